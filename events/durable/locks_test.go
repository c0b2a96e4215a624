// SPDX-License-Identifier: Apache-2.0

package durable_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/durable"
	"github.com/kvroute/kvroute/internal/natstest"
)

// While a snapshot is read, however long that takes, workers register, change and leave, and
// messages of other feeds are applied. The snapshot's content for workers that changed meanwhile
// is ignored.
func TestReadingASnapshotKeepsNobodyWaiting(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startAskable(t, n.connect(), 4)
	a := e.startMember(n.connect(), "a", durable.Config{})
	e.work(400)
	e.mustKnow(a)
	a.stop()
	if !n.hasSnapshot(1) {
		t.Fatal("there is no snapshot")
	}

	b := newReplica(t, n.connect(), "b", durable.Config{})
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
	natstest.Run(t, b.sub.Run)
	natstest.Run(t, b.Run)
	defer goOn()
	<-reading
	natstest.Soon(t, "a worker that leaves", func() { b.sub.Forget(1) })
	natstest.Soon(t, "a worker that changes", func() {
		src := e.source(1)
		src.Feed = events.FeedCore
		b.sub.SetWorker(2, src)
	})
	natstest.Soon(t, "a worker that comes", func() { b.sub.SetWorker(99, events.Source{Feed: events.FeedCore}) })
	natstest.Soon(t, "a message", func() { b.sub.Take(context.Background(), events.FeedCore, nil, nil) })
	natstest.Soon(t, "the position", func() { b.Position() })
	goOn()
	if !<-installed {
		t.Error("a worker that leaves has to wait while the snapshot is installed")
	}

	natstest.Eventually(t, b.Ready)
	e.awaitEqual(func(w int) bool { return w > 1 }, b)
	b.sub.SetWorker(1, e.source(0)) // the worker is read again
	e.mustKnow(b)
	e.work(100)
	e.mustKnow(b)
}
