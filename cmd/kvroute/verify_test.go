// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/internal/reach"
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

// tokenizeServer answers /tokenize with the result of ids for kvroute's own ids.
func tokenizeServer(t *testing.T, ids func([]uint32) any) (netip.AddrPort, *atomic.Int32) {
	t.Helper()
	var asked atomic.Int32
	m := simCard(t).Prompts
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/render") { // as vLLM without --enable-scale-out
			w.WriteHeader(http.StatusForbidden)
			return
		}
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

// promptOf reads the prompt of a body.
func promptOf(t *testing.T, path, body string) router.Prompt {
	t.Helper()
	endpoint, _ := openai.Classify(http.MethodPost, path)
	b, bad := openai.Parse(endpoint, []byte(body))
	if bad != nil {
		t.Fatal(bad.Message)
	}
	return b.Request
}

func chatPrompt(t *testing.T) router.Prompt {
	t.Helper()
	return promptOf(t, "/v1/chat/completions", `{"model":"sim","messages":[{"role":"user","content":"the worker keeps the shared prefix and the router finds it there"}]}`)
}

// A worker is asked with the client's own body, byte for byte: at the path that renders bodies of the API, or else at
// /tokenize, if that reads the API's bodies with all their fields.
func TestClientsBodyIsSent(t *testing.T) {
	const chat, words = "/v1/chat/completions", `[{"role":"user","content":"the worker keeps the shared prefix"}]`
	for _, c := range []struct {
		path, body string
		has        string // the path that the worker has
		asked      []string
		outcome    string
	}{
		{chat, `{"foo": {"b":1,"a":2}, "model":"client's name","messages":` + words + `, "stream":true}`, chat + "/render", []string{chat + "/render"}, "ok"},
		{chat, `{ "messages":` + words + `,"model":"sim" , "cache_salt":"x"}`, "/tokenize", []string{chat + "/render", "/tokenize"}, "ok"},
		{chat, `{"model":"sim","messages":` + words + `,"reasoning_effort":"low"}`, "/tokenize", []string{chat + "/render"}, "unavailable"},
		{chat, `{"model":"sim","messages":` + words + `,"reasoning_effort":"low"}`, chat + "/render", []string{chat + "/render"}, "ok"},
		{chat, `{"model":"sim","messages":` + words + `,"tool_choice":"none","tools":[]}`, "/tokenize", []string{chat + "/render"}, "unavailable"},
		{"/v1/completions", `{"model":"sim","prompt":"the worker keeps","n":2}`, "/v1/completions/render", []string{"/v1/completions/render"}, "ok"},
		{"/v1/completions", `{"model":"sim","prompt":"the worker keeps","n":2}`, "/tokenize", []string{"/v1/completions/render", "/tokenize"}, "ok"},
		{"/v1/messages", `{"model":"sim","max_tokens":7,"messages":` + words + `}`, "/v1/messages/render", []string{"/v1/messages/render"}, "ok"},
		{"/v1/messages", `{"model":"sim","max_tokens":7,"messages":` + words + `}`, "/tokenize", []string{"/v1/messages/render"}, "unavailable"},
		{"/v1/responses", `{"model":"sim","input":"the worker keeps"}`, "/v1/responses/render", []string{"/v1/responses/render"}, "ok"},
		{"/v1/responses", `{"model":"sim","input":"the worker keeps"}`, "/tokenize", []string{"/v1/responses/render"}, "unavailable"},
		{"/v1/completions", `{"model":"sim","prompt":["a","b"]}`, "/tokenize", nil, ""},
		{"/v1/embeddings", `{"model":"sim","input":"a"}`, "/tokenize", nil, ""},
	} {
		card, prompt := simCard(t), promptOf(t, c.path, c.body)
		p, err := card.Prompts.Encode(t.Context(), nil, prompt, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		var asked []string
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			asked = append(asked, r.URL.Path)
			if body, err := io.ReadAll(r.Body); err != nil || string(body) != c.body {
				t.Errorf("%s: %s was sent, %v, want %s", r.URL, body, err, c.body)
			}
			switch {
			case r.URL.Path != c.has:
				w.WriteHeader(http.StatusNotFound)
			case c.has == "/tokenize":
				_ = json.NewEncoder(w).Encode(map[string]any{"tokens": p.IDs, "count": len(p.IDs)})
			case c.path == "/v1/completions":
				_ = json.NewEncoder(w).Encode([]any{map[string]any{"request_id": "x", "token_ids": p.IDs}})
			default:
				_ = json.NewEncoder(w).Encode(map[string]any{"request_id": "x", "token_ids": p.IDs})
			}
		}))
		counts := meter.New(nil)
		v := newVerifier(slog.New(slog.DiscardHandler), counts.Counter("checks", "", "", "model", "outcome"), reach.Networks{}.Client(), noWorkers)
		v.observe(router.Observation{Card: card, Model: "sim", BlockSize: 16, Address: netip.MustParseAddrPort(strings.TrimPrefix(s.URL, "http://")), Prompt: prompt, IDs: p.IDs})
		if queued := len(v.queue); queued != min(len(c.asked), 1) {
			t.Errorf("%s %s: %d checks", c.path, c.body, queued)
		} else if queued > 0 {
			position, ok := v.compare(t.Context(), <-v.queue)
			if ok != (c.outcome == "ok") || ok && position >= 0 {
				t.Errorf("%s %s: %v, position %d, want %s", c.path, c.body, ok, position, c.outcome)
			}
		}
		s.Close()
		if !slices.Equal(asked, c.asked) {
			t.Errorf("%s %s: asked at %q, want %q", c.path, c.body, asked, c.asked)
		}
	}
}

