// SPDX-License-Identifier: Apache-2.0

// Package engines reads the cache events of engines: from the sockets of vLLM and SGLang, the HTTP
// endpoint of TensorRT-LLM, and the publishers of NVIDIA Dynamo's workers.
package engines

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/engines/dynamo"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// Transports of engines that kvroute reads directly.
const (
	// TransportZMQ is an engine's PUB socket, and its ROUTER socket for replays.
	TransportZMQ = "zmq"
	// TransportPoll polls TensorRT-LLM's server for its events.
	TransportPoll = "http_poll"
)

// EngineWorker describes how to read the events of a worker's engine. ID and Transport are
// required, and Address unless Endpoint is complete. The zero value of each other field is its
// default.
type EngineWorker struct {
	ID        uint64
	Name      string // for the log
	Transport string
	Address   string // ip:port of the engine's HTTP server
	Host      string // Host header of requests to it; empty = Address

	// Endpoint is the address of the events: tcp://host:port or ipc://path, see
	// [zmtp.ParseEndpoint]. The host "*" is the worker's host. For [TransportPoll] it is a URL. If
	// it is empty, the engine at Address is queried for it.
	Endpoint string
	// Topic is the prefix of the topics to subscribe to. Default: all.
	Topic string
	// Replay is the endpoint for requests of lost events. Default: the one that the engine
	// reports, if any.
	Replay string

	// DPStart and DPSize are the ranks. If DPSize is 0, it is the number that the engine reports,
	// or 1.
	DPStart, DPSize uint32
	// BlockSize is the block size of the index, in tokens. 0 uses the engine's, if the engine
	// reports it.
	BlockSize int
	// Engine is a name of package engine, or empty if unknown.
	Engine string
	// SetLike is as in [EngineOptions].
	SetLike bool

	// Started is the worker's start time, if known. When it changes, the worker's events are read
	// again from the beginning.
	Started int64

	arrived uint64 // the number of workers that were set before it
}

// SourcesConfig configures [Sources]. Sink is required; the zero value of each other field is its
// default.
type SourcesConfig struct {
	// Sink receives the events. One goroutine at a time calls it for a rank. The slices of an event
	// are reused when it returns.
	Sink events.Sink
	// Scope is that of the saved state.
	Scope wire.Scope
	// Sides returns events that build the side groups of a rank, and their blocks, in an index like that of Sink;
	// nil if they are unknown. Default: hybrid models are not saved.
	Sides func(id uint64, rank uint32) []indexer.Event
	// Tokens receives the engine's token ids of each event with stored blocks of text, before Sink receives the
	// blocks. It must not keep the ids. Default: none.
	Tokens func(ids []uint32)
	// Subscriber receives the events of Dynamo's publishers. It must send its queries with
	// [dynamo.Listener.Ask]. Default: such publishers are not followed.
	Subscriber *events.Subscriber
	// Found receives what an engine reports about itself, before the engine's events and after
	// each discovery. It must not call back. Default: none.
	Found func(id uint64, f Found)
	// Changed is called when a worker's state may have changed. It must not call back. Default:
	// none.
	Changed func(id uint64, worst indexer.State)
	// Ended is called when the connection to an engine's event socket has ended: the engine may be dead. It
	// may be called by any number of goroutines at once. Default: none.
	Ended func(id uint64)
	// Faulty is called when [Sources.Faults] of a worker may have changed. It may call only that method.
	// Default: none.
	Faulty func(id uint64)
	// Client sends HTTP requests to engines. Control checks the addresses of their sockets, as
	// [net.Dialer]'s. Default: those of package reach for all networks.
	Client  *http.Client
	Control func(network, address string, _ syscall.RawConn) error
	// Log receives a line for each loss and each change. Default: none.
	Log *slog.Logger
	// Meter makes the instruments listed in docs/metrics.md. It must not be that of Subscriber, which makes some of the
	// same names for other feeds. Default: none.
	Meter metric.Meter
}

func (c *SourcesConfig) dialer(d *net.Dialer) { d.Control = c.Control }

// Sources follows the caches of workers whose engines are read without NATS. It runs a goroutine
// for each socket, which ends when the worker is removed.
//
// # Guarantees
//
// For each rank, the events that the sink receives between two clears were published by one
// process of the engine, in order. After each loss and each new connection, the batches that the
// engine can send again are requested. Batches that it cannot send again stay missing and are
// counted, and the rank is suspect. A new process is detected by its numbers, by a last batch that
// it does not have, or by a closed port; then the rank is cleared.
//
// # Concurrency
//
// The methods may be called by any number of goroutines.
type Sources struct {
	conf    SourcesConfig
	metrics *sourceMetrics
	wake    chan struct{} // holds one token while something is to be started or ended
	same    *same
	// Dynamo receives the events of Dynamo's publishers.
	Dynamo *dynamo.Listener

	mu sync.Mutex
	// mu guards the fields below.
	wanted  map[uint64]EngineWorker
	arrived uint64 // workers that were set so far
	ranks   map[*rankSource]struct{}
	unknown map[uint64]Fault               // why the sockets of a worker's engine are unknown
	saved   map[events.RankName]*savedRank // ranks of an earlier process that are not followed yet
	loaded  time.Time                      // when saved was loaded
}

