// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/internal/zmtp"
	"github.com/kvroute/kvroute/router"
)

// Record describes a worker as JSON: in the registry's bucket, and as an element of
// "workers" in the configuration file. The registry ignores unknown fields.
type Record struct {
	V        int    `json:"v,omitempty"`         // version of the record: 1, or absent
	WorkerID uint64 `json:"worker_id,omitempty"` // 0 = derived from Name
	Name     string `json:"name,omitempty"`

	Address       string            `json:"address"`                  // ip:port of the OpenAI endpoint
	RankAddresses map[string]string `json:"rank_addresses,omitempty"` // rank -> ip:port, where ranks have ports of their own

	// Host is the Host header of requests to the worker, for workers behind a router that selects by
	// Host. It does not change where requests are sent. Default: the address, if it is a DNS name.
	// A worker cannot register with it.
	Host  string `json:"host,omitempty"`
	Named bool   `json:"-"` // Host is the name in the address of a configured worker, not required by it

	Models []string    `json:"models"` // names of the base model
	LoRA   []string    `json:"lora,omitempty"`
	Role   router.Role `json:"role,omitempty"` // "aggregated" (default), "prefill", "decode", "both"
	// Bootstrap is the ip:port of the server by which SGLang's decode workers find this
	// prefill worker. Default: port 8998 of the worker's address.
	Bootstrap string `json:"bootstrap,omitempty"`
	// KVSource is the ip:port at which rank 0 serves other workers that copy blocks of its cache: the P2P tier of
	// vLLM. The port of another rank is higher by its number. Default: none.
	KVSource string `json:"kv_source,omitempty"`

	BlockSize        int    `json:"block_size,omitempty"` // tokens; 0 = publishes no events
	DPStart          uint32 `json:"dp_start,omitempty"`
	DPSize           uint32 `json:"dp_size,omitempty"` // 0 = 1
	TotalKVBlocks    int    `json:"total_kv_blocks,omitempty"`
	MaxNumSeqs       int    `json:"max_num_seqs,omitempty"`
	MaxBatchedTokens int    `json:"max_num_batched_tokens,omitempty"`
	Reorders         bool   `json:"reorders,omitempty"` // prompts are not computed in the order of their arrival

	PrefillTPS float64 `json:"prefill_tps,omitempty"` // prompt tokens a second, for estimates; 0 = unknown
	GPUType    string  `json:"gpu_type,omitempty"`    // shown only, such as "H100"

	// Taints are words that requests may require or prefer. Device is "cpu" for a worker
	// that computes on CPUs.
	Taints []string `json:"taints,omitempty"`
	Device string   `json:"device,omitempty"`

	// ModelCard names a model card of the router, for models that workers serve under names
	// of their own. It is never a path.
	ModelCard string `json:"model_card,omitempty"`

	// Events is the source of its cache events. Default: the bus.
	Events Events `json:"events,omitzero"`
	// Health enables probes: an answer with status 200 to 299 is a sign of life. Default
	// path /health, every 2.5s. A static worker without probes is always healthy.
	Health *Probe `json:"health,omitempty"`
	// Metrics enables reading the engine's metrics for its load. Default paths: LoadPaths,
	// every 5s.
	Metrics *Probe `json:"metrics,omitempty"`
	// KVEvents says how well the publisher knows the cache. With [indexer.StateMisfit] it publishes no events.
	KVEvents indexer.State `json:"kv_events,omitempty"`

	Engine        string `json:"engine,omitempty"`
	EngineVersion string `json:"engine_version,omitempty"`
	Draining      bool   `json:"draining,omitempty"`   // takes no new requests, keeps its blocks
	StartedMS     int64  `json:"started_ms,omitempty"` // unix ms; a changed value means a restart

	// NotReady says in words why the worker's platform takes the worker for not ready; empty = it is ready. A worker
	// that is not ready gets no requests, and keeps its blocks.
	NotReady string `json:"-"`
	// Pod is the worker's pod, if the worker was found in Kubernetes.
	Pod *router.Pod `json:"-"`

	// Group is set if the candidate is a router group with this number of workers.
	Group   string `json:"-"`
	Members int    `json:"-"`
}

