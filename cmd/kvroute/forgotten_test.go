// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/outcomes"
	"github.com/kvroute/kvroute/router"
)

// An hour after their workers left, models have no series any more: neither gauges nor the counters and histograms
// of their requests. Other models keep their counts. A client that invents a model makes no series.
func TestForgottenModelsHaveNoMetrics(t *testing.T) {
	now := time.Now()
	clock := func() time.Time { return now }
	m, err := telemetry.NewMetrics()
	if err != nil {
		t.Fatal(err)
	}
	s := server{metrics: m, log: slog.New(slog.DiscardHandler)}
	if s.outcomes, err = outcomes.New(m.Meter("outcomes"), clock); err != nil {
		t.Fatal(err)
	}
	rc := router.Config{Now: clock, Meter: m.Meter("router")}
	s.setHooks(&rc.Hooks)
	if s.router, err = router.New(rc); err != nil {
		t.Fatal(err)
	}
	scrape := func() string {
		w := httptest.NewRecorder()
		m.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
		if w.Code != http.StatusOK {
			t.Fatalf("status %d: %s", w.Code, w.Body)
		}
		return w.Body.String()
	}
	models := func(text string) int { return strings.Count(text, `"passing-`) }
	comes := func(id uint64, model string) {
		t.Helper()
		if err := s.router.SetWorker(router.WorkerInfo{ID: id, Models: []string{model}, BlockSize: 16, Address: netip.MustParseAddrPort("127.0.0.1:1")}); err != nil {
			t.Fatal(err)
		}
	}
	serves := func(model string) {
		t.Helper()
		id := "request of " + model
		if _, err := s.router.BestWorker(t.Context(), router.Request{ID: id, Model: model, Tokens: make([]uint32, 64)}); err != nil {
			t.Fatal(err)
		}
		s.router.ReportUsage(id, router.Usage{PromptTokens: 64, OutputTokens: 2})
		s.router.MarkPrefillCompleted(id)
		s.router.Free(id)
	}
	comes(1, "stays")
	serves("stays")
	before := strings.Count(scrape(), "\n")
	for round := range 2 {
		for i := range 600 {
			model := fmt.Sprintf("passing-%d-%d", round, i)
			comes(2, model)
			serves(model)
		}
		s.router.RemoveWorker(2)
		s.router.Tick()
		now = now.Add(time.Hour - time.Second)
		s.router.Tick()
		if text := scrape(); models(text) < 600*100 || !strings.Contains(text, `kvroute_router_workers{health="healthy",model="passing-0-7"} 0`) && round == 0 {
			t.Errorf("round %d: %d series before the hour has passed, or no gauge of one", round, models(text))
		}
		serves("stays")
		now = now.Add(time.Second)
		s.router.Tick()
		text := scrape()
		if n := models(text); n > 0 {
			t.Errorf("round %d: %d series of models that are forgotten", round, n)
		}
		if want := fmt.Sprintf("kvroute_router_prompt_tokens_total{model=\"stays\"} %d\n", 64*(round+2)); !strings.Contains(text, want) {
			t.Errorf("round %d: no %s", round, want)
		}
		if n := strings.Count(text, "\n"); n > before+10 {
			t.Errorf("round %d: %d lines, %d before", round, n, before)
		}
	}
	if _, err := s.router.BestWorker(t.Context(), router.Request{ID: "x", Model: "passing-invented"}); !errors.Is(err, router.ErrUnknownModel) {
		t.Errorf("a model that does not exist: %v", err)
	}
	if n := models(scrape()); n > 0 {
		t.Errorf("%d series of a model that a client invented", n)
	}
	// A model that returns begins at 0.
	comes(2, "passing-0-7")
	serves("passing-0-7")
	if text := scrape(); !strings.Contains(text, `gen_ai_server_request_duration_seconds_count{gen_ai_request_model="passing-0-7"} 1`) {
		t.Errorf("the model that returned:\n%s", text)
	}
}
