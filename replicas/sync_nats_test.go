// SPDX-License-Identifier: Apache-2.0

package replicas_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
)

// replica is a router with its sync over a real bus.
type replica struct {
	*router.Router
	sync *replicas.Sync
	stop func()
}

// startReplica starts a replica with workers 1 to 3. Its clock is ahead of the others'.
func startReplica(t *testing.T, nc *nats.Conn, id uint64, ahead time.Duration, conf router.Config) *replica {
	t.Helper()
	return startReplicaAt(t, 200*time.Millisecond, nc, id, ahead, conf)
}

// startReplicaAt is startReplica with an interval between two presences.
func startReplicaAt(t *testing.T, presence time.Duration, nc *nats.Conn, id uint64, ahead time.Duration, conf router.Config) *replica {
	t.Helper()
	var s *replicas.Sync
	conf.Hooks.Tell = func(c router.Change) { s.Publish(c) }
	conf.Hooks.TellSession = func(b router.SessionBinding) { s.PublishSession(b) }
	conf.Hooks.TellGiven = func(b router.GivenBinding) { s.PublishGiven(b) }
	conf.PredictTTL = -1
	conf.Now = func() time.Time { return time.Now().Add(ahead) }
	r, err := router.New(conf)
	if err != nil {
		t.Fatal(err)
	}
	for w := range uint64(3) {
		if err := r.SetWorker(router.WorkerInfo{
			ID: w + 1, Models: []string{"m"}, BlockSize: 8, MaxBatchedTokens: 100,
			Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(w)}), 8000),
		}); err != nil {
			t.Fatal(err)
		}
	}
	if s, err = replicas.NewSync(nc, replicas.SyncConfig{
		ID: id, Presence: replicas.Presence{Replica: fmt.Sprint("replica-", id)},
		Apply: r.PeerChanged, Remove: r.RemovePeer, FirstToken: r.MarkPrefillCompleted, Bind: r.PeerSession, BindGiven: r.PeerGave, Given: r.GivenBindings, Now: conf.Now,
	}); err != nil {
		t.Fatal(err)
	}
	s.Quicken(presence)
	return &replica{r, s, natstest.Run(t, s.Run)}
}

// book books n requests at a replica, and returns a function that ends them.
func (r *replica) book(t *testing.T, name string, n int) (free func()) {
	t.Helper()
	for i := range n {
		if _, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(name, i), Owned: true, Model: "m", Tokens: make([]uint32, 20)}); err != nil {
			t.Fatal(err)
		}
	}
	return func() {
		for i := range n {
			r.Free(fmt.Sprint(name, i))
		}
	}
}

// active returns a replica's number of requests on all workers, and their pending tokens.
func (r *replica) active() (requests, pending int) {
	for _, w := range r.Workers() {
		requests += w.ActiveRequests
		pending += w.PendTokens
	}
	return requests, pending
}

// counts waits until a replica has so many requests.
func (r *replica) counts(t *testing.T, what string, want int) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); ; <-time.After(2 * time.Millisecond) {
		got, pending := r.active()
		if got == want && pending == 20*want {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: %d requests with %d tokens, want %d", what, got, pending, want)
		}
	}
}

// The requests of a replica that dies are removed, a new replica learns all requests, and
// a request that waits for room proceeds when another replica makes room.
func TestReplicasComeAndGo(t *testing.T) {
	s := natstest.Start(t, 0)
	connection := natstest.Connect(t, s)
	a := startReplica(t, connection, 1, 0, router.Config{})
	b := startReplica(t, natstest.Connect(t, s), 2, 5*time.Minute, router.Config{})
	a.book(t, "a", 100)
	freeB := b.book(t, "b", 10)
	a.counts(t, "a, of both", 110)
	b.counts(t, "b, of both", 110)

	threshold := 0.0
	c := startReplica(t, natstest.Connect(t, s), 3, -5*time.Minute, router.Config{Queue: router.QueueConfig{Threshold: &threshold}})
	c.counts(t, "c, which came later", 110)
	booked := make(chan error, 1)
	go func() {
		_, err := c.BestWorker(context.WithoutCancel(t.Context()), router.Request{ID: "c0", Owned: true, Model: "m", Tokens: make([]uint32, 20)})
		booked <- err
	}()

	connection.Close() // it dies without a goodbye message
	a.stop()
	b.counts(t, "b, without a", 10)
	c.counts(t, "c, without a", 10)
	select {
	case err := <-booked:
		t.Fatalf("a request does not wait for the requests of b: %v", err)
	default:
	}
	freeB()
	select {
	case err := <-booked:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("room at b does not admit the request that waits at c")
	}
	b.counts(t, "b, at the end", 1)
	c.Free("c0")
	b.counts(t, "b, of nothing", 0)
}

