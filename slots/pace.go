// SPDX-License-Identifier: Apache-2.0

package slots

import (
	"math/bits"
	"slices"
)

const (
	overtakings  = 4 // among the last 16 first tokens: with as many the worker reorders
	leastSamples = 5
)

// pace is how fast, and in which order, a worker computes. It outlives its slots.
type pace struct {
	samples    [15]float64 // tokens a second
	taken      int         // samples so far
	rate       float64     // their median; 0 = unknown
	fit        fit
	late       uint16 // bits of the last first tokens: 1 for those that came after that of a later request
	registered bool   // the worker registered that it reorders prompts
}

func (p *pace) reorders() bool { return p.registered || bits.OnesCount16(p.late) >= overtakings }

func (p *pace) sample(rate float64) {
	p.samples[p.taken%len(p.samples)] = rate
	p.taken++
	if p.taken < leastSamples {
		return
	}
	sorted := p.samples
	some := sorted[:min(p.taken, len(sorted))]
	slices.Sort(some)
	p.rate = some[len(some)/2]
}

// fit is the line through the worker's last samples of times by tokens, as Theil and Sen estimate it: its slope is the
// median of the slopes between two samples. A quarter of the samples may be wrong, as after a pause of the engine.
// Unlike those of the rate, samples may have few tokens: they show the time that a prompt needs besides its tokens.
type fit struct {
	samples         [15]struct{ tokens, seconds float64 }
	taken           int
	perToken, fixed float64 // s; 0 = unknown
}

const (
	leastApart = 256 // tokens between two samples whose slope counts
	leastPairs = 24  // with fewer slopes there is no fit
	fitEvery   = 8   // samples
)

func (f *fit) add(tokens, seconds float64) {
	f.samples[f.taken%len(f.samples)] = struct{ tokens, seconds float64 }{tokens, seconds}
	f.taken++
	if f.perToken > 0 && f.taken%fitEvery > 0 {
		return
	}
	var slopes [len(f.samples) * (len(f.samples) - 1) / 2]float64
	n, some := 0, f.samples[:min(f.taken, len(f.samples))]
	for i, a := range some {
		for _, b := range some[:i] {
			if apart := a.tokens - b.tokens; apart >= leastApart || apart <= -leastApart {
				slopes[n] = (a.seconds - b.seconds) / apart
				n++
			}
		}
	}
	f.perToken, f.fixed = 0, 0
	if n < leastPairs {
		return
	}
	slices.Sort(slopes[:n])
	if f.perToken = max(0, slopes[n/2]); f.perToken == 0 {
		return
	}
	for i, a := range some {
		slopes[i] = a.seconds - f.perToken*a.tokens
	}
	slices.Sort(slopes[:len(some)])
	f.fixed = max(0, slopes[len(some)/2])
}
