// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/kvroute/kvroute/attention"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/outcomes"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// setWorker passes a worker to the router, and then to the reader of its events: events
// that waited for the worker need it there.
func (s *server) setWorker(info router.WorkerInfo) {
	s.names.set(info.ID, info.Name)
	if s.faults.add(info.ID) {
		s.verifier.expect(info.ID)
	}
	s.compared.SetHealth(info.ID, info.Health)
	if err := s.direct.SetWorker(info); err != nil {
		s.log.Warn("a worker is refused", "worker", info.ID, "err", err)
		return
	}
	if info.Health < router.Unhealthy {
		s.faults.set(info.ID, silenceFault, nil)
	}
	s.workerChanged(info.ID, true)
	s.log.Debug("worker", "worker", info.ID, "address", info.Place(), "health", info.Health.String())
	if s.router.WantsEvents() {
		s.events.SetWorker(info.ID, s.source(&info))
	}
}

// silentFault is the fault of workers that give no sign of life, and silenceFault its source.
const silentFault, silenceFault = "silent", "silence"

// silent keeps the fault of a worker that became unhealthy. setWorker ends it.
func (s *server) silent(info router.WorkerInfo, cause string) {
	s.faults.set(info.ID, silenceFault, []router.Fault{{
		What: silentFault, Text: fmt.Sprintf("%s%s at %s%s", attention.Silence, cause, info.Place(), attention.HowToProbe(cause)),
	}})
}

// traffic returns the work of a worker.
func (s *server) traffic(id uint64) fleet.Traffic {
	inFlight, failures := s.router.Traffic(id)
	return fleet.Traffic{InFlight: inFlight, Failures: failures}
}

// warnOfWorkers logs which workers of the configuration have no events, no tokenizer for their model, or another
// engine than the profile of their model.
func (s *server) warnOfWorkers() {
	if !s.router.WantsEvents() {
		return
	}
	const noEvents = "workers have no events in the configuration: until one arrives, kvroute estimates what they cache from the requests that it sent there"
	silent := map[string][]string{}      // workers by what to do
	noTokenizer := map[string][]string{} // workers by model
	profiles := map[[3]string][]string{} // workers by model, profile and engine
	cards := map[string][]string{}       // of workers, by model
	for i := range s.conf.Workers {
		if r := &s.conf.Workers[i]; len(r.Models) > 0 {
			cards[r.Models[0]] = append(cards[r.Models[0]], cmp.Or(r.ModelCard, r.Models[0]))
		}
	}
	for _, w := range s.router.Workers() {
		name := w.Worker.Label(w.Name)
		if w.NeverHeard {
			silent[attention.HowToPublish(&w)] = append(silent[attention.HowToPublish(&w)], name)
		}
		at := slices.IndexFunc(s.conf.Models, func(m modelConfig) bool { return m.Name == w.Model })
		if at >= 0 && slices.Contains(engine.Profiles(), w.Engine) {
			if profile := cmp.Or(s.conf.Models[at].Profile, string(chat.VLLM)); profile != w.Engine {
				of := [3]string{w.Model, profile, w.Engine}
				profiles[of] = append(profiles[of], name)
			}
		}
		if w.TokenMode == tokenizer.Bytes && w.Group == "" && at < 0 {
			noTokenizer[w.Model] = append(noTokenizer[w.Model], name)
		}
	}
	for _, model := range slices.Sorted(maps.Keys(cards)) {
		if names := slices.Compact(slices.Sorted(slices.Values(cards[model]))); len(names) > 1 {
			s.log.Warn("the workers of a model name several model_cards: kvroute uses the tokenizer of the model itself, else of the first of them that it has; name one",
				"model", model, "model_cards", listed(names))
		}
	}
	for _, advice := range slices.Sorted(maps.Keys(silent)) {
		s.log.Warn(noEvents, "workers", listed(silent[advice]), "count", len(silent[advice]), "advice", advice)
	}
	for _, model := range slices.Sorted(maps.Keys(noTokenizer)) {
		names := noTokenizer[model]
		s.log.Warn("the model has no tokenizer, so kvroute finds cached prompts only by their text: add the model to models with the folder of its tokenizer",
			"model", model, "workers", listed(names), "count", len(names))
	}
	for of, names := range profiles {
		s.log.Warn("the model's profile is another engine than that of its workers, which make prompts in another way: set profile to their engine",
			"model", of[0], "profile", of[1], "engine", of[2], "workers", listed(names), "count", len(names))
	}
}

// source returns where the events of a worker come from.
func (s *server) source(info *router.WorkerInfo) events.Source {
	src := events.Source{
		DPStart: info.DPStart, DPSize: max(1, info.DPSize),
		StartedMS: info.StartedMS, Home: fmt.Sprint(info.Models[0], "/", info.BlockSize),
		Publisher: info.Events.PublisherID,
	}
	if src.Feed, src.Queries = events.ChooseFeed(info.Events.Transport, info.Events.LocalIndexer, s.durable != nil); info.BlockSize == 0 {
		src.Feed, src.Queries = events.FeedNone, false
	}
	return src
}

