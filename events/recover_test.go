// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// story drives a tracker of one worker, id 7, that can be queried.
type story struct {
	t       *testing.T
	sink    sink
	tracker events.Tracker
	now     time.Time
	asks    []events.Ask
	happens map[string]int
	states  []string
}

func newStory(t *testing.T, src events.Source) *story {
	s := &story{t: t, sink: sink{known: map[uint64]bool{7: true}}, now: start, happens: map[string]int{}}
	s.tracker = events.NewTracker(s.sink.apply).Knows(s.sink.knows).Seed(1)
	s.tracker.Count(func(what string, n int) { s.happens[what] += n })
	s.tracker.Changed(func(_ uint64, _ uint32, state indexer.State) { s.states = append(s.states, string(state)) })
	s.tracker.SetWorker(s.now, 7, src)
	return s
}

// hear passes live events of a publisher to the tracker and returns the verdicts.
func (s *story) hear(publisher uint64, ids ...uint64) string {
	var verdicts []string
	for _, id := range ids {
		verdicts = append(verdicts, s.tracker.Accept(s.now, publisher, stored(7, id)))
	}
	return strings.Join(verdicts, ", ")
}

// pass advances the time and returns the queries sent, in words.
func (s *story) pass(d time.Duration) string {
	s.now = s.now.Add(d)
	s.asks = s.tracker.Tick(s.now)
	var words []string
	for _, a := range s.asks {
		w := "dump"
		if a.Query.HasStart {
			w = fmt.Sprint("from ", a.Query.Start)
		}
		words = append(words, w)
	}
	return strings.Join(words, ", ")
}

// answer answers the last query.
func (s *story) answer(publisher uint64, kind events.AnswerKind, last uint64, ids ...uint64) {
	a := events.Answer{Kind: kind, LastEventID: last}
	for _, id := range ids {
		a.Events = append(a.Events, stored(7, id))
	}
	s.tracker.Answer(s.now, s.asks[len(s.asks)-1].ID, publisher, a)
}

// wantCalls checks the calls to the sink since the last check: ids of stored events, and X for a clear.
func (s *story) wantCalls(want string) {
	s.t.Helper()
	got := strings.NewReplacer("7.0 stored ", "", "7.0 cleared", "X").Replace(strings.Join(s.sink.calls, " "))
	s.sink.calls = nil
	if got != want {
		s.t.Errorf("the sink got %q, want %q", got, want)
	}
}

func (s *story) want(got, want string) {
	s.t.Helper()
	if got != want {
		s.t.Errorf("got %q, want %q", got, want)
	}
}

// discovered returns a story whose worker has been read up to event 5.
func discovered(t *testing.T) *story {
	s := newStory(t, source(1))
	s.want(s.pass(time.Second), "dump")
	s.answer(9, events.AnswerDump, 5, 100)
	s.wantCalls("X 100")
	return s
}

func TestDiscovery(t *testing.T) {
	s := newStory(t, source(1))
	s.want(s.hear(9, 3, 4), "held, held")
	s.want(s.pass(time.Second), "dump")
	s.want(s.hear(9, 5, 5), "held, held")
	s.wantCalls("")
	s.answer(9, events.AnswerDump, 3, 101, 102)
	s.wantCalls("X 101 102 4 5")
	s.want(s.hear(9, 6, 6, 3), ", duplicate, duplicate")
	s.wantCalls("6")
	s.want(s.pass(time.Hour), "")
}

// The first event was lost: the worker's answer contains it, whether the loss was before or after
// the query.
func TestALostFirstEventIsFound(t *testing.T) {
	s := newStory(t, source(1))
	s.want(s.pass(time.Second), "dump")
	s.answer(9, events.AnswerDump, 1, 1)
	s.wantCalls("X 1")
	s.want(s.hear(9, 2), "")

	s = newStory(t, source(1))
	s.want(s.pass(time.Second), "dump")
	s.answer(9, events.AnswerDump, 0) // nothing was stored so far
	s.wantCalls("X")
	s.want(s.hear(9, 2), "gap held")
	s.want(s.pass(time.Second), "dump") // a range from the first event is a dump
	s.answer(9, events.AnswerDump, 2, 1, 2)
	s.wantCalls("X 1 2")
	s.want(s.hear(9, 3), "")

	// Ids may begin with 0 or 1.
	for _, first := range []uint64{0, 1} {
		s = newStory(t, source(1))
		s.pass(time.Second)
		s.answer(9, events.AnswerDump, 0)
		s.want(s.hear(9, first, first+1, first+3), ", , gap held")
		s.wantCalls(fmt.Sprint("X ", first, " ", first+1))
		s.want(s.pass(time.Second), fmt.Sprint("from ", first+2))
	}
}

