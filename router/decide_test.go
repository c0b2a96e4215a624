// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// occupy books a request on a worker, with blocks that only this worker has, and marks
// its prefill completed if done is set.
func occupy(t *testing.T, r *router.Router, id string, on uint64, letters string, done bool) {
	t.Helper()
	if _, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: "m", Tokens: prompt(letters), Pinned: &router.Worker{ID: on}}); err != nil {
		t.Fatal(err)
	}
	if done {
		r.MarkPrefillCompleted(id)
	}
}

func pick(t *testing.T, r *router.Router, req router.Request) (uint64, error) {
	t.Helper()
	req.Model = "m"
	if req.Tokens == nil {
		req.Tokens = prompt("QRS")
	}
	d, err := r.BestWorker(t.Context(), req)
	return d.Worker.ID, err
}

func TestModes(t *testing.T) {
	cpu := func(ids ...uint64) func(*router.WorkerInfo) {
		return func(w *router.WorkerInfo) { w.CPU = slices.Contains(ids, w.ID) }
	}
	for _, c := range []struct {
		name    string
		conf    router.Config
		change  func(*router.WorkerInfo)
		load    []int // requests on each worker
		want    []uint64
		uniform bool // each worker of want is chosen about equally often
	}{
		{name: "least-loaded", conf: router.Config{Mode: router.LeastLoaded}, load: []int{2, 1, 3}, want: []uint64{2}},
		{name: "least-loaded, equal", conf: router.Config{Mode: router.LeastLoaded}, load: []int{1, 2, 1}, want: []uint64{1, 3}, uniform: true},
		{name: "random", conf: router.Config{Mode: router.Random}, load: []int{9, 0, 1}, want: []uint64{1, 2, 3}, uniform: true},
		{name: "power-of-two", conf: router.Config{Mode: router.PowerOfTwo}, load: []int{9, 0, 1}, want: []uint64{2, 3}},
		{name: "power-of-two with one", conf: router.Config{Mode: router.PowerOfTwo}, load: []int{4}, want: []uint64{1}},
		{name: "device-aware, ratio 8", conf: router.Config{Mode: router.DeviceAware}, change: cpu(1, 2), load: []int{1, 1, 8, 4}, want: []uint64{4}},
		{name: "device-aware, ratio 4", conf: router.Config{Mode: router.DeviceAware, DeviceRatio: 4}, change: cpu(1, 2), load: []int{1, 1, 8, 4}, want: []uint64{1, 2}, uniform: true},
		{name: "device-aware, one class", conf: router.Config{Mode: router.DeviceAware}, load: []int{1, 0}, want: []uint64{2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			seen := map[uint64]int{}
			n := 40
			if c.uniform {
				n = 300
			}
			for seed := range uint64(n) {
				c.conf.Seed = seed
				r := newRouter(t, c.conf, 0)
				for i, load := range c.load {
					w := worker(uint64(i + 1))
					if c.change != nil {
						c.change(&w)
					}
					set(t, r, w)
					for k := range load {
						occupy(t, r, fmt.Sprint(i, "-", k), w.ID, "", true)
					}
				}
				d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Prompt: router.Prompt{Messages: []byte("not read")}})
				if err != nil || d.Reason != router.ReasonMode || d.Policy != "" {
					t.Fatalf("reason %q, policy %q, %v", d.Reason, d.Policy, err)
				}
				seen[d.Worker.ID]++
			}
			for id, times := range seen {
				if !slices.Contains(c.want, id) || c.uniform && math.Abs(float64(times)-float64(n)/float64(len(c.want))) > float64(n)/8 {
					t.Errorf("workers were chosen %v times, want %v", seen, c.want)
				}
			}
			if c.uniform && len(seen) != len(c.want) {
				t.Errorf("workers were chosen %v times, want all of %v", seen, c.want)
			}
		})
	}
}

func TestDirect(t *testing.T) {
	some := .5
	r := newRouter(t, router.Config{Mode: router.Direct, Thresholds: scorer.Thresholds{ActiveBlocks: &some}}, 2)
	w := worker(3)
	w.TotalKVBlocks = 2
	set(t, r, w)
	occupy(t, r, "x", 3, "AB", true)
	for _, c := range []struct {
		pin  *router.Worker
		want uint64
		err  error
	}{
		{nil, 0, router.ErrPinMissing},
		{&router.Worker{ID: 2}, 2, nil},
		{&router.Worker{ID: 9}, 0, router.ErrNoWorkers},
		{&router.Worker{ID: 9}, 0, router.ErrPinnedUnknown},
		{&router.Worker{ID: 2, DPRank: 1}, 0, router.ErrNoWorkers},
		{&router.Worker{ID: 3}, 0, router.ErrAllBusy},
		{&router.Worker{ID: 3}, 0, router.ErrPinnedBusy},
	} {
		if got, err := pick(t, r, router.Request{Pinned: c.pin}); got != c.want || !errors.Is(err, c.err) {
			t.Errorf("pinned to %v: worker %d, %v; want %d, %v", c.pin, got, err, c.want, c.err)
		}
	}
}