func (s *server) removeWorker(id uint64) {
	s.log.Info("a worker is gone", "worker", id)
	defer s.names.set(id, "")
	s.prober.Remove(id)
	s.compared.Remove(id)
	s.faults.forget(id)
	s.verifier.forget(id)
	s.loads.Forget(id)
	s.requests.Forget(id)
	s.events.Forget(id)
	s.direct.RemoveWorker(id)
	s.workerChanged(id, false)
}

// follow uses a worker's record to read its events and to probe it.
func (s *server) follow(r fleet.Record, info router.WorkerInfo) {
	s.compared.Set(r, info)
	s.direct.Follow(r, info)
	s.prober.Set(r, info)
}

// connected handles a new connection to a worker's events: its engine may have restarted.
func (s *server) connected(id uint64) {
	s.prober.Compare(id)
	s.verifier.expect(id)
}

// probed passes on the result of a health probe: to the record of the worker's health, and to the router, which may
// avoid the worker.
func (s *server) probed(id uint64, result fleet.Probed, err error) {
	s.registry.Probed(id, result, err)
	s.router.Probed(id, result == fleet.ProbeAnswered)
	s.verifier.probed(id, result == fleet.ProbeAnswered)
}

// engineLoad applies the load that a worker reports in a heartbeat, and divides it evenly among its
// ranks.
func (s *server) engineLoad(info router.WorkerInfo, l fleet.Load) {
	ranks := int(max(1, info.DPSize))
	l.KVUtilization = min(max(0, l.KVUtilization), 1)
	blocks := l.KVUsedBlocks / ranks
	blocks = cmp.Or(blocks, int(math.Round(l.KVUtilization*float64(info.TotalKVBlocks))))
	for i := range ranks {
		w := router.Worker{ID: info.ID, DPRank: info.DPStart + uint32(i)}
		if info.TotalKVBlocks == 0 && l.KVUsedBlocks == 0 && l.KVUtilization > 0 {
			s.router.SetEngineUsage(w, l.KVUtilization, time.Now())
		} else {
			s.rankLoad(w, fleet.ViaHeartbeat, 0, blocks)
		}
		s.rankRequests(w, fleet.ViaHeartbeat, l.Running/ranks, l.Waiting/ranks)
	}
}

// rankLoad takes how many blocks of its cache a rank uses, as reported via one of the ways.
func (s *server) rankLoad(w router.Worker, via fleet.LoadVia, publisher uint64, blocks int) {
	now := time.Now()
	if used, counts := s.loads.Report(w, via, publisher, blocks, now); counts && !s.router.SetEngineLoad(w, used, now) {
		s.loads.Forget(w.ID) // the router does not know the worker
	}
}

// rankRequests takes how many requests a rank is reported to have.
func (s *server) rankRequests(w router.Worker, via fleet.LoadVia, running, waiting int) {
	now := time.Now()
	if _, counts := s.requests.Report(w, via, 0, running+waiting, now); counts && !s.router.SetEngineRequests(w, running, waiting, now) {
		s.requests.Forget(w.ID) // the router does not know the worker
	}
}

// rankLoads takes the load of each rank from its engine's metrics.
func (s *server) rankLoads(info router.WorkerInfo, ranks map[uint32]fleet.Load) {
	for rank, l := range ranks {
		w := router.Worker{ID: info.ID, DPRank: rank}
		s.rankLoad(w, fleet.ViaMetrics, 0, l.KVUsedBlocks)
		s.rankRequests(w, fleet.ViaMetrics, l.Running, l.Waiting)
	}
}

// usedBlocks takes how many blocks a rank uses, as its engine reports on the bus.
func (s *server) usedBlocks(u events.UsedBlocks) {
	s.rankLoad(router.Worker{ID: u.WorkerID, DPRank: u.DPRank}, fleet.ViaBus, u.Publisher, u.Blocks)
}

// panics logs that all workers of a model are unhealthy and serve nevertheless, or no longer are.
func (s *server) panics(model string, begins bool) {
	if !begins {
		s.log.Info("requests of the model no longer go to unhealthy workers", "model", model)
		return
	}
	var names []string
	for _, w := range s.router.Workers() {
		if w.Model == model && !w.Draining {
			names = append(names, w.Worker.Label(w.Name)+" "+w.Health)
		}
	}
	s.log.Warn("no worker of the model is healthy, so requests go to unhealthy workers: kvroute may not reach their health paths, or all of them failed",
		"model", model, "workers", listed(names))
}

// forgot removes the counters and histograms of models that the router no longer knows.
func (s *server) forgot() {
	known := make(map[string]bool)
	for _, m := range s.router.Models() {
		known[m.Model] = true
	}
	if err := s.metrics.Forget(context.Background(), known, "model", outcomes.ModelAttribute); err != nil {
		s.log.Error("the metrics could not be read when models were forgotten", "err", err)
	}
}
