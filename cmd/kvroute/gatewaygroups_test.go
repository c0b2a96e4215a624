// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
)

// newUpperTier returns a router of the groups east and west, with kvroute's flags. The gateways of
// the groups are at the addresses. Its Envoy runs Envoy Gateway's output for the manifests. more is
// text for each group in kvroute's file.
func newUpperTier(t *testing.T, east, west, more string) (d *demonstration, flags []string) {
	t.Helper()
	d = newStack(t, 0, nil)
	d.Bootstrap = gatewayBootstrap(t, "original-destination")
	d.EnvoyConfig.Pool = []string{east, west}
	var file strings.Builder
	fmt.Fprintf(&file, "version: 1\ncomponent: tier\nmodels:\n- {name: sim, tokenizer: %q}\ngroups:\n", modelFolder(t))
	for i, name := range []string{"east", "west"} {
		fmt.Fprintf(&file, "- {name: %s, address: %q%s}\n", name, d.EnvoyConfig.Pool[i], more)
	}
	return d, []string{"--config", writeFile(t, file.String()), "--mode-override", "--second-choice", "header"}
}

// startGroup starts a router group on a bus: two workers, their router, and an Envoy by
// the bootstrap, or by a variant of the manifests. More flags are the router's.
func startGroup(t *testing.T, bus *bus.Server, name, variant string, more ...string) *demonstration {
	t.Helper()
	d := newStack(t, 2, nil)
	d.Bus = bus
	flags := []string{"--group", name, "--component", name, "--allow-direct", "--group-interval", "100ms"}
	flags = append(flags, more...)
	if variant != "" {
		d.Bootstrap = gatewayBootstrap(t, variant)
		flags = append(flags, "--mode-override")
	}
	t.Cleanup(func() {
		d.Bus = nil // the other tier owns the bus
		d.Stop()
		if t.Failed() && d.Router != nil {
			t.Logf("the log of %s:\n%s", name, d.Router.LastLines())
		}
	})
	for i := range d.Workers {
		worker := fmt.Sprint(name, "-", i+1)
		e, err := demo.Start(t.Context(), d.Dir, worker, "engine", "--name", worker, "--component", name, "--speed", "20", "--listen", "127.0.0.1:0", "--nats-url", bus.URL())
		if err != nil {
			t.Fatal(err)
		}
		d.Engines = append(d.Engines, e)
	}
	if err := d.StartRouter(t.Context(), flags...); err != nil {
		t.Fatal(err)
	}
	return d
}