// Probe configures HTTP requests to a worker, at its address. An empty field selects its
// default.
type Probe struct {
	Path     string `json:"path,omitempty"`     // begins with "/", or [NoProbe]
	Interval string `json:"interval,omitempty"` // such as "2.5s": 100 ms to 1 h
	Timeout  string `json:"timeout,omitempty"`  // for one answer, such as "5s", the default: 100 ms to 1 m
}

// NoProbe as the path of a probe turns the probe off.
const NoProbe = "none"

// isSent reports whether there is a probe. p may be nil.
func (p *Probe) isSent() bool { return p != nil && p.Path != NoProbe }

// AddProbes adds health probes with default settings to the records of engines that have no setting of
// health. At the addresses of router groups and of Dynamo's workers no engine answers.
func AddProbes(records []Record) {
	for i := range records {
		if r := &records[i]; r.Health == nil && isCompared(r) {
			r.Health = &Probe{}
		}
	}
}

// every returns the interval, or its default.
func (p *Probe) every(byDefault time.Duration) time.Duration { return duration(p.Interval, byDefault) }

// duration reads a duration that was checked. An empty text selects the default.
func duration(text string, byDefault time.Duration) time.Duration {
	if d, err := time.ParseDuration(text); err == nil {
		return d
	}
	return byDefault
}

// Events is the source of a worker's cache events.
type Events struct {
	// Transport is "nats" (default), "jetstream", "zmq", "http_poll" or "none"; in the
	// configuration also [transportDynamo].
	Transport string `json:"transport,omitempty"`
	// Endpoint is the engine's socket, tcp://host:port, in the configuration also
	// ipc://path. With "http_poll" it is a URL. Empty: kvroute asks the engine.
	Endpoint string `json:"endpoint,omitempty"`
	Topic    string `json:"topic,omitempty"`  // prefix of the wanted topics
	Replay   string `json:"replay,omitempty"` // socket that sends lost events again
	// LocalIndexer means that the worker answers queries about its events. Ignored with "zmq",
	// where the engine's own socket sends lost events again.
	LocalIndexer bool `json:"local_indexer,omitempty"`
	// PublisherID is the id of the worker's publisher, if one publisher sends the events of
	// all ranks. kvroute then ignores other publishers of this worker.
	PublisherID uint64 `json:"publisher_id,omitempty"`
}

// transportDynamo is the transport of workers in Dynamo's discovery records, which contain
// the sources of events. A worker cannot register with it.
const transportDynamo = "dynamo"

// Direct reports whether the events come from the engine itself, not over the bus.
func (e *Events) Direct() bool {
	return e != nil && (e.Transport == "zmq" || e.Transport == "http_poll")
}

// ParseRecord reads a record of the registry.
func ParseRecord(data []byte) (Record, error) {
	var r Record
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("fleet: read record: %w", err)
	}
	return r, nil
}

// encode returns the record as the registry stores it.
func (r *Record) encode() ([]byte, error) {
	data, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("fleet: write record: %w", err)
	}
	if len(data) > maxRecord {
		return nil, fmt.Errorf("fleet: the record of worker %q has %d bytes, want at most %d", clip(r.Name), len(data), maxRecord)
	}
	return data, nil
}

// ID returns the worker's id: WorkerID, or the id derived from its name.
func (r *Record) ID() uint64 {
	if r.WorkerID == 0 && r.Name != "" {
		return wire.WorkerID(r.Name)
	}
	return r.WorkerID
}

// Limits of a record. They bound the memory that a registration can use.
const (
	maxNames   = 256
	maxNameLen = 256 // bytes
	maxRanks   = 1024
)

// check collects the first error of a record's fields.
type check struct {
	worker string
	err    error
}

func (r *Record) newCheck() check { return check{worker: fmt.Sprintf("%q (%d)", clip(r.Name), r.ID())} }

// that notes an error unless ok. A string is quoted.
func (c *check) that(ok bool, field string, value any, want string) {
	if ok || c.err != nil {
		return
	}
	if text, isText := value.(string); isText {
		value = strconv.Quote(clip(text))
	}
	c.err = fmt.Errorf("fleet: worker %s: %s is %v, want %s", c.worker, field, value, want)
}

