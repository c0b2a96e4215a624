// SPDX-License-Identifier: Apache-2.0

package router

import "slices"

// collectWorse makes candidates of the best workers that may take a request and are not healthy. If no worker is
// degraded or starting, the reports of workers' health may be wrong: unhealthy and expired workers are candidates
// then. They are not if they just failed without a response, or if their probe was refused while the others'
// probes were not.
func (c *core) collectWorse(in *decisionInput, ch *choice) {
	for _, worst := range []Health{Degraded, Starting} {
		if c.collect(in, ch, worst); len(ch.candidates) > 0 {
			return
		}
	}
	if ch.part == prefillPart && in.PrefillPinned == nil && in.Split != SplitAlways && in.decode.takes(whole) {
		return // the decode worker computes the prompt
	}
	c.collect(in, ch, Expired)
	c.leaveOut(ch, ExcludedRefused, func(e *entry) bool { return e.avoid.refuses(ch.time) })
	reachable := slices.ContainsFunc(ch.candidates, func(ord int) bool { return !c.entries[ord].info.Refuses })
	if reachable {
		c.leaveOut(ch, ExcludedRefused, func(e *entry) bool { return e.info.Refuses })
	}
	ch.panics = len(ch.candidates) > 0
}

// collectPinned makes a candidate of the pinned worker if it is as good as the workers that a request without a
// pin would get.
func (c *core) collectPinned(in *decisionInput, ch *choice) {
	pinned := in.Pinned
	in.Pinned = nil
	c.collectWorse(in, ch)
	in.Pinned = pinned
	c.leaveOut(ch, ExcludedPin, func(e *entry) bool { return e.exclude(in, ch.part) == ExcludedPin })
}

// leaveOut removes the candidates that the function selects.
func (c *core) leaveOut(ch *choice, why Exclusion, selects func(*entry) bool) {
	ch.candidates = slices.DeleteFunc(ch.candidates, func(ord int) bool {
		e := &c.entries[ord]
		if !selects(e) {
			return false
		}
		at, _ := c.search(e.worker)
		ch.exclusions[at] = why
		return true
	})
}
