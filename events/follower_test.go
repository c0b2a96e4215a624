// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// process is an engine's process as its socket shows it: numbered batches, of which it keeps the
// newest few. Each body names the process.
type process struct {
	id, published uint64
	keeps         int
}

func (p *process) body(sequence uint64) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, p.id), sequence)
}

func (p *process) publish() (sequence uint64, body []byte) {
	p.published++
	return p.published - 1, p.body(p.published - 1)
}

func (p *process) oldest() uint64 {
	if p.published < uint64(p.keeps) {
		return 0
	}
	return p.published - uint64(p.keeps)
}

// follower is an [events.Follower], the batches that it applied since the last clear, and the connections to
// an engine. Its clock stands still, except until a request is sent.
type follower struct {
	*events.Follower
	t       testing.TB
	now     time.Time
	id      uint64      // of the last request
	applied [][2]uint64 // process and sequence
	clears  int
	counts  map[string]int
	gaveUp  int
	clearAt uint64 // the engine clears its cache in the batch with this number, unless it is 0
}

func newFollower(t testing.TB, replays bool) *follower {
	f := &follower{t: t, now: start, counts: map[string]int{}}
	f.Follower = events.NewFollower(events.FollowerConfig{
		Replays: replays,
		Apply: func(body []byte) bool {
			batch := [2]uint64{binary.BigEndian.Uint64(body), binary.BigEndian.Uint64(body[8:])}
			if f.clearAt > 0 && batch[1] == f.clearAt {
				f.applied = nil
				return true
			}
			f.applied = append(f.applied, batch)
			return false
		},
		Clear:  func() { f.applied, f.clears = nil, f.clears+1 },
		Count:  func(outcome string, n int) { f.counts[outcome] += n },
		GaveUp: func() { f.gaveUp++ },
	})
	return f
}

func (f *follower) connected(closed bool)             { f.Connected(f.now, closed) }
func (f *follower) hear(sequence uint64, body []byte) { f.Live(f.now, sequence, body) }
func (f *follower) requestAll()                       { f.RequestAll(f.now) }

// begin sends the request that is due.
func (f *follower) begin() (from uint64) {
	f.t.Helper()
	for range 100 {
		id, from, wait := f.Tick(f.now)
		if id != 0 {
			f.id = id
			return from
		}
		f.now = f.now.Add(wait)
	}
	f.t.Fatal("no request is sent")
	return 0
}

// giveUp lets the request fail until it is given up.
func (f *follower) giveUp() {
	f.t.Helper()
	for n := f.Requests(); f.Waits() && f.Requests() == n; {
		f.begin()
		f.Fail(f.now, f.id, false)
	}
}

// answer lets a process answer the pending request with up to most batches.
func (f *follower) answer(p *process, most int) { f.answerBut(p, most, nil) }

// answerBut is answer without the batches at some places of the answer.
func (f *follower) answerBut(p *process, most int, dropped func(place int) bool) {
	if !f.Waits() {
		return // no request is due
	}
	id, from := f.Requests(), f.begin()
	for seq := max(from, p.oldest()); seq < p.published; seq++ {
		if most--; most < 0 {
			f.Fail(f.now, f.id, true)
			return // the answer ends early
		}
		if place := int(seq - max(from, p.oldest())); dropped != nil && dropped(place) {
			continue
		}
		f.Part(f.now, f.id, seq, p.body(seq))
		if f.Requests() != id {
			return // another request was sent meanwhile
		}
	}
	f.End(f.now, f.id)
}

func (f *follower) String() string {
	var s strings.Builder
	for _, a := range f.applied {
		fmt.Fprintf(&s, "%d/%d ", a[0], a[1])
	}
	if f.State() != indexer.StateOK {
		s.WriteString(string(f.State()) + " ")
	}
	return s.String()
}

