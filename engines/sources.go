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
	"reflect"
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
	saved  map[WorkerRank][]byte // by an earlier process, of ranks not followed yet
	loaded time.Time             // when
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
	s.stir()
}

// Remove ends what follows a worker.
func (s *Sources) Remove(id uint64) {
	s.mu.Lock()
	delete(s.wanted, id)
	s.mu.Unlock()
	s.stir()
}

func (s *Sources) stir() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Has reports whether a worker is followed.
func (s *Sources) Has(id uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.wanted[id]
	return ok
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

// following is a worker that is being followed.
type following struct {
	worker EngineWorker
	cancel context.CancelFunc
	done   chan struct{}
}

// Run follows the workers until ctx ends.
func (s *Sources) Run(ctx context.Context) error {
	defer s.conf.Client.CloseIdleConnections()
	var wg sync.WaitGroup
	defer wg.Wait()
	if s.conf.Subscriber != nil {
		wg.Go(func() { s.plane.run(ctx) })
	}
	running := make(map[uint64]*following)
	end := func(id uint64) {
		f := running[id]
		delete(running, id)
		f.cancel()
		<-f.done
	}
	for {
		s.mu.Lock()
		var start []EngineWorker
		for id, w := range s.wanted {
			if f := running[id]; f == nil || !reflect.DeepEqual(f.worker, w) {
				start = append(start, w)
			}
		}
		var stop []uint64
		for id := range running {
			if _, ok := s.wanted[id]; !ok {
				stop = append(stop, id)
			}
		}
		s.mu.Unlock()
		for _, id := range stop {
			end(id)
		}
		for _, w := range start {
			if running[w.ID] != nil {
				end(w.ID)
			}
			f := &following{worker: w, done: make(chan struct{})}
			var own context.Context
			own, f.cancel = context.WithCancel(ctx)
			running[w.ID] = f
			go func() {
				defer close(f.done)
				s.follow(own, w)
			}()
		}
		select {
		case <-ctx.Done():
			for id := range running {
				end(id)
			}
			return nil
		case <-s.wake:
		}
	}
}

// follow follows one worker until ctx ends.
func (s *Sources) follow(ctx context.Context, w EngineWorker) {
	log := s.conf.Log.With("worker", w.ID, "name", w.Name)
	asked := w // sockets fills in what is not said
	wait := backoff{}
	level := slog.LevelWarn // once
	for ctx.Err() == nil {
		sockets, err := s.sockets(ctx, &w)
		if err == nil {
			var wg sync.WaitGroup
			for _, at := range sockets {
				r := newRankSource(s, &w, at, log.With("dp_rank", at.rank))
				s.mu.Lock()
				s.ranks[r] = struct{}{}
				s.mu.Unlock()
				wg.Go(func() { r.run(ctx) })
			}
			wg.Wait()
			s.ended(asked)
			return
		}
		if ctx.Err() == nil {
			s.metrics.count(ctx, sourceUndiscovered, 1)
			log.Log(ctx, level, "where an engine's events are is not known; it is asked again", "err", err)
			level = slog.LevelDebug
		}
		wait.wait(ctx)
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

// backoff waits longer each time: 200 ms doubling to 5 s.
type backoff struct{ next time.Duration }

func (b *backoff) step() time.Duration {
	d := max(b.next, 200*time.Millisecond)
	b.next = min(2*d, 5*time.Second)
	return d
}

func (b *backoff) wait(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(b.step()):
	}
}

// errNoEvents is wrapped by errors about engines that publish no events.
var errNoEvents = errors.New("it publishes no events")
