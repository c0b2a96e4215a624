// SPDX-License-Identifier: Apache-2.0

package durable_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/engines/publish"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/durable"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// The invariant of these tests: after any fault, every replica eventually knows exactly what the
// engines cache. Each test covers one fault.

// A restart of the NATS server loses neither messages in transit nor events of the time it is
// away.
func TestNATSRestarts(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 4)
	conf := durable.Config{SnapshotThreshold: 40}
	a := startReplica(t, n.connect(), "a", conf)
	for range 3 {
		e.workFor(150 * time.Millisecond)
		n.stop()
		e.work(100)
		n.start()
	}
	e.workFor(150 * time.Millisecond)
	e.mustKnow(a, startReplica(t, n.connect(), "b", conf))
}

// A minute without NATS (shortened to seconds with as many events) only makes the state stale.
func TestNATSIsAwayForAMinute(t *testing.T) {
	t.Parallel()
	n, e, a := settled(t, 4, 200, durable.Config{})
	before := a.content()
	n.stop()
	natstest.Eventually(t, func() bool { return !a.Ready() })
	e.workFor(3 * time.Second)
	if !slices.Equal(a.content(), before) {
		t.Error("without NATS the replica forgets or invents something")
	}
	n.start()
	e.mustKnow(a)
}

// NATS is away for longer than registry records live, so the registry is empty when NATS returns.
// Workers that stayed alive stay known with their blocks. A worker that ended meanwhile is removed
// with its blocks.
func TestNATSIsAwayBeyondTheRecordsLife(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	bucket := wire.Scope{}.Bucket("workers")
	// An existing bucket keeps its settings.
	records, err := n.jetStream().CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: bucket, TTL: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	e := startAskable(t, n.connect(), 4)
	var leave []func()
	for w := range e.pubs {
		a, err := fleet.NewAnnouncer(e.nc, fleet.AnnouncerConfig{Record: fleet.Record{
			WorkerID: uint64(w + 1), Name: fmt.Sprint("worker-", w+1), Address: "10.0.0.1:1", Models: []string{"m"}, BlockSize: 16,
			Events: fleet.Events{Transport: "jetstream", LocalIndexer: true, PublisherID: e.pubs[w].ID()},
		}})
		if err != nil {
			t.Fatal(err)
		}
		leave = append(leave, natstest.Run(t, a.Run))
	}

	a := newReplica(t, n.connect(), "a", durable.Config{})
	var mu sync.Mutex
	var forgotten []uint64
	clock := time.Now() // the registry's time, which stands still
	var hurry time.Time // from this time on, the clock runs ten times as fast
	looks := 0          // how often the registry read the clock
	registry, err := fleet.NewRegistry(a.nc, fleet.RegistryConfig{
		Set: func(w router.WorkerInfo) { a.sub.SetWorker(w.ID, e.source(int(w.ID)-1)) },
		Remove: func(id uint64) {
			a.sub.Forget(id)
			a.mu.Lock()
			a.parked.RemoveWorker(number(id))
			a.mu.Unlock()
			mu.Lock()
			forgotten = append(forgotten, id)
			mu.Unlock()
		},
		Now: func() time.Time {
			mu.Lock()
			defer mu.Unlock()
			looks++
			if hurry.IsZero() {
				return clock
			}
			return clock.Add(10 * time.Since(hurry))
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	natstest.Run(t, a.sub.Run)
	natstest.Run(t, a.Run)
	natstest.Run(t, registry.Run)
	natstest.Eventually(t, func() bool { return a.Ready() && registry.Ready() })
	e.work(300)
	e.mustKnow(a)

	n.stop()
	natstest.Eventually(t, func() bool { return !a.Ready() && !registry.Ready() })
	// The worker ends without deregistering: its last message does not arrive.
	leave[3]()
	e.stops[3]()
	e.live = 3
	e.workFor(1500 * time.Millisecond) // longer than a record's lifetime
	e.awaitEqual(func(w int) bool { return w == 4 }, a)
	mu.Lock()
	clock = clock.Add(time.Minute)
	mu.Unlock()
	n.start()
	natstest.Eventually(t, func() bool {
		keys, err := records.Keys(t.Context())
		return err == nil && len(keys) == 3
	})
	e.work(100)
	e.mustKnow(a)
	natstest.Eventually(t, registry.Ready)
	mu.Lock()
	until := looks + 10 // more than the workers' records and heartbeats make it look, so that it looks for silent ones
	mu.Unlock()
	natstest.Eventually(t, func() bool { mu.Lock(); defer mu.Unlock(); return looks >= until })
	mu.Lock()
	early := slices.Clone(forgotten)
	hurry = time.Now()
	mu.Unlock()
	if len(early) > 0 {
		t.Errorf("workers %d were forgotten as soon as NATS was back", early)
	}
	e.truth.RemoveWorker(4)
	e.mustKnow(a)
	e.work(100)
	e.mustKnow(a)
}

// Between publishers and the stream, one message in twenty is lost, one is stored but not
// acknowledged, and one is repeated much later.
func TestDroppedDuplicatedReorderedMessages(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	rng, mu, late := rand.New(rand.NewPCG(1, 1)), sync.Mutex{}, []*nats.Msg{}
	lost, twice, again := 0, 0, 0
	e := startEngines(t, n.connect(), 4, func(conf *publish.Config) {
		conf.Publish = n.interfere(func(ctx context.Context, m *nats.Msg, publish func(context.Context, *nats.Msg) error) error {
			mu.Lock()
			fault := rng.IntN(20)
			var old *nats.Msg
			switch {
			case fault == 0:
				lost++
			case fault == 1:
				twice++
			case fault == 2 && len(late) > 0:
				old, again = late[rng.IntN(len(late))], again+1
			}
			if len(late) < 200 {
				copied := nats.NewMsg(m.Subject)
				copied.Data = bytes.Clone(m.Data)
				late = append(late, copied)
			}
			mu.Unlock()
			switch {
			case fault == 0:
				return errors.New("lost")
			case fault == 1:
				// Without the message id, the stream cannot detect the duplicate.
				m.Header.Del(jetstream.MsgIDHeader)
				return errors.Join(publish(ctx, m), errors.New("the answer is lost"))
			case old != nil:
				if err := publish(ctx, old); err != nil {
					return err
				}
			}
			return publish(ctx, m)
		})
	})
	a := startReplica(t, n.connect(), "a", durable.Config{SnapshotThreshold: 100})
	e.workFor(2 * time.Second)
	e.mustKnow(a)
	mu.Lock()
	defer mu.Unlock()
	if lost == 0 || twice == 0 || again == 0 {
		t.Errorf("%d were lost, %d came twice, %d late: nothing was tested", lost, twice, again)
	}
}

// Connections that break lose messages on their way to the replica. Those messages are delivered
// again, in order, and are applied once.
func TestBrokenConnections(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 4)
	nc := n.connect()
	a := startReplica(t, nc, "a", durable.Config{SnapshotThreshold: 60})
	for range 20 {
		e.workFor(50 * time.Millisecond)
		if err := nc.ForceReconnect(); err != nil {
			t.Fatal(err)
		}
	}
	e.mustKnow(a)
}

// A replica that is slower than the engines for some time falls behind but misses nothing: a
// faster replica that takes snapshots purges nothing that the slow one has not read.
func TestASlowReplica(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 4)
	a := newReplica(t, n.connect(), "a", durable.Config{SnapshotThreshold: 1 << 30}, func(t *durable.Timing) { t.Fetch = 4 })
	a.slow = 2 * time.Millisecond
	natstest.Run(t, a.Run)
	fast := startReplica(t, n.connect(), "fast", durable.Config{SnapshotThreshold: 10})
	e.workUntil(func() bool { return n.hasSnapshot(a.Position() + 20) })
	e.mustKnow(fast)
	if behind := a.Position(); behind >= fast.Position() || n.streamInfo().State.FirstSeq > behind+1+16 { // a few are delivered and not applied
		t.Errorf("the slow replica is at %d, the fast one at %d, the stream begins with %d", behind, fast.Position(), n.streamInfo().State.FirstSeq)
	}
	a.mu.Lock()
	a.slow = 0
	a.mu.Unlock()
	e.mustKnow(a)
	if a.log.Has("restored") {
		t.Error("the slow replica needed a snapshot")
	}
}

// A replica that was away for longer than its consumer's lifetime finds its messages purged, and
// loads the snapshot that contains them.
func TestAReplicaThatWasAwayForLong(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 4)
	conf := durable.Config{SnapshotThreshold: 20}
	quick := func(t *durable.Timing) { t.Inactive = 300 * time.Millisecond }
	way := natstest.NewWay(t, func() string { return n.s.Addr().String() })
	nc, err := nats.Connect("nats://"+way.At, nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond), nats.ReconnectJitter(0, 0))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	a, b := startReplica(t, nc, "a", conf, quick), startReplica(t, n.connect(), "b", conf, quick)
	e.workFor(200 * time.Millisecond)
	e.mustKnow(a, b)
	way.Cut(true)
	at := a.Position()
	natstest.Eventually(t, func() bool { return !slices.Contains(n.consumers(), "kvroute-a") })
	e.workUntil(func() bool { return n.streamInfo().State.FirstSeq > at+1 })
	e.mustKnow(b)
	way.Cut(false)
	e.mustKnow(a)
	if !a.log.Has("a snapshot is restored") {
		t.Error("the replica did not load the snapshot")
	}
}