func TestFollower(t *testing.T) {
	p := func(n int) *process { return &process{id: 1, published: uint64(n), keeps: 5} }
	live := func(f *follower, p *process, n int) {
		for range n {
			f.hear(p.publish())
		}
	}
	// firstLost brings f into a partial state: the engine kept no batch when it was asked.
	firstLost := func(f *follower) *process {
		e := &process{id: 1}
		f.connected(false)
		e.publish()
		live(f, e, 1)
		for range 3 {
			f.answer(e, 9)
		}
		return e
	}
	// tooOld brings f into a suspect state: of seven lost batches the engine kept only the last ones.
	tooOld := func(f *follower) *process {
		e := p(0)
		f.connected(false)
		f.answer(e, 9)
		live(f, e, 1)
		for range 7 {
			e.publish()
		}
		live(f, e, 1)
		f.answer(e, 9)
		return e
	}
	for _, c := range []struct {
		name    string
		replays bool
		do      func(*follower)
		want    string
		clears  int
	}{
		{"from the beginning", true, func(f *follower) {
			e := p(0)
			f.connected(false)
			f.answer(e, 9)
			live(f, e, 2)
		}, "1/0 1/1 ", 0},
		{"late, live while the answer comes", true, func(f *follower) {
			e := p(2)
			f.connected(false)
			live(f, e, 2)
			f.answer(e, 9)
			live(f, e, 1)
		}, "1/0 1/1 1/2 1/3 1/4 ", 0},
		{"too late", true, func(f *follower) {
			e := p(7)
			f.connected(false)
			f.answer(e, 9)
		}, "1/2 1/3 1/4 1/5 1/6 partial ", 0},
		{"late, without requests", false, func(f *follower) {
			e := p(1)
			f.connected(false)
			live(f, e, 2)
		}, "1/1 1/2 partial ", 0},
		{"a gap is repaired", true, func(f *follower) {
			e := p(0)
			f.connected(false)
			f.answer(e, 9)
			live(f, e, 1)
			e.publish()
			live(f, e, 2)
			f.answer(e, 9)
		}, "1/0 1/1 1/2 1/3 ", 0},
		{"a gap that cannot be repaired", false, func(f *follower) {
			e := p(0)
			f.connected(false)
			live(f, e, 1)
			e.publish()
			live(f, e, 1)
		}, "1/0 1/2 suspect ", 0},
		{"a gap too old", true, func(f *follower) { tooOld(f) }, "1/0 1/4 1/5 1/6 1/7 1/8 suspect ", 0},
		{"a later gap, which the engine can fill", true, func(f *follower) {
			e := tooOld(f)
			e.publish()
			live(f, e, 1)
			f.answer(e, 9)
		}, "1/0 1/4 1/5 1/6 1/7 1/8 1/9 1/10 suspect ", 0},
		{"a request without an answer", true, func(f *follower) {
			e := p(0)
			f.connected(false)
			f.answer(e, 9)
			live(f, e, 1)
			e.publish()
			live(f, e, 2)
			f.giveUp()
		}, "1/0 1/2 1/3 suspect ", 0},
		{"a request without an answer, and a later one with one", true, func(f *follower) {
			e := p(0)
			f.connected(false)
			f.answer(e, 9)
			live(f, e, 1)
			e.publish()
			live(f, e, 2)
			f.giveUp()
			f.requestAll()
			live(f, e, 1)
			f.answer(e, 9)
		}, "1/0 1/1 1/2 1/3 1/4 ", 1},
		{"a new process, seen by its numbers", false, func(f *follower) {
			e := p(0)
			f.connected(false)
			live(f, e, 3)
			live(f, &process{id: 2, keeps: 5}, 2)
		}, "2/0 2/1 ", 1},
		{"a new process that is ahead, seen by the closed port", false, func(f *follower) {
			e := p(0)
			f.connected(false)
			live(f, e, 1)
			f.connected(true)
			live(f, &process{id: 2, published: 1, keeps: 5}, 1)
		}, "2/1 partial ", 1},
		{"the same process after a lost connection", true, func(f *follower) {
			e := p(0)
			f.connected(false)
			f.answer(e, 9)
			live(f, e, 2)
			e.publish()
			f.connected(true)
			f.answer(e, 9)
			live(f, e, 1)
		}, "1/0 1/1 1/2 1/3 ", 0},
		{"a new process, silent so far", true, func(f *follower) {
			e := p(0)
			f.connected(false)
			f.answer(e, 9)
			live(f, e, 2)
			f.connected(false)
			e = &process{id: 2, keeps: 5}
			f.answer(e, 9)
			f.answer(e, 9)
		}, "", 1},
		{"a new process that is ahead", true, func(f *follower) {
			e := p(0)
			f.connected(false)
			f.answer(e, 9)
			live(f, e, 2)
			f.connected(false)
			e = &process{id: 2, published: 4, keeps: 5}
			live(f, e, 1)
			f.answer(e, 9)
			f.answer(e, 9)
		}, "2/0 2/1 2/2 2/3 2/4 ", 1},
		{"a new process with the last number, seen by it", false, func(f *follower) {
			e := p(0)
			f.connected(false)
			live(f, e, 2)
			f.connected(false)
			live(f, &process{id: 2, published: 1, keeps: 5}, 1)
		}, "2/1 partial ", 1},
		{"a new process behind a proxy, whose answer begins with the next number", true, func(f *follower) {
			e := p(0)
			f.connected(false)
			f.answer(e, 9)
			live(f, e, 2)
			f.connected(false)
			f.answer(&process{id: 2, published: 4, keeps: 2}, 9)
			f.requestAll() // the engine has no first batch: this requests nothing
		}, "1/0 1/1 2/2 2/3 suspect ", 0},
		{"an answer in two parts", true, func(f *follower) {
			e := p(4)
			f.connected(false)
			f.answer(e, 2)
			f.answer(e, 9)
		}, "1/0 1/1 1/2 1/3 ", 0},
		{"an answer that lacks something inside", true, func(f *follower) {
			e := p(5)
			f.connected(false)
			f.answerBut(e, 9, func(place int) bool { return place == 2 })
			f.answer(e, 9)
		}, "1/0 1/1 1/2 1/3 1/4 ", 0},
		{"each time another thing", true, func(f *follower) {
			e := &process{id: 1, published: 9, keeps: 9}
			f.connected(false)
			for range 3 {
				f.answerBut(e, 9, func(place int) bool { return place == 3 })
			}
			f.answer(e, 9)
		}, "1/0 1/1 1/2 1/3 1/4 1/5 1/6 1/7 1/8 ", 0},
		{"the same thing, over another connection", true, func(f *follower) {
			e := p(5)
			f.connected(false)
			f.answerBut(e, 9, func(place int) bool { return place == 2 })
			f.connected(false)
			f.answerBut(e, 9, func(place int) bool { return place == 1 })
			f.answer(e, 9)
		}, "1/0 1/1 1/2 1/3 1/4 ", 0},
		{"each time the same thing", true, func(f *follower) {
			e := p(5)
			f.connected(false)
			f.answerBut(e, 9, func(place int) bool { return place == 2 || place == 3 })
			f.answerBut(e, 9, func(place int) bool { return place == 1 || place == 2 })
			f.requestAll()
			f.answer(e, 9) // no request is pending
		}, "1/0 1/1 1/4 suspect ", 0},
		{"a partial state stays partial if nobody answers the request of all batches", true, func(f *follower) {
			e := firstLost(f)
			f.requestAll()
			live(f, e, 1)
			f.giveUp()
			live(f, e, 1)
		}, "1/1 1/2 1/3 partial ", 0},
		{"and if the engine no longer has the first batches", true, func(f *follower) {
			e := firstLost(f)
			f.requestAll()
			e.keeps = 1
			f.answer(e, 9)
		}, "1/1 partial ", 0},
		{"a connection that ends during the request of all batches", true, func(f *follower) {
			e := firstLost(f)
			f.requestAll()
			e.publish()
			f.connected(false)
			f.giveUp()
		}, "1/1 suspect ", 0},
		{"an answer that never has what live has", true, func(f *follower) {
			firstLost(f)
		}, "1/1 partial ", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFollower(t, c.replays)
			c.do(f)
			if f.String() != c.want || f.clears != c.clears {
				t.Errorf("%sand %d clears, want %sand %d; %v", f, f.clears, c.want, c.clears, f.counts)
			}
		})
	}
}

