// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
)

// A worker that speaks only HTTP is in the fleets of all replicas, whichever replica it
// registered with.
func TestRegistrationOnBehalf(t *testing.T) {
	s := natstest.Start(t, 0)
	a, b := watch(t, s), watch(t, s)
	if err := a.SetStatic([]fleet.Record{record("static")}); err != nil {
		t.Fatal(err)
	}
	beat := fleet.Heartbeat{WorkerID: wire.WorkerID("w")}
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
