// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"
	"golang.org/x/sync/errgroup"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/records"
	"github.com/kvroute/kvroute/internal/telemetry"
)

const (
	healthEvery = 2500 * time.Millisecond // between two health checks of the engine
	stateEvery  = time.Second             // between two looks at how well its cache is known
	loadGood    = 10 * time.Second        // how long a reported load counts: a few heartbeats
	// smallestBlock is the smallest default of block-size. SGLang's pages have one token by default.
	smallestBlock = 16
)

// sidecar is everything that `kvroute publish` consists of.
type sidecar struct {
	conf   *publishConfig
	log    *slog.Logger
	nc     *nats.Conn
	client *http.Client

	engine    engines.EngineWorker
	record    fleet.Record
	met       answers // of the engine, when it was registered
	mismatch  bool    // the engine's blocks do not fit those of the routers
	publisher *engines.Publisher
	sources   *engines.Sources
	announcer *fleet.Announcer
	alive     atomic.Bool
	load      engineLoad
}

// answers is what an engine reports about itself, for values that the flags do not set. Zero values
// are unknown.
type answers struct {
	models []string
	found  engines.Found
}

func newSidecar(c *publishConfig, record fleet.Record, log *slog.Logger) *sidecar {
	s := &sidecar{conf: c, log: log, client: reach.Networks{}.Client(), record: record, engine: c.engineWorker()}
	s.client.Timeout = 2 * time.Second
	s.load.publisher = rand.Uint64() & (1<<53 - 1) // every JSON reader keeps it exactly
	return s
}

// open waits for the engine and makes all parts; nothing runs yet.
func (s *sidecar) open(ctx context.Context, meter metric.Meter, recorder *engines.Recorder) (err error) {
	c := s.conf
	if s.sources, err = engines.NewSources(engines.SourcesConfig{
		Sink: func(_ uint64, rank uint32, ev indexer.Event) {
			s.publisher.Publish(rank, ev)
		},
		Recorder: recorder, Log: s.log, Meter: meter,
	}); err != nil {
		return err
	}
	if err := s.waitForEngine(ctx); err != nil {
		return err
	}
	if err := s.fitBlocks(); err != nil {
		return err
	}
	if recorder != nil {
		recorder.Note("begin", fmt.Sprintf("kvroute %s, worker %s, engine %q at %s, models %q, adapters %q, blocks of %d tokens there and %d here, ranks from %d: %d",
			telemetry.Version(), s.record.Name, s.engine.Engine, s.engine.Address, s.record.Models, s.record.LoRA, s.met.found.BlockSize, s.record.BlockSize, s.record.DPStart, max(1, s.record.DPSize)))
	}
	s.record.Events = fleet.Events{Transport: "nats", LocalIndexer: c.LocalIndexer}
	if c.Durable {
		s.record.Events.Transport = "jetstream"
	}
	s.engine.ID, s.engine.Name = s.record.ID(), s.record.Name
	lost, err := s.instruments(meter)
	if err != nil {
		return err
	}
	s.publisher = engines.NewPublisher(s.nc, engines.PublisherConfig{
		Scope: c.scope(), WorkerID: s.engine.ID, LocalIndexer: c.LocalIndexer, Durable: c.Durable, Replicas: c.NATSReplicas, Log: s.log,
		Lost: func(n int) { lost.Add(ctx, int64(n)) },
	})
	s.record.Events.PublisherID, s.record.StartedMS = s.publisher.ID(), time.Now().UnixMilli()
	s.announcer, err = fleet.NewAnnouncer(s.nc, fleet.AnnouncerConfig{
		Scope: c.scope(), Record: s.record, Replicas: c.NATSReplicas, Alive: s.alive.Load, Load: s.load.recent, Log: s.log,
	})
	return err
}

// waitForEngine waits until the engine answers, and completes the record with its answers.
func (s *sidecar) waitForEngine(ctx context.Context) (err error) {
	level := slog.LevelInfo
	for {
		if s.met, err = s.ask(ctx); err == nil {
			break
		}
		if ctx.Err() == nil {
			s.log.Log(ctx, level, "waiting for the engine", "engine", s.engine.Address, "err", err)
			level = slog.LevelDebug
		}
		select {
		case <-ctx.Done():
			return errInterrupted
		case <-time.After(time.Second):
		}
	}
	f := &s.met.found
	s.alive.Store(true)
	s.record.Models = s.met.models
	s.record.Engine = cmp.Or(s.record.Engine, f.Engine)
	if s.conf.ZMQ == "" && f.DPSize > 0 {
		s.record.DPStart, s.record.DPSize = f.DPStart, f.DPSize
	}
	s.engine.Engine, s.engine.DPStart, s.engine.DPSize = s.record.Engine, s.record.DPStart, s.record.DPSize
	return nil
}

