// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/replica"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

const (
	eventWorkers   = 64
	eventRate      = 10_000 // events a second, of all workers
	snapshotPairs  = 10_000_000
	tailPairs      = 1_000_000
	tailMessages   = 1_000_000
	tailBlocks     = 4 // of each message's event
	eventsDeadline = 5 * time.Minute
)

// Events measures the path of events and the start of replicas. The NATS server is in the
// same process and stores in files, as in `kvroute serve`.
func (b *Bench) Events() []bench.Figure {
	const rate = "10,000 events/s, "
	latency := func(name string, durable bool, target float64) shape {
		return shape{[]quantity{
			{"publisher's flush to index, " + rate + name + ", p99", "ms", bench.AtMost(target)},
			{"publish to index (batching included), " + rate + name + ", p99", "ms", bench.Target{}},
		}, func() []float64 { return inLab(func(l *lab) []float64 { return l.latency(durable) }) }}
	}
	return b.run([]shape{
		{
			[]quantity{{"decode and apply, 32-block events, one core", "M block operations/s", bench.AtLeast(2)}},
			func() []float64 { return inLab((*lab).applyRate) },
		},
		latency("NATS core", false, 5),
		latency("JetStream", true, 20),
		{[]quantity{
			{"snapshot of 10 M pairs, from the index into the object store", "s", bench.AtMost(10)},
			{"restore of 10 M pairs, from the object store into the index", "s", bench.AtMost(5)},
		}, func() []float64 { return inLab(func(l *lab) []float64 { return l.snapshot(snapshotPairs) }) }},
		{
			[]quantity{{"replica start: snapshot of 1 M pairs, then 1 M messages of 4 blocks", "s", bench.AtMost(15)}},
			func() []float64 { return inLab((*lab).start) },
		},
	})
}

var errLong = errors.New("it takes too long")

// lab is a NATS server with its clients.
type lab struct {
	url   string
	scope wire.Scope
	done  <-chan struct{} // closed when the measurement takes too long
	conns []*nats.Conn
}

func inLab(measure func(*lab) []float64) []float64 {
	s := bench.Must(bus.StartServer("127.0.0.1:0", "", ""))
	defer s.Stop()
	return inLabAt(s.URL(), measure)
}

// inLabAt is inLab with a server that runs already.
func inLabAt(url string, measure func(*lab) []float64) []float64 {
	ctx, cancel := context.WithTimeout(context.Background(), eventsDeadline)
	defer cancel()
	l := &lab{url: url, done: ctx.Done()}
	defer func() {
		for _, nc := range l.conns {
			nc.Close()
		}
	}()
	return measure(l)
}

func (l *lab) connect() *nats.Conn {
	nc := bench.Must(nats.Connect(l.url))
	l.conns = append(l.conns, nc)
	return nc
}

// until waits until ok.
func (l *lab) until(ok func() bool) {
	for !ok() {
		l.wait(time.Millisecond)
	}
}

// wait waits for a time, if that is not negative.
func (l *lab) wait(d time.Duration) {
	if d <= 0 {
		return
	}
	select {
	case <-l.done:
		bench.NoError(errLong)
	case <-time.After(d):
	}
}

// follower is a router that gets events from a subscriber, over NATS core or JetStream.
type follower struct {
	router  *router.Router
	sub     *events.Subscriber
	durable *events.Durable
	stop    func() // waits for its end
}

