// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/fixtures"
)

// managerRun is a request to vLLM's cache manager.
type managerRun struct {
	Case, Note string
	Groups     []json.RawMessage // of the line that begins a case
	Prompt     string            `json:"prompt_token_ids"`
	Output     string            `json:"output_token_ids"`
	Cached     int               `json:"cached_tokens"`
	Payloads   []string          `json:"payloads_hex"`
}

// tokens are the ids of the prompt.
func (r *managerRun) tokens(t *testing.T) (ids []uint32) {
	t.Helper()
	b, err := hex.DecodeString(r.Prompt)
	if err != nil {
		t.Fatal(err)
	}
	for ; len(b) > 0; b = b[4:] {
		ids = append(ids, binary.LittleEndian.Uint32(b))
	}
	return ids
}

// readManagerRuns returns the requests of a case.
func readManagerRuns(t *testing.T, name string) (runs []managerRun) {
	t.Helper()
	fixtures.EachLine(t, fixtures.Need(t, "vectors", "hybrid-vllm-0.33.0", "manager.jsonl.gz"), func(line []byte) {
		var r managerRun
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		if r.Case == name && r.Groups == nil {
			runs = append(runs, r)
		}
	})
	if len(runs) == 0 {
		t.Fatalf("%s: no requests", name)
	}
	return runs
}

// shapes describes the events of a batch without the names of blocks.
func shapes(t *testing.T, batch []byte) (out []string) {
	t.Helper()
	b, err := engines.DecodeBatch(batch)
	if err != nil {
		t.Fatal(err)
	}
	for i := range b.Events {
		ev := &b.Events[i]
		out = append(out, fmt.Sprint(ev.Kind, ev.Group, ev.Spec, ev.Window, ev.BlockSize, len(ev.Hashes), len(ev.Tokens), ev.HasParent))
	}
	return out
}

// The side groups of the simulated engine keep what those of vLLM's cache manager keep: equal hits, and equal events.
// The simulated engine does not cache outputs, so the events of a request with an output differ, and those of the
// next request.
func TestHybridCacheIsVLLMs(t *testing.T) {
	for _, c := range []struct {
		name, hybrid string
		block        int
	}{{"swa1024_b16_default", "window=1024", 16}, {"mamba_b528_default", "state=528", 16}} {
		var got []string
		s := enginesim.NewHybridScheduler(c.hybrid, c.block, 4000, 2048, func(batch []byte) { got = append(got, shapes(t, batch)...) })
		afterOutput, right := 0, 0
		for i, run := range readManagerRuns(t, c.name) {
			var want []string
			for _, p := range run.Payloads {
				b, err := hex.DecodeString(p)
				if err != nil {
					t.Fatal(err)
				}
				want = append(want, shapes(t, b)...)
			}
			got = nil
			q := s.Submit(i, run.tokens(t), max(1, len(run.Output)/8))
			for s.Step() > 0 {
			}
			if q.Cached() == run.Cached {
				right++
			} else {
				t.Errorf("%s, %s: %d tokens are cached, want %d", c.name, run.Note, q.Cached(), run.Cached)
			}
			if run.Output != "" {
				afterOutput = 2
			}
			if afterOutput--; afterOutput < 0 && !slices.Equal(got, want) {
				t.Errorf("%s, %s: events\n%q, want\n%q", c.name, run.Note, got, want)
			}
		}
		t.Logf("%s: %d hits are equal", c.name, right)
	}
}

