// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Requests without a routable prompt, or with several prompts, still add load.
func TestLoadOfOtherPrompts(t *testing.T) {
	r := newRouter(t, router.Config{Scoring: classic(1), Cards: []router.Card{cardOf(t, "m")}}, 2)
	for _, c := range []struct {
		name   string
		prompt router.Prompt
		mode   tokenizer.Mode
		reason string
		tokens int
	}{
		{"embeddings", router.Prompt{Size: 401, Inexact: "no_prompt"}, tokenizer.None, "no_prompt", 101},
		{"one prompt", router.Prompt{Prompt: []byte(`"abcd"`)}, tokenizer.Exact, "", 4},
		{"a list", router.Prompt{Prompt: []byte(`["abcd","bb","` + strings.Repeat("c", 40) + `"]`)}, tokenizer.Exact, "", 40 + (6+4+3)/4},
		{"lists of ids", router.Prompt{Prompt: []byte(`[[1,2,3],[4],[5,6]]`)}, tokenizer.Exact, "", 6},
		{"the last ids", router.Prompt{Prompt: []byte(`[[1,2,3],[4],[5,6]]`), TruncatePromptTokens: []byte(`2`)}, tokenizer.Exact, "", 5},
		{"a history elsewhere", router.Prompt{Messages: []byte(`[{"role":"user","content":"a"}]`), Inexact: "no_history"}, tokenizer.Bytes, "no_history", 7},
	} {
		d, err := r.BestWorker(t.Context(), router.Request{ID: "x", Model: "m", Prompt: c.prompt})
		if err != nil || d.TokenMode != c.mode || d.TokenReason != c.reason || d.PromptTokens != c.tokens || d.PrefillTokens != c.tokens {
			t.Errorf("%s: %+v, %v; want mode %s, reason %q and %d tokens", c.name, d, err, c.mode, c.reason, c.tokens)
		}
		for _, w := range r.Workers() {
			if w.ActiveRequests == 1 && w.PendTokens != c.tokens {
				t.Errorf("%s: %d tokens are pending, want %d", c.name, w.PendTokens, c.tokens)
			}
		}
		r.Free("x")
	}
}

