// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// newRouter makes a router with n workers of block size 8, ids 1 to n. Unless conf sets
// it, the router predicts no blocks.
func newRouter(t testing.TB, conf router.Config, n int) *router.Router {
	t.Helper()
	if conf.PredictTTL == 0 {
		conf.PredictTTL = -1
	}
	r, err := router.New(conf)
	if err != nil {
		t.Fatal(err)
	}
	for id := range n {
		set(t, r, worker(uint64(id+1)))
	}
	return r
}

// classic returns NVIDIA Dynamo's classic cost with an overlap weight.
func classic(weight float64) scorer.Settings {
	s := scorer.Defaults()
	s.Policy, s.OverlapWeight = scorer.Dynamo, weight
	return s
}

func worker(id uint64) router.WorkerInfo {
	return router.WorkerInfo{
		ID:        id,
		Name:      fmt.Sprint("w", id),
		Address:   netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(id)}), 8000),
		Models:    []string{"m"},
		BlockSize: 8,
	}
}

func set(t testing.TB, r *router.Router, info router.WorkerInfo) {
	t.Helper()
	if err := r.SetWorker(info); err != nil {
		t.Fatal(err)
	}
}

// prompt returns a prompt of blocks of eight tokens, one letter for each block.
func prompt(letters string) []uint32 {
	var tokens []uint32
	for _, l := range letters {
		for range 8 {
			tokens = append(tokens, uint32(l))
		}
	}
	return tokens
}

// store applies an event that a worker cached the blocks of a prompt.
func store(r *router.Router, w router.Worker, letters string) bool {
	local := indexer.AppendLocalHashes(nil, prompt(letters), 8, indexer.Seed("", ""))
	ev := indexer.Event{Kind: indexer.Stored}
	for i, s := range indexer.AppendSequenceHashes(nil, local) {
		ev.Blocks = append(ev.Blocks, indexer.Block{External: s + 1, Local: local[i]})
	}
	return r.ApplyEvent(w, ev)
}

// Three conversations share a beginning. Each continues on the worker that has most of it
// cached.
func TestConversationsStickToTheirBlocks(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1)}, 2)
	a, b := router.Worker{ID: 1}, router.Worker{ID: 2}
	store(r, a, "AB")
	store(r, a, "ACD")
	store(r, b, "ACE")
	for _, c := range []struct {
		prompt  string
		want    router.Worker
		overlap [2]int
	}{
		{"ACDF", a, [2]int{3, 2}},
		{"ACEG", b, [2]int{2, 3}},
	} {
		d, err := r.BestWorker(t.Context(), router.Request{ID: c.prompt, Model: "m", Tokens: prompt(c.prompt), Explain: true})
		if err != nil {
			t.Fatal(err)
		}
		got := [2]int{d.Candidates[0].OverlapBlocks, d.Candidates[1].OverlapBlocks}
		if d.Worker != c.want || got != c.overlap || d.OverlapBlocks != 3 || d.Reason != router.ReasonKV {
			t.Errorf("%s: worker %v with overlap %d (%v), reason %s; want %v with 3 of %v, kv", c.prompt, d.Worker, d.OverlapBlocks, got, d.Reason, c.want, c.overlap)
		}
		if d.CachedTokens != 24 || d.PrefillTokens != 8 || d.PromptBlocks != 4 || d.PromptTokens != 32 {
			t.Errorf("%s: decision %+v", c.prompt, d)
		}
		r.Free(c.prompt)
		store(r, c.want, c.prompt)
	}
	for i, want := range []int{5, 4} { // A B C D F, and A C E G
		if got := r.Workers()[i].CachedBlocks; got != want {
			t.Errorf("worker %d holds %d blocks, want %d", i+1, got, want)
		}
	}
}

// Engines compute the last token of a prompt even if the whole prompt is cached, so it
// counts as a token to compute.
func TestTheLastTokenIsComputed(t *testing.T) {
	r := newRouter(t, router.Config{}, 1)
	store(r, router.Worker{ID: 1}, "AB")
	for more, want := range map[int]int{0: 1, 1: 1, 8: 8} {
		d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: append(prompt("AB"), make([]uint32, more)...)})
		if err != nil || d.OverlapBlocks != 2 || d.PrefillTokens != want {
			t.Errorf("two cached blocks and %d tokens: %d blocks cached, %d tokens to compute, %v; want 2 and %d", more, d.OverlapBlocks, d.PrefillTokens, err, want)
		}
	}
}

