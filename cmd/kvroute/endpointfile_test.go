// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/router"
)

// The file is made if it is missing. It follows the fleet once the registry has answered, and keeps
// the last workers when all are gone or writing fails.
func TestTheEndpointFileKeepsTheLastGuess(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "pool.yaml")
	var fleet []router.WorkerState
	known := false
	worker := func(port int, health router.Health, failing bool) router.WorkerState {
		return router.WorkerState{Address: netip.MustParseAddrPort(fmt.Sprint("10.0.0.1:", port)), Health: health.String(), Failing: failing}
	}
	of := func(model string, w router.WorkerState) router.WorkerState {
		w.Model = model
		return w
	}
	f := &endpointFile{path: path, known: func() bool { return known }, workers: func() []router.WorkerState { return fleet }, log: slog.New(slog.DiscardHandler)}
	ports := func() (got string) {
		t.Helper()
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for port := 1; port < 9; port++ {
			if strings.Contains(string(text), fmt.Sprintf(": %d\n", port)) || strings.Contains(string(text), fmt.Sprintf(": %d}", port)) {
				got += fmt.Sprint(port)
			}
		}
		return got
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.run(ended); err != nil || ports() != "" {
		t.Fatalf("at first: %v, %s", err, ports())
	}
	for _, step := range []struct {
		name  string
		known bool
		fleet []router.WorkerState
		want  string
	}{
		{"a part that is known so far", false, []router.WorkerState{worker(1, router.Healthy, false)}, ""},
		{"the fleet", true, []router.WorkerState{worker(1, router.Healthy, false), worker(2, router.Healthy, false), worker(3, router.Healthy, true)}, "12"},
		{"none is healthy", true, []router.WorkerState{worker(1, router.Unhealthy, false), worker(2, router.Degraded, false)}, "2"},
		{"another model's are", true, []router.WorkerState{worker(1, router.Unhealthy, false), worker(2, router.Healthy, true), of("b", worker(3, router.Healthy, false))}, "23"},
		{"and one of its own comes back", true, []router.WorkerState{worker(1, router.Healthy, false), worker(2, router.Healthy, true), of("b", worker(3, router.Healthy, false))}, "13"},
		{"none is", true, []router.WorkerState{worker(2, router.Degraded, false), of("b", worker(3, router.Unhealthy, false))}, "23"},
		{"one model's are gone", true, []router.WorkerState{worker(2, router.Degraded, false)}, "2"},
		{"all are gone", true, nil, "2"},
		{"one answers its own Host only", true, []router.WorkerState{worker(4, router.Healthy, false), ownHost(worker(5, router.Healthy, false))}, "4"},
		{"others come", true, []router.WorkerState{worker(4, router.Healthy, false)}, "4"},
	} {
		if fleet, known = step.fleet, step.known; f.update() != nil || ports() != step.want {
			t.Errorf("%s: the file has %q, want %q", step.name, ports(), step.want)
		}
	}
	for _, step := range []struct{ name, want string }{{"the fleet is as before", "4"}, {"all are gone", "4"}} {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if f.update() != nil || ports() != step.want {
			t.Errorf("%s and the file was removed: it has %q, want %q", step.name, ports(), step.want)
		}
		fleet = nil
	}
	f.path = filepath.Join(dir, "nowhere", "pool.yaml")
	if fleet = []router.WorkerState{worker(5, router.Healthy, false)}; f.update() == nil {
		t.Error("a folder that is missing is no error")
	}
	if f.path = path; f.update() != nil || ports() != "5" {
		t.Errorf("the write that failed is not repeated: %s", ports())
	}
	if left, err := filepath.Glob(filepath.Join(dir, ".pool*")); err != nil || len(left) > 0 {
		t.Errorf("%v, %v are left behind", left, err)
	}
}

