// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// modelFolder is a folder with a model's files.
func modelFolder(t testing.TB) string {
	t.Helper()
	dir := t.TempDir() + "/model"
	if err := os.CopyFS(dir, enginesim.ModelFiles()); err != nil {
		t.Fatal(err)
	}
	return dir
}

// answered holds the fields of an engine's answer that the tests check.
type answered struct {
	PromptTokenIDs []uint32 `json:"prompt_token_ids"`
	Usage          struct {
		Prompt  int `json:"prompt_tokens"`
		Input   int `json:"input_tokens"`
		Details struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

// Links in a folder of Hugging Face's cache lead out of the folder.
func TestAModelFolderMayHaveLinks(t *testing.T) {
	files, folder := modelFolder(t), t.TempDir()
	entries, err := os.ReadDir(files)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if err := os.Symlink(filepath.Join(files, e.Name()), filepath.Join(folder, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	file := writeFile(t, fmt.Sprintf("version: 1\nmodels:\n- {name: m, tokenizer: %q, chat-template: %q}\n", folder, folder+"/chat_template.jinja"))
	c, _, err := readConfig("test", []string{"--config", file}, nil)
	if err != nil {
		t.Fatal(err)
	}
	cards, err := c.loadCards(nil, slog.New(slog.DiscardHandler))
	if err != nil || cards[0].Prompts == nil || cards[0].Why != "" {
		t.Errorf("%+v, %v", cards, err)
	}
}

// addEngine starts one more worker of a stack.
func addEngine(t *testing.T, d *demonstration, name string, args ...string) {
	t.Helper()
	e, err := demo.Start(t.Context(), d.Dir, name, append([]string{"engine", "--name", name, "--listen", "127.0.0.1:0", "--nats-url", d.Bus.URL()}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	d.Engines = append(d.Engines, e)
	d.Workers++
	if err := d.WaitWorkers(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// lastDecision is the newest decision that the router keeps.
func lastDecision(t *testing.T, d *demonstration) router.Decision {
	t.Helper()
	var list struct{ Decisions []router.Decision }
	if err := process.GetJSON(t.Context(), "http://"+d.Router.At.HTTP+"/v1/decisions?limit=1", &list); err != nil || len(list.Decisions) != 1 {
		t.Fatalf("decisions %+v, %v", list, err)
	}
	return list.Decisions[0]
}

// reload writes the configuration file, and waits until the router has read it.
func (d *demonstration) reload(t *testing.T, file, text string) {
	t.Helper()
	count := func() int {
		log, err := os.ReadFile(d.Router.Log)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(log), "msg=reloaded")
	}
	before := count()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.Router.Cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the configuration is not reloaded", func() bool { return count() > before })
}

// One kvroute serves several models, each under all its names. A reload while requests are in flight
// fails none of them.
func TestModelsAreReloadedUnderLoad(t *testing.T) {
	t.Parallel() // mostly waits
	dir := modelFolder(t)
	with := func(alias string) string {
		return fmt.Sprintf("version: 1\nmodels:\n- {name: base, aliases: [%s], lora: [base-lora], tokenizer: %q}\n", alias, dir)
	}
	file := writeFile(t, with("latest"))
	d := startStack(t, 1, []string{"--speed", "20"}, "--config", file)
	addEngine(t, d, "base-1", "--model", "base", "--alias", "latest,newest", "--lora", "base-lora", "--tokenizer", dir, "--speed", "20")
	addEngine(t, d, "base-2", "--model", "base", "--alias", "latest,newest", "--lora", "base-lora", "--tokenizer", dir, "--speed", "20")

	body := func(model, content string) string {
		return strings.Replace(chatBody(content, 2, false), `"sim"`, `"`+model+`"`, 1)
	}
	// Names of one model share its cache; adapters and other models do not.
	content := strings.Repeat("names of one model share what is cached ", 10)
	for _, c := range []struct {
		model, pool string
		cached      bool
	}{{"base", "base", false}, {"latest", "base", true}, {"base-lora", "base", false}, {"base-lora", "base", true}, {"base", "base", true}, {"sim", "sim", false}, {"sim", "sim", true}} {
		resp, text := reply(t, d, "POST", chatPath, body(c.model, content), nil)
		var response answered
		if err := json.Unmarshal([]byte(text), &response); err != nil || resp.StatusCode != 200 {
			t.Fatalf("%s: status %d, %s, %v", c.model, resp.StatusCode, text, err)
		}
		last := lastDecision(t, d)
		if (response.Usage.Details.Cached > 0) != c.cached || (last.OverlapBlocks > 0) != c.cached || last.TokenMode != tokenizer.Exact || last.Model != c.pool {
			t.Errorf("%s: %d tokens cached, decision %+v, want cached %v", c.model, response.Usage.Details.Cached, last, c.cached)
		}
		settle(t, d)
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var load sync.WaitGroup
	var done atomic.Int64
	for i := range 8 {
		load.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				model := []string{"base", "latest", "base-lora", "sim"}[(i+n)%4]
				resp, err := send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, body(model, fmt.Sprintf("%d of %d: %s", n, i, content)), nil)
				if err != nil {
					t.Error(err)
					return
				}
				text, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close() // it was read
				if err != nil || resp.StatusCode != http.StatusOK || resp.Header.Get("X-Dynamo-Reason") == "" {
					t.Errorf("%s: status %d, reason %q, %s, %v", model, resp.StatusCode, resp.Header.Get("X-Dynamo-Reason"), text, err)
				}
				done.Add(1)
			}
		})
	}
	for i := range 10 {
		before := done.Load()
		// The workers register the alias "latest" themselves.
		d.reload(t, file, with([]string{"of-the-file", "other"}[i%2]))
		eventually(t, "no request ends", func() bool { return done.Load() >= before+10 })
	}
	cancel()
	load.Wait()
	t.Logf("%d requests during 10 reloads", done.Load())
	for _, name := range []string{"streams_failed", "failure_mode_allowed", "message_timeouts"} {
		if n, err := d.Envoy.Stat(t.Context(), "http.llm.ext_proc.kvroute."+name); err != nil || n != 0 {
			t.Errorf("Envoy counts %s %d, %v", name, n, err)
		}
	}
	if n, err := d.Envoy.Stat(t.Context(), "cluster.pool.upstream_rq_total"); err != nil || n != 0 {
		t.Errorf("%d requests went to the pool, %v", n, err)
	}
	// A name that only the file has comes and goes with it, and a mistake in the file changes
	// nothing.
	statusFor := func(model string) int {
		resp, _ := reply(t, d, "POST", chatPath, body(model, "a"), nil)
		return resp.StatusCode
	}
	d.reload(t, file, with("newest-of-all"))
	if got := statusFor("other"); got != http.StatusNotFound {
		t.Errorf("a name that is gone: status %d", got)
	}
	if err := os.WriteFile(file, []byte("version: 1\nmodels:\n- {name: base, tokenizer: /nowhere}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.Router.Cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the mistake is not told", func() bool { return strings.Contains(d.Router.LastLines(), "not reloaded") })
	if got := statusFor("base"); got != http.StatusOK || lastDecision(t, d).TokenMode != tokenizer.Exact {
		t.Errorf("after a mistake: status %d, %+v", got, lastDecision(t, d))
	}
	_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
	for _, want := range []string{`kvroute_config_reloads_total{outcome="done"} 11`, `kvroute_config_reloads_total{outcome="refused"} 1`} {
		if !strings.Contains(text, want) {
			t.Errorf("the metrics do not say %s", want)
		}
	}
	// A new template is used by the next request.
	template := writeFile(t, "{% for m in messages %}{{ m.content }}{% endfor %}")
	long := lastDecision(t, d).PromptTokens
	d.reload(t, file, strings.Replace(with("latest"), "tokenizer:", fmt.Sprintf("chat-template: %q, tokenizer:", template), 1))
	if got := statusFor("base"); got != http.StatusOK || lastDecision(t, d).PromptTokens >= long {
		t.Errorf("with a shorter template: status %d, %d tokens, want fewer than %d", got, lastDecision(t, d).PromptTokens, long)
	}
	eventually(t, "slots are left", func() bool { requests, _, _ := inFlight(t, d); return requests == 0 })
}

// The prompts of a worker that names a model card are tokenized by that card, whatever name the
// worker serves. A worker whose card is missing is routed in text-block mode.
func TestAWorkerNamesItsModelCard(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	dir := modelFolder(t)
	file := writeFile(t, fmt.Sprintf(`version: 1
models:
- {name: known, tokenizer: %q}
workers:
- {name: a, address: "127.0.0.1:1", models: [first], model_card: known}
- {name: another, address: "127.0.0.1:3", models: [first], model_card: zebra}
- {name: b, address: "127.0.0.1:2", models: [second], model_card: unknown}
`, dir))
	c := serveFile(t, file)
	d := &demonstration{demo.Stack{Router: c}}
	// A worker that registers on the bus names its card there.
	e, err := demo.Start(t.Context(), t.TempDir(), "engine", "engine", "--name", "c", "--model", "third", "--listen", "127.0.0.1:0", "--nats-url", c.At.NATS)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Stop()
	eventually(t, "the worker does not register", func() bool { return len(workers(t, d)) == 4 })
	if log := c.LastLines(); strings.Count(log, "name several model_cards") != 1 || !strings.Contains(log, `model=first model_cards="known, zebra"`) {
		t.Errorf("the log does not warn of two model_cards of one model:\n%s", log)
	}
	link := envoytest.Dial(t, c.At.Extproc)
	for model, want := range map[string]tokenizer.Mode{"first": tokenizer.Exact, "second": tokenizer.Bytes, "third": tokenizer.Exact} {
		x := link.Do(envoytest.Request{Path: chatPath, Body: []byte(strings.Replace(chatBody("hello", 2, false), `"sim"`, `"`+model+`"`, 1))})
		if x.Header["x-dynamo-worker"] == "" {
			t.Errorf("%s: refusal %+v", model, x.Refusal)
		}
		x.End()
		if got := lastDecision(t, d); got.Model != model || got.TokenMode != want {
			t.Errorf("%s: %+v, want mode %s", model, got, want)
		}
	}
}

// The API and a gauge report the mode of each model; for a mode that is not exact, the log does too.
func TestEachModelTellsItsMode(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	dir := t.TempDir()
	put := func(name, text string) string {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(dir+"/"+name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(dir+"/"+name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return filepath.Dir(dir + "/" + name)
	}
	exact := modelFolder(t)
	unigram := put("unigram/tokenizer.json", `{"model":{"type":"Unigram","vocab":[["a",0]]}}`)
	pieces := put("pieces/tokenizer.json", `{"model":{"type":"WordPiece","vocab":{"a":0}}}`)
	bare := put("bare/tokenizer.json", `{"model":{"vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}}`)
	template := writeFile(t, "{% autoescape true %}{% endautoescape %}")
	file := writeFile(t, fmt.Sprintf(`version: 1
models:
- {name: exact, aliases: [also], lora: [adapter], tokenizer: %q}
- {name: unigram, tokenizer: %q}
- {name: pieces, tokenizer: %q}
- {name: bare, tokenizer: %q}
- {name: escapes, tokenizer: %q, chat-template: %q}
workers:
- {name: a, address: "127.0.0.1:1", models: [exact], block_size: 16}
- {name: b, address: "127.0.0.1:2", models: [unigram]}
- {name: c, address: "127.0.0.1:3", models: [pieces]}
- {name: d, address: "127.0.0.1:4", models: [bare]}
- {name: e, address: "127.0.0.1:5", models: [nobodys]}
- {name: f, address: "127.0.0.1:6", models: [exact], block_size: 32}
- {name: g, address: "127.0.0.1:7", models: [escapes]}
`, exact, unigram, pieces, bare, exact, template))
	for _, c := range []struct {
		flags []string
		modes map[string][2]string // mode and reason, by model
	}{
		{nil, map[string][2]string{
			"exact": {"exact", ""}, "unigram": {"bytes", "no_tokenizer"}, "pieces": {"bytes", "no_tokenizer"}, "bare": {"bytes", "no_renderer"}, "nobodys": {"bytes", "no_tokenizer"}, "escapes": {"bytes", "unsupported"},
		}},
		{[]string{"--router-mode", "round-robin"}, map[string][2]string{
			"exact": {"none", ""}, "unigram": {"none", ""}, "pieces": {"none", ""}, "bare": {"none", ""}, "nobodys": {"none", ""}, "escapes": {"none", ""},
		}},
	} {
		t.Run(strings.Join(c.flags, " "), func(t *testing.T) {
			r, err := demo.Start(t.Context(), t.TempDir(), "kvroute", append([]string{
				"serve", "--config", file,
				"--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0",
			}, c.flags...)...)
			if err != nil {
				t.Fatal(err)
			}
			defer r.Stop()
			var list struct{ Models []router.ModelState }
			if err := process.GetJSON(t.Context(), "http://"+r.At.HTTP+"/v1/models", &list); err != nil || len(list.Models) != len(c.modes) {
				t.Fatalf("models %+v, %v", list, err)
			}
			_, metrics := get(t, "http://"+r.At.HTTP+"/metrics")
			var fleet struct{ Workers []router.WorkerState }
			if err := process.GetJSON(t.Context(), "http://"+r.At.HTTP+"/v1/workers", &fleet); err != nil {
				t.Fatal(err)
			}
			tokens := map[string]router.TokenState{}
			for _, w := range fleet.Workers {
				tokens[w.Model] = w.TokenState
			}
			for _, m := range list.Models {
				if tokens[m.Model] != m.TokenState {
					t.Errorf("/v1/workers says %+v, /v1/models %+v", tokens[m.Model], m.TokenState)
				}
				want := c.modes[m.Model]
				if string(m.TokenMode) != want[0] || m.TokenReason != want[1] || (m.Why == "") != (want[0] == "exact") || m.Checks != "unchecked" {
					t.Errorf("%+v, want mode %s, reason %q", m, want[0], want[1])
				}
				if gauge := fmt.Sprintf(`kvroute_tokenize_models{mode=%q,model=%q,reason=%q} 1`, want[0], m.Model, want[1]); strings.Count(metrics, gauge) != 1 {
					t.Errorf("the metrics do not say %s", gauge)
				}
				if m.Model == "exact" && (m.Workers != 2 || !slices.Equal(m.BlockSizes, []int{16, 32}) || !slices.Equal(m.Names, []string{"adapter", "also", "exact"})) {
					t.Errorf("%+v", m)
				}
			}
			log, err := os.ReadFile(r.Log)
			if err != nil {
				t.Fatal(err)
			}
			for _, want := range []string{"model=unigram", "Unigram", "model=pieces", "WordPiece", "model=bare", "no chat template", "model=escapes", "the block 'autoescape'"} {
				if !strings.Contains(string(log), want) {
					t.Errorf("the log does not say %q", want)
				}
			}
			if said := strings.Contains(string(log), "model=nobodys workers=e "); said != (len(c.flags) == 0) {
				t.Errorf("the log names the model without a tokenizer: %v", said)
			}
		})
	}
}

// Every kind of request, through Envoy: the router's prediction of cached tokens matches the
// engine's count, and no load stays booked.
func TestEveryKindOfRequestThroughEnvoy(t *testing.T) {
	t.Parallel() // mostly waits
	d := startStack(t, 3, []string{"--speed", "20"})
	words := strings.Repeat("every kind of request is routed ", 12)
	quoted := fmt.Sprintf("%q", words)
	ids := strings.TrimSuffix(strings.Repeat("260,", 100), ",")
	image := `{"type":"image_url","image_url":{"url":"data:image/png;base64,` + strings.Repeat("A", 5000) + `"}}`
	for _, c := range []struct {
		name, path, body string
		mode             tokenizer.Mode
		reason           string
		cached           bool // the second time
	}{
		{"chat", chatPath, `{"model":"sim","max_tokens":2,"messages":[{"role":"user","content":` + quoted + `}]}`, tokenizer.Exact, "", true},
		{"chat, streamed", chatPath, `{"model":"sim","max_tokens":2,"stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"system","content":` + quoted + `},{"role":"user","content":"a"}]}`, tokenizer.Exact, "", true},
		{"completion", "/v1/completions", `{"model":"sim","max_tokens":2,"prompt":` + quoted + `}`, tokenizer.Exact, "", true},
		{"completions", "/v1/completions", `{"model":"sim","max_tokens":2,"prompt":["1 ` + quoted[1:] + `,"b",` + quoted + `]}`, tokenizer.Exact, "", true},
		{"completion of ids", "/v1/completions", `{"model":"sim","max_tokens":2,"prompt":[` + ids + `]}`, tokenizer.Exact, "", true},
		{"completions of ids", "/v1/completions", `{"model":"sim","max_tokens":2,"prompt":[[7,` + ids + `],[1,2]]}`, tokenizer.Exact, "", true},
		{"ids in a chat", chatPath, `{"model":"sim","max_tokens":2,"messages":[{"role":"user","content":"a"}],"kv_transfer_params":{"prompt_token_ids":[8,` + ids + `]}}`, tokenizer.Exact, "", true},
		{"responses", "/v1/responses", `{"model":"sim","max_output_tokens":2,"instructions":"Be brief.","input":` + quoted + `}`, tokenizer.Exact, "", true},
		{"responses of items", "/v1/responses", `{"model":"sim","max_output_tokens":2,"input":[{"role":"user","content":[{"type":"input_text","text":` + quoted + `}]},
			{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"seen"}]}`, tokenizer.Exact, "", true},
		{"messages", "/v1/messages", `{"model":"sim","max_tokens":2,"system":[{"type":"text","text":` + quoted + `}],"messages":[{"role":"user","content":[{"type":"text","text":"look"}]},
			{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":{"a":1}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":"seen"}]}]}`, tokenizer.Exact, "", true},
		{"salted", chatPath, `{"model":"sim","max_tokens":2,"cache_salt":"s","messages":[{"role":"user","content":` + quoted + `}]}`, tokenizer.Exact, "", true},
		{"salted for Dynamo", chatPath, `{"model":"sim","max_tokens":2,"nvext":{"cache_salt":"t"},"messages":[{"role":"user","content":` + quoted + `}]}`, tokenizer.Exact, "", true},
		{"embeddings", "/v1/embeddings", `{"model":"sim","input":` + quoted + `}`, tokenizer.None, "no_prompt", false},
		{"an image", chatPath, `{"model":"sim","max_tokens":2,"messages":[{"role":"system","content":` + quoted + `},{"role":"user","content":[{"type":"text","text":"look"},` + image + `]}]}`, tokenizer.ExactPrefix, tokenizer.Items, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, again := range []bool{false, true} {
				resp, body := reply(t, d, "POST", c.path, c.body, nil)
				if resp.StatusCode != http.StatusOK {
					t.Fatalf("status %d: %s", resp.StatusCode, body)
				}
				last := lastDecision(t, d)
				if last.TokenMode != c.mode || last.TokenReason != c.reason || last.PromptTokens == 0 {
					t.Errorf("decision %+v, want mode %s, reason %q", last, c.mode, c.reason)
				}
				body = strings.ReplaceAll(body, "cache_read_input_tokens", "cached_tokens")
				cached := strings.Contains(body, `"cached_tokens":`) && !strings.Contains(body, `"cached_tokens":0`)
				if again && c.cached && (!cached || last.OverlapBlocks == 0) {
					t.Errorf("the second time: overlap %d, the engine found something: %v", last.OverlapBlocks, cached)
				}
				settle(t, d)
			}
		})
	}
	eventually(t, "slots are left", func() bool {
		requests, pend, blocks := inFlight(t, d)
		return requests+pend+blocks == 0
	})
}

// The first events of a stream of /v1/responses do not count as the first token.
func TestTheFirstTokenOfAResponse(t *testing.T) {
	t.Parallel() // mostly waits
	d := startStack(t, 1, []string{"--num-gpu-blocks", "16384"})
	body := fmt.Sprintf(`{"model":"sim","stream":true,"max_output_tokens":100,"input":%q}`, strings.Repeat("a long prompt ", 14_000))
	resp, err := send(t, t.Context(), "POST", d.Envoy.URL()+"/v1/responses", body, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	read := func(want string) {
		t.Helper()
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(line, want) {
				return
			}
		}
	}
	read("event: response.created")
	// The prompt of 42,000 tokens takes two seconds.
	if _, pend, _ := inFlight(t, d); pend < 40_000 {
		t.Errorf("after the first event %d prefill tokens are pending, want all", pend)
	}
	read("event: response.output_text.delta")
	eventually(t, "the first token is not noticed", func() bool {
		requests, pend, _ := inFlight(t, d)
		return requests == 1 && pend == 0
	})
	read("event: response.completed")
}

// A model whose template differs from its workers' is noticed at its first requests and routed in
// text-block mode; with the right template it is exact again.
func TestAWrongTemplateIsNoticed(t *testing.T) {
	right := modelFolder(t)
	template, err := os.ReadFile(right + "/chat_template.jinja")
	if err != nil {
		t.Fatal(err)
	}
	wrong := writeFile(t, "{{- '<|im_start|>system\nnobody said so<|im_end|>\n' }}"+string(template))
	with := func(more string) string {
		return fmt.Sprintf("version: 1\nmodels:\n- {name: sim, tokenizer: %q%s}\n", right, more)
	}
	file := writeFile(t, with(fmt.Sprintf(", chat-template: %q", wrong)))
	// Events would confirm the ids, or contradict them: see package confirm.
	d := startStack(t, 1, []string{"--speed", "50", "--kv-events", "none"}, "--config", file)
	decide := func() router.Decision {
		resp, body := reply(t, d, "POST", chatPath, chatBody(strings.Repeat("is this right? ", 20), 2, false), nil)
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("status %d: %s", resp.StatusCode, body)
		}
		return lastDecision(t, d)
	}
	eventually(t, "the wrong template is not noticed", func() bool { return decide().TokenReason == tokenizer.Drifted })
	log, err := os.ReadFile(d.Router.Log)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"a worker makes other tokens", "position=", "requests of the class are routed by their text"} {
		if !strings.Contains(string(log), want) {
			t.Errorf("the log does not say %q: %s", want, log)
		}
	}
	if _, text := get(t, "http://"+d.Router.At.HTTP+"/v1/models"); !strings.Contains(text, `"checks":"drift"`) {
		t.Errorf("the models: %s", text)
	}
	if _, text := get(t, "http://"+d.Router.At.HTTP+"/metrics"); !strings.Contains(text, `kvroute_tokenize_checks_total{model="sim",outcome="different"}`) {
		t.Error("differences are not counted")
	}
	d.reload(t, file, with(""))
	for range 4 {
		if got := decide(); got.TokenMode != tokenizer.Exact {
			t.Errorf("with the right template: %+v", got)
		}
	}
	if got := decide(); got.OverlapBlocks == 0 {
		t.Errorf("with the right template no cached blocks are found: %+v", got)
	}
	eventually(t, "equal ids are not counted", func() bool {
		_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
		return strings.Contains(text, `kvroute_tokenize_checks_total{model="sim",outcome="ok"}`)
	})
	eventually(t, "the fault does not end", func() bool { return faultsOf(t, d.Router)["worker-1"] == "" })
}

// Each of these paths is a mistake that users make with files of Hugging Face. The error says what to give instead.
func TestModelFolderMistakes(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		name = filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	write("hub/models--owner--name/snapshots/0123abc/config.json", "{}")
	write("pointer/tokenizer.json", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 11422654\n")
	for name, want := range map[string]string{
		"Qwen/Qwen3-8B":                  "run `hf download Qwen/Qwen3-8B",
		filepath.Join(dir, "hub"):        "models--owner--name/snapshots/<revision>",
		dir + "/hub/models--owner--name": "give " + dir + "/hub/models--owner--name/snapshots/0123abc",
		filepath.Join(dir, "pointer"):    "tokenizer.json is a pointer of Git LFS, not the file: run `git lfs pull`",
		filepath.Join(dir, "nowhere"):    "no such file",
	} {
		_, err := loadCard(modelConfig{Name: "m", Tokenizer: name}, nil, slog.New(slog.DiscardHandler))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v; want %q", name, err, want)
		}
	}
}

// A model whose profile is another engine than that of its workers is logged once, with these workers.
func TestProfilesOfOtherEngines(t *testing.T) {
	for profile, want := range map[string]bool{"": true, "vllm": true, "trtllm": true, "sglang": false} {
		var out bytes.Buffer
		r, err := router.New(router.Config{})
		if err != nil {
			t.Fatal(err)
		}
		for id, name := range []string{"sglang", "SGLang", "", "other"} {
			if err := r.SetWorker(router.WorkerInfo{
				ID: uint64(id), Name: fmt.Sprint("w", id), Address: netip.MustParseAddrPort("127.0.0.1:1"), Models: []string{"m"}, BlockSize: 16, Engine: name,
			}); err != nil {
				t.Fatal(err)
			}
		}
		s := &server{router: r, log: slog.New(slog.NewTextHandler(&out, nil))}
		s.conf.Models = []modelConfig{{Name: "m", Profile: profile}}
		s.warnOfWorkers()
		if logged := strings.Contains(out.String(), `engine=sglang workers="w0, w1" count=2`); logged != want {
			t.Errorf("profile %q: %s", profile, out.String())
		}
	}
}