// Of ten blocks, the idle workers have 2, 5 and 8 cached. Cached blocks save prefill; all
// ten blocks would be active on any worker.
func TestCostOfADecision(t *testing.T) {
	ten := "0123456789"
	for _, weight := range []float64{.5, 1, 2} {
		r := newRouter(t, router.Config{Scoring: classic(weight)}, 3)
		for i, held := range []int{2, 5, 8} {
			store(r, router.Worker{ID: uint64(i + 1)}, ten[:held])
		}
		d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt(ten), Explain: true})
		if err != nil {
			t.Fatal(err)
		}
		for i, c := range d.Candidates {
			if want := weight*float64(10-[]int{2, 5, 8}[i]) + 10; c.Cost != want {
				t.Errorf("weight %v, worker %d: cost %v, want %v", weight, i+1, c.Cost, want)
			}
		}
		if d.Worker.ID != 3 || d.Cost != d.Candidates[2].Cost {
			t.Errorf("weight %v: worker %d wins with cost %v, want worker 3", weight, d.Worker.ID, d.Cost)
		}
	}
}

func TestTheLoadOfOneDecisionIsSeenByTheNext(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1)}, 4)
	seen := map[uint64]int{}
	for i := range 8 {
		// The prompts share no block.
		d, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(i), Model: "m", Tokens: prompt(fmt.Sprintf("%c%c", 'a'+i, 'A'+i))})
		if err != nil {
			t.Fatal(err)
		}
		seen[d.Worker.ID]++
	}
	for id := uint64(1); id <= 4; id++ {
		if seen[id] != 2 {
			t.Errorf("worker %d got %d of 8 equal requests, want 2", id, seen[id])
		}
	}
}

func TestTheSameSeedGivesTheSameDecisions(t *testing.T) {
	decide := func(seed uint64) string {
		r := newRouter(t, router.Config{Scoring: classic(1), Seed: seed}, 8)
		var picks strings.Builder
		for i := range 50 {
			d, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint("r", i), Model: "m", Tokens: prompt("x")})
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprint(&picks, d.Worker.ID)
			r.Free(d.ID)
		}
		return picks.String()
	}
	first := decide(1)
	if again := decide(1); again != first {
		t.Errorf("seed 1 gave %s, then %s", first, again)
	}
	if other := decide(2); other == first {
		t.Errorf("seeds 1 and 2 both gave %s", first)
	}
	for id := '1'; id <= '8'; id++ {
		if !strings.ContainsRune(first, id) {
			t.Errorf("50 ties never went to worker %c: %s", id, first)
		}
	}
}

func TestRoundRobin(t *testing.T) {
	r := newRouter(t, router.Config{Mode: router.RoundRobin}, 3)
	var got []uint64
	for i := range 7 {
		d, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(i), Model: "m", Prompt: router.Prompt{Messages: []byte("not read")}})
		if err != nil || d.Reason != router.ReasonRoundRobin {
			t.Fatalf("reason %q, error %v", d.Reason, err)
		}
		got = append(got, d.Worker.ID)
	}
	if want := "[1 2 3 1 2 3 1]"; fmt.Sprint(got) != want {
		t.Errorf("seven requests went to %v, want %s", got, want)
	}
}

func TestWithoutAnIDNothingIsBooked(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1)}, 1)
	if _, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("AB")}); err != nil {
		t.Fatal(err)
	}
	if w := r.Workers()[0]; w.ActiveRequests != 0 || w.Routed != 0 || len(r.Decisions(9)) != 0 {
		t.Errorf("a read-only decision left %+v and %d kept decisions", w, len(r.Decisions(9)))
	}
}

func TestLifeOfASlot(t *testing.T) {
	now := time.Unix(1755000000, 0)
	r := newRouter(t, router.Config{Scoring: classic(1), Now: func() time.Time { return now }}, 1)
	d, err := r.BestWorker(t.Context(), router.Request{ID: "a", Model: "m", Tokens: prompt("AB")})
	if err != nil {
		t.Fatal(err)
	}
	if d.Address.String() != "10.0.0.1:8000" || d.Reason != router.ReasonLoad {
		t.Errorf("decision %+v", d)
	}
	if _, err := r.BestWorker(t.Context(), router.Request{ID: "a", Model: "m", Tokens: prompt("AB")}); !errors.Is(err, router.ErrDuplicate) {
		t.Errorf("the same id again: error %v, want ErrDuplicate", err)
	}
	load := func() string {
		w := r.Workers()[0]
		return fmt.Sprint(w.ActiveRequests, w.ActiveBlocks, w.PendTokens)
	}
	if got := load(); got != "1 2 16" {
		t.Errorf("booked: requests, blocks, pending tokens are %s, want 1 2 16", got)
	}
	now = now.Add(time.Second)
	if !r.MarkPrefillCompleted("a") || r.MarkPrefillCompleted("a") {
		t.Error("the first token must have an effect once")
	}
	if got := load(); got != "1 2 0" {
		t.Errorf("first token: %s, want 1 2 0", got)
	}
	now = now.Add(time.Second)
	if !r.Free("a") || r.Free("a") || r.MarkPrefillCompleted("a") {
		t.Error("the end must have an effect once, and no later call any")
	}
	if got := load(); got != "0 0 0" {
		t.Errorf("free: %s, want 0 0 0", got)
	}
	kept, ok := r.Decision("a")
	if !ok || kept.FirstToken.Sub(kept.Time) != time.Second || kept.Freed.Sub(kept.Time) != 2*time.Second || len(kept.Candidates) != 1 {
		t.Errorf("kept decision %+v", kept)
	}
}

