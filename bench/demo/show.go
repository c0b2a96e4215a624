// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/router"
)

// A show plays one load in several ways and compares them.
type show struct {
	name, command string // of the report
	ways          []way
	ratios        []ratio
	strict        bool // each round must meet the targets, not only the median of all
}

// A way is one set of processes that the load is played through.
type way struct {
	title string // of its column, and in errors
	name  string // in figures
	start func(ctx context.Context, s *Stack) error
	check func(ctx context.Context, s *Stack, played *bench.Summary) error // after the load; may be nil
}

// A ratio compares a measure of two ways of one round. Both ran within minutes, so the
// ratio depends less on the machine's other work than either value.
type ratio struct {
	what        string
	target      bench.Target
	of          func(*bench.Summary) float64
	over, under int // ways; under may be none
}

// none as the way below makes a ratio the measure of the way above.
const none = -1

func meanTTFT(s *bench.Summary) float64    { return s.TTFT.Mean }
func p90TTFT(s *bench.Summary) float64     { return s.TTFT.P90 }
func meanITL(s *bench.Summary) float64     { return s.ITL.Mean }
func p99ITL(s *bench.Summary) float64      { return s.ITL.P99 }
func meanE2E(s *bench.Summary) float64     { return s.E2E.Mean }
func cachedShare(s *bench.Summary) float64 { return s.CachedShare }

// busiestShare is the largest worker's share of the requests that reached a worker.
func busiestShare(s *bench.Summary) float64 {
	most, all := 0, 0
	for _, n := range s.PerWorker {
		most, all = max(most, n), all+n
	}
	return float64(most) / float64(max(all, 1))
}

// show returns the show that the flags select.
func (c *Command) show() show {
	started := func(then func(context.Context, *Stack) error) func(context.Context, *Stack) error {
		return func(ctx context.Context, s *Stack) error {
			if err := s.Start(ctx); err != nil {
				return err
			}
			return then(ctx, s)
		}
	}
	alone := func(flags ...string) func(context.Context, *Stack) error {
		return started(func(ctx context.Context, s *Stack) error {
			return s.StartRouter(ctx, append([]string{"--replica", "kvroute-1"}, flags...)...)
		})
	}
	replicated := func(n int, flags ...string) func(context.Context, *Stack) error {
		return started(func(ctx context.Context, s *Stack) error { return s.StartReplicas(ctx, n, flags...) })
	}
	grouped := func(probe string) func(context.Context, *Stack) error {
		return func(ctx context.Context, s *Stack) error {
			return bench.Try(func() { s.startGroups(ctx, c.Groups, "--group-probe", probe) })
		}
	}
	switch n := c.Replicas; {
	case c.Groups > 1:
		return show{
			name: "bench-demo-groups", command: fmt.Sprint("make bench-demo GROUPS=", c.Groups),
			ways: []way{
				{title: "flat", name: "flat", start: alone()},
				{title: "groups, asked", name: "groups that are asked", start: grouped("on"), check: summarized},
				{title: "by summaries", name: "groups by summaries", start: grouped("off"), check: summarized},
			},
			ratios: []ratio{
				{"mean TTFT, groups by summaries ÷ flat", bench.AtMost(1.15), meanTTFT, 2, 0},
				{"mean E2E, groups by summaries ÷ flat", bench.AtMost(1.05), meanE2E, 2, 0},
				{"mean TTFT, groups that are asked ÷ flat", bench.AtMost(1.15), meanTTFT, 1, 0},
				{"mean E2E, groups that are asked ÷ flat", bench.AtMost(1.05), meanE2E, 1, 0},
			},
		}
	case c.Split:
		return splitShow(c.Workers, alone())
	case c.Hot:
		return hotShow(c.Workers, alone)
	case n > 1:
		return show{
			name: "bench-demo-replicas", command: fmt.Sprint("make bench-demo REPLICAS=", n),
			ways: []way{
				{title: "one", name: "one", start: replicated(1)},
				{title: fmt.Sprint(n, " synced"), name: "several", start: replicated(n), check: c.agree},
				{title: fmt.Sprint(n, " unsynced"), name: "without sync", start: replicated(n, "--router-replica-sync=false")},
			},
			ratios: []ratio{
				{"mean TTFT, several replicas ÷ one", bench.AtMost(1.1), meanTTFT, 1, 0},
				{"mean TTFT, without sync ÷ with", bench.Above(1), meanTTFT, 2, 1},
				{"p90 TTFT, several replicas ÷ one", bench.Target{}, p90TTFT, 1, 0},
				{"p90 TTFT, without sync ÷ with", bench.Target{}, p90TTFT, 2, 1},
			},
		}
	}
	roundRobin, kv := string(router.RoundRobin), string(router.KV)
	return show{
		name: "bench-demo", command: "make bench-demo", strict: true,
		ways: []way{
			{title: roundRobin, name: "round robin", start: alone("--router-mode", roundRobin)},
			{title: kv, name: "kv", start: alone("--router-mode", kv)},
		},
		ratios: []ratio{
			{"mean TTFT, kv ÷ round robin", bench.Below(1), meanTTFT, 1, 0},
			{"p90 TTFT, kv ÷ round robin", bench.Target{}, p90TTFT, 1, 0},
			{"mean E2E, kv ÷ round robin", bench.Below(1), meanE2E, 1, 0},
			{"cached share, round robin ÷ kv", bench.Below(1), cachedShare, 0, 1},
		},
	}
}

