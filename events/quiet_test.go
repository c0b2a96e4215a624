// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/kvroute/kvroute/events"
)

type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

// The next line that is logged carries the count of omitted lines.
func TestLinesLeftOutAreCounted(t *testing.T) {
	var log lines
	quiet, wait := events.QuietLogNow(slog.New(slog.NewTextHandler(&log, nil)))
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
