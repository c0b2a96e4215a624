// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// simCard is the card of the simulated engines' model, with a tokenizer of its own.
func simCard(t *testing.T) *router.Card {
	t.Helper()
	m, err := tokenizer.LoadModel(enginesim.ModelFiles(), tokenizer.ModelConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return &router.Card{Name: "sim", Prompts: m}
}

// tokenizeServer answers /tokenize with what ids makes of our own ids.
func tokenizeServer(t *testing.T, ids func([]uint32) any) (netip.AddrPort, *atomic.Int32) {
	t.Helper()
	var asked atomic.Int32
	m := simCard(t).Prompts
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		var body struct{ Messages json.RawMessage }
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || r.URL.Path != "/tokenize" {
			t.Errorf("%s: %v", r.URL, err)
		}
		p, err := m.Encode(r.Context(), nil, router.Prompt{Messages: body.Messages}, time.Now())
		if err != nil {
			t.Error(err)
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"tokens": ids(p.IDs)})
	}))
	t.Cleanup(s.Close)
	return netip.MustParseAddrPort(strings.TrimPrefix(s.URL, "http://")), &asked
}

// A worker that goes on to make other tokens in the first block takes its model
// out of exact tokenization; other differences are told only.
func TestDrift(t *testing.T) {
	for _, c := range []struct {
		name    string
		ids     func([]uint32) any
		drifted bool
		log     string
	}{
		{"the same", func(ids []uint32) any { return ids }, false, ""},
		{"other ids at once", func(ids []uint32) any { return append([]uint32{7}, ids...) }, true, "position=0"},
		{"other ids at the end", func(ids []uint32) any { return append(ids, 7) }, false, "position="},
		{"no ids", func([]uint32) any { return "none" }, false, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			address, asked := tokenizeServer(t, c.ids)
			var out bytes.Buffer
			v, err := newVerifier(slog.New(slog.NewTextHandler(&out, nil)), noop.Meter{})
			if err != nil {
				t.Fatal(err)
			}
			card := simCard(t)
			prompt := router.Prompt{Messages: []byte(`[{"role":"user","content":"the worker keeps the shared prefix and the router finds it there"}]`)}
			p, err := card.Prompts.Encode(t.Context(), nil, prompt, time.Now())
			if err != nil || p.Mode != tokenizer.Exact {
				t.Fatal(p, err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- v.run(ctx) }()
			for range 5 {
				v.observe(router.Observation{Card: card, Model: "sim", Address: address, BlockSize: 16, Prompt: prompt, IDs: p.IDs})
			}
			eventually(t, "the worker is not asked", func() bool { return asked.Load() >= 5 && len(v.queue) == 0 })
			eventually(t, "the verdict is another", func() bool {
				p, err := card.Prompts.Encode(t.Context(), nil, prompt, time.Now())
				return err == nil && (p.Reason == tokenizer.Drifted) == c.drifted
			})
			cancel()
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(out.String(), c.log) || c.log == "" && strings.Contains(out.String(), "other tokens") {
				t.Errorf("log %q, want %q in it", out.String(), c.log)
			}
		})
	}
}

// Of many requests the first are checked, and then one in ten thousand; nobody
// waits for that.
func TestFewRequestsAreChecked(t *testing.T) {
	v, err := newVerifier(slog.New(slog.DiscardHandler), noop.Meter{})
	if err != nil {
		t.Fatal(err)
	}
	for range 30_000 {
		v.observe(router.Observation{Model: "m"})
	}
	if n := len(v.queue); n != firstChecks+2 {
		t.Errorf("%d checks, want %d", n, firstChecks+2)
	}
	for range 100 {
		v.seen = map[string]int{}
		v.observe(router.Observation{Model: "m"})
	}
}

