// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/router"
)

func (f flow) String() string { return [...]string{"whole", "behind", "ahead", "duplex"}[f] }

func (a action) String() string {
	return [...]string{"leave", "proceed", "hold", "decide", "relay", "refuse", "respond", "ignore"}[a]
}

// Table prints the legal moves of a main stream.
func Table() string {
	var b strings.Builder
	for f := range flows {
		for s := range states {
			for m := range messages {
				act, to := next(f, s, m)
				// Cases that equal those of bodies in one message are listed there.
				if wholeAct, wholeTo := next(whole, s, m); f != whole && act == wholeAct && to == wholeTo {
					continue
				}
				switch {
				case act == leave:
				case f == whole && act == decide:
					fmt.Fprintf(&b, "%s: %s: decide\n", s, m)
				case f == whole:
					fmt.Fprintf(&b, "%s: %s: %s -> %s\n", s, m, act, to)
				case act == decide:
					fmt.Fprintf(&b, "%s: %s: %s: decide\n", f, s, m)
				default:
					fmt.Fprintf(&b, "%s: %s: %s: %s -> %s\n", f, s, m, act, to)
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
func (s *Server) Held() int64 { return s.held.taken.Load() }

// ReadUsage reads a response in pieces of n bytes.
func ReadUsage(response string, n int) (u router.Usage) {
	var r usageReader
	for piece := range slices.Chunk([]byte(response), n) {
		r.read(piece, false)
		if len(r.rest) > 2*maxUsage {
			panic("the reader keeps more than its limit")
		}
	}
	return r.usage
}

// Audited returns the number of audited requests of n.
func Audited(share float64, n int) (audited int) {
	s := Server{conf: Config{AuditShare: share}, prefix: IDPrefix(1)}
	for range n {
		if s.audited(s.newID()) {
			audited++
		}
	}
	return audited
}

// Evict ends the longest wait of a stream without a decision.
func (s *Server) Evict() { s.waits.evict() }

// Waits returns the number of streams that wait for Envoy.
func (s *Server) Waits() (n int) {
	s.waits.mu.Lock()
	defer s.waits.mu.Unlock()
	for _, head := range []*wait{&s.waits.undecided, &s.waits.others} {
		for w := head.next; w != nil && w != head; w = w.next {
			n++
		}
	}
	return n
}
