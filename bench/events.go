// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"regexp"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
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

// EventsBench measures how events travel and how replicas start, with a NATS server
// in the same process, as `kvroute serve` has it, that stores in files.
type EventsBench struct {
	Rounds int            // of each shape; the median counts
	Only   *regexp.Regexp // of their names; nil means all
	Log    io.Writer      // told what is being measured
}

// eventsShape measures one or more quantities at once.
type eventsShape struct {
	figures []Figure // without values
	targets []limit
	measure func(*eventsLab) ([]float64, error)
}

func eventsShapes() []eventsShape {
	one := func(what, unit string, target limit) ([]Figure, []limit) {
		return []Figure{{What: what, Unit: unit, Target: target.text}}, []limit{target}
	}
	shape := func(what, unit string, target limit, measure func(*eventsLab) (float64, error)) eventsShape {
		f, t := one(what, unit, target)
		return eventsShape{f, t, func(l *eventsLab) ([]float64, error) {
			v, err := measure(l)
			return []float64{v}, err
		}}
	}
	latency := func(name string, durable bool, target float64) eventsShape {
		f, t := one("publisher's flush to index, 10,000 events/s, "+name+", p99", "ms", atMost(target))
		f = append(f, Figure{What: "publish to index (batching included), 10,000 events/s, " + name + ", p99", Unit: "ms"})
		return eventsShape{f, append(t, limit{}), func(l *eventsLab) ([]float64, error) { return l.latency(durable) }}
	}
	f, t := one("snapshot of 10 M pairs, from the index into the object store", "s", atMost(10))
	g, u := one("restore of 10 M pairs, from the object store into the index", "s", atMost(5))
	return []eventsShape{
		shape("decode and apply, 32-block events, one core", "M block operations/s", atLeast(2), (*eventsLab).applyRate),
		latency("NATS core", false, 5),
		latency("JetStream", true, 20),
		{append(f, g...), append(t, u...), func(l *eventsLab) ([]float64, error) { return l.snapshot(snapshotPairs) }},
		shape("replica start: snapshot of 1 M pairs, then 1 M messages of 4 blocks", "s", atMost(15), (*eventsLab).start),
	}
}

// Figures measures the shapes.
func (b *EventsBench) Figures() (out []Figure, err error) {
	for _, s := range eventsShapes() {
		if b.Only != nil && !b.Only.MatchString(s.figures[0].What) {
			continue
		}
		values := make([][]float64, len(s.figures))
		for range b.Rounds {
			runtime.GC()
			v, err := inLab(s.measure)
			if err != nil {
				return out, fmt.Errorf("bench: %s: %w", s.figures[0].What, err)
			}
			for i := range v {
				values[i] = append(values[i], v[i])
			}
		}
		for i, f := range s.figures {
			v := values[i]
			slices.Sort(v)
			f.Median, f.Min, f.Max = v[len(v)/2], v[0], v[len(v)-1]
			f.Met = s.targets[i].met != nil && s.targets[i].met(f.Median)
			fmt.Fprintf(b.Log, "%s: %.4g %s (%s)\n", f.What, f.Median, f.Unit, f.Target)
			out = append(out, f)
		}
	}
	return out, nil
}

var errLong = errors.New("it takes too long")

// eventsLab is a NATS server with what runs beside it.
type eventsLab struct {
	url   string
	scope wire.Scope
	done  <-chan struct{} // closed when it takes too long
	conns []*nats.Conn
}

func inLab(measure func(*eventsLab) ([]float64, error)) (v []float64, err error) {
	url, stop, err := startBus()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	return inLabAt(url, measure)
}

// inLabAt is inLab with a server that is there.
func inLabAt(url string, measure func(*eventsLab) ([]float64, error)) ([]float64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), eventsDeadline)
	defer cancel()
	l := &eventsLab{url: url, done: ctx.Done()}
	defer func() {
		for _, nc := range l.conns {
			nc.Close()
		}
	}()
	return measure(l)
}

func (l *eventsLab) connect() (*nats.Conn, error) {
	nc, err := nats.Connect(l.url)
	if err == nil {
		l.conns = append(l.conns, nc)
	}
	return nc, err
}

// newEventsRouter returns a router that knows the workers, with ids from 1 on.
func newEventsRouter() (*router.Router, error) {
	r, err := router.New(router.Config{BlockSize: 16})
	for id := range uint64(eventWorkers) {
		if err == nil {
			err = r.SetWorker(router.WorkerInfo{ID: id + 1, Address: netip.MustParseAddrPort("10.0.0.1:8000"), Models: []string{"m"}, BlockSize: 16})
		}
	}
	return r, err
}

// follower is a router fed by a subscriber, in one way or the other.
type follower struct {
	router  *router.Router
	sub     *events.Subscriber
	durable *events.Durable
	stop    func() error // waits for its end
}

