// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/router"
)

// printed is the output of `kvroute explain --json`, read with no other knowledge than
// docs/routing.md.
type printed struct {
	Mode   string
	Reason string
	Worker struct {
		WorkerID uint64 `json:"worker_id"`
	}
	Prompt   float64 `json:"prompt_tokens"`
	Block    float64 `json:"block_size"`
	Draw     float64
	Turn     int
	Ratio    float64 `json:"device_ratio"`
	Output   float64 `json:"expected_output_tokens"`
	InUse    float64 `json:"active_prefix_tokens"`
	Sharers  float64 `json:"active_prefix_requests"`
	Settings struct {
		Cost             string
		Temperature      float64 `json:"router_temperature"`
		Weight           float64 `json:"overlap_score_weight"`
		Credit           float64 `json:"overlap_score_credit"`
		Decay            float64 `json:"overlap_score_credit_decay"`
		WOverlap         float64 `json:"weighted_overlap"`
		WRequests        float64 `json:"weighted_requests"`
		WUse             float64 `json:"weighted_kv_use"`
		Scale            float64 `json:"prefill_load_scale"`
		Request          float64 `json:"active_request_weight"`
		Host             float64 `json:"host_cache_weight"`
		Disk             float64 `json:"disk_cache_weight"`
		Alpha, Attention float64
		Batch            float64 `json:"max_batch"`
		Decode           float64 `json:"decode_weight"`
		KVRead           float64 `json:"kv_read"`
		Track            bool    `json:"track_prefill_tokens"`
		Engine           map[string]float64
	}
	Candidates []*candidate

	most, ready float64 // cached tokens of a candidate, and those that are computed
	speeds      bool    // a candidate has a speed other than 1
}

type candidate struct {
	Worker struct {
		WorkerID uint64 `json:"worker_id"`
	}
	Excluded          string
	Overlap           float64 `json:"overlap_blocks"`
	Coming            float64 `json:"pending_blocks"`
	Host              float64 `json:"host_blocks"`
	Disk              float64 `json:"disk_blocks"`
	Pend              float64 `json:"pend_tokens"`
	N                 int     `json:"active_requests"`
	Held              float64 `json:"decode_tokens"`
	ToDecode          float64 `json:"waiting_tokens"`
	Speed             float64
	Active            int     `json:"active_blocks"`
	More              int     `json:"additional_blocks"`
	Use               float64 `json:"kv_use"`
	Places            float64 `json:"max_requests"`
	Taints            float64 `json:"taint_weight"`
	CPU               bool
	Cost, Probability float64
}

// cost is the formula of each policy.
func (r *printed) cost(c *candidate, least float64) float64 {
	s := &r.Settings
	n, blocks := float64(c.N), float64(c.Active+c.More)
	cached := math.Round((c.Overlap + s.Host*c.Host + s.Disk*c.Disk) * r.Block)
	u := math.Max(1, r.Prompt-cached)
	cost := 0.
	held := c.Held + c.ToDecode
	delay := s.Decode * s.KVRead * r.Output * held / 3
	prefix := math.Min(c.Overlap*r.Block, r.Prompt)
	wait := math.Min(math.Min(c.Coming*r.Block, c.Pend), prefix)
	work := func(from, to float64) float64 { return (to - from) * (1 + s.Attention*(from+to)/2) }
	base := s.Decode * s.Engine["floor"] * r.Output / 3
	switch {
	case s.Cost == "tokens" && !s.Track:
		if cost = blocks; s.Decode > 0 {
			cost = held/r.Block + float64(c.More)
		}
		base = -1
	case s.Cost == "tokens":
		cost = c.Pend + work(r.Prompt-u, r.Prompt)*(1+s.Alpha*n) + delay
		copies := work(prefix-wait, prefix) - wait + math.Min(wait, math.Max(0, r.ready-(prefix-wait)))
		if most := math.Min(r.most, r.Prompt); cached < most && n > 0 {
			copies += work(cached, most) / 4
		} else if cached < most && r.InUse > cached {
			copies -= work(cached, math.Min(most, r.InUse)) * r.Sharers / (r.Sharers + 1)
		}
		cost += math.Min(1, s.Decode) * copies
		if c.Places > 0 {
			cost += r.Prompt * math.Max(0, n+1-.9*c.Places)
		}
		base /= s.Engine["token"]
	case s.Cost == "dynamo":
		cost = blocks
		if s.Track {
			cost += s.Weight * math.Max(0, c.Pend+r.Prompt-c.Overlap*r.Block) / r.Block
		}
	case s.Cost == "dynamo_newer":
		raw, decay := 0., 1.
		if s.Track {
			raw = (c.Pend + math.Max(0, r.Prompt-cached) + cached) / r.Block
			decay = 1 / (1 + s.Decay*((c.Pend-least)/r.Block)/math.Ceil(r.Prompt/r.Block))
		}
		cost = s.Scale*math.Max(0, raw-s.Credit*decay*c.Overlap-s.Host*c.Host-s.Disk*c.Disk) + blocks + s.Request*n
	case s.Cost == "predicted_ttft":
		e := s.Engine
		own := e["token"]*u + e["attention"]*u*(r.Prompt-u/2)
		cost = own + 1.15*e["token"]*(c.Pend-wait) + (c.Pend+u)/e["chunk"]*(e["floor"]+e["kv_token"]*c.Held) + s.Alpha*own*n
		cost += e["token"]*(wait+delay) + e["attention"]*wait*(prefix-wait/2)
	case s.Cost == "weighted":
		batch := s.Batch
		if c.Places > 0 {
			batch = c.Places
		}
		return -(s.WOverlap*(math.Min(c.Overlap*r.Block, r.Prompt)/r.Prompt-delay/r.Prompt) - s.WRequests*n/batch - s.WUse*c.Use)
	}
	if v := c.Speed; r.speeds && base >= 0 && (s.Cost == "tokens" || s.Cost == "predicted_ttft") {
		cost += base
		if v > 0 {
			cost /= math.Pow(v, .75)
		}
	}
	return cost * math.Exp(-math.Tanh(c.Taints))
}

