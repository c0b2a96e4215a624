// SPDX-License-Identifier: Apache-2.0

package main

import (
	"flag"
	"fmt"
	"math"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench/replay"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/settings"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/slots"
)

// situation is how many blocks of a prompt of ten blocks of eight tokens each worker has cached, and
// the load of each worker.
type situation struct {
	held    []int // leading blocks cached
	decode  []int // blocks of a request that has its first token; 0 for none
	pending []int // blocks of a request that has no first token; 0 for none
	more    []int // requests of one block, with their first token
	shared  []int // blocks of the prompt itself, in a request that has its first token

	cpu   []bool       // workers on CPUs
	tier  indexer.Tier // tier that holds lower blocks behind those of held
	lower []int

	tps    []float64 // registered prefill throughputs
	places int       // requests that each worker computes at a time; 0 = unknown
}

func letters(s string) (tokens []uint32) {
	for _, l := range s {
		for range 8 {
			tokens = append(tokens, uint32(l))
		}
	}
	return tokens
}

// routerOf makes a router with the settings of `kvroute serve` with flags, in a situation.
func routerOf(t *testing.T, s situation, flags ...string) *router.Router {
	r, _, _ := routerWith(t, s, flags...)
	return r
}

// routerWith also returns the configuration, and a function that advances the router's clock.
func routerWith(t *testing.T, s situation, flags ...string) (*router.Router, config, func(time.Duration)) {
	t.Helper()
	c, _, err := readConfig("test", flags, nil)
	if err != nil {
		t.Fatal(err)
	}
	conf, err := c.routing()
	if err != nil {
		t.Fatal(err)
	}
	var now atomic.Int64
	conf.Now = func() time.Time { return time.Unix(1e9, now.Load()) }
	r, err := router.New(conf)
	if err != nil {
		t.Fatal(err)
	}
	const prompt = "ABCDEFGHIJ"
	for i := range s.held {
		id := uint64(i + 1)
		var tps float64
		if s.tps != nil {
			tps = s.tps[i]
		}
		if err := r.SetWorker(router.WorkerInfo{
			ID: id, PrefillThroughput: tps, Models: []string{"m"}, BlockSize: 8, TotalKVBlocks: 10, MaxBatchedTokens: 16, CPU: s.cpu != nil && s.cpu[i], MaxNumSeqs: s.places, Taints: []string{[2]string{"even", "odd"}[id%2]},
			Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(id)}), 80),
		}); err != nil {
			t.Fatal(err)
		}
		ev := indexer.Event{Kind: indexer.Stored}
		for n, l := range indexer.AppendLocalHashes(nil, letters(prompt), 8, indexer.Seed("", "")) {
			ev.Blocks = append(ev.Blocks, indexer.Block{Local: l, External: uint64(n + 1)})
		}
		all := ev.Blocks
		ev.Blocks = all[:s.held[i]]
		r.ApplyEvent(router.Worker{ID: id}, ev)
		if s.lower != nil && s.lower[i] > 0 {
			ev.Tier, ev.Parent, ev.HasParent, ev.Blocks = s.tier, uint64(s.held[i]), true, all[s.held[i]:s.held[i]+s.lower[i]]
			r.ApplyEvent(router.Worker{ID: id}, ev)
		}
		busy := func(name, text string, done bool) {
			if text == "" {
				return
			}
			id := fmt.Sprint(name, i)
			if _, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: "m", Tokens: letters(text), Pinned: &router.Worker{ID: uint64(i + 1)}}); err != nil {
				t.Fatal(err)
			}
			if done {
				r.MarkPrefillCompleted(id)
			}
		}
		at := func(list []int) int {
			if list == nil {
				return 0
			}
			return list[i]
		}
		busy("decode", strings.Repeat("x", at(s.decode)), true)
		busy("pending", strings.Repeat("y", at(s.pending)), false)
		busy("shared", prompt[:at(s.shared)], true)
		for n := range at(s.more) {
			busy(fmt.Sprint("more", n), string(rune('a'+n)), true)
		}
	}
	return r, c, func(d time.Duration) { now.Add(int64(d)) }
}