// A pin can be wrong in three ways. Each has its own error, and none of them is the error
// for a lack of workers.
func TestPins(t *testing.T) {
	tokens := 10
	r := newRouter(t, router.Config{Thresholds: scorer.Thresholds{PrefillTokens: &tokens}}, 2)
	for id, change := range map[uint64]func(*router.WorkerInfo){
		3: func(w *router.WorkerInfo) { w.Health = router.Unhealthy },
		4: func(w *router.WorkerInfo) { w.Draining = true },
		5: func(w *router.WorkerInfo) { w.Role = router.Prefill },
		6: func(w *router.WorkerInfo) { w.Health = router.Degraded },
		7: func(w *router.WorkerInfo) { w.Taints = []string{"gold"} },
	} {
		w := worker(id)
		change(&w)
		set(t, r, w)
	}
	store(r, router.Worker{ID: 1}, "QRS")
	occupy(t, r, "x", 2, "AB", false)
	pin := func(id uint64) *router.Worker { return &router.Worker{ID: id} }
	for _, c := range []struct {
		name string
		req  router.Request
		want uint64
		err  error
	}{
		{"without", router.Request{}, 1, nil},
		{"fine", router.Request{Pinned: pin(7)}, 7, nil},
		{"degraded", router.Request{Pinned: pin(6)}, 6, nil},
		{"unknown", router.Request{Pinned: pin(77)}, 0, router.ErrPinnedUnknown},
		{"unknown rank", router.Request{Pinned: &router.Worker{ID: 1, DPRank: 4}}, 0, router.ErrPinnedUnknown},
		{"busy", router.Request{Pinned: pin(2)}, 0, router.ErrPinnedBusy},
		{"unhealthy", router.Request{Pinned: pin(3)}, 0, router.ErrNoWorkers},
		{"draining", router.Request{Pinned: pin(4)}, 0, router.ErrNoWorkers},
		{"of another role", router.Request{Pinned: pin(5)}, 0, router.ErrPinnedNotAllowed},
		{"not allowed", router.Request{Pinned: pin(1), Allowed: []router.Worker{{ID: 7}}}, 0, router.ErrPinnedNotAllowed},
		{"not at an allowed address", router.Request{Pinned: pin(1), AllowedAddresses: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:81")}}, 0, router.ErrPinnedNotAllowed},
		{"without a required taint", router.Request{Pinned: pin(1), RequiredTaints: []string{"gold"}}, 0, router.ErrPinnedNotAllowed},
		{"with it", router.Request{Pinned: pin(7), RequiredTaints: []string{"gold"}}, 7, nil},
	} {
		got, err := pick(t, r, c.req)
		if got != c.want || !errors.Is(err, c.err) {
			t.Errorf("%s: worker %d, %v; want %d, %v", c.name, got, err, c.want, c.err)
		}
		pinErrors := 0
		for _, e := range []error{router.ErrPinnedUnknown, router.ErrPinnedNotAllowed, router.ErrPinnedBusy, router.ErrNoWorkers, router.ErrAllBusy} {
			if errors.Is(err, e) {
				pinErrors++
			}
		}
		if c.err != nil && pinErrors != 1 {
			t.Errorf("%s: %v is %d kinds of error, want one", c.name, err, pinErrors)
		}
	}
	d, err := r.BestWorker(t.Context(), router.Request{ID: "p", Model: "m", Tokens: prompt("A"), Pinned: pin(7), Explain: true})
	if err != nil || d.Cost != 0 || d.Policy != "" || d.Reason != router.ReasonPinned || len(d.Candidates) != 7 {
		t.Errorf("a pinned decision %+v, %v", d, err)
	}
	for _, c := range d.Candidates {
		if c.Worker.ID != 7 && c.Excluded != router.ExcludedPin || c.Worker.ID == 7 && c.Excluded != "" {
			t.Errorf("worker %d is excluded as %q", c.Worker.ID, c.Excluded)
		}
	}
	if w := r.Workers()[6]; w.ActiveRequests != 1 || w.PendTokens != 8 {
		t.Errorf("the pinned request is not booked: %+v", w)
	}
}

func TestAllowedAndTaints(t *testing.T) {
	r := newRouter(t, router.Config{}, 2)
	for id, taints := range map[uint64][]string{3: {"gold"}, 4: {"gold", "rack-7"}} {
		w := worker(id)
		w.Taints = taints
		set(t, r, w)
	}
	store(r, router.Worker{ID: 1}, "Q")
	occupy(t, r, "x", 4, "AB", false)
	occupy(t, r, "y", 2, "AB", false)
	for _, c := range []struct {
		name string
		req  router.Request
		want uint64
		err  error
	}{
		{"anybody", router.Request{}, 1, nil},
		{"allowed", router.Request{Allowed: []router.Worker{{ID: 2}, {ID: 4}, {ID: 3}}}, 3, nil},
		{"nobody is allowed", router.Request{Allowed: []router.Worker{}}, 0, router.ErrNoWorkers},
		{"address with any port", router.Request{AllowedAddresses: []netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr("10.0.0.2"), 0)}}, 2, nil},
		{"address with the wrong port", router.Request{AllowedAddresses: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.2:1")}}, 0, router.ErrNoWorkers},
		{"required", router.Request{RequiredTaints: []string{"gold"}}, 3, nil},
		{"both required", router.Request{RequiredTaints: []string{"gold", "rack-7"}}, 4, nil},
		{"required of nobody", router.Request{RequiredTaints: []string{"silver"}}, 0, router.ErrNoWorkers},
		{"preferred", router.Request{PreferredTaints: map[string]float64{"gold": 5}}, 3, nil},
		{"preferred, not enough", router.Request{PreferredTaints: map[string]float64{"rack-7": .5}}, 1, nil},
		{"shunned", router.Request{PreferredTaints: map[string]float64{"gold": -1}, Allowed: []router.Worker{{ID: 3}, {ID: 2}}}, 2, nil},
		{"no number", router.Request{PreferredTaints: map[string]float64{"gold": math.NaN()}}, 0, router.ErrBadRequest},
	} {
		if c.name == "shunned" {
			occupy(t, r, "z", 3, "CD", false) // 40 tokens each, but for the taint
		}
		if got, err := pick(t, r, c.req); got != c.want || !errors.Is(err, c.err) {
			t.Errorf("%s: worker %d, %v; want %d, %v", c.name, got, err, c.want, c.err)
		}
	}
}

// In every mode a worker above a threshold gets no request and a worker at the threshold
// does. Loads that the engine reports count for ten seconds.
func TestThresholds(t *testing.T) {
	for _, mode := range []router.Mode{router.KV, router.Random, router.RoundRobin, router.LeastLoaded, router.PowerOfTwo, router.DeviceAware} {
		t.Run(string(mode), func(t *testing.T) {
			c := newClock()
			r := newRouter(t, router.Config{Mode: mode, Now: c.read}, 0)
			for id := range uint64(2) {
				w := worker(id + 1)
				w.TotalKVBlocks, w.MaxBatchedTokens = 1000, 16
				set(t, r, w)
			}
			set(t, r, worker(3)) // does not report its number of blocks
			only := []router.Worker{{ID: 1}, {ID: 2}}
			set := func(change func(*scorer.Thresholds)) {
				t.Helper()
				if _, err := r.SetThresholds("m", func(scorer.Thresholds) (th scorer.Thresholds) { change(&th); return th }); err != nil {
					t.Fatal(err)
				}
			}
			free := func() (ids []uint64) {
				t.Helper()
				for _, id := range []uint64{1, 2} {
					switch got, err := pick(t, r, router.Request{Allowed: []router.Worker{{ID: id}}}); {
					case err == nil:
						ids = append(ids, got)
					case !errors.Is(err, router.ErrAllBusy):
						t.Fatal(err)
					}
				}
				return ids
			}
			check := func(what string, want ...uint64) {
				t.Helper()
				if got := free(); !slices.Equal(got, want) {
					t.Errorf("%s: workers %v are free, want %v", what, got, want)
				}
			}
			share := .8
			set(func(th *scorer.Thresholds) { th.ActiveBlocks = &share })
			check("idle", 1, 2)
			r.SetEngineLoad(router.Worker{ID: 1}, 800, c.now)
			r.SetEngineLoad(router.Worker{ID: 2}, 801, c.now)
			check("800 and 801 of 1,000", 1)
			r.SetEngineLoad(router.Worker{ID: 1}, 900, c.now.Add(time.Hour)) // the report's clock is an hour ahead
			check("both", []uint64{}...)
			if _, err := pick(t, r, router.Request{Allowed: only}); !errors.Is(err, router.ErrAllBusy) {
				t.Errorf("all busy: %v", err)
			}
			d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("QRS"), Explain: true})
			if err != nil || d.Worker.ID != 3 || len(d.Candidates) != 3 || d.Candidates[0].Excluded != router.ExcludedBusy || d.Candidates[2].Excluded != "" {
				t.Errorf("%+v, %v; want worker 3, whose size is unknown", d, err)
			}
			c.pass(10 * time.Second)
			check("ten seconds later", []uint64{}...)
			c.pass(time.Millisecond)
			check("after that", 1, 2)
			if r.SetEngineLoad(router.Worker{ID: 9}, 1, c.now) || r.SetEngineLoad(router.Worker{ID: 1, DPRank: 3}, 1, c.now) {
				t.Error("a report of an unknown worker was accepted")
			}

			// The same with shares of 1,000 blocks; they apply only to workers whose size
			// is known.
			set(func(th *scorer.Thresholds) { th.ActiveBlocks = &share })
			if !r.SetEngineUsage(router.Worker{ID: 1}, .8, c.now) || !r.SetEngineUsage(router.Worker{ID: 2}, .801, c.now) {
				t.Error("a share was not accepted")
			}
			check("shares of 0.8 and 0.801", 1)
			if r.SetEngineUsage(router.Worker{ID: 9}, 1, c.now) || r.SetEngineUsage(router.Worker{ID: 1, DPRank: 3}, 1, c.now) {
				t.Error("a share of an unknown worker or rank was accepted")
			}
			c.pass(10*time.Second + time.Millisecond)
			check("shares that are old", 1, 2)

			tokens := 16
			set(func(th *scorer.Thresholds) { th.PrefillTokens = &tokens })
			occupy(t, r, "a", 1, "AB", false)
			check("16 tokens pending of 16", 1, 2)
			tokens = 15
			check("16 of 15", 2)
			frac := 1.
			set(func(th *scorer.Thresholds) { th.PrefillFraction = &frac })
			check("one batch of one", 1, 2)
			frac = .9
			check("one batch of .9", 2)
			r.MarkPrefillCompleted("a")
			check("after its first token", 1, 2)
		})
	}
}

