// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
)

//go:embed clients.py
var pythonClients string

//go:embed client.mjs
var javaScriptClient string

// client is a program that sends a server all kinds of requests, and prints a JSON
// object with the outcome of each.
type client struct {
	name string
	run  func(ctx context.Context, e *env, url string) map[string]json.RawMessage
}

func allClients() []client {
	return []client{
		{"openai for Python", python("openai")},
		{"openai for Python, asynchronous", python("openai-async")},
		{"litellm", python("litellm")},
		{"openai for JavaScript", javaScript},
		{"curl with HTTP/2", curls},
	}
}

// clientChecks send requests through Envoy with clients that know nothing of kvroute, and
// directly to a simulated engine, and compare the outcomes.
func clientChecks() (all []check) {
	for _, c := range allClients() {
		all = append(all, check{c.name + ", simulated engines", 4 * time.Minute, func(ctx context.Context, e *env, res *result) {
			e.compareClient(ctx, res, c, e.simulated(ctx), e.sims)
		}})
	}
	return all
}

// realClients are the same checks with real engines.
func realClients() (all []check) {
	for _, c := range allClients() {
		all = append(all, check{"client " + c.name, engineStart + time.Minute, func(ctx context.Context, e *env, res *result) {
			if e.clients == "" {
				bench.NoError(errors.New("--clients is not given"))
			}
			f := e.fleet(ctx)
			e.compareClient(ctx, res, c, f.config("{transport: zmq}"), f.addresses())
		}})
	}
	return all
}

// simulated starts two simulated engines, which end with the group, and returns kvroute's
// configuration for them.
func (e *env) simulated(ctx context.Context) string {
	if e.sims == nil {
		for _, name := range []string{"sim-a", "sim-b"} {
			p := e.startKvroute(ctx, name, "engine", "--name", name, "--model", modelName, "--listen", "127.0.0.1:0", "--nats-url", "", "--kv-events", "zmq")
			e.atGroupEnd(p.Stop)
			e.sims = append(e.sims, p.At.HTTP)
		}
		e.atGroupEnd(func() { e.sims = nil })
	}
	var config strings.Builder
	config.WriteString("version: 1\nworkers:\n")
	for i, address := range e.sims {
		fmt.Fprintf(&config, "- {name: sim-%c, address: %q, models: [%s], model_card: kvroute-sim, events: {transport: zmq}}\n", 'a'+i, address, modelName)
	}
	return config.String()
}

// refusals are the scenarios that are errors.
//
//nolint:gochecknoglobals // a constant list
var refusals = []string{"unknown model", "no messages"}

// compareClient sends the requests to the first engine, then through Envoy.
func (e *env) compareClient(ctx context.Context, res *result, c client, config string, engines []string) {
	res.what = "the client's view of responses, directly and through Envoy"
	s := e.startStack(ctx, "clients", config, engines)
	s.waitWorkers(ctx, len(engines))
	s.waitRouted(ctx)
	want := c.run(ctx, e, "http://"+engines[0])
	// Two equal failures would be no success.
	for name, value := range want {
		if bytes.Contains(value, []byte("Error")) && !slices.Contains(refusals, name) {
			bench.NoError(fmt.Errorf("directly: %s: %s", name, value))
		}
	}
	got := c.run(ctx, e, s.envoy.URL())
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if res.cases++; !bytes.Equal(want[name], got[name]) {
			res.differ("%s: directly %.300s, through Envoy %.300s", name, want[name], got[name])
		}
	}
	if len(got) != len(want) {
		res.differ("%d answers directly, %d through Envoy", len(want), len(got))
	}
	// No slot is left of requests that their clients gave up.
	res.try(ctx, "in the end", func() {
		await(ctx, nil, 10*time.Second, "all slots are free", func(ctx context.Context) (taken string) {
			for _, w := range s.states(ctx) {
				if w.ActiveRequests > 0 || w.PendTokens > 0 || w.ActiveBlocks > 0 {
					taken += w.Name + " "
				}
			}
			return taken
		})
	})
	var routed uint64
	for _, w := range s.states(ctx) {
		routed += w.Routed
	}
	if routed < uint64(len(want)/2) {
		res.differ("kvroute has decided %d requests only", routed)
	}
	res.note("scenarios %s; %d requests routed", strings.Join(slices.Sorted(maps.Keys(want)), "; "), routed)
}