func TestRecentDecisionsAreKeptAndOldOnesNot(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1), KeepDecisions: 3}, 2)
	for i := range 5 {
		id := fmt.Sprint(i)
		if _, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: "m", Tokens: prompt("A")}); err != nil {
			t.Fatal(err)
		}
		r.Free(id)
	}
	var ids []string
	for _, d := range r.Decisions(10) {
		ids = append(ids, d.ID)
	}
	if fmt.Sprint(ids) != "[4 3 2]" {
		t.Errorf("kept %v, want [4 3 2]", ids)
	}
	if _, ok := r.Decision("1"); ok {
		t.Error("decision 1 is still kept")
	}
	if d, ok := r.Decision("3"); !ok || d.Freed.IsZero() {
		t.Errorf("decision 3: %v, %+v", ok, d)
	}
	third, _ := r.Decision("3")
	for i, d := range r.BriefDecisions(10, third.Time) {
		whole, _ := r.Decision(d.ID)
		if want := d.ID == "4"; d.ID != ids[i] || len(d.Candidates) > 0 != want || len(whole.Candidates) == 0 {
			t.Errorf("decision %s has %d candidates in brief, %d in whole", d.ID, len(d.Candidates), len(whole.Candidates))
		}
	}
	none := newRouter(t, router.Config{Scoring: classic(1), KeepDecisions: -1}, 1)
	if _, err := none.BestWorker(t.Context(), router.Request{ID: "a", Model: "m"}); err != nil || len(none.Decisions(9)) != 0 {
		t.Errorf("keeping none: %d kept, error %v", len(none.Decisions(9)), err)
	}
}

func TestWhoCanBeChosen(t *testing.T) {
	choose := func(t *testing.T, r *router.Router, model string) (uint64, error) {
		t.Helper()
		d, err := r.BestWorker(t.Context(), router.Request{Model: model, Tokens: prompt("A")})
		return d.Worker.ID, err
	}
	with := func(t *testing.T, change ...func(*router.WorkerInfo)) *router.Router {
		r := newRouter(t, router.Config{Scoring: classic(1)}, 0)
		for i, c := range change {
			w := worker(uint64(i + 1))
			c(&w)
			set(t, r, w)
		}
		return r
	}
	fine := func(*router.WorkerInfo) {}
	sick := func(h router.Health) func(*router.WorkerInfo) {
		return func(w *router.WorkerInfo) { w.Health = h }
	}
	draining := func(w *router.WorkerInfo) { w.Draining = true }
	prefill := func(w *router.WorkerInfo) { w.Role = router.Prefill }
	adapter := func(w *router.WorkerInfo) { w.LoRA = []string{"lora"} }
	for _, c := range []struct {
		name    string
		model   string
		workers []func(*router.WorkerInfo)
		want    uint64
		err     error
	}{
		{"nobody is known", "m", nil, 0, router.ErrNoWorkers},
		{"another model", "x", []func(*router.WorkerInfo){fine}, 0, router.ErrUnknownModel},
		{"healthy before degraded", "m", []func(*router.WorkerInfo){sick(router.Degraded), fine}, 2, nil},
		{"never expired", "m", []func(*router.WorkerInfo){sick(router.Expired), sick(router.Degraded)}, 2, nil},
		{"degraded before nobody", "m", []func(*router.WorkerInfo){sick(router.Unhealthy), sick(router.Degraded)}, 2, nil},
		{"starting before unhealthy", "m", []func(*router.WorkerInfo){sick(router.Unhealthy), sick(router.Starting)}, 2, nil},
		{"degraded before starting", "m", []func(*router.WorkerInfo){sick(router.Starting), sick(router.Degraded)}, 2, nil},
		{"unhealthy before nobody", "m", []func(*router.WorkerInfo){draining, sick(router.Unhealthy)}, 2, nil},
		{"expired before nobody", "m", []func(*router.WorkerInfo){sick(router.Expired)}, 1, nil},
		{"never draining, even if nobody is healthy", "m", []func(*router.WorkerInfo){draining}, 0, router.ErrNoWorkers},
		{"a state of health from the future", "m", []func(*router.WorkerInfo){sick(77)}, 0, router.ErrNoWorkers},
		{"never draining", "m", []func(*router.WorkerInfo){draining, fine}, 2, nil},
		{"never a prefill worker", "m", []func(*router.WorkerInfo){prefill}, 0, router.ErrNoWorkers},
		{"an adapter where it is", "lora", []func(*router.WorkerInfo){fine, adapter}, 2, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := choose(t, with(t, c.workers...), c.model)
			if got != c.want || !errors.Is(err, c.err) {
				t.Errorf("worker %d, error %v; want %d, %v", got, err, c.want, c.err)
			}
		})
	}
	t.Run("a model whose workers left is away, not unknown", func(t *testing.T) {
		r := with(t, fine)
		r.RemoveWorker(1)
		r.RemoveWorker(1) // removing twice is harmless
		if _, err := choose(t, r, "m"); !errors.Is(err, router.ErrNoWorkers) {
			t.Errorf("error %v, want ErrNoWorkers", err)
		}
	})
}

