// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/replay"
)

func fixed(cell, rule string, ttft, e2e float64) Measured {
	return Measured{Cell: cell, Rule: rule, TTFT: single(ttft), E2E: single(e2e), TTFTp90: single(1)}
}

func TestRangeIsShortJSON(t *testing.T) {
	b, err := json.Marshal(newRange([]float64{1, 2, 4.123456}))
	if err != nil || string(b) != "[2.374,1,4.123]" {
		t.Errorf("%s, %v", b, err)
	}
}

func TestRivalFiguresFindTheWorstCell(t *testing.T) {
	all := []Measured{
		fixed("a", defaultRule, 1, 10), fixed("a", rivalRule, 2, 11), fixed("a", oracleRule, 1, 9),
		fixed("b", defaultRule, 3, 10), fixed("b", rivalRule, 2, 20), fixed("b", oracleRule, 1, 9),
		fixed("full", defaultRule, 9, 90), fixed("full", rivalRule, 1, 1), fixed("full", oracleRule, 1, 9),
		fixed("c at 110 % load", defaultRule, 9, 90), fixed("c at 110 % load", rivalRule, 1, 1), fixed("c at 110 % load", oracleRule, 1, 9),
		fixed("agentic 9 users", defaultRule, 4, 10), fixed("agentic 9 users", rivalRule, 4, 9), fixed("agentic 9 users", oracleRule, 1, 9),
	}
	all[8].TTFTp90 = single(3)  // of the oracle: saturated
	all[14].TTFTp90 = single(3) // a closed loop counts all the same
	f := rivalFigures("", all)
	if len(f) != 2 || f[0].Median != 1.5 || f[0].Met || !strings.Contains(f[0].What, "worst of 3 cells up to 95 % load: b") {
		t.Errorf("TTFT: %+v", f)
	}
	if f[1].Median < 1.11 || f[1].Median > 1.12 || !strings.Contains(f[1].What, "agentic 9 users") {
		t.Errorf("E2E: %+v", f[1])
	}
}

// A rule that is near the default in one open cell is compared with the default in all.
func TestContendersAndTheWorstCell(t *testing.T) {
	b := &Bench{}
	larger := b.largerCells()
	names := map[string]bool{}
	for _, c := range append(larger, b.cells()...) {
		names[c.name] = true
	}
	if len(names) != len(larger)+7 {
		t.Errorf("cells that have one name: %d names of %d cells", len(names), len(larger)+7)
	}
	cells := []cell{{name: "a", open: true}, {name: "b", open: true}, {name: "loop"}}
	all := []Measured{
		fixed("a", defaultRule, 1, 10), fixed("a", "near", 1, 12.5), fixed("a", "far", 1, 13), fixed("a", oracleRule, 1, 5),
		fixed("b", defaultRule, 1, 10), fixed("b", "near", 1, 8), fixed("b", "far", 1, 13),
		fixed("loop", defaultRule, 1, 10), fixed("loop", "far", 1, 1),
	}
	if got := contenders(cells, all); len(got) != 2 || got[0] != defaultRule || got[1] != "near" {
		t.Errorf("contenders are %v", got)
	}
	if w := worstE2E(cells[:2], all); w.ratio.Mean != 1.25 || w.where != "b, near" {
		t.Errorf("worst is %+v", w)
	}
}

// Cells have names of their own, since results are found by them, and rules parse.
func TestAxesAreSound(t *testing.T) {
	b := &Bench{}
	n := 0
	for _, a := range b.axes(tops{2.1, 1.9, 15}) {
		seen := map[string]bool{}
		for _, c := range a.cells {
			if n++; seen[c.name] {
				t.Errorf("axis %s has two cells %q", a.name, c.name)
			}
			seen[c.name] = true
			var s replay.Scenario
			c.set(&s)
		}
		for _, r := range a.rules {
			if _, err := replay.ParseRule(r); err != nil {
				t.Error(err)
			}
		}
	}
	if n < 80 {
		t.Errorf("%d cells", n)
	}
	for _, rule := range cellRules() {
		if _, err := replay.ParseRule(rule); err != nil {
			t.Error(err)
		}
	}
}

func TestPlayMeasures(t *testing.T) {
	b := &Bench{Seeds: 2, Log: io.Discard}
	c := cell{
		name: "small", open: true,
		trace: func(seed uint64) *replay.Trace {
			return bench.Must(replay.Generate(replay.GenerateConfig{Requests: 200, Rate: 20, Seed: seed}))
		},
		set: func(*replay.Scenario) {},
	}
	all := b.play(context.Background(), []cell{c, c.with("predicting", predicting)}, []string{defaultRule, "random"})
	own, other := find(all, "small", defaultRule), find(all, "small, predicting", "random")
	if len(all) != 4 || own.HitRate.Mean <= other.HitRate.Mean || own.TTFT.Min > own.TTFT.Mean || own.TTFT.Max < own.TTFT.Mean {
		t.Errorf("%+v", all)
	}
	var table bytes.Buffer
	if printMeasured(&table, all); !strings.Contains(table.String(), "small, predicting\n") {
		t.Error(table.String())
	}
	file := filepath.Join(t.TempDir(), "new", "policy.jsonl")
	writeLines(file, all)
	text, err := os.ReadFile(file)
	if err != nil || strings.Count(string(text), "\n") != 4 {
		t.Errorf("%v\n%s", err, text)
	}
}

func TestBenchNamesTheMissingTrace(t *testing.T) {
	b := &Bench{Traces: t.TempDir(), Seeds: 1, Log: io.Discard}
	if err := bench.Try(func() { b.Figures(context.Background(), io.Discard, t.TempDir()) }); err == nil || !strings.Contains(err.Error(), "mooncake_conversation") {
		t.Errorf("%v", err)
	}
}