// splitShow shows workers that start starts: aggregated ones, and the same number split.
func splitShow(workers int, start func(context.Context, *Stack) error) show {
	return show{
		name: "bench-demo-split", command: "make demo DEMO=--split",
		ways: []way{
			{title: fmt.Sprint(workers, " aggregated"), name: "aggregated", start: start},
			{title: fmt.Sprintf("%d + %d split", workers/2, workers-workers/2), name: "split", start: func(ctx context.Context, s *Stack) error {
				s.Prefill = s.Workers / 2
				return start(ctx, s)
			}, check: countLegs},
		},
		ratios: []ratio{
			{"mean TTFT, split ÷ aggregated", bench.Target{}, meanTTFT, 1, 0},
			{"p90 TTFT, split ÷ aggregated", bench.Target{}, p90TTFT, 1, 0},
			{"mean time between tokens, split ÷ aggregated", bench.Target{}, meanITL, 1, 0},
			{"p99 time between tokens, split ÷ aggregated", bench.Target{}, p99ITL, 1, 0},
			{"mean E2E, split ÷ aggregated", bench.Target{}, meanE2E, 1, 0},
		},
	}
}

// hotShow shows the default cost with and without decoding, and round robin. alone starts the workers
// and a router with flags.
func hotShow(workers int, alone func(flags ...string) func(context.Context, *Stack) error) show {
	unevenness := func(s *bench.Summary) float64 { return busiestShare(s) * float64(workers) }
	return show{
		name: "bench-demo-hot", command: "make bench-demo HOT=1", strict: true,
		ways: []way{
			{title: "round-robin", name: "round robin", start: alone("--router-mode", string(router.RoundRobin))},
			{title: "kv, decode 0", name: "kv without decoding", start: alone("--decode-weight=0")},
			{title: "kv", name: "kv", start: alone()},
		},
		ratios: []ratio{
			{"busiest worker's share ÷ an even share, kv", bench.AtMost(1.6), unevenness, 2, none},
			{"mean E2E, kv ÷ kv without decoding", bench.AtMost(.5), meanE2E, 2, 1},
			{"mean TTFT, kv ÷ kv without decoding", bench.Target{}, meanTTFT, 2, 1},
			{"mean E2E, kv ÷ round robin", bench.Target{}, meanE2E, 2, 0},
			{"mean TTFT, kv ÷ round robin", bench.Target{}, meanTTFT, 2, 0},
		},
	}
}

