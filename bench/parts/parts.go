// SPDX-License-Identifier: Apache-2.0

// Package parts measures parts of kvroute alone, each against its targets: the index,
// decisions, events and snapshots, and the messages between replicas and router groups.
// ../README.md is the method. Errors end a measurement with [bench.NoError].
//
// One measurement runs at a time: each uses all cores.
package parts

import (
	"fmt"
	"io"
	"net/netip"
	"regexp"
	"runtime"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// Bench says how the shapes of a part are measured.
type Bench struct {
	Rounds int            // of each shape; the median counts
	Only   *regexp.Regexp // of the shapes' names; nil matches all
	Dynamo string         // program that measures Dynamo's index; empty leaves the comparison out
	Log    io.Writer      // gets a line for each figure
}

// shape is something to measure: one row of the report, or more rows that are measured together.
type shape struct {
	rows    []bench.Row
	measure func() []float64 // a value for each row
}

// one is a shape of one row.
func one(what, unit string, target bench.Target, measure func() float64) shape {
	return shape{[]bench.Row{bench.NewRow(what, unit, target)}, func() []float64 { return []float64{measure()} }}
}

func (b *Bench) matches(name string) bool { return b.Only == nil || b.Only.MatchString(name) }

// run measures the shapes that match b.Only.
func (b *Bench) run(shapes []shape) (out []bench.Figure) {
	for _, s := range shapes {
		name := s.rows[0].What
		if !b.matches(name) {
			continue
		}
		bench.Within(name, func() {
			round := func() []float64 {
				runtime.GC()
				return s.measure()
			}
			for _, f := range bench.Rounds(b.Rounds, s.rows, round) {
				fmt.Fprintf(b.Log, "%s: %.4g %s (%s)\n", f.What, f.Median, f.Unit, f.Target)
				out = append(out, f)
			}
		})
	}
	return out
}

const (
	blockTokens  = 16
	workerBlocks = 20_000 // in a worker's cache
	predictTTL   = 10 * time.Second
)

// newRouter returns a router with n workers of one model, whose ids begin at 1. Each worker has
// room for so many blocks; 0 sets no bound.
func newRouter(conf router.Config, n, blocks int) *router.Router {
	r := bench.Must(router.New(conf))
	for id := range uint64(n) {
		bench.NoError(r.SetWorker(router.WorkerInfo{
			ID: id + 1, Address: netip.MustParseAddrPort("10.0.0.1:8000"), Models: []string{"m"}, BlockSize: blockTokens, TotalKVBlocks: blocks,
		}))
	}
	return r
}

// promptOf returns the blocks of a prompt.
func promptOf(local []uint64, tokens int) router.Blocks {
	return router.Blocks{Local: local, Sequence: indexer.AppendSequenceHashes(nil, local), Tokens: tokens}
}

// store applies the event that a worker stored a prompt, under its sequence hashes.
func store(r *router.Router, w router.Worker, prompt *router.Blocks) {
	ev := indexer.Event{Kind: indexer.Stored}
	for i := range prompt.Local {
		ev.Blocks = append(ev.Blocks, indexer.Block{Local: prompt.Local[i], External: prompt.Sequence[i]})
	}
	r.ApplyEvent(w, ev)
}
