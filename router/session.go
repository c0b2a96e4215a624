// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"slices"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/kvroute/kvroute/scorer"
)

// sessions remembers which worker each conversation of a pool is bound to. A binding ends when
// the session was not used for the ttl, when its worker leaves, or when there are too many
// sessions and this one is the least recently used.
type sessions struct {
	ttl   time.Duration                       // 0: no session is bound
	byKey *simplelru.LRU[uint64, sessionSeat] // the least recently used one expires first
}

type sessionSeat struct {
	worker int // ordinal
	until  time.Time
}

// SessionBinding says where a session is bound.
type SessionBinding struct {
	Session string // name
	Worker  Worker
	// Over says that the binding has ended.
	Over bool
}

// PeerSession takes the binding of a session from another router replica. The first binding
// wins: a session that is bound here stays bound, unless the message ends it. PeerSession
// reports whether anything changed. Nothing changes if the worker is not known or sessions
// are off.
func (r *Router) PeerSession(b SessionBinding) (news bool) {
	key := r.sessionKey(b.Session)
	if key == 0 {
		return false
	}
	return r.reported(b.Worker, func(c *core, now time.Time, ord int) bool {
		_, bound := c.sessions.worker(now, key)
		if b.Over {
			c.sessions.touch(now, key, true)
		} else if !bound {
			c.sessions.bind(now, key, ord, false)
		}
		return bound == b.Over
	})
}

// sessionKey is the hash of a session's name; 0 without a name, and if sessions are off.
func (r *Router) sessionKey(name string) uint64 {
	if r.conf.Sessions.TTL == 0 || name == "" {
		return 0
	}
	return max(1, scorer.DrawKey(name))
}

func newSessions(c SessionConfig) sessions {
	byKey, _ := simplelru.NewLRU[uint64, sessionSeat](max(1, c.Limit), nil) // fails for a size below 1 only
	return sessions{ttl: c.TTL, byKey: byKey}
}

// worker returns the worker that a session is bound to.
func (s *sessions) worker(now time.Time, key uint64) (ord int, bound bool) {
	b, known := s.byKey.Peek(key)
	return b.worker, known && now.Before(b.until)
}

// touch notes that a bound session is used, for the last time if final is set.
func (s *sessions) touch(now time.Time, key uint64, final bool) {
	switch ord, bound := s.worker(now, key); {
	case final:
		s.byKey.Remove(key)
	case bound:
		s.byKey.Add(key, sessionSeat{ord, now.Add(s.ttl)})
	}
}

// bind binds a session to a worker. A session that is bound already keeps its worker, unless
// rebind is set.
func (s *sessions) bind(now time.Time, key uint64, ord int, rebind bool) {
	if s.ttl == 0 {
		return
	}
	if old, bound := s.worker(now, key); bound && !rebind {
		ord = old
	}
	s.byKey.Add(key, sessionSeat{ord, now.Add(s.ttl)})
}

// expire drops the sessions that have not been used for the ttl.
func (s *sessions) expire(now time.Time) {
	for _, b, some := s.byKey.GetOldest(); some && !now.Before(b.until); _, b, some = s.byKey.GetOldest() {
		s.byKey.RemoveOldest()
	}
}

// removeWorker ends the sessions of a worker that leaves.
func (s *sessions) removeWorker(ord int) {
	for _, key := range s.byKey.Keys() {
		if b, _ := s.byKey.Peek(key); b.worker == ord {
			s.byKey.Remove(key)
		}
	}
}

// follow returns the candidate that the request's session is bound to, if the session may stay there; −1
// otherwise. The request has a session, and is not pinned. hard is [SessionConfig.Hard].
func (s *sessions) follow(in *decisionInput, ch *choice, workers *ranks, hard bool) (bound int, err error) {
	ord, known := s.worker(ch.time, in.session)
	if !known {
		return -1, nil
	}
	bound = slices.Index(ch.candidates, ord)
	switch {
	case bound < 0 && hard:
		w := workers.entries[ord].worker
		at, _ := workers.search(w)
		err := ErrNoWorkers
		if ch.exclusions[at] == ExcludedBusy {
			err = ErrAllBusy
		}
		return -1, fmt.Errorf("the session's worker %d, rank %d (%s): %w", w.ID, w.DPRank, ch.exclusions[at], err)
	case bound < 0 || !hard && scorer.SessionOverloaded(ch.inputs, bound):
		ch.sessionMoves = true
		return -1, nil
	}
	for i, other := range workers.order {
		if other != ord && ch.exclusions[i] == "" {
			ch.exclusions[i] = ExcludedSession
		}
	}
	return bound, nil
}
