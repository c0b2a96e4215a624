// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/engines/publish"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
)

// While NATS is away, a limited number of events waits. Dropped events show as a gap, and later
// events arrive.
func TestTheBusIsAwayForAWhile(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t, 0)
	port := s.Addr().(*net.TCPAddr).Port
	connect := func(buffer int) *nats.Conn {
		nc, err := nats.Connect(s.ClientURL(), nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond), nats.ReconnectJitter(0, 0), nats.ReconnectBufSize(buffer))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
	sending, receiving := connect(16<<10), connect(1<<20)
	scope := wire.Scope{Namespace: "away"}
	var c caches
	var log fixtures.Log
	subscriber, err := events.NewSubscriber(receiving, events.SubscriberConfig{Scope: scope, Sink: c.apply, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	running(t, subscriber.Run)
	var lost atomic.Int64
	publisher := publish.New(sending, publish.Config{Scope: scope, WorkerID: 7, Lost: func(n int) { lost.Add(int64(n)) }})
	end := running(t, publisher.Run)
	engine := simulate(t, enginesim.SocketsConfig{Replay: freePort})
	all, _ := follow(t, engines.SourcesConfig{Sink: func(_ uint64, rank uint32, ev indexer.Event) {
		publisher.Publish(rank, ev)
	}}, zmqWorker(7, engine))
	engine.store(3)
	agree(t, &c, 0, engine)

	s.Shutdown()
	s.WaitForShutdown()
	eventually(t, func() bool { return !sending.IsConnected() && !receiving.IsConnected() })
	for range 300 { // each is a chain of its own, so that no event is joined to another
		engine.last += 2
		engine.Publish(enginesim.Change{Event: indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1e6 + engine.last}}}, Tokens: seq(int(engine.last), 16)})
	}
	eventually(t, func() bool { return lost.Load() > 0 })
	natstest.Start(t, port)
	eventually(t, func() bool { return sending.IsConnected() && receiving.IsConnected() })
	engine.Publish(enginesim.Change{Event: indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 42}}}, Tokens: seq(9000, 16)})
	eventually(t, func() bool { _, there := c.of(7, 0)[42]; return there })
	if !log.Has("events of a worker are missing") {
		t.Error("the gap was not reported")
	}
	if got := all.State(7); got != indexer.StateOK {
		t.Errorf("the engine is known %s to its sidecar", got)
	}
	end() // ends while NATS is available
}

// A rank whose known blocks are wrong is read again from its engine's replay socket or its worker's local indexer.
func TestAnyRankIsReadAgain(t *testing.T) {
	t.Parallel()
	var c caches
	nc := bus(t)
	subscriber, err := events.NewSubscriber(nc, events.SubscriberConfig{Sink: c.apply})
	if err != nil {
		t.Fatal(err)
	}
	publisher := publish.New(nc, publish.Config{WorkerID: 26, LocalIndexer: true})
	subscriber.SetWorker(26, events.Source{Feed: events.FeedCore, Queries: true, DPSize: 1})
	running(t, subscriber.Run)
	running(t, publisher.Run)
	engine := simulate(t, enginesim.SocketsConfig{Replay: freePort})
	sources, err := engines.NewSources(engines.SourcesConfig{Sink: c.apply, Subscriber: subscriber})
	if err != nil {
		t.Fatal(err)
	}
	sources.Set(zmqWorker(7, engine))
	running(t, sources.Run)
	publisher.Publish(0, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1}}})
	engine.store(1)
	agree(t, &c, 0, engine)
	for _, worker := range []uint64{7, 26} {
		eventually(t, func() bool { return sources.State(7) == indexer.StateOK && len(c.of(worker, 0)) == 1 })
		c.apply(worker, 0, indexer.Event{Kind: indexer.Cleared})
		if !sources.Reread(worker, 0) {
			t.Errorf("worker %d: nothing is requested", worker)
		}
		eventually(t, func() bool { return len(c.of(worker, 0)) == 1 })
	}
	silent := publish.New(nc, publish.Config{WorkerID: 27})
	subscriber.SetWorker(27, events.Source{Feed: events.FeedCore, DPSize: 1})
	running(t, silent.Run)
	silent.Publish(0, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1}}})
	plain := simulate(t, enginesim.SocketsConfig{})
	sources.Set(zmqWorker(8, plain))
	eventually(t, func() bool {
		return plain.Subscribers() == 1 && sources.State(8) == indexer.StateOK && len(c.of(27, 0)) == 1
	})
	for what, at := range map[string][2]uint64{
		"no local indexer": {27, 0}, "no replay socket": {8, 0}, "another rank": {7, 5}, "another rank over NATS": {26, 5}, "no worker": {99, 0},
	} {
		if sources.Reread(at[0], uint32(at[1])) {
			t.Errorf("%s: events are said to be requested", what)
		}
	}
}