// ask checks whether the engine is alive, and requests the values that the flags do not set.
func (s *sidecar) ask(ctx context.Context) (a answers, err error) {
	if _, err := s.get(ctx, s.conf.HealthPath); err != nil {
		return a, err
	}
	if a.models = commaList(s.conf.Model); a.models == nil {
		var answer struct{ Data []struct{ ID string } }
		body, err := s.get(ctx, "/v1/models")
		if err == nil {
			err = json.Unmarshal(body, &answer)
		}
		if err != nil {
			return a, err
		}
		for _, m := range answer.Data {
			a.models = append(a.models, m.ID)
		}
	}
	if s.engine.Transport != engines.TransportZMQ {
		return a, nil
	}
	if a.found, err = s.sources.Discover(ctx, s.conf.engineWorker()); s.conf.ZMQ != "" {
		err = nil // the flags have all necessary values
	}
	return a, err
}

func (s *sidecar) get(ctx context.Context, path string) ([]byte, error) {
	return fetch(ctx, s.client, "http://"+s.engine.Address+path)
}

// fitBlocks sets the size of the record's blocks, and compares it with the engine's.
func (s *sidecar) fitBlocks() error {
	own, theirs := s.met.found.BlockSize, s.record.BlockSize
	switch {
	case own == 0 && theirs == 0:
		return errors.New("block-size is 0, and the engine does not say its own")
	case theirs == 0:
		s.record.BlockSize = own
		if own < smallestBlock && smallestBlock%own == 0 {
			s.record.BlockSize = smallestBlock
		}
	case own > 0 && own%theirs != 0 && theirs%own != 0:
		s.mismatch = true
		s.record.KVEvents = engines.KnownMisfit.String()
		s.log.Error("neither block size is a multiple of the other: no events are published, and routers estimate what the engine caches",
			"engine_block_size", own, "block_size", theirs)
	}
	if s.record.TotalKVBlocks == 0 {
		s.record.TotalKVBlocks = s.met.found.TotalKVBlocks
		if own > 0 {
			s.record.TotalKVBlocks = s.record.TotalKVBlocks * own / s.record.BlockSize
		}
	}
	s.engine.BlockSize = s.record.BlockSize
	return nil
}

// instruments makes the metrics of messages that wait for the bus and of lost events.
// docs/metrics.md lists them.
func (s *sidecar) instruments(meter metric.Meter) (lost metric.Int64Counter, err error) {
	lost, err1 := meter.Int64Counter("kvroute.publish.lost",
		metric.WithUnit("{event}"), metric.WithDescription("Events that the bus did not take and that had no more room to wait."))
	_, err2 := meter.Int64ObservableGauge("kvroute.publish.buffered",
		metric.WithUnit("By"), metric.WithDescription("Messages that wait for the bus."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			if n, err := s.nc.Buffered(); err == nil { // an error means that the connection is closed: nothing waits
				o.Observe(int64(n))
			}
			return nil
		}))
	return lost, errors.Join(err1, err2)
}

// run runs all parts until ctx ends or one of them fails.
func (s *sidecar) run(ctx context.Context, metrics http.Handler) error {
	var ready addresses
	// The publisher ends last: it publishes the events that the sources deliver until they end.
	last, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	parts, ctx := errgroup.WithContext(ctx)
	if s.conf.HTTPAddress != "" {
		at, err := net.Listen("tcp", s.conf.HTTPAddress)
		if err != nil {
			return fmt.Errorf("listen for HTTP: %w", err)
		}
		ready.HTTP = at.Addr().String()
		mux := http.NewServeMux()
		mux.Handle("GET /metrics", metrics)
		mux.HandleFunc("GET /healthz", func(http.ResponseWriter, *http.Request) {})
		serveHTTP(ctx, parts, at, mux)
	}
	parts.Go(func() error { return s.announcer.Run(ctx) })
	parts.Go(func() error { return s.publisher.Run(last) })
	parts.Go(func() error { return s.watch(ctx) })
	parts.Go(func() error {
		defer end()
		return s.follow(ctx, ready)
	})
	return parts.Wait()
}

// follow reads the engine's events once the worker is registered: routers must know the worker
// before they receive its events.
func (s *sidecar) follow(ctx context.Context, ready addresses) error {
	select {
	case <-ctx.Done():
		return nil
	case <-s.announcer.Registered():
	}
	s.log.Info("the worker is registered", "worker", s.engine.ID, "address", s.record.Address, "models", s.record.Models,
		"block_size", s.record.BlockSize, "engine", s.engine.Engine)
	if s.conf.ReadyFile != "" {
		if err := records.WriteJSON(s.conf.ReadyFile, ready); err != nil {
			return fmt.Errorf("ready-file: %w", err)
		}
	}
	if s.mismatch {
		<-ctx.Done()
		return nil
	}
	s.sources.Set(s.engine)
	return s.sources.Run(ctx)
}

