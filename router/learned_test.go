// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/router"
)

// auditWorld is one worker, on a clock of its own, whose responses the test makes up.
type auditWorld struct {
	*router.Router

	t     *testing.T
	now   time.Time
	n     int
	news  []string
	block int
}

func newAuditWorld(t *testing.T, block int) *auditWorld {
	w := &auditWorld{t: t, now: time.Unix(1000, 0), block: block}
	w.Router = newRouter(t, router.Config{
		Scoring: classic(1), Now: func() time.Time { return w.now },
		Hooks: router.Hooks{
			Departs: func(_ router.Worker, departs bool) { w.news = append(w.news, fmt.Sprint("departs ", departs)) },
			Learned: func(_ router.Worker, rule string) { w.news = append(w.news, "rule "+rule) },
		},
	}, 0)
	info := worker(1)
	info.BlockSize = block
	set(t, w.Router, info)
	return w
}

// respond sends a prompt. The response has the cached tokens that a function makes of the promised ones.
func (w *auditWorld) respond(tokens []uint32, cached func(promised int) int) router.Decision {
	w.t.Helper()
	w.n++
	d, err := w.BestWorker(w.t.Context(), router.Request{ID: fmt.Sprint(w.n), Owned: true, Model: "m", Tokens: tokens, Explain: true})
	if err != nil {
		w.t.Fatal(err)
	}
	promised := min(d.OverlapBlocks+d.LoweredBlocks, (d.PromptTokens-1)/d.BlockSize) * d.BlockSize
	w.ReportUsage(d.ID, router.Usage{PromptTokens: d.PromptTokens, CachedTokens: max(0, cached(promised)), Cached: true, OutputTokens: 1})
	w.Free(d.ID)
	w.now = w.now.Add(10 * time.Second)
	return d
}

func (w *auditWorld) audit() router.AuditState {
	if a := w.Workers()[0].Audit; a != nil {
		return *a
	}
	return router.AuditState{}
}

// managerRun is a request to vLLM's cache manager.
type managerRun struct {
	Case, Note string
	Groups     []json.RawMessage // of the line that begins a case
	Prompt     string            `json:"prompt_token_ids"`
	Cached     int               `json:"cached_tokens"`
	Payloads   []string          `json:"payloads_hex"`
}

// managerRuns returns the requests of a case; nil without the file.
func managerRuns(t *testing.T, name string) (runs []managerRun) {
	t.Helper()
	path := fixtures.Path(t, "vectors", "hybrid-vllm-0.33.0", "manager.jsonl.gz")
	if path == "" {
		return nil
	}
	fixtures.EachLine(t, path, func(text []byte) {
		var l managerRun
		if err := json.Unmarshal(text, &l); err != nil {
			t.Fatal(err)
		}
		if l.Case == name && l.Groups == nil {
			runs = append(runs, l)
		}
	})
	if len(runs) != 21 {
		t.Fatalf("%s: %d requests", name, len(runs))
	}
	return runs
}

// tokens are the ids of the prompt.
func (l *managerRun) tokens(t *testing.T) (tokens []uint32) {
	t.Helper()
	b, err := hex.DecodeString(l.Prompt)
	if err != nil {
		t.Fatal(err)
	}
	for ; len(b) > 0; b = b[4:] {
		tokens = append(tokens, binary.LittleEndian.Uint32(b))
	}
	return tokens
}

// applyPayloads applies an engine's batches, in hex, as events of worker 1.
func applyPayloads(t *testing.T, r *router.Router, engine *engines.Engine, payloads []string) {
	t.Helper()
	for _, p := range payloads {
		b, err := hex.DecodeString(p)
		if err != nil {
			t.Fatal(err)
		}
		batch, err := engines.DecodeBatch(b)
		if err != nil {
			t.Fatal(err)
		}
		evs, _ := engine.Apply(&batch)
		for _, ev := range evs {
			r.ApplyEvent(router.Worker{ID: 1}, ev.Event)
		}
	}
}

// vLLM's cache manager with EAGLE and a KV connector uses a block less than events say. Eight responses teach that;
// then each prediction is right.
func TestEagleIsLearned(t *testing.T) {
	eagle := managerRuns(t, "swa1024_b16_eagle")
	if eagle == nil {
		return
	}
	w := newAuditWorld(t, 16)
	for round := range 2 {
		w.ApplyEvent(router.Worker{ID: 1}, indexer.Event{Kind: indexer.Cleared})
		engine, right := engines.NewEngine(engines.EngineOptions{BlockSize: 16}), 0
		for i, l := range eagle {
			tokens := l.tokens(t)
			d := w.respond(tokens, func(int) int { return l.Cached })
			switch got := min(d.CachedTokens, (len(tokens)-1)/16*16); {
			case got == l.Cached:
				right++
			case round == 1 || i >= 8:
				t.Errorf("round %d, %s: %d tokens, want %d", round, l.Note, got, l.Cached)
			}
			applyPayloads(t, w.Router, engine, l.Payloads)
		}
		t.Logf("round %d: %d of 21 right", round, right)
	}
	if fmt.Sprint(w.news) != "[rule drop]" {
		t.Errorf("news %v", w.news)
	}
}

