// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/replay"
)

func single(v float64) Range { return Range{v, v, v} }

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
		fixed("loop", defaultRule, 4, 10), fixed("loop", rivalRule, 4, 9), fixed("loop", oracleRule, 1, 9),
		fixed("full without events", defaultRule, 9, 90), fixed("full without events", rivalRule, 1, 1),
	}
	all[8].TTFTp90 = single(3)  // of the oracle: saturated
	all[11].TTFTp90 = single(3) // a closed loop counts all the same
	cells := []cell{{name: "a", open: true}, {name: "b", open: true}, {name: "full", open: true}, {name: "loop"}, {name: "full without events", open: true, bound: "full"}}
	f := rivalFigures(cells, all)
	if len(f) != 2 || f[0].Median != 1.5 || f[0].Met || !strings.Contains(f[0].What, "worst of 3 cells that are not saturated: b") {
		t.Errorf("TTFT: %+v", f)
	}
	if f[1].Median < 1.11 || f[1].Median > 1.12 || !strings.Contains(f[1].What, "loop") {
		t.Errorf("E2E: %+v", f[1])
	}
}

// Results are found by the names of cells: cells of one name are equal. Rules parse.
func TestCellsAndRulesAreSound(t *testing.T) {
	b := &Bench{}
	seen := map[string]replay.Scenario{}
	for _, c := range slices.Concat(b.firstShapes(), b.furtherShapes(), b.sevenCells(), b.axisCells()) {
		var s replay.Scenario
		c.set(&s)
		if other, ok := seen[c.name]; ok && !reflect.DeepEqual(s, other) {
			t.Errorf("two cells %q: %+v and %+v", c.name, s, other)
		}
		seen[c.name] = s
	}
	if len(seen) < 60 {
		t.Errorf("%d cells", len(seen))
	}
	for _, rule := range slices.Concat(allRules(), otherRules(), targetRules(), []string{noDecode}) {
		if _, err := replay.ParseRule(rule); err != nil {
			t.Error(err)
		}
	}
}

// The same seed gives the same result.
func TestASimulationRepeats(t *testing.T) {
	trace := bench.Must(replay.Generate(replay.GenerateConfig{Requests: 500, Rate: 20, Seed: 1}))
	var first []byte
	for range 3 {
		result := bench.Must(replay.Run(t.Context(), replay.Scenario{Trace: trace, Rule: bench.Must(replay.ParseRule(defaultRule)), KVBlocks: 400, Seed: 1}))
		text := bench.Must(json.Marshal(result))
		if first == nil {
			first = text
		} else if !bytes.Equal(text, first) {
			t.Fatalf("%s, before %s", text, first)
		}
	}
}

func TestPlayMeasures(t *testing.T) {
	b := &Bench{Log: io.Discard}
	c := cell{
		name: "small", open: true,
		trace: func(seed uint64) *replay.Trace {
			return bench.Must(replay.Generate(replay.GenerateConfig{Requests: 200, Rate: 20, Seed: seed}))
		},
		set: func(*replay.Scenario) {},
	}
	all := b.play(context.Background(), "small", []cell{c, c.with("predicting", predicting), c}, []string{defaultRule, "random"}, 2)
	own, other := find(all, "small", defaultRule), find(all, "small, predicting", "random")
	if len(all) != 4 || own.HitRate.Mean <= other.HitRate.Mean || own.TTFT.Min > own.TTFT.Mean || own.TTFT.Max < own.TTFT.Mean {
		t.Errorf("%+v", all)
	}
	var table bytes.Buffer
	file := filepath.Join(t.TempDir(), "new", "policy.jsonl")
	if record(&table, file, all); !strings.Contains(table.String(), "\nsmall, predicting ") {
		t.Error(table.String())
	}
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
