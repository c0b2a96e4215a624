// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"testing"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// After each further loss a partial rank is partial for ten minutes again.
func TestAFurtherLossRenewsTheTimeOfPartial(t *testing.T) {
	x := events.NewTracker(func(uint64, uint32, indexer.Event) {}).Seed(1)
	x.SetWorker(start, 7, events.Source{Feed: events.FeedDurable, DPSize: 1, StartedMS: 1})
	for at, want := range []indexer.State{
		0: indexer.StatePartial, 9: indexer.StatePartial, 18: indexer.StatePartial, 19: indexer.StateOK,
	} {
		now := start.Add(time.Duration(at) * time.Minute)
		if at == 0 || at == 9 {
			x.CaughtUp(now, true) // messages have left the stream before they were read
		}
		if x.Expire(now); want != "" && x.State(7, 0) != want {
			t.Errorf("after %d minutes the rank is %s, want %s", at, x.State(7, 0), want)
		}
	}
}

// An engine that no longer has its first batches is not read again: neither is its rank lost, nor is the engine
// requested every minute. After the engine has cleared its cache, a later loss is another one.
func TestWithoutTheFirstBatchARankIsNotReadAgain(t *testing.T) {
	f, e := faulty(t)
	f.Part(f.now, f.id, 1, e.body(1))
	if f.String() != "1/0 1/2 suspect " || f.clears != 0 || f.Waits() {
		t.Errorf("after an answer without batch 0: %s, %d clears", f, f.clears)
	}
	for end := f.now.Add(10 * time.Minute); f.now.Before(end); {
		id, _, wait := f.Tick(f.now)
		if id != 0 {
			t.Fatal("the rank is read again")
		}
		f.now = f.now.Add(wait)
	}
	if f.Reread(f.now) {
		t.Error("Reread says that batches are requested")
	}
	f.clearAt = e.published
	f.hear(e.publish())
	if f.State() != indexer.StateOK {
		t.Errorf("after a clear the rank is %s", f.State())
	}
	e.publish() // is lost
	f.hear(e.publish())
	f.giveUp()
	if f.String() != "1/5 suspect " || !f.Reread(f.now) {
		t.Errorf("after a loss behind the clear: %s, and the rank is not read again", f)
	}
}

// If the audit has a rank read again of which no batch is missing, and the engine no longer has batch 0, nothing is lost:
// the rank stays ok, with the batches that came meanwhile, and is not read again.
func TestARankThatLacksNothingStaysOKWithoutTheFirstBatch(t *testing.T) {
	for _, gap := range []bool{false, true} {
		f, e := newFollower(t, true), &process{id: 1, published: 3, keeps: 3}
		f.connected(false)
		f.answer(e, 9)
		if f.String() != "1/0 1/1 1/2 " || !f.Reread(f.now) {
			t.Fatalf("at first the rank has %s", f)
		}
		f.begin()
		if gap {
			e.publish() // is lost
		}
		f.hear(e.publish())
		f.Part(f.now, f.id, e.published-2, e.body(e.published-2))
		want := "1/0 1/1 1/2 1/3 "
		if gap {
			f.answer(e, 9)
			want += "1/4 "
		}
		if f.String() != want || f.Waits() || f.clears != 0 || f.counts["lost"] != 0 {
			t.Errorf("gap %v: %s, %d clears, %v", gap, f, f.clears, f.counts)
		}
		if f.Reread(f.now) {
			t.Error("Reread says that batches are requested")
		}
	}
}

// An engine that has no batch at all is another process than the one whose blocks are known.
func TestAnEmptyAnswerToARequestOfAllClearsTheRank(t *testing.T) {
	f, _ := faulty(t)
	f.End(f.now, f.id)
	if f.String() != "" || f.clears != 1 || f.counts["restart"] != 1 || f.Waits() {
		t.Errorf("%s, %d clears; %v", f, f.clears, f.counts)
	}
}

