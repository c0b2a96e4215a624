// SPDX-License-Identifier: Apache-2.0

package events

import (
	"strings"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/meter"
)

// The outcomes of events.
const (
	outcomeAccepted  = "accepted"
	outcomeDuplicate = "duplicate"
	outcomeGap       = "gap"     // events before it are missing
	outcomeRestart   = "restart" // accepted after the rank was cleared
	outcomeMany      = "multi_publisher"
	outcomeWaiting   = "waiting"    // waits for its worker
	outcomeDropped   = "dropped"    // its worker did not register in time, or too many events wait
	outcomeForeign   = "foreign"    // about blocks that are not the worker's
	outcomeUnknown   = "unknown"    // of an unknown kind
	outcomeBad       = "bad"        // unreadable
	outcomeSlow      = "slow"       // messages dropped because kvroute was too slow
	outcomeHeld      = "held"       // waits for the missing events before it
	outcomeOther     = "other_feed" // dropped: its worker has another feed
)

// FeedMetrics are the instruments of all feeds. docs/metrics.md lists them.
type FeedMetrics struct {
	received, queries, retries, answers, repairs meter.Counter

	accepted [feedSaved + 1]meter.Set // of received, by feed: made once, because such events are frequent
}

// NewFeedMetrics makes the instruments. Each feed must count with one maker only.
func NewFeedMetrics(m *meter.Maker) FeedMetrics {
	all := FeedMetrics{
		received: m.Counter("kvroute.events.received", "{event}",
			"Events of workers' caches, and batches of engines, by feed and outcome.", "feed", "outcome"),
		queries: m.Counter("kvroute.events.queries", "{query}",
			"Queries for missing events, by feed and by what they ask for.", "feed", "kind"),
		retries: m.Counter("kvroute.events.query.retries", "{query}", "Queries that were not the first try.", "feed"),
		answers: m.Counter("kvroute.events.query.ends", "{query}",
			"Queries ended, by feed and by the answer or why there is none.", "feed", "end"),
		repairs: m.Counter("kvroute.events.repairs", "1",
			"What happened while ranks were repaired, other than queries.", "feed", "what"),
	}
	for feed := range all.accepted {
		all.accepted[feed] = meter.NewSet("feed", Feed(feed).String(), "outcome", outcomeAccepted)
	}
	return all
}

// Ranks makes the gauge of ranks. observe passes the number of each feed and state.
func (FeedMetrics) Ranks(m *meter.Maker, observe func(observe func(n int, feed Feed, state indexer.State))) {
	m.Gauge("kvroute.events.ranks", "{rank}",
		"Ranks whose events are followed, by feed and by how far they can be trusted.", func(o meter.Observe) {
			observe(func(n int, feed Feed, state indexer.State) {
				o(float64(n), "feed", feed.String(), "state", string(state))
			})
		})
}

// Received counts events by their outcome.
func (m *FeedMetrics) Received(feed Feed, outcome string, n int) {
	if outcome == outcomeAccepted {
		m.received.AddTo(m.accepted[feed], n)
	} else {
		m.received.Add(n, feed.String(), outcome)
	}
}

// Happened counts what happened in a repair.
func (m *FeedMetrics) Happened(feed Feed, what string, n int) {
	if kind, ok := strings.CutPrefix(what, "ask_"); ok {
		m.queries.Add(n, feed.String(), kind)
		return
	}
	switch what {
	case "retry":
		m.retries.Add(n, feed.String())
	case "no_room", "spilled", "given_up", "restored", "broken", "lie", "gap", "replayed", "replay_cut", "buffer_full",
		"restart":
		m.repairs.Add(n, feed.String(), what)
	default:
		m.answers.Add(n, feed.String(), what)
	}
}

// metrics are the instruments of a [Subscriber].
type metrics struct {
	FeedMetrics

	late metric.Float64Histogram
}

func newMetrics(from metric.Meter, s *Subscriber) (*metrics, error) {
	m := meter.New(from)
	m.Gauge("kvroute.events.held.blocks", "{block}", "Blocks in events that wait for missing events before them, without the batches of engines.", func(o meter.Observe) {
		s.mu.Lock()
		blocks := s.tracker.repairs.blocks
		s.mu.Unlock()
		o(float64(blocks))
	})
	all := NewFeedMetrics(m)
	all.Ranks(m, s.observeStates)
	return &metrics{
		FeedMetrics: all,
		// From loopback to an index that is too old to be of use.
		late: m.Seconds("kvroute.events.delay", "Time from a message's publication to its arrival, by the two clocks.",
			.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30),
	}, m.Err()
}

func (s *Subscriber) observeStates(observe func(n int, feed Feed, state indexer.State)) {
	const repairing = "repairing" // is shown as indexer.StateOK elsewhere
	n := make(map[Feed]map[indexer.State]int)
	for _, feed := range []Feed{FeedCore, FeedDurable, FeedPlane} {
		n[feed] = map[indexer.State]int{indexer.StateOK: 0, repairing: 0, indexer.StatePartial: 0, indexer.StateSuspect: 0}
	}
	s.mu.Lock()
	for _, r := range s.tracker.ranks {
		states := n[s.tracker.workers[r.WorkerID].Feed]
		if states == nil {
			states = n[FeedCore] // of no feed yet
		}
		if r.repair != nil && !r.repair.reread {
			states[repairing]++
		} else {
			states[r.reported]++
		}
	}
	s.mu.Unlock()
	for feed, states := range n {
		for state, n := range states {
			observe(n, feed, state)
		}
	}
}

// event counts an event. Foreign and unknown ones without another outcome count as such.
func (m *metrics) event(feed Feed, ev *RouterEvent, outcome string) {
	switch {
	case outcome != outcomeAccepted:
	case ev.Foreign:
		outcome = outcomeForeign
	case ev.Event.Kind == 0:
		outcome = outcomeUnknown
	}
	m.Received(feed, outcome, 1)
}