func TestThresholdsOfModels(t *testing.T) {
	half := .5
	r := newRouter(t, router.Config{Thresholds: scorer.Thresholds{ActiveBlocks: &half}}, 1)
	w := worker(2)
	w.Models, w.BlockSize = []string{"n", "alias"}, 16
	set(t, r, w)
	tokens := 7
	got, err := r.SetThresholds("alias", func(th scorer.Thresholds) scorer.Thresholds { th.PrefillTokens = &tokens; return th })
	if err != nil || got.Model != "n" || *got.PrefillTokens != 7 || *got.ActiveBlocks != .5 {
		t.Errorf("%+v, %v", got, err)
	}
	w.BlockSize = 32 // a pool created later has the same thresholds
	w.ID = 3
	set(t, r, w)
	all := r.Thresholds()
	if len(all) != 2 || all[0].Model != "m" || all[0].PrefillTokens != nil || all[1].Model != "n" || *all[1].PrefillTokens != 7 {
		t.Errorf("%+v", all)
	}
	occupied := router.Request{ID: "x", Model: "n", Tokens: prompt("AB"), Pinned: &router.Worker{ID: 3}}
	if _, err := r.BestWorker(t.Context(), occupied); err != nil {
		t.Fatal(err)
	}
	occupied.ID = ""
	if _, err := r.BestWorker(t.Context(), occupied); !errors.Is(err, router.ErrPinnedBusy) {
		t.Errorf("%v, want the later pool's worker to be busy", err)
	}
	bad := -1
	if got, err := r.SetThresholds("n", func(th scorer.Thresholds) scorer.Thresholds { th.PrefillTokens = &bad; return th }); err == nil || *got.PrefillTokens != 7 {
		t.Errorf("a negative threshold: %+v, %v", got, err)
	}
	none := 0 // prefill tokens; for the models without thresholds of their own, and later pools
	r.SetDefaultThresholds(scorer.Thresholds{PrefillTokens: &none})
	w.Models, w.ID = []string{"later"}, 4
	set(t, r, w)
	all = r.Thresholds()
	if len(all) != 3 || all[0].Model != "later" || *all[0].PrefillTokens != 0 || all[1].ActiveBlocks != nil || *all[1].PrefillTokens != 0 || *all[2].PrefillTokens != 7 {
		t.Errorf("%+v", all)
	}
	for _, id := range []uint64{1, 4} {
		occupied := router.Request{ID: fmt.Sprint(id), Model: map[uint64]string{1: "m", 4: "later"}[id], Tokens: prompt("AB")}
		if _, err := r.BestWorker(t.Context(), occupied); err != nil {
			t.Fatal(err)
		}
		occupied.ID = ""
		if _, err := r.BestWorker(t.Context(), occupied); !errors.Is(err, router.ErrAllBusy) {
			t.Errorf("worker %d above the new threshold: %v", id, err)
		}
	}
	if _, err := r.SetThresholds("x", func(th scorer.Thresholds) scorer.Thresholds { return th }); !errors.Is(err, router.ErrUnknownModel) {
		t.Errorf("unknown model: %v", err)
	}
}