func TestAdaptersAndSaltsShareNoBlocks(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1)}, 0)
	w := worker(1)
	w.LoRA = []string{"lora"}
	set(t, r, w)
	store(r, router.Worker{ID: 1}, "AB")
	for _, c := range []struct {
		model, salt string
		want        int
	}{{"m", "", 2}, {"lora", "", 0}, {"m", "tenant", 0}} {
		d, err := r.BestWorker(t.Context(), router.Request{Model: c.model, Salt: c.salt, Tokens: prompt("AB")})
		if err != nil || d.OverlapBlocks != c.want {
			t.Errorf("model %q, salt %q: overlap %d, error %v; want %d", c.model, c.salt, d.OverlapBlocks, err, c.want)
		}
	}
}

func TestAWorkerThatLeavesTakesItsStateAlong(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1)}, 1)
	store(r, router.Worker{ID: 1}, "AB")
	if _, err := r.BestWorker(t.Context(), router.Request{ID: "a", Model: "m", Tokens: prompt("AB")}); err != nil {
		t.Fatal(err)
	}
	r.RemoveWorker(1)
	if store(r, router.Worker{ID: 1}, "AB") {
		t.Error("an event of a worker that left was accepted")
	}
	set(t, r, worker(2)) // gets the ordinal of worker 1
	d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("AB"), Explain: true})
	if err != nil {
		t.Fatal(err)
	}
	if c := d.Candidates[0]; c.OverlapBlocks != 0 || c.ActiveRequests != 0 || c.ActiveBlocks != 0 {
		t.Errorf("the new worker inherits %+v", c)
	}
	r.Free("a") // booked on the worker that left
	if got := r.Workers()[0]; got.ActiveRequests != 0 {
		t.Errorf("worker 2 has %d requests", got.ActiveRequests)
	}
}

func TestARestartedWorkerIsEmpty(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1)}, 1)
	store(r, router.Worker{ID: 1}, "AB")
	same := worker(1)
	same.Draining = true
	set(t, r, same)
	if got := r.Workers()[0].CachedBlocks; got != 2 {
		t.Errorf("after a change of the record %d blocks, want 2", got)
	}
	same.StartedMS = 1
	set(t, r, same)
	if got := r.Workers()[0].CachedBlocks; got != 0 {
		t.Errorf("after a restart %d blocks, want 0", got)
	}
}

func TestRanks(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1)}, 0)
	w := worker(1)
	w.DPStart, w.DPSize = 2, 3
	w.RankAddresses = map[uint32]netip.AddrPort{3: netip.MustParseAddrPort("10.9.9.9:1")}
	set(t, r, w)
	if store(r, router.Worker{ID: 1, DPRank: 0}, "A") || !store(r, router.Worker{ID: 1, DPRank: 3}, "A") {
		t.Error("rank 3 exists, rank 0 does not")
	}
	d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("A")})
	if err != nil || d.Worker.DPRank != 3 || d.Address.String() != "10.9.9.9:1" {
		t.Errorf("decision %+v, error %v; want rank 3 at its own address", d, err)
	}
	w.DPSize = 1
	set(t, r, w)
	if got := r.Workers(); len(got) != 1 || got[0].DPRank != 2 {
		t.Errorf("after the worker shrank: %+v, want rank 2 alone", got)
	}
}