// among draws one of the candidates for which no other is better.
func among(all []*candidate, draw float64, better func(a, b *candidate) bool) *candidate {
	var best []*candidate
	for _, c := range all {
		switch {
		case len(best) == 0 || better(c, best[0]):
			best = []*candidate{c}
		case !better(best[0], c):
			best = append(best, c)
		}
	}
	return best[int(draw*float64(len(best)))]
}

func quieter(a, b *candidate) bool { return a.N < b.N || a.N == b.N && a.Active < b.Active }

// choice computes the decision again.
func (r *printed) choice() *candidate {
	var all []*candidate
	least := math.Inf(1)
	for _, c := range r.Candidates {
		if c.Excluded == "" {
			all, least = append(all, c), math.Min(least, c.Pend)
			s := &r.Settings
			r.speeds = r.speeds || c.Speed > 0 && c.Speed != 1
			cached := math.Round((c.Overlap + s.Host*c.Host + s.Disk*c.Disk) * r.Block)
			r.most, r.ready = math.Max(r.most, cached), math.Max(r.ready, cached-c.Coming*r.Block)
		}
	}
	n := len(all)
	switch r.Mode {
	case "round-robin":
		return all[r.Turn%n]
	case "random":
		return all[int(r.Draw*float64(n))]
	case "least-loaded":
		return among(all, r.Draw, quieter)
	case "power-of-two":
		if n == 1 {
			return all[0]
		}
		pair := int(r.Draw * float64(n*(n-1)))
		i, j := pair/(n-1), pair%(n-1)
		if j >= i {
			j++
		}
		if all[j].N < all[i].N {
			i = j
		}
		return all[i]
	case "device-aware-weighted":
		var workers, requests [2]float64
		class := func(c *candidate) int { return map[bool]int{false: 0, true: 1}[c.CPU] }
		for _, c := range all {
			workers[class(c)]++
			requests[class(c)] += float64(c.N)
		}
		if workers[0] > 0 && workers[1] > 0 {
			cpu := requests[1]/workers[1] < requests[0]/(workers[0]*r.Ratio)
			var kept []*candidate
			for _, c := range all {
				if c.CPU == cpu {
					kept = append(kept, c)
				}
			}
			all = kept
		}
		return among(all, r.Draw, quieter)
	}
	for _, c := range all {
		c.Cost = r.cost(c, least)
	}
	if t := r.Settings.Temperature; t > 0 {
		low, high, sum, upTo := math.Inf(1), math.Inf(-1), 0., 0.
		for _, c := range all {
			low, high = math.Min(low, c.Cost), math.Max(high, c.Cost)
		}
		weight := func(c *candidate) float64 {
			if high == low {
				return 1
			}
			return math.Exp(-(c.Cost - low) / (high - low) / t)
		}
		for _, c := range all {
			sum += weight(c)
		}
		for _, c := range all {
			if upTo += weight(c) / sum; r.Draw <= upTo {
				return c
			}
		}
		return all[n-1]
	}
	same := func(a, b float64) bool { return math.Abs(a-b) <= 1e-12*math.Max(math.Abs(a), math.Abs(b)) }
	if r.Settings.Cost == "weighted" {
		return among(all, 0, func(a, b *candidate) bool { return !same(a.Cost, b.Cost) && a.Cost < b.Cost })
	}
	return among(all, r.Draw, func(a, b *candidate) bool {
		if !same(a.Cost, b.Cost) {
			return a.Cost < b.Cost
		}
		return quieter(a, b)
	})
}

