// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// With a share of requests that the router does not send, the default rule is faster if it
// hears what engines report than if it does not, for each of several seeds.
func TestReportsOfForeignLoadHelp(t *testing.T) {
	for seed := range uint64(3) {
		trace, err := Generate(GenerateConfig{Requests: 1500, Rate: 12, Seed: seed})
		if err != nil {
			t.Fatal(err)
		}
		run := func(name string) *Result {
			return play(t, Scenario{Trace: trace, Rule: rule(t, name), ForeignShare: .3, Predict: 10 * time.Second, Seed: seed})
		}
		with, without := run(Default), run(Default+",reports=none")
		t.Logf("seed %d: mean TTFT %.3f s with reports, %.3f s without; mean E2E %.2f and %.2f s; %d of %d requests foreign",
			seed, with.TTFT.Mean, without.TTFT.Mean, with.E2E.Mean, without.E2E.Mean, with.Foreign, with.Requests)
		if with.TTFT.Mean >= without.TTFT.Mean || with.E2E.Mean >= without.E2E.Mean {
			t.Errorf("seed %d: mean TTFT %.3f s with reports, %.3f s without; mean E2E %.2f and %.2f s", seed, with.TTFT.Mean, without.TTFT.Mean, with.E2E.Mean, without.E2E.Mean)
		}
		if with.Foreign != without.Foreign || with.Foreign < 350 || with.Foreign > 550 {
			t.Errorf("seed %d: %d and %d of 1,500 requests are foreign", seed, with.Foreign, without.Foreign)
		}
	}
}

// Reports of engines that have nothing but what the routers sent change no decision, with
// replicas that hear of each other at once, too; and foreign requests are the same for each run of a
// seed.
func TestReportsOfOwnLoadChangeNothing(t *testing.T) {
	trace := small(t)
	for _, c := range []Scenario{{}, {Replicas: 3}} {
		c.Trace, c.KVBlocks, c.Seed, c.ForeignShare, c.ReportEvery = trace, 300, 7, 1e-12, 100*time.Millisecond
		c.Rule = rule(t, Default)
		with := decisions(t, c)
		c.Rule = rule(t, Default+",reports=none")
		without := decisions(t, c)
		if len(with) != len(trace.Requests) || !slices.Equal(with, without) {
			i := 0
			for with[i] == without[i] {
				i++
			}
			t.Errorf("%d replicas: reports change decision %d of %d:\n%s\n%s", c.Replicas, i, len(with), with[i], without[i])
		}
		c.Rule, c.ForeignShare = rule(t, Default), .4
		a, b := decisions(t, c), decisions(t, c)
		if len(a) >= len(trace.Requests) || !slices.Equal(a, b) {
			t.Errorf("%d and %d decisions of one seed", len(a), len(b))
		}
	}
}

func TestForeignTrafficIsRefused(t *testing.T) {
	for want, c := range map[string]Scenario{
		"foreign share is 1":    {ForeignShare: 1},
		"9 workers, want":       {ForeignShare: .1, ForeignWorkers: 9},
		`report-every is "1µs"`: {ForeignShare: .1, ReportEvery: time.Microsecond},
		"neither groups nor ":   {ForeignShare: .1, Groups: 2},
	} {
		c.Trace, c.Rule = small(t), rule(t, Default)
		if _, err := Run(t.Context(), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", c, err, want)
		}
	}
}