// If Envoy sends requests to workers of the file only, the file has all workers that kvroute may choose. Those that
// are no part of the pool are marked.
func TestTheEndpointFileHasAllThatMayBeChosen(t *testing.T) {
	worker := func(port uint16, health router.Health, change func(*router.WorkerState)) router.WorkerState {
		w := router.WorkerState{Address: netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), port), Health: health.String()}
		if change != nil {
			change(&w)
		}
		return w
	}
	fleet := []router.WorkerState{
		worker(1, router.Healthy, nil),
		worker(2, router.Healthy, func(w *router.WorkerState) { w.Failing = true }),
		worker(3, router.Degraded, nil),
		worker(4, router.Unhealthy, nil),
		worker(5, router.Expired, nil),
		worker(6, router.Healthy, func(w *router.WorkerState) { w.OwnHost = true }),
		worker(7, router.Healthy, func(w *router.WorkerState) { w.Role = router.Prefill }),
		worker(1, router.Unhealthy, func(w *router.WorkerState) { w.DPRank = 1 }),
		worker(0, router.Unhealthy, func(w *router.WorkerState) { w.Address = netip.AddrPort{} }),
	}
	for chosen, want := range map[bool]string{false: "1", true: "1 2* 3* 4* 5* 6*"} {
		f := &endpointFile{
			path: filepath.Join(t.TempDir(), "pool.yaml"), chosen: chosen, known: func() bool { return true },
			workers: func() []router.WorkerState { return fleet }, log: slog.New(slog.DiscardHandler),
		}
		if err := f.update(); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(f.path)
		if err != nil {
			t.Fatal(err)
		}
		var file struct {
			Resources []struct {
				Endpoints []struct {
					List []struct {
						Endpoint struct {
							Address struct {
								Socket struct {
									Port int `json:"port_value"`
								} `json:"socket_address"`
							} `json:"address"`
						} `json:"endpoint"`
						Health string `json:"health_status"`
					} `json:"lb_endpoints"`
				} `json:"endpoints"`
			} `json:"resources"`
		}
		if err := json.Unmarshal(text, &file); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range file.Resources[0].Endpoints[0].List {
			got = append(got, strconv.Itoa(e.Endpoint.Address.Socket.Port)+map[string]string{"UNHEALTHY": "*"}[e.Health])
		}
		if strings.Join(got, " ") != want {
			t.Errorf("chosen %v: the file has %q, want %q", chosen, got, want)
		}
	}
}

// Envoy sends a decided request to a worker of the file that is no part of the pool, and no other request.
func TestEnvoyReachesMarkedWorkersOfTheFile(t *testing.T) {
	t.Parallel() // mostly waits
	d := newStack(t, 0, nil)
	plain := newHostWorker(t, func(*http.Request) bool { return true })
	own := newHostWorker(t, func(r *http.Request) bool { return r.Host == "own.example" })
	config := fmt.Sprintf("version: 1\nworkers:\n- {name: any, address: %q, models: [sim], block_size: 16}\n- {name: own, address: %q, host: own.example, models: [sim], block_size: 16}\n", plain.address, own.address)
	d.EnvoyConfig.Failover, d.EnvoyConfig.PoolFile = envoy.List, filepath.Join(d.Dir, "pool.json")
	d.Unrouted = true
	if err := os.WriteFile(d.EnvoyConfig.PoolFile, envoy.Endpoints("0", nil, nil), 0o600); err != nil {
		t.Fatal(err)
	}
	d.begin(t, "--config", writeFile(t, config), "--second-choice", "list", "--endpoint-file", d.EnvoyConfig.PoolFile, "--router-mode", "round-robin", "--avoid-failing", "0")
	ask := func() int { return d.send(t, "hello", false).status }
	eventually(t, "not both workers serve", func() bool { return ask() == 200 && own.served.Load() > 0 && plain.served.Load() > 0 })
	d.Router.Stop()
	own.mu.Lock()
	own.wrong = nil
	own.mu.Unlock()
	for range 20 {
		if status := ask(); status != 200 {
			t.Errorf("without kvroute: status %d", status)
		}
	}
	own.mu.Lock()
	defer own.mu.Unlock()
	if len(own.wrong) > 0 {
		t.Errorf("without kvroute the worker that needs its own Host got %q", own.wrong)
	}
}

func ownHost(w router.WorkerState) router.WorkerState {
	w.OwnHost = true
	return w
}
