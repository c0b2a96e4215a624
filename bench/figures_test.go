// SPDX-License-Identifier: Apache-2.0

package bench_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench"
)

func TestReport(t *testing.T) {
	good := bench.Figure{What: "lookup", Target: "≤ 5 µs", Unit: "µs", Median: 1.25, Min: 1, Max: 2, Met: true}
	missed := bench.Figure{What: "memory", Target: "≤ 48 B", Unit: "B", Median: 50, Min: 50, Max: 51}
	extra := bench.Figure{What: "for information", Median: 3}
	for _, c := range []struct {
		figures []bench.Figure
		last    string
		met     bool
	}{
		{[]bench.Figure{good, extra}, "1 of 1 targets met", true},
		{[]bench.Figure{good, missed, extra}, "1 of 2 targets met", false},
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
	// Any difference from a reference is a target that was missed.
	for different, last := range map[int]string{0: "2 of 2 targets met", 3: "1 of 2 targets met"} {
		r := bench.NewRun("conformance", "abc", "make conformance", []bench.Figure{good})
		r.Compared = []bench.Comparison{bench.NewComparison("template", "t.jinja", 200, different, 2*time.Millisecond, 30*time.Millisecond)}
		var out bytes.Buffer
		met, err := bench.Report(&out, t.TempDir(), r)
		row := fmt.Sprintf("template t.jinja 200 %d %d 10 15", 200-different, different)
		if text := strings.Join(strings.Fields(out.String()), " "); err != nil || met != (different == 0) || !strings.Contains(text, row) || !strings.HasSuffix(text, last) {
			t.Errorf("met %v, error %v, printed\n%s", met, err, out.String())
		}
	}
	if met, err := bench.Report(&bytes.Buffer{}, t.TempDir(), bench.Run{Name: "empty"}); met || err == nil {
		t.Errorf("a run of nothing: %v, %v", met, err)
	}
	if _, err := bench.Report(&bytes.Buffer{}, t.TempDir(), bench.Run{Name: "../evil"}); err == nil {
		t.Error("a name with a slash must be refused")
	}
}
