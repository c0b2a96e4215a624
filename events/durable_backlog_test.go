// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/wire"
)

// A replica is far behind. Whatever happens to it, to its server or to its consumer
// meanwhile, and whatever others purge, it ends up with everything: what the stream does
// not have any more is in a snapshot.
func TestALongBacklog(t *testing.T) {
	for name, fault := range map[string]func(n *natsd, b *replica) (again *replica){
		"nothing happens": func(_ *natsd, b *replica) *replica { return b },
		"the replica dies": func(n *natsd, b *replica) *replica {
			b.kill()
			return startReplica(b.t, n.connect(), "b", events.DurableConfig{})
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
			b := newReplica(t, n.connect(), "b", events.DurableConfig{})
			b.slow = time.Millisecond
			b.stop = running(t, b.Run)
			eventually(t, func() bool { return b.Position() > 10 })
			// Another one reads it faster, takes a snapshot and shortens the stream.
			a := startReplica(t, n.connect(), "a", events.DurableConfig{SnapshotThreshold: 50})
			e.mustKnow(a)
			eventually(t, func() bool { return n.hasSnapshot(backlog / 2) })
			t.Logf("it is at %d, the stream begins at %d", b.Position(), n.streamInfo().State.FirstSeq)
			b = fault(n, b)
			b.mu.Lock()
			b.slow = 0
			b.mu.Unlock()
			e.work(100)
			e.mustKnow(a, b)
			eventually(t, b.Ready)
			// The stream can be shortened behind it.
			from := n.streamInfo().State.LastSeq
			e.workUntil(func() bool { return n.streamInfo().State.FirstSeq > from })
			e.mustKnow(a, b)
		})
	}
}

// While a replica reads a backlog nothing is purged that was not delivered to it.
func TestABacklogHoldsBackThePurge(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 2)
	e.workUntil(func() bool {
		s, err := n.jetStream().Stream(t.Context(), wire.Scope{}.Stream())
		return err == nil && s.CachedInfo().State.Msgs >= 200
	})
	// A replica's consumer, to which only a little was delivered.
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
	a := startReplica(t, n.connect(), "a", events.DurableConfig{SnapshotThreshold: 50}, func(x *events.Timing) { x.Inactive = time.Minute })
	e.mustKnow(a)
	eventually(t, func() bool { return n.hasSnapshot(100) })
	e.workUntil(func() bool { return n.streamInfo().State.FirstSeq > 1 }) // by the next one
	e.mustKnow(a)
	<-time.After(200 * time.Millisecond) // ten times what it takes to see that something is due
	if first := n.streamInfo().State.FirstSeq; first != 41 {
		t.Errorf("the stream begins at %d, want 41: 40 were delivered to the one behind", first)
	}
}
