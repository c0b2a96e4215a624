// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/settings"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/replicas"
)

// config is the settings of `kvroute serve`. Each is a flag and a key of the configuration
// file, under one name; a flag wins over the file. The comment and the tags of a field describe it:
// see package settings. The tag own means that replicas may differ in the setting. If they differ in others,
// they decide differently.
//
// "workers", "groups", "models", "kubernetes" and "dynamo" are in the file only. Each flag is also an environment
// variable; see [variable]. Variables whose names begin with OTEL_ set traces and the names of the
// process: see package telemetry.
type config struct {
	// Version of the file's format: 1.
	Version int `yaml:"version"`

	// <ip:port> or unix:/path at which Envoy reaches the external processor; port 0 picks a free one
	ExtprocAddress string `yaml:"extproc-address" topic:"Listeners and access" own:"yes" default:"127.0.0.1:9002"`

	// <ip:port> of health checks, metrics and the API; port 0 picks a free one
	HTTPAddress string `yaml:"http-address" own:"yes" default:"127.0.0.1:9003"`

	// <file> of bearer tokens, one a line, 16 or more visible ASCII characters each; the API then
	// answers only requests with one of them
	APITokenFile string `yaml:"api-token-file" own:"yes"`

	// PEM <file> with the certificate of http-address, which then speaks HTTPS only
	HTTPTLSCert string `yaml:"http-tls-cert" own:"yes"`

	// PEM <file> with the key of http-tls-cert
	HTTPTLSKey string `yaml:"http-tls-key" own:"yes"`

	// allow http-address, extproc-address and nats-listen off loopback without api-token-file and
	// extproc-tls-client-ca; set it if only trusted clients reach them
	TrustedNetwork bool `yaml:"trusted-network" own:"yes"`

	// <URL> of the NATS server, or file:PATH of a file that holds the URL; empty runs a NATS server in
	// this process
	NATSURL string `yaml:"nats-url" topic:"NATS and the scope of the workers" own:"yes"`

	// <ip:port> at which the NATS server in this process listens for workers and other replicas; empty
	// listens nowhere. Clients need the URL in the file nats-url of state-dir
	NATSListen string `yaml:"nats-listen" own:"yes"`

	bus.Access `yaml:",inline"`

	// 1, 3 or 5: <number> of NATS servers that store the streams and buckets that kvroute makes
	NATSReplicas int `yaml:"nats-replicas" default:"1" want:"1, 3 or 5"`

	wire.Scope `yaml:",inline"`

	// <networks> that workers may be in: CIDR, CIDR:port or CIDR:port-port, comma-separated; empty
	// allows all. Add 127.0.0.0/8 to let workers on loopback register
	WorkerNetworks string `yaml:"worker-networks"`

	// PEM <file> with the authorities of the workers' certificates; kvroute then calls all workers
	// over HTTPS
	WorkerTLSCA string `yaml:"worker-tls-ca" own:"yes"`

	// <name> in the certificate of every worker; empty takes the worker's IP address
	WorkerTLSName string `yaml:"worker-tls-name"`

	// read events from a stream that stores them, so that a restart loses none
	DurableKVEvents bool `yaml:"durable-kv-events" topic:"Cache events and replicas" default:"true"`

	// <time> for which the stream stores events, 30m to 8760h; 0 leaves an existing stream unchanged
	// and makes a new one with 1h
	KVEventsRetention time.Duration `yaml:"kv-events-retention"`

	// <name> of this router replica, the same after a restart; empty makes one of the host name and
	// the port
	Replica string `yaml:"replica" own:"yes"`

	// <number> of messages in the stream above which the index is saved and the stream shortened
	RouterSnapshotThreshold int `yaml:"router-snapshot-threshold" default:"1000000" want:"more than 0"`

	// make all replicas forget at the start what they know from events
	RouterResetStates bool `yaml:"router-reset-states" own:"yes"`

	// exchange requests in flight with other router replicas
	RouterReplicaSync bool `yaml:"router-replica-sync" dynamo:"DYN_ROUTER_REPLICA_SYNC" default:"true"`

	// <name> of the router group that the workers form, for upper routers; empty: no upper router
	Group string `yaml:"group" topic:"Router groups"`

	// <time> between two summaries of the group, 50ms to 1m
	GroupInterval time.Duration `yaml:"group-interval" default:"1s" want:"50ms to 1m"`

	// auto, on or off: ask router groups about each request before it is sent; auto asks if a model
	// has at most 8 groups
	GroupProbe string `yaml:"group-probe" default:"auto" want:"auto, on or off"`

	// <time> for which answers of router groups are awaited
	GroupProbeBudget time.Duration `yaml:"group-probe-budget" default:"3ms" want:"more than 0s"`

	Routing `yaml:",inline"`

	// <number> of pairs of block and worker that are stored for a model from events, 1 to 30 bytes
	// each; above it the least recently requested are removed
	MaxIndexBlocks int `yaml:"max-index-blocks" topic:"The index and the stored state" default:"16777216" want:"more than 0"`

	// ignore cache events, and estimate what workers cache from the requests sent to them
	NoKVEvents bool `yaml:"no-kv-events" dynamo:"!DYN_ROUTER_USE_KV_EVENTS"`

	// <seconds> for which an estimate of --no-kv-events counts after the last request that confirms it
	RouterTTLSecs float64 `yaml:"router-ttl-secs" dynamo:"DYN_ROUTER_TTL_SECS" default:"120" want:"more than 0, at most 1e9"`

	// <seconds> for which a request's blocks count as cached before an event confirms them; 0 turns
	// that off
	RouterPredictedTTLSecs float64 `yaml:"router-predicted-ttl-secs" dynamo:"DYN_ROUTER_PREDICTED_TTL_SECS" default:"10" want:"0 to 1e9"`

	// <folder> for what a restart must not forget; empty stores nothing
	StateDir string `yaml:"state-dir" own:"yes"`

	// <time> between two writes of the state; a crash loses what came since the last one
	StateInterval time.Duration `yaml:"state-interval" own:"yes" default:"30s" want:"more than 0s"`

	// <tokens> in a block of workers that do not report it; 0 takes that of the model's other workers,
	// or 16
	BlockSize int `yaml:"block-size"`

	// <number> that makes the choice among equal workers reproducible
	Seed uint64 `yaml:"seed" own:"yes"`

	// <number> of recent decisions that the API can explain, some 300 bytes for each worker, at most
	// 128 workers of a decision; 0 stores none
	KeepDecisions int `yaml:"keep-decisions" own:"yes" default:"1024" want:"0 or more"`

	// <file> for a trace of the requests served, for kvroute replay; empty writes none. At 256 MiB it
	// is renamed to FILE.1
	//
	// The trace has the Mooncake format: hashes of blocks of 512 tokens under a seed of this
	// process, and no text.
	TraceOut string `yaml:"trace-out" topic:"Traces for kvroute replay, and samples" own:"yes"`

	// <share> of the responses whose usage is read to compare the predicted cached tokens with the
	// real ones
	AuditShare float64 `yaml:"audit-share" default:"0.01" want:"0 to 1"`

	// <share> of the requests, 0 to 1, that are routed round robin to compare their times to first tokens
	// with those of the others. It is drawn by session, or else by the beginning of the prompt. 0 turns it off
	HoldoutShare float64 `yaml:"holdout-share" want:"0 to 1"`

	// <number> of workers that have metrics of their own; 0 turns these metrics off
	WorkerMetrics int `yaml:"worker-metrics" default:"1024" want:"0 or more"`

	// <time> between two tokens of a response that the trace assumes
	TraceOutTPOT time.Duration `yaml:"trace-out-tpot" own:"yes" default:"20ms" want:"more than 0s"`

	// header, list or none: how Envoy learns where to send a request that its worker refuses; must fit
	// config envoy --failover; none applies to /v1/generate, too
	SecondChoice string `yaml:"second-choice" topic:"Envoy" default:"header"`

	// add id, worker, overlap and reason of the decision to the response's headers, which reveals the
	// addresses of workers
	DecisionHeaders bool `yaml:"decision-headers"`

	// observer or response-headers: what counts as the first token of a response; response-headers
	// fits only workers that send their headers with it
	FirstToken string `yaml:"first-token" default:"observer" want:"observer or response-headers"`

	// most <tokens> to compute for a streamed request at which kvroute infers the first token, if it needs no
	// report by Envoy, which costs CPU; 0 infers none that Envoy can report
	InferTokens int `yaml:"infer-tokens" default:"512" want:"0 or more"`

	// <number> of first tokens a minute of each worker that Envoy reports in any case; they measure how fast
	// the worker computes prompts
	ObservePerMinute int `yaml:"observe-per-minute" default:"30" want:"1 or more"`

	// <share> of the other streamed requests within infer-tokens whose first token Envoy reports; their times to first
	// tokens stand for those of all these requests
	ObserveShare float64 `yaml:"observe-share" default:"0.05" want:"0 to 1"`

	// <URL> of Envoy's admin endpoint, as http://127.0.0.1:9901; kvroute then reads Envoy's counters
	// every 10 s and its configuration every minute, and reports whether Envoy uses it. Empty reads none
	EnvoyAdmin string `yaml:"envoy-admin" own:"yes"`

	// <time> of Envoy's max_message_timeout; 60s is that of kvroute's bootstrap. Prefill legs and waits that take
	// longer would be lost, so kvroute refuses longer values of prefill-timeout and queue-wait. With envoy-admin
	// kvroute compares with Envoy's configuration instead
	EnvoyMaxMessageTimeout time.Duration `yaml:"envoy-max-message-timeout" default:"1m" want:"more than 0s"`

	// ask Envoy for the response's headers and trailers; needed with Envoy Gateway
	//
	// The configuration of some filters cannot request the response: see examples/envoy-gateway.
	ModeOverride bool `yaml:"mode-override"`

	// PEM <file> with the certificate for connections of Envoy
	ExtprocTLSCert string `yaml:"extproc-tls-cert" own:"yes"`

	// PEM <file> with the key of extproc-tls-cert
	ExtprocTLSKey string `yaml:"extproc-tls-key" own:"yes"`

	// PEM <file> with the authorities whose clients may connect; empty accepts all clients
	ExtprocTLSClientCA string `yaml:"extproc-tls-client-ca" own:"yes"`

	// <time> after which Envoy is asked to open a new connection; 0 never asks
	//
	// New replicas behind a balancer of connections get their share only when Envoy reconnects.
	ExtprocConnectionAge time.Duration `yaml:"extproc-connection-age" default:"10m" want:"0s or more"`

	// also speak the endpoint-picker protocol of the Gateway API Inference Extension
	EndpointPicker bool `yaml:"endpoint-picker"`

	// <time> of the initial back-off for a worker that refused or failed a request, up to 16 times as
	// long if it goes on; 0 turns back-off off
	AvoidFailing time.Duration `yaml:"avoid-failing" topic:"Health of workers" default:"2s"`

	// <time> without a sign of life after which a worker gets requests only if no worker is healthy;
	// 3s or more
	//
	// unhealthy-after must be at least as long, and expired-after at least as long as that.
	DegradedAfter time.Duration `yaml:"degraded-after" default:"7.5s"`

	// <time> without a sign of life after which a worker gets requests only if no worker is better
	UnhealthyAfter time.Duration `yaml:"unhealthy-after" default:"15s"`

	// <time> without a sign of life after which an unhealthy worker counts as expired. A registered worker
	// is removed after one and a half times this, at least 45s; a worker of the configuration file is
	// never removed
	ExpiredAfter time.Duration `yaml:"expired-after" default:"30s"`

	// <file> that is kept up to date with the healthy workers, for Envoy's pool; empty writes none
	EndpointFile string `yaml:"endpoint-file" own:"yes"`

	// <bytes> of the largest request body that is read; set Envoy's limit to the same
	MaxBodyBytes int `yaml:"max-body-bytes" topic:"Bodies, time and shutdown" default:"16777216" want:"more than 0"`

	// <bytes> of request bodies in memory at a time; requests above it are left to Envoy's choice. 0
	// takes a quarter of the memory limit, or 512 MiB without one
	MaxHeldBytes int64 `yaml:"max-held-bytes" want:"0 or more"`

	// <number> of requests in flight; requests above it are left to Envoy's choice. 0 takes what fits
	// a quarter of the memory limit, at most 40,000
	MaxStreams int `yaml:"max-streams" want:"0 or more"`

	// <time> after which a request is left to Envoy's choice; less than Envoy's message_timeout
	DecisionTimeout time.Duration `yaml:"decision-timeout" default:"1.5s" want:"more than 0s"`

	// <time> for which a shutdown still decides requests; longer than the interval of Envoy's health
	// checks
	DrainDelay time.Duration `yaml:"drain-delay" default:"2s" want:"0s or more"`

	// <time> after which a shutdown ends open streams
	DrainTimeout time.Duration `yaml:"drain-timeout" default:"25s" want:"more than 0s"`

	// debug, info, warn or error
	LogLevel string `yaml:"log-level" topic:"Logs and prompts" own:"yes" default:"info" want:"debug, info, warn or error"`

	// text or json
	LogFormat string `yaml:"log-format" own:"yes" default:"text" want:"text or json"`

	// answer 404 to requests for models without a tokenizer, instead of routing them by load
	StrictModels bool `yaml:"strict-models"`

	// compare token ids with those of workers without events: send them the bodies of the first requests of each class, of
	// each restarted worker, and of few later ones. A class whose ids differ is routed in text-block mode. Of workers with
	// events, the events confirm the ids
	VerifyTokenizer bool `yaml:"verify-tokenizer" default:"true"`
	// where a worker makes other tokens than kvroute: log the texts of both around the first different
	// token, and show them to kvroute doctor. They are parts of prompts
	ExplainDrift bool `yaml:"explain-drift"`

	// <bytes> of memory for the messages and token ids of recent prompts
	TokenizerCacheBytes int `yaml:"tokenizer-cache-bytes" own:"yes" default:"67108864" want:"more than 0"`

	// Dynamo finds workers by the records of NVIDIA Dynamo's discovery: docs/workers.md.
	Dynamo dynamoConfig `yaml:"dynamo,omitempty" topic:"In the file only"`

	// Kubernetes finds workers by Kubernetes' API: docs/workers.md.
	Kubernetes kubernetesConfig `yaml:"kubernetes,omitempty"`

	// Models are the models whose prompts are tokenized exactly. Reloaded
	// when the file changes.
	Models []modelConfig `yaml:"models,omitempty"`

	// Workers are known from the start, and count as healthy unless they ask for
	// probes. Their fields are those of a registration; an address may be a name,
	// which stands for a worker at each of its addresses and is looked up every 10 s.
	// Reloaded when the file changes.
	Workers workerList `yaml:"workers"`

	// Groups are router groups, to which requests go instead of workers. Fields: name, address
	// (ip:port of the group's gateway), and optionally models, block_size and members, which are
	// used until the group reports them. Reloaded when the file changes.
	Groups groupList `yaml:"groups,omitempty"`
}

