// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
)

const (
	costReplicas = 4
	costWorkers  = 8
	costSeconds  = 4 // of requests
	// Blocks of a prompt, of which each has its first half in common with the one before:
	// of a load test's, of 512 tokens and an answer or two before them; of a long one;
	// and of the public trace of chats, whose mean is 13,300 tokens.
	costShort, costLong, costChat = 40, 430, 830
)

// Sync measures the CPU time that a request costs each replica: four replicas with real
// routers in this process, less the same replicas without the exchange. The bus runs in
// its own process, as in a fleet, started by a command that does what [ServeBus] does.
func (b *Bench) Sync(command []string) []bench.Figure {
	bus := startBusProcess(command)
	defer bus.Stop()
	var shapes []shape
	for _, c := range []struct {
		what   string
		rate   int // requests a second, of all replicas
		blocks int
		ttl    time.Duration
		target bench.Target
	}{
		{"", 1000, costShort, predictTTL, bench.AtMost(30)},
		{"", 1000, costLong, predictTTL, bench.AtMost(30)},
		{", without prediction", 1000, costLong, -1, bench.Target{}},
		{"", 1000, costChat, predictTTL, bench.Target{}},
		{"", 4000, costShort, predictTTL, bench.AtMost(30)},
		{"", 4000, costLong, predictTTL, bench.AtMost(30)},
	} {
		each := float64(c.rate * costSeconds * costReplicas)
		what := fmt.Sprintf("CPU of replica sync, of a request, of each of %d replicas, %d requests/s of %d blocks%s", costReplicas, c.rate, c.blocks, c.what)
		shapes = append(shapes, shape{
			[]quantity{{what, "µs", c.target}, {"the same and a quarter of the bus", "µs", bench.Target{}}},
			func() []float64 {
				return inLabAt(bus.url, func(l *lab) []float64 {
					alone, aloneBus := l.tellTime(bus, false, c.rate, c.blocks, c.ttl)
					synced, syncedBus := l.tellTime(bus, true, c.rate, c.blocks, c.ttl)
					own, all := synced-alone, synced-alone+syncedBus-aloneBus
					return []float64{own.Seconds() * 1e6 / each, all.Seconds() * 1e6 / each}
				})
			},
		})
	}
	return b.run(shapes)
}

// tellTime returns the CPU time of replicas during some seconds of requests with so many
// blocks each, and that of the bus.
func (l *lab) tellTime(bus *busProcess, synced bool, rate, size int, predict time.Duration) (own, server time.Duration) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	var routers []*router.Router
	for n := range costReplicas {
		var exchange *replicas.Sync
		conf := router.Config{PredictTTL: predict}
		if synced {
			conf.Tell = func(c router.Change) { exchange.Publish(c) }
		}
		r := newRouter(conf, costWorkers, 0)
		routers = append(routers, r)
		if !synced {
			continue
		}
		nc := l.connect()
		exchange = bench.Must(replicas.NewSync(nc, replicas.SyncConfig{
			Scope: l.scope, ID: uint64(n) + 1, Apply: r.PeerChanged, Remove: r.RemovePeer, FirstToken: r.MarkPrefillCompleted,
		}))
		running.Go(func() { _ = exchange.Run(ctx) }) // fails where connect would have
		l.until(func() bool { return nc.NumSubscriptions() > 3 && nc.Flush() == nil })
	}
	// The first requests let the replicas find each other and allocate.
	n := rate * costSeconds
	l.tellAll(routers, rate, 0, n/8, size, synced)
	served := bus.cpu()
	before := bench.CPUTime()
	l.tellAll(routers, rate, n, n, size, synced)
	own = bench.CPUTime() - before
	server = bus.cpu()
	return own, server - served
}

