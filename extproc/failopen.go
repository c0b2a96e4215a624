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

	"github.com/kvroute/kvroute/internal/openai"
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
	failEncoding                // kvroute cannot read the body's compression or charset
	failBody                    // kvroute cannot read the body, which is not JSON
	failStarting                // the fleet is not known yet
	failInternal                // an error that is not the client's mistake
	failures                    // the number of reasons
)

func (f failure) String() string {
	return [...]string{
		"budget", "panic", "limit", "held_bytes", "draining", "unsupported_mode", "unreadable_encoding",
		"unreadable_body", "starting", "internal",
	}[f]
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

// withoutWorker answers all unanswered messages of the request, of which m is the last one, after an
// error of the router. starting reports that the fleet was not known before the decision.
func (s *stream) withoutWorker(m message, err error, model string, unread, starting bool) bool {
	why := failInternal
	noWorkers, unknownModel := errors.Is(err, router.ErrNoWorkers), errors.Is(err, router.ErrUnknownModel)
	switch {
	case starting && (noWorkers || unknownModel):
		why = failStarting
	case errors.Is(err, router.ErrDecisionTimeout) || errors.Is(err, context.DeadlineExceeded):
		why = failBudget
	case unread && s.unreadable():
		why = failEncoding
	case unread && s.malformed:
		why = failBody
	case unread:
		why = failMode
	}
	switch {
	case why == failStarting:
	case model == "" && !unread && unknownModel && s.endpoint.NeedsModel():
		return s.refuse(openai.NoModel())
	case model == "" && !unread && unknownModel:
		return s.pass(m) // there are several models; the worker uses its own
	// An unread request is not refused unless Envoy cannot route it either.
	case !unread, noWorkers, m.isOther() && !unknownModel:
		if r := s.refusal(err, model); r != nil {
			return s.refuse(r)
		}
	}
	s.failOpen(why, err)
	return s.pass(m)
}

// pass answers all unanswered messages of the request, of which m is the last one, without a
// decision.
func (s *stream) pass(m message) bool {
	if s.state = passing; s.ended {
		s.state = passed
	}
	if s.mode == buffered || m.isRequestHeaders() {
		return s.send(s.unchanged(m))
	}
	return s.answerChunks(m, s.unchanged(headersOurs), s.replaced)
}

// giveUp answers a request that has no decision yet without one. It reports whether the stream may
// end now: it may not while Envoy needs kvroute for the rest of the request or response.
func (s *stream) giveUp(why failure) bool {
	switch s.state {
	case gathering:
		if !s.passChunks(why) {
			return true
		}
	case waiting:
		if why == failHeld && s.conf.untrusted() != 0 && s.wait.woken != nil {
			s.refuse(uncheckedBody())
			return true
		}
		s.failOpen(why, nil)
	case begun:
		s.failOpen(why, nil)
	default: // the request has its answer
	}
	return s.mayEnd()
}

// mayEnd reports whether Envoy can continue without this stream. kvroute must send back the chunks
// of a request that it holds. In full duplex, chunks of the response may be on their way to
// kvroute; they would be missing from the response, and no error would show it.
func (s *stream) mayEnd() bool {
	idle := s.state == begun || s.state == refused
	return idle || !s.echo && (s.ended || s.mode == buffered)
}

// recoverPanic is deferred by a stream's handler: a panic for one request must not end the
// others.
func (s *Server) recoverPanic(k kind) {
	if cause := recover(); cause != nil {
		s.panicked(k, cause)
	}
}

func (s *Server) panicked(k kind, cause any) {
	// A panic's value may be text of any length.
	text := fmt.Sprint(cause)
	err := fmt.Errorf("panic: %s", text[:min(len(text), 256)])
	s.failOpen(failPanic, err, "stream", k.String(), "stack", string(debug.Stack()))
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
