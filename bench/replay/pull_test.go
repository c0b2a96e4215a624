// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
)

// With round robin the fourth request reaches a worker that lacks its prompt, while the other worker holds it.
func TestTimesOfAPull(t *testing.T) {
	other := strings.Replace(prompt16, "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]", "[21,22,23,24,25,26,27,28,29,30,31,32,33,34,35,36]", 1)
	for name, c := range map[string]struct {
		scenario Scenario
		pulls    int
		seconds  float64 // of the pull
	}{
		"off":            {Scenario{}, 0, 0},
		"on":             {Scenario{Pull: true}, 1, .027 + 8192*262_144/50e9},
		"slow link":      {Scenario{Pull: true, TransferRate: 1}, 0, 0},
		"long delay":     {Scenario{Pull: true, PullDelay: 10 * time.Second}, 0, 0},
		"short for that": {Scenario{Pull: true, PullMinTokens: 8193}, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := c.scenario
			s.Trace = lines(t, prompt16+`,"output_length":2`, `"timestamp":9000,`+other+`,"output_length":2`, `"timestamp":9000,`+other+`,"output_length":2`, `"timestamp":9001,`+prompt16+`,"output_length":2`)
			s.Rule, s.Workers = rule(t, "round-robin"), 2
			var sources []*router.Source
			s.decided = func(_ int32, d router.Decision) { sources = append(sources, d.Source) }
			r := play(t, s)
			if c.pulls > 0 && (sources[3] == nil || sources[3].Worker.ID&0xff != 1 || sources[3].Tokens != 8191) {
				t.Errorf("source %+v, want the first worker", sources[3])
			}
			if r.Pulls != c.pulls || math.Abs(r.Pull.Mean-c.seconds) > 1e-6 {
				t.Errorf("%d pulls of %v s, want %d of %v: sources %+v", r.Pulls, r.Pull.Mean, c.pulls, c.seconds, sources)
			}
		})
	}
}

// Requests whose worker leaves or restarts during a copy are routed again, and all requests end.
func TestPullsOfAWorkerThatLeaves(t *testing.T) {
	for _, kind := range []ChangeKind{Leave, Restart} {
		s := Scenario{
			Pull: true, TransferRate: 10, Rule: rule(t, "round-robin"), Workers: 3,
			Trace:   lines(t, prompt16+`,"output_length":2`, `"timestamp":9000,`+prompt16+`,"output_length":2`),
			Changes: []Change{{At: 9100 * time.Millisecond, Worker: 1, Kind: kind}},
		}
		if r := play(t, s); r.Pulls == 0 || r.Retried != 1 || r.Requests != 2 {
			t.Errorf("%s: %d pulls, %d retried, %d requests", kind, r.Pulls, r.Retried, r.Requests)
		}
	}
}

// With the price of a copy in the cost, a request leaves the busy holder earlier.
func TestCostOfAPull(t *testing.T) {
	requests := []string{prompt16 + `,"output_length":2`}
	for i := range 24 {
		last := fmt.Sprintf("%d]", 99+i)
		requests = append(requests, `"timestamp":9000,`+strings.Replace(prompt16, "16]", last, 1)+`,"output_length":2`)
	}
	requests = append(requests, `"timestamp":9001,"input_length":1,"hash_ids":[98],"output_length":1`) // the others come in 1 ms
	var pulls [2]int
	for i := range pulls {
		pulls[i] = play(t, Scenario{Pull: true, PullCost: i > 0, Rule: rule(t, Default), Workers: 2, Trace: lines(t, requests...)}).Pulls
	}
	if pulls[1] <= pulls[0] {
		t.Errorf("%d pulls without the cost and %d with it", pulls[0], pulls[1])
	}
	for name, s := range map[string]Scenario{
		"pull-cost needs pull": {PullCost: true},
		"pull-cost needs":      {Pull: true, PullCost: true, Rule: rule(t, "random")},
		"pull cannot be":       {Pull: true, Workers: 2, PrefillWorkers: 1},
		"leave out one":        {Pull: true, Approximate: true},
		"with hybrid":          {Pull: true, Hybrid: "window=64"},
	} {
		if s.Trace = lines(t, requests...); s.Rule.Name == "" {
			s.Rule = rule(t, Default)
		}
		if _, err := Run(t.Context(), s); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%v, want %s", err, name)
		}
	}
}
