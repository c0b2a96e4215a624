// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/tokenizer"
)

// engine runs a simulated worker until ctx ends: the engine, its event publisher
// and its registration.
func engine(ctx context.Context, args []string, std stdio) error {
	var sim enginesim.Config
	var scope wire.Scope
	var level string
	fs := newFlagSet("engine", std.err)
	listen := fs.String("listen", "127.0.0.1:8000", "`ip:port` of the OpenAI endpoint; port 0 picks a free one")
	advertise := fs.String("advertise", "", "`ip:port` to register; empty takes the address that the bus is reached from")
	var access bus.Access
	busFlags(fs, &access)
	durable := fs.Bool("durable-kv-events", true, "publish events into a stream that keeps them")
	replicas := fs.Int("nats-replicas", 1, "`number` of NATS servers that keep the stream, if it is not there yet")
	natsURL := fs.String("nats-url", "nats://127.0.0.1:4222", "`URL` of the NATS bus, or file:PATH of a file that has it; empty does not register")
	readyFile := fs.String("ready-file", "", "`file` that gets the address as JSON once it is open")
	fs.StringVar(&scope.Namespace, "namespace", "kvroute", "namespace of the workers' subjects")
	fs.StringVar(&scope.Component, "component", "workers", "component of the workers' subjects")
	fs.StringVar(&scope.Endpoint, "endpoint", "generate", "endpoint of the workers' subjects")
	fs.StringVar(&sim.Name, "name", "worker", "name of the worker")
	fs.StringVar(&sim.Model, "model", "sim", "name of the model")
	aliases := fs.String("alias", "", "other `names` of the model, comma-separated")
	adapters := fs.String("lora", "", "`names` of its adapters, comma-separated")
	fs.StringVar(&sim.Engine, "engine", "", "act, and register, as vllm, sglang or trtllm; empty acts as vllm and registers as kvroute-sim")
	version := fs.String("engine-version", buildVersion(), "version to register")
	files := fs.String("tokenizer", "", "`folder` with the model's tokenizer and chat template; empty takes a small one of its own")
	fs.IntVar(&sim.BlockSize, "block-size", 16, "`tokens` in a block")
	fs.IntVar(&sim.NumBlocks, "num-gpu-blocks", 8192, "capacity of the cache in `blocks`")
	fs.IntVar(&sim.MaxNumSeqs, "max-num-seqs", 256, "largest `number` of requests running at once")
	fs.IntVar(&sim.MaxBatchedTokens, "max-num-batched-tokens", 8192, "largest `number` of tokens in a step")
	fs.StringVar(&sim.Preset, "preset", "32b-2xh100", "hardware: 8b-1xh100, 32b-2xh100 or 70b-4xh100")
	fs.StringVar(&sim.BlockHash, "block-hash", "sim", "names of blocks: sim, vllm, sglang, sequence or random")
	var sockets enginesim.SocketsConfig
	kvEvents := fs.String("kv-events", "nats", "how it tells of its cache: nats, zmq or none")
	fs.StringVar(&sockets.Endpoint, "kv-events-endpoint", "tcp://127.0.0.1:0", "`endpoint` of the events' PUB socket")
	fs.StringVar(&sockets.Replay, "kv-events-replay-endpoint", "tcp://127.0.0.1:0", "`endpoint` of the ROUTER socket that sends events again; empty has none")
	fs.StringVar(&sockets.Topic, "kv-events-topic", "kv-events", "topic of the events")
	fs.StringVar(&sockets.Format, "kv-events-format", "", "vllm or sglang; empty as the engine, else vllm")
	fs.BoolVar(&sockets.Connect, "kv-events-connect", false, "connect the PUB socket instead of binding it")
	fs.IntVar(&sockets.DropEvery, "kv-events-drop-every", 0, "leave out each `n`-th message of events, as a network might; 0 leaves out none")
	fs.Float64Var(&sim.Speed, "speed", 1, "simulated seconds in a real one")
	localIndexer := fs.Bool("enable-local-indexer", false, "answer routers' queries about events that they missed")
	fs.StringVar(&level, "log-level", "info", "debug, info, warn or error")
	if err := parse(fs, args); err != nil {
		return err
	}
	log, err := telemetry.NewLogger(std.err, level, "text", nil)
	if err != nil {
		return err
	}
	log = log.With("worker", sim.Name)
	sim.Aliases, sim.LoRA = names(*aliases), names(*adapters)
	kind := cmp.Or(sim.Engine, "kvroute-sim")
	card := enginesim.ModelCard
	if *files != "" {
		card = ""
		dir, err := os.OpenRoot(*files)
		if err != nil {
			return fmt.Errorf("tokenizer: %w", err)
		}
		defer func() { _ = dir.Close() }() // it is only read
		if sim.Prompts, err = tokenizer.LoadModel(dir.FS(), tokenizer.ModelConfig{}); err != nil {
			return err
		}
	}
	if *natsURL, err = bus.ReadURL(*natsURL); err != nil {
		return err
	}
	if *kvEvents != "nats" && *kvEvents != "zmq" && *kvEvents != "none" {
		return fmt.Errorf("kv-events is %q, want nats, zmq or none", *kvEvents)
	}
	if *kvEvents == "nats" && *natsURL == "" {
		return errors.New("kv-events is nats, and there is no nats-url")
	}
	at, err := net.Listen("tcp", *listen)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	defer at.Close()

	var run []func(context.Context) error
	var where fleet.Events
	switch *kvEvents {
	case "zmq":
		if sockets.Format == "" && sim.Engine == "sglang" {
			sockets.Format = sim.Engine
		}
		if sim.Sockets, err = enginesim.NewSockets(sockets); err != nil {
			return err
		}
		run = append(run, sim.Sockets.Run)
		live, replay := sim.Sockets.Endpoints()
		where = fleet.Events{Transport: "zmq", Endpoint: live, Replay: replay, Topic: sockets.Topic}
		log.Info("events are on ZeroMQ", "endpoint", live, "replay", replay)
	case "none":
		where = fleet.Events{Transport: "none"}
	}
	sim.Log = log
	var nc *nats.Conn
	address := at.Addr().String()
	if *natsURL != "" {
		if nc, err = bus.Connect(*natsURL, "kvroute engine "+sim.Name, &access, log); err != nil {
			return err
		}
		defer nc.Close()
		if address, err = publicAddress(*advertise, address, *natsURL); err != nil {
			return err
		}
	}
	if *kvEvents == "nats" {
		where = fleet.Events{Transport: transport(*durable), LocalIndexer: *localIndexer}
		publisher := engines.NewPublisher(nc, engines.PublisherConfig{
			Scope: scope, WorkerID: wire.WorkerID(sim.Name), LocalIndexer: *localIndexer,
			Durable: *durable, Replicas: *replicas, Quiet: true, Log: log,
		})
		where.PublisherID = publisher.ID()
		sim.Publish = func(ev indexer.Event) { publisher.Publish(0, ev) }
		run = append(run, publisher.Run)
	}
	e, err := enginesim.New(sim)
	if err != nil {
		return err
	}
	if nc != nil {
		r := record(e.Config(), card, address, kind, *version)
		r.Events = where
		announcer, err := fleet.NewAnnouncer(nc, fleet.AnnouncerConfig{Scope: scope, Record: r, Replicas: *replicas, Load: func() fleet.Load { return loadOf(e) }, Log: log})
		if err != nil {
			return err
		}
		run = append(run, announcer.Run)
	}
	if *readyFile != "" {
		if err := writeReady(*readyFile, addresses{HTTP: at.Addr().String()}); err != nil {
			return err
		}
	}
	log.Info("engine is open", "address", address, "model", sim.Model)

	parts, ctx := errgroup.WithContext(ctx)
	parts.Go(func() error { return e.Run(ctx) })
	for _, part := range run {
		parts.Go(func() error { return part(ctx) })
	}
	serveHTTP(ctx, parts, at, e) // at the end, responses in progress have no engine any more
	return parts.Wait()
}