// Batches that an engine no longer has are not requested repeatedly; unanswered requests are
// repeated.
func TestOnlyBatchesThatMayExistAreRequestedAgain(t *testing.T) {
	for name, c := range map[string]struct {
		published int
		answers   bool
		again     bool
	}{"it is gone": {7, true, false}, "no answer": {7, false, true}, "all is known": {3, true, false}} {
		f := newFollower(t, true)
		f.connected(false)
		if c.answers {
			f.answer(&process{id: 1, published: uint64(c.published), keeps: 5}, 9)
		} else {
			f.giveUp()
		}
		asks := f.Requests()
		f.requestAll()
		if again := f.Requests() > asks; again != c.again {
			t.Errorf("%s: requested again: %v", name, again)
		}
		possible := name != "it is gone"
		for range 2 {
			if requested := f.Reread(f.now); requested != possible {
				t.Errorf("%s: Reread says that it requests: %v", name, requested)
			}
		}
	}
}

func TestWaitingForAnAnswerIsBounded(t *testing.T) {
	f := newFollower(t, true)
	e := &process{id: 1, keeps: 1 << 20}
	e.publish()
	f.connected(false)
	for range 5000 {
		f.hear(e.publish())
	}
	if f.State() == indexer.StateSuspect || f.counts["buffer_full"] != 1 || len(f.applied) != 5000 {
		t.Errorf("%d batches of 5,000 were applied; %v", len(f.applied), f.counts)
	}
	if f.Requests() != 2 {
		t.Errorf("the number of requests is %d, want 2: Tick is due, to plan the next one", f.Requests())
	}
	f.requestAll()
	f.answer(e, 1<<20)
	if f.State() != indexer.StateOK || len(f.applied) != 5001 {
		t.Errorf("after a full answer %d batches of 5,001 are there", len(f.applied))
	}
}

