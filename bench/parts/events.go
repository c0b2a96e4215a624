// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/engines/publish"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/durable"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/replica"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

const (
	eventWorkers   = 64
	eventRate      = 10_000 // events a second, of all workers
	eventSeconds   = 10
	snapshotPairs  = 10_000_000
	tailPairs      = 1_000_000
	tailMessages   = 1_000_000
	tailBlocks     = 4 // of each message's event
	eventsDeadline = 5 * time.Minute
)

// Events measures the path of events and the start of replicas. The NATS server is in the
// same process and stores in files, as in `kvroute serve`.
func (b *Bench) Events() []bench.Figure { return b.run(eventShapes()) }

func eventShapes() []shape {
	const latency = "publisher's flush to index, 10,000 events/s, "
	return []shape{
		inLab((*lab).applyRate, bench.NewRow("decode and apply, 32-block events, one core", "M block operations/s", bench.AtLeast(2))),
		inLab(func(l *lab) []float64 { return l.latency(false) }, bench.NewRow(latency+"NATS core, p99", "ms", bench.AtMost(5))),
		inLab(func(l *lab) []float64 { return l.latency(true) }, bench.NewRow(latency+"JetStream, p99", "ms", bench.AtMost(20))),
		inLab(func(l *lab) []float64 { return l.snapshot(snapshotPairs) },
			bench.NewRow("snapshot of 10 M pairs, from the index into the object store", "s", bench.AtMost(10)),
			bench.NewRow("restore of 10 M pairs, from the object store into the index", "s", bench.AtMost(5))),
		inLab((*lab).start, bench.NewRow("replica start: snapshot of 1 M pairs, then 1 M messages of 4 blocks", "s", bench.AtMost(15))),
	}
}

// lab is a NATS server with its clients.
type lab struct {
	url   string
	conns []*nats.Conn
}

// inLab is a shape that needs a NATS server. Each round has a new one.
func inLab(measure func(*lab) []float64, rows ...bench.Row) shape {
	return shape{rows, func() []float64 {
		s := bench.Must(bus.StartServer("127.0.0.1:0", "", ""))
		defer s.Stop()
		l := &lab{url: s.URL()}
		defer l.close()
		return measure(l)
	}}
}

func (l *lab) close() {
	for _, nc := range l.conns {
		nc.Close()
	}
}

func (l *lab) connect() *nats.Conn {
	nc := bench.Must(nats.Connect(l.url))
	l.conns = append(l.conns, nc)
	return nc
}

// until waits for a condition.
func until(ok func() bool) {
	bench.NoError(process.Until(context.Background(), eventsDeadline, "the measurement", func(context.Context) bool { return ok() }))
}

// follower is a router that receives events over NATS core or from JetStream.
type follower struct {
	router  *router.Router
	durable *durable.Reader
	stop    func() // waits for the end of the subscriber
}

func (l *lab) follow(name string, streamed bool, applied func(worker uint64, ev *indexer.Event)) *follower {
	r := newRouter(router.Config{BlockSize: blockTokens}, eventWorkers, 0)
	nc := l.connect()
	f := &follower{router: r}
	sub := bench.Must(events.NewSubscriber(nc, events.SubscriberConfig{Sink: func(id uint64, rank uint32, ev indexer.Event) {
		r.ApplyEvent(router.Worker{ID: id, DPRank: rank}, ev)
		applied(id, &ev)
	}}))
	run, ready := sub.Run, func() bool { return nc.NumSubscriptions() > 0 && nc.Flush() == nil }
	if streamed {
		f.durable = bench.Must(durable.New(sub, durable.Config{
			Replica: name, Drain: eventsDeadline, SnapshotThreshold: 1 << 30,
			Holdings: replica.Holdings(replica.Config{Router: r, Direct: func(uint64) bool { return false }, Expect: func([]uint64) {}, Log: slog.New(slog.DiscardHandler)}),
		}))
		run, ready = f.durable.Run, f.durable.Ready
	}
	f.stop = background(run)
	until(ready)
	return f
}

// background calls run in a goroutine. stop ends its context and waits for its end.
func background(run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	return func() {
		cancel()
		bench.NoError(<-done)
	}
}

// applyRate decodes and applies messages on one core. The messages exist before.
func (l *lab) applyRate() []float64 {
	r := newRouter(router.Config{BlockSize: blockTokens}, eventWorkers, 0)
	sub := bench.Must(events.NewSubscriber(l.connect(), events.SubscriberConfig{Sink: func(id uint64, rank uint32, ev indexer.Event) {
		r.ApplyEvent(router.Worker{ID: id, DPRank: rank}, ev)
	}}))
	messages, blocks := manyMessages(1_000_000)
	runtime.GC()
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	start := time.Now()
	for _, m := range messages {
		sub.Take(context.Background(), events.FeedDurable, m, nil)
	}
	return []float64{float64(blocks) / 1e6 / time.Since(start).Seconds()}
}

// manyMessages makes messages of eight events of 32 blocks each: sequences of 512
// blocks are stored, and each second one is removed again.
func manyMessages(blocks int) (messages [][]byte, operations int) {
	ids := make([]uint64, eventWorkers)
	var pending []events.RouterEvent
	for n := 0; operations < blocks; n++ {
		evs := stored(nil, n%eventWorkers, uint64(n)<<32, sequence(n, indexSequence))
		if n%2 == 1 {
			evs = append(evs, removals(evs, indexBatch)...)
		}
		for _, e := range evs {
			ids[e.worker]++
			pending = append(pending, events.RouterEvent{WorkerID: uint64(e.worker + 1), EventID: ids[e.worker], Event: e.event})
			if len(pending) == 8 {
				messages = append(messages, envelope(uint64(len(messages)), pending))
				pending = nil
			}
		}
		operations += blocksOf(evs)
	}
	return messages, operations
}