// When a replica says that it leaves, its requests are freed at once, after its last
// changes, however long the timeout for silent replicas is.
func TestALeavingReplicaSaysSo(t *testing.T) {
	s := natstest.Start(t, 0)
	a := startReplicaAt(t, time.Hour, natstest.Connect(t, s), 1, 0, router.Config{})
	b := startReplicaAt(t, time.Hour, natstest.Connect(t, s), 2, 0, router.Config{})
	hears := func(r *replica, n int) func() bool {
		return func() bool { _, peers := r.sync.Views(); return len(peers) == n }
	}
	natstest.Eventually(t, hears(a, 1))
	natstest.Eventually(t, hears(b, 1))
	a.book(t, "a", 20)
	free := a.book(t, "over", 3)
	b.counts(t, "b, of a", 23)
	natstest.Eventually(t, func() bool { own, _ := a.sync.Views(); return own == 23 })
	natstest.Eventually(t, func() bool { _, peers := b.sync.Views(); return peers[0].ActiveRequests == 23 && peers[0].Whole })
	free()
	a.book(t, "late", 1)
	a.stop()
	b.counts(t, "b, without a", 0)
	natstest.Eventually(t, hears(b, 0))
}

// A session bound at one replica is bound at the other, too.
func TestSessionsTravel(t *testing.T) {
	s := natstest.Start(t, 0)
	sessions := router.Config{Sessions: router.SessionConfig{TTL: time.Hour}}
	a := startReplica(t, natstest.Connect(t, s), 1, 0, sessions)
	b := startReplica(t, natstest.Connect(t, s), 2, 0, sessions)
	decide := func(r *replica, id string, pin *router.Worker) router.Decision {
		d, err := r.BestWorker(t.Context(), router.Request{ID: id, Owned: true, Model: "m", Session: "s", Tokens: make([]uint32, 20), Pinned: pin})
		if err != nil {
			t.Fatal(err)
		}
		r.MarkPrefillCompleted(id)
		r.Free(id)
		return d
	}
	natstest.Eventually(t, func() bool { _, peers := b.sync.Views(); return len(peers) == 1 }) // b receives messages
	decide(a, "a", &router.Worker{ID: 2})
	natstest.Eventually(t, func() bool {
		d, err := b.BestWorker(t.Context(), router.Request{Model: "m", Session: "s", Tokens: make([]uint32, 20)})
		return err == nil && d.Reason == router.ReasonSession && d.Worker.ID == 2
	})
	if d := decide(b, "b", nil); d.Worker.ID != 2 || d.Reason != router.ReasonSession {
		t.Errorf("the session goes to %d, %s", d.Worker.ID, d.Reason)
	}
}

