// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// config is everything that can be set about `kvroute serve`. Each scalar is a
// flag and a key of the configuration file, under one name; a flag wins over the
// file. "workers" stands in the file only. Nothing is read from the environment.
type config struct {
	// Version is the version of the file's format: 1.
	Version int `yaml:"version"`

	// ExtprocAddress is where Envoy reaches the external processor: ip:port, or
	// unix:/path. Port 0 picks a free one.
	ExtprocAddress string `yaml:"extproc-address"`
	// HTTPAddress serves health, metrics and the API: ip:port. Port 0 picks a
	// free one.
	HTTPAddress string `yaml:"http-address"`
	// APITokenFile is a file of bearer tokens, one a line, 16 or more visible ASCII
	// characters each. With it the API answers only requests with one of them;
	// /healthz, /readyz and /metrics want none. Read again when it changes.
	APITokenFile string `yaml:"api-token-file"`
	// TrustedNetwork says that only trusted clients reach this process. Without it,
	// HTTPAddress off loopback needs APITokenFile, and ExtprocAddress off loopback needs
	// ExtprocTLSClientCA. NATSListen off loopback is refused.
	TrustedNetwork bool `yaml:"trusted-network"`

	// NATSURL is the bus on which workers register and publish their events; file:PATH
	// reads it from a file. Empty keeps a bus inside this process.
	NATSURL string `yaml:"nats-url"`
	// NATSListen is where the bus inside this process listens for others: ip:port. Empty
	// listens nowhere. Its URL, with a password, is written to nats-url in StateDir and
	// to the ready file. It keeps what it stores under StateDir, or forgets it at its end.
	NATSListen string `yaml:"nats-listen"`
	// What follows is for a bus that wants to know who connects.
	bus.Access `yaml:",inline"`
	// NATSReplicas is how many servers of a NATS cluster keep the streams and
	// buckets that this process makes: 1, 3 or 5.
	NATSReplicas int `yaml:"nats-replicas"`
	// Namespace, Component and Endpoint name the scope of the workers' subjects.
	Namespace string `yaml:"namespace"`
	Component string `yaml:"component"`
	Endpoint  string `yaml:"endpoint"`
	// WorkerNetworks are the only networks that workers may have addresses in, and that
	// kvroute connects to: CIDR, CIDR:port or CIDR:port-port, comma-separated. Empty
	// allows all. Workers that register themselves may have a loopback or link-local
	// address only if a network has nothing else, as 127.0.0.0/8.
	WorkerNetworks string `yaml:"worker-networks"`

	// DurableKVEvents reads events from a stream that keeps them for an hour, so
	// that nothing is lost while this process is away. False listens to NATS core.
	DurableKVEvents bool `yaml:"durable-kv-events"`
	// KVEventsRetention is how long that stream keeps events, 30m to 8760h. 0 leaves a
	// stream that is there as it is, and makes one that keeps them for 1h.
	KVEventsRetention time.Duration `yaml:"kv-events-retention"`
	// LegacyJetstream takes in the stream into which Dynamo before 1.4 writes its
	// durable events, whose name follows from Namespace and Component.
	LegacyJetstream bool `yaml:"legacy-jetstream"`
	// Replica is this process's name among the router replicas, the same after a
	// restart. Empty makes one of the host's name and the port of HTTPAddress.
	Replica string `yaml:"replica"`
	// RouterSnapshotThreshold is the number of messages in the stream above which
	// the index is saved and the stream shortened.
	RouterSnapshotThreshold int `yaml:"router-snapshot-threshold"`
	// RouterResetStates makes this and all other replicas forget at the start what
	// they know from events, and delete what is stored of it.
	RouterResetStates bool `yaml:"router-reset-states"`

	// RouterReplicaSync tells the other router replicas of the requests that this one
	// sends to workers, and counts theirs. Without, each decides by its own alone.
	RouterReplicaSync bool `yaml:"router-replica-sync"`

	// Group is the name of the router group that the workers are: what they do and hold is
	// told to routers above. Empty: there is none above.
	Group string `yaml:"group"`
	// GroupInterval is the time between two of its summaries, 50ms to 1m.
	GroupInterval time.Duration `yaml:"group-interval"`
	// GroupProbe asks router groups what a request would find there before it is sent:
	// auto (where a model has at most 8), on or off, which goes by their summaries.
	// GroupProbeBudget is how long answers are waited for.
	GroupProbe       string        `yaml:"group-probe"`
	GroupProbeBudget time.Duration `yaml:"group-probe-budget"`

	// RouterMode is the way of choosing: kv (the cheapest by cache and load),
	// random, round-robin, direct (the worker that the request names),
	// least-loaded, power-of-two or device-aware-weighted.
	RouterMode string `yaml:"router-mode"`
	// Cost says what a worker costs in mode kv: tokens, dynamo, dynamo_newer,
	// predicted_ttft or weighted. Empty is tokens, or the one that the settings
	// below belong to; docs/routing.md has the formulas.
	Cost string `yaml:"cost"`
	// Alpha is the share of a prefill that each request beside it pays, for the
	// costs tokens and predicted_ttft. Absent: 0.1.
	Alpha *float64 `yaml:"alpha"`
	// Attention is what the attention of a token to one before it costs against
	// its linear part, for the cost tokens. "auto" takes it from each model's
	// config.json, 4·layers·heads·head size/parameters, or 6e-5 without one.
	Attention string `yaml:"attention"`
	// RouterTemperature above 0 draws the worker, the cheaper the likelier.
	RouterTemperature float64 `yaml:"router-temperature"`
	// KVOverlapScoreWeight weighs prefill against active blocks and selects the
	// cost dynamo; 0 routes by load alone and keeps no index. Absent: 1.
	KVOverlapScoreWeight *float64 `yaml:"kv-overlap-score-weight"`
	// The settings of the cost dynamo_newer, each of which selects it: prefill
	// blocks forgiven for a cached one (absent: 1), the rate at which that
	// shrinks with pending prefill (0), the weight of prefill (1), blocks that
	// each request counts by itself (0).
	OverlapScoreCredit        *float64 `yaml:"router-kv-overlap-score-credit"`
	OverlapScoreCreditDecay   *float64 `yaml:"router-kv-overlap-score-credit-decay"`
	PrefillLoadScale          *float64 `yaml:"router-prefill-load-scale"`
	DecodeActiveRequestWeight *float64 `yaml:"router-decode-active-request-weight"`
	// What a cached block in host memory, and one on disk or farther, is worth in
	// blocks on the device, for all costs but dynamo and weighted. Absent: 0.75, 0.25.
	HostCacheHitWeight *float64 `yaml:"router-host-cache-hit-weight"`
	DiskCacheHitWeight *float64 `yaml:"router-disk-cache-hit-weight"`
	// The weights of the cost weighted: of the cached share of the prompt, of requests as
	// a share of max_num_seqs, and of the used share of the cache. Absent: 0.6, 0.3, 0.1.
	WeightedOverlap  *float64 `yaml:"weighted-overlap"`
	WeightedRequests *float64 `yaml:"weighted-requests"`
	WeightedKVUse    *float64 `yaml:"weighted-kv-use"`
	// EnginePreset is the engine that times are estimated by: 32b, 8b or 70b.
	EnginePreset string `yaml:"engine-preset"`
	// DeviceRatio is how many CPU workers do the work of another one, in mode
	// device-aware-weighted.
	DeviceRatio float64 `yaml:"device-ratio"`
	// NoAssumeKVReuse counts the blocks of each request in flight as its own,
	// NoTrackActiveBlocks and NoTrackPrefillTokens do not count them, or its
	// prefill tokens, at all.
	NoAssumeKVReuse      bool `yaml:"no-assume-kv-reuse"`
	NoTrackActiveBlocks  bool `yaml:"no-track-active-blocks"`
	NoTrackPrefillTokens bool `yaml:"no-router-track-prefill-tokens"`
	// NoTrackOutputBlocks does not count the blocks that outputs fill. Nobody sees
	// the tokens of a response behind Envoy: they are estimated by the time since the
	// first one. OutputRate is how many a request makes a second; 0 takes what is
	// known of its worker from requests through the API, or the engine preset.
	NoTrackOutputBlocks bool    `yaml:"no-router-track-output-blocks"`
	OutputRate          float64 `yaml:"output-rate"`

	// A worker above one of these gets no requests, in any mode: the share of
	// its blocks in use, 0 to 1; pending prefill tokens; the same in batches of
	// the engine. Absent: never. /busy_threshold of the API changes them.
	BusyThreshold                    *float64 `yaml:"busy-threshold"`
	ActivePrefillTokensThreshold     *int     `yaml:"active-prefill-tokens-threshold"`
	ActivePrefillTokensThresholdFrac *float64 `yaml:"active-prefill-tokens-threshold-frac"`
	// RouterQueueThreshold is how many batches of pending prefill each worker
	// has, more than this, when requests begin to wait for one. Absent: nobody
	// waits.
	RouterQueueThreshold *float64 `yaml:"router-queue-threshold"`
	// RouterQueuePolicy is fcfs (the first come), lcfs (the last) or wspt (the
	// shortest prefill); RouterQueueLimit the largest number that waits, by pool.
	RouterQueuePolicy string `yaml:"router-queue-policy"`
	RouterQueueLimit  int    `yaml:"router-queue-limit"`
	// QueueWait is the longest time that a request waits. Half a second more
	// must not exceed Envoy's max_message_timeout.
	QueueWait time.Duration `yaml:"queue-wait"`
	// OverloadStatus is what clients get when all workers are busy, the queue is
	// full, or the wait was too long: 429, 503 or 529.
	OverloadStatus int `yaml:"overload-status"`
	// SessionAffinityTTL is how many seconds without a request a session stays
	// with its worker; 0: sessions do not matter. In SessionAffinityMode "hard"
	// it gets that worker or an error, in "soft" another one if that is busy.
	SessionAffinityTTL  int    `yaml:"session-affinity-ttl-secs"`
	SessionAffinityMode string `yaml:"session-affinity-mode"`
	// SessionHeaders are the headers that name a session, comma-separated.
	SessionHeaders string `yaml:"session-headers"`
	// TrustOverrides heeds headers with routing hints: priorities, expected
	// output, the target of the first token, taints, x-dynamo-router-override.
	// AllowDirect heeds those that name the worker. For listeners that only
	// trusted clients reach; otherwise they are removed unread.
	TrustOverrides bool `yaml:"trust-overrides"`
	AllowDirect    bool `yaml:"allow-direct"`

	// MaxIndexBlocks bounds the pairs of block and worker that are remembered of
	// a model from events, some 1 to 30 bytes each. At the bound those go first
	// that were asked for longest ago.
	MaxIndexBlocks int `yaml:"max-index-blocks"`
	// NoKVEvents is for workers that do not tell what they cache: the router
	// guesses from the requests that it sent, and listens to no events.
	NoKVEvents bool `yaml:"no-kv-events"`
	// RouterTTLSecs is how many seconds such a guess counts after the last
	// request that confirms it.
	RouterTTLSecs float64 `yaml:"router-ttl-secs"`
	// RouterPredictedTTLSecs is how many seconds a worker counts as holding a
	// request's blocks before its events say so; 0 for not at all.
	RouterPredictedTTLSecs float64 `yaml:"router-predicted-ttl-secs"`
	// StateDir is the folder that keeps what a restart should not forget. Empty
	// keeps nothing.
	StateDir string `yaml:"state-dir"`
	// StateInterval is how often it is written; a crash loses what came since.
	StateInterval time.Duration `yaml:"state-interval"`
	// BlockSize is the number of tokens in a block of workers that do not say; 0
	// takes that of the model's other workers, or 16.
	BlockSize int `yaml:"block-size"`
	// Seed makes the choice among equal workers reproducible.
	Seed uint64 `yaml:"seed"`
	// KeepDecisions is how many recent decisions the API can explain; 0 keeps none.
	// Each takes some 270 bytes for each worker of its pool.
	KeepDecisions int `yaml:"keep-decisions"`

	// TraceOut is a file that gets a line for each request that was served and
	// tokenized exactly, in the Mooncake format: hashes of blocks of 512 tokens
	// under a seed of this process, no text. At 256 MiB it becomes FILE.1 in place
	// of the last one. An older FILE is overwritten. Empty writes none.
	TraceOut string `yaml:"trace-out"`
	// TraceOutTPOT is the time taken for that between two tokens of a response,
	// whose number is worked out from how long it took.
	TraceOutTPOT time.Duration `yaml:"trace-out-tpot"`

	// SecondChoice is how Envoy is told where a request goes that its worker
	// refuses: "header" names it in x-dynamo-worker-fallback, "list" behind the
	// first one in x-dynamo-worker, "none" not at all. It must fit Envoy's
	// configuration: kvroute config envoy --failover.
	SecondChoice string `yaml:"second-choice"`
	// ModeOverride asks Envoy for what keeps its stream open to the end of the
	// response, where the filter's configuration cannot: see examples/envoy-gateway.
	ModeOverride bool `yaml:"mode-override"`
	// ExtprocTLSCert and ExtprocTLSKey are PEM files that Envoy's connections are
	// secured with, ExtprocTLSClientCA one with the authorities whose clients alone
	// may connect. They are read again when they change. Empty for none.
	ExtprocTLSCert     string `yaml:"extproc-tls-cert"`
	ExtprocTLSKey      string `yaml:"extproc-tls-key"`
	ExtprocTLSClientCA string `yaml:"extproc-tls-client-ca"`
	// ExtprocConnectionAge is after how long Envoy is asked to open a new connection,
	// so that replicas which come get their share behind balancers of connections. What
	// runs on the old one ends there. 0 asks never.
	ExtprocConnectionAge time.Duration `yaml:"extproc-connection-age"`
	// EndpointPicker also speaks the endpoint-picker protocol of the Gateway API
	// Inference Extension, for gateways that route by it.
	EndpointPicker bool `yaml:"endpoint-picker"`
	// AvoidFailing is for how long a worker gets no requests that refused one or
	// failed, while others can take them; up to 16 times as long if it goes on.
	// 0 avoids none.
	AvoidFailing time.Duration `yaml:"avoid-failing"`
	// DegradedAfter, UnhealthyAfter and ExpiredAfter are how old a worker's last sign
	// of life is when it gets requests only while no worker is healthy, when it gets
	// none, and when it is given up. None may be below the one before; at least 3s.
	DegradedAfter  time.Duration `yaml:"degraded-after"`
	UnhealthyAfter time.Duration `yaml:"unhealthy-after"`
	ExpiredAfter   time.Duration `yaml:"expired-after"`
	// EndpointFile is a file that is kept up to date with the addresses of the
	// healthy workers, in the form that Envoy reads (kvroute config envoy
	// --pool-file): with kvroute gone, Envoy goes on with them. Empty keeps none.
	EndpointFile string `yaml:"endpoint-file"`

	// DecisionHeaders tells worker, overlap and reason in headers of the
	// response. They reveal the addresses of workers.
	DecisionHeaders bool `yaml:"decision-headers"`
	// FirstToken is how the first token of a response is noticed: "observer"
	// reads the beginning of the response, "response-headers" takes its headers
	// for it, which is right only for workers that send them that late.
	FirstToken string `yaml:"first-token"`
	// MaxBodyBytes is the largest request body that is read. Envoy's own limit
	// should equal it.
	MaxBodyBytes int `yaml:"max-body-bytes"`
	// MaxHeldBytes bounds the request bodies held at a time, all together. A request
	// that finds no room is left to Envoy's choice. 0 takes a quarter of the memory
	// limit (GOMEMLIMIT, else the container's), or 512 MiB without one.
	MaxHeldBytes int64 `yaml:"max-held-bytes"`
	// MaxStreams bounds the requests in flight; those above it are left to Envoy's
	// choice. 0 takes as many as fit a quarter of the memory limit, at most 40,000.
	MaxStreams int `yaml:"max-streams"`
	// DecisionTimeout is the time that a decision may take before the request
	// is left to Envoy's choice. Less than Envoy's message_timeout.
	DecisionTimeout time.Duration `yaml:"decision-timeout"`
	// DrainDelay is how long a shutdown goes on deciding after it has told Envoy's
	// health checks that this replica leaves: longer than their interval.
	DrainDelay time.Duration `yaml:"drain-delay"`
	// DrainTimeout is the longest time of a shutdown, which waits for decisions in
	// progress.
	DrainTimeout time.Duration `yaml:"drain-timeout"`

	// LogLevel is "debug", "info", "warn" or "error"; LogFormat "text" or "json".
	LogLevel  string `yaml:"log-level"`
	LogFormat string `yaml:"log-format"`

	// StrictModels answers 404 to requests for models that have workers but no
	// tokenizer, which are otherwise routed by load.
	StrictModels bool `yaml:"strict-models"`
	// VerifyTokenizer compares the first requests of each model, and few of the
	// later ones, with the worker's own /tokenize. A model whose worker goes on
	// to make other tokens is routed in text-block mode.
	VerifyTokenizer bool `yaml:"verify-tokenizer"`
	// RemoteTokenize asks a worker's /tokenize for the ids of prompts whose model
	// has no tokenizer here, for up to 0.3 s; the answers are kept. Without, such
	// models are in text-block mode.
	RemoteTokenize bool `yaml:"remote-tokenize"`
	// ForwardTokens hands prompts on as token ids, which saves workers from making
	// them: "auto" wherever the worker's engine and version are known to take them,
	// or the fields that may be written, comma-separated: "prompt" of completions,
	// "kv_transfer_params" of vLLM's chats, "prompt_token_ids" of TensorRT-LLM's.
	// Empty leaves bodies as they are. Needs verify-tokenizer.
	ForwardTokens string `yaml:"forward-tokens"`
	// TokenizerCacheBytes is how much memory the ids of prompts take that were
	// seen before, over all models.
	TokenizerCacheBytes int `yaml:"tokenizer-cache-bytes"`

	// Dynamo finds workers by the records of NVIDIA Dynamo's own discovery: docs/fleet.md.
	Dynamo dynamoConfig `yaml:"dynamo,omitempty"`

	// Models are the models whose prompts are tokenized exactly. Reloaded
	// when the file changes.
	Models []modelConfig `yaml:"models,omitempty"`
	// Workers are known from the start, and count as healthy unless they ask for
	// probes. Their fields are those of a registration; an address may be a name,
	// which stands for a worker at each of its addresses and is looked up every 10 s.
	// Reloaded when the file changes.
	Workers workerList `yaml:"workers"`
	// Groups are router groups, to which requests go instead of workers. Fields: name,
	// address (ip:port of the group's gateway); models, block_size and members as far as
	// they are to be known before the group says so itself. Reloaded when the file changes.
	Groups groupList `yaml:"groups,omitempty"`
}