// Events of a worker that has not registered are in the snapshot of the replica that holds them,
// and so survive that replica.
func TestWaitingEventsAreInTheSnapshot(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 3)
	a := newReplica(t, n.connect(), "a", durable.Config{})
	a.stranger = 2
	a.stop = natstest.Run(t, a.Run)
	natstest.Eventually(t, a.Ready)
	e.work(200)
	e.awaitEqual(func(w int) bool { return w != 2 }, a)
	natstest.Eventually(t, func() bool { return a.Position() == n.streamInfo().State.LastSeq })
	a.stop() // stop writes a snapshot
	n.purge()
	b := newReplica(t, n.connect(), "b", durable.Config{})
	b.stranger = 2
	natstest.Run(t, b.Run)
	natstest.Eventually(t, b.Ready)
	b.mu.Lock()
	b.stranger = 0
	b.mu.Unlock()
	b.sub.SetWorker(2, events.Source{})
	e.mustKnow(b)
}

// Events that wait for their parent are in the snapshot of the replica that holds them, although
// the stream no longer has them.
func TestParkedEventsAreInTheSnapshot(t *testing.T) {
	t.Parallel()
	n, e, a := settled(t, 2, 100, durable.Config{SnapshotThreshold: 10})
	store := func(parent uint64, blocks ...uint64) indexer.Event {
		ev := indexer.Event{Kind: indexer.Stored, HasParent: parent > 0, Parent: parent << 32}
		for _, b := range blocks {
			ev.Blocks = append(ev.Blocks, indexer.Block{External: b << 32, Local: b})
		}
		return ev
	}
	// The last blocks of a chain arrive first; one of them is removed again.
	parent, child, grandchild := store(0, 1, 2), store(2, 3, 4), store(4, 5)
	goes := indexer.Event{Kind: indexer.Removed, Externals: []uint64{3 << 32}}
	e.pubs[0].Publish(0, grandchild)
	e.pubs[0].Publish(0, child)
	e.pubs[0].Publish(0, goes)
	from := n.streamInfo().State.LastSeq
	e.workUntil(func() bool { return n.hasSnapshot(from + 5) }) // the snapshot contains the waiting events
	e.mustKnow(a)                                               // both publishers have sent everything
	natstest.Eventually(t, func() bool { return a.Position() == n.streamInfo().State.LastSeq })
	a.stop() // stop writes another snapshot
	n.purge()
	b := startReplica(t, n.connect(), "b", durable.Config{})
	b.kill() // no replica has the waiting events in memory now
	c := startReplica(t, n.connect(), "c", durable.Config{})
	e.pubs[0].Publish(0, parent)
	for _, ev := range []indexer.Event{parent, child, grandchild, goes} {
		e.truth.Apply(1, ev)
	}
	e.mustKnow(c)
}

