// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
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

	"github.com/kvroute/kvroute/internal/engine"
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
		var body struct{ Messages, Prompt json.RawMessage }
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || r.URL.Path != "/tokenize" {
			t.Errorf("%s: %v", r.URL, err)
		}
		p, err := m.Encode(r.Context(), nil, router.Prompt{Messages: body.Messages, Prompt: body.Prompt}, time.Now())
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
		v := newVerifier(slog.New(slog.DiscardHandler), counts.Counter("checks", "", "", "model", "outcome"), reach.Networks{}.Client())
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

// The first requests are checked, and then one in ten thousand. No request waits for a check.
func TestFewRequestsAreChecked(t *testing.T) {
	v := newVerifier(slog.New(slog.DiscardHandler), meter.New(nil).Counter("checks", "", "", "model", "outcome"), reach.Networks{}.Client())
	o := router.Observation{Model: "m", Card: new(router.Card), Prompt: chatPrompt(t)}
	for range 30_000 {
		v.observe(o)
	}
	if n := len(v.queue); n != firstChecks+2 {
		t.Errorf("%d checks, want %d", n, firstChecks+2)
	}
	// Prompts for a frontend, prompts without a body, and large ones are not checked.
	o.Engine, o.Model = engine.Dynamo, "other"
	v.observe(o)
	o.Engine, o.Prompt.Body = "", nil
	v.observe(o)
	o.Prompt.Body = make([]byte, mostBody+1)
	v.observe(o)
	if n := len(v.queue); n != firstChecks+2 {
		t.Errorf("%d checks, want still %d", n, firstChecks+2)
	}
	// A reload starts the checks again, for as many requests as the queue has room for.
	o.Prompt = chatPrompt(t)
	for i := range 100 {
		o.Card, o.Worker.ID = new(router.Card), uint64(i)
		v.observe(o)
	}
	if n := len(v.queue); n != cap(v.queue) {
		t.Errorf("%d checks, want the queue full", n)
	}
}

// A worker that makes other ids, and one that does not answer, leave room for the checks of other classes and workers.
func TestBadWorkersLeaveRoomForChecks(t *testing.T) {
	var hang atomic.Bool
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if hang.Load() {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		fmt.Fprint(w, `{"tokens":[7]}`)
	}))
	defer s.Close()
	counts := meter.New(nil)
	v := newVerifier(slog.New(slog.DiscardHandler), counts.Counter("checks", "", "", "model", "outcome"), reach.Networks{}.Client())
	card := simCard(t)
	check := func(model string, worker uint64, suspect bool) (checked bool) {
		t.Helper()
		v.observe(router.Observation{
			Card: card, Model: model, Worker: router.Worker{ID: worker}, Suspect: suspect, BlockSize: 4, IDs: []uint32{1, 2, 3},
			Address: netip.MustParseAddrPort(strings.TrimPrefix(s.URL, "http://")), Prompt: chatPrompt(t),
		})
		select {
		case o := <-v.queue:
			v.compare(t.Context(), o)
			return true
		default:
			return false
		}
	}
	many := func(model string, worker uint64, suspect bool) (n int) {
		for range 1000 {
			if check(model, worker, suspect) {
				n++
			}
		}
		return n
	}
	// Workers 1 and 2 make other ids for a class that was checked before.
	for range firstChecks {
		check("bad", 3, false)
	}
	v.minute = time.Time{}
	if n := many("bad", 1, true); n != ofOneWorker {
		t.Errorf("%d checks of one worker in a minute, want %d", n, ofOneWorker)
	}
	if n := many("bad", 2, true) + many("bad", 4, true); n != otherChecks-ofOneWorker {
		t.Errorf("%d checks of the others, want %d", n, otherChecks-ofOneWorker)
	}
	// The first requests of another model have room. Those that have none are checked in the next minute.
	if n := many("other", 5, false) + many("third", 6, false); n != mostChecks-otherChecks {
		t.Errorf("%d first checks, want %d", n, mostChecks-otherChecks)
	}
	v.minute = time.Time{}
	if n := many("third", 6, false); n != firstChecks-(mostChecks-otherChecks-firstChecks) {
		t.Errorf("%d checks are made up for", n)
	}
	// A worker that fails is asked once in a minute, and does not count.
	v.minute = time.Time{}
	hang.Store(true)
	if n := many("fourth", 7, false); n != 1 {
		t.Errorf("a worker that fails is asked %d times", n)
	}
	hang.Store(false)
	if n := many("fourth", 8, false); n != firstChecks {
		t.Errorf("%d checks of another worker, want %d", n, firstChecks)
	}
}

