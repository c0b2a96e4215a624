// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/internal/zmtp"
	"github.com/kvroute/kvroute/router"
)

// Record is what a worker says of itself, as JSON: in the registry's bucket, and as
// an element of "workers" in the configuration file. Fields that nobody knows are
// ignored in the registry.
type Record struct {
	V        int    `json:"v,omitempty"`         // version of the record: 1, or absent
	WorkerID uint64 `json:"worker_id,omitempty"` // 0 = derived from Name
	Name     string `json:"name,omitempty"`

	Address       string            `json:"address"`                  // ip:port of the OpenAI endpoint
	RankAddresses map[string]string `json:"rank_addresses,omitempty"` // rank -> ip:port, where ranks have ports of their own

	Models []string    `json:"models"` // names of the base model, the first one its own
	LoRA   []string    `json:"lora,omitempty"`
	Role   router.Role `json:"role,omitempty"` // "aggregated" (default), "prefill", "decode"

	BlockSize        int    `json:"block_size,omitempty"` // tokens; 0 = publishes no events
	DPStart          uint32 `json:"dp_start,omitempty"`
	DPSize           uint32 `json:"dp_size,omitempty"` // 0 = 1
	TotalKVBlocks    int    `json:"total_kv_blocks,omitempty"`
	MaxNumSeqs       int    `json:"max_num_seqs,omitempty"`
	MaxBatchedTokens int    `json:"max_num_batched_tokens,omitempty"`
	Reorders         bool   `json:"reorders,omitempty"` // prompts are not computed in the order of their arrival

	// PrefillTPS is how many prompt tokens it computes a second, for estimates; 0 = unknown.
	PrefillTPS float64 `json:"prefill_tps,omitempty"`
	GPUType    string  `json:"gpu_type,omitempty"` // for people, such as "H100"

	// Taints are words that requests may require or prefer; Device is "cpu" for a
	// worker that computes on CPUs.
	Taints []string `json:"taints,omitempty"`
	Device string   `json:"device,omitempty"`

	// ModelCard names a card that the router knows, for models that workers serve
	// under names of their own. Never a path.
	ModelCard string `json:"model_card,omitempty"`

	// Events says where its cache events are. Default: on the bus.
	Events Events `json:"events,omitzero"`
	// Health asks for probes: an answer of 200 to 299 is a sign of life. Default path
	// /health, every 2.5s. A worker of the configuration without it is always healthy;
	// a registered one has its heartbeats.
	Health *Probe `json:"health,omitempty"`
	// Metrics asks for the engine's own metrics to be read, for how full its cache is.
	// Default path: those of LoadPaths; every 5s.
	Metrics *Probe `json:"metrics,omitempty"`
	// KVEvents is how well who publishes the events knows the cache: "ok", "partial",
	// "suspect", "none", or "block_size_mismatch", which publishes none.
	KVEvents string `json:"kv_events,omitempty"`

	Engine        string `json:"engine,omitempty"`
	EngineVersion string `json:"engine_version,omitempty"`
	Draining      bool   `json:"draining,omitempty"`   // takes no new requests, keeps its blocks
	StartedMS     int64  `json:"started_ms,omitempty"` // unix ms; a changed value means a restart

	// Group makes it the candidate that a router group is, of so many workers. Only
	// [Groups] says so.
	Group   string `json:"-"`
	Members int    `json:"-"`
}

// Probe says what to ask a worker over HTTP, at its address, and how often. An empty
// field means its default.
type Probe struct {
	Path     string `json:"path,omitempty"`     // begins with "/"
	Interval string `json:"interval,omitempty"` // such as "2.5s": 100 ms to 1 h
}

// check refuses what cannot be asked.
func (p *Probe) check() error {
	if p == nil {
		return nil
	}
	if p.Path != "" && (p.Path[0] != '/' || len(p.Path) > maxNameLen || strings.ContainsFunc(p.Path, func(r rune) bool { return r <= ' ' || r == 0x7f || r == '#' })) {
		return fmt.Errorf("path is %q, want one that begins with /, of at most %d bytes", clip(p.Path), maxNameLen)
	}
	if p.Interval == "" {
		return nil
	}
	if d, err := time.ParseDuration(p.Interval); err != nil || d < 100*time.Millisecond || d > time.Hour {
		return fmt.Errorf("interval is %q, want 100ms to 1h", clip(p.Interval))
	}
	return nil
}

