// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// The command behind make bench-policy.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	"github.com/kvroute/kvroute/bench"
)

func main() {
	traces := flag.String("traces", "", "folder with the traces")
	seeds := flag.Int("seeds", 3, "seeds of each cell; their mean counts")
	dir := flag.String("report", "bench/out", "write the figures to this folder")
	plots := flag.String("plots", "bench/out", "write the plots to this folder")
	commit := flag.String("commit", "", "record this commit")
	flag.Parse()
	b := bench.PolicyBench{Traces: *traces, Seeds: max(1, *seeds), Log: os.Stderr}
	figures, err := b.Figures(context.Background(), os.Stdout, *dir, *plots)
	met := false
	if err == nil {
		fmt.Println()
		met, err = bench.Report(os.Stdout, *dir, bench.NewRun("bench-policy", *commit, "make bench-policy", figures))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if err != nil || !met {
		os.Exit(1)
	}
}
