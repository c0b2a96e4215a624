// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
)

// replicaSaying is a replica that reports the same in three readings, unless change modifies one of
// them.
func replicaSaying(name string, id uint64, change func(n int, r *reading)) *examined {
	x := &examined{api: apiClient{url: "http://" + name}, name: name}
	for n := range 3 {
		r := reading{
			Replica: api.Replica{
				RouterID: id, Replica: name, Version: "v1", Scope: "s", HashSeed: 1337, Bus: true, Synced: true, ActiveRequests: 2,
				Ready:    api.Readiness{Status: "ready", Checks: map[string]bool{"workers": true, "registry": true}},
				Settings: map[string]any{"block-size": 16.0, "busy-threshold": nil},
			},
			models:     []router.ModelState{{Model: "m", Names: []string{"m"}, BlockSizes: []int{16}}},
			thresholds: map[string]string{},
		}
		for _, other := range []uint64{1, 2} {
			if other != id {
				r.Peers = append(r.Peers, replicas.PeerView{RouterID: other, Replica: string("ab"[other-1]), ActiveRequests: 2, Whole: true})
			}
		}
		for w := range uint64(2) {
			r.workers = append(r.workers, router.WorkerState{
				Worker: router.Worker{ID: w + 1}, Name: fmt.Sprint("w", w+1), Model: "m", Health: "healthy", KVEvents: "ok", BlockSize: 16,
				CachedBlocks: 100, ActiveRequests: 2, PendTokens: 50,
			})
		}
		if change != nil {
			change(n, &r)
		}
		x.readings = append(x.readings, r)
	}
	return x
}

