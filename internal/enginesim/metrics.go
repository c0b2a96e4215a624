// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"net/http"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Stats is the load of an engine.
type Stats struct {
	Running, Waiting int // requests
	CachedBlocks     int // blocks in the cache, in use or not
	UsedBlocks       int // blocks in use or reserved
	PromptTokens     int // prompt tokens looked up in the cache so far
	CachedTokens     int // of these, the tokens that were found
	ReceivedTokens   int // prompt tokens that prefill engines sent so far
}

// metrics are vLLM's, by its names.
type metrics struct {
	http.Handler

	firstToken                prometheus.Observer // seconds from the request to the first token
	prompts, outputs, success prometheus.Counter  // tokens and requests, when a request ends
}

func newMetrics(model string, blockSize, numBlocks int, stats func() Stats) *metrics {
	registry := prometheus.NewRegistry()
	labels := prometheus.Labels{"model_name": model, "engine": "0"}
	add := func(c prometheus.Collector) { registry.MustRegister(c) }
	for name, read := range map[string]func(Stats) float64{
		"vllm:num_requests_running": func(s Stats) float64 { return float64(s.Running) },
		"vllm:num_requests_waiting": func(s Stats) float64 { return float64(s.Waiting) },
		"vllm:kv_cache_usage_perc":  func(s Stats) float64 { return float64(s.UsedBlocks) / float64(numBlocks) },
		"sim:cached_blocks":         func(s Stats) float64 { return float64(s.CachedBlocks) }, // not one of vLLM's
	} {
		add(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, ConstLabels: labels}, func() float64 { return read(stats()) }))
	}
	for name, read := range map[string]func(Stats) int{
		"vllm:prefix_cache_queries_total": func(s Stats) int { return s.PromptTokens },
		"vllm:prefix_cache_hits_total":    func(s Stats) int { return s.CachedTokens },
	} {
		add(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, ConstLabels: labels}, func() float64 { return float64(read(stats())) }))
	}
	received := prometheus.Labels{"model_name": model, "engine": "0", "source": "external_kv_transfer"}
	add(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "vllm:prompt_tokens_by_source_total", ConstLabels: received}, func() float64 { return float64(stats().ReceivedTokens) }))
	cache := prometheus.Labels{"engine": "0", "block_size": strconv.Itoa(blockSize), "num_gpu_blocks": strconv.Itoa(numBlocks), "enable_prefix_caching": "True"}
	add(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "vllm:cache_config_info", ConstLabels: cache}, func() float64 { return 1 }))
	counter := func(name string, labels prometheus.Labels) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, ConstLabels: labels})
		add(c)
		return c
	}
	firstToken := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "vllm:time_to_first_token_seconds", ConstLabels: labels,
		Buckets: []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80},
	})
	add(firstToken)
	return &metrics{
		Handler: promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), firstToken: firstToken,
		prompts: counter("vllm:prompt_tokens_total", labels), outputs: counter("vllm:generation_tokens_total", labels),
		success: counter("vllm:request_success_total", prometheus.Labels{"model_name": model, "engine": "0", "finished_reason": "length"}),
	}
}