func (l *eventsLab) follow(name string, durable bool, applied func(worker uint64, ev *indexer.Event)) (*follower, error) {
	r, err := newEventsRouter()
	if err != nil {
		return nil, err
	}
	nc, err := l.connect()
	if err != nil {
		return nil, err
	}
	f := &follower{router: r}
	if f.sub, err = events.NewSubscriber(nc, events.SubscriberConfig{Scope: l.scope, Sink: func(id uint64, rank uint32, ev indexer.Event) bool {
		known := r.ApplyEvent(router.Worker{ID: id, DPRank: rank}, ev)
		if applied != nil {
			applied(id, &ev)
		}
		return known
	}}); err != nil {
		return nil, err
	}
	run := f.sub.Run
	if durable {
		if f.durable, err = events.NewDurable(f.sub, events.DurableConfig{
			Replica: name, Drain: eventsDeadline, SnapshotThreshold: 1 << 30,
			Holdings: replica.Holdings(replica.Config{Router: r, Direct: func(uint64) bool { return false }, Expect: func([]uint64) {}, Log: slog.New(slog.DiscardHandler)}),
		}); err != nil {
			return nil, err
		}
		run = f.durable.Run
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	f.stop = func() error {
		cancel()
		return <-done
	}
	if durable {
		return f, l.until(f.durable.Ready)
	}
	return f, l.until(func() bool { return nc.NumSubscriptions() > 0 && nc.Flush() == nil })
}

func (l *eventsLab) until(ok func() bool) error {
	for !ok() {
		select {
		case <-l.done:
			return errLong
		case <-time.After(time.Millisecond):
		}
	}
	return nil
}

// applyRate decodes and applies messages that are ready, on one core.
func (l *eventsLab) applyRate() (float64, error) {
	r, err := newEventsRouter()
	if err != nil {
		return 0, err
	}
	nc, err := l.connect()
	if err != nil {
		return 0, err
	}
	sub, err := events.NewSubscriber(nc, events.SubscriberConfig{Sink: func(id uint64, rank uint32, ev indexer.Event) bool {
		return r.ApplyEvent(router.Worker{ID: id, DPRank: rank}, ev)
	}})
	if err != nil {
		return 0, err
	}
	messages, blocks := manyMessages(1_000_000)
	runtime.GC()
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	start := time.Now()
	for _, m := range messages {
		sub.Take(context.Background(), events.FeedDurable, m)
	}
	return float64(blocks) / 1e6 / time.Since(start).Seconds(), nil
}

// manyMessages makes messages of eight events of 32 blocks each: sequences of 512
// blocks are stored, and each second one is removed again.
func manyMessages(blocks int) (messages [][]byte, operations int) {
	ids := make([]uint64, eventWorkers)
	var pending []events.RouterEvent
	var batch uint64
	flush := func() {
		messages = append(messages, events.AppendEnvelope(nil, events.Envelope{
			PublisherID: pending[0].WorkerID, Sequence: batch, Topic: events.Topic, Payload: events.AppendEvents(nil, pending),
		}))
		pending, batch = nil, batch+1
	}
	tell := func(w int, ev indexer.Event) {
		ids[w]++
		pending = append(pending, events.RouterEvent{WorkerID: uint64(w + 1), EventID: ids[w], Event: ev})
		operations += len(ev.Blocks) + len(ev.Externals)
		if len(pending) == 8 {
			flush()
		}
	}
	for n := uint64(0); operations < blocks; n++ {
		w := int(n % eventWorkers)
		var externals []uint64
		parent := uint64(0)
		for part := range uint64(16) {
			ev := indexer.Event{Kind: indexer.Stored, HasParent: part > 0, Parent: parent}
			for i := range uint64(32) {
				external := mix(n<<16 | part<<8 | i)
				ev.Blocks = append(ev.Blocks, indexer.Block{External: external, Local: mix(external)})
				externals = append(externals, external)
				parent = external
			}
			tell(w, ev)
		}
		if n%2 == 1 {
			for len(externals) > 0 {
				tell(w, indexer.Event{Kind: indexer.Removed, Externals: externals[len(externals)-32:]})
				externals = externals[:len(externals)-32]
			}
		}
	}
	if len(pending) > 0 {
		flush()
	}
	return messages, operations
}

// sender is a publisher that notes when its events left.
type sender struct {
	publisher *engines.Publisher

	mu sync.Mutex
	// mu guards the fields below. The index is the first block of an event.
	published []time.Time
	flushed   []time.Time
	open      int // the first that has not left
}

// now is the publisher's clock: it looks at it when it sends a message. What was
// published meanwhile counts as sent then, too: too early, never too late.
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
func (l *eventsLab) latency(durable bool) ([]float64, error) {
	const seconds = 10
	senders := make([]*sender, eventWorkers)
	var mu sync.Mutex
	var fromFlush, fromPublish []time.Duration
	f, err := l.follow("a", durable, func(worker uint64, ev *indexer.Event) {
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
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	for i := range senders {
		nc, err := l.connect()
		if err != nil {
			return nil, err
		}
		s := &sender{}
		s.publisher = engines.NewPublisher(nc, engines.PublisherConfig{Scope: l.scope, WorkerID: uint64(i + 1), Durable: durable, Now: s.now})
		senders[i] = s
		running.Go(func() { _ = s.publisher.Run(ctx) }) // what it did not send is missed below
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
			// Each begins a sequence, so none is joined with another; four blocks.
			ev := indexer.Event{Kind: indexer.Stored}
			for k := range uint64(4) {
				ev.Blocks = append(ev.Blocks, indexer.Block{External: mix(uint64(total)<<8 | k), Local: i + k<<40})
			}
			s.publisher.Publish(0, ev)
		}
	}
	if err := l.until(func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(fromFlush) == total
	}); err != nil {
		return nil, fmt.Errorf("%d of %d events arrived: %w", len(fromFlush), total, err)
	}
	if err := f.stop(); err != nil {
		return nil, err
	}
	return []float64{percentile(fromFlush, 99) / 1e3, percentile(fromPublish, 99) / 1e3}, nil
}

// fill makes the router know so many pairs, in sequences of 512 blocks, half of
// which two workers share.
func fill(r *router.Router, pairs int) {
	for n := uint64(0); pairs > 0; n++ {
		w := router.Worker{ID: n%eventWorkers + 1}
		sequence := n
		if n%4 == 1 {
			sequence-- // the one that the worker before has
		}
		parent := uint64(0)
		for part := range uint64(16) {
			ev := indexer.Event{Kind: indexer.Stored, HasParent: part > 0, Parent: parent}
			for i := range uint64(32) {
				external := mix(n<<16 | part<<8 | i)
				ev.Blocks = append(ev.Blocks, indexer.Block{External: external, Local: mix(sequence<<16 | part<<8 | i)})
				parent = external
			}
			r.ApplyEvent(w, ev)
			pairs -= 32
		}
	}
}

// snapshot writes a snapshot of so many pairs at the end of one replica, and starts
// another one from it. It returns the times in seconds.
func (l *eventsLab) snapshot(pairs int) ([]float64, error) {
	a, err := l.follow("a", true, nil)
	if err != nil {
		return nil, err
	}
	if err := l.say(1); err != nil {
		return nil, err
	}
	if err := l.until(func() bool { return a.durable.Position() == 1 }); err != nil {
		return nil, err
	}
	fill(a.router, pairs)
	want := contentSize(a.router)
	start := time.Now()
	if err := a.stop(); err != nil {
		return nil, err
	}
	wrote := time.Since(start).Seconds()
	a = nil
	runtime.GC()
	start = time.Now()
	b, err := l.follow("b", true, nil)
	if err != nil {
		return nil, err
	}
	read := time.Since(start).Seconds()
	if got := contentSize(b.router); got != want || got < pairs {
		return nil, fmt.Errorf("%d pairs were restored of %d", got, want)
	}
	return []float64{wrote, read}, b.stop()
}

func contentSize(r *router.Router) (blocks int) {
	for _, w := range r.Workers() {
		blocks += w.CachedBlocks
	}
	return blocks
}

// say publishes n messages with one event of four blocks each into the stream, which
// is there.
func (l *eventsLab) say(n int) error {
	nc, err := l.connect()
	if err != nil {
		return err
	}
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(8192))
	if err != nil {
		return err
	}
	ids := make([]uint64, eventWorkers)
	for i := range n {
		w := i % eventWorkers
		ids[w]++
		ev := indexer.Event{Kind: indexer.Stored}
		for k := range uint64(tailBlocks) {
			b := mix(1<<60 | uint64(i)<<8 | k)
			ev.Blocks = append(ev.Blocks, indexer.Block{External: b, Local: mix(b)})
		}
		data := events.AppendEnvelope(nil, events.Envelope{
			PublisherID: uint64(w + 1), Sequence: ids[w], PublishedAt: uint64(time.Now().UnixMilli()), Topic: events.Topic,
			Payload: events.AppendEvents(nil, []events.RouterEvent{{WorkerID: uint64(w + 1), EventID: ids[w], Event: ev}}),
		})
		for {
			_, err := js.PublishAsync(l.scope.Topic(events.Topic), data)
			if err == nil {
				break
			}
			if !errors.Is(err, jetstream.ErrTooManyStalledMsgs) {
				return err
			}
			select {
			case <-l.done:
				return errLong
			default:
			}
		}
	}
	select {
	case <-js.PublishAsyncComplete():
		return nil
	case <-l.done:
		return errLong
	}
}

// start starts a replica with a snapshot of a million pairs and a million messages
// behind it, and returns the seconds until it has applied them all.
func (l *eventsLab) start() (float64, error) {
	if _, err := l.snapshot(tailPairs); err != nil {
		return 0, err
	}
	if err := l.say(tailMessages); err != nil {
		return 0, err
	}
	runtime.GC()
	start := time.Now()
	c, err := l.follow("c", true, nil)
	if err != nil {
		return 0, err
	}
	if err := l.until(func() bool { return c.durable.Position() >= tailMessages+1 }); err != nil {
		return 0, err
	}
	took := time.Since(start).Seconds()
	if got, want := contentSize(c.router), tailPairs+tailMessages*tailBlocks; got < want {
		return 0, fmt.Errorf("the replica knows %d pairs, want %d", got, want)
	}
	return took, c.stop()
}
