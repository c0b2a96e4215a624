// SPDX-License-Identifier: Apache-2.0

package router

import (
	"slices"
	"time"
)

// collectWorse makes candidates of the best workers that may take a request and are not healthy. These are degraded
// workers; then workers that are avoided, with those that may serve all the same (see [core.addTries]). If there are
// none, the reports of workers' health may be wrong: unhealthy and expired workers are candidates if nothing but the
// silence of probes or heartbeats speaks against them, then starting workers, then all unhealthy and expired ones.
// Workers are left out that just failed without a response, or whose probe was refused while the others' probes were
// not. An avoided worker is a candidate only if all candidates are avoided.
func (c *core) collectWorse(in *decisionInput, ch *choice) {
	if c.collect(in, ch, Degraded); len(ch.candidates) > 0 {
		c.leaveOutUnlessAll(ch, ExcludedFailing, func(e *entry) bool { return c.avoids(ch.time, e) })
		c.addTries(ch)
		return
	}
	if ch.part == prefillPart && in.PrefillPinned == nil && in.Split != SplitAlways && in.decode.takes(whole) {
		return // the decode worker computes the prompt
	}
	c.collect(in, ch, Expired)
	starting := func(e *entry) bool { return e.info.Health == Starting }
	c.leaveOut(ch, ExcludedRefused, func(e *entry) bool { return e.avoid.refuses(ch.time) && !starting(e) })
	c.leaveOutUnlessAll(ch, ExcludedRefused, func(e *entry) bool { return e.info.Refuses && !starting(e) })
	c.leaveOutUnlessAll(ch, ExcludedHealth, func(e *entry) bool { return starting(e) || !e.info.Unproved })
	c.leaveOutUnlessAll(ch, ExcludedHealth, func(e *entry) bool { return !starting(e) })
	c.leaveOutUnlessAll(ch, ExcludedFailing, func(e *entry) bool { return c.avoids(ch.time, e) })
	ch.panics = len(ch.candidates) > 0 && !starting(&c.entries[ch.candidates[0]])
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
// because it answered a request, or it is avoided. Then probes or heartbeats may fail although the workers serve,
// and a worker that gets no request cannot show it. A worker is added that may serve all the same, once in a while,
// until it answers. addTries reports whether no candidate is proved to be healthy.
func (c *core) addTries(ch *choice) (unproved bool) {
	refusing := false
	for _, ord := range ch.candidates {
		e := &c.entries[ord]
		if !e.info.Unproved && !c.avoids(ch.time, e) {
			return false
		}
		refusing = refusing || e.info.Refuses
	}
	ch.candidates = ch.candidates[:0]
	for i, ord := range c.order {
		e := &c.entries[ord]
		if ch.exclusions[i] == ExcludedHealth && e.info.Unproved && (refusing || !e.info.Refuses) &&
			!e.avoid.refuses(ch.time) && !ch.time.Before(e.tries.until) && !c.avoids(ch.time, e) {
			ch.exclusions[i], ch.tries = "", true
		}
		if ch.exclusions[i] == "" {
			ch.candidates = append(ch.candidates, ord)
		}
	}
	return true
}

// collectPinned makes a candidate of the pinned worker if it is as good as the workers that a request without a
// pin would get, or if nothing but the silence of its probes or heartbeats speaks against it.
func (c *core) collectPinned(in *decisionInput, ch *choice) {
	pinned := in.Pinned
	in.Pinned = nil
	c.collectWorse(in, ch)
	in.Pinned = pinned
	other := func(e *entry) bool { return e.exclude(in, ch.part) == ExcludedPin }
	if c.leaveOut(ch, ExcludedPin, other); len(ch.candidates) > 0 {
		return
	}
	// No other worker may take the request: the worker gets it if it may serve.
	c.collect(in, ch, Expired)
	c.leaveOut(ch, ExcludedHealth, func(e *entry) bool {
		return !e.info.Unproved || e.info.Refuses || e.avoid.refuses(ch.time)
	})
}

// addBound makes a candidate of the worker that a hard session is bound to, since no other worker may take the
// request: if it is avoided because of its answers, or if nothing but the silence of its probes or heartbeats speaks
// against it.
func (c *core) addBound(in *decisionInput, ch *choice) {
	ord, bound := c.sessions.worker(ch.time, in.session)
	if !bound || slices.Contains(ch.candidates, ord) {
		return
	}
	e := &c.entries[ord]
	mayServe := e.info.Health <= Degraded || e.info.Unproved && !e.info.Refuses
	if e.exclude(in, ch.part) != "" || !mayServe || e.avoid.refuses(ch.time) {
		return
	}
	at, _ := c.search(e.worker)
	ch.exclusions[at] = ""
	place, _ := slices.BinarySearchFunc(ch.candidates, e.worker, func(other int, w Worker) int { return c.entries[other].worker.Compare(w) })
	ch.candidates = slices.Insert(ch.candidates, place, ord)
}

// leaveOutUnlessAll is leaveOut unless that would remove all candidates.
func (c *core) leaveOutUnlessAll(ch *choice, why Exclusion, selects func(*entry) bool) {
	if slices.ContainsFunc(ch.candidates, func(ord int) bool { return !selects(&c.entries[ord]) }) {
		c.leaveOut(ch, why, selects)
	}
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