// modelConfig is one of the file's "models".
type modelConfig struct {
	// Name is the name of the base model, as its workers serve it.
	Name string `yaml:"name"`

	// Aliases are other names that clients may use.
	Aliases []string `yaml:"aliases,omitempty"`

	// LoRA are the names of the model's adapters.
	LoRA []string `yaml:"lora,omitempty"`

	// <folder> with the model's files; empty takes those of the simulated engine
	//
	// The files are tokenizer.json, or a rank file *.tiktoken, or Mistral's tekken.json or
	// tokenizer.model.v*, and, if present, config.json, tokenizer_config.json, chat_template.jinja
	// and special_tokens_map.json.
	Tokenizer string `yaml:"tokenizer"`

	// the engine's --tokenizer-mode: hf or mistral; empty takes what vLLM takes by itself
	TokenizerMode string `yaml:"tokenizer-mode,omitempty"`

	// <file> with a chat template instead of the model's
	ChatTemplate string `yaml:"chat-template,omitempty"`

	// values for the chat template: the engine's --default-chat-template-kwargs
	//
	// The values of a request replace them.
	DefaultChatTemplateKwargs map[string]any `yaml:"default-chat-template-kwargs,omitempty"`

	// form of contents for the template: auto (default), string or openai; the engine's --chat-template-content-format
	ChatTemplateContentFormat string `yaml:"chat-template-content-format,omitempty"`

	// true: the engine runs with --exclude-tools-when-tool-choice-none
	ExcludeTools bool `yaml:"exclude-tools-when-tool-choice-none,omitempty"`

	// efforts for the template by those of requests: the engine's --reasoning-effort-map
	ReasoningEffortMap map[string]string `yaml:"reasoning-effort-map,omitempty"`

	// <effort> for disabled thinking in /v1/messages; the engine's --anthropic-disabled-thinking-effort. Default auto
	DisabledThinkingEffort string `yaml:"anthropic-disabled-thinking-effort,omitempty"`

	// how a rank file splits words: gpt2, cl100k, o200k, kimi, or an <expression>
	//
	// If it is empty, the file's name or the class in tokenizer_config.json decides.
	Pattern string `yaml:"pattern,omitempty"`

	// <engine> that serves the model: vllm (default), sglang or trtllm
	Profile string `yaml:"profile,omitempty"`

	// BlockSize is the number of tokens in a block; 0 takes that of the first worker.
	BlockSize int `yaml:"block-size,omitempty"`
}

