// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// The load of the decision bench: requests that share long beginnings, some of
// them far more often than others.
const (
	decideRequests = 10_000
	decideWorkers  = 4
	decidePrompts  = 20  // shared beginnings, drawn by a Pareto law of exponent 1
	decidePrefix   = 512 // tokens of each
	decideOwnLeast = 50  // tokens that only one request has
	decideOwnMost  = 200
	decideInFlight = 32 // requests that a thread keeps in flight
	decideRounds   = 20 // times that the load is played for one value
)

// Decisions measures the cost of a decision with small prompts.
func (b *Bench) Decisions() []bench.Figure {
	load := sync.OnceValue(newDecideLoad)
	return b.run([]shape{{[]bench.Row{
		bench.NewRow("decisions a second from token ids, booked and freed, all cores", "/s", bench.AtLeast(500_000)),
		bench.NewRow("  … for a second of one core", "/s", bench.Target{}),
	}, func() []float64 {
		l, start := load(), bench.CPUTime()
		rate := l.rate(decideRounds)
		return []float64{rate, decideRounds * decideRequests / (bench.CPUTime() - start).Seconds()}
	}}})
}

// decideLoad is the load, and a router that knows what its workers have cached of it.
type decideLoad struct {
	router *router.Router
	ids    []string
	tokens [][]uint32
}

func newDecideLoad() *decideLoad {
	settings := scorer.Defaults()
	engine := scorer.Dense32B()
	settings.Attention = engine.AttentionWeight()
	l := &decideLoad{router: newRouter(router.Config{Scoring: settings, BlockSize: blockTokens, PredictTTL: -1}, decideWorkers, 1<<16)}
	rng := rand.New(rand.NewPCG(1, 0x646563696465))
	random := func(n int) []uint32 {
		ids := make([]uint32, n)
		for i := range ids {
			ids[i] = uint32(rng.IntN(128_000))
		}
		return ids
	}
	prompts := make([][]uint32, decidePrompts)
	for i := range prompts {
		prompts[i] = random(decidePrefix)
	}
	// The load is played once while it is made; every worker stores its requests' blocks.
	for i := range decideRequests {
		// Pareto of exponent 1 from 1 on, cut to a prompt's number.
		rank := min(decidePrompts-1, int(math.Floor(1/(1-rng.Float64())))-1)
		tokens := slices.Concat(prompts[rank], random(decideOwnLeast+rng.IntN(decideOwnMost-decideOwnLeast+1)))
		l.ids, l.tokens = append(l.ids, strconv.Itoa(i)), append(l.tokens, tokens)
		blocks := promptOf(indexer.AppendLocalHashes(nil, tokens, blockTokens, indexer.Seed("", "")), len(tokens))
		d := bench.Must(l.router.BestWorker(context.Background(), router.Request{ID: l.ids[i], Model: "m", Blocks: &blocks}))
		store(l.router, d.Worker, &blocks)
		l.router.Free(l.ids[i])
	}
	return l
}

// rate returns decisions a second, each booked, marked and freed, on all cores.
func (l *decideLoad) rate(rounds int) float64 {
	threads := runtime.GOMAXPROCS(0)
	errs := make([]error, threads)
	var wg sync.WaitGroup
	start := time.Now()
	for t := range threads {
		wg.Go(func() {
			errs[t] = bench.Try(func() {
				for range rounds {
					l.play(t, threads)
				}
			})
		})
	}
	wg.Wait()
	taken := time.Since(start)
	bench.NoError(errors.Join(errs...))
	return float64(rounds*len(l.ids)) / taken.Seconds()
}

// play sends every n-th request, beginning with number first.
func (l *decideLoad) play(first, n int) {
	for i := first; i < len(l.ids)+n*decideInFlight; i += n {
		if i < len(l.ids) {
			bench.Must(l.router.BestWorker(context.Background(), router.Request{ID: l.ids[i], Model: "m", Tokens: l.tokens[i]}))
		}
		if done := i - n*decideInFlight; done >= 0 && done < len(l.ids) {
			l.router.MarkPrefillCompleted(l.ids[done])
			l.router.Free(l.ids[done])
		}
	}
}