func record(c enginesim.Config, card, address, kind, version string) fleet.Record {
	return fleet.Record{
		Name: c.Name, Address: address, Models: append([]string{c.Model}, c.Aliases...), LoRA: c.LoRA,
		BlockSize: c.BlockSize, TotalKVBlocks: c.NumBlocks, MaxNumSeqs: c.MaxNumSeqs, MaxBatchedTokens: c.MaxBatchedTokens,
		ModelCard: card,
		Engine:    kind, EngineVersion: version, StartedMS: time.Now().UnixMilli(),
	}
}

// names are those of a list, comma-separated.
func names(list string) (names []string) {
	for name := range strings.SplitSeq(list, ",") {
		if name = strings.TrimSpace(name); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// transport is how a record tells where events are published.
func transport(durable bool) string {
	if durable {
		return "jetstream"
	}
	return "nats"
}

func loadOf(e *enginesim.Engine) fleet.Load {
	s, c := e.Stats(), e.Config()
	return fleet.Load{
		Running: s.Running, Waiting: s.Waiting,
		KVUsedBlocks: s.UsedBlocks, KVUtilization: float64(s.UsedBlocks) / float64(c.NumBlocks),
	}
}

// publicAddress is where others reach a listener. One that listens everywhere is
// reached at the address from which this machine reaches the bus.
func publicAddress(advertise, listener, natsURL string) (string, error) {
	if advertise != "" {
		if _, err := netip.ParseAddrPort(advertise); err != nil {
			return "", fmt.Errorf("advertise is %q, want ip:port", advertise)
		}
		return advertise, nil
	}
	own, err := netip.ParseAddrPort(listener)
	if err != nil {
		return "", err
	}
	if !own.Addr().IsUnspecified() {
		return own.String(), nil
	}
	first, _, _ := strings.Cut(natsURL, ",")
	u, err := url.Parse(first)
	if err != nil || u.Hostname() == "" {
		return "", fmt.Errorf("find the own address: set --advertise: %q has no host", first)
	}
	// Connecting a UDP socket sends nothing; it only looks up the way.
	probe, err := net.Dial("udp", net.JoinHostPort(u.Hostname(), "9"))
	if err != nil {
		return "", fmt.Errorf("find the own address: set --advertise: %w", err)
	}
	defer probe.Close()
	from, err := netip.ParseAddrPort(probe.LocalAddr().String())
	if err != nil {
		return "", err
	}
	return netip.AddrPortFrom(from.Addr().Unmap(), own.Port()).String(), nil
}
