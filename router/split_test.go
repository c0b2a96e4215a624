// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

func withRole(id uint64, role router.Role) router.WorkerInfo {
	w := worker(id)
	w.Role, w.Engine, w.TotalKVBlocks, w.MaxBatchedTokens = role, "vllm", 1000, 1000
	return w
}

// splitOf makes a router whose workers, from id 1 on, have these roles.
func splitOf(t *testing.T, conf router.Config, roles ...router.Role) *router.Router {
	t.Helper()
	r := newRouter(t, conf, 0)
	for i, role := range roles {
		set(t, r, withRole(uint64(i+1), role))
	}
	return r
}

// A model is split from the moment when workers for both legs are healthy until the last one of
// either leaves, in any order.
func TestSplitsBeginAndEnd(t *testing.T) {
	r := splitOf(t, router.Config{}, router.Decode)
	n := 0
	legs := func(what string, decode, prefill uint64, why router.NoLeg) {
		t.Helper()
		n++
		d := decided(t, r, fmt.Sprint(n), "abcd")
		defer r.Free(d.ID)
		got := uint64(0)
		if d.Prefill != nil {
			got = d.Prefill.Worker.ID
		}
		if d.Worker.ID != decode || got != prefill || d.NoLeg != why {
			t.Errorf("%s: worker %d, prefill on %d, reason %q; want %d, %d, %q", what, d.Worker.ID, got, d.NoLeg, decode, prefill, why)
		}
	}
	legs("a decode worker alone", 1, 0, "")
	set(t, r, withRole(2, router.Prefill))
	legs("both", 1, 2, "")
	sick := withRole(2, router.Prefill)
	sick.Health = router.Unhealthy
	set(t, r, sick)
	legs("the prefill worker is sick", 1, 0, router.NoLegMissing)
	set(t, r, withRole(2, router.Prefill))
	legs("it is healthy again", 1, 2, "")
	r.RemoveWorker(2)
	legs("it has left", 1, 0, "")
	set(t, r, withRole(2, router.Prefill))
	legs("it is back", 1, 2, "")
	r.RemoveWorker(1)
	if _, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("abcd")}); !errors.Is(err, router.ErrNoWorkers) {
		t.Errorf("without a decode worker: %v", err)
	}
	set(t, r, withRole(1, router.Both))
	legs("a worker with both roles decodes", 1, 2, "")
	r.RemoveWorker(2)
	legs("alone it does both", 1, 0, router.NoLegMissing)
	other := withRole(2, router.Prefill)
	other.Engine = "sglang"
	set(t, r, other)
	legs("engines cannot transfer blocks to other engines", 1, 0, router.NoLegMissing)
	for id, engine := range map[uint64]string{1: "TensorRT-LLM", 2: "trtllm"} {
		w := withRole(id, router.Both)
		w.Engine = engine
		set(t, r, w)
	}
	if d := decided(t, r, "spelling", "abcd"); d.Prefill == nil || d.Engine != "trtllm" || d.Prefill.Engine != "trtllm" {
		t.Errorf("two spellings of one engine: %q and leg %+v", d.Engine, d.Prefill)
	}
}