// One of two replicas reports another value. Values that are equal in any two readings are not
// reported as different.
func TestDiagnosis(t *testing.T) {
	const equal = ""
	for name, c := range map[string]struct {
		change func(n int, r *reading)
		edit   func(x *examined)
		want   string // text of the one expected finding, or the constant equal
		level  severity
	}{
		"nothing":              {want: equal},
		"a request on its way": {change: func(n int, r *reading) { r.workers[0].ActiveRequests += n }, want: equal},
		"a request for ever": {
			change: func(_ int, r *reading) { r.workers[0].ActiveRequests = 3 },
			want:   "active requests of w1: 2 at a; 3 at b", level: different,
		},
		"a load that moves elsewhere": {
			change: func(n int, r *reading) { r.workers[1].ActiveRequests = 7 + n },
			want:   "active requests of w2: 2 at a; 7..9 at b", level: different,
		},
		"pending tokens": {
			change: func(_ int, r *reading) { r.workers[1].PendTokens = 0 },
			want:   "pending tokens of w2: 0 at b; 50 at a", level: different,
		},
		"blocks on their way": {change: func(n int, r *reading) { r.workers[0].CachedBlocks = 90 + 8*n }, want: equal},
		"blocks": {
			change: func(n int, r *reading) { r.workers[0].CachedBlocks = 80 + 8*n },
			want:   "cached blocks of w1: 100 at a; 80..96 at b", level: different,
		},
		"an unknown worker": {
			change: func(_ int, r *reading) { r.workers = r.workers[:1] },
			want:   "worker w2: known at a; unknown at b", level: different,
		},
		"a worker that comes": {
			change: func(n int, r *reading) { r.workers = r.workers[:min(2, 1+n)] },
			want:   equal,
		},
		"another health": {
			change: func(_ int, r *reading) { r.workers[0].Health = "degraded" },
			want:   "health of w1: degraded at b; healthy at a", level: different,
		},
		"a setting": {
			change: func(_ int, r *reading) { r.Settings = map[string]any{"block-size": 32.0, "busy-threshold": nil} },
			want:   "setting block-size: 16 at a; 32 at b", level: different,
		},
		"a setting that the other does not have": {
			change: func(_ int, r *reading) { r.Settings = map[string]any{"block-size": 16.0, "busy-threshold": 0.5} },
			want:   "setting busy-threshold: 0.5 at b; none at a", level: different,
		},
		"thresholds set by the API": {
			change: func(_ int, r *reading) { r.thresholds = map[string]string{"m": "busy 1"} },
			want:   `busy thresholds of m: busy 1 at b; none at a`, level: different,
		},
		"the hash seed": {
			change: func(_ int, r *reading) { r.HashSeed = 1 },
			want:   "hash seed: 1 at b; 1337 at a", level: different,
		},
		"how prompts are read": {
			change: func(_ int, r *reading) {
				r.models = []router.ModelState{{Model: "m", Names: []string{"m"}, BlockSizes: []int{16}, TokenState: router.TokenState{TokenMode: "bytes"}}}
			},
			want: "model m: [m], blocks of [16], tokens:  at a; [m], blocks of [16], tokens: bytes at b", level: different,
		},
		"the version": {
			change: func(_ int, r *reading) { r.Version = "v2" },
			want:   "version: v1 at a; v2 at b", level: note,
		},
		"what it holds of the other": {
			change: func(_ int, r *reading) { r.Peers[0].ActiveRequests = 5 },
			want:   "requests of a: 2 at a; 5 at b", level: different,
		},
		"it does not hear the other": {
			change: func(_ int, r *reading) { r.Peers = nil },
			want:   "requests of a: 2 at a; not heard at b", level: different,
		},
		"it asks the other": {
			change: func(_ int, r *reading) { r.Peers[0].Whole = false },
			want:   "b: it is not sure to hold all requests of a, and asks for them", level: note,
		},
		"there is a third one": {
			change: func(_ int, r *reading) { r.Peers = append(r.Peers, replicas.PeerView{RouterID: 3, Replica: "c"}) },
			want:   "replica c (3) is heard by others, but was not asked: give its --url, too", level: note,
		},
		"NATS is away": {
			change: func(_ int, r *reading) { r.Bus = false },
			want:   "b: NATS is away: it neither hears of workers nor of other replicas", level: fault,
		},
		"a check fails": {
			change: func(_ int, r *reading) {
				r.Ready = api.Readiness{Status: "degraded", Checks: map[string]bool{"registry": false}}
			},
			want: `b: it is degraded: the check "registry" fails`, level: fault,
		},
		"a balancer": {
			change: func(n int, r *reading) { r.RouterID = uint64(2 + n) },
			edit: func(x *examined) {
				x.readings[2].RouterID = 2 // the replica that the other one hears
				x.readings[0].RouterID = 5
			},
			want: "b: its answers come from several replicas, or it has just started again: is the URL that of a balancer?", level: fault,
		},
		"it does not answer": {
			edit: func(x *examined) { x.err = http.ErrServerClosed },
			want: "b: it cannot be asked: http: Server closed", level: fault,
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := replicaSaying("a", 1, nil), replicaSaying("b", 2, c.change)
			if c.edit != nil {
				c.edit(b)
			}
			got := diagnose([]*examined{a, b}, tolerance{})
			if b.err != nil { // the doctor then also notes the unread replica
				got = slices.DeleteFunc(got, func(f finding) bool { return f.What == "replica" })
			}
			if strings.Contains(name, "health") { // health is also a finding of one replica
				got = slices.DeleteFunc(got, func(f finding) bool { return f.Level == note })
			}
			switch {
			case c.want == equal && len(got) == 0:
			case c.want == equal, len(got) != 1:
				t.Errorf("found %+v, want %q", got, c.want)
			case got[0].text() != c.want || got[0].Level != c.level:
				t.Errorf("found %s: %s\nwant  %s: %s", got[0].Level, got[0].text(), c.level, c.want)
			}
		})
	}
	tolerant := diagnose([]*examined{replicaSaying("a", 1, nil), replicaSaying("b", 2, func(_ int, r *reading) {
		r.workers[0].ActiveRequests, r.workers[0].CachedBlocks, r.workers[0].PendTokens, r.Peers[0].ActiveRequests = 4, 90, 60, 3
	})}, tolerance{requests: 2, blocks: 10, tokens: 10})
	if len(tolerant) > 0 {
		t.Errorf("findings within the tolerance: %+v", tolerant)
	}
	for _, state := range []string{"suspect", "partial", "block_size_mismatch"} {
		found := diagnose([]*examined{replicaSaying("a", 1, func(_ int, r *reading) { r.workers[0].KVEvents, r.Peers = state, nil })}, tolerance{})
		if serious(found) != 1 || !strings.Contains(found[0].text(), state) {
			t.Errorf("%s: found %+v", state, found)
		}
	}
	empty := diagnose([]*examined{replicaSaying("a", 1, func(_ int, r *reading) { r.workers, r.Peers = nil, nil })}, tolerance{})
	if len(empty) != 1 || empty[0].text() != "a: it knows no worker" {
		t.Errorf("without workers: %+v", empty)
	}
	alone := func(_ int, r *reading) { r.Synced, r.Peers, r.workers[0].ActiveRequests = false, nil, int(r.RouterID) }
	if found := diagnose([]*examined{replicaSaying("a", 1, alone), replicaSaying("b", 2, alone)}, tolerance{}); len(found) != 1 || found[0].Level != note || found[0].What != "sync" {
		t.Errorf("replicas that do not exchange: %+v", found)
	}
}

