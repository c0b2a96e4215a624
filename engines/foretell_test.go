// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
)

// An engine's cache hits equal the predictions from its earlier events, however small its cache.
// The test covers prompts of whole blocks (which real engines store again each time and remove one
// copy at a time), adapters, salts, and resets (which engines publish with their next step).
// docs/interop.md has the results with real engines.
func TestEventsForetellHits(t *testing.T) {
	const size = 16
	sockets, err := enginesim.NewSockets(enginesim.SocketsConfig{Endpoint: freePort, Replay: freePort, DropEvery: 7})
	if err != nil {
		t.Fatal(err)
	}
	engine, err := enginesim.New(enginesim.Config{Sockets: sockets, NumBlocks: 48, BlockHash: "vllm", Speed: 1000, LoRA: []string{"adapter"}})
	if err != nil {
		t.Fatal(err)
	}
	running(t, sockets.Run)
	running(t, engine.Run)

	var mu sync.Mutex
	index := indexer.New(indexer.Config{})
	stored := map[uint64]bool{}
	removed := 0
	w := engines.EngineWorker{ID: 7, Transport: engines.TransportZMQ, Address: "127.0.0.1:1", BlockSize: size}
	w.Endpoint, w.Replay = sockets.Endpoints()
	follow(t, engines.SourcesConfig{Sink: func(_ uint64, rank uint32, ev indexer.Event) {
		mu.Lock()
		defer mu.Unlock()
		index.Apply(int(rank), ev)
		switch ev.Kind {
		case indexer.Stored:
			for _, b := range ev.Blocks {
				stored[b.External] = true
			}
		case indexer.Removed:
			removed += len(ev.Externals)
			for _, e := range ev.Externals {
				delete(stored, e)
			}
		default:
			clear(stored)
		}
	}}, w)

	post := func(path, body string) (code int, text []byte) {
		rec := httptest.NewRecorder()
		engine.ServeHTTP(rec, httptest.NewRequest(http.MethodPost, path, strings.NewReader(body)))
		return rec.Code, rec.Body.Bytes()
	}
	send := func(prompt []uint32, lora, salt string) (cached int) {
		t.Helper()
		q := map[string]any{"model": "sim", "prompt": prompt, "max_tokens": 1}
		if lora != "" {
			q["model"] = lora
		}
		if salt != "" {
			q["cache_salt"] = salt
		}
		body, err := json.Marshal(q)
		if err != nil {
			t.Fatal(err)
		}
		code, text := post("/v1/completions", string(body))
		var response struct {
			Usage struct {
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		if err := json.Unmarshal(text, &response); err != nil || code != http.StatusOK {
			t.Fatalf("status %d: %s", code, text)
		}
		return response.Usage.Details.Cached
	}
	// A dropped message is only detected when the next one arrives.
	settle := func() {
		eventually(t, func() bool {
			mu.Lock()
			n := len(stored)
			same := n == len(engine.Cached())
			for _, h := range engine.Cached() {
				same = same && stored[h]
			}
			mu.Unlock()
			if !same {
				send([]uint32{uint32(n)}, "", "") // a step that stores no block
				sockets.Publish()
			}
			return same
		})
	}

	r := rand.New(rand.NewPCG(5, 5))
	hits, resets := 0, 0
	for i := range 300 {
		if r.IntN(40) == 0 {
			if code, text := post("/reset_prefix_cache", ""); code != http.StatusOK {
				t.Fatalf("status %d: %s", code, text)
			}
			resets++
			send([]uint32{1}, "", "")
			settle()
		}
		n := size * (1 + r.IntN(8))
		if r.IntN(2) == 0 {
			n += r.IntN(size)
		}
		prompt := seq(1000*r.IntN(3)+1, n)
		if r.IntN(3) == 0 {
			prompt = append(slices.Clone(prompt[:n/2]), seq(5000*i, n-n/2)...)
		}
		lora, salt := []string{"", "", "adapter"}[r.IntN(3)], []string{"", "", "tenant"}[r.IntN(3)]
		scores := make([]int32, 1)
		mu.Lock()
		index.Match(scores, indexer.AppendLocalHashes(nil, prompt, size, indexer.Seed(lora, salt)))
		mu.Unlock()
		want := min(int(scores[0]), (len(prompt)-1)/size) * size
		got := send(prompt, lora, salt)
		if got != want {
			t.Fatalf("request %d, %d tokens for %q with %q: %d predicted, %d cached", i, len(prompt), lora, salt, want, got)
		}
		hits += got
		settle()
	}
	mu.Lock()
	defer mu.Unlock()
	if hits == 0 || removed == 0 || resets == 0 {
		t.Errorf("%d tokens cached, %d blocks evicted, %d resets: the test tests nothing", hits, removed, resets)
	}
	t.Logf("%d tokens cached, %d blocks evicted, %d resets", hits, removed, resets)
}
