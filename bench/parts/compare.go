// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/bench"
)

// sameCost is the largest ratio of costs, new ÷ old, that is no change.
const sameCost = 1.03

// Compare measures a part of two checkouts, the current folder (new) and the folder base (old): "events", or
// "index", which includes decisions. Each round runs the old programs twice and the new ones once, in an order that
// changes. A ratio above 1 means that new costs more.
func (b *Bench) Compare(ctx context.Context, part, base string) (out []bench.Figure) {
	dir := bench.Must(os.MkdirTemp("", "bench-"+part))
	defer func() { _ = os.RemoveAll(dir) }()
	old, current := filepath.Join(dir, "old"), filepath.Join(dir, "new")
	build(ctx, part, base, old)
	build(ctx, part, ".", current)
	programs := []string{old, old, current}
	rng := rand.New(rand.NewPCG(1, 1))
	var names []string
	changed, unchanged := map[string][]float64{}, map[string][]float64{} // ratios by name
	for round := range b.Rounds {
		var runs [3][]bench.Figure
		for _, i := range rng.Perm(len(programs)) {
			runs[i] = b.measure(ctx, part, programs[i])
		}
		for _, now := range runs[2] {
			name := now.What
			i := slices.IndexFunc(runs[0], func(f bench.Figure) bool { return f.What == name })
			if i < 0 {
				fmt.Fprintf(b.Log, "%s: the old checkout has no such row\n", name)
				continue
			}
			if round == 0 {
				names = append(names, name)
			}
			changed[name] = append(changed[name], costRatio(now, runs[0][i]))
			unchanged[name] = append(unchanged[name], costRatio(runs[1][i], runs[0][i]))
		}
		fmt.Fprintf(b.Log, "round %d of %d\n", round+1, b.Rounds)
	}
	for _, name := range names {
		out = append(out, compared(name, changed[name], unchanged[name])...)
	}
	return out
}

// compared returns the two rows of a comparison. The target is sameCost, or the largest ratio of the
// old programs to themselves, in either direction, if this is more.
func compared(name string, changed, unchanged []float64) []bench.Figure {
	noise := bench.NewFigure(name+": old ÷ old", "×", bench.Target{}, unchanged...)
	limit := max(sameCost, noise.Max, 1/noise.Min)
	target := bench.AtMost(math.Ceil(limit*1000) / 1000)
	return []bench.Figure{bench.NewFigure(name+": new ÷ old", "×", target, changed...), noise}
}

// costRatio is the cost of a against the cost of b. A figure with a lower bound is a rate, the
// inverse of a cost.
func costRatio(a, b bench.Figure) float64 {
	const tiny = 1e-9 // makes 0 ÷ 0 equal to 1
	if strings.HasPrefix(a.Target, "≥") {
		a, b = b, a
	}
	return (a.Median + tiny) / (b.Median + tiny)
}

// build builds the benchmarks of a part of a checkout into a folder. Functions begin at cache lines: by Go's
// default, a change of one package moves the functions of all others, and a lookup in an unchanged
// index took 0.215 instead of 0.194 µs (six runs each).
func build(ctx context.Context, part, checkout, folder string) {
	const aligned = "-ldflags=-funcalign=64"
	output(exec.CommandContext(ctx, "go", "build", "-C", checkout, aligned, "-o", filepath.Join(folder, part), "bench/main.go"), 0)
	if part == "index" {
		output(exec.CommandContext(ctx, "go", "test", "-C", checkout, aligned, "-c", "-o", filepath.Join(folder, "router"), "./router"), 0)
	}
}

// measure runs the benchmarks in a folder once. An index row is the median of three values, a row of events is one.
func (b *Bench) measure(ctx context.Context, part, folder string) (out []bench.Figure) {
	shapes, rounds := indexShapes(), "3"
	if part == "events" {
		shapes, rounds = eventShapes(), "1"
	}
	if slices.ContainsFunc(shapes, func(s shape) bool { return b.matches(s.rows[0].What) }) {
		only := cmp.Or(b.Only, regexp.MustCompile("")).String()
		flags := []string{part, "--rounds", rounds, "--only", only, "--report", folder}
		// Status 1 means that a target of the part is missed. The comparison has its own targets.
		output(exec.CommandContext(ctx, filepath.Join(folder, part), flags...), 1)
		var run bench.Run
		report := bench.Must(filepath.Glob(filepath.Join(folder, "bench-"+part+"*.json")))[0] // see bench.Run.Part
		bench.NoError(json.Unmarshal(bench.Must(os.ReadFile(report)), &run))
		out = run.Figures
	}
	if part == "index" && b.matches("BenchmarkDecision") {
		flags := []string{"-test.run", "^$", "-test.bench", "^BenchmarkDecision$", "-test.benchtime", "3s"}
		out = append(out, benchmarks(output(exec.CommandContext(ctx, filepath.Join(folder, "router"), flags...), 0))...)
	}
	return out
}

// benchmarks returns the times that a Go benchmark printed.
func benchmarks(text string) (out []bench.Figure) {
	line := regexp.MustCompile(`(?m)^(Benchmark[\w/]+)\S*\s+\d+\s+(\S+) ns/op`)
	for _, match := range line.FindAllStringSubmatch(text, -1) {
		nanoseconds := bench.Must(strconv.ParseFloat(match[2], 64))
		out = append(out, bench.NewFigure(match[1], "ns", bench.Target{}, nanoseconds))
	}
	return out
}

// output returns what a command printed. Its exit status must be 0 or allowed.
func output(cmd *exec.Cmd, allowed int) string {
	text, err := cmd.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == allowed {
		err = nil
	}
	if err != nil {
		bench.NoError(fmt.Errorf("%s: %w\n%s", cmd, err, text))
	}
	return string(text)
}
