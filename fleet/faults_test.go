// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// routed is a router with a registry that adds workers to it.
type routed struct {
	*router.Router
	*fleet.Registry
	sets atomic.Int64 // number of calls that set a worker
	log  lineWriter
}

func (r *routed) Run(ctx context.Context) error { return r.Registry.Run(ctx) }

// startRouted starts a router whose clock is ahead of the others'.
func startRouted(t *testing.T, nc *nats.Conn, ahead time.Duration) *routed {
	t.Helper()
	r := &routed{log: make(lineWriter, 256)}
	var err error
	now := func() time.Time { return time.Now().Add(ahead) }
	if r.Router, err = router.New(router.Config{Now: now, PredictTTL: -1}); err != nil {
		t.Fatal(err)
	}
	if r.Registry, err = fleet.NewRegistry(nc, fleet.RegistryConfig{
		Set: func(i router.WorkerInfo) {
			r.sets.Add(1)
			if err := r.SetWorker(i); err != nil {
				t.Error(err)
			}
		},
		Remove: r.RemoveWorker,
		Now:    now,
		Log:    slog.New(slog.NewTextHandler(r.log, nil)),
	}); err != nil {
		t.Fatal(err)
	}
	natstest.Run(t, r.Run)
	natstest.Eventually(t, r.Ready)
	return r
}

// healthy returns address and model of the healthy workers by name.
func (r *routed) healthy() (all map[string]string) {
	all = map[string]string{}
	for _, w := range r.Workers() {
		if w.Health == router.Healthy.String() {
			all[w.Name] = w.Address.String() + " " + w.Model
		}
	}
	return all
}

// says waits until a line of the log contains part.
func (r *routed) says(t *testing.T, part string) {
	t.Helper()
	for deadline := time.After(30 * time.Second); ; {
		select {
		case line := <-r.log:
			if strings.Contains(line, part) {
				return
			}
		case <-deadline:
			t.Fatalf("the log does not contain %q", part)
		}
	}
}

// at returns a record with an address of its own.
func at(name string, n int) fleet.Record {
	r := record(name)
	r.Address = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)}), 8000).String()
	return r
}

func announceRecord(t *testing.T, nc *nats.Conn, r fleet.Record, now func() time.Time) (a *fleet.Announcer, stop func()) {
	t.Helper()
	a, err := fleet.NewAnnouncer(nc, fleet.AnnouncerConfig{Record: r, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	return a, natstest.Run(t, a.Run)
}

// The registry's bucket is deleted. Known workers stay known, since their heartbeats
// continue. New workers, changes and departures are seen in the bucket that the next
// record creates.
func TestTheBucketIsDeleted(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t, 0)
	r := startRouted(t, natstest.Connect(t, s), 0)
	nc := natstest.Connect(t, s)
	a, _ := announceRecord(t, nc, at("a", 1), nil)
	_, stopB := announceRecord(t, nc, at("b", 2), nil)
	natstest.Eventually(t, func() bool { return len(r.healthy()) == 2 })
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	for round := range 2 {
		if err := js.DeleteKeyValue(t.Context(), wire.Scope{}.Bucket("workers")); err != nil {
			t.Fatal(err)
		}
		if got := r.healthy(); len(got) != 2+round {
			t.Errorf("round %d: without the bucket the workers are %v", round, got)
		}
		// The worker's record is the first in a new bucket, with a revision that the old
		// bucket had, too.
		announceRecord(t, nc, at(fmt.Sprint("new", round), 10+round), nil)
		natstest.Eventually(t, func() bool { return len(r.healthy()) == 3+round })
	}
	moved := at("a", 3)
	if err := a.Update(moved); err != nil {
		t.Fatal(err)
	}
	natstest.Eventually(t, func() bool { return r.healthy()["a"] == moved.Address+" m" })
	r.says(t, "the bucket was deleted")
	// A worker that leaves is removed at once, though its record was in the previous
	// bucket.
	leaves, stopIt := announceRecord(t, nc, at("leaves", 4), nil)
	<-leaves.Registered()
	natstest.Eventually(t, func() bool { return r.healthy()["leaves"] != "" })
	if err := js.DeleteKeyValue(t.Context(), wire.Scope{}.Bucket("workers")); err != nil {
		t.Fatal(err)
	}
	announceRecord(t, nc, at("last", 5), nil)
	natstest.Eventually(t, func() bool { return r.healthy()["last"] != "" })
	stopIt()
	natstest.Eventually(t, func() bool {
		return !slices.ContainsFunc(r.Workers(), func(w router.WorkerState) bool { return w.Name == "leaves" })
	})
	stopB()
	natstest.Eventually(t, func() bool { return r.healthy()["b"] == "" })
}

// A router that starts does not treat a worker as healthy that died earlier and still has
// a record; it does treat live workers as healthy.
func TestARouterStartsAfterAWorkerDied(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t, 0)
	nc := natstest.Connect(t, s)
	before := startRouted(t, natstest.Connect(t, s), 0)
	announceRecord(t, nc, at("lives", 1), nil)
	natstest.Eventually(t, func() bool { return len(before.healthy()) == 1 })
	bucket := records(t, nc)
	dead, err := json.Marshal(at("dead", 2))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bucket.Put(t.Context(), wire.WorkerKey(wire.WorkerID("dead")), dead); err != nil {
		t.Fatal(err)
	}
	natstest.Eventually(t, func() bool { return len(before.healthy()) == 2 })
	for _, ahead := range []time.Duration{0, 5 * time.Minute} { // how far the router's clock is ahead
		natstest.Eventually(t, func() bool { return before.health("dead") != "healthy" })
		late := startRouted(t, natstest.Connect(t, s), ahead)
		if got := late.health("lives"); got != "healthy" {
			t.Errorf("the live worker is %s to a router that starts", got)
		}
		// At first the dead worker's record may be as recent as a live worker's.
		for end := time.Now().Add(30 * time.Second); late.health("dead") == "healthy" && time.Now().Before(end); {
			<-time.After(time.Second)
			late = startRouted(t, natstest.Connect(t, s), ahead)
		}
		if got := late.health("dead"); got != "degraded" {
			t.Errorf("the dead worker is %s to a router that starts", got)
		}
	}
}