// modelConfig is one of the file's "models".
type modelConfig struct {
	// Name is the name of the base model, as its workers serve it.
	Name string `yaml:"name"`
	// Aliases are other names that clients may use, LoRA those of its adapters.
	Aliases []string `yaml:"aliases,omitempty"`
	LoRA    []string `yaml:"lora,omitempty"`
	// Tokenizer is the folder with the model's tokenizer.json, or rank file
	// *.tiktoken, or Mistral's tekken.json or tokenizer.model.v*, and what is
	// beside it: config.json, tokenizer_config.json, chat_template.jinja,
	// special_tokens_map.json.
	Tokenizer string `yaml:"tokenizer"`
	// TokenizerMode is the engine's --tokenizer-mode: hf or mistral. Empty takes
	// what vLLM takes by itself.
	TokenizerMode string `yaml:"tokenizer-mode,omitempty"`
	// ChatTemplate is a file with a chat template, instead of the model's own.
	ChatTemplate string `yaml:"chat-template,omitempty"`
	// Pattern parts words for a rank file: gpt2, cl100k, o200k, kimi, or an expression.
	// Empty: what its name or the class in tokenizer_config.json tells.
	Pattern string `yaml:"pattern,omitempty"`
	// Profile is the engine that serves the model: vllm (default), sglang, trtllm.
	Profile string `yaml:"profile,omitempty"`
	// BlockSize is the number of tokens in a block; 0 takes that of the first worker.
	BlockSize int `yaml:"block-size,omitempty"`
}

