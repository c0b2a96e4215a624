// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"
	"golang.org/x/sync/errgroup"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/records"
	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// sidecar is what `kvroute publish` is told.
type sidecar struct {
	scope     wire.Scope
	natsURL   string
	advertise string
	models    string
	lora      string
	health    string
	metrics   string
	http      string
	ready     string
	level     string
	format    string

	frames recording

	localIndexer bool
	durable      bool
	bindEvents   string
	bindQueries  string
	access       bus.Access
	replicas     int

	engine engines.EngineWorker
	record fleet.Record
}

func (c *sidecar) flags(fs *flag.FlagSet) {
	fs.StringVar(&c.natsURL, "nats-url", "nats://127.0.0.1:4222", "`URL` of the NATS bus, or file:PATH of a file that has it; empty needs none, with bind-events and a router that has the worker in its configuration")
	fs.StringVar(&c.scope.Namespace, "namespace", "kvroute", "namespace of the workers' subjects")
	fs.StringVar(&c.scope.Component, "component", "workers", "component of the workers' subjects")
	fs.StringVar(&c.scope.Endpoint, "endpoint", "generate", "endpoint of the workers' subjects")

	fs.StringVar(&c.record.Name, "name", "", "name of the worker; empty takes its address")
	fs.Uint64Var(&c.record.WorkerID, "worker-id", 0, "`number` of the worker; 0 takes one made of its name")
	fs.StringVar(&c.engine.Address, "engine-address", "127.0.0.1:8000", "`ip:port` of the engine's HTTP server, from here")
	fs.StringVar(&c.advertise, "advertise", "", "`ip:port` of it to register; empty takes engine-address, or this machine's own as the bus sees it")
	fs.StringVar(&c.metrics, "metrics-path", "", "`path` of the engine's metrics, for its load; empty tries the usual ones")
	fs.StringVar(&c.health, "health-path", "/health", "`path` that answers 200 while the engine lives")
	fs.StringVar(&c.models, "model", "", "`names` of the model, comma-separated; empty asks the engine")
	fs.StringVar(&c.lora, "lora", "", "`names` of its adapters, comma-separated")
	fs.StringVar(&c.record.ModelCard, "model-card", "", "name of the routers' `card` for the model")
	fs.IntVar(&c.record.TotalKVBlocks, "total-kv-blocks", 0, "capacity of its cache in `blocks`; 0 takes what the engine says")
	fs.IntVar(&c.record.MaxNumSeqs, "max-num-seqs", 0, "largest `number` of requests running at once")
	fs.IntVar(&c.record.MaxBatchedTokens, "max-num-batched-tokens", 0, "largest `number` of tokens in a step")

	fs.StringVar(&c.engine.Engine, "engine", "", "vllm, sglang or trtllm; empty asks the engine")
	fs.StringVar(&c.engine.Endpoint, "zmq-endpoint", "", "`endpoint` of the engine's events, tcp://host:port or ipc://path; empty asks the engine")
	fs.StringVar(&c.engine.Topic, "zmq-topic", "", "`prefix` of the topics to read")
	fs.StringVar(&c.engine.Replay, "zmq-replay-endpoint", "", "`endpoint` that sends lost events again")
	fs.IntVar(&c.record.BlockSize, "block-size", 0, "`tokens` in a block as the routers count; 0 takes the engine's, but at least 16")
	fs.Var((*rankFlag)(&c.record.DPStart), "dp-start", "first data-parallel `rank`")
	fs.Var((*rankFlag)(&c.record.DPSize), "dp-size", "`number` of data-parallel ranks; 0 takes what the engine says")
	fs.BoolVar(&c.engine.SetLike, "set-like", false, "one removal removes all copies of a block: for engines that report blocks again which they have")

	fs.BoolVar(&c.localIndexer, "enable-local-indexer", true, "answer routers' queries about events that they missed")
	fs.BoolVar(&c.durable, "durable", true, "publish into a stream that keeps events")
	fs.StringVar(&c.bindEvents, "bind-events", "", "`endpoint` to publish events at instead of NATS, as tcp://*:5558; the ports of further ranks follow")
	fs.StringVar(&c.bindQueries, "bind-queries", "", "`endpoint` at which routers then ask for what they missed; empty takes the port 5658 beside bind-events, a free one beside port 0")
	c.access.Flags(fs)
	fs.IntVar(&c.replicas, "nats-replicas", 1, "`number` of NATS servers that keep the stream, if it is not there yet")

	fs.StringVar(&c.http, "http-address", "", "`ip:port` of /metrics and /healthz; empty has none")
	fs.StringVar(&c.frames.file, "record", "", "`file` that records every event of the engine, with the token ids of prompts; an existing file is overwritten")
	fs.Int64Var(&c.frames.bytes, "record-bytes", 64<<20, "`bytes` that it may have at most")
	fs.DurationVar(&c.frames.time, "record-time", 10*time.Minute, "`time` for which it is written at most")

	fs.StringVar(&c.ready, "ready-file", "", "`file` that gets the addresses as JSON once the worker is registered")
	fs.StringVar(&c.level, "log-level", "info", "debug, info, warn or error")
	fs.StringVar(&c.format, "log-format", "text", "text or json")
}

