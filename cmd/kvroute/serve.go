// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/bench/replay"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/records"
	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// addresses is what a ready file says.
type addresses struct {
	Extproc string `json:"extproc,omitempty"`
	HTTP    string `json:"http"`
	NATS    string `json:"nats,omitempty"`
	Events  string `json:"events,omitempty"`
	Queries string `json:"queries,omitempty"`
}

// serve runs the external processor until ctx ends, then drains.
func serve(ctx context.Context, args []string, std stdio) (err error) {
	// Before the configuration is read: later an early SIGHUP would end the process.
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	var readyFile string
	began := time.Now() // a file that is newer has changed since it was read
	read := func() (config, string, error) {
		return readConfig("serve", args, std.err, func(fs *flag.FlagSet) {
			fs.StringVar(&readyFile, "ready-file", "", "`file` that gets the addresses as JSON once they are open")
		})
	}
	conf, file, err := read()
	if err != nil {
		return err
	}
	names := new(workerNames)
	log, err := telemetry.NewLogger(std.err, conf.LogLevel, conf.LogFormat, names.replace)
	if err != nil {
		return err
	}
	log.Info("kvroute starts", "version", telemetry.Version(), "mode", conf.RouterMode)
	networks, err := reach.Parse(conf.WorkerNetworks)
	if err != nil {
		return err
	}

	s := server{
		conf: conf, given: conf, read: read, file: file, hup: hup, networks: networks, log: log, names: names, scope: conf.scope(),
		id:    rand.Uint64() & (1<<53 - 1), // every JSON reader keeps it exactly
		begun: began, client: networks.Client(),
	}
	s.networks.Own = s.listensAt
	if s.shared, err = conf.shared(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.open(); err != nil {
		return err
	}
	if readyFile != "" {
		if err := records.WriteJSON(readyFile, s.addresses()); err != nil {
			return fmt.Errorf("ready-file: %w", err)
		}
	}
	return s.run(ctx)
}

// server is everything that `kvroute serve` consists of.
type server struct {
	conf     config
	given    config                         // conf as it was read, without limits that follow from the machine's memory
	read     func() (config, string, error) // reads the flags and the file again
	file     string
	hup      <-chan os.Signal // SIGHUPs since before the file was read
	networks reach.Networks
	client   *http.Client // for all calls to workers
	log      *slog.Logger
	names    *workerNames // of log
	scope    wire.Scope

	metrics  *telemetry.Metrics
	bus      *bus.Server // nil if the bus is elsewhere
	nc       *nats.Conn
	prompts  *tokenizer.Cache // of ids, for all models
	reloads  metric.Int64Counter
	verifier *verifier      // nil unless --verify-tokenizer
	tracer   *replay.Tracer // nil unless --trace-out
	state    *os.Root       // of --state-dir; nil without
	files    stateFiles     // counts those in there
	id       uint64         // of this replica
	begun    time.Time
	shared   map[string]any // settings, as all replicas should have them
	router   *router.Router
	registry *fleet.Registry
	prober   *fleet.Prober
	static   *static
	dynamo   *fleet.Dynamo  // nil unless the file has "dynamo"
	sync     *replicas.Sync // nil without --router-replica-sync
	groups   groups
	events   *events.Subscriber
	durable  *events.Durable // nil unless --durable-kv-events
	expected expected
	loads    fleet.Loads // blocks in use
	requests fleet.Loads // running and waiting
	direct   *direct     // workers whose engines are heard without the bus
	extproc  *extproc.Server
	grpc     *grpc.Server
	health   *health.Server
	started  atomic.Bool // the fleet is known
	tokens   *api.Tokens // nil unless --api-token-file
	http     *http.Server
	grpcAt   net.Listener
	httpAt   net.Listener
}

// open makes all parts and opens the listeners; nothing runs yet.
func (s *server) open() (err error) {
	c := &s.conf
	if s.metrics, err = telemetry.NewMetrics(); err != nil {
		return err
	}
	if err := s.openBus(); err != nil {
		return err
	}
	if s.reloads, err = newReloads(s.metrics.Meter("config")); err != nil {
		return err
	}
	s.prompts = tokenizer.NewCache(c.TokenizerCacheBytes)
	cards, err := c.loadCards(s.prompts, s.log)
	if err != nil {
		return err
	}
	var observe func(router.Observation)
	if c.VerifyTokenizer {
		if s.verifier, err = newVerifier(s.log, s.metrics.Meter("tokenize"), s.client, s.workersOf); err != nil {
			return err
		}
		observe = s.verifier.observe
	}
	rc, err := c.routing()
	if err != nil {
		return err
	}
	if c.TraceOut != "" {
		if s.tracer, err = replay.NewTracer(replay.TracerConfig{
			File: c.TraceOut, TPOT: c.TraceOutTPOT, Seed: rand.Uint64(), Prefix: extproc.IDPrefix(s.id),
			Log: s.log, Meter: s.metrics.Meter("trace"),
		}); err != nil {
			return err
		}
		observe = both(observe, s.tracer.Observe)
	}
	rc.Cards, rc.Observe, rc.Meter = cards, observe, s.metrics.Meter("router")
	if c.RemoteTokenize {
		rc.Remote = newRemote(c.TokenizerCacheBytes, s.client).ids
	}
	rc.Tell, rc.TellSession = s.tell(), s.tellSession()
	if rc.Probe, err = s.openProbes(); err != nil {
		return err
	}
	if s.router, err = router.New(rc); err != nil {
		return err
	}
	if err := s.openSync(); err != nil {
		return err
	}
	if s.events, err = events.NewSubscriber(s.nc, events.SubscriberConfig{
		Scope: s.scope,
		Sink: func(id uint64, rank uint32, ev indexer.Event) {
			s.router.ApplyEvent(router.Worker{ID: id, DPRank: rank}, ev)
		},
		Knows: s.router.Knows,
		Changed: func(id uint64, rank uint32, state events.State) {
			s.router.SetEventState(router.Worker{ID: id, DPRank: rank}, state.String())
		},
		Ask: func(ctx context.Context, q events.Query, part func(events.AnswerPart) bool) error {
			return s.direct.sources.Ask(ctx, q, part)
		},
		Log:   s.log,
		Meter: s.metrics.Meter("events"),
	}); err != nil {
		return err
	}
	if s.direct, err = newDirect(s.router, s.events, s.client, s.networks, s.log, s.metrics.Meter("source")); err != nil {
		return err
	}
	if err = s.openDurable(); err != nil {
		return err
	}
	if err = s.loadState(); err != nil {
		return err
	}
	if s.registry, err = fleet.NewRegistry(s.nc, fleet.RegistryConfig{
		Scope:    s.scope,
		Replicas: c.NATSReplicas,
		Networks: s.networks,
		Ages:     fleet.Ages{Degraded: c.DegradedAfter, Unhealthy: c.UnhealthyAfter, Expired: c.ExpiredAfter},
		Set:      s.setWorker,
		Remove:   s.removeWorker,
		Events:   s.follow,
		Load:     s.engineLoad,
		Prefixes: s.cachedPrefixes,
		Log:      s.log,
		Meter:    s.metrics.Meter("fleet"),
	}); err != nil {
		return err
	}
	if s.prober, err = fleet.NewProber(fleet.ProberConfig{
		Alive:  s.registry.Alive,
		Load:   s.rankLoads,
		Client: s.client,
		Meter:  s.metrics.Meter("fleet"),
	}); err != nil {
		return err
	}
	s.static = newStatic(s.registry.SetStatic, s.log)
	if err = s.static.set(context.Background(), c.Workers); err != nil {
		return err
	}
	s.warnOfSilence()
	if err = s.openGroups(); err != nil {
		return err
	}
	if err = s.openExtproc(); err != nil {
		return err
	}
	if err = s.openHTTP(); err != nil {
		return err
	}
	return s.openDynamo() // last: its records must not name our listeners
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
	conf.RouterID, conf.Networks, conf.Log, conf.Meter = s.id, s.networks, s.log, s.metrics.Meter("extproc")
	conf.Started = s.started.Load
	conf.Synced = s.sync != nil
	reports, err := fleet.NewReports(s.engineUsage, s.metrics.Meter("fleet"), s.log)
	if err != nil {
		return err
	}
	conf.LoadReport = reports.Take
	if s.extproc, err = extproc.New(conf, decider); err != nil {
		return err
	}
	options := s.extproc.ServerOptions()
	if c.ExtprocConnectionAge > 0 {
		// Without a time of grace: what runs on an old connection ends there.
		options = append(options, grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: c.ExtprocConnectionAge}))
	}
	secured, err := c.tls(s.log)
	if err != nil {
		return err
	}
	if secured != nil {
		options = append(options, grpc.Creds(secured))
	}
	s.grpc = grpc.NewServer(options...)
	s.extproc.Register(s.grpc)
	s.health = health.NewServer()
	s.health.SetServingStatus("liveness", healthpb.HealthCheckResponse_SERVING)
	s.serving(healthpb.HealthCheckResponse_NOT_SERVING)
	healthpb.RegisterHealthServer(s.grpc, s.health)
	if s.grpcAt, err = listen(c.ExtprocAddress); err != nil {
		return fmt.Errorf("listen for Envoy: %w", err)
	}
	return nil
}