// An override applies to one request and to no other.
func TestOverrides(t *testing.T) {
	scoring := classic(1)
	scoring.DecodeWeight = 0
	r := newRouter(t, router.Config{Scoring: scoring}, 3)
	for i, held := range []int{2, 5, 8} {
		store(r, router.Worker{ID: uint64(i + 1)}, "0123456789"[:held])
	}
	occupy(t, r, "a", 1, "abcde", true)
	occupy(t, r, "c", 3, "vwxy", true)
	num := func(v float64) *float64 { return &v }
	for _, c := range []struct {
		name     string
		override *scorer.Override
		want     uint64
		cost     float64
		field    string // field that the error names
	}{
		{"none", nil, 2, 15, ""},
		{"weight 2", &scorer.Override{OverlapScoreWeight: num(2)}, 3, 18, ""},
		{"tokens", &scorer.Override{Cost: new(scorer.Tokens)}, 3, 17.6, ""},
		{"alpha selects tokens", &scorer.Override{Alpha: num(0)}, 3, 16, ""},
		// Worker 3 has a request of 32 tokens; 256 tokens of output are expected.
		{"decode weight selects tokens", &scorer.Override{DecodeWeight: num(3)}, 3, 17.6 + 32*256*5.6e-5/.0386, ""},
		{"none again", nil, 2, 15, ""},
		{"newer form", &scorer.Override{PrefillLoadScale: num(2)}, 3, 18, ""},
		{"not a number", &scorer.Override{OverlapScoreWeight: num(math.NaN())}, 0, 0, "overlap_score_weight"},
		{"negative", &scorer.Override{Temperature: num(-1)}, 0, 0, "router_temperature"},
		{"contradiction", &scorer.Override{Cost: new(scorer.Tokens), OverlapScoreWeight: num(1)}, 0, 0, "overlap_score_weight"},
		{"unknown cost", &scorer.Override{Cost: new(scorer.Policy("cheap"))}, 0, 0, "cost"},
		{"a cache that nobody hears of", &scorer.Override{SharedCacheMultiplier: num(.5)}, 0, 0, "shared_cache_multiplier"},
		{"no decode weight", &scorer.Override{DecodeWeight: num(-1)}, 0, 0, "decode_weight"},
		{"prefill that is not tracked", &scorer.Override{Alpha: num(.5), TrackPrefillTokens: new(bool)}, 0, 0, "alpha"},
	} {
		d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("0123456789"), Override: c.override})
		if c.field == "" {
			if err != nil || d.Worker.ID != c.want || math.Abs(d.Cost-c.cost) > 1e-9 {
				t.Errorf("%s: worker %d for %v, %v; want %d for %v", c.name, d.Worker.ID, d.Cost, err, c.want, c.cost)
			}
			continue
		}
		bad, ok := errors.AsType[*scorer.SettingError](err)
		if !ok || !errors.Is(err, router.ErrBadOverride) || bad.Setting != c.field {
			t.Errorf("%s: %v, want ErrBadOverride of %s", c.name, err, c.field)
		}
	}
	blind := newRouter(t, router.Config{Scoring: classic(0)}, 1)
	_, err := pick(t, blind, router.Request{Override: &scorer.Override{OverlapScoreWeight: num(1)}})
	if bad, ok := errors.AsType[*scorer.SettingError](err); !ok || bad.Setting != "overlap_score_weight" {
		t.Errorf("a weight without an index: %v", err)
	}
	if _, err := pick(t, blind, router.Request{Override: &scorer.Override{OverlapScoreWeight: num(0)}}); err != nil {
		t.Errorf("weight 0 without an index: %v", err)
	}
	other := newRouter(t, router.Config{Mode: router.Random}, 1)
	if _, err := pick(t, other, router.Request{Override: &scorer.Override{Alpha: num(1)}}); !errors.Is(err, router.ErrBadOverride) {
		t.Errorf("an override where nothing is compared: %v", err)
	}
	// A pinned request compares no costs, unless its rank is open.
	pinned := router.Request{Override: &scorer.Override{Alpha: num(1)}, Pinned: &router.Worker{ID: 2}}
	if _, err := pick(t, r, pinned); !errors.Is(err, router.ErrBadOverride) || !strings.Contains(err.Error(), "names its worker") {
		t.Errorf("an override beside a pin: %v", err)
	}
	pinned.AnyRank = true
	if w, err := pick(t, r, pinned); err != nil || w != 2 {
		t.Errorf("an override beside a pin to any rank: %v", err)
	}
	// The booking follows the override, too.
	no := false
	if _, err := pick(t, r, router.Request{ID: "u", Override: &scorer.Override{TrackPrefillTokens: &no}, Pinned: &router.Worker{ID: 2}}); err != nil {
		t.Fatal(err)
	}
	if w := r.Workers()[1]; w.PendTokens != 0 || w.ActiveRequests != 1 {
		t.Errorf("untracked prefill: %+v", w)
	}
}

