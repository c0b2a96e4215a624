// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"testing"

	"github.com/kvroute/kvroute/internal/fixtures"
)

func TestHitRateOfTheConversations(t *testing.T) {
	name := fixtures.Need(t, "traces", "cc_weka_sessions.jsonl.gz")
	c, err := LoadConversations(name)
	if err != nil {
		t.Fatal(err)
	}
	trace, err := c.Recorded()
	if err != nil {
		t.Fatal(err)
	}
	all := trace.InOrder()
	if h := trace.HitRate(all, 1, 80_000); h.Hit != 10_152_557 || h.Blocks != 10_608_487 {
		t.Errorf("one cache of 80,000 blocks: %d of %d, want 10,152,557 of 10,608,487", h.Hit, h.Blocks)
	}
	if h := trace.HitRate(all, 1, 0); h.Hit != 10_174_440 {
		t.Errorf("an endless cache: %d hits, want 10,174,440", h.Hit)
	}
	if h := trace.HitRate(all, 8, 10_000); h.Hit != 1_830_311 {
		t.Errorf("8 workers, round robin: %d hits, want 1,830,311", h.Hit)
	}
}
