// SPDX-License-Identifier: Apache-2.0

package demo

import (
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
		asked, told bench.Summary
		met         int
	}{
		{of(1.15, 1.05), of(1.15, 1.05), 5},
		{of(1.16, 1.05), of(1.15, 1.05), 4},
		{of(1.15, 1.06), of(1.15, 1.05), 4},
		{of(1, 1), of(1.16, 1.06), 3},
	} {
		if got := met(Command{Groups: 2}, of(1, 1), c.asked, c.told); got != c.met {
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