func TestTokenizeCommand(t *testing.T) {
	file := t.TempDir() + "/request.json"
	if err := os.WriteFile(file, []byte(`{"model":"sim","messages":[{"role":"user","content":"the worker keeps the shared prefix"}],"cache_salt":"s"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	address, _ := tokenizeServer(t, func(ids []uint32) any { return ids })
	var out, errs bytes.Buffer
	if err := tokenizeFile(t.Context(), []string{"--request", file, "--block-size", "4", "--json", "--worker", "http://" + address.String()}, stdio{&out, &errs}); err != nil {
		t.Fatal(err)
	}
	var got tokenized
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.Mode != tokenizer.Exact || len(got.IDs) < 8 || len(got.Local) != len(got.IDs)/4 || len(got.Sequence) != len(got.Local) || got.Local[0] != got.Sequence[0] {
		t.Errorf("%+v", got)
	}
	if !strings.Contains(errs.String(), "the same") {
		t.Errorf("said %q", errs.String())
	}
	out.Reset()
	if err := tokenizeFile(t.Context(), []string{"--request", file, "--text"}, stdio{&out, &errs}); err != nil || !strings.Contains(out.String(), "mode exact") || !strings.Contains(out.String(), "worker keeps") {
		t.Errorf("%v, printed %s", err, out.String())
	}
	other, _ := tokenizeServer(t, func(ids []uint32) any { return ids[1:] })
	err := tokenizeFile(t.Context(), []string{"--request", file, "--worker", "http://" + other.String()}, stdio{&out, &errs})
	if err == nil || !strings.Contains(err.Error(), "from position 0 on") {
		t.Errorf("error %v, want one that names the position", err)
	}
	for name, args := range map[string][]string{
		"no such file": {"--request", file + "x"}, "no such folder": {"--request", file, "--tokenizer", file + "x"}, "block-size": {"--request", file, "--block-size", "0"},
	} {
		if err := tokenizeFile(t.Context(), args, stdio{&out, &errs}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// Models of the configuration are loaded; what cannot be exact is routed all the
// same, with a reason; what is not there is an error.
func TestModelCards(t *testing.T) {
	dir := t.TempDir()
	put := func(name, text string) {
		t.Helper()
		if err := os.MkdirAll(dir+"/"+name[:strings.LastIndex(name, "/")], 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(dir+"/"+name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("good/tokenizer.json", `{"model":{"vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}}`)
	put("unigram/tokenizer.json", `{"model":{"type":"Unigram","vocab":[["a",0]]}}`)
	put("broken/tokenizer.json", `{"model":`)
	put("t/template.jinja", `{{ messages[0].content }}`)
	put("t/bad.jinja", `{% if %}`)
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	cache := tokenizer.NewCache(1 << 20)
	cards, err := loadCards([]modelConfig{
		{Name: "good", Tokenizer: dir + "/good", ChatTemplate: dir + "/t/template.jinja", Aliases: []string{"g"}, LoRA: []string{"l"}, BlockSize: 32},
		{Name: "plain", Tokenizer: dir + "/good"},
		{Name: "unigram", Tokenizer: dir + "/unigram"},
	}, cache, log)
	if err != nil || len(cards) != 4 {
		t.Fatalf("%d cards, %v; want 3 and the simulated engine's", len(cards), err)
	}
	if cards[0].Prompts == nil || cards[0].BlockSize != 32 || cards[2].Prompts != nil {
		t.Errorf("cards %+v", cards)
	}
	for _, want := range []string{"model=unigram", "Unigram", "model=plain", "no chat template"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the log does not say %q: %s", want, out.String())
		}
	}
	for want, m := range map[string]modelConfig{
		"broken/tokenizer.json": {}, "no such file": {Tokenizer: dir + "/none"}, "bad.jinja": {Tokenizer: dir + "/good", ChatTemplate: dir + "/t/bad.jinja"},
		"unknown engine profile": {Tokenizer: dir + "/good", ChatTemplate: dir + "/t/template.jinja", Profile: "x"},
	} {
		m.Name = "m"
		if m.Tokenizer == "" {
			m.Tokenizer = dir + "/broken"
		}
		_, err := loadCards([]modelConfig{m}, cache, log)
		if err == nil || !strings.Contains(err.Error(), `model "m"`) {
			t.Errorf("%s: error %v, want one that names the model", want, err)
		}
	}
}