// noError is [check.that] for an error that says what is wanted.
func (c *check) noError(err error, field string, value any) {
	if err != nil {
		c.that(false, field, value, err.Error())
	}
}

// length checks the length of a list or text.
func (c *check) length(n, least, most int, field, unit string) {
	if n < least || n > most {
		c.that(false, field, unquoted(fmt.Sprintf("%d %s long", n, unit)), fmt.Sprintf("%d to %d", least, most))
	}
}

// names checks the length of a list of names, and of each name.
func (c *check) names(list []string, least, leastBytes int, field string) {
	c.length(len(list), least, maxNames, field, "names")
	for _, name := range list {
		c.length(len(name), leastBytes, maxNameLen, "a name in "+field, "bytes")
	}
}

type unquoted string

// hostForm is a DNS name or IPv4 address, which may have a port.
var hostForm = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?(:[0-9]{1,5})?$`)

// Info checks the record and returns the worker that it describes. All addresses must lie
// in the networks. An error names the field and its value.
func (r *Record) Info(networks reach.Networks) (router.WorkerInfo, error) {
	c := r.newCheck()
	c.that(r.V == 0 || r.V == 1, "v", r.V, "1")
	c.that(r.ID() != 0, "worker_id", 0, "a number, or a name to derive it from")
	c.length(len(r.Name), 0, maxNameLen, "name", "bytes")
	c.names(r.Models, 1, 1, "models")
	c.names(r.LoRA, 0, 1, "lora")
	c.names(r.Taints, 0, 0, "taints")
	c.length(len(r.RankAddresses), 0, maxRanks, "rank_addresses", "ranks")
	c.that(slices.Contains([]router.Role{"", router.Aggregated, router.Prefill, router.Decode, router.Both}, r.Role), "role", string(r.Role), "aggregated, prefill, decode or both")
	if r.Bootstrap != "" {
		_, err := address(r.Bootstrap, networks)
		c.noError(err, "bootstrap", r.Bootstrap)
	}
	kvSource := c.kvSource(r, networks.Check)
	c.that(r.Host == "" || hostForm.MatchString(r.Host), "host", r.Host, "a host name, with or without a port")
	c.that(r.BlockSize >= 0, "block_size", r.BlockSize, "0 or more tokens")
	c.that(r.TotalKVBlocks >= 0, "total_kv_blocks", r.TotalKVBlocks, "0 or more")
	c.that(r.MaxNumSeqs >= 0, "max_num_seqs", r.MaxNumSeqs, "0 or more")
	c.that(r.MaxBatchedTokens >= 0, "max_num_batched_tokens", r.MaxBatchedTokens, "0 or more")
	c.that(r.PrefillTPS >= 0 && r.PrefillTPS <= 1e9, "prefill_tps", r.PrefillTPS, "0 to 1e9 prompt tokens a second")
	c.that(r.DPSize <= maxRanks, "dp_size", r.DPSize, fmt.Sprintf("at most %d", maxRanks))
	c.probe("health", r.Health)
	c.probe("metrics", r.Metrics)
	c.events(r, networks)
	at, err := address(r.Address, networks)
	c.noError(err, "address", r.Address)
	var ranks map[uint32]netip.AddrPort
	for rank, a := range r.RankAddresses {
		n, notNumber := strconv.ParseUint(rank, 10, 32)
		rankAt, err := address(a, networks)
		c.that(notNumber == nil && err == nil, "rank_addresses", clip(rank)+": "+clip(a), "rank: ip:port in the worker networks")
		if ranks == nil {
			ranks = make(map[uint32]netip.AddrPort)
		}
		ranks[uint32(n)] = rankAt
	}
	if c.err != nil {
		return router.WorkerInfo{}, c.err
	}
	info := router.WorkerInfo{
		ID: r.ID(), Name: r.Name, Address: at, RankAddresses: ranks, Host: r.Host, OwnHost: r.Host != "" && !r.Named,
		Models: r.Models, LoRA: r.LoRA, Role: r.Role, Bootstrap: r.Bootstrap, KVSource: kvSource,
		BlockSize: r.BlockSize, DPStart: r.DPStart, DPSize: max(1, r.DPSize),
		TotalKVBlocks: r.TotalKVBlocks, MaxNumSeqs: r.MaxNumSeqs, MaxBatchedTokens: r.MaxBatchedTokens, Reorders: r.Reorders,
		PrefillThroughput: r.PrefillTPS, GPUType: clip(r.GPUType),
		Taints: r.Taints, CPU: strings.EqualFold(r.Device, "cpu"),
		ModelCard: clip(r.ModelCard),
		KVEvents:  r.KVEvents.Known(),
		NoEvents:  r.Events.Transport == "none" || r.KVEvents == indexer.StateMisfit,
		Group:     r.Group, Members: r.Members, Pod: r.Pod,
		Engine: r.Engine, EngineVersion: clip(r.EngineVersion), Draining: r.Draining, StartedMS: r.StartedMS,
		Events: router.EventSource{
			Transport: r.Events.Transport, Endpoint: r.Events.Endpoint, Replay: r.Events.Replay,
			LocalIndexer: r.Events.LocalIndexer, PublisherID: r.Events.PublisherID,
		},
	}
	if err := info.Check(); err != nil {
		return router.WorkerInfo{}, fmt.Errorf("fleet: worker %q: %w", clip(r.Name), err)
	}
	return info, nil
}

// kvSource reads the address for pulls. The ports of all ranks must pass a check.
func (c *check) kvSource(r *Record, allowed func(netip.AddrPort) error) netip.AddrPort {
	if r.KVSource == "" {
		return netip.AddrPort{}
	}
	at, err := address(r.KVSource, reach.Networks{})
	c.noError(err, "kv_source", r.KVSource)
	if c.err != nil {
		return netip.AddrPort{}
	}
	last := uint64(at.Port()) + uint64(r.DPStart) + uint64(max(1, r.DPSize)) - 1
	c.that(last <= math.MaxUint16, "kv_source", r.KVSource, "a port that leaves room for the ports of all ranks")
	for port := uint64(at.Port()) + uint64(r.DPStart); port <= last && c.err == nil; port++ {
		c.noError(allowed(netip.AddrPortFrom(at.Addr(), uint16(port))), "kv_source", r.KVSource)
	}
	return at
}

// probe checks the settings of a probe.
func (c *check) probe(field string, p *Probe) {
	if !p.isSent() {
		return
	}
	strange := func(r rune) bool { return r <= ' ' || r == 0x7f || r == '#' }
	c.that(p.Path == "" || p.Path[0] == '/' && len(p.Path) <= maxNameLen && !strings.ContainsFunc(p.Path, strange),
		field+".path", p.Path, fmt.Sprintf("a path that begins with /, of at most %d bytes, or none", maxNameLen))
	d, err := time.ParseDuration(p.Interval)
	c.that(p.Interval == "" || err == nil && d >= 100*time.Millisecond && d <= time.Hour, field+".interval", p.Interval, "100ms to 1h")
	d, err = time.ParseDuration(p.Timeout)
	c.that(p.Timeout == "" || err == nil && d >= 100*time.Millisecond && d <= time.Minute, field+".timeout", p.Timeout, "100ms to 1m")
}

// events checks the source of events.
func (c *check) events(r *Record, networks reach.Networks) {
	e := &r.Events
	c.length(len(e.Endpoint), 0, maxNameLen, "events.endpoint", "bytes")
	c.length(len(e.Topic), 0, maxNameLen, "events.topic", "bytes")
	c.length(len(e.Replay), 0, maxNameLen, "events.replay", "bytes")
	switch e.Transport {
	case "", "nats", "jetstream", "none", transportDynamo:
	case "http_poll":
		if e.Endpoint == "" {
			return
		}
		u, err := url.Parse(e.Endpoint)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			c.that(false, "events.endpoint", e.Endpoint, "http://ip:port/path")
			return
		}
		c.noError(near(u.Hostname(), networks), "events.endpoint", e.Endpoint)
	case "zmq":
		c.socket("events.endpoint", e.Endpoint, networks)
		c.socket("events.replay", e.Replay, networks)
	default:
		c.that(false, "events.transport", e.Transport, "nats, jetstream, zmq, http_poll or none")
	}
}

// socket checks a ZMQ socket, if there is one.
func (c *check) socket(field, endpoint string, networks reach.Networks) {
	if endpoint == "" {
		return
	}
	at, err := zmtp.ParseEndpoint(endpoint, 0, 0)
	if err != nil {
		c.that(false, field, endpoint, "tcp://host:port or ipc://path")
	} else if at.Path == "" && !at.Anywhere() {
		c.noError(near(at.Host, networks), field, endpoint)
	}
}

// near refuses an address outside the networks. Names are checked when kvroute connects.
func near(host string, networks reach.Networks) error {
	if a, err := netip.ParseAddr(host); err == nil {
		return networks.Check(netip.AddrPortFrom(a, 0))
	}
	return nil
}

// The only paths that a worker may register: of health probes, and of TensorRT-LLM's events.
const (
	healthPath = "/health"
	pollPath   = "/kv_cache_events"
)

// Registered is [Record.Info] for a record that the operator did not write. Its worker may
// name only its own host and fixed paths: a registration must not choose which other
// addresses kvroute calls.
func (r *Record) Registered(networks reach.Networks) (router.WorkerInfo, error) {
	info, err := r.Info(networks)
	if err != nil {
		return info, err
	}
	c := r.newCheck()
	own := info.Address.Addr()
	c.noError(networks.CheckRegistered(info.Address), "address", r.Address)
	for _, a := range info.RankAddresses {
		c.that(a.Addr() == own, "rank_addresses", a.String(), fmt.Sprintf("the worker's own host %v", own))
		c.noError(networks.CheckRegistered(a), "rank_addresses", a.String())
	}
	if r.Bootstrap != "" {
		at, _ := netip.ParseAddrPort(r.Bootstrap)
		c.that(at.Addr() == own, "bootstrap", r.Bootstrap, fmt.Sprintf("the worker's own host %v", own))
	}
	if r.KVSource != "" {
		c.that(info.KVSource.Addr() == own, "kv_source", r.KVSource, fmt.Sprintf("the worker's own host %v", own))
		c.kvSource(r, networks.CheckRegistered)
	}
	c.that(r.Host == "", "host", r.Host, "none: only workers in the configuration file may have one")
	if p := r.Health; p != nil {
		c.that(p.Path == "" || p.Path == healthPath, "health.path", p.Path, healthPath+"; other paths are for workers in the configuration file")
	}
	if p := r.Metrics; p != nil {
		c.that(p.Path == "" || slices.Contains(LoadPaths[:], p.Path), "metrics.path", p.Path, strings.Join(LoadPaths[:], " or ")+"; other paths are for workers in the configuration file")
	}
	switch e := &r.Events; e.Transport {
	case transportDynamo:
		c.that(false, "events.transport", e.Transport, "one that a worker may register with")
	case "http_poll":
		want := "http://" + info.Address.String() + pollPath
		c.that(e.Endpoint == "" || e.Endpoint == want, "events.endpoint", e.Endpoint, want)
	case "zmq":
		c.ownSocket("events.endpoint", e.Endpoint, own, networks)
		c.ownSocket("events.replay", e.Replay, own, networks)
	}
	return info, c.err
}

// ownSocket checks that a ZMQ socket, if there is one, is on the worker's own host.
func (c *check) ownSocket(field, endpoint string, own netip.Addr, networks reach.Networks) {
	if endpoint == "" {
		return
	}
	at, err := zmtp.ParseEndpoint(endpoint, 0, 0)
	host, notAddress := netip.ParseAddr(at.Host)
	isOwn := err == nil && (at.Anywhere() || notAddress == nil && host.Unmap() == own)
	c.that(isOwn, field, endpoint, fmt.Sprintf("tcp://%v:port, the worker's own host", own))
	c.noError(networks.CheckRegistered(netip.AddrPortFrom(own, uint16(at.Port))), field, endpoint)
}

// address parses an address that requests are sent to. The error says what is wanted.
func address(s string, networks reach.Networks) (netip.AddrPort, error) {
	a, err := netip.ParseAddrPort(s)
	if err != nil || a.Port() == 0 || a.Addr().IsUnspecified() || a.Addr().IsMulticast() || a.Addr().Zone() != "" {
		return netip.AddrPort{}, errors.New("ip:port")
	}
	a = netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
	return a, networks.Check(a)
}

// clip shortens a text for an error or a log line.
func clip(s string) string { return s[:min(len(s), 128)] }
