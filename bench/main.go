// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// The command behind make bench-index, bench-events, bench-policy and bench-fleet:
// its first argument names the benchmark.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"slices"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/parts"
	"github.com/kvroute/kvroute/bench/policy"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	bench.Exit("bench", func() bool { return run(ctx, os.Args[1:]) })
}

// busArgument makes the process a NATS server for another process.
const busArgument = "bus"

func run(ctx context.Context, args []string) (met bool) {
	if len(args) == 0 {
		args = []string{"nothing"}
	}
	part, traces := parts.Bench{Log: os.Stderr}, policy.Bench{Log: os.Stderr}
	fs := flag.NewFlagSet("bench "+args[0], flag.ExitOnError)
	fs.IntVar(&part.Rounds, "rounds", 3, "`number` of times to measure each shape, of which the median counts; for policy and fleet, seeds of each cell, of which the mean counts")
	dir := fs.String("report", "bench/out", "`folder` for the figures")
	commit := fs.String("commit", "", "commit to name in the report")
	only := fs.String("only", "", "index, events: measure only shapes that match this regular expression")
	base := fs.String("base", "", "index, events: `folder` of an earlier checkout to compare with")
	fs.StringVar(&part.Dynamo, "dynamo", "", "index: `program` that measures Dynamo's index, to compare with; empty leaves it out")
	fs.StringVar(&traces.Traces, "traces", "", "policy, fleet: `folder` with the traces")
	bench.NoError(fs.Parse(args[1:]))
	part.Only, traces.Seeds = bench.Must(regexp.Compile(*only)), max(1, part.Rounds)
	cost := parts.Bench{Rounds: 3, Log: os.Stderr} // of what replicas and groups exchange
	var figures []bench.Figure
	command := "make bench-" + args[0]
	switch args[0] {
	case "index", "events":
		if *base == "" {
			figures = map[string]func() []bench.Figure{"index": part.Index, "events": part.Events}[args[0]]()
		} else {
			figures, command = part.Compare(ctx, args[0], *base), command+" BASE="+*base
		}
	case "policy":
		figures = append(cost.Decisions(), traces.Figures(ctx, os.Stdout, *dir)...)
	case "fleet":
		figures = slices.Concat(traces.Fleet(ctx, os.Stdout, *dir), cost.Sync([]string{os.Args[0], busArgument}), cost.Summaries(), parts.Scale(traces.Traces))
	case busArgument:
		parts.ServeBus(os.Stdin, os.Stdout)
		return true
	default:
		bench.NoError(fmt.Errorf("there is no benchmark %q; there are index, events, policy and fleet", args[0]))
	}
	fmt.Println()
	return bench.Must(bench.Report(os.Stdout, *dir, bench.NewRun("bench-"+args[0], *commit, command, figures).Part(*only)))
}