// health returns a worker's health as the router has it; empty if the worker is unknown.
func (r *routed) health(name string) string {
	for _, w := range r.Workers() {
		if w.Name == name {
			return w.Health
		}
	}
	return ""
}

// Five hundred workers join at once. Each is known, is set only a few times and gets
// requests; a decision looks at each of them once.
func TestFiveHundredWorkersJoin(t *testing.T) {
	const n = 500
	s := natstest.Start(t, 0)
	early := startRouted(t, natstest.Connect(t, s), 0)
	nc := natstest.Connect(t, s)
	for i := range n {
		announceRecord(t, nc, at(fmt.Sprint("w", i), i), nil)
	}
	late := startRouted(t, natstest.Connect(t, s), 0)
	for name, r := range map[string]*routed{"early": early, "late": late} {
		for end := time.Now().Add(60 * time.Second); len(r.healthy()) != n; <-time.After(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s: %d workers are healthy, want %d", name, len(r.healthy()), n)
			}
		}
		busy := map[uint64]int{}
		for i := range n {
			d, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(name, i), Owned: true, Model: "m", Tokens: make([]uint32, 40), Explain: i == 0})
			if err != nil {
				t.Fatal(err)
			}
			if i == 0 && len(d.Candidates) != n {
				t.Errorf("%s: a decision looks at %d candidates, want %d", name, len(d.Candidates), n)
			}
			busy[d.Worker.ID]++
		}
		if len(busy) != n {
			t.Errorf("%s: %d requests go to %d workers, want one each", name, n, len(busy))
		}
		// Changes of health also set a worker, and on a busy machine some may be late.
		if sets := r.sets.Load(); sets < n || sets > 4*n {
			t.Errorf("%s: %d calls of Set for %d workers", name, sets, n)
		}
	}
}