// die ends every process of a group, as if its site had failed.
func (d *demonstration) die(t *testing.T) {
	t.Helper()
	if err := syscall.Kill(d.Envoy.Pid(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-d.Envoy.Done
	for _, c := range append(slices.Clone(d.Engines), d.Router) {
		kill(t, c)
	}
}

// Two tiers: the upper one and one of the groups are behind Envoy Gateway's output for the
// manifests, the other group is behind this project's bootstrap.
func TestGatewayOfGroups(t *testing.T) {
	t.Parallel() // mostly waits
	bus, err := startNATS("127.0.0.1:0", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(bus.Stop)
	groups := map[string]*demonstration{}
	for name, variant := range map[string]string{"east": "", "west": "original-destination"} {
		groups[name] = startGroup(t, bus, name, variant)
	}
	address := func(group string) string { return strings.TrimPrefix(groups[group].Envoy.URL(), "http://") }
	d, flags := newUpperTier(t, address("east"), address("west"), "")
	// On a busy machine a probe without an answer in time would name no worker.
	flags = append(flags, "--nats-url", bus.URL(), "--group-probe-budget", "1s")
	d.begin(t, flags...)
	heard := func(names ...string) {
		t.Helper()
		eventually(t, "it is not so that these are heard, and no others: "+fmt.Sprint(names), func() bool {
			var fresh []string
			for _, w := range workers(t, d) {
				if !w.Summary.Stale && w.Summary.Members == 2 {
					fresh = append(fresh, w.Group)
				}
			}
			slices.Sort(fresh)
			return slices.Equal(fresh, names)
		})
	}
	settled := func() {
		t.Helper()
		for _, name := range slices.Sorted(maps.Keys(groups)) {
			idle(t, groups[name])
			settle(t, groups[name])
		}
		idle(t, d)
	}
	// at returns the group whose worker has answered.
	at := func(resp *http.Response) string {
		name, _, _ := strings.Cut(resp.Header.Get("X-Sim-Worker"), "-")
		return name
	}
	heard("east", "west")

	// The upper tier decides, and its headers arrive: the worker that the group named gets the
	// request, and the decision has this reason.
	victim := startHTTP(t, func(http.ResponseWriter, *http.Request) { t.Error("the client's choice was reached") })
	forged := http.Header{
		"X-Dynamo-Worker": {victim}, "X-Dynamo-Worker-Fallback": {victim},
		"X-Dynamo-Router-Group": {"nowhere"}, "X-Dynamo-Worker-Instance-Id": {"17"}, "X-Worker-Instance-Id": {"17"},
	}
	home := map[int]string{}
	const conversations = 6
	content := func(i int) string { return fmt.Sprint(i, strings.Repeat(" a prefix to be found again", 50)) }
	before := newest(t, d).ID
	for turn := range 2 {
		for i := range conversations {
			settled()
			resp, body := reply(t, d, "POST", chatPath, chatBody(content(i), 4, turn == 0), forged)
			upper := newest(t, d)
			if resp.StatusCode != 200 || upper.ID == before || upper.Group != at(resp) || upper.Member == nil {
				t.Fatalf("conversation %d: status %d from %q, the upper tier chose %q and %v: %.200s", i, resp.StatusCode, resp.Header.Get("X-Sim-Worker"), upper.Group, upper.Member, body)
			}
			before = upper.ID
			if lower := newest(t, groups[upper.Group]); lower.Reason != router.ReasonPreferred || lower.Worker != *upper.Member || lower.WorkerName != resp.Header.Get("X-Sim-Worker") {
				t.Errorf("conversation %d: the upper tier named %v, the group %s chose %v for reason %s, %s answered", i, *upper.Member, upper.Group, lower.Worker, lower.Reason, resp.Header.Get("X-Sim-Worker"))
			}
			if turn > 0 && (at(resp) != home[i] || upper.OverlapBlocks < 10) {
				t.Errorf("conversation %d began in %s, then it went to %s with %d blocks", i, home[i], at(resp), upper.OverlapBlocks)
			}
			home[i] = at(resp)
		}
	}

	// The stream lasts to the end of the response: the slot is held until then.
	settled()
	resp, err := send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, chatBody("a long story", 4000, true), nil)
	if err != nil {
		t.Fatal(err)
	}
	if upper := newest(t, d); upper.ID == before || !upper.Freed.IsZero() {
		t.Errorf("while a response goes on the slot is free: %+v", upper)
	}
	_ = resp.Body.Close()
	eventually(t, "the slot is not freed at the end", func() bool { return !newest(t, d).Freed.IsZero() })

	// undecided sends requests that bypass the upper tier's kvroute: the groups decide them.
	undecided := func(want ...string) {
		t.Helper()
		served := map[string]bool{}
		for range 20 {
			resp, body := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), forged)
			if resp.StatusCode != 200 || groups[at(resp)] == nil || resp.Header.Get("X-Dynamo-Reason") == "" {
				t.Fatalf("with the upper kvroute dead: status %d from %q: %s", resp.StatusCode, resp.Header.Get("X-Sim-Worker"), body)
			}
			served[at(resp)] = true
		}
		if got := slices.Sorted(maps.Keys(served)); !slices.Equal(got, want) {
			t.Errorf("with the upper kvroute dead %v serve, want %v", got, want)
		}
	}
	settled()
	kill(t, d.Router)
	undecided("east", "west")
	if err := d.StartRouter(t.Context(), flags...); err != nil {
		t.Fatal(err)
	}
	heard("east", "west")

	// The group of conversation 0 dies: the other group serves this conversation and all others.
	gone := home[0]
	left := map[string]string{"east": "west", "west": "east"}[gone]
	groups[gone].die(t)
	delete(groups, gone)
	for i := range conversations {
		resp, body := reply(t, d, "POST", chatPath, chatBody(content(i), 4, false), forged)
		if resp.StatusCode != 200 || at(resp) != left {
			t.Errorf("without %s: conversation %d: status %d from %q: %s", gone, i, resp.StatusCode, resp.Header.Get("X-Sim-Worker"), body)
		}
	}
	heard(left)
	settled()
	if resp, body := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), nil); resp.StatusCode != 200 || newest(t, d).Group != left || newest(t, d).Served.IsValid() {
		t.Errorf("without %s: status %d, %+v: %s", gone, resp.StatusCode, newest(t, d), body)
	}
	kill(t, d.Router)
	undecided(left)
}

// A group receives the upper tier's headers from kvroute only, never from a client, because a group
// may obey them.
func TestGatewayTellsGroupsWhatKvrouteSays(t *testing.T) {
	t.Parallel() // mostly waits
	const forged = "192.0.2.1:1"
	var mu sync.Mutex
	var asked []http.Header
	gateway := func(name string) string {
		return startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			if r.Header.Get("X-Of-Others") == "stays" { // other requests are not the test's
				header := r.Header.Clone()
				header.Set("X-Asked", name)
				asked = append(asked, header)
			}
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"choices":[]}`)
		})
	}
	d, flags := newUpperTier(t, gateway("east"), gateway("west"), ", models: [sim], block_size: 16, members: 2")
	d.begin(t, append(flags, "--group-probe", "off")...)
	header := http.Header{"X-Of-Others": {"stays"}}
	for _, name := range envoytest.SteeringHeaders {
		header.Add(name, forged)
	}
	check := func(when string, decides bool) {
		t.Helper()
		for _, c := range []struct{ method, path, body string }{
			{"POST", chatPath, chatBody("hello", 2, false)}, {"OPTIONS", "/v1/models/x", "{}"}, {"HEAD", "/v1/models", ""},
		} {
			if resp, body := reply(t, d, c.method, c.path, c.body, header); resp.StatusCode != 200 {
				t.Errorf("%s, %s: status %d: %.200s", when, c.path, resp.StatusCode, body)
			}
			mu.Lock()
			got := asked
			asked = nil
			mu.Unlock()
			if len(got) != 1 {
				t.Fatalf("%s, %s: %d requests arrive, want 1", when, c.path, len(got))
			}
			for _, name := range envoytest.SteeringHeaders {
				if v := got[0].Values(name); slices.Contains(v, forged) {
					t.Errorf("%s, %s: the client's %s reaches a group", when, c.path, name)
				}
			}
			want := ""
			if decides && c.path == chatPath {
				want = got[0].Get("X-Asked")
			}
			if group := got[0].Get("X-Dynamo-Router-Group"); group != want {
				t.Errorf("%s, %s: a gateway is told that the group %q is meant, want %q", when, c.path, group, want)
			}
		}
	}
	check("kvroute decides", true)
	hold(t, d.Router)
	check("kvroute hangs", false)
	kill(t, d.Router)
	check("kvroute is dead", false)
}
