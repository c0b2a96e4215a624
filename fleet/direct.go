// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"log/slog"
	"net/http"
	"sync"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/router"
)

// DirectConfig configures [DirectWorkers]. Router is required; the zero value of each other field
// means its default.
type DirectConfig struct {
	// Router receives the workers and the events of their engines.
	Router *router.Router
	// Subscriber receives the events of Dynamo's publishers, as in [engines.SourcesConfig].
	// Default: such publishers are not followed.
	Subscriber *events.Subscriber
	// Client sends HTTP requests to engines. Networks limit the addresses of the engines' sockets.
	// Default: all networks.
	Client   *http.Client
	Networks Networks
	// Ended receives each worker whose event socket has closed, as in [engines.SourcesConfig]. Default: none.
	Ended func(id uint64)
	// Log receives a line for each refused worker and each loss of events. Default: none.
	Log *slog.Logger
	// Meter makes the instruments listed in docs/metrics.md. Default: none.
	Meter metric.Meter
}

// DirectWorkers passes workers to the router, and reads the events of engines that do not send
// them over the bus. Such an engine reports data about itself (block size, number of blocks, ranks,
// engine): the worker gets these data where its record does not have them. The router also gets
// how well the engine's cache is known.
//
// The methods may be called by any number of goroutines. For one worker they must be called in the
// order of its records: [DirectWorkers.SetWorker], then [DirectWorkers.Follow]. The sources call
// the router from goroutines of their own; the router receives the states of a worker one at a time.
type DirectWorkers struct {
	router  *router.Router
	sources *engines.Sources
	log     *slog.Logger

	mu sync.Mutex
	// mu guards the field below, and orders the states of a worker that the router receives.
	workers map[uint64]*directWorker
}

// directWorker is a worker whose engine is read directly.
type directWorker struct {
	info  router.WorkerInfo // of its record
	found *engines.Found    // nil until the engine answers
	known string            // state of its cache, as in Record.KVEvents
}

// NewDirectWorkers returns DirectWorkers without a worker. An error is one of its metrics.
func NewDirectWorkers(conf DirectConfig) (*DirectWorkers, error) {
	d := &DirectWorkers{
		router:  conf.Router,
		log:     meter.Log(conf.Log),
		workers: make(map[uint64]*directWorker),
	}
	var err error
	d.sources, err = engines.NewSources(engines.SourcesConfig{
		Sink: func(id uint64, rank uint32, ev indexer.Event) {
			d.router.ApplyEvent(router.Worker{ID: id, DPRank: rank}, ev)
		},
		Subscriber: conf.Subscriber,
		Client:     conf.Client,
		Control:    conf.Networks.Control,

		Found: func(id uint64, f engines.Found) {
			d.update(id, func(w *directWorker) { w.found = &f })
		},
		Changed: func(id uint64, worst engines.State) {
			d.update(id, func(w *directWorker) { w.known = worst.String() })
		},
		Ended: conf.Ended,
		Log:   conf.Log,
		Meter: conf.Meter,
	})
	return d, err
}

// Sources returns the readers of the engines' events. Their Run must run, or no engine is read.
func (d *DirectWorkers) Sources() *engines.Sources { return d.sources }

// SetWorker passes a worker to the router, with the data of its engine. The error is the router's:
// the worker is refused.
func (d *DirectWorkers) SetWorker(info router.WorkerInfo) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.workers[info.ID]
	if w == nil {
		return d.router.SetWorker(info)
	}
	w.info = info
	return d.router.SetWorker(w.completed())
}

// Follow starts, changes or stops the reading of a worker's engine, as the worker's record says.
// info is the worker that the record describes.
func (d *DirectWorkers) Follow(r Record, info router.WorkerInfo) {
	if !r.Events.Direct() {
		if d.forget(info.ID) { // the router must not keep the data of the engine
			d.pass(info)
		}
		return
	}
	d.start(info)
	d.sources.Set(engines.EngineWorker{
		ID:        info.ID,
		Name:      info.Name,
		Transport: r.Events.Transport,
		Address:   info.Address.String(),
		Host:      info.Host,
		Endpoint:  r.Events.Endpoint,
		Topic:     r.Events.Topic,
		Replay:    r.Events.Replay,
		DPStart:   info.DPStart,
		DPSize:    info.DPSize,
		BlockSize: info.BlockSize,
		Engine:    info.Engine,
		Started:   info.StartedMS,
	})
}

// RemoveWorker stops the reading of a worker's engine and removes the worker from the router.
func (d *DirectWorkers) RemoveWorker(id uint64) {
	d.forget(id)
	d.router.RemoveWorker(id)
}

// start adds a worker whose engine is read. Its cache is unknown until the engine is connected.
func (d *DirectWorkers) start(info router.WorkerInfo) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if w := d.workers[info.ID]; w != nil {
		w.info = info
		return
	}
	w := &directWorker{info: info, known: engines.StateNone.String()}
	d.workers[info.ID] = w
	d.pass(w.completed())
}

// forget stops the reading of a worker's engine. It returns false if the engine was not read.
func (d *DirectWorkers) forget(id uint64) (known bool) {
	d.sources.Remove(id)
	d.mu.Lock()
	defer d.mu.Unlock()
	_, known = d.workers[id]
	delete(d.workers, id)
	return known
}

// update changes what is known of a worker's engine. The router gets the worker again if
// something changed.
func (d *DirectWorkers) update(id uint64, change func(*directWorker)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.workers[id]
	if w == nil {
		return
	}
	known, found := w.known, w.found
	change(w)
	if w.known != known || w.found != found {
		d.pass(w.completed())
	}
}

// pass passes a worker to the router.
func (d *DirectWorkers) pass(info router.WorkerInfo) {
	if err := d.router.SetWorker(info); err != nil {
		d.log.Warn("a worker is refused", "worker", info.ID, "err", err)
	}
}

// completed returns the worker of the record, completed with the data of its engine.
func (w *directWorker) completed() router.WorkerInfo {
	info := w.info
	if f := w.found; f != nil {
		info.BlockSize = cmp.Or(info.BlockSize, f.BlockSize)
		info.TotalKVBlocks = cmp.Or(info.TotalKVBlocks, f.TotalKVBlocks)
		info.Engine = cmp.Or(info.Engine, f.Engine)
		info.DPStart, info.DPSize = f.DPStart, f.DPSize
	}
	info.KVEvents = w.known
	return info
}
