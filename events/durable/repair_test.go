// SPDX-License-Identifier: Apache-2.0

package durable_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/engines/publish"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/durable"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
)

// Events that the stream lost are requested from workers with a local indexer, whether or not a
// later event shows the gap.
func TestLocalIndexersMendTheStream(t *testing.T) {
	t.Parallel()
	spoil := func(n *natsd) {
		infos, err := n.objects().List(n.t.Context())
		if err != nil {
			n.t.Fatal(err)
		}
		for _, i := range infos {
			if _, err := n.objects().PutBytes(n.t.Context(), i.Name, []byte("KVRSNAP2 and nothing")); err != nil {
				n.t.Fatal(err)
			}
		}
	}
	for name, story := range map[string]func(n *natsd, e *enginePool){
		"purged while nobody was there": func(n *natsd, e *enginePool) {
			a := e.startMember(n.connect(), "a", durable.Config{SnapshotThreshold: 20})
			e.workUntil(func() bool { return n.head().Previous != "" })
			e.mustKnow(a)
			a.kill()
			e.workFor(100 * time.Millisecond)
			n.purge()
		},
		"gone before the first router came": func(n *natsd, e *enginePool) {
			e.workFor(200 * time.Millisecond)
			natstest.Eventually(n.t, func() bool {
				s, err := n.jetStream().Stream(n.t.Context(), wire.Scope{}.Stream())
				return err == nil && s.CachedInfo().State.LastSeq > 0
			})
			n.purge()
		},
		"snapshots damaged, the stream purged": func(n *natsd, e *enginePool) {
			a := e.startMember(n.connect(), "a", durable.Config{SnapshotThreshold: 20})
			e.workUntil(func() bool { return n.head().Previous != "" })
			a.kill()
			spoil(n)
			n.purge()
		},
		"another stream": func(n *natsd, e *enginePool) {
			a := e.startMember(n.connect(), "a", durable.Config{})
			e.workFor(100 * time.Millisecond)
			e.mustKnow(a)
			a.stop()
			e.workFor(100 * time.Millisecond)
			if err := n.jetStream().DeleteStream(n.t.Context(), wire.Scope{}.Stream()); err != nil {
				n.t.Fatal(err)
			}
			e.workFor(50 * time.Millisecond)
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := startJetStream(t)
			e := startAskable(t, n.connect(), 4)
			story(n, e)
			b := e.startMember(n.connect(), "b", durable.Config{})
			e.mustKnow(b) // no further event is published
			b.isIn(indexer.StateOK, 4)
			e.work(50)
			e.mustKnow(b)
			b.stop() // stop writes a snapshot of the repaired state
			c := e.startMember(n.connect(), "c", durable.Config{})
			e.mustKnow(c)
			c.isIn(indexer.StateOK, 4)
		})
	}
}

// Events that the stream refuses leave a gap in the numbers, and the replica requests them.
func TestWhatThePublisherLosesIsAskedFor(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	var refuse atomic.Bool
	var refused atomic.Int64
	e := startAskable(t, n.connect(), 3, func(conf *publish.Config) {
		conf.Publish = n.interfere(func(ctx context.Context, m *nats.Msg, publish func(context.Context, *nats.Msg) error) error {
			if refuse.Load() {
				refused.Add(1)
				return nats.ErrMaxPayload // a permanent error
			}
			return publish(ctx, m)
		})
	})
	a := e.startMember(n.connect(), "a", durable.Config{})
	var asked atomic.Int64
	queries, err := a.nc.Subscribe(wire.Scope{}.Own("query", "*", "*"), func(*nats.Msg) { asked.Add(1) })
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = queries.Unsubscribe() }()
	e.workFor(100 * time.Millisecond)
	e.mustKnow(a)
	refuse.Store(true)
	e.workUntil(func() bool { return refused.Load() > 5 })
	refuse.Store(false)
	e.mustKnow(a)
	a.isIn(indexer.StateOK, 3)
	if asked.Load() == 0 {
		t.Error("no worker was queried")
	}
}

// After a reset of the states, every replica rebuilds from the workers, and all replicas agree.
func TestResetReplicasRebuild(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startAskable(t, n.connect(), 4)
	conf := durable.Config{SnapshotThreshold: 30}
	a, b := e.startMember(n.connect(), "a", conf), e.startMember(n.connect(), "b", conf)
	e.workUntil(func() bool { return n.head().Previous != "" })
	e.mustKnow(a, b)
	reset := conf
	reset.ResetStates = true
	c := e.startMember(n.connect(), "c", reset)
	natstest.Eventually(t, func() bool { return a.log.Has("began a new epoch") && b.log.Has("began a new epoch") })
	e.mustKnow(a, b, c) // no further event is published
	e.workFor(100 * time.Millisecond)
	e.mustKnow(a, b, c)
	for _, r := range []*replica{a, b, c} {
		r.isIn(indexer.StateOK, 4)
	}
	for _, r := range []*replica{a, b, c} {
		r.kill()
	}
	e.mustKnow(e.startMember(n.connect(), "d", conf))
}

