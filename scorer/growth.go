// SPDX-License-Identifier: Apache-2.0

package scorer

import "time"

// Grow makes the outputs longer that nobody tells of: each request on the worker
// with its first token has perSecond more tokens for each second since then, or
// since the last call, up to the length that is expected, if any. A request whose
// output [Slots.AddOutputTokens] tells of is left alone, for good. Grow is no sign
// of life.
//
// Behind a proxy nobody sees the tokens of a response, for that would be a message
// for each; the time that they take is known well enough. It costs a walk over the
// worker's decoding requests, so it should be called a few times a second, not for
// every decision.
func (s *Slots) Grow(now time.Time, worker int, perSecond float64) {
	if worker < 0 || worker >= len(s.workers) {
		return
	}
	since := now.Sub(s.epoch)
	for next := s.workers[worker].untold.head; next != 0; {
		n := next - 1
		t := &s.slots[n]
		next = t.next
		d := since - t.grown
		if d <= 0 {
			continue
		}
		t.grown = since
		t.estimate += d.Seconds() * perSecond
		most := MostTokens
		if t.expected > 0 {
			most = t.expected
		}
		t.estimate = min(t.estimate, float64(most))
		if k := int(t.estimate) - t.out; k > 0 {
			s.lengthen(n, k)
		}
	}
}

// OutputRate returns how many tokens a second a request on the worker makes by what
// was told of others there; 0 if nothing was. Newer ones count more.
func (s *Slots) OutputRate(worker int) float64 {
	if worker < 0 || worker >= len(s.rates) {
		return 0
	}
	return s.rates[worker]
}

const (
	// rateAfter is how long an output must have taken to say something of the rate.
	rateAfter = time.Second
	// rateWeight is what one telling counts against those before it.
	rateWeight = 1. / 16
)

// learn takes an output that was told of just now for the rate of its worker.
func (s *Slots) learn(t *slot) {
	taken := t.seen - t.first
	if !t.started || taken < rateAfter {
		return
	}
	for len(s.rates) <= int(t.worker) {
		s.rates = append(s.rates, 0)
	}
	rate := &s.rates[t.worker]
	if now := float64(t.out) / taken.Seconds(); *rate == 0 {
		*rate = now
	} else {
		*rate += (now - *rate) * rateWeight
	}
}

// lengthen adds k tokens, which may be negative, to the output of a slot.
func (s *Slots) lengthen(n int32, k int) {
	t := &s.slots[n]
	t.out += k
	w := &s.workers[t.worker]
	if t.started {
		w.decode += k
	}
	if size := int(t.blockSize); t.blocks && size > 0 {
		output := blocks(t.prompt+t.out, size) - blocks(t.prompt, size)
		w.blocks += output - t.output
		t.output = output
	}
	s.reweigh(n)
}
