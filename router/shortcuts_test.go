// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// Decisions take two shortcuts: a request that excludes no workers by itself takes the candidates of
// the one before, if no worker changed since, and a cost that does not depend on new active blocks is
// computed without them. Routers without these shortcuts choose the same workers at the same costs.
func TestShortcutsChangeNoDecision(t *testing.T) {
	t.Parallel()
	for seed := range uint64(200) {
		quick, slow := decisionsOf(t, seed, true), decisionsOf(t, seed, false)
		for i := range max(len(quick), len(slow)) {
			if i >= len(quick) || i >= len(slow) || quick[i] != slow[i] {
				t.Fatalf("seed %d, step %d:\n%v\nwithout shortcuts:\n%v", seed, i, quick[i:min(i+1, len(quick))], slow[i:min(i+1, len(slow))])
			}
		}
	}
}

// decisionsOf plays random workers, events and requests, and returns what the router decided and knew.
func decisionsOf(t *testing.T, seed uint64, shortcuts bool) (lines []string) {
	rng := rand.New(rand.NewPCG(seed, 77))
	now := time.Unix(1_700_000_000, 0)
	conf := router.Config{Now: func() time.Time { return now }, Seed: seed, PredictTTL: -1, GuessTTL: time.Minute, AvoidFailing: 2 * time.Second, KeepDecisions: 8, InferFirstTokens: rng.IntN(2) == 0, EstimateOutput: rng.IntN(2) == 0}
	s := scorer.Defaults()
	s.Policy = scorer.Policies()[rng.IntN(5)]
	if rng.IntN(4) == 0 {
		s.Temperature = rng.Float64() * 2
	}
	s.AssumeKVReuse, s.TrackPrefill = rng.IntN(4) > 0, rng.IntN(4) > 0
	if rng.IntN(2) == 0 {
		s.CreditDecay = rng.Float64()
	}
	conf.Scoring = s
	if rng.IntN(3) == 0 {
		conf.Mode = router.Modes()[rng.IntN(len(router.Modes()))]
	}
	if rng.IntN(3) == 0 {
		conf.PredictTTL = 10 * time.Second
	}
	if rng.IntN(3) == 0 {
		conf.Sessions = router.SessionConfig{TTL: time.Minute, Hard: rng.IntN(2) == 0}
	}
	if rng.IntN(3) == 0 {
		conf.Thresholds = scorer.Thresholds{PrefillTokens: new(200 + rng.IntN(400)), ActiveBlocks: new(rng.Float64())}
	}
	if rng.IntN(6) == 0 {
		conf.NoActiveBlocks = true
	}
	if rng.IntN(6) == 0 {
		conf.Split.Skip = router.SkipShort
	}
	r, err := router.New(conf)
	if err != nil {
		t.Fatal(err)
	}
	n := 2 + rng.IntN(20)
	if seed%50 == 0 {
		n = 300
	}
	split, groups := rng.IntN(4) == 0, rng.IntN(5) == 0
	set := func(id int) {
		w := router.WorkerInfo{ID: uint64(id) + 1, Models: []string{"m"}, Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(id >> 8), byte(id)}), 8000), BlockSize: 4}
		w.MaxNumSeqs, w.TotalKVBlocks, w.MaxBatchedTokens = rng.IntN(2)*4, rng.IntN(2)*100, rng.IntN(2)*256
		w.CPU, w.Draining = rng.IntN(4) == 0, rng.IntN(10) == 0
		w.Health = router.Health(rng.IntN(10) / 8)
		w.StartedMS = int64(rng.IntN(20) / 19)
		if rng.IntN(3) == 0 {
			w.Taints = []string{"a", "b", "c"}[:1+rng.IntN(3)]
		}
		if rng.IntN(3) == 0 {
			w.LoRA = []string{"lora"}
		}
		if rng.IntN(6) == 0 {
			w.DPSize = 2
		}
		if split {
			w.Role = []router.Role{router.Prefill, router.Decode, router.Both, ""}[rng.IntN(4)]
		} else if groups && id%2 == 0 {
			w.Group, w.Members, w.DPSize = fmt.Sprint("g", id), 2, 0
		}
		if err := r.SetWorker(w); err != nil {
			t.Fatal(err)
		}
	}
	for i := range n {
		set(i)
	}
	toks := func() (out []uint32) {
		p := rng.IntN(4)
		for i := range 4 + rng.IntN(60) {
			out = append(out, uint32(p*1000+i))
		}
		for range rng.IntN(20) {
			out = append(out, rng.Uint32N(50))
		}
		return out
	}
	record := func(v ...any) {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, string(b))
	}
	var flying []string
	for step := range 150 {
		if !shortcuts {
			r.ForgetCandidates()
		}
		now = now.Add(time.Duration(rng.IntN(400)) * time.Millisecond)
		w := router.Worker{ID: uint64(rng.IntN(n)) + 1}
		switch rng.IntN(14) {
		case 0:
			local := indexer.AppendLocalHashes(nil, toks(), 4, indexer.Seed("", ""))
			seq := indexer.AppendSequenceHashes(nil, local)
			ev := indexer.Event{Kind: indexer.Stored, Tier: indexer.Tier(rng.IntN(3))}
			for k := range local {
				ev.Blocks = append(ev.Blocks, indexer.Block{Local: local[k], External: seq[k]})
			}
			r.ApplyEvent(w, ev)
		case 1:
			set(rng.IntN(n))
		case 2:
			if rng.IntN(4) == 0 {
				r.RemoveWorker(w.ID)
			}
		case 3:
			r.SetEngineLoad(w, rng.IntN(90), now)
			r.SetEngineRequests(w, rng.IntN(5), rng.IntN(3), now)
		case 4:
			r.SetEngineUsage(w, rng.Float64(), now)
		case 5:
			if len(flying) > 0 {
				r.Served(flying[rng.IntN(len(flying))], router.Response{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(rng.IntN(n))}), 8000), Asked: 1 + rng.IntN(2), Status: 200 + 303*rng.IntN(2), Local: rng.IntN(2) == 0})
			}
		case 6:
			if groups {
				r.SetSummary(w.ID, router.Summary{Taken: now, Healthy: 2, Busy: rng.IntN(3), PendTokens: rng.IntN(500), ActiveRequests: rng.IntN(9), ActiveBlocks: rng.IntN(80), TotalBlocks: 100})
			}
		case 7:
			loads, err := r.PotentialLoads(context.Background(), router.Request{Model: "m", Tokens: toks()})
			record(loads, fmt.Sprint(err))
		case 8, 9:
			if len(flying) > 0 {
				i := rng.IntN(len(flying))
				record(r.MarkPrefillCompleted(flying[i]))
				r.AddOutputTokens(flying[i], rng.IntN(20))
				if rng.IntN(2) == 0 {
					record(r.Free(flying[i]))
					flying = append(flying[:i], flying[i+1:]...)
				}
			}
		default:
			q := router.Request{Model: "m", Tokens: toks(), Owned: true, Explain: rng.IntN(2) == 0, WantSecond: rng.IntN(2) == 0, Unseen: rng.IntN(2) == 0}
			if rng.IntN(3) > 0 {
				q.ID = fmt.Sprint("r", step)
			}
			if rng.IntN(6) == 0 {
				q.Pinned, q.AnyRank = &w, rng.IntN(2) == 0
			}
			if rng.IntN(6) == 0 {
				q.Preferred = &w
			}
			if rng.IntN(5) == 0 {
				q.RequiredTaints = []string{"a"}
			}
			if rng.IntN(5) == 0 {
				q.PreferredTaints = map[string]float64{"b": 1, "c": -2}
			}
			if rng.IntN(5) == 0 {
				q.Model = "lora"
			}
			if rng.IntN(5) == 0 {
				q.Session, q.SessionFinal = fmt.Sprint(rng.IntN(3)), rng.IntN(5) == 0
			}
			if rng.IntN(8) == 0 {
				q.Allowed = []router.Worker{{ID: 1}, {ID: 2}, {ID: 3}}
			}
			if rng.IntN(5) == 0 {
				q.ExpectedOutput = 1 + rng.IntN(50)
			}
			if rng.IntN(6) == 0 {
				q.Override = &router.Override{}
			}
			if !shortcuts {
				q.Explain = true
			}
			d, err := r.BestWorker(context.Background(), q)
			if err == nil && q.ID != "" {
				flying = append(flying, q.ID)
			}
			record(d.Worker, d.Cost, d.Reason, d.Second, d.OverlapBlocks, d.PrefillTokens, d.EstimatedTTFT, fmt.Sprint(err))
			if d.Prefill != nil {
				record(d.Prefill.Worker, d.Prefill.Cost)
			}
		}
	}
	for _, s := range r.Workers() {
		record(s)
	}
	return lines
}
