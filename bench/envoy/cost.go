// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/process"
)

// watchCost is what a kvroute without requests uses for 500 workers: probes of health, comparison of their
// configuration, and metrics of theirs and its own.
func watchCost(ctx context.Context, o options, dir string) []bench.Figure {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	const workers = 500
	var metrics strings.Builder
	for i := range 200 { // a vLLM has about 20 KB
		fmt.Fprintf(&metrics, "vllm:request_time_seconds_bucket{engine=\"0\",le=\"%d\",model_name=\"sim\"} %d.0\n", i, i)
	}
	metrics.WriteString("vllm:num_requests_running{engine=\"0\",model_name=\"sim\"} 3.0\nvllm:num_requests_waiting{engine=\"0\",model_name=\"sim\"} 0.0\nvllm:kv_cache_usage_perc{engine=\"0\",model_name=\"sim\"} 0.25\n")
	models := `{"object":"list","data":[{"id":"sim","object":"model","root":"sim","max_model_len":8192}]}`
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/health":
		case "/metrics":
			_, _ = io.WriteString(w, metrics.String())
		case "/v1/models":
			_, _ = io.WriteString(w, models)
		default:
			http.NotFound(w, r)
		}
	})}
	l := bench.Must(net.Listen("tcp4", "0.0.0.0:0")) // all addresses of the loopback interface
	go func() { _ = server.Serve(l) }()
	defer func() { _ = server.Close() }()
	var text strings.Builder
	fmt.Fprintf(&text, "version: 1\nmodels: [{name: sim, tokenizer: %q, block-size: 16}]\nworkers:\n", bench.Must(filepath.Abs(tokenizerDir)))
	for i := range workers {
		fmt.Fprintf(&text, "- {name: w%d, address: \"127.1.%d.%d:%d\", models: [sim], engine: vllm, block_size: 16, health: {}, metrics: {}, events: {transport: none}}\n", i, i/250, i%250+1, l.Addr().(*net.TCPAddr).Port)
	}
	router := startServer(ctx, o, dir, "cost", text.String())
	defer router.Stop()
	url := "http://" + router.At.HTTP
	scrape := func(n int) { // one in 15 s, as in examples/observability/prometheus.yaml
		for range n {
			bench.Must(process.Get(ctx, url+"/metrics"))
			wait(ctx, 15*time.Second)
		}
	}
	scrape(1) // the start is not counted
	before := bench.Must(bench.ProcessTime(router.Pid()))
	began := time.Now()
	scrape(2)
	used := (bench.Must(bench.ProcessTime(router.Pid())) - before).Seconds() / time.Since(began).Seconds()
	return []bench.Figure{
		bench.NewFigure("500 workers with probes and metrics: CPU", "% of a core", bench.AtMost(5), 100*used),
		bench.NewFigure("500 workers with probes and metrics: memory", "MB", bench.AtMost(100), memory(router.Pid())),
	}
}

// memory returns the resident memory of a process in MB.
func memory(pid int) float64 {
	return statusValue(bench.Must(os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))), "VmRSS") / 1e3
}

// statusValue returns a number in a file /proc/PID/status, or 0.
func statusValue(text []byte, name string) float64 {
	_, after, _ := bytes.Cut(text, []byte("\n"+name+":"))
	if f := bytes.Fields(after); len(f) > 0 {
		return bench.Must(strconv.ParseFloat(string(f[0]), 64))
	}
	return 0
}
