// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// judge adds the judgement of the events of each worker, as a replica does.
func judge(r *Reading) {
	of, err := router.New(router.Config{NoEvents: r.Settings["no-kv-events"] == true})
	if err != nil {
		panic(err)
	}
	for i := range r.workers {
		w := &r.workers[i]
		w.EventsLevel, w.EventsText = of.EventsState(&w.WorkerState)
	}
}

// replicaSaying is a replica that reports the same in three readings, unless change modifies one of
// them.
func replicaSaying(name string, id uint64, change func(n int, r *Reading)) *Replica {
	x := &Replica{Source: Source{URL: "http://" + name}, Name: name}
	for n := range 3 {
		r := Reading{
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
			r.workers = append(r.workers, api.Worker{WorkerState: router.WorkerState{
				Worker: router.Worker{ID: w + 1}, Name: fmt.Sprint("w", w+1), Model: "m", Health: "healthy", KVEvents: "ok", BlockSize: 16,
				CachedBlocks: 100, ActiveRequests: 2, PendTokens: 50,
			}})
		}
		if change != nil {
			change(n, &r)
		}
		judge(&r)
		x.readings = append(x.readings, r)
	}
	return x
}

// One of two replicas reports another value. Values that are equal in any two readings are not
// reported as different.
func TestDiagnosis(t *testing.T) {
	const equal = ""
	for name, c := range map[string]struct {
		change func(n int, r *Reading)
		edit   func(x *Replica)
		want   string // text of the one expected finding, or the constant equal
		level  Severity
	}{
		"nothing":              {want: equal},
		"a request on its way": {change: func(n int, r *Reading) { r.workers[0].ActiveRequests += n }, want: equal},
		"a request for ever": {
			change: func(_ int, r *Reading) { r.workers[0].ActiveRequests = 3 },
			want:   "active requests of w1: 2 at a; 3 at b", level: different,
		},
		"a load that moves elsewhere": {
			change: func(n int, r *Reading) { r.workers[1].ActiveRequests = 7 + n },
			want:   "active requests of w2: 2 at a; 7..9 at b", level: different,
		},
		"pending tokens": {
			change: func(_ int, r *Reading) { r.workers[1].PendTokens = 0 },
			want:   "pending tokens of w2: 0 at b; 50 at a", level: different,
		},
		"blocks on their way": {change: func(n int, r *Reading) { r.workers[0].CachedBlocks = 90 + 8*n }, want: equal},
		"blocks": {
			change: func(n int, r *Reading) { r.workers[0].CachedBlocks = 80 + 8*n },
			want:   "cached blocks of w1: 100 at a; 80..96 at b", level: different,
		},
		"an unknown worker": {
			change: func(_ int, r *Reading) { r.workers = r.workers[:1] },
			want:   "worker w2: known at a; unknown at b", level: different,
		},
		"a worker that comes": {
			change: func(n int, r *Reading) { r.workers = r.workers[:min(2, 1+n)] },
			want:   equal,
		},
		"another health": {
			change: func(_ int, r *Reading) { r.workers[0].Health = "degraded" },
			want:   "health of w1: degraded at b; healthy at a", level: different,
		},
		"a setting": {
			change: func(_ int, r *Reading) { r.Settings = map[string]any{"block-size": 32.0, "busy-threshold": nil} },
			want:   "setting block-size: 16 at a; 32 at b", level: different,
		},
		"a setting that the other does not have": {
			change: func(_ int, r *Reading) { r.Settings = map[string]any{"block-size": 16.0, "busy-threshold": 0.5} },
			want:   "setting busy-threshold: 0.5 at b; none at a", level: different,
		},
		"thresholds set by the API": {
			change: func(_ int, r *Reading) { r.thresholds = map[string]string{"m": "busy 1"} },
			want:   `busy thresholds of m: busy 1 at b; none at a`, level: different,
		},
		"the hash seed": {
			change: func(_ int, r *Reading) { r.HashSeed = 1 },
			want:   "hash seed: 1 at b; 1337 at a", level: different,
		},
		"how prompts are read": {
			change: func(_ int, r *Reading) {
				r.models = []router.ModelState{{Model: "m", Names: []string{"m"}, BlockSizes: []int{16}, TokenState: router.TokenState{TokenMode: "bytes"}}}
			},
			want: "model m: [m], blocks of [16], tokens:  at a; [m], blocks of [16], tokens: bytes at b", level: different,
		},
		"chats that have no exact ids": {
			change: func(_ int, r *Reading) {
				r.models[0].TokenState = router.TokenState{Why: "chats with tools have no exact ids: chat_template cannot be used: line 4: the filter 'random'"}
			},
			want: "b: model m: chats with tools have no exact ids: chat_template cannot be used: line 4: the filter 'random'", level: note,
		},
		"the version": {
			change: func(_ int, r *Reading) { r.Version = "v2" },
			want:   "version: v1 at a; v2 at b", level: note,
		},
		"what it holds of the other": {
			change: func(_ int, r *Reading) { r.Peers[0].ActiveRequests = 5 },
			want:   "requests of a: 2 at a; 5 at b", level: different,
		},
		"it does not hear the other": {
			change: func(_ int, r *Reading) { r.Peers = nil },
			want:   "requests of a: 2 at a; not heard at b", level: different,
		},
		"it asks the other": {
			change: func(_ int, r *Reading) { r.Peers[0].Whole = false },
			want:   "b: it is not sure to hold all requests of a, and asks for them", level: note,
		},
		"there is a third one": {
			change: func(_ int, r *Reading) { r.Peers = append(r.Peers, replicas.PeerView{RouterID: 3, Replica: "c"}) },
			want:   "replica c (3) is heard by others, but was not asked: give its --url, too", level: note,
		},
		"NATS is away": {
			change: func(_ int, r *Reading) { r.Bus = false },
			want:   "b: NATS is away: kvroute hears neither of workers nor of other replicas", level: fault,
		},
		"a check fails": {
			change: func(_ int, r *Reading) {
				r.Ready = api.Readiness{Status: "degraded", Checks: map[string]bool{"registry": false}}
			},
			want: `b: kvroute is degraded: the check "registry" fails`, level: fault,
		},
		"a balancer": {
			change: func(n int, r *Reading) { r.RouterID = uint64(2 + n) },
			edit: func(x *Replica) {
				x.readings[2].RouterID = 2 // the replica that the other one hears
				x.readings[0].RouterID = 5
			},
			want: "b: its answers come from several replicas, or it has just started again: is the URL that of a balancer?", level: fault,
		},
		"it does not answer": {
			edit: func(x *Replica) { x.Err = http.ErrServerClosed },
			want: "b: it cannot be asked: http: Server closed", level: fault,
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := replicaSaying("a", 1, nil), replicaSaying("b", 2, c.change)
			if c.edit != nil {
				c.edit(b)
			}
			got := diagnose([]*Replica{a, b})
			if b.Err != nil { // the doctor then also notes the unread replica
				got = slices.DeleteFunc(got, func(f Finding) bool { return f.What == "replica" })
			}
			if strings.Contains(name, "health") { // health is also a finding of one replica
				got = slices.DeleteFunc(got, func(f Finding) bool { return f.Level == note })
			}
			switch {
			case c.want == equal && len(got) == 0:
			case c.want == equal, len(got) != 1:
				t.Errorf("found %+v, want %q", got, c.want)
			case got[0].String() != c.want || got[0].Level != c.level:
				t.Errorf("found %s: %s\nwant  %s: %s", got[0].Level, got[0].String(), c.level, c.want)
			}
		})
	}
	for _, state := range slices.DeleteFunc(indexer.States(), func(s indexer.State) bool { return !s.Faulty() }) {
		found := diagnose([]*Replica{replicaSaying("a", 1, func(_ int, r *Reading) { r.workers[0].KVEvents, r.Peers = state, nil })})
		if count(found, different, fault) != 1 || !strings.Contains(found[0].String(), string(state)) {
			t.Errorf("%s: found %+v", state, found)
		}
		old := replicaSaying("a", 1, func(_ int, r *Reading) { r.workers[0].KVEvents, r.Peers = state, nil })
		for i := range old.readings { // version 0.1.0 does not judge events itself
			old.readings[i].workers[0].EventsLevel, old.readings[i].workers[0].EventsText = "", ""
		}
		if found := diagnose([]*Replica{old}); count(found, different, fault) != 1 || !strings.Contains(found[0].String(), string(state)) {
			t.Errorf("%s of version 0.1.0: found %+v", state, found)
		}
	}
	empty := diagnose([]*Replica{replicaSaying("a", 1, func(_ int, r *Reading) { r.workers, r.Peers = nil, nil })})
	if len(empty) != 1 || empty[0].String() != "a: it knows no worker" {
		t.Errorf("without workers: %+v", empty)
	}
	alone := func(_ int, r *Reading) { r.Synced, r.Peers, r.workers[0].ActiveRequests = false, nil, int(r.RouterID) }
	if found := diagnose([]*Replica{replicaSaying("a", 1, alone), replicaSaying("b", 2, alone)}); len(found) != 1 || found[0].Level != note || found[0].What != "sync" {
		t.Errorf("replicas that do not exchange: %+v", found)
	}
}

