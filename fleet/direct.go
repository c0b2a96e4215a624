// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"log/slog"
	"net/http"
	"slices"
	"sync"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// DirectConfig configures [DirectWorkers]. Router is required; the zero value of each other field
// means its default.
type DirectConfig struct {
	// Router receives the workers and the events of their engines.
	Router *router.Router
	// Scope is that of the saved state of the engines.
	Scope wire.Scope
	// Subscriber receives the events of Dynamo's publishers, as in [engines.SourcesConfig].
	// Default: such publishers are not followed.
	Subscriber *events.Subscriber
	// Client sends HTTP requests to engines. Networks limit the addresses of the engines' sockets.
	// Default: all networks.
	Client   *http.Client
	Networks Networks
	// Ended receives each worker whose event socket has closed, as in [engines.SourcesConfig]. Default: none.
	Ended func(id uint64)
	// Faults receives the faults of a worker's event sockets. It must not call back. Default: none.
	Faults func(id uint64, source string, faults []router.Fault)
	// Connected is called when kvroute is connected to a worker's events again: the engine may have
	// restarted. It must not call back. Default: none.
	Connected func(id uint64)
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
	conf    DirectConfig
	log     *slog.Logger

	mu sync.Mutex
	// mu guards the field below, and orders the states of a worker that the router receives.
	workers map[uint64]*directWorker
}

// directWorker is a worker. The engine's data count only while its engine is read directly.
type directWorker struct {
	info  router.WorkerInfo // of its record
	read  bool              // its engine is read directly
	found *engines.Found    // nil until the engine answers
	known indexer.State     // as in Record.KVEvents

	lora, aliases []string // names that its engine lists and the record does not have
	missing       []string // adapters of the record that its engine does not list
	length        int      // tokens of the longest request, as its engine lists it; 0 = unknown

	version string        // its engine's, as the engine reports it; "" = unknown
	flags   *engine.Flags // nil = its engine does not report them
}

// NewDirectWorkers returns DirectWorkers without a worker. An error is one of its metrics.
func NewDirectWorkers(conf DirectConfig) (*DirectWorkers, error) {
	if conf.Faults == nil {
		conf.Faults = func(uint64, string, []router.Fault) {}
	}
	if conf.Connected == nil {
		conf.Connected = func(uint64) {}
	}
	d := &DirectWorkers{
		router:  conf.Router,
		conf:    conf,
		log:     meter.Log(conf.Log),
		workers: make(map[uint64]*directWorker),
	}
	var err error
	d.sources, err = engines.NewSources(engines.SourcesConfig{
		Sink: func(id uint64, rank uint32, ev indexer.Event) {
			d.router.ApplyEvent(router.Worker{ID: id, DPRank: rank}, ev)
		},
		Scope: conf.Scope,
		Sides: func(id uint64, rank uint32) []indexer.Event {
			return d.router.Sides(router.Worker{ID: id, DPRank: rank})
		},
		Tokens:     d.router.StoredTokens,
		Subscriber: conf.Subscriber,
		Client:     conf.Client,
		Control:    conf.Networks.Control,

		Found: func(id uint64, f engines.Found) {
			d.update(id, func(w *directWorker) { w.found = &f })
		},
		Changed: func(id uint64, worst indexer.State) {
			connected := false
			d.update(id, func(w *directWorker) {
				connected = w.known == indexer.StateNone && worst != indexer.StateNone
				w.known = worst
			})
			if connected {
				d.conf.Connected(id)
			}
		},
		Ended:  conf.Ended,
		Faulty: d.faulty,
		Log:    conf.Log,
		Meter:  conf.Meter,
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
		w = &directWorker{}
		d.workers[info.ID] = w
	}
	w.info = info
	return d.router.SetWorker(w.completed())
}

// SetListed sets the names and the longest request that a worker's engine lists. The worker gets requests with the
// names.
func (d *DirectWorkers) SetListed(id uint64, models []engineModel, r *Record) {
	lora, aliases := listedNames(models, r)
	length, missing := longest(models, r), missingAdapters(models, r)
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.workers[id]
	if w == nil {
		return
	}
	sameNames := slices.Equal(w.lora, lora) && slices.Equal(w.aliases, aliases) && slices.Equal(w.missing, missing)
	if sameNames && w.length == length {
		return
	}
	if !sameNames {
		d.log.Info("an engine lists other names than before", "worker", id, "adapters", some(lora), "aliases", some(aliases), "missing_adapters", some(missing))
	}
	w.lora, w.aliases, w.missing, w.length = lora, aliases, missing, length
	d.pass(w.completed())
}

// SetReported sets the version and the flags that a worker's engine reports; "" and nil = it reports none.
func (d *DirectWorkers) SetReported(id uint64, version string, flags *engine.Flags) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.workers[id]
	if w == nil || w.version == version && w.flags.Equal(flags) {
		return
	}
	w.version, w.flags = version, flags
	d.pass(w.completed())
}