func TestBadRequests(t *testing.T) {
	r := newRouter(t, router.Config{}, 1)
	for name, req := range map[string]router.Request{
		"id":       {ID: strings.Repeat("x", 1025)},
		"priority": {Priority: math.NaN()},
		"endless":  {Priority: math.Inf(1)},
		"output":   {ExpectedOutput: -1},
		"target":   {TTFTTarget: -1},
	} {
		if _, err := pick(t, r, req); !errors.Is(err, router.ErrBadRequest) {
			t.Errorf("%s: %v, want ErrBadRequest", name, err)
		}
	}
	if _, err := r.BestWorker(t.Context(), router.Request{Model: "m", Blocks: &router.Blocks{Tokens: -1}}); !errors.Is(err, router.ErrBadBlocks) {
		t.Errorf("a prompt of -1 tokens: %v", err)
	}
}

// Sessions stay with their worker: always, or until the worker is overloaded.
func TestSessions(t *testing.T) {
	for _, hard := range []bool{false, true} {
		t.Run(fmt.Sprint("hard ", hard), func(t *testing.T) {
			c := newClock()
			r := newRouter(t, router.Config{Now: c.read, Sessions: router.SessionConfig{TTL: time.Minute, Hard: hard}}, 3)
			n := 0
			turn := func(session, letters string) (uint64, router.Reason, error) {
				t.Helper()
				n++
				id := fmt.Sprint("t", n)
				d, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: "m", Tokens: prompt(letters), Session: session})
				if err != nil {
					return 0, "", err
				}
				r.MarkPrefillCompleted(id)
				r.Free(id)
				return d.Worker.ID, d.Reason, nil
			}
			home, reason, err := turn("s", "AB")
			if err != nil || reason == router.ReasonSession {
				t.Fatalf("the first turn: reason %s, %v", reason, err)
			}
			away := home%3 + 1
			store(r, router.Worker{ID: away}, "XYZ")
			if got, reason, err := turn("s", "XYZ"); got != home || reason != router.ReasonSession || err != nil {
				t.Errorf("the second turn: worker %d, %s, %v; want %d", got, reason, err, home)
			}
			if got, _, _ := turn("another", "XYZ"); got != away {
				t.Errorf("another session: worker %d, want %d", got, away)
			}
			c.pass(59 * time.Second)
			if got, _, _ := turn("s", "XYZ"); got != home {
				t.Errorf("after 59 s: worker %d, want %d", got, home)
			}
			c.pass(time.Minute)
			r.Tick()
			if got, _, _ := turn("s", "XYZ"); got != away {
				t.Errorf("after a minute: worker %d, want the cheapest, %d", got, away)
			}
			// The worker is overloaded: more than twice the mean and more than 50,000
			// tokens.
			long := make([]uint32, 170_000)
			if _, err := r.BestWorker(t.Context(), router.Request{ID: "long", Model: "m", Tokens: long, Pinned: &router.Worker{ID: away}}); err != nil {
				t.Fatal(err)
			}
			got, _, err := turn("s", "XYZ")
			if err != nil || (got == away) != hard {
				t.Errorf("with an overloaded worker: %d, %v", got, err)
			}
			r.Free("long")
			if again, _, _ := turn("s", "XYZ"); again != got {
				t.Errorf("afterwards: worker %d, want %d, where it was bound last", again, got)
			}
			sick := worker(got)
			sick.Health = router.Unhealthy
			set(t, r, sick)
			switch other, _, err := turn("s", "AB"); {
			case hard && !errors.Is(err, router.ErrNoWorkers):
				t.Errorf("hard, with an unhealthy worker: %d, %v", other, err)
			case !hard && (err != nil || other == got):
				t.Errorf("soft, with an unhealthy worker: %d, %v", other, err)
			}
			r.RemoveWorker(got)
			if other, _, err := turn("s", "AB"); err != nil || other == got {
				t.Errorf("after its worker left: %d, %v", other, err)
			}
		})
	}
}

