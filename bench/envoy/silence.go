// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/process"
)

// silence measures, in a network of its own, how long requests wait for a worker whose packets are dropped.
func silence(ctx context.Context, o options, _ string) []bench.Figure {
	cmd := exec.CommandContext(ctx, "unshare", "--net", bench.Must(os.Executable()), "--silence", "--kvroute", o.binary)
	cmd.Stderr = os.Stderr
	text, err := cmd.Output()
	if err != nil {
		bench.NoError(fmt.Errorf("%v: %w; the part needs Linux, root, and the programs unshare and ip; ONLY=health, new, refused, status or cost leaves it out", cmd.Args, err))
	}
	var took silenceTimes
	bench.NoError(json.Unmarshal(text, &took))
	return []bench.Figure{
		bench.NewFigure("packets are dropped: longest wait of a request sent before", "s", bench.AtMost(60), took.Before),
		bench.NewFigure("packets are dropped: longest wait of a request sent after", "s", bench.AtMost(60), took.After),
		count("packets are dropped: failed, of 40 requests sent after", bench.Exactly(0), took.Failed),
	}
}

// silenceTimes is what the process in a network of its own prints. Times are in seconds.
type silenceTimes struct {
	Before, After float64
	Failed        int
}

// silencePatience bounds the wait of a request, so a worker's silence that nobody notices ends the measurement.
const silencePatience = 90 * time.Second

// runSilence drops the packets of one of two workers while requests wait for it.
func runSilence(ctx context.Context, o options) {
	const lost = "127.0.0.9"
	command := func(line string) {
		args := strings.Fields(line)
		if out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput(); err != nil {
			bench.NoError(fmt.Errorf("%s: %w: %s", line, err, out))
		}
	}
	command("ip link set lo up")
	dir := bench.Must(os.MkdirTemp("", "bench-workers"))
	defer func() { _ = os.RemoveAll(dir) }()
	near, far := startFaulty(ctx, "near", "127.0.0.1", 50*time.Millisecond), startFaulty(ctx, "far", lost, 300*time.Millisecond)
	s := startStack(ctx, o, dir, "silence", []*faultyWorker{near, far}, "--router-mode", "round-robin")
	defer s.stop()
	longest := func(all []outcome) (most float64) {
		for _, o := range all {
			most = max(most, o.took.Seconds())
		}
		return most
	}
	// Envoy keeps the connections of these requests. Some of the later ones are sent on them.
	var open sync.WaitGroup
	for i := range 16 {
		open.Go(func() { s.ask(ctx, i, false) })
	}
	open.Wait()
	warm := far.received.Load()
	far.hangs.Store(true)
	patient, cancel := context.WithTimeout(ctx, silencePatience)
	defer cancel()
	waiting := make([]outcome, 6)
	for i := range waiting {
		open.Go(func() { waiting[i] = s.ask(patient, i, i%2 == 0) })
	}
	bench.NoError(process.Until(ctx, process.Patience, "no request waits for the worker", func(context.Context) bool { return far.received.Load() >= warm+3 }))
	// The kernel drops all packets to this address, those of established connections without a word.
	command("ip route add blackhole " + lost + "/32 table local")
	after := s.spread(ctx, 40, 200*time.Millisecond, silencePatience)
	open.Wait()
	bench.NoError(json.NewEncoder(os.Stdout).Encode(silenceTimes{longest(waiting), longest(after), failed(after)}))
}
