// SPDX-License-Identifier: Apache-2.0

package outcomes_test

import (
	"encoding/json"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/outcomes"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// newRecorder returns a recorder with a clock.
func newRecorder(t testing.TB) (*outcomes.Recorder, *time.Time) {
	t.Helper()
	now := new(time.UnixMilli(1_000_000_000_000).Truncate(time.Hour))
	r, err := outcomes.New(nil, func() time.Time { return *now })
	if err != nil {
		t.Fatal(err)
	}
	return r, now
}

// Each span has all requests of its time, in steps of its own, by model and group.
func TestSpans(t *testing.T) {
	r, now := newRecorder(t)
	for i := range 25 * 3600 { // a request a second, for 25 hours
		o := outcome(*now, 100*time.Millisecond)
		if o.MarginalRate = 1000; i%4 == 0 {
			o.Model = "other"
		} else if i%4 == 1 {
			o.Group = "g"
		}
		r.Finished(o)
		*now = now.Add(time.Second)
	}
	for _, span := range outcomes.Spans() {
		length := map[string]time.Duration{"10m": 10 * time.Minute, "1h": time.Hour, "24h": 24 * time.Hour}[span.Name]
		for of, share := range map[outcomes.Series]int{{}: 4, {Model: "m"}: 2, {Model: "m", Group: "g"}: 1, {Model: "other"}: 1} {
			samples, known := r.Samples(of, span)
			var sum outcomes.Sample
			for i, s := range samples {
				sum.Requests, sum.PromptTokens, sum.Saved, sum.Rated = sum.Requests+s.Requests, sum.PromptTokens+s.PromptTokens, sum.Saved+s.Saved, sum.Rated+s.Rated
				if i > 0 && s.TimeMS <= samples[i-1].TimeMS || math.Abs(s.TTFT-100) > 1e-6 || math.Abs(s.TTFTP90-100) > 2.5 {
					t.Fatalf("%s: %+v", span.Name, s)
				}
			}
			steps := int(length / span.Step)
			want := int(length.Seconds()) * share / 4
			// The current step has not ended; with a request every other second some short steps have none.
			if !known || len(samples) > steps || math.Abs(float64(sum.Requests-want)) > float64(share*int(span.Step/time.Second)) {
				t.Errorf("%s of %+v: %d samples with %d requests, want %d", span.Name, of, len(samples), sum.Requests, want)
			}
			if sum.PromptTokens != 1000*sum.Requests || sum.Rated != sum.Requests || math.Abs(sum.Saved-500*float64(sum.Requests)) > 1 {
				t.Errorf("%s of %+v: %+v", span.Name, of, sum)
			}
		}
	}
	if got := r.Series(); !slices.Equal(got, []outcomes.Series{{Model: "m"}, {Model: "m", Group: "g"}, {Model: "other"}}) {
		t.Errorf("series %v", got)
	}
	if _, known := r.Samples(outcomes.Series{Model: "none"}, outcomes.Spans()[0]); known {
		t.Error("an unknown model has a history")
	}
	*now = now.Add(24*time.Hour + 5*time.Minute)
	if s, _ := r.Samples(outcomes.Series{}, outcomes.Spans()[2]); len(s) != 0 {
		t.Errorf("%d samples of yesterday", len(s))
	}
}

// Any number of models with requests all day take less than 4 MB; in the long form of the test a million.
func TestHistoryIsBounded(t *testing.T) {
	r, now := newRecorder(t)
	used := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	requests := 200_000
	if fixtures.Long() {
		requests = 2_000_000
	}
	before := used()
	for i := range requests {
		o := outcome(*now, time.Duration(i%1000)*time.Millisecond)
		if o.Model = fmt.Sprint("model-", i/2%60); i > 1000 && i%2 == 0 {
			o.Model = fmt.Sprint("model-", i)
		}
		o.Holdout, o.Conversation = router.SideRouted, uint64(i)
		r.Finished(o)
		*now = now.Add(24 * time.Hour / time.Duration(requests))
	}
	took := used() - before
	t.Logf("%.2f MB for %d series and %d models", float64(took)/1e6, len(r.Series()), requests/2)
	if took > 4e6 {
		t.Errorf("the history takes %d bytes", took)
	}
	if n := len(r.Holdout(.1).Models); n > 64 {
		t.Errorf("%d models are compared", n)
	}
	for range 25 { // series without requests make room
		*now = now.Add(time.Hour)
	}
	o := outcome(*now, time.Second)
	o.Model = "late"
	if r.Finished(o); !slices.Contains(r.Series(), outcomes.Series{Model: "late"}) {
		t.Error("a new model gets no history after a day")
	}
	runtime.KeepAlive(r)
}

// The estimate is a share of the prefill at a random candidate, and a time only where the worker's rate is known.
func TestBenefits(t *testing.T) {
	r, now := newRecorder(t)
	o := outcome(*now, time.Second) // 1000 tokens, 800 cached, 300 on average
	r.Finished(o)
	if b := r.Benefits(); len(b) != 1 || b[0].SavedTokens == nil || *b[0].SavedTokens != 500 || math.Abs(*b[0].SavedShare-5./7) > 1e-9 || b[0].Why != "" || b[0].SavedTime != 0 || b[0].Rated != 0 {
		t.Errorf("without a rate: %+v", b)
	}
	o.MarginalRate = 2000
	r.Finished(o)
	o.Holdout, o.Reason = router.SideRoundRobin, router.ReasonHoldout
	r.Finished(o)
	split := outcome(*now, time.Second)
	split.Model = "split"
	split.Prefill = &router.Decision{CachedTokens: 0, MeanCachedTokens: 100, MarginalRate: 1000}
	r.Finished(split)
	b := r.Benefits()
	if len(b) != 2 || b[0].Model != "m" || b[0].Requests != 2 || b[0].Rated != 1 || b[0].SavedTime != 250 || b[1].SavedTime != -100 {
		t.Errorf("%+v", b)
	}
	text, err := json.Marshal(b[0])
	if want := `{"model":"m","group":"","requests":2,"prompt_tokens":2000,"cached_tokens":1600,"mean_cached_tokens":600,"saved_tokens":1000,"saved_share":0.7142857142857143,"rated_requests":1,"saved_ms":250}`; err != nil || string(text) != want {
		t.Errorf("%v: %s", err, text)
	}
}

// Without a look into the caches there is no estimate, rather than one of 0.
func TestNoEstimateWithoutCaches(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*router.Outcome)
		want   string // "" = an estimate
	}{
		"nothing is cached":        {func(o *router.Outcome) { o.CachedTokens, o.MeanCachedTokens = 0, 0 }, ""},
		"round robin":              {func(o *router.Outcome) { o.Mode, o.PromptTokens, o.CachedTokens = router.RoundRobin, 0, 0 }, "router mode round-robin does not look for cached prompts"},
		"an unread prompt":         {func(o *router.Outcome) { o.Mode, o.PromptTokens, o.CachedTokens = router.KV, 0, 0 }, "kvroute could read none of the prompts"},
		"costs without any credit": {func(o *router.Outcome) { o.Settings, o.CachedTokens = &scorer.Settings{Policy: scorer.Dynamo}, 0 }, "its costs do not count cached prompts"},
	} {
		r, now := newRecorder(t)
		o := outcome(*now, time.Second)
		c.change(&o)
		r.Finished(o)
		b := r.Benefits()[0]
		if has := b.SavedShare != nil && b.SavedTokens != nil; has != (c.want == "") || !strings.Contains(b.Why, c.want) || b.Requests != 1 {
			t.Errorf("%s: %+v", name, b)
		}
		text, err := json.Marshal(b)
		if err != nil || strings.Contains(string(text), "saved_share") != (c.want == "") {
			t.Errorf("%s: %v, %s", name, err, text)
		}
	}
}

