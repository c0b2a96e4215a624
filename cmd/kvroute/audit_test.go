// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// A forged event makes kvroute forget the blocks of a worker. The usage in the worker's responses shows
// the difference: kvroute names the worker and reads its events again.
func TestTheAuditFindsABrokenIndex(t *testing.T) {
	t.Parallel() // mostly waits
	d := newStack(t, 1, []string{"--speed", "50", "--enable-local-indexer"})
	d.Core = true
	d.begin(t, "--audit-share", "1", "--router-predicted-ttl-secs", "0", "--worker-metrics", "1")
	prompt := strings.Repeat("The same long beginning of many questions. ", 100)
	sendChats := func(n int) {
		t.Helper()
		for range n {
			before := d.counter(t, "kvroute_audit_responses_total", "")
			body := strings.Replace(chatBody(prompt, 4, true), "{", `{"stream_options":{"include_usage":true},`, 1)
			if resp, text := reply(t, d, http.MethodPost, chatPath, body, nil); resp.StatusCode != http.StatusOK {
				t.Fatal(text)
			}
			// The observer's copy of the last chunk may come after the response's end.
			eventually(t, "a response is not audited", func() bool { return d.counter(t, "kvroute_audit_responses_total", "") > before })
		}
	}
	state := func() router.WorkerState { return workers(t, d)[0] }
	indexed := func() bool { return state().CachedBlocks > 20 && state().CachedBlocks == cachedBlocks(t, d.Engines[0]) }
	sendChats(1)
	eventually(t, "the blocks of the first prompt are not known", indexed)
	sendChats(4)
	if a := state().Audit; a == nil || a.Departs || d.counter(t, "kvroute_audit_responses_total", `outcome="equal"`) < 4 {
		t.Fatalf("audit %+v of a worker whose index is right", a)
	}
	if kept := newest(t, d); kept.Usage == nil || kept.Usage.CachedTokens == 0 || kept.FirstTokenBy != router.SignObserver {
		t.Errorf("kept decision: usage %+v, first token by %s", kept.Usage, kept.FirstTokenBy)
	}

	forgeClear(t, d)
	eventually(t, "the forged event is not applied", func() bool { return state().CachedBlocks == 0 })
	sendChats(4)
	if !state().Audit.Departs {
		t.Errorf("audit %+v after the index was broken", state().Audit)
	}
	eventually(t, "the log does not name the worker", func() bool {
		return strings.Contains(d.Router.LastLines(), "its events are requested again") && strings.Contains(d.Router.LastLines(), "worker="+state().Name)
	})
	eventually(t, "the index is not read again", indexed)
	sendChats(4)
	if a := state().Audit; a == nil || a.Departs {
		t.Errorf("audit %+v after the index was read again", a)
	}
	if n := d.counter(t, "kvroute_audit_prompts_total", `outcome="different"`); n != 0 {
		t.Errorf("%d prompts of another length", n)
	}
	if n := d.counter(t, "gen_ai_server_time_per_output_token_seconds_count", ""); n < 10 {
		t.Errorf("the time between tokens of %d responses is known", n)
	}
}

// Events that no source can send again are not said to be requested.
func TestTheAuditSaysWhereNothingIsRequested(t *testing.T) {
	r, err := router.New(router.Config{})
	if err != nil {
		t.Fatal(err)
	}
	direct, err := fleet.NewDirectWorkers(fleet.DirectConfig{Router: r})
	if err != nil {
		t.Fatal(err)
	}
	var log fixtures.Log
	s := &server{log: slog.New(slog.NewTextHandler(&log, nil)), direct: direct}
	s.departs(router.Worker{ID: 7}, true)
	if !log.Has("no source can send its events again") || !log.Has("worker=7") || log.Has("requested") {
		t.Error(log.String())
	}
}

// Envoy opens an observer stream for event streams, and for those of the other responses whose usage
// kvroute reads.
func TestTheObserverSeesOnlyWhatItNeeds(t *testing.T) {
	t.Parallel() // mostly waits
	for _, audits := range []bool{false, true} {
		d := newStack(t, 1, nil)
		d.begin(t, "--audit-share", map[bool]string{false: "0", true: "1"}[audits])
		observed := func() int64 {
			n, err := d.Envoy.Sum(t.Context(), `^http\.llm\.ext_proc\.kvroute_observer\.streams_started$`)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		for _, c := range []struct {
			what, path, body string
			status           int
			want             bool
		}{
			{"an event stream", chatPath, chatBody("hello", 4, true), 200, true},
			{"a document", chatPath, chatBody("hello", 4, false), 200, audits},
			{"an unknown path", "/metrics", "{}", 404, false},
			{"the pool's response", "/v1/models", "", 200, false},
		} {
			before := observed()
			method := http.MethodPost
			if c.body == "" {
				method = http.MethodHead // GET is answered by kvroute
			}
			if resp, text := reply(t, d, method, c.path, c.body, http.Header{"X-Dynamo-Request-Id": {"forged-audit"}}); resp.StatusCode != c.status {
				t.Fatalf("%s: status %d: %s", c.what, resp.StatusCode, text)
			}
			if got := observed() > before; got != c.want {
				t.Errorf("audits %v, %s is observed: %v", audits, c.what, got)
			}
		}
		if audits {
			eventually(t, "the document is not audited", func() bool { return d.counter(t, "kvroute_audit_responses_total", "") >= 1 })
		}
	}
}

// forgeClear publishes an event as the only worker's publisher: the worker has cleared its cache.
func forgeClear(t *testing.T, d *demonstration) {
	t.Helper()
	nc, err := nats.Connect(d.Bus.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	id := wire.WorkerID(d.Engines[0].Name)
	m, err := nc.Request(wire.Scope{}.Own("query", wire.WorkerKey(id), "0"), events.AppendQuery(nil, events.Query{WorkerID: id}), process.Patience)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := events.DecodeAnswer(m.Data)
	if err != nil {
		t.Fatal(err)
	}
	forged := events.RouterEvent{WorkerID: id, EventID: answer.LastEventID + 1, Event: indexer.Event{Kind: indexer.Cleared}}
	if err := nc.Publish(wire.Scope{}.Topic(events.Topic), events.AppendEnvelope(nil, events.Envelope{
		PublisherID: publisherOf(t, nc, d.Engines[0].Name), Topic: events.Topic, Payload: events.AppendEvents(nil, []events.RouterEvent{forged}),
	})); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
}