// every is how often, given what is meant if nothing is said.
func (p *Probe) every(otherwise time.Duration) time.Duration {
	if d, err := time.ParseDuration(p.Interval); err == nil {
		return d
	}
	return otherwise
}

// Events says where a worker's cache events come from.
type Events struct {
	// Transport is "nats" (default), "jetstream", "zmq", "http_poll", "heartbeat" or
	// "none"; in the configuration also [TransportDynamo].
	Transport string `json:"transport,omitempty"`
	// Endpoint is the engine's socket, tcp://host:port; ipc://path in the
	// configuration only. Empty asks the engine. Of "http_poll" a URL.
	Endpoint string `json:"endpoint,omitempty"`
	Topic    string `json:"topic,omitempty"`  // prefix of the topics wanted
	Replay   string `json:"replay,omitempty"` // socket that sends lost events again
	// LocalIndexer says that the worker answers queries about its events. With "zmq"
	// that is a publisher of ours at Endpoint, which is asked at Replay.
	LocalIndexer bool `json:"local_indexer,omitempty"`
	// PublisherID is the id by which the worker's publisher signs its messages, if
	// that one alone speaks for all of the worker's ranks: others are not listened to.
	PublisherID uint64 `json:"publisher_id,omitempty"`
}

// TransportDynamo is the transport of events that come from where the records of Dynamo's
// discovery say. It cannot be registered.
const TransportDynamo = "dynamo"

// Direct says that the events come from the engine itself, not over the bus.
func (e *Events) Direct() bool {
	return e != nil && (e.Transport == "zmq" || e.Transport == "http_poll")
}

// check refuses event settings that kvroute cannot listen to.
func (e *Events) check(networks reach.Networks) error {
	wrong := func(field, value, want string) error {
		return fmt.Errorf("events.%s is %q, want %s", field, clip(value), want)
	}
	for field, text := range map[string]string{"endpoint": e.Endpoint, "topic": e.Topic, "replay": e.Replay} {
		if len(text) > maxNameLen {
			return wrong(field, text, fmt.Sprintf("at most %d bytes", maxNameLen))
		}
	}
	switch e.Transport {
	case "", "nats", "jetstream", "heartbeat", "none", TransportDynamo:
		return nil
	case "http_poll":
		if e.Endpoint == "" {
			return nil
		}
		u, err := url.Parse(e.Endpoint)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return wrong("endpoint", e.Endpoint, "http://ip:port/path")
		}
		if err := near(u.Hostname(), networks); err != nil {
			return wrong("endpoint", e.Endpoint, err.Error())
		}
		return nil
	case "zmq":
	default:
		return wrong("transport", e.Transport, "nats, jetstream, zmq, http_poll, heartbeat or none")
	}
	for field, text := range map[string]string{"endpoint": e.Endpoint, "replay": e.Replay} {
		if text == "" {
			continue
		}
		at, err := zmtp.ParseEndpoint(text, 0, 0)
		switch {
		case err != nil:
			return wrong(field, text, "tcp://host:port or ipc://path")
		case at.Path != "" || at.Anywhere():
			continue
		}
		if err := near(at.Host, networks); err != nil {
			return wrong(field, text, err.Error())
		}
	}
	return nil
}

// near refuses a host outside the networks. Names are checked when they are dialled.
func near(host string, networks reach.Networks) error {
	if a, err := netip.ParseAddr(host); err == nil {
		return networks.Check(netip.AddrPortFrom(a, 0))
	}
	return nil
}

// healthPath and pollPath are the only paths that a worker may register for probes of its
// health, and for the events of TensorRT-LLM.
const (
	healthPath = "/health"
	pollPath   = "/kv_cache_events"
)