// The prefill worker is chosen by overlap and pending prefill, the decode worker by its active
// blocks. Each slot is freed once.
func TestALegIsChosenAndBooked(t *testing.T) {
	r := splitOf(t, router.Config{}, router.Prefill, router.Prefill, router.Decode, router.Decode)
	store(r, router.Worker{ID: 2}, "abcd")
	store(r, router.Worker{ID: 3}, "abcd")
	first := decided(t, r, "first", "abcdef")
	if first.Prefill == nil || first.Prefill.Worker.ID != 2 || first.Prefill.OverlapBlocks != 4 || first.Prefill.PrefillTokens != 16 || first.PrefillTokens != 0 {
		t.Fatalf("decision %+v, prefill %+v; want prefill on 2 with 4 blocks cached", first, first.Prefill)
	}
	check := func(what string, pend, blocks map[uint64]int) {
		t.Helper()
		for id, w := range byID(t, r) {
			if w.PendTokens != pend[id] || w.ActiveBlocks != blocks[id] {
				t.Errorf("%s: worker %d has %d tokens pending and %d blocks, want %d and %d", what, id, w.PendTokens, w.ActiveBlocks, pend[id], blocks[id])
			}
		}
	}
	decode := first.Worker.ID
	other := 7 - decode
	check("booked", map[uint64]int{2: 16}, map[uint64]int{decode: 6})
	second := decided(t, r, "second", "abcdef")
	if second.Worker.ID != other {
		t.Errorf("the second request decodes on worker %d, want the idle one, %d", second.Worker.ID, other)
	}
	if !r.Free(first.Prefill.ID) || r.Free(first.Prefill.ID) {
		t.Error("the first leg does not end once")
	}
	check("the first leg has ended", map[uint64]int{second.Prefill.Worker.ID: second.Prefill.PrefillTokens}, map[uint64]int{decode: 6, other: 6})
	r.MarkPrefillCompleted("second")
	check("the second request has its first token", nil, map[uint64]int{decode: 6, other: 6})
	if !r.Free("first") || !r.Free("second") || r.Free("second") || r.Free(second.Prefill.ID) {
		t.Error("requests do not end once")
	}
	check("all freed", nil, nil)
	third := decided(t, r, "third", "xy")
	r.Abandon("third")
	check("a request that nobody served", nil, nil)
	if d, ok := r.Decision("third"); !ok || d.Prefill == nil || len(d.Prefill.Candidates) != 4 || d.Prefill.Worker != third.Prefill.Worker {
		t.Errorf("the kept decision has the leg %+v", d.Prefill)
	}
}

// A client that leaves during the prefill leg leaves load on the prefill worker only: no other worker got
// the request. Once both were sent, it leaves load on both.
func TestTheLoadOfALegStays(t *testing.T) {
	for _, sent := range []bool{false, true} {
		r := splitOf(t, router.Config{}, router.Prefill, router.Decode)
		set(t, r, withRole(1, router.Prefill))
		set(t, r, withRole(2, router.Decode))
		d := decided(t, r, "a", "abcdef")
		if d.Prefill == nil || !r.Leave("a", sent) || r.Leave("a", sent) || r.Free(d.Prefill.ID) {
			t.Fatal("the request and its leg do not end once")
		}
		of := byID(t, r)
		if got := of[1].LeftRequests; got != 1 {
			t.Errorf("sent %v: %d requests left on the prefill worker, want 1", sent, got)
		}
		if got := of[2].LeftRequests == 1; got != sent || of[1].ActiveRequests+of[2].ActiveRequests > 0 {
			t.Errorf("sent %v: %d requests left on the decode worker; %d and %d in flight", sent, of[2].LeftRequests, of[1].ActiveRequests, of[2].ActiveRequests)
		}
	}
}

// While all prefill workers are avoided because they fail, requests have no leg. After the back-off one request tries.
func TestNoLegWhileAllPrefillWorkersFail(t *testing.T) {
	c := &clock{now: time.Unix(1000, 0)}
	r := splitOf(t, router.Config{AvoidFailing: 2 * time.Second, Now: c.read}, router.Decode, router.Prefill, router.Prefill)
	fail := func(id string) {
		d := decided(t, r, id, "abcd")
		if d.Prefill == nil {
			t.Fatalf("%s has no leg: %s", id, d.NoLeg)
		}
		r.Served(d.Prefill.ID, router.Response{Address: d.Prefill.Address, Asked: 1, Local: true})
		r.Free(id)
	}
	fail("a")
	fail("b")
	if d := decided(t, r, "c", "abcd"); d.Prefill != nil || d.NoLeg != router.NoLegFailing || d.Worker.ID != 1 {
		t.Errorf("while both fail: worker %d, leg %v, reason %q", d.Worker.ID, d.Prefill, d.NoLeg)
	}
	c.now = c.now.Add(3 * time.Second)
	if d := decided(t, r, "d", "abcd"); d.Prefill == nil {
		t.Errorf("after the back-off there is no leg: %s", d.NoLeg)
	}
}