// answering is a router whose workers have no events, with a verifier.
type answering struct {
	t      *testing.T
	router *router.Router
	card   *router.Card
	v      *verifier
	n      int

	mu      sync.Mutex
	changes []string // kinds of changed verdicts, with the worker of those on a worker
	judged  func(router.Judgement)
}

func newAnswering(t *testing.T, workers ...netip.AddrPort) *answering {
	t.Helper()
	a := &answering{t: t, card: simCard(t)}
	a.v = newVerifier(slog.New(slog.DiscardHandler), meter.New(nil).Counter("checks", "", "", "model", "outcome"), reach.Networks{}.Client())
	var err error
	a.router, err = router.New(router.Config{Cards: []router.Card{*a.card}, Hooks: router.Hooks{
		Observe: a.v.observe,
		Judged: func(j router.Judgement) {
			a.mu.Lock()
			defer a.mu.Unlock()
			a.changes = append(a.changes, fmt.Sprintf("%d %s %d", j.Kind, j.Class, j.Worker.ID))
			if a.judged != nil {
				a.judged(j)
			}
		},
	}})
	if err != nil {
		t.Fatal(err)
	}
	a.v.answered = a.router.Answered
	for i, at := range workers {
		if err := a.router.SetWorker(router.WorkerInfo{ID: uint64(i + 1), Address: at, Models: []string{"sim"}, BlockSize: 4, NoEvents: true}); err != nil {
			t.Fatal(err)
		}
	}
	return a
}

// ask routes a request to a worker, and checks it if a check is due.
func (a *answering) ask(worker uint64, path, body string) (asked bool, reason string) {
	a.t.Helper()
	a.n++
	id := fmt.Sprint(a.n)
	d, err := a.router.BestWorker(a.t.Context(), router.Request{ID: id, Model: "sim", Prompt: promptOf(a.t, path, body), Pinned: &router.Worker{ID: worker}})
	if err != nil {
		a.t.Fatal(err)
	}
	a.router.Free(id)
	select {
	case o := <-a.v.queue:
		a.v.minute = time.Time{}
		if _, ok := a.v.compare(a.t.Context(), o); !ok {
			a.t.Fatal("the worker does not answer")
		}
		return true, d.TokenReason
	default:
		return false, d.TokenReason
	}
}

const aChat = `{"model":"sim","messages":[{"role":"user","content":"the worker keeps the shared prefix and the router finds it there"}]}`