// If no worker can be queried, a replica reports which ranks are incomplete, and its snapshots
// carry this to the next replica.
func TestWhatIsMissingIsShown(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 3)
	for w := range e.pubs { // each worker publishes something
		e.publish(w, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1<<50 | uint64(w), Local: 1}}})
	}
	a := e.startMember(n.connect(), "a", durable.Config{})
	e.mustKnow(a)
	a.isIn(indexer.StateOK, 3)
	a.stop()

	// A gap after the snapshot: the ranks are partial at once, and suspect when an event shows the
	// gap.
	publish := func() {
		before := n.streamInfo().State.LastSeq
		for w := range e.pubs {
			e.publish(w, indexer.Event{Kind: indexer.Removed, Externals: []uint64{1}})
		}
		natstest.Eventually(t, func() bool { return n.streamInfo().State.LastSeq >= before+3 })
	}
	publish()
	n.purge()
	b := e.startMember(n.connect(), "b", durable.Config{})
	b.isIn(indexer.StatePartial, 3)
	publish()
	b.isIn(indexer.StateSuspect, 3)
	b.stop()
	c := e.startMember(n.connect(), "c", durable.Config{})
	c.isIn(indexer.StateSuspect, 3)

	// The next epoch has no state from before.
	d := e.startMember(n.connect(), "d", durable.Config{ResetStates: true})
	for _, r := range []*replica{c, d} {
		r.isIn(indexer.StatePartial, 3)
	}
	publish()
	for w := range e.pubs {
		e.publish(w, indexer.Event{Kind: indexer.Cleared})
	}
	for _, r := range []*replica{c, d} {
		r.isIn(indexer.StateOK, 3)
	}
	e.mustKnow(c, d)

	// A replica that starts late without a snapshot lacks the beginning of every rank.
	c.kill()
	d.kill()
	for _, key := range []string{"head", "epoch"} {
		if err := n.state().Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
	infos, err := n.objects().List(t.Context())
	for _, i := range infos {
		if e := n.objects().Delete(t.Context(), i.Name); err == nil {
			err = e
		}
	}
	if err != nil && len(infos) > 0 {
		t.Fatal(err)
	}
	n.purge()
	publish()
	f := e.startMember(n.connect(), "f", durable.Config{})
	f.isIn(indexer.StatePartial, 3)
}

// Events from a publisher that the worker's record does not name change nothing. Events of the
// worker's next process are applied from the first one, whether the events or the new record come
// first.
func TestStrangersAreNotHeard(t *testing.T) {
	t.Parallel()
	for _, local := range []bool{true, false} {
		t.Run(fmt.Sprint("local indexer ", local), func(t *testing.T) {
			t.Parallel()
			n := startJetStream(t)
			start := startEngines
			if local {
				start = startAskable
			}
			e := start(t, n.connect(), 3)
			a := e.startMember(n.connect(), "a", durable.Config{})
			e.work(200)
			e.mustKnow(a)
			var liars []*publish.Publisher
			for w := range uint64(3) {
				liar := publish.New(n.connect(), publish.Config{WorkerID: w + 1, Durable: true})
				natstest.Run(t, liar.Run)
				liar.Publish(0, indexer.Event{Kind: indexer.Cleared})
				liars = append(liars, liar)
			}
			natstest.Eventually(t, func() bool { return a.log.Has("a publisher speaks for a worker whose record names another one") })
			for i := range uint64(50) {
				liars[i%3].Publish(0, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1<<60 + i, Local: i}}})
				e.work(10)
			}
			e.mustKnow(a)
			a.isIn(indexer.StateOK, 3)

			e.restart(1)
			e.work(50)
			position := n.streamInfo().State.LastSeq
			natstest.Eventually(t, func() bool { return a.Position() >= position })
			b := e.startMember(n.connect(), "b", durable.Config{}) // the record arrives first
			e.register(a)                                          // the events arrive first
			e.mustKnow(a, b)
			a.isIn(indexer.StateOK, 3)
			b.isIn(indexer.StateOK, 3)
		})
	}
}

