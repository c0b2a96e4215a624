// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// soon fails if do does not return while something else blocks.
func soon(t *testing.T, what string, do func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); do() }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatalf("%s has to wait", what)
	}
}

// While a snapshot is read, however long that takes, workers register, change and leave, and
// messages of other feeds are applied. The snapshot's content for workers that changed meanwhile
// is ignored.
func TestReadingASnapshotKeepsNobodyWaiting(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startAskable(t, n.connect(), 4)
	a := e.startMember(n.connect(), "a", events.DurableConfig{})
	e.work(400)
	e.mustKnow(a)
	a.stop()
	if !n.hasSnapshot(1) {
		t.Fatal("there is no snapshot")
	}

	b := newReplica(t, n.connect(), "b", events.DurableConfig{})
	reading, read := make(chan struct{}), make(chan struct{})
	b.gate = sync.OnceFunc(func() {
		close(reading)
		<-read
	})
	installed := make(chan bool, 1)
	b.installing = sync.OnceFunc(func() {
		left := make(chan struct{})
		go func() { defer close(left); b.sub.Forget(98) }()
		select {
		case <-left:
			installed <- true
		case <-time.After(30 * time.Second):
			installed <- false
		}
	})
	goOn := sync.OnceFunc(func() { close(read) })
	e.register(b)
	running(t, b.sub.Run)
	running(t, b.Run)
	defer goOn()
	<-reading
	soon(t, "a worker that leaves", func() { b.sub.Forget(1) })
	soon(t, "a worker that changes", func() {
		src := e.source(1)
		src.Feed = events.FeedCore
		b.sub.SetWorker(2, src)
	})
	soon(t, "a worker that comes", func() { b.sub.SetWorker(99, events.Source{Feed: events.FeedCore}) })
	soon(t, "a message", func() { b.sub.Take(context.Background(), events.FeedCore, nil, nil) })
	soon(t, "the position", func() { b.Position() })
	goOn()
	if !<-installed {
		t.Error("a worker that leaves has to wait while the snapshot is installed")
	}

	eventually(t, b.Ready)
	e.awaitEqual(func(w int) bool { return w > 1 }, b)
	b.sub.SetWorker(1, e.source(0)) // the worker is read again
	e.mustKnow(b)
	e.work(100)
	e.mustKnow(b)
}

// A sink that blocks does not delay registrations.
func TestASinkKeepsNobodyWaiting(t *testing.T) {
	t.Parallel()
	s, _ := startServer(t, -1)
	entered, leave := make(chan struct{}, 9), make(chan struct{})
	sub, err := events.NewSubscriber(connect(t, s), events.SubscriberConfig{Sink: func(uint64, uint32, indexer.Event) {
		entered <- struct{}{}
		<-leave
	}})
	if err != nil {
		t.Fatal(err)
	}
	sub.SetWorker(1, events.Source{Feed: events.FeedCore, DPSize: 1})
	taken := make(chan struct{})
	go func() {
		defer close(taken)
		sub.Take(t.Context(), events.FeedCore, envelope(t, events.AppendEvents(nil, []events.RouterEvent{stored(1, 1)})), nil)
	}()
	<-entered
	defer func() { close(leave); <-taken }()
	soon(t, "a worker that comes", func() { sub.SetWorker(2, events.Source{Feed: events.FeedCore, DPSize: 1}) })
	soon(t, "a worker that leaves", func() { sub.Forget(2) })
	soon(t, "a question", func() { sub.Wants(events.FeedCore) })
	soon(t, "a message", func() {
		sub.Take(t.Context(), events.FeedCore, envelope(t, events.AppendEvents(nil, []events.RouterEvent{stored(1, 2)})), nil)
	})
}

// A callback that blocks delays neither registrations nor messages.
func TestACallbackKeepsNobodyWaiting(t *testing.T) {
	s, _ := startServer(t, -1)
	entered, leave := make(chan struct{}, 9), make(chan struct{})
	sub, err := events.NewSubscriber(connect(t, s), events.SubscriberConfig{
		Sink: func(uint64, uint32, indexer.Event) {},
		Changed: func(uint64, uint32, indexer.State) {
			entered <- struct{}{}
			<-leave
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	sub.SetWorker(1, events.Source{Feed: events.FeedCore, DPSize: 1})
	sub.Follow(1, 7, 1)
	go sub.Doubt(1, 0) // the rank is suspect
	<-entered
	defer close(leave)
	soon(t, "a worker that comes", func() { sub.SetWorker(2, events.Source{Feed: events.FeedCore, DPSize: 1}) })
	soon(t, "a worker that leaves", func() { sub.Forget(2) })
	soon(t, "a message", func() { sub.Take(t.Context(), events.FeedCore, nil, nil) })
}