// readConfig works out the configuration from defaults, the file named by --config
// and flags, in this order. more adds flags that are no settings.
func readConfig(name string, args []string, more func(*flag.FlagSet)) (c config, file string, err error) {
	// The first pass finds the file, the second lets the flags win over it.
	given := map[string]bool{} // names of flags
	for _, pass := range []string{"file", "flags"} {
		if pass == "file" {
			c = defaults()
		}
		fs := newFlagSet(name)
		fs.StringVar(&file, "config", file, "YAML `file` with settings of the same names, and workers")
		settings.AddFlags(fs, &c)
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
		fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	}
	return c, file, located(c.check(), file, given)
}

// readFile returns the defaults with what the file says.
func readFile(file string) (config, error) {
	c := defaults()
	if file == "" {
		return c, nil
	}
	data, err := readYAML(file)
	if err != nil {
		return c, err
	}
	tree, err := parseYAML(file, data)
	if err != nil {
		return c, misread(err, file, data)
	}
	c.Version = 0
	if err := decodeYAML(data, &c); err != nil {
		return c, misread(err, file, data)
	}
	if err := c.checkNodes(file, tree); err != nil {
		return c, err
	}
	if c.Version != 1 {
		return c, fmt.Errorf("%s:1: version is %d, want the line version: 1", file, c.Version)
	}
	return c, nil
}

