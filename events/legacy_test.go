// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/wire"
)

// The tests of this file play what was captured of older Dynamo over a real NATS.

var dynamoScope = wire.Scope{Namespace: "dynamo", Component: "backend", Endpoint: "generate"}

// played is a message as it was captured.
type played struct{ Run, Subject, Data string }

// captured returns the messages with cache events of some runs.
func captured(t *testing.T, dir, file string, runs ...string) (messages []played) {
	t.Helper()
	for _, row := range rows[played](t, dir, file) {
		if strings.HasSuffix(row.Subject, ".kv-events") && !strings.HasPrefix(row.Subject, "$") && slices.Contains(runs, row.Run) {
			messages = append(messages, row)
		}
	}
	if len(messages) < 30 {
		t.Fatalf("%d messages", len(messages))
	}
	return messages
}

// meant is what the messages mean: the index, slow and plain.
func meant(t *testing.T, messages []played) []string {
	t.Helper()
	x := indexer.New(indexer.Config{})
	for _, row := range messages {
		m, err := events.DecodeMessage(unhex(t, row.Data))
		if err != nil {
			t.Fatal(err)
		}
		for _, ev := range m.Events {
			x.Apply(number(ev.WorkerID), ev.Event)
		}
	}
	want := holdings(x)
	if len(want) < 10 {
		t.Fatalf("the capture leaves %d blocks", len(want))
	}
	return want
}

func (r *replica) mustHold(want []string) {
	r.t.Helper()
	var got []string
	for deadline := time.Now().Add(time.Minute); ; <-time.After(5 * time.Millisecond) {
		if got = r.content(); slices.Equal(got, want) {
			return
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("%d blocks, want %d; %s", len(got), len(want), firstDifference(got, want))
		}
	}
}

func play(t *testing.T, nc *nats.Conn, messages []played) {
	t.Helper()
	for _, m := range messages {
		if err := nc.Publish(m.Subject, unhex(t, m.Data)); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
}

// Events for a whole component, as Dynamo up to 1.3 publishes them, are heard on
// NATS core.
func TestEventsOfAComponent(t *testing.T) {
	dir := shared(t)
	if dir == "" {
		return
	}
	for file, run := range map[string]string{"dynamo-0.8.0/events_nats.jsonl": "local-indexer", "dynamo-1.3.1/events_nats.jsonl": "nats"} {
		t.Run(file, func(t *testing.T) {
			messages := captured(t, dir, file, run)
			nc := bus(t)
			r := newReplicaIn(t, nc, dynamoScope, "a", events.DurableConfig{})
			other := newReplicaIn(t, nc, wire.Scope{Namespace: "dynamo", Component: "prefill"}, "b", events.DurableConfig{})
			for _, l := range []*replica{r, other} {
				before := nc.NumSubscriptions()
				running(t, l.sub.Run)
				eventually(t, func() bool { return nc.NumSubscriptions() == before+3 })
			}
			play(t, nc, messages)
			r.mustHold(meant(t, messages))
			if n := len(other.content()); n != 0 {
				t.Errorf("another component has heard of %d blocks", n)
			}
		})
	}
}

// The stream keeps what is published for the component, too.
func TestTheStreamKeepsAComponentsEvents(t *testing.T) {
	dir := shared(t)
	if dir == "" {
		return
	}
	messages := captured(t, dir, "dynamo-1.3.1/events_nats.jsonl", "nats")
	n := startJetStream(t)
	a := newReplicaIn(t, n.connect(), dynamoScope, "a", events.DurableConfig{})
	a.stop = running(t, a.Run)
	eventually(t, a.Ready)
	play(t, n.connect(), messages)
	want := meant(t, messages)
	a.mustHold(want)
	a.stop()
	b := newReplicaIn(t, n.connect(), dynamoScope, "b", events.DurableConfig{})
	running(t, b.Run)
	b.mustHold(want)
}

// Dynamo's own stream of durable events is read, whether it was there before or comes
// later, whatever Dynamo's routers do to consumers that they do not know, across the
// death of replicas and the expiry of what a snapshot has; and it stays as it is.
func TestAnOlderDynamosStream(t *testing.T) {
	dir := shared(t)
	if dir == "" {
		return
	}
	messages := captured(t, dir, "dynamo-0.8.0/events_nats.jsonl", "jetstream", "jetstream-snapshot")
	name := dynamoScope.LegacyStream()
	for when, late := range map[string]bool{"it is there": false, "it comes later": true} {
		t.Run(when, func(t *testing.T) {
			n := startJetStream(t)
			js := n.jetStream()
			theirs := func() {
				t.Helper()
				// As Dynamo 0.8 makes it.
				if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: []string{name + ".*"}, MaxAge: time.Hour}); err != nil {
					t.Fatal(err)
				}
			}
			publish := func(messages []played) {
				t.Helper()
				for _, m := range messages {
					if _, err := js.Publish(t.Context(), m.Subject, unhex(t, m.Data)); err != nil {
						t.Fatal(err)
					}
				}
			}
			k := len(messages) / 3
			if !late {
				theirs()
				publish(messages[:k])
			}
			start := func(id string) *replica {
				r := newReplicaIn(t, n.connect(), dynamoScope, id, events.DurableConfig{Legacy: true})
				r.stop = running(t, r.Run)
				return r
			}
			a := start("a")
			eventually(t, a.Ready)
			if late {
				theirs()
				publish(messages[:k])
			}
			a.mustHold(meant(t, messages[:k]))

			// What a router of Dynamo does when it starts.
			stream, err := js.Stream(t.Context(), name)
			if err != nil {
				t.Fatal(err)
			}
			for c := range stream.ConsumerNames(t.Context()).Name() {
				if err := stream.DeleteConsumer(t.Context(), c); err != nil {
					t.Fatal(err)
				}
			}
			publish(messages[k : 2*k])
			a.mustHold(meant(t, messages[:2*k]))

			// Its last snapshot is all that the next one has of the first messages: the
			// owner of the stream has purged them, and so has age ours.
			a.stop()
			if err := stream.Purge(t.Context()); err != nil {
				t.Fatal(err)
			}
			ours, err := js.Stream(t.Context(), dynamoScope.Stream())
			if err != nil {
				t.Fatal(err)
			}
			if err := ours.Purge(t.Context()); err != nil {
				t.Fatal(err)
			}
			publish(messages[2*k:])
			b := start("b")
			b.mustHold(meant(t, messages))

			// NATS restarts.
			n.stop()
			n.start()
			eventually(t, func() bool { return b.nc.IsConnected() && b.Ready() })
			last := messages[len(messages)-1]
			cleared := strings.Replace(string(unhex(t, last.Data)), `"event":{`, `"event":{"dp_rank":0,"event_id":99999,"data":"cleared"},"was":{`, 1)
			eventually(t, func() bool {
				_, err := js.Publish(t.Context(), name+".kv-events", []byte(cleared))
				return err == nil
			})
			m, err := events.DecodeMessage([]byte(cleared))
			if err != nil || m.Events[0].Event.Kind != indexer.Cleared {
				t.Fatalf("%+v, %v", m, err)
			}
			eventually(t, func() bool {
				b.mu.Lock()
				defer b.mu.Unlock()
				return b.index.WorkerBlocks(number(m.Events[0].WorkerID)) == 0
			})
			if stream, err = js.Stream(t.Context(), name); err != nil {
				t.Fatal(err)
			}
			if got := stream.CachedInfo().State.Msgs; int(got) < len(messages)-2*k+1 {
				t.Errorf("their stream has %d messages left, want at least %d", got, len(messages)-2*k+1)
			}
		})
	}
}

