// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/attention"
	"github.com/kvroute/kvroute/bench/replay"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/records"
	"github.com/kvroute/kvroute/internal/replica"
	"github.com/kvroute/kvroute/internal/silence"
	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/outcomes"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// serve runs the external processor until ctx ends, then drains.
func serve(ctx context.Context, args []string, std stdio) (err error) {
	// Before the configuration is read: otherwise an early SIGHUP would end the process.
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	var readyFile string
	began := time.Now() // files with a later time have changed since they were read
	read := func() (config, string, error) {
		return readConfig("serve", args, func(fs *flag.FlagSet) {
			fs.StringVar(&readyFile, "ready-file", "", "`file` that gets the addresses as JSON once they are open")
		})
	}
	conf, file, err := read()
	if err != nil {
		return err
	}
	names := new(workerNames)
	level := telemetry.Level(conf.LogLevel)
	log := telemetry.NewLogger(std.err, level, conf.LogFormat, names.replace)
	networks, _ := reach.Parse(conf.WorkerNetworks) // readConfig has checked them
	log.Info("kvroute starts", "version", telemetry.Version(), "mode", conf.RouterMode)
	conf.warnOfReaders(log)
	if err := networks.Secure(conf.WorkerTLSCA, conf.WorkerTLSName); err != nil {
		return err
	}
	s := server{
		conf: conf, given: conf, read: read, file: file, hup: hup, networks: networks, log: log, level: level, names: names,
		id:    rand.Uint64() & (1<<53 - 1), // every JSON reader keeps it exactly
		begun: began, client: networks.Client(),
	}
	s.networks.Own = s.listensAt
	s.shared.Store(conf.shared())
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.open(); err != nil {
		return err
	}
	if readyFile != "" {
		if err := records.WriteJSON(readyFile, s.addresses()); err != nil {
			return fmt.Errorf("ready-file: %w", err)
		}
	}
	boundGarbage(ctx, mostGarbage)
	return s.run(ctx)
}

// open makes all parts and opens the listeners; nothing runs yet.
func (s *server) open() (err error) {
	if s.metrics, err = telemetry.NewMetrics(); err != nil {
		return err
	}
	if s.metered, err = newCounters(s.metrics.Meter("kvroute")); err != nil {
		return err
	}
	for _, open := range []func() error{
		s.checkPorts, s.lockStateDir, s.openBus, s.openRouter, s.openSync, s.openEvents, s.openDurable, s.loadState,
		s.openFleet, s.openKubernetes, s.openGroups, s.openExtproc, s.openHTTP, s.openWatch,
		s.openDynamo, // last: its records must not name our listeners
	} {
		if err := open(); err != nil {
			return err
		}
	}
	return nil
}

// openRouter makes the router, and the observers of its decisions.
func (s *server) openRouter() error {
	c := &s.conf
	rc, err := c.routing()
	if err != nil {
		return err
	}
	s.prompts = tokenizer.NewCache(c.TokenizerCacheBytes)
	if rc.Cards, err = c.loadCards(s.prompts, s.log); err != nil {
		return err
	}
	var observers []func(router.Observation)
	if c.VerifyTokenizer {
		s.verifier = newVerifier(s.log, s.metered.checks, s.client)
		s.verifier.answered = func(o *router.Observation, theirs []uint32) int { return s.router.Answered(o, theirs) }
		observers = append(observers, s.verifier.observe)
	}
	if c.TraceOut != "" {
		if s.tracer, err = replay.NewTracer(replay.TracerConfig{
			File: c.TraceOut, TPOT: c.TraceOutTPOT, Seed: rand.Uint64(), Prefix: extproc.IDPrefix(s.id),
			Log: s.log, Meter: s.metrics.Meter("trace"),
		}); err != nil {
			return err
		}
		observers = append(observers, s.tracer.Observe)
	}
	if len(observers) > 0 {
		rc.Hooks.Observe = func(o router.Observation) {
			for _, observe := range observers {
				observe(o)
			}
		}
	}
	if s.outcomes, err = outcomes.New(s.metrics.Meter("outcomes"), time.Now); err != nil {
		return err
	}
	s.setHooks(&rc.Hooks)
	rc.Meter = s.metrics.Meter("router")
	if rc.Probe, err = s.openProbes(); err != nil {
		return err
	}
	if s.router, err = router.New(rc); err != nil {
		return err
	}
	return s.metrics.Register(workerMetrics, s.readWorkers)
}

