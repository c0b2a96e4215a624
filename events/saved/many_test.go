// SPDX-License-Identifier: Apache-2.0

package saved_test

import (
	"bytes"
	"encoding/json"
	"slices"
	"testing"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/saved"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/wire"
)

// More events with blocks of side groups than a reader takes are left out, so that no reader refuses the file. The
// shape of a worker is never left out: without it, prompts would need no blocks of side groups.
func TestManySides(t *testing.T) {
	one := events.RouterEvent{Event: indexer.Event{Kind: indexer.SideStored, Externals: []uint64{1}}}
	long := events.RouterEvent{Event: indexer.Event{Kind: indexer.SideStored, Externals: make([]uint64, 3*4096)}}
	shape := events.RouterEvent{WorkerID: 2, Event: indexer.Event{Kind: indexer.Shaped}}
	for _, n := range []int{1<<20 - 4, 1<<20 - 3, 1<<20 + 1} {
		all := append(slices.Repeat([]events.RouterEvent{one}, n), long, shape)
		s := goldenContent()
		s.Parked = all
		s.Owners = slices.Values([]*events.Owner{{
			Info: json.RawMessage("{}"), Events: all, Blocks: func(func(events.Place, *events.OwnedBlock) bool) {},
		}})
		var file bytes.Buffer
		if _, err := saved.Write(&file, wire.Scope{}, s); err != nil {
			t.Fatal(err)
		}
		back, whole, err := saved.Read(&file, wire.Scope{})
		if err != nil {
			t.Fatal(n, err)
		}
		for range back.Runs {
		}
		var sides []events.RouterEvent
		for o := range back.Owners {
			sides = o.Events
		}
		if err := whole(); err != nil {
			t.Fatal(n, err)
		}
		want := min(n+4, 1<<20) // the long event has three parts
		for where, got := range map[string][]events.RouterEvent{"parked events": back.Parked, "events of an owner": sides} {
			if len(got) != want || got[0].WorkerID != 2 || got[0].Event.Kind != indexer.Shaped {
				t.Errorf("%d events: %d %s, want %d and the shape first", n+2, len(got), where, want)
			}
		}
	}
}
