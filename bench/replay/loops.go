// SPDX-License-Identifier: Apache-2.0

package replay

// loops is the course of a closed loop. A request waits for the one before it of its user, and for
// its gate.
type loops struct {
	next  []int32 // by request: the next one of its user, none for the last one
	waits []int8  // by request: what it still waits for
	opens []bool  // by request: first one of its user
	gates []gate
	in    [][]int32 // by request: gates that it belongs to
	until int64     // ns; no request begins after it, 0 = no such time
}

// gate is a gate of the trace.
type gate struct {
	left   int     // requests that have not ended
	behind []int32 // requests that wait for it
}

// beginLoops plans the first requests of a closed loop.
func (s *sim) beginLoops() {
	n := len(s.reqs)
	l := &loops{next: make([]int32, n), waits: make([]int8, n), opens: make([]bool, n), gates: make([]gate, len(s.Trace.Gates)), in: make([][]int32, n)}
	s.loops, s.left = l, 0
	for i := range s.Trace.Gates {
		l.gates[i].left = len(s.Trace.Gates[i])
		for _, r := range s.Trace.Gates[i] {
			l.in[r] = append(l.in[r], int32(i))
		}
	}
	for i := range s.reqs {
		l.next[i] = none
		if g := s.reqs[i].Gate; g > 0 {
			l.waits[i]++
			l.gates[g-1].behind = append(l.gates[g-1].behind, int32(i))
		}
	}
	for u := range s.Trace.Users {
		user := &s.Trace.Users[u]
		for i, r := range user.Requests {
			if i == 0 {
				l.opens[r] = true
				continue
			}
			l.next[user.Requests[i-1]] = r
			l.waits[r]++
		}
		if len(user.Requests) > 0 && s.reqs[user.Requests[0]].Gate == 0 {
			s.planNext(user.Requests[0], user.Start.Nanoseconds())
		}
	}
	for i := range l.gates {
		if l.gates[i].left == 0 {
			s.open(int32(i))
		}
	}
}

// follow plans the requests that wait for nothing more now that a request has ended.
func (s *sim) follow(req int32) {
	l := s.loops
	if next := l.next[req]; next != none {
		s.states[next].due = s.now + s.reqs[next].Think.Nanoseconds()
		s.unblock(next)
	}
	for _, i := range l.in[req] {
		if l.gates[i].left--; l.gates[i].left == 0 {
			s.open(i)
		}
	}
}

// open opens a gate. The first one begins the measurement if its length is given.
func (s *sim) open(gate int32) {
	if gate == 0 && s.Trace.Measured > 0 {
		s.loops.until = s.now + s.Trace.Measured.Nanoseconds()
		for _, e := range s.engines {
			e.computed = 0
		}
	}
	for _, r := range s.loops.gates[gate].behind {
		if s.loops.opens[r] {
			s.states[r].due = s.now + s.reqs[r].Think.Nanoseconds()
		}
		s.unblock(r)
	}
}

// unblock notes that a request waits for one thing less.
func (s *sim) unblock(req int32) {
	if s.loops.waits[req]--; s.loops.waits[req] == 0 {
		s.planNext(req, max(s.now, s.states[req].due))
	}
}

// planNext plans a request of a closed loop, unless the measurement has ended by then.
func (s *sim) planNext(req int32, at int64) {
	if s.loops.until > 0 && at > s.loops.until {
		return
	}
	s.left++
	s.queue.plan(at, func() { s.arrived(req) })
}