// watch checks the engine's health, and reports in the record how well its cache is known.
// It fails when another engine is at the address.
func (s *sidecar) watch(ctx context.Context) error {
	health, state := time.NewTicker(healthEvery), time.NewTicker(stateEvery)
	defer health.Stop()
	defer state.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-health.C:
			if err := s.checkHealth(ctx); err != nil {
				return err
			}
		case <-state.C:
			now := s.sources.State(s.engine.ID).String()
			if s.mismatch || now == s.record.KVEvents {
				continue
			}
			s.record.KVEvents = now
			if err := s.announcer.Update(s.record); err != nil {
				return err
			}
		}
	}
}

// checkHealth checks whether the engine is alive, and how busy it is. An engine that comes back must
// give the same answers as before.
func (s *sidecar) checkHealth(ctx context.Context) error {
	was := s.alive.Load()
	_, err := s.get(ctx, s.conf.HealthPath)
	if err == nil && !was {
		var now answers
		if now, err = s.ask(ctx); err == nil {
			if other := now.difference(&s.met); other != "" {
				return errors.New("another engine is at the address: " + other + "; start again to register it")
			}
		}
	}
	if err == nil {
		s.measure(ctx)
	}
	if s.alive.Store(err == nil); was != (err == nil) && ctx.Err() == nil {
		s.log.Warn("the engine's health has changed", "alive", err == nil, "err", err)
	}
	return nil
}

// difference names the first answer in which an engine differs from the earlier one. Unknown answers
// equal any answer.
func (a *answers) difference(before *answers) string {
	f, old := &a.found, &before.found
	for _, d := range []struct {
		what     string
		now, was any
		known    bool
	}{
		{"models", a.models, before.models, true},
		{"engine", f.Engine, old.Engine, f.Engine != "" && old.Engine != ""},
		{"tokens in a block", f.BlockSize, old.BlockSize, f.BlockSize > 0 && old.BlockSize > 0},
		{"ranks from", [2]uint32{f.DPStart, f.DPSize}, [2]uint32{old.DPStart, old.DPSize}, f.DPSize > 0 && old.DPSize > 0},
	} {
		if now, was := fmt.Sprint(d.now), fmt.Sprint(d.was); d.known && now != was {
			return fmt.Sprintf("%s %s, before %s", d.what, now, was)
		}
	}
	return ""
}

// engineLoad is the load that an engine last reported.
type engineLoad struct {
	publisher uint64 // id that signs the messages of used blocks; not the id of events
	sequence  uint64 // of these messages
	unknown   sync.Once

	mu sync.Mutex
	// mu guards the fields below.
	ranks map[uint32]fleet.Load
	at    time.Time
}

// recent is the load for heartbeats: the zero load if the last report is too old.
func (l *engineLoad) recent() fleet.Load {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.at) > loadGood {
		return fleet.Load{}
	}
	return fleet.Total(l.ranks)
}

// measure reads the engine's load from its metrics, keeps it for the heartbeats, and
// publishes how many blocks of its cache each rank uses.
func (s *sidecar) measure(ctx context.Context) {
	paths := fleet.LoadPaths[:]
	if s.conf.MetricsPath != "" {
		paths = []string{s.conf.MetricsPath}
	}
	ranks, _, err := fleet.AskLoad(paths, fleet.Capacity{Blocks: s.record.TotalKVBlocks, BlockSize: s.record.BlockSize},
		func(path string) ([]byte, error) { return s.get(ctx, path) })
	if err != nil {
		if ctx.Err() == nil {
			s.load.unknown.Do(func() { s.log.Info("the engine does not report its load, so heartbeats have none", "err", err) })
		}
		return
	}
	s.load.mu.Lock()
	s.load.ranks, s.load.at = ranks, time.Now()
	s.load.mu.Unlock()
	for rank, l := range ranks {
		e := events.Envelope{
			PublisherID: s.load.publisher, Sequence: s.load.sequence, PublishedAt: uint64(time.Now().UnixMilli()), Topic: events.LoadTopic,
			Payload: events.AppendUsedBlocks(nil, s.engine.ID, rank, uint64(l.KVUsedBlocks)),
		}
		s.load.sequence++
		// The next message replaces a lost one.
		_ = s.nc.Publish(s.conf.scope().Topic(events.LoadTopic), events.AppendEnvelope(nil, e))
	}
}
