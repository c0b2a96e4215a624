// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/router"
)

// follow takes what a worker's record says besides who it is.
func (s *server) follow(r fleet.Record, info router.WorkerInfo) {
	s.direct.follow(r, info)
	s.prober.Set(r, info)
}

// engineLoad takes how full a worker says to be in a heartbeat. One number of several
// ranks is shared out evenly: they get the same kind of work.
func (s *server) engineLoad(info router.WorkerInfo, l fleet.Load) {
	ranks := max(1, info.DPSize)
	for i := range ranks {
		s.rankLoad(router.Worker{ID: info.ID, DPRank: info.DPStart + i}, fleet.ViaHeartbeat, 0, l.KVUsedBlocks/int(ranks))
	}
}

// rankLoad takes how many blocks of its cache a rank is said to use.
func (s *server) rankLoad(w router.Worker, via fleet.LoadVia, publisher uint64, blocks int) {
	now := time.Now()
	if used, counts := s.loads.Say(w, via, publisher, blocks, now); counts && !s.router.SetEngineLoad(w, used, now) {
		s.loads.Forget(w.ID) // nobody knows it
	}
}

// rankLoads takes how full each rank is by its engine's metrics.
func (s *server) rankLoads(info router.WorkerInfo, ranks map[uint32]fleet.Load) {
	for rank, l := range ranks {
		s.rankLoad(router.Worker{ID: info.ID, DPRank: rank}, fleet.ViaMetrics, 0, l.KVUsedBlocks)
	}
}

// engineUsage takes how full a worker says to be in a response.
func (s *server) engineUsage(w router.Worker, usage float64) bool {
	now := time.Now()
	known := s.router.SetEngineUsage(w, usage, now)
	if known {
		s.loads.Say(w, fleet.ViaHeader, 0, 0, now) // the router has it already
	}
	return known
}

// usedBlocks takes how full a rank is by what its engine says on the bus.
func (s *server) usedBlocks(u events.UsedBlocks) {
	s.rankLoad(router.Worker{ID: u.WorkerID, DPRank: u.DPRank}, fleet.ViaBus, u.Publisher, u.Blocks)
}

// cachedPrefixes takes what a worker says to hold in a heartbeat.
func (s *server) cachedPrefixes(id uint64, cached map[string]int) {
	prefixes, err := fleet.ParsePrefixes(cached)
	if err != nil {
		s.log.Warn("a heartbeat's prefixes are refused", "worker", id, "err", err)
		return
	}
	s.router.SetCachedPrefixes(id, prefixes)
}