func TestGaps(t *testing.T) {
	t.Run("what is missing is asked for", func(t *testing.T) {
		s := discovered(t)
		s.want(s.hear(9, 6, 9, 10, 12), ", gap held, held, held")
		s.wantCalls("6")
		s.want(s.pass(time.Millisecond), "") // the event may only be late
		s.want(s.pass(time.Second), "from 7")
		s.want(s.hear(9, 13), "held")
		s.answer(9, events.AnswerEvents, 12, 7, 8, 9, 10, 11, 12)
		s.wantCalls("7 8 9 10 11 12 13")
		s.want(s.hear(9, 14), "")
	})
	t.Run("what is late is not asked for", func(t *testing.T) {
		s := discovered(t)
		s.want(s.hear(9, 8, 7, 6), "gap held, held, ")
		s.wantCalls("6 7 8")
		s.want(s.pass(time.Hour), "")
	})
	t.Run("more is lost meanwhile", func(t *testing.T) {
		s := discovered(t)
		s.hear(9, 8)
		s.pass(time.Second)
		s.hear(9, 11)
		s.answer(9, events.AnswerEvents, 8, 6, 7, 8)
		s.wantCalls("6 7 8")
		s.want(s.pass(time.Second), "from 9")
		s.answer(9, events.AnswerEvents, 11, 9, 10, 11)
		s.wantCalls("9 10 11")
	})
	t.Run("too old for a range", func(t *testing.T) {
		s := discovered(t)
		s.hear(9, 5000)
		s.want(s.pass(time.Second), "from 6")
		s.answer(9, events.AnswerDump, 5000, 200, 201)
		s.wantCalls("X 200 201")
		s.want(s.hear(9, 5001), "")
	})
	t.Run("events before a clear may be left out", func(t *testing.T) {
		s := discovered(t)
		s.hear(9, 20)
		s.pass(time.Second)
		a := events.Answer{Kind: events.AnswerEvents, LastEventID: 20, Events: []events.RouterEvent{
			{WorkerID: 7, EventID: 18, Event: indexer.Event{Kind: indexer.Cleared}}, stored(7, 19), stored(7, 20),
		}}
		s.tracker.Answer(s.now, s.asks[0].ID, 9, a)
		s.wantCalls("X 19 20")
	})
	t.Run("an answer with a hole is no answer", func(t *testing.T) {
		s := discovered(t)
		s.hear(9, 20)
		s.pass(time.Second)
		s.answer(9, events.AnswerEvents, 20, 6, 7, 20)
		s.wantCalls("")
		s.want(s.pass(time.Second), "dump")
		s.answer(9, events.AnswerDump, 20, 300)
		s.wantCalls("X 300")
	})
	t.Run("an answer of another worker's events is a lie", func(t *testing.T) {
		s := discovered(t)
		s.hear(9, 7)
		s.pass(time.Second)
		s.tracker.Answer(s.now, s.asks[0].ID, 9, events.Answer{Kind: events.AnswerEvents, LastEventID: 7, Events: []events.RouterEvent{stored(8, 6), stored(8, 7)}})
		s.wantCalls("")
		if s.happens["lie"] != 2 {
			t.Errorf("what happened: %v", s.happens)
		}
	})
	t.Run("too much waits", func(t *testing.T) {
		s := discovered(t)
		for id := range uint64(events.MaxHeldEvents + 10) {
			s.hear(9, id+7)
		}
		s.want(s.pass(time.Second), "dump")
		if _, blocks, _ := s.tracker.Repairs(); blocks > 30 {
			t.Errorf("%d blocks wait after there were too many", blocks)
		}
		s.answer(9, events.AnswerDump, 4000, 400)
		s.wantCalls("X 400")
		s.want(s.pass(time.Second), "from 4001") // the dropped events are requested
		var rest []uint64
		for id := range uint64(events.MaxHeldEvents + 16 - 4000) {
			rest = append(rest, 4001+id)
		}
		s.answer(9, events.AnswerEvents, events.MaxHeldEvents+16, rest...)
		if n := len(s.sink.calls); n != len(rest) {
			t.Errorf("the sink received %d events, want %d", n, len(rest))
		}
		if ranks, _, _ := s.tracker.Repairs(); ranks != 0 {
			t.Error("the repair does not end")
		}
	})
}