// The doctor names each worker that should send events but never did, and what to set for its engine.
func TestDiagnosisOfSilentWorkers(t *testing.T) {
	for _, c := range []struct {
		transport, engine string
		neverHeard, off   bool   // off: kvroute ignores events
		want              string // at the end of the one finding; "" = none
	}{
		{"", "", true, false, `"topic":"kv-events"}' and set events: {transport: zmq} for the worker, or events: {transport: none} if it publishes none`},
		{"", "trtllm", true, false, "event_buffer_max_size: 1024} in the file of --extra_llm_api_options and set events: {transport: http_poll} for the worker, or events: {transport: none} if it publishes none"},
		{"zmq", "vllm", false, false, `start vLLM with --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657","topic":"kv-events"}'`},
		{"zmq", "sglang", false, false, `start SGLang with --kv-events-config '{"publisher":"zmq","endpoint":"tcp://*:5557","topic":"kv-events"}'`},
		{"http_poll", "trtllm", false, false, "start TensorRT-LLM with kv_cache_config: {event_buffer_max_size: 1024} in the file of --extra_llm_api_options"},
		{"nats", "", false, false, `"topic":"kv-events"}'`},
		{"none", "", false, false, ""},
		{"zmq", "", false, true, ""},
		{"dead", "", true, false, ""}, // its health is the fault
		{"configured", "vllm", false, false, `kvroute reads tcp://127.0.0.1:5601; start vLLM with --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5601","replay_endpoint":"tcp://*:5701","topic":"kv-events"}', or set events.endpoint of the worker to the engine's socket`},
		{"alone", "vllm", false, false, `"publisher":"zmq","endpoint":"ipc:///run/events","topic":"kv-events"}', or set events.endpoint of the worker to the engine's socket`},
	} {
		x := replicaSaying("a", 1, func(_ int, r *Reading) {
			w := &r.workers[0]
			w.KVEvents, w.Transport, w.NeverHeard, w.Engine, w.Health = "none", c.transport, c.neverHeard, c.engine, "healthy"
			w.CachedBlocks = 0
			switch c.transport {
			case "dead":
				w.Health = "unhealthy"
			case "alone":
				w.Transport, w.Endpoint = "zmq", "ipc:///run/events"
			case "configured":
				w.Transport, w.Endpoint, w.Replay = "zmq", "tcp://127.0.0.1:5601", "tcp://127.0.0.1:5701"
			}
			r.Settings["no-kv-events"] = c.off
		})
		got := slices.DeleteFunc(diagnose([]*Replica{x}), func(f Finding) bool { return f.What != "events" })
		switch {
		case c.want == "" && len(got) == 0:
		case c.want == "" || len(got) != 1 || got[0].Level != fault || got[0].Text != "events of w1: no event has come, although it should send some: kvroute predicts its cache" || !strings.HasSuffix(got[0].Advice, c.want):
			t.Errorf("%+v: found %+v", c, got)
		}
	}
}