func defaults() config {
	return config{
		Version:             1,
		ExtprocAddress:      "127.0.0.1:9002",
		HTTPAddress:         "127.0.0.1:9003",
		Namespace:           "kvroute",
		Component:           "workers",
		Endpoint:            "generate",
		RouterMode:          string(router.KV),
		Attention:           "auto",
		EnginePreset:        "32b",
		DeviceRatio:         8,
		RouterQueuePolicy:   string(scorer.FCFS),
		RouterQueueLimit:    10_000,
		QueueWait:           9500 * time.Millisecond,
		OverloadStatus:      429,
		SessionAffinityMode: "soft",
		SessionHeaders:      "x-dynamo-session-id,x-session-id,session-id,x-claude-code-session-id",
		KeepDecisions:       1024,
		TraceOutTPOT:        20 * time.Millisecond,
		SecondChoice:        extproc.SecondHeader,
		AvoidFailing:        2 * time.Second,
		DegradedAfter:       7500 * time.Millisecond,
		UnhealthyAfter:      15 * time.Second,
		ExpiredAfter:        30 * time.Second,

		ExtprocConnectionAge: 10 * time.Minute,

		NATSReplicas:            1,
		DurableKVEvents:         true,
		RouterReplicaSync:       true,
		GroupInterval:           time.Second,
		GroupProbe:              "auto",
		GroupProbeBudget:        3 * time.Millisecond,
		RouterSnapshotThreshold: 1_000_000,

		MaxIndexBlocks:         1 << 24,
		RouterTTLSecs:          120,
		RouterPredictedTTLSecs: 10,
		StateInterval:          30 * time.Second,
		FirstToken:             "observer",
		TokenizerCacheBytes:    64 << 20,
		MaxBodyBytes:           16 << 20,
		DecisionTimeout:        1500 * time.Millisecond,
		DrainDelay:             2 * time.Second,
		DrainTimeout:           25 * time.Second,
		LogLevel:               "info",
		LogFormat:              "text",
	}
}