// A deleted consumer or stream is created again. No event is lost that a replica received or that
// is published later.
func TestConsumerAndStreamAreDeleted(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 4)
	js := n.jetStream()
	a := startReplica(t, n.connect(), "a", durable.Config{SnapshotThreshold: 30})
	stream := wire.Scope{}.Stream()
	for range 3 {
		e.workFor(100 * time.Millisecond)
		// The replica may not have created its consumer or stream again yet.
		natstest.Eventually(t, func() bool { return js.DeleteConsumer(t.Context(), stream, a.Consumer()) == nil })
		e.workFor(100 * time.Millisecond)
		e.mustKnow(a) // the deleted stream's messages are lost, so the replica must have all of them
		if err := js.DeleteStream(t.Context(), stream); err != nil {
			t.Fatal(err)
		}
	}
	e.workFor(100 * time.Millisecond)
	e.mustKnow(a)
	// A new replica loads a snapshot for the time before the stream.
	created := n.streamInfo().Created.UnixNano()
	natstest.Eventually(t, func() bool { return n.head().Stream == created })
	a.stop()
	b := startReplica(t, n.connect(), "b", durable.Config{})
	e.work(100)
	e.mustKnow(b)
	// If no replica runs when the stream is deleted, the snapshot's position means nothing
	// in the next stream. A lock that the stopped replica left would keep b from its last
	// snapshot.
	natstest.Eventually(t, n.unlocked)
	b.stop()
	if err := js.DeleteStream(t.Context(), stream); err != nil {
		t.Fatal(err)
	}
	e.work(3)
	e.mustKnow(startReplica(t, n.connect(), "c", durable.Config{}))
}