// The rules for requests without a leg, with the cases of Dynamo's conditional disaggregation.
func TestRulesThatSkipTheLeg(t *testing.T) {
	threshold := func(c router.Config) router.Config { c.Thresholds.PrefillTokens = new(100); return c }
	queue := router.QueueConfig{Threshold: new(.05)} // of a batch of 1,000 tokens
	for _, c := range []struct {
		name           string
		conf           router.Config
		tokens, cached int
		pend           int // on the prefill worker
		split          router.Split
		want           router.NoLeg
	}{
		{"mostly cached", router.Config{Split: router.SplitConfig{Skip: router.SkipShort}}, 8000, 7000, 0, "", router.NoLegShort},
		{"short and not cached", router.Config{Split: router.SplitConfig{Skip: router.SkipShort}}, 2000, 0, 0, "", ""},
		{"just enough cached", router.Config{Split: router.SplitConfig{Skip: router.SkipShort}}, 2000, 601, 0, "", router.NoLegShort},
		{"just too much to compute", router.Config{Split: router.SplitConfig{Skip: router.SkipShort}}, 10000, 7952, 0, "", ""},
		{"a leg is asked for", router.Config{Split: router.SplitConfig{Skip: router.SkipShort}}, 8000, 7000, 0, router.SplitAlways, ""},
		{"no rule", router.Config{}, 8000, 7000, 0, "", ""},
		{"one worker is asked for", router.Config{}, 8000, 0, 0, router.SplitNever, router.NoLegAsked},
		{"busy by the threshold", threshold(router.Config{Split: router.SplitConfig{Skip: router.SkipBusy}}), 8000, 0, 101, "", router.NoLegBusy},
		{"not busy", threshold(router.Config{Split: router.SplitConfig{Skip: router.SkipBusy}}), 8000, 0, 99, "", ""},
		{"busy without a rule", threshold(router.Config{}), 8000, 0, 101, "", router.NoLegBusy},
		{"busy by the queue's threshold", router.Config{Queue: queue, Split: router.SplitConfig{Skip: router.SkipBusy}}, 8000, 0, 51, "", router.NoLegBusy},
		{"either: short", threshold(router.Config{Split: router.SplitConfig{Skip: router.SkipEither}}), 8000, 7000, 0, "", router.NoLegShort},
		{"either: busy", threshold(router.Config{Split: router.SplitConfig{Skip: router.SkipEither}}), 8000, 0, 101, "", router.NoLegBusy},
		{"own bounds", router.Config{Split: router.SplitConfig{Skip: router.SkipShort, SkipTokens: 9000, SkipFraction: 1}}, 8000, 1, 0, "", router.NoLegShort},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRouter(t, c.conf, 0)
			for id, role := range []router.Role{router.Prefill, router.Decode} {
				w := withRole(uint64(id+1), role)
				w.BlockSize, w.TotalKVBlocks = 1, 0
				set(t, r, w)
			}
			if c.pend > 0 {
				before := router.Request{ID: "before", Owned: true, Model: "m", Tokens: long("before", c.pend), Split: router.SplitAlways}
				if _, err := r.BestWorker(t.Context(), before); err != nil {
					t.Fatal(err)
				}
			}
			ids := long("request", c.tokens)
			local := indexer.AppendLocalHashes(nil, ids[:c.cached], 1, indexer.Seed("", ""))
			ev := indexer.Event{Kind: indexer.Stored}
			for i, s := range indexer.AppendSequenceHashes(nil, local) {
				ev.Blocks = append(ev.Blocks, indexer.Block{External: s + 1, Local: local[i]})
			}
			r.ApplyEvent(router.Worker{ID: 2}, ev)
			d, err := r.BestWorker(t.Context(), router.Request{ID: "request", Owned: true, Model: "m", Tokens: ids, Split: c.split})
			if err != nil || d.NoLeg != c.want || (d.Prefill == nil) != (c.want != "") || d.Worker.ID != 2 {
				t.Fatalf("worker %d, prefill leg %v, reason %q, error %v; want reason %q", d.Worker.ID, d.Prefill != nil, d.NoLeg, err, c.want)
			}
			if pend := byID(t, r)[2].PendTokens; (c.want != "") != (pend == c.tokens-c.cached) {
				t.Errorf("the decode worker has %d tokens to compute", pend)
			}
		})
	}
	if _, err := router.New(router.Config{Split: router.SplitConfig{Skip: router.SkipBusy}}); err == nil {
		t.Error("a rule about busy workers without a threshold is no error")
	}
}