// Each batch that is missing for good counts once, whether it is missing between two batches or before the first one.
func TestLostBatchesAreCounted(t *testing.T) {
	for _, replays := range []bool{false, true} {
		f, e := newFollower(t, replays), &process{id: 1, published: 2, keeps: 2}
		f.connected(false)
		f.answer(e, 9)
		f.hear(e.publish()) // without requests 0 and 1 are lost
		before := 0
		if !replays {
			before = 2
		}
		if f.counts["lost"] != before {
			t.Errorf("requests %v: %d batches are lost at first, want %d", replays, f.counts["lost"], before)
		}
		e.published += 4
		f.hear(e.publish()) // 3 to 6 are missing; the engine still has 6
		f.answer(e, 9)
		want := before + 4
		if replays {
			want = 3
		}
		if f.counts["lost"] != want {
			t.Errorf("requests %v: %d batches are lost, want %d; %s", replays, f.counts["lost"], want, f)
		}
	}
}

// An answer that begins with the last known batch shows that the port was closed for another reason than a new
// process. What happens later is no sign of one.
func TestAnAnswerSettlesWhyThePortWasClosed(t *testing.T) {
	f, e := newFollower(t, true), &process{id: 1, published: 2, keeps: 1 << 20}
	f.connected(false)
	f.answer(e, 9)
	f.connected(true)
	f.answer(e, 9)
	e.publish() // is lost
	f.hear(e.publish())
	f.giveUp()
	if f.String() != "1/0 1/1 1/3 suspect " || f.clears != 0 {
		t.Errorf("%s after %d clears", f, f.clears)
	}
}

// The port of an engine of which nothing is known may be closed at first.
func TestAClosedPortMeansNothingAtFirst(t *testing.T) {
	for _, replays := range []bool{false, true} {
		f, e := newFollower(t, replays), &process{id: 1, keeps: 9}
		f.connected(true)
		if replays {
			e.published = 2
			f.answer(e, 9)
		}
		f.hear(e.publish())
		if f.clears != 0 || f.counts["restart"] != 0 || f.State() != indexer.StateOK {
			t.Errorf("requests %v: %s after %d clears; %v", replays, f, f.clears, f.counts)
		}
	}
}

// A request that another one replaces does not count as one of its tries.
func TestAnotherRequestHasAllTries(t *testing.T) {
	fail := func(f *follower, n int) {
		for range n {
			f.begin()
			f.Fail(f.now, f.id, false)
		}
	}
	f, e := newFollower(t, true), &process{id: 1, published: 1, keeps: 9}
	f.connected(false)
	f.answer(e, 9)
	e.publish()
	f.hear(e.publish())
	fail(f, events.MaxTries-1)
	f.connected(false)
	if fail(f, events.MaxTries-1); !f.Waits() || f.gaveUp != 0 {
		t.Errorf("after another connection it is given up too early")
	}
	if fail(f, 1); f.Waits() || f.gaveUp != 1 {
		t.Errorf("it is not given up after %d tries", events.MaxTries)
	}

	s := discovered(t)
	failed := func(n int) {
		t.Helper()
		for end := s.now.Add(time.Hour); n > 0; {
			if s.pass(20*time.Millisecond) != "" {
				s.tracker.Failed(s.now, s.asks[0].ID)
				n--
			}
			if s.now.After(end) {
				t.Fatal("nothing is requested")
			}
		}
	}
	pending := func(what string) {
		t.Helper()
		if s.happens["given_up"] != 0 || !s.tracker.Repairing(7, 0) {
			t.Errorf("%s: given up too early", what)
		}
	}
	s.hear(9, 8, 10)
	failed(events.MaxTries - 1)
	s.tracker.Missed(s.now, 7, 0)
	failed(events.MaxTries - 1)
	pending("the worker is reachable again")
	for s.pass(20*time.Millisecond) == "" {
	}
	s.answer(9, events.AnswerEvents, 8, 6, 7, 8) // 9 is missing, too
	failed(events.MaxTries - 1)
	pending("the answer brought events")
	failed(1)
	if s.happens["given_up"] != 1 {
		t.Errorf("what happened: %v", s.happens)
	}
}