// When another program purges the stream, replicas that have read it lose nothing, and soon write
// a snapshot for the others.
func TestSomebodyPurgesTheStream(t *testing.T) {
	t.Parallel()
	n, e, a := settled(t, 4, 300, durable.Config{})
	n.purge()
	natstest.Eventually(t, func() bool { return n.hasSnapshot(a.Position()) })
	a.kill()
	b := startReplica(t, n.connect(), "b", durable.Config{})
	e.mustKnow(b)
	e.work(100)
	e.mustKnow(b)
}

// headOf holds the fields of the head that a test reads.
type headOf struct {
	Object      string
	LastSeq     uint64 `json:"last_seq"`
	Stream      int64
	Previous    string
	PreviousSeq uint64 `json:"previous_seq"`
}

func (n *natsd) head() (h headOf) {
	n.t.Helper()
	entry, err := n.state().Get(n.t.Context(), "head")
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return h
	}
	if err == nil {
		err = json.Unmarshal(entry.Value(), &h)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return h
}

// twoSnapshots prepares a shortened stream with two snapshots at different positions and messages
// after them, and no replica.
func twoSnapshots(t *testing.T, n *natsd) (e *enginePool) {
	t.Helper()
	e = startEngines(t, n.connect(), 3)
	a := startReplica(t, n.connect(), "a", durable.Config{SnapshotThreshold: 30})
	var first headOf
	e.workUntil(func() bool { first = n.head(); return first.Previous != "" && n.streamInfo().State.FirstSeq > 1 })
	e.mustKnow(a)
	a.kill()
	e.work(50)
	h := n.head()
	if h.Previous == "" || h.PreviousSeq == 0 || h.PreviousSeq >= h.LastSeq {
		t.Fatalf("the head is %+v", h)
	}
	return e
}

// Messages that only the newest snapshot contains stay in the stream, although every replica has
// acknowledged them.
func TestThePurgeStopsAtTheOlderSnapshot(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 2)
	startReplica(t, n.connect(), "a", durable.Config{SnapshotThreshold: 8})
	acknowledged := func() bool {
		s, err := n.jetStream().Stream(t.Context(), wire.Scope{}.Stream())
		if err != nil {
			t.Fatal(err)
		}
		c, err := s.Consumer(t.Context(), "kvroute-a")
		return err == nil && c.CachedInfo().AckFloor.Stream == s.CachedInfo().State.LastSeq
	}
	seen := map[string]bool{}
	for len(seen) < 4 {
		e.work(1)
		natstest.Eventually(t, acknowledged)
		info := n.streamInfo() // read before the head, since a purge only follows a new head
		h := n.head()
		seen[h.Object] = true
		if first := info.State.FirstSeq; first > h.PreviousSeq+1 {
			t.Fatalf("the stream begins with %d, the snapshots end with %d and %d", first, h.PreviousSeq, h.LastSeq)
		}
	}
	natstest.Eventually(t, func() bool { h := n.head(); return n.streamInfo().State.FirstSeq == h.PreviousSeq+1 })
}