// Clocks of workers and routers may differ by five minutes: ages count from the time of
// receipt, and a new start time marks a restart even if it is before the last one.
func TestClocksOfWorkersAreApart(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t, 0)
	nc := natstest.Connect(t, s)
	routers := []*routed{startRouted(t, natstest.Connect(t, s), 5*time.Minute), startRouted(t, natstest.Connect(t, s), -5*time.Minute)}
	first := at("a", 1)
	first.StartedMS = time.Now().Add(5 * time.Minute).UnixMilli()
	fast := func() time.Time { return time.Now().Add(5 * time.Minute) }
	slow := func() time.Time { return time.Now().Add(-5 * time.Minute) }
	_, stop := announceRecord(t, nc, first, fast)
	announceRecord(t, nc, at("b", 2), slow)
	id := wire.WorkerID("a")
	for _, r := range routers {
		natstest.Eventually(t, func() bool { return len(r.healthy()) == 2 })
		if _, err := r.BestWorker(t.Context(), router.Request{ID: "r", Owned: true, Model: "m", Tokens: make([]uint32, 40), Pinned: &router.Worker{ID: id}}); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	for _, r := range routers {
		natstest.Eventually(t, func() bool { return len(r.healthy()) == 1 })
	}
	second := at("a", 1)
	second.StartedMS = time.Now().Add(-5 * time.Minute).UnixMilli()
	announceRecord(t, nc, second, slow)
	// The wait is longer than a heartbeat takes to age to degraded, so only further
	// heartbeats keep the workers healthy.
	natstest.Eventually(t, func() bool { return len(routers[0].healthy()) == 2 && len(routers[1].healthy()) == 2 })
	for range 9 {
		<-time.After(time.Second)
		for i, r := range routers {
			if got := r.healthy(); len(got) != 2 {
				t.Fatalf("router %d: only %v are healthy", i, got)
			}
		}
	}
	for i, r := range routers {
		for _, w := range r.Workers() {
			if w.ActiveRequests != 0 {
				t.Errorf("router %d: worker %s still has requests from before its restart", i, w.Name)
			}
		}
	}
}

// Two processes claim one id. All routers use the address of the last record, and log
// that it alternates. A worker that moves once is not logged.
func TestTwoProcessesClaimOneID(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t, 0)
	nc := natstest.Connect(t, s)
	routers := []*routed{startRouted(t, natstest.Connect(t, s), 0), startRouted(t, natstest.Connect(t, s), 0)}
	one, other := at("a", 1), at("a", 2)
	same := func(want fleet.Record) {
		t.Helper()
		for _, r := range routers {
			natstest.Eventually(t, func() bool { return r.healthy()["a"] == want.Address+" m" })
			if n := len(r.Workers()); n != 1 {
				t.Errorf("one id belongs to %d workers", n)
			}
		}
	}
	first, _ := announceRecord(t, nc, one, nil)
	same(one)
	announceRecord(t, nc, other, nil)
	same(other)
	for _, r := range routers {
		select {
		case line := <-r.log:
			if strings.Contains(line, "claim") {
				t.Errorf("a worker that moves is reported as a second one: %s", line)
			}
		default:
		}
	}
	if err := first.Update(one); err != nil { // as every 15 s in production
		t.Fatal(err)
	}
	same(one)
	for _, r := range routers {
		r.says(t, "two processes claim one worker's id")
	}
	late := startRouted(t, natstest.Connect(t, s), 0)
	natstest.Eventually(t, func() bool { return late.healthy()["a"] == one.Address+" m" })
}

// A worker restarts at its address with another model. The old model's pool drops it with
// its blocks and requests, and no request for the old model goes there.
func TestAWorkerServesAnotherModel(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t, 0)
	nc := natstest.Connect(t, s)
	r := startRouted(t, natstest.Connect(t, s), 0)
	announceRecord(t, nc, at("other", 2), nil)
	_, stop := announceRecord(t, nc, at("a", 1), nil)
	natstest.Eventually(t, func() bool { return len(r.healthy()) == 2 })
	decide := func(model, id string) (router.Decision, error) {
		return r.BestWorker(t.Context(), router.Request{ID: id, Owned: true, Model: model, Tokens: make([]uint32, 40)})
	}
	for i := range 6 {
		if _, err := decide("m", fmt.Sprint("before", i)); err != nil {
			t.Fatal(err)
		}
	}
	again := at("a", 1)
	again.Models, again.StartedMS = []string{"n"}, time.Now().UnixMilli()
	announceRecord(t, nc, again, nil) // the old process was killed: its record remains
	natstest.Eventually(t, func() bool { return r.healthy()["a"] == again.Address+" n" })
	stop() // the end of the previous process does not remove the worker
	for i := range 20 {
		d, err := decide("m", fmt.Sprint("after", i))
		if err != nil || d.WorkerName != "other" {
			t.Fatalf("a request of the old model goes to %s, %v", d.WorkerName, err)
		}
	}
	if d, err := decide("n", "new"); err != nil || d.WorkerName != "a" {
		t.Errorf("a request of the new model goes to %s, %v", d.WorkerName, err)
	}
	for _, w := range r.Workers() {
		if w.Name == "a" && (w.ActiveRequests != 1 || w.Model != "n") {
			t.Errorf("the worker of the new model is %+v", w)
		}
	}
	if got := r.healthy()["a"]; got != again.Address+" n" {
		t.Errorf("worker a is %q at the end", got)
	}
}
