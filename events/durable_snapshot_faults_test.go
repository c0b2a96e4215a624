// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/wire"
)

// A replica that is killed in the middle of a snapshot leaves a lock, half an object and
// a stream that is whole: when the lock has expired another one takes the snapshot, and
// what the dead one had written is gone.
func TestAReplicaDiesWhileItWritesASnapshot(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 4)
	a := newReplica(t, n.connect(), "a", events.DurableConfig{SnapshotThreshold: 10})
	writing, killed := make(chan struct{}), make(chan struct{})
	a.runs = func(yield func(int, indexer.Run) bool) {
		// More than a chunk of the object store, so that a part is there.
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
	a.stop = running(t, a.Run)
	eventually(t, a.Ready)
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
	eventually(t, func() bool { return chunks() == 1 })
	a.nc.Close()
	close(killed)
	a.stop()
	if n.hasSnapshot(1) || n.streamInfo().State.FirstSeq != 1 || chunks() != 1 {
		t.Errorf("a snapshot: %v, the stream begins with %d, %d objects have chunks; want half a snapshot, and all of the stream",
			n.hasSnapshot(1), n.streamInfo().State.FirstSeq, chunks())
	}
	b := startReplica(t, n.connect(), "b", events.DurableConfig{SnapshotThreshold: 10})
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
	e.mustKnow(startReplica(t, n.connect(), "c", events.DurableConfig{}))
}

// Somebody purges the stream while a replica is behind: what it had not read is in the
// snapshot that one takes who has, and it waits for that.
func TestSomebodyPurgesWhatAReplicaHasNotRead(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 4)
	conf := events.DurableConfig{SnapshotThreshold: 1 << 30}
	a := startReplica(t, n.connect(), "a", conf)
	b := startReplica(t, n.connect(), "b", conf, func(x *events.Timing) { x.Fetch, x.SnapshotRest = 4, 2*time.Second })
	e.work(50)
	e.mustKnow(a, b)
	b.mu.Lock()
	b.slow = 5 * time.Millisecond
	b.mu.Unlock()
	e.workUntil(func() bool { return a.Position() > b.Position()+20 })
	e.mustKnow(a)
	n.purge()
	if at, first := b.Position(), n.streamInfo().State.FirstSeq; first <= at+10 {
		t.Fatalf("the replica is at %d, the stream begins with %d: nothing is missing", at, first)
	}
	b.mu.Lock()
	b.slow = 0
	b.mu.Unlock()
	e.work(100)
	e.mustKnow(a, b)
	if !b.log.has("were purged") || !b.log.has("a snapshot is restored") {
		t.Error("it did not take the snapshot of the one who had read all")
	}

	// If nobody has read it, it is gone, and what is known says so until it is true
	// again.
	a.stop()
	b.mu.Lock()
	b.slow = 5 * time.Millisecond
	b.mu.Unlock()
	for w := range e.pubs {
		e.tell(w, indexer.Event{Kind: indexer.Cleared})
		e.held[w] = nil
	}
	from := b.Position()
	e.workUntil(func() bool { return n.streamInfo().State.LastSeq > from+40 })
	n.purge()
	b.mu.Lock()
	b.slow = 0
	b.mu.Unlock()
	e.workUntil(func() bool { return b.log.has("unread and in no snapshot") })
	for w := range e.pubs {
		e.tell(w, indexer.Event{Kind: indexer.Cleared})
		e.held[w] = nil
	}
	e.work(100)
	e.mustKnow(b)
}
