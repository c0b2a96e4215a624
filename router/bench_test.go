// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// decider is a router with four workers that have the shared beginnings of prompts
// cached.
type decider struct {
	router  *router.Router
	prompts [][]uint32
	blocks  []*router.Blocks
}

const benchBlock = 16

// newDecider makes prompts of 512 shared tokens and 50 to 200 tokens of their own.
func newDecider(tb testing.TB, conf router.Config) *decider {
	conf.PredictTTL = -1
	r, err := router.New(conf)
	if err != nil {
		tb.Fatal(err)
	}
	d := &decider{router: r}
	for id := range uint64(4) {
		w := worker(id + 1)
		w.BlockSize = benchBlock
		if err := r.SetWorker(w); err != nil {
			tb.Fatal(err)
		}
	}
	rnd := rand.New(rand.NewPCG(1, 1))
	for i := range 1024 {
		tokens := make([]uint32, 512, 712)
		for j := range tokens {
			tokens[j] = uint32(i%32*1000 + j)
		}
		for range 50 + rnd.IntN(151) {
			tokens = append(tokens, rnd.Uint32N(100_000))
		}
		local := indexer.AppendLocalHashes(nil, tokens, benchBlock, indexer.Seed("", ""))
		b := &router.Blocks{Local: local, Sequence: indexer.AppendSequenceHashes(nil, local), Tokens: len(tokens)}
		d.prompts, d.blocks = append(d.prompts, tokens), append(d.blocks, b)
		ev := indexer.Event{Kind: indexer.Stored}
		for k := range 512 / benchBlock {
			ev.Blocks = append(ev.Blocks, indexer.Block{Local: local[k], External: b.Sequence[k]})
		}
		r.ApplyEvent(router.Worker{ID: uint64(i%4 + 1)}, ev)
	}
	return d
}

// serve books the i-th request and frees it.
func (d *decider) serve(id string, i int, hashed bool) error {
	req := router.Request{ID: id, Model: "m", Owned: true}
	if hashed {
		req.Blocks = d.blocks[i%len(d.blocks)]
	} else {
		req.Tokens = d.prompts[i%len(d.prompts)]
	}
	_, err := d.router.BestWorker(context.Background(), req)
	d.router.Free(id)
	return err
}

// BenchmarkDecision measures a booked decision and its end, on GOMAXPROCS goroutines:
// from hashes, and from token ids including the hashing.
func BenchmarkDecision(b *testing.B) {
	for _, hashed := range []bool{true, false} {
		name := "tokens"
		if hashed {
			name = "hashes"
		}
		b.Run(name, func(b *testing.B) {
			d := newDecider(b, router.Config{})
			var next atomic.Uint64
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				me := next.Add(1)
				ids := make([]string, 256)
				for i := range ids {
					ids[i] = "request-" + strconv.FormatUint(me, 10) + "-" + strconv.Itoa(i)
				}
				for i := 0; pb.Next(); i++ {
					if err := d.serve(ids[i%len(ids)], i, hashed); err != nil {
						b.Error(err)
						return
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "decisions/s")
		})
	}
}
