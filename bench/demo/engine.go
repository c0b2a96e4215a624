// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/engines/publish"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/records"
	"github.com/kvroute/kvroute/internal/settings"
	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// EngineCommand is `kvroute engine`: a simulated worker, which is the engine, the
// publisher of its events and its registration.
type EngineCommand struct {
	bus.Access
	Listen       string `yaml:"listen" default:"127.0.0.1:8000" help:"<ip:port> of the OpenAI endpoint; port 0 picks a free one"`
	Advertise    string `yaml:"advertise" help:"<ip:port> to register; empty takes the address that the bus is reached from"`
	NATSURL      string `yaml:"nats-url" default:"nats://127.0.0.1:4222" help:"<URL> of the NATS bus, or file:PATH of a file that has it; empty does not register"`
	Replicas     int    `yaml:"nats-replicas" default:"1" help:"<number> of NATS servers that keep the stream, if it is not there yet"`
	Durable      bool   `yaml:"durable-kv-events" default:"true" help:"publish events into a stream that keeps them"`
	LocalIndexer bool   `yaml:"enable-local-indexer" help:"answer routers' queries about events that they missed"`
	KVEvents     string `yaml:"kv-events" default:"nats" want:"nats, zmq or none" help:"nats, zmq or none: how the worker publishes the events of its cache"`
	Aliases      string `yaml:"alias" help:"other <names> of the model, comma-separated"`
	Adapters     string `yaml:"lora" help:"<names> of its adapters, comma-separated"`
	Tokenizer    string `yaml:"tokenizer" help:"<folder> with the model's tokenizer and chat template; empty takes a small one of its own"`
	ReadyFile    string `yaml:"ready-file" help:"<file> that gets the address as JSON once it is open"`
	Level        string `yaml:"log-level" default:"info" want:"debug, info, warn or error" help:"debug, info, warn or error"`

	version string
	sim     enginesim.Config
	scope   wire.Scope
	sockets enginesim.SocketsConfig
}

// Flags adds the flags of the command to fs.
func (c *EngineCommand) Flags(fs *flag.FlagSet) {
	settings.SetDefaults(c)
	settings.AddFlags(fs, c)
	fs.StringVar(&c.scope.Namespace, "namespace", "kvroute", "namespace of the workers' subjects")
	fs.StringVar(&c.scope.Component, "component", "workers", "component of the workers' subjects")
	fs.StringVar(&c.scope.Endpoint, "endpoint", "generate", "endpoint of the workers' subjects")
	fs.StringVar(&c.sim.Name, "name", "worker", "name of the worker")
	fs.StringVar(&c.sim.Model, "model", "sim", "name of the model")
	fs.StringVar(&c.sim.Engine, "engine", "", "vllm, sglang or trtllm: act, and register, as this engine; empty acts as vllm and registers as kvroute-sim")
	fs.StringVar(&c.version, "engine-version", telemetry.Version(), "version to register")
	fs.IntVar(&c.sim.BlockSize, "block-size", 16, "`tokens` in a block")
	fs.StringVar(&c.sim.Hybrid, "hybrid", "", "`window=1024` gives the model a group of layers with a sliding window of so many tokens, state=640 three groups with recurrent states in blocks of so many tokens; with vllm. Empty: full attention only")
	fs.IntVar(&c.sim.NumBlocks, "num-gpu-blocks", 8192, "capacity of the cache in `blocks`")
	fs.IntVar(&c.sim.MaxNumSeqs, "max-num-seqs", 256, "largest `number` of requests running at once")
	fs.IntVar(&c.sim.MaxBatchedTokens, "max-num-batched-tokens", 8192, "largest `number` of tokens in a step")
	fs.StringVar(&c.sim.Preset, "preset", "32b-2xh100", "8b-1xh100, 32b-2xh100 or 70b-4xh100: the simulated hardware")
	fs.StringVar(&c.sim.BlockHash, "block-hash", "sim", "sim, vllm, sglang, sequence or random: names of blocks")
	fs.StringVar(&c.sockets.Endpoint, "kv-events-endpoint", "tcp://127.0.0.1:0", "`endpoint` of the events' PUB socket")
	fs.StringVar(&c.sockets.Replay, "kv-events-replay-endpoint", "tcp://127.0.0.1:0", "`endpoint` of the ROUTER socket that sends events again; empty has none")
	fs.StringVar(&c.sockets.Topic, "kv-events-topic", "kv-events", "topic of the events")
	fs.StringVar(&c.sockets.Format, "kv-events-format", "", "vllm or sglang; empty as the engine, else vllm")
	fs.IntVar(&c.sockets.DropEvery, "kv-events-drop-every", 0, "leave out each `n`-th message of events, as a network might; 0 leaves out none")
	fs.BoolVar(&c.sim.StoreResponses, "store-responses", false, "store the responses of /v1/responses, as vLLM does with VLLM_ENABLE_RESPONSES_API_STORE=1")
	fs.StringVar(&c.sim.Role, "role", "", "prefill, decode or both: part in a split model, to play and to register; empty has none")
	fs.IntVar(&c.sim.TokenBytes, "token-bytes", 262_144, "`bytes` of the cache that a prefill worker, or one with --kv-pulls, sends for a token")
	fs.Float64Var(&c.sim.Bandwidth, "bandwidth", 50, "`GB/s` at which a prefill worker, or one with --kv-pulls, sends them")
	fs.BoolVar(&c.sim.Pulls, "kv-pulls", false, "keep the cache in host memory, too, let other engines copy blocks at --bandwidth, and copy them from the engine that a request names (kvroute serve --kv-pull body); with --kv-events nats")
	fs.DurationVar(&c.sim.HoldTime, "hold-time", 8*time.Minute, "how `long` a prefill worker keeps blocks that no decode worker fetches")
	fs.Float64Var(&c.sim.Speed, "speed", 1, "simulated seconds in a real one")
}

