// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// The command behind make bench-index.
package main

import (
	"flag"
	"fmt"
	"os"
	"regexp"

	"github.com/kvroute/kvroute/bench"
)

func main() {
	rounds := flag.Int("rounds", 5, "measure each shape so often; the median counts")
	dir := flag.String("report", "bench/out", "write the figures to this folder")
	commit := flag.String("commit", "", "record this commit")
	only := flag.String("only", "", "measure only what matches this regular expression")
	flag.Parse()
	b := bench.IndexBench{Rounds: *rounds, Only: regexp.MustCompile(*only), Log: os.Stderr}
	met, err := bench.Report(os.Stdout, *dir, bench.NewRun("bench-index", *commit, "make bench-index", b.Figures()))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if err != nil || !met {
		os.Exit(1)
	}
}
