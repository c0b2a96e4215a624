// SPDX-License-Identifier: Apache-2.0

package router

import (
	"container/list"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// sessions remembers which worker the conversations of a pool are bound to. A
// session is bound once and stays so until it has not been used for the ttl, its
// worker leaves, or as many others are used after it as may be remembered.
//
// Invariants: byKey and used hold the same sessions; used is sorted by until, the
// latest first, for each use moves a session to the front.
type sessions struct {
	ttl   time.Duration // 0: nothing is remembered
	limit int
	byKey map[uint64]*list.Element
	used  *list.List // of *session
}

// SessionBinding says where a session is bound.
type SessionBinding struct {
	Session string // its name
	Worker  Worker
	// Over says that it is bound no more: it has ended, or moves.
	Over bool
}

// PeerSession takes what another router replica tells of a session. The first binding
// that lives wins: one that is bound here stays where it is, and for as long, unless it
// is over. It reports whether anything changed: not, if the worker is not known or
// sessions do not matter here.
func (r *Router) PeerSession(b SessionBinding) (news bool) {
	if r.conf.Sessions.TTL == 0 || b.Session == "" {
		return false
	}
	now, key := r.conf.Now(), sessionKey(b.Session)
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	p := r.owners[b.Worker.ID]
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	s := &p.core.sessions
	_, bound := s.worker(now, key)
	switch ord, known := p.core.find(b.Worker); {
	case b.Over:
		s.touch(now, key, true)
		return bound
	case bound || !known:
		return false
	default:
		s.bind(now, key, ord, false)
		return true
	}
}

// sessionKey is how a session is remembered: never 0.
func sessionKey(name string) uint64 { return max(1, scorer.DrawKey(name)) }

type session struct {
	key    uint64
	worker int // ordinal
	until  time.Time
}

func newSessions(c SessionConfig) sessions {
	return sessions{ttl: c.TTL, limit: c.Limit, byKey: make(map[uint64]*list.Element), used: list.New()}
}

// worker returns the worker that a session is bound to.
func (s *sessions) worker(now time.Time, key uint64) (ord int, bound bool) {
	e := s.byKey[key]
	if e == nil {
		return 0, false
	}
	b := e.Value.(*session)
	return b.worker, now.Before(b.until)
}

// touch notes that a bound session is used, for the last time if final is set.
func (s *sessions) touch(now time.Time, key uint64, final bool) {
	switch e := s.byKey[key]; {
	case e == nil:
	case final:
		s.drop(e)
	default:
		if b := e.Value.(*session); now.Before(b.until) {
			s.extend(now, e)
		}
	}
}

// bind binds a session to a worker. One that is bound stays where it is, unless
// anew is set.
func (s *sessions) bind(now time.Time, key uint64, ord int, anew bool) {
	if s.ttl == 0 {
		return
	}
	if e := s.byKey[key]; e != nil {
		b := e.Value.(*session)
		if anew || !now.Before(b.until) {
			b.worker = ord
		}
		s.extend(now, e)
		return
	}
	s.expire(now)
	if len(s.byKey) >= s.limit {
		s.drop(s.used.Back())
	}
	s.byKey[key] = s.used.PushFront(&session{key: key, worker: ord, until: now.Add(s.ttl)})
}

func (s *sessions) extend(now time.Time, e *list.Element) {
	e.Value.(*session).until = now.Add(s.ttl)
	s.used.MoveToFront(e)
}

// expire drops the sessions that have not been used for the ttl.
func (s *sessions) expire(now time.Time) {
	for e := s.used.Back(); e != nil && !now.Before(e.Value.(*session).until); e = s.used.Back() {
		s.drop(e)
	}
}

// removeWorker ends the sessions of a worker that leaves.
func (s *sessions) removeWorker(ord int) {
	for e := s.used.Front(); e != nil; {
		next := e.Next()
		if e.Value.(*session).worker == ord {
			s.drop(e)
		}
		e = next
	}
}

func (s *sessions) drop(e *list.Element) {
	delete(s.byKey, e.Value.(*session).key)
	s.used.Remove(e)
}