// Registered is [Record.Info] for a record that is not the operator's own: its worker may
// name its own host only, and fixed paths. Whoever registers must not choose what else
// kvroute calls.
func (r *Record) Registered(networks reach.Networks) (router.WorkerInfo, error) {
	info, err := r.Info(networks)
	if err != nil {
		return info, err
	}
	wrong := func(field, value, want string) (router.WorkerInfo, error) {
		return router.WorkerInfo{}, fmt.Errorf("fleet: worker %q (%d): %s is %q, want %s", clip(r.Name), info.ID, field, clip(value), want)
	}
	own := info.Address.Addr()
	if err := networks.CheckRegistered(info.Address); err != nil {
		return wrong("address", r.Address, err.Error())
	}
	for _, a := range info.RankAddresses {
		if a.Addr() != own {
			return wrong("rank_addresses", a.String(), fmt.Sprintf("the worker's own host %v", own))
		}
		if err := networks.CheckRegistered(a); err != nil {
			return wrong("rank_addresses", a.String(), err.Error())
		}
	}
	if p := r.Health; p != nil && p.Path != "" && p.Path != healthPath {
		return wrong("health.path", p.Path, healthPath+"; other paths are for workers in the configuration file")
	}
	if p := r.Metrics; p != nil && p.Path != "" && !slices.Contains(LoadPaths[:], p.Path) {
		return wrong("metrics.path", p.Path, strings.Join(LoadPaths[:], " or ")+"; other paths are for workers in the configuration file")
	}
	switch e := &r.Events; e.Transport {
	case TransportDynamo:
		return wrong("events.transport", e.Transport, "one that a worker may register with")
	case "http_poll":
		if want := "http://" + info.Address.String() + pollPath; e.Endpoint != "" && e.Endpoint != want {
			return wrong("events.endpoint", e.Endpoint, want)
		}
	case "zmq":
		for field, text := range map[string]string{"events.endpoint": e.Endpoint, "events.replay": e.Replay} {
			if text == "" {
				continue
			}
			at, err := zmtp.ParseEndpoint(text, 0, 0)
			host, ipErr := netip.ParseAddr(at.Host)
			if err != nil || !at.Anywhere() && (ipErr != nil || host.Unmap() != own) {
				return wrong(field, text, fmt.Sprintf("tcp://%v:port, the worker's own host", own))
			}
			if err := networks.CheckRegistered(netip.AddrPortFrom(own, uint16(at.Port))); err != nil {
				return wrong(field, text, err.Error())
			}
		}
	}
	return info, nil
}

// ParseRecord reads a record of the registry.
func ParseRecord(data []byte) (Record, error) {
	var r Record
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("fleet: read record: %w", err)
	}
	return r, nil
}

// encode writes a record as the registry has it.
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

// ID returns the worker's id: WorkerID, or the one derived from its name.
func (r *Record) ID() uint64 {
	if r.WorkerID == 0 && r.Name != "" {
		return wire.WorkerID(r.Name)
	}
	return r.WorkerID
}

// bounds of what a record may claim. A registration is not trusted with our memory.
const (
	maxNames   = 256
	maxNameLen = 256
	maxRanks   = 1024
)