// Workers of one model have several block sizes: each worker's blocks are found by hashes
// of its own block size, and the cheapest of all workers gets the request.
func TestBlockSizes(t *testing.T) {
	r := newRouter(t, router.Config{}, 1)
	odd, none := worker(2), worker(3)
	odd.BlockSize, none.BlockSize = 16, 0
	set(t, r, odd)
	set(t, r, none)
	local := indexer.AppendLocalHashes(nil, prompt("AB"), 16, indexer.Seed("", ""))
	wide := indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 7, Local: local[0]}}}
	if !store(r, router.Worker{ID: 1}, "A") || !r.ApplyEvent(router.Worker{ID: 2}, wide) || !r.ApplyEvent(router.Worker{ID: 3}, wide) {
		t.Error("the workers are known")
	}
	for i, want := range []string{"ok 1", "ok 1", "none 0"} {
		if s := r.Workers()[i]; fmt.Sprint(s.KVEvents, " ", s.CachedBlocks) != want {
			t.Errorf("worker %d: %s %d, want %s", i+1, s.KVEvents, s.CachedBlocks, want)
		}
	}
	for letters, want := range map[string][2]int{"AB": {2, 1}, "AC": {1, 1}} { // worker and its overlap
		d, err := r.BestWorker(t.Context(), router.Request{ID: letters, Model: "m", Tokens: prompt(letters), Explain: true})
		if err != nil || [2]int{int(d.Worker.ID), d.OverlapBlocks} != want {
			t.Errorf("%s: worker %d with %d blocks, %v; want %v", letters, d.Worker.ID, d.OverlapBlocks, err, want)
		}
		if d.CachedTokens+d.PrefillTokens != 16 && d.PrefillTokens != 1 {
			t.Errorf("%s: %d cached and %d to compute of 16", letters, d.CachedTokens, d.PrefillTokens)
		}
		r.Free(letters)
	}
	for id := uint64(1); id <= 3; id++ {
		pin := router.Worker{ID: id}
		if d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("Z"), Pinned: &pin}); err != nil || d.Worker != pin {
			t.Errorf("pinned to %d: %d, %v", id, d.Worker.ID, err)
		}
	}
	pin := router.Worker{ID: 4}
	if _, err := r.BestWorker(t.Context(), router.Request{Model: "m", Pinned: &pin}); !errors.Is(err, router.ErrPinnedUnknown) {
		t.Errorf("pinned to an unknown worker: %v", err)
	}
	// A worker that reports no block size joins the others.
	r.RemoveWorker(1)
	r.RemoveWorker(3)
	set(t, r, none)
	if s := r.Workers(); len(s) != 2 || s[1].KVEvents != "none" {
		t.Errorf("workers %+v", s)
	}
	if d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("AB"), Explain: true}); err != nil || len(d.Candidates) != 2 || d.Worker.ID != 2 {
		t.Errorf("one pool is left: %+v, %v", d, err)
	}
}

// Costs in blocks of different sizes are compared in tokens.
func TestCostsOfSeveralBlockSizes(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1)}, 1)
	wide := worker(2)
	wide.BlockSize = 32
	set(t, r, wide)
	store(r, router.Worker{ID: 1}, "ABC")
	// 1 + 4 blocks of 8 tokens here, 1 + 1 blocks of 32 tokens there.
	if d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("ABCD")}); err != nil || d.Worker.ID != 1 || d.Cost != 5 {
		t.Errorf("worker %d for %v blocks, %v; want 1 for 5", d.Worker.ID, d.Cost, err)
	}
}

// Hashes of one block size match no worker with another block size: blocks that were counted for one pool
// of a model do not count for the workers of the next pool.
func TestHashesOfOneBlockSize(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1)}, 1)
	wide := worker(2)
	wide.BlockSize = 32
	set(t, r, wide)
	store(r, router.Worker{ID: 1}, "ABC")
	local := indexer.AppendLocalHashes(nil, prompt("ABC"), 8, indexer.Seed("", ""))
	blocks := &router.Blocks{Local: local, Sequence: indexer.AppendSequenceHashes(nil, local), Tokens: 24, BlockSize: 8}
	d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Blocks: blocks, Allowed: []router.Worker{{ID: 2}}})
	if err != nil || d.Worker.ID != 2 || d.OverlapBlocks != 0 {
		t.Errorf("worker %d with %d blocks, %v; want 2 with none", d.Worker.ID, d.OverlapBlocks, err)
	}
	book(t, r, "load", "DEFGHIJK") // makes the worker with the blocks the dearer one
	for range 8 {
		if d, err = r.BestWorker(t.Context(), router.Request{Model: "m", Blocks: blocks}); err != nil || d.Worker.ID == 2 && d.OverlapBlocks != 0 {
			t.Errorf("worker %d with %d blocks, %v", d.Worker.ID, d.OverlapBlocks, err)
		}
	}
}

// In modes without a cost, the pool whose workers have fewer requests gets the next
// request.
func TestBlockSizesInOtherModes(t *testing.T) {
	r := newRouter(t, router.Config{Mode: router.RoundRobin}, 2)
	odd := worker(3)
	odd.BlockSize = 16
	set(t, r, odd)
	seen := map[uint64]int{}
	for i := range 9 {
		d, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(i), Model: "m"})
		if err != nil {
			t.Fatal(err)
		}
		seen[d.Worker.ID]++
	}
	if seen[1] != 3 || seen[2] != 3 || seen[3] != 3 {
		t.Errorf("nine requests were spread as %v, want three each", seen)
	}
}

func TestAWorkerChangesItsModel(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1)}, 2)
	w := worker(1)
	w.Models = []string{"n", "alias"}
	set(t, r, w)
	for model, want := range map[string]uint64{"m": 2, "n": 1, "alias": 1} {
		if d, err := r.BestWorker(t.Context(), router.Request{Model: model}); err != nil || d.Worker.ID != want {
			t.Errorf("model %s: worker %d, error %v; want %d", model, d.Worker.ID, err, want)
		}
	}
}