// The blocks that wait for repairs are limited over all ranks, too. The rank that exceeds the
// limit drops all its waiting events and requests them later; the other ranks drop nothing.
func TestAllThatWaitsIsBounded(t *testing.T) {
	s := newStory(t, source(1))
	hear := func(worker, id uint64, weight int) {
		s.sink.known[worker] = true
		s.tracker.SetWorker(s.now, worker, source(1))
		ev := events.RouterEvent{WorkerID: worker, EventID: id, Event: indexer.Event{Kind: indexer.Stored, Blocks: make([]indexer.Block, weight-1)}}
		if got := s.tracker.Accept(s.now, 9, ev); got != "held" {
			t.Fatalf("event %d of worker %d is %q, want it held", id, worker, got)
		}
	}
	waits := func(what string, blocks, spilled int) {
		t.Helper()
		if _, got, sum := s.tracker.Repairs(); got != blocks || sum != blocks || s.happens["spilled"] != spilled {
			t.Errorf("%s: %d blocks wait (counted: %d), %d events are given up; want %d and %d", what, got, sum, s.happens["spilled"], blocks, spilled)
		}
	}
	const all = 8 << 20 // blocks: 128 MB
	const half, halves = events.MaxHeldBlocks / 2, 2*all/events.MaxHeldBlocks - 1
	for n := range uint64(halves) { // two for each worker
		hear(10+n/2, n+1, half)
	}
	const other = 10 + halves
	hear(other, 1, half/2)
	hear(other, 2, half/2)
	waits("up to the bound", all, 0)
	hear(other, 3, 1)
	waits("one above", all-half+1, 2)
}

func TestRestarts(t *testing.T) {
	t.Run("another publisher is heard", func(t *testing.T) {
		s := discovered(t)
		s.want(s.hear(4, 1, 2), "restart held, held")
		s.want(s.hear(9, 6), "held") // the last event of the old process
		s.wantCalls("")
		s.want(s.pass(time.Second), "dump")
		s.answer(4, events.AnswerDump, 1, 500)
		s.wantCalls("X 500 2")
		s.want(s.hear(9, 7), "multi_publisher")
		s.want(s.hear(4, 3), "")
		s.wantCalls("3")
	})
	t.Run("it was a liar", func(t *testing.T) {
		s := discovered(t)
		s.hear(66, 1)
		s.want(s.pass(time.Second), "dump")
		s.hear(9, 6)
		s.answer(9, events.AnswerDump, 5, 100)
		s.wantCalls("X 100 6")
		s.want(s.hear(66, 2, 3), "multi_publisher, multi_publisher")
		// It may be the worker's next process.
		s.pass(11 * time.Second)
		s.want(s.hear(66, 4), "restart held")
	})
	t.Run("the answer was made before it", func(t *testing.T) {
		s := discovered(t)
		s.hear(9, 8)
		s.pass(time.Second)
		s.hear(4, 1)
		s.want(s.pass(time.Second), "dump")
		s.hear(3, 1) // yet another publisher
		s.answer(4, events.AnswerDump, 1, 600)
		s.wantCalls("") // publisher 3 sent an event after the query: is publisher 4 still there?
		s.want(s.pass(time.Second), "dump")
		s.answer(3, events.AnswerDump, 1, 700)
		s.wantCalls("X 700")
	})
	t.Run("the registry tells of it", func(t *testing.T) {
		s := discovered(t)
		s.tracker.SetWorker(s.now, 7, source(2))
		s.want(s.hear(4, 1), "held")
		s.want(s.pass(time.Second), "dump")
		s.answer(4, events.AnswerDump, 1, 1)
		s.wantCalls("X 1")
	})
	t.Run("the answer to a range tells of it", func(t *testing.T) {
		s := discovered(t)
		s.hear(9, 7)
		s.pass(time.Second)
		s.answer(4, events.AnswerEvents, 8, 6, 7, 8) // ids of another publisher
		s.wantCalls("")
		s.want(s.pass(time.Second), "dump")
		s.answer(4, events.AnswerDump, 8, 800)
		s.wantCalls("X 800")
	})
	t.Run("the worker knows less than we do", func(t *testing.T) {
		s := discovered(t)
		s.tracker.Audit(s.now)
		s.want(s.pass(3*time.Second), "from 6")
		s.answer(9, events.AnswerTooNew, 2)
		s.want(s.pass(time.Second), "dump")
	})
	t.Run("nothing is missing", func(t *testing.T) {
		s := discovered(t)
		s.tracker.Audit(s.now)
		s.want(s.pass(3*time.Second), "from 6")
		s.answer(9, events.AnswerTooNew, 5)
		s.wantCalls("")
		s.want(s.hear(9, 6), "")
	})
	t.Run("its blocks are counted elsewhere", func(t *testing.T) {
		s := discovered(t)
		src := source(1)
		src.Home = "another model"
		s.tracker.SetWorker(s.now, 7, src)
		s.want(s.pass(time.Second), "dump")
	})
	t.Run("it is told of again", func(t *testing.T) {
		s := discovered(t)
		s.tracker.SetWorker(s.now, 7, source(1))
		s.want(s.pass(time.Hour), "")
	})
}