// A session leaves a worker whose state excludes it, and stays where it went when that worker is well again.
func TestSessionsFollowTheStateOfTheirWorker(t *testing.T) {
	for _, c := range []struct {
		state        string
		begins, ends func(t *testing.T, r *router.Router, id uint64, d router.Decision)
	}{
		{"unhealthy", health(router.Unhealthy), health(router.Healthy)},
		{"degraded", health(router.Degraded), health(router.Healthy)},
		{"draining", func(t *testing.T, r *router.Router, id uint64, _ router.Decision) {
			t.Helper()
			w := worker(id)
			w.Draining = true
			set(t, r, w)
		}, health(router.Healthy)},
		{"avoided", func(t *testing.T, r *router.Router, _ uint64, d router.Decision) {
			t.Helper()
			r.Served(d.ID, router.Response{Address: d.Address, Asked: 1, Status: 503, Local: true})
		}, health(router.Healthy)},
		{"gone", func(_ *testing.T, r *router.Router, id uint64, _ router.Decision) { r.RemoveWorker(id) }, health(router.Healthy)},
	} {
		t.Run(c.state, func(t *testing.T) {
			r := newRouter(t, router.Config{AvoidFailing: time.Minute, Sessions: router.SessionConfig{TTL: time.Hour}}, 3)
			n := 0
			turn := func() router.Decision {
				t.Helper()
				n++
				d, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(n), Model: "m", Tokens: prompt("AB"), Session: "s"})
				if err != nil {
					t.Fatal(err)
				}
				return d
			}
			d := turn()
			home := d.Worker.ID
			r.MarkPrefillCompleted(d.ID)
			r.Free(d.ID)
			last := turn()
			if last.Worker.ID != home || last.Reason != router.ReasonSession {
				t.Fatalf("before: worker %d by %s, want %d by its session", last.Worker.ID, last.Reason, home)
			}
			c.begins(t, r, home, last)
			r.Free(last.ID)
			d = turn()
			away := d.Worker.ID
			if away == home {
				t.Fatalf("the session stays on worker %d", home)
			}
			r.MarkPrefillCompleted(d.ID)
			r.Free(d.ID)
			c.ends(t, r, home, last)
			if d = turn(); d.Worker.ID != away || d.Reason != router.ReasonSession {
				t.Errorf("afterwards: worker %d by %s, want %d by its session", d.Worker.ID, d.Reason, away)
			}
		})
	}
}

