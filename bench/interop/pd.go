// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/router"
)

// pairChecks compare with two real vLLM engines that share the work on each request: one computes
// the prompt, the other receives the blocks over NIXL and generates the response.
func pairChecks() []check {
	const start = engineStart + 5*time.Minute
	return []check{
		{"pd: transferred tokens, texts and streams", start, pair(transfers)},
		{"pd: clients that leave", start, pair(leave)},
		{"pd: the prefill engine killed and started again", 2 * start, killedPrefill},
	}
}

// pair plays with the two engines.
func pair(p play) func(context.Context, *env, *result) {
	return func(ctx context.Context, e *env, res *result) {
		if e.vllms == nil {
			e.vllms = e.files()
			e.writeWeights(e.vllms.model)
			e.atGroupEnd(func() { e.vllms = nil })
			for _, role := range []router.Role{router.Prefill, router.Decode} {
				e.atGroupEnd(e.launch(e.vllms, string(role), 1, role).stop)
			}
		}
		f := e.fleet(ctx)
		for _, v := range f.engines {
			v.empty(ctx) // the first step takes long
		}
		e.play(ctx, res, "pd", f.config("{transport: zmq}"), []string{noGuesses, "--prefill-timeout", "55s"}, p)
	}
}

//go:embed weights.py
var weightsScript string

// writeWeights adds weights to the folder of the model.
func (e *env) writeWeights(model string) {
	if _, err := os.Stat(filepath.Join(model, "model.safetensors")); err != nil {
		e.runPython(weightsScript, model)
	}
}

// transfers sends requests of all kinds. The decode engine must receive each prompt except what it
// had cached, compute none of it, and generate the text that the prefill engine generates for the
// same request without kvroute.
func transfers(ctx context.Context, w *world, res *result) {
	res.what = "tokens, texts and indexes of split requests with the engines' own"
	prefill, decode := w.engines[0], w.engines[1]
	texts := make(map[string]bool)
	received := 0
	for _, one := range pairRequests() {
		before := decode.prompts(ctx)
		a := w.ask(ctx, res, one.what, one.path, one.body)
		after := decode.prompts(ctx)
		whole := ask(ctx, "http://"+prefill.address+one.path, one.body, nil).read()
		w.expect(prefill.rank(0), whole.Usage.stored(w.block))
		transferred, computed := after[externalTokens]-before[externalTokens], after[computedTokens]-before[computedTokens]
		if want := a.Usage.Prompt - a.Usage.Details.Cached; transferred != want || computed != 0 {
			res.differ("%s: of %d tokens %d were cached, %d transferred and %d computed", one.what, a.Usage.Prompt, a.Usage.Details.Cached, transferred, computed)
		}
		if a.text() != whole.text() || a.text() == "" {
			res.differ("%s: the text is %q, without a split %q", one.what, a.text(), whole.text())
		}
		texts[a.text()], received = true, received+transferred
	}
	if len(texts) < 6 {
		res.differ("%d different texts only: equal texts prove nothing", len(texts))
	}
	res.note("%d tokens transferred, %d different texts", received, len(texts))
}

type pairRequest struct{ what, path, body string }

func pairRequests() (all []pairRequest) {
	limit := map[string]any{"max_tokens": 12}
	stream := map[string]any{"stream": true, "stream_options": map[string]any{"include_usage": true}, "max_tokens": 12}
	for i := range 4 {
		text := words(uint64(14_000+i), 60+150*i)
		ids := make([]int, blockSize*(i+1)) // whole blocks
		for k := range ids {
			ids[k] = 100 + (7*k+i)%400
		}
		more := []any{message("user", text), message("assistant", "Yes."), message("user", "Why?")}
		all = append(all, []pairRequest{
			{fmt.Sprint("chat ", i), chatPath, chat(text, limit)},
			{fmt.Sprint("the same chat, streamed ", i), chatPath, chat(text, stream)},
			{fmt.Sprint("a longer chat ", i), chatPath, body(map[string]any{"messages": more}, stream)},
			{fmt.Sprint("text ", i), completionPath, body(map[string]any{"prompt": text}, limit)},
			{fmt.Sprint("ids ", i), completionPath, body(map[string]any{"prompt": ids}, limit)},
			{fmt.Sprint("a short prompt ", i), completionPath, body(map[string]any{"prompt": ids[:10]}, stream)},
		}...)
	}
	return all
}