// The hits of a simulated hybrid model are those that an index promises by its events, however small the cache is. At
// rest no block is in use.
func TestHybridEventsPromiseHits(t *testing.T) {
	for _, c := range []struct {
		hybrid string
		block  int
	}{{"window=40", 16}, {"window=100", 16}, {"window=16", 16}, {"state=48", 16}} {
		size := 16
		if c.hybrid == "state=48" {
			size = 48
		}
		index, engine := indexer.New(indexer.Config{}), engines.NewEngine(engines.EngineOptions{BlockSize: 16})
		removed := 0
		s := enginesim.NewHybridScheduler(c.hybrid, c.block, 90, 160, func(data []byte) {
			b, err := engines.DecodeBatch(data)
			if err != nil {
				t.Fatal(err)
			}
			evs, dropped := engine.Apply(&b)
			for _, n := range dropped {
				if n > 0 {
					t.Fatalf("dropped %v", dropped)
				}
			}
			for _, ev := range evs {
				if out := index.Apply(0, ev.Event); out.Unknown+out.Invalid+out.Refused > 0 {
					t.Fatalf("%+v: %+v", ev, out)
				}
				if ev.Event.Kind == indexer.SideRemoved {
					removed += len(ev.Event.Externals)
				}
			}
		})
		r := rand.New(rand.NewPCG(3, 7))
		hits, short := 0, 0
		for i := range 3000 {
			n := 1 + r.IntN(40)*size/4
			prompt := span(1000*r.IntN(4)+1, n)
			if cut := r.IntN(n); r.IntN(3) == 0 {
				prompt = append(slices.Clone(prompt[:cut]), span(1_000_000+1000*i, n-cut)...)
			}
			local := indexer.AppendLocalHashes(nil, prompt, 16, indexer.Seed("", ""))
			m, whole := indexer.Matches{Device: make([]int32, 1), Tokens: n}, indexer.Matches{Device: make([]int32, 1), Whole: true}
			index.FindMatches(&m, local)
			index.FindMatches(&whole, local)
			q := s.Submit(i, prompt, 1+r.IntN(3))
			if r.IntN(8) == 0 {
				s.Submit(-i, span(1000*r.IntN(4)+1, n), 5) // in the same steps
			}
			for s.Step() > 0 {
			}
			if want := int(m.Device[0]) * 16; q.Cached() != want {
				t.Fatalf("%s, request %d of %d tokens: %d are cached, %d promised", c.hybrid, i, n, q.Cached(), want)
			}
			hits += q.Cached()
			if m.Device[0] < whole.Device[0] {
				short++
			}
			if _, used, reserved := s.Blocks(); used != 0 || reserved != 0 {
				t.Fatalf("%s, request %d: %d blocks are in use, %d reserved", c.hybrid, i, used, reserved)
			}
		}
		if hits == 0 || short == 0 || removed == 0 {
			t.Errorf("%s: %d tokens cached, %d hits shorter than the full blocks, %d blocks of side groups evicted: the test tests nothing", c.hybrid, hits, short, removed)
		}
	}
}

// Without sockets a hybrid engine tells its shape, and the blocks of its groups, by events of kvroute's own kinds.
func TestHybridEventsWithoutSockets(t *testing.T) {
	for hybrid, size := range map[string]int{"window=64": 16, "state=48": 48} {
		var mu sync.Mutex
		index := indexer.New(indexer.Config{})
		e, url := start(t, enginesim.Config{Hybrid: hybrid, Speed: fast, Publish: func(ev indexer.Event) {
			mu.Lock()
			defer mu.Unlock()
			index.Apply(0, ev)
		}})
		if got := e.Config().BlockSize; got != size {
			t.Errorf("%s: blocks of %d tokens, want %d", hybrid, got, size)
		}
		var cached []int
		for i, prompt := range [][]uint32{span(1, 500), span(1, 500), append(span(1, 300), span(9000, 100)...), append(span(1, 300), span(19_000, 100)...)} {
			m := indexer.Matches{Device: make([]int32, 1), Tokens: len(prompt)}
			mu.Lock()
			index.FindMatches(&m, indexer.AppendLocalHashes(nil, prompt, size, indexer.Seed("", "")))
			mu.Unlock()
			body, err := json.Marshal(map[string]any{"model": "sim", "prompt": prompt, "max_tokens": 2})
			if err != nil {
				t.Fatal(err)
			}
			_, text := send(t, "POST", url+"/v1/completions", string(body))
			var a struct {
				Usage struct {
					Details struct {
						Cached int `json:"cached_tokens"`
					} `json:"prompt_tokens_details"`
				}
			}
			if err := json.Unmarshal([]byte(text), &a); err != nil {
				t.Fatal(err)
			}
			if cached = append(cached, a.Usage.Details.Cached); cached[i] != int(m.Device[0])*size {
				t.Errorf("%s, request %d: %d tokens are cached, %d promised", hybrid, i, cached[i], int(m.Device[0])*size)
			}
		}
		if want := []int{0, 499 / size * size, 0, 300 / size * size}; !slices.Equal(cached, want) {
			t.Errorf("%s: %d tokens are cached, want %d", hybrid, cached, want)
		}
	}
}
