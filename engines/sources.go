// SPDX-License-Identifier: Apache-2.0

// Package engines reads what engines say of their caches: vLLM's and SGLang's sockets,
// TensorRT-LLM's HTTP endpoint, and the publishers of NVIDIA Dynamo's workers. Beside an
// engine, its [Publisher] sends what they say to the routers.
package engines

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// Transports of engines that are heard directly.
const (
	// TransportZMQ is an engine's PUB socket, and its ROUTER socket for replays.
	TransportZMQ = "zmq"
	// TransportPoll asks TensorRT-LLM's server for its events.
	TransportPoll = "http_poll"
)

// EngineWorker says how the engine of a worker is heard. ID, Transport and, unless
// Endpoint says it all, Address are required; the zero value of each other field
// means its default.
type EngineWorker struct {
	ID        uint64
	Name      string // for the log
	Transport string
	Address   string // ip:port of the engine's HTTP server

	// Endpoint is where events come from: tcp://host:port or ipc://path, see
	// [zmtp.ParseEndpoint]; the host "*" is the worker's own. For [TransportPoll]
	// a URL. Empty asks the engine at Address.
	Endpoint string
	// Topic is the prefix of the topics wanted. Default all.
	Topic string
	// Replay is where lost events can be asked for again. Default nowhere, or what
	// the engine says.
	Replay string

	// Queries says that a publisher of ours is at Endpoint, and is asked at Replay
	// for what was missed: [SourcesConfig].Subscriber takes what it says. Both must be
	// set, with [TransportZMQ].
	Queries bool

	// DPStart and DPSize are the ranks; DPSize 0 is 1, or what the engine says.
	DPStart, DPSize uint32
	// BlockSize is the index's. 0 takes the engine's, if it says so.
	BlockSize int
	// Engine is "vllm", "sglang", "trtllm" or unknown.
	Engine string
	// SetLike is as in [EngineOptions].
	SetLike bool

	// Started is when the worker started, if known. A changed value begins anew.
	Started int64
}

// KnownState says how well the cache of a rank is known.
type KnownState uint8

// The states, from best to worst.
const (
	KnownWell    KnownState = iota // all that happened since the engine's start or last clear
	KnownPartly                    // from some time on: blocks are unknown
	KnownSuspect                   // events are missing: blocks may be wrongly known
	KnownMisfit                    // its blocks do not fit the index's: none are known
	KnownNothing                   // not heard of yet, or not now
	knownStates
)

// String returns a word for records and metrics.
func (k KnownState) String() string {
	return [...]string{"ok", "partial", "suspect", "block_size_mismatch", "none"}[min(k, KnownNothing)]
}

