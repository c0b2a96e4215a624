// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/wire"
)

// A worker that speaks HTTP only is in all replicas' fleets, whichever it asked.
func TestRegistrationOnBehalf(t *testing.T) {
	s := startNATS(t, -1)
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
	eventually(t, func() bool { return b.names() == "map[w:healthy]" })
	if err := b.Beat(t.Context(), beat); err != nil {
		t.Errorf("a heartbeat to the other replica: %v", err)
	}
	if got := a.Find("w"); got != info.ID {
		t.Errorf("its name stands for %d", got)
	}
	if got := a.Find("12"); got != 12 {
		t.Errorf("a number stands for %d", got)
	}
	wrong := record("x")
	wrong.Address = "nowhere"
	if _, err := a.Register(t.Context(), wrong); err == nil || !strings.Contains(err.Error(), "address") {
		t.Errorf("a wrong record: %v", err)
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
	eventually(t, func() bool { return a.names() == "map[static:healthy]" && b.names() == "map[]" })
	if err := b.Deregister(t.Context(), info.ID); !errors.Is(err, fleet.ErrNotRegistered) {
		t.Errorf("deregistered twice: %v", err)
	}
	s.Shutdown()
	eventually(t, func() bool { return !a.Ready() })
	if _, err := a.Register(t.Context(), record("w")); !errors.Is(err, fleet.ErrBusAway) {
		t.Errorf("without the bus: %v", err)
	}
}

func errOf[T any](_ T, err error) error { return err }

func TestPrefixesAreRead(t *testing.T) {
	got, err := fleet.ParsePrefixes(map[string]int{"c9bfd41410669565": 512, "00000000000000ff": 16})
	if diff := cmp.Diff(map[uint64]int{0xc9bfd41410669565: 512, 255: 16}, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	for _, bad := range []map[string]int{{"ff": 1}, {"c9bfd4141066956g": 1}, {"c9bfd41410669565": -1}, {"+9bfd41410669565a": 1}} {
		if _, err := fleet.ParsePrefixes(bad); err == nil {
			t.Errorf("%v is taken", bad)
		}
	}
}