// The ids of a decision are a copy that is not retained. There are none if they are not exact, or if the
// prompt came as ids.
func TestTokensOfADecision(t *testing.T) {
	card := cardOf(t, "m")
	r := newRouter(t, router.Config{Scoring: classic(1), Cards: []router.Card{card}}, 0)
	set(t, r, worker(1))
	n := 0
	tokensOf := func(req router.Request) []uint32 {
		t.Helper()
		n++
		req.ID, req.Model = strings.Repeat("x", n), "m"
		d, err := r.BestWorker(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		r.Free(req.ID)
		if kept, ok := r.Decision(req.ID); !ok || kept.Tokens != nil {
			t.Errorf("kept %+v, %v", kept.Tokens, ok)
		}
		return d.Tokens
	}
	text := router.Prompt{Prompt: []byte(`"abcd"`)}
	if got := tokensOf(router.Request{Prompt: text}); got != nil {
		t.Errorf("not asked for: %+v", got)
	}
	first := tokensOf(router.Request{Prompt: text, WantTokens: true})
	if tokensOf(router.Request{Prompt: router.Prompt{Prompt: []byte(`"ddddd"`)}, WantTokens: true}); !slices.Equal(first, []uint32{0, 1, 2, 3}) {
		t.Errorf("ids %d after the next request, want 0 to 3", first)
	}
	class := encodedClass(t, card.Prompts, text)
	card.Prompts.SetConfirmed(class, false)
	if got := tokensOf(router.Request{Prompt: text, WantTokens: true}); got != nil {
		t.Errorf("after drift: %+v", got)
	}
	card.Prompts.SetConfirmed(class, true)
	for name, req := range map[string]router.Request{
		"ids":       {Tokens: []uint32{1, 2}},
		"hashes":    {Blocks: &router.Blocks{Tokens: 32, Local: []uint64{1}, Sequence: []uint64{1}}},
		"no prompt": {Prompt: router.Prompt{Size: 40}},
		"no text":   {Prompt: router.Prompt{Prompt: []byte(`"\ud800"`)}},
	} {
		req.WantTokens = true
		if got := tokensOf(req); got != nil {
			t.Errorf("%s: %+v, want no ids", name, got)
		}
	}
}

// The engine creates the tokens of an image. The blocks before the image are found in the
// engine's cache, the blocks behind it are not.
func TestBlocksBeforeAnItem(t *testing.T) {
	m, err := tokenizer.LoadModel(fstest.MapFS{
		"tokenizer.json": {Data: []byte(`{"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},
			"model":{"vocab":{"a":0,"b":1,"c":2,"d":3,"i":4},"merges":[]}}`)},
		"chat_template.jinja": {Data: []byte(`{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}ii{% endif %}{% endfor %}{% endfor %}`)},
	}, tokenizer.ModelConfig{})
	if err != nil {
		t.Fatal(err)
	}
	r := newRouter(t, router.Config{Scoring: classic(1), BlockSize: 2, Cards: []router.Card{{Name: "m", Prompts: m}}}, 0)
	w := worker(1)
	w.BlockSize = 2
	set(t, r, w)
	// The engine's token ids: the text, and several placeholders for the image.
	ids := []uint32{0, 1, 2, 3, 0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 0, 1}
	event := indexer.Event{Kind: indexer.Stored}
	for i, local := range indexer.AppendLocalHashes(nil, ids, 2, indexer.Seed("", "")) {
		event.Blocks = append(event.Blocks, indexer.Block{Local: local, External: uint64(i + 1)})
	}
	r.ApplyEvent(router.Worker{ID: 1}, event)
	for _, item := range []string{
		`{"type":"image_url","image_url":{"url":"data:image/png;base64,` + strings.Repeat("A", 100_000) + `"}}`,
		`{"type":"input_audio","input_audio":{"data":"AAAA","format":"wav"}}`, `{"type":"video_url","video_url":{"url":"http://x/y.mp4"}}`,
	} {
		d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Prompt: router.Prompt{Messages: []byte(
			`[{"role":"user","content":[{"type":"text","text":"abcdabcd"},` + item + `,{"type":"text","text":"ab"}]}]`)}})
		// The four blocks before the item match the engine's. Blocks behind it match only
		// requests with the same item.
		if err != nil || d.TokenMode != tokenizer.ExactPrefix || d.TokenReason != tokenizer.Items || d.OverlapBlocks < 4 || d.OverlapBlocks > 5 || d.PromptBlocks != 9 {
			t.Errorf("%.40s: %+v, %v", item, d, err)
		}
		req := router.Request{ID: item[:20], Model: "m", Prompt: router.Prompt{Messages: []byte(
			`[{"role":"user","content":[{"type":"text","text":"abcdabcd"},` + item + `,{"type":"text","text":"ab"}]}]`)}}
		if _, err := r.BestWorker(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		req.ID = ""
		if again, err := r.BestWorker(t.Context(), req); err != nil || again.OverlapBlocks != 9 {
			t.Errorf("%.40s: the second time %d blocks count as cached, %v; want all 9", item, again.OverlapBlocks, err)
		}
		if d.PromptTokens < 256 || d.PromptTokens > 300 {
			t.Errorf("%.40s: taken for %d tokens, want those of one item and few more", item, d.PromptTokens)
		}
	}
}

// Token ids of a chat with an image, made by the client, match the engines' caches up to
// the image. The ids do not show whose image it is, so blocks behind it match nothing.
func TestGivenIDsOfAnItem(t *testing.T) {
	const text, image = `[{"role":"user","content":"abcd"}]`, `[{"role":"user","content":[{"type":"text","text":"ab"},{"type":"image_url","image_url":{"url":"u"}}]}]`
	r := newRouter(t, router.Config{Scoring: classic(1), BlockSize: 2}, 0)
	w := worker(1)
	w.BlockSize = 2
	set(t, r, w)
	ids := []uint32{0, 1, 4, 4, 4, 4}
	event := indexer.Event{Kind: indexer.Stored}
	locals := indexer.AppendLocalHashes(nil, ids, 2, indexer.Seed("", ""))
	locals[1] = indexer.ObjectHash(ids[2:4], []uint64{7}, indexer.Seed("", ""))
	locals[2] = indexer.ObjectHash(ids[4:6], []uint64{7}, indexer.Seed("", ""))
	for i, local := range locals {
		event.Blocks = append(event.Blocks, indexer.Block{Local: local, External: uint64(i + 1)})
	}
	r.ApplyEvent(router.Worker{ID: 1}, event)
	for messages, want := range map[string]tokenizer.Mode{text: tokenizer.Exact, image: tokenizer.ExactPrefix} {
		d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: ids, Prompt: router.Prompt{Messages: []byte(messages)}})
		if err != nil || d.TokenMode != want || (d.TokenReason == tokenizer.Items) != (want == tokenizer.ExactPrefix) || d.OverlapBlocks != 1 {
			t.Errorf("%s: %+v, %v; want mode %s and the one block before the image", messages, d, err, want)
		}
	}
}

// encodedClass returns the class of a prompt.
func encodedClass(t *testing.T, m *tokenizer.Model, q router.Prompt) chat.Class {
	t.Helper()
	p, err := m.Encode(t.Context(), nil, q, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	return p.Class
}