// A message that is repeated because its acknowledgement was lost is in the stream once: both
// copies have the same id.
func TestARepeatedMessageIsInTheStreamOnce(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	var sent atomic.Int64
	var id atomic.Pointer[string]
	p := publish.New(n.connect(), publish.Config{WorkerID: 1, Durable: true, Publish: n.interfere(func(ctx context.Context, m *nats.Msg, publish func(context.Context, *nats.Msg) error) error {
		err := publish(ctx, m)
		now := m.Header.Get(jetstream.MsgIDHeader)
		if before := id.Swap(&now); before != nil && *before != now {
			t.Errorf("the message is %q first and %q then", *before, now)
		}
		if err == nil && sent.Add(1) < 3 {
			return errors.New("the answer is lost")
		}
		return err
	})})
	natstest.Run(t, p.Run)
	p.Publish(0, indexer.Event{Kind: indexer.Cleared})
	natstest.Eventually(t, func() bool { return sent.Load() == 3 })
	if got := n.streamInfo().State; got.Msgs != 1 || got.LastSeq != 1 {
		t.Errorf("the stream has %d messages, the last is %d; want one", got.Msgs, got.LastSeq)
	}
	if want := fmt.Sprintf("%x-0", p.ID()); *id.Load() != want {
		t.Errorf("the message is called %q, want %q", *id.Load(), want)
	}
}

// A publisher whose stream accepts nothing waits only once when it ends, however many events are
// pending.
func TestAPublisherLeavesInTime(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	p := publish.New(n.connect(), publish.Config{WorkerID: 1, Durable: true, Publish: func(context.Context, *nats.Msg) error {
		return errors.New("refused")
	}})
	stop := natstest.Run(t, p.Run)
	for i := range uint64(128 * 100) {
		p.Publish(0, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: i, Local: i}}})
	}
	begin := time.Now()
	stop()
	if took := time.Since(begin); took > 25*time.Second { // 100 messages with a timeout each would take 50 s
		t.Errorf("the publisher took %v to end", took)
	}
}

// The head is only replaced by a writer that has read its current revision.
func TestTheHeadIsComparedAndSet(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	kv, err := n.jetStream().CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "state"})
	if err != nil {
		t.Fatal(err)
	}
	if err := durable.WriteKey(t.Context(), kv, "head", 1, 0); err != nil {
		t.Fatal(err)
	}
	at := func() uint64 {
		e, err := kv.Get(t.Context(), "head")
		if err != nil {
			t.Fatal(err)
		}
		return e.Revision()
	}
	old := at()
	if err := durable.WriteKey(t.Context(), kv, "head", 2, old); err != nil {
		t.Fatal(err)
	}
	for _, revision := range []uint64{0, old, old + 7} {
		before := at()
		if err := durable.WriteKey(t.Context(), kv, "head", 3, revision); err == nil || at() != before {
			t.Errorf("who read revision %d of %d can write: %v", revision, before, err)
		}
	}
}

// A replica does not miss messages of other endpoints that were purged from the common stream.
func TestOtherEndpointsPurge(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	one, other := wire.Scope{Endpoint: "one"}, wire.Scope{Endpoint: "other"}
	conf := durable.Config{SnapshotThreshold: 10}
	start := func(scope wire.Scope, name string) (*replica, *publish.Publisher) {
		r := newReplicaIn(t, n.connect(), scope, name, conf)
		r.stop = natstest.Run(t, r.Run)
		p := publish.New(n.connect(), publish.Config{Scope: scope, WorkerID: 1, Durable: true})
		natstest.Run(t, p.Run)
		return r, p
	}
	a, quiet := start(one, "a")
	quiet.Publish(0, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1, Local: 1}}})
	natstest.Eventually(t, func() bool { return a.Position() == 1 })
	a.stop()
	_, busy := start(other, "b")
	natstest.Eventually(t, func() bool {
		busy.Publish(0, indexer.Event{Kind: indexer.Cleared})
		<-time.After(2 * time.Millisecond)
		return n.streamInfo().State.NumDeleted > 0
	})
	// Also purge the message of the quiet worker from the stream.
	s, err := n.jetStream().Stream(t.Context(), wire.Scope{}.Stream())
	if err == nil {
		err = s.Purge(t.Context(), jetstream.WithPurgeSubject(one.Topic(events.Topic)))
	}
	if err != nil {
		t.Fatal(err)
	}
	c := newReplicaIn(t, n.connect(), one, "c", conf)
	natstest.Run(t, c.Run)
	natstest.Eventually(t, c.Ready)
	if !c.log.Has("a snapshot is restored") || !c.log.Has("may be of other endpoints") || c.log.Has("in no snapshot") {
		t.Error("the log does not say what happened")
	}
	c.isIn(indexer.StateOK, 1)
	quiet.Publish(0, indexer.Event{Kind: indexer.Removed, Externals: []uint64{5}})
	natstest.Eventually(t, func() bool { return c.Position() > 1 })
	c.isIn(indexer.StateOK, 1)
	if got := c.content(); len(got) != 1 {
		t.Errorf("the replica knows %v, want one block", got)
	}
}