// The batches that wait for an answer have at most 64 MiB.
func TestTheBytesThatWaitAreBounded(t *testing.T) {
	f := newFollower(t, true)
	e := &process{id: 1, published: 1}
	f.connected(false)
	for n := range 65 {
		if n < 64 && f.counts["buffer_full"] > 0 {
			t.Fatalf("%d MiB do not wait", n)
		}
		sequence, body := e.publish()
		f.hear(sequence, append(body, make([]byte, 1<<20-len(body))...))
	}
	if f.counts["buffer_full"] != 1 || len(f.applied) != 65 {
		t.Errorf("%d batches of 1 MiB were applied, want 65; %v", len(f.applied), f.counts)
	}
}

// A rank that was restored without some of its blocks is read completely after the first answer.
func TestARecheckFollowsTheFirstAnswer(t *testing.T) {
	f := newFollower(t, true)
	e := &process{id: 1, published: 3, keeps: 5}
	f.Continue(2, xxh3.Hash(e.body(2)))
	f.Miss(f.now, indexer.StateSuspect)
	f.Recheck()
	f.connected(false)
	f.answer(e, 9)
	if !f.Waits() {
		t.Error("after the first answer nothing is requested")
	}
	f.answer(e, 9)
	if f.String() != "1/0 1/1 1/2 " || f.Waits() {
		t.Errorf("in the end %s", f)
	}
}

// While a rank is read again its state stays as it was, as that of a worker with a local indexer. If the engine does
// not answer, the rank is suspect, and is read again later.
func TestARereadingThatFailsMakesTheRankSuspect(t *testing.T) {
	f := newFollower(t, true)
	e := &process{id: 1, published: 3, keeps: 5}
	f.connected(false)
	f.answer(e, 9)
	f.Reread(f.now)
	if f.State() != indexer.StateOK || !f.Waits() {
		t.Errorf("before the answer the rank is %s, waits for it: %v", f.State(), f.Waits())
	}
	f.answer(e, 9)
	if f.clears != 1 || f.String() != "1/0 1/1 1/2 " {
		t.Errorf("after %d clears %s", f.clears, f)
	}
	f.Reread(f.now)
	f.giveUp()
	if f.String() != "1/0 1/1 1/2 suspect " || f.counts["given_up"] != 1 {
		t.Errorf("without an answer %s; %v", f, f.counts)
	}
	for begin := f.now; !f.Waits(); {
		_, _, wait := f.Tick(f.now)
		if f.now = f.now.Add(wait); f.now.Sub(begin) > 2*time.Minute {
			t.Fatal("it is not read again")
		}
	}
	f.answer(e, 9)
	if f.clears != 2 || f.String() != "1/0 1/1 1/2 " {
		t.Errorf("in the end, after %d clears, %s", f.clears, f)
	}
}

