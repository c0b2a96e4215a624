// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// twin is an events.Follower that gets the same batches as a stream.
type twin struct {
	*events.Follower
	now     time.Time
	id      uint64 // of the last request
	applied [][2]uint64
	clears  int
	counts  map[string]int
	cleared func(body []byte) bool
}

func newTwin(replays bool, cleared func(body []byte) bool) *twin {
	w := &twin{now: time.Unix(1755000000, 0), counts: map[string]int{}, cleared: cleared}
	w.Follower = events.NewFollower(events.FollowerConfig{
		Replays: replays,
		Apply: func(body []byte) bool {
			w.applied = append(w.applied, [2]uint64{binary.BigEndian.Uint64(body), binary.BigEndian.Uint64(body[8:])})
			return w.cleared(body)
		},
		Clear:  func() { w.applied, w.clears = nil, w.clears+1 },
		Count:  func(what string, n int) { w.counts[what] += n },
		GaveUp: func() {},
	})
	return w
}

// begin sends the request that is due.
func (w *twin) begin(t testing.TB) (from uint64) {
	t.Helper()
	for range 1000 {
		id, from, wait := w.Tick(w.now)
		if w.now = w.now.Add(max(wait, time.Millisecond)); id != 0 {
			w.id = id
			return from
		}
	}
	t.Fatal("no request is sent")
	return 0
}

// The follower applies the same batches as the stream that it replaces, after every step of random worlds.
func TestTheFollowerEqualsTheStream(t *testing.T) {
	for seed := range seeds(60_000) {
		rng := rand.New(rand.NewPCG(seed, 2))
		replays, keeps := seed%3 > 0, 1000
		if seed%5 < 2 {
			keeps = 1 + rng.IntN(10)
		}
		clears := seed%7 == 0
		cleared := func(body []byte) bool { return clears && binary.BigEndian.Uint64(body[8:])%11 == 10 }
		f := newFollower(t, replays)
		f.cleared = cleared
		start := time.Unix(1755000000, 0)
		w, e := newTwin(replays, cleared), &process{id: 1, keeps: keeps}
		var trace []string
		do := func(what string, old, current func()) {
			trace = append(trace, what)
			old()
			current()
			partial, suspect := f.State()
			state := indexer.StateOK
			switch {
			case suspect:
				state = indexer.StateSuspect
			case partial:
				state = indexer.StatePartial
			}
			if partial && !suspect && w.State() == indexer.StateOK && w.now.Sub(start) >= 10*time.Minute {
				state, partial = indexer.StateOK, false
				f.Forgive() // the one difference: partial ends after 10 minutes
			}
			if !slices.Equal(f.applied, w.applied) || f.clears != w.clears || state != w.State() || f.Asking() != w.Waits() {
				t.Fatalf("seed %d: old %v, %d clears, %s, waits %v, %v\nnew %v, %d clears, %s, waits %v, %v\n%s", seed, f.applied, f.clears, state, f.Asking(), f.counts,
					w.applied, w.clears, w.State(), w.Waits(), w.counts, strings.Join(trace, ", "))
			}
		}
		tries, request := 0, 0 // failures of the old request, as rankSource counts them
		fail := func(from uint64, cut bool) {
			if f.Asks() != request {
				tries, request = 0, f.Asks()
			}
			do("fail", func() {
				if cut && f.From() > from {
					tries = 0
				} else if tries++; tries >= 8 {
					f.GiveUp()
				}
			}, func() { w.Fail(w.now, w.id, cut) })
		}
		begin := func() (from uint64) {
			from = f.Begin()
			if got := w.begin(t); got != from {
				t.Fatalf("seed %d: old requests from %d, new from %d\n%s", seed, from, got, strings.Join(trace, ", "))
			}
			return from
		}
		live := func() {
			sequence, body := e.publish()
			do("live", func() { f.FromLive(sequence, body) }, func() { w.Live(w.now, sequence, body) })
		}
		answer := func(most int, dropped func(place int) bool) {
			if !f.Asking() {
				return
			}
			from := begin()
			id := f.Asks()
			for seq := max(from, e.oldest()); seq < e.published; seq++ {
				if most--; most < 0 {
					fail(from, rng.IntN(2) == 0)
					return
				}
				if rng.IntN(30) == 0 {
					live()
				}
				if f.Asks() != id {
					return // another request is due
				}
				if dropped(int(seq - from)) {
					continue
				}
				do("part", func() { f.FromReplay(seq, e.body(seq)) }, func() { w.Part(w.now, w.id, seq, e.body(seq)) })
				if f.Asks() != id {
					return
				}
			}
			do("end", f.ReplayEnd, func() { w.End(w.now, w.id) })
		}
		whole := func(int) bool { return false }
		closed := true
		connect := func() {
			do("connect", func() { f.Connected(closed) }, func() { w.Connected(w.now, closed) })
			closed = false
		}
		connect()
		for range 80 {
			switch n := rng.IntN(20); {
			case n < 8:
				live()
			case n < 10:
				trace = append(trace, "lost")
				e.publish()
			case n < 14:
				answer(1<<20, whole)
			case n < 15:
				answer(1<<20, func(place int) bool { return place > 1 && rng.IntN(3) == 0 })
			case n < 16:
				answer(rng.IntN(4), whole)
			case n < 17:
				connect()
			case n < 18:
				for range 8 {
					if f.Asking() {
						fail(begin(), false)
					}
				}
			case n < 19:
				if rng.IntN(4) == 0 {
					do("reread", f.Reread, func() { w.Reread(w.now) })
				} else {
					do("request all", f.TryAll, func() { w.RequestAll(w.now) })
				}
				do("request more", f.More, func() { w.RequestMore(w.now) })
			default:
				trace = append(trace, "new process")
				e = &process{id: e.id + 1, keeps: keeps}
				for range rng.IntN(8) {
					e.publish()
				}
				if closed = true; rng.IntN(5) > 0 {
					connect()
				}
			}
		}
	}
}