// Each flag about routing changes the worker or the result of a request. A new flag must be added
// here.
func TestFlagsChangeDecisions(t *testing.T) {
	warm := situation{held: []int{2, 5, 8}, decode: []int{5, 0, 4}}
	seen := map[string]bool{"router-temperature": true} // has a test of its own below
	for _, c := range []struct {
		flag          string
		in            situation
		without, with string
		from, to      uint64
	}{
		{"cost", warm, "", "--cost tokens", 3, 3}, // the default
		{"kv-overlap-score-weight", warm, "", "--kv-overlap-score-weight 1", 3, 2},
		{"kv-overlap-score-weight", warm, "--kv-overlap-score-weight 1", "--kv-overlap-score-weight 2", 2, 3},
		{"cost", warm, "", "--cost dynamo", 3, 2},
		{"cost", warm, "--cost dynamo", "--cost dynamo --kv-overlap-score-weight 4", 2, 3},
		{"router-kv-overlap-score-credit", warm, "", "--router-kv-overlap-score-credit 1", 3, 2},
		{"router-prefill-load-scale", warm, "--cost dynamo_newer", "--router-prefill-load-scale 2", 2, 3},
		{"weighted-overlap", warm, "--cost weighted", "--cost weighted --weighted-overlap 0", 3, 2},
		{"weighted-requests", warm, "--cost weighted", "--cost weighted --weighted-requests 60", 3, 2},
		{"weighted-kv-use", warm, "--cost weighted", "--cost weighted --weighted-kv-use 1", 3, 2},
		{
			"router-kv-overlap-score-credit-decay",
			situation{held: []int{8, 0}, decode: []int{0, 7}, pending: []int{7, 0}},
			"--cost dynamo_newer", "--router-kv-overlap-score-credit-decay 1", 1, 2,
		},
		{
			"router-decode-active-request-weight",
			situation{held: []int{0, 0}, decode: []int{4, 0}, more: []int{0, 2}},
			"--cost dynamo_newer", "--router-decode-active-request-weight 10", 2, 1,
		},
		{
			"no-assume-kv-reuse",
			situation{held: []int{0, 0}, shared: []int{10, 0}, decode: []int{0, 4}},
			"--kv-overlap-score-weight 0", "--kv-overlap-score-weight 0 --no-assume-kv-reuse", 1, 2,
		},
		{
			"no-track-active-blocks",
			situation{held: []int{0, 0}, decode: []int{5, 0}, more: []int{0, 2}},
			"--cost dynamo", "--cost dynamo --no-track-active-blocks", 2, 1,
		},
		{
			"no-router-track-prefill-tokens",
			situation{held: []int{0, 0}, pending: []int{5, 0}, decode: []int{0, 6}},
			"--cost dynamo", "--cost dynamo --no-router-track-prefill-tokens", 2, 1,
		},
		{
			"alpha",
			situation{held: []int{4, 5}, more: []int{0, 3}},
			"--alpha 0", "--alpha 1", 2, 1,
		},
		{
			"attention",
			situation{held: []int{0, 4}, pending: []int{0, 5}},
			"--attention 0", "--attention 1", 1, 2,
		},
		{
			"decode-weight", // eight requests with the same beginning decode on worker 1
			situation{held: []int{8, 0}, decode: []int{8, 0}},
			"--decode-weight 0", "--decode-weight 30", 1, 2,
		},
		{
			"no-worker-speeds", // worker 2 would be as good, and is slow
			situation{held: []int{4, 5}, tps: []float64{40_000, 4_000}},
			"", "--no-worker-speeds", 1, 2,
		},
		{"router-mode", warm, "", "--router-mode round-robin", 3, 3}, // two were booked before
		{"router-mode", warm, "", "--router-mode least-loaded", 3, 2},
		{
			"busy-threshold",
			situation{held: []int{8, 0}, decode: []int{9, 0}},
			"", "--busy-threshold 0.8", 1, 2,
		},
		{
			"active-prefill-tokens-threshold",
			situation{held: []int{8, 0}, pending: []int{1, 0}},
			"", "--active-prefill-tokens-threshold 7", 1, 2,
		},
		{
			"active-prefill-tokens-threshold-frac",
			situation{held: []int{8, 0}, pending: []int{1, 0}},
			"", "--active-prefill-tokens-threshold-frac 0.4", 1, 2,
		},
		{
			"router-host-cache-hit-weight",
			situation{held: []int{2, 6}, lower: []int{8, 0}, tier: indexer.HostPinned},
			"", "--router-host-cache-hit-weight 0.25", 1, 2,
		},
		{
			"router-disk-cache-hit-weight",
			situation{held: []int{2, 6}, lower: []int{8, 0}, tier: indexer.Disk},
			"", "--router-disk-cache-hit-weight 1", 2, 1,
		},
		{
			"device-ratio",
			situation{held: []int{0, 0}, cpu: []bool{true, false}, more: []int{1, 5}},
			"--router-mode device-aware-weighted", "--router-mode device-aware-weighted --device-ratio 4", 2, 1,
		},
	} {
		seen[c.flag] = true
		t.Run(c.flag, func(t *testing.T) {
			for _, side := range []struct {
				flags string
				want  uint64
			}{{c.without, c.from}, {c.with, c.to}} {
				// Without Explain a decision may leave out inputs that its cost does not read.
				for _, explain := range []bool{false, true} {
					r := routerOf(t, c.in, strings.Fields(side.flags)...)
					d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: letters("ABCDEFGHIJ"), Explain: explain})
					if err != nil || d.Worker.ID != side.want {
						t.Errorf("with %q: worker %d, %v; want %d\n%+v", side.flags, d.Worker.ID, err, side.want, d.Candidates)
					}
				}
			}
		})
	}
	for _, c := range moreFlags() {
		seen[c.flag] = true
		t.Run(c.flag, func(t *testing.T) {
			for _, side := range []struct{ flags, want string }{{c.without, c.from}, {c.with, c.to}} {
				r, conf, pass := routerWith(t, c.in, strings.Fields(side.flags)...)
				if got := c.outcome(&flagTest{t, r, conf, pass}); got != side.want {
					t.Errorf("with %q: %q, want %q", side.flags, got, side.want)
				}
			}
		})
	}
	c := defaults()
	fs := newFlagSet("test")
	settings.AddFlags(fs, &c.Routing)
	fs.VisitAll(func(f *flag.Flag) {
		if !seen[f.Name] {
			t.Errorf("--%s: nothing shows that it changes anything", f.Name)
		}
	})
	t.Run("router-temperature", func(t *testing.T) {
		seen := map[uint64]bool{}
		for seed := range 100 {
			r := routerOf(t, warm, "--router-temperature", "1", "--seed", fmt.Sprint(seed))
			d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: letters("ABCDEFGHIJ")})
			if err != nil {
				t.Fatal(err)
			}
			seen[d.Worker.ID] = true
		}
		if len(seen) != 3 {
			t.Errorf("of three workers %v were drawn", seen)
		}
	})
	t.Run("weight 0 keeps no index", func(t *testing.T) {
		for _, flags := range []string{"--kv-overlap-score-weight 0", "--router-kv-overlap-score-credit 0"} {
			r := routerOf(t, warm, strings.Fields(flags)...)
			if d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: letters("ABCDEFGHIJ")}); err != nil || d.Worker.ID != 2 || d.OverlapBlocks != 0 {
				t.Errorf("%s: worker %d with %d blocks, %v", flags, d.Worker.ID, d.OverlapBlocks, err)
			}
			if w := r.Workers()[2]; w.CachedBlocks != 0 {
				t.Errorf("%s: %d blocks are kept", flags, w.CachedBlocks)
			}
		}
	})
}

