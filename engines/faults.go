// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/kvroute/kvroute/internal/reach"
)

// Fault is something wrong with a worker's engine that a person must mend. What is one of the names in
// docs/workers.md, and Text a sentence that says what was found and what to change.
type Fault struct{ What, Text string }

// The faults that this package finds.
const (
	FaultSameEvents   = "same_events"          // two workers share an event socket
	FaultRefused      = "event_socket_refused" // an event or replay socket is unavailable
	FaultEventSockets = "event_sockets"        // the engine has other event sockets than the worker's settings, or none
	FaultBlockSize    = "block_size"           // the engine has another block size than the worker's settings
)

// Faults returns what is wrong with the event sockets of a worker now.
func (s *Sources) Faults(id uint64) (faults []Fault) {
	s.mu.Lock()
	if f, wrong := s.unknown[id]; wrong {
		faults = append(faults, f)
	}
	for r := range s.ranks {
		for _, f := range []*Fault{r.noEvents.Load(), r.noReplay.Load()} {
			if f != nil && r.worker.ID == id {
				faults = append(faults, *f)
			}
		}
	}
	s.mu.Unlock()
	slices.SortFunc(faults, func(a, b Fault) int { return strings.Compare(a.Text, b.Text) })
	return append(s.same.faults(id), faults...)
}

// setUnknown notes why the sockets of a worker's engine are unknown, or that they are known. An engine
// that does not answer is no fault of its sockets.
func (s *Sources) setUnknown(id uint64, err error) {
	_, answered := errors.AsType[reach.StatusError](err)
	f, wrong := Fault{}, answered || errors.Is(err, errNoEvents)
	if wrong {
		f = Fault{FaultEventSockets, fmt.Sprintf("its event sockets are unknown: %v; set events.endpoint, or let the engine publish events", err)}
	}
	s.mu.Lock()
	old, was := s.unknown[id]
	if delete(s.unknown, id); wrong {
		s.unknown[id] = f
	}
	s.mu.Unlock()
	if was != wrong || old != f {
		s.conf.Faulty(id)
	}
}

// unavailable notes why a socket of the rank is unavailable, or that it is available.
func (r *rankSource) unavailable(to *atomic.Pointer[Fault], err error) {
	var f *Fault
	if err != nil {
		kind, where, setting := "event", r.at.where(), "events.endpoint"
		if to == &r.noReplay {
			kind, where, setting = "replay", r.at.replay.String(), "events.replay"
		}
		f = &Fault{FaultRefused, fmt.Sprintf("its %s socket %s (rank %d) is unavailable: %v; is the engine running, and is %s right?",
			kind, where, r.at.rank, err, setting)}
	}
	if old := to.Swap(f); old != f && (old == nil || f == nil || *old != *f) {
		r.s.conf.Faulty(r.worker.ID)
	}
}

// mute mutes the sources whose events another worker's source delivers, too, and those no more muted
// count again. The blocks of a muted source are forgotten, and its state is [StateNone].
func (s *Sources) mute(changed []*rankSource) {
	for _, r := range changed {
		r.do(func() {
			muted := s.same.by(r) != nil
			if muted == r.muted {
				return
			}
			r.muted = muted
			r.newStream()
			switch {
			case muted:
				r.clear()
				r.set(StateNone)
			case r.connected:
				r.set(StateOK)
				r.stream.connected(false)
			}
		})
	}
	if len(changed) == 0 {
		return
	}
	s.mu.Lock()
	ids := make([]uint64, 0, len(s.wanted))
	for id := range s.wanted {
		ids = append(ids, id)
	}
	s.mu.Unlock()
	for _, id := range ids { // seldom: any of them may have been the other worker
		s.conf.Faulty(id)
	}
}

// newStream begins a stream. That of a muted source requests nothing.
func (r *rankSource) newStream() {
	r.stream, r.seenRequests = newStream(r.at.replays && !r.muted, r.apply, r.clear, r.count), 0
	if r.cancel != nil {
		r.cancel() // the request of the stream before
	}
}
