// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"context"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/engines/publish"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/wire"
)

// startServer starts a NATS server on a port; -1 selects a free port that the test keeps.
func startServer(t *testing.T, port int) (s *server.Server, stop func()) {
	t.Helper()
	if port == server.RANDOM_PORT {
		port = fixtures.HoldPort(t)
	}
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: port, NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("NATS does not start")
	}
	stop = sync.OnceFunc(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	t.Cleanup(stop)
	return s, stop
}

func connect(t *testing.T, s *server.Server) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(s.ClientURL(), nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond), nats.ReconnectJitter(0, 0),
		nats.ReconnectBufSize(4096)) // buffers little while the server is away
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// bed is a worker with a local indexer, and a router that follows it.
type bed struct {
	t      *testing.T
	sub    *events.Subscriber
	counts func() map[string]int
	scope  wire.Scope

	mu      sync.Mutex
	index   *indexer.Index
	parked  *indexer.Parked
	unknown map[uint64]bool // unregistered workers
}

// source returns the source of a worker with a local indexer.
func source(started int64) events.Source {
	return events.Source{Feed: events.FeedCore, Queries: true, DPSize: 1, StartedMS: started}
}

func newBed(t *testing.T, nc *nats.Conn, conf events.SubscriberConfig) *bed {
	t.Helper()
	b := &bed{t: t, scope: conf.Scope, index: indexer.New(indexer.Config{}), unknown: map[uint64]bool{}}
	b.parked = indexer.NewParked(b.index)
	conf.Sink = func(worker uint64, dpRank uint32, ev indexer.Event) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.unknown[worker] {
			return
		}
		b.parked.Apply(time.Now(), rankNumber(worker, dpRank), ev)
	}
	conf.Knows = func(worker uint64) bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return !b.unknown[worker]
	}
	var err error
	if b.sub, err = events.NewSubscriber(nc, conf); err != nil {
		t.Fatal(err)
	}
	b.counts = b.sub.Counting()
	return b
}

// rankNumber returns a rank's number in the index of a bed. For rank 0 it is the worker's id.
func rankNumber(worker uint64, dpRank uint32) int { return int(worker) + 10_000*int(dpRank) }

// liveWorker is a worker's process: a cache that changes at random, and its publisher.
type liveWorker struct {
	*publish.Publisher

	id    uint64
	cache fakeCache
	truth *indexer.Index
	stop  func()
}

func startProcess(t *testing.T, nc *nats.Conn, conf publish.Config, seed uint64) *liveWorker {
	t.Helper()
	p := &liveWorker{
		Publisher: publish.New(nc, conf), id: conf.WorkerID,
		cache: fakeCache{rng: rand.New(rand.NewPCG(seed, 4))}, truth: indexer.New(indexer.Config{}),
	}
	before := nc.NumSubscriptions()
	p.stop = running(t, p.Run)
	if conf.LocalIndexer {
		eventually(t, func() bool { return nc.NumSubscriptions() > before })
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	return p
}

// change makes n cache changes.
func (p *liveWorker) change(n int) {
	for range n {
		ev := p.cache.event()
		p.truth.Apply(0, ev)
		p.Publish(0, ev)
	}
}

// changing changes the cache continuously until the returned function is called.
func (p *liveWorker) changing(t *testing.T) (stop func()) {
	return running(t, func(ctx context.Context) error {
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(time.Millisecond):
				p.change(5)
			}
		}
	})
}

// holds reports whether the router's index equals a worker's cache.
func (b *bed) holds(p *liveWorker) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return p.truth.WorkerBlocks(0) == b.index.WorkerBlocks(int(p.id)) && slices.Equal(content(p.truth, 0), content(b.index, int(p.id)))
}

// equal waits until the router's index equals the workers' caches.
func (b *bed) equal(ps ...*liveWorker) {
	b.t.Helper()
	deadline := time.Now().Add(5 * time.Minute) // enough for a million blocks on a busy machine
	for {
		bad := slices.IndexFunc(ps, func(p *liveWorker) bool { return !b.holds(p) })
		if bad < 0 {
			return
		}
		if time.Now().After(deadline) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.t.Fatalf("the cache holds (-) and is said to hold (+):\n%.2000s\n%v", gocmp.Diff(content(ps[bad].truth, 0), content(b.index, int(ps[bad].id))), b.counts())
		}
		<-time.After(5 * time.Millisecond)
	}
}

