// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/engines/publish"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
)

// bus starts a NATS server in this process and connects to it.
func bus(t *testing.T) *nats.Conn {
	t.Helper()
	s, err := server.NewServer(&server.Options{DontListen: true, NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("NATS does not start")
	}
	nc, err := nats.Connect("", nats.InProcessServer(s))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		nc.Close()
		s.Shutdown()
		s.WaitForShutdown()
	})
	return nc
}

// running runs a function until the test ends or stop is called.
func running(t *testing.T, run func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(stop)
	return stop
}

// listener is an index fed by a subscriber.
type listener struct {
	mu    sync.Mutex
	index *indexer.Index
	sub   *events.Subscriber
	evs   int
}

func listen(t *testing.T, nc *nats.Conn, scope wire.Scope) *listener {
	t.Helper()
	l := &listener{index: indexer.New(indexer.Config{})}
	var err error
	l.sub, err = events.NewSubscriber(nc, events.SubscriberConfig{Scope: scope, Sink: func(worker uint64, _ uint32, ev indexer.Event) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.evs++
		l.index.Apply(int(worker), ev)
	}})
	if err != nil {
		t.Fatal(err)
	}
	running(t, l.sub.Run)
	eventually(t, func() bool { return nc.NumSubscriptions() > 0 })
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	return l
}

func (l *listener) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.evs
}

func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Minute); !ok(); {
		if time.Now().After(deadline) {
			t.Fatal("the condition did not hold in time")
		}
		<-time.After(time.Millisecond)
	}
}

func TestFromPublisherToIndex(t *testing.T) {
	nc := bus(t)
	l := listen(t, nc, wire.Scope{})
	other := listen(t, nc, wire.Scope{Namespace: "other"})
	p := publish.New(nc, publish.Config{WorkerID: 3})
	stop := running(t, p.Run)

	// A chain stored in single blocks becomes few events.
	const blocks = 300
	for i := range uint64(blocks) {
		p.Publish(0, indexer.Event{Kind: indexer.Stored, HasParent: i > 0, Parent: i + 999, Blocks: []indexer.Block{{External: i + 1000, Local: i}}})
	}
	eventually(t, func() bool { return l.index.WorkerBlocks(3) == blocks })
	if n := l.count(); n > blocks/10 {
		t.Errorf("%d events for %d blocks, want them joined", n, blocks)
	}
	for i := range uint64(100) {
		p.Publish(0, indexer.Event{Kind: indexer.Removed, Externals: []uint64{1000 + blocks - 1 - i}})
	}
	p.Publish(0, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1, Local: 77}}})
	stop() // pending events are sent first
	eventually(t, func() bool { return l.index.WorkerBlocks(3) == blocks-100+1 })

	// A new publisher starts with an empty cache.
	again := publish.New(nc, publish.Config{WorkerID: 3})
	running(t, again.Run)
	again.Publish(0, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 5, Local: 5}}})
	eventually(t, func() bool { return l.index.WorkerBlocks(3) == 1 })
	if n := other.count(); n != 0 {
		t.Errorf("another namespace heard %d events", n)
	}
}

// maxPending is the number of events that a publisher keeps while they cannot be sent.
const maxPending = 16384

// The number of unsent events is limited, and dropped events show as a gap.
func TestTooManyPendingEventsLeaveAGap(t *testing.T) {
	nc := bus(t)
	l := listen(t, nc, wire.Scope{})
	p := publish.New(nc, publish.Config{WorkerID: 1})
	store := func(i uint64) indexer.Event {
		return indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: i, Local: i}}}
	}
	for i := range uint64(maxPending + 100) {
		p.Publish(0, store(i))
	}
	// The first event after the loss shows it, whether it carries only its number or a change.
	tr, gaps := events.NewTracker(func(uint64, uint32, indexer.Event) {}), make(chan string, 10)
	sub, err := nc.Subscribe(wire.Scope{}.Topic(events.Topic), func(m *nats.Msg) {
		e, err := events.DecodeEnvelope(m.Data)
		if err != nil {
			t.Error(err)
		}
		evs, _, _ := events.DecodeEvents(e.Payload)
		for _, ev := range evs {
			if v := tr.Accept(time.Time{}, e.PublisherID, ev); v != "" {
				gaps <- fmt.Sprint(ev.EventID, " ", v)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := sub.SetPendingLimits(-1, -1); err != nil {
		t.Fatal(err)
	}
	running(t, p.Run)
	eventually(t, func() bool { return l.index.WorkerBlocks(1) == maxPending })
	p.Publish(0, store(1<<40))
	if got, want := <-gaps, fmt.Sprint(maxPending+101, " gap"); got != want {
		t.Errorf("after the loss: event %s, want %s", got, want)
	}
}

// A bus that closes while the last events are sent causes no error: it could have been away
// before.
func TestTheBusGoesAwayAtTheEnd(t *testing.T) {
	s, _ := startServer(t, -1)
	w := natstest.NewWay(t, func() string { return s.Addr().String() })
	nc, err := nats.Connect("nats://"+w.At, nats.MaxReconnects(-1))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	p := publish.New(nc, publish.Config{WorkerID: 1})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	eventually(t, nc.IsConnected)
	w.Deaf.Store(true)
	sent := nc.Stats().OutMsgs
	p.Publish(0, indexer.Event{Kind: indexer.Cleared})
	cancel()
	eventually(t, func() bool { return nc.Stats().OutMsgs > sent })
	<-time.After(100 * time.Millisecond) // the flush waits for its answer, up to a second
	w.Cut(true)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestGarbageOnTheBusIsHarmless(t *testing.T) {
	nc := bus(t)
	l := listen(t, nc, wire.Scope{})
	subject := wire.Scope{}.Topic(events.Topic)
	for _, data := range []string{"", "{}", "\xc1", "\x80", frameE1, string(unhex(t, frameE5))} {
		if err := nc.Publish(subject, []byte(data)); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, func() bool { return l.count() == 2 }) // the two events of the last publisher
}

func TestForgottenAndKnownWorkers(t *testing.T) {
	nc := bus(t)
	l := listen(t, nc, wire.Scope{})
	p := publish.New(nc, publish.Config{WorkerID: 1})
	running(t, p.Run)
	p.Publish(0, indexer.Event{Kind: indexer.Cleared})
	eventually(t, func() bool { return l.count() == 1 })
	l.sub.SetWorker(1, events.Source{})
	l.sub.Forget(1)
	p.Publish(0, indexer.Event{Kind: indexer.Cleared})
	eventually(t, func() bool { return l.count() == 2 })
}

// The log warns about an abandoned repair and names the worker.
func TestARepairThatIsGivenUpIsAWarning(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	b := newBed(t, bus(t), events.SubscriberConfig{Log: slog.New(slog.NewTextHandler(&out, nil))})
	b.sub.SetWorker(1, source(1))
	b.sub.Take(t.Context(), events.FeedCore, envelope(t, events.AppendEvents(nil, []events.RouterEvent{stored(1, 3)})), nil)
	src := source(1)
	src.Queries = false
	b.sub.SetWorker(1, src) // the worker can no longer be queried
	if got := out.String(); !strings.Contains(got, "level=WARN") || !strings.Contains(got, "could not be requested") || !strings.Contains(got, "worker=1 ") {
		t.Errorf("the log says %q", got)
	}
}