// The error for contradictory settings names the mistake.
func TestContradictoryRouting(t *testing.T) {
	for flags, want := range map[string]string{
		"--cost tokens --kv-overlap-score-weight 1": "kv-overlap-score-weight",
		"--cost nonsense": "cost is nonsense",
		"--cost tokens --router-prefill-load-scale 2":                "router-prefill-load-scale",
		"--cost dynamo --router-decode-active-request-weight 2":      "router-decode-active-request-weight",
		"--cost dynamo --alpha .2":                                   "alpha",
		"--kv-overlap-score-weight 2 --alpha .2":                     "alpha",
		"--attention many":                                           `attention is "many"`,
		"--attention NaN":                                            `attention is "NaN"`,
		"--attention -1":                                             "attention is -1",
		"--router-temperature -1":                                    "router-temperature is -1",
		"--router-kv-overlap-score-credit-decay NaN":                 "credit-decay is NaN",
		"--busy-threshold 1.5":                                       "busy-threshold is 1.5, want a share",
		"--active-prefill-tokens-threshold -1":                       "active-prefill-tokens-threshold is -1, want",
		"--router-queue-threshold -1":                                `router-queue-threshold is "-1", want 0 or more`,
		"--router-queue-threshold NaN":                               `router-queue-threshold is "NaN", want 0 or more`,
		"--router-queue-threshold 1 --router-queue-policy best":      `router-queue-policy is "best"`,
		"--session-affinity-ttl-secs -1":                             `session-affinity-ttl-secs is "-1"`,
		"--session-affinity-ttl-secs 18446744083":                    `session-affinity-ttl-secs is "18446744083"`, // 9 s in an int64 of ns
		"--router-mode device-aware-weighted --device-ratio 0":       `device-ratio is "0"`,
		"--router-ttl-secs 0":                                        `router-ttl-secs is "0"`,
		"--router-predicted-ttl-secs -1":                             `router-predicted-ttl-secs is "-1"`,
		"--keep-decisions -1":                                        `keep-decisions is "-1"`,
		"--session-affinity-ttl-secs 9 --session-affinity-mode firm": `session-affinity-mode is "firm"`,
		"--engine-preset 1b":                                         `engine-preset is "1b"`,
		"--router-mode device-aware-weighted --device-ratio -1":      `device-ratio is "-1"`,
		"--kv-pull on":                                               `kv-pull is "on", want off, body or header`,
		"--kv-pull body --kv-pull-delay 2h":                          `kv-pull-delay is "2h`,
		"--kv-pull body --kv-pull-token-time -1us":                   `kv-pull-token-time is "-1`,
		"--kv-pull body --kv-pull-compute-time 0s":                   `kv-pull-compute-time is "0s"`,
		"--kv-pull body --kv-pull-min-tokens 0":                      `kv-pull-min-tokens is "0"`,
		"--kv-pull body --kv-pull-limit 0":                           `kv-pull-limit is "0"`,
		"--output-rate NaN":                                          `output-rate is "NaN"`,
		"--output-rate -1":                                           `output-rate is "-1"`,
		"--router-host-cache-hit-weight -1":                          "router-host-cache-hit-weight is -1, want",
		"--router-disk-cache-hit-weight +Inf":                        "router-disk-cache-hit-weight is +Inf, want",
		"--overload-status 500":                                      `overload-status is "500"`,
		"--queue-wait 0s":                                            `queue-wait is "0s", want more than 0s`,
		"--queue-wait -1.5s":                                         `queue-wait is "-1.5s", want more than 0s`,
		"--kv-overlap-score-weight 1 --router-prefill-load-scale 2":  "router-prefill-load-scale is 2",
	} {
		status, _, stderr := runs(t, append([]string{"config"}, strings.Fields(flags)...)...)
		if status != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%s: status %d, %q; want 1 and %q", flags, status, stderr, want)
		}
	}
}

