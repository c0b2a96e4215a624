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
// object with the outcome of each. Its last arguments are the base URL, the model, and "direct" or
// "envoy".
type client struct {
	name, program, folder, script string // the first three in the folder of the clients
	args                          []string
}

func allClients() []client {
	python := func(name, kind string) client {
		return client{name, "py/bin/python", "", pythonClients, []string{"-", kind}}
	}
	return []client{
		python("openai for Python", "openai"),
		python("openai for Python, asynchronous", "openai-async"),
		python("litellm", "litellm"),
		{"openai for JavaScript", "node", "js", javaScriptClient, []string{"--input-type=module", "-"}},
		python("curl with HTTP/2", "curl"),
	}
}

// run runs the client with a server.
func (c client) run(ctx context.Context, e *env, url, way string) (out map[string]json.RawMessage) {
	program := c.program
	if strings.Contains(program, "/") {
		program = bench.Must(filepath.Abs(filepath.Join(e.clients, program)))
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, program, append(c.args, url+"/v1", modelName, way)...)
	cmd.Dir, cmd.Stdin, cmd.Stderr = filepath.Join(e.clients, c.folder), strings.NewReader(c.script), &stderr // the folder has the client's packages
	// Clients obey proxies of the environment.
	cmd.Env = append(os.Environ(), "NO_PROXY=127.0.0.1", "no_proxy=127.0.0.1")
	text, err := cmd.Output()
	if err != nil {
		log := stderr.String()
		bench.NoError(fmt.Errorf("%s: %w: %s", c.name, err, log[max(0, len(log)-2000):]))
	}
	lines := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
	bench.NoError(json.Unmarshal(lines[len(lines)-1], &out))
	return out
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
	want := c.run(ctx, e, "http://"+engines[0], "direct")
	// Two equal failures would be no success.
	for name, value := range want {
		if bytes.Contains(value, []byte("Error")) && !slices.Contains(refusals, name) {
			bench.NoError(fmt.Errorf("directly: %s: %s", name, value))
		}
	}
	got := c.run(ctx, e, s.envoy.URL(), "envoy")
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if res.cases++; !bytes.Equal(want[name], got[name]) {
			res.differ("%s: directly %.300s, through Envoy %.300s", name, want[name], got[name])
		}
	}
	if len(got) != len(want) {
		res.differ("%d answers directly, %d through Envoy", len(want), len(got))
	}
	// No slot is left of requests that their clients gave up. The load of one that had no token stays for up to 30 s.
	res.try(ctx, "in the end", func() {
		await(ctx, nil, 45*time.Second, "all slots are free", func(ctx context.Context) (taken string) {
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