// SourcesConfig says where events go. Sink is required; the zero value of each
// other field means its default.
type SourcesConfig struct {
	// Sink takes the events. It is called by one goroutine at a time for a rank.
	Sink events.Sink
	// Subscriber takes those of workers with Queries, and of Dynamo's publishers, and is
	// to ask by [Sources.Ask]. Default: such workers are not followed.
	Subscriber *events.Subscriber
	// Found is told what an engine says of itself, before its events and once for
	// each time that it is asked. It must not call back. Default nobody.
	Found func(id uint64, f Found)
	// Changed is told when it may have changed how well a worker is known. It must
	// not call back. Default nobody.
	Changed func(id uint64, worst KnownState)
	// Client asks engines over HTTP, and Control checks where their sockets are, as
	// [net.Dialer]'s. Default: those of package reach for all networks.
	Client  *http.Client
	Control func(network, address string, _ syscall.RawConn) error
	// Recorder writes down what the engines' sockets say. Default none.
	Recorder *Recorder
	// Log takes a line for each loss and each change. Default none.
	Log *slog.Logger
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

func (c *SourcesConfig) dialer(d *net.Dialer) { d.Control = c.Control }

// Sources follows the caches of workers whose engines are heard without a bus. It
// keeps a goroutine for each socket, which ends with its worker.
//
// # What is promised
//
// For each rank, what the sink gets between two events that clear it is true of
// one process of the engine: the events are those that it published, in order. What
// the engine can send again is asked for after each loss and each new connection;
// what it cannot stays missing, is counted, and the rank counts as suspect. A
// process that starts anew is noticed by its numbers, by the last batch that it no
// longer knows, or by its closed port, and the rank is cleared.
//
// # Concurrency
//
// The methods may be called by any number of goroutines.
type Sources struct {
	conf    SourcesConfig
	metrics *sourceMetrics
	wake    chan struct{} // holds one token while something is to be started or ended
	plane   plane

	mu sync.Mutex
	// mu guards the fields below.
	wanted map[uint64]EngineWorker
	ranks  map[*rankSource]struct{}
	saved  map[WorkerRank]*savedRank // by an earlier process, of ranks not followed yet
	loaded time.Time                 // when
}

// NewSources returns sources of no workers yet.
func NewSources(conf SourcesConfig) (*Sources, error) {
	if conf.Found == nil {
		conf.Found = func(uint64, Found) {}
	}
	if conf.Changed == nil {
		conf.Changed = func(uint64, KnownState) {}
	}
	conf.Log = cmp.Or(conf.Log, slog.New(slog.DiscardHandler))
	if conf.Client == nil {
		conf.Client = reach.Networks{}.Client()
	}
	s := &Sources{
		conf:   conf,
		wake:   make(chan struct{}, 1),
		wanted: make(map[uint64]EngineWorker),
		ranks:  make(map[*rankSource]struct{}),
	}
	s.plane.s, s.plane.wake = s, make(chan struct{}, 1)
	conf.Meter = cmp.Or[metric.Meter](conf.Meter, noop.Meter{})
	var err error
	s.metrics, err = newSourceMetrics(conf.Meter, s)
	return s, err
}

// Set begins to follow a worker, or begins anew if it is not as it was.
func (s *Sources) Set(w EngineWorker) {
	s.mu.Lock()
	s.wanted[w.ID] = w
	s.mu.Unlock()
	stir(s.wake)
}

// Remove ends what follows a worker.
func (s *Sources) Remove(id uint64) {
	s.mu.Lock()
	delete(s.wanted, id)
	s.mu.Unlock()
	stir(s.wake)
}

// stir puts a token into a channel that has room for one.
func stir(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

// Has reports whether s itself orders the events of a worker. It does not for a worker with a
// local indexer, whose events the Subscriber orders.
func (s *Sources) Has(id uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	w, ok := s.wanted[id]
	return ok && !w.Queries
}

// State returns the worst state of a worker's ranks.
func (s *Sources) State(id uint64) KnownState {
	s.mu.Lock()
	defer s.mu.Unlock()
	state, heard := KnownWell, false
	for r := range s.ranks {
		if r.worker.ID == id {
			state, heard = max(state, r.known()), true
		}
	}
	if !heard {
		return KnownNothing
	}
	return state
}

// survey counts ranks by state, and finds the block with most copies.
func (s *Sources) survey() (counts [knownStates]int, copies int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r := range s.ranks {
		counts[r.known()]++
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
		wg.Go(func() { runEach(ctx, s.plane.wake, s.plane.spots, s.plane.follow) })
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
func runEach[K comparable](ctx context.Context, wake <-chan struct{}, wanted func() map[K]bool, run func(context.Context, K)) {
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

// follow follows one worker until ctx ends. An engine that was asked where its sockets are
// is asked again if they become unavailable: it may have restarted with others.
func (s *Sources) follow(ctx context.Context, wanted EngineWorker) {
	log := s.conf.Log.With("worker", wanted.ID, "name", wanted.Name)
	wait := backoff{}
	level := slog.LevelWarn // once
	for ctx.Err() == nil {
		w := wanted // sockets completes it
		sockets, err := s.sockets(ctx, &w)
		if err != nil {
			if ctx.Err() == nil {
				s.metrics.count(ctx, sourceUndiscovered, 1)
				log.Log(ctx, level, "the sockets of an engine are unknown; it is asked again", "err", err)
				level = slog.LevelDebug
			}
			wait.wait(ctx)
			continue
		}
		wait, level = backoff{}, slog.LevelWarn
		own, cancel := context.WithCancel(ctx)
		var wg sync.WaitGroup
		for _, at := range sockets {
			r := newRankSource(s, &w, at, log.With("dp_rank", at.rank))
			s.mu.Lock()
			s.ranks[r] = struct{}{}
			s.mu.Unlock()
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

// discoverEvery is how often an engine whose sockets are unavailable is asked for others.
const discoverEvery = 3 * time.Second

// awaitMove returns when ctx ends, or when an engine says that it has other sockets.
func (s *Sources) awaitMove(ctx context.Context, w EngineWorker, sockets []socket) {
	tick := time.NewTicker(discoverEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if s.State(w.ID) != KnownNothing {
			continue
		}
		if f, err := s.discover(ctx, &w); err == nil && !slices.Equal(f.sockets, sockets) {
			return
		}
	}
}

// socket is where the events of a rank are.
type socket struct {
	rank           uint32
	topic          string
	url            string // of TransportPoll
	events, replay zmtp.Endpoint
	replays        bool // replay is set
	plane          bool // a publisher of ours, that answers queries there
}

// basePort and baseReplayPort are those of rank 0 where an endpoint's port is
// "{rank}".
const (
	basePort       = 5557
	baseReplayPort = 5657
)

// sockets works out where a worker's events are. It asks the engine for what is
// not said, and fills it in.
func (s *Sources) sockets(ctx context.Context, w *EngineWorker) ([]socket, error) {
	switch w.Transport {
	case TransportPoll:
		url := w.Endpoint
		if url == "" {
			url = "http://" + w.Address + "/kv_cache_events"
		}
		w.Engine = cmp.Or(w.Engine, "trtllm")
		return []socket{{rank: w.DPStart, url: url}}, nil
	case TransportZMQ:
	default:
		return nil, fmt.Errorf("events: transport is %q, want %s or %s", w.Transport, TransportZMQ, TransportPoll)
	}
	if w.Queries && (s.conf.Subscriber == nil || w.Endpoint == "" || w.Replay == "") {
		return nil, errors.New("events: a publisher that answers queries needs an endpoint, and one to ask at")
	}
	if w.Endpoint == "" {
		f, err := s.discover(ctx, w)
		if err != nil {
			return nil, err
		}
		w.Engine = cmp.Or(w.Engine, f.Engine)
		w.BlockSize = cmp.Or(w.BlockSize, f.BlockSize)
		w.DPStart, w.DPSize = f.DPStart, f.DPSize
		s.conf.Found(w.ID, f)
		return f.sockets, nil
	}
	host, _, err := net.SplitHostPort(w.Address)
	if err != nil {
		host = "127.0.0.1"
	} else if w.BlockSize == 0 && !w.Queries {
		// Only that is asked for, and it is not worth waiting for.
		if f, err := s.discover(ctx, w); err == nil {
			w.Engine, w.BlockSize = cmp.Or(w.Engine, f.Engine), f.BlockSize
			f.DPStart, f.DPSize = w.DPStart, max(1, w.DPSize)
			s.conf.Found(w.ID, f)
		}
	}
	var sockets []socket
	for i := range max(1, w.DPSize) {
		at := socket{rank: w.DPStart + i, topic: w.Topic, plane: w.Queries}
		live, ask := basePort, baseReplayPort
		if at.plane {
			at.topic, live, ask = events.Topic, PlanePort, QueryPort
		}
		if at.events, err = zmtp.ParseEndpoint(w.Endpoint, live, int(at.rank)); err != nil {
			return nil, err
		}
		at.events = at.events.At(host)
		if w.Replay != "" {
			at.replays = true
			if at.replay, err = zmtp.ParseEndpoint(w.Replay, ask, int(at.rank)); err != nil {
				return nil, err
			}
			at.replay = at.replay.At(host)
		}
		sockets = append(sockets, at)
	}
	return sockets, nil
}

// errNoEvents is wrapped by errors about engines that publish no events.
var errNoEvents = errors.New("it publishes no events")