// A damaged snapshot is skipped and logged. The previous snapshot and the stream rebuild the
// state, and a new snapshot replaces the damaged one.
func TestHalfASnapshot(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*testing.T, *natsd, jetstream.ObjectStore, string, []byte){
		"half": func(t *testing.T, _ *natsd, obs jetstream.ObjectStore, object string, data []byte) {
			if _, err := obs.PutBytes(t.Context(), object, data[:len(data)/2]); err != nil {
				t.Fatal(err)
			}
		},
		"in parts": func(t *testing.T, n *natsd, obs jetstream.ObjectStore, object string, _ []byte) {
			info, err := obs.GetInfo(t.Context(), object)
			if err != nil {
				t.Fatal(err)
			}
			// The same state as after a crash between the two steps of a deletion.
			bucket := wire.Scope{}.Bucket("snap")
			stream, err := n.jetStream().Stream(t.Context(), "OBJ_"+bucket)
			if err != nil {
				t.Fatal(err)
			}
			if err := stream.Purge(t.Context(), jetstream.WithPurgeSubject("$O."+bucket+".C."+info.NUID)); err != nil {
				t.Fatal(err)
			}
		},
		"missing": func(t *testing.T, _ *natsd, obs jetstream.ObjectStore, object string, _ []byte) {
			if err := obs.Delete(t.Context(), object); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := startJetStream(t)
			e := twoSnapshots(t, n)
			obs := n.objects()
			h := n.head()
			data, err := obs.GetBytes(t.Context(), h.Object)
			if err != nil {
				t.Fatal(err)
			}
			spoil(t, n, obs, h.Object, data)
			c := startReplica(t, n.connect(), "c", durable.Config{})
			e.mustKnow(c)
			if !c.log.Has("a snapshot is skipped") || !c.log.Has(h.Previous) {
				t.Error("the log does not say what was done")
			}
			// The replica replaces the damaged snapshot with a good one. The damaged one is not
			// kept as the fallback.
			natstest.Eventually(t, func() bool { return n.head().LastSeq > h.LastSeq })
			after := n.head()
			if after.Previous != h.Previous || after.PreviousSeq != h.PreviousSeq {
				t.Errorf("the head is %+v, want %q before it", after, h.Previous)
			}
			c.kill()
			e.mustKnow(startReplica(t, n.connect(), "d", durable.Config{}))
			if err := obs.Delete(t.Context(), after.Object); err != nil {
				t.Fatal(err)
			}
			e.mustKnow(startReplica(t, n.connect(), "e", durable.Config{}))
		})
	}
	t.Run("any byte", func(t *testing.T) {
		n := startJetStream(t)
		e := twoSnapshots(t, n)
		obs := n.objects()
		h := n.head()
		data, err := obs.GetBytes(t.Context(), h.Object)
		if err != nil {
			t.Fatal(err)
		}
		step := max(1, len(data)/20)
		if !fixtures.Long() {
			step = max(1, len(data)/4)
		}
		for at := 0; at < len(data); at += step {
			changed := bytes.Clone(data)
			changed[at] ^= 1 << (at % 8)
			for what, bad := range map[string][]byte{"changed": changed, "cut": data[:at]} {
				if _, err := obs.PutBytes(t.Context(), h.Object, bad); err != nil {
					t.Fatal(err)
				}
				c := startReplica(t, n.connect(), "c", durable.Config{}, func(t *durable.Timing) { t.KeepEvery = time.Hour })
				e.mustKnow(c)
				if !c.log.Has("a snapshot is skipped") {
					t.Errorf("%s at byte %d is not noticed", what, at)
				}
				c.kill()
			}
		}
	})
	t.Run("no other", func(t *testing.T) {
		n, e, _ := settled(t, 3, 200, durable.Config{})
		if _, err := n.state().Create(t.Context(), "head", []byte(`{"object":"index-1","last_seq":1}`)); err != nil {
			t.Fatal(err)
		}
		if _, err := n.objects().PutBytes(t.Context(), "index-1", []byte("KVRSNAP2 and nothing")); err != nil {
			t.Fatal(err)
		}
		b := startReplica(t, n.connect(), "b", durable.Config{})
		e.mustKnow(b) // from the stream alone
		if !b.log.Has("a snapshot is skipped") {
			t.Error("the log does not say what was done")
		}
	})
}

