// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/engines"
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

// follower is a stream, the batches that it applied since the last clear, and the connections to
// an engine.
type follower struct {
	*engines.Stream
	t       testing.TB
	applied [][2]uint64 // process and sequence
	clears  int
	counts  map[string]int
	cleared func(body []byte) bool
}

func newFollower(t testing.TB, replays bool) *follower {
	f := &follower{t: t, counts: map[string]int{}}
	f.Stream = engines.NewStream(replays, func(body []byte) bool {
		f.applied = append(f.applied, [2]uint64{binary.BigEndian.Uint64(body), binary.BigEndian.Uint64(body[8:])})
		return f.cleared != nil && f.cleared(body)
	}, func() {
		f.applied = nil
		f.clears++
	}, func(outcome string, n int) { f.counts[outcome] += n })
	return f
}

// answer lets a process answer the pending request with up to most batches.
func (f *follower) answer(p *process, most int) { f.answerBut(p, most, nil) }

// answerBut is answer without the batches at some places of the answer.
func (f *follower) answerBut(p *process, most int, dropped func(place int) bool) {
	id, from := f.Asks(), f.Begin()
	for seq := max(from, p.oldest()); seq < p.published; seq++ {
		if most--; most < 0 {
			return // the answer ends early
		}
		if place := int(seq - max(from, p.oldest())); dropped != nil && dropped(place) {
			continue
		}
		f.FromReplay(seq, p.body(seq))
		if f.Asks() != id {
			return // another request was sent meanwhile
		}
	}
	f.ReplayEnd()
}

func (f *follower) String() string {
	var s strings.Builder
	for _, a := range f.applied {
		fmt.Fprintf(&s, "%d/%d ", a[0], a[1])
	}
	partial, suspect := f.State()
	if partial {
		s.WriteString("partial ")
	}
	if suspect {
		s.WriteString("suspect ")
	}
	return s.String()
}

