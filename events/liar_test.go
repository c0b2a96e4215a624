// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// An engine whose answers are false or contradict each other does not cause requests without a pause.
func TestFalseAnswersCauseFewRequests(t *testing.T) {
	for seed := range seeds(10_000) {
		rng := rand.New(rand.NewPCG(seed, 9))
		// An engine of this kind answers each request with the same places, counted from the requested batch or
		// from 0. Seed 0 is number 2^64-1 with a body, which also stands for the end of an answer.
		type place struct{ relative, offset uint64 }
		places := []place{{0, math.MaxUint64}}
		if seed > 0 {
			places = nil
			for range rng.IntN(5) {
				offsets := []uint64{0, 1, 2, 9, math.MaxUint64 - 1, math.MaxUint64}
				places = append(places, place{rng.Uint64N(2), offsets[rng.IntN(len(offsets))]})
			}
		}
		vary, end := seed == 0 || rng.IntN(2) == 0, rng.IntN(2)
		f := newFollower(t, true)
		f.connected(false)
		for i := range rng.Uint64N(4) {
			f.hear(i, make([]byte, 16))
		}
		requests, body := 0, make([]byte, 16)
		for begin := f.now; f.now.Sub(begin) < time.Minute; {
			id, from, wait := f.Tick(f.now)
			if id == 0 {
				f.now = f.now.Add(wait)
				continue
			}
			if requests++; requests > 1000 {
				t.Fatalf("seed %d: %d requests in %v; %v", seed, requests, f.now.Sub(begin), f.counts)
			}
			more := true
			for i := 0; more && i < len(places); i++ {
				if vary {
					binary.BigEndian.PutUint64(body, rng.Uint64())
				}
				more = f.Part(f.now, id, places[i].relative*from+places[i].offset, body)
			}
			switch {
			case !more:
			case end == 0:
				f.End(f.now, id)
			default:
				f.Fail(f.now, id, false)
			}
		}
	}
}