// The comparison says what is missing until both sides have enough requests of enough conversations.
func TestHoldoutNeedsConversations(t *testing.T) {
	r, now := newRecorder(t)
	add := func(side router.Side, n, conversations int, ms float64) {
		for i := range n {
			o := outcome(*now, time.Duration(ms*float64(time.Millisecond)))
			o.Holdout, o.Conversation = side, uint64(1+i%conversations)*7919
			r.Finished(o)
		}
	}
	add(router.SideRouted, 100, 100, 100)
	add(router.SideRoundRobin, 29, 29, 200)
	c := r.Holdout(.1).Models[0]
	if c.Difference != nil || c.Why != "each side needs the first tokens of 30 requests" || c.Routed.Requests != 100 || c.RoundRobin.Mean != 200 {
		t.Errorf("%+v", c)
	}
	add(router.SideRoundRobin, 1, 1, 200)
	c = r.Holdout(.1).Models[0]
	if c.Difference == nil || math.Abs(*c.Difference-100) > 1e-6 || *c.Low > *c.Difference || *c.High < *c.Difference || c.Why != "" {
		t.Errorf("%+v", c)
	}
	sum := [2]int{}
	for i, b := range c.Buckets {
		sum[0], sum[1] = sum[0]+b.Routed, sum[1]+b.RoundRobin
		if i > 0 && b.From != c.Buckets[i-1].To {
			t.Errorf("bucket %d begins at %v", i, b.From)
		}
	}
	if sum != [2]int{100, 30} || c.Buckets[0].Routed != 100 || c.Buckets[len(c.Buckets)-1].RoundRobin != 30 {
		t.Errorf("buckets %+v", c.Buckets)
	}
	one, now := newRecorder(t)
	for range 100 { // one conversation on each side says nothing
		for _, side := range []router.Side{router.SideRouted, router.SideRoundRobin} {
			o := outcome(*now, time.Second)
			o.Holdout, o.Conversation = side, 7
			one.Finished(o)
		}
	}
	if c := one.Holdout(.1).Models[0]; c.Difference != nil || c.Why == "" {
		t.Errorf("one conversation: %+v", c)
	}
}