// rankFlag is a number of ranks.
type rankFlag uint32

func (r *rankFlag) String() string { return fmt.Sprint(uint32(*r)) }

// Set reads it.
func (r *rankFlag) Set(s string) error {
	n, err := strconv.ParseUint(s, 10, 32)
	*r = rankFlag(n)
	return err
}

// publish stands beside an engine until ctx ends: what the engine says of its cache
// goes to the bus, the worker is registered, and stays so while the engine lives. It fails
// when another engine is at the address: whoever starts it again has that registered.
func publish(ctx context.Context, args []string, std stdio) error {
	var c sidecar
	fs := newFlagSet("publish", std.err)
	c.flags(fs)
	if err := parse(fs, args); err != nil {
		return err
	}
	log, err := telemetry.NewLogger(std.err, c.level, c.format, nil)
	if err != nil {
		return err
	}
	if err := c.check(); err != nil {
		return err
	}
	metrics, err := telemetry.NewMetrics()
	if err != nil {
		return err
	}
	defer func() { _ = metrics.Shutdown(context.WithoutCancel(ctx)) }() // nothing is exported at the end
	p := beside{sidecar: &c, told: c, log: log, client: reach.Networks{}.Client()}
	p.client.Timeout = 2 * time.Second
	p.scrape.id = rand.Uint64() & (1<<53 - 1) // every JSON reader keeps it exactly
	defer p.client.CloseIdleConnections()
	recorder, stop, err := c.frames.start(log)
	if err != nil {
		return err
	}
	defer stop()
	if c.natsURL != "" {
		if p.nc, err = bus.Connect(c.natsURL, "kvroute publish "+c.record.Name, &c.access, log); err != nil {
			return err
		}
		defer p.nc.Close()
	}
	if err := p.open(ctx, metrics.Meter("publish"), recorder); err != nil {
		return err
	}
	return p.run(ctx, metrics.Handler())
}