// leave has clients leave while their prompts are computed, while they receive a stream, and at any
// time. Then no slot may be taken, and the engines must have freed all blocks.
func leave(ctx context.Context, w *world, res *result) {
	res.what = "slots and engines without work, after clients have left"
	prefill := w.engines[0]
	long := func(i int) string {
		return chat(words(uint64(15_000+i), 1500), map[string]any{"stream": true, "max_tokens": 1000, "ignore_eos": true})
	}
	idle := func(when string) {
		res.try(ctx, when, func() { w.waitIdle(ctx) })
	}
	// The prefill engine computes nothing while its processes are stopped.
	bench.NoError(syscall.Kill(-prefill.process.Pid(), syscall.SIGSTOP))
	res.try(ctx, "during the leg", func() {
		defer func() { bench.NoError(syscall.Kill(-prefill.process.Pid(), syscall.SIGCONT)) }()
		client, left := context.WithCancel(ctx)
		var ended sync.WaitGroup
		ended.Go(func() { w.listen(client, long(0), nil) })
		await(ctx, nil, process.Patience, "the leg runs", func(ctx context.Context) string {
			return missingUnless(w.active(ctx) == 2, "%d slots are taken", w.active(ctx))
		})
		left()
		ended.Wait()
		await(ctx, nil, process.Patience, "the slots are free", func(ctx context.Context) string {
			return missingUnless(w.active(ctx) == 0, "%d slots are taken", w.active(ctx))
		})
	})
	idle("after the leg")
	client, left := context.WithCancel(ctx)
	defer left()
	chunks := w.listen(client, long(1), left)
	res.cases++
	if chunks == 0 || chunks > 900 {
		res.differ("the client received %d chunks before it left", chunks)
	}
	idle("after the stream")
	var clients sync.WaitGroup
	r := rand.New(rand.NewPCG(16, 16))
	for i := range 16 {
		limit := time.Duration(r.Int64N(int64(4 * time.Second)))
		clients.Go(func() {
			client, left := context.WithTimeout(ctx, limit)
			defer left()
			w.listen(client, long(2+i), nil)
		})
	}
	clients.Wait()
	idle("after 16 clients")
	w.settle(ctx)
	w.ask(ctx, res, "in the end", chatPath, chat(words(15_900, 100), nil))
}

// listen sends a request, and returns how many chunks of the stream arrived. first, if not nil, is
// called after the first.
func (w *world) listen(ctx context.Context, text string, first func()) (chunks int) {
	req := bench.Must(http.NewRequestWithContext(ctx, http.MethodPost, w.envoy.URL()+chatPath, strings.NewReader(text)))
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0 // the client has left
	}
	defer func() { _ = resp.Body.Close() }()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if !strings.HasPrefix(lines.Text(), "data: ") {
			continue
		}
		if chunks++; chunks == 1 && first != nil {
			first()
		}
	}
	return chunks
}

// waitIdle waits until kvroute has no slot taken, no engine has a request, and each has freed all
// blocks. A prefill engine keeps blocks that nobody fetches for half a minute.
func (w *world) waitIdle(ctx context.Context) {
	await(ctx, w.router.Process, process.Patience, "nothing runs", func(ctx context.Context) string {
		for _, v := range w.engines {
			if n := v.metric(ctx, "vllm:num_requests_running") + v.metric(ctx, "vllm:num_requests_waiting"); n > 0 {
				return fmt.Sprintf("%s has %v requests", v.name, n)
			}
		}
		return missingUnless(w.active(ctx) == 0, "%d slots are taken", w.active(ctx))
	})
	for _, v := range w.engines {
		v.empty(ctx) // which an engine does only if no request has a block
	}
}

// active is the number of slots that are taken.
func (w *world) active(ctx context.Context) (n int) {
	for _, s := range w.states(ctx) {
		n += s.ActiveRequests
	}
	return n
}