// Answers of workers without events judge a class of requests as events do: a class is routed by its text after three
// requests with other ids, and no other class is. It has ids again after five equal answers to one request in 20.
func TestAnswersJudgeAClass(t *testing.T) {
	var wrong atomic.Bool
	address, _ := tokenizeServer(t, func(ids []uint32) any {
		if wrong.Load() {
			return append([]uint32{7}, ids...)
		}
		return ids
	})
	a := newAnswering(t, address)
	for range 4 {
		if asked, reason := a.ask(1, "/v1/chat/completions", aChat); !asked || reason != "" {
			t.Fatalf("asked %v, reason %q", asked, reason)
		}
	}
	wrong.Store(true)
	for range 3 {
		a.ask(1, "/v1/chat/completions", aChat)
	}
	if _, reason := a.ask(1, "/v1/chat/completions", aChat); reason != tokenizer.Drifted {
		t.Fatalf("reason %q after three other answers", reason)
	}
	if s := a.router.Models()[0]; s.Checks != router.ChecksDrift || s.Classes[0].Position != 0 {
		t.Errorf("%+v", s)
	}
	if _, reason := a.ask(1, "/v1/completions", `{"model":"sim","prompt":"the worker keeps the shared prefix and the router finds it there"}`); reason != "" {
		t.Errorf("another class has the reason %q", reason)
	}
	wrong.Store(false)
	asked, requests := 0, 0
	for ; requests < 200; requests++ {
		did, reason := a.ask(1, "/v1/chat/completions", aChat)
		if reason == "" {
			break
		}
		if did {
			asked++
		}
	}
	if asked < 5 || asked > 6 || requests > 120 {
		t.Errorf("%d answers to %d requests", asked, requests)
	}
	want := []string{"0 chat 1", "1 chat 1"}
	if !slices.Equal(a.changes, want) {
		t.Errorf("verdicts %q, want %q", a.changes, want)
	}
}

// A class that comes late is checked as the first one is. Different ids behind the last full block change no verdict.
func TestLateClassesAreChecked(t *testing.T) {
	address, asked := tokenizeServer(t, func(ids []uint32) any { return append(ids, 7) })
	a := newAnswering(t, address)
	for range 100 {
		a.ask(1, "/v1/chat/completions", aChat)
	}
	if n := asked.Load(); n != firstChecks {
		t.Errorf("%d checks, want %d", n, firstChecks)
	}
	for range 100 {
		a.ask(1, "/v1/chat/completions", strings.Replace(aChat, `"messages"`, `"chat_template_kwargs":{"x":1},"messages"`, 1))
	}
	if n := asked.Load(); n != 2*firstChecks {
		t.Errorf("%d checks, want %d", n, 2*firstChecks)
	}
	if s := a.router.Models()[0]; s.Checks != "agreed" || a.changes != nil {
		t.Errorf("%s, %q", s.Checks, a.changes)
	}
}

// A worker that alone makes other ids is named, and is checked until it makes the same ones.
func TestAWorkerThatAloneMakesOtherIDs(t *testing.T) {
	var wrong atomic.Bool
	good, _ := tokenizeServer(t, func(ids []uint32) any { return ids })
	bad, _ := tokenizeServer(t, func(ids []uint32) any {
		if wrong.Load() {
			return ids[1:]
		}
		return ids
	})
	a := newAnswering(t, good, bad)
	for range 4 {
		a.ask(1, "/v1/chat/completions", aChat)
	}
	for range firstChecks {
		a.ask(2, "/v1/chat/completions", aChat)
	}
	wrong.Store(true)
	if asked, _ := a.ask(2, "/v1/chat/completions", aChat); asked {
		t.Fatal("a class that was confirmed is checked again at once")
	}
	a.v.expect(2) // it restarted
	for range restartChecks {
		a.ask(2, "/v1/chat/completions", aChat)
	}
	wrong.Store(false)
	for range 20 {
		if _, reason := a.ask(2, "/v1/chat/completions", aChat); reason != "" {
			t.Fatalf("reason %q", reason)
		}
	}
	if want := []string{"3 chat 2", "4 chat 2"}; !slices.Equal(a.changes, want) {
		t.Errorf("verdicts %q, want %q", a.changes, want)
	}
}