// Run runs the worker until ctx ends.
func (c *EngineCommand) Run(ctx context.Context, _ *flag.FlagSet, _, logTo io.Writer) error {
	return bench.Try(func() {
		log := telemetry.NewLogger(logTo, telemetry.Level(c.Level), "text", nil).With("worker", c.sim.Name)
		c.prepare()
		at := bench.Must(net.Listen("tcp", c.Listen))
		defer at.Close()
		address := at.Addr().String()
		var nc *nats.Conn
		if c.NATSURL != "" {
			nc = bench.Must(bus.Connect(c.NATSURL, "kvroute engine "+c.sim.Name, &c.Access, log)) //nolint:contextcheck // the connection ends with its Close
			defer nc.Close()
			address = bench.Must(bus.PublicAddress(c.Advertise, address, c.NATSURL))
		}
		where, publish := c.publisher(nc, log)
		e := bench.Must(enginesim.New(c.sim))
		parts, ctx := errgroup.WithContext(ctx)
		if nc != nil {
			announcer := bench.Must(fleet.NewAnnouncer(nc, fleet.AnnouncerConfig{
				Scope: c.scope, Record: c.record(e, address, where), Replicas: c.Replicas, Load: func() fleet.Load { return loadOf(e) }, Log: log,
			}))
			parts.Go(func() error { return announcer.Run(ctx) })
		}
		if c.ReadyFile != "" {
			bench.NoError(records.WriteJSON(c.ReadyFile, process.Addresses{HTTP: at.Addr().String()}))
		}
		log.Info("engine is open", "address", address, "model", c.sim.Model)
		parts.Go(func() error { return e.Run(ctx) })
		parts.Go(func() error { return publish(ctx) })
		// On a busy machine a client may need seconds from its connection to its headers.
		server := &http.Server{Handler: e, ReadHeaderTimeout: time.Minute}
		context.AfterFunc(ctx, func() { _ = server.Close() }) // responses in progress have no engine any more
		parts.Go(func() error {
			if err := server.Serve(at); !errors.Is(err, http.ErrServerClosed) {
				return err
			}
			return nil
		})
		bench.NoError(parts.Wait())
	})
}