// examine runs the command against running replicas.
func examine(t *testing.T, flags ...string) (status int, out string) {
	t.Helper()
	status, out, stderr := runs(t, append([]string{"doctor"}, flags...)...)
	return status, out + stderr
}

// apis are the --url flags of some replicas.
func apis(replicas ...*demo.Child) (flags []string) {
	for _, c := range replicas {
		flags = append(flags, "--url", "http://"+c.At.HTTP)
	}
	return flags
}

// Running replicas with the same knowledge are reported as equal, while requests begin and end. A
// replica with other settings, without a listener or out of reach is named.
func TestTheDoctorComparesReplicas(t *testing.T) {
	t.Parallel() // mostly waits
	bus, engines := streamFleet(t)
	a, b := startReplicaProcess(t, bus, "a"), startReplicaProcess(t, bus, "b")
	talk(t, engines, 0, 12)
	booked := func(c *demo.Child, id string) {
		t.Helper()
		resp, text := whole(t, http.MethodPost, "http://"+c.At.HTTP+"/v1/best_worker", fmt.Sprintf(`{"model":"sim","request_id":%q,"token_ids":[1,2,3]}`, id), nil)
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s", resp.Status, text)
		}
	}
	booked(a, "one")
	booked(b, "two")
	stop := make(chan struct{})
	busy := make(chan struct{})
	go func() {
		defer close(busy)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
			id := fmt.Sprint("busy", i)
			booked([]*demo.Child{a, b}[i%2], id)
			whole(t, http.MethodPost, "http://"+[]*demo.Child{a, b}[i%2].At.HTTP+"/v1/free", fmt.Sprintf(`{"request_id":%q}`, id), nil)
		}
	}()
	eventually(t, "equal replicas are not called so", func() bool {
		status, out := examine(t, apis(a, b)...)
		return status == 0 && strings.Contains(out, "equal: 2 replicas, 3 workers, ") && !strings.Contains(out, " 0 cached blocks")
	})
	close(stop)
	<-busy

	_, out := examine(t, append(apis(a), "--json")...)
	var report struct {
		Equal    bool
		Replicas []struct {
			Name     string
			Workers  int
			RouterID uint64         `json:"router_id"`
			Settings map[string]any `json:"settings"`
			Peers    []replicas.PeerView
		}
		Findings []finding
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatal(err)
	}
	if r := report.Replicas[0]; !report.Equal || r.Name != "a" || r.Workers != 3 || r.RouterID == 0 || r.Settings["block-size"] == nil || r.Settings["nats-url"] != nil || len(r.Peers) != 1 {
		t.Errorf("report %+v", report)
	}
	if len(report.Findings) != 1 || report.Findings[0].What != "replica" || !strings.Contains(report.Findings[0].Text, "replica b ") {
		t.Errorf("the replica that was not asked is not named: %+v", report.Findings)
	}

	alone := startReplicaProcess(t, bus, "alone", "--router-replica-sync=false", "--block-size", "32", "--active-prefill-tokens-threshold", "1000000")
	status, out := examine(t, append(append(apis(a, b, alone), apis(a)...), "--url", "http://127.0.0.1:1", "--tolerate-blocks", "1000000")...)
	for _, want := range []string{
		"setting block-size: 0 at a#1, a#4, b; 32 at alone",
		"setting router-replica-sync: false at alone; true at a#1, a#4, b",
		"busy thresholds of sim: active_prefill_tokens_threshold 1000000 at alone; none at a#1, a#4, b",
		"active requests", "pending tokens",
		"a#4: it is the same process as a#1",
		"127.0.0.1:1: it cannot be asked",
		"differences, 2 faults, among 4 replicas",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("it does not say %q", want)
		}
	}
	if status != 1 || t.Failed() {
		t.Errorf("status %d\n%s", status, out)
	}

	bus.Server.Shutdown()
	eventually(t, "that NATS is away is not said", func() bool {
		status, out := examine(t, apis(a, b)...)
		return status == 1 && strings.Contains(out, "a: NATS is away") && strings.Contains(out, `b: it is degraded: the check "registry" fails`)
	})
}