// NewSources returns Sources without workers.
func NewSources(conf SourcesConfig) (*Sources, error) {
	if conf.Found == nil {
		conf.Found = func(uint64, Found) {}
	}
	if conf.Changed == nil {
		conf.Changed = func(uint64, indexer.State) {}
	}
	if conf.Ended == nil {
		conf.Ended = func(uint64) {}
	}
	if conf.Faulty == nil {
		conf.Faulty = func(uint64) {}
	}
	if conf.Sides == nil {
		conf.Sides = func(uint64, uint32) []indexer.Event { return nil }
	}
	conf.Log = meter.Log(conf.Log)
	conf.Client = cmp.Or(conf.Client, reach.Networks{}.Client())
	s := &Sources{
		conf:    conf,
		wake:    make(chan struct{}, 1),
		same:    newSame(),
		wanted:  make(map[uint64]EngineWorker),
		ranks:   make(map[*rankSource]struct{}),
		unknown: make(map[uint64]Fault),
		saved:   make(map[events.RankName]*savedRank),
	}
	var err error
	if s.metrics, err = newSourceMetrics(conf.Meter, s.survey); err != nil {
		return nil, err
	}
	s.Dynamo = dynamo.New(dynamo.Config{Subscriber: conf.Subscriber, Dialer: conf.dialer, Count: s.countPlane, Log: conf.Log})
	return s, nil
}

func (s *Sources) countPlane(what string, n int) { s.metrics.count(events.FeedPlane, what, n) }

// Set starts to follow a worker, or starts again if its settings changed.
func (s *Sources) Set(w EngineWorker) {
	s.mu.Lock()
	if w.arrived = s.wanted[w.ID].arrived; w.arrived == 0 {
		s.arrived++
		w.arrived = s.arrived
	}
	s.wanted[w.ID] = w
	s.mu.Unlock()
	stir(s.wake)
}

// Remove stops following a worker.
func (s *Sources) Remove(id uint64) {
	s.mu.Lock()
	delete(s.wanted, id)
	delete(s.unknown, id)
	s.mu.Unlock()
	stir(s.wake)
}

// Reread requests all events of a worker's rank: from the engine, if it has a replay socket, or else from the
// worker's local indexer, if it has one. It reports whether they are requested.
func (s *Sources) Reread(id uint64, rank uint32) (requested bool) {
	if s.conf.Subscriber != nil {
		requested = s.conf.Subscriber.Reread(id, rank) // does nothing if the worker is read directly
	}
	s.mu.Lock()
	ranks := slices.Collect(maps.Keys(s.ranks))
	s.mu.Unlock()
	for _, r := range ranks {
		if r.worker.ID == id {
			r.do(func() {
				if _, named := r.namedRanks[rank]; named {
					requested = r.follower.Reread(time.Now()) || requested
				}
			})
		}
	}
	return requested
}

// stir puts a token into a channel that has room for one.
func stir(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

// Has reports whether s reads and orders the events of a worker.
func (s *Sources) Has(id uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.wanted[id]
	return ok
}

// State returns the worst state of a worker's ranks.
func (s *Sources) State(id uint64) indexer.State {
	s.mu.Lock()
	defer s.mu.Unlock()
	state, followed := indexer.StateOK, false
	for r := range s.ranks {
		if r.worker.ID == id {
			state, followed = indexer.Worst(state, r.current()), true
		}
	}
	if !followed {
		return indexer.StateNone
	}
	return state
}

// survey counts ranks by feed and state, and finds the block with most copies.
func (s *Sources) survey() (counts map[events.Feed]map[indexer.State]int, copies int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	counts = make(map[events.Feed]map[indexer.State]int)
	for _, feed := range []events.Feed{events.FeedZMQ, events.FeedPoll} {
		counts[feed] = make(map[indexer.State]int)
		for _, state := range indexer.States() {
			if state != indexer.StateSummary {
				counts[feed][state] = 0
			}
		}
	}
	for r := range s.ranks {
		counts[feedOf(r.worker.Transport)][r.current()]++
		copies = max(copies, int(r.copies.Load()))
	}
	return counts, copies
}

// Run follows the workers until ctx ends.
func (s *Sources) Run(ctx context.Context) error {
	defer s.conf.Client.CloseIdleConnections()
	var wg sync.WaitGroup
	defer wg.Wait()
	if s.conf.Subscriber != nil {
		wg.Go(func() { runEach(ctx, s.Dynamo.Changed, s.Dynamo.Spots, s.Dynamo.Follow) })
	}
	runEach(ctx, s.wake, func() map[EngineWorker]bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		all := make(map[EngineWorker]bool, len(s.wanted))
		for _, w := range s.wanted {
			all[w] = true
		}
		return all
	}, s.follow)
	return nil
}

