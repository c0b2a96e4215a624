// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// The share is drawn by conversation: by session, else by the beginning of the prompt. Requests on the side round-robin
// go to the workers in turn, and the others as always.
func TestHoldoutShare(t *testing.T) {
	const conversations = 400
	for name, change := range map[string]func(q *router.Request, conversation, turn int){
		"session": func(q *router.Request, c, turn int) {
			q.Session, q.Tokens = fmt.Sprint("s", c), []uint32{1, 2, 3, 4, 5, 6, 7, 8, uint32(turn)}
		},
		"chat": func(q *router.Request, c, turn int) {
			var text strings.Builder
			fmt.Fprintf(&text, `[{"role": "system", "content": "same"}, {"role": "user", "content": "%d"}`, c)
			for i := range turn {
				fmt.Fprintf(&text, `, {"role": "assistant", "content": "a%d"}, {"role": "user", "content": "b%d"}`, i, i)
			}
			q.Tokens, q.Prompt = []uint32{uint32(c), uint32(turn)}, chat.Request{Messages: []byte(text.String() + "]")}
		},
		"tokens": func(q *router.Request, c, turn int) {
			q.Tokens = []uint32{uint32(c), 2, 3, 4, 5, 6, 7, 8, uint32(turn), uint32(turn)}
		},
	} {
		r := newRouter(t, router.Config{HoldoutShare: .25, Seed: 3}, 4)
		sides, got := map[int]router.Side{}, map[uint64]int{}
		held := 0
		for turn := range 2 {
			for c := range conversations {
				d := decided(t, r, fmt.Sprint(turn, "/", c), "", func(q *router.Request) { change(q, c, turn) })
				r.Free(d.ID)
				if turn == 0 {
					sides[c] = d.Holdout
				}
				if d.Holdout != sides[c] || d.Holdout == "" {
					t.Errorf("%s: turn %d of conversation %d is on the side %q, and the first one on %q", name, turn, c, d.Holdout, sides[c])
				}
				if (d.Holdout == router.SideRoundRobin) != (d.Reason == router.ReasonHoldout && d.Mode == router.RoundRobin) || d.Conversation == 0 {
					t.Errorf("%s: %q has the reason %s and the mode %s", name, d.Holdout, d.Reason, d.Mode)
				}
				if d.Holdout == router.SideRoundRobin {
					got[d.Worker.ID]++
					held++
				}
			}
		}
		if held < conversations*2/5 || held > conversations*3/5 {
			t.Errorf("%s: %d of %d requests are held out", name, held, 2*conversations)
		}
		for id := range uint64(4) {
			if n := got[id+1]; n < held/4 || n > held/4+1 {
				t.Errorf("%s: worker %d got %d of the %d requests in turn", name, id+1, n, held)
			}
		}
	}
}

// Requests that cannot be compared take no part, and without the setting no request does.
func TestHoldoutLeavesOut(t *testing.T) {
	r := newRouter(t, router.Config{HoldoutShare: 1}, 2)
	pin := router.Worker{ID: 2}
	for name, change := range map[string]func(*router.Request){
		"pinned":    func(q *router.Request) { q.Pinned = &pin },
		"preferred": func(q *router.Request) { q.Preferred = &pin },
		"unread":    func(q *router.Request) { q.Tokens, q.Unread = nil, true },
		"short":     func(q *router.Request) { q.Tokens = q.Tokens[:3] },
	} {
		if d := decided(t, r, name, "ab", change); d.Holdout != "" || d.Reason == router.ReasonHoldout || d.Conversation != 0 {
			t.Errorf("%s: side %q, reason %s", name, d.Holdout, d.Reason)
		}
	}
	if d := decided(t, newRouter(t, router.Config{}, 2), "a", "ab"); d.Holdout != "" {
		t.Errorf("without the setting: side %q", d.Holdout)
	}
	for _, hard := range []bool{false, true} {
		r := newRouter(t, router.Config{HoldoutShare: 1, Sessions: router.SessionConfig{TTL: time.Minute, Hard: hard}}, 4)
		seen := map[uint64]bool{}
		for i := range 4 {
			d := decided(t, r, fmt.Sprint(i), "ab", func(q *router.Request) { q.Session = "s" })
			r.FirstToken(d.ID, router.SignObserver)
			r.Free(d.ID)
			seen[d.Worker.ID] = true
			if (d.Holdout == "") != hard {
				t.Errorf("hard sessions %v: side %q", hard, d.Holdout)
			}
		}
		if (len(seen) == 1) != hard {
			t.Errorf("hard sessions %v: the session has %d workers", hard, len(seen))
		}
	}
	if _, err := router.New(router.Config{HoldoutShare: 1.5}); err == nil || !strings.Contains(err.Error(), "HoldoutShare is 1.5, want 0 to 1") {
		t.Errorf("a share of 1.5: %v", err)
	}
}

// A held-out request says so in words, and kept decisions repeat its choice.
func TestHoldoutInWords(t *testing.T) {
	r := newRouter(t, router.Config{HoldoutShare: 1}, 3)
	for turn := range 4 {
		decided(t, r, fmt.Sprint(turn), "abcd")
		d, _ := r.Decision(fmt.Sprint(turn))
		want := fmt.Sprintf("The request is in the share that --holdout-share routes round robin. Mode round-robin gives each worker its turn: turn %d is that of w%d, number %d of 3.", turn, turn%3+1, turn%3+1)
		if text := d.Sentence(); !strings.HasPrefix(text, want) {
			t.Errorf("turn %d: %s\nwant %s", turn, text, want)
		}
		if got := d.ModeText(); got != fmt.Sprint("round-robin, turn ", turn) {
			t.Errorf("turn %d: %s", turn, got)
		}
	}
}