// flags makes every scalar of c a flag of fs, c's values their defaults.
func (c *config) flags(fs *flag.FlagSet) {
	fs.StringVar(&c.ExtprocAddress, "extproc-address", c.ExtprocAddress, "where Envoy reaches the external processor: `ip:port` or unix:/path")
	fs.StringVar(&c.HTTPAddress, "http-address", c.HTTPAddress, "`ip:port` of health, metrics and API")
	fs.StringVar(&c.APITokenFile, "api-token-file", c.APITokenFile, "`file` of bearer tokens, one a line, that open the API")
	fs.BoolVar(&c.TrustedNetwork, "trusted-network", c.TrustedNetwork, "only trusted clients reach http-address, extproc-address and nats-listen: allow addresses off loopback without api-token-file and extproc-tls-client-ca")
	fs.StringVar(&c.NATSURL, "nats-url", c.NATSURL, "`URL` of the NATS bus, or file:PATH of a file that has it; empty keeps a bus in this process")
	fs.StringVar(&c.NATSListen, "nats-listen", c.NATSListen, "`ip:port` at which the bus in this process listens for workers and other replicas; empty listens nowhere. Clients need the URL in the file nats-url of state-dir")
	c.Access.Flags(fs)
	fs.IntVar(&c.NATSReplicas, "nats-replicas", c.NATSReplicas, "`number` of NATS servers that keep what is made there")
	fs.BoolVar(&c.RouterReplicaSync, "router-replica-sync", c.RouterReplicaSync, "exchange requests in flight with other router replicas")
	fs.StringVar(&c.Group, "group", c.Group, "`name` of the router group that the workers are, for routers above")
	fs.DurationVar(&c.GroupInterval, "group-interval", c.GroupInterval, "`time` between two summaries of the group")
	fs.StringVar(&c.GroupProbe, "group-probe", c.GroupProbe, "auto, on or off: ask router groups about each request")
	fs.DurationVar(&c.GroupProbeBudget, "group-probe-budget", c.GroupProbeBudget, "longest `time` that groups' answers are waited for")
	fs.BoolVar(&c.DurableKVEvents, "durable-kv-events", c.DurableKVEvents, "read events from a stream that keeps them")
	fs.DurationVar(&c.KVEventsRetention, "kv-events-retention", c.KVEventsRetention, "how `long` the stream of events keeps them, 30m to 8760h; 0 leaves an existing stream as it is and makes one of 1h")
	fs.BoolVar(&c.LegacyJetstream, "legacy-jetstream", c.LegacyJetstream, "take in the stream of durable events of Dynamo before 1.4")
	fs.StringVar(&c.Replica, "replica", c.Replica, "`name` of this process among the router replicas, the same after a restart")
	fs.IntVar(&c.RouterSnapshotThreshold, "router-snapshot-threshold", c.RouterSnapshotThreshold, "`messages` in the stream above which the index is saved")
	fs.BoolVar(&c.RouterResetStates, "router-reset-states", c.RouterResetStates, "make all replicas forget what they know from events")
	fs.StringVar(&c.Namespace, "namespace", c.Namespace, "namespace of the workers' subjects")
	fs.StringVar(&c.Component, "component", c.Component, "component of the workers' subjects")
	fs.StringVar(&c.Endpoint, "endpoint", c.Endpoint, "endpoint of the workers' subjects")
	fs.StringVar(&c.WorkerNetworks, "worker-networks", c.WorkerNetworks, "`networks` that workers may be in: CIDR, CIDR:port or CIDR:port-port, comma-separated; empty allows all. Add 127.0.0.0/8 to let workers on loopback register")
	c.routingFlags(fs)
	fs.IntVar(&c.MaxIndexBlocks, "max-index-blocks", c.MaxIndexBlocks, "largest `number` of pairs of block and worker remembered of a model")
	fs.BoolVar(&c.NoKVEvents, "no-kv-events", c.NoKVEvents, "guess what workers cache from what was sent there, and listen to no events")
	fs.Float64Var(&c.RouterTTLSecs, "router-ttl-secs", c.RouterTTLSecs, "`seconds` that such a guess counts")
	fs.Float64Var(&c.RouterPredictedTTLSecs, "router-predicted-ttl-secs", c.RouterPredictedTTLSecs, "`seconds` that a request's blocks count as cached before an event says so; 0 for none")
	fs.StringVar(&c.StateDir, "state-dir", c.StateDir, "`folder` that keeps what a restart should not forget")
	fs.DurationVar(&c.StateInterval, "state-interval", c.StateInterval, "`time` between two writings of it")
	fs.IntVar(&c.BlockSize, "block-size", c.BlockSize, "`tokens` in a block of workers that do not say; 0 takes that of the model's others")
	fs.Uint64Var(&c.Seed, "seed", c.Seed, "makes the choice among equal workers reproducible")
	fs.IntVar(&c.KeepDecisions, "keep-decisions", c.KeepDecisions, "`number` of recent decisions that can be explained, 0 for none")
	fs.StringVar(&c.TraceOut, "trace-out", c.TraceOut, "`file` that gets a trace of the requests served, for kvroute replay")
	fs.DurationVar(&c.TraceOutTPOT, "trace-out-tpot", c.TraceOutTPOT, "`time` between two tokens of a response, for the trace")
	fs.StringVar(&c.SecondChoice, "second-choice", c.SecondChoice, "header, list or none: how Envoy is told where a request goes that its worker refuses")
	fs.BoolVar(&c.ModeOverride, "mode-override", c.ModeOverride, "ask Envoy for the response's headers and trailers, for Envoy Gateway")
	fs.StringVar(&c.ExtprocTLSCert, "extproc-tls-cert", c.ExtprocTLSCert, "`file` with the certificate that Envoy's connections are secured with")
	fs.StringVar(&c.ExtprocTLSKey, "extproc-tls-key", c.ExtprocTLSKey, "`file` with its key")
	fs.StringVar(&c.ExtprocTLSClientCA, "extproc-tls-client-ca", c.ExtprocTLSClientCA, "`file` with the authorities whose clients alone may connect")
	fs.DurationVar(&c.ExtprocConnectionAge, "extproc-connection-age", c.ExtprocConnectionAge, "after how `long` Envoy is asked to open a new connection; 0 for never")
	fs.BoolVar(&c.EndpointPicker, "endpoint-picker", c.EndpointPicker, "also speak the endpoint-picker protocol of the Gateway API Inference Extension")
	fs.DurationVar(&c.AvoidFailing, "avoid-failing", c.AvoidFailing, "how `long` a worker that fails gets no requests, at first; 0 avoids none")
	fs.DurationVar(&c.DegradedAfter, "degraded-after", c.DegradedAfter, "for how `long` a worker is silent before it only stands in for healthy ones")
	fs.DurationVar(&c.UnhealthyAfter, "unhealthy-after", c.UnhealthyAfter, "for how `long` a worker is silent before it gets no requests")
	fs.DurationVar(&c.ExpiredAfter, "expired-after", c.ExpiredAfter, "for how `long` a worker is silent before it is given up")
	fs.StringVar(&c.EndpointFile, "endpoint-file", c.EndpointFile, "`file` kept up to date with the healthy workers, for Envoy's pool")
	fs.BoolVar(&c.DecisionHeaders, "decision-headers", c.DecisionHeaders, "tell worker, overlap and reason in the response's headers")
	fs.StringVar(&c.FirstToken, "first-token", c.FirstToken, "observer or response-headers: what counts as the first token")
	fs.IntVar(&c.MaxBodyBytes, "max-body-bytes", c.MaxBodyBytes, "largest request body in `bytes`")
	fs.Int64Var(&c.MaxHeldBytes, "max-held-bytes", c.MaxHeldBytes, "`bytes` of request bodies held at a time, all together; 0 takes a quarter of the memory limit, or 512 MiB without one")
	fs.IntVar(&c.MaxStreams, "max-streams", c.MaxStreams, "largest `number` of requests in flight; 0 takes what fits a quarter of the memory limit, at most 40,000")
	fs.DurationVar(&c.DecisionTimeout, "decision-timeout", c.DecisionTimeout, "longest `time` of a decision")
	fs.DurationVar(&c.DrainDelay, "drain-delay", c.DrainDelay, "how `long` a shutdown goes on deciding, so that Envoy's health checks notice it")
	fs.DurationVar(&c.DrainTimeout, "drain-timeout", c.DrainTimeout, "longest `time` of a shutdown")
	fs.BoolVar(&c.StrictModels, "strict-models", c.StrictModels, "answer 404 for models without a tokenizer")
	fs.BoolVar(&c.VerifyTokenizer, "verify-tokenizer", c.VerifyTokenizer, "compare some prompts with the workers' own tokens")
	fs.BoolVar(&c.RemoteTokenize, "remote-tokenize", c.RemoteTokenize, "ask a worker for the tokens of models without a tokenizer")
	fs.StringVar(&c.ForwardTokens, "forward-tokens", c.ForwardTokens, "hand prompts on as ids: auto, or a list of prompt, kv_transfer_params, prompt_token_ids")
	fs.IntVar(&c.TokenizerCacheBytes, "tokenizer-cache-bytes", c.TokenizerCacheBytes, "`bytes` for the token ids of prompts seen before")
	fs.StringVar(&c.LogLevel, "log-level", c.LogLevel, "debug, info, warn or error")
	fs.StringVar(&c.LogFormat, "log-format", c.LogFormat, "text or json")
}

