// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/router"
)

// Changes that are not sent are dropped above a limit, and a sequence number is skipped:
// peers notice the gap, request the list and then have the correct state.
func TestPendingChangesAreBounded(t *testing.T) {
	w := newSyncWorld(t, 1, 2, 1)
	a := w.replicas[0]
	w.settle()
	w.book(a, "x")
	w.settle()
	for i := range syncPending + 10 {
		a.sync.Publish(router.Change{Kind: router.FirstToken, Owner: 7, ID: fmt.Sprint(i)})
	}
	w.book(a, "y")
	if n := len(a.sync.own.pending); n > 20 {
		t.Errorf("%d changes wait, want those that came after the limit of %d", n, syncPending)
	}
	asked := w.replicas[1].in.peers[a.id].next
	w.settle()
	if next := w.replicas[1].in.peers[a.id].next; next <= asked+1 {
		t.Errorf("the number %d follows %d: dropped changes are not missed", next, asked)
	}
	w.check("after changes were dropped")
}

// The number of session bindings that wait for the bus is bounded. Without peers none is
// kept.
func TestBindingsAreBounded(t *testing.T) {
	s := newSyncWorld(t, 1, 1, 1).replicas[0].sync
	publish := func() int {
		for range syncSessions + 1000 {
			s.PublishSession(router.SessionBinding{Session: "s", Worker: router.Worker{ID: 1}})
			s.PublishGiven(router.GivenBinding{Key: 1, Worker: router.Worker{ID: 1}})
		}
		s.PublishSession(router.SessionBinding{Session: strings.Repeat("s", maxSyncID+1)})
		return max(len(s.sessions), len(s.given))
	}
	if n := publish(); n != 0 {
		t.Errorf("%d wait, though there is no other replica", n)
	}
	s.othersSeen.Store(s.conf.Now().UnixNano())
	if n := publish(); n != syncSessions {
		t.Errorf("%d wait, want %d", n, syncSessions)
	}
}

// Publishing a request's decision allocates little: its entry in the list, and room in a
// message.
func TestPublishAllocatesLittle(t *testing.T) {
	w := newSyncWorld(t, 1, 1, 1)
	s := w.replicas[0].sync
	c := router.Change{ID: "a", Sequence: make([]uint64, 500)}
	if n := testing.AllocsPerRun(100, func() {
		for range 100 {
			for _, c.Kind = range []router.ChangeKind{router.SlotTaken, router.FirstToken, router.SlotFreed} {
				s.Publish(c)
			}
		}
		s.own.take(nil, false)
	}); n > 320 {
		t.Errorf("%v allocations for 100 requests", n)
	}
}

// A request on an unknown worker counts when the worker becomes known soon. If its worker
// is absent for a while, the request counts again afterwards.
func TestSyncWaitsForWorkers(t *testing.T) {
	w := newSyncWorld(t, 1, 2, 1)
	a, b := w.replicas[0], w.replicas[1]
	b.router.RemoveWorker(1)
	b.sync.WorkerChanged(1, false)
	w.book(a, "x")
	w.settle()
	if n := len(b.router.Workers()); n != 0 {
		t.Fatalf("%d workers", n)
	}
	back := func() {
		t.Helper()
		if err := b.router.SetWorker(workerInfo(0, 1)); err != nil {
			t.Fatal(err)
		}
		b.sync.WorkerChanged(1, true)
		w.settle()
	}
	back()
	w.check("the worker came")
	b.router.RemoveWorker(1)
	b.sync.WorkerChanged(1, false)
	w.settle()
	back()
	w.check("it came again")
	if a.router.Free("x"); len(w.live) != 1 {
		t.Fatal("the model must have one request left")
	}
	clear(w.live)
	w.settle()
	w.check("the request is over")
}

// After a forged sequence number, or an id as long as a message, a peer's later messages
// are still applied.
func TestSyncRecoversFromAForgedNumber(t *testing.T) {
	w := newSyncWorld(t, 1, 2, 1)
	a, b := w.replicas[0], w.replicas[1]
	w.settle()
	w.book(a, "x")
	w.settle()
	b.in.message(b.sync.topic, events.AppendEnvelope(nil, events.Envelope{PublisherID: a.id, Sequence: 1 << 60, Topic: syncTopic, Payload: []byte{0x81, 0xa6, 'e', 'v', 'e', 'n', 't', 's', 0x90}}))
	w.book(a, "y")
	w.settle()
	w.check("after a forged message")
	seq := uint64(math.MaxUint64)
	forged, err := json.Marshal(Presence{RouterID: a.id, Replica: strings.Repeat("a", 1<<20), SyncSeq: &seq, ActiveRequests: 3})
	if err != nil {
		t.Fatal(err)
	}
	b.in.message(b.sync.presence, forged)
	if n := len(b.in.peers[a.id].name); n > 128 {
		t.Errorf("a name of %d bytes is kept", n)
	}
	clear(w.live)
	a.router.Free("x")
	a.router.Free("y")
	w.settle()
	w.check("after a forged presence")
}