// setHooks sets all hooks of the router but Observe.
func (s *server) setHooks(h *router.Hooks) {
	h.Finished, h.Used = s.finished(), s.outcomes.Used
	h.Departs, h.Learned, h.Panic, h.Forgot = s.departs, s.learned, s.panics, s.forgot
	h.Judged, h.Flags = s.judged, func(id uint64, before, now []router.Fault) { s.faults.report(id, before, now) }
	h.Answered = func(id uint64) { s.registry.Answered(id) }
	h.Tell, h.TellSession, h.TellGiven = s.publishChange(), s.publishSession(), s.publishGiven()
}

// finished returns what is done with the outcome of each request.
func (s *server) finished() func(router.Outcome) {
	var err error
	if s.traces, err = telemetry.NewTraces(context.Background(), s.log, s.metered.spans.Add); err != nil {
		s.log.Warn("there are no traces", "err", err)
	}
	if s.traces == nil {
		return s.outcomes.Finished
	}
	s.log.Info("spans are exported")
	tracer := s.traces.Tracer("github.com/kvroute/kvroute")
	return func(o router.Outcome) {
		s.outcomes.Finished(o)
		outcomes.Trace(tracer, &o)
	}
}

// openEvents makes the readers of the workers' events, from NATS and from engines.
func (s *server) openEvents() (err error) {
	if s.events, err = events.NewSubscriber(s.nc, events.SubscriberConfig{
		Scope: s.conf.Scope,
		Sink: func(id uint64, rank uint32, ev indexer.Event) {
			s.router.ApplyEvent(router.Worker{ID: id, DPRank: rank}, ev)
		},
		Knows: s.router.Knows,
		Changed: func(id uint64, rank uint32, state indexer.State) {
			s.router.SetEventState(router.Worker{ID: id, DPRank: rank}, state)
		},
		Ask: func(ctx context.Context, q events.Query, part func(events.AnswerPart) bool) error {
			return s.direct.Sources().Dynamo.Ask(ctx, q, part)
		},
		Log:   s.log,
		Meter: s.metrics.Meter("events"),
	}); err != nil {
		return err
	}
	s.faults = newWorkerFaults(s.router.SetFaults, s.log)
	if s.direct, err = fleet.NewDirectWorkers(fleet.DirectConfig{
		Router: s.router, Scope: s.conf.Scope, Subscriber: s.events, Client: s.client, Networks: s.networks,
		Ended:  func(id uint64) { s.registry.Doubt(id) },
		Faults: s.faults.set, Connected: s.connected,
		Log: s.log, Meter: s.metrics.Meter("source"),
	}); err != nil {
		return err
	}
	s.holdings = replica.Holdings(replica.Config{
		Router: s.router, Direct: s.direct.Sources().Has, Expect: s.expected.add, Log: s.log,
	})
	return nil
}

// openFleet makes the registry of workers, with the workers of the configuration.
func (s *server) openFleet() (err error) {
	c := &s.conf
	if s.registry, err = fleet.NewRegistry(s.nc, fleet.RegistryConfig{
		Scope:    s.conf.Scope,
		Replicas: c.NATSReplicas,
		Networks: s.networks,
		Ages:     fleet.Ages{Degraded: c.DegradedAfter, Unhealthy: c.UnhealthyAfter, Expired: c.ExpiredAfter},
		Room:     func(info router.WorkerInfo) error { return s.router.CheckRoom(&info) },
		Set:      s.setWorker,
		Remove:   s.removeWorker,
		Events:   s.follow,
		Load:     s.engineLoad,
		Traffic:  s.traffic,
		Probe: func(info router.WorkerInfo, own *fleet.Probe, done func(error)) bool {
			return s.prober.Now(info, own, done)
		},
		Silent: s.silent,
		Log:    s.log,
		Meter:  s.metrics.Meter("fleet"),
	}); err != nil {
		return err
	}
	s.compared = fleet.NewComparison(fleet.ComparisonConfig{Faults: s.faults.set, Workers: s.direct})
	if s.prober, err = fleet.NewProber(fleet.ProberConfig{
		Probed: s.probed, Load: s.rankLoads, Compare: s.compared, Client: s.client, Log: s.log, Meter: s.metrics.Meter("fleet"),
	}); err != nil {
		return err
	}
	s.static = newStatic(s.registry.SetStatic, s.registry.SetUnresolved, s.log)
	if err := s.static.set(context.Background(), c.Workers); err != nil {
		return err
	}
	s.warnOfWorkers()
	return nil
}