// A worker is read when it is discovered, and followed from there. If its first event was lost,
// that query returns it.
func TestDiscoveryReadsTheWorker(t *testing.T) {
	t.Parallel()
	nc := bus(t)
	p := startProcess(t, nc, publish.Config{WorkerID: 7, LocalIndexer: true}, 1)
	p.change(300)
	b := newBed(t, nc, events.SubscriberConfig{})
	running(t, b.sub.Run)
	b.sub.SetWorker(7, source(1))
	b.equal(p)
	p.change(50)
	b.equal(p)
	if c := b.counts(); c["ask_dump"] != 1 || c["ask_range"] != 0 {
		t.Errorf("asked %v, want one dump", c)
	}
	// The worker leaves, and returns as another process.
	b.sub.Forget(7)
	b.mu.Lock()
	b.parked.RemoveWorker(7)
	b.mu.Unlock()
	p.stop()
	again := startProcess(t, nc, publish.Config{WorkerID: 7, LocalIndexer: true}, 2)
	again.change(20)
	b.sub.SetWorker(7, source(2))
	b.equal(again)
	// The worker restarts without a new record; its events show the restart.
	again.stop()
	third := startProcess(t, nc, publish.Config{WorkerID: 7, LocalIndexer: true}, 3)
	third.change(20)
	b.equal(third)
}

// A dump of many parts arrives complete while events are in transit.
func TestALargeCacheIsRead(t *testing.T) {
	t.Parallel()
	nc := bus(t)
	p := startProcess(t, nc, publish.Config{WorkerID: 7, LocalIndexer: true}, 1)
	store := func(first, n uint64) {
		ev := indexer.Event{Kind: indexer.Stored}
		for i := range n {
			ev.Blocks = append(ev.Blocks, indexer.Block{External: first + i, Local: (first + i) * 0x9e3779b97f4a7c15})
		}
		p.truth.Apply(0, ev)
		p.Publish(0, ev)
	}
	for i := range uint64(20) {
		store(1+i*10_000, 10_000) // larger than an event on the bus may be
	}
	b := newBed(t, nc, events.SubscriberConfig{})
	running(t, b.sub.Run)
	b.sub.SetWorker(7, source(1))
	for i := range uint64(20) {
		store(1e6+i*10, 10)
	}
	b.equal(p)
	if n := p.truth.WorkerBlocks(0); n != 200_200 || b.counts()["given_up"]+b.counts()["broken"] > 0 {
		t.Errorf("%d blocks, %v", n, b.counts())
	}
}

// One subtest for each fault of the bus, with a worker that publishes all the time. At the end the
// index equals the worker's cache.
func TestFaultsOfTheBus(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]func(t *testing.T, port int, stop func()) (again *server.Server){
		"it restarts": func(t *testing.T, port int, stop func()) *server.Server {
			stop()
			s, _ := startServer(t, port)
			return s
		},
		"it is away for long": func(t *testing.T, port int, stop func()) *server.Server {
			stop()
			<-time.After(1500 * time.Millisecond) // 75 times the reconnect delay
			s, _ := startServer(t, port)
			return s
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, stop := startServer(t, -1)
			b := newBed(t, connect(t, s), events.SubscriberConfig{})
			running(t, b.sub.Run)
			p := startProcess(t, connect(t, s), publish.Config{WorkerID: 7, LocalIndexer: true}, 1)
			b.sub.SetWorker(7, source(1))
			rest := p.changing(t)
			eventually(t, func() bool { steady, others := b.sub.Ranks(); return steady == 1 && others == 0 })
			again := fault(t, s.Addr().(*net.TCPAddr).Port, stop)
			eventually(t, func() bool { return again.NumClients() == 2 })
			<-time.After(100 * time.Millisecond)
			rest()
			b.equal(p)
			p.stop()
		})
	}
}

// Only the router loses its connection, and no later event shows what it missed: the router sends
// a query.
func TestARouterThatWasAwayAsks(t *testing.T) {
	t.Parallel()
	s, _ := startServer(t, -1)
	nc, err := nats.Connect(s.ClientURL(), nats.MaxReconnects(-1), nats.ReconnectWait(200*time.Millisecond), nats.ReconnectJitter(0, 0))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	b := newBed(t, nc, events.SubscriberConfig{})
	running(t, b.sub.Run)
	p := startProcess(t, connect(t, s), publish.Config{WorkerID: 7, LocalIndexer: true}, 1)
	b.sub.SetWorker(7, source(1))
	p.change(20)
	b.equal(p)
	eventually(t, func() bool { steady, _ := b.sub.Ranks(); return steady == 1 })
	id, err := nc.GetClientID()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.DisconnectClientByID(id); err != nil {
		t.Fatal(err)
	}
	p.change(20)
	<-time.After(50 * time.Millisecond) // the event is on the bus while no router is connected
	b.equal(p)
	if c := b.counts(); c["ask_range"] != 1 || c["ask_dump"] != 1 {
		t.Errorf("asked %v, want a dump at first and a range later", c)
	}
}

