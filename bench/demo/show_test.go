// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"flag"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/bench"
)

// met counts the figures of one round that meet their targets.
func met(c Command, round ...bench.Summary) (n int) {
	show := c.show()
	for _, f := range show.figures([][]bench.Summary{round}) {
		if f.Met {
			n++
		}
	}
	return n
}

func TestGroupFigures(t *testing.T) {
	of := func(ttft, e2e float64) bench.Summary {
		return bench.Summary{TTFT: bench.Quantiles{Mean: ttft}, E2E: bench.Quantiles{Mean: e2e}}
	}
	for _, c := range []struct {
		probed, summarized bench.Summary
		met                int
	}{
		{of(1.15, 1.05), of(1.15, 1.05), 5},
		{of(1.16, 1.05), of(1.15, 1.05), 4},
		{of(1.15, 1.06), of(1.15, 1.05), 4},
		{of(1, 1), of(1.16, 1.06), 3},
	} {
		if got := met(Command{Groups: 2}, of(1, 1), c.probed, c.summarized); got != c.met {
			t.Errorf("%+v: %d targets are met", c, got)
		}
	}
}

func TestReplicaFigures(t *testing.T) {
	of := func(ttft float64) bench.Summary { return bench.Summary{TTFT: bench.Quantiles{Mean: ttft, P90: ttft}} }
	for _, c := range []struct {
		one, synced, alone float64
		met                int
	}{{1, 1.05, 2, 3}, {1, 1.2, 2, 2}, {1, 1, 0.9, 2}} {
		if got := met(Command{Replicas: 2}, of(c.one), of(c.synced), of(c.alone)); got != c.met {
			t.Errorf("%+v: %d targets are met", c, got)
		}
	}
}

func TestHotFigures(t *testing.T) {
	of := func(e2e float64, busiest int) bench.Summary {
		// The name of the busiest worker is neither the first nor the last one.
		return bench.Summary{E2E: bench.Quantiles{Mean: e2e}, PerWorker: map[string]int{"worker-1": 50 - busiest/2, "worker-2": busiest, "worker-3": 50 - (busiest+1)/2}}
	}
	for _, c := range []struct {
		off, kv bench.Summary
		met     int
	}{
		{of(2, 100), of(1, 20), 3}, // two workers have 40 % each
		{of(2, 100), of(1, 53), 3},
		{of(2, 100), of(1, 54), 2},
		{of(1, 100), of(1, 34), 2},
		{of(1, 100), of(1, 100), 1},
	} {
		if got := met(Command{Hot: true, Workers: 3}, of(1, 34), c.off, c.kv); got != c.met {
			t.Errorf("%+v: %d targets are met", c, got)
		}
	}
}

// A missed target of one round fails the demo, and so does a request that failed.
func TestHotJudgesEachRound(t *testing.T) {
	c := Command{Hot: true, Workers: 2}
	show := c.show()
	even := bench.Summary{E2E: bench.Quantiles{Mean: 1}, PerWorker: map[string]int{"worker-1": 1, "worker-2": 1}}
	slow, failed, all := even, even, even
	slow.E2E.Mean = 2
	failed.Errors = map[string]int{"timeout": 1}
	all.PerWorker = map[string]int{"worker-1": 2}
	for want, round := range map[string][]bench.Summary{
		"":                      {even, slow, even},
		"busiest worker's":      {even, slow, all},
		"mean E2E, kv ÷ kv":     {even, even, even},
		"failed requests: 1, w": {even, slow, failed},
	} {
		switch err := show.judge(round); {
		case want == "" && err != nil:
			t.Error(err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("got %v, want %q", err, want)
		}
	}
	var table strings.Builder
	show.compare(&table, []bench.Summary{even, slow, all})
	if want := "busiest worker's share           50 %           50 %          100 %\n"; !strings.Contains(table.String(), want) {
		t.Errorf("want %q in\n%s", want, &table)
	}
}

// --hot sets the load and the workers, but no flag that is given.
func TestHotLoad(t *testing.T) {
	for _, given := range []bool{false, true} {
		var c Command
		fs := flag.NewFlagSet("demo", flag.ContinueOnError)
		c.Flags(fs)
		args, workers, rate := []string{"--hot"}, 8, 10.
		if given {
			args, workers, rate = append(args, "--workers", "2", "--rate", "1.5"), 2, 1.5
		}
		if err := fs.Parse(args); err != nil {
			t.Fatal(err)
		}
		if err := c.check(fs); err != nil {
			t.Fatal(err)
		}
		if c.Workers != workers || c.load.Rate != rate || c.load.SystemPrompts != 1 || c.load.Turns != 1 || c.Blocks != 19_200 {
			t.Errorf("%v: %+v", args, c)
		}
	}
}
