// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os/exec"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
)

const (
	costReplicas = 4
	costWorkers  = 8
	costSeconds  = 4  // of requests
	costInFlight = 32 // requests
	// Blocks of a prompt, of which each has its first half in common with the one before:
	// of a load test's, of 512 tokens and an answer or two before them; of a long one;
	// and of the public trace of chats, whose mean is 13,300 tokens.
	costShort, costLong, costChat = 40, 430, 830
)

// Sync measures the CPU time that a request costs each replica: four replicas with real
// routers in this process, less the same replicas without the exchange. The bus runs in
// its own process, as in a fleet, started by a command that calls [ServeBus].
func (b *Bench) Sync(command []string) []bench.Figure {
	server := bench.Must(process.StartLines(exec.Command(command[0], command[1:]...)))
	defer server.Stop()
	var url string
	bench.NoError(server.Ask("", &url))
	var shapes []shape
	for _, c := range []struct {
		rate, blocks int // requests a second, of all replicas, and their blocks
		target       bench.Target
	}{
		{1000, costShort, bench.AtMost(30)},
		{1000, costLong, bench.AtMost(30)},
		{1000, costChat, bench.Target{}},
		{4000, costShort, bench.AtMost(30)},
		{4000, costLong, bench.AtMost(30)},
	} {
		requests := float64(c.rate * costSeconds * costReplicas)
		what := fmt.Sprintf("CPU of replica sync, of a request, of each of %d replicas, %d requests/s of %d blocks", costReplicas, c.rate, c.blocks)
		shapes = append(shapes, shape{
			[]bench.Row{bench.NewRow(what, "µs", c.target), bench.NewRow("the same and a quarter of the bus", "µs", bench.Target{})},
			func() []float64 {
				l := &lab{url: url}
				defer l.close()
				pid := server.Pid()
				alone, aloneBus := l.syncTime(pid, false, c.rate, c.blocks)
				synced, syncedBus := l.syncTime(pid, true, c.rate, c.blocks)
				own, all := synced-alone, synced-alone+syncedBus-aloneBus
				return []float64{own.Seconds() * 1e6 / requests, all.Seconds() * 1e6 / requests}
			},
		})
	}
	return b.run(shapes)
}

// ServeBus runs a NATS server until in ends. It answers each line of in with the server's
// URL, as JSON.
func ServeBus(in io.Reader, out io.Writer) {
	s := bench.Must(bus.StartServer("127.0.0.1:0", "", ""))
	defer s.Stop()
	for lines := bufio.NewScanner(in); lines.Scan(); {
		bench.Must(fmt.Fprintf(out, "%q\n", s.URL()))
	}
}

// syncTime returns the CPU time of replicas during some seconds of requests with so many
// blocks each, and that of the bus, a process.
func (l *lab) syncTime(bus int, synced bool, rate, size int) (own, server time.Duration) {
	var routers []*router.Router
	for n := range costReplicas {
		var exchange *replicas.Sync
		conf := router.Config{PredictTTL: predictTTL}
		if synced {
			conf.Hooks.Tell = func(c router.Change) { exchange.Publish(c) }
		}
		r := newRouter(conf, costWorkers, 0)
		routers = append(routers, r)
		if !synced {
			continue
		}
		nc := l.connect()
		exchange = bench.Must(replicas.NewSync(nc, replicas.SyncConfig{
			ID: uint64(n) + 1, Apply: r.PeerChanged, Remove: r.RemovePeer, FirstToken: r.MarkPrefillCompleted,
		}))
		defer background(exchange.Run)()
		until(func() bool { return nc.NumSubscriptions() > 3 && nc.Flush() == nil })
	}
	// The first requests let the replicas find each other and allocate.
	n := rate * costSeconds
	serveAll(routers, rate, 0, n/8, size)
	own, server = bench.CPUTime(), bench.Must(bench.ProcessTime(bus))
	serveAll(routers, rate, n, n, size)
	return bench.CPUTime() - own, bench.Must(bench.ProcessTime(bus)) - server
}