// compare prints a round, with a column for each way.
func (s *show) compare(out io.Writer, round []bench.Summary) {
	row := func(what string, cell func(i int) string) {
		fmt.Fprintf(out, "  %-22s", what)
		for i := range round {
			fmt.Fprintf(out, " %14s", cell(i))
		}
		fmt.Fprintln(out)
	}
	number := func(what, format string, of func(*bench.Summary) any) {
		row(what, func(i int) string { return fmt.Sprintf(format, of(&round[i])) })
	}
	fmt.Fprintln(out)
	row("", func(i int) string { return s.ways[i].title })
	number("requests", "%d", func(s *bench.Summary) any { return s.Requests })
	number("errors", "%d", func(s *bench.Summary) any { return s.Failed() })
	number("TTFT mean", "%.0f ms", func(s *bench.Summary) any { return s.TTFT.Mean * 1e3 })
	number("TTFT p50", "%.0f ms", func(s *bench.Summary) any { return s.TTFT.P50 * 1e3 })
	number("TTFT p90", "%.0f ms", func(s *bench.Summary) any { return s.TTFT.P90 * 1e3 })
	number("TTFT p99", "%.0f ms", func(s *bench.Summary) any { return s.TTFT.P99 * 1e3 })
	number("between tokens mean", "%.1f ms", func(s *bench.Summary) any { return s.ITL.Mean * 1e3 })
	number("between tokens p99", "%.1f ms", func(s *bench.Summary) any { return s.ITL.P99 * 1e3 })
	number("E2E mean", "%.0f ms", func(s *bench.Summary) any { return s.E2E.Mean * 1e3 })
	number("E2E p90", "%.0f ms", func(s *bench.Summary) any { return s.E2E.P90 * 1e3 })
	number("E2E p99", "%.0f ms", func(s *bench.Summary) any { return s.E2E.P99 * 1e3 })
	number("cached prompt tokens", "%.1f %%", func(s *bench.Summary) any { return s.CachedShare * 100 })
	number("busiest worker's share", "%.0f %%", func(s *bench.Summary) any { return busiestShare(s) * 100 })
	for _, name := range slices.Sorted(maps.Keys(round[0].PerWorker)) {
		number("requests of "+name, "%d", func(s *bench.Summary) any { return s.PerWorker[name] })
	}
	for i := range round {
		for kind, n := range round[i].Errors {
			fmt.Fprintf(out, "  %d requests failed: %s\n", n, kind)
		}
	}
}

// judge returns an error if a round misses a target that each round must meet.
func (s *show) judge(round []bench.Summary) (missed error) {
	for _, f := range s.figures([][]bench.Summary{round}) {
		if f.Target != "" && !f.Met && (s.strict || f.What == failedRequests) {
			missed = errors.Join(missed, fmt.Errorf("%s: %.4g, want %s", f.What, f.Median, f.Target))
		}
	}
	return missed
}

const failedRequests = "failed requests"

// figures compares the ways over all rounds.
func (s *show) figures(played [][]bench.Summary) (figures []bench.Figure) {
	add := func(what string, target bench.Target, of func(round []bench.Summary) float64) {
		var v []float64
		for _, round := range played {
			v = append(v, of(round))
		}
		figures = append(figures, bench.NewFigure(what, "", target, v...))
	}
	for _, r := range s.ratios {
		add(r.what, r.target, func(round []bench.Summary) float64 {
			if r.under == none {
				return r.of(&round[r.over])
			}
			return r.of(&round[r.over]) / r.of(&round[r.under])
		})
	}
	for i, w := range s.ways {
		add("mean TTFT in ms, "+w.name, bench.Target{}, func(round []bench.Summary) float64 { return round[i].TTFT.Mean * 1e3 })
		add("mean E2E in ms, "+w.name, bench.Target{}, func(round []bench.Summary) float64 { return round[i].E2E.Mean * 1e3 })
		add("busiest worker's share, "+w.name, bench.Target{}, func(round []bench.Summary) float64 { return busiestShare(&round[i]) })
	}
	add(failedRequests, bench.Exactly(0), func(round []bench.Summary) (n float64) {
		for i := range round {
			n += float64(round[i].Failed())
		}
		return n
	})
	return figures
}