// relay forwards a scope's events to another scope with faults, and the queries back without
// faults.
func relay(t *testing.T, nc *nats.Conn, from, to wire.Scope, rng *rand.Rand, percent int) {
	t.Helper()
	var late [][]byte
	forward := func(data []byte) {
		if err := nc.Publish(to.Topic(events.Topic), data); err != nil {
			t.Error(err)
		}
	}
	sub, err := nc.Subscribe(from.Topic(events.Topic), func(m *nats.Msg) {
		switch n := rng.IntN(100) / percent; n {
		case 0: // lost
		case 1:
			forward(m.Data)
			forward(m.Data)
		case 2:
			late = append(late, m.Data)
		default:
			forward(m.Data)
			for _, data := range late {
				forward(data)
			}
			late = nil
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	queries, err := nc.Subscribe(to.Own("query", "*", "*"), func(m *nats.Msg) {
		rest := m.Subject[len(to.Own("query")):]
		if err := nc.PublishRequest(from.Own("query")+rest, m.Reply, m.Data); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = sub.Unsubscribe()
		_ = queries.Unsubscribe()
	})
}

// 5% of the messages are lost, 5% are repeated and 5% are late.
func TestLossRepetitionAndDelay(t *testing.T) {
	t.Parallel()
	nc := bus(t)
	inner, outer := wire.Scope{Namespace: "inner"}, wire.Scope{Namespace: "outer"}
	relay(t, nc, inner, outer, rand.New(rand.NewPCG(5, 5)), 5)
	b := newBed(t, nc, events.SubscriberConfig{Scope: outer})
	running(t, b.sub.Run)
	var ps []*liveWorker
	var rests []func()
	for id := range uint64(4) {
		p := startProcess(t, nc, publish.Config{Scope: inner, WorkerID: id + 1, LocalIndexer: true}, id)
		b.sub.SetWorker(p.id, source(1))
		ps, rests = append(ps, p), append(rests, p.changing(t))
	}
	eventually(t, func() bool { return b.counts()["ask_range"] >= 10 })
	for _, rest := range rests {
		rest()
	}
	// The last event may be lost like any other; later events show the loss.
	eventually(t, func() bool {
		for _, p := range ps {
			p.change(1)
		}
		<-time.After(50 * time.Millisecond)
		steady, _ := b.sub.Ranks()
		return steady == len(ps) && !slices.ContainsFunc(ps, func(p *liveWorker) bool { return !b.holds(p) })
	})
	b.equal(ps...)
	c := b.counts()
	t.Log(c)
	if c["ask_range"] < 10 || c["given_up"] > 0 || c["ask_dump"] > len(ps)+5 {
		t.Errorf("asked %v, want ranges, and dumps only at first", c)
	}
}

// A router that is too slow for the bus loses messages, and recovers their events by queries.
func TestASlowRouterLosesNothing(t *testing.T) {
	t.Parallel()
	nc := bus(t)
	b := newBed(t, nc, events.SubscriberConfig{})
	b.sub.LimitPending(4)
	running(t, b.sub.Run)
	p := startProcess(t, nc, publish.Config{WorkerID: 7, LocalIndexer: true}, 1)
	b.sub.SetWorker(7, source(1))
	eventually(t, func() bool { steady, _ := b.sub.Ranks(); return steady == 1 })
	read := b.counts()["ask_dump"] // the dump at discovery
	published, err := nc.SubscribeSync(wire.Scope{}.Topic(events.Topic))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = published.Unsubscribe() }()
	b.mu.Lock() // the sink blocks
	rest := p.changing(t)
	eventually(t, func() bool { n, _, err := published.Pending(); return err != nil || n > 30 })
	rest() // no later event shows the loss
	<-time.After(50 * time.Millisecond)
	b.mu.Unlock()
	// The index may equal the cache by chance before the loss is noticed, so first wait for the query.
	eventually(t, func() bool { c := b.counts(); return c["ask_range"] > 0 || c["ask_dump"] > read })
	b.equal(p)
}

// A process that publishes under another worker's id does not harm that worker, and neither do
// messages of random bytes.
func TestLiarsAndGarbage(t *testing.T) {
	t.Parallel()
	nc := bus(t)
	b := newBed(t, nc, events.SubscriberConfig{})
	running(t, b.sub.Run)
	p := startProcess(t, nc, publish.Config{WorkerID: 7, LocalIndexer: true}, 1)
	b.sub.SetWorker(7, source(1))
	b.sub.SetWorker(8, source(1)) // only the false worker answers for it
	rest := p.changing(t)
	rng := rand.New(rand.NewPCG(6, 6))
	lies := rand.New(rand.NewPCG(7, 7))
	liar, err := nc.Subscribe(wire.Scope{}.Own("query", wire.WorkerKey(8), "0"), func(m *nats.Msg) {
		data := events.AppendAnswer(nil, &events.Answer{Kind: events.AnswerDump, LastEventID: 3, Events: []events.RouterEvent{stored(7, 1), stored(7, 2)}})
		switch lies.IntN(3) {
		case 0:
			data = data[:lies.IntN(len(data))]
		case 1:
			data[lies.IntN(len(data))] ^= byte(1 + lies.IntN(255))
		}
		if err := m.Respond(data); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = liar.Unsubscribe() }()
	for i := range uint64(300) {
		m := events.AppendEnvelope(nil, events.Envelope{PublisherID: 66 + i%3, Topic: events.Topic, Payload: events.AppendEvents(nil, []events.RouterEvent{stored(7, i)})})
		if i%3 == 0 {
			for range 3 {
				m[rng.IntN(len(m))] = byte(rng.Uint32())
			}
		}
		if err := nc.Publish(wire.Scope{}.Topic(events.Topic), m); err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Millisecond)
	}
	rest()
	b.equal(p)
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, line := range content(b.index, 7) {
		if slices.Contains(content(b.index, 8), line) {
			t.Errorf("worker 8 got what is worker 7's: %s", line)
		}
	}
}

// Two thousand workers, in the long form ten thousand, appear at once: few queries run at a time, and all workers are read soon.
// If no worker answers, queries are retried with a growing delay.
func TestManyWorkersAtOnce(t *testing.T) {
	t.Parallel()
	workers := 2_000
	if fixtures.Long() {
		workers = 10_000
	}
	nc := bus(t)
	b := newBed(t, nc, events.SubscriberConfig{})
	var mu sync.Mutex
	inFlight, most, asked := 0, 0, 0
	answers := make(chan *nats.Msg, workers)
	sub, err := nc.Subscribe(wire.Scope{}.Own("query", "*", "*"), func(m *nats.Msg) {
		mu.Lock()
		defer mu.Unlock()
		asked++
		inFlight++
		most = max(most, inFlight)
		answers <- m
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	running(t, func(ctx context.Context) error {
		for {
			select {
			case <-ctx.Done():
				return nil
			case m := <-answers:
				q, err := events.DecodeQuery(m.Data)
				if err != nil {
					return err
				}
				mu.Lock()
				inFlight--
				mu.Unlock()
				if err := m.Respond(events.AppendAnswer(nil, &events.Answer{Kind: events.AnswerDump, LastEventID: 1, Events: []events.RouterEvent{stored(q.WorkerID, 1)}})); err != nil {
					return err
				}
			}
		}
	})
	begin := time.Now()
	for id := range uint64(workers) {
		b.sub.SetWorker(id+1, source(1))
	}
	running(t, b.sub.Run)
	for last, progress := 0, begin; last < workers; <-time.After(100 * time.Millisecond) { // Ranks holds the lock for long
		if steady, _ := b.sub.Ranks(); steady > last {
			last, progress = steady, time.Now()
		}
		if time.Since(progress) > 3*time.Minute {
			t.Fatalf("%d of %d workers are read, and no more for 3 minutes: %v", last, workers, b.counts())
		}
	}
	t.Logf("%d workers were read in %v, at most %d at once", workers, time.Since(begin), most)
	mu.Lock()
	if most > events.MaxDumps || asked != workers {
		t.Errorf("%d queries, %d at once; want one each, at most %d at once", asked, most, events.MaxDumps)
	}
	mu.Unlock()
	if n := b.index.Blocks(); n != workers {
		t.Errorf("%d blocks are known, want one of each worker", n)
	}
}

// Two namespaces with the same workers share nothing.
func TestScopesShareNothing(t *testing.T) {
	t.Parallel()
	nc := bus(t)
	var beds []*bed
	var ps []*liveWorker
	for i, scope := range []wire.Scope{{Namespace: "a"}, {Namespace: "b"}, {Namespace: "a", Endpoint: "e"}} {
		b := newBed(t, nc, events.SubscriberConfig{Scope: scope})
		running(t, b.sub.Run)
		b.sub.SetWorker(7, source(1))
		beds = append(beds, b)
		ps = append(ps, startProcess(t, nc, publish.Config{Scope: scope, WorkerID: 7, LocalIndexer: true}, uint64(i)))
	}
	for range 20 {
		for i, p := range ps {
			p.change(3 + i)
			if i == 1 {
				beds[1].sub.Doubt(7, 0) // read again meanwhile
			}
		}
		<-time.After(time.Millisecond)
	}
	for i, b := range beds {
		b.equal(ps[i])
		if c := b.counts(); c["lie"]+c["given_up"]+c["broken"] > 0 {
			t.Errorf("scope %d: %v", i, c)
		}
	}
}