// An id that a worker gave out in a response of one replica leads to that worker at the other, too, without sessions.
// The observer of the response may be at the other replica.
func TestGivenIDsTravel(t *testing.T) {
	s := natstest.Start(t, 0)
	a := startReplica(t, natstest.Connect(t, s), 0xa, 0, router.Config{})
	b := startReplica(t, natstest.Connect(t, s), 0xb, 0, router.Config{})
	leads := func(r *replica, id string) (to uint64) {
		d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Held: id, Tokens: make([]uint32, 20)})
		if err == nil && d.Reason == router.ReasonSession {
			to = d.Worker.ID
		}
		return to
	}
	const request = "000000000000000a-1"
	if _, err := a.BestWorker(t.Context(), router.Request{ID: request, Owned: true, Model: "m", Tokens: make([]uint32, 20), Pinned: &router.Worker{ID: 2}}); err != nil {
		t.Fatal(err)
	}
	b.counts(t, "b, of a", 1)
	by, known := b.Giver(request, netip.AddrPort{})
	if !known || by.ID != 2 || !b.Gave("resp_1", by) {
		t.Fatalf("the observer at b finds worker %d", by.ID)
	}
	natstest.Eventually(t, func() bool { return leads(a, "resp_1") == 2 && leads(b, "resp_1") == 2 })
	a.Gave("resp_2", router.Worker{ID: 3})
	natstest.Eventually(t, func() bool { return leads(b, "resp_2") == 3 })
	// A replica that begins later gets them all, however many they are.
	for n := range 60_000 {
		a.Gave(fmt.Sprint(n), router.Worker{ID: uint64(n%3) + 1})
	}
	c := startReplica(t, natstest.Connect(t, s), 0xc, 0, router.Config{})
	natstest.Eventually(t, func() bool {
		return leads(c, "resp_1") == 2 && leads(c, "resp_2") == 3 && leads(c, "0") == 1 && leads(c, "59999") == 3
	})
}

// An observer that sees the first token of another replica's request reports it to all
// replicas.
func TestFirstTokenElsewhere(t *testing.T) {
	s := natstest.Start(t, 0)
	a := startReplica(t, natstest.Connect(t, s), 0xa, 0, router.Config{})
	b := startReplica(t, natstest.Connect(t, s), 0xb, 0, router.Config{})
	c := startReplica(t, natstest.Connect(t, s), 0xc, 0, router.Config{})
	const id = "000000000000000a-1"
	if _, err := a.BestWorker(t.Context(), router.Request{ID: id, Owned: true, Model: "m", Tokens: make([]uint32, 20)}); err != nil {
		t.Fatal(err)
	}
	b.counts(t, "b, of a", 1)
	c.counts(t, "c, of a", 1)
	if !b.MarkPrefillCompleted(id) || b.MarkPrefillCompleted(id) || b.Free(id) || b.AddOutputTokens(id, 1) {
		t.Error("b does not note the first token of a's request once, or b can free the request")
	}
	for _, r := range []*replica{a, b, c} {
		for end := time.Now().Add(30 * time.Second); ; <-time.After(2 * time.Millisecond) {
			if requests, pending := r.active(); requests == 1 && pending == 0 {
				break
			}
			if time.Now().After(end) {
				t.Fatal("a first token that another replica reported does not arrive")
			}
		}
	}
	a.Free(id)
	c.counts(t, "c, at the end", 0)
}

// While NATS is unavailable no replica expires. Changes made meanwhile are known soon
// afterwards.
func TestReplicasOutliveNATS(t *testing.T) {
	s := natstest.Start(t, 0)
	port := s.Addr().(*net.TCPAddr).Port
	var all []*replica
	var frees []func()
	for i := range 4 {
		r := startReplica(t, natstest.Connect(t, s), uint64(i+1), time.Duration(i-2)*150*time.Second, router.Config{})
		all = append(all, r)
		frees = append(frees, r.book(t, "before", 25))
	}
	for i, r := range all {
		r.counts(t, fmt.Sprint("replica ", i, " before"), 100)
	}
	s.Shutdown()
	s.WaitForShutdown()
	frees[0]()
	after := all[1].book(t, "meanwhile", 7)
	// The wait is twice the time after which a silent replica expires.
	<-time.After(1200 * time.Millisecond)
	if n, _ := all[2].active(); n != 100 {
		t.Errorf("replica 2 counts %d requests without NATS, want the 100 from before", n)
	}
	natstest.Start(t, port)
	for i, r := range all {
		r.counts(t, fmt.Sprint("replica ", i, " afterwards"), 82)
	}
	var ends sync.WaitGroup
	for _, free := range append(frees[1:], after) {
		ends.Go(free)
	}
	ends.Wait()
	for i, r := range all {
		r.counts(t, fmt.Sprint("replica ", i, " at the end"), 0)
	}
}

func TestSyncNeedsWhatItNeeds(t *testing.T) {
	if _, err := replicas.NewSync(nil, replicas.SyncConfig{ID: 1}); err == nil {
		t.Errorf("without functions: %v", err)
	}
}
