// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"strconv"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/fixtures"
)

// When 32 users begin, in ms, and which conversations they take, by line: what the
// asserted fraction was counted with.
const (
	agenticStarts = `26963 40130 11842 31571 40713 34761 58219 20161 37297 58469 41970 58050 4065 59258 14858 58020 17453 1247 43277 9365 46731 23839 16216 10689 4405 46565 608 54760 47898 24668 41102 18220`
	agenticOrder  = `201 97 370 197 600 612 217 513 482 196 596 576 556 119 311 283 92 694 544 650 572 659 438 324 121 545 274 676 407 573 632 299 332 387 409 628 473 262 578 619 344 247 687 207 216 649 202 284 357 642 180 701 323 267 73 674 348 83 429 212 434 476 266 425 178 142 175 265 537 455 374 127 397 242 251 271 683 422 115 77 3 338 74 103 67 672 0 555 398 145 668 285 117 133 154 418 688 147 198 27 62 153 464 113 661 686 626 532 606 48 226 625 509`
)

func numbers(t *testing.T, s string) (out []int) {
	t.Helper()
	for f := range strings.FieldsSeq(s) {
		n, err := strconv.Atoi(f)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, n)
	}
	return out
}

func TestHitRateOfTheConversations(t *testing.T) {
	name := fixtures.Path(t, "traces", "cc_weka_sessions.jsonl.gz")
	if name == "" {
		return
	}
	c, err := LoadConversations(name)
	if err != nil {
		t.Fatal(err)
	}
	var starts []int64
	for _, n := range numbers(t, agenticStarts) {
		starts = append(starts, int64(n))
	}
	trace := c.arrivals(starts, numbers(t, agenticOrder), 6000)
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