// The second choice gets the request with the parameters of the prefill leg, so it has the leg's
// engine, and is not the leg's worker.
func TestTheSecondChoiceOfASplitRequest(t *testing.T) {
	r := splitOf(t, router.Config{}, router.Both, router.Both)
	other := withRole(3, router.Decode)
	other.Engine = "trtllm"
	set(t, r, other)
	if _, err := r.BestWorker(t.Context(), router.Request{Model: "m", ID: "load", Tokens: prompt("abcdefgh"), Pinned: &router.Worker{ID: 3}, Split: router.SplitNever}); err != nil {
		t.Fatal(err)
	}
	check := func(id string, want func(d router.Decision) uint64) {
		t.Helper()
		d, err := r.BestWorker(t.Context(), router.Request{Model: "m", ID: id, Tokens: prompt("abcd"), WantSecond: true})
		if err != nil || d.Prefill == nil || d.Worker.ID == 3 || d.Second.Worker.ID != want(d) {
			t.Errorf("%s: error %v, prefill %v, decode on %d, second choice %d", id, err, d.Prefill, d.Worker.ID, d.Second.Worker.ID)
		}
	}
	check("no third worker", func(router.Decision) uint64 { return 0 })
	set(t, r, withRole(4, router.Both))
	check("a third worker", func(d router.Decision) uint64 { return 1 + 2 + 4 - d.Worker.ID - d.Prefill.Worker.ID })
}

// SGLang's engines with a role take split requests only, so no rule leaves out their legs.
func TestSGLangTakesNoWholeRequests(t *testing.T) {
	for _, rule := range []router.SkipRule{router.SkipNever, router.SkipEither} {
		r := newRouter(t, router.Config{Split: router.SplitConfig{Skip: rule}, Thresholds: scorer.Thresholds{PrefillTokens: new(10)}}, 0)
		workers := []router.WorkerInfo{withRole(1, router.Prefill), withRole(2, router.Decode)}
		for i := range workers {
			workers[i].Engine = "sglang"
			set(t, r, workers[i])
		}
		first := decided(t, r, "first", "abcd")
		if first.Prefill == nil || first.Worker.ID != 2 {
			t.Fatalf("%s: a short prompt: worker %d, reason %q", rule, first.Worker.ID, first.NoLeg)
		}
		refused := func(what string, split router.Split, want error) {
			t.Helper()
			if d, err := r.BestWorker(t.Context(), router.Request{Model: "m", ID: "refused", Tokens: prompt("abcd"), Split: split}); !errors.Is(err, want) {
				t.Errorf("%s: %s: worker %d, error %v; want %v", rule, what, d.Worker.ID, err, want)
			}
		}
		refused("a whole request", router.SplitNever, router.ErrNoWorkers)
		refused("the prefill worker is busy", router.SplitAuto, router.ErrAllBusy)
		if err := r.PrefillFailed("first"); !errors.Is(err, router.ErrNoWorkers) {
			t.Errorf("%s: the leg failed: %v", rule, err)
		}
		r.Free("first")
		whole := worker(3)
		whole.Engine = "sglang"
		set(t, r, whole)
		if d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("abcd"), Split: router.SplitNever}); err != nil || d.Worker.ID != 3 {
			t.Errorf("%s: a whole request beside an aggregated worker: worker %d, error %v", rule, d.Worker.ID, err)
		}
	}
}

// A decode worker above its threshold never gets a prefill: it is no candidate.
func TestABusyDecodeWorkerGetsNoPrefill(t *testing.T) {
	conf := router.Config{Split: router.SplitConfig{Skip: router.SkipShort, SkipTokens: 1 << 20, SkipFraction: 1}}
	conf.Thresholds.ActiveBlocks = new(.001)
	r := splitOf(t, conf, router.Prefill, router.Decode, router.Decode)
	store(r, router.Worker{ID: 2}, "abcdefgh")
	occupy(t, r, "before", 2, "stuvwxyz", true)
	if d := decided(t, r, "a", "abcdefgh"); d.Worker.ID != 3 {
		t.Errorf("worker %d with %q, want 3", d.Worker.ID, d.NoLeg)
	}
}

