// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"sync"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
)

// loadGood is how long what an engine said of its load counts: some heartbeats.
const loadGood = 10 * time.Second

// scrape is what an engine last said of its load.
type scrape struct {
	path     string // that had it
	id       uint64 // of who publishes it: another one than of events
	sequence uint64 // of the messages about it
	silent   bool   // said once that there is nothing

	mu sync.Mutex
	// mu guards the fields below.
	ranks map[uint32]fleet.Load
	at    time.Time
}

// load is what the heartbeats say: nothing, if the engine has said nothing for long.
func (s *scrape) load() fleet.Load {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.at) > loadGood {
		return fleet.Load{}
	}
	return fleet.Total(s.ranks)
}

// measure asks the engine for its load, keeps it for the heartbeats, and tells those on
// the bus who want to know how full each rank's cache is.
func (p *beside) measure(ctx context.Context) {
	paths := fleet.LoadPaths[:]
	switch {
	case p.metrics != "":
		paths = []string{p.metrics}
	case p.scrape.path != "":
		paths = []string{p.scrape.path}
	}
	ranks, from, err := fleet.AskLoad(paths, fleet.Capacity{Blocks: p.record.TotalKVBlocks, BlockSize: p.record.BlockSize},
		func(path string) (body []byte, err error) {
			err = p.get(ctx, path, &body)
			return body, err
		})
	if err != nil {
		if !p.scrape.silent && p.scrape.path == "" && ctx.Err() == nil {
			p.scrape.silent = true
			p.log.Info("the engine does not say how busy it is; heartbeats do not either until it does", "err", err)
		}
		return
	}
	p.scrape.path = from
	p.scrape.mu.Lock()
	p.scrape.ranks, p.scrape.at = ranks, time.Now()
	p.scrape.mu.Unlock()
	if p.nc == nil {
		return
	}
	for rank, l := range ranks {
		e := events.Envelope{
			PublisherID: p.scrape.id, Sequence: p.scrape.sequence, PublishedAt: uint64(time.Now().UnixMilli()), Topic: events.LoadTopic,
			Payload: events.AppendUsedBlocks(nil, p.engine.ID, rank, uint64(l.KVUsedBlocks)),
		}
		p.scrape.sequence++
		// What a lost one said the next one says.
		_ = p.nc.Publish(p.scope.Topic(events.LoadTopic), events.AppendEnvelope(nil, e))
	}
}
