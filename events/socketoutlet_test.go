// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// socketBed is a router that follows publishers on their own sockets.
type socketBed struct {
	*bed
	sources *engines.Sources
}

func newSocketBed(t *testing.T) *socketBed {
	t.Helper()
	b := &socketBed{}
	b.bed = newBed(t, bus(t), events.SubscriberConfig{
		Ask: func(ctx context.Context, q events.Query, part func(events.AnswerPart) bool) error {
			return b.sources.Ask(ctx, q, part)
		},
	})
	var err error
	if b.sources, err = engines.NewSources(engines.SourcesConfig{
		Sink: func(uint64, uint32, indexer.Event) {
			t.Error("an event went past the subscriber")
		},
		Subscriber: b.sub,
	}); err != nil {
		t.Fatal(err)
	}
	running(t, b.sub.Run)
	running(t, b.sources.Run)
	return b
}

// know registers a worker and the addresses of its sockets.
func (b *socketBed) know(id uint64, ranks uint32, live, ask string) {
	b.sub.SetWorker(id, events.Source{Feed: events.FeedZMQ, Queries: true, DPSize: ranks, StartedMS: 1})
	b.sources.Set(engines.EngineWorker{ID: id, Transport: engines.TransportZMQ, Endpoint: live, Replay: ask, Queries: true, DPSize: ranks, BlockSize: 16})
}

// ear is a fixed address that forwards to another one that changes.
type ear struct {
	*way

	to atomic.Pointer[string]
}

func listenFor(t *testing.T) *ear {
	t.Helper()
	e := &ear{}
	e.way = newWay(t, func() string { return *e.to.Load() })
	return e
}

func (e *ear) endpoint() string { return "tcp://" + e.at }

func (e *ear) point(to net.Addr) {
	text := to.String()
	e.to.Store(&text)
}

func sockets(t *testing.T) engines.RankSockets {
	t.Helper()
	var at engines.RankSockets
	for _, l := range []*net.Listener{&at.Events, &at.Queries} {
		var err error
		if *l, err = zmtp.Listen(zmtp.Endpoint{Host: "127.0.0.1"}); err != nil {
			t.Fatal(err)
		}
	}
	return at
}

// startOnSockets starts a worker's process that publishes without a bus.
func startOnSockets(t *testing.T, at engines.RankSockets, seed uint64, lost ...func(int)) *liveWorker {
	t.Helper()
	const id = 7
	conf := engines.PublisherConfig{WorkerID: id, Sockets: map[uint32]engines.RankSockets{0: at}}
	for _, f := range lost {
		conf.Lost = f
	}
	p := &liveWorker{
		Publisher: engines.NewPublisher(nil, conf), id: id,
		cache: fakeCache{rng: rand.New(rand.NewPCG(seed, 4))}, truth: indexer.New(indexer.Config{}),
	}
	p.stop = running(t, p.Run)
	return p
}

// A publisher without NATS is read when it is discovered and followed from there. After a broken
// connection the missing events are requested. Another process is read again.
func TestAPublisherWithoutNATS(t *testing.T) {
	t.Parallel()
	b := newSocketBed(t)
	live, ask := listenFor(t), listenFor(t)
	point := func(at engines.RankSockets) {
		live.point(at.Events.Addr())
		ask.point(at.Queries.Addr())
	}
	at := sockets(t)
	point(at)
	p := startOnSockets(t, at, 1)
	p.change(300)
	b.know(7, 1, live.endpoint(), ask.endpoint())
	b.equal(p)
	if c := b.counts(); c["dump"] != 1 || c["events"] > 1 {
		t.Errorf("at discovery: %v, want one dump", c)
	}

	// Connections break while the cache changes. Only the missing events are requested.
	for range 10 {
		p.change(5)
		live.cut(false)
		p.change(5)
		b.equal(p)
	}
	if c := b.counts(); c["events"] == 0 || c["dump"] != 1 {
		t.Errorf("after broken connections: %v, want ranges, and no other dump", c)
	}

	// Another process under the same addresses.
	p.stop()
	at = sockets(t)
	point(at)
	again := startOnSockets(t, at, 2)
	again.change(50)
	live.cut(false)
	ask.cut(false)
	b.equal(again)

	// The publisher is away for longer than queries are retried, then returns with another cache.
	again.stop()
	live.cut(false)
	eventually(t, func() bool { return b.sources.State(7) == engines.KnownNothing })
	at = sockets(t)
	third := startOnSockets(t, at, 3)
	third.change(70)
	point(at)
	b.equal(third)
	third.stop()
}

