// SPDX-License-Identifier: Apache-2.0

// Package sidecar runs beside one engine: it publishes the events of the engine's cache over NATS,
// registers the worker, and keeps it registered while the engine is healthy.
//
// # Promises
//
//   - Events are published only after the worker is registered, and all of them until the sources
//     end: the publisher ends last.
//   - An engine that comes back must give the same answers as before. Otherwise Run fails: a new
//     sidecar then registers the other engine.
//   - If neither block size is a multiple of the other, no events are published, and the worker's
//     record says so.
//
// A [Sidecar] belongs to the goroutine that calls [Sidecar.Run].
package sidecar

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"
	"golang.org/x/sync/errgroup"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/engines/publish"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/records"
	"github.com/kvroute/kvroute/internal/silence"
)

const (
	healthEvery = 2500 * time.Millisecond // between two health checks of the engine
	stateEvery  = time.Second             // between two looks at the state of its events
	loadGood    = 10 * time.Second        // how long a reported load counts: a few heartbeats
	// smallestBlock is the smallest default of block-size. SGLang's pages have one token by default.
	smallestBlock = 16
)

// Sidecar is everything that `kvroute publish` consists of.
type Sidecar struct {
	conf   *Config
	log    *slog.Logger
	meter  metric.Meter
	lost   meter.Counter
	nc     *nats.Conn
	client *http.Client
	// networks allow all addresses.
	networks reach.Networks

	engine    engines.EngineWorker
	record    fleet.Record
	first     answers // of the engine, when it was registered
	mismatch  bool    // the engine's blocks do not fit those of the routers
	publisher *publish.Publisher
	sources   *engines.Sources
	announcer *fleet.Announcer
	healthy   atomic.Bool
	load      engineLoad
}

// New checks the flags, and makes the instruments; docs/metrics.md lists them.
func New(c *Config, log *slog.Logger, from metric.Meter) (*Sidecar, error) {
	record, err := c.record()
	if err != nil {
		return nil, err
	}
	s := &Sidecar{conf: c, log: log, meter: from, record: record, engine: c.engineWorker()}
	if err := s.networks.Secure(c.WorkerTLSCA, c.WorkerTLSName); err != nil {
		return nil, err
	}
	s.client = s.networks.Client()
	s.client.Timeout = c.HealthTimeout
	s.load.publisher = rand.Uint64() & (1<<53 - 1) // every JSON reader keeps it exactly
	m := meter.New(from)
	s.lost = m.Counter("kvroute.publish.lost", "{event}",
		"Events that NATS did not accept and that had no more room to wait.")
	m.Gauge("kvroute.publish.buffered", "By", "Messages that wait for NATS.", func(o meter.Observe) {
		if n, err := s.nc.Buffered(); err == nil { // an error means that the connection is closed: nothing waits
			o(float64(n))
		}
	})
	return s, m.Err()
}

// Run waits for the engine, and publishes its events until ctx ends. metrics is served at /metrics.
func (s *Sidecar) Run(ctx context.Context, metrics http.Handler) (err error) {
	//nolint:contextcheck // the connection's callbacks only log
	if s.nc, err = bus.Connect(s.conf.NATSURL, "kvroute publish "+s.record.Name, &s.conf.Access, s.log); err != nil {
		return err
	}
	defer s.nc.Close()
	defer s.client.CloseIdleConnections()
	if err := s.open(ctx); err != nil {
		return err
	}
	// The publisher ends last: it publishes the events that the sources deliver until they end.
	last, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	parts, ctx := errgroup.WithContext(ctx)
	ready := map[string]string{}
	if s.conf.HTTPAddress != "" {
		//nolint:contextcheck // a context would only limit the look-up of a name
		at, err := silence.Listen("tcp", s.conf.HTTPAddress)
		if err != nil {
			return fmt.Errorf("listen for HTTP: %w", err)
		}
		ready["http"] = at.Addr().String()
		serve(ctx, parts, at, metrics)
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

// serve adds the HTTP server to the parts. It ends with ctx, without waiting for requests.
func serve(ctx context.Context, parts *errgroup.Group, at net.Listener, metrics http.Handler) {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	mux.HandleFunc("GET /healthz", func(http.ResponseWriter, *http.Request) {})
	// On a busy machine a client may need seconds from its connection to its headers.
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	context.AfterFunc(ctx, func() { _ = server.Close() }) // an error: the connections are closed already
	parts.Go(func() error {
		if err := server.Serve(at); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
}

// open waits for the engine and makes all parts; nothing runs yet.
func (s *Sidecar) open(ctx context.Context) (err error) {
	c := s.conf
	if s.sources, err = engines.NewSources(engines.SourcesConfig{
		Sink:   func(_ uint64, rank uint32, ev indexer.Event) { s.publisher.Publish(rank, ev) },
		Client: s.networks.Client(), Log: s.log, Meter: s.meter,
	}); err != nil {
		return err
	}
	if err := s.waitForEngine(ctx); err != nil {
		return err
	}
	if err := s.fitBlocks(); err != nil {
		return err
	}
	s.record.Events = fleet.Events{Transport: "nats", LocalIndexer: c.LocalIndexer}
	if c.Durable {
		s.record.Events.Transport = "jetstream"
	}
	s.engine.ID, s.engine.Name = s.record.ID(), s.record.Name
	s.publisher = publish.New(s.nc, publish.Config{
		Scope: c.Scope, WorkerID: s.engine.ID, LocalIndexer: c.LocalIndexer, Durable: c.Durable,
		Replicas: c.NATSReplicas, Log: s.log,
		Lost: func(n int) { s.lost.Add(n) },
	})
	s.record.Events.PublisherID, s.record.StartedMS = s.publisher.ID(), time.Now().UnixMilli()
	s.announcer, err = fleet.NewAnnouncer(s.nc, fleet.AnnouncerConfig{
		Scope: c.Scope, Record: s.record, Replicas: c.NATSReplicas, Alive: s.healthy.Load, Load: s.load.recent, Log: s.log,
	})
	return err
}

// follow reads the engine's events once the worker is registered: routers must know the worker
// before they receive its events.
func (s *Sidecar) follow(ctx context.Context, ready map[string]string) error {
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

// watch checks the engine's health, and reports in the record how completely its events are known.
// It fails when another engine is at the address.
func (s *Sidecar) watch(ctx context.Context) error {
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
			now := s.sources.State(s.engine.ID)
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