// The charts have the load of each known worker, and the times to first tokens where there were some.
func TestCharts(t *testing.T) {
	r, now := newRecorder(t)
	state := func(id uint64, active int) router.WorkerState {
		return router.WorkerState{Worker: router.Worker{ID: id}, Model: "m", ActiveRequests: active, ActiveBlocks: 25, TotalKVBlocks: 100 * int(id%2)}
	}
	for i := range 40 {
		o := outcome(*now, 100*time.Millisecond)
		o.Worker = router.Worker{ID: 1}
		if i < 39 {
			r.Finished(o)
		}
		if times := r.ObserveWorkers([]router.WorkerState{state(1, i), state(2, 0)}); i > 0 && (times[0] != 100 || times[1] != 0) {
			t.Errorf("times %v", times)
		}
		*now = now.Add(20 * time.Second)
	}
	c := r.Charts()
	one, two := c.Workers["1/0/m"], c.Workers["2/0/m"]
	if c.StepMS != 20_000 || c.EndMS != now.Add(-20*time.Second).UnixMilli() || len(one.TTFT) != 30 || one.Active[29] != 39 || one.KVUse[0] != .25 || one.TTFT[28] != 100 || one.TTFT[29] == one.TTFT[29] {
		t.Errorf("%+v", c)
	}
	text, err := json.Marshal(outcomes.Chart{TTFT: one.TTFT[28:], Active: one.Active[28:], KVUse: two.KVUse[29:]})
	if err != nil || string(text) != `{"ttft_ms":[100,null],"active_requests":[38,39],"kv_use":[null]}` {
		t.Errorf("%v: %s", err, text)
	}
	r.ObserveWorkers(nil)
	*now = now.Add(20 * time.Second)
	if r.ObserveWorkers(nil); len(r.Charts().Workers) != 0 {
		t.Error("a worker that is gone has a chart")
	}
}

func BenchmarkFinished(b *testing.B) {
	r, now := newRecorder(b)
	o := outcome(*now, 100*time.Millisecond)
	o.MarginalRate = 1000
	b.ReportAllocs()
	for b.Loop() {
		*now = now.Add(100 * time.Microsecond)
		r.Finished(o)
	}
}