// The first requests to a new worker are checked, and those to one that answers probes again, though the class has been
// checked at other workers.
func TestNewAndRestartedWorkersAreChecked(t *testing.T) {
	var wrong atomic.Bool
	right := func(ids []uint32) any { return ids }
	good, _ := tokenizeServer(t, right)
	other, asked := tokenizeServer(t, func(ids []uint32) any {
		if wrong.Load() {
			return ids[1:]
		}
		return ids
	})
	a := newAnswering(t, good, other)
	s := &server{verifier: a.v, faults: newWorkerFaults(a.router.SetFaults, slog.New(slog.DiscardHandler))}
	many := func(worker uint64) {
		for range 20 {
			a.ask(worker, "/v1/chat/completions", aChat)
		}
	}
	many(1)
	if many(2); asked.Load() != 0 {
		t.Fatalf("%d checks of a worker that is not new", asked.Load())
	}
	if s.faults.add(2) {
		s.verifier.expect(2)
	}
	if many(2); asked.Load() != restartChecks {
		t.Errorf("%d checks of a new worker, want %d", asked.Load(), restartChecks)
	}
	s.verifier.probed(2, true)
	if many(2); asked.Load() != restartChecks {
		t.Errorf("%d checks of a worker that goes on", asked.Load())
	}
	wrong.Store(true)
	s.verifier.probed(2, false)
	s.verifier.probed(2, true)
	for range restartChecks {
		a.ask(2, "/v1/chat/completions", aChat)
	}
	if want := []string{"3 chat 2"}; !slices.Equal(a.changes, want) {
		t.Errorf("verdicts %q, want %q", a.changes, want)
	}
}

// The fault of a worker that alone makes other ids has all classes that it is named for. It ends when the worker is no
// longer named for any, and when the model's files are read again.
func TestTheFaultOfAWorkerHasAllClasses(t *testing.T) {
	const completion = `{"model":"sim","prompt":"the worker keeps the shared prefix and the router finds it there"}`
	good, _ := tokenizeServer(t, func(ids []uint32) any { return ids })
	bad, _ := tokenizeServer(t, func(ids []uint32) any { return ids[1:] })
	a := newAnswering(t, good, bad)
	s := &server{log: slog.New(slog.DiscardHandler), router: a.router, faults: newWorkerFaults(a.router.SetFaults, slog.New(slog.DiscardHandler))}
	s.faults.add(2)
	a.judged = s.judged
	name := func(path, body string) {
		for range 4 {
			a.ask(1, path, body)
			a.ask(2, path, body)
		}
	}
	fault := func() string {
		for _, w := range a.router.Workers() {
			for _, f := range w.Faults {
				return f.Text
			}
		}
		return ""
	}
	name("/v1/chat/completions", aChat)
	name("/v1/completions", completion)
	if f := fault(); !strings.Contains(f, "the class chat of model sim, the class completions of model sim") {
		t.Fatalf("fault %q, changes %q", f, a.changes)
	}
	// The worker recovers for one class.
	mends, _ := tokenizeServer(t, func(ids []uint32) any { return ids })
	if err := a.router.SetWorker(router.WorkerInfo{ID: 2, Address: mends, Models: []string{"sim"}, BlockSize: 4, NoEvents: true}); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		a.ask(2, "/v1/chat/completions", aChat)
	}
	if f := fault(); strings.Contains(f, "class chat") || !strings.Contains(f, "class completions") {
		t.Errorf("fault %q, changes %q", f, a.changes)
	}
	a.router.SetCards([]router.Card{*simCard(t)})
	s.renameTokens()
	if f := fault(); f != "" {
		t.Errorf("fault %q after the files were read again", f)
	}
}

// Answers about a model whose files were read again, or of a worker that left, do not count.
func TestOldAnswersDoNotCount(t *testing.T) {
	address, _ := tokenizeServer(t, func(ids []uint32) any { return ids })
	a := newAnswering(t, address)
	var o router.Observation
	for range 5 {
		a.n++
		if _, err := a.router.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(a.n), Model: "sim", Prompt: promptOf(t, "/v1/chat/completions", aChat)}); err != nil {
			t.Fatal(err)
		}
		o = <-a.v.queue
		old := o
		old.Card = simCard(t)
		a.router.Answered(&old, nil)
		old = o
		old.Worker.ID = 9
		a.router.Answered(&old, nil)
	}
	if s := a.router.Models()[0]; s.Checks != "unchecked" {
		t.Errorf("%+v", s)
	}
	if a.router.Answered(&o, o.IDs); a.router.Models()[0].Checks != "agreed" {
		t.Errorf("%+v", a.router.Models()[0])
	}
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
