// SPDX-License-Identifier: Apache-2.0

package telemetry_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/telemetry"
)

// Of the warnings with one message ten a minute are written, by all loggers together. Other levels have no limit.
func TestWarningsHaveALimit(t *testing.T) {
	var out strings.Builder
	log := telemetry.NewLogger(&out, slog.LevelInfo, "text", nil)
	now := time.Unix(1_755_000_000, 0)
	write := func(level slog.Level, message string, n int) {
		for i := range n {
			h := log.Handler()
			if i%2 == 1 {
				h = log.With("worker", i).Handler()
			}
			if err := h.Handle(context.Background(), slog.NewRecord(now, level, message, 0)); err != nil {
				t.Fatal(err)
			}
		}
	}
	write(slog.LevelWarn, "a record is bad", 1000)
	write(slog.LevelWarn, "a worker is gone", 3)
	write(slog.LevelInfo, "a worker came", 50)
	write(slog.LevelError, "a fault", 50)
	text := out.String()
	for what, want := range map[string]int{"a record is bad": 10, "further lines": 1, "a worker is gone": 3, "a worker came": 50, "a fault": 50} {
		if n := strings.Count(text, what); n != want {
			t.Errorf("%q is written %d times, want %d", what, n, want)
		}
	}
	now = now.Add(time.Minute)
	write(slog.LevelWarn, "a record is bad", 2)
	if text = out.String()[len(text):]; strings.Count(text, "a record is bad") != 2 || strings.Count(text, "left_out=990") != 1 {
		t.Errorf("a minute later: %s", text)
	}
}
