// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"bytes"
	"errors"
	"log/slog"
	"maps"
	"strings"
	"testing"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/router"
)

func TestLoadReport(t *testing.T) {
	const header, nothing = "endpoint-load-metrics", "says nothing"
	for name, c := range map[string]struct {
		header, value string
		want          float64
		err           string // "" expects ErrNoLoad
	}{
		"vLLM's JSON":    {header, `JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}}`, 0.25, ""},
		"vLLM's text":    {header, "TEXT named_metrics.kv_cache_usage_perc=0.5, named_metrics.num_requests_waiting=0.0", 0.5, ""},
		"Triton's text":  {header, "TEXT cpu_utilization=0.3, eps=1, named_metrics.kv_cache_utilization=0.125,named_metrics.max_token_capacity=9000", 0.125, ""},
		"an older name":  {header, "TEXT named_metrics.gpu_cache_usage_perc=1e0", 1, ""},
		"an idle engine": {header, `JSON {"named_metrics":{"kv_cache_usage_perc":0}}`, 0, ""},
		"camels":         {header + "-json", `{"cpuUtilization":0.1,"namedMetrics":{"kv_cache_usage_perc":0.75}}`, 0.75, ""},

		"nothing of the cache":       {header, `JSON {"named_metrics":{"num_requests_waiting":3}}`, 0, nothing},
		"nothing named":              {header, `JSON {"cpu_utilization":0.3}`, 0, nothing},
		"text without the cache":     {header, "TEXT cpu_utilization=0.3", 0, nothing},
		"the cache as utilization":   {header, "TEXT utilization.kv_cache_usage_perc=0.3", 0, nothing},
		"nothing":                    {header, "", 0, `the form is ""`},
		"no form":                    {header, `{"named_metrics":{}}`, 0, "the form is"},
		"ORCA's message":             {header + "-bin", "", 0, "is not known"},
		"a form of others":           {header, "CBOR 123", 0, `the form is "CBOR"`},
		"broken JSON":                {header, `JSON {"named_metrics":`, 0, "unexpected end"},
		"JSON of another kind":       {header, `JSON {"named_metrics":{"kv_cache_usage_perc":"a lot"}}`, 0, "cannot unmarshal"},
		"JSON twice":                 {header + "-json", `{} {}`, 0, "after top-level value"},
		"no pair":                    {header, "TEXT kv_cache_usage_perc", 0, "no name=value"},
		"no number":                  {header, "TEXT named_metrics.kv_cache_usage_perc=much", 0, `"much", want a number`},
		"a percentage":               {header, "TEXT named_metrics.kv_cache_usage_perc=42", 0, "kv_cache_usage_perc is 42, want 0 to 1"},
		"less than nothing":          {header, `JSON {"named_metrics":{"kv_cache_usage_perc":-0.1}}`, 0, "is -0.1"},
		"not a number":               {header, "TEXT named_metrics.kv_cache_usage_perc=NaN", 0, "is NaN"},
		"too long":                   {header, "TEXT " + strings.Repeat("a=1,", 1024) + "a=1", 0, "want 4096 at most"},
		"a header that none defines": {header + "-xml", "<a/>", 0, "is not known"},
	} {
		got, err := fleet.LoadReport(c.header, c.value)
		switch {
		case c.err == nothing:
			if !errors.Is(err, fleet.ErrNoLoad) {
				t.Errorf("%s: %v, %v, want that nothing is said", name, got, err)
			}
		case c.err != "":
			if err == nil || !strings.Contains(err.Error(), c.err) || !strings.Contains(err.Error(), c.header) || len(err.Error()) > 200 {
				t.Errorf("%s: %v, %v, want an error with %q and the header", name, got, err, c.err)
			}
		case err != nil || got != c.want:
			t.Errorf("%s: %v, %v, want %v", name, got, err, c.want)
		}
	}
}

func FuzzLoadReport(f *testing.F) {
	f.Add("", `JSON {"named_metrics":{"kv_cache_usage_perc":0.5}}`)
	f.Add("", "TEXT named_metrics.kv_cache_usage_perc=0.5")
	f.Fuzz(func(t *testing.T, kind, value string) {
		if usage, err := fleet.LoadReport(fleet.LoadHeader+kind, value); !(usage >= 0 && usage <= 1) || err != nil && usage != 0 {
			t.Errorf("%v, %v", usage, err)
		}
	})
}

func TestReportsGoToTheWorker(t *testing.T) {
	var told []float64
	reader := sdkmetric.NewManualReader()
	var log bytes.Buffer
	r, err := fleet.NewReports(func(w router.Worker, usage float64) bool {
		told = append(told, usage)
		return w.ID == 7
	}, sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)).Meter("test"), slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range []string{"TEXT named_metrics.kv_cache_usage_perc=0.5", "nonsense", "nonsense", "TEXT eps=1"} {
		r.Take(router.Worker{ID: 7}, fleet.LoadHeader, v)
	}
	r.Take(router.Worker{ID: 8}, fleet.LoadHeader, "TEXT named_metrics.kv_cache_usage_perc=0.25")
	if len(told) != 2 || told[0] != 0.5 || told[1] != 0.25 {
		t.Errorf("reported %v, want 0.5 and 0.25", told)
	}
	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	counted := map[string]int64{}
	for _, p := range all.ScopeMetrics[0].Metrics[0].Data.(metricdata.Sum[int64]).DataPoints { //nolint:forcetypeassert // the only instrument
		outcome, _ := p.Attributes.Value("outcome")
		counted[outcome.AsString()] = p.Value
	}
	if want := (map[string]int64{"taken": 1, "bad": 2, "nothing said": 1, "unused": 1}); !maps.Equal(counted, want) {
		t.Errorf("counted %v, want %v", counted, want)
	}
	if n := strings.Count(log.String(), "\n"); n != 1 {
		t.Errorf("%d lines of two bad ones in the log, want 1:\n%s", n, &log)
	}
}
