// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/settings"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/replicas"
)

// config is the settings of `kvroute serve`. Each is a flag and a key of the configuration
// file, under one name; a flag wins over the file. The tags of a field describe it: see package
// settings. The tag own means that replicas may differ in the setting. If they differ in others,
// they decide differently.
//
// "workers", "groups", "models" and "dynamo" are in the file only. Each flag is also an environment
// variable; see [variable]. Variables whose names begin with OTEL_ set traces and the names of the
// process: see package telemetry.
type config struct {
	// Version of the file's format: 1.
	Version int `yaml:"version"`

	ExtprocAddress string `yaml:"extproc-address" topic:"Listeners and access" own:"yes" default:"127.0.0.1:9002" help:"<ip:port> or unix:/path at which Envoy reaches the external processor; port 0 picks a free one"`
	HTTPAddress    string `yaml:"http-address" own:"yes" default:"127.0.0.1:9003" help:"<ip:port> of health checks, metrics and the API; port 0 picks a free one"`
	APITokenFile   string `yaml:"api-token-file" own:"yes" help:"<file> of bearer tokens, one a line, 16 or more visible ASCII characters each; the API then answers only requests with one of them"`
	HTTPTLSCert    string `yaml:"http-tls-cert" own:"yes" help:"PEM <file> with the certificate of http-address, which then speaks HTTPS only"`
	HTTPTLSKey     string `yaml:"http-tls-key" own:"yes" help:"PEM <file> with the key of http-tls-cert"`
	TrustedNetwork bool   `yaml:"trusted-network" own:"yes" help:"allow http-address, extproc-address and nats-listen off loopback without api-token-file and extproc-tls-client-ca; set it if only trusted clients reach them"`

	NATSURL        string `yaml:"nats-url" topic:"NATS and the scope of the workers" own:"yes" help:"<URL> of the NATS server, or file:PATH of a file that holds the URL; empty runs a NATS server in this process"`
	NATSListen     string `yaml:"nats-listen" own:"yes" help:"<ip:port> at which the NATS server in this process listens for workers and other replicas; empty listens nowhere. Clients need the URL in the file nats-url of state-dir"`
	bus.Access     `yaml:",inline"`
	NATSReplicas   int `yaml:"nats-replicas" default:"1" want:"1, 3 or 5" help:"<number> of NATS servers that store the streams and buckets that kvroute makes: 1, 3 or 5"`
	wire.Scope     `yaml:",inline"`
	WorkerNetworks string `yaml:"worker-networks" help:"<networks> that workers may be in: CIDR, CIDR:port or CIDR:port-port, comma-separated; empty allows all. Add 127.0.0.0/8 to let workers on loopback register"`
	WorkerTLSCA    string `yaml:"worker-tls-ca" own:"yes" help:"PEM <file> with the authorities of the workers' certificates; kvroute then calls all workers over HTTPS"`
	WorkerTLSName  string `yaml:"worker-tls-name" help:"<name> in the certificate of every worker; empty takes the worker's IP address"`

	DurableKVEvents         bool          `yaml:"durable-kv-events" topic:"Cache events and replicas" default:"true" help:"read events from a stream that stores them, so that a restart loses none"`
	KVEventsRetention       time.Duration `yaml:"kv-events-retention" help:"<time> for which the stream stores events, 30m to 8760h; 0 leaves an existing stream unchanged and makes a new one with 1h"`
	Replica                 string        `yaml:"replica" own:"yes" help:"<name> of this router replica, the same after a restart; empty makes one of the host name and the port"`
	RouterSnapshotThreshold int           `yaml:"router-snapshot-threshold" default:"1000000" want:"more than 0" help:"<number> of messages in the stream above which the index is saved and the stream shortened"`
	RouterResetStates       bool          `yaml:"router-reset-states" own:"yes" help:"make all replicas forget at the start what they know from events"`

	RouterReplicaSync bool `yaml:"router-replica-sync" dynamo:"DYN_ROUTER_REPLICA_SYNC" default:"true" help:"exchange requests in flight with other router replicas"`

	Group            string        `yaml:"group" topic:"Router groups" help:"<name> of the router group that the workers form, for upper routers; empty: no upper router"`
	GroupInterval    time.Duration `yaml:"group-interval" default:"1s" want:"50ms to 1m" help:"<time> between two summaries of the group, 50ms to 1m"`
	GroupProbe       string        `yaml:"group-probe" default:"auto" want:"auto, on or off" help:"auto, on or off: ask router groups about each request before it is sent; auto asks if a model has at most 8 groups"`
	GroupProbeBudget time.Duration `yaml:"group-probe-budget" default:"3ms" want:"more than 0s" help:"<time> for which answers of router groups are awaited"`

	Routing `yaml:",inline"`

	MaxIndexBlocks         int           `yaml:"max-index-blocks" topic:"The index and the stored state" default:"16777216" want:"more than 0" help:"<number> of pairs of block and worker that are stored for a model from events, 1 to 30 bytes each; above it the least recently requested are removed"`
	NoKVEvents             bool          `yaml:"no-kv-events" dynamo:"!DYN_ROUTER_USE_KV_EVENTS" help:"ignore cache events, and estimate what workers cache from the requests sent to them"`
	RouterTTLSecs          float64       `yaml:"router-ttl-secs" dynamo:"DYN_ROUTER_TTL_SECS" default:"120" want:"more than 0, at most 1e9" help:"<seconds> for which an estimate of --no-kv-events counts after the last request that confirms it"`
	RouterPredictedTTLSecs float64       `yaml:"router-predicted-ttl-secs" dynamo:"DYN_ROUTER_PREDICTED_TTL_SECS" default:"10" want:"0 to 1e9" help:"<seconds> for which a request's blocks count as cached before an event confirms them; 0 turns that off"`
	StateDir               string        `yaml:"state-dir" own:"yes" help:"<folder> for what a restart must not forget; empty stores nothing"`
	StateInterval          time.Duration `yaml:"state-interval" own:"yes" default:"30s" want:"more than 0s" help:"<time> between two writes of the state; a crash loses what came since the last one"`
	BlockSize              int           `yaml:"block-size" help:"<tokens> in a block of workers that do not report it; 0 takes that of the model's other workers, or 16"`
	Seed                   uint64        `yaml:"seed" own:"yes" help:"<number> that makes the choice among equal workers reproducible"`
	KeepDecisions          int           `yaml:"keep-decisions" own:"yes" default:"1024" want:"0 or more" help:"<number> of recent decisions that the API can explain, some 300 bytes for each worker, at most 128 workers of a decision; 0 stores none"`

	// The trace has the Mooncake format: hashes of blocks of 512 tokens under a seed of this
	// process, and no text.
	TraceOut      string        `yaml:"trace-out" topic:"Traces for kvroute replay, and samples" own:"yes" help:"<file> for a trace of the requests served, for kvroute replay; empty writes none. At 256 MiB it is renamed to FILE.1"`
	AuditShare    float64       `yaml:"audit-share" default:"0.01" want:"0 to 1" help:"<share> of the responses whose usage is read to compare the predicted cached tokens with the real ones"`
	WorkerMetrics int           `yaml:"worker-metrics" default:"1024" want:"0 or more" help:"<number> of workers that have metrics of their own; 0 turns these metrics off"`
	TraceOutTPOT  time.Duration `yaml:"trace-out-tpot" own:"yes" default:"20ms" want:"more than 0s" help:"<time> between two tokens of a response that the trace assumes"`

	SecondChoice    string `yaml:"second-choice" topic:"Envoy" default:"header" help:"header, list or none: how Envoy learns where to send a request that its worker refuses; must fit config envoy --failover"`
	DecisionHeaders bool   `yaml:"decision-headers" help:"add worker, overlap and reason of the decision to the response's headers, which reveals the addresses of workers"`
	FirstToken      string `yaml:"first-token" default:"observer" want:"observer or response-headers" help:"observer or response-headers: what counts as the first token of a response; response-headers fits only workers that send their headers with it"`
	EnvoyAdmin      string `yaml:"envoy-admin" own:"yes" help:"<URL> of Envoy's admin endpoint, as http://127.0.0.1:9901; kvroute then reads Envoy's counters every 10 s and reports whether Envoy uses it. Empty reads none"`
	// The configuration of some filters cannot request the response: see examples/envoy-gateway.
	ModeOverride       bool   `yaml:"mode-override" help:"ask Envoy for the response's headers and trailers; needed with Envoy Gateway"`
	ExtprocTLSCert     string `yaml:"extproc-tls-cert" own:"yes" help:"PEM <file> with the certificate for connections of Envoy"`
	ExtprocTLSKey      string `yaml:"extproc-tls-key" own:"yes" help:"PEM <file> with the key of extproc-tls-cert"`
	ExtprocTLSClientCA string `yaml:"extproc-tls-client-ca" own:"yes" help:"PEM <file> with the authorities whose clients may connect; empty accepts all clients"`
	// New replicas behind a balancer of connections get their share only when Envoy reconnects.
	ExtprocConnectionAge time.Duration `yaml:"extproc-connection-age" default:"10m" want:"0s or more" help:"<time> after which Envoy is asked to open a new connection; 0 never asks"`
	EndpointPicker       bool          `yaml:"endpoint-picker" help:"also speak the endpoint-picker protocol of the Gateway API Inference Extension"`
	AvoidFailing         time.Duration `yaml:"avoid-failing" topic:"Health of workers" default:"2s" help:"<time> of the initial back-off for a worker that refused or failed a request, up to 16 times as long if it goes on; 0 turns back-off off"`
	// Each of the next three must be at least the one before it.
	DegradedAfter  time.Duration `yaml:"degraded-after" default:"7.5s" help:"<time> without a sign of life after which a worker gets requests only if no worker is healthy; 3s or more"`
	UnhealthyAfter time.Duration `yaml:"unhealthy-after" default:"15s" help:"<time> without a sign of life after which a worker gets no requests"`
	ExpiredAfter   time.Duration `yaml:"expired-after" default:"30s" help:"<time> without a sign of life after which a worker counts as expired and gets no requests. A registered worker is removed after one and a half times this, at least 45s; a worker of the configuration file is never removed"`
	EndpointFile   string        `yaml:"endpoint-file" own:"yes" help:"<file> that is kept up to date with the healthy workers, for Envoy's pool; empty writes none"`

	MaxBodyBytes    int           `yaml:"max-body-bytes" topic:"Bodies, time and shutdown" default:"16777216" want:"more than 0" help:"<bytes> of the largest request body that is read; set Envoy's limit to the same"`
	MaxHeldBytes    int64         `yaml:"max-held-bytes" want:"0 or more" help:"<bytes> of request bodies in memory at a time; requests above it are left to Envoy's choice. 0 takes a quarter of the memory limit, or 512 MiB without one"`
	MaxStreams      int           `yaml:"max-streams" want:"0 or more" help:"<number> of requests in flight; requests above it are left to Envoy's choice. 0 takes what fits a quarter of the memory limit, at most 40,000"`
	DecisionTimeout time.Duration `yaml:"decision-timeout" default:"1.5s" want:"more than 0s" help:"<time> after which a request is left to Envoy's choice; less than Envoy's message_timeout"`
	DrainDelay      time.Duration `yaml:"drain-delay" default:"2s" want:"0s or more" help:"<time> for which a shutdown still decides requests; longer than the interval of Envoy's health checks"`
	DrainTimeout    time.Duration `yaml:"drain-timeout" default:"25s" want:"more than 0s" help:"<time> after which a shutdown ends open streams"`

	LogLevel  string `yaml:"log-level" topic:"Logs and prompts" own:"yes" default:"info" want:"debug, info, warn or error" help:"debug, info, warn or error"`
	LogFormat string `yaml:"log-format" own:"yes" default:"text" want:"text or json" help:"text or json"`

	StrictModels        bool `yaml:"strict-models" help:"answer 404 to requests for models without a tokenizer, instead of routing them by load"`
	VerifyTokenizer     bool `yaml:"verify-tokenizer" help:"compare the first prompts of each model, and few later ones, with the workers' own token ids; a model whose ids differ is routed in text-block mode"`
	TokenizerCacheBytes int  `yaml:"tokenizer-cache-bytes" own:"yes" default:"67108864" want:"more than 0" help:"<bytes> of memory for the messages and token ids of recent prompts"`

	// Dynamo finds workers by the records of NVIDIA Dynamo's discovery: docs/workers.md.
	Dynamo dynamoConfig `yaml:"dynamo,omitempty" topic:"In the file only"`

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
	// Aliases are other names that clients may use, LoRA those of its adapters.
	Aliases []string `yaml:"aliases,omitempty"`
	LoRA    []string `yaml:"lora,omitempty"`
	// Tokenizer is the folder with the model's tokenizer.json, or rank file *.tiktoken, or
	// Mistral's tekken.json or tokenizer.model.v*, and, if present, config.json,
	// tokenizer_config.json, chat_template.jinja and special_tokens_map.json.
	Tokenizer     string `yaml:"tokenizer" help:"<folder> with the model's files; empty takes those of the simulated engine"`
	TokenizerMode string `yaml:"tokenizer-mode,omitempty" help:"the engine's --tokenizer-mode: hf or mistral; empty takes what vLLM takes by itself"`
	ChatTemplate  string `yaml:"chat-template,omitempty" help:"<file> with a chat template instead of the model's"`
	// Pattern is for rank files. If it is empty, the file's name or the class in
	// tokenizer_config.json decides.
	Pattern string `yaml:"pattern,omitempty" help:"how a rank file splits words: gpt2, cl100k, o200k, kimi, or an <expression>"`
	Profile string `yaml:"profile,omitempty" help:"<engine> that serves the model: vllm (default), sglang or trtllm"`
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
	data, err := os.ReadFile(file)
	if err != nil {
		return c, err
	}
	c.Version = 0
	if err := yaml.UnmarshalWithOptions(data, &c, yaml.Strict()); err != nil {
		return c, misread(err, file, data)
	}
	if err := c.checkNodes(file, data); err != nil {
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
		if err := readElement(fmt.Sprintf("%s[%d]", name, i), elements[i], &(*l)[i]); err != nil {
			return err
		}
	}
	return nil
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