// The worker does not answer: eight attempts with growing delays, then events are applied across
// the gap, and the rank is suspect until a later dump.
func TestNobodyAnswers(t *testing.T) {
	s := discovered(t)
	s.hear(9, 8, 10)
	var waits []time.Duration
	last := s.now
	for len(waits) < events.MaxTries {
		if s.pass(10*time.Millisecond) == "" {
			continue
		}
		waits = append(waits, s.now.Sub(last))
		last = s.now
		s.tracker.Failed(s.now, s.asks[0].ID)
	}
	if sum := s.now.Sub(start); sum < 12*time.Second || sum > 30*time.Second || waits[7] < 3*time.Second || waits[1] > time.Second {
		t.Errorf("waited %v between the tries", waits)
	}
	s.wantCalls("8 10")
	s.want(s.hear(9, 11, 13, 9, 13), ", gap, duplicate, duplicate")
	s.wantCalls("11 13")
	if diff := cmp.Diff([]string{"suspect"}, s.states); diff != "" {
		t.Errorf("states:\n%s", diff)
	}
	s.want(s.pass(40*time.Second), "")
	s.want(s.pass(55*time.Second), "dump")
	s.want(s.hear(9, 14), "") // no event is held meanwhile
	s.wantCalls("14")
	s.tracker.Failed(s.now, s.asks[0].ID)
	s.want(s.pass(40*time.Second), "")
	s.want(s.pass(55*time.Second), "dump")
	s.hear(9, 15, 16)
	s.wantCalls("15 16")
	s.answer(9, events.AnswerDump, 15, 900)
	s.wantCalls("X 900 16")
	if diff := cmp.Diff([]string{"suspect", "ok"}, s.states); diff != "" {
		t.Errorf("states:\n%s", diff)
	}
	s.want(s.hear(9, 17, 19), ", gap held")

	// A query without an answer times out.
	s = discovered(t)
	s.hear(9, 8)
	s.want(s.pass(time.Second), "from 6")
	s.want(s.pass(29*time.Second), "")
	s.want(s.pass(2*time.Second), "")
	s.want(s.pass(time.Second), "from 6")
	if s.happens["timeout"] != 1 || s.happens["retry"] != 1 {
		t.Errorf("what happened: %v", s.happens)
	}
	// The late answer to the first query is ignored.
	s.tracker.Answer(s.now, s.asks[0].ID-1, 9, events.Answer{Kind: events.AnswerDump})
	s.wantCalls("")

	// A new publisher appears, and no process answers queries about it.
	s = discovered(t)
	s.hear(4, 1, 2)
	for s.happens["given_up"] == 0 {
		if s.pass(100*time.Millisecond) != "" {
			s.tracker.Failed(s.now, s.asks[0].ID)
		}
	}
	s.wantCalls("X 1 2")
	s.want(s.hear(4, 3), "")
}

