// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"testing"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// The sink removes the blocks of a worker that registers as another process than its snapshot has. The cursors of
// that worker are dropped, too: otherwise its rank is ok although blocks are missing.
func TestCursorsOfAnotherProcessAreDropped(t *testing.T) {
	snapshot := func(startedMS int64, last uint64) *events.Snapshot {
		return &events.Snapshot{
			Workers: []events.SnapshotWorker{{ID: 7, StartedMS: startedMS}},
			Cursors: []events.Cursor{{RankName: events.RankName{WorkerID: 7}, PublisherID: 1, EventID: last}},
		}
	}
	registered := func(startedMS int64) func(events.Tracker) {
		return func(x events.Tracker) {
			x.SetWorker(start, 7, events.Source{Feed: events.FeedDurable, DPSize: 1, StartedMS: startedMS})
		}
	}
	restored := func(s *events.Snapshot) func(events.Tracker) {
		return func(x events.Tracker) { x.Restored(start, s) }
	}
	event := func(id uint64) func(events.Tracker) {
		return func(x events.Tracker) {
			x.AcceptStream(start, 1, events.RouterEvent{WorkerID: 7, EventID: id, Event: indexer.Event{Kind: indexer.Removed}})
		}
	}
	tracker := func() events.Tracker { return events.NewTracker(func(uint64, uint32, indexer.Event) {}).Seed(1) }
	first := tracker() // a replica at which the worker does not register before the next snapshot
	first.Restored(start, snapshot(1, 5))
	for name, c := range map[string]struct {
		steps []func(events.Tracker)
		want  indexer.State
	}{
		"the same process":           {[]func(events.Tracker){restored(snapshot(1, 5)), event(6), registered(1), event(7)}, indexer.StateOK},
		"another process":            {[]func(events.Tracker){restored(snapshot(1, 5)), event(6), registered(2), event(7)}, indexer.StatePartial},
		"registered before":          {[]func(events.Tracker){registered(2), restored(snapshot(1, 6)), event(7)}, indexer.StatePartial},
		"in a snapshot of a restore": {[]func(events.Tracker){restored(first.Export()), event(6), registered(2), event(7)}, indexer.StatePartial},
		"in a later snapshot":        {[]func(events.Tracker){restored(snapshot(1, 5)), restored(snapshot(2, 6)), registered(2), event(7)}, indexer.StatePartial},
		"unknown in the snapshot":    {[]func(events.Tracker){restored(snapshot(0, 5)), event(6), registered(2), event(7)}, indexer.StateOK},
	} {
		t.Run(name, func(t *testing.T) {
			x := tracker()
			for _, step := range c.steps {
				step(x)
			}
			if got := x.State(7, 0); got != c.want {
				t.Errorf("the rank is %v, want %v", got, c.want)
			}
		})
	}
}
