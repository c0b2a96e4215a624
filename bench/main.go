// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// The command behind make bench-index, bench-peers, bench-events, bench-policy and bench-fleet:
// its first argument names the benchmark.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/parts"
	"github.com/kvroute/kvroute/bench/policy"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	met, err := run(ctx, os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if err != nil || !met {
		os.Exit(1)
	}
}

// busArgument makes the process a NATS server for another process.
const busArgument = "bus"

func run(ctx context.Context, args []string) (met bool, err error) {
	if len(args) == 0 {
		return false, fmt.Errorf("bench: name a benchmark: index, peers, events, policy or fleet")
	}
	if args[0] == busArgument {
		return true, parts.ServeBus(os.Stdin, os.Stdout)
	}
	part, traces := parts.Bench{Log: os.Stderr}, policy.Bench{Log: os.Stderr}
	fs := flag.NewFlagSet("bench "+args[0], flag.ExitOnError)
	fs.IntVar(&part.Rounds, "rounds", 3, "`number` of times to measure each shape, of which the median counts; for policy and fleet, seeds of each cell, of which the mean counts")
	dir := fs.String("report", "bench/out", "`folder` for the figures")
	commit := fs.String("commit", "", "commit to name in the report")
	fs.Func("only", "measure only shapes that match this regular expression", func(s string) (err error) {
		part.Only, err = regexp.Compile(s)
		return err
	})
	fs.StringVar(&traces.Traces, "traces", "", "policy, fleet: `folder` with the traces")
	plots := fs.String("plots", "bench/out", "policy: `folder` for the plots")
	var peers parts.Peers
	fs.StringVar(&peers.Dynamo, "dynamo", "", "peers: `program` of bench/peers/dynamo.rs")
	fs.StringVar(&peers.LLMD, "llmd", "", "peers: `program` of bench/peers/llmd.go")
	if err := fs.Parse(args[1:]); err != nil {
		return false, err
	}
	traces.Seeds = max(1, part.Rounds)
	var figures []bench.Figure
	switch args[0] {
	case "index":
		figures, err = part.Index()
	case "peers":
		figures, err = part.Peers(ctx, peers)
	case "events":
		figures, err = part.Events()
	case "policy", "fleet":
		if part.Only != nil && part.Only.String() != "" {
			return false, fmt.Errorf("bench: the targets of %s compare cells with each other: --only cannot leave any out", args[0])
		}
		figures, err = simulated(ctx, args[0], traces, *dir, *plots)
	default:
		return false, fmt.Errorf("bench: there is no benchmark %q; there are index, peers, events, policy and fleet", args[0])
	}
	if err != nil {
		return false, err
	}
	return bench.Report(os.Stdout, *dir, bench.NewRun("bench-"+args[0], *commit, "make bench-"+args[0], figures))
}

// simulated returns the figures of the benchmarks that simulate, and those of the parts
// that belong to them.
func simulated(ctx context.Context, name string, traces policy.Bench, dir, plots string) (figures []bench.Figure, err error) {
	defer fmt.Println()
	cost := parts.Bench{Rounds: 3, Log: os.Stderr}
	measures := []func() ([]bench.Figure, error){
		parts.Decisions,
		func() ([]bench.Figure, error) { return traces.Figures(ctx, os.Stdout, dir, plots) },
	}
	if name == "fleet" {
		measures = []func() ([]bench.Figure, error){
			func() ([]bench.Figure, error) { return traces.Fleet(ctx, os.Stdout, dir) },
			func() ([]bench.Figure, error) { return cost.Sync([]string{os.Args[0], busArgument}) },
			cost.Summaries,
			func() ([]bench.Figure, error) { return parts.Scale(traces.Traces) },
		}
	}
	for _, measure := range measures {
		more, err := measure()
		if err != nil {
			return nil, err
		}
		figures = append(figures, more...)
	}
	return figures, nil
}