// serveAll sends requests with so many blocks each to the replicas in turn, at an even rate.
func serveAll(routers []*router.Router, rate, first, n, size int) {
	start := time.Now()
	id := func(i int) string { return fmt.Sprintf("%016x-%024x", i%len(routers)+1, i) }
	var blocks router.Blocks
	for i := first; i < first+n+costInFlight; i++ {
		if i < first+n {
			<-time.After(time.Until(start.Add(time.Duration(i-first) * time.Second / time.Duration(rate))))
			blocks.Local = append(sequence(i/2, size/2), sequence(i+1<<20, size/2)...)
			blocks.Sequence = indexer.AppendSequenceHashes(blocks.Sequence[:0], blocks.Local)
			blocks.Tokens = size*16 + 7
			r := routers[i%len(routers)]
			bench.Must(r.BestWorker(context.Background(), router.Request{ID: id(i), Owned: true, Model: "m", Blocks: &blocks}))
			r.MarkPrefillCompleted(id(i))
		}
		if done := i - costInFlight; done >= first {
			routers[done%len(routers)].Free(id(done))
		}
	}
	until(func() bool {
		for _, r := range routers {
			for _, w := range r.Workers() {
				if w.ActiveRequests > 0 {
					return false
				}
			}
		}
		return true
	})
}

const (
	// summaryFaster is how many times faster everything happens than in production, so that the
	// measurement takes a few seconds: summaries, whole filters and what workers compute.
	summaryFaster  = 10
	summaryRate    = costWorkers * 20_480 / 16 / summaryChain * summaryFaster // chains a second
	summarySeconds = 6                                                        // for two whole filters
	summaryChain   = 512                                                      // blocks that are stored, and removed, together
)

// Summaries measures the messages of a router group of eight workers. Their caches are full,
// and each worker computes new blocks all the time, as fast as the engine can.
func (b *Bench) Summaries() []bench.Figure {
	return (&Bench{Rounds: 1, Log: b.Log}).run([]shape{inLab((*lab).summaries, bench.NewRow(
		fmt.Sprintf("summaries of a group of %d workers with %d blocks each, all computing all the time", costWorkers, workerBlocks), "MB/s", bench.AtMost(1),
	))})
}

// summaries returns MB a second.
func (l *lab) summaries() []float64 {
	r := newRouter(router.Config{}, costWorkers, workerBlocks)
	// compute has the workers in turn store a chain, and remove their oldest one.
	compute := func(chain int) {
		w := router.Worker{ID: uint64(chain%costWorkers) + 1}
		if old := chain - workerBlocks/summaryChain*costWorkers; old >= 0 {
			r.ApplyEvent(w, indexer.Event{Kind: indexer.Removed, Externals: sequence(old, summaryChain)})
		}
		local := sequence(chain, summaryChain)
		store(r, w, &router.Blocks{Local: local, Sequence: local})
	}
	chains := workerBlocks / summaryChain * costWorkers
	for c := range chains {
		compute(c)
	}
	above := l.connect()
	var bytes, largest atomic.Int64
	bench.Must(above.Subscribe(wire.Scope{}.Group("g1", ">"), func(m *nats.Msg) {
		bytes.Add(int64(m.Size()))
		largest.Store(max(largest.Load(), int64(len(m.Data)))) // by this goroutine alone
	}))
	bench.NoError(above.Flush())
	s := bench.Must(replicas.NewGroupPublisher(l.connect(), replicas.GroupPublisherConfig{
		Group: "g1", ID: 1, Router: r, Interval: time.Second / summaryFaster, FullEvery: 30 * time.Second / summaryFaster,
	}))
	defer background(s.Run)()
	until(func() bool { return largest.Load() > 10_000 })
	// The measurement begins after a whole filter, so that it contains as many as it should.
	before, start := bytes.Load(), time.Now()
	n := 0
	for ; time.Since(start) < summarySeconds*time.Second; n++ {
		<-time.After(time.Until(start.Add(time.Duration(n) * time.Second / summaryRate)))
		compute(chains + n)
	}
	// In proportion to the chains, since a busy machine computes fewer of them.
	return []float64{float64(bytes.Load()-before) / 1e6 / (float64(n) / summaryRate * summaryFaster)}
}
