// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// Config is the flags of `kvroute publish`. Their comments and tags are described in package settings.
type Config struct {
	// <URL> of the NATS server, or file:PATH of a file that holds it
	NATSURL string `yaml:"nats-url" default:"nats://127.0.0.1:4222"`

	bus.Access `yaml:",inline"`

	// 1, 3 or 5: <number> of NATS servers that store the stream, if it is made here
	NATSReplicas int `yaml:"nats-replicas" default:"1" want:"1, 3 or 5"`

	wire.Scope `yaml:",inline"`

	// name of the worker; empty takes its address
	Name string `yaml:"name"`

	// <number> of the worker; 0 takes one made of its name
	WorkerID uint64 `yaml:"worker-id"`

	// <ip:port> of the engine's HTTP server, as reached from here
	EngineAddress string `yaml:"engine-address" default:"127.0.0.1:8000"`

	// PEM <file> with the authorities of the engine's certificate; kvroute then calls the engine over
	// HTTPS
	WorkerTLSCA string `yaml:"worker-tls-ca"`

	// <name> in the engine's certificate; empty takes the host of engine-address
	WorkerTLSName string `yaml:"worker-tls-name"`

	// <ip:port> of the engine to register; empty takes engine-address, or the address of this machine
	// that reaches NATS
	Advertise string `yaml:"advertise"`

	// <path> of the engine's metrics, for its load; empty tries the usual ones
	MetricsPath string `yaml:"metrics-path"`

	// <path> that answers 200 while the engine is healthy
	HealthPath string `yaml:"health-path" default:"/health"`

	// <time> for one answer of the engine: to health checks, and to requests for its metrics
	HealthTimeout time.Duration `yaml:"health-timeout" default:"5s" want:"more than 0s"`

	// <names> of the model, comma-separated; empty asks the engine
	Model string `yaml:"model"`

	// <names> of its adapters, comma-separated
	LoRA string `yaml:"lora"`

	// aggregated, prefill, decode or both: <role> of the worker; empty asks the engine, where only
	// SGLang answers
	Role string `yaml:"role" want:"aggregated, prefill, decode, both or nothing"`

	// <ip:port> of rank 0's socket for workers that copy blocks of this worker: of vLLM's P2P tier
	KVSource string `yaml:"kv-source"`

	// name of the routers' <card> for the model
	ModelCard string `yaml:"model-card"`

	// capacity of its cache in <blocks>; 0 takes the engine's own value
	TotalKVBlocks int `yaml:"total-kv-blocks"`

	// largest <number> of requests running at once
	MaxNumSeqs int `yaml:"max-num-seqs"`

	// largest <number> of tokens in a step
	MaxBatchedTokens int `yaml:"max-num-batched-tokens"`

	// vllm, sglang or trtllm; empty asks the engine
	Engine string `yaml:"engine" want:"vllm, sglang, trtllm or nothing"`

	// <endpoint> of the engine's events, tcp://host:port or ipc://path; empty asks the engine
	ZMQ string `yaml:"zmq-endpoint"`

	// <prefix> of the topics to read
	ZMQTopic string `yaml:"zmq-topic"`

	// <endpoint> that sends lost events again
	ZMQReplay string `yaml:"zmq-replay-endpoint"`

	// <tokens> in a block of the routers; 0 takes the engine's own value, but at least 16
	BlockSize int `yaml:"block-size"`

	// first data-parallel <rank>
	DPStart int `yaml:"dp-start" want:"0 to 4294967295"`

	// <number> of data-parallel ranks; 0 takes the engine's own value
	DPSize int `yaml:"dp-size" want:"0 to 4294967295"`

	// one removal removes all copies of a block: for engines that report blocks again which they have
	SetLike bool `yaml:"set-like"`

	// answer routers' queries about events that they missed
	LocalIndexer bool `yaml:"enable-local-indexer" default:"true"`

	// publish into a stream that stores events
	Durable bool `yaml:"durable" default:"true"`

	// <ip:port> of /metrics and /healthz; empty opens none
	HTTPAddress string `yaml:"http-address"`

	// <file> that gets the addresses as JSON once the worker is registered
	ReadyFile string `yaml:"ready-file"`

	// debug, info, warn or error
	LogLevel string `yaml:"log-level" default:"info" want:"debug, info, warn or error"`

	// text or json
	LogFormat string `yaml:"log-format" default:"text" want:"text or json"`
}

// record checks the flags, reads NATSURL from its file, and returns the worker's record as far as
// the flags say it.
func (c *Config) record() (r fleet.Record, err error) {
	at, err := netip.ParseAddrPort(c.EngineAddress)
	if err != nil {
		return r, fmt.Errorf("engine-address is %q, want ip:port", c.EngineAddress)
	}
	if c.NATSURL, err = bus.ReadURL(c.NATSURL); err != nil {
		return r, err
	}
	if c.NATSURL == "" {
		return r, errors.New("nats-url is empty: there is nowhere to publish")
	}
	listener := at.String()
	if at.Addr().IsLoopback() && !c.busIsLocal() {
		// Routers on other machines cannot reach the engine at its loopback address.
		listener = net.JoinHostPort("0.0.0.0", fmt.Sprint(at.Port()))
	}
	address, err := bus.PublicAddress(c.Advertise, listener, c.NATSURL)
	return fleet.Record{
		Name: cmp.Or(c.Name, address), WorkerID: c.WorkerID, Address: address, Models: commaList(c.Model),
		LoRA: commaList(c.LoRA), ModelCard: c.ModelCard, Role: router.Role(c.Role), KVSource: c.KVSource,
		BlockSize: c.BlockSize, DPStart: uint32(c.DPStart), DPSize: uint32(c.DPSize),
		TotalKVBlocks: c.TotalKVBlocks, MaxNumSeqs: c.MaxNumSeqs, MaxBatchedTokens: c.MaxBatchedTokens, Engine: c.Engine,
	}, err
}

// busIsLocal reports whether the first NATS server is on this machine's loopback.
func (c *Config) busIsLocal() bool {
	first, _, _ := strings.Cut(c.NATSURL, ",")
	u, err := url.Parse(first)
	if err != nil || u.Hostname() == "localhost" {
		return true // a wrong URL is refused elsewhere
	}
	ip, err := netip.ParseAddr(u.Hostname())
	return err == nil && ip.Unmap().IsLoopback()
}

// engineWorker returns where the events of the engine come from.
func (c *Config) engineWorker() engines.EngineWorker {
	w := engines.EngineWorker{
		Address: c.EngineAddress, Engine: c.Engine, Transport: engines.TransportZMQ, Endpoint: c.ZMQ, Topic: c.ZMQTopic,
		Replay:  c.ZMQReplay,
		DPStart: uint32(c.DPStart), DPSize: uint32(c.DPSize), SetLike: c.SetLike,
	}
	if engine.Of(c.Engine).Polled && c.ZMQ == "" {
		w.Transport = engines.TransportPoll
	}
	return w
}

func commaList(s string) (items []string) {
	for item := range strings.SplitSeq(s, ",") {
		if item = strings.TrimSpace(item); item != "" {
			items = append(items, item)
		}
	}
	return items
}