func (c *sidecar) check() error {
	at, err := netip.ParseAddrPort(c.engine.Address)
	if err != nil {
		return fmt.Errorf("engine-address is %q, want ip:port", c.engine.Address)
	}
	switch c.engine.Engine {
	case "", "vllm", "sglang", "trtllm":
	default:
		return fmt.Errorf("engine is %q, want vllm, sglang, trtllm or nothing", c.engine.Engine)
	}
	if c.natsURL, err = bus.ReadURL(c.natsURL); err != nil {
		return err
	}
	if c.natsURL == "" && c.bindEvents == "" {
		return errors.New("nats-url is empty, and so is bind-events: there is nowhere to publish")
	}
	if c.frames.bytes < 1 || c.frames.time <= 0 {
		return fmt.Errorf("record-bytes is %d and record-time %v, want more than 0", c.frames.bytes, c.frames.time)
	}
	if c.bindQueries != "" && c.bindEvents == "" {
		return errors.New("bind-queries is set, and bind-events is not")
	}
	if c.engine.Transport = engines.TransportZMQ; c.engine.Engine == "trtllm" && c.engine.Endpoint == "" {
		c.engine.Transport = engines.TransportPoll
	}
	listener := at.String()
	first, _, _ := strings.Cut(c.natsURL, ",")
	if u, err := url.Parse(first); err == nil && c.natsURL != "" && at.Addr().IsLoopback() && !isLoopback(u.Hostname()) {
		// Nobody else reaches the engine there.
		listener = net.JoinHostPort("0.0.0.0", fmt.Sprint(at.Port()))
	}
	if c.record.Address, err = bus.PublicAddress(c.advertise, listener, c.natsURL); err != nil {
		return err
	}
	c.record.Name = cmp.Or(c.record.Name, c.record.Address)
	c.record.Models, c.record.LoRA = commaList(c.models), commaList(c.lora)
	return nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func commaList(s string) (items []string) {
	for item := range strings.SplitSeq(s, ",") {
		if item = strings.TrimSpace(item); item != "" {
			items = append(items, item)
		}
	}
	return items
}

// transport is how a record tells where events are published.
func transport(durable bool) string {
	if durable {
		return "jetstream"
	}
	return "nats"
}

// beside is everything that `kvroute publish` consists of.
type beside struct {
	*sidecar
	told   sidecar // before the engine was asked
	met    sidecar // when it had answered
	log    *slog.Logger
	nc     *nats.Conn // nil if there is no bus
	client *http.Client

	publisher *engines.Publisher
	sources   *engines.Sources
	announcer *fleet.Announcer // nil if there is no bus
	lost      metric.Int64Counter
	alive     atomic.Bool
	scrape    scrape
	counted   bool // the capacity is in the engine's blocks
	misfit    bool // the engine's blocks fit no block of the routers'
}

// open waits for the engine, learns what it is, and makes all parts.
func (p *beside) open(ctx context.Context, meter metric.Meter, recorder *engines.Recorder) (err error) {
	var sink *engines.Publisher
	if p.sources, err = engines.NewSources(engines.SourcesConfig{
		Sink: func(_ uint64, rank uint32, ev indexer.Event) {
			sink.Publish(rank, ev)
		},
		Recorder: recorder, Log: p.log, Meter: meter,
	}); err != nil {
		return err
	}
	if err := p.meet(ctx); err != nil {
		return err
	}
	if recorder != nil {
		recorder.Note("begin", fmt.Sprintf("kvroute %s, worker %s, engine %q at %s, models %q, adapters %q, blocks of %d tokens there and %d here, ranks from %d: %d",
			telemetry.Version(), p.record.Name, p.engine.Engine, p.engine.Address, p.record.Models, p.record.LoRA, p.engine.BlockSize, p.record.BlockSize, p.record.DPStart, max(1, p.record.DPSize)))
	}
	p.record.Events = fleet.Events{Transport: transport(p.durable), LocalIndexer: p.localIndexer}
	sockets, err := p.bind()
	if err != nil {
		return err
	}
	p.record.Engine, p.record.StartedMS = p.engine.Engine, time.Now().UnixMilli()
	p.engine.ID, p.engine.Name = p.record.ID(), p.record.Name
	p.engine.DPStart, p.engine.DPSize, p.engine.BlockSize = p.record.DPStart, p.record.DPSize, p.record.BlockSize
	if p.lost, err = newPublishMetrics(meter, p.nc); err != nil {
		return err
	}
	sink = engines.NewPublisher(p.nc, engines.PublisherConfig{
		Scope: p.scope, WorkerID: p.engine.ID, LocalIndexer: p.localIndexer, Durable: p.durable, Replicas: p.replicas, Quiet: true, Log: p.log,
		Sockets: sockets,
		Lost:    func(n int) { p.lost.Add(ctx, int64(n)) },
	})
	p.publisher = sink
	p.record.Events.PublisherID = sink.ID()
	if p.nc == nil {
		return nil
	}
	p.announcer, err = fleet.NewAnnouncer(p.nc, fleet.AnnouncerConfig{
		Scope: p.scope, Record: p.record, Replicas: p.replicas, Alive: p.alive.Load, Load: p.scrape.load, Log: p.log,
	})
	return err
}

// bind opens the sockets of each rank, if events are to be had there, and says so in
// the record.
func (p *beside) bind() (map[uint32]engines.RankSockets, error) {
	switch {
	case p.misfit && p.nc == nil:
		return nil, errors.New("block-size does not fit the engine's, and there is no bus to say so on")
	case p.bindEvents == "" || p.misfit:
		return nil, nil
	}
	queries := p.bindQueries
	if queries == "" {
		live, err := zmtp.ParseEndpoint(p.bindEvents, engines.PlanePort, 0)
		if err != nil {
			return nil, fmt.Errorf("bind-events: %w", err)
		}
		if live.Path != "" {
			return nil, errors.New("bind-events is a path, so bind-queries must be one")
		}
		if live.Port > 0 { // else any free one does
			live.Port = engines.QueryPort
		}
		queries = live.String()
	}
	sockets := make(map[uint32]engines.RankSockets)
	for i := range max(1, p.record.DPSize) {
		rank := p.record.DPStart + i
		var at engines.RankSockets
		for _, s := range []struct {
			flag, endpoint string
			base           int
			to             *net.Listener
			said           *string
		}{
			{"bind-events", p.bindEvents, engines.PlanePort, &at.Events, &p.record.Events.Endpoint},
			{"bind-queries", queries, engines.QueryPort, &at.Queries, &p.record.Events.Replay},
		} {
			e, err := zmtp.ParseEndpoint(s.endpoint, s.base, int(rank))
			if err == nil {
				*s.to, err = zmtp.Listen(e)
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", s.flag, err)
			}
			*s.said = s.endpoint
			if e.Path == "" && e.Port == 0 {
				if p.record.DPSize > 1 {
					return nil, fmt.Errorf("%s is %q: several ranks need a port", s.flag, s.endpoint)
				}
				e.Port = (*s.to).Addr().(*net.TCPAddr).Port
				*s.said = e.String()
			}
		}
		sockets[rank] = at
	}
	p.record.Events.Transport, p.record.Events.LocalIndexer = engines.TransportZMQ, true
	return sockets, nil
}

// newPublishMetrics makes the instruments of what waits for the bus and is lost to
// it. docs/metrics.md lists them.
func newPublishMetrics(meter metric.Meter, nc *nats.Conn) (metric.Int64Counter, error) {
	lost, err1 := meter.Int64Counter("kvroute.publish.lost",
		metric.WithUnit("{event}"), metric.WithDescription("Events that the bus did not take and that had no more room to wait."))
	_, err2 := meter.Int64ObservableGauge("kvroute.publish.buffered",
		metric.WithUnit("By"), metric.WithDescription("Messages that wait for the bus."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			if nc == nil {
				return nil
			}
			if n, err := nc.Buffered(); err == nil { // closed: nothing waits
				o.Observe(int64(n))
			}
			return nil
		}))
	return lost, errors.Join(err1, err2)
}