// countLegs adds the prefill workers' requests to those of the load. The share of cached tokens, which
// clients see of decode workers only, becomes that of all workers: a prompt token that no worker
// computed is cached. It fails if no request was split.
func countLegs(ctx context.Context, s *Stack, played *bench.Summary) error {
	return bench.Try(func() {
		var computed, prompts float64
		for i, e := range s.Engines {
			counts := map[string]float64{}
			for line := range strings.Lines(string(bench.Must(process.Get(ctx, "http://"+e.At.HTTP+"/metrics")))) {
				if name, rest, ok := strings.Cut(line, "{"); ok {
					_, value, _ := strings.Cut(rest, "} ")
					counts[name], _ = strconv.ParseFloat(strings.TrimSpace(value), 64)
				}
			}
			computed += counts["vllm:prefix_cache_queries_total"] - counts["vllm:prefix_cache_hits_total"] - counts["vllm:prompt_tokens_by_source_total"]
			if i >= s.Prefill {
				prompts += counts["vllm:prefix_cache_queries_total"]
				continue
			}
			legs := int(counts["vllm:request_success_total"])
			if legs == 0 {
				bench.NoError(fmt.Errorf("worker-%d computed no prompt", i+1))
			}
			played.PerWorker[fmt.Sprint("worker-", i+1)] = legs
		}
		played.CachedShare = 1 - computed/prompts
	})
}

// summarized is [checkSummaries] after a load.
func summarized(ctx context.Context, s *Stack, _ *bench.Summary) error { return checkSummaries(ctx, s) }

// agree has the replicas compared by `kvroute doctor`, which fails if they differ.
func (c *Command) agree(ctx context.Context, s *Stack, _ *bench.Summary) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	args := []string{"doctor"}
	for _, r := range s.Others {
		args = append(args, "--url", "http://"+r.At.HTTP)
	}
	text, err := exec.CommandContext(ctx, self, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("the replicas differ: %w\n%s", err, text)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	_, err = fmt.Fprintf(c.out, "kvroute doctor: %s\n", lines[len(lines)-1])
	return err
}

// startGroups starts two tiers: n groups, each with its share of the workers, an Envoy
// and a router, and the tier above them. It runs in [bench.Try].
func (s *Stack) startGroups(ctx context.Context, n int, flags ...string) {
	s.Bus = bench.Must(bus.StartServer("127.0.0.1:0", "", ""))
	model := filepath.Join(s.Dir, "model") // the tier above hashes prompts as the groups do
	if err := os.CopyFS(model, enginesim.ModelFiles()); !errors.Is(err, os.ErrExist) {
		bench.NoError(err)
	}
	var upper strings.Builder
	fmt.Fprintf(&upper, "version: 1\ncomponent: tier\nmodels:\n- {name: %q, tokenizer: %q}\ngroups:\n", s.Model, model)
	for i := range n {
		name := fmt.Sprint("group-", i+1)
		first, end := i*s.Workers/n, (i+1)*s.Workers/n
		g := &Stack{
			Dir: filepath.Join(s.Dir, name), EnvoyPath: s.EnvoyPath, Bus: s.Bus, SharedBus: true,
			Workers: end - first, EngineFlags: s.EngineFlags, Model: s.Model, Core: s.Core,
		}
		s.Groups = append(s.Groups, g)
		bench.Within(name, func() {
			bench.NoError(os.MkdirAll(g.Dir, 0o700))
			bench.NoError(g.StartEngines(ctx, name, first+1))
			bench.NoError(g.StartRouter(ctx, "--group", name, "--component", name, "--allow-direct"))
		})
		fmt.Fprintf(&upper, "- {name: %s, address: %q}\n", name, strings.TrimPrefix(g.Envoy.URL(), "http://"))
	}
	file := filepath.Join(s.Dir, "upper.yaml")
	bench.NoError(os.WriteFile(file, []byte(upper.String()), 0o600))
	bench.NoError(s.StartRouter(ctx, append([]string{"--config", file}, flags...)...))
	bench.NoError(process.Until(ctx, process.Patience, "the summaries of the groups are missing", func(ctx context.Context) bool { return checkSummaries(ctx, s) == nil }))
}

// checkSummaries fails if the upper tier lacks the current summary of a group.
func checkSummaries(ctx context.Context, s *Stack) error {
	known, err := s.workers(ctx)
	if err != nil {
		return err
	}
	members := 0
	for _, w := range known {
		if w.Summary != nil && !w.Summary.Stale && w.Summary.Filtered {
			members += w.Summary.Members
		}
	}
	if members != s.Workers || len(known) != len(s.Groups) {
		return fmt.Errorf("the summaries name %d of %d workers", members, s.Workers)
	}
	return nil
}
