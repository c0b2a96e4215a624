// SPDX-License-Identifier: Apache-2.0

package api

import (
	"time"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/router"
)

// Decision is a decision of the router with the texts that explain it. The fields of the router's decision
// come first.
type Decision struct {
	router.Decision

	// Prefill and Candidates are sent instead of the fields of these names in the router's decision.
	Prefill    *Decision   `json:"prefill,omitempty"`
	Candidates []Candidate `json:"candidates,omitempty"`

	ModeText       string `json:"mode_text"`
	ReasonText     string `json:"reason_text"`
	SettingsText   string `json:"settings_text,omitempty"` // the settings that the costs depend on
	FirstTokenText string `json:"first_token_text,omitempty"`
}

// Candidate is a candidate with the text of its verdict, which is empty if it only lost the comparison.
type Candidate struct {
	router.Candidate

	VerdictText string `json:"verdict_text,omitempty"`
}

// Worker is the state of a worker with the judgement of its events.
type Worker struct {
	router.WorkerState

	EventsLevel router.EventsLevel `json:"kv_events_level"`
	EventsText  string             `json:"kv_events_text"`
}

// LeftWorker is a worker that is gone, with its departure in words.
type LeftWorker struct {
	fleet.Left

	Text string `json:"text"`
}

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

// brief returns the decision without candidates, as it is now: now is a later copy of it.
func (s Decision) brief(now *router.Decision) Decision {
	s.Decision, s.Candidates, s.FirstTokenText = *now.Brief(), nil, now.FirstTokenText()
	if s.Prefill != nil {
		s.Prefill = new(s.Prefill.brief(now.Prefill))
	}
	return s
}

// workers returns all workers, each a [Worker].
func (c *Config) workers() any {
	list := []Worker{} // an empty list in JSON, not null
	for _, w := range c.Router.Workers() {
		level, text := c.Router.EventsState(&w)
		list = append(list, Worker{w, level, text})
	}
	return list
}

// left returns the workers that are gone, each a [LeftWorker].
func (c *Config) left() any {
	list := []LeftWorker{} // an empty list in JSON, not null
	if c.Fleet != nil {
		now := time.Now()
		for _, l := range c.Fleet.Left() {
			list = append(list, LeftWorker{l, l.Text(now)})
		}
	}
	return list
}
