// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// A worker that speaks only HTTP is in the fleets of all replicas, whichever replica it
// registered with.
func TestRegistrationOnBehalf(t *testing.T) {
	s := natstest.Start(t, 0)
	a, b := watch(t, s), watch(t, s)
	if err := a.SetStatic([]fleet.Record{record("static")}); err != nil {
		t.Fatal(err)
	}
	beat := fleet.Heartbeat{WorkerID: wire.WorkerID("w"), CachedPrefixes: map[string]int{"c9bfd41410669565": 512}}
	if err := a.Beat(t.Context(), beat); !errors.Is(err, fleet.ErrNotRegistered) {
		t.Errorf("a heartbeat before the registration: %v", err)
	}
	info, err := a.Register(t.Context(), record("w"))
	if err != nil || info.ID != wire.WorkerID("w") {
		t.Fatalf("registered as %d, %v", info.ID, err)
	}
	if err := a.Beat(t.Context(), beat); err != nil {
		t.Errorf("a heartbeat right behind the registration: %v", err)
	}
	natstest.Eventually(t, func() bool { return b.names() == "map[w:healthy]" })
	if err := b.Beat(t.Context(), beat); err != nil {
		t.Errorf("a heartbeat to the other replica: %v", err)
	}
	if got := a.Find("w"); got != info.ID {
		t.Errorf("the worker's name has the id %d", got)
	}
	if got := a.Find("12"); got != 12 {
		t.Errorf("a number stands for %d", got)
	}
	wrong := record("x")
	wrong.Address = "nowhere"
	if _, err := a.Register(t.Context(), wrong); err == nil || !strings.Contains(err.Error(), "address") {
		t.Errorf("a wrong record: %v", err)
	}
	large := record("x")
	large.Engine = strings.Repeat("e", 64<<10)
	if _, err := a.Register(t.Context(), large); err == nil || errors.Is(err, fleet.ErrBusAway) || !strings.Contains(err.Error(), "want at most 65536") {
		t.Errorf("a large record: %v", err)
	}
	for what, err := range map[string]error{
		"registered":   errOf(a.Register(t.Context(), record("static"))),
		"deregistered": a.Deregister(t.Context(), wire.WorkerID("static")),
	} {
		if !errors.Is(err, fleet.ErrConfigured) {
			t.Errorf("a worker of the configuration is %s: %v", what, err)
		}
	}
	if err := b.Deregister(t.Context(), info.ID); err != nil {
		t.Error(err)
	}
	natstest.Eventually(t, func() bool { return a.names() == "map[static:healthy]" && b.names() == "map[]" })
	if err := b.Deregister(t.Context(), info.ID); !errors.Is(err, fleet.ErrNotRegistered) {
		t.Errorf("deregistered twice: %v", err)
	}
	s.Shutdown()
	natstest.Eventually(t, func() bool { return !a.Ready() })
	if _, err := a.Register(t.Context(), record("w")); !errors.Is(err, fleet.ErrBusAway) {
		t.Errorf("without the bus: %v", err)
	}
}

func errOf[T any](_ T, err error) error { return err }

// The prefixes that a worker reports reach all replicas, and so does an empty report. A
// heartbeat without prefixes changes nothing.
func TestPrefixesReachAllReplicas(t *testing.T) {
	s := natstest.Start(t, 0)
	type replica struct {
		*fleet.Registry
		said chan int
	}
	var all [2]replica
	for i := range all {
		r := &all[i]
		r.said = make(chan int, 16)
		var err error
		if r.Registry, err = fleet.NewRegistry(natstest.Connect(t, s), fleet.RegistryConfig{
			Set: func(router.WorkerInfo) {}, Remove: func(uint64) {},
			Prefixes: func(_ uint64, cached map[string]int) { r.said <- len(cached) },
		}); err != nil {
			t.Fatal(err)
		}
		natstest.Run(t, r.Run)
		natstest.Eventually(t, r.Ready)
	}
	w := record("w")
	w.Events.Transport = "heartbeat"
	info, err := all[0].Register(t.Context(), w)
	if err != nil {
		t.Fatal(err)
	}
	other := &all[1]
	natstest.Eventually(t, func() bool { return other.Beat(t.Context(), fleet.Heartbeat{WorkerID: info.ID}) == nil })
	for _, cached := range []map[string]int{{"77d735ce838418aa": 16}, nil, {}} {
		if err := all[0].Beat(t.Context(), fleet.Heartbeat{WorkerID: info.ID, CachedPrefixes: cached}); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []int{1, 0} {
		select {
		case got := <-other.said:
			if got != want {
				t.Errorf("the other replica receives %d prefixes, want %d", got, want)
			}
		case <-time.After(15 * time.Second):
			t.Fatalf("the other replica does not receive %d prefixes", want)
		}
	}
}

func TestPrefixesAreRead(t *testing.T) {
	got, err := fleet.ParsePrefixes(map[string]int{"c9bfd41410669565": 512, "00000000000000ff": 16})
	if diff := cmp.Diff(map[uint64]int{0xc9bfd41410669565: 512, 255: 16}, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	for _, bad := range []map[string]int{{"ff": 1}, {"c9bfd4141066956g": 1}, {"c9bfd41410669565": -1}, {"+9bfd41410669565a": 1}} {
		if _, err := fleet.ParsePrefixes(bad); err == nil {
			t.Errorf("%v is accepted", bad)
		}
	}
}
