// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/fixtures"
)

func TestHitRateOfTheConversations(t *testing.T) {
	name := fixtures.Need(t, "traces", "cc_weka_sessions.jsonl.gz")
	c, err := LoadConversations(name)
	if err != nil {
		t.Fatal(err)
	}
	trace, err := c.recorded()
	if err != nil {
		t.Fatal(err)
	}
	if h := trace.HitRate(1, 80_000); h.Hit != 10_152_557 || h.Blocks != 10_608_487 {
		t.Errorf("one cache of 80,000 blocks: %d of %d, want 10,152,557 of 10,608,487", h.Hit, h.Blocks)
	}
	if h := trace.HitRate(1, 0); h.Hit != 10_174_440 {
		t.Errorf("an endless cache: %d hits, want 10,174,440", h.Hit)
	}
	if h := trace.HitRate(8, 10_000); h.Hit != 1_830_311 {
		t.Errorf("8 workers, round robin: %d hits, want 1,830,311", h.Hit)
	}
}

// When 32 users begin, in ms, and which conversations they take, by line from 0: what
// the asserted hit rate was counted with.
const (
	agenticStarts = `26963 40130 11842 31571 40713 34761 58219 20161 37297 58469 41970 58050 4065 59258 14858 58020 17453 1247 43277 9365 46731 23839 16216 10689 4405 46565 608 54760 47898 24668 41102 18220`
	agenticOrder  = `201 97 370 197 600 612 217 513 482 196 596 576 556 119 311 283 92 694 544 650 572 659 438 324 121 545 274 676 407 573 632 299 332 387 409 628 473 262 578 619 344 247 687 207 216 649 202 284 357 642 180 701 323 267 73 674 348 83 429 212 434 476 266 425 178 142 175 265 537 455 374 127 397 242 251 271 683 422 115 77 3 338 74 103 67 672 0 555 398 145 668 285 117 133 154 418 688 147 198 27 62 153 464 113 661 686 626 532 606 48 226 625 509`
)

const recordedRequests = 6000

// recorded returns the first 6,000 requests of 32 users at their recorded times, as if
// no server had ever been slower or quicker, in blocks of the recorded size: what the
// conversations' hit rate is counted with. It needs the 710 conversations that the
// order was drawn from.
func (c *Conversations) recorded() (*Trace, error) {
	var starts []int64
	var order []int
	for _, l := range []struct {
		text string
		add  func(n int)
	}{
		{agenticStarts, func(n int) { starts = append(starts, int64(n)) }},
		{agenticOrder, func(n int) { order = append(order, n) }},
	} {
		for f := range strings.FieldsSeq(l.text) {
			n, err := strconv.Atoi(f)
			if err != nil {
				return nil, fmt.Errorf("replay: %w", err)
			}
			l.add(n)
		}
	}
	if most := slices.Max(order); most >= len(c.list) {
		return nil, fmt.Errorf("replay: %s: %d conversations, want at least %d", c.Name, len(c.list), most+1)
	}
	return c.arrivals(starts, order, recordedRequests), nil
}

// arrivals plays the recorded times of the conversations without a server: users
// take conversations in the given order, and the first count requests become a
// trace in the order of their times, with the blocks as they were recorded.
func (c *Conversations) arrivals(starts []int64, order []int, count int) *Trace {
	type state struct {
		at    int64 // ms of the next request
		conv  int
		turns []Request
		think []int64
		api   []int64
		next  int
	}
	t := &Trace{Name: c.Name, BlockSize: c.list[order[0]].blockSize}
	taken := 0
	startConversation := func(s *state) bool {
		if taken == len(order) {
			return false
		}
		s.conv = order[taken]
		taken++
		s.turns, s.think, s.api, s.next = nil, nil, nil, 0
		conv := &c.list[s.conv]
		conv.unroll(func(u *turn, ids []int) {
			r := Request{Session: uint64(s.conv) + 1, Input: u.input, Output: u.output, Blocks: make([]int32, 0, len(ids))}
			parent := none
			for _, id := range ids {
				parent = t.blocks.number(parent, uint64(s.conv)<<32|uint64(id))
				r.Blocks = append(r.Blocks, parent)
			}
			s.turns = append(s.turns, r)
			s.think = append(s.think, min(round(1000*u.think), thinkMost.Milliseconds()))
			api := round(1000 * u.api)
			if u.api == 0 {
				api = 6000
			}
			s.api = append(s.api, api)
		})
		return len(s.turns) > 0
	}
	users := make([]state, len(starts))
	for i := range users {
		users[i].at = starts[i]
		startConversation(&users[i])
	}
	for len(t.Requests) < count {
		first := -1
		for i := range users {
			if s := &users[i]; s.next < len(s.turns) && (first < 0 || s.at < users[first].at) {
				first = i
			}
		}
		if first < 0 {
			break
		}
		s := &users[first]
		r, api := s.turns[s.next], s.api[s.next]
		r.At = time.Duration(s.at) * time.Millisecond
		t.Requests = append(t.Requests, r)
		if s.next++; s.next < len(s.turns) {
			s.at += api + s.think[s.next]
		} else if startConversation(s) {
			s.at += api + pauseBetween.Milliseconds()
		}
	}
	t.Requests = slices.Clip(t.Requests)
	return t
}

func round(x float64) int64 { return int64(x + .5) }
