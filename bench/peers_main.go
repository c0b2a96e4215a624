// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// The command behind make bench-peers.
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
	rounds := flag.Int("rounds", 5, "measure each shape so often; the median counts")
	dir := flag.String("report", "bench/out", "write the figures to this folder")
	commit := flag.String("commit", "", "record this commit")
	only := flag.String("only", "", "measure only the shapes that match this regular expression")
	dynamo := flag.String("dynamo", "", "program of bench/peers/dynamo.rs")
	llmd := flag.String("llmd", "", "program of bench/peers/llmd.go")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	b := bench.PeerBench{Rounds: *rounds, Only: regexp.MustCompile(*only), Dynamo: *dynamo, LLMD: *llmd, Log: os.Stderr}
	figures, err := b.Figures(ctx)
	met := false
	if err == nil {
		met, err = bench.Report(os.Stdout, *dir, bench.NewRun("bench-peers", *commit, "make bench-peers", figures))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if err != nil || !met {
		os.Exit(1)
	}
}