// output runs a program and reads the JSON object that it prints last.
func output(cmd *exec.Cmd) (out map[string]json.RawMessage) {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	// Clients obey proxies of the environment.
	cmd.Env = append(os.Environ(), "NO_PROXY=127.0.0.1", "no_proxy=127.0.0.1")
	text, err := cmd.Output()
	if err != nil {
		log := stderr.String()
		bench.NoError(fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Path), err, log[max(0, len(log)-2000):]))
	}
	lines := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
	bench.NoError(json.Unmarshal(lines[len(lines)-1], &out))
	return out
}

func python(kind string) func(context.Context, *env, string) map[string]json.RawMessage {
	return func(ctx context.Context, e *env, url string) map[string]json.RawMessage {
		cmd := exec.CommandContext(ctx, filepath.Join(e.clients, "py/bin/python"), "-", kind, url+"/v1", modelName)
		cmd.Stdin = strings.NewReader(pythonClients)
		return output(cmd)
	}
}

func javaScript(ctx context.Context, e *env, url string) map[string]json.RawMessage {
	cmd := exec.CommandContext(ctx, "node", "--input-type=module", "-", url+"/v1", modelName)
	cmd.Dir = filepath.Join(e.clients, "js") // has the client's packages
	cmd.Stdin = strings.NewReader(javaScriptClient)
	return output(cmd)
}

// curls sends requests with curl: HTTP/1.1 with the offer of HTTP/2, and HTTP/2 from the
// start. An engine has HTTP/1.1 only, so all requests to it use that.
func curls(ctx context.Context, e *env, url string) map[string]json.RawMessage {
	direct := slices.Contains(e.sims, strings.TrimPrefix(url, "http://")) || e.vllms != nil && slices.Contains(e.vllms.addresses(), strings.TrimPrefix(url, "http://"))
	out := make(map[string]json.RawMessage)
	for _, version := range []string{"--http1.1", "--http2", "--http2-prior-knowledge"} {
		flag := version
		if direct {
			flag = "--http1.1"
		}
		for name, q := range map[string]string{
			"chat":   chat(words(8000, 100), map[string]any{"seed": 1}),
			"stream": chat(words(8000, 100), map[string]any{"seed": 1, "stream": true, "max_tokens": 4}),
			"wrong":  chat("a", map[string]any{"model": "nobody's"}),
		} {
			text := string(bench.Must(exec.CommandContext(ctx, "curl", "-sS", "-N", "--noproxy", "*", flag, "-w", "\n%{http_code} %{content_type} %{http_version}", "-H", "Content-Type: application/json", "-d", q, url+chatPath).Output()))
			at := strings.LastIndex(text, "\n")
			status := strings.Fields(text[at:])
			if got := status[len(status)-1]; version == "--http2-prior-knowledge" && !direct && got != "2" {
				bench.NoError(fmt.Errorf("curl %s: HTTP %s", flag, got))
			}
			value := []any{status[0], status[1], settledBody(text[:at])}
			if name == "wrong" {
				value = value[:2] // kvroute and the engine have different texts
			}
			out[name+" "+version] = bench.Must(json.Marshal(value))
		}
	}
	return out
}

// settledBody is a body without the fields that differ in each answer: ids, times, and
// cached tokens.
func settledBody(text string) any {
	var out []any
	for line := range strings.SplitSeq(text, "\n") {
		line = strings.TrimPrefix(strings.TrimSpace(line), "data: ")
		var v map[string]any
		switch {
		case line == "":
		case json.Unmarshal([]byte(line), &v) != nil:
			out = append(out, line)
		default:
			for _, key := range []string{"id", "created", "usage", "system_fingerprint"} {
				delete(v, key)
			}
			out = append(out, v)
		}
	}
	return out
}
