// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"math"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/router"
)

const prompt16 = `"input_length":8192,"hash_ids":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]`

// lines makes a trace of requests, whose fields are JSON.
func lines(t *testing.T, requests ...string) *Trace {
	t.Helper()
	trace, err := readMooncake("test", strings.NewReader("{"+strings.Join(requests, "}\n{")+"}"))
	if err != nil {
		t.Fatal(err)
	}
	return trace
}

// The first token comes after the prefill, the transfer, and a step of the decode worker.
func TestTimesOfASplitRequest(t *testing.T) {
	trace := lines(t, prompt16+`,"output_length":11`)
	for _, c := range []struct {
		bytes    int
		rate     float64
		transfer float64
	}{{0, 0, 8192 * 262_144 / 50e9}, {131_072, 10, 8192 * 131_072 / 10e9}} {
		r := play(t, Scenario{Trace: trace, Rule: rule(t, "tokens"), Workers: 2, PrefillWorkers: 1, KVBytesPerToken: c.bytes, TransferRate: c.rate})
		first := .400393 + c.transfer + .011 + 2.33e-9*8191.5
		steps := 0.
		for k := range 10 {
			steps += (11 + 5.6e-5*float64(8193+k)) / 1e3
		}
		if math.Abs(r.TTFT.Mean-first) > 1e-5 || math.Abs(r.E2E.Mean-first-steps) > 1e-5 || r.Legs != 1 || math.Abs(r.Transfer.Mean-c.transfer) > 1e-8 {
			t.Errorf("%d bytes a token: first token after %v s, the last after %v, %d legs, %+v in transfer; want %v, %v, 1, %v",
				c.bytes, r.TTFT.Mean, r.E2E.Mean, r.Legs, r.Transfer, first, first+steps, c.transfer)
		}
	}
}

// A transfer carries the blocks that the decode worker has not cached, and waits for the transfer
// before it.
func TestTransfers(t *testing.T) {
	const block, whole = 512 * 262_144 / 50e9, 16 * 512 * 262_144 / 50e9
	later := `"timestamp":10000,` + prompt16 + `,"output_length":2`
	other := strings.Replace(prompt16, "[1,", "[17,", 1) + `,"output_length":2`
	for what, c := range map[string]struct {
		trace   *Trace
		prefill int
		sum     float64
	}{
		"the last block is computed again":       {lines(t, prompt16+`,"output_length":2`, later), 1, whole + block},
		"two prefill workers end at one time":    {lines(t, prompt16+`,"output_length":2`, other), 2, whole + 2*whole},
		"the decode worker has another prompt":   {lines(t, prompt16+`,"output_length":2`, `"timestamp":10000,`+other), 1, 2 * whole},
		"the output has the first token alone":   {lines(t, prompt16+`,"output_length":1`), 1, whole},
		"the decode worker has some of a prompt": {lines(t, `"input_length":512,"hash_ids":[1],"output_length":2`, later), 1, block + 15*block},
	} {
		if c.prefill == 2 {
			c.trace.Requests[1].At = 0 // the trace format spreads the requests of one timestamp
		}
		r := play(t, Scenario{Trace: c.trace, Rule: rule(t, "tokens"), Workers: c.prefill + 1, PrefillWorkers: c.prefill})
		if got := r.Transfer.Mean * float64(r.Legs); r.Legs != len(c.trace.Requests) || math.Abs(got-c.sum) > 1e-6 {
			t.Errorf("%s: %d legs with %v s in transfer, want %d with %v", what, r.Legs, got, len(c.trace.Requests), c.sum)
		}
	}
}

