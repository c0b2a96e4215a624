// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/wire"
)

// The tests of this file start workers and kvroute as processes, without Envoy.

// startFleet starts workers that answer queries directly, and kvroute.
func startFleet(t *testing.T, engine []string, flags ...string) *demonstration {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	d := &demonstration{demo.Stack{Dir: t.TempDir(), Core: true, Workers: 3, EngineFlags: append([]string{"--speed", "50"}, engine...), Model: "sim"}}
	t.Cleanup(func() {
		d.Stop()
		if t.Failed() && d.Router != nil {
			t.Logf("kvroute's log:\n%s", d.Router.LastLines())
		}
		http.DefaultClient.CloseIdleConnections()
	})
	if err := d.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	d.serve(t, flags...)
	return d
}

// serve starts or restarts kvroute.
func (d *demonstration) serve(t *testing.T, flags ...string) {
	t.Helper()
	var err error
	if d.Router, err = demo.Start(t.Context(), d.Dir, "kvroute", append([]string{
		"serve", "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-url", d.Bus.URL(), "--drain-timeout", "1s", "--drain-delay", "0", d.EventsFlag(),
	}, flags...)...); err != nil {
		t.Fatal(err)
	}
	if err := d.WaitWorkers(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// prompts sends prompts to each worker, so that it caches them.
func (d *demonstration) prompts(t *testing.T, what string) {
	t.Helper()
	for i, e := range d.Engines {
		for n := range 1 + i {
			content := fmt.Sprint(what, i, n, strings.Repeat(" and so on", 200))
			if resp, _ := whole(t, http.MethodPost, "http://"+e.At.HTTP+chatPath, chatBody(content, 2, false), nil); resp.StatusCode != http.StatusOK {
				t.Fatalf("status %d", resp.StatusCode)
			}
		}
	}
}

// held requests from the workers how many blocks they hold.
func (d *demonstration) held(t *testing.T) map[string]int {
	t.Helper()
	nc, err := nats.Connect(d.Bus.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	blocks := map[string]int{}
	for _, e := range d.Engines {
		id := wire.WorkerID(e.Name)
		m, err := nc.Request(wire.Scope{}.Own("query", wire.WorkerKey(id), "0"), events.AppendQuery(nil, events.Query{WorkerID: id}), process.Patience)
		if err != nil {
			t.Fatal(err)
		}
		a, err := events.DecodeAnswer(m.Data)
		if err != nil || a.Kind != events.AnswerDump {
			t.Fatalf("%v, %v", a.Kind, err)
		}
		blocks[e.Name] = 0
		for _, ev := range a.Events {
			blocks[e.Name] += len(ev.Event.Blocks)
		}
	}
	return blocks
}

// follows waits until kvroute's index contains what the workers hold.
func (d *demonstration) follows(t *testing.T) {
	t.Helper()
	want := d.held(t)
	eventually(t, fmt.Sprint("the workers' caches are not known: ", want), func() bool {
		for _, w := range workers(t, d) {
			if w.CachedBlocks != want[w.Name] || w.CachedBlocks == 0 || w.KVEvents != "ok" {
				return false
			}
		}
		return true
	})
}

// counter reads a counter of kvroute.
func (d *demonstration) counter(t *testing.T, name, label string) int {
	t.Helper()
	_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
	sum := 0
	for _, m := range regexp.MustCompile(`(?m)^`+name+`\{([^}]*)\} (\S+)$`).FindAllStringSubmatch(text, -1) {
		if strings.Contains(m[1], label) {
			v, err := strconv.ParseFloat(m[2], 64)
			if err != nil {
				t.Fatal(err)
			}
			sum += int(v)
		}
	}
	return sum
}

// A router that is killed requests only the events since its last save; without its file, or with a
// damaged one, it requests everything.
func TestARestartAsksForRangesOnly(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	flags := []string{"--state-dir", dir, "--state-interval", "50ms"}
	d := startFleet(t, []string{"--enable-local-indexer"}, flags...)
	file := filepath.Join(dir, wire.Scope{}.Bucket(eventFile))
	asked := func() (ranges, dumps int) {
		return d.counter(t, "kvroute_events_queries_total", `kind="range"`), d.counter(t, "kvroute_events_queries_total", `kind="dump"`)
	}
	saved := func() {
		t.Helper()
		written := func() time.Time {
			info, err := os.Stat(file)
			if err != nil {
				return time.Time{}
			}
			return info.ModTime()
		}
		for range 2 { // the second save from now contains everything that is known now
			before := written()
			eventually(t, "the state is not saved", func() bool { return written().After(before) })
		}
	}
	d.prompts(t, "first")
	d.follows(t)
	if ranges, dumps := asked(); dumps != d.Workers {
		t.Errorf("asked for %d ranges and %d dumps, want one dump of each worker", ranges, dumps)
	}
	saved()

	kill(t, d.Router)
	d.prompts(t, "while nobody listens")
	d.serve(t, flags...)
	d.follows(t)
	if ranges, dumps := asked(); ranges < d.Workers || dumps != 0 {
		t.Errorf("after a crash: asked for %d ranges and %d dumps, want ranges only", ranges, dumps)
	}
	d.prompts(t, "afterwards")
	d.follows(t)

	// After a drain everything is saved.
	d.Router.Stop()
	d.serve(t, flags...)
	d.follows(t)
	eventually(t, "nobody is asked after a drain", func() bool { ranges, dumps := asked(); return ranges+dumps >= d.Workers })
	if ranges, dumps := asked(); ranges != d.Workers || dumps != 0 {
		t.Errorf("after a drain: asked for %d ranges and %d dumps, want ranges only", ranges, dumps)
	}

	// A damaged file is logged, and kvroute serves without it.
	kill(t, d.Router)
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2]++
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	d.serve(t, flags...)
	d.follows(t)
	if ranges, dumps := asked(); dumps != d.Workers || !strings.Contains(d.Router.LastLines(), "what it says of the workers is lost") {
		t.Errorf("with a damaged file: asked for %d ranges and %d dumps, log:\n%s", ranges, dumps, d.Router.LastLines())
	}

	// A worker that restarted is read completely.
	saved()
	kill(t, d.Router)
	d.Engines[0].Stop()
	name := d.Engines[0].Name
	if d.Engines[0], err = demo.Start(t.Context(), d.Dir, name, append([]string{
		"engine", "--name", name, "--listen", "127.0.0.1:0", "--nats-url", d.Bus.URL(), "--model", "sim", d.EventsFlag(),
	}, d.EngineFlags...)...); err != nil {
		t.Fatal(err)
	}
	d.prompts(t, "anew")
	d.serve(t, flags...)
	d.follows(t)
	eventually(t, "the others are not asked", func() bool { ranges, dumps := asked(); return ranges+dumps >= d.Workers })
	if ranges, dumps := asked(); ranges != d.Workers-1 || dumps != 1 {
		t.Errorf("asked for %d ranges and %d dumps, want one dump, of the worker that started anew", ranges, dumps)
	}
}

// listeners returns how many clients subscribe to a subject or below it.
func listeners(t *testing.T, bus *bus.Server, subject string) (n int) {
	t.Helper()
	s, err := bus.Server.Subsz(&natsserver.SubszOptions{Subscriptions: true, Limit: 10_000})
	if err != nil {
		t.Fatal(err)
	}
	for _, sub := range s.Subs {
		if strings.HasPrefix(sub.Subject, subject) {
			n++
		}
	}
	return n
}

// A router that does not use events does not subscribe to them, sends no queries and saves
// nothing of them. Started again with a use for them, it follows the workers.
func TestUnwantedEventsAreNotRead(t *testing.T) {
	t.Parallel() // it waits, most of the time
	for _, flags := range [][]string{{"--no-kv-events"}, {"--kv-overlap-score-weight", "0"}} {
		t.Run(flags[0], func(t *testing.T) {
			dir := t.TempDir()
			d := startFleet(t, []string{"--enable-local-indexer"}, append(flags, "--state-dir", dir, "--state-interval", "20ms")...)
			subject := wire.Scope{}.Topic(events.Topic)
			nc, err := nats.Connect(d.Bus.URL())
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			presence, err := nc.SubscribeSync(wire.Scope{}.Own("presence"))
			if err != nil {
				t.Fatal(err)
			}
			if m, err := presence.NextMsg(process.Patience); err != nil {
				t.Fatalf("presence %v, %v", m, err)
			}
			if n := listeners(t, d.Bus, subject); n != 0 {
				t.Errorf("%d subscriptions to events that the router does not use", n)
			}
			d.prompts(t, "first")
			if n := d.counter(t, "kvroute_events_queries_total", ""); n != 0 {
				t.Errorf("%d queries were sent", n)
			}
			if _, err := os.Stat(filepath.Join(dir, wire.Scope{}.Bucket(eventFile))); err == nil {
				t.Error("there is a file of events")
			}
			d.Router.Stop()
			d.serve(t)
			d.follows(t)
			d.prompts(t, "second")
			d.follows(t)
		})
	}
}

// publisherOf returns the publisher of a worker's events, as registered.
func publisherOf(t *testing.T, nc *nats.Conn, worker string) uint64 {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	bucket, err := js.KeyValue(t.Context(), wire.Scope{}.Bucket("workers"))
	if err != nil {
		t.Fatal(err)
	}
	entry, err := bucket.Get(t.Context(), wire.WorkerKey(wire.WorkerID(worker)))
	if err != nil {
		t.Fatal(err)
	}
	record, err := fleet.ParseRecord(entry.Value())
	if err != nil {
		t.Fatal(err)
	}
	return record.Events.PublisherID
}

// A worker without an answer to queries for missing events is shown as suspect.
func TestAWorkerInDoubtShows(t *testing.T) {
	d := startFleet(t, nil)
	nc, err := nats.Connect(d.Bus.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	worker := wire.WorkerID(d.Engines[0].Name)
	publisher := publisherOf(t, nc, d.Engines[0].Name) // events of another one would wait
	say := func(id uint64) {
		t.Helper()
		ev := events.RouterEvent{WorkerID: worker, EventID: id, Event: indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: id, Local: id}}}}
		m := events.AppendEnvelope(nil, events.Envelope{PublisherID: publisher, Topic: events.Topic, Payload: events.AppendEvents(nil, []events.RouterEvent{ev})})
		if err := nc.Publish(wire.Scope{}.Topic(events.Topic), m); err != nil {
			t.Fatal(err)
		}
	}
	shows := func(want string) {
		t.Helper()
		eventually(t, "the worker is not "+want, func() bool {
			for _, w := range workers(t, d) {
				if w.Name == d.Engines[0].Name && w.Transport == "nats" {
					return string(w.KVEvents) == want
				}
			}
			return false
		})
		// counter also reads gauges.
		if n := d.counter(t, "kvroute_events_ranks", `state="`+want+`"`); n != 1 {
			t.Errorf("%d ranks are %s, want 1", n, want)
		}
	}
	say(5)
	shows("partial")
	say(7)
	shows("suspect")
}
