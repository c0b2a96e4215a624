// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/internal/telemetry"
)

// workerMetrics are the metrics with a value for each worker, in the order of readWorkers.
//
//nolint:gochecknoglobals // a table
var workerMetrics = []telemetry.Reading{
	{Name: "kvroute.worker.requests", Help: "Requests sent to a worker.", Total: true, Labels: workerLabels},
	{Name: "kvroute.worker.failures", Help: "Requests that a worker refused, failed, or answered with a status of 500 or above.", Total: true, Labels: workerLabels},
	{Name: "kvroute.worker.active_requests", Help: "Requests in flight on a worker.", Labels: workerLabels},
	{Name: "kvroute.worker.pending_tokens", Help: "Prompt tokens that a worker has to compute.", Labels: workerLabels},
	{Name: "kvroute.worker.active_blocks", Help: "Blocks of the requests in flight on a worker.", Labels: workerLabels},
	{
		Name: "kvroute.worker.cached_blocks", Help: "Blocks that a worker has cached, by its events or by prediction.",
		Labels: workerLabels,
	},
	{
		Name: "kvroute.worker.speed",
		Help: "How fast a worker computes prompts, compared with the median worker of its pool.", Labels: workerLabels,
	},
	{
		Name: "kvroute.worker.state", Help: "1 for each worker, by its health.", Labels: append(workerLabels[:3:3], "health"),
	},
}

//nolint:gochecknoglobals // a constant
var workerLabels = []string{"worker", "rank", "model"}

// readWorkers reads the metrics of --worker-metrics workers, in worker order. A name that another worker
// of the model has, too, is replaced by the worker's id.
func (s *server) readWorkers(observe func(place int, value float64, labels ...string)) {
	workers := s.router.Workers()
	seen := map[[3]string]bool{}
	for _, w := range workers[:min(len(workers), s.conf.WorkerMetrics)] {
		id := strconv.FormatUint(w.ID, 10)
		labels := []string{cmp.Or(w.Name, id), strconv.FormatUint(uint64(w.DPRank), 10), w.Model}
		for i := range labels {
			labels[i] = strings.ToValidUTF8(labels[i], "?")
		}
		if seen[[3]string(labels)] {
			labels[0] = id
		}
		seen[[3]string(labels)] = true
		for i, n := range []int{int(w.Routed), int(w.Failures), w.ActiveRequests, w.PendTokens, w.ActiveBlocks, w.CachedBlocks + w.GuessedBlocks} {
			observe(i, float64(n), labels...)
		}
		observe(len(workerMetrics)-2, w.Speed, labels...)
		observe(len(workerMetrics)-1, 1, append(labels, w.Health)...)
	}
}