// The doctor refuses contradictory flags.
func TestTheDoctorRefuses(t *testing.T) {
	for args, want := range map[string]string{
		"--url nowhere": "want http://host:port", "--tolerate-blocks -1": "below 0", "--api-token-file /nowhere/at": "nowhere",
	} {
		if status, _, stderr := runs(t, append([]string{"doctor"}, strings.Fields(args)...)...); status == 0 || !strings.Contains(stderr, want) {
			t.Errorf("%s: status %d, %s", args, status, stderr)
		}
	}
}

// Each setting belongs either to one replica or to all, and each name in these lists is a setting.
func TestWhatReplicasShare(t *testing.T) {
	c := defaults()
	all, err := c.shared()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"block-size", "router-mode", "cost", "namespace", "router-replica-sync", "drain-timeout"} {
		if _, ok := all[name]; !ok {
			t.Errorf("%s is not compared", name)
		}
	}
	for _, name := range []string{"version", "http-address", "nats-url", "nats-creds", "nats-key", "replica", "state-dir", "extproc-tls-key", "log-level", "models", "workers", "dynamo"} {
		if _, ok := all[name]; ok {
			t.Errorf("%s is compared", name)
		}
	}
}

// The log names each worker that should send events but never did, and the flags to set.
func TestDiagnosisOfSilentWorkers(t *testing.T) {
	saying := func(transport string, neverHeard bool) []finding {
		x := replicaSaying("a", 1, func(_ int, r *reading) {
			w := &r.workers[0]
			w.KVEvents, w.Transport, w.NeverHeard = "none", transport, neverHeard
		})
		return slices.DeleteFunc(diagnose([]*examined{x}, tolerance{}), func(f finding) bool { return f.What != "events" })
	}
	for _, got := range [][]finding{saying("", true), saying("zmq", false), saying("http_poll", false)} {
		if len(got) != 1 || got[0].Level != fault || !strings.Contains(got[0].Text, "worker w1") || !strings.Contains(got[0].Text, "--kv-events-config") {
			t.Errorf("found %+v", got)
		}
	}
	if got := saying("none", false); len(got) != 0 {
		t.Errorf("findings for a worker that is configured to publish no events: %+v", got)
	}
}
