// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/router"
)

// audited books a request with the prompt, and reports a usage with the given number of cached tokens.
func audited(t *testing.T, r *router.Router, id, letters string, cached int) {
	t.Helper()
	d := decided(t, r, id, letters)
	r.Served(id, router.Response{Address: d.Address, Asked: 1, Status: 200})
	r.ReportUsage(id, router.Usage{PromptTokens: d.PromptTokens, CachedTokens: cached, Cached: true, OutputTokens: 2})
	r.Free(id)
}

// A worker whose responses differ from the predictions departs; it agrees again when its responses do.
func TestAuditFindsAWrongIndex(t *testing.T) {
	var reports []string
	now := time.Unix(1000, 0)
	r := newRouter(t, router.Config{
		Scoring: classic(1), Now: func() time.Time { return now },
		Hooks: router.Hooks{Departs: func(w router.Worker, departs bool) { reports = append(reports, fmt.Sprint(w.ID, departs)) }},
	}, 2)
	store(r, router.Worker{ID: 2}, "abcdefgh") // as kvroute believes
	step := func(n, cached int, want ...string) {
		t.Helper()
		for i := range n {
			audited(t, r, fmt.Sprint(len(reports), cached, i, now.Unix()), "abcdefghij", cached)
			now = now.Add(time.Second)
		}
		if diff := cmp.Diff(want, reports); diff != "" {
			t.Errorf("after %d responses with %d cached tokens, reports (-want +got):\n%s", n, cached, diff)
		}
		reports = nil
	}
	block := byID(t, r)[2].BlockSize
	step(8, 8*block)
	if a := byID(t, r)[2].Audit; a == nil || a.Departs || a.Responses != 8 || a.PredictedTokens != a.CachedTokens {
		t.Errorf("audit %+v of a worker that agrees", a)
	}
	step(8, 7*block) // a block is allowed
	step(3, 10*block)
	step(1, 10*block, "2 true")
	if a := byID(t, r)[2].Audit; !a.Departs {
		t.Errorf("audit %+v of a worker that departs", a)
	}
	step(8, 10*block) // not again within a minute
	now = now.Add(time.Minute)
	step(1, 10*block, "2 true")
	step(3, 8*block)
	step(1, 8*block, "2 false")
	if a := byID(t, r)[1].Audit; a != nil {
		t.Errorf("audit %+v of a worker without requests", a)
	}
}

// Responses that say nothing about the cache are not compared.
func TestAuditComparesOnlyWhatIsComparable(t *testing.T) {
	var used []router.Usage
	r := newRouter(t, router.Config{
		Scoring: classic(1),
		Hooks: router.Hooks{
			Departs: func(router.Worker, bool) { t.Error("reported") },
			Used:    func(d router.Decision) { used = append(used, *d.Usage) },
		},
	}, 2)
	for i := range 10 {
		id := fmt.Sprint(i)
		d := decided(t, r, id, "abcd")
		for _, u := range []router.Usage{{}, {Bad: true}, {PromptTokens: 32, CachedTokens: 1 << 40, Cached: true}, {PromptTokens: 5}, {PromptTokens: 5, CachedTokens: 0, Cached: true}} {
			r.ReportUsage(id, u)
		}
		r.ReportUsage("nobody's", router.Usage{PromptTokens: 64, CachedTokens: 64, Cached: true})
		if d.Usage != nil {
			t.Error("the caller's decision was changed")
		}
		r.Free(id)
		r.ReportUsage(id, router.Usage{PromptTokens: 64, OutputTokens: 3}) // after the end
		if kept, _ := r.Decision(id); kept.Usage == nil || kept.Usage.OutputTokens != 3 {
			t.Errorf("kept usage %+v", kept.Usage)
		}
	}
	if len(used) != 30 || !slices.Contains(used, router.Usage{PromptTokens: 64, OutputTokens: 3}) {
		t.Errorf("%d usages reported: %+v", len(used), used)
	}
}

// The outcome of a request has what happened until its end.
func TestOutcomes(t *testing.T) {
	var got []router.Outcome
	now := time.Unix(1000, 0)
	r := newRouter(t, router.Config{
		Scoring: classic(1), KeepDecisions: -1,
		Now:   func() time.Time { return now },
		Hooks: router.Hooks{Finished: func(o router.Outcome) { got = append(got, o) }},
	}, 2)
	store(r, router.Worker{ID: 2}, "abcd")
	tick := func() time.Time { now = now.Add(time.Second); return now }

	d := decided(t, r, "seen", "abcdef", func(q *router.Request) {
		q.Arrival = router.Arrival{Began: now.Add(-time.Second), TraceParent: "00-1"}
	})
	answered := tick()
	r.Served("seen", router.Response{Address: d.Address, Asked: 1, Status: 200})
	first := tick()
	r.FirstToken("seen", router.SignObserver)
	r.ReportUsage("seen", router.Usage{PromptTokens: 96, OutputTokens: 2})
	tick()
	r.Free("seen")

	decided(t, r, "failed", "abcdef")
	r.Served("failed", router.Response{Status: 503, Nowhere: true})
	r.Abandon("failed")
	decided(t, r, "without response", "abcdef")
	r.Abandon("without response")
	if _, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("abcd")}); err != nil { // no booking
		t.Fatal(err)
	}
	if len(got) != 3 {
		t.Fatalf("%d outcomes", len(got))
	}
	o := got[0]
	if o.ID != "seen" || o.Worker.ID != 2 || o.Status != 200 || o.Abandoned || o.TraceParent != "00-1" || !o.Answered.Equal(answered) ||
		!o.FirstToken.Equal(first) || o.FirstTokenBy != router.SignObserver || !o.Freed.Equal(now) || o.Usage == nil || !o.Began.Equal(d.Time.Add(-time.Second)) {
		t.Errorf("outcome %+v", o)
	}
	block := float64(d.BlockSize)
	if o.CachedTokens != 4*d.BlockSize || o.MeanCachedTokens != 2*block {
		t.Errorf("%d cached tokens, mean %v", o.CachedTokens, o.MeanCachedTokens)
	}
	if o := got[1]; o.Status != 503 || !o.Abandoned || !o.FirstToken.IsZero() || o.Began.IsZero() {
		t.Errorf("outcome %+v", o)
	}
	if o := got[2]; o.Status != 0 || !o.Abandoned || !o.Answered.IsZero() {
		t.Errorf("outcome %+v", o)
	}
}
