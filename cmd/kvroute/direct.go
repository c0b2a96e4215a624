// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"log/slog"
	"net/http"
	"sync"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
)

// direct tells the router of workers, and of the caches of those whose engines are
// heard without the bus. What such an engine says of itself completes what the
// registry knows of its worker.
type direct struct {
	router  *router.Router
	sources *engines.Sources
	log     *slog.Logger

	mu sync.Mutex
	// mu guards the fields below, and orders what the router is told of workers.
	workers map[uint64]router.WorkerInfo // that are heard, as the registry knows them
	found   map[uint64]engines.Found
	known   map[uint64]engines.KnownState
}

func newDirect(r *router.Router, sub *events.Subscriber, client *http.Client, networks reach.Networks, log *slog.Logger, meter metric.Meter) (*direct, error) {
	d := &direct{router: r, log: log, workers: make(map[uint64]router.WorkerInfo), found: make(map[uint64]engines.Found), known: make(map[uint64]engines.KnownState)}
	var err error
	d.sources, err = engines.NewSources(engines.SourcesConfig{
		Sink: func(id uint64, rank uint32, ev indexer.Event) {
			r.ApplyEvent(router.Worker{ID: id, DPRank: rank}, ev)
		},
		Subscriber: sub,
		Client:     client,
		Control:    networks.Control,

		Found:   d.tell,
		Changed: d.changed,
		Log:     log,
		Meter:   meter,
	})
	return d, err
}

// setWorker tells the router of a worker.
func (d *direct) setWorker(info router.WorkerInfo) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, heard := d.workers[info.ID]; heard {
		d.workers[info.ID] = info
	}
	return d.setLocked(info)
}

func (d *direct) setLocked(info router.WorkerInfo) error {
	if f, ok := d.found[info.ID]; ok {
		info.BlockSize = cmp.Or(info.BlockSize, f.BlockSize)
		info.TotalKVBlocks = cmp.Or(info.TotalKVBlocks, f.TotalKVBlocks)
		info.Engine = cmp.Or(info.Engine, f.Engine)
		info.DPStart, info.DPSize = f.DPStart, f.DPSize
	}
	if k, ok := d.known[info.ID]; ok {
		info.KVEvents = k.String()
	}
	return d.router.SetWorker(info)
}

// changed takes how well a worker's cache is known.
func (d *direct) changed(id uint64, state engines.KnownState) {
	d.mu.Lock()
	defer d.mu.Unlock()
	info, heard := d.workers[id]
	if old, ok := d.known[id]; !heard || ok && old == state {
		return
	}
	d.known[id] = state
	if err := d.setLocked(info); err != nil {
		d.log.Warn("a worker is refused", "err", err)
	}
}

// tell takes what an engine says of itself.
func (d *direct) tell(id uint64, f engines.Found) {
	d.mu.Lock()
	defer d.mu.Unlock()
	info, heard := d.workers[id]
	if !heard {
		return
	}
	d.found[id] = f
	if err := d.setLocked(info); err != nil {
		d.log.Warn("a worker is refused", "err", err)
	}
}

// follow takes a record of the registry: its events may be the engine's own.
func (d *direct) follow(r fleet.Record, info router.WorkerInfo) {
	id := info.ID
	if !r.Events.Direct() {
		d.forget(id)
		return
	}
	d.mu.Lock()
	d.workers[id] = info
	d.mu.Unlock()
	d.sources.Set(engines.EngineWorker{
		ID: id, Name: info.Name, Transport: r.Events.Transport, Address: info.Address.String(),
		Endpoint: r.Events.Endpoint, Topic: r.Events.Topic, Replay: r.Events.Replay, Queries: r.Events.LocalIndexer,
		DPStart: info.DPStart, DPSize: info.DPSize, BlockSize: info.BlockSize, Engine: info.Engine, Started: info.StartedMS,
	})
}

func (d *direct) forget(id uint64) {
	d.sources.Remove(id)
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.workers, id)
	delete(d.found, id)
	delete(d.known, id)
}

func (d *direct) removeWorker(id uint64) {
	d.forget(id)
	d.router.RemoveWorker(id)
}
