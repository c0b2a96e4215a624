// SPDX-License-Identifier: Apache-2.0

package durable_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/durable"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
)

// A replica far behind the stream ends with complete state, whatever happens to the replica, its
// server or its consumer, and whatever other replicas purge. A snapshot contains what the stream
// no longer has.
func TestALongBacklog(t *testing.T) {
	for name, fault := range map[string]func(n *natsd, b *replica) (again *replica){
		"nothing happens": func(_ *natsd, b *replica) *replica { return b },
		"the replica dies": func(n *natsd, b *replica) *replica {
			b.kill()
			return startReplica(b.t, n.connect(), "b", durable.Config{})
		},
		"its consumer is deleted": func(n *natsd, b *replica) *replica {
			s, err := n.jetStream().Stream(b.t.Context(), wire.Scope{}.Stream())
			if err != nil {
				b.t.Fatal(err)
			}
			for _, c := range n.consumers() {
				if c == "kvroute-b" {
					if err := s.DeleteConsumer(b.t.Context(), c); err != nil {
						b.t.Fatal(err)
					}
				}
			}
			return b
		},
		"NATS restarts": func(n *natsd, b *replica) *replica {
			n.stop()
			n.start()
			return b
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := startJetStream(t)
			e := startEngines(t, n.connect(), 3)
			const backlog = 400
			e.workUntil(func() bool {
				s, err := n.jetStream().Stream(t.Context(), wire.Scope{}.Stream())
				return err == nil && s.CachedInfo().State.Msgs >= backlog
			})
			b := newReplica(t, n.connect(), "b", durable.Config{})
			b.slow = time.Millisecond
			b.stop = natstest.Run(t, b.Run)
			natstest.Eventually(t, func() bool { return b.Position() > 10 })
			// Another replica reads the backlog faster, takes a snapshot and shortens the stream.
			a := startReplica(t, n.connect(), "a", durable.Config{SnapshotThreshold: 50})
			e.mustKnow(a)
			natstest.Eventually(t, func() bool { return n.hasSnapshot(backlog / 2) })
			t.Logf("it is at %d, the stream begins at %d", b.Position(), n.streamInfo().State.FirstSeq)
			b = fault(n, b)
			b.mu.Lock()
			b.slow = 0
			b.mu.Unlock()
			e.work(100)
			e.mustKnow(a, b)
			natstest.Eventually(t, b.Ready)
			// Another replica can shorten the stream while this one is behind.
			from := n.streamInfo().State.LastSeq
			e.workUntil(func() bool { return n.streamInfo().State.FirstSeq > from })
			e.mustKnow(a, b)
		})
	}
}

// While a replica reads a backlog, messages not yet delivered to it are not purged.
func TestABacklogHoldsBackThePurge(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 2)
	e.workUntil(func() bool {
		s, err := n.jetStream().Stream(t.Context(), wire.Scope{}.Stream())
		return err == nil && s.CachedInfo().State.Msgs >= 200
	})
	// A consumer of a replica that received only a few messages.
	s, err := n.jetStream().Stream(t.Context(), wire.Scope{}.Stream())
	if err != nil {
		t.Fatal(err)
	}
	c, err := s.CreateConsumer(t.Context(), jetstream.ConsumerConfig{
		Name: "kvroute-b", FilterSubjects: []string{wire.Scope{}.Topic(events.Topic)}, AckPolicy: jetstream.AckNonePolicy,
		InactiveThreshold: time.Minute, MemoryStorage: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	batch, err := c.Fetch(40)
	if err != nil {
		t.Fatal(err)
	}
	for range batch.Messages() {
		continue
	}
	a := startReplica(t, n.connect(), "a", durable.Config{SnapshotThreshold: 50}, func(x *durable.Timing) { x.Inactive = time.Minute })
	e.mustKnow(a)
	natstest.Eventually(t, func() bool { return n.hasSnapshot(100) })
	e.workUntil(func() bool { return n.streamInfo().State.FirstSeq > 1 }) // the next replica purges
	e.mustKnow(a)
	<-time.After(200 * time.Millisecond) // ten times the interval at which a replica checks for due work
	if first := n.streamInfo().State.FirstSeq; first != 41 {
		t.Errorf("the stream begins at %d, want 41: 40 were delivered to the one behind", first)
	}
}
