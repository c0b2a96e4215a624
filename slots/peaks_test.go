// SPDX-License-Identifier: Apache-2.0

package slots_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvroute/kvroute/slots"
)

// The peak is compared with a list of all past loads: it covers the largest load of the
// last PeakSpan, and no load older than two PeakSpans.
func TestPeakEqualsSlowModel(t *testing.T) {
	type moment struct {
		at   time.Time
		load slots.Load
	}
	fields := func(l slots.Load) [3]int {
		return [3]int{l.Requests, l.Waiting, l.Blocks}
	}
	for seed := range uint64(10) {
		rng := rand.New(rand.NewPCG(seed, 19))
		var s slots.Table
		var history [3][]moment
		now := at(0)
		for step := range 1000 {
			if rng.IntN(3) == 0 {
				now = now.Add(time.Duration(rng.IntN(400)) * time.Millisecond)
			}
			if rng.IntN(200) == 0 {
				now = now.Add(time.Duration(rng.IntN(5000)) * time.Millisecond)
			}
			id := fmt.Sprint(rng.IntN(30))
			switch w := rng.IntN(3); rng.IntN(8) {
			case 0, 1, 2, 3:
				s.Add(now, id, &slots.Booking{Worker: w, Blocks: chain(rng, 6), PromptTokens: rng.IntN(100), BlockSize: 16, Owned: true})
			case 4, 5:
				s.MarkPrefillCompleted(now, id)
			case 6, 7:
				s.Finish(now, id)
			}
			if w := rng.IntN(3); rng.IntN(300) == 0 {
				s.RemoveWorker(w)
				history[w] = nil
			}
			for w := range history {
				h := append(history[w], moment{now, s.Load(w)})
				history[w] = h
				if rng.IntN(4) > 0 {
					continue
				}
				got := fields(s.Peak(now, w))
				var least, most [3]int
				for i, m := range h {
					until := now
					if i+1 < len(h) {
						until = h[i+1].at
					}
					for f, v := range fields(m.load) {
						if now.Sub(until) <= slots.PeakSpan {
							least[f] = max(least[f], v)
						}
						if now.Sub(until) <= 2*slots.PeakSpan {
							most[f] = max(most[f], v)
						}
					}
				}
				for f := range got {
					if got[f] < least[f] || got[f] > most[f] {
						t.Fatalf("seed %d, step %d: the peak of worker %d is %v, want %v to %v", seed, step, w, got, least, most)
					}
				}
			}
		}
	}
	var s slots.Table
	if s.Peak(at(0), 0) != (slots.Load{}) || s.Peak(at(0), -1) != (slots.Load{}) {
		t.Error("a worker without slots has a peak")
	}
}
