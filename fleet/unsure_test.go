// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"testing"

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
