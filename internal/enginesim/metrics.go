// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// metrics are vLLM's, by its names.
type metrics struct {
	registry *prometheus.Registry
	ttft     prometheus.Histogram
	prompts  prometheus.Counter
	outputs  prometheus.Counter
	success  prometheus.Counter
}

func newMetrics(e *Engine) *metrics {
	labels := prometheus.Labels{"model_name": e.conf.Model, "engine": "0"}
	m := &metrics{
		registry: prometheus.NewRegistry(),
		ttft: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "vllm:time_to_first_token_seconds", Help: "Time to the first token.", ConstLabels: labels,
			Buckets: []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80},
		}),
		prompts: prometheus.NewCounter(prometheus.CounterOpts{Name: "vllm:prompt_tokens_total", Help: "Prompt tokens of finished requests.", ConstLabels: labels}),
		outputs: prometheus.NewCounter(prometheus.CounterOpts{Name: "vllm:generation_tokens_total", Help: "Tokens generated for finished requests.", ConstLabels: labels}),
		success: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "vllm:request_success_total", Help: "Requests finished.",
			ConstLabels: prometheus.Labels{"model_name": e.conf.Model, "engine": "0", "finished_reason": "length"},
		}),
	}
	gauge := func(name, help string, read func(Stats) float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels}, func() float64 { return read(e.Stats()) })
	}
	counter := func(name, help string, read func(Stats) float64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels}, func() float64 { return read(e.Stats()) })
	}
	m.registry.MustRegister(m.ttft, m.prompts, m.outputs, m.success,
		gauge("vllm:num_requests_running", "Requests running.", func(s Stats) float64 { return float64(s.Running) }),
		gauge("vllm:num_requests_waiting", "Requests waiting.", func(s Stats) float64 { return float64(s.Waiting) }),
		gauge("vllm:kv_cache_usage_perc", "Share of the blocks in use, 0 to 1.", func(s Stats) float64 { return float64(s.UsedBlocks) / float64(e.conf.NumBlocks) }),
		gauge("sim:cached_blocks", "Blocks in the cache, in use or not; not one of vLLM's.", func(s Stats) float64 { return float64(s.CachedBlocks) }),
		counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the cache.", func(s Stats) float64 { return float64(s.PromptTokens) }),
		counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the cache.", func(s Stats) float64 { return float64(s.CachedTokens) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "vllm:cache_config_info", Help: "Settings of the cache.",
			ConstLabels: prometheus.Labels{"engine": "0", "block_size": strconv.Itoa(e.conf.BlockSize), "num_gpu_blocks": strconv.Itoa(e.conf.NumBlocks), "enable_prefix_caching": "True"},
		}, func() float64 { return 1 }),
	)
	return m
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

func (m *metrics) firstToken(after time.Duration) { m.ttft.Observe(after.Seconds()) }

func (m *metrics) finished(prompt, output int) {
	m.prompts.Add(float64(prompt))
	m.outputs.Add(float64(output))
	m.success.Inc()
}