// prepare checks the flags, and completes the engine's configuration.
func (c *EngineCommand) prepare() {
	bench.NoError(settings.Check(c))
	c.sim.Aliases, c.sim.LoRA = names(c.Aliases), names(c.Adapters)
	if c.Tokenizer != "" {
		c.sim.Prompts = bench.Must(tokenizer.LoadModel(os.DirFS(c.Tokenizer), tokenizer.ModelConfig{}))
	}
	c.NATSURL = bench.Must(bus.ReadURL(c.NATSURL))
	if c.KVEvents == "nats" && c.NATSURL == "" {
		bench.NoError(errors.New("kv-events is nats, and there is no nats-url"))
	}
	if c.sim.Pulls && c.KVEvents != "nats" {
		bench.NoError(fmt.Errorf("kv-events is %s, want nats with kv-pulls: only there the engine tells what host memory has", c.KVEvents))
	}
}

// publisher makes the publisher of the engine's events. It returns the record's entry for
// the events and the function that runs the publisher.
func (c *EngineCommand) publisher(nc *nats.Conn, log *slog.Logger) (where fleet.Events, run func(context.Context) error) {
	switch c.KVEvents {
	case "zmq":
		if c.sockets.Format == "" && c.sim.Engine == "sglang" {
			c.sockets.Format = c.sim.Engine
		}
		c.sim.Sockets = bench.Must(enginesim.NewSockets(c.sockets))
		live, replay := c.sim.Sockets.Endpoints()
		log.Info("events are on ZeroMQ", "endpoint", live, "replay", replay)
		return fleet.Events{Transport: "zmq", Endpoint: live, Replay: replay, Topic: c.sockets.Topic}, c.sim.Sockets.Run
	case "none":
		return fleet.Events{Transport: "none"}, func(context.Context) error { return nil }
	}
	publisher := publish.New(nc, publish.Config{
		Scope: c.scope, WorkerID: wire.WorkerID(c.sim.Name), LocalIndexer: c.LocalIndexer,
		Durable: c.Durable, Replicas: c.Replicas, Log: log,
	})
	c.sim.Publish = func(ev indexer.Event) { publisher.Publish(0, ev) }
	where = fleet.Events{Transport: "nats", LocalIndexer: c.LocalIndexer, PublisherID: publisher.ID()}
	if c.Durable {
		where.Transport = "jetstream"
	}
	return where, publisher.Run
}

// record is the worker's registration.
func (c *EngineCommand) record(e *enginesim.Engine, address string, where fleet.Events) fleet.Record {
	sim := e.Config()
	r := fleet.Record{
		Name: sim.Name, Address: address, Models: append([]string{sim.Model}, sim.Aliases...), LoRA: sim.LoRA,
		BlockSize: sim.BlockSize, TotalKVBlocks: sim.NumBlocks, MaxNumSeqs: sim.MaxNumSeqs, MaxBatchedTokens: sim.MaxBatchedTokens,
		Engine: cmp.Or(c.sim.Engine, "kvroute-sim"), EngineVersion: c.version, StartedMS: time.Now().UnixMilli(), Events: where,
	}
	if sim.Role != "" {
		r.Role, r.Engine = router.Role(sim.Role), sim.Engine // kvroute knows no protocol of kvroute-sim
	}
	if r.Role == router.Prefill && sim.Engine == enginesim.SGLang {
		r.Bootstrap = address
	}
	if sim.Pulls {
		r.KVSource = address
	}
	if c.Tokenizer == "" {
		r.ModelCard = enginesim.ModelCard
	}
	return r
}

func loadOf(e *enginesim.Engine) fleet.Load {
	s, c := e.Stats(), e.Config()
	return fleet.Load{
		Running: s.Running, Waiting: s.Waiting,
		KVUsedBlocks: s.UsedBlocks, KVUtilization: float64(s.UsedBlocks) / float64(c.NumBlocks),
	}
}

// names splits a comma-separated list.
func names(list string) (names []string) {
	for name := range strings.SplitSeq(list, ",") {
		if name = strings.TrimSpace(name); name != "" {
			names = append(names, name)
		}
	}
	return names
}
