// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/wire"
)

// A configured worker without event addresses may or may not publish events. A worker
// with event addresses publishes them, and a worker that registers has a publisher.
func TestWhoMayPublishNoEvents(t *testing.T) {
	var l changes
	tab := fleet.NewTable(fleet.Networks{}, l.set, l.remove)
	silent, speaking := record("a"), record("b")
	silent.Events, speaking.Events = fleet.Events{}, fleet.Events{Transport: "zmq", Endpoint: "tcp://10.0.0.7:5557"}
	if err := tab.SetStatic(start, []fleet.Record{silent, speaking}); err != nil {
		t.Fatal(err)
	}
	put(t, tab, start, record("c"))
	for name, want := range map[string]bool{"a": true, "b": false, "c": false} {
		if got := l.workers[wire.WorkerID(name)].EventsUnsure; got != want {
			t.Errorf("%s may publish none: %t, want %t", name, got, want)
		}
	}
}

// A worker's health is proved by probes if it has any, otherwise by heartbeats and records. An answered request makes
// it healthy and proves nothing about the others' probes.
func TestWhatProvesHealth(t *testing.T) {
	var l changes
	tab := fleet.NewTable(fleet.Networks{}, l.set, l.remove)
	configured, registered, beating := record("configured"), record("registered"), record("beating")
	configured.Health, registered.Health = &fleet.Probe{}, &fleet.Probe{}
	registered.StartedMS = 1
	if err := tab.SetStatic(start, []fleet.Record{configured}); err != nil {
		t.Fatal(err)
	}
	put(t, tab, start, registered)
	put(t, tab, start, beating)
	check := func(what, want string) {
		t.Helper()
		var got []string
		for _, name := range []string{"configured", "registered", "beating"} {
			w := l.workers[wire.WorkerID(name)]
			state := w.Health.String()
			if w.Unproved {
				state += " unproved"
			}
			got = append(got, state)
		}
		if all := strings.Join(got, ", "); all != want {
			t.Errorf("%s: the workers are %q, want %q", what, all, want)
		}
	}
	each := func(at time.Duration, do func(now time.Time, id uint64)) {
		for _, name := range []string{"configured", "registered", "beating"} {
			do(start.Add(at), wire.WorkerID(name))
		}
	}
	probed := func(result fleet.Probed) func(time.Time, uint64) {
		return func(now time.Time, id uint64) {
			if id != wire.WorkerID("beating") {
				tab.Probed(now, id, result)
			}
		}
	}
	beats := func(now time.Time, id uint64) {
		if id != wire.WorkerID("configured") {
			tab.Heartbeat(now, &fleet.Heartbeat{WorkerID: id})
		}
	}
	check("they come", "starting unproved, starting unproved, healthy")
	each(2*time.Second, beats)
	check("heartbeats", "starting unproved, starting unproved, healthy")
	each(3*time.Second, probed(fleet.ProbeFailed))
	each(4*time.Second, tab.Answered)
	check("requests answered", "healthy unproved, healthy unproved, healthy")
	each(5*time.Second, probed(fleet.ProbeAnswered))
	check("probes answered", "healthy, healthy, healthy")
	tab.Tick(start.Add(14*time.Second), false)
	check("silence", "degraded unproved, degraded unproved, degraded unproved")
	each(15*time.Second, tab.Answered)
	check("requests answered again", "healthy unproved, healthy unproved, healthy unproved")
	each(16*time.Second, beats)
	check("heartbeats again", "healthy unproved, healthy unproved, healthy")
	each(17*time.Second, probed(fleet.ProbeUnavailable))
	check("probes answered with 503", "unhealthy, unhealthy, healthy")
	each(19*time.Second, probed(fleet.ProbeAnswered))
	registered.StartedMS = 2
	put(t, tab, start.Add(20*time.Second), registered)
	check("a restart", "healthy, starting unproved, healthy")
}