func (s *server) openExtproc() (err error) {
	c := &s.conf
	var decider extproc.Router = s.router
	if s.tracer != nil {
		s.tracer.Router = s.router
		decider = s.tracer
	}
	c.fitMemory(memoryLimit(os.DirFS("/")))
	s.log.Debug("bounds", "held_bytes", c.MaxHeldBytes, "streams", c.MaxStreams)
	conf := c.extproc()
	conf.Bodies.Known = s.prompts
	conf.RouterID, conf.Networks, conf.Client, conf.Log, conf.Meter = s.id, s.networks, s.client, s.log, s.metrics.Meter("extproc")
	conf.Started, conf.Models = s.started.Load, s.router.ServedModels
	conf.Synced = s.sync != nil
	conf.NoResponse = func(id uint64) {
		s.registry.Why(id, func(cause string) { s.router.Unanswered(id, cause) })
	}
	if s.extproc, err = extproc.New(conf, decider); err != nil {
		return err
	}
	options := s.extproc.ServerOptions()
	if c.ExtprocConnectionAge > 0 {
		// Without a grace period: streams on an old connection run to their end.
		options = append(options, grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: c.ExtprocConnectionAge}))
	}
	secured, err := c.extprocTLS(s.log)
	if err != nil {
		return err
	}
	if secured != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(secured)))
	}
	s.grpc = grpc.NewServer(options...)
	s.extproc.Register(s.grpc)
	s.health = health.NewServer()
	s.health.SetServingStatus("liveness", healthpb.HealthCheckResponse_SERVING)
	s.serving(healthpb.HealthCheckResponse_NOT_SERVING)
	healthpb.RegisterHealthServer(s.grpc, s.health)
	s.grpcAt, err = listen(c.ExtprocAddress)
	return err
}

// extproc returns the settings of Envoy's streams.
func (c *config) extproc() extproc.Config {
	return extproc.Config{
		MaxBodyBytes:    c.MaxBodyBytes,
		DecisionTimeout: c.DecisionTimeout,
		MaxHeldBytes:    c.MaxHeldBytes,
		MaxStreams:      c.MaxStreams,
		QueueWait:       c.QueueWait,
		OverloadStatus:  c.OverloadStatus,
		SessionHeaders:  c.sessionHeaders(),
		TrustOverrides:  c.TrustOverrides,
		AllowDirect:     c.AllowDirect,
		Group:           c.Group,
		DecisionHeaders: c.DecisionHeaders,
		FirstToken:      c.FirstToken,
		AuditShare:      c.AuditShare,
		ObserveShare:    c.ObserveShare,
		SecondChoice:    c.SecondChoice,
		PrefillLeg:      c.PrefillLeg,
		PrefillTimeout:  c.PrefillTimeout,
		KVPull:          c.KVPull,
		EndpointPicker:  c.EndpointPicker,
		ModeOverride:    c.ModeOverride, MaxMessageTimeout: max(c.EnvoyMaxMessageTimeout, c.longestWait()),
	}
}