// A prompt that cannot be tokenized is routed by load.
func TestOddPromptsAreRouted(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1)}, 2)
	d, err := r.BestWorker(t.Context(), router.Request{ID: "a", Model: "m", Prompt: router.Prompt{Messages: []byte(`[{"role":"user","content":12345}]`)}})
	if err != nil || d.Reason != router.ReasonTokenizer || d.PromptTokens == 0 {
		t.Errorf("decision %+v, error %v; want one by load with a guess of the length", d, err)
	}
	e, err := r.BestWorker(t.Context(), router.Request{ID: "b", Model: "m", Prompt: router.Prompt{Prompt: []byte(`"hello"`)}})
	if err != nil || e.Worker == d.Worker || e.PromptTokens != 2 || e.TokenMode != tokenizer.Bytes || e.TokenReason != tokenizer.NoTokenizer {
		t.Errorf("decision %+v, error %v; want the other worker", e, err)
	}
}

func TestACancelledRequestBooksNothing(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1)}, 1)
	why := errors.New("the client left")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	if _, err := r.BestWorker(ctx, router.Request{ID: "a", Model: "m"}); !errors.Is(err, why) {
		t.Errorf("error %v, want %v", err, why)
	}
	if r.Free("a") {
		t.Error("the request holds a slot")
	}
}

func TestBadSettings(t *testing.T) {
	for want, c := range map[string]router.Config{
		"Mode":                 {Mode: "fastest"},
		"overlap_score_weight": {Scoring: classic(math.NaN())},
		"BlockSize":            {BlockSize: -1},
		"cost":                 {Scoring: scorer.Settings{Policy: "cheap"}},
		"GuessTTL":             {GuessTTL: -1},
		"DeviceRatio":          {DeviceRatio: math.NaN()},
		"PrefillThroughput":    {PrefillThroughput: -1},
		"OutputRate":           {EstimateOutput: true, OutputRate: math.Inf(1)},
		"Queue.Threshold":      {Queue: router.QueueConfig{Threshold: new(math.NaN())}},
		"Queue.Limit":          {Queue: router.QueueConfig{Limit: -1}},
		"queue_policy":         {Queue: router.QueueConfig{Policy: "best"}},
		"Sessions.TTL":         {Sessions: router.SessionConfig{TTL: 1}},
		"Sessions.Limit":       {Sessions: router.SessionConfig{Limit: -1}},

		"active_decode_blocks_threshold":       {Thresholds: scorer.Thresholds{ActiveBlocks: new(1.5)}},
		"active_prefill_tokens_threshold is":   {Thresholds: scorer.Thresholds{PrefillTokens: new(-1)}},
		"active_prefill_tokens_threshold_frac": {Thresholds: scorer.Thresholds{PrefillFraction: new(math.NaN())}},
	} {
		if _, err := router.New(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v, want one that names %s", c, err, want)
		}
	}
	if _, err := router.New(router.Config{Scoring: classic(-1)}); err == nil {
		t.Error("a negative weight must be refused")
	}
	if _, err := router.New(router.Config{Scoring: classic(math.Inf(1))}); err == nil {
		t.Error("an infinite weight must be refused")
	}
}

func TestBadWorkers(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1)}, 1)
	for want, change := range map[string]func(*router.WorkerInfo){
		"models":     func(w *router.WorkerInfo) { w.Models = nil },
		"address":    func(w *router.WorkerInfo) { w.Address = netip.AddrPort{} },
		"block_size": func(w *router.WorkerInfo) { w.BlockSize = -1 },
		"ranks":      func(w *router.WorkerInfo) { w.DPSize = 1 << 30 },
	} {
		w := worker(1)
		change(&w)
		if err := r.SetWorker(w); !errors.Is(err, router.ErrBadWorker) || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one that names %s", err, want)
		}
	}
	if got := len(r.Workers()); got != 1 {
		t.Errorf("%d workers, want the one from before", got)
	}
	w := worker(9)
	var err error
	for i := 0; err == nil && i < 2000; i++ {
		w.ID = uint64(9 + i) // each model keeps its worker
		w.Models = []string{fmt.Sprint("model-", i)}
		err = r.SetWorker(w)
	}
	if !errors.Is(err, router.ErrBadWorker) {
		t.Errorf("2,000 models: error %v, want ErrBadWorker", err)
	}
}