// tellAll sends requests with so many blocks each to the replicas in turn, at an even rate.
// A request ends after 32 more have begun.
func (l *lab) tellAll(routers []*router.Router, rate, first, n, size int, synced bool) {
	const behind = 32
	start := time.Now()
	id := func(i int) string { return fmt.Sprintf("%016x-%024x", i%len(routers)+1, i) }
	var blocks router.Blocks
	for i := first; i < first+n+behind; i++ {
		if i < first+n {
			l.wait(time.Until(start.Add(time.Duration(i-first) * time.Second / time.Duration(rate))))
			blocks.Local = append(sequence(i/2, size/2), sequence(i+1<<20, size/2)...)
			blocks.Sequence = indexer.AppendSequenceHashes(blocks.Sequence[:0], blocks.Local)
			blocks.Tokens = size*16 + 7
			r := routers[i%len(routers)]
			bench.Must(r.BestWorker(context.Background(), router.Request{ID: id(i), Owned: true, Model: "m", Blocks: &blocks}))
			r.MarkPrefillCompleted(id(i))
		}
		if done := i - behind; done >= first {
			routers[done%len(routers)].Free(id(done))
		}
	}
	l.until(func() bool {
		for _, r := range routers {
			for _, w := range r.Workers() {
				if synced && w.ActiveRequests > 0 {
					return false
				}
			}
		}
		return true
	})
}

const (
	// tellFaster is how many times faster everything goes than it would, so that it is
	// over in a few seconds: summaries, whole filters and what workers compute.
	tellFaster = 10
	tellFor    = 6 * time.Second // for two whole filters
	tellChain  = 512             // blocks that are stored, and removed, together
)

// Summaries measures the messages of a router group of eight workers. Their caches are full,
// and each worker computes new blocks all the time, as fast as the engine can.
func (b *Bench) Summaries() []bench.Figure {
	rounds := Bench{Rounds: 1, Log: b.Log}
	return rounds.run([]shape{{[]quantity{
		{fmt.Sprintf("summaries of a group of %d workers with %d blocks each, all computing all the time", costWorkers, workerBlocks), "MB/s", bench.AtMost(1)},
		{"the same, messages", "/s", bench.Target{}},
		{"the same, bytes of the largest message", "kB", bench.Target{}},
	}, func() []float64 { return inLab((*lab).summaries) }}})
}

// summaries returns MB and messages a second, and the kB of the largest message.
func (l *lab) summaries() []float64 {
	r := newRouter(router.Config{}, costWorkers, workerBlocks)
	chains := 0
	// compute has the worker whose turn it is store a chain, and forget its oldest one.
	compute := func() {
		w := router.Worker{ID: uint64(chains%costWorkers) + 1}
		hashes := func(n int) []uint64 { return sequence(n, tellChain) }
		if old := chains - workerBlocks/tellChain*costWorkers; old >= 0 {
			r.ApplyEvent(w, indexer.Event{Kind: indexer.Removed, Externals: hashes(old)})
		}
		ev := indexer.Event{Kind: indexer.Stored}
		for _, h := range hashes(chains) {
			ev.Blocks = append(ev.Blocks, indexer.Block{Local: h, External: h})
		}
		r.ApplyEvent(w, ev)
		chains++
	}
	for chains < workerBlocks/tellChain*costWorkers {
		compute()
	}
	above := l.connect()
	nc := l.connect()
	var bytes, messages, largest atomic.Int64
	bench.Must(above.Subscribe(l.scope.Group("g1", ">"), func(m *nats.Msg) {
		bytes.Add(int64(m.Size()))
		messages.Add(1)
		largest.Store(max(largest.Load(), int64(len(m.Data)))) // by this goroutine alone
	}))
	bench.NoError(above.Flush())
	s := bench.Must(replicas.NewGroupPublisher(nc, replicas.GroupPublisherConfig{
		Scope: l.scope, Group: "g1", ID: 1, Router: r, Interval: time.Second / tellFaster, FullEvery: 30 * time.Second / tellFaster,
	}))
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { _ = s.Run(ctx) }) // fails where connect would have
	l.until(func() bool { return largest.Load() > 10_000 })
	// From one whole filter on, so that there are as many as there should be.
	first, before, start := bytes.Load(), messages.Load(), time.Now()
	const rate = costWorkers * 20_480 / 16 / tellChain * tellFaster // chains a second
	n := 0
	for ; time.Since(start) < tellFor; n++ {
		l.wait(time.Until(start.Add(time.Duration(n) * time.Second / rate)))
		compute()
	}
	// In proportion to the chains, since a busy machine computes fewer of them.
	took := float64(n) / rate * tellFaster
	return []float64{float64(bytes.Load()-first) / 1e6 / took, float64(messages.Load()-before) / took, float64(largest.Load()) / 1e3}
}
