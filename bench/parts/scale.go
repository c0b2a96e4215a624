// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/replay"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

const (
	scaleGroups  = 100
	scaleMembers = 100 // workers of a group
	scaleStride  = 4
	scaleWarm    = 1000 // requests before the measured ones
	scaleAsked   = 1000 // in each round
	scaleRounds  = 3
	// scaleChurn is how many checkpoints are new in a group each quarter of a second:
	// prefill at a tenth of what 100 workers can.
	scaleChurn = scaleMembers * 20_480 / 10 / blockTokens / scaleStride / 4
)

// scaleFleet is 10,000 workers in 100 router groups: real routers of both tiers, on the
// real clock.
type scaleFleet struct {
	upper  *router.Router
	groups []*router.Router
}

func newScaleFleet() (f *scaleFleet) {
	f = &scaleFleet{}
	f.upper = bench.Must(router.New(router.Config{KeepDecisions: -1, PredictTTL: predictTTL}))
	for g := range scaleGroups {
		name := fmt.Sprint("g", g)
		address := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, 0, byte(g)}), 8000)
		bench.NoError(f.upper.SetWorker(router.WorkerInfo{ID: uint64(g) + 1, Name: name, Group: name, Models: []string{"m"}, Address: address, BlockSize: blockTokens}))
		f.groups = append(f.groups, newRouter(router.Config{KeepDecisions: -1}, scaleMembers, workerBlocks))
	}
	return f
}

// route sends a request through both tiers, and returns the CPU time of the upper one's decision.
// The request's blocks are cached at once, under their sequence hashes. It stays on one thread.
func (f *scaleFleet) route(id string, blocks *router.Blocks) (took time.Duration) {
	q := router.Request{ID: id, Owned: true, Model: "m", Blocks: blocks}
	start := bench.ThreadTime()
	d := bench.Must(f.upper.BestWorker(context.Background(), q))
	took = bench.ThreadTime() - start
	group := f.groups[d.Worker.ID-1]
	d = bench.Must(group.BestWorker(context.Background(), q))
	store(group, d.Worker, blocks)
	f.upper.MarkPrefillCompleted(id)
	group.MarkPrefillCompleted(id)
	return took
}

func (f *scaleFleet) free(id string) {
	f.upper.Free(id)
	for _, g := range f.groups {
		g.Free(id)
	}
}

// summarise gives the upper tier the load and the filter of a group. Half of the filter's bits
// are set at random, as in the filter of full caches.
func (f *scaleFleet) summarise(g int, rng *rand.Rand) {
	all := f.groups[g].Summarize("m")
	if len(all) != 1 {
		bench.NoError(errors.New("a group serves no model"))
	}
	const checkpoints = scaleMembers * workerBlocks / scaleStride
	bits := uint64(indexer.NewFilter(checkpoints).Bits())
	data := make([]byte, 0, bits/8)
	for range bits / 64 {
		data = binary.LittleEndian.AppendUint64(data, rng.Uint64())
	}
	filter := bench.Must(indexer.ParseFilter(bits, 7, checkpoints, data))
	for h, err := range f.groups[g].Checkpoints("m", blockTokens, scaleStride) {
		bench.NoError(err)
		filter.Add(h)
	}
	all[0].Filter, all[0].Stride = filter, scaleStride
	f.upper.SetSummary(uint64(g)+1, all[0])
}

// update gives the upper tier the load and the new checkpoints of each group, four times a
// second, until done.
func (f *scaleFleet) update(done <-chan struct{}) {
	tick := time.NewTicker(time.Second / 4 / scaleGroups)
	defer tick.Stop()
	rng := rand.New(rand.NewPCG(1, 2))
	added := make([]uint64, scaleChurn)
	for g := 0; ; g = (g + 1) % scaleGroups {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		all := f.groups[g].Summarize("m")
		for i := range added {
			added[i] = rng.Uint64()
		}
		all[0].Added = added
		f.upper.SetSummary(uint64(g)+1, all[0])
	}
}

// scalePrompts are the prompts of a trace in blocks of 16 tokens. With common above 0 all
// begin with so many blocks that are everybody's.
func scalePrompts(t *replay.Trace, n, common int) (out []router.Blocks) {
	const per = replay.MooncakeBlock / blockTokens
	before := sequence(1<<30, common)
	for i := range n {
		r := &t.Requests[i]
		local := slices.Clone(before)
		for j := range min(r.Input/blockTokens, len(r.Blocks)*per) {
			local = append(local, mix(uint64(r.Blocks[j/per])<<8|uint64(j%per)))
		}
		out = append(out, promptOf(local, r.Input+common*blockTokens))
	}
	return out
}

// Scale measures decisions of an upper tier among many router groups, with prompts of the
// public trace of chats in a folder.
func Scale(traces string) (out []bench.Figure) {
	trace := bench.Must(replay.LoadMooncake(filepath.Join(traces, "mooncake_conversation.jsonl.gz")))
	for _, c := range []struct {
		what   string
		common int // blocks
	}{{"chat prompts", 0}, {"chat prompts behind 8,000 tokens that all groups have", 500}} {
		var p50, p99 []float64
		for _, times := range decideAtScale(scalePrompts(trace, scaleWarm+scaleRounds*scaleAsked, c.common), c.common) {
			p50, p99 = append(p50, percentile(times, 50)/1e3), append(p99, percentile(times, 99)/1e3)
		}
		what := fmt.Sprintf("decision of the upper tier, %d workers in %d groups, %s, ", scaleGroups*scaleMembers, scaleGroups, c.what)
		out = append(out, bench.NewFigure(what+"p50", "ms", bench.Target{}, p50...), bench.NewFigure(what+"p99", "ms", bench.AtMost(1), p99...))
	}
	return out
}

// decideAtScale returns the times of the upper tier's decisions, by round, while the groups
// send summaries. All groups have cached the first common blocks of the prompts.
func decideAtScale(prompts []router.Blocks, common int) (rounds [scaleRounds][]time.Duration) {
	f := newScaleFleet()
	runtime.LockOSThread() // for ThreadTime
	defer runtime.UnlockOSThread()
	for _, g := range f.groups {
		store(g, router.Worker{ID: 1}, &router.Blocks{Local: prompts[0].Local[:common], Sequence: prompts[0].Sequence[:common]})
	}
	rng := rand.New(rand.NewPCG(3, 4))
	done := make(chan struct{})
	var updates sync.WaitGroup
	defer updates.Wait()
	defer close(done)
	const behind = 1000 // requests in flight
	id := func(i int) string { return fmt.Sprint("request ", i) }
	for i := range prompts {
		if i == scaleWarm {
			for g := range scaleGroups {
				f.summarise(g, rng)
			}
			updates.Go(func() { f.update(done) })
		}
		took := f.route(id(i), &prompts[i])
		if i >= behind {
			f.free(id(i - behind))
		}
		if i >= scaleWarm {
			round := &rounds[(i-scaleWarm)/scaleAsked]
			*round = append(*round, took)
		}
	}
	return rounds
}