// killedPrefill kills the prefill engine under load. Each request must have a response with the
// right text. Once the engine serves again, it must compute prompts again.
func killedPrefill(ctx context.Context, e *env, res *result) {
	pair(func(ctx context.Context, w *world, res *result) {
		res.what = "responses while the prefill engine is killed, and transfers after it serves again"
		prefill, decode := w.engines[0], w.engines[1]
		texts := make([]string, 30)
		for i := range texts {
			texts[i] = chat(words(uint64(17_000+i), 100+20*(i%5)), map[string]any{"max_tokens": 4})
		}
		killUnderLoad(ctx, w, res, texts)
		e.begin(prefill)
		prefill.ready(ctx)
		w.waitWorkers(ctx, len(w.engines))
		for _, v := range w.engines {
			v.empty(ctx)
		}
		w.settle(ctx)
		r := rand.New(rand.NewPCG(18, 18))
		await(ctx, prefill.process, process.Patience, "the prefill engine is used again", func(ctx context.Context) string {
			before := decode.prompts(ctx)
			w.ask(ctx, res, "after", chatPath, chat(words(r.Uint64(), 100), nil))
			return missingUnless(decode.prompts(ctx)[externalTokens] > before[externalTokens], "no tokens were transferred")
		})
		w.askAll(ctx, res, "after", texts[:6])
	})(ctx, e, res)
}

// killUnderLoad kills the prefill engine while three clients send requests, and compares the texts
// with those that the decode engine generates alone.
func killUnderLoad(ctx context.Context, w *world, res *result, texts []string) {
	prefill, decode := w.engines[0], w.engines[1]
	want, got := make([]string, len(texts)), make([]string, len(texts))
	for i, text := range texts {
		a := ask(ctx, "http://"+decode.address+chatPath, text, nil).read()
		want[i] = a.text()
	}
	decode.empty(ctx)
	before := decode.prompts(ctx)
	next, answered := make(chan int), make(chan struct{}, len(texts))
	var clients sync.WaitGroup
	for range 3 {
		clients.Go(func() {
			for i := range next {
				err := bench.Try(func() {
					a := ask(ctx, w.envoy.URL()+chatPath, texts[i], nil).read()
					got[i] = a.text()
				})
				if err != nil {
					got[i] = err.Error()
				}
				answered <- struct{}{}
			}
		})
	}
	for i := range texts {
		if i == len(texts)/3 {
			for range i - 3 { // their blocks have been transferred
				<-answered
			}
			prefill.stopListening()
			prefill.process.Kill()
		}
		next <- i
	}
	close(next)
	clients.Wait()
	for i := range texts {
		if res.cases++; got[i] != want[i] {
			res.differ("request %d: %q, want %q", i, got[i], want[i])
		}
	}
	after := decode.prompts(ctx)
	transferred, computed := after[externalTokens]-before[externalTokens], after[computedTokens]-before[computedTokens]
	if res.cases++; transferred == 0 || computed == 0 {
		res.differ("%d tokens were transferred before the engine was killed, %d computed after it", transferred, computed)
	}
	res.note("%d tokens transferred before the kill, %d computed after it", transferred, computed)
}

// The sources of prompt tokens in vLLM's metrics.
const (
	externalTokens = "external_kv_transfer"
	computedTokens = "local_compute"
)

// prompts reads from the engine's metrics how many prompt tokens it has had, by source.
func (v *vllmEngine) prompts(ctx context.Context) map[string]int {
	all := make(map[string]int)
	for _, source := range []string{externalTokens, computedTokens} {
		all[source] = int(v.metric(ctx, "vllm:prompt_tokens_by_source_total", `source="`+source+`"`))
	}
	return all
}

// metric reads one of the engine's metrics: the first with the name and all the labels.
func (v *vllmEngine) metric(ctx context.Context, name string, labels ...string) float64 {
	for line := range strings.Lines(string(bench.Must(process.Get(ctx, "http://"+v.address+"/metrics")))) {
		rest, ok := strings.CutPrefix(line, name+"{")
		if !ok || slices.ContainsFunc(labels, func(l string) bool { return !strings.Contains(rest, l) }) {
			continue
		}
		_, value, _ := strings.Cut(strings.TrimSpace(rest), "} ")
		return bench.Must(strconv.ParseFloat(value, 64))
	}
	bench.NoError(errors.New(v.name + " has no metric " + name))
	return 0
}

// transferConfig is the engine's configuration for NIXL, and the environment that it needs. If the
// other engine is gone, a decode engine computes the prompt itself.
func transferConfig() (config string, environment []string) {
	config = string(bench.Must(json.Marshal(map[string]any{
		"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu", "kv_load_failure_policy": "recompute",
	})))
	port := fmt.Sprint("VLLM_NIXL_SIDE_CHANNEL_PORT=", bench.Must(process.FreePorts(1)))
	return config, []string{"VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1", port, "UCX_NET_DEVICES=lo"}
}
