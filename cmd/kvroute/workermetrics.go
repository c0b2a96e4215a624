// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/router"
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
		Name: "kvroute.worker.state", Help: "1 for each worker, by its health: left for an hour after a worker fell silent and was removed.",
		Labels: append(workerLabels[:3:3], "health"),
	},
	{Name: "kvroute.worker.faults", Help: "1 for each fault of a worker, by name.", Labels: append(workerLabels[:3:3], "fault")},
}

// Places in workerMetrics, behind the counts.
const (
	speedPlace = iota + 6
	statePlace
	faultPlace
)

//nolint:gochecknoglobals // a constant
var workerLabels = []string{"worker", "rank", "model"}

// readWorkers reads the metrics of the first --worker-metrics workers, and then of workers that left.
// A name that another worker of the model has, too, is replaced by the worker's id.
func (s *server) readWorkers(observe func(place int, value float64, labels ...string)) {
	workers := s.router.Workers()
	seen := map[[3]string]bool{}
	labelsOf := func(w router.Worker, name, model string) []string {
		id := strconv.FormatUint(w.ID, 10)
		labels := []string{cmp.Or(name, id), strconv.FormatUint(uint64(w.DPRank), 10), model}
		for i := range labels {
			labels[i] = strings.ToValidUTF8(labels[i], "?")
		}
		if seen[[3]string(labels)] {
			labels[0] = id
		}
		seen[[3]string(labels)] = true
		return labels
	}
	workers = workers[:min(len(workers), s.conf.WorkerMetrics)]
	type labelled struct {
		w      *router.WorkerState
		labels []string
	}
	all := make([]labelled, len(workers))
	for i := range workers {
		w := &workers[i]
		all[i] = labelled{w, labelsOf(w.Worker, w.Name, w.Model)}
	}
	// The exporter sorts the values of each metric by model, rank and worker. In this order it compares each one once.
	slices.SortFunc(all, func(a, b labelled) int {
		return cmp.Or(strings.Compare(a.labels[2], b.labels[2]), strings.Compare(a.labels[1], b.labels[1]),
			strings.Compare(a.labels[0], b.labels[0]))
	})
	for _, one := range all {
		w, labels := one.w, one.labels
		for i, n := range []int{int(w.Routed), int(w.Failures), w.ActiveRequests, w.PendTokens, w.ActiveBlocks, w.CachedBlocks + w.GuessedBlocks} {
			observe(i, float64(n), labels...)
		}
		observe(speedPlace, w.Speed, labels...)
		observe(statePlace, 1, append(labels, w.Health)...)
		for i, f := range w.Faults { // in the order of their names
			if i == 0 || f.What != w.Faults[i-1].What {
				observe(faultPlace, 1, append(labels, f.What)...)
			}
		}
	}
	room := s.conf.WorkerMetrics - len(workers)
	for _, l := range s.registry.Left() {
		if l.IsFault() && room > 0 {
			room--
			labels := labelsOf(router.Worker{ID: l.ID, DPRank: l.Rank}, l.Name, l.Models[0])
			observe(statePlace, 1, append(labels, string(l.State))...)
		}
	}
}
