// SPDX-License-Identifier: Apache-2.0

package localindex_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvroute/kvroute/engines/localindex"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

var start = time.Unix(1_700_000_000, 0)

// A ring with the ids 10 to 1033 gives the same answers as Dynamo's.
func TestRingAnswers(t *testing.T) {
	t.Parallel()
	l := localindex.New()
	const first, last = 10, 9 + localindex.RingEvents
	for id := range uint64(last) {
		l.Remember(start, events.RouterEvent{WorkerID: 7, EventID: id + 1, Event: indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: id, Local: id}}}})
	}
	from := func(start, end uint64) events.Query {
		return events.Query{WorkerID: 7, HasStart: true, Start: start, End: end}
	}
	for _, c := range []struct {
		q    events.Query
		want string
	}{
		{from(11, 0), "events 11-1033 last 1033"},
		{from(11, 12), "events 11-1033 last 1033"}, // the end of the range is only validated
		{from(11, 2000), "events 11-1033 last 1033"},
		{from(first, 0), "events 10-1033 last 1033"},
		{from(last, last), "events 1033-1033 last 1033"},
		{from(first-1, 0), "dump 1-9 last 1033"}, // 1,033 blocks, 128 an event
		{from(0, 0), "dump 1-9 last 1033"},
		{events.Query{WorkerID: 7}, "dump 1-9 last 1033"},
		{events.Query{WorkerID: 7, End: 5}, "dump 1-9 last 1033"},
		{from(15, 10), "invalid_range - last 0"},
		{from(last+1, 0), "too_new - last 1033"},
		{from(2000, 2001), "too_new - last 1033"},
		{events.Query{WorkerID: 7, DPRank: 3}, "dump - last 0"}, // no block was stored there
		{events.Query{WorkerID: 7, DPRank: 3, HasStart: true, Start: 1}, "too_new - last 0"},
	} {
		a := l.Ask(c.q)
		ids := "-"
		if n := len(a.Events); n > 0 && a.Kind == events.AnswerEvents {
			ids = fmt.Sprint(a.Events[0].EventID, "-", a.Events[n-1].EventID)
		}
		blocks := 0
		for _, ev := range a.Events {
			blocks += len(ev.Event.Blocks)
		}
		if a.Kind == events.AnswerDump && blocks == last {
			ids = "1-9" // however the dump is split
		}
		if got := fmt.Sprint(a.Kind, " ", ids, " last ", a.LastEventID); got != c.want {
			t.Errorf("%+v: %s, want %s", c.q, got, c.want)
		}
	}
	// Few large events are limited, too.
	l = localindex.New()
	for id := range uint64(40) {
		l.Remember(start, events.RouterEvent{WorkerID: 7, EventID: id + 1, Event: indexer.Event{Kind: indexer.Removed, Externals: make([]uint64, 1<<16)}})
	}
	if a := l.Ask(from(40, 0)); len(a.Events) != 1 {
		t.Errorf("the last event is not kept: %v", a.Kind)
	}
	if a := l.Ask(from(20, 0)); a.Kind != events.AnswerDump {
		t.Errorf("2 million blocks are kept: %v", a.Kind)
	}
}

// Parts have at most 512 KiB each, and together they contain all events in order.
func TestAnswersComeInParts(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(1, 8))
	a := events.Answer{Kind: events.AnswerDump, LastEventID: 1 << 63}
	for id := range uint64(600) {
		ev := events.RouterEvent{WorkerID: 1<<64 - 1, DPRank: 1<<32 - 1, EventID: 1<<63 + id, Event: indexer.Event{Kind: indexer.Stored, HasParent: true, Parent: 1<<64 - 1}}
		if id%3 == 0 {
			ev.Event = indexer.Event{Kind: indexer.Removed}
		}
		for range rng.IntN(4096) {
			if id%3 == 0 {
				ev.Event.Externals = append(ev.Event.Externals, rng.Uint64())
			} else {
				ev.Event.Blocks = append(ev.Event.Blocks, indexer.Block{External: rng.Uint64(), Local: rng.Uint64()})
			}
		}
		a.Events = append(a.Events, ev)
	}
	parts := localindex.Split(&a)
	next := uint64(1 << 63)
	for i := range parts {
		if n := len(events.AppendAnswer(nil, &parts[i])); n > 512<<10 {
			t.Errorf("part %d has %d bytes", i, n)
		}
		for _, ev := range parts[i].Events {
			if ev.EventID != next {
				t.Fatalf("part %d has event %d, want %d", i, ev.EventID-1<<63, next-1<<63)
			}
			next++
		}
	}
	if next != 1<<63+600 || len(parts) < 50 {
		t.Errorf("%d events in %d parts", next-1<<63, len(parts))
	}
	empty := events.Answer{Kind: events.AnswerDump}
	if n := len(localindex.Split(&empty)); n != 1 {
		t.Errorf("an empty dump has %d parts", n)
	}
}
