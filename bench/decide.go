// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"strconv"
	"sync"
	"time"

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
	decideOwnLeast = 50  // tokens of its own that a request has
	decideOwnMost  = 200
	decideBlock    = 16
	decideInFlight = 32 // requests that a thread keeps in flight
)

// decideLoad is the load, and a router that knows what its workers cached of it.
type decideLoad struct {
	router *router.Router
	ids    []string
	tokens [][]uint32
	blocks []router.Blocks
}

func newDecideLoad(predict bool) (*decideLoad, error) {
	settings := scorer.Defaults()
	engine := scorer.Dense32B()
	settings.Attention = engine.AttentionWeight()
	conf := router.Config{Scoring: settings, BlockSize: decideBlock, PredictTTL: -1}
	if predict {
		conf.PredictTTL = 0
	}
	r, err := router.New(conf)
	if err != nil {
		return nil, err
	}
	for w := range decideWorkers {
		err := r.SetWorker(router.WorkerInfo{
			ID: uint64(w) + 1, Models: []string{"m"}, BlockSize: decideBlock, TotalKVBlocks: 1 << 16,
			Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, byte(w + 1)}), 8000),
		})
		if err != nil {
			return nil, err
		}
	}
	l := &decideLoad{router: r}
	rng := rand.New(rand.NewPCG(1, 0x646563696465))
	token := func() uint32 { return uint32(rng.IntN(128_000)) }
	prompts := make([][]uint32, decidePrompts)
	for i := range prompts {
		for range decidePrefix {
			prompts[i] = append(prompts[i], token())
		}
	}
	for i := range decideRequests {
		// Pareto of exponent 1 from 1 on, cut to a prompt's number.
		rank := min(decidePrompts-1, int(math.Floor(1/(1-rng.Float64())))-1)
		tokens := append([]uint32(nil), prompts[rank]...)
		for range decideOwnLeast + rng.IntN(decideOwnMost-decideOwnLeast+1) {
			tokens = append(tokens, token())
		}
		local := indexer.AppendLocalHashes(nil, tokens, decideBlock, indexer.Seed("", ""))
		l.ids = append(l.ids, strconv.Itoa(i))
		l.tokens = append(l.tokens, tokens)
		l.blocks = append(l.blocks, router.Blocks{Local: local, Sequence: indexer.AppendSequenceHashes(nil, local), Tokens: len(tokens)})
	}
	return l, l.warm()
}

// warm plays the load once, and every worker stores what it was sent.
func (l *decideLoad) warm() error {
	for i := range l.ids {
		b := &l.blocks[i]
		d, err := l.router.BestWorker(context.Background(), router.Request{ID: l.ids[i], Model: "m", Blocks: b})
		if err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		ev := indexer.Event{Kind: indexer.Stored}
		for j := range b.Local {
			ev.Blocks = append(ev.Blocks, indexer.Block{External: b.Sequence[j], Local: b.Local[j]})
		}
		l.router.ApplyEvent(d.Worker, ev)
		l.router.Free(l.ids[i])
	}
	return nil
}

// rate returns decisions a second, each booked, marked and freed, on all cores.
func (l *decideLoad) rate(hashed bool, rounds int) (float64, error) {
	threads := runtime.GOMAXPROCS(0)
	errs := make([]error, threads)
	var wg sync.WaitGroup
	start := time.Now()
	for t := range threads {
		wg.Go(func() {
			for range rounds {
				if errs[t] = l.play(t, threads, hashed); errs[t] != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	taken := time.Since(start)
	for _, err := range errs {
		if err != nil {
			return 0, fmt.Errorf("bench: %w", err)
		}
	}
	return float64(rounds*len(l.ids)) / taken.Seconds(), nil
}

// play sends every n-th request, beginning with number first.
func (l *decideLoad) play(first, n int, hashed bool) error {
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
		if _, err := l.router.BestWorker(context.Background(), req); err != nil {
			return err
		}
		if old := i - n*decideInFlight; old >= first {
			done(old)
		}
	}
	for i := first + max(0, (len(l.ids)-first+n-1)/n-decideInFlight)*n; i < len(l.ids); i += n {
		done(i)
	}
	return nil
}