// Behaviours of workers with exact events, by the cached tokens that they report for promised ones.
func TestRulesOfResponses(t *testing.T) {
	const block, blocks = 16, 40
	var rng *rand.Rand
	random := func(share float64) func(int) int {
		return func(promised int) int {
			if rng.Float64() < share {
				return promised
			}
			return promised / block * rng.IntN(2) / 2 * block
		}
	}
	exact := func(n int) int { return n }
	drop := func(n int) int { return n - block }
	for name, c := range map[string]struct {
		cached    func(promised int) int
		responses int
		same      bool // all prompts promise the same
		then      func(promised int) int
		want      string // the last rule
		rereads   int    // -1 = any
	}{
		"exact":                           {cached: exact, responses: 200},
		"evicts a little":                 {cached: random(.8), responses: 400, rereads: -1},
		"drops a block":                   {cached: drop, responses: 8, want: "drop"},
		"drops a block of one prompt":     {cached: drop, responses: 100, same: true},
		"drops a block, sometimes two":    {cached: func(n int) int { return n - block*(1+rng.IntN(2)) }, responses: 6},
		"drops no longer":                 {cached: drop, responses: 8, then: exact},
		"never hits":                      {cached: func(int) int { return 0 }, responses: 40, want: "limit", rereads: 1},
		"loses states":                    {cached: random(.3), responses: 60, want: "limit", rereads: 1},
		"loses states no longer":          {cached: func(int) int { return 0 }, responses: 40, then: exact, rereads: 1},
		"loses states, now drops a block": {cached: func(int) int { return 0 }, responses: 40, then: drop, want: "drop", rereads: 1},
		"hits more than events say":       {cached: func(n int) int { return n + 3*block }, responses: 100, rereads: 5}, // at 0:40, and 1, 2, 4 and 8 minutes later
	} {
		t.Run(name, func(t *testing.T) {
			rng = rand.New(rand.NewPCG(1, 2))
			w := newAuditWorld(t, block)
			prompts := make([][]uint32, 12)
			for i := range prompts {
				for range block * blocks {
					prompts[i] = append(prompts[i], rng.Uint32())
				}
				held := prompts[i][:block*(blocks/2+i)]
				if c.same {
					held = prompts[i][:block*blocks/2]
				}
				local := indexer.AppendLocalHashes(nil, held, block, indexer.Seed("", ""))
				ev := indexer.Event{Kind: indexer.Stored}
				for i, s := range indexer.AppendSequenceHashes(nil, local) {
					ev.Blocks = append(ev.Blocks, indexer.Block{External: s, Local: local[i]})
				}
				w.ApplyEvent(router.Worker{ID: 1}, ev)
			}
			for i := range c.responses {
				w.respond(prompts[i%len(prompts)], c.cached)
			}
			if c.then != nil {
				for i := range 16 {
					w.respond(prompts[i%len(prompts)], c.then)
				}
			}
			a, rereads := w.audit(), 0
			for _, n := range w.news {
				if n == "departs true" {
					rereads++
				}
			}
			if a.Rule != c.want || c.rereads >= 0 && rereads != c.rereads {
				t.Errorf("audit %+v with news %q, want rule %q and %d times events read again", a, w.news, c.want, c.rereads)
			}
			d := w.respond(prompts[11], func(promised int) int { return promised })
			want := d.OverlapBlocks + d.LoweredBlocks
			switch c.want {
			case "drop":
				want--
			case "limit":
				want = int(float64(want) * a.Share)
			}
			if d.OverlapBlocks != want || d.Candidates[0].OverlapBlocks != want {
				t.Errorf("%d blocks count with rule %q, want %d", d.OverlapBlocks, c.want, want)
			}
			// A restart forgets the rule.
			info := worker(1)
			info.BlockSize, info.StartedMS = block, 7
			set(t, w.Router, info)
			if a := w.audit(); a != (router.AuditState{}) {
				t.Errorf("audit %+v after a restart", a)
			}
		})
	}
}

// A worker with a group of an unknown kind counts for nothing, until its responses show which share of the prefix it
// uses.
func TestUnknownGroupsAreLearned(t *testing.T) {
	w := newAuditWorld(t, 8)
	one := router.Worker{ID: 1}
	store(w.Router, one, "abcdefgh")
	if got := w.Workers()[0].Hybrid; got != "" {
		t.Errorf("before the groups are known the worker is hybrid: %q", got)
	}
	w.ApplyEvent(one, indexer.Event{Kind: indexer.Shaped, Shape: &indexer.Shape{Block: 8, Full: 8, Sides: []indexer.SideGroup{{Group: 1, Block: 8}}}})
	if got := w.Workers()[0].Hybrid; got != "unknown" {
		t.Errorf("with a group of an unknown kind hybrid is %q", got)
	}
	for range 4 {
		if d := w.respond(prompt("abcdefghij"), func(int) int { return 4 * 8 }); d.OverlapBlocks != 0 || d.LoweredBlocks != 8 {
			t.Errorf("%d blocks count, %d more are promised; want 0 and 8", d.OverlapBlocks, d.LoweredBlocks)
		}
	}
	if d := w.respond(prompt("abcdefghij"), func(int) int { return 4 * 8 }); d.OverlapBlocks != 4 {
		t.Errorf("%d blocks count, want half of 8", d.OverlapBlocks)
	}
	for range 20 {
		w.respond(prompt("abcdefghij"), func(int) int { return 0 })
	}
	if d := w.respond(prompt("abcdefghij"), func(int) int { return 0 }); d.OverlapBlocks != 0 {
		t.Errorf("%d blocks count of a worker that uses none", d.OverlapBlocks)
	}
	if fmt.Sprint(w.news) != "[rule limit]" {
		t.Errorf("news %v", w.news)
	}
}