// faulty passes on the faults of a worker's event sockets.
func (d *DirectWorkers) faulty(id uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if w := d.workers[id]; w != nil && w.read {
		d.conf.Faults(id, faultsOfSockets, routerFaults(d.sources.Faults(id)))
	}
}

// Follow starts, changes or stops the reading of a worker's engine, as the worker's record says.
// info is the worker that the record describes.
func (d *DirectWorkers) Follow(r Record, info router.WorkerInfo) {
	if !r.Events.Direct() {
		d.stop(info)
		return
	}
	d.start(info)
	d.sources.Set(engineWorker(&r, &info))
}

// engineWorker says how to read the events of a record's worker.
func engineWorker(r *Record, info *router.WorkerInfo) engines.EngineWorker {
	return engines.EngineWorker{
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
	}
}

// RemoveWorker stops the reading of a worker's engine and removes the worker from the router.
func (d *DirectWorkers) RemoveWorker(id uint64) {
	d.sources.Remove(id)
	d.mu.Lock()
	delete(d.workers, id)
	d.mu.Unlock()
	d.router.RemoveWorker(id)
}

// start adds a worker whose engine is read. Its cache is unknown until the engine is connected.
func (d *DirectWorkers) start(info router.WorkerInfo) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.workers[info.ID]
	if w == nil {
		w = &directWorker{}
		d.workers[info.ID] = w
	}
	if w.info = info; w.read {
		return
	}
	w.read, w.known = true, indexer.StateNone
	d.pass(w.completed())
}

// stop stops the reading of a worker's engine. The router must not keep the data of the engine.
func (d *DirectWorkers) stop(info router.WorkerInfo) {
	d.sources.Remove(info.ID)
	d.mu.Lock()
	defer d.mu.Unlock()
	if w := d.workers[info.ID]; w != nil && w.read {
		w.info, w.read, w.found = info, false, nil
		d.conf.Faults(info.ID, faultsOfSockets, nil)
		d.pass(w.completed())
	}
}

// update changes what is known of a worker's engine. The router gets the worker again if
// something changed.
func (d *DirectWorkers) update(id uint64, change func(*directWorker)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.workers[id]
	if w == nil || !w.read {
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
	info.ListedLoRA, info.ListedAliases, info.MaxModelLen = w.lora, w.aliases, w.length
	info.EngineVersion, info.EngineFlags = cmp.Or(w.version, info.EngineVersion), w.flags
	if len(w.missing) > 0 {
		info.LoRA = slices.DeleteFunc(slices.Clone(info.LoRA), func(name string) bool { return slices.Contains(w.missing, name) })
	}
	if !w.read {
		return info
	}
	if f := w.found; f != nil {
		info.BlockSize = cmp.Or(info.BlockSize, f.BlockSize)
		if info.TotalKVBlocks == 0 {
			info.TotalKVBlocks = f.TotalKVBlocks
			if f.BlockSize > 0 { // the engine counts its own blocks
				info.TotalKVBlocks = f.TotalKVBlocks * f.BlockSize / info.BlockSize
			}
		}
		info.Engine = cmp.Or(info.Engine, f.Engine)
		info.DPStart, info.DPSize = f.DPStart, f.DPSize
	}
	info.KVEvents = w.known
	return info
}
