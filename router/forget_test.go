// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/kvroute/kvroute/router"
)

// seriesOf counts the series of gauges and totals by their attribute model.
func seriesOf(t *testing.T, reader *sdkmetric.ManualReader) map[string]int {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	series := make(map[string]int)
	count := func(points []metricdata.DataPoint[float64]) {
		for _, p := range points {
			if model, ok := p.Attributes.Value("model"); ok {
				series[model.AsString()]++
			}
		}
	}
	for _, s := range all.ScopeMetrics {
		for _, m := range s.Metrics {
			switch data := m.Data.(type) {
			case metricdata.Gauge[float64]:
				count(data.DataPoints)
			case metricdata.Sum[float64]:
				count(data.DataPoints)
			}
		}
	}
	return series
}

// Models without workers are known for an hour, and then forgotten with their metrics. A model whose
// worker comes back in time, and one with a card, stay. The limit of the number of models is not reached.
func TestModelsAreForgotten(t *testing.T) {
	c := newClock()
	reader := sdkmetric.NewManualReader()
	forgot := 0
	r := newRouter(t, router.Config{
		Now: c.read, Cards: []router.Card{{Name: "configured"}}, Hooks: router.Hooks{Forgot: func() { forgot++ }},
		Meter: sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)).Meter("router"),
	}, 1)
	comes := func(model string) {
		info := worker(2)
		info.Models = []string{model}
		set(t, r, info)
	}
	known := func(model string) bool {
		_, err := r.BestWorker(t.Context(), router.Request{Model: model, Tokens: prompt("a")})
		if !errors.Is(err, router.ErrNoWorkers) && !errors.Is(err, router.ErrUnknownModel) {
			t.Fatalf("model %s: %v", model, err)
		}
		return errors.Is(err, router.ErrNoWorkers)
	}
	for round := range 3 {
		for i := range 600 { // more than the limit in all rounds together
			comes(fmt.Sprint("model ", round, i))
		}
		comes("configured")
		comes("again")
		r.RemoveWorker(2)
		r.Tick()
		c.pass(59 * time.Minute)
		r.Tick()
		if n := len(seriesOf(t, reader)); n < 603 || !known(fmt.Sprint("model ", round, 7)) {
			t.Fatalf("round %d: series of %d models before the hour has passed", round, n)
		}
		comes("again")
		r.RemoveWorker(2)
		r.Tick()
		c.pass(time.Minute)
		r.Tick()
		if got := seriesOf(t, reader); len(got) != 3 || got["m"] == 0 || got["again"] == 0 || got["configured"] == 0 {
			t.Fatalf("round %d: %d models have series after an hour", round, len(got))
		}
		if known(fmt.Sprint("model ", round, 7)) || !known("again") || !known("configured") {
			t.Errorf("round %d: the wrong models are forgotten", round)
		}
	}
	comes("again")
	own := func(model string) bool {
		for _, m := range r.Thresholds() {
			if m.Model == model {
				return m.Thresholds != (router.Thresholds{})
			}
		}
		t.Fatalf("no thresholds of %s", model)
		return false
	}
	for _, model := range []string{"again", "configured"} {
		if _, err := r.SetThresholds(model, func(router.Thresholds) router.Thresholds { return router.Thresholds{ActiveBlocks: new(.5)} }); err != nil {
			t.Fatal(err)
		}
	}
	r.RemoveWorker(2)
	r.Tick()
	c.pass(time.Hour)
	r.Tick()
	if forgot != 4 {
		t.Errorf("the hook was called %d times", forgot)
	}
	comes("again")
	if own("again") || !own("configured") {
		t.Error("thresholds: those of a forgotten model stay, or those of a model with a card do not")
	}
	if got, _ := decide(t, r, "abc"); got != 1 {
		t.Errorf("the model that has a worker: worker %d", got)
	}
}

// At the limit of models, one without workers makes room for another.
func TestAModelWithoutWorkersMakesRoom(t *testing.T) {
	r := newRouter(t, router.Config{}, 1)
	info := worker(2)
	for i := range 1100 {
		info.Models = []string{fmt.Sprint("model ", i)}
		set(t, r, info)
		r.RemoveWorker(2)
	}
	info.Models = []string{"last"}
	set(t, r, info)
	if d, err := r.BestWorker(t.Context(), router.Request{Model: "last", Tokens: prompt("a")}); err != nil || d.Worker.ID != 2 {
		t.Errorf("worker %v, %v", d.Worker, err)
	}
	if got, _ := decide(t, r, "abc"); got != 1 {
		t.Errorf("a model with a worker: worker %d", got)
	}
}

// Requests without a model mean the only model with workers, also while others without workers are known.
func TestTheOnlyModelWithWorkers(t *testing.T) {
	r := newRouter(t, router.Config{}, 1)
	other := worker(2)
	other.Models = []string{"other"}
	for i, step := range []struct {
		change func()
		model  string
		want   error
	}{
		{func() {}, "m", nil},
		{func() { set(t, r, other) }, "", router.ErrUnknownModel},
		{func() { r.RemoveWorker(1) }, "other", nil},
		{func() { r.RemoveWorker(2) }, "", router.ErrUnknownModel}, // each is as good as the other
		{func() { set(t, r, worker(1)) }, "m", nil},
	} {
		step.change()
		d, err := r.BestWorker(t.Context(), router.Request{Tokens: prompt("a")})
		if !errors.Is(err, step.want) || d.Model != step.model {
			t.Errorf("step %d: model %q, %v; want %q, %v", i, d.Model, err, step.model, step.want)
		}
	}
	r = newRouter(t, router.Config{}, 1)
	r.RemoveWorker(1)
	if _, err := r.BestWorker(t.Context(), router.Request{Tokens: prompt("a")}); !errors.Is(err, router.ErrNoWorkers) {
		t.Errorf("the only model has lost its workers: %v", err)
	}
}