// Two replicas that repeatedly want a snapshot at the same time take snapshots one after the
// other. An older snapshot never replaces the newest one.
func TestTwoReplicasTakeSnapshotsAtOnce(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 4)
	often := func(t *durable.Timing) { t.SnapshotAge, t.SnapshotRest, t.KeepEvery = 0, 0, time.Millisecond }
	a, b := startReplica(t, n.connect(), "a", durable.Config{}, often), startReplica(t, n.connect(), "b", durable.Config{}, often)
	watch, err := n.state().Watch(t.Context(), "head")
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()
	last, snapshots := headOf{}, 0
	readHead := func(entry jetstream.KeyValueEntry) {
		if entry == nil {
			return // there was no head before
		}
		var h headOf
		if err := json.Unmarshal(entry.Value(), &h); err != nil {
			t.Fatal(err)
		}
		if h.LastSeq <= last.LastSeq {
			t.Errorf("a snapshot of position %d came after one of %d", h.LastSeq, last.LastSeq)
		}
		last, snapshots = h, snapshots+1
	}
	e.workUntil(func() bool {
		for {
			select {
			case entry := <-watch.Updates():
				readHead(entry)
			default:
				return snapshots >= 5
			}
		}
	})
	e.mustKnow(a, b)
	a.stop()
	b.stop()
	for newest := n.head(); last != newest; {
		readHead(<-watch.Updates())
	}
	if objects, err := n.objects().List(t.Context()); err != nil || len(objects) > 2 {
		t.Errorf("%d snapshots are kept, %v; want 2", len(objects), err)
	}
	e.mustKnow(startReplica(t, n.connect(), "c", durable.Config{}))
}

