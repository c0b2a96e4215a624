// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

const (
	warningsEach = 10          // lines with one message, for each time of warningsTime
	warningsTime = time.Minute // beginning with the first line
	maxMessages  = 1024        // messages are constants; beyond, all of them begin again
)

// warnings is a handler that limits the number of warnings with one message: bad records of the bus, or a thousand
// workers that expire at once, must not fill the log.
type warnings struct {
	slog.Handler
	seen *messages // of all loggers made from one
}

// messages are the messages of warnings.
type messages struct {
	mu sync.Mutex
	// mu guards the fields below.
	since map[string]*lines
}

// lines are the warnings with one message since a time.
type lines struct {
	begin          time.Time
	written, above int
}

func newWarnings(h slog.Handler) *warnings {
	return &warnings{h, &messages{since: make(map[string]*lines)}}
}

// Handle writes a record, unless it is a warning above the limit.
func (w *warnings) Handle(ctx context.Context, r slog.Record) error {
	if r.Level == slog.LevelWarn {
		nth, above := w.seen.count(r.Message, r.Time)
		switch {
		case nth > warningsEach:
			return nil
		case nth == warningsEach:
			r = r.Clone()
			r.AddAttrs(slog.String("note", "further lines with this message are left out for a minute"))
		case above > 0:
			r = r.Clone()
			r.AddAttrs(slog.Int("left_out", above))
		}
	}
	return w.Handler.Handle(ctx, r)
}

// count counts a line, and returns its number in the current minute. The first line of a minute also gets the number of
// lines that were left out before.
func (m *messages) count(message string, now time.Time) (nth, above int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.since[message]
	switch {
	case l == nil:
		if len(m.since) >= maxMessages {
			clear(m.since)
		}
		l = &lines{begin: now}
		m.since[message] = l
	case now.Sub(l.begin) >= warningsTime:
		above = l.above
		*l = lines{begin: now}
	}
	if l.written == warningsEach {
		l.above++
		return warningsEach + 1, 0
	}
	l.written++
	return l.written, above
}

// WithAttrs returns a handler with the same limit.
func (w *warnings) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &warnings{w.Handler.WithAttrs(attrs), w.seen}
}

// WithGroup returns a handler with the same limit.
func (w *warnings) WithGroup(name string) slog.Handler {
	return &warnings{w.Handler.WithGroup(name), w.seen}
}
