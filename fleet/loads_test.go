// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"testing"
	"time"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/router"
)

func TestWhoSpeaksOfALoad(t *testing.T) {
	var loads fleet.Loads
	w := router.Worker{ID: 7, DPRank: 1}
	for i, c := range []struct {
		after     time.Duration
		via       fleet.LoadVia
		publisher uint64
		blocks    int
		used      int
		counts    bool
	}{
		{0, fleet.ViaHeartbeat, 0, 50, 50, true},
		{time.Second, fleet.ViaHeartbeat, 0, 40, 40, true},
		{2 * time.Second, fleet.ViaBus, 1, 900, 900, true},
		{3 * time.Second, fleet.ViaHeartbeat, 0, 0, 0, false}, // another source has a report
		{4 * time.Second, fleet.ViaBus, 2, 100, 900, true},    // the largest of two publishers counts
		{5 * time.Second, fleet.ViaBus, 1, 200, 200, true},    // replaces its own report
		{6 * time.Second, fleet.ViaMetrics, 0, 30, 30, true},  // the newest source counts
		{14 * time.Second, fleet.ViaBus, 2, 100, 200, true},
		{15001 * time.Millisecond, fleet.ViaBus, 2, 100, 100, true}, // the other publisher's has expired
		{16 * time.Second, fleet.ViaMetrics, 0, 0, 0, true},
		{25500 * time.Millisecond, fleet.ViaHeartbeat, 0, 10, 0, false},
		{26001 * time.Millisecond, fleet.ViaHeartbeat, 0, 10, 10, true}, // all others have expired
	} {
		if used, counts := loads.Report(w, c.via, c.publisher, c.blocks, start.Add(c.after)); used != c.used || counts != c.counts {
			t.Errorf("step %d: %d blocks, counts: %v; want %d, %v", i, used, counts, c.used, c.counts)
		}
	}
	// Reports of other workers are separate, and the number of kept reports is bounded.
	if used, _ := loads.Report(router.Worker{ID: 7}, fleet.ViaBus, 1, 3, start); used != 3 {
		t.Errorf("another rank uses %d blocks, want 3", used)
	}
	for p := range uint64(1000) {
		loads.Report(w, fleet.ViaBus, p, 1000-int(p), start.Add(time.Minute))
	}
	if used, _ := loads.Report(w, fleet.ViaBus, 1000, 0, start.Add(time.Minute)); used != 7 { // the maximum of the last eight
		t.Errorf("of many publishers %d blocks are believed, want 7", used)
	}
	loads.Forget(7)
	if used, _ := loads.Report(w, fleet.ViaBus, 5, 1, start.Add(time.Minute)); used != 1 {
		t.Errorf("after it was forgotten %d blocks are in use, want 1", used)
	}
}
