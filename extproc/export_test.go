// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"fmt"
	"strings"
)

func (m bodyMode) String() string {
	return [...]string{"buffered", "streamed", "streamed ahead", "full duplex"}[m]
}

func (a action) String() string {
	return [...]string{"leave", "proceed", "hold", "decide", "relay", "refuse", "respond", "ignore"}[a]
}

// Table prints the legal moves of a main stream.
func Table() string {
	var b strings.Builder
	for mode := range bodyModes {
		for s := range states {
			for m := range messages {
				act, to := next(mode, s, m)
				// Cases that equal those of bodies in one message are listed there.
				if bufferedAct, bufferedTo := next(buffered, s, m); mode != buffered && act == bufferedAct && to == bufferedTo {
					continue
				}
				switch {
				case act == leave:
				case mode == buffered && act == decide:
					fmt.Fprintf(&b, "%s: %s: decide\n", s, m)
				case mode == buffered:
					fmt.Fprintf(&b, "%s: %s: %s -> %s\n", s, m, act, to)
				case act == decide:
					fmt.Fprintf(&b, "%s: %s: %s: decide\n", mode, s, m)
				default:
					fmt.Fprintf(&b, "%s: %s: %s: %s -> %s\n", mode, s, m, act, to)
				}
			}
		}
	}
	b.WriteString("anything else: leave\n")
	return b.String()
}

// NewFirstEvent returns a function that is fed the pieces of an event stream.
func NewFirstEvent() func(piece []byte) bool { return new(firstEvent).in }

// Held returns the bytes of request bodies that are held.
func (s *Server) Held() int64 { return s.bodies.taken.Load() }

// Audited returns the number of audited requests of n.
func Audited(share float64, n int) (audited int) {
	s := Server{conf: Config{AuditShare: share}, prefix: IDPrefix(1)}
	for range n {
		if id, _ := s.newID(false); s.audited(id) {
			audited++
		}
	}
	return audited
}

// Sampled returns how many requests of n are in the sample, and for how many they stand.
func Sampled(audits, observes float64, n int) (sampled, represented int) {
	s := Server{conf: Config{AuditShare: audits, ObserveShare: observes}, prefix: IDPrefix(1)}
	for range n {
		if _, represents := s.newID(false); represents > 0 {
			sampled++
			represented += represents
		}
	}
	return sampled, represented
}

// Evict ends the longest wait of a stream without a decision.
func (s *Server) Evict() { s.waits.evict() }

// Waits returns the number of streams that wait for Envoy.
func (s *Server) Waits() (n int) {
	s.waits.mu.Lock()
	defer s.waits.mu.Unlock()
	for _, head := range []*wait{&s.waits.undecided, &s.waits.small, &s.waits.others} {
		for w := head.next; w != nil && w != head; w = w.next {
			n++
		}
	}
	return n
}