// envelope is a message with events of one worker or more.
func envelope(number uint64, evs []events.RouterEvent) []byte {
	return events.AppendEnvelope(nil, events.Envelope{
		PublisherID: evs[0].WorkerID, Sequence: number, PublishedAt: uint64(time.Now().UnixMilli()), Topic: events.Topic, Payload: events.AppendEvents(nil, evs),
	})
}

// sender is a publisher that records when it sent its events.
type sender struct {
	publisher *publish.Publisher

	mu sync.Mutex
	// mu guards the fields below.
	published uint64
	sent      []time.Time // by the number of the event
}

// now is the publisher's clock, which it reads when it sends a message. Events that were
// published meanwhile count as sent then, too: too early, never too late.
func (s *sender) now() time.Time {
	t := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for uint64(len(s.sent)) < s.published {
		s.sent = append(s.sent, t)
	}
	return t
}

// latency publishes at a steady rate for some seconds, and returns the 99th percentile of the
// time from the publisher's flush to the index, in ms.
func (l *lab) latency(durable bool) []float64 {
	senders := make([]*sender, eventWorkers)
	var mu sync.Mutex
	var took []time.Duration
	f := l.follow("a", durable, func(worker uint64, ev *indexer.Event) {
		now, s := time.Now(), senders[worker-1]
		s.mu.Lock()
		sent := s.sent[ev.Blocks[0].Local] // see below
		s.mu.Unlock()
		mu.Lock()
		defer mu.Unlock()
		took = append(took, now.Sub(sent))
	})
	defer f.stop()
	for i := range senders {
		s := &sender{}
		s.publisher = publish.New(l.connect(), publish.Config{WorkerID: uint64(i + 1), Durable: durable, Now: s.now})
		senders[i] = s
		defer background(s.publisher.Run)()
	}
	begin := time.Now()
	for total := range eventSeconds * eventRate {
		<-time.After(time.Until(begin.Add(time.Duration(total*1000/eventRate) * time.Millisecond)))
		s := senders[total%eventWorkers]
		s.mu.Lock()
		i := s.published
		s.published++
		s.mu.Unlock()
		// Each begins a sequence, so the publisher joins none with another; four blocks.
		ev := indexer.Event{Kind: indexer.Stored}
		for k := range uint64(4) {
			ev.Blocks = append(ev.Blocks, indexer.Block{External: mix(uint64(total)<<8 | k), Local: i + k<<40})
		}
		s.publisher.Publish(0, ev)
	}
	until(func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(took) == eventSeconds*eventRate
	})
	return []float64{percentile(took, 99) / 1e3}
}

// fill stores so many pairs in the router's index, in sequences of 512 blocks. Two workers
// share each second sequence.
func fill(r *router.Router, pairs int) {
	for n := 0; pairs > 0; n++ {
		number := n
		if n%4 == 1 {
			number-- // the sequence of the worker before
		}
		for _, e := range stored(nil, n%eventWorkers, uint64(n)<<32, sequence(number, indexSequence)) {
			r.ApplyEvent(router.Worker{ID: uint64(e.worker) + 1}, e.event)
			pairs -= len(e.event.Blocks)
		}
	}
}

// snapshot writes a snapshot of so many pairs at the end of one replica, and starts
// another one from it. It returns the times in seconds.
func (l *lab) snapshot(pairs int) []float64 {
	a := l.follow("a", true, unwatched)
	l.publish(1)
	until(func() bool { return a.durable.Position() == 1 })
	fill(a.router, pairs)
	want := contentSize(a.router)
	start := time.Now()
	a.stop()
	wrote := time.Since(start).Seconds()
	a = nil
	runtime.GC()
	start = time.Now()
	b := l.follow("b", true, unwatched)
	read := time.Since(start).Seconds()
	if got := contentSize(b.router); got != want || got < pairs {
		bench.NoError(fmt.Errorf("%d pairs were restored of %d", got, want))
	}
	b.stop()
	return []float64{wrote, read}
}

func unwatched(uint64, *indexer.Event) {}

func contentSize(r *router.Router) (blocks int) {
	for _, w := range r.Workers() {
		blocks += w.CachedBlocks
	}
	return blocks
}

// publish sends n messages with one event of four blocks each into the stream, which must
// exist.
func (l *lab) publish(n int) {
	js := bench.Must(jetstream.New(l.connect(), jetstream.WithPublishAsyncMaxPending(8192)))
	for i := range n {
		id := uint64(i/eventWorkers) + 1
		e := stored(nil, i%eventWorkers, 1<<60, sequence(1<<30+i, tailBlocks))[0]
		data := envelope(id, []events.RouterEvent{{WorkerID: uint64(e.worker + 1), EventID: id, Event: e.event}})
		bench.Must(js.PublishAsync(wire.Scope{}.Topic(events.Topic), data, jetstream.WithStallWait(eventsDeadline)))
	}
	until(func() bool { return js.PublishAsyncPending() == 0 })
}

// start starts a replica with a snapshot of a million pairs and a million messages
// behind it, and returns the seconds until it has applied them all.
func (l *lab) start() []float64 {
	l.snapshot(tailPairs)
	l.publish(tailMessages)
	runtime.GC()
	start := time.Now()
	c := l.follow("c", true, unwatched)
	until(func() bool { return c.durable.Position() >= tailMessages+1 })
	took := time.Since(start).Seconds()
	if got, want := contentSize(c.router), tailPairs+tailMessages*tailBlocks; got < want {
		bench.NoError(fmt.Errorf("the replica knows %d pairs, want %d", got, want))
	}
	c.stop()
	return []float64{took}
}
