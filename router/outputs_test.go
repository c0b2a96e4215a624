// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// expectation is the output that a decision expects of a request.
func expectation(t *testing.T, r *router.Router, q router.Request) float64 {
	t.Helper()
	q.Model, q.Tokens = "m", prompt("ab")
	d, err := r.BestWorker(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	return d.ExpectedOutput
}

// The expected output begins with a default and becomes the mean output of the pool's requests: by
// reports, by usage, and otherwise by time.
func TestTheExpectedOutputIsLearnt(t *testing.T) {
	for _, c := range []struct {
		how    string
		change func(r *router.Router, w *watch, id string) // of a request with its first token
	}{
		{"reported", func(r *router.Router, _ *watch, id string) { r.AddOutputTokens(id, 100) }},
		{"usage", func(r *router.Router, _ *watch, id string) {
			r.ReportUsage(id, router.Usage{PromptTokens: 16, OutputTokens: 100})
		}},
		{"time", func(_ *router.Router, w *watch, _ string) { w.advance(2 * time.Second) }}, // at 50 a second
		{"time of a whole response", nil},
	} {
		w := newWatch()
		r := newRouter(t, router.Config{Now: w.now, EstimateOutput: true, OutputRate: 50}, 2)
		if got := expectation(t, r, router.Request{}); got != 256 {
			t.Errorf("%s: %v tokens at first, want 256", c.how, got)
		}
		for i := range 300 {
			id := fmt.Sprint(i)
			bookFor(t, r, id, "ab")
			if c.change == nil { // the first token is noticed with the end
				w.advance(2 * time.Second)
				r.FirstToken(id, router.SignEnd)
			} else {
				r.MarkPrefillCompleted(id)
				c.change(r, w, id)
			}
			r.Free(id)
			if i == 7 {
				// Eight requests weigh as much as the default.
				if got := expectation(t, r, router.Request{}); math.Abs(got-178) > 1 {
					t.Errorf("%s: %v tokens after eight outputs of 100, want 178", c.how, got)
				}
			}
		}
		if got := expectation(t, r, router.Request{}); math.Abs(got-100) > 2 {
			t.Errorf("%s: %v tokens after 300 outputs of 100", c.how, got)
		}
		for _, q := range []struct {
			request router.Request
			want    float64
		}{{router.Request{MaxOutput: 7}, 7}, {router.Request{MaxOutput: 5000}, 100}, {router.Request{ExpectedOutput: 900, MaxOutput: 7}, 900}} {
			if got := expectation(t, r, q.request); math.Abs(got-q.want) > 2 {
				t.Errorf("%s: %v tokens of a request with at most %d and %d expected, want %v", c.how, got, q.request.MaxOutput, q.request.ExpectedOutput, q.want)
			}
		}
	}
}

// Requests without a first token, and those of other replicas, teach nothing.
func TestTheExpectedOutputIgnoresOthers(t *testing.T) {
	w := newWatch()
	r := newRouter(t, router.Config{Now: w.now, EstimateOutput: true, OutputRate: 50}, 2)
	for i := range 50 {
		id := fmt.Sprint(i)
		bookFor(t, r, id, "ab")
		r.PeerChanged(7, router.Change{Kind: router.SlotTaken, ID: id, Worker: router.Worker{ID: 1}, PromptTokens: 16})
		r.PeerChanged(7, router.Change{Kind: router.FirstToken, ID: id})
		w.advance(time.Second)
		r.Free(id)
		r.PeerChanged(7, router.Change{Kind: router.SlotFreed, ID: id})
	}
	if got := expectation(t, r, router.Request{}); got != 256 {
		t.Errorf("%v tokens, want the default of 256", got)
	}
}

// A usage that comes after the end teaches the worker's rate, so that later estimates by time are right.
func TestAUsageTeachesTheRate(t *testing.T) {
	w := newWatch()
	r := newRouter(t, router.Config{Now: w.now, EstimateOutput: true}, 1)
	for i := range 200 {
		id := fmt.Sprint(i)
		bookFor(t, r, id, "ab")
		r.MarkPrefillCompleted(id)
		w.advance(4 * time.Second)
		r.Free(id)
		if i < 100 {
			r.ReportUsage(id, router.Usage{PromptTokens: 16, OutputTokens: 40})
		}
	}
	if got := expectation(t, r, router.Request{}); math.Abs(got-40) > 5 {
		t.Errorf("%v tokens of outputs that take 4 s at 10 tokens a second, want 40", got)
	}
}

// One hot prompt does not fill one worker: with the default cost eight workers share 128 requests that
// decode for a while. Without the term for decoding one worker gets all of them.
func TestAHotPromptFillsNoWorker(t *testing.T) {
	for weight, most := range map[float64]int{1: 26, 0: 128} {
		s := scorer.Defaults()
		s.DecodeWeight = weight
		w := newWatch()
		r := newRouter(t, router.Config{Scoring: s, Now: w.now, NoEvents: true}, 8)
		got, busiest := map[uint64]int{}, 0
		system := make([]uint32, 16_000)
		for i := range 128 {
			id := fmt.Sprint(i)
			question := make([]uint32, 64)
			for j := range question {
				question[j] = uint32(1000 + i)
			}
			d, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: "m", Tokens: append(system[:16_000:16_000], question...), Owned: true})
			if err != nil {
				t.Fatal(err)
			}
			w.advance(100 * time.Millisecond)
			r.MarkPrefillCompleted(id)
			got[d.Worker.ID]++
			busiest = max(busiest, got[d.Worker.ID])
		}
		if weight > 0 && busiest > most || weight == 0 && busiest < most {
			t.Errorf("weight %v: the busiest worker has %d of 128 requests: %v; want %d", weight, busiest, got, most)
		}
	}
}

// Of a group, the tokens that its requests hold come from the summary, with what changed since.
func TestHeldTokensOfAGroup(t *testing.T) {
	w := newWatch()
	r := newRouter(t, router.Config{Now: w.now, PredictTTL: -1}, 0)
	set(t, r, groupOf(1))
	held := func() int {
		in := dryRun(t, r, "wxyz").Candidates[0].Input
		return in.DecodeTokens + in.WaitingTokens
	}
	bookFor(t, r, "before", "abcd") // 32 tokens
	w.advance(time.Second)
	report := router.Summary{Taken: w.now(), Interval: time.Hour, Healthy: 4, ActiveRequests: 5, ActiveBlocks: 10, HeldTokens: 500}
	setSummary(t, r, 1, report)
	w.advance(time.Second)
	if got := held(); got != 500 {
		t.Errorf("%d tokens, want the 500 of the summary", got)
	}
	bookFor(t, r, "after", "abcdef")
	if got := held(); got != 548 {
		t.Errorf("%d tokens, want 48 more", got)
	}
	r.Free("before")
	if got := held(); got != 516 {
		t.Errorf("%d tokens, want 32 fewer", got)
	}
	report.Taken, report.HeldTokens = w.now(), 0
	setSummary(t, r, 1, report)
	if got := held(); got != 80 {
		t.Errorf("%d tokens of a router without the field, want those of its 10 blocks", got)
	}
}
