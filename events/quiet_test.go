// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/enginesim"
)

// A socket that says what makes a line of log as often as it can fills no log: each
// line comes once in ten seconds, with the number of those that were left out.
func TestAHostileSocketDoesNotFillTheLog(t *testing.T) {
	s := simulate(t, enginesim.SocketsConfig{})
	var log lines
	_, c := follow(t, events.SourcesConfig{Log: slog.New(slog.NewTextHandler(&log, nil))}, zmqWorker(7, s))
	eventually(t, func() bool { return s.Subscribers() == 1 })
	const n = 3000
	for i := range uint64(n) { // each loses batches, and each second one is another process
		s.PublishFrames(plane(7, 0, 10*(1-i%2)+5)...)
	}
	eventually(t, func() bool { c.mu.Lock(); defer c.mu.Unlock(); return c.clears >= n/2 })
	log.mu.Lock()
	text := log.buf.String()
	log.mu.Unlock()
	if got := strings.Count(text, "\n"); got > 50 {
		t.Errorf("%d lines, such as\n%s", got, text[:min(len(text), 1000)])
	}
	if !strings.Contains(text, "an engine started anew") {
		t.Errorf("nothing is said at all:\n%s", text)
	}
}

// What was left out is counted by the next line that is not.
func TestLinesLeftOutAreCounted(t *testing.T) {
	var log lines
	quiet, wait := events.QuietLog(slog.New(slog.NewTextHandler(&log, nil)))
	for range 5 {
		quiet.Warn("lost", "worker", 7)
	}
	quiet.Warn("lost", "worker", 8)
	wait()
	quiet.Warn("lost", "worker", 7)
	for i := range 3000 {
		quiet.Warn("forged", "worker", i)
	}
	text := log.buf.String()
	for want, times := range map[string]int{"lost worker=7": 2, "lost worker=8": 1, "repeated=4": 1} {
		if got := strings.Count(text, want); got != times {
			t.Errorf("%d times %s, want %d:\n%.500s", got, want, times, text)
		}
	}
	if got := strings.Count(text, "forged"); got > 1100 {
		t.Errorf("%d lines of forged workers", got)
	}
}