// A suspect rank whose cache is cleared, or whose publisher restarts, is ok. The answer to a dump
// that was requested before does not undo later events.
func TestASuspectRankEndsItsRepairWhenItIsCleared(t *testing.T) {
	cleared := events.RouterEvent{WorkerID: 7, EventID: 12, Event: indexer.Event{Kind: indexer.Cleared}}
	for name, c := range map[string]struct {
		publisher uint64
		first     events.RouterEvent
	}{
		"cleared":   {9, cleared},
		"restarted": {4, stored(7, 1)},
	} {
		t.Run(name, func(t *testing.T) {
			suspect := func() *story {
				s := discovered(t)
				s.hear(9, 8)
				for s.happens["given_up"] == 0 {
					if s.pass(100*time.Millisecond) != "" {
						s.tracker.Failed(s.now, s.asks[0].ID)
					}
				}
				s.hear(9, 11)
				s.wantCalls("8 11")
				return s
			}
			next := c.first.EventID + 1
			first := func(s *story) {
				t.Helper()
				s.tracker.Accept(s.now, c.publisher, c.first)
				if got := s.tracker.State(7, 0); got != indexer.StateOK {
					t.Fatalf("the rank is %v", got)
				}
				s.sink.calls = nil
			}
			// A dump is requested, and made before the event.
			s := suspect()
			s.want(s.pass(2*time.Minute), "dump")
			first(s)
			s.want(s.hear(c.publisher, next), "")
			s.answer(9, events.AnswerDump, 11, 900)
			s.wantCalls(fmt.Sprint(next))
			if got := s.tracker.Cursor(7, 0); got != next {
				t.Errorf("the cursor is %d, want %d", got, next)
			}
			s.want(s.hear(c.publisher, next+1), "")
			// The timer of the next dump is removed, too.
			s = suspect()
			first(s)
			s.want(s.pass(2*time.Minute), "")
			s.want(s.hear(c.publisher, next), "")
		})
	}
}

// A dump of which a part cannot be read is used, and the rank is read again.
func TestADamagedDumpIsUsedAndDoubted(t *testing.T) {
	s := newStory(t, source(1))
	s.pass(time.Second)
	s.tracker.Answer(s.now, s.asks[0].ID, 9, events.Answer{Kind: events.AnswerDump, LastEventID: 4, Bad: 1, Events: []events.RouterEvent{stored(7, 1)}})
	s.wantCalls("X 1")
	s.want(s.hear(9, 5), "")
	s.want(s.pass(2*time.Minute), "dump")
	s.answer(9, events.AnswerDump, 5, 1, 2)
	s.wantCalls("5 X 1 2")
	if diff := cmp.Diff([]string{"suspect", "ok"}, s.states); diff != "" {
		t.Errorf("states:\n%s", diff)
	}
}

// A worker that cannot be queried: events are applied across gaps, and the rank's state shows it.
func TestWorkersThatCannotBeAsked(t *testing.T) {
	src := source(1)
	src.Queries = false
	s := newStory(t, src)
	s.want(s.hear(9, 4, 5), "gap, ")
	s.want(s.hear(9, 7), "gap")
	s.wantCalls("4 5 7")
	s.want(s.pass(time.Hour), "")
	if diff := cmp.Diff([]string{"partial", "suspect"}, s.states); diff != "" {
		t.Errorf("states:\n%s", diff)
	}
	s.tracker.Accept(s.now, 9, events.RouterEvent{WorkerID: 7, EventID: 8, Event: indexer.Event{Kind: indexer.Cleared}})
	s.want(s.hear(9, 9), "")
	s.tracker.Doubt(s.now, 7, 0)
	s.want(s.hear(4, 1), "restart")
	if diff := cmp.Diff([]string{"partial", "suspect", "ok", "suspect", "ok"}, s.states); diff != "" {
		t.Errorf("states:\n%s", diff)
	}
	// The worker gains a local indexer, and loses it again.
	s.tracker.SetWorker(s.now, 7, source(1))
	s.want(s.pass(time.Second), "from 2")
	s.want(s.hear(4, 3), "held")
	s.tracker.SetWorker(s.now, 7, src)
	s.wantCalls("X 9 X 1 3")
	s.want(s.pass(time.Hour), "")

	// Of a worker that was found late, no event is missed for ten minutes.
	s = newStory(t, src)
	s.hear(9, 4, 5)
	s.tracker.Expire(s.now.Add(10 * time.Minute))
	if diff := cmp.Diff([]string{"partial", "ok"}, s.states); diff != "" {
		t.Errorf("states:\n%s", diff)
	}
}