// The measured age of a message does not depend on the difference of two clocks.
func TestLateness(t *testing.T) {
	var l latency
	start := time.UnixMilli(1_755_000_000_000)
	at := func(ms int64) uint64 { return uint64(start.UnixMilli() + ms) }
	for _, c := range []struct {
		received  time.Duration
		published uint64 // by a clock that is 300 s ahead
		want      time.Duration
	}{
		{0, at(300_000 - 7), 0},
		{time.Second, at(301_000 - 2), 0},
		{2 * time.Second, at(302_000 - 152), 150 * time.Millisecond},
		{62 * time.Second, at(362_000 - 152), 150 * time.Millisecond},
		{123 * time.Second, at(423_000 - 152), 0}, // no message was faster for minutes
	} {
		if got := l.of(start.Add(c.received), c.published, time.Minute); got != c.want {
			t.Errorf("after %v: %v, want %v", c.received, got, c.want)
		}
	}
}

// BenchmarkSync measures a request's cost for replicas: one publishes its three changes
// in batches like a busy one, and another applies them.
func BenchmarkSync(b *testing.B) {
	for _, blocks := range []int{16, 256} {
		b.Run(fmt.Sprint(blocks, "blocks"), func(b *testing.B) {
			w := newSyncWorld(b, 1, 2, 1, 2, 3, 4, 5, 6, 7, 8)
			from, to := w.replicas[0], w.replicas[1]
			from.sync.link.room = func() int { return 1 << 20 }
			w.settle() // both know each other
			var payloads [][]byte
			from.sync.link.publish = func(_, _ string, data []byte) error {
				payloads = append(payloads, slices.Clone(data))
				return nil
			}
			const batch = 64
			c := router.Change{PromptTokens: blocks * 16, Sequence: make([]uint64, blocks)}
			ids := make([]string, b.N+batch)
			for i := range ids {
				ids[i] = fmt.Sprintf("%016x-%024x", from.id, i)
			}
			b.ResetTimer()
			b.ReportAllocs()
			for n := 0; n < b.N; n += batch {
				for _, k := range [...]router.ChangeKind{router.SlotTaken, router.FirstToken, router.SlotFreed} {
					for i := n; i < n+batch; i++ {
						one := c
						one.Kind, one.ID, one.Worker.ID = k, ids[i], uint64(i%8+1)
						if k != router.SlotTaken {
							one.Sequence = nil
						} else {
							for j := range one.Sequence[blocks/2:] {
								one.Sequence[blocks/2+j] = uint64(i*blocks+j) * 0x9e3779b97f4a7c15
							}
						}
						from.sync.Publish(one)
					}
				}
				from.out.flush(false)
				for _, p := range payloads {
					to.in.message(to.sync.topic, p)
				}
				payloads = payloads[:0]
			}
			b.StopTimer()
			if n := len(to.in.peers[from.id].requests); n > 0 {
				b.Fatalf("%d requests are left", n)
			}
		})
	}
}

// A bus with a constant backlog does not keep a dead replica alive.
func TestABusyBusDoesNotKeepTheDead(t *testing.T) {
	gone := make(chan uint64, 2)
	s, err := NewSync(nil, SyncConfig{
		ID: 1, Apply: func(uint64, router.Change) bool { return true }, Remove: func(id uint64) { gone <- id }, FirstToken: func(string) bool { return false },
	})
	if err != nil {
		t.Fatal(err)
	}
	s.times.presence = 20 * time.Millisecond
	s.link = link{
		publish:    func(string, string, []byte) error { return nil },
		connected:  func() bool { return true },
		reconnects: func() uint64 { return 0 },
		room:       func() int { return 1 << 20 },
	}
	in, done := make(chan *nats.Msg, 1024), make(chan struct{})
	var receiving sync.WaitGroup
	receiving.Go(func() { newReceiver(s).run(done, in) })
	defer receiving.Wait()
	defer close(done)
	in <- &nats.Msg{Subject: s.presence, Data: []byte(`{"router_id":7,"started_ms":1,"sync_seq":1}`)}
	over := make(chan struct{})
	var busy sync.WaitGroup
	for range 8 { // enough that there is almost always a backlog
		busy.Go(func() {
			for {
				select {
				case in <- &nats.Msg{Subject: s.topic, Data: []byte("no message")}:
				case <-over:
					return
				}
			}
		})
	}
	defer busy.Wait()
	defer close(over)
	end := time.After(30 * time.Second)
	for range 2 { // the first removes state from before the replica joined
		select {
		case id := <-gone:
			if id != 7 {
				t.Errorf("%d is called gone, want 7", id)
			}
		case <-end:
			t.Fatal("a silent replica is never removed")
		}
	}
}
