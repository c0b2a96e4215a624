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
	failHeld                    // too many bytes of bodies are held
	failDraining                // we are shutting down
	failMode                    // Envoy is configured for a processing mode that we do not know
	failEncoding                // the body is compressed in a way that we cannot read
	failStarting                // we do not know the fleet yet
	failInternal                // an error that no client can mend
	failures                    // the number of reasons
)

func (f failure) String() string {
	return [...]string{"budget", "panic", "limit", "held_bytes", "draining", "unsupported_mode", "unreadable_encoding", "starting", "internal"}[f]
}

// failOpen is called for each request that is left to Envoy to route: answered
// without a header, or by the end of the stream. It counts it, and logs it now and
// then. err, if there is more to say than the reason, is not the client's text.
func (s *Server) failOpen(why failure, err error, more ...any) {
	s.metrics.failedOpen(why)
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

// starting reports whether the fleet is not known yet. It is asked before a decision: a
// fleet that becomes known while a request is decided was not known to it.
func (s *Server) starting() bool { return s.conf.Started != nil && !s.conf.Started() }

// unserved reports whether a decision failed for lack of workers that serve the model,
// which fails open as long as the server is starting.
func unserved(err error) bool {
	return errors.Is(err, router.ErrNoWorkers) || errors.Is(err, router.ErrUnknownModel)
}

// recoverPanic is deferred by a stream's handler. What panicked for one request
// must not end the others.
func (s *Server) recoverPanic(k kind) {
	what := recover()
	if what == nil {
		return
	}
	// A panic's value may be text of any length.
	text := fmt.Sprint(what)
	s.failOpen(failPanic, fmt.Errorf("panic: %s", text[:min(len(text), 256)]), "stream", k.String(), "stack", string(debug.Stack()))
}

// lineInterval keeps a fault that every request meets from filling the log.
const lineInterval = 10 * time.Second

// lineLimit lets one line through per lineInterval.
type lineLimit struct {
	last     atomic.Int64 // time of the last line, unix ns; 0 for none
	unlogged atomic.Int64 // calls since
}

// allow reports whether a line may be written now, and how many were not since
// the last one.
func (l *lineLimit) allow(now time.Time) (unlogged int64, ok bool) {
	last, t := l.last.Load(), now.UnixNano()
	if last != 0 && t-last < int64(lineInterval) || !l.last.CompareAndSwap(last, t) {
		l.unlogged.Add(1)
		return 0, false
	}
	return l.unlogged.Swap(0), true
}