// Pins, taints and adapters hold for both legs.
func TestLegsFollowTheRequestsConditions(t *testing.T) {
	r := splitOf(t, router.Config{}, router.Prefill, router.Prefill, router.Decode, router.Decode)
	for id, role := range map[uint64]router.Role{2: router.Prefill, 4: router.Decode} {
		w := withRole(id, role)
		w.Taints, w.LoRA = []string{"zone-b"}, []string{"adapter"}
		set(t, r, w)
	}
	pin := func(id uint64) *router.Worker { return &router.Worker{ID: id} }
	for _, c := range []struct {
		name            string
		change          func(*router.Request)
		prefill, decode uint64 // 0 = no leg, or an error
		err             error
	}{
		{"both pinned", func(q *router.Request) { q.PrefillPinned, q.Pinned = pin(1), pin(4) }, 1, 4, nil},
		{"decode pinned by its process", func(q *router.Request) { q.Pinned, q.AnyRank, q.PrefillPinned = pin(3), true, pin(2) }, 2, 3, nil},
		{"taint", func(q *router.Request) { q.RequiredTaints = []string{"zone-b"} }, 2, 4, nil},
		{"pin against a taint", func(q *router.Request) { q.RequiredTaints, q.PrefillPinned = []string{"zone-b"}, pin(1) }, 0, 0, router.ErrPinnedNotAllowed},
		{"a taint that no prefill worker has", func(q *router.Request) { q.RequiredTaints = []string{"decode-only"} }, 0, 0, router.ErrNoWorkers},
		{"unknown prefill worker", func(q *router.Request) { q.PrefillPinned = pin(9) }, 0, 0, router.ErrPinnedUnknown},
		{"a decode worker pinned for prefill", func(q *router.Request) { q.PrefillPinned = pin(3) }, 0, 0, router.ErrPinnedNotAllowed},
		{"a prefill worker pinned for decode", func(q *router.Request) { q.Pinned = pin(1) }, 0, 0, router.ErrPinnedNotAllowed},
		{"adapter", func(q *router.Request) { q.Model = "adapter" }, 2, 4, nil},
		{"only these", func(q *router.Request) { q.Allowed = []router.Worker{{ID: 2}, {ID: 3}} }, 2, 3, nil},
		{"one worker", func(q *router.Request) { q.Split, q.Pinned = router.SplitNever, pin(3) }, 0, 3, nil},
		{"neither word", func(q *router.Request) { q.Split = "both" }, 0, 0, router.ErrBadRequest},
		{"an id that looks like a leg's", func(q *router.Request) { q.ID = "x/prefill" }, 0, 0, router.ErrBadRequest},
	} {
		t.Run(c.name, func(t *testing.T) {
			req := router.Request{ID: c.name, Owned: true, Model: "m", Tokens: prompt("abcd")}
			c.change(&req)
			d, err := r.BestWorker(t.Context(), req)
			if !errors.Is(err, c.err) || (err == nil) != (c.err == nil) {
				t.Fatalf("error %v, want %v", err, c.err)
			}
			prefill := uint64(0)
			if d.Prefill != nil {
				prefill = d.Prefill.Worker.ID
			}
			if err == nil && (prefill != c.prefill || d.Worker.ID != c.decode) {
				t.Errorf("prefill on %d, decode on %d; want %d and %d", prefill, d.Worker.ID, c.prefill, c.decode)
			}
			r.Free(req.ID)
			for id, w := range byID(t, r) {
				if w.ActiveRequests != 0 {
					t.Errorf("worker %d has a slot left", id)
				}
			}
		})
	}
	none := splitOf(t, router.Config{}, router.Decode)
	if _, err := none.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("a"), Split: router.SplitAlways}); !errors.Is(err, router.ErrNoWorkers) {
		t.Errorf("a leg that cannot be had: %v", err)
	}
}