// A subscriber that is too slow loses messages, and recovers their events although no later event
// shows the loss.
func TestASlowListenerOfASocket(t *testing.T) {
	t.Parallel()
	b := newSocketBed(t)
	at := sockets(t)
	at.Queue = 2
	live := "tcp://" + at.Events.Addr().String()
	var lost atomic.Int64
	p := startOnSockets(t, at, 5, func(n int) { lost.Add(int64(n)) })
	b.know(7, 1, live, "tcp://"+at.Queries.Addr().String())
	eventually(t, func() bool { steady, _ := b.sub.Ranks(); return steady == 1 })
	b.mu.Lock() // the sink blocks
	for deadline := time.Now().Add(2 * time.Minute); lost.Load() == 0 && time.Now().Before(deadline); <-time.After(10 * time.Millisecond) {
		// More than the buffers of a connection hold.
		for range 50 {
			ev := indexer.Event{Kind: indexer.Stored}
			for range 4000 {
				id := p.cache.rng.Uint64()
				ev.Blocks = append(ev.Blocks, indexer.Block{External: id, Local: id})
			}
			p.truth.Apply(0, ev)
			p.Publish(0, ev)
		}
	}
	b.mu.Unlock()
	if lost.Load() == 0 {
		t.Fatal("nothing was lost")
	}
	b.equal(p)
}

// Each rank has its own sockets, and publishes events of no other rank.
func TestRanksOnSockets(t *testing.T) {
	t.Parallel()
	b := newSocketBed(t)
	// Consecutive ports, as a worker with two ranks has them.
	var at map[uint32]engines.RankSockets
	var live, ask string
	for tries := 0; at == nil && tries < 100; tries++ {
		first := sockets(t)
		second := engines.RankSockets{}
		var errs [2]error
		second.Events, errs[0] = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", first.Events.Addr().(*net.TCPAddr).Port+1))
		second.Queries, errs[1] = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", first.Queries.Addr().(*net.TCPAddr).Port+1))
		if errs[0] == nil && errs[1] == nil {
			at = map[uint32]engines.RankSockets{0: first, 1: second}
			live, ask = "tcp://"+first.Events.Addr().String(), "tcp://"+first.Queries.Addr().String()
			break
		}
		for _, l := range []net.Listener{first.Events, first.Queries, second.Events, second.Queries} {
			if l != nil {
				_ = l.Close()
			}
		}
	}
	if at == nil {
		t.Fatal("no two ports in a row are free")
	}
	p := engines.NewPublisher(nil, engines.PublisherConfig{WorkerID: 7, Sockets: at})
	running(t, p.Run)
	b.know(7, 2, live, ask)
	eventually(t, func() bool { steady, _ := b.sub.Ranks(); return steady == 2 })
	for rank := range uint32(2) {
		for i := range uint64(10) {
			p.Publish(rank, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: uint64(rank)*100 + i, Local: uint64(rank)*100 + i}}})
		}
	}
	p.Publish(0, indexer.Event{Kind: indexer.Removed, Externals: []uint64{3}})
	eventually(t, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.index.WorkerBlocks(rankNumber(7, 0)) == 9 && b.index.WorkerBlocks(rankNumber(7, 1)) == 10
	})

	// Another worker's socket publishes events with this worker's id.
	lies := sockets(t)
	liar := startOnSockets(t, lies, 9)
	b.know(8, 1, "tcp://"+lies.Events.Addr().String(), "tcp://"+lies.Queries.Addr().String())
	eventually(t, func() bool { return b.sources.State(8) == engines.KnownWell })
	liar.change(50)
	p.Publish(1, indexer.Event{Kind: indexer.Removed, Externals: []uint64{103}})
	eventually(t, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.index.WorkerBlocks(rankNumber(7, 0)) == 9 && b.index.WorkerBlocks(rankNumber(7, 1)) == 9
	})
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := b.index.WorkerBlocks(8); n != 0 {
		t.Errorf("the liar has %d blocks", n)
	}
}

// Invalid data from an unknown client of the sockets has no effect.
func TestStrangersAtASocket(t *testing.T) {
	t.Parallel()
	b := newSocketBed(t)
	at := sockets(t)
	p := startOnSockets(t, at, 1)
	for _, frames := range [][][]byte{
		{{}},
		{{}, {0xc1}},
		{{1}, events.AppendQuery(nil, events.Query{WorkerID: 7})},
		{{}, events.AppendQuery(nil, events.Query{WorkerID: 8})},
		{{}, events.AppendQuery(nil, events.Query{WorkerID: 7, Kind: "gossip"})},
	} {
		c, err := zmtp.Dial(t.Context(), zmtp.Endpoint{Host: "127.0.0.1", Port: at.Queries.Addr().(*net.TCPAddr).Port}, zmtp.Dealer)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Write(frames...); err != nil {
			t.Fatal(err)
		}
		if len(frames) == 2 && frames[1][0] == 0xc1 {
			answer, err := c.Read()
			if err != nil || len(answer) != 3 {
				t.Errorf("an answer of %d frames, %v", len(answer), err)
			}
		}
		_ = c.Close()
	}
	p.change(20)
	b.know(7, 1, "tcp://"+at.Events.Addr().String(), "tcp://"+at.Queries.Addr().String())
	b.equal(p)
}
