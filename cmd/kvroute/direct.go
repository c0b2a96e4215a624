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

// direct passes workers to the router, with the data that their engines report about themselves, and
// reads the events of engines that are not on the bus.
type direct struct {
	router  *router.Router
	sources *engines.Sources
	log     *slog.Logger

	mu sync.Mutex
	// mu guards the field below, and orders what the router gets of a worker.
	workers map[uint64]*directWorker
}

// directWorker is a worker whose engine is read directly.
type directWorker struct {
	info  router.WorkerInfo // of the registry
	found *engines.Found    // nil until the engine answered
	known string            // how well its cache is known; "" in follow only
}

func newDirect(r *router.Router, sub *events.Subscriber, client *http.Client, networks reach.Networks, log *slog.Logger, meter metric.Meter) (*direct, error) {
	d := &direct{router: r, log: log, workers: make(map[uint64]*directWorker)}
	var err error
	d.sources, err = engines.NewSources(engines.SourcesConfig{
		Sink: func(id uint64, rank uint32, ev indexer.Event) {
			r.ApplyEvent(router.Worker{ID: id, DPRank: rank}, ev)
		},
		Subscriber: sub,
		Client:     client,
		Control:    networks.Control,

		Found: func(id uint64, f engines.Found) { d.complete(id, func(w *directWorker) { w.found = &f }) },
		Changed: func(id uint64, worst engines.State) {
			d.complete(id, func(w *directWorker) { w.known = worst.String() })
		},
		Log:   log,
		Meter: meter,
	})
	return d, err
}

// setWorker passes a worker of the registry to the router.
func (d *direct) setWorker(info router.WorkerInfo) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.workers[info.ID]
	if w == nil {
		return d.router.SetWorker(info)
	}
	w.info = info
	return d.router.SetWorker(w.completed())
}

// complete takes what an engine says, and passes its worker to the router again.
func (d *direct) complete(id uint64, take func(*directWorker)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.workers[id]
	if w == nil {
		return
	}
	known, found := w.known, w.found
	if take(w); w.known == known && w.found == found {
		return
	}
	if err := d.router.SetWorker(w.completed()); err != nil {
		d.log.Warn("a worker is refused", "worker", id, "err", err)
	}
}

// completed returns the worker with the data that its engine reports about itself.
func (w *directWorker) completed() router.WorkerInfo {
	info := w.info
	if f := w.found; f != nil {
		info.BlockSize = cmp.Or(info.BlockSize, f.BlockSize)
		info.TotalKVBlocks = cmp.Or(info.TotalKVBlocks, f.TotalKVBlocks)
		info.Engine = cmp.Or(info.Engine, f.Engine)
		info.DPStart, info.DPSize = f.DPStart, f.DPSize
	}
	info.KVEvents = cmp.Or(w.known, info.KVEvents)
	return info
}

// follow takes a record of the registry: its events may come from the engine itself.
func (d *direct) follow(r fleet.Record, info router.WorkerInfo) {
	id := info.ID
	if !r.Events.Direct() {
		d.forget(id)
		return
	}
	d.mu.Lock()
	if w := d.workers[id]; w != nil {
		w.info = info
	} else {
		d.workers[id] = &directWorker{info: info}
		defer d.complete(id, func(w *directWorker) { w.known = cmp.Or(w.known, engines.StateNone.String()) }) // until it is connected
	}
	d.mu.Unlock()
	d.sources.Set(engines.EngineWorker{
		ID: id, Name: info.Name, Transport: r.Events.Transport, Address: info.Address.String(),
		Endpoint: r.Events.Endpoint, Topic: r.Events.Topic, Replay: r.Events.Replay,
		DPStart: info.DPStart, DPSize: info.DPSize, BlockSize: info.BlockSize, Engine: info.Engine, Started: info.StartedMS,
	})
}

func (d *direct) forget(id uint64) {
	d.sources.Remove(id)
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.workers, id)
}

func (d *direct) removeWorker(id uint64) {
	d.forget(id)
	d.router.RemoveWorker(id)
}