// All methods run at once, for the race detector; at the end nothing is left.
func TestConcurrentUse(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1), KeepDecisions: 16}, 4)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 200 {
				id := fmt.Sprint(g, "-", i)
				letters := fmt.Sprintf("%c%c%c", 'A'+i%3, 'A'+i%5, 'A'+i%7)
				d, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: "m", Tokens: prompt(letters)})
				if err != nil {
					t.Errorf("%s: %v", id, err)
					return
				}
				store(r, d.Worker, letters)
				r.MarkPrefillCompleted(id)
				r.Free(id)
				r.Decisions(4)
			}
		})
	}
	wg.Go(func() {
		for i := range 100 {
			w := worker(uint64(5 + i%3))
			if err := r.SetWorker(w); err != nil {
				t.Error(err)
			}
			r.Workers()
			r.RemoveWorker(w.ID)
		}
	})
	wg.Wait()
	for _, w := range r.Workers() {
		if w.ActiveRequests != 0 || w.ActiveBlocks != 0 || w.PendTokens != 0 {
			t.Errorf("left behind: %+v", w)
		}
	}
}

// cardOf returns a card with a small tokenizer: a letter is a token.
func cardOf(t *testing.T, name string) router.Card {
	t.Helper()
	m, err := tokenizer.LoadModel(fstest.MapFS{"tokenizer.json": {Data: []byte(`{"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},
		"model":{"vocab":{"a":0,"b":1,"c":2,"d":3},"merges":[]}}`)}}, tokenizer.ModelConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return router.Card{Name: name, Aliases: []string{name + "-alias"}, LoRA: []string{name + "-lora"}, Prompts: m}
}

// A model with a card is tokenized exactly under each of its names, so that its workers'
// events match. A decision for a model without a card reports that.
func TestCards(t *testing.T) {
	var seen []router.Observation
	r := newRouter(t, router.Config{Scoring: classic(1), BlockSize: 2, Cards: []router.Card{cardOf(t, "m")}, Hooks: router.Hooks{Observe: func(o router.Observation) {
		o.IDs = slices.Clone(o.IDs)
		seen = append(seen, o)
	}}}, 0)
	for id := range uint64(2) {
		w := worker(id + 1)
		w.BlockSize = 2
		set(t, r, w)
	}
	ids := []uint32{0, 1, 2, 3}
	local := indexer.AppendLocalHashes(nil, ids, 2, indexer.Seed("", ""))
	r.ApplyEvent(router.Worker{ID: 2}, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{Local: local[0], External: 1}, {Local: local[1], External: 2}}})
	decide := func(id, model string) router.Decision {
		t.Helper()
		d, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: model, Prompt: router.Prompt{Prompt: []byte(`"abcd"`)}})
		if err != nil {
			t.Fatal(err)
		}
		r.Free(id)
		return d
	}
	for id, model := range map[string]string{"1": "m", "2": "m-alias"} {
		if d := decide(id, model); d.TokenMode != tokenizer.Exact || d.OverlapBlocks != 2 || d.Worker.ID != 2 || d.PromptTokens != 4 {
			t.Errorf("%s: %+v, want the worker that holds both blocks", model, d)
		}
	}
	if d := decide("3", "m-lora"); d.TokenMode != tokenizer.Exact || d.OverlapBlocks != 0 {
		t.Errorf("adapter: %+v, want no overlap with the base model", d)
	}
	if len(seen) != 3 || !slices.Equal(seen[0].IDs, ids) || seen[0].Card == nil || seen[0].BlockSize != 2 {
		t.Errorf("observed %+v", seen)
	}
	// Decisions continue while the cards change.
	r.SetCards(nil)
	if d := decide("4", "m"); d.TokenMode != tokenizer.Bytes || d.TokenReason != tokenizer.NoTokenizer || d.OverlapBlocks != 0 {
		t.Errorf("without a card: %+v", d)
	}
	if _, err := r.BestWorker(t.Context(), router.Request{Model: "m-alias"}); !errors.Is(err, router.ErrUnknownModel) {
		t.Errorf("an alias of no card: %v", err)
	}
	r.SetCards([]router.Card{cardOf(t, "m")})
	if d := decide("5", "m"); d.OverlapBlocks != 2 {
		t.Errorf("with the card again: %+v", d)
	}
}

// A worker may name the card of its model. Of several names the known one counts, whichever worker came last.
func TestWorkersNameTheirCard(t *testing.T) {
	r := newRouter(t, router.Config{Cards: []router.Card{cardOf(t, "known")}}, 0)
	mode := func() tokenizer.Mode {
		d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Prompt: router.Prompt{Prompt: []byte(`"abcd"`)}})
		if err != nil {
			t.Fatal(err)
		}
		return d.TokenMode
	}
	names := worker(1)
	names.ModelCard = "known"
	for id, card := range []string{"", "other", "unknown"} {
		other := worker(uint64(id) + 2)
		other.ModelCard = card
		for _, last := range []router.WorkerInfo{names, other, names, other} {
			set(t, r, last)
			if got := mode(); got != tokenizer.Exact {
				t.Errorf("after worker %d with the card %q: %s", last.ID, last.ModelCard, got)
			}
		}
	}
	r.RemoveWorker(1)
	if got := mode(); got != tokenizer.Bytes {
		t.Errorf("without the worker that names a known card: %s", got)
	}
}

