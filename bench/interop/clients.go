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

	"github.com/kvroute/kvroute/internal/process"
)

//go:embed clients.py
var pythonClients string

//go:embed client.mjs
var javaScriptClient string

// client is a program that asks a server everything that it can, and prints a JSON
// object with what it made of each answer.
type client struct {
	name string
	run  func(ctx context.Context, e *env, url, model string) (map[string]json.RawMessage, error)
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

// clientChecks ask through Envoy with clients that know nothing of kvroute, and directly
// at an engine: what the clients make of the answers is compared. Engines are simulated;
// behind a real one the same is asked in the group vllm.
func clientChecks() (all []check) {
	for _, c := range allClients() {
		all = append(all, check{c.name + ", simulated engines", 4 * time.Minute, func(ctx context.Context, e *env) (res result, err error) {
			s, engine, model, err := e.simulated(ctx)
			if err != nil {
				return res, err
			}
			defer s.stop()
			return e.compareClient(ctx, c, s, engine, model)
		}})
	}
	return all
}

// realClients are the same checks before real engines.
func realClients() (all []check) {
	for _, c := range allClients() {
		all = append(all, check{"client " + c.name, engineStart + time.Minute, func(ctx context.Context, e *env) (res result, err error) {
			if e.clients == "" {
				return res, errors.New("--clients is not given")
			}
			f, err := e.fleet(ctx)
			if err != nil {
				return res, err
			}
			s, err := e.startStack(ctx, "clients-vllm", f.config(""), f.addresses())
			if err != nil {
				return res, err
			}
			defer s.stop()
			if err := s.waitWorkers(ctx, len(f.engines)); err != nil {
				return res, err
			}
			return e.compareClient(ctx, c, s, f.engines[0].address, modelName)
		}})
	}
	return all
}

// simulated starts two simulated engines, which end with the group, and kvroute and
// Envoy before them.
func (e *env) simulated(ctx context.Context) (s *stack, engine, model string, err error) {
	if e.sims == nil {
		for _, name := range []string{"sim-a", "sim-b"} {
			p, err := process.StartChild(ctx, e.dir, name, e.kvroute, "engine", "--name", name, "--model", modelName, "--listen", "127.0.0.1:0", "--nats-url", "", "--kv-events", "zmq")
			if err != nil {
				return nil, "", "", err
			}
			e.atEnd(p.Stop)
			e.sims = append(e.sims, p.At.HTTP)
		}
		e.atEnd(func() { e.sims = nil })
	}
	var config strings.Builder
	config.WriteString("version: 1\nworkers:\n")
	for i, address := range e.sims {
		fmt.Fprintf(&config, "- {name: sim-%c, address: %q, models: [%s], model_card: kvroute-sim, events: {transport: zmq}}\n", 'a'+i, address, modelName)
	}
	if s, err = e.startStack(ctx, "clients", config.String(), e.sims); err != nil {
		return nil, "", "", err
	}
	if err := s.waitWorkers(ctx, len(e.sims)); err != nil {
		s.stop()
		return nil, "", "", err
	}
	return s, e.sims[0], modelName, nil
}

// refusals are the scenarios that are errors.
//
//nolint:gochecknoglobals // a constant list
var refusals = []string{"unknown model", "no messages"}

// compareClient asks at the engine, then through Envoy.
func (e *env) compareClient(ctx context.Context, c client, s *stack, engine, model string) (res result, err error) {
	res.what = "what the client makes of answers, directly and through Envoy"
	if err := s.waitRouted(ctx, chat("Hi", map[string]any{"model": model})); err != nil {
		return res, err
	}
	want, err := c.run(ctx, e, "http://"+engine, model)
	if err != nil {
		return res, fmt.Errorf("directly: %w", err)
	}
	// Two equal failures would be no success.
	for name, value := range want {
		if bytes.Contains(value, []byte("Error")) && !slices.Contains(refusals, name) {
			return res, fmt.Errorf("directly: %s: %s", name, value)
		}
	}
	got, err := c.run(ctx, e, s.envoy.URL(), model)
	if err != nil {
		return res, fmt.Errorf("through Envoy: %w", err)
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if res.cases++; !bytes.Equal(want[name], got[name]) {
			res.differ("%s: directly %.300s, through Envoy %.300s", name, want[name], got[name])
		}
	}
	if len(got) != len(want) {
		res.differ("%d answers directly, %d through Envoy", len(want), len(got))
	}
	// Nothing is left of requests that their clients gave up.
	res.cases++
	if err := process.Until(ctx, 10*time.Second, "all slots are free", func(ctx context.Context) bool {
		all, err := s.states(ctx)
		for _, w := range all {
			if w.ActiveRequests > 0 || w.PendTokens > 0 || w.ActiveBlocks > 0 {
				return false
			}
		}
		return err == nil && len(all) > 0
	}); err != nil {
		res.differ("%v", err)
	}
	var routed uint64
	all, err := s.states(ctx)
	for _, w := range all {
		routed += w.Routed
	}
	if routed < uint64(len(want)/2) {
		res.differ("kvroute has decided %d requests only", routed)
	}
	res.notes = append(res.notes, fmt.Sprintf("scenarios %s; %d requests routed", strings.Join(slices.Sorted(maps.Keys(want)), "; "), routed))
	return res, err
}

// output runs a program and reads the JSON object that it prints last.
func output(cmd *exec.Cmd) (out map[string]json.RawMessage, err error) {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	// Clients obey proxies of the environment.
	cmd.Env = append(os.Environ(), "NO_PROXY=127.0.0.1", "no_proxy=127.0.0.1")
	text, err := cmd.Output()
	if err != nil {
		log := stderr.String()
		return nil, fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Path), err, log[max(0, len(log)-2000):])
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &out); err != nil {
		return nil, fmt.Errorf("%s: %w in %.300s", filepath.Base(cmd.Path), err, text)
	}
	return out, nil
}