// Info checks a record and turns it into what the router wants to know. Its addresses
// must lie in the networks. An error names the field and its value.
func (r *Record) Info(networks reach.Networks) (router.WorkerInfo, error) {
	info := router.WorkerInfo{
		ID: r.ID(), Name: r.Name,
		Models: r.Models, LoRA: r.LoRA, Role: r.Role,
		BlockSize: r.BlockSize, DPStart: r.DPStart, DPSize: max(1, r.DPSize),
		TotalKVBlocks: r.TotalKVBlocks, MaxNumSeqs: r.MaxNumSeqs, MaxBatchedTokens: r.MaxBatchedTokens, Reorders: r.Reorders,
		PrefillThroughput: r.PrefillTPS, GPUType: clip(r.GPUType),
		Taints: r.Taints, CPU: strings.EqualFold(r.Device, "cpu"),
		ModelCard: clip(r.ModelCard),
		KVEvents:  clip(r.KVEvents),
		NoEvents:  r.Events.Transport == "none" || r.Events.Transport == "heartbeat" || r.KVEvents == "block_size_mismatch",
		Group:     r.Group, Members: r.Members,
		Engine: r.Engine, EngineVersion: r.EngineVersion, Draining: r.Draining, StartedMS: r.StartedMS,
		Events: router.EventSource{Transport: r.Events.Transport, LocalIndexer: r.Events.LocalIndexer, PublisherID: r.Events.PublisherID},
	}
	wrong := func(field string, value any, want string) (router.WorkerInfo, error) {
		return router.WorkerInfo{}, fmt.Errorf("fleet: worker %q (%d): %s is %v, want %s", clip(r.Name), info.ID, field, value, want)
	}
	switch {
	case r.V != 0 && r.V != 1:
		return wrong("v", r.V, "1")
	case info.ID == 0:
		return wrong("worker_id", 0, "a number, or a name to derive it from")
	case len(r.Name) > maxNameLen:
		return wrong("name", fmt.Sprintf("%d bytes long", len(r.Name)), fmt.Sprintf("at most %d", maxNameLen))
	case len(r.Models) == 0 || len(r.Models) > maxNames:
		return wrong("models", fmt.Sprintf("a list of %d", len(r.Models)), fmt.Sprintf("1 to %d names", maxNames))
	case len(r.LoRA) > maxNames:
		return wrong("lora", fmt.Sprintf("a list of %d", len(r.LoRA)), fmt.Sprintf("at most %d names", maxNames))
	case r.Role != "" && r.Role != router.Aggregated && r.Role != router.Prefill && r.Role != router.Decode:
		return wrong("role", fmt.Sprintf("%q", clip(string(r.Role))), "aggregated, prefill or decode")
	case r.BlockSize < 0:
		return wrong("block_size", r.BlockSize, "0 or more tokens")
	case r.TotalKVBlocks < 0 || r.MaxNumSeqs < 0 || r.MaxBatchedTokens < 0:
		return wrong("total_kv_blocks, max_num_seqs or max_num_batched_tokens", min(r.TotalKVBlocks, r.MaxNumSeqs, r.MaxBatchedTokens), "0 or more")
	case !(r.PrefillTPS >= 0 && r.PrefillTPS <= 1e9):
		return wrong("prefill_tps", r.PrefillTPS, "0 to 1e9 prompt tokens a second")
	case r.Events.Transport == "zmq" && r.Events.LocalIndexer && (r.BlockSize == 0 || r.Events.Endpoint == "" || r.Events.Replay == ""):
		return wrong("events.local_indexer", "true", "with zmq block_size, events.endpoint and events.replay beside it")
	case r.DPSize > maxRanks:
		return wrong("dp_size", r.DPSize, fmt.Sprintf("at most %d", maxRanks))
	}
	for field, probe := range map[string]*Probe{"health": r.Health, "metrics": r.Metrics} {
		if err := probe.check(); err != nil {
			return wrong(field, "not what can be asked", err.Error())
		}
	}
	for _, taint := range r.Taints {
		if len(r.Taints) > maxNames || len(taint) > maxNameLen {
			return wrong("taints", fmt.Sprintf("a list of %d", len(r.Taints)), fmt.Sprintf("at most %d of %d bytes", maxNames, maxNameLen))
		}
	}
	for _, name := range append(append([]string{}, r.Models...), r.LoRA...) {
		if name == "" || len(name) > maxNameLen {
			return wrong("models or lora", fmt.Sprintf("a name of %d bytes", len(name)), fmt.Sprintf("1 to %d", maxNameLen))
		}
	}
	err := r.Events.check(networks)
	if err != nil {
		return router.WorkerInfo{}, fmt.Errorf("fleet: worker %q (%d): %w", clip(r.Name), info.ID, err)
	}
	if info.Address, err = address(r.Address, networks); err != nil {
		return wrong("address", fmt.Sprintf("%q", clip(r.Address)), err.Error())
	}
	for rank, a := range r.RankAddresses {
		n, rankErr := strconv.ParseUint(rank, 10, 32)
		at, err := address(a, networks)
		if rankErr != nil || err != nil || len(r.RankAddresses) > maxRanks {
			return wrong("rank_addresses", fmt.Sprintf("%q: %q", clip(rank), clip(a)), "rank: ip:port in the worker networks")
		}
		if info.RankAddresses == nil {
			info.RankAddresses = make(map[uint32]netip.AddrPort)
		}
		info.RankAddresses[uint32(n)] = at
	}
	if err := info.Check(); err != nil {
		return router.WorkerInfo{}, fmt.Errorf("fleet: worker %q: %w", clip(r.Name), err)
	}
	return info, nil
}

// address checks an address that requests will be sent to. The error says what is
// wanted.
func address(s string, networks reach.Networks) (netip.AddrPort, error) {
	a, err := netip.ParseAddrPort(s)
	if err != nil || a.Port() == 0 || a.Addr().IsUnspecified() || a.Addr().IsMulticast() || a.Addr().Zone() != "" {
		return netip.AddrPort{}, fmt.Errorf("ip:port")
	}
	a = netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
	return a, networks.Check(a)
}

func clip(s string) string { return s[:min(len(s), 128)] }