// A session binds the decode worker only, and preferred taints, such as a zone, hold for both workers.
func TestSessionsAndPreferencesOfLegs(t *testing.T) {
	r := splitOf(t, router.Config{Sessions: router.SessionConfig{TTL: time.Minute}}, router.Prefill, router.Prefill, router.Decode, router.Decode)
	for id, role := range map[uint64]router.Role{2: router.Prefill, 4: router.Decode} {
		w := withRole(id, role)
		w.Taints = []string{"zone-b"}
		set(t, r, w)
	}
	decide := func(id string, prefer float64) router.Decision {
		t.Helper()
		d, err := r.BestWorker(t.Context(), router.Request{
			ID: id, Owned: true, Model: "m", Tokens: prompt("abcdefgh"), Session: "s", PreferredTaints: map[string]float64{"zone-b": prefer},
		})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	first := decide("first", 1e6)
	if first.Worker.ID != 4 || first.Prefill == nil || first.Prefill.Worker.ID != 2 {
		t.Fatalf("decision %+v, prefill %+v; want the workers of the zone, 4 and 2", first, first.Prefill)
	}
	r.MarkPrefillCompleted("first") // binds the session
	other := router.Request{ID: "other", Owned: true, Model: "m", Tokens: prompt("stuvwxyz"), PrefillPinned: &router.Worker{ID: 2}}
	if _, err := r.BestWorker(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	second := decide("second", 0)
	if second.Worker.ID != 4 || second.Reason != router.ReasonSession || second.Prefill == nil || second.Prefill.Reason == router.ReasonSession || second.Prefill.Worker.ID != 1 {
		t.Errorf("decision %+v, prefill %+v; want the session's decode worker, and the idle prefill worker", second, second.Prefill)
	}
}

// A request waits in the queue while no prefill worker has room, and takes both slots at once.
func TestALegWaitsInTheQueue(t *testing.T) {
	r := splitOf(t, router.Config{Queue: router.QueueConfig{Threshold: new(0.)}}, router.Prefill, router.Decode)
	first := decided(t, r, "first", "abcd")
	waiting, got := make(chan struct{}), make(chan router.Decision)
	go func() {
		defer close(got)
		d, err := r.BestWorker(t.Context(), router.Request{ID: "second", Owned: true, Model: "m", Tokens: prompt("efgh"), Waiting: func(bool) { close(waiting) }})
		if err != nil {
			t.Error(err)
		}
		got <- d
	}()
	<-waiting
	r.Free(first.Prefill.ID)
	if d := <-got; d.Prefill == nil || d.Worker.ID != 2 {
		t.Errorf("decision %+v", d)
	}
	r.Free("first")
	r.Free("second")
}

// Requests come and go on workers that come and go, at a router and its replica. Legs only go to
// workers that may take them, both routers count the same load, and in the end none is left.
func TestRandomSplits(t *testing.T) {
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 1))
		replica := newRouter(t, router.Config{NoEvents: true}, 0)
		r := newRouter(t, router.Config{
			NoEvents: true, Seed: seed,
			Split: router.SplitConfig{Skip: []router.SkipRule{router.SkipNever, router.SkipShort}[seed%2], SkipTokens: 30},
			Hooks: router.Hooks{Tell: func(c router.Change) { replica.PeerChanged(7, c) }},
		}, 0)
		roles := []router.Role{router.Prefill, router.Decode, router.Both, router.Aggregated}
		info := map[uint64]router.WorkerInfo{}
		flying := map[string]string{} // leg by request, empty without one
		for step := range 400 {
			switch id := rng.Uint64N(6) + 1; rng.IntN(8) {
			case 0:
				w := withRole(id, roles[rng.IntN(4)])
				if old, known := info[id]; known && rng.IntN(2) == 0 {
					w.Role = old.Role
					w.Draining = rng.IntN(2) == 0
				}
				info[id] = w
				set(t, r, w)
				set(t, replica, w)
			case 1:
				delete(info, id)
				r.RemoveWorker(id)
				replica.RemoveWorker(id)
			case 2, 3:
				for name, leg := range flying {
					if n := rng.IntN(6); n < 2 {
						r.MarkPrefillCompleted(name)
					} else if n < 3 {
						r.PrefillFailed(name)
					} else if leg != "" && rng.IntN(2) == 0 {
						r.Free(leg)
					} else {
						r.Free(name)
						delete(flying, name)
					}
					break
				}
			default:
				name := fmt.Sprint(step)
				d, err := r.BestWorker(t.Context(), router.Request{ID: name, Owned: true, Model: "m", Tokens: prompt("abcdefgh"[:1+rng.IntN(8)])})
				if errors.Is(err, router.ErrNoWorkers) || errors.Is(err, router.ErrUnknownModel) {
					continue
				} else if err != nil {
					t.Fatal(err)
				}
				flying[name] = ""
				if info[d.Worker.ID].Role == router.Prefill {
					t.Fatalf("seed %d: a prefill worker decodes", seed)
				}
				if p := d.Prefill; p != nil {
					flying[name] = p.ID
					to, from := info[d.Worker.ID], info[p.Worker.ID]
					if p.Worker.ID == d.Worker.ID || to.Role == router.Aggregated || from.Role != router.Prefill && from.Role != router.Both || from.Draining {
						t.Fatalf("seed %d: prefill on %+v for %+v", seed, from, to)
					}
				}
			}
			if a, b := loads(r), loads(replica); a != b {
				t.Fatalf("seed %d, step %d: the router has\n%s\nits replica\n%s", seed, step, a, b)
			}
		}
		for _, name := range slices.Sorted(maps.Keys(flying)) {
			r.Free(name)
		}
		for _, w := range slices.Concat(r.Workers(), replica.Workers()) {
			if w.ActiveRequests|w.ActiveBlocks|w.PendTokens != 0 {
				t.Fatalf("seed %d: in the end worker %d has %d requests", seed, w.ID, w.ActiveRequests)
			}
		}
	}
}