// The output of explain is enough to compute the same choice, cost by cost, with only the formulas
// of docs/routing.md: in all modes, with all policies, with draws and overrides.
func TestADecisionCanBeWorkedOutAgain(t *testing.T) {
	for seed, flags := range []string{
		"", "--alpha .3 --attention 0", "--decode-weight 5", "--decode-weight 0", "--cost weighted --decode-weight 2", "--router-temperature .5", "--no-router-track-prefill-tokens",
		"--kv-overlap-score-weight 2", "--kv-overlap-score-weight 0 --router-temperature 1",
		"--cost dynamo_newer", "--router-kv-overlap-score-credit 1.5 --router-kv-overlap-score-credit-decay .5 --router-prefill-load-scale 3 --router-decode-active-request-weight 4",
		"--cost predicted_ttft", "--cost predicted_ttft --engine-preset 8b --alpha .25", "--cost weighted", "--cost weighted --weighted-requests .5 --weighted-kv-use .2",
		"--router-mode random", "--router-mode round-robin", "--router-mode least-loaded", "--router-mode power-of-two",
		"--router-mode device-aware-weighted", "--router-mode device-aware-weighted --device-ratio 2",
	} {
		t.Run(flags, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(uint64(seed), 9))
			for range 12 {
				recompute(t, rnd, strings.Fields(flags)...)
			}
		})
	}
}

func recompute(t *testing.T, rnd *rand.Rand, flags ...string) {
	const workers = 5
	s := situation{}
	for _, list := range []*[]int{&s.held, &s.lower, &s.decode, &s.pending, &s.more} {
		for range workers {
			*list = append(*list, rnd.IntN(5))
		}
	}
	for range workers {
		s.cpu = append(s.cpu, rnd.IntN(2) == 0)
	}
	s.tier = 1
	s.places = rnd.IntN(8)
	r, _, _ := routerWith(t, s, append(flags, "--seed", strconv.Itoa(rnd.IntN(100)))...)
	if rnd.IntN(3) == 0 {
		if _, err := r.SetThresholds("m", func(router.Thresholds) router.Thresholds { return router.Thresholds{PrefillTokens: new(16)} }); err != nil {
			t.Fatal(err)
		}
	}
	reports := server{router: r}
	for id := range uint64(workers) {
		if rnd.IntN(2) == 0 {
			reports.engineLoad(router.WorkerInfo{ID: id + 1, TotalKVBlocks: 10}, fleet.Load{Running: rnd.IntN(9), Waiting: rnd.IntN(9), KVUtilization: rnd.Float64()})
		}
	}
	server := httptest.NewServer(api.New(api.Config{Router: r, Metrics: http.NotFoundHandler()}))
	defer server.Close()
	req := router.Request{ID: "it", Model: "m", Tokens: letters("ABCDEFGHIJ"), PreferredTaints: map[string]float64{"even": rnd.Float64() - .5}}
	if kv := !strings.Contains(strings.Join(flags, " "), "--router-mode"); kv && rnd.IntN(3) == 0 {
		req.Override = &router.Override{Temperature: new(rnd.Float64())}
	}
	d, err := r.BestWorker(t.Context(), req)
	if errors.Is(err, router.ErrAllBusy) {
		return // no worker was chosen
	}
	if err != nil {
		t.Fatal(err)
	}
	status, out, stderr := runs(t, "explain", "--url", server.URL, "--json", "it")
	var got printed
	if err := json.Unmarshal([]byte(out), &got); status != 0 || err != nil {
		t.Fatal(status, stderr, err)
	}
	costs := map[uint64]float64{}
	for _, c := range got.Candidates {
		costs[c.Worker.WorkerID] = c.Cost
	}
	choice := got.choice()
	if choice.Worker.WorkerID != d.Worker.ID {
		t.Errorf("worker %d by hand, %d by kvroute:\n%s", choice.Worker.WorkerID, d.Worker.ID, out)
	}
	for _, c := range got.Candidates {
		if was := costs[c.Worker.WorkerID]; c.Excluded == "" && math.Abs(was-c.Cost) > 1e-9*math.Abs(was) {
			t.Errorf("worker %d costs %v by hand, %v by kvroute", c.Worker.WorkerID, c.Cost, was)
		}
	}

	// The text for people has the same numbers, with four significant digits.
	if got.Settings.Cost != "tokens" || got.Mode != "kv" || !got.Settings.Track {
		return
	}
	_, out, _ = runs(t, "explain", "--url", server.URL, "it")
	rows := 0
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) < 18 || f[17] == "-" {
			continue
		}
		number := func(column int) (x float64) {
			_, _ = fmt.Sscan(f[column], &x) // stays 0 in the header line
			return x
		}
		if number(0) == 0 {
			continue
		}
		c := candidate{
			Overlap: number(1), Coming: number(2), Host: number(3), Disk: number(4), Pend: number(5), N: int(number(7)),
			Held: number(8), ToDecode: number(9), Places: number(13), Speed: number(14), Taints: number(15),
		}
		if by := got.cost(&c, 0); math.Abs(by-number(17)) > 2e-3*by {
			t.Errorf("%v by hand in the line %s", by, line)
		}
		rows++
	}
	if rows == 0 {
		t.Errorf("no rows in\n%s", out)
	}
}
