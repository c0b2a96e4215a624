// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"testing"
	"time"

	"github.com/kvroute/kvroute/events"
)

// faulty returns a follower of a suspect rank, which is read again, and its engine: batch 1 was lost, and the engine
// did not send it again.
func faulty(t *testing.T) (*follower, *process) {
	t.Helper()
	f, e := newFollower(t, true), &process{id: 1, published: 1, keeps: 1 << 20}
	f.connected(false)
	f.answer(e, 9)
	e.publish()
	f.hear(e.publish())
	f.giveUp()
	if f.String() != "1/0 1/2 suspect " || f.gaveUp != 1 {
		t.Fatalf("%s, given up %d times", f, f.gaveUp)
	}
	f.requestAll()
	if from := f.begin(); from != 0 {
		t.Fatalf("batches are requested from %d on", from)
	}
	return f, e
}

// While a faulty rank is read again, live batches are applied at once, for as long as the engine does not answer.
func TestALiveBatchDoesNotWaitForARereading(t *testing.T) {
	f, e := faulty(t)
	f.hear(e.publish())
	e.publish() // is lost
	f.hear(e.publish())
	if f.String() != "1/0 1/2 1/3 1/5 suspect " || !f.Waits() {
		t.Errorf("before an answer %s", f)
	}
	sequence, body := e.publish()
	f.hear(sequence, body)
	body[0] = 9 // the memory of a live batch is used again
	id := f.id
	f.Part(f.now, id, 0, e.body(0))
	f.hear(e.publish()) // waits for the rest of the answer
	if f.String() != "1/0 suspect " {
		t.Errorf("after the first batch of the answer %s", f)
	}
	for sequence := range uint64(5) {
		f.Part(f.now, id, sequence, e.body(sequence))
	}
	f.End(f.now, id)
	if f.String() != "1/0 1/1 1/2 1/3 1/4 1/5 1/6 1/7 " || f.Waits() {
		t.Errorf("after the answer %s", f)
	}
}

// A rank that is read again stays faulty until the engine has sent all batches, also if the answer breaks off.
func TestARankIsFaultyUntilTheEndOfTheAnswer(t *testing.T) {
	for name, test := range map[string]struct {
		rest func(f *follower, e *process)
		want string
	}{
		"given up":  {func(f *follower, _ *process) { f.giveUp() }, "1/0 suspect "},
		"continued": {func(f *follower, e *process) { f.Fail(f.now, f.id, false); f.answer(e, 9) }, "1/0 1/1 1/2 "},
		"with a gap": {func(f *follower, e *process) {
			e.keeps = 1
			f.Fail(f.now, f.id, false)
			f.answer(e, 9)
		}, "1/0 1/2 suspect "},
	} {
		f, e := faulty(t)
		f.Part(f.now, f.id, 0, e.body(0))
		if f.String() != "1/0 suspect " {
			t.Errorf("%s: after the first batch %s", name, f)
		}
		if test.rest(f, e); f.String() != test.want {
			t.Errorf("%s: %s, want %s", name, f, test.want)
		}
	}
}

// A rereading that fails is not tried again at once, because the next one follows in about a minute.
func TestARereadingHasOneTry(t *testing.T) {
	f, e := faulty(t)
	for range 3 {
		f.hear(e.publish())
		f.Fail(f.now, f.id, false)
		if f.Waits() {
			t.Fatal("the rereading is tried again at once")
		}
		failed := f.now
		f.begin()
		if after := f.now.Sub(failed); after < 45*time.Second || after > 75*time.Second {
			t.Errorf("the next rereading begins after %v", after)
		}
	}
	if f.String() != "1/0 1/2 1/3 1/4 1/5 suspect " || f.counts["given_up"] != 1 || f.gaveUp != 4 || f.counts["duplicate"] != 0 {
		t.Errorf("%s, given up %d times; %v", f, f.gaveUp, f.counts)
	}
	// An answer that ends in the middle is continued with as many tries as that of another gap.
	f.Part(f.now, f.id, 0, e.body(0))
	f.hear(e.publish())
	for range events.MaxTries - 1 {
		f.Fail(f.now, f.id, false)
		if from := f.begin(); from != 0 {
			t.Fatalf("batches are requested from %d on", from)
		}
	}
	for sequence := range e.published - 1 {
		f.Part(f.now, f.id, sequence, e.body(sequence))
	}
	f.End(f.now, f.id)
	if f.String() != "1/0 1/1 1/2 1/3 1/4 1/5 1/6 " || f.Waits() {
		t.Errorf("in the end %s", f)
	}
}

// A live batch in which the engine clears its cache ends the rereading: an answer would bring back the blocks of before.
func TestAClearEndsARereading(t *testing.T) {
	f, e := faulty(t)
	f.clearAt = e.published
	f.hear(e.publish())
	f.hear(e.publish())
	if f.String() != "1/4 " || f.Waits() {
		t.Errorf("after the clear %s, read again: %v", f, f.Waits())
	}
	if f.Part(f.now, f.id, 0, e.body(0)); f.String() != "1/4 " {
		t.Errorf("a late answer leaves %s", f)
	}
	e.publish() // is lost
	f.hear(e.publish())
	if from := f.begin(); from != 4 {
		t.Errorf("after the clear, batches are requested from %d on, want those after the last one", from)
	}
}

// A rereading with too many live batches ends without an answer: they were applied.
func TestARereadingWaitsForFewBatches(t *testing.T) {
	f, e := faulty(t)
	for range events.MaxHeldEvents {
		f.hear(e.publish())
	}
	if !f.Waits() {
		t.Errorf("%d batches end the rereading", events.MaxHeldEvents)
	}
	f.hear(e.publish())
	if len(f.applied) != int(e.published)-1 || f.Waits() || f.counts["buffer_full"] != 1 || f.counts["duplicate"] != 0 {
		t.Errorf("%d batches of %d were applied; %v", len(f.applied), e.published-1, f.counts)
	}
	if f.begin(); f.State() == "ok" {
		t.Error("the rank is ok without an answer")
	}
}