// meet waits until the engine answers and has said what was not set.
func (p *beside) meet(ctx context.Context) error {
	said := false
	for {
		err := p.ask(ctx)
		if err == nil {
			p.alive.Store(true)
			p.met = *p.sidecar
			return p.fit()
		}
		if ctx.Err() != nil {
			return errInterrupted
		}
		level := slog.LevelDebug
		if !said {
			said, level = true, slog.LevelInfo
		}
		p.log.Log(ctx, level, "waiting for the engine", "engine", p.engine.Address, "err", err)
		select {
		case <-ctx.Done():
			return errInterrupted
		case <-time.After(time.Second):
		}
	}
}

func (p *beside) ask(ctx context.Context) error {
	if err := p.get(ctx, p.health, nil); err != nil {
		return err
	}
	if len(p.record.Models) == 0 {
		var answer struct {
			Data []struct {
				ID string `json:"id"`
			} `json:"data"`
		}
		if err := p.get(ctx, "/v1/models", &answer); err != nil {
			return err
		}
		for _, m := range answer.Data {
			p.record.Models = append(p.record.Models, m.ID)
		}
	}
	if p.engine.Transport != engines.TransportZMQ {
		return nil
	}
	f, err := p.sources.Discover(ctx, p.engine)
	if p.engine.Endpoint == "" {
		if err != nil {
			return err
		}
		p.record.DPStart, p.record.DPSize = f.DPStart, f.DPSize
	} // else all that must be known was said, and the rest is welcome
	p.engine.Engine = cmp.Or(p.engine.Engine, f.Engine)
	if p.record.TotalKVBlocks == 0 {
		p.record.TotalKVBlocks, p.counted = f.TotalKVBlocks, true
	}
	p.engine.BlockSize = f.BlockSize
	return nil
}

var errOtherEngine = errors.New("the engine has come back as another")

// again asks an engine that has come back what it is. If that is not what it was, it is
// registered as what it is not.
func (p *beside) again(ctx context.Context) error {
	now, was := p.told, &p.met
	q := beside{sidecar: &now, client: p.client, sources: p.sources}
	if err := q.ask(ctx); err != nil {
		return err
	}
	say := func(what string, now, was any) error {
		return fmt.Errorf("%w: %s %v, before %v; start again to register it", errOtherEngine, what, now, was)
	}
	switch block, before := now.engine.BlockSize, was.engine.BlockSize; {
	case !slices.Equal(now.record.Models, was.record.Models):
		return say("models", now.record.Models, was.record.Models)
	case now.engine.Engine != was.engine.Engine:
		return say("engine", now.engine.Engine, was.engine.Engine)
	case block != before && block > 0 && before > 0: // 0 says nothing
		return say("tokens in a block", block, before)
	case now.record.DPStart != was.record.DPStart || now.record.DPSize != was.record.DPSize:
		return say("ranks from", []uint32{now.record.DPStart, now.record.DPSize}, []uint32{was.record.DPStart, was.record.DPSize})
	}
	return nil
}