// Whatever the connection loses and whenever the engine restarts: the batches applied between two
// clears belong to one process, in order, without duplicates, and without a gap unless the stream
// is suspect. At the end all batches are there that the engine still has.
func TestAnyLinkGivesASubsequence(t *testing.T) {
	for seed := range seeds(3000) {
		rng := rand.New(rand.NewPCG(seed, 1))
		replays := seed%3 > 0
		keeps := 1000
		if seed%5 == 0 {
			keeps = 1 + rng.IntN(10)
		}
		f := newFollower(t, replays)
		e := &process{id: 1, keeps: keeps}
		var trace []string
		do := func(what string, act func()) {
			trace = append(trace, what)
			act()
			check(t, f, seed, trace)
		}
		asked := 0
		connected, closed := false, false
		answers := func(most int) {
			if f.Waits() && f.Requests() >= asked {
				asked = f.Requests()
				f.answer(e, most)
			}
		}
		for range 60 {
			switch n := rng.IntN(20); {
			case !connected:
				do("connect", func() { f.connected(closed) })
				connected, closed = true, false
			case n < 9:
				do("live", func() { f.hear(e.publish()) })
			case n < 11:
				do("lost", func() { e.publish() })
			case n < 15:
				do("answer", func() { answers(1000) })
			case n < 16 && rng.IntN(2) == 0:
				do("an answer with holes", func() {
					if f.Waits() && f.Requests() >= asked {
						asked = f.Requests()
						// The first batches in a queue are never lost.
						f.answerBut(e, 1000, func(place int) bool { return place > 1 && rng.IntN(3) == 0 })
					}
				})
			case n < 16:
				do("part of an answer", func() { answers(rng.IntN(4)) })
			case n < 17:
				connected = false
			case n < 18 && replays:
				do("give up", func() {
					if f.Waits() {
						f.giveUp()
					}
				})
			case n < 19:
				do("try all", func() { f.requestAll() })
			default:
				trace = append(trace, "new process")
				e = &process{id: e.id + 1, keeps: keeps}
				for range rng.IntN(8) {
					e.publish()
				}
				connected, closed = false, true
			}
		}
		if !replays {
			continue
		}
		do("connect", func() { f.connected(closed) })
		for range 10 {
			do("live", func() { f.hear(e.publish()) })
			do("answer", func() { answers(1000) })
		}
		do("try all", func() { f.requestAll() })
		do("answer", func() { answers(1000) })
		do("answer", func() { answers(1000) })
		if len(f.applied) == 0 {
			t.Fatalf("seed %d: in the end nothing is known of process %d with %d batches, asking %v\n%s", seed, e.id, e.published, f.Waits(), strings.Join(trace, ", "))
		}
		last := f.applied[len(f.applied)-1]
		if last != [2]uint64{e.id, e.published - 1} || keeps == 1000 && (f.State() != indexer.StateOK || len(f.applied) != int(e.published)) {
			t.Fatalf("seed %d: in the end %s of process %d with %d batches\n%s", seed, f, e.id, e.published, strings.Join(trace, ", "))
		}
	}
}

func check(t *testing.T, f *follower, seed uint64, trace []string) {
	t.Helper()
	for i, a := range f.applied {
		switch {
		case a[0] != f.applied[0][0]:
			t.Fatalf("seed %d: two processes in one: %s\n%s", seed, f, strings.Join(trace, ", "))
		case i == 0 && a[1] > 0 && f.State() == indexer.StateOK, i > 0 && a[1] <= f.applied[i-1][1], i > 0 && a[1] != f.applied[i-1][1]+1 && f.State() != indexer.StateSuspect:
			t.Fatalf("seed %d: %s\n%s", seed, f, strings.Join(slices.Clip(trace), ", "))
		}
	}
}