// readConfig works out the configuration from defaults, the file named by --config
// and flags, in this order. more adds flags that are no settings.
func readConfig(name string, args []string, out io.Writer, more func(*flag.FlagSet)) (c config, file string, err error) {
	// The first pass finds the file, the second lets the flags win over it.
	for _, pass := range []string{"file", "flags"} {
		if pass == "file" {
			c = defaults()
		}
		fs := newFlagSet(name, out)
		fs.StringVar(&file, "config", file, "YAML `file` with settings of the same names, and workers")
		c.flags(fs)
		if more != nil {
			more(fs)
		}
		if err := parse(fs, args); err != nil {
			return c, file, err
		}
		if pass == "file" {
			if c, err = readFile(file); err != nil {
				return c, file, err
			}
		}
	}
	return c, file, c.check()
}

// changed returns the names of the settings that differ between c and a running
// configuration, in order, without the lists that are reloaded.
func (c *config) changed(running *config) (names []string, err error) {
	now, err := c.settings()
	if err != nil {
		return nil, err
	}
	was, err := running.settings()
	if err != nil {
		return nil, err
	}
	for name := range now {
		if _, known := was[name]; !known {
			was[name] = nil
		}
	}
	for name, value := range was {
		if !slices.Contains([]string{"models", "workers", "groups"}, name) && !reflect.DeepEqual(value, now[name]) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// readFile returns the defaults with what the file says.
func readFile(file string) (config, error) {
	c := defaults()
	if file == "" {
		return c, nil
	}
	dir, err := os.OpenRoot(filepath.Dir(file))
	if err != nil {
		return c, fmt.Errorf("config: %w", err)
	}
	defer dir.Close()
	data, err := dir.ReadFile(filepath.Base(file))
	if err != nil {
		return c, fmt.Errorf("config: %w", err)
	}
	c.Version = 0
	if err := yaml.UnmarshalWithOptions(data, &c, yaml.Strict()); err != nil {
		return c, fmt.Errorf("config: read %s:\n%s", file, yaml.FormatError(err, false, true))
	}
	if c.Version != 1 {
		return c, fmt.Errorf("config: %s: version is %d, want 1", file, c.Version)
	}
	return c, eachOnce(c.Workers)
}

// seconds turns a setting in seconds into a time; what is no time becomes one that
// is refused.
func seconds(s float64) time.Duration {
	if math.IsNaN(s) || s < 0 || s > 1e9 {
		return -1
	}
	return time.Duration(s * float64(time.Second))
}

// maxSessionSecs is a year, as package router has it.
const maxSessionSecs = 31_536_000

// check refuses values that no package would refuse in words of the user's.
func (c *config) check() error {
	var errs []error
	bad := func(name string, value, want string) {
		errs = append(errs, fmt.Errorf("config: %s is %q, want %s", name, value, want))
	}
	for _, a := range []struct {
		name, value string
	}{{"http-address", c.HTTPAddress}, {"nats-listen", c.NATSListen}, {"extproc-address", c.ExtprocAddress}} {
		if _, _, err := splitAddress(a.value); err != nil && (a.value != "" || a.name != "nats-listen") {
			bad(a.name, a.value, "ip:port")
		}
	}
	// Where packages take 0 for their default, a person does not mean that.
	if s := c.RouterTTLSecs; seconds(s) <= 0 {
		bad("router-ttl-secs", fmt.Sprint(s), "more than 0 seconds, at most 1e9")
	}
	if s := c.RouterPredictedTTLSecs; seconds(s) < 0 {
		bad("router-predicted-ttl-secs", fmt.Sprint(s), "0 or more seconds, at most 1e9")
	}
	if r := c.DeviceRatio; !(r > 0) {
		bad("device-ratio", fmt.Sprint(r), "a number above 0")
	}
	if c.KeepDecisions < 0 {
		bad("keep-decisions", fmt.Sprint(c.KeepDecisions), "0 or more")
	}
	if s := c.SessionAffinityTTL; s < 0 || s > maxSessionSecs {
		bad("session-affinity-ttl-secs", fmt.Sprint(s), fmt.Sprintf("0 to %d", maxSessionSecs))
	}
	for _, a := range []struct{ name, value, guard, need string }{
		{"http-address", c.HTTPAddress, c.APITokenFile, "api-token-file"},
		{"extproc-address", c.ExtprocAddress, c.ExtprocTLSClientCA, "extproc-tls-client-ca"},
		{"nats-listen", c.NATSListen, "", "nats-url of a server with TLS, since the password here is not encrypted"},
	} {
		if !c.TrustedNetwork && a.guard == "" && !loopback(a.value) {
			errs = append(errs, fmt.Errorf("config: %s is %q, which other machines can reach; give %s, or trusted-network if only trusted clients reach it", a.name, a.value, a.need))
		}
	}
	if o := c.OverloadStatus; o != 429 && o != 503 && o != 529 {
		bad("overload-status", fmt.Sprint(o), "429, 503 or 529")
	}
	if c.FirstToken != "observer" && c.FirstToken != "response-headers" {
		bad("first-token", c.FirstToken, "observer or response-headers")
	}
	for _, n := range []struct {
		name  string
		value int64
	}{
		{"max-body-bytes", int64(c.MaxBodyBytes)},
		{"tokenizer-cache-bytes", int64(c.TokenizerCacheBytes)},
		{"router-queue-limit", int64(c.RouterQueueLimit)},
		{"max-index-blocks", int64(c.MaxIndexBlocks)},
	} {
		if n.value <= 0 {
			bad(n.name, fmt.Sprint(n.value), "more than 0")
		}
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"decision-timeout", c.DecisionTimeout},
		{"queue-wait", c.QueueWait},
		{"trace-out-tpot", c.TraceOutTPOT},
		{"state-interval", c.StateInterval},
		{"drain-timeout", c.DrainTimeout},
		{"group-probe-budget", c.GroupProbeBudget},
	} {
		if d.value <= 0 {
			bad(d.name, d.value.String(), "a time above 0s")
		}
	}
	for _, d := range []struct {
		name         string
		value, least time.Duration
	}{
		{"degraded-after", c.DegradedAfter, fleet.MinAge},
		{"unhealthy-after", c.UnhealthyAfter, c.DegradedAfter},
		{"expired-after", c.ExpiredAfter, c.UnhealthyAfter},
	} {
		if d.value < d.least || d.value > time.Hour {
			bad(d.name, d.value.String(), fmt.Sprintf("%v to 1h", d.least))
		}
	}
	if c.MaxHeldBytes < 0 {
		bad("max-held-bytes", fmt.Sprint(c.MaxHeldBytes), "0 or more")
	}
	if c.MaxStreams < 0 {
		bad("max-streams", fmt.Sprint(c.MaxStreams), "0 or more")
	}
	if c.ExtprocConnectionAge < 0 {
		bad("extproc-connection-age", c.ExtprocConnectionAge.String(), "0 or more")
	}
	if c.DrainDelay < 0 {
		bad("drain-delay", c.DrainDelay.String(), "0 or more")
	}
	if _, err := telemetry.NewLogger(io.Discard, c.LogLevel, c.LogFormat, nil); err != nil {
		errs = append(errs, fmt.Errorf("config: %w", err))
	}
	if err := extproc.CheckForwardTokens(c.ForwardTokens); err != nil {
		errs = append(errs, fmt.Errorf("config: forward-tokens: %w", err))
	} else if c.ForwardTokens != "" && !c.VerifyTokenizer {
		errs = append(errs, errors.New("config: forward-tokens needs verify-tokenizer: ids go to workers only where they were compared with a worker's own"))
	}
	if c.RouterSnapshotThreshold <= 0 {
		bad("router-snapshot-threshold", fmt.Sprint(c.RouterSnapshotThreshold), "a number of messages")
	}
	if r := c.KVEventsRetention; r != 0 && (r < 30*time.Minute || r > 8760*time.Hour) {
		bad("kv-events-retention", r.String(), "0, or 30m to 8760h")
	} else if r != 0 && !c.DurableKVEvents {
		errs = append(errs, errors.New("config: kv-events-retention needs durable-kv-events: without it no stream keeps events"))
	}
	if c.LegacyJetstream && !c.DurableKVEvents {
		errs = append(errs, errors.New("config: legacy-jetstream needs durable-kv-events: it is our stream that takes the other in"))
	}
	if n := c.NATSReplicas; n != 1 && n != 3 && n != 5 {
		bad("nats-replicas", fmt.Sprint(n), "1, 3 or 5")
	}
	if _, err := c.Options(); err != nil {
		errs = append(errs, fmt.Errorf("config: %w", err))
	}
	if c.NATSURL != "" && !strings.HasPrefix(c.NATSURL, "file:") {
		if err := bus.CheckURL(c.NATSURL); err != nil {
			errs = append(errs, fmt.Errorf("config: %w", err))
		}
	}
	if p := c.GroupProbe; p != "auto" && p != "on" && p != "off" {
		bad("group-probe", p, "auto, on or off")
	}
	if err := replicas.CheckGroups(c.Groups); err != nil {
		errs = append(errs, fmt.Errorf("config: %w", err))
	}
	if ms := c.GroupInterval.Milliseconds(); ms < 50 || ms > 60_000 {
		bad("group-interval", c.GroupInterval.String(), "50ms to 1m")
	}
	if c.Group != "" && len(c.Groups) > 0 {
		errs = append(errs, errors.New("config: group and groups are both given: a router of a group knows its workers"))
	}
	if err := c.Dynamo.check(); err != nil {
		errs = append(errs, err)
	}
	if _, err := reach.Parse(c.WorkerNetworks); err != nil {
		errs = append(errs, fmt.Errorf("config: worker-networks: %w", err))
	}
	names := map[string]bool{}
	for i, m := range c.Models {
		at := fmt.Sprintf("models[%d]", i)
		switch {
		case m.Name == "":
			bad(at+".name", m.Name, "a name")
		case names[m.Name]:
			bad(at+".name", m.Name, "each name once")
		case m.Tokenizer == "":
			bad(at+".tokenizer", m.Tokenizer, "a folder")
		case m.BlockSize < 0:
			bad(at+".block-size", fmt.Sprint(m.BlockSize), "0 or more tokens")
		}
		names[m.Name] = true
	}
	return errors.Join(errs...)
}

// loopback says whether only this machine can reach an address.
func loopback(address string) bool {
	network, at, err := splitAddress(address)
	if err != nil || network == "unix" {
		return true // a wrong address is refused as such
	}
	host, _, _ := net.SplitHostPort(at)
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}

// splitAddress tells the network and the address of a listener.
func splitAddress(s string) (network, address string, err error) {
	if path, ok := cutUnix(s); ok {
		return "unix", path, nil
	}
	if _, _, err := net.SplitHostPort(s); err != nil {
		return "", "", err
	}
	return "tcp", s, nil
}

// groupList is the "groups" of the file.
type groupList []replicas.Group

// UnmarshalYAML reads the list; fields that a group does not have are refused.
func (l *groupList) UnmarshalYAML(data []byte) error {
	return readList(data, "groups", (*[]replicas.Group)(l))
}

// MarshalYAML is the inverse of UnmarshalYAML.
func (l groupList) MarshalYAML() ([]byte, error) { return writeList([]replicas.Group(l)) }

// workerList is the "workers" of the file. The fields are those of the JSON that
// workers register with, so it is read as that.
type workerList []fleet.Record

// UnmarshalYAML reads the list; fields that a record does not have are refused.
func (l *workerList) UnmarshalYAML(data []byte) error {
	return readList(data, "workers", (*[]fleet.Record)(l))
}

// readList reads a list of the file into one whose elements are known as JSON.
func readList(data []byte, name string, to any) error {
	text, err := yaml.YAMLToJSON(data)
	if err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(to); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

func writeList(list any) ([]byte, error) {
	text, err := json.Marshal(list)
	if err != nil {
		return nil, err
	}
	return yaml.JSONToYAML(text)
}

// MarshalYAML is the inverse of UnmarshalYAML.
func (l workerList) MarshalYAML() ([]byte, error) { return writeList([]fleet.Record(l)) }