// Saved state is used if the worker's process is the same; then only later events are requested.
func TestWhatWasSavedIsUsed(t *testing.T) {
	begin := func(src events.Source, waits ...uint64) *story {
		s := newStory(t, events.Source{})
		s.tracker.Forget(7)
		s.tracker.Load(s.now, events.SnapshotWorker{ID: 7, StartedMS: 1}, events.Cursor{RankName: events.RankName{WorkerID: 7}, PublisherID: 9, EventID: 5})
		s.pass(time.Second)
		for _, id := range waits {
			s.want(s.hear(9, id), "waiting")
		}
		s.tracker.SetWorker(s.now, 7, src)
		return s
	}
	s := begin(source(1), 6)
	s.wantCalls("6")
	s.want(s.hear(9, 9), "gap held")
	s.want(s.pass(time.Second), "from 7")
	s.answer(9, events.AnswerEvents, 9, 7, 8, 9)
	s.wantCalls("7 8 9")

	other := source(1)
	other.Home = "elsewhere"
	for name, src := range map[string]events.Source{"another process": source(2), "another home": other} {
		t.Run(name, func(t *testing.T) {
			s := begin(src, 6)
			s.t = t
			s.wantCalls("X")
			s.want(s.pass(time.Second), "dump")
		})
	}

	// A worker that cannot be queried: events may have been lost meanwhile.
	src := source(1)
	src.Queries = false
	s = begin(src, 6)
	s.wantCalls("6")
	if got := s.tracker.State(7, 0); got != indexer.StatePartial {
		t.Errorf("the rank is %v, want partial", got)
	}
	// Without a start time it may be another process.
	src.StartedMS = 0
	s = newStory(t, events.Source{})
	s.tracker.Forget(7)
	s.tracker.Load(s.now, events.SnapshotWorker{ID: 7}, events.Cursor{RankName: events.RankName{WorkerID: 7}, PublisherID: 9, EventID: 5})
	s.tracker.SetWorker(s.now, 7, src)
	s.wantCalls("X")

	// The same worker with another publisher.
	s = begin(source(1))
	s.wantCalls("")
	s.want(s.pass(time.Second), "from 6")
	s.answer(4, events.AnswerEvents, 8, 6, 7, 8)
	s.wantCalls("")
	s.want(s.pass(time.Second), "dump")
}

// After the discovery of many workers or a lost connection, few queries run at a time and they are
// spread over time.
func TestQueriesAreFewAndSpread(t *testing.T) {
	tr := events.NewTracker(func(uint64, uint32, indexer.Event) {}).Seed(3)
	const workers = 1000
	for id := range uint64(workers) {
		tr.SetWorker(start, id+1, source(1))
	}
	now, most, dumps := start, 0, 0
	for dumps < workers {
		now = now.Add(time.Millisecond)
		asks := tr.Tick(now)
		most = max(most, tr.Asked())
		for _, a := range asks {
			dumps++
			tr.Answer(now, a.ID, 9, events.Answer{Kind: events.AnswerDump, LastEventID: 1})
		}
		if now.Sub(start) > time.Minute {
			t.Fatalf("after a minute %d workers are read", dumps)
		}
	}
	if most > events.MaxDumps {
		t.Errorf("%d dumps at once", most)
	}
	tr.Audit(now)
	asked, most := map[int]int{}, 0
	for step := range 2100 {
		for _, a := range tr.Tick(now.Add(time.Duration(step) * time.Millisecond)) {
			asked[step/100]++
			tr.Answer(now, a.ID, 9, events.Answer{Kind: events.AnswerTooNew, LastEventID: 1})
		}
	}
	for _, n := range asked {
		most = max(most, n)
	}
	if len(asked) < 18 || most > workers/5 {
		t.Errorf("queries by tenths of a second: %v, want them spread over two seconds", asked)
	}
	// All workers leave, and no state of them remains.
	for id := range uint64(workers) {
		tr.Forget(id + 1)
	}
	if tr.Ranks() != 0 || tr.Asked() != 0 || len(tr.Tick(now.Add(time.Hour))) != 0 {
		t.Errorf("%d ranks, %d queries are left", tr.Ranks(), tr.Asked())
	}
}

// A fleet with more ranks than the limit is followed up to the limit, and the refused ranks are
// counted.
func TestTooManyRanks(t *testing.T) {
	tr := events.NewTracker(func(uint64, uint32, indexer.Event) {})
	refused := 0
	tr.Count(func(what string, n int) {
		if what == "no_room" {
			refused += n
		}
	})
	src := source(1)
	src.DPSize = 1024
	for id := range uint64(events.MaxRanks/1024 + 1) {
		tr.SetWorker(start, id+1, src)
	}
	if tr.Ranks() != events.MaxRanks || refused != 1024 {
		t.Errorf("%d ranks are followed, %d refused", tr.Ranks(), refused)
	}
}
