// SPDX-License-Identifier: Apache-2.0

package api

import (
	"github.com/kvroute/kvroute/attention"
	"github.com/kvroute/kvroute/router"
)

// Decision is a decision of the router with the texts that explain it. The fields of the router's decision
// come first.
type Decision struct {
	router.Decision

	// Prefill and Candidates are sent instead of the fields of these names in the router's decision.
	Prefill    *Decision   `json:"prefill,omitempty"`
	Candidates []Candidate `json:"candidates,omitempty"`

	ModeText       string `json:"mode_text,omitempty"`
	ReasonText     string `json:"reason_text"`
	SettingsText   string `json:"settings_text,omitempty"` // the settings that the costs depend on
	FirstTokenText string `json:"first_token_text,omitempty"`
}

// Candidate is a candidate with the text of its verdict, which is empty if it only lost the comparison.
type Candidate struct {
	router.Candidate

	VerdictText string `json:"verdict_text,omitempty"`
}

type (
	// Worker is the state of a worker with the judgement of its events.
	Worker = attention.Worker
	// LeftWorker is a worker that is gone.
	LeftWorker = attention.LeftWorker
)

// shown adds the texts to a decision.
func shown(d *router.Decision) Decision {
	s := Decision{
		Decision: *d,
		ModeText: d.ModeText(), ReasonText: d.Sentence(), SettingsText: d.SettingsText(), FirstTokenText: d.FirstTokenText(),
	}
	if d.Prefill != nil {
		s.Prefill = new(shown(d.Prefill))
	}
	for i := range d.Candidates {
		c := &d.Candidates[i]
		s.Candidates = append(s.Candidates, Candidate{*c, d.Verdict(c)})
	}
	return s
}

// workers returns all workers, and notes what needs attention.
func (c *Config) workers() any {
	states := c.Router.Workers()
	s := attention.State{Workers: make([]Worker, len(states)), Left: c.left(), Models: c.Router.Models()}
	var times []float64
	if c.Outcomes != nil {
		times = c.Outcomes.ObserveWorkers(states)
	}
	for i := range states {
		level, text := c.Router.EventsState(&states[i])
		s.Workers[i] = Worker{WorkerState: states[i], EventsLevel: level, EventsText: text}
		if times != nil {
			s.Workers[i].TTFT = times[i]
		}
	}
	if c.Attention != nil {
		r := c.describe(states)
		s.Replica = attention.Replica{
			BusAway: c.Replica != nil && !r.Bus, Status: r.Ready.Status, Failed: attention.FailedChecks(r.Ready.Checks),
			Pending: r.Pending, Refused: r.Refused, Kubernetes: r.Kubernetes,
		}
		if r.Envoy != nil {
			s.Replica.Envoy = r.Envoy.Faults
		}
		c.Attention.Observe(c.now(), &s)
	}
	return s.Workers
}

// Observe notes what needs attention, and the load of the workers. Call it about once a second.
func (c *Config) Observe() { c.workers() }

// left returns the workers that are gone.
func (c *Config) left() []LeftWorker {
	list := []LeftWorker{} // an empty list in JSON, not null
	if c.Fleet != nil {
		now := c.now()
		for _, l := range c.Fleet.Left() {
			list = append(list, LeftWorker{Left: l, Text: l.Text(now)})
		}
	}
	return list
}
