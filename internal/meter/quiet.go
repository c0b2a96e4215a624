// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

const (
	// quietFor is how long equal lines are omitted after a line.
	quietFor = 10 * time.Second
	// maxQuiet limits the number of remembered lines.
	maxQuiet = 1024
)

// quiet is a log handler that writes each line at most once in [quietFor] for each worker. The
// attribute "repeated" of the next line is the number of lines left out. Without it a hostile
// or broken peer could fill the log.
type quiet struct {
	slog.Handler

	lines *quietLines
}

type quietLines struct {
	mu sync.Mutex
	// mu guards the field below.
	seen map[quietLine]*quietState
}

type quietLine struct {
	message string
	worker  string // its attribute "worker"
}

type quietState struct {
	until   time.Time
	leftOut int
}

// Quiet returns a log that writes each line at most once in ten seconds for each
// worker.
func Quiet(log *slog.Logger) *slog.Logger {
	return slog.New(quiet{log.Handler(), &quietLines{seen: make(map[quietLine]*quietState)}})
}

// Handle passes a record on, unless its line is omitted.
func (q quiet) Handle(ctx context.Context, r slog.Record) error {
	line := quietLine{message: r.Message}
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "worker" {
			line.worker = a.Value.String()
		}
		return true
	})
	leftOut, ok := q.lines.pass(line, r.Time)
	if !ok {
		return nil
	}
	if leftOut > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("repeated", leftOut))
	}
	return q.Handler.Handle(ctx, r)
}

// pass reports whether a line is written, and how many equal lines were left out before.
func (l *quietLines) pass(line quietLine, now time.Time) (leftOut int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.seen[line]
	if s == nil && len(l.seen) >= maxQuiet {
		for k, s := range l.seen {
			if s.leftOut == 0 && !now.Before(s.until) {
				delete(l.seen, k)
			}
		}
		if len(l.seen) >= maxQuiet {
			line.worker = "" // too many workers: they share a line
			s = l.seen[line]
		}
	}
	if s == nil {
		s = &quietState{}
		l.seen[line] = s
	}
	if now.Before(s.until) {
		s.leftOut++
		return 0, false
	}
	leftOut, s.leftOut, s.until = s.leftOut, 0, now.Add(quietFor)
	return leftOut, true
}

// WithAttrs and WithGroup share the counts.
func (q quiet) WithAttrs(attrs []slog.Attr) slog.Handler {
	return quiet{q.Handler.WithAttrs(attrs), q.lines}
}

func (q quiet) WithGroup(name string) slog.Handler {
	return quiet{q.Handler.WithGroup(name), q.lines}
}