// get asks the engine and reads the answer into v: as it is into a *[]byte, else as
// JSON; nil is for nobody.
func (p *beside) get(ctx context.Context, path string, v any) error {
	body, err := fetch(ctx, p.client, "http://"+p.engine.Address+path)
	if err != nil || v == nil {
		return err
	}
	if raw, ok := v.(*[]byte); ok {
		*raw = body
		return nil
	}
	return json.Unmarshal(body, v)
}

// smallest is the smallest block that routers are asked to count in. SGLang's pages
// have one token unless it is told otherwise.
const smallest = 16

// fit compares the engine's blocks, if their size is known, with the routers'.
func (p *beside) fit() error {
	own, theirs := p.engine.BlockSize, p.record.BlockSize
	switch {
	case own == 0 && theirs == 0:
		return errors.New("block-size is 0, and the engine does not say its own")
	case theirs == 0:
		p.record.BlockSize = own
		if own < smallest && smallest%own == 0 {
			p.record.BlockSize = smallest
		}
	case own > 0 && own%theirs != 0 && theirs%own != 0:
		p.misfit = true
		p.record.KVEvents = engines.KnownMisfit.String()
		p.log.Error("the engine's blocks fit no block of the routers'; nothing is published, and routers guess what it caches",
			"engine_block_size", own, "block_size", theirs)
	}
	if own > 0 && p.counted {
		p.record.TotalKVBlocks = p.record.TotalKVBlocks * own / p.record.BlockSize
	}
	return nil
}

// registered is closed once routers can know whose the events are.
func (p *beside) registered() <-chan struct{} {
	if p.announcer != nil {
		return p.announcer.Registered()
	}
	now := make(chan struct{})
	close(now)
	r := p.record
	r.StartedMS = 0 // it would not be true for long
	if text, err := json.Marshal(r); err == nil {
		p.log.Info("there is no bus to register on: routers need this worker in their configuration", "record", string(text))
	}
	return now
}

func (p *beside) run(ctx context.Context, metrics http.Handler) error {
	var at net.Listener
	if p.http != "" {
		var err error
		if at, err = net.Listen("tcp", p.http); err != nil {
			return fmt.Errorf("listen for HTTP: %w", err)
		}
		defer at.Close()
	}
	// The last events that the sources bring are still published.
	last, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	parts, ctx := errgroup.WithContext(ctx)
	parts.Go(func() error { return p.publisher.Run(last) })
	if p.announcer != nil {
		parts.Go(func() error { return p.announcer.Run(ctx) })
	}
	parts.Go(func() error { return p.watch(ctx) })
	parts.Go(func() error {
		defer end()
		// Who hears of blocks should know whose they are.
		select {
		case <-ctx.Done():
			return nil
		case <-p.registered():
		}
		if p.announcer != nil {
			p.log.Info("the worker is registered", "worker", p.engine.ID, "address", p.record.Address, "models", p.record.Models,
				"block_size", p.record.BlockSize, "engine", p.engine.Engine)
		}
		if p.ready != "" {
			a := addresses{Events: p.record.Events.Endpoint, Queries: p.record.Events.Replay}
			if at != nil {
				a.HTTP = at.Addr().String()
			}
			if err := records.WriteJSON(p.ready, a); err != nil {
				return fmt.Errorf("ready-file: %w", err)
			}
		}
		if p.misfit {
			<-ctx.Done()
			return nil
		}
		p.sources.Set(p.engine)
		return p.sources.Run(ctx)
	})
	if at != nil {
		mux := http.NewServeMux()
		mux.Handle("GET /metrics", metrics)
		mux.HandleFunc("GET /healthz", func(http.ResponseWriter, *http.Request) {})
		serveHTTP(ctx, parts, at, mux)
	}
	return parts.Wait()
}

// watch looks whether the engine lives, and how well its cache is known; the record
// says so.
func (p *beside) watch(ctx context.Context) error {
	health, state := time.NewTicker(2500*time.Millisecond), time.NewTicker(time.Second)
	defer health.Stop()
	defer state.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-health.C:
			err := p.get(ctx, p.health, nil)
			if err == nil && !p.alive.Load() {
				err = p.again(ctx)
			}
			if errors.Is(err, errOtherEngine) {
				return err
			}
			if err == nil {
				p.measure(ctx)
			}
			if was := p.alive.Swap(err == nil); was != (err == nil) && ctx.Err() == nil {
				p.log.Warn("the engine's health has changed", "alive", err == nil, "err", err)
			}
		case <-state.C:
			if now := p.sources.State(p.engine.ID).String(); !p.misfit && now != p.record.KVEvents {
				if p.record.KVEvents = now; p.announcer == nil {
					continue
				}
				if err := p.announcer.Update(p.record); err != nil {
					return err
				}
			}
		}
	}
}
