// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"math/rand/v2"
	"runtime"
	"strconv"
	"syscall"
	"testing"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// manyRouter is a router with workers that each have four requests in flight, and prompts of
// 512 tokens that 8 workers have cached and 100 tokens of their own.
func manyRouter(tb testing.TB, conf router.Config, workers int) (r *router.Router, prompts []*router.Blocks) {
	conf.PredictTTL = -1
	r, err := router.New(conf)
	if err != nil {
		tb.Fatal(err)
	}
	for id := range uint64(workers) {
		w := worker(id + 1)
		w.BlockSize, w.MaxNumSeqs, w.TotalKVBlocks, w.MaxBatchedTokens = benchBlock, 256, 1<<16, 8192
		if err := r.SetWorker(w); err != nil {
			tb.Fatal(err)
		}
	}
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range 1024 {
		local := make([]uint64, 38)
		for j := range local {
			local[j] = uint64(i%32*1000 + j + 1)
			if j >= 32 {
				local[j] = rng.Uint64()
			}
		}
		b := &router.Blocks{Local: local, Sequence: indexer.AppendSequenceHashes(nil, local), Tokens: 612}
		prompts = append(prompts, b)
		if i >= 256 {
			continue
		}
		ev := indexer.Event{Kind: indexer.Stored}
		for k := range 32 {
			ev.Blocks = append(ev.Blocks, indexer.Block{Local: local[k], External: b.Sequence[k]})
		}
		r.ApplyEvent(router.Worker{ID: rng.Uint64N(uint64(workers)) + 1}, ev)
	}
	for i := range 4 * workers {
		at := router.Worker{ID: uint64(i%workers) + 1}
		id := "held" + strconv.Itoa(i)
		if _, err := r.BestWorker(context.Background(), router.Request{ID: id, Model: "m", Owned: true, Pinned: &at, Blocks: prompts[rng.IntN(len(prompts))]}); err != nil {
			tb.Fatal(err)
		}
		if i%4 > 0 {
			r.MarkPrefillCompleted(id)
		}
	}
	return r, prompts
}

// BenchmarkManyWorkers measures a booked decision and its end with 4,096 workers that have a million
// blocks in all, and the process's memory afterwards. The default is "kept".
func BenchmarkManyWorkers(b *testing.B) {
	for name, conf := range map[string]router.Config{"kept": {}, "not kept": {KeepDecisions: -1}, "outputs": {KeepDecisions: -1, EstimateOutput: true}} {
		b.Run(name, func(b *testing.B) {
			r, prompts := manyRouter(b, conf, 4096)
			rng := rand.New(rand.NewPCG(2, 2))
			for i := range 1 << 15 {
				ev := indexer.Event{Kind: indexer.Stored, Blocks: make([]indexer.Block, 32)}
				for k := range ev.Blocks {
					ev.Blocks[k] = indexer.Block{Local: rng.Uint64(), External: rng.Uint64()}
				}
				r.ApplyEvent(router.Worker{ID: uint64(i%4096) + 1}, ev)
			}
			b.ReportAllocs()
			i, start := 0, cpuTime(b)
			for b.Loop() {
				if _, err := r.BestWorker(context.Background(), router.Request{ID: "x", Model: "m", Owned: true, WantSecond: true, Blocks: prompts[i%len(prompts)]}); err != nil {
					b.Fatal(err)
				}
				r.Free("x")
				i++
			}
			b.ReportMetric(float64(cpuTime(b)-start)/float64(i), "cpu-ns/op")
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			b.ReportMetric(float64(m.HeapAlloc)/1e6, "heap-MB")
			b.ReportMetric(float64(m.Sys)/1e6, "process-MB")
			runtime.KeepAlive(r)
		})
	}
}

// cpuTime is the CPU time of the process, which other load on the machine does not change much.
func cpuTime(tb testing.TB) int64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		tb.Fatal(err)
	}
	return u.Utime.Nano() + u.Stime.Nano()
}
