// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// The command behind make bench-events.
package main

import (
	"flag"
	"fmt"
	"os"
	"regexp"

	"github.com/kvroute/kvroute/bench"
)

func main() {
	rounds := flag.Int("rounds", 3, "measure each shape so often; the median counts")
	dir := flag.String("report", "bench/out", "write the figures to this folder")
	commit := flag.String("commit", "", "record this commit")
	only := flag.String("only", "", "measure only what matches this regular expression")
	flag.Parse()
	b := bench.EventsBench{Rounds: *rounds, Only: regexp.MustCompile(*only), Log: os.Stderr}
	figures, err := b.Figures()
	met := false
	if err == nil {
		met, err = bench.Report(os.Stdout, *dir, bench.NewRun("bench-events", *commit, "make bench-events", figures))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if err != nil || !met {
		os.Exit(1)
	}
}