// If a worker repeatedly returns other tokens in the first block, its model is no longer tokenized
// exactly; other differences are only reported.
func TestDrift(t *testing.T) {
	for _, c := range []struct {
		name    string
		ids     func([]uint32) any
		drifted bool
		log     string
	}{
		{"the same", func(ids []uint32) any { return ids }, false, ""},
		{"other ids at once", func(ids []uint32) any { return append([]uint32{7}, ids...) }, true, "worker=7 address=127.0.0.1:"},
		{"other ids at the end", func(ids []uint32) any { return append(ids, 7) }, false, "position="},
		{"no ids", func([]uint32) any { return "none" }, false, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			address, asked := tokenizeServer(t, c.ids)
			var out bytes.Buffer
			v := newVerifier(slog.New(slog.NewTextHandler(&out, nil)), meter.New(nil).Counter("checks", "", "", "model", "outcome"), reach.Networks{}.Client(), noWorkers)
			card := simCard(t)
			prompt := chatPrompt(t)
			p, err := card.Prompts.Encode(t.Context(), nil, prompt, time.Now())
			if err != nil || p.Mode != tokenizer.Exact {
				t.Fatal(p, err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- v.run(ctx) }()
			for range 5 {
				v.observe(router.Observation{Card: card, Model: "sim", Worker: router.Worker{ID: 7}, Address: address, BlockSize: 16, Prompt: prompt, IDs: p.IDs})
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

// The first requests are checked, and then one in ten thousand. No request waits for a check.
func TestFewRequestsAreChecked(t *testing.T) {
	v := newVerifier(slog.New(slog.DiscardHandler), meter.New(nil).Counter("checks", "", "", "model", "outcome"), reach.Networks{}.Client(), noWorkers)
	o := router.Observation{Model: "m", Card: new(router.Card), Prompt: chatPrompt(t)}
	for range 30_000 {
		v.observe(o)
	}
	if n := len(v.queue); n != firstChecks+2 {
		t.Errorf("%d checks, want %d", n, firstChecks+2)
	}
	// Prompts whose body is not known, or large, are not checked.
	o.Prompt.Body, o.Model = nil, "other"
	v.observe(o)
	o.Prompt.Body = make([]byte, mostBody+1)
	v.observe(o)
	if n := len(v.queue); n != firstChecks+2 {
		t.Errorf("%d checks, want still %d", n, firstChecks+2)
	}
	// A reload starts the checks again, for as many requests as the queue has room for.
	o.Prompt = chatPrompt(t)
	for range 100 {
		o.Card = new(router.Card)
		v.observe(o)
	}
	if n := len(v.queue); n != cap(v.queue) {
		t.Errorf("%d checks, want the queue full", n)
	}
	// A minute has so many checks, whatever comes.
	checks := 0
	now := time.Now().Add(time.Hour)
	for checks < 1000 && v.mayCheck(now) {
		checks++
	}
	if checks != mostChecks || !v.mayCheck(now.Add(time.Minute)) {
		t.Errorf("%d checks in a minute, want %d", checks, mostChecks)
	}
}

func noWorkers(string) []router.WorkerState { return nil }

// verifying runs a verifier with a short time between checks, until the test ends.
func verifying(t *testing.T, log io.Writer, workers func(string) []router.WorkerState) *verifier {
	t.Helper()
	v := newVerifier(slog.New(slog.NewTextHandler(log, nil)), meter.New(nil).Counter("checks", "", "", "model", "outcome"), reach.Networks{}.Client(), workers)
	v.again = 20 * time.Millisecond
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- v.run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return v
}

// observeTimes makes n observations of a prompt with the card's ids.
func observeTimes(t *testing.T, v *verifier, card *router.Card, at netip.AddrPort, n int) {
	t.Helper()
	prompt := chatPrompt(t)
	p, err := card.Prompts.Check(t.Context(), nil, prompt, time.Now())
	if err != nil || p.Mode != tokenizer.Exact {
		t.Fatal(p, err)
	}
	for range n {
		v.observe(router.Observation{Card: card, Model: "sim", Address: at, BlockSize: 16, Prompt: prompt, IDs: p.IDs})
	}
}

func hasVerdict(t *testing.T, card *router.Card, want tokenizer.Verdict) {
	t.Helper()
	eventually(t, fmt.Sprintf("the verdict is not %d", want), func() bool { return card.Prompts.Verdict() == want })
}

// The verdict on a model decides whether it is routed exactly, and whether its ids may be sent to
// workers: never again after they differed once.
func TestVerdicts(t *testing.T) {
	var wrong atomic.Int32 // how many wrong ids the worker puts first; -1 puts one at the end
	change := func(ids []uint32) any {
		switch n := wrong.Load(); {
		case n < 0:
			return append(ids, 7)
		default:
			return append(make([]uint32, n), ids...)
		}
	}
	address, asked := tokenizeServer(t, change)
	var log lockedBuffer
	v := verifying(t, &log, noWorkers)

	card := simCard(t)
	hasVerdict(t, card, tokenizer.Unchecked)
	observeTimes(t, v, card, address, 1)
	hasVerdict(t, card, tokenizer.Agreed)
	wrong.Store(-1)
	observeTimes(t, v, card, address, 1)
	hasVerdict(t, card, tokenizer.Differs)
	wrong.Store(0)
	before := asked.Load()
	observeTimes(t, v, card, address, 1)
	eventually(t, "the worker is not asked", func() bool { return asked.Load() > before && len(v.queue) == 0 })
	hasVerdict(t, card, tokenizer.Differs)

	// One wrong beginning may be a worker that is being replaced; two wrong ones change the verdict.
	wrong.Store(3)
	observeTimes(t, v, card, address, 1)
	eventually(t, "the worker is not asked", func() bool { return strings.Contains(log.String(), "position=0") })
	hasVerdict(t, card, tokenizer.Differs)
	observeTimes(t, v, card, address, 1)
	hasVerdict(t, card, tokenizer.DriftSeen)
	// The model is tokenized again as soon as the worker agrees.
	wrong.Store(0)
	hasVerdict(t, card, tokenizer.Differs)
	if !strings.Contains(log.String(), "tokenized again") {
		t.Errorf("log: %s", log.String())
	}

	// Checks of a reloaded card start again, whatever the verdict was.
	wrong.Store(3)
	observeTimes(t, v, card, address, 2)
	hasVerdict(t, card, tokenizer.DriftSeen)
	card = simCard(t)
	observeTimes(t, v, card, address, 1)
	eventually(t, "the reloaded model is not checked", func() bool { return card.Prompts.Verdict() == tokenizer.Differs })
	observeTimes(t, v, card, address, 1)
	hasVerdict(t, card, tokenizer.DriftSeen)
	wrong.Store(0)
	card = simCard(t)
	observeTimes(t, v, card, address, 1)
	hasVerdict(t, card, tokenizer.Agreed)
}

// If other workers' events confirm the ids, a worker with other ids has a fault, and the model keeps its verdict.
func TestEventsOverruleAnswers(t *testing.T) {
	bad, asked := tokenizeServer(t, func(ids []uint32) any { return ids[1:] })
	v := newVerifier(slog.New(slog.DiscardHandler), meter.New(nil).Counter("checks", "", "", "model", "outcome"), reach.Networks{}.Client(), noWorkers)
	var faults []router.Fault
	v.faults = func(_ uint64, now []router.Fault) { faults = now }
	card, prompt := simCard(t), chatPrompt(t)
	p, err := card.Prompts.Encode(t.Context(), nil, prompt, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	checked := &trial{card: card, differs: map[uint64]bool{}}
	for i := range int32(4) {
		v.check(t.Context(), checked, router.Observation{Card: card, Model: "sim", Address: bad, BlockSize: 16, Confirmed: true, Prompt: prompt, IDs: p.IDs})
		if len(faults) != 1 || faults[0].What != "token_ids" || asked.Load() != i+1 {
			t.Errorf("faults %+v after %d answers", faults, asked.Load())
		}
	}
	if got := card.Prompts.Verdict(); got != tokenizer.Unchecked {
		t.Errorf("verdict %v", got)
	}
}

// A model that drifted is checked with another worker when the first has left.
func TestDriftEndsWithAnotherWorker(t *testing.T) {
	var gone atomic.Bool
	bad, _ := tokenizeServer(t, func(ids []uint32) any {
		if gone.Load() {
			return "no answer"
		}
		return ids[1:]
	})
	good, _ := tokenizeServer(t, func(ids []uint32) any { return ids })
	v := verifying(t, io.Discard, func(model string) []router.WorkerState {
		if model != "sim" || !gone.Load() {
			return nil
		}
		return []router.WorkerState{{Address: bad}, {Address: good}}
	})
	card := simCard(t)
	observeTimes(t, v, card, bad, 2)
	hasVerdict(t, card, tokenizer.DriftSeen)
	gone.Store(true)
	hasVerdict(t, card, tokenizer.Differs)
}

// lockedBuffer is a log that may be read while it is written.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func TestTokenizeCommand(t *testing.T) {
	file := t.TempDir() + "/request.json"
	if err := os.WriteFile(file, []byte(`{"model":"sim","messages":[{"role":"user","content":"the worker keeps the shared prefix"}],"cache_salt":"s"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	if err := tokenizeFile(t.Context(), []string{"--request", file, "--block-size", "4", "--json"}, stdio{&out, &errs}); err != nil {
		t.Fatal(err)
	}
	var got tokenized
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.Mode != tokenizer.Exact || len(got.IDs) < 8 || len(got.Local) != len(got.IDs)/4 || len(got.Sequence) != len(got.Local) || got.Local[0] != got.Sequence[0] {
		t.Errorf("%+v", got)
	}
	out.Reset()
	if err := tokenizeFile(t.Context(), []string{"--request", file, "--text"}, stdio{&out, &errs}); err != nil || !strings.Contains(out.String(), "mode exact") || !strings.Contains(out.String(), "worker keeps") {
		t.Errorf("%v, printed %s", err, out.String())
	}
	for name, args := range map[string][]string{
		"no such file": {"--request", file + "x"}, "no such folder": {"--request", file, "--tokenizer", file + "x"}, "block-size": {"--request", file, "--block-size", "0"},
		"path": {"--request", file, "--path", "/v1/models"}, "no input": {"--request", file, "--path", "/v1/responses"},
	} {
		if err := tokenizeFile(t.Context(), args, stdio{&out, &errs}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// Each kind of request has ids, or a reason why it has none.
func TestTokenizeEveryKind(t *testing.T) {
	const words = "the worker keeps the shared prefix and the router finds it there"
	chat := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}]}`, words)
	for _, c := range []struct {
		name, path, body string
		like             string // another body that has the same ids
		mode             tokenizer.Mode
		others           bool
		asked            bool // a worker can be asked about the body
	}{
		{"chat", "/v1/chat/completions", chat, "", tokenizer.Exact, false, true},
		{"responses", "/v1/responses", fmt.Sprintf(`{"model":"sim","input":%q}`, words), chat, tokenizer.Exact, false, true},
		{"responses by their fields", "", fmt.Sprintf(`{"model":"sim","input":[{"role":"user","content":%q}]}`, words), chat, tokenizer.Exact, false, true},
		{"completions", "", `{"model":"sim","prompt":["the worker","and the router"]}`, `{"model":"sim","prompt":"and the router"}`, tokenizer.Exact, true, false},
		{"ids", "", `{"model":"sim","prompt":[1,2,3]}`, `{"model":"sim","prompt":[[1,2,3]]}`, tokenizer.Exact, false, false},
		{"given ids", "", `{"model":"sim","messages":[{"role":"user","content":"x"}],"nvext":{"token_data":[1,2,3]}}`, `{"model":"sim","prompt":[1,2,3]}`, tokenizer.Exact, false, false},
		{"embeddings", "/v1/embeddings", `{"model":"sim","input":"x"}`, "", tokenizer.None, true, false},
		{"an effort", "", `{"model":"sim","reasoning_effort":"low","messages":[{"role":"user","content":"x"}]}`, "", tokenizer.Exact, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			run := func(body string, args ...string) (got tokenized, err error) {
				t.Helper()
				file := t.TempDir() + "/request.json"
				if err := os.WriteFile(file, []byte(body), 0o600); err != nil {
					t.Fatal(err)
				}
				var out bytes.Buffer
				if err := tokenizeFile(t.Context(), append(args, "--request", file, "--json"), stdio{&out, io.Discard}); err != nil {
					return got, err
				}
				return got, json.Unmarshal(out.Bytes(), &got)
			}
			got, err := run(c.body, "--path", c.path)
			if err != nil || got.Mode != c.mode || (got.Others > 0) != c.others {
				t.Fatalf("%+v, %v; want mode %s, others %v", got, err, c.mode, c.others)
			}
			if c.like != "" {
				if want, err := run(c.like); err != nil || !slices.Equal(got.IDs, want.IDs) || len(want.IDs) == 0 {
					t.Errorf("ids %d, want %d, %v", got.IDs, want.IDs, err)
				}
			}
			file := t.TempDir() + "/request.json"
			if err := os.WriteFile(file, []byte(c.body), 0o600); err != nil {
				t.Fatal(err)
			}
			body, err := readRequest(file, c.path)
			if asks := body.Tokens == nil && idsPaths(body.Request, nil) != nil; err != nil || asks != c.asked {
				t.Errorf("a worker can be asked: %v, want %v; %v", asks, c.asked, err)
			}
		})
	}
}

// Models of the configuration are loaded. A model that cannot be exact is still routed, with a
// reason; a missing file is an error.
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
	// Templates that cannot be read, and the warning that is logged.
	bad := map[string]string{
		"{% if %}": "line 1: unexpected the end of the tag", "line\n{% if x %}\n": "unexpected end of template, expected 'endif'", "\n{% trans %}{% endtrans %}": "line 2: unknown tag 'trans'",
		"{% do 1 %}": "unknown tag 'do'", "{% block a %}{% endblock %}{% block a %}{% endblock %}": "block 'a' defined twice", "{{ messages | from_json }}": "No filter named 'from_json'.",
		"\n{{ " + strings.Repeat("(", 1<<15) + "1" + strings.Repeat(")", 1<<15) + " }}": "line 2: nested deeper", "\xff": "not UTF-8", strings.Repeat("x", 5<<20): "template of more than",
		"{% for a in [] %}{{ a is nosuch }}{% endfor %}": "No test named 'nosuch'.",
	}
	n := 0
	for text := range bad {
		put(fmt.Sprintf("t/%d.jinja", n), text)
		n++
	}
	put("number/tokenizer.json", `{"model":{"vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}}`)
	put("number/tokenizer_config.json", `{"chat_template":5}`)
	put("t/dead.jinja", `{% if messages is not iterable %}{{ messages | fromjson }}{{ 1 is nosuch }}{% endif %}{{ messages[0].content }}`)
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	cache := tokenizer.NewCache(1 << 20)
	models := []modelConfig{
		{Name: "good", Tokenizer: dir + "/good", ChatTemplate: dir + "/t/template.jinja", Aliases: []string{"g"}, LoRA: []string{"l"}, BlockSize: 32},
		{Name: "plain", Tokenizer: dir + "/good"},
		{Name: "unigram", Tokenizer: dir + "/unigram"},
		{Name: "dead", Tokenizer: dir + "/good", ChatTemplate: dir + "/t/dead.jinja"},
		{Name: "number", Tokenizer: dir + "/number"},
	}
	for i := range n {
		models = append(models, modelConfig{Name: fmt.Sprint("bad", i), Tokenizer: dir + "/good", ChatTemplate: fmt.Sprintf("%s/t/%d.jinja", dir, i)})
	}
	cards, err := (&config{Models: models}).loadCards(cache, log)
	if err != nil || len(cards) != len(models)+1 {
		t.Fatalf("%d cards, %v; want %d and the simulated engine's", len(cards), err, len(models))
	}
	if mode, reason := cards[3].Prompts.Usual(); mode != tokenizer.Exact {
		t.Errorf("unknown names that are never reached: mode %s, reason %s", mode, reason)
	}
	for _, c := range cards[4 : len(cards)-1] {
		if mode, reason := c.Prompts.Usual(); mode != tokenizer.Bytes || reason != tokenizer.NoRenderer || c.Prompts.Degraded() == "" {
			t.Errorf("%s: mode %s, reason %s (%s)", c.Name, mode, reason, c.Prompts.Degraded())
		}
	}
	for text, want := range bad {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%.100q: the log does not say %q", text, want)
		}
	}
	if cards[0].Prompts == nil || cards[0].BlockSize != 32 || cards[2].Prompts != nil {
		t.Errorf("cards %+v", cards)
	}
	for _, want := range []string{"model=unigram", "Unigram", "model=plain", "no chat template", "model=number", "neither a text nor a list", "template=" + dir + "/t/0.jinja"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the log does not say %q: %s", want, out.String())
		}
	}
	for want, m := range map[string]modelConfig{
		"tokenizer: tokenizer.json: unexpected end at byte 9": {}, "no such file": {Tokenizer: dir + "/none"},
		"unknown engine profile": {Tokenizer: dir + "/good", ChatTemplate: dir + "/t/template.jinja", Profile: "x"},
	} {
		m.Name = "m"
		if m.Tokenizer == "" {
			m.Tokenizer = dir + "/broken"
		}
		_, err := (&config{Models: []modelConfig{m}}).loadCards(cache, log)
		if err == nil || !strings.HasPrefix(err.Error(), "models[0].") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one that names the model's place in the configuration", want, err)
		}
	}
}