func health(h router.Health) func(*testing.T, *router.Router, uint64, router.Decision) {
	return func(t *testing.T, r *router.Router, id uint64, _ router.Decision) {
		t.Helper()
		w := worker(id)
		w.Health = h
		set(t, r, w)
	}
}

// Of two concurrent requests of a session, the one with the earlier first token binds the
// session.
func TestSessionsAreBoundOnce(t *testing.T) {
	r := newRouter(t, router.Config{Sessions: router.SessionConfig{TTL: time.Hour}}, 3)
	for i := range uint64(2) {
		if _, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(i), Model: "m", Session: "s", Pinned: &router.Worker{ID: i + 1}}); err != nil {
			t.Fatal(err)
		}
	}
	if d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Session: "s"}); err != nil || d.Reason == router.ReasonSession {
		t.Errorf("before any first token: %s, %v", d.Reason, err)
	}
	r.MarkPrefillCompleted("1")
	r.MarkPrefillCompleted("0")
	if d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Session: "s"}); err != nil || d.Worker.ID != 2 {
		t.Errorf("worker %d, %v; want 2", d.Worker.ID, err)
	}
}

func TestSessionsAreBounded(t *testing.T) {
	r := newRouter(t, router.Config{Sessions: router.SessionConfig{TTL: time.Hour, Limit: 10}}, 8)
	where := map[int]uint64{}
	for i := range 20 {
		d, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(i), Model: "m", Session: fmt.Sprint("s", i), Tokens: prompt("A")})
		if err != nil {
			t.Fatal(err)
		}
		where[i] = d.Worker.ID
		r.MarkPrefillCompleted(d.ID)
		r.Free(d.ID)
	}
	for i := range 20 {
		d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Session: fmt.Sprint("s", i), Tokens: prompt("A")})
		if err != nil {
			t.Fatal(err)
		}
		if bound := d.Reason == router.ReasonSession; bound != (i >= 10) || bound && d.Worker.ID != where[i] {
			t.Errorf("session %d of 20: worker %d by %s, was %d", i, d.Worker.ID, d.Reason, where[i])
		}
	}
	if _, err := r.BestWorker(t.Context(), router.Request{ID: "end", Model: "m", Session: "s15", SessionFinal: true}); err != nil {
		t.Fatal(err)
	}
	r.MarkPrefillCompleted("end")
	if d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Session: "s15"}); err != nil || d.Reason == router.ReasonSession {
		t.Errorf("after its last request: %s, %v", d.Reason, err)
	}
}

