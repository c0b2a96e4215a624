// SPDX-License-Identifier: Apache-2.0

package bench_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/bench"
)

func TestReport(t *testing.T) {
	good := bench.Figure{What: "lookup", Target: "≤ 5 µs", Unit: "µs", Median: 1.25, Min: 1, Max: 2, Met: true}
	missed := bench.Figure{What: "memory", Target: "≤ 48 B", Unit: "B", Median: 50, Min: 50, Max: 51}
	extra := bench.Figure{What: "for information", Median: 3}
	apart := bench.AtMost(5).Within(1.3).Figure("noisy", "ms", 4, 3, 4)
	for _, c := range []struct {
		figures []bench.Figure
		last    string
		met     bool
	}{
		{[]bench.Figure{good, extra}, "1 of 1 targets met", true},
		{[]bench.Figure{good, missed, extra}, "1 of 2 targets met", false},
		{[]bench.Figure{good, apart}, "1 of 2 targets met", false},
		{[]bench.Figure{good, bench.AtMost(5).Within(1.3).Figure("steady", "ms", 4, 3.5, 4.5)}, "2 of 2 targets met", true},
		{[]bench.Figure{extra}, "0 of 0 targets met", true},
	} {
		dir := filepath.Join(t.TempDir(), "out")
		var out bytes.Buffer
		met, err := bench.Report(&out, dir, bench.NewRun("bench-x", "abc", "make bench-x", c.figures))
		if err != nil || met != c.met {
			t.Errorf("met %v, error %v; want %v", met, err, c.met)
		}
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if lines[len(lines)-1] != c.last || len(lines) != len(c.figures)+2 {
			t.Errorf("printed\n%s\nwant %q last", out.String(), c.last)
		}
		data, err := os.ReadFile(filepath.Join(dir, "bench-x.json"))
		if err != nil {
			t.Fatal(err)
		}
		var r bench.Run
		if err := json.Unmarshal(data, &r); err != nil || len(r.Figures) != len(c.figures) || r.Commit != "abc" || r.Cores < 1 || r.Date.IsZero() {
			t.Errorf("wrote %s, %v", data, err)
		}
	}
	if met, err := bench.Report(&bytes.Buffer{}, t.TempDir(), bench.Run{Name: "empty"}); met || err == nil {
		t.Errorf("a run of nothing: %v, %v", met, err)
	}
	if _, err := bench.Report(&bytes.Buffer{}, t.TempDir(), bench.Run{Name: "../evil"}); err == nil {
		t.Error("a name with a slash must be refused")
	}
}

// A run of a part does not replace the file of a whole run.
func TestPartsHaveFilesOfTheirOwn(t *testing.T) {
	for only, want := range map[string]string{
		"": "interop: make test-interop", "hybrid": "interop-hybrid: make test-interop ONLY='hybrid'",
		"vllm ../x,pd": "interop-vllm-x-pd: make test-interop ONLY='vllm ../x,pd'",
	} {
		if r := bench.NewRun("interop", "", "make test-interop", nil).Part(only); r.Name+": "+r.Command != want {
			t.Errorf("ONLY=%q: %s: %s, want %s", only, r.Name, r.Command, want)
		}
	}
}

func TestRounds(t *testing.T) {
	v := 0.
	rows := []bench.Row{bench.NewRow("a", "µs", bench.AtMost(3)), bench.NewRow("b", "", bench.Above(3)), bench.NewRow("without values", "", bench.Exactly(1))}
	got := bench.Rounds(4, rows, func() []float64 {
		v++
		return []float64{v, 4 - v}
	})
	want := []bench.Figure{
		{What: "a", Target: "≤ 3", Unit: "µs", Median: 3, Min: 1, Max: 4, Met: true},
		{What: "b", Target: "> 3", Median: 2, Min: 0, Max: 3},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
