// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/router"
)

// The load that an engine reports counts for the worker that served, whichever worker was chosen
// first, and of nobody where no worker that we chose has answered.
func TestLoadReportsAreOfWhoServed(t *testing.T) {
	const report = "TEXT named_metrics.kv_cache_usage_perc=0.5"
	first, other := fmt.Sprint(chosen.Worker, " endpoint-load-metrics ", report), fmt.Sprint(second.Worker, " endpoint-load-metrics ", report)
	for name, c := range map[string]struct {
		upstream, details string
		header            []string
		want              []string
	}{
		"the first choice":              {chosen.Address.String(), "via_upstream", []string{"endpoint-load-metrics", report}, []string{first}},
		"the second choice":             {second.Address.String(), "via_upstream", []string{"endpoint-load-metrics", report}, []string{other}},
		"Envoy does not say":            {"", "", []string{"endpoint-load-metrics", report}, []string{first}},
		"another one of the pool":       {"10.0.0.77:8000", "via_upstream", []string{"endpoint-load-metrics", report}, nil},
		"Envoy's own reply":             {chosen.Address.String(), "upstream_reset_before_response_started{x}", []string{"endpoint-load-metrics", report}, nil},
		"a reply of another filter":     {"", "direct_response", []string{"endpoint-load-metrics", report}, nil},
		"several headers":               {chosen.Address.String(), "via_upstream", []string{"endpoint-load-metrics-bin", "AA==", "endpoint-load-metrics-json", "{}"}, []string{fmt.Sprint(chosen.Worker, " endpoint-load-metrics-bin AA=="), fmt.Sprint(chosen.Worker, " endpoint-load-metrics-json {}")}},
		"nothing":                       {chosen.Address.String(), "via_upstream", nil, nil},
		"a header of almost that name":  {chosen.Address.String(), "via_upstream", []string{"x-endpoint-load-metrics", report}, nil},
		"its first letters are no name": {chosen.Address.String(), "via_upstream", []string{"endpoint-load", report}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var told []string
			h := newHarness(t, extproc.Config{LoadReport: func(w router.Worker, header, value string) {
				told = append(told, fmt.Sprint(w, " ", header, " ", value))
			}})
			x := h.Do(chat(hello))
			x.Upstream, x.Details = c.upstream, c.details
			x.Respond(200, c.header...)
			x.End()
			slices.Sort(told)
			if !slices.Equal(told, c.want) {
				t.Errorf("told %q, want %q", told, c.want)
			}
		})
	}
	t.Run("a request of others", func(t *testing.T) {
		h := newHarness(t, extproc.Config{LoadReport: func(w router.Worker, _, _ string) { t.Errorf("told of %v", w) }})
		r := chat("{}")
		r.Path = "/metrics"
		x := h.Do(r)
		x.Respond(200, "endpoint-load-metrics", report)
		x.End()
	})
}