// Each fault in Envoy's use of a replica is a finding.
func TestDiagnosisOfEnvoy(t *testing.T) {
	found := diagnose([]*Replica{replicaSaying("a", 1, func(_ int, r *Reading) {
		r.Peers, r.Envoy = nil, &envoy.State{Faults: []envoy.Fault{{What: "unused", Text: "Envoy sent no request"}, {What: "bypassed", Text: "100 % of"}}}
	})})
	if len(found) != 2 || count(found, fault) != 2 || found[0].String() != "a: Envoy sent no request" || found[1].String() != "a: 100 % of" {
		t.Errorf("found %+v", found)
	}
}

// Dead workers, workers that left without a word, faults of workers and differing token ids are faults, each
// with its name and cause. A worker that was removed is no fault.
func TestDiagnosisOfWorkers(t *testing.T) {
	lost := fleet.Left{ID: 5, Name: "w5", Address: netip.MustParseAddrPort("10.0.0.5:80"), State: fleet.Lost}
	removed := lost
	removed.State = fleet.Removed
	refused := router.Fault{What: "event_socket_refused", Text: "tcp://10.0.0.1:5601: connection refused"}
	for _, c := range []struct {
		change func(r *Reading)
		want   string // the faults
	}{
		{func(*Reading) {}, ""},
		{func(r *Reading) { r.workers[0].Health = "degraded" }, ""},
		{func(r *Reading) { r.workers[0].Health = "unhealthy" }, "a: worker w1 is unhealthy: it gets requests only if no worker is better"},
		{func(r *Reading) {
			r.workers[0].Health, r.workers[0].HealthCause = "expired", "timeout: no answer to a probe of its health"
		}, "a: worker w1 is expired: it gets requests only if no worker is better: timeout: no answer to a probe of its health; if its health has another path, or takes longer, set health: {path: …, timeout: …}, or health: none"},
		{func(r *Reading) {
			r.workers[0].Health, r.workers[0].Faults = "unhealthy", []router.Fault{{What: "silent", Text: "connection refused at 10.0.0.1:80"}}
		}, "a: worker w1 has the fault silent: connection refused at 10.0.0.1:80"},
		{func(r *Reading) {
			w := &r.workers[0]
			w.KVEvents, w.CachedBlocks, w.Transport, w.Faults = "none", 0, "zmq", []router.Fault{refused}
		}, "a: worker w1 has the fault event_socket_refused: tcp://10.0.0.1:5601: connection refused"},
		{func(r *Reading) { r.left = []api.LeftWorker{{Left: lost, Text: "left 2 min ago: connection refused"}} }, "a: worker w5 at 10.0.0.5:80 left 2 min ago: connection refused"},
		{func(r *Reading) { r.left = []api.LeftWorker{{Left: removed, Text: "removed 2 min ago"}} }, ""},
		{func(r *Reading) {
			r.left = []api.LeftWorker{{Left: fleet.Left{ID: 7, Name: "w7", State: fleet.Unresolved}, Text: "has no address: no such host"}}
		}, "a: worker w7 has no address: no such host"},
		{func(r *Reading) { r.models[0].Checks = "drift" }, "a: model m: its workers make other token ids than kvroute (drift)"},
		{func(r *Reading) { r.models[0].Checks = "agreed" }, ""},
		{
			func(r *Reading) {
				r.models[0].Checks, r.models[0].Classes = "differs", []confirm.ClassState{
					{Class: "chat", Requests: map[string]uint64{"confirmed": 9}},
					{Class: "chat+tools", Unconfirmed: true, Requests: map[string]uint64{"confirmed": 1, "unconfirmed": 3}, Block: 1, Position: 31, Ours: "a", Theirs: `"strict": false`},
				}
			},
			`a: model m: its workers make other tokens than kvroute for requests of the class chat+tools (3 unconfirmed, 1 confirmed): at token 31 the engine has "\"strict\": false", kvroute "a"; such requests are routed by their text`,
		},
		{
			func(r *Reading) {
				r.models[0].Classes = []confirm.ClassState{{Class: "chat", Unconfirmed: true, Block: 2, Position: -1}}
			},
			"a: model m: its workers make other tokens than kvroute for requests of the class chat (0 unconfirmed, 0 confirmed): the first different token is in block 2; such requests are routed by their text",
		},
	} {
		x := replicaSaying("a", 1, func(_ int, r *Reading) {
			r.Peers = nil
			c.change(r)
		})
		var got []string
		found := diagnose([]*Replica{x})
		for i := range found {
			if found[i].Level == fault {
				got = append(got, found[i].String())
			}
			dead := slices.Contains([]string{"silent", "health", "left"}, found[i].What) && found[i].Level == fault
			if found[i].Docs == "" || dead && !strings.Contains(found[i].Advice, "start it again") {
				t.Errorf("no link, or no advice: %+v", found[i])
			}
		}
		if text := strings.Join(got, "\n"); text != c.want {
			t.Errorf("found %q\nwant  %q", text, c.want)
		}
		report := Report{Replicas: []*Replica{x}, Findings: found}
		want := "healthy: 1 replica, 2 workers, "
		if c.want != "" {
			want = "unhealthy: 1 fault: 1 replica, 2 workers, "
		}
		if got := report.Summary(); !strings.HasPrefix(got, want) {
			t.Errorf("the summary is %q, want %q", got, want)
		}
	}
}

// A model without a tokenizer is routed by the text of prompts only. That is allowed, and said.
func TestModelsWithoutATokenizerAreNamed(t *testing.T) {
	for _, group := range []string{"", "g"} { // the workers of a group make their tokens themselves
		x := replicaSaying("a", 1, func(_ int, r *Reading) {
			r.Peers = nil
			r.models[0].TokenState = router.TokenState{TokenMode: tokenizer.Bytes, TokenReason: tokenizer.NoTokenizer, Why: "it is missing"}
			for i := range r.workers {
				r.workers[i].Group = group
			}
		})
		want := []Finding{{
			Level: note, What: "tokens", Replica: "a",
			Text:   "model m has no tokenizer, so kvroute finds cached prompts only by their text: it is missing",
			Advice: "name the folder of its tokenizer under models",
			Docs:   "https://github.com/kvroute/kvroute/blob/v1/docs/troubleshooting.md#tokenizerdrift",
		}}
		if group != "" {
			want = nil
		}
		if diff := cmp.Diff(want, diagnose([]*Replica{x})); diff != "" {
			t.Errorf("group %q (-want +got):\n%s", group, diff)
		}
	}
}