// When a replica dies while it writes a snapshot, its lock expires and its partial snapshot is
// removed.
func TestTheLocksHolderDies(t *testing.T) {
	t.Parallel()
	n, e, _ := settled(t, 4, 300, durable.Config{SnapshotThreshold: 1 << 30})
	js := n.jetStream()
	locks, err := js.KeyValue(t.Context(), wire.Scope{}.Bucket("lock"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := locks.Create(t.Context(), "snapshot", []byte(`{"replica":"dead"}`)); err != nil {
		t.Fatal(err)
	}
	half := "$O." + wire.Scope{}.Bucket("snap") + ".C.dead"
	if _, err := js.Publish(t.Context(), half, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	often := func(t *durable.Timing) { t.SnapshotAge = 0 }
	b := startReplica(t, n.connect(), "b", durable.Config{}, often)
	e.work(50)
	e.mustKnow(b)
	if n.hasSnapshot(1) {
		t.Error("a snapshot was taken while another one held the lock")
	}
	natstest.Eventually(t, func() bool { return n.hasSnapshot(1) })
	stream, err := js.Stream(t.Context(), "OBJ_"+wire.Scope{}.Bucket("snap"))
	if err != nil {
		t.Fatal(err)
	}
	natstest.Eventually(t, func() bool {
		info, err := stream.Info(t.Context(), jetstream.WithSubjectFilter(half))
		return err == nil && len(info.State.Subjects) == 0
	})
}

// An interrupted replacement may have been stored without an answer. The lock is still released at
// once, not only when it expires.
func TestAnInterruptedReplacementLeavesNoLock(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	kv, err := n.jetStream().CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "locks", TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	_, release, ok := durable.TakeLock(t.Context(), kv, "a", time.Hour)
	if !ok {
		t.Fatal("the lock is not free")
	}
	e, err := kv.Get(t.Context(), "snapshot")
	if err == nil {
		_, err = kv.Put(t.Context(), "snapshot", e.Value())
	}
	if err != nil {
		t.Fatal(err)
	}
	release()
	if _, _, ok := durable.TakeLock(t.Context(), kv, "b", time.Hour); !ok {
		t.Error("the lock is not free again")
	}
}

// A lock that could not be released keeps others from it until it expires, but not its own
// instance.
func TestALeftLockIsTakenAgain(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	kv, err := n.jetStream().CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "locks", TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, ok := durable.TakeLock(t.Context(), kv, "a", time.Hour); !ok {
		t.Fatal("the lock is not free")
	}
	_, release, ok := durable.TakeLock(t.Context(), kv, "a", time.Hour)
	if !ok {
		t.Fatal("an instance does not get its own lock")
	}
	if _, _, ok := durable.TakeLock(t.Context(), kv, "b", time.Hour); ok {
		t.Error("two have the lock")
	}
	release()
	if _, _, ok := durable.TakeLock(t.Context(), kv, "b", time.Hour); !ok {
		t.Error("a released lock is not free")
	}
}

// A holder that was delayed until its lock expired neither replaces the newest snapshot nor purges
// anything.
func TestALostLockStopsItsHolder(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	js := n.jetStream()
	kv, err := js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "locks", TTL: 3 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	ctx, release, ok := durable.TakeLock(t.Context(), kv, "a", time.Second)
	if !ok {
		t.Fatal("the lock is not free")
	}
	if _, _, ok := durable.TakeLock(t.Context(), kv, "b", time.Second); ok {
		t.Error("two have the lock")
	}
	select {
	case <-ctx.Done():
		t.Error("the lock is not kept")
	case <-time.After(4 * time.Second): // longer than an unrenewed lock lasts
	}
	if _, err := kv.Put(t.Context(), "snapshot", []byte("mine now")); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ctx.Done():
	case <-time.After(30 * time.Second):
		t.Error("the holder does not notice that it lost the lock")
	}
	release()
	if e, err := kv.Get(t.Context(), "snapshot"); err != nil || string(e.Value()) != "mine now" {
		t.Errorf("the former holder took the lock from its new one: %v", err)
	}
	if err := kv.Delete(t.Context(), "snapshot"); err != nil {
		t.Fatal(err)
	}
	// On a busy machine one attempt may take longer than the lock's timeout.
	for _, why := range []string{"the lock is not free again", "a released lock is not free"} {
		ok := false
		for tries := 0; tries < 50 && !ok; tries++ {
			if _, release, ok = durable.TakeLock(t.Context(), kv, "a", time.Second); !ok {
				time.Sleep(100 * time.Millisecond)
			}
		}
		if !ok {
			t.Fatal(why)
		}
		release()
	}
}

// With a full object store there is no snapshot and no purge, and the log reports it. Events are
// still applied. When there is room again, snapshots are taken again.
func TestTheObjectStoreIsFull(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	js := n.jetStream()
	bucket := jetstream.ObjectStoreConfig{Bucket: wire.Scope{}.Bucket("snap"), MaxBytes: 2000}
	if _, err := js.CreateObjectStore(t.Context(), bucket); err != nil {
		t.Fatal(err)
	}
	e := startEngines(t, n.connect(), 4)
	a := startReplica(t, n.connect(), "a", durable.Config{SnapshotThreshold: 20})
	e.workUntil(func() bool { return a.log.Has("a snapshot failed") })
	e.mustKnow(a)
	if first := n.streamInfo().State.FirstSeq; first != 1 || n.hasSnapshot(1) {
		t.Errorf("the stream was purged to %d without a snapshot", first)
	}
	bucket.MaxBytes = -1
	if _, err := js.UpdateObjectStore(t.Context(), bucket); err != nil {
		t.Fatal(err)
	}
	e.workUntil(func() bool { return n.hasSnapshot(1) && n.streamInfo().State.FirstSeq > 1 })
	e.mustKnow(a)
	a.kill()
	e.mustKnow(startReplica(t, n.connect(), "b", durable.Config{}))
}

// A worker that uses another worker's id can corrupt that worker's state if no record names its
// publisher (with a record, see TestStrangersAreNotHeard). This is counted. Other workers' state
// is not affected.
func TestAWorkerLiesAboutItsID(t *testing.T) {
	t.Parallel()
	n, e, a := settled(t, 4, 200, durable.Config{})
	liar := publish.New(n.connect(), publish.Config{WorkerID: 2, Durable: true})
	stop := natstest.Run(t, liar.Run)
	for i := range uint64(50) {
		liar.Publish(0, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1<<60 + i, Local: i}}})
		e.work(10)
		<-time.After(10 * time.Millisecond)
	}
	e.awaitEqual(func(w int) bool { return w != 2 }, a)
	natstest.Eventually(t, func() bool { return a.log.Has("two publishers speak for one rank") })
	b := startReplica(t, n.connect(), "b", durable.Config{})
	e.awaitEqual(func(w int) bool { return w != 2 }, b)
	// When the false worker is silent and the real one has cleared its cache, the state is correct
	// again.
	stop()
	e.publish(1, indexer.Event{Kind: indexer.Cleared})
	e.held[1] = nil
	e.work(200)
	e.mustKnow(a, b)
}