// The time to the first token is expected by the measured rate, once there is one.
func TestExpectedTTFT(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	r := newRouter(t, router.Config{InferFirstTokens: true, Now: c.read}, 1)
	long := func(q *router.Request) { q.Tokens = make([]uint32, 1000) }
	for i := range 5 {
		d := decided(t, r, fmt.Sprint(i), "", long, func(q *router.Request) { q.Tokens[0] = uint32(i) })
		if d.ExpectedTTFT != 0 || d.PrefillRate != 0 {
			t.Errorf("after %d first tokens the expected time is %v ms", i, d.ExpectedTTFT)
		}
		c.now = c.now.Add(100 * time.Millisecond)
		r.FirstToken(d.ID, router.SignObserver)
		r.Free(d.ID)
	}
	a := decided(t, r, "a", "", long)
	b := decided(t, r, "b", "", long)
	short := decided(t, newRouter(t, router.Config{InferFirstTokens: true, Now: c.read}, 1), "short", "abcd")
	if c := decided(t, r, "c", "abcd"); c.ExpectedTTFT <= 200 || short.ExpectedTTFT != 0 {
		t.Errorf("a short prompt behind long ones is expected after %v ms", c.ExpectedTTFT)
	}
	for _, id := range []string{"a", "b", "c"} {
		r.Free(id)
	}
	if d := decided(t, r, "d", "abcd"); d.ExpectedTTFT != 0 || d.PrefillRate == 0 {
		t.Errorf("a short prompt alone is expected after %v ms", d.ExpectedTTFT)
	}
	if a.PrefillRate != 10_000 || a.ExpectedTTFT != 100 || b.ExpectedTTFT != 200 {
		t.Errorf("rate %v, expected %v and %v ms", a.PrefillRate, a.ExpectedTTFT, b.ExpectedTTFT)
	}
}

// The expected time to the first token has the time that each prompt needs besides its tokens, once prompts of different
// lengths have shown it.
func TestExpectedTTFTHasAFixedPart(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	r := newRouter(t, router.Config{InferFirstTokens: true, Now: c.read}, 1)
	prompt := func(id string, tokens int) router.Decision {
		return decided(t, r, id, "", func(q *router.Request) {
			q.Tokens = make([]uint32, tokens)
			q.Tokens[0] = uint32(c.now.UnixMilli())
		})
	}
	for i := range 10 {
		tokens := 400 + 2000*(i%2)
		d := prompt(fmt.Sprint(i), tokens)
		c.now = c.now.Add(50*time.Millisecond + time.Duration(tokens)*100*time.Microsecond)
		r.FirstToken(d.ID, router.SignObserver)
		r.Free(d.ID)
	}
	a, b := prompt("a", 1000), prompt("b", 2000)
	if math.Abs(a.MarginalRate-10_000) > 1 || math.Abs(a.ExpectedTTFT-150) > .1 || math.Abs(b.ExpectedTTFT-400) > .1 {
		t.Errorf("rate %v, expected %v and %v ms; want 10000, 150 and 400", a.MarginalRate, a.ExpectedTTFT, b.ExpectedTTFT)
	}
}

// A worker that gave no response is named with the cause and the time until it serves, or answers a probe.
func TestUnansweredRequestsStayNamed(t *testing.T) {
	for _, ends := range []func(r *router.Router, c *clock){
		func(r *router.Router, _ *clock) {
			d := decided(t, r, "good", "", func(q *router.Request) { q.Tokens, q.Pinned = []uint32{1}, &router.Worker{ID: 1} })
			r.Served(d.ID, router.Response{Address: d.Address, Status: 200})
		},
		func(r *router.Router, _ *clock) { r.Probed(1, true) },
	} {
		c := &clock{time.Unix(1000, 0)}
		r := newRouter(t, router.Config{AvoidFailing: 2 * time.Second, Now: c.read}, 2)
		r.Unanswered(1, "nothing failed yet")
		d := decided(t, r, "bad", "", func(q *router.Request) { q.Tokens, q.Pinned = []uint32{1}, &router.Worker{ID: 1} })
		r.Served(d.ID, router.Response{Address: d.Address, Local: true})
		r.Unanswered(1, "connection refused")
		r.Free(d.ID)
		for _, passed := range []time.Duration{0, 10 * time.Minute} {
			c.now = time.Unix(1000, 0).Add(passed)
			if w := byID(t, r)[1]; !w.AvoidedSince.Equal(time.Unix(1000, 0)) || w.AvoidedFor != "it gave no response: connection refused" || w.Failing != (passed == 0) {
				t.Errorf("after %v: failing %v, since %v, %q", passed, w.Failing, w.AvoidedSince, w.AvoidedFor)
			}
		}
		ends(r, c)
		if w := byID(t, r)[1]; !w.AvoidedSince.IsZero() || w.AvoidedFor != "" {
			t.Errorf("it is still named: %+v", w)
		}
	}
}