func (l *lab) follow(name string, durable bool, applied func(worker uint64, ev *indexer.Event)) *follower {
	r := newRouter(router.Config{BlockSize: blockTokens}, eventWorkers, 0)
	nc := l.connect()
	f := &follower{router: r}
	f.sub = bench.Must(events.NewSubscriber(nc, events.SubscriberConfig{Scope: l.scope, Sink: func(id uint64, rank uint32, ev indexer.Event) {
		r.ApplyEvent(router.Worker{ID: id, DPRank: rank}, ev)
		if applied != nil {
			applied(id, &ev)
		}
	}}))
	run := f.sub.Run
	if durable {
		f.durable = bench.Must(events.NewDurable(f.sub, events.DurableConfig{
			Replica: name, Drain: eventsDeadline, SnapshotThreshold: 1 << 30,
			Holdings: replica.Holdings(replica.Config{Router: r, Direct: func(uint64) bool { return false }, Expect: func([]uint64) {}, Log: slog.New(slog.DiscardHandler)}),
		}))
		run = f.durable.Run
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	f.stop = func() {
		cancel()
		bench.NoError(<-done)
	}
	l.until(func() bool {
		if durable {
			return f.durable.Ready()
		}
		return nc.NumSubscriptions() > 0 && nc.Flush() == nil
	})
	return f
}

// applyRate decodes and applies messages that are ready, on one core.
func (l *lab) applyRate() []float64 {
	r := newRouter(router.Config{BlockSize: blockTokens}, eventWorkers, 0)
	nc := l.connect()
	sub := bench.Must(events.NewSubscriber(nc, events.SubscriberConfig{Sink: func(id uint64, rank uint32, ev indexer.Event) {
		r.ApplyEvent(router.Worker{ID: id, DPRank: rank}, ev)
	}}))
	messages, blocks := manyMessages(1_000_000)
	runtime.GC()
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	start := time.Now()
	for _, m := range messages {
		sub.Take(context.Background(), events.FeedDurable, m)
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
			evs = append(evs, removals(evs, indexBatch, false)...)
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

// sender is a publisher that records when its events were sent.
type sender struct {
	publisher *engines.Publisher

	mu sync.Mutex
	// mu guards the fields below. The index is the first block of an event.
	published []time.Time
	flushed   []time.Time
	open      int // the first that has not left
}

// now is the publisher's clock, which it reads when it sends a message. Events that were
// published meanwhile count as sent then, too: too early, never too late.
func (s *sender) now() time.Time {
	t := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for ; s.open < len(s.published); s.open++ {
		s.flushed = append(s.flushed, t)
	}
	return t
}

// latency publishes at a steady rate for some seconds, and returns the 99th
// percentiles from flush to index and from publish to index, in ms.
func (l *lab) latency(durable bool) []float64 {
	const seconds = 10
	senders := make([]*sender, eventWorkers)
	var mu sync.Mutex
	var fromFlush, fromPublish []time.Duration
	f := l.follow("a", durable, func(worker uint64, ev *indexer.Event) {
		now := time.Now()
		s := senders[worker-1]
		i := ev.Blocks[0].Local // see below
		s.mu.Lock()
		flushed, published := s.flushed[i], s.published[i]
		s.mu.Unlock()
		mu.Lock()
		defer mu.Unlock()
		fromFlush = append(fromFlush, now.Sub(flushed))
		fromPublish = append(fromPublish, now.Sub(published))
	})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	for i := range senders {
		nc := l.connect()
		s := &sender{}
		s.publisher = engines.NewPublisher(nc, engines.PublisherConfig{Scope: l.scope, WorkerID: uint64(i + 1), Durable: durable, Now: s.now})
		senders[i] = s
		running.Go(func() { _ = s.publisher.Run(ctx) }) // events that it did not send are missed below
	}
	total := 0
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for start := time.Now(); total < seconds*eventRate; {
		<-tick.C
		for due := int(time.Since(start).Seconds() * eventRate); total < min(due, seconds*eventRate); total++ {
			w := total % eventWorkers
			s := senders[w]
			s.mu.Lock()
			i := uint64(len(s.published))
			s.published = append(s.published, time.Now())
			s.mu.Unlock()
			// Each begins a sequence, so the publisher joins none with another; four blocks.
			ev := indexer.Event{Kind: indexer.Stored}
			for k := range uint64(4) {
				ev.Blocks = append(ev.Blocks, indexer.Block{External: mix(uint64(total)<<8 | k), Local: i + k<<40})
			}
			s.publisher.Publish(0, ev)
		}
	}
	l.until(func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(fromFlush) == total
	})
	f.stop()
	return []float64{percentile(fromFlush, 99) / 1e3, percentile(fromPublish, 99) / 1e3}
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
	a := l.follow("a", true, nil)
	l.say(1)
	l.until(func() bool { return a.durable.Position() == 1 })
	fill(a.router, pairs)
	want := contentSize(a.router)
	start := time.Now()
	a.stop()
	wrote := time.Since(start).Seconds()
	a = nil
	runtime.GC()
	start = time.Now()
	b := l.follow("b", true, nil)
	read := time.Since(start).Seconds()
	if got := contentSize(b.router); got != want || got < pairs {
		bench.NoError(fmt.Errorf("%d pairs were restored of %d", got, want))
	}
	b.stop()
	return []float64{wrote, read}
}

func contentSize(r *router.Router) (blocks int) {
	for _, w := range r.Workers() {
		blocks += w.CachedBlocks
	}
	return blocks
}

// say publishes n messages with one event of four blocks each into the stream, which
// must exist.
func (l *lab) say(n int) {
	nc := l.connect()
	js := bench.Must(jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(8192)))
	for i := range n {
		id := uint64(i/eventWorkers) + 1
		e := stored(nil, i%eventWorkers, 1<<60, sequence(1<<30+i, tailBlocks))[0]
		data := envelope(id, []events.RouterEvent{{WorkerID: uint64(e.worker + 1), EventID: id, Event: e.event}})
		bench.Must(js.PublishAsync(l.scope.Topic(events.Topic), data, jetstream.WithStallWait(eventsDeadline)))
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-l.done:
		bench.NoError(errLong)
	}
}

// start starts a replica with a snapshot of a million pairs and a million messages
// behind it, and returns the seconds until it has applied them all.
func (l *lab) start() []float64 {
	l.snapshot(tailPairs)
	l.say(tailMessages)
	runtime.GC()
	start := time.Now()
	c := l.follow("c", true, nil)
	l.until(func() bool { return c.durable.Position() >= tailMessages+1 })
	took := time.Since(start).Seconds()
	if got, want := contentSize(c.router), tailPairs+tailMessages*tailBlocks; got < want {
		bench.NoError(fmt.Errorf("the replica knows %d pairs, want %d", got, want))
	}
	c.stop()
	return []float64{took}
}
