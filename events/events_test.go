// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == strconv.Itoa(runtime.GOMAXPROCS(0)) {
		_ = f.Value.Set("6") // most of these tests wait for servers and use little CPU
	}
	// The NATS client leaves this goroutine behind if its connection closes at that moment.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/nats-io/nats.go/jetstream.(*jetStream).resetPendingAcksOnReconnect"))
}

// seeds returns the number of random worlds that a test plays: all in the long form, otherwise a
// fifth.
func seeds(all int) uint64 {
	if fixtures.Long() {
		return uint64(all)
	}
	return uint64(max(3, all/5))
}

// sink records the calls that it receives. known holds the workers that it knows.
type sink struct {
	known map[uint64]bool
	calls []string
}

func (s *sink) knows(worker uint64) bool { return s.known[worker] }

func (s *sink) apply(worker uint64, rank uint32, ev indexer.Event) {
	if !s.known[worker] {
		return
	}
	var what string
	switch ev.Kind {
	default:
		what = "cleared"
	case indexer.Stored:
		what = fmt.Sprint("stored ", ev.Blocks[0].External)
	case indexer.Removed:
		what = fmt.Sprint("removed ", ev.Externals[0])
	}
	s.calls = append(s.calls, fmt.Sprintf("%d.%d %s", worker, rank, what))
}

func stored(worker, id uint64) events.RouterEvent {
	return events.RouterEvent{WorkerID: worker, EventID: id, Event: indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: id, Local: id}}}}
}

func TestOrderOfEvents(t *testing.T) {
	type step struct {
		publisher uint64
		ev        events.RouterEvent
		verdict   string
	}
	foreign, unknown := stored(1, 2), stored(1, 3)
	foreign.Foreign = true
	unknown.Event = indexer.Event{}
	for _, c := range []struct {
		name  string
		steps []step
		calls string
	}{
		{"in order", []step{{9, stored(1, 1), ""}, {9, stored(1, 2), ""}}, "1.0 stored 1, 1.0 stored 2"},
		{"from zero", []step{{9, stored(1, 0), ""}, {9, stored(1, 1), ""}}, "1.0 stored 0, 1.0 stored 1"},
		{"we came late", []step{{9, stored(1, 7), "gap"}, {9, stored(1, 8), ""}}, "1.0 stored 7, 1.0 stored 8"},
		{"twice", []step{{9, stored(1, 1), ""}, {9, stored(1, 1), "duplicate"}, {9, stored(1, 2), ""}}, "1.0 stored 1, 1.0 stored 2"},
		{"late", []step{{9, stored(1, 1), ""}, {9, stored(1, 3), "gap"}, {9, stored(1, 2), "duplicate"}}, "1.0 stored 1, 1.0 stored 3"},
		{"ranks count apart", []step{{9, stored(1, 1), ""}, {9, events.RouterEvent{WorkerID: 1, DPRank: 1, EventID: 1, Event: indexer.Event{Kind: indexer.Cleared}}, ""}}, "1.0 stored 1, 1.1 cleared"},
		{"a restart forgets", []step{{9, stored(1, 5), "gap"}, {8, stored(1, 1), "restart"}, {8, stored(1, 2), ""}}, "1.0 stored 5, 1.0 cleared, 1.0 stored 1, 1.0 stored 2"},
		{"two publishers are a union", []step{
			{9, stored(1, 1), ""}, {8, stored(1, 1), "restart"}, {9, stored(1, 2), "multi_publisher"}, {8, stored(1, 2), ""}, {7, stored(1, 1), ""},
		}, "1.0 stored 1, 1.0 cleared, 1.0 stored 1, 1.0 stored 2, 1.0 stored 2, 1.0 stored 1"},
		{"others' blocks count but do nothing", []step{{9, stored(1, 1), ""}, {9, foreign, ""}, {9, unknown, ""}, {9, stored(1, 4), ""}}, "1.0 stored 1, 1.0 stored 4"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := sink{known: map[uint64]bool{1: true}}
			tr := events.NewTracker(s.apply).Knows(s.knows)
			for i, st := range c.steps {
				if got := tr.Accept(time.Time{}, st.publisher, st.ev); got != st.verdict {
					t.Errorf("step %d: %q, want %q", i, got, st.verdict)
				}
			}
			if got := strings.Join(s.calls, ", "); got != c.calls {
				t.Errorf("the sink got\n%s\nwant\n%s", got, c.calls)
			}
		})
	}
}

func TestEventsWaitForTheirWorker(t *testing.T) {
	now := time.Unix(1755000000, 0)
	s := sink{known: map[uint64]bool{}}
	tr := events.NewTracker(s.apply).Knows(s.knows)
	for id := uint64(1); id <= 3; id++ {
		if got := tr.Accept(now, 9, stored(1, id)); got != "waiting" {
			t.Errorf("event %d: %q, want waiting", id, got)
		}
	}
	s.known[1] = true
	// The sink knows the worker, but Known was not called yet: new events wait after the waiting
	// ones.
	tr.Accept(now, 9, stored(1, 4))
	tr.Known(1)
	tr.Accept(now, 9, stored(1, 5))
	if got, want := strings.Join(s.calls, ", "), "1.0 stored 1, 1.0 stored 2, 1.0 stored 3, 1.0 stored 4, 1.0 stored 5"; got != want {
		t.Errorf("the sink got %s\nwant %s", got, want)
	}
	tr.Known(2) // no event waits
	tr.Forget(1)
	if got := tr.Accept(now, 9, stored(1, 9)); got != "gap" {
		t.Errorf("after it was forgotten: %q, want gap", got)
	}
}