// A request without an owner expires, and its id can be used again.
func TestUnownedRequestsEnd(t *testing.T) {
	c := newClock()
	r := newRouter(t, router.Config{Now: c.read}, 1)
	for id, owned := range map[string]bool{"mine": true, "lost": false, "alive": false} {
		if _, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: "m", Tokens: prompt("A"), Owned: owned}); err != nil {
			t.Fatal(err)
		}
	}
	c.pass(200 * time.Second)
	r.Tick()
	if !r.AddOutputTokens("alive", 3) || r.AddOutputTokens("nobody", 1) {
		t.Error("output must be accepted for a request in flight, and for no other")
	}
	c.pass(150 * time.Second)
	r.Tick()
	if got := r.Workers()[0].ActiveRequests; got != 2 {
		t.Errorf("%d requests, want the owned and the one that shows life", got)
	}
	if _, err := r.BestWorker(t.Context(), router.Request{ID: "lost", Model: "m"}); err != nil {
		t.Errorf("the request's id is not free: %v", err)
	}
	for id, want := range map[string]bool{"mine": true, "alive": true, "lost": true} {
		if got := r.Free(id); got != want {
			t.Errorf("Free(%s) = %v", id, got)
		}
	}
	// The id is free again after the worker left, too.
	if _, err := r.BestWorker(t.Context(), router.Request{ID: "x", Model: "m"}); err != nil {
		t.Fatal(err)
	}
	r.RemoveWorker(1)
	r.Tick()
	if r.Free("x") {
		t.Error("a request whose worker left is still in flight")
	}
}

// Output tokens fill blocks; a block of a request that is nearly done counts less.
func TestOutputTokens(t *testing.T) {
	r := newRouter(t, router.Config{}, 1)
	if _, err := r.BestWorker(t.Context(), router.Request{ID: "x", Model: "m", Tokens: prompt("AB"), ExpectedOutput: 16}); err != nil {
		t.Fatal(err)
	}
	r.MarkPrefillCompleted("x")
	for _, c := range []struct{ more, want int }{{0, 2}, {1, 3}, {7, 2}, {8, 0}} { // 2, 3·15/16, 3·1/2, 4·0
		r.AddOutputTokens("x", c.more)
		if got := r.Workers()[0].ActiveBlocks; got != c.want {
			t.Errorf("after %d more tokens: %d blocks, want %d", c.more, got, c.want)
		}
	}
}

func TestEstimates(t *testing.T) {
	r := newRouter(t, router.Config{}, 1)
	d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: make([]uint32, 8192)})
	if err != nil || math.Abs(d.EstimatedTTFT-405.393) > .001 || math.Abs(d.CoarseTTFT-163.84) > 1e-9 {
		t.Errorf("estimates %v and %v ms, %v; want 405.393 and 163.84", d.EstimatedTTFT, d.CoarseTTFT, err)
	}
}
