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
	var shapes []shape
	for _, c := range []struct {
		what            string
		hashed, predict bool
		target          bench.Target
	}{
		{"decisions a second from token ids, booked and freed, all cores", false, false, bench.AtLeast(500_000)},
		{"the same with hashes given", true, false, bench.Target{}},
		{"the same from token ids, with prediction", false, true, bench.Target{}},
		{"the same with hashes given, with prediction", true, true, bench.Target{}},
	} {
		load := sync.OnceValue(func() *decideLoad { return newDecideLoad(c.predict) })
		shapes = append(shapes, shape{
			[]quantity{{c.what, "/s", c.target}, {"  … for a second of one core", "/s", bench.Target{}}},
			func() []float64 {
				l, start := load(), bench.CPUTime()
				rate := l.rate(c.hashed, decideRounds)
				return []float64{rate, decideRounds * decideRequests / (bench.CPUTime() - start).Seconds()}
			},
		})
	}
	return (&Bench{Rounds: 5, Log: b.Log}).run(shapes)
}

// decideLoad is the load, and a router that knows what its workers have cached of it.
type decideLoad struct {
	router *router.Router
	ids    []string
	tokens [][]uint32
	blocks []router.Blocks
}

func newDecideLoad(predict bool) *decideLoad {
	settings := scorer.Defaults()
	engine := scorer.Dense32B()
	settings.Attention = engine.AttentionWeight()
	conf := router.Config{Scoring: settings, BlockSize: blockTokens, PredictTTL: -1}
	if predict {
		conf.PredictTTL = 0
	}
	r := newRouter(conf, decideWorkers, 1<<16)
	l := &decideLoad{router: r}
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
	for i := range decideRequests {
		// Pareto of exponent 1 from 1 on, cut to a prompt's number.
		rank := min(decidePrompts-1, int(math.Floor(1/(1-rng.Float64())))-1)
		tokens := slices.Concat(prompts[rank], random(decideOwnLeast+rng.IntN(decideOwnMost-decideOwnLeast+1)))
		l.ids = append(l.ids, strconv.Itoa(i))
		l.tokens = append(l.tokens, tokens)
		l.blocks = append(l.blocks, promptOf(indexer.AppendLocalHashes(nil, tokens, blockTokens, indexer.Seed("", "")), len(tokens)))
	}
	// Play the load once; every worker stores what it gets.
	for i := range l.ids {
		d := bench.Must(l.router.BestWorker(context.Background(), router.Request{ID: l.ids[i], Model: "m", Blocks: &l.blocks[i]}))
		store(l.router, d.Worker, &l.blocks[i])
		l.router.Free(l.ids[i])
	}
	return l
}

// rate returns decisions a second, each booked, marked and freed, on all cores.
func (l *decideLoad) rate(hashed bool, rounds int) float64 {
	threads := runtime.GOMAXPROCS(0)
	errs := make([]error, threads)
	var wg sync.WaitGroup
	start := time.Now()
	for t := range threads {
		wg.Go(func() {
			for n := 0; n < rounds && errs[t] == nil; n++ {
				errs[t] = bench.Try(func() { l.play(t, threads, hashed) })
			}
		})
	}
	wg.Wait()
	taken := time.Since(start)
	bench.NoError(errors.Join(errs...))
	return float64(rounds*len(l.ids)) / taken.Seconds()
}

// play sends every n-th request, beginning with number first.
func (l *decideLoad) play(first, n int, hashed bool) {
	var inFlight []int
	done := func(i int) {
		l.router.MarkPrefillCompleted(l.ids[i])
		l.router.Free(l.ids[i])
	}
	for i := first; i < len(l.ids); i += n {
		req := router.Request{ID: l.ids[i], Model: "m"}
		if hashed {
			req.Blocks = &l.blocks[i]
		} else {
			req.Tokens = l.tokens[i]
		}
		bench.Must(l.router.BestWorker(context.Background(), req))
		if inFlight = append(inFlight, i); len(inFlight) > decideInFlight {
			done(inFlight[0])
			inFlight = inFlight[1:]
		}
	}
	for _, i := range inFlight {
		done(i)
	}
}
