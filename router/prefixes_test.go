// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// slowPrefixes is HotPrefixes by its definition: prompts are the latest ones, holds says whether a
// worker has a number of leading blocks of a prompt.
func slowPrefixes(prompts []*router.Blocks, workers int, holds func(worker int, prompt *router.Blocks, blocks int) bool) []router.Prefix {
	type node struct {
		router.Prefix
		of *router.Blocks
	}
	requests, all := map[string]int{}, map[string]*node{}
	name := func(p *router.Blocks, blocks int) string { return fmt.Sprint(p.Sequence[:blocks]) }
	for _, p := range prompts {
		for n := 1; n <= min(64, len(p.Sequence)); n++ {
			requests[name(p, n)]++
		}
	}
	for _, p := range prompts {
		for n := 1; n <= min(64, len(p.Sequence)); n++ {
			r := requests[name(p, n)]
			longest := n == min(64, len(p.Sequence)) || requests[name(p, n+1)] < r
			if r < 2 || !longest || all[name(p, n)] != nil {
				continue
			}
			v := &node{router.Prefix{Model: "m", Hash: fmt.Sprintf("%016x", p.Sequence[n-1]), Blocks: n, Requests: r}, p}
			for w := range workers {
				if holds(w, p, n) {
					v.Workers++
				}
			}
			all[name(p, n)] = v
		}
	}
	var list []*node
	for _, v := range all {
		list = append(list, v)
	}
	slices.SortFunc(list, func(a, b *node) int {
		return cmp.Or(cmp.Compare(b.Requests, a.Requests), cmp.Compare(a.Blocks, b.Blocks), cmp.Compare(a.Hash, b.Hash))
	})
	list = list[:min(len(list), 50)]
	var below func(parent *node) []router.Prefix
	below = func(parent *node) (children []router.Prefix) {
		for _, v := range list {
			var nearest *node // the longest prefix of v in the list
			for n := range v.Blocks {
				if p := all[name(v.of, n)]; p != nil {
					nearest = p
				}
			}
			if nearest == parent {
				child := v.Prefix
				child.Children = below(v)
				children = append(children, child)
			}
		}
		return children
	}
	return below(nil)
}

// In random worlds the prefixes are those of the definition.
func TestHotPrefixesAreThoseOfTheDefinition(t *testing.T) {
	for seed := range uint64(8) {
		rnd := rand.New(rand.NewPCG(seed, 21))
		workers := 1 + rnd.IntN(70)
		r, err := router.New(router.Config{PredictTTL: -1, KeepDecisions: -1})
		if err != nil {
			t.Fatal(err)
		}
		for id := range uint64(workers) {
			w := worker(id + 1)
			w.BlockSize = 16
			if err := r.SetWorker(w); err != nil {
				t.Fatal(err)
			}
		}
		held := make([]map[uint64]bool, workers) // sequence hashes
		var prompts []*router.Blocks
		letters := 1 + rnd.IntN(6)
		for i := range rnd.IntN(900) {
			var local []uint64
			for range rnd.IntN(90) {
				next := uint64(0) // mostly the same
				if rnd.IntN(8) == 0 {
					next = uint64(rnd.IntN(letters))
				}
				local = append(local, 1000+next)
			}
			b := &router.Blocks{Local: local, Sequence: indexer.AppendSequenceHashes(nil, local), Tokens: 16 * len(local)}
			if rnd.IntN(3) == 0 && len(local) > 0 {
				w, n := rnd.IntN(workers), 1+rnd.IntN(len(local))
				ev := indexer.Event{Kind: indexer.Stored}
				if held[w] == nil {
					held[w] = map[uint64]bool{}
				}
				for k := range n {
					ev.Blocks = append(ev.Blocks, indexer.Block{Local: b.Local[k], External: b.Sequence[k]})
					held[w][b.Sequence[k]] = true
				}
				r.ApplyEvent(router.Worker{ID: uint64(w + 1)}, ev)
			}
			if _, err := r.BestWorker(t.Context(), router.Request{ID: strconv.Itoa(i), Model: "m", Blocks: b}); err != nil {
				t.Fatal(err)
			}
			if len(local) > 0 {
				prompts = append(prompts, b)
			}
		}
		prompts = prompts[max(0, len(prompts)-512):]
		want := slowPrefixes(prompts, workers, func(w int, p *router.Blocks, blocks int) bool { return held[w][p.Sequence[blocks-1]] })
		got := r.HotPrefixes()
		if len(want) == 0 && len(got) == 0 {
			continue
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("seed %d: prefixes\n%+v\nwant\n%+v", seed, got, want)
		}
	}
}

// A prefix of a pool without workers stays until newer prompts take its place; no worker has it.
func TestHotPrefixesOutliveTheirWorkers(t *testing.T) {
	r, err := router.New(router.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if got := r.HotPrefixes(); got == nil || len(got) != 0 {
		t.Errorf("without requests: %#v, want an empty list", got)
	}
	w := worker(1)
	w.BlockSize = 16
	if err := r.SetWorker(w); err != nil {
		t.Fatal(err)
	}
	local := []uint64{1, 2, 3}
	b := &router.Blocks{Local: local, Sequence: indexer.AppendSequenceHashes(nil, local), Tokens: 48}
	for i := range 2 {
		if _, err := r.BestWorker(t.Context(), router.Request{ID: strconv.Itoa(i), Model: "m", Blocks: b}); err != nil {
			t.Fatal(err)
		}
	}
	if got := r.HotPrefixes(); len(got) != 1 || got[0].Workers != 1 || got[0].Blocks != 3 || got[0].Requests != 2 {
		t.Errorf("%+v, want one prefix of 3 blocks and 2 requests at the worker that is predicted to have it", got)
	}
	r.RemoveWorker(1)
	if got := r.HotPrefixes(); len(got) != 1 || got[0].Workers != 0 {
		t.Errorf("after the worker left: %+v, want a prefix without workers", got)
	}
}

// Prefixes are read while requests are decided and workers come and go.
func TestHotPrefixesBesideManyGoroutines(t *testing.T) {
	d := newDecider(t, router.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for g := range 2 {
		all.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				if err := d.serve(fmt.Sprint(g, "-", i), i, true); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range 30 {
		w := worker(9)
		w.BlockSize = benchBlock
		if i%2 == 0 {
			if err := d.router.SetWorker(w); err != nil {
				t.Error(err)
			}
		} else {
			d.router.RemoveWorker(9)
		}
		if n := len(d.router.HotPrefixes()); n > 50 {
			t.Errorf("%d prefixes", n)
		}
	}
	cancel()
	all.Wait()
}

func BenchmarkHotPrefixes(b *testing.B) {
	d := newDecider(b, router.Config{})
	for i := range 600 {
		if err := d.serve(strconv.Itoa(i), i, true); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		d.router.HotPrefixes()
	}
}