// runEach runs a goroutine for each wanted key until ctx ends. After each token in wake it
// ends those that are not wanted any more, and then starts the new ones.
func runEach[K comparable](
	ctx context.Context, wake <-chan struct{}, wanted func() map[K]bool, run func(context.Context, K),
) {
	running := make(map[K]func()) // each ends a goroutine
	for ctx.Err() == nil {
		keys := wanted()
		for k, end := range running {
			if !keys[k] {
				end()
				delete(running, k)
			}
		}
		for k := range keys {
			if running[k] != nil {
				continue
			}
			own, cancel := context.WithCancel(ctx)
			done := make(chan struct{})
			running[k] = func() {
				cancel()
				<-done
			}
			go func() {
				defer close(done)
				run(own, k)
			}()
		}
		select {
		case <-ctx.Done():
		case <-wake:
		}
	}
	for _, end := range running {
		end()
	}
}

// follow follows one worker until ctx ends. An engine that was queried for its sockets
// is queried again if they become unavailable: it may have restarted with others.
func (s *Sources) follow(ctx context.Context, wanted EngineWorker) {
	log := s.conf.Log.With("worker", wanted.ID, "name", wanted.Name)
	backoff := zmtp.Backoff{}
	level := slog.LevelWarn // warn only once
	for ctx.Err() == nil {
		w := wanted // sockets completes the copy
		sockets, err := s.sockets(ctx, &w)
		if err != nil {
			if ctx.Err() == nil {
				s.metrics.count(feedOf(wanted.Transport), sourceUndiscovered, 1)
				log.Log(ctx, level, "the sockets of an engine are unknown; it is asked again", "err", err)
				level = slog.LevelDebug
				s.setUnknown(wanted.ID, err)
			}
			backoff.Wait(ctx)
			continue
		}
		s.setUnknown(wanted.ID, nil)
		backoff, level = zmtp.Backoff{}, slog.LevelWarn
		own, cancel := context.WithCancel(ctx)
		var wg sync.WaitGroup
		for _, at := range sockets {
			r := newRankSource(s, &w, at, log.With("dp_rank", at.rank))
			s.mu.Lock()
			s.ranks[r] = struct{}{}
			s.mu.Unlock()
			s.mute(s.same.add(r))
			wg.Go(func() { r.run(own) })
		}
		if wanted.Endpoint == "" && wanted.Transport == TransportZMQ {
			s.awaitMove(own, wanted, sockets)
			if ctx.Err() == nil {
				log.Info("an engine has other sockets of events than before")
			}
		} else {
			<-ctx.Done()
		}
		cancel()
		wg.Wait()
		s.ended(wanted)
	}
}

// discoverEvery is the interval at which an engine whose sockets are unavailable is queried for
// other sockets.
const discoverEvery = 3 * time.Second

// awaitMove returns when ctx ends, or when the engine reports other sockets.
func (s *Sources) awaitMove(ctx context.Context, w EngineWorker, sockets []socket) {
	for bus.Wait(ctx, discoverEvery) {
		if s.State(w.ID) != indexer.StateNone {
			continue
		}
		if f, err := s.Discover(ctx, w); err == nil && !slices.Equal(f.sockets, sockets) {
			return
		}
	}
}

// Faults returns what is wrong with the event sockets of a worker now.
func (s *Sources) Faults(id uint64) (faults []Fault) {
	s.mu.Lock()
	if f, wrong := s.unknown[id]; wrong {
		faults = append(faults, f)
	}
	for r := range s.ranks {
		for _, f := range []*Fault{r.noEvents.Load(), r.noReplay.Load()} {
			if f != nil && r.worker.ID == id {
				faults = append(faults, *f)
			}
		}
	}
	s.mu.Unlock()
	slices.SortFunc(faults, func(a, b Fault) int { return strings.Compare(a.Text, b.Text) })
	return append(s.same.faults(id), faults...)
}

// setUnknown notes why the sockets of a worker's engine are unknown, or that they are known. An engine
// that does not answer is no fault of its sockets.
func (s *Sources) setUnknown(id uint64, err error) {
	_, answered := errors.AsType[reach.StatusError](err)
	f, wrong := Fault{}, answered || errors.Is(err, errNoEvents)
	if wrong {
		f = Fault{faultEventSockets, fmt.Sprintf("its event sockets are unknown: %v; set events.endpoint, or let the engine publish events", err)}
	}
	s.mu.Lock()
	old, was := s.unknown[id]
	if delete(s.unknown, id); wrong {
		s.unknown[id] = f
	}
	s.mu.Unlock()
	if was != wrong || old != f {
		s.conf.Faulty(id)
	}
}