func TestStream(t *testing.T) {
	p := func(n int) *process { return &process{id: 1, published: uint64(n), keeps: 5} }
	live := func(f *follower, p *process, n int) {
		for range n {
			f.FromLive(p.publish())
		}
	}
	// firstLost brings f into a partial state: the engine kept no batch when it was asked.
	firstLost := func(f *follower) *process {
		e := &process{id: 1}
		f.Connected(false)
		e.publish()
		live(f, e, 1)
		for range 3 {
			f.answer(e, 9)
		}
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
			f.Connected(false)
			f.answer(e, 9)
			live(f, e, 2)
		}, "1/0 1/1 ", 0},
		{"late, live while the answer comes", true, func(f *follower) {
			e := p(2)
			f.Connected(false)
			live(f, e, 2)
			f.answer(e, 9)
			live(f, e, 1)
		}, "1/0 1/1 1/2 1/3 1/4 ", 0},
		{"too late", true, func(f *follower) {
			e := p(7)
			f.Connected(false)
			f.answer(e, 9)
		}, "1/2 1/3 1/4 1/5 1/6 partial ", 0},
		{"late, and nobody to ask", false, func(f *follower) {
			e := p(1)
			f.Connected(false)
			live(f, e, 2)
		}, "1/1 1/2 partial ", 0},
		{"a gap is repaired", true, func(f *follower) {
			e := p(0)
			f.Connected(false)
			f.answer(e, 9)
			live(f, e, 1)
			e.publish()
			live(f, e, 2)
			f.answer(e, 9)
		}, "1/0 1/1 1/2 1/3 ", 0},
		{"a gap that nobody can repair", false, func(f *follower) {
			e := p(0)
			f.Connected(false)
			live(f, e, 1)
			e.publish()
			live(f, e, 1)
		}, "1/0 1/2 suspect ", 0},
		{"a gap too old", true, func(f *follower) {
			e := p(0)
			f.Connected(false)
			f.answer(e, 9)
			live(f, e, 1)
			for range 7 {
				e.publish()
			}
			live(f, e, 1)
			f.answer(e, 9)
		}, "1/0 1/4 1/5 1/6 1/7 1/8 suspect ", 0},
		{"a question that is never answered", true, func(f *follower) {
			e := p(0)
			f.Connected(false)
			f.answer(e, 9)
			live(f, e, 1)
			e.publish()
			live(f, e, 2)
			f.GiveUp()
		}, "1/0 1/2 1/3 suspect ", 0},
		{"which succeeds later", true, func(f *follower) {
			e := p(0)
			f.Connected(false)
			f.answer(e, 9)
			live(f, e, 1)
			e.publish()
			live(f, e, 2)
			f.GiveUp()
			f.TryAll()
			live(f, e, 1)
			f.answer(e, 9)
		}, "1/0 1/1 1/2 1/3 1/4 ", 1},
		{"a new process, seen by its numbers", false, func(f *follower) {
			e := p(0)
			f.Connected(false)
			live(f, e, 3)
			live(f, &process{id: 2, keeps: 5}, 2)
		}, "2/0 2/1 ", 1},
		{"a new process that is ahead, seen by the closed port", false, func(f *follower) {
			e := p(0)
			f.Connected(false)
			live(f, e, 1)
			f.Connected(true)
			live(f, &process{id: 2, published: 1, keeps: 5}, 1)
		}, "2/1 partial ", 1},
		{"the same process after a lost connection", true, func(f *follower) {
			e := p(0)
			f.Connected(false)
			f.answer(e, 9)
			live(f, e, 2)
			e.publish()
			f.Connected(true)
			f.answer(e, 9)
			live(f, e, 1)
		}, "1/0 1/1 1/2 1/3 ", 0},
		{"a new process, silent so far", true, func(f *follower) {
			e := p(0)
			f.Connected(false)
			f.answer(e, 9)
			live(f, e, 2)
			f.Connected(false)
			e = &process{id: 2, keeps: 5}
			f.answer(e, 9)
			f.answer(e, 9)
		}, "", 1},
		{"a new process that is ahead", true, func(f *follower) {
			e := p(0)
			f.Connected(false)
			f.answer(e, 9)
			live(f, e, 2)
			f.Connected(false)
			e = &process{id: 2, published: 4, keeps: 5}
			live(f, e, 1)
			f.answer(e, 9)
			f.answer(e, 9)
		}, "2/0 2/1 2/2 2/3 2/4 ", 1},
		{"an answer in two parts", true, func(f *follower) {
			e := p(4)
			f.Connected(false)
			f.answer(e, 2)
			f.answer(e, 9)
		}, "1/0 1/1 1/2 1/3 ", 0},
		{"an answer that lacks something inside", true, func(f *follower) {
			e := p(5)
			f.Connected(false)
			f.answerBut(e, 9, func(place int) bool { return place == 2 })
			f.answer(e, 9)
		}, "1/0 1/1 1/2 1/3 1/4 ", 0},
		{"each time another thing", true, func(f *follower) {
			e := &process{id: 1, published: 9, keeps: 9}
			f.Connected(false)
			for range 3 {
				f.answerBut(e, 9, func(place int) bool { return place == 3 })
			}
			f.answer(e, 9)
		}, "1/0 1/1 1/2 1/3 1/4 1/5 1/6 1/7 1/8 ", 0},
		{"the same thing, over another connection", true, func(f *follower) {
			e := p(5)
			f.Connected(false)
			f.answerBut(e, 9, func(place int) bool { return place == 2 })
			f.Connected(false)
			f.answerBut(e, 9, func(place int) bool { return place == 1 })
			f.answer(e, 9)
		}, "1/0 1/1 1/2 1/3 1/4 ", 0},
		{"each time the same thing", true, func(f *follower) {
			e := p(5)
			f.Connected(false)
			f.answerBut(e, 9, func(place int) bool { return place == 2 || place == 3 })
			f.answerBut(e, 9, func(place int) bool { return place == 1 || place == 2 })
			f.TryAll()
			f.answer(e, 9) // no request is pending
		}, "1/0 1/1 1/4 suspect ", 0},
		{"a partial state stays partial if nobody answers the request of all batches", true, func(f *follower) {
			e := firstLost(f)
			f.TryAll()
			live(f, e, 1)
			f.GiveUp()
			live(f, e, 1)
		}, "1/1 1/2 1/3 partial ", 0},
		{"and if the engine no longer has the first batches", true, func(f *follower) {
			e := firstLost(f)
			f.TryAll()
			e.keeps = 1
			f.answer(e, 9)
		}, "1/1 partial ", 0},
		{"a connection that ends during the request of all batches", true, func(f *follower) {
			e := firstLost(f)
			f.TryAll()
			e.publish()
			f.Connected(false)
			f.GiveUp()
		}, "1/1 partial suspect ", 0},
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
func TestOnlyWhatMayBeThereIsAskedForAgain(t *testing.T) {
	for name, c := range map[string]struct {
		published int
		answers   bool
		again     bool
	}{"it is gone": {7, true, false}, "no answer": {7, false, true}, "all is known": {3, true, false}} {
		f := newFollower(t, true)
		f.Connected(false)
		if c.answers {
			f.answer(&process{id: 1, published: uint64(c.published), keeps: 5}, 9)
		} else {
			f.GiveUp()
		}
		asks := f.Asks()
		f.TryAll()
		if again := f.Asks() > asks; again != c.again {
			t.Errorf("%s: asked again: %v", name, again)
		}
	}
}