// The version that a worker registers selects the rules for prompts.
func TestEngineVersions(t *testing.T) {
	m, err := tokenizer.LoadModel(fstest.MapFS{
		"tokenizer.json":      {Data: []byte(`{"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"model":{"vocab":{"a":0,"b":1},"merges":[]}}`)},
		"chat_template.jinja": {Data: []byte(`{{ "b" if tools[0].function.strict is defined else "a" }}`)},
	}, tokenizer.ModelConfig{Profile: chat.SGLang})
	if err != nil {
		t.Fatal(err)
	}
	r := newRouter(t, router.Config{Cards: []router.Card{{Name: "m", Prompts: m}}}, 0)
	q := chat.Request{Messages: []byte(`[{"role":"user","content":"x"}]`), Tools: []byte(`[{"function":{"name":"f"}}]`)}
	for version, want := range map[string]uint32{"0.5.23": 0, "0.5.17": 1, "0.0.0.dev0": 0} {
		w := worker(1)
		w.Engine, w.EngineVersion = "sglang", version
		set(t, r, w)
		// Another version of a worker with a higher id changes nothing, however often the worker changes.
		for _, other := range []string{"0.5.17", "0.5.23"} {
			w.ID, w.EngineVersion = 2, other
			set(t, r, w)
			if p, err := m.Encode(t.Context(), nil, q, time.Time{}); err != nil || !slices.Equal(p.IDs, []uint32{want}) {
				t.Errorf("%s: ids %v, %v, want %d", version, p.IDs, err, want)
			}
		}
	}
}

func TestStrictModels(t *testing.T) {
	r := newRouter(t, router.Config{StrictModels: true, Cards: []router.Card{cardOf(t, "n")}}, 1)
	if _, err := r.BestWorker(t.Context(), router.Request{Model: "m"}); !errors.Is(err, router.ErrUnknownModel) {
		t.Errorf("error %v, want ErrUnknownModel", err)
	}
	w := worker(2)
	w.Models = []string{"n"}
	set(t, r, w)
	if _, err := r.BestWorker(t.Context(), router.Request{Model: "n"}); err != nil {
		t.Error(err)
	}
}

// Blocks of text-block mode have hashes that no token blocks have.
func TestBytesMeetNoEvent(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1)}, 0)
	w := worker(1)
	w.BlockSize = 1
	set(t, r, w)
	ids := tokenizer.AppendBytes(nil, []byte("abcd"))
	local := indexer.AppendLocalHashes(nil, ids, 1, indexer.Seed("", ""))
	r.ApplyEvent(router.Worker{ID: 1}, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{Local: local[0], External: 1}}})
	d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Prompt: router.Prompt{Prompt: []byte(`"abcd"`)}})
	if err != nil || d.PromptBlocks != 1 || d.OverlapBlocks != 0 {
		t.Errorf("%+v, %v; want no overlap", d, err)
	}
	d, err = r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: ids})
	if err != nil || d.OverlapBlocks != 1 {
		t.Errorf("%+v, %v; want the block", d, err)
	}
}

// A prompt given as hashes gets the same decision as its tokens, and the caller's rule
// replaces the cost.
func TestBlocksAndRule(t *testing.T) {
	local := indexer.AppendLocalHashes(nil, prompt("abc"), 8, indexer.Seed("", ""))
	blocks := &router.Blocks{Local: local, Sequence: indexer.AppendSequenceHashes(nil, local), Tokens: 27}
	last := func(_ *scorer.Request, in []scorer.Input, _ []float64) int { return len(in) - 1 }

	r := newRouter(t, router.Config{}, 3)
	store(r, router.Worker{ID: 2}, "ab")
	d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Blocks: blocks})
	if err != nil || d.Worker.ID != 2 || d.OverlapBlocks != 2 || d.PromptTokens != 27 || d.PrefillTokens != 11 {
		t.Errorf("BestWorker(blocks) = worker %d, %d blocks of %d tokens, %d to compute, %v; want worker 2, 2, 27, 11", d.Worker.ID, d.OverlapBlocks, d.PromptTokens, d.PrefillTokens, err)
	}
	r = newRouter(t, router.Config{Rule: last}, 3)
	store(r, router.Worker{ID: 2}, "ab")
	if d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Blocks: blocks}); err != nil || d.Worker.ID != 3 {
		t.Errorf("BestWorker by a rule that takes the last = worker %d, %v, want 3", d.Worker.ID, err)
	}
	blocks.Local = blocks.Local[1:]
	if _, err := r.BestWorker(t.Context(), router.Request{Model: "m", Blocks: blocks}); !errors.Is(err, router.ErrBadBlocks) {
		t.Errorf("BestWorker(2 local, 3 sequence hashes) = %v, want ErrBadBlocks", err)
	}
}