// Events of ten thousand workers on one stream are all received, and a snapshot contains all
// workers.
func TestTenThousandWorkers(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	nc := n.connect()
	const workers = 10_000
	truth := indexer.New(indexer.Config{})
	a := startReplica(t, n.connect(), "a", durable.Config{})
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(workers))
	if err != nil {
		t.Fatal(err)
	}
	for w := range uint64(workers) {
		ev := indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: w<<8 | 1, Local: w % 50}, {External: w<<8 | 2, Local: w % 7}}}
		truth.Apply(int(w), ev)
		if _, err := js.PublishMsgAsync(&nats.Msg{Subject: wire.Scope{}.Topic(events.Topic), Data: events.AppendEnvelope(nil, events.Envelope{
			PublisherID: w + 1, Topic: events.Topic,
			Payload: events.AppendEvents(nil, []events.RouterEvent{{WorkerID: w, EventID: 1, Event: ev}}),
		})}); err != nil {
			t.Fatal(err)
		}
	}
	e := &enginePool{t: t, truth: truth}
	e.mustKnow(a)
	a.stop()
	natstest.Eventually(t, func() bool { return n.hasSnapshot(workers) })
	e.mustKnow(startReplica(t, n.connect(), "b", durable.Config{}))
}

// In a cluster of three servers with three copies of the stream, the loss of the stream's leader
// loses no acknowledged message, whatever is in progress.
func TestAClusterLosesItsLeader(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t)
	urls := nodes[0].s.ClientURL() + "," + nodes[1].s.ClientURL() + "," + nodes[2].s.ClientURL()
	connect := func() *nats.Conn {
		nc, err := nats.Connect(urls, nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond), nats.ReconnectJitter(0, 0), nats.Timeout(time.Second))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
	conf := durable.Config{Replicas: 3, SnapshotThreshold: 100}
	a := newReplica(t, connect(), "a", conf)
	natstest.Run(t, a.Run)
	for deadline := time.Now().Add(time.Minute); !a.Ready() && time.Now().Before(deadline); {
		<-time.After(10 * time.Millisecond)
	}
	if !a.Ready() {
		t.Fatal("the replica does not get ready")
	}
	e := startEngines(t, connect(), 4)
	e.workFor(500 * time.Millisecond)
	e.mustKnow(a)

	js, err := jetstream.New(connect())
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), wire.Scope{}.Stream())
	if err != nil {
		t.Fatal(err)
	}
	info := stream.CachedInfo()
	if info.Config.Replicas != 3 || info.Cluster == nil {
		t.Fatalf("the stream has %d copies", info.Config.Replicas)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		<-time.After(300 * time.Millisecond)
		for _, node := range nodes {
			if node.s.Name() == info.Cluster.Leader {
				node.stop()
			}
		}
	}()
	e.workFor(2 * time.Second)
	<-done
	e.mustKnow(a)
	b := newReplica(t, connect(), "b", conf)
	natstest.Run(t, b.Run)
	e.mustKnow(b)
}

// startCluster starts three servers that form one JetStream cluster.
func startCluster(t *testing.T) (nodes []*natsd) {
	t.Helper()
	var ports [3]int
	var routes []string
	for i := range ports {
		ports[i] = fixtures.HoldPort(t)
		routes = append(routes, fmt.Sprintf("nats://127.0.0.1:%d", ports[i]))
	}
	for i := range 3 {
		n := &natsd{t: t, opts: server.Options{
			ServerName: fmt.Sprint("n", i+1), Host: "127.0.0.1", Port: fixtures.HoldPort(t),
			JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true,
			Cluster: server.ClusterOpts{Name: "kvroute-test", Host: "127.0.0.1", Port: ports[i]},
			Routes:  server.RoutesFromStr(strings.Join(routes, ",")),
		}}
		n.start()
		t.Cleanup(n.stop)
		nodes = append(nodes, n)
	}
	for deadline := time.Now().Add(time.Minute); ; {
		if slices.ContainsFunc(nodes, func(n *natsd) bool { return n.s.JetStreamIsLeader() }) {
			return nodes
		}
		if time.Now().After(deadline) {
			t.Fatal("the cluster does not choose a leader")
		}
		<-time.After(10 * time.Millisecond)
	}
}