// listen opens a listener at ip:port or unix:/path. A socket that a process left behind
// which was killed is taken over, one that somebody listens at is not.
func listen(at string) (net.Listener, error) {
	network, address, err := splitAddress(at)
	if err != nil {
		return nil, err
	}
	if network == "unix" {
		conn, err := net.DialTimeout(network, address, time.Second)
		switch {
		case err == nil:
			_ = conn.Close() // it was only a question
			return nil, fmt.Errorf("somebody else listens at %s", address)
		case errors.Is(err, syscall.ECONNREFUSED):
			if err := os.Remove(address); err != nil {
				return nil, err
			}
		}
	}
	return net.Listen(network, address)
}

// extproc is what the flags say of Envoy's streams.
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
		ForwardTokens:   c.ForwardTokens,
		SecondChoice:    c.SecondChoice,
		EndpointPicker:  c.EndpointPicker,
		ModeOverride:    c.ModeOverride,
	}
}

func (s *server) openHTTP() (err error) {
	if s.conf.APITokenFile != "" {
		if s.tokens, err = api.OpenTokens(s.conf.APITokenFile); err != nil {
			return fmt.Errorf("config: %w", err)
		}
	}
	s.http = &http.Server{
		Handler: api.New(api.Config{
			Router:  s.router,
			Client:  s.client,
			Metrics: s.metrics.Handler(),
			Ready:   s.checks(),
			Replica: s.replica,
			Scope:   s.scopeName(),
			Stream:  s.position,
			Fleet:   s.registry,
			Tokens:  s.tokens,

			OverloadStatus: s.conf.OverloadStatus,
			QueueWait:      s.conf.QueueWait,

			DecisionTimeout: s.conf.DecisionTimeout,
		}),
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	if s.httpAt, err = net.Listen("tcp", s.conf.HTTPAddress); err != nil {
		return fmt.Errorf("listen for HTTP: %w", err)
	}
	return nil
}

// both returns a function that calls two, of which the first may be nil.
func both(a, b func(router.Observation)) func(router.Observation) {
	if a == nil {
		return b
	}
	return func(o router.Observation) {
		a(o)
		b(o)
	}
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

// listensAt reports whether an address is one at which this process listens.
func (s *server) listensAt(a netip.AddrPort) bool {
	ours := []net.Addr{s.grpcAt.Addr(), s.httpAt.Addr()}
	if s.bus != nil {
		ours = append(ours, s.bus.Addr())
	}
	return slices.ContainsFunc(ours, func(l net.Addr) bool {
		at, ok := l.(*net.TCPAddr)
		if !ok || at.Port != int(a.Port()) {
			return false
		}
		return at.IP.Equal(a.Addr().AsSlice()) || at.IP.IsUnspecified() && ofThisMachine(a.Addr())
	})
}

func ofThisMachine(a netip.Addr) bool {
	if a.IsLoopback() {
		return true
	}
	addresses, _ := net.InterfaceAddrs() // none: as if there were no interface
	return slices.ContainsFunc(addresses, func(n net.Addr) bool {
		own, ok := n.(*net.IPNet)
		return ok && own.IP.Equal(a.AsSlice())
	})
}

// workersOf returns the addresses of a model's workers.
func (s *server) workersOf(model string) (addresses []netip.AddrPort) {
	for _, w := range s.router.Workers() {
		if w.Model == model && w.Health == router.Healthy.String() && w.Group == "" {
			addresses = append(addresses, w.Address)
		}
	}
	return addresses
}

// setWorker tells first the router of a worker and then the events that wait for it.
func (s *server) setWorker(info router.WorkerInfo) {
	s.names.set(info.ID, info.Name)
	if err := s.direct.setWorker(info); err != nil {
		s.log.Warn("a worker is refused", "err", err)
		return
	}
	s.workerChanged(info.ID, true)
	s.log.Debug("worker", "worker", info.ID, "address", info.Address.String(), "health", info.Health.String())
	if s.router.WantsEvents() {
		s.events.SetWorker(info.ID, s.source(&info))
	}
}

// source says where the events of a worker are taken from.
func (s *server) source(info *router.WorkerInfo) events.Source {
	src := events.Source{
		DPStart: info.DPStart, DPSize: max(1, info.DPSize),
		StartedMS: info.StartedMS, Home: fmt.Sprint(info.Models[0], "/", info.BlockSize),
		Publisher: info.Events.PublisherID,
	}
	if src.Feed, src.Queries = events.ChooseFeed(info.Events.Transport, info.Events.LocalIndexer, s.durable != nil); info.BlockSize == 0 {
		src.Feed, src.Queries = events.FeedNone, false
	}
	return src
}

func (s *server) removeWorker(id uint64) {
	s.log.Info("a worker is gone", "worker", id)
	defer s.names.set(id, "")
	s.prober.Remove(id)
	s.loads.Forget(id)
	s.requests.Forget(id)
	s.events.Forget(id)
	s.direct.removeWorker(id)
	s.workerChanged(id, false)
}

// run runs all parts until ctx ends or one of them fails. Every goroutine of the
// process starts here or belongs to a server that is started here.
func (s *server) run(ctx context.Context) error {
	s.log.Info("kvroute is open", "extproc", s.grpcAt.Addr().String(), "http", s.httpAt.Addr().String())
	parts, ctx := errgroup.WithContext(ctx)
	parts.Go(func() error { return s.registry.Run(ctx) })
	parts.Go(func() error { return s.prober.Run(ctx) })
	parts.Go(func() error { return s.static.run(ctx) })
	if s.dynamo != nil {
		parts.Go(func() error { return s.dynamo.Run(ctx) })
	}
	parts.Go(func() error { return events.FollowUsedBlocks(ctx, s.nc, s.scope, s.usedBlocks) })
	parts.Go(func() error { return s.router.Run(ctx) })
	parts.Go(func() error { return s.warmUp(ctx) })
	if s.conf.EndpointFile != "" {
		f := &endpointFile{path: s.conf.EndpointFile, known: s.started.Load, workers: s.router.Workers, log: s.log}
		parts.Go(func() error { return f.run(ctx) })
	}
	if s.router.WantsEvents() {
		parts.Go(func() error { return s.events.Run(ctx) })
		if s.durable != nil {
			parts.Go(func() error { return s.readStream(ctx) })
		}
		parts.Go(func() error { return s.direct.sources.Run(ctx) })
		parts.Go(func() error { return s.expireEvents(ctx) })
	}
	// Others hear of this replica until its last request is over.
	drained, leave := context.WithCancel(context.WithoutCancel(ctx))
	parts.Go(func() error { return s.beHeard(drained) })
	s.groups.run(ctx, parts)
	if s.state != nil {
		parts.Go(func() error { return s.keepState(ctx) })
	}
	parts.Go(func() error { return s.grpc.Serve(s.grpcAt) })
	parts.Go(func() error {
		if err := s.http.Serve(s.httpAt); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	parts.Go(func() error { return s.reload(ctx) })
	if s.tracer != nil {
		parts.Go(func() error { return s.tracer.Run(ctx) })
	}
	if s.verifier != nil {
		parts.Go(func() error { return s.verifier.run(ctx) })
	}
	parts.Go(func() error {
		<-ctx.Done()
		defer leave()
		return s.drain()
	})
	return parts.Wait()
}

// expireEvents has workers read anew of which an event waited in vain for what
// should have come before it.
func (s *server) expireEvents(ctx context.Context) error {
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			for _, w := range s.router.ExpireEvents() {
				s.events.Doubt(w.ID, w.DPRank)
			}
		}
	}
}

// drain tells Envoy that this replica leaves, decides until Envoy has heard, and lets
// decisions in progress finish. Responses go on without us.
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

func newReloads(meter metric.Meter) (metric.Int64Counter, error) {
	return meter.Int64Counter("kvroute.config.reloads", metric.WithUnit("{reload}"), metric.WithDescription("Readings of the configuration anew, by what became of them."))
}

// reload reads the models, workers and router groups of the configuration file, and the tokens of the
// API, anew on SIGHUP, and when one of these files has changed: all of them, or none if one
// has a mistake.
func (s *server) reload(ctx context.Context) error {
	watch := newWatch(s.begun, s.file, s.conf.APITokenFile)
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.hup:
			watch.taken()
		case <-tick.C:
			if !watch.changed() {
				continue
			}
		}
		c, _, err := s.read()
		var pending []string
		if err == nil {
			pending, err = c.changed(&s.given)
		}
		if err == nil {
			_, err = c.checkedRouting()
		}
		var cards []router.Card
		if err == nil {
			c.Attention = s.conf.Attention // which a flag may have set
			cards, err = c.loadCards(s.prompts, s.log)
		}
		commit := func() {}
		if err == nil && s.tokens != nil {
			commit, err = s.tokens.Read()
		}
		if err == nil {
			var undo func()
			if undo, err = s.groups.reload(s.conf.Groups, c.Groups); err == nil {
				if err = s.static.set(ctx, c.Workers); err != nil {
					undo()
				}
			}
		}
		if err != nil {
			s.reloads.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", "refused")))
			s.log.Error("the configuration is not reloaded; the old one stays", "err", err)
			continue
		}
		s.conf.Groups = c.Groups
		s.router.SetCards(cards)
		commit()
		s.reloads.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", "done")))
		s.log.Info("reloaded", "models", len(c.Models), "workers", len(c.Workers))
		if len(pending) > 0 {
			s.log.Warn("these changed settings take effect only after a restart", "settings", strings.Join(pending, ", "))
		}
	}
}

// close gives back what open took, as far as it came.
func (s *server) close() error {
	if s.nc != nil {
		s.nc.Close()
	}
	if s.bus != nil {
		s.bus.Stop()
	}
	for _, l := range []net.Listener{s.grpcAt, s.httpAt} {
		if l != nil {
			_ = l.Close() // closed already, if its server ran
		}
	}
	if s.state != nil {
		_ = s.state.Close() // only a handle
	}
	if s.metrics != nil {
		return s.metrics.Shutdown(context.Background())
	}
	return nil
}

func (c *config) scope() wire.Scope {
	return wire.Scope{Namespace: c.Namespace, Component: c.Component, Endpoint: c.Endpoint}
}

func cutUnix(s string) (path string, ok bool) { return strings.CutPrefix(s, "unix:") }

// healthcheck asks a URL, for images that have no other program.
func healthcheck(ctx context.Context, args []string, std stdio) error {
	fs := newFlagSet("healthcheck", std.err)
	url := fs.String("url", "http://127.0.0.1:9003/readyz", "`URL` to ask")
	if err := parse(fs, args); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	_, err := fetch(ctx, http.DefaultClient, *url)
	return err
}