func TestWaitingForAnAnswerIsBounded(t *testing.T) {
	f := newFollower(t, true)
	e := &process{id: 1, keeps: 1 << 20}
	e.publish()
	f.Connected(false)
	for range 5000 {
		f.FromLive(e.publish())
	}
	if _, suspect := f.State(); suspect || f.counts["buffer_full"] != 1 || len(f.applied) != 5000 {
		t.Errorf("%d batches of 5,000 were applied; %v", len(f.applied), f.counts)
	}
	f.TryAll()
	f.answer(e, 1<<20)
	if partial, _ := f.State(); partial || len(f.applied) != 5001 {
		t.Errorf("after a full answer %d batches of 5,001 are there", len(f.applied))
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
			if f.Asking() && f.Asks() >= asked {
				asked = f.Asks()
				f.answer(e, most)
			}
		}
		for range 60 {
			switch n := rng.IntN(20); {
			case !connected:
				do("connect", func() { f.Connected(closed) })
				connected, closed = true, false
			case n < 9:
				do("live", func() { f.FromLive(e.publish()) })
			case n < 11:
				do("lost", func() { e.publish() })
			case n < 15:
				do("answer", func() { answers(1000) })
			case n < 16 && rng.IntN(2) == 0:
				do("an answer with holes", func() {
					if f.Asking() && f.Asks() >= asked {
						asked = f.Asks()
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
					if f.Asking() {
						f.GiveUp()
					}
				})
			case n < 19:
				do("try all", func() { f.TryAll() })
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
		do("connect", func() { f.Connected(closed) })
		for range 10 {
			do("live", func() { f.FromLive(e.publish()) })
			do("answer", func() { answers(1000) })
		}
		do("try all", func() { f.TryAll() })
		do("answer", func() { answers(1000) })
		do("answer", func() { answers(1000) })
		if len(f.applied) == 0 {
			t.Fatalf("seed %d: in the end nothing is known of process %d with %d batches, asking %v\n%s", seed, e.id, e.published, f.Asking(), strings.Join(trace, ", "))
		}
		last := f.applied[len(f.applied)-1]
		partial, suspect := f.State()
		if last != [2]uint64{e.id, e.published - 1} || keeps == 1000 && (partial || suspect || len(f.applied) != int(e.published)) {
			t.Fatalf("seed %d: in the end %s of process %d with %d batches\n%s", seed, f, e.id, e.published, strings.Join(trace, ", "))
		}
	}
}

func check(t *testing.T, f *follower, seed uint64, trace []string) {
	t.Helper()
	partial, suspect := f.State()
	for i, a := range f.applied {
		switch {
		case a[0] != f.applied[0][0]:
			t.Fatalf("seed %d: two processes in one: %s\n%s", seed, f, strings.Join(trace, ", "))
		case i == 0 && a[1] > 0 && !partial, i > 0 && a[1] <= f.applied[i-1][1], i > 0 && a[1] != f.applied[i-1][1]+1 && !suspect:
			t.Fatalf("seed %d: %s\n%s", seed, f, strings.Join(slices.Clip(trace), ", "))
		}
	}
}
