// SPDX-License-Identifier: Apache-2.0

package events

import "github.com/kvroute/kvroute/indexer"

// maxQueuedBlocks is about 10 MB of events.
const maxQueuedBlocks = 1 << 18

// delivery is an event for the sink, or something else to do.
type delivery struct {
	do func() // nil for an event
	RankName

	ev indexer.Event
}

// unlock unlocks mu and makes the deliveries, unless another goroutine makes them.
func (s *Subscriber) unlock() {
	if !s.delivering {
		s.delivering = true
		for len(s.queue) > 0 {
			s.deliverLocked()
			if s.blocked > 0 {
				break // a blocked goroutine continues
			}
		}
		s.endLocked()
	}
	if p := &s.tracker.repairs; len(p.timers)+len(p.ready) > 0 {
		select {
		case s.repairing <- struct{}{}:
		default:
		}
	}
	s.mu.Unlock()
}

// deliverLocked makes the deliveries that are queued now. Its caller has set delivering.
func (s *Subscriber) deliverLocked() {
	list := s.queue
	s.queue, s.queuedBlocks = nil, 0
	s.mu.Unlock()
	for i := range list {
		if d := &list[i]; d.do != nil {
			d.do()
		} else {
			s.conf.Sink(d.WorkerID, d.DPRank, d.ev)
		}
	}
	s.mu.Lock()
}

func (s *Subscriber) endLocked() {
	s.delivering = false
	s.delivered.Broadcast()
}

// unlockAndWait unlocks mu like unlock, and returns when the queue is short.
func (s *Subscriber) unlockAndWait() {
	for s.delivering && (len(s.queue) > s.maxQueue || s.queuedBlocks > maxQueuedBlocks) {
		s.blocked++
		s.delivered.Wait()
		s.blocked--
	}
	s.unlock()
}

// pause calls at with mu locked, makes the deliveries queued so far, and makes no more until
// resume is called. Until then the sink has what the tracker had during the call of at.
func (s *Subscriber) pause(at func()) (resume func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.delivering {
		s.blocked++
		s.delivered.Wait()
		s.blocked--
	}
	s.delivering = true
	at()
	s.deliverLocked()
	return func() {
		s.mu.Lock()
		s.endLocked()
		s.unlock()
	}
}

// laterLocked calls do after mu is unlocked.
func (s *Subscriber) laterLocked(do func()) { s.queue = append(s.queue, delivery{do: do}) }