// A setting that has no effect because of another one is refused by name.
func TestPointlessSettingsAreRefused(t *testing.T) {
	const (
		idle    = "no-router-track-prefill-tokens"
		noIndex = "keeps no index"
		noQueue = "a missing router-queue-threshold"
		noTTL   = "session-affinity-ttl-secs 0"
	)
	for flags, want := range map[string][2]string{
		"--router-mode random --cost tokens":                            {"cost", "router-mode random"},
		"--router-mode least-loaded --alpha .2":                         {"alpha", "router-mode least-loaded"},
		"--router-mode round-robin --attention 0":                       {"attention", "router-mode round-robin"},
		"--router-mode round-robin --router-temperature 1":              {"router-temperature", "router-mode round-robin"},
		"--router-mode power-of-two --kv-overlap-score-weight 1":        {"kv-overlap-score-weight", "router-mode power-of-two"},
		"--router-mode random --router-kv-overlap-score-credit 1":       {"router-kv-overlap-score-credit", "router-mode random"},
		"--router-mode random --router-kv-overlap-score-credit-decay 1": {"router-kv-overlap-score-credit-decay", "router-mode random"},
		"--router-mode random --router-prefill-load-scale 1":            {"router-prefill-load-scale", "router-mode random"},
		"--router-mode random --router-decode-active-request-weight 1":  {"router-decode-active-request-weight", "router-mode random"},
		"--router-mode random --router-host-cache-hit-weight 1":         {"router-host-cache-hit-weight", "router-mode random"},
		"--router-mode random --router-disk-cache-hit-weight 1":         {"router-disk-cache-hit-weight", "router-mode random"},
		"--device-ratio 4": {"device-ratio", "router-mode kv"},
		"--cost dynamo --router-host-cache-hit-weight 1":                              {"router-host-cache-hit-weight", "cost dynamo"},
		"--cost weighted --router-disk-cache-hit-weight 1":                            {"router-disk-cache-hit-weight", "cost weighted"},
		"--router-kv-overlap-score-credit 0 --router-host-cache-hit-weight 1":         {"router-host-cache-hit-weight", "credit 0"},
		"--router-kv-overlap-score-credit 0 --router-disk-cache-hit-weight 1":         {"router-disk-cache-hit-weight", "credit 0"},
		"--router-kv-overlap-score-credit 0 --router-kv-overlap-score-credit-decay 1": {"router-kv-overlap-score-credit-decay", "credit 0"},
		"--no-router-track-prefill-tokens --router-kv-overlap-score-credit-decay 1":   {"router-kv-overlap-score-credit-decay", idle},
		"--no-router-track-prefill-tokens --alpha .2":                                 {"alpha", "prefill is not tracked"},
		"--no-router-track-prefill-tokens --attention .2":                             {"attention", "prefill is not tracked"},
		"--no-router-track-prefill-tokens --kv-overlap-score-weight 2":                {"kv-overlap-score-weight", "prefill is not tracked"},
		"--no-router-track-prefill-tokens --router-prefill-load-scale 2":              {"router-prefill-load-scale", "prefill is not tracked"},
		"--kv-overlap-score-weight 0 --router-ttl-secs 9":                             {"router-ttl-secs", noIndex},
		"--kv-overlap-score-weight 0 --router-predicted-ttl-secs 9":                   {"router-predicted-ttl-secs", noIndex},
		"--kv-overlap-score-weight 0 --max-index-blocks 9":                            {"max-index-blocks", noIndex},
		"--no-kv-events --router-predicted-ttl-secs 9":                                {"router-predicted-ttl-secs", "no-kv-events"},
		"--no-kv-events --max-index-blocks 9":                                         {"max-index-blocks", "no-kv-events"},
		"--no-router-track-output-blocks --output-rate 9":                             {"output-rate", "no-router-track-output-blocks"},
		"--router-queue-policy lcfs":                                                  {"router-queue-policy", noQueue},
		"--router-queue-limit 9":                                                      {"router-queue-limit", noQueue},
		"--queue-wait 1s":                                                             {"queue-wait", noQueue},
		"--kv-pull-delay 1s":                                                          {"kv-pull-delay", "kv-pull off"},
		"--kv-pull-token-time 1us":                                                    {"kv-pull-token-time", "kv-pull off"},
		"--kv-pull-compute-time 1us":                                                  {"kv-pull-compute-time", "kv-pull off"},
		"--kv-pull-min-tokens 9":                                                      {"kv-pull-min-tokens", "kv-pull off"},
		"--kv-pull-limit 9":                                                           {"kv-pull-limit", "kv-pull off"},
		"--kv-pull body --no-kv-events":                                               {"kv-pull", "no-kv-events"},
		"--kv-pull header --kv-overlap-score-weight 0":                                {"kv-pull", "keeps no index"},
		"--session-affinity-mode hard":                                                {"session-affinity-mode", noTTL},
		"--session-headers x":                                                         {"session-headers", noTTL},
	} {
		status, _, stderr := runs(t, append([]string{"config"}, strings.Fields(flags)...)...)
		if status != 1 || !strings.Contains(stderr, want[0]) || !strings.Contains(stderr, want[1]) {
			t.Errorf("%s: status %d, %q; want 1 and %q", flags, status, stderr, want)
		}
	}
	for _, flags := range []string{
		"", "--kv-overlap-score-weight 0 --no-kv-events --router-predicted-ttl-secs 0", "--no-kv-events --router-ttl-secs 9",
		"--no-router-track-prefill-tokens --kv-overlap-score-weight 0", "--no-router-track-prefill-tokens --cost predicted_ttft --alpha .2",
		"--router-mode random --busy-threshold .9 --no-assume-kv-reuse",
	} {
		if status, _, stderr := runs(t, append([]string{"config"}, strings.Fields(flags)...)...); status != 0 {
			t.Errorf("%s: %s", flags, stderr)
		}
	}
}

