// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"encoding/binary"
	"log/slog"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/fixtures"
)

// A socket that causes log lines as often as possible does not fill the log: each line appears
// once in ten seconds, with the number of omitted lines.
func TestAHostileSocketDoesNotFillTheLog(t *testing.T) {
	s := simulate(t, enginesim.SocketsConfig{})
	var log fixtures.Log
	_, c := follow(t, engines.SourcesConfig{Log: slog.New(slog.NewTextHandler(&log, nil))}, zmqWorker(7, s))
	eventually(t, func() bool { return s.Subscribers() == 1 })
	const n = 3000
	body := encode(nil, list{1.5, list{blockStored(list{5}, nil, seq(0, 16), 16)}, 0})
	for i := range uint64(n) { // each message loses batches, and every second one is from another process
		s.PublishFrames([]byte("kv"), binary.BigEndian.AppendUint64(nil, 10*(1-i%2)+5), body)
	}
	eventually(t, func() bool { c.mu.Lock(); defer c.mu.Unlock(); return c.clears >= n/2 })
	text := log.String()
	if got := strings.Count(text, "\n"); got > 50 {
		t.Errorf("%d lines, such as\n%s", got, text[:min(len(text), 1000)])
	}
	if !strings.Contains(text, "an engine restarted") {
		t.Errorf("nothing is said at all:\n%s", text)
	}
}

// A faulty rank is requested about once a minute. That the engine does not answer is logged once, until it answers.
func TestASilentReplaySocketIsLoggedOnce(t *testing.T) {
	var log fixtures.Log
	r, out := engines.NewTestRank(func(uint64, uint32, indexer.Event) {}), slog.New(slog.NewTextHandler(&log, nil))
	warnings := func() int { return strings.Count(log.String(), "does not send missing events") }
	for range 3 {
		r.GiveUp(out)
	}
	if n := warnings(); n != 1 {
		t.Errorf("%d warnings of three requests without an answer, want 1:\n%s", n, log.String())
	}
	r.Answer()
	r.GiveUp(out)
	if n := warnings(); n != 2 {
		t.Errorf("%d warnings after an answer and another failure, want 2:\n%s", n, log.String())
	}
}