// A worker heard in two dialects is understood in the one that was first, until that
// is silent; then what it had said is forgotten.
func TestAWorkerSpeaksOneDialect(t *testing.T) {
	t.Parallel()
	nc := bus(t)
	var seconds atomic.Int64
	x := indexer.New(indexer.Config{})
	sub, err := events.NewSubscriber(nc, events.SubscriberConfig{
		Now:  func() time.Time { return start.Add(time.Duration(seconds.Load()) * time.Second) },
		Sink: func(worker uint64, _ uint32, ev indexer.Event) { x.Apply(int(worker), ev) },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	blocks := func(what string, worker, want int) {
		t.Helper()
		if got := x.WorkerBlocks(worker); got != want {
			t.Errorf("%s: %d blocks of worker %d, want %d", what, got, worker, want)
		}
	}
	inJSON := func(worker, id, block string) {
		sub.Take(ctx, events.FeedCore, []byte(`{"worker_id":`+worker+`,"event":{"event_id":`+id+`,"data":{"stored":{"parent_hash":null,"blocks":[{"block_hash":`+block+`,"tokens_hash":`+block+`}]}},"dp_rank":0}}`))
	}
	inEnvelope := func(worker, id, block uint64, array bool) {
		ev := events.RouterEvent{WorkerID: worker, EventID: id, Event: indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: block, Local: block}}}}
		payload := events.AppendEvents(nil, []events.RouterEvent{ev})
		if !array {
			payload = payload[1:]
		}
		sub.Take(ctx, events.FeedCore, events.AppendEnvelope(nil, events.Envelope{PublisherID: 5, Topic: events.Topic, Payload: payload}))
	}
	inJSON("1", "0", "10")
	inEnvelope(1, 1, 11, true)
	inEnvelope(1, 2, 12, false)
	blocks("JSON first", 1, 1)
	inEnvelope(2, 1, 20, false)
	inEnvelope(2, 2, 21, true)
	inJSON("2", "3", "22")
	blocks("the component's first", 2, 1)
	seconds.Store(29)
	inJSON("1", "1", "13")
	seconds.Store(58)
	inEnvelope(1, 3, 14, true)
	blocks("not silent for long", 1, 2)
	seconds.Store(60)
	inEnvelope(1, 4, 15, true)
	inJSON("1", "2", "16")
	blocks("silent for long", 1, 1)
	sub.Forget(1)
	x.RemoveWorker(1)
	inJSON("1", "0", "17")
	blocks("forgotten", 1, 1)
}
