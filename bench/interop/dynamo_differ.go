// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// dynamoDiffers puts to both indexes what docs/protocol.md says that they take differently,
// in the bytes of the event plane: each must do what is said there.
func dynamoDiffers(_ context.Context, e *env) (result, error) {
	r := result{what: "leading blocks of a prompt by kvroute's index and by Dynamo's with what the docs say of each"}
	stored := func(parent uint64, first, n, by uint64) indexer.Event {
		ev := indexer.Event{Kind: indexer.Stored, Parent: parent, HasParent: parent > 0}
		for i := range n {
			ev.Blocks = append(ev.Blocks, indexer.Block{External: by + first + i, Local: first + i})
		}
		return ev
	}
	removed := func(externals ...uint64) indexer.Event {
		return indexer.Event{Kind: indexer.Removed, Externals: externals}
	}
	for what, steps := range map[string][]struct {
		event        indexer.Event
		ours, theirs int
	}{
		"a block in the middle": {
			{stored(0, 1, 5, 100), 5, 5}, {removed(103), 2, 2}, {stored(102, 3, 1, 100), 5, 3}, {stored(103, 4, 2, 100), 5, 5},
		},
		"two ids for one chain": {
			{stored(0, 1, 3, 100), 3, 3}, {stored(0, 1, 3, 200), 3, 3}, {removed(103, 102, 101), 3, 0}, {removed(203, 202, 201), 0, 0},
		},
		"a parent that comes later": {
			{stored(103, 4, 2, 100), 0, 0}, {stored(0, 1, 3, 100), 5, 3},
		},
		"a clear": {
			{stored(0, 1, 3, 100), 3, 3}, {indexer.Event{Kind: indexer.Cleared}, 0, 0}, {stored(0, 1, 2, 100), 2, 2},
		},
	} {
		theirs, err := (&dynamoFleet{e: e}).startIndex()
		if err != nil {
			return r, err
		}
		index := indexer.New(indexer.Config{})
		ours := indexer.NewParked(index)
		const worker = 7
		for i, s := range steps {
			payload := events.AppendEvents(nil, []events.RouterEvent{{WorkerID: worker, EventID: uint64(i + 1), Event: s.event}})
			if err := theirs.apply(events.AppendEnvelope(nil, events.Envelope{PublisherID: 1, Topic: events.Topic, Payload: payload})); err != nil {
				return r, err
			}
			ours.Apply(time.Now(), 0, s.event)
			there, err := theirs.match([]uint64{1, 2, 3, 4, 5}, worker)
			if err != nil {
				return r, err
			}
			here := make([]int32, 1)
			index.Match(here, []uint64{1, 2, 3, 4, 5})
			r.cases++
			if int(here[0]) != s.ours || there != s.theirs {
				r.differ("%s, event %d: %d blocks here, %d there; said is %d and %d", what, i+1, here[0], there, s.ours, s.theirs)
			}
		}
		theirs.Stop()
	}
	return r, nil
}
