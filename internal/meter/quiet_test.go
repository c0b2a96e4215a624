// SPDX-License-Identifier: Apache-2.0

package meter_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/meter"
)

// The next line that is logged carries the count of omitted lines.
func TestLinesLeftOutAreCounted(t *testing.T) {
	var log bytes.Buffer
	quiet, wait := meter.QuietNow(slog.New(slog.NewTextHandler(&log, nil)))
	for range 5 {
		quiet.Warn("lost", "worker", 7)
	}
	quiet.Warn("lost", "worker", 8)
	wait()
	quiet.Warn("lost", "worker", 7)
	for i := range 3000 {
		quiet.Warn("forged", "worker", i)
	}
	text := log.String()
	for want, times := range map[string]int{"lost worker=7": 2, "lost worker=8": 1, "repeated=4": 1} {
		if got := strings.Count(text, want); got != times {
			t.Errorf("%d times %s, want %d:\n%.500s", got, want, times, text)
		}
	}
	if got := strings.Count(text, "forged"); got > 1100 {
		t.Errorf("%d lines of forged workers", got)
	}
}
