// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/router"
)

// With a queue threshold, a request may wait in its router's queue, as in package router. After each
// event the simulation takes the requests that have left the queues, in the order in which they
// left, and sends them to their workers. The queue refuses a request if the queue is full, or if the
// request has waited for QueueWait: kvroute then answers the client with an error. A client of the
// simulation does not try again.
//
// Priorities change the order in the queue only. Engines serve requests in the order in which they
// come.

// admission is the course of a request before a router has decided.
type admission struct {
	strict  int     // priorities
	jump    float64 // s, or weight
	waits   bool
	refused bool
	queued  bool  // the request was in a queue
	since   int64 // when the request entered the queue, ns
	waited  int64 // ns in queues
}

// prioritised reports whether the request should come before others.
func (a *admission) prioritised() bool { return a.strict > 0 || a.jump > 0 }

// prioritise gives each request its priorities: those of the trace, or for a share of the
// requests those of the scenario.
func (s *sim) prioritise(rng *rand.Rand) {
	for i := range s.states {
		state, r := &s.states[i], &s.reqs[i]
		if state.strict, state.jump = r.StrictPriority, r.Priority; rng.Float64() < s.PriorityShare {
			state.strict, state.jump = s.StrictPriority, s.Priority
		}
	}
}

// wait notes that a request waits in its router's queue, and plans the end of its time.
func (s *sim) wait(req int32) {
	state := &s.states[req]
	state.waits, state.queued, state.since = true, true, s.now
	s.waiting++
	s.local, s.sequence = nil, nil // the router reads them until it decides
	r, since := s.routers[state.router].router, s.now
	s.queue.plan(s.now+s.QueueWait.Nanoseconds(), func() {
		if state.waits && state.since == since {
			r.Free(state.id) // as the timer of a caller that blocks
		}
	})
}

// leaveQueues sends the requests that have left the routers' queues to their workers.
func (s *sim) leaveQueues() {
	for left := s.waiting > 0; left; {
		left = false
		for _, r := range s.routers {
			r.router.Decided(s.ctx, func(id string, d router.Decision, err error) {
				left = true
				req := int32(bench.Must(strconv.Atoi(id)))
				state := &s.states[req]
				state.waits, state.waited = false, state.waited+s.now-state.since
				s.waiting--
				if s.decided != nil {
					s.decided(req, d)
				}
				s.routed(req, d, err)
			})
		}
	}
}

// refuses reports whether an error is a refusal of the queue.
func refuses(err error) bool {
	return errors.Is(err, router.ErrQueueFull) || errors.Is(err, router.ErrFreed)
}

// refuse ends a request that the queue refused.
func (s *sim) refuse(req int32) {
	s.free(req)
	state := &s.states[req]
	state.refused, state.end = true, s.now
	s.over(req)
}

// queueResult has the measures of the routers' queues. Times are in seconds.
type queueResult struct {
	Waited  int `json:"waited"`  // requests that were in a queue
	Refused int `json:"refused"` // because the queue was full, or after QueueWait
	// Wait is the time in the queue, of served requests with and without a wait.
	Wait bench.Quantiles `json:"wait_s"`
	// Requests with a priority, and those without; nil if no request has one.
	Prioritised *queueClass `json:"prioritised,omitempty"`
	Others      *queueClass `json:"others,omitempty"`
}

// queueClass has the measures of the requests with or without a priority. Times are those of
// served requests.
type queueClass struct {
	Requests int             `json:"requests"`
	Refused  int             `json:"refused"`
	Wait     bench.Quantiles `json:"wait_s"`
	TTFT     bench.Quantiles `json:"ttft_s"`
	E2E      bench.Quantiles `json:"e2e_s"`
}

// queueResult returns nil without a queue. Foreign requests do not count.
func (s *sim) queueResult() *queueResult {
	if s.RouterQueueThreshold == nil {
		return nil
	}
	var r queueResult
	var all []float64
	var classes [2]struct {
		queueClass
		wait, ttft, e2e []float64
	}
	for i := range s.states {
		state := &s.states[i]
		if state.router < 0 {
			continue
		}
		if state.queued {
			r.Waited++
		}
		c := &classes[0]
		if state.prioritised() {
			c = &classes[1]
		}
		c.Requests++
		if state.refused {
			r.Refused++
			c.Refused++
			continue
		}
		since := func(t int64) float64 { return time.Duration(t - state.due).Seconds() }
		wait := time.Duration(state.waited).Seconds()
		all = append(all, wait)
		c.wait, c.ttft, c.e2e = append(c.wait, wait), append(c.ttft, since(state.first)), append(c.e2e, since(state.end))
	}
	r.Wait = bench.NewQuantiles(all)
	if classes[1].Requests == 0 {
		return &r
	}
	for i := range classes {
		c := &classes[i]
		c.Wait, c.TTFT, c.E2E = bench.NewQuantiles(c.wait), bench.NewQuantiles(c.ttft), bench.NewQuantiles(c.e2e)
	}
	r.Others, r.Prioritised = &classes[0].queueClass, &classes[1].queueClass
	return &r
}

// writeCells writes the columns of the queue, with classes also those of priorities.
func (r *queueResult) writeCells(w io.Writer, classes bool) {
	fmt.Fprintf(w, "%d\t%d\t%.3f\t%.2f\t", r.Waited, r.Refused, r.Wait.Mean, r.Wait.P99)
	if !classes {
		return
	}
	for _, c := range []*queueClass{r.Prioritised, r.Others} {
		if c == nil { // no request of this seed has a priority
			fmt.Fprint(w, "-\t-\t-\t")
		} else {
			fmt.Fprintf(w, "%.3f\t%.2f\t%.2f\t", c.TTFT.Mean, c.TTFT.P99, c.E2E.Mean)
		}
	}
}

// checkQueue returns an error for settings of the queue that contradict each other.
func (c *Scenario) checkQueue() error {
	switch {
	case c.RouterQueueThreshold != nil && c.ColdStart > 0:
		return errors.New("router-queue-threshold cannot be combined with cold-start: leave out one of them")
	case c.PriorityShare > 0 && cmp.Or(float64(c.StrictPriority), c.Priority) == 0:
		return errors.New("priority-share is set, but strict-priority and priority are 0: set one of them above 0")
	}
	return nil
}
