// SPDX-License-Identifier: Apache-2.0

package router

import (
	"slices"
	"time"
)

// collectWorse makes candidates of the best workers that may take a request and are not healthy. If no worker is
// degraded or starting, the reports of workers' health may be wrong: unhealthy and expired workers are candidates
// then. They are not if they just failed without a response, or if their probe was refused while the others'
// probes were not.
func (c *core) collectWorse(in *decisionInput, ch *choice) {
	for _, worst := range []Health{Degraded, Starting} {
		if c.collect(in, ch, worst); len(ch.candidates) > 0 {
			if worst == Degraded {
				c.addTries(ch)
			}
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

// tries are the requests that try a worker, since it was last healthy or degraded; see [core.addTries].
type tries struct {
	n     int       // at most mostStrikes
	until time.Time // no other request tries the worker before
}

// firstTry is the time after the first try in which no other request tries the worker. It doubles with each try,
// up to 16 times.
const firstTry = 2 * time.Second

func (t *tries) begin(now time.Time) {
	t.n = min(t.n+1, mostStrikes)
	t.until = now.Add(firstTry << (t.n - 1))
}

// addTries adds candidates that are not healthy, if no candidate is proved to be healthy: each is healthy only
// because it answered a request. Then probes or heartbeats may fail although the workers serve, and a worker that
// gets no request cannot show it. A worker is added that may serve all the same, once in a while, until it answers.
// addTries reports whether no candidate is proved to be healthy.
func (c *core) addTries(ch *choice) (unproved bool) {
	refusing := false
	for _, ord := range ch.candidates {
		info := c.entries[ord].info
		if !info.Unproved {
			return false
		}
		refusing = refusing || info.Refuses
	}
	ch.candidates = ch.candidates[:0]
	for i, ord := range c.order {
		e := &c.entries[ord]
		if ch.exclusions[i] == ExcludedHealth && e.info.Unproved && (refusing || !e.info.Refuses) &&
			!e.avoid.refuses(ch.time) && !ch.time.Before(e.tries.until) && !ch.time.Before(e.avoid.end()) {
			ch.exclusions[i], ch.tries = "", true
		}
		if ch.exclusions[i] == "" {
			ch.candidates = append(ch.candidates, ord)
		}
	}
	return true
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