// The decode worker's cached blocks count if the operator wants it.
func TestDecodeCredit(t *testing.T) {
	for credit, want := range map[float64]uint64{0: 3, 1: 2} {
		r := splitOf(t, router.Config{Split: router.SplitConfig{DecodeCredit: credit}, Scoring: scorer.Defaults()}, router.Prefill, router.Decode, router.Decode)
		store(r, router.Worker{ID: 2}, "abcdefgh")
		occupy(t, r, "before", 2, "xy", true)
		if d := decided(t, r, "a", "abcdefgh"); d.Worker.ID != want || d.Prefill == nil {
			t.Errorf("credit %v: worker %d, want %d", credit, d.Worker.ID, want)
		}
	}
}

// The listed loads of both choices are those before the booking, also of workers that were not candidates.
func TestListsOfASplitShowLoadsBeforeTheBooking(t *testing.T) {
	r := splitOf(t, router.Config{}, router.Prefill, router.Decode)
	d := decided(t, r, "a", "ABCD")
	if d.Prefill == nil {
		t.Fatal("there is no prefill leg")
	}
	kept, _ := r.Decision("a")
	for _, list := range [][]router.Candidate{kept.Candidates, kept.Prefill.Candidates} {
		if len(list) != 2 {
			t.Fatalf("%d workers are listed, want 2", len(list))
		}
		for _, c := range list {
			if c.ActiveRequests != 0 {
				t.Errorf("worker %d (%s) is listed with %d requests, want none", c.Worker.ID, c.Excluded, c.ActiveRequests)
			}
		}
	}
}

// A request that is admitted while its caller gives up keeps no slot, neither its own nor that of its
// prefill leg.
func TestAnAbandonedWaitKeepsNoSlotOfTheLeg(t *testing.T) {
	for i := range 40 {
		r := splitOf(t, router.Config{Queue: router.QueueConfig{Threshold: new(.01)}}, router.Prefill, router.Decode)
		for id := uint64(1); id <= 2; id++ {
			w := withRole(id, []router.Role{router.Prefill, router.Decode}[id-1])
			w.MaxBatchedTokens = 100
			set(t, r, w)
		}
		ctx, cancel := context.WithCancel(t.Context())
		if d := decided(t, r, "a", "ABCDEFGHIJKLMNOP"); d.Prefill == nil {
			t.Fatal("there is no prefill leg")
		}
		waited := false
		_, err := r.BestWorker(ctx, router.Request{ID: "b", Model: "m", Tokens: prompt("QRSTUVWXYZ"), Owned: true, Waiting: func(bool) {
			waited = true
			r.MarkPrefillCompleted("a") // admits b
			r.Free("a")
			cancel()
		}})
		if !waited {
			t.Fatal("the second request does not wait")
		}
		if err == nil {
			r.Free("b")
		}
		for _, w := range r.Workers() {
			if w.ActiveRequests != 0 || w.PendTokens != 0 {
				t.Fatalf("run %d, %v: worker %d keeps %d requests and %d tokens", i, err, w.ID, w.ActiveRequests, w.PendTokens)
			}
		}
	}
}
