// SPDX-License-Identifier: Apache-2.0

package outcomes_test

import (
	"math"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/outcomes"
	"github.com/kvroute/kvroute/router"
)

// outcome is that of a request that took two seconds, with its first token after the given time.
func outcome(at time.Time, first time.Duration) router.Outcome {
	o := router.Outcome{Arrival: router.Arrival{Began: at.Add(-2 * time.Second)}, Status: 200}
	o.Model, o.Labels.Operation = "m", "chat"
	o.PromptTokens, o.CachedTokens, o.MeanCachedTokens = 1000, 800, 300
	o.FirstToken, o.FirstTokenBy, o.Freed = o.Began.Add(first), router.SignObserver, at
	return o
}

func TestHistory(t *testing.T) {
	now := time.UnixMilli(1_000_000_000)
	r, err := outcomes.New(nil, func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	for i := range 10 {
		r.Finished(outcome(now, time.Duration(i+1)*100*time.Millisecond))
	}
	failed := outcome(now, 0)
	failed.Abandoned, failed.Status, failed.FirstToken = true, 0, time.Time{}
	r.Finished(failed)
	if h := r.History(); len(h) != 0 {
		t.Errorf("the current sample is shown: %+v", h)
	}
	now = now.Add(2 * time.Second)
	sums := outcomes.Totals{Requests: 11, Failed: 1, PromptTokens: 11_000, CachedTokens: 8800, MeanCachedTokens: 3300}
	want := []outcomes.Sample{{TimeMS: now.UnixMilli(), Totals: sums, TTFT: 550, TTFTP90: 900}}
	near := cmp.Comparer(func(a, b float64) bool { return math.Abs(a-b) <= .025*max(a, b) })
	if diff := cmp.Diff(want, r.History(), near); diff != "" {
		t.Errorf("history (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(sums, r.Totals()); diff != "" {
		t.Errorf("totals (-want +got):\n%s", diff)
	}
	for range 400 { // longer than the history
		now = now.Add(2 * time.Second)
		r.Finished(outcome(now, time.Second))
	}
	h := r.History()
	if len(h) > 300 || len(h) < 299 || h[0].TimeMS >= h[1].TimeMS || h[0].TTFT != 1000 {
		t.Errorf("%d samples, the first %+v", len(h), h[0])
	}
	now = now.Add(time.Hour)
	if h := r.History(); len(h) != 0 {
		t.Errorf("%d samples of an hour ago", len(h))
	}
}

// A prefill leg's worker computes the prompt, so its cache counts.
func TestSplitRequests(t *testing.T) {
	r, err := outcomes.New(nil, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	o := outcome(time.Now(), time.Second)
	o.Prefill = &router.Decision{CachedTokens: 500, MeanCachedTokens: 100}
	r.Finished(o)
	if got := r.Totals(); got.CachedTokens != 500 || got.MeanCachedTokens != 100 || got.PromptTokens != 1000 {
		t.Errorf("totals %+v", got)
	}
}

func TestHistograms(t *testing.T) {
	m, err := telemetry.NewMetrics()
	if err != nil {
		t.Fatal(err)
	}
	now := time.UnixMilli(1_000_000_000)
	r, err := outcomes.New(m.Meter("outcomes"), func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	r.Finished(outcome(now, 500*time.Millisecond))
	inferred := outcome(now, time.Millisecond)
	inferred.FirstTokenBy = router.SignRate
	r.Finished(inferred)
	sampled := outcome(now, time.Second)
	sampled.Represents = 3
	r.Finished(sampled)
	failed := outcome(now, 0)
	failed.FirstToken, failed.Status = time.Time{}, 503
	r.Finished(failed)
	o := outcome(now, time.Second)
	o.Usage = &router.Usage{PromptTokens: 1000, OutputTokens: 11}
	r.Used(o.Decision)
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
	for _, want := range []string{
		`gen_ai_server_time_to_first_token_seconds_sum{gen_ai_operation_name="chat",gen_ai_request_model="m"} 3.5`,
		`gen_ai_server_time_to_first_token_seconds_count{gen_ai_operation_name="chat",gen_ai_request_model="m"} 4`,
		`gen_ai_server_request_duration_seconds_count{gen_ai_operation_name="chat",gen_ai_request_model="m"} 3`,
		`gen_ai_server_request_duration_seconds_count{error_type="503",gen_ai_operation_name="chat",gen_ai_request_model="m"} 1`,
		`gen_ai_server_time_per_output_token_seconds_sum{gen_ai_operation_name="chat",gen_ai_request_model="m"} 0.1`,
		`gen_ai_client_token_usage_sum{gen_ai_operation_name="chat",gen_ai_request_model="m",gen_ai_token_type="input"} 4000`,
		`gen_ai_client_token_usage_sum{gen_ai_operation_name="chat",gen_ai_request_model="m",gen_ai_token_type="output"} 11`,
	} {
		if !strings.Contains(w.Body.String(), want+"\n") {
			t.Errorf("no %q in\n%s", want, w.Body)
		}
	}
	now = now.Add(time.Minute)
	if h := r.History(); len(h) != 1 || h[0].TTFT != 875 {
		t.Errorf("history %+v, want a mean time to the first token of 875 ms", h)
	}
}