// A request is tried eight times, as queries over NATS are. After that all batches are requested about once a
// minute, until an answer comes.
func TestFollowerTries(t *testing.T) {
	f := newFollower(t, true)
	e := &process{id: 1, published: 3, keeps: 5}
	f.connected(false)
	f.answer(e, 9)
	e.publish()
	f.hear(e.publish())
	begin := f.now
	for f.Waits() {
		f.begin()
		f.Fail(f.now, f.id, false)
	}
	if took := f.now.Sub(begin); f.counts["replay_failed"] != events.MaxTries || took < 10*time.Second || took > 25*time.Second {
		t.Errorf("given up after %d tries in %v", f.counts["replay_failed"], took)
	}
	if f.counts["given_up"] != 1 || f.counts["retry"] != events.MaxTries-1 {
		t.Errorf("counted %v, want given_up 1, and each try but the first", f.counts)
	}
	if f.State() != indexer.StateSuspect {
		t.Errorf("the rank is %s", f.State())
	}
	for begin = f.now; !f.Waits(); {
		_, _, wait := f.Tick(f.now)
		f.now = f.now.Add(wait)
	}
	if took := f.now.Sub(begin); took < 45*time.Second || took > 75*time.Second {
		t.Errorf("all batches are requested after %v", took)
	}
	f.begin()
	for begin = f.now; ; { // no answer
		_, _, wait := f.Tick(f.now)
		if !f.Waits() {
			break
		}
		f.now = f.now.Add(wait)
	}
	if took := f.now.Sub(begin); took < 30*time.Second || took > 31*time.Second {
		t.Errorf("an answer is awaited for %v", took)
	}
	f.requestAll()
	f.answer(e, 9)
	if f.String() != "1/0 1/1 1/2 1/3 1/4 " {
		t.Errorf("in the end %s", f)
	}
}

// A rank whose first batches are missing is partial for ten minutes after the last loss, also if the engine could
// send them again.
func TestFollowerIsPartialForSomeTime(t *testing.T) {
	for _, replays := range []bool{false, true} {
		f := newFollower(t, replays)
		e := &process{id: 1, published: 3, keeps: 1}
		f.connected(false)
		f.hear(e.publish())
		f.answer(e, 9)
		for begin := f.now; f.State() == indexer.StatePartial; {
			_, _, wait := f.Tick(f.now)
			if took := f.now.Sub(begin); f.State() == indexer.StateOK && (took < 10*time.Minute || took > 11*time.Minute) {
				t.Errorf("partial for %v", took)
			}
			if f.Waits() {
				t.Fatal("what the engine does not have is requested again")
			}
			f.now = f.now.Add(wait)
		}
		if f.String() != "1/3 " {
			t.Errorf("in the end %s", f)
		}
	}
}

// A rank whose first batches are missing stays partial while an engine that does not answer is still requested: the
// engine may have them.
func TestFollowerIsPartialUntilAnAnswer(t *testing.T) {
	f := newFollower(t, true)
	e := &process{id: 1, published: 3, keeps: 50}
	f.connected(false)
	f.hear(e.publish())
	for begin, ticks := f.now, 0; f.now.Sub(begin) < time.Hour; ticks++ {
		id, _, wait := f.Tick(f.now)
		if wait < 0 || ticks > 10_000 {
			t.Fatalf("tick %d is followed by another one after %v", ticks, wait)
		}
		f.Fail(f.now, id, false)
		if f.now = f.now.Add(wait); id != 0 {
			continue
		}
		if since := f.now.Sub(begin); since > time.Minute && f.State() != indexer.StatePartial {
			t.Fatalf("after %v the rank is %s", since, f.State())
		}
	}
	if f.counts["given_up"] != 1 {
		t.Errorf("the rank was given up %d times, want once", f.counts["given_up"])
	}
	f.answer(e, 99)
	f.requestAll()
	f.answer(e, 99)
	if f.String() != "1/0 1/1 1/2 1/3 " {
		t.Errorf("in the end %s", f)
	}
}

// A batch that waits for an answer, and is in the answer as well, counts as a duplicate.
func TestABatchThatTheAnswerContainsIsADuplicate(t *testing.T) {
	p, f := &process{keeps: 10}, newFollower(t, true)
	f.Live(f.now, 0, p.body(0))
	f.Live(f.now, 2, p.body(2)) // batch 1 is missing, so this one waits
	id, _, _ := f.Tick(f.now)
	for sequence := range uint64(3) {
		f.Part(f.now, id, sequence, p.body(sequence))
	}
	f.End(f.now, id)
	if len(f.applied) != 3 || f.counts["duplicate"] != 1 || f.counts["replayed"] != 2 {
		t.Errorf("%d batches were applied, want 3; %v", len(f.applied), f.counts)
	}
}