// jsonList is a list of the file whose elements have the JSON form of another package.
type jsonList[T any] []T

// UnmarshalYAML reads the list; unknown fields of an element are refused.
func (l *jsonList[T]) UnmarshalYAML(data []byte) error {
	text, err := yaml.YAMLToJSON(data)
	if err != nil {
		return err
	}
	name := "workers"
	if _, ok := any(*new(T)).(replicas.Group); ok {
		name = "groups"
	}
	var elements []json.RawMessage
	if err := readElement(name, text, &elements); err != nil {
		return err
	}
	*l = make(jsonList[T], len(elements))
	for i := range elements {
		if name == "workers" {
			elements[i] = probesInFull(elements[i])
		}
		if err := readElement(fmt.Sprintf("%s[%d]", name, i), elements[i], &(*l)[i]); err != nil {
			return err
		}
	}
	return nil
}

// probesInFull returns a worker in which the word none in place of a probe is a mapping, as in its record.
func probesInFull(worker json.RawMessage) json.RawMessage {
	var fields map[string]json.RawMessage
	if json.Unmarshal(worker, &fields) != nil {
		return worker // readElement says what is wrong
	}
	changed := false
	for _, name := range []string{"health", "metrics"} {
		if string(fields[name]) == `"`+fleet.NoProbe+`"` {
			fields[name], changed = json.RawMessage(`{"path": "`+fleet.NoProbe+`"}`), true
		}
	}
	full, err := json.Marshal(fields)
	if !changed || err != nil {
		return worker
	}
	return full
}

// MarshalYAML is the inverse of UnmarshalYAML.
func (l jsonList[T]) MarshalYAML() ([]byte, error) {
	text, err := json.Marshal([]T(l))
	if err != nil {
		return nil, err
	}
	return yaml.JSONToYAML(text)
}

type (
	groupList  = jsonList[replicas.Group]
	workerList = jsonList[fleet.Record]
)