func python(kind string) func(context.Context, *env, string, string) (map[string]json.RawMessage, error) {
	return func(ctx context.Context, e *env, url, model string) (map[string]json.RawMessage, error) {
		cmd := exec.CommandContext(ctx, filepath.Join(e.clients, "py/bin/python"), "-", kind, url+"/v1", model)
		cmd.Stdin = strings.NewReader(pythonClients)
		return output(cmd)
	}
}

func javaScript(ctx context.Context, e *env, url, model string) (map[string]json.RawMessage, error) {
	cmd := exec.CommandContext(ctx, "node", "--input-type=module", "-", url+"/v1", model)
	cmd.Dir = filepath.Join(e.clients, "js") // where it finds the client
	cmd.Stdin = strings.NewReader(javaScriptClient)
	return output(cmd)
}

// curls asks with curl: HTTP/1.1 with the offer of HTTP/2, and HTTP/2 from the start. An
// engine speaks HTTP/1.1 only, so there it is asked in that for both.
func curls(ctx context.Context, e *env, url, model string) (map[string]json.RawMessage, error) {
	direct := slices.Contains(e.sims, strings.TrimPrefix(url, "http://")) || e.vllms.has(url)
	out := make(map[string]json.RawMessage)
	for _, version := range []string{"--http1.1", "--http2", "--http2-prior-knowledge"} {
		flag := version
		if direct {
			flag = "--http1.1"
		}
		for name, q := range map[string]string{
			"chat":   chat(words(8000, 100), map[string]any{"model": model, "seed": 1}),
			"stream": chat(words(8000, 100), map[string]any{"model": model, "seed": 1, "stream": true, "max_tokens": 4}),
			"wrong":  chat("a", map[string]any{"model": "nobody's"}),
		} {
			cmd := exec.CommandContext(ctx, "curl", "-sS", "-N", "--noproxy", "*", flag, "-w", "\n%{http_code} %{content_type} %{http_version}", "-H", "Content-Type: application/json", "-d", q, url+chatPath)
			text, err := cmd.Output()
			if err != nil {
				return nil, fmt.Errorf("curl %s: %w", flag, err)
			}
			at := strings.LastIndex(string(text), "\n")
			body, status := string(text[:at]), strings.Fields(string(text[at:]))
			if spoken := status[len(status)-1]; version == "--http2-prior-knowledge" && !direct && spoken != "2" {
				return nil, fmt.Errorf("curl %s: HTTP %s", flag, spoken)
			}
			value := []any{status[0], status[1], settledBody(body)}
			if name == "wrong" {
				value = value[:2] // who refuses says it in its own words
			}
			if out[name+" "+version], err = json.Marshal(value); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// settledBody is a body without what is new in each answer: ids, times, and what was
// cached.
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