func (s *server) openHTTP() (err error) {
	if s.conf.APITokenFile != "" {
		if s.tokens, err = api.OpenTokens(s.conf.APITokenFile); err != nil {
			return err
		}
	}
	draining := make(chan struct{})
	conf := api.Config{
		TrustOverrides: s.conf.TrustOverrides,
		Router:         s.router,
		Client:         s.client,
		Metrics:        s.metrics.Handler(),
		Ready:          s.checks(),
		Replica:        s.replica,
		Scope:          s.scopeName(),
		Stream:         s.position,
		Fleet:          s.registry,
		Tokens:         s.tokens,

		Draining:  draining,
		Outcomes:  s.outcomes,
		Holdout:   s.conf.HoldoutShare,
		Attention: attention.NewLog(attention.DocsOf(telemetry.Version())),
		Docs:      attention.DocsOf(telemetry.Version()),
		Prefixes:  func() any { return s.router.HotPrefixes() },

		OverloadStatus:  s.conf.OverloadStatus,
		QueueWait:       s.conf.QueueWait,
		DecisionTimeout: s.conf.DecisionTimeout,
		RunLeg:          s.extproc.RunLeg, WorkerHeaders: s.extproc.WorkerHeaders, OneChoice: s.conf.SecondChoice == extproc.SecondNone,
		HoldBody: s.extproc.HoldBody, ReleaseBody: s.extproc.ReleaseBody,
	}
	s.readiness, s.observe = conf.Readiness, conf.Observe
	s.http = &http.Server{
		Handler:           api.New(conf),
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	s.http.RegisterOnShutdown(func() { close(draining) })
	secured, err := s.conf.httpTLS(s.log)
	if err != nil {
		return err
	}
	s.httpAt, err = silence.Listen("tcp", s.conf.HTTPAddress)
	if err == nil && secured != nil {
		s.httpAt = tls.NewListener(s.httpAt, secured)
	}
	return err
}

func (s *server) addresses() addresses {
	a := addresses{HTTP: s.httpAt.Addr().String(), Extproc: s.grpcAt.Addr().String()}
	if s.grpcAt.Addr().Network() == "unix" {
		a.Extproc = "unix:" + a.Extproc
	}
	if s.conf.NATSListen != "" && s.bus != nil {
		a.NATS = s.bus.URL()
	}
	return a
}

// run runs all parts until ctx ends or one of them fails. ARCHITECTURE.md lists each part, and each
// goroutine that a part starts.
func (s *server) run(ctx context.Context) error {
	s.log.Info("kvroute is open", "extproc", s.grpcAt.Addr().String(), "http", s.httpAt.Addr().String())
	parts, ctx := errgroup.WithContext(ctx)
	runs := []func(context.Context) error{
		s.registry.Run, s.prober.Run, s.static.run, s.followUsedBlocks, s.router.Run, s.warmUp, s.reload, s.serveEnvoy,
		s.serveAPI, s.logStatus, s.observeAttention,
	}
	when := func(is bool, run ...func(context.Context) error) {
		if is {
			runs = append(runs, run...)
		}
	}
	wanted := s.router.WantsEvents()
	when(s.dynamo != nil, s.dynamo.Run)
	when(s.pods != nil, s.pods.Run)
	when(s.watch != nil, s.watchEnvoy)
	when(s.conf.EndpointFile != "", (&endpointFile{path: s.conf.EndpointFile, id: s.id, known: s.started.Load, workers: s.router.Workers, chosen: s.conf.SecondChoice == "list", log: s.log}).run)
	when(wanted, s.events.Run, s.direct.Sources().Run, s.expireEvents, s.forgetExpected)
	when(wanted && s.durable != nil, s.readStream)
	when(s.state != nil, s.keepState)
	when(s.group != nil, s.group.Run)
	when(s.groups != nil, s.groups.Run)
	when(s.tracer != nil, s.tracer.Run)
	when(s.verifier != nil, s.verifier.run)
	for _, run := range runs {
		parts.Go(func() error { return run(ctx) })
	}
	// This replica announces itself until its last request has ended.
	drained, leave := context.WithCancel(context.WithoutCancel(ctx))
	if s.sync != nil {
		parts.Go(func() error { return s.sync.Run(drained) })
	}
	parts.Go(func() error {
		<-ctx.Done()
		defer leave()
		return s.drain()
	})
	return parts.Wait()
}

func (s *server) followUsedBlocks(ctx context.Context) error {
	return events.FollowUsedBlocks(ctx, s.nc, s.conf.Scope, s.usedBlocks)
}

// serveEnvoy and serveAPI end when drain stops their servers.
func (s *server) serveEnvoy(context.Context) error { return s.grpc.Serve(s.grpcAt) }

func (s *server) serveAPI(context.Context) error {
	if err := s.http.Serve(s.httpAt); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// expireEvents requests the events of a worker again if one of them waited too long for an earlier
// one.
func (s *server) expireEvents(ctx context.Context) error {
	return every(ctx, 5*time.Second, func() {
		for _, w := range s.router.ExpireEvents() {
			s.events.Doubt(w.ID, w.DPRank)
		}
	})
}

// drain fails the health check, decides requests until Envoy has noticed, and waits for
// decisions in progress. Responses continue without kvroute.
func (s *server) drain() error {
	s.log.Info("draining")
	force := time.AfterFunc(s.conf.DrainTimeout, s.grpc.Stop)
	defer force.Stop()
	s.serving(healthpb.HealthCheckResponse_NOT_SERVING)
	<-time.After(min(s.conf.DrainDelay, s.conf.DrainTimeout))
	s.extproc.Drain()
	s.grpc.GracefulStop()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := s.http.Shutdown(ctx); err != nil {
		return s.http.Close()
	}
	return nil
}

// close releases what open acquired, even if open failed halfway.
func (s *server) close() error {
	s.nc.Close() // may be nil
	if s.bus != nil {
		s.bus.Stop()
	}
	if s.grpc != nil {
		s.grpc.Stop() // its goroutines wait for streams even if it never ran
	}
	for _, l := range []net.Listener{s.grpcAt, s.httpAt} {
		if l != nil {
			_ = l.Close() // closed already, if its server ran
		}
	}
	if s.state != nil {
		_ = s.state.Close() // only a handle
	}
	if s.stateLock != nil {
		_ = s.stateLock.Close() // unlocks the folder
	}
	if s.traces != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second) // a collector may not answer
		defer cancel()
		if err := s.traces.Shutdown(ctx); err != nil {
			s.log.Warn("the last spans were not exported", "err", err)
		}
	}
	if s.metrics != nil {
		return s.metrics.Shutdown(context.Background())
	}
	return nil
}