func TestWaitingIsBounded(t *testing.T) {
	now := time.Unix(1755000000, 0)
	s := sink{known: map[uint64]bool{}}
	tr := events.NewTracker(s.apply).Knows(s.knows)
	for id := range uint64(events.MaxWaitingEvents + 10) {
		tr.Accept(now, 9, stored(0, id+1))
	}
	if got := tr.Accept(now, 9, stored(0, 5000)); got != "dropped" {
		t.Errorf("one event too many: %q, want dropped", got)
	}
	for w := range uint64(events.MaxWaitingWorkers + 10) {
		tr.Accept(now.Add(time.Second), 9, stored(w+1, 1))
	}
	if workers, evs := tr.Waiting(); workers != events.MaxWaitingWorkers || evs != events.MaxWaitingEvents+events.MaxWaitingWorkers-1 {
		t.Errorf("%d workers wait with %d events", workers, evs)
	}
	if n := tr.Ranks(); n != 0 {
		t.Errorf("cursors of %d ranks are kept for workers that nobody knows", n)
	}
	if n := tr.Expire(now.Add(59 * time.Second)); n != 0 {
		t.Errorf("%d events expired before their time", n)
	}
	if n := tr.Expire(now.Add(60 * time.Second)); n != events.MaxWaitingEvents {
		t.Errorf("%d events expired, want those of the first worker", n)
	}
	tr.Expire(now.Add(time.Hour))
	if workers, _ := tr.Waiting(); workers != 0 || tr.Ranks() != 0 {
		t.Errorf("%d workers wait for ever, %d ranks are kept", workers, tr.Ranks())
	}
}

// A worker that reports ever more ranks cannot use unlimited memory.
func TestRanksAreBounded(t *testing.T) {
	tr := events.NewTracker(func(uint64, uint32, indexer.Event) {})
	var last string
	for rank := range uint32(events.MaxRanks + 1) {
		last = tr.Accept(time.Time{}, 9, events.RouterEvent{WorkerID: 1, DPRank: rank, EventID: 1, Event: indexer.Event{Kind: indexer.Cleared}})
	}
	if last != "dropped" || tr.Ranks() != events.MaxRanks {
		t.Errorf("one rank too many: %q, %d kept", last, tr.Ranks())
	}
	// All ranks belong to one worker; with quadratic cost, Forget would not return in reasonable
	// time.
	if tr.Forget(1); tr.Ranks() != 0 {
		t.Errorf("%d ranks are kept of a worker that is forgotten", tr.Ranks())
	}
}

// Whatever a bus does to the events of a worker whose publisher sometimes restarts (drop, repeat,
// delay), the sink gets a subsequence of the published events, in order, without duplicates, and a
// clear before the events of each new publisher.
func TestAnyBusGivesASubsequence(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		type sent struct {
			publisher uint64
			ev        events.RouterEvent
		}
		var bus []sent
		var published []string
		block := uint64(0)
		for life := range uint64(3) {
			for id := uint64(1); id <= 1+rng.Uint64N(8); id++ {
				block++
				ev := stored(1, id)
				ev.Event.Blocks[0].External = block
				published = append(published, fmt.Sprint("1.0 stored ", block))
				if rng.IntN(5) == 0 {
					continue // lost
				}
				bus = append(bus, sent{life + 1, ev})
				for rng.IntN(4) == 0 {
					bus = append(bus, sent{life + 1, ev}) // repeated
				}
				// Delayed, but not beyond its publisher's end: another process has another
				// connection, and the bus delivers in order from each.
				if n := len(bus); n > 1 && rng.IntN(4) == 0 && bus[n-2].publisher == life+1 {
					bus[n-1], bus[n-2] = bus[n-2], bus[n-1]
				}
			}
		}
		s := sink{known: map[uint64]bool{1: rng.IntN(2) == 0}}
		tr := events.NewTracker(s.apply).Knows(s.knows)
		lives, last := 0, uint64(0)
		for i, b := range bus {
			tr.Accept(time.Time{}, b.publisher, b.ev)
			if b.publisher != last {
				lives, last = lives+1, b.publisher
			}
			if i == len(bus)/2 {
				s.known[1] = true
				tr.Known(1)
			}
		}
		clears, at := 0, 0
		for _, what := range s.calls {
			if what == "1.0 cleared" {
				clears++
				continue
			}
			next := slices.Index(published[at:], what)
			if next < 0 {
				t.Fatalf("seed %d: %s is out of order or came twice:\n%v", seed, what, s.calls)
			}
			at += next + 1
		}
		if clears != max(0, lives-1) {
			t.Fatalf("seed %d: %d clears for %d lives", seed, clears, lives)
		}
	}
}
