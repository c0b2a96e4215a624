// SPDX-License-Identifier: Apache-2.0

package slots

import (
	"cmp"
	"time"
)

// Grow estimates the length of outputs that are not reported. Each request on the worker
// with a first token gets perSecond tokens for each second since the first token, or since
// the last call, up to the expected length, if any. A request whose output was ever
// reported by [Table.AddOutputTokens] is not changed. Grow is no sign of life.
//
// Behind a proxy the tokens of a response are not seen, because that would take a message
// for each. Grow walks over the worker's decoding requests, so call it a few times a
// second, not for every decision.
func (s *Table) Grow(now time.Time, worker int, perSecond float64) {
	if worker < 0 || worker >= len(s.workers) {
		return
	}
	since := now.Sub(s.epoch)
	for next := s.workers[worker].estimated.head; next != 0; {
		n := next - 1
		t := &s.slots[n]
		next = t.next
		d := since - t.grown
		if d <= 0 {
			continue
		}
		t.grown = since
		t.estimate = min(t.estimate+d.Seconds()*perSecond, float64(cmp.Or(t.ExpectedOutput, MostTokens)))
		if k := int(t.estimate) - t.out; k > 0 {
			s.lengthen(n, k)
		}
	}
}

// AddOutputTokens notes that a request has k more tokens of output. Each block that they
// begin, beyond the prompt's last one, is one more on the worker. From then on
// [Table.Grow] no longer estimates this output. It returns false, and changes nothing, if
// the id has no slot.
func (s *Table) AddOutputTokens(now time.Time, id string, k int) bool {
	n, exists := s.ids[id]
	if !exists {
		return false
	}
	t := &s.slots[n]
	t.seen = now.Sub(s.epoch)
	if k <= 0 {
		return true
	}
	k = min(k, MostTokens)
	if !t.outputReported {
		if t.outputReported = true; t.linked {
			s.unlink(&s.workers[t.Worker].estimated, n)
			t.linked = false
		}
		k -= t.out
	}
	s.lengthen(n, min(k, MostTokens-t.out))
	if t.started {
		s.LearnOutputRate(t.Worker, t.out, t.seen-t.first)
	}
	return true
}

// ReportOutput is [Table.AddOutputTokens] for the length of the whole output.
func (s *Table) ReportOutput(now time.Time, id string, tokens int) (taken bool) {
	n, exists := s.ids[id]
	if !exists {
		return false
	}
	if t := &s.slots[n]; t.outputReported {
		tokens -= t.out
	}
	return s.AddOutputTokens(now, id, tokens)
}

// OutputRate returns the tokens a second of a request on the worker, by the reported
// outputs there; newer reports count more. It is 0 without reports.
func (s *Table) OutputRate(worker int) float64 {
	return s.history(worker).outputRate
}

const (
	// rateAfter is how long an output must have taken for its rate to count.
	rateAfter = time.Second
	// rateWeight is the weight of a new report in the mean.
	rateWeight = 1. / 16
)

// LearnOutputRate notes how long the output of a request on a worker took, from its first token. Times
// below a second do not count.
func (s *Table) LearnOutputRate(worker, tokens int, taken time.Duration) {
	if taken < rateAfter || worker < 0 {
		return
	}
	s.grow(worker)
	rate := &s.histories[worker].outputRate
	if now := float64(tokens) / taken.Seconds(); *rate == 0 {
		*rate = now
	} else {
		*rate += (now - *rate) * rateWeight
	}
}

// lengthen adds k tokens, which may be negative, to the output of a slot.
func (s *Table) lengthen(n int32, k int) {
	t := &s.slots[n]
	t.out += k
	w := &s.workers[t.Worker]
	if t.started {
		w.DecodeTokens += k
	}
	if size := t.BlockSize; !t.BlocksUntracked && size > 0 {
		output := blocks(t.PromptTokens+t.out, size) - blocks(t.PromptTokens, size)
		w.Blocks += output - t.output
		t.output = output
	}
	s.reweigh(n)
}

// blocks returns the number of blocks that hold the tokens, rounded up.
func blocks(tokens, blockSize int) int {
	return (tokens + blockSize - 1) / blockSize
}
