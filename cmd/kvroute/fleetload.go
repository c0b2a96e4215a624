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
		s.router.SetEngineLoad(router.Worker{ID: info.ID, DPRank: info.DPStart + i}, l.KVUsedBlocks/int(ranks), time.Now())
	}
}

// rankLoads takes how full each rank is by its engine's metrics.
func (s *server) rankLoads(info router.WorkerInfo, ranks map[uint32]fleet.Load) {
	now := time.Now()
	for rank, l := range ranks {
		s.router.SetEngineLoad(router.Worker{ID: info.ID, DPRank: rank}, l.KVUsedBlocks, now)
	}
}

// engineUsage takes how full a worker says to be in a response.
func (s *server) engineUsage(w router.Worker, usage float64) bool {
	return s.router.SetEngineUsage(w, usage, time.Now())
}

// usedBlocks takes how full a rank is by what its engine says on the bus.
func (s *server) usedBlocks(u events.UsedBlocks) {
	s.router.SetEngineLoad(router.Worker{ID: u.WorkerID, DPRank: u.DPRank}, u.Blocks, time.Now())
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
