// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"io"
	"reflect"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench/replay"
)

// A fleet that is compared with one router differs from it in what its name says, and in nothing
// else.
func TestFleetComparisons(t *testing.T) {
	p := &Bench{Log: io.Discard}
	targets := 0
	for _, c := range append(p.replicaComparisons(), p.groupComparisons()...) {
		var one, several replay.Scenario
		c.one.set(&one)
		c.cell.set(&several)
		if several.Groups == 4 {
			if several.SummaryAge != time.Second || several.Workers != 32 || several.Predict == 0 {
				t.Errorf("%s: %+v", c.what, several)
			}
			several.Groups, several.SummaryAge = 0, 0
		} else {
			if several.Replicas != 4 || (several.SyncDelay == -1) != !c.ttft.IsSet() {
				t.Errorf("%s: %+v", c.what, several)
			}
			several.Replicas, several.SyncDelay = 0, 0
		}
		if one.Workers != several.Workers || one.KVBlocks != several.KVBlocks || one.Speedup != several.Speedup || one.Approximate != several.Approximate ||
			one.Predict != several.Predict || one.Groups != several.Groups || one.Replicas != several.Replicas {
			t.Errorf("%s: %+v against %+v", c.what, several, one)
		}
		all := []Measured{
			{Cell: c.one.name, Rule: defaultRule, TTFT: single(2), E2E: single(10)},
			{Cell: c.cell.name, Rule: defaultRule, TTFT: single(2.6), E2E: single(10.4)},
		}
		for i, f := range c.figures(all) {
			if want := []float64{1.3, 1.04}[i]; f.Median != want {
				t.Errorf("%s: %v, want %v", f.What, f.Median, want)
			}
			if f.Target == "" {
				continue
			}
			if targets++; f.Met != (i == 1) {
				t.Errorf("%s %s: met %v", f.What, f.Target, f.Met)
			}
		}
	}
	if targets != 12 {
		t.Errorf("%d targets, want 12", targets)
	}
}

// Prefill and decode workers are compared with as many aggregated workers, under the same load.
func TestSplitComparisons(t *testing.T) {
	p := &Bench{Log: io.Discard}
	comparisons := p.splitComparisons()
	for i, c := range comparisons {
		var one, split replay.Scenario
		c.one.set(&one)
		c.cell.set(&split)
		if split.PrefillWorkers != 4 || (split.ConditionalDisaggregation == "isl_bounding") != (i%2 == 1) || len(c.figures([]Measured{
			{Cell: c.one.name, Rule: defaultRule}, {Cell: c.cell.name, Rule: defaultRule},
		})) != 4 {
			t.Errorf("%s: %+v", c.what, split)
		}
		split.PrefillWorkers, split.ConditionalDisaggregation = 0, ""
		if !reflect.DeepEqual(one, split) {
			t.Errorf("%s: %+v against %+v", c.what, split, one)
		}
	}
	if len(comparisons) != 12 {
		t.Errorf("%d comparisons, want 12", len(comparisons))
	}
}
