// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// A refusal for lack of room estimates when the first worker has room: pending prefill
// shrinks by one token every .0386 · 1.15 ms, and blocks become free within the time that
// requests stay.
func TestRefusalsSayWhenToComeAgain(t *testing.T) {
	prefill := router.Config{Thresholds: scorer.Thresholds{PrefillTokens: new(1000)}}
	blocks := router.Config{Thresholds: scorer.Thresholds{ActiveBlocks: new(.5)}}
	both := prefill
	both.Thresholds.ActiveBlocks = new(.5)
	full := router.Config{Queue: router.QueueConfig{Threshold: new(1.), Limit: 1}}
	only := func(id uint64) *router.Worker { return &router.Worker{ID: id} }
	for _, c := range []struct {
		what    string
		conf    router.Config
		pend    [2]int        // tokens pending on each worker
		held    [2]int        // blocks held on each worker
		stay    time.Duration // duration of a request that has ended
		pinned  *router.Worker
		waiting bool // another request waits already
		want    int
		err     error
	}{
		{"the first of two", prefill, [2]int{200_000, 100_000}, [2]int{}, 0, nil, false, 5, router.ErrAllBusy}, // 99,000 · .04439 ms
		{"the one that is meant", prefill, [2]int{200_000, 100_000}, [2]int{}, 0, only(1), false, 9, router.ErrPinnedBusy},
		{"at once", prefill, [2]int{1001, 5000}, [2]int{}, 0, nil, false, 1, router.ErrAllBusy},
		{"not for ever", prefill, [2]int{1 << 30, 1 << 30}, [2]int{}, 0, nil, false, 60, router.ErrAllBusy},
		{"30 of 80 blocks, requests stay 40 s", blocks, [2]int{}, [2]int{90, 80}, 40 * time.Second, nil, false, 15, router.ErrAllBusy},
		{"the same before any has ended", blocks, [2]int{}, [2]int{90, 80}, 0, nil, false, 4, router.ErrAllBusy}, // 10 s · 30/80
		{"the later of two reasons", both, [2]int{300_000, 300_000}, [2]int{60, 60}, 0, nil, false, 14, router.ErrAllBusy},
		{"the queue is full", full, [2]int{100_000, 60_000}, [2]int{}, 0, nil, true, 3, router.ErrQueueFull}, // 51,808 · .04439 ms
	} {
		t.Run(c.what, func(t *testing.T) {
			now := time.Unix(1e9, 0)
			thresholds := c.conf.Thresholds
			c.conf.Thresholds, c.conf.Now = scorer.Thresholds{}, func() time.Time { return now }
			r := newRouter(t, c.conf, 0)
			for id := range uint64(2) {
				w := worker(id + 1)
				w.TotalKVBlocks, w.MaxBatchedTokens = 100, 8192
				set(t, r, w)
			}
			n := 0
			book := func(w, tokens, blocks int) string {
				n++
				id := fmt.Sprint("r", n)
				b := router.Blocks{Tokens: tokens}
				for i := range blocks {
					b.Local = append(b.Local, uint64(n*1000+i))
					b.Sequence = append(b.Sequence, uint64(n*1000+i))
				}
				if _, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: "m", Blocks: &b, Pinned: only(uint64(w + 1))}); err != nil {
					t.Fatal(err)
				}
				return id
			}
			if c.stay > 0 {
				id := book(0, 1, 0)
				now = now.Add(c.stay)
				r.Free(id)
			}
			for w := range c.pend {
				if c.held[w] > 0 {
					r.MarkPrefillCompleted(book(w, c.held[w]*8, c.held[w]))
				}
				if c.pend[w] > 0 {
					book(w, c.pend[w], 0)
				}
			}
			if _, err := r.SetThresholds("m", func(scorer.Thresholds) scorer.Thresholds { return thresholds }); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ask := func(id string, waiting func(bool)) error {
				_, err := r.BestWorker(ctx, router.Request{ID: id, Model: "m", Blocks: &router.Blocks{Tokens: 10}, Pinned: c.pinned, Waiting: waiting})
				return err
			}
			left := make(chan error, 1)
			if c.waiting {
				waits := make(chan struct{})
				go func() { left <- ask("waits", func(bool) { close(waits) }) }()
				<-waits
			}
			err := ask("late", nil)
			if got := router.RetryAfter(err); !errors.Is(err, c.err) || got != c.want {
				t.Errorf("%v: retry after %d s, want %v and %d s", err, got, c.err, c.want)
			}
			if c.waiting {
				cancel()
				if err := <-left; !errors.Is(err, context.Canceled) || router.RetryAfter(err) != c.want {
					t.Errorf("the request that waited in vain: %v, %d s", err, router.RetryAfter(err))
				}
			}
		})
	}
	if got := router.RetryAfter(router.ErrNoWorkers); got != 1 {
		t.Errorf("of another error: %d s, want 1", got)
	}
}

// Behind a proxy nothing reports output tokens, so they are estimated from time.
func TestOutputsAreEstimated(t *testing.T) {
	for _, c := range []struct {
		what string
		conf router.Config
		told int // reported tokens in 2 s of another request on the worker
		want int // expected blocks after 10 s
	}{
		{"not asked for", router.Config{}, 0, 2},
		{"at a rate", router.Config{EstimateOutput: true, OutputRate: 8}, 0, 12},
		{"by the model of the engine", router.Config{EstimateOutput: true}, 0, 116}, // 11.0009 ms per token: 908
		{"as another was told of", router.Config{EstimateOutput: true}, 32, 22},     // 16 tokens per second
	} {
		t.Run(c.what, func(t *testing.T) {
			now := time.Unix(1e9, 0)
			c.conf.Now = func() time.Time { return now }
			r := newRouter(t, c.conf, 1)
			blocks := func() int {
				// A dry run, like any decision, uses the estimated output up to now.
				loads, err := r.PotentialLoads(t.Context(), router.Request{Model: "m", Tokens: []uint32{}})
				if err != nil {
					t.Fatal(err)
				}
				if active := r.Workers()[0].ActiveBlocks; active != loads[0].PotentialDecodeBlocks {
					t.Errorf("%d active blocks, %d in a question", active, loads[0].PotentialDecodeBlocks)
				}
				return loads[0].PotentialDecodeBlocks
			}
			if c.told > 0 {
				occupy(t, r, "told", 1, "X", true)
				now = now.Add(2 * time.Second)
				r.AddOutputTokens("told", c.told)
				r.Free("told")
			}
			occupy(t, r, "a", 1, "AB", false)
			now = now.Add(time.Second)
			if got := blocks(); got != 2 {
				t.Errorf("%d blocks before the first token, want 2", got)
			}
			r.MarkPrefillCompleted("a")
			now = now.Add(10 * time.Second)
			if got := blocks(); got != c.want {
				t.Errorf("%d blocks after 10 s, want %d", got, c.want)
			}
			r.Free("a")
			if got := blocks(); got != 0 {
				t.Errorf("%d blocks are left", got)
			}
		})
	}
	for name, conf := range map[string]router.Config{
		"negative":          {EstimateOutput: true, OutputRate: -1},
		"without estimates": {OutputRate: 5},
	} {
		if _, err := router.New(conf); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
