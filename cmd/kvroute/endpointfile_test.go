// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

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

func ownHost(w router.WorkerState) router.WorkerState {
	w.OwnHost = true
	return w
}
