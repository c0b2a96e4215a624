// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/router"
)

// failure is a reason why a request failed open.
type failure uint8

const (
	failBudget   failure = iota // the decision took too long
	failPanic                   // a handler panicked
	failLimit                   // too many streams at a time
	failHeld                    // the bodies in memory take all of the budget
	failDraining                // kvroute is shutting down
	failMode                    // Envoy's processing mode does not show the body
	failEncoding                // kvroute cannot read the body's compression
	failStarting                // the fleet is not known yet
	failInternal                // an error that is not the client's mistake
	failures                    // the number of reasons
)

func (f failure) String() string {
	return [...]string{"budget", "panic", "limit", "held_bytes", "draining", "unsupported_mode", "unreadable_encoding", "starting", "internal"}[f]
}

// failOpen counts a request that Envoy routes without kvroute, and logs some of them. err, if not
// nil, is logged with the reason; it must not contain text of the client.
func (s *Server) failOpen(why failure, err error, more ...any) {
	s.metrics.failOpen.Count(why.String())
	unlogged, ok := s.lines[why].allow(time.Now())
	if !ok {
		return
	}
	level := slog.LevelWarn
	if why == failPanic {
		level = slog.LevelError
	}
	args := []any{"reason", why.String(), "unlogged", unlogged}
	if err != nil {
		args = append(args, "err", err)
	}
	s.conf.Log.Log(context.Background(), level, "a request failed open", append(args, more...)...)
}

// starting reports whether the fleet is not known yet. Call it before a decision: the fleet may
// become known during the decision, too late for it.
func (s *Server) starting() bool { return s.conf.Started != nil && !s.conf.Started() }

// failure returns the reason why a request fails open after an error of the router.
func (s *stream) failure(err error, starting, unread bool) failure {
	switch {
	case starting && (errors.Is(err, router.ErrNoWorkers) || errors.Is(err, router.ErrUnknownModel)):
		return failStarting
	case errors.Is(err, router.ErrDecisionTimeout) || errors.Is(err, context.DeadlineExceeded):
		return failBudget
	case unread && s.compressed:
		return failEncoding
	case unread:
		return failMode
	}
	return failInternal
}

// giveUp answers a request that has no decision yet without one. It reports whether the stream may
// end now: it may not while Envoy needs kvroute for the rest of the request or response.
func (s *stream) giveUp(why failure) bool {
	switch s.state {
	case gathering:
		if !s.release(why) {
			return true
		}
	case begun, waiting:
		s.server.failOpen(why, nil)
	default: // the request has its answer
	}
	return s.mayEnd()
}

// mayEnd reports whether Envoy can continue without this stream. kvroute must send back the chunks
// of a request that it holds. In full duplex, chunks of the response may be on their way to
// kvroute; they would be missing from the response, and no error would show it.
func (s *stream) mayEnd() bool {
	if s.echo && s.state != begun && s.state != refused {
		return false
	}
	return s.ended || s.flow == whole || s.state == begun || s.state == refused
}

// free frees the slot, if there is one.
func (s *stream) free() {
	if !s.booked {
		return
	}
	s.server.reportUsage(s.id, s.usage)
	if s.booked = false; s.served || !s.server.headersSent.Load() {
		s.server.router.Free(s.id)
	} else {
		s.server.router.Abandon(s.id)
	}
}

// recoverPanic is deferred by a stream's handler: a panic for one request must not end the
// others.
func (s *Server) recoverPanic(k kind) {
	cause := recover()
	if cause == nil {
		return
	}
	// A panic's value may be text of any length.
	text := fmt.Sprint(cause)
	s.failOpen(failPanic, fmt.Errorf("panic: %s", text[:min(len(text), 256)]), "stream", k.String(), "stack", string(debug.Stack()))
}

// lineInterval is the least time between two log lines of one reason, so that a fault of every
// request does not fill the log.
const lineInterval = 10 * time.Second

// lineLimit lets one line through per lineInterval.
type lineLimit struct {
	last     atomic.Int64 // time of the last line, unix ns; 0 for none
	unlogged atomic.Int64 // calls since
}

// allow reports whether a line may be written now, and how many lines were suppressed since the
// last one.
func (l *lineLimit) allow(now time.Time) (unlogged int64, ok bool) {
	last, t := l.last.Load(), now.UnixNano()
	if last != 0 && t-last < int64(lineInterval) || !l.last.CompareAndSwap(last, t) {
		l.unlogged.Add(1)
		return 0, false
	}
	return l.unlogged.Swap(0), true
}
