// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// The command behind make bench-index, bench-peers, bench-events, bench-policy and bench-fleet:
// its first argument is which.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"

	"github.com/kvroute/kvroute/bench"
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

// busArgument makes the process a NATS server for another one.
const busArgument = "bus"

func run(ctx context.Context, args []string) (met bool, err error) {
	if len(args) == 0 {
		return false, fmt.Errorf("bench: say which: index, peers, events, policy or fleet")
	}
	if args[0] == busArgument {
		return true, bench.ServeBus(os.Stdin, os.Stdout)
	}
	fs := flag.NewFlagSet("bench "+args[0], flag.ExitOnError)
	rounds := fs.Int("rounds", 3, "measure each shape so often, and the median counts; of policy and fleet, seeds of each cell, and their mean counts")
	dir := fs.String("report", "bench/out", "write the figures to this folder")
	commit := fs.String("commit", "", "record this commit")
	var only *regexp.Regexp
	fs.Func("only", "measure only what matches this regular expression", func(s string) (err error) {
		only, err = regexp.Compile(s)
		return err
	})
	var measure func() ([]bench.Figure, error)
	switch args[0] {
	case "index":
		measure = func() ([]bench.Figure, error) {
			b := bench.IndexBench{Rounds: *rounds, Only: only, Log: os.Stderr}
			return b.Figures(), nil
		}
	case "peers":
		dynamo := fs.String("dynamo", "", "program of bench/peers/dynamo.rs")
		llmd := fs.String("llmd", "", "program of bench/peers/llmd.go")
		measure = func() ([]bench.Figure, error) {
			b := bench.PeerBench{Rounds: *rounds, Only: only, Dynamo: *dynamo, LLMD: *llmd, Log: os.Stderr}
			return b.Figures(ctx)
		}
	case "events":
		measure = func() ([]bench.Figure, error) {
			b := bench.EventsBench{Rounds: *rounds, Only: only, Log: os.Stderr}
			return b.Figures()
		}
	case "policy":
		traces := fs.String("traces", "", "folder with the traces")
		plots := fs.String("plots", "bench/out", "write the plots to this folder")
		measure = func() ([]bench.Figure, error) {
			b := bench.PolicyBench{Traces: *traces, Seeds: max(1, *rounds), Log: os.Stderr}
			defer fmt.Println()
			return b.Figures(ctx, os.Stdout, *dir, *plots)
		}
	case "fleet":
		traces := fs.String("traces", "", "folder with the traces")
		measure = func() ([]bench.Figure, error) {
			b := bench.FleetBench{Traces: *traces, Seeds: max(1, *rounds), Bus: []string{os.Args[0], busArgument}, Log: os.Stderr}
			defer fmt.Println()
			return b.Figures(ctx, os.Stdout, *dir)
		}
	default:
		return false, fmt.Errorf("bench: %q is none of index, peers, events, policy and fleet", args[0])
	}
	if err := fs.Parse(args[1:]); err != nil {
		return false, err
	}
	if only != nil && (args[0] == "policy" || args[0] == "fleet") {
		return false, fmt.Errorf("bench: %s has gates that compare its cells: --only cannot leave any out", args[0])
	}
	figures, err := measure()
	if err != nil {
		return false, err
	}
	return bench.Report(os.Stdout, *dir, bench.NewRun("bench-"+args[0], *commit, "make bench-"+args[0], figures))
}