func TestRoutingFlagsReachTheRouter(t *testing.T) {
	c, _, err := readConfig("test", strings.Fields("--router-queue-threshold 2 --router-queue-policy wspt --router-queue-limit 5 "+
		"--session-affinity-ttl-secs 60 --session-affinity-mode hard --router-mode device-aware-weighted --device-ratio 4 --engine-preset 8b"), nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.routing()
	if err != nil {
		t.Fatal(err)
	}
	if *r.Queue.Threshold != 2 || r.Queue.Policy != slots.WSPT || r.Queue.Limit != 5 || r.Sessions != (router.SessionConfig{TTL: time.Minute, Hard: true}) ||
		r.Mode != router.DeviceAware || r.DeviceRatio != 4 || r.Scoring.Engine != scorer.Dense8B() || r.Scoring.Attention != 6e-5 {
		t.Errorf("%+v", r)
	}
}

// A setting of 0 disables its feature, although the packages read 0 as the default.
func TestZeroIsNone(t *testing.T) {
	kept := func(flags string) bool {
		r := routerOf(t, situation{held: []int{0}}, strings.Fields(flags)...)
		if _, err := r.BestWorker(t.Context(), router.Request{ID: "r", Model: "m", Tokens: letters("A")}); err != nil {
			t.Fatal(err)
		}
		_, found := r.Decision("r")
		return found
	}
	if !kept("") || kept("--keep-decisions 0") {
		t.Error("--keep-decisions 0 must keep none")
	}
	predicted := func(flags string) int {
		r := routerOf(t, situation{held: []int{0}}, strings.Fields(flags)...)
		for _, id := range []string{"first", ""} {
			d, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: "m", Tokens: letters("AB")})
			if err != nil {
				t.Fatal(err)
			}
			if id == "" {
				return d.OverlapBlocks
			}
		}
		return -1
	}
	if on, off := predicted(""), predicted("--router-predicted-ttl-secs 0"); on != 2 || off != 0 {
		t.Errorf("--router-predicted-ttl-secs 0: %d blocks predicted, %d without it", off, on)
	}
}

