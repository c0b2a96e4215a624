// SPDX-License-Identifier: Apache-2.0

package durable_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/events/durable"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
)

// A replica that is killed while it writes a snapshot leaves a lock, a partial object and a
// complete stream. When the lock has expired, another replica takes the snapshot and removes the
// partial object.
func TestAReplicaDiesWhileItWritesASnapshot(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 4)
	a := newReplica(t, n.connect(), "a", durable.Config{SnapshotThreshold: 10})
	writing, killed := make(chan struct{}), make(chan struct{})
	a.runs = func(yield func(int, indexer.Run) bool) {
		// More than one chunk of the object store, so that a part is stored.
		run := indexer.Run{ID: 1, Holders: []indexer.Holder{{}}}
		for i := range uint64(1000) {
			run.Local = append(run.Local, i)
			run.Holders[0].Externals = append(run.Holders[0].Externals, i)
		}
		for run.ID <= 40 {
			if !yield(0, run) {
				return
			}
			run.ID++
		}
		close(writing)
		<-killed
	}
	a.stop = natstest.Run(t, a.Run)
	natstest.Eventually(t, a.Ready)
	e.workUntil(func() bool {
		select {
		case <-writing:
			return true
		default:
			return false
		}
	})
	chunks := func() (n1 int) {
		s, err := n.jetStream().Stream(t.Context(), "OBJ_"+wire.Scope{}.Bucket("snap"))
		if err != nil {
			t.Fatal(err)
		}
		info, err := s.Info(t.Context(), jetstream.WithSubjectFilter("$O."+wire.Scope{}.Bucket("snap")+".C.*"))
		if err != nil {
			t.Fatal(err)
		}
		return len(info.State.Subjects)
	}
	natstest.Eventually(t, func() bool { return chunks() == 1 })
	a.nc.Close()
	close(killed)
	a.stop()
	if n.hasSnapshot(1) || n.streamInfo().State.FirstSeq != 1 || chunks() != 1 {
		t.Errorf("a snapshot: %v, the stream begins with %d, %d objects have chunks; want half a snapshot, and all of the stream",
			n.hasSnapshot(1), n.streamInfo().State.FirstSeq, chunks())
	}
	b := startReplica(t, n.connect(), "b", durable.Config{SnapshotThreshold: 10})
	e.workUntil(func() bool { return n.hasSnapshot(1) && n.streamInfo().State.FirstSeq > 1 })
	e.mustKnow(b)
	b.stop()
	objects, err := n.objects().List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := chunks(); got != len(objects) {
		t.Errorf("%d objects have chunks, %d are named", got, len(objects))
	}
	e.mustKnow(startReplica(t, n.connect(), "c", durable.Config{}))
}

// Another program purges the stream while a replica is behind. The ranks whose messages are gone
// are not ok until their workers clear their caches.
func TestSomebodyPurgesWhatAReplicaHasNotRead(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 4)
	b := startReplica(t, n.connect(), "b", durable.Config{SnapshotThreshold: 1 << 30}, func(x *durable.Timing) { x.Fetch = 4 })
	e.register(b)
	e.work(50)
	e.mustKnow(b)
	b.mu.Lock()
	b.slow = 5 * time.Millisecond
	b.mu.Unlock()
	from := b.Position()
	e.workUntil(func() bool { return n.streamInfo().State.LastSeq > from+40 })
	n.purge()
	if at, first := b.Position(), n.streamInfo().State.FirstSeq; first <= at+10 {
		t.Fatalf("the replica is at %d, the stream begins with %d: nothing is missing", at, first)
	}
	b.mu.Lock()
	b.slow = 0
	b.mu.Unlock()
	e.workUntil(func() bool { return b.log.Has("were purged") })
	natstest.Eventually(t, b.Ready)
	natstest.Eventually(t, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.states) == len(e.pubs)
	})
	for w := range e.pubs {
		e.publish(w, indexer.Event{Kind: indexer.Cleared})
		e.held[w] = nil
	}
	e.work(100)
	e.mustKnow(b)
	b.isIn(indexer.StateOK, len(e.pubs))
}

// Another program purges the stream while a replica is behind. The replica restores a snapshot of
// another replica that contains the purged messages, whichever worker publishes the next message.
// Without such a snapshot the ranks are suspect or partial.
func TestASnapshotFillsAPurgedHole(t *testing.T) {
	for name, c := range map[string]struct {
		next     int // the worker of the message behind the hole
		snapshot bool
		want     [3]indexer.State
	}{
		"a worker that lost messages publishes":                        {0, true, [3]indexer.State{}},
		"a worker that lost nothing publishes":                         {2, true, [3]indexer.State{}},
		"a worker that lost messages publishes, without a snapshot":    {0, false, [3]indexer.State{indexer.StateSuspect, indexer.StatePartial, indexer.StatePartial}},
		"a worker that lost nothing publishes, and without a snapshot": {2, false, [3]indexer.State{indexer.StatePartial, indexer.StatePartial, indexer.StatePartial}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := startJetStream(t)
			e := startEngines(t, n.connect(), 3)
			b := startReplica(t, n.connect(), "b", durable.Config{SnapshotThreshold: 1 << 30}, func(x *durable.Timing) { x.Fetch = 4 })
			e.register(b)
			for w := range e.pubs { // each worker publishes something
				e.publish(w, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1<<50 | uint64(w), Local: 1}}})
			}
			e.work(50)
			e.mustKnow(b)
			e.live = 2 // the last worker publishes nothing for now
			b.mu.Lock()
			from := n.streamInfo().State.LastSeq
			e.workUntil(func() bool { return n.streamInfo().State.LastSeq > from+40 })
			a := startReplica(t, n.connect(), "a", durable.Config{SnapshotThreshold: 1 << 30})
			e.mustKnow(a) // the publishers have sent everything
			if c.snapshot {
				a.stop() // writes a snapshot
			} else {
				a.kill()
			}
			n.purge()
			first := n.streamInfo().State.FirstSeq
			e.publish(c.next, indexer.Event{Kind: indexer.Removed, Externals: []uint64{1}})
			b.mu.Unlock()
			natstest.Eventually(t, func() bool { return b.Position() >= first && b.Ready() })
			natstest.Eventually(t, func() bool {
				b.mu.Lock()
				defer b.mu.Unlock()
				return [3]indexer.State{b.states[1], b.states[2], b.states[3]} == c.want
			})
			if c.snapshot {
				e.mustKnow(b)
			}
		})
	}
}
