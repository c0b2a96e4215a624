// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// Each prompt is requested from a worker once. A prompt that /tokenize cannot represent is not
// requested, and a worker that fails gets no requests for a while.
func TestRemoteTokens(t *testing.T) {
	address, asked := tokenizeServer(t, func(ids []uint32) any { return ids })
	r := newRemote(1<<20, reach.Networks{}.Client())
	prompt := func(text string) router.Prompt {
		return router.Prompt{Messages: fmt.Appendf(nil, `[{"role":"user","content":%q}]`, text)}
	}
	own, err := simCard(t).Prompts.Encode(t.Context(), nil, prompt("a b"), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		got, err := r.ids(t.Context(), address, "sim", prompt("a b"))
		if err != nil || !slices.Equal(got, own.IDs) || asked.Load() != 1 {
			t.Fatalf("%d, %v after %d questions", got, err, asked.Load())
		}
		got[0]++ // must not change the cache
	}
	for n, p := range []router.Prompt{prompt("a c"), {Messages: prompt("a b").Messages, ChatTemplateKwargs: []byte(`{}`)}} {
		if _, err := r.ids(t.Context(), address, "sim", p); err != nil || int(asked.Load()) != n+2 {
			t.Errorf("another prompt: %v after %d questions", err, asked.Load())
		}
	}
	if _, err := r.ids(t.Context(), address, "other", prompt("a b")); err != nil || asked.Load() != 4 {
		t.Errorf("another model: %v after %d questions", err, asked.Load())
	}
	for _, p := range []router.Prompt{
		{Prompt: []byte(`["a"]`)}, {Messages: []byte(`[{"role":"user","content":[{"type":"image_url"}]}]`)}, {Messages: []byte(`[]`), Documents: []byte(`[]`)},
	} {
		if _, err := r.ids(t.Context(), address, "sim", p); !errors.Is(err, errCannotAsk) || asked.Load() != 4 {
			t.Errorf("%s: %v", p.Messages, err)
		}
	}

	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.ids(gone, address, "sim", prompt("left")); !errors.Is(err, context.Canceled) {
		t.Errorf("a client that left: %v", err)
	}
	if _, err := r.ids(t.Context(), address, "sim", prompt("stayed")); err != nil {
		t.Errorf("after a client that left: %v", err)
	}

	bad, failures := tokenizeServer(t, func([]uint32) any { return "none" })
	for range 3 {
		if _, err := r.ids(t.Context(), bad, "sim", prompt("x")); err == nil {
			t.Error("no error")
		}
	}
	if failures.Load() != 1 {
		t.Errorf("a worker that fails was asked %d times, want once in a while", failures.Load())
	}
}

// The cache of prompts has a bound, and keeps the prompts that were requested recently.
func TestRemoteTokensAreBounded(t *testing.T) {
	address, asked := tokenizeServer(t, func(ids []uint32) any { return ids })
	r := newRemote(64<<10, reach.Networks{}.Client())
	prompt := func(i int) router.Prompt {
		return router.Prompt{Messages: fmt.Appendf(nil, `[{"role":"user","content":"%d"}]`, i)}
	}
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 300 {
				if _, err := r.ids(context.Background(), address, "sim", prompt(g*1000+i)); err != nil {
					t.Error(err)
					return
				}
				// One prompt is requested repeatedly.
				if _, err := r.ids(context.Background(), address, "sim", prompt(-1)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	kept := 0
	for _, generation := range []map[[32]byte][]uint32{r.newer, r.older} {
		for _, ids := range generation {
			kept += len(ids) + 32
		}
	}
	if kept > r.limit || kept < r.limit/4 {
		t.Errorf("%d kept, want at most %d and not much less", kept, r.limit)
	}
	if n := asked.Load(); n < 1200 || n > 1210 {
		t.Errorf("%d questions, want one for each of 1,200 prompts and few for the one in common", n)
	}
}

// Through Envoy: prompts of a model without a tokenizer in kvroute are found in the workers' caches.
func TestRemoteTokenize(t *testing.T) {
	dir := modelFolder(t)
	d := startStack(t, 2, []string{"--tokenizer", dir, "--speed", "20"}, "--remote-tokenize")
	body := chatBody(strings.Repeat("only the workers know this model ", 10), 2, false)
	for _, overlap := range []bool{false, true} {
		resp, text := reply(t, d, http.MethodPost, chatPath, body, nil)
		last := lastDecision(t, d)
		if resp.StatusCode != http.StatusOK || last.TokenMode != tokenizer.Remote || (last.OverlapBlocks > 0) != overlap {
			t.Errorf("status %d, %s, decision %+v, want overlap %v", resp.StatusCode, text, last, overlap)
		}
		settle(t, d)
	}
}