// The weights of a dense model of 32B with 64 layers and 64 heads of 128, and of models that keep fewer
// keys and values.
func TestWeightsOfAModel(t *testing.T) {
	dense := `{"num_hidden_layers":64,"hidden_size":5120,"num_attention_heads":64,"num_key_value_heads":8,"head_dim":128,"intermediate_size":25600,"vocab_size":151936,"tie_word_embeddings":false}`
	const kv32b = 5.6e-5 / .0386
	// Of 128 experts 8 compute a token: 30B parameters, of which 3.3B count.
	sparse := `{"num_hidden_layers":48,"hidden_size":2048,"num_attention_heads":32,"num_key_value_heads":4,"head_dim":128,"intermediate_size":6144,"moe_intermediate_size":768,"num_experts_per_tok":8,"vocab_size":151936}`
	more := func(fields string) string { return dense[:len(dense)-1] + "," + fields + "}" }
	for _, c := range []struct {
		name, config, preset string
		attention, kvRead    float64
	}{
		{"dense", dense, "32b", 6.4e-5, kv32b},
		{"inside a model that sees", `{"text_config":` + dense + `}`, "32b", 6.4e-5, kv32b},
		// The preset of a smaller model, whose keys and values are large for its parameters.
		{"another preset", dense, "8b", 6.4e-5, 5.6e-5 / .0154 * (131_072. / 32.8e9) / (65_536. / 8.03e9)},
		{"experts", sparse, "32b", 2.3e-4, kv32b * (2 * 48 * 4 * 128 / 3.3e9) / (131_072. / 32.8e9)},
		{"latent attention", more(`"kv_lora_rank":512,"qk_rope_head_dim":64`), "32b", 6.4e-5, kv32b * 576 / 2048},
		{"every fourth layer reads all tokens", more(`"full_attention_interval":4`), "32b", 6.4e-5, kv32b / 4},
		{"half of the layers read all tokens", more(`"layer_types":[` + strings.Repeat(`"full_attention","sliding_attention",`, 31) + `"full_attention","linear_attention"]`), "32b", 6.4e-5, kv32b / 2},
		{"half of the layers are attention", more(`"layer_types":[` + strings.Repeat(`"attention","mamba",`, 31) + `"attention","mamba"]`), "32b", 6.4e-5, kv32b / 2},
		{"a window that is off", more(`"sliding_window":131072,"use_sliding_window":false`), "32b", 6.4e-5, kv32b},
		{"a window", more(`"sliding_window":4096`), "32b", 6.4e-5, 0},
		{"a pattern", more(`"hybrid_override_pattern":"M-M*-"`), "32b", 6.4e-5, 0},
		{"a period", more(`"attn_layer_period":8`), "32b", 6.4e-5, 0},
		{"fewer types than layers", more(`"layer_types":["full_attention"]`), "32b", 6.4e-5, 0},
		{"no layer reads all tokens", more(`"layer_types":["linear_attention"]`), "32b", 6.4e-5, 0},
	} {
		attention, kvRead := weightsOf([]byte(c.config), c.preset)
		if math.Abs(attention-c.attention) > .04*c.attention || math.Abs(kvRead-c.kvRead) > .04*c.kvRead {
			t.Errorf("%s: attention %v, a held token %v; want %v, %v", c.name, attention, kvRead, c.attention, c.kvRead)
		}
	}
	for _, bad := range []string{"", "{}", "[1]", `{"num_hidden_layers":-3,"hidden_size":5}`, `{"num_hidden_layers":64,"num_attention_heads":64,"head_dim":128}`} {
		if attention, kvRead := weightsOf([]byte(bad), "32b"); attention != 0 || kvRead != 0 {
			t.Errorf("%q: attention %v, a held token %v; want none", bad, attention, kvRead)
		}
	}
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/config.json", []byte(strings.Replace(dense, "{", `{"attention_chunk_size":8192,`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	m := modelConfig{Tokenizer: dir}
	a, k, chunk := m.weights("32b")
	if a == nil || k == nil || math.Abs(*a-6.4e-05) > 1e-6 || math.Abs(*k-kv32b) > .04*kv32b {
		t.Errorf("attention of the model %v, a held token %v; want 6.4e-05, %v by its config.json", a, k, kv32b)
	}
	if chunk != 8192 || chunkOf([]byte(`{"text_config":{"attention_chunk_size":4}}`)) != 4 || chunkOf([]byte(`{"attention_chunk_size":-1}`)) != 0 {
		t.Errorf("chunks of %d tokens, want 8192", chunk)
	}
	empty := modelConfig{Tokenizer: t.TempDir()}
	if a, k, chunk := empty.weights("32b"); a != nil || k != nil || chunk != 0 {
		t.Errorf("attention of a folder without config.json %v, a held token %v; want none", a, k)
	}
}

// The page on routing names only flags that exist. It names all flags of routing and, in its section
// on replay, all flags of replay.
func TestRoutingPageNamesFlags(t *testing.T) {
	text, err := os.ReadFile("../../docs/routing.md")
	if err != nil {
		t.Fatal(err)
	}
	fs := newFlagSet("test")
	c := defaults()
	settings.AddFlags(fs, &c)
	before, rest, found := strings.Cut(string(text), "## Replaying a load\n")
	section, after, more := strings.Cut(rest, "\n## ")
	if !found || !more {
		t.Fatal("there is no section on replaying a load")
	}
	own, replays := newFlagSet("test"), newFlagSet("test")
	settings.AddFlags(own, &c.Routing)
	new(replay.Command).Flags(replays)
	for _, part := range []struct {
		name, text string
		known      []*flag.FlagSet
		all        *flag.FlagSet
	}{
		{"the page", before + after, []*flag.FlagSet{fs}, own},
		{"the section on replaying", section, []*flag.FlagSet{replays, fs}, replays},
	} {
		seen := 0
		for _, m := range regexp.MustCompile("`(?:kvroute serve\\s+)?--([a-z-]+)").FindAllStringSubmatch(part.text, -1) {
			seen++
			if !slices.ContainsFunc(part.known, func(fs *flag.FlagSet) bool { return fs.Lookup(m[1]) != nil }) {
				t.Errorf("%s: --%s does not exist", part.name, m[1])
			}
		}
		part.all.VisitAll(func(f *flag.Flag) {
			if !regexp.MustCompile("`--" + f.Name + "[` ]").MatchString(part.text) {
				t.Errorf("%s: --%s is missing", part.name, f.Name)
			}
		})
		if seen < 20 {
			t.Errorf("%s: %d flags found", part.name, seen)
		}
	}
}