// Each slot is taken once and freed once, also those of legs, and the prefill workers hold no blocks at
// the end. Requests with a mostly cached prompt have no leg.
func TestSlotsOfLegsEnd(t *testing.T) {
	for _, c := range []Scenario{
		{PrefillWorkers: 4},
		{PrefillWorkers: 5, ConditionalDisaggregation: "isl_bounding"},
		{PrefillWorkers: 2, KVBlocks: 60, TransferRate: .5}, // little memory, which slow transfers hold
		{PrefillWorkers: 4, Approximate: true},
	} {
		taken, freed, legs := map[string]int{}, map[string]int{}, 0
		c.Trace, c.Rule, c.Seed, c.Predict = small(t), rule(t, Default), 1, 0
		c.slotChanged = func(change router.Change) {
			switch change.Kind {
			case router.SlotTaken:
				taken[change.ID]++
			case router.SlotFreed:
				freed[change.ID]++
			default:
			}
		}
		c.decided = func(_ int32, d router.Decision) {
			if d.Prefill != nil {
				legs++
			}
		}
		s, err := newSim(context.Background(), c)
		if err != nil {
			t.Fatal(err)
		}
		r, err := s.play()
		if err != nil {
			t.Fatal(err)
		}
		all := len(c.Trace.Requests)
		if r.Legs != legs || legs == 0 || (legs < all) != (c.ConditionalDisaggregation != "") || len(taken) != all+legs || len(freed) != all+legs {
			t.Errorf("%+v: %d requests, %d decided with a leg, %d legs in the result, %d slots taken, %d freed", c.PrefillWorkers, all, legs, r.Legs, len(taken), len(freed))
		}
		for id, n := range taken {
			if n != 1 || freed[id] != 1 {
				t.Errorf("%s: slot taken %d times, freed %d times", id, n, freed[id])
			}
		}
		for _, w := range s.routers[0].router.Workers() {
			if w.ActiveRequests != 0 || w.PendTokens != 0 || w.ActiveBlocks != 0 {
				t.Errorf("load at the end: %+v", w)
			}
		}
		for w, e := range s.engines {
			if e.admitted != 0 || e.cache.live != 0 || e.cache.reserved != 0 {
				t.Errorf("engine %d ends with %d requests, %d blocks in use and %d reserved", w, e.admitted, e.cache.live, e.cache.reserved)
			}
		}
	}
}

// With the prompt's blocks at a decode worker, isl_bounding leaves out the leg and the transfer.
func TestShortPromptsHaveNoTransfer(t *testing.T) {
	trace := lines(t, prompt16+`,"output_length":2`, `"timestamp":10000,`+prompt16+`,"output_length":2`)
	r := play(t, Scenario{Trace: trace, Rule: rule(t, "tokens"), Workers: 2, PrefillWorkers: 1, ConditionalDisaggregation: "isl_bounding"})
	if r.Legs != 1 || r.HitRate != 7680./16384 {
		t.Errorf("%d legs, hits %v; want 1, and all but the last block of the second prompt", r.Legs, r.HitRate)
	}
}

// Each rule serves a load with prefill workers, and step by step gives the times of runs of steps.
func TestSplitServesAll(t *testing.T) {
	for _, name := range []string{"tokens", "dynamo", "dynamo-agentic", "predicted_ttft", "lmetric"} {
		c := Scenario{Trace: small(t), Rule: rule(t, name), KVBlocks: 300, Seed: 1, PrefillWorkers: 5}
		r := play(t, c)
		if r.HitRate < .3 || r.TPOT.P99 > .05 || r.Imbalance > 1.5 || r.Imbalance < 1 {
			t.Errorf("%s: %+v", name, r)
		}
		if whole := play(t, stepwise(c)); math.Abs(whole.E2E.Mean-r.E2E.Mean) > .002*r.E2E.Mean {
			t.Errorf("%s: E2E %v with runs of steps, %v step by step", name, r.E2E.Mean, whole.E2E.Mean)
		}
	}
}

func TestBadSplits(t *testing.T) {
	trace := small(t)
	for want, c := range map[string]Scenario{
		"prefill-workers is 8 of 8 workers, want at least one":                     {PrefillWorkers: 8},
		`prefill-workers is "-1", want 0 to 4095`:                                  {PrefillWorkers: -1},
		"cannot be combined with groups":                                           {PrefillWorkers: 4, Groups: 2},
		"cannot be combined with change":                                           {PrefillWorkers: 4, Changes: []Change{{Worker: 1, Kind: Leave}}},
		"neither groups nor prefill workers":                                       {PrefillWorkers: 4, ForeignShare: .5},
		"cannot be combined with the rule oracle":                                  {PrefillWorkers: 4, Rule: rule(t, "oracle")},
		`kv-bytes-per-token is "-1"`:                                               {PrefillWorkers: 4, KVBytesPerToken: -1},
		`transfer-rate is "-1"`:                                                    {PrefillWorkers: 4, TransferRate: -1},
		`conditional-disaggregation is "prefill_load", want never or isl_bounding`: {PrefillWorkers: 4, ConditionalDisaggregation: "prefill_load"},
	} {
		c.Trace = trace
		if _, err := Run(context.Background(), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
