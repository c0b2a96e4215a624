// SPDX-License-Identifier: Apache-2.0

// Package router decides which worker a request goes to.
//
// A [Router] knows workers, what they cache and what they are busy with. The caller
// passes in workers ([Router.SetWorker]) and the events of their caches
// ([Router.ApplyEvent]). The load follows from the requests that the router routed
// itself. [Router.BestWorker] makes tokens from a prompt, block hashes from the tokens, each worker's
// overlap from the hashes, and a cost from overlap and load. The worker with the lowest cost gets
// the request, which has a slot there until [Router.Free].
//
// # Guarantees
//
// Workers of one base model with blocks of one size are a pool; pools share
// nothing. Two requests decided
// at the same time are decided one after the other, so the second sees the slot
// of the first. A router chooses only workers that were passed in. It never refuses
// a request because of its prompt: a prompt that it cannot tokenize is routed by load.
//
// A router does not retry, starts no goroutine, and uses the network only through
// [Config.Probe]. Requests wait only if a queue is configured. Slots, sessions and
// waiting requests expire while [Router.Run] runs or when the caller calls [Router.Tick].
//
// # Concurrency
//
// A [Router] may be used by any number of goroutines. Reading the index takes no
// lock that a decision holds; load, choice and booking of one pool are one
// critical section.
package router

import (
	"cmp"
	"errors"
	"net/netip"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/slots"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Worker names one rank of one serving process. Workers are ordered by ID, then
// by DPRank.
type Worker struct {
	ID     uint64 `json:"worker_id"`
	DPRank uint32 `json:"dp_rank"`
}

// Compare orders workers by ID, then by DPRank.
func (w Worker) Compare(v Worker) int {
	return cmp.Or(cmp.Compare(w.ID, v.ID), cmp.Compare(w.DPRank, v.DPRank))
}

// Health is the state of a worker process.
type Health uint8

// The states of health, from the best to the worst. A worker is a candidate only if no worker that may take the
// request has a better state. Unhealthy and expired workers count as one state: see [Decision.Panic].
const (
	Healthy Health = iota
	Degraded
	// Starting is the health of a worker that is probed and has not answered a probe yet.
	Starting
	Unhealthy
	// Expired is the health of a worker that has been silent for long.
	Expired
	// NotReady is the health of a worker whose platform says that it serves no requests now. It is never a candidate.
	NotReady

	// expected is the health of a worker that is known from a restoration only. No status
	// shows it.
	expected
)

// String returns the state's lower-case name.
func (h Health) String() string {
	switch h {
	case Healthy:
		return "healthy"
	case Degraded:
		return "degraded"
	case Starting:
		return "starting"
	case Unhealthy:
		return "unhealthy"
	case NotReady:
		return "not_ready"
	default:
		return "expired"
	}
}

// EventSource says how the events of a worker's cache arrive. The router only passes it on
// to the readers of events.
type EventSource struct {
	Transport string // "nats", "jetstream", "zmq", "http_poll", "none"; empty = unknown
	// Endpoint and Replay are the addresses of its sockets, as registered; empty = unknown.
	Endpoint string `json:",omitempty"`
	Replay   string `json:",omitempty"`
	// LocalIndexer says that the worker answers queries about its events.
	LocalIndexer bool
	// PublisherID is the only publisher of events of the worker's ranks; 0 = unknown.
	PublisherID uint64
}

// WorkerInfo describes one worker process. Each of its DPSize ranks is a [Worker].
type WorkerInfo struct {
	ID      uint64
	Name    string         // the operator's name for it; may be empty
	Address netip.AddrPort // of its OpenAI endpoint
	Host    string         `json:",omitempty"` // Host header of requests to it; empty = the client's, or the address in kvroute's own requests
	// OwnHost says that the worker answers requests with this Host header only. It is then no second choice
	// of a request with another one.
	OwnHost bool `json:",omitempty"`
	// RankAddresses overrides Address for single ranks, by absolute rank.
	RankAddresses map[uint32]netip.AddrPort

	Models []string // names of the base model; the first one names the pool
	LoRA   []string // adapters that it serves
	// ListedLoRA and ListedAliases are adapters and other names of the model that only the engine itself
	// names. Requests with them go to workers that list them. A name that is configured anywhere else,
	// or that is the name of a base model, keeps that meaning.
	ListedLoRA    []string `json:",omitempty"`
	MaxModelLen   int      `json:",omitempty"` // tokens of the longest request that its engine takes; 0 = unknown
	ListedAliases []string `json:",omitempty"`

	Role Role

	BlockSize int    // tokens in a block of its KV cache; 0 = publishes no blocks
	DPStart   uint32 // first rank
	DPSize    uint32 // number of ranks; 0 counts as 1

	TotalKVBlocks    int // capacity per rank; 0 = unknown
	MaxNumSeqs       int // 0 = unknown
	MaxBatchedTokens int // 0 = unknown

	GPUType           string  // such as "H100"; only shown
	PrefillThroughput float64 // prompt tokens computed a second; 0 = [Config.PrefillThroughput]

	// EventsUnsure says that the configuration does not say whether the worker publishes
	// events. Until its first event the worker counts as one that publishes none.
	EventsUnsure bool
	// NoEvents says that the worker publishes no events of its cache, as a BlockSize of 0
	// does. The router predicts its cache from the requests that it sends there.
	NoEvents bool

	// Taints are words that requests may require or prefer.
	Taints []string
	// CPU says that the worker computes on CPUs; see [DeviceAware].
	CPU bool
	// Reorders says that the worker does not compute prompts in the order of their arrival,
	// so the order of first tokens proves nothing; see [Config.InferFirstTokens].
	Reorders bool

	Engine string // vllm, sglang, trtllm or dynamo, in any spelling of package internal/engine; or another name
	// EngineVersion is the version of the engine, "0.5.23" for instance; "" = unknown. Of a model's workers with a
	// version, the one with the lowest id decides how prompts are made.
	EngineVersion string `json:",omitempty"`
	// EngineFlags are flags of the engine that change prompts, as the engine reports them; nil = it does not. They
	// replace the settings of its model: see [tokenizer.Model.SetEngineFlags].
	EngineFlags *engine.Flags `json:",omitempty"`
	// ModelCard names the [Card] of its model. Default: the model's name.
	ModelCard string
	// KVEvents says how well the worker's publisher knows its cache. Only shown.
	KVEvents indexer.State
	// Bootstrap is the address of SGLang's bootstrap server on a prefill worker, host:port.
	Bootstrap string
	// KVSource is the address at which rank 0 serves workers that copy blocks of its cache; the port of another rank
	// is higher by its number. It is not valid if the worker serves none.
	KVSource netip.AddrPort `json:",omitzero"`
	// Pod is the worker's pod in Kubernetes; nil if the worker was not found there.
	Pod *Pod `json:",omitempty"`
	// Group, if not empty, makes this a router group of that name. Address is the group's
	// gateway. The group reports its load and its cache; see [Router.SetSummary].
	// Members is the number of its workers until the first report.
	Group     string
	Members   int
	Draining  bool  // gets no new requests, keeps its blocks
	StartedMS int64 // a changed value means that the process restarted empty
	Health    Health
	// HealthCause says in words why it is not healthy, or why its last probes failed. It is
	// empty for a healthy worker that answered one of its last two probes.
	HealthCause string `json:",omitempty"`
	Refuses     bool   `json:",omitempty"` // the last probe of its health found that it accepts no connections
	// Unproved says that no probe was answered and no heartbeat came lately: the worker is healthy because it
	// answers requests, or it is not healthy and may serve all the same.
	Unproved bool `json:",omitempty"`
	Events   EventSource
}

// Pod names a pod of Kubernetes.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	// Deadline is when the pod is removed at the latest; zero unless it is being deleted.
	Deadline time.Time `json:"deadline,omitzero"`
}

// Place names the worker's address for people, with the Host header if the worker answers requests with this one only.
func (i *WorkerInfo) Place() string {
	if i.OwnHost {
		return i.Address.String() + " (Host " + i.Host + ")"
	}
	return i.Address.String()
}

// engineName returns one name for all spellings of an engine.
func engineName(s string) string { return engine.Canonical(s) }

// Role says which phase of a request a worker takes.
type Role string

// The roles. The empty string counts as [Aggregated].
const (
	Aggregated Role = "aggregated" // computes whole requests and transfers no blocks
	Prefill    Role = "prefill"    // takes prefill legs only
	Decode     Role = "decode"     // takes the decode of split requests, and whole requests; SGLang's takes no whole ones
	Both       Role = "both"       // takes either leg of a request, and whole requests
)

// Card is the configuration of a model: its names and its tokenizer.
type Card struct {
	// Name is the name of the base model, or a name of the card that workers register.
	Name string
	// Aliases are other names of the model, LoRA the names of its adapters. They are
	// served as soon as a worker serves the model.
	Aliases []string
	LoRA    []string
	// BlockSize is the number of tokens in a block for workers that do not register it;
	// 0 takes [Config.BlockSize].
	BlockSize int
	// Attention, if not nil, is the model's attention weight for the tokens
	// policy, instead of the configured one.
	Attention *float64
	// KVRead, if not nil, is the model's cost of reading a held token, instead of the configured one; see
	// [scorer.Settings].
	KVRead *float64
	// Chunk is the size of the model's chunks of chunked local attention, in tokens, which vLLM's events do not name; 0
	// if it is unknown, or if there are none. It counts for blocks that are stored later. See [indexer.SideGroup].
	Chunk int
	// Prompts makes token ids. Nil means text-block mode: blocks are of text, and match
	// only blocks of earlier prompts, not events. Why says why there is no tokenizer.
	Prompts *tokenizer.Model
	Why     string
}

// Observation is the argument of [Hooks.Observe].
type Observation struct {
	ID        string // of the request
	Card      *Card
	Model     string         // name of the pool
	Worker    Worker         // the chosen one
	Group     string         // the router group, if the worker is one
	Address   netip.AddrPort // of the chosen worker
	Host      string         // as of [Decision]
	Engine    string         // of the chosen worker
	BlockSize int
	// Events says that the worker's events show which blocks it has, in a way that can be compared.
	Events bool
	// Suspect says that the last comparisons of this class of requests, or of the worker, found other ids.
	Suspect bool
	// Class is the class of the request. While it is unconfirmed, ByText is set: the request was routed by its text, and
	// IDs were made for a comparison only.
	Class  chat.Class
	ByText bool
	Prompt Prompt
	IDs    []uint32
}

// Prompt is the prompt of a request as raw JSON spans of its body.
type Prompt = chat.Request

// Override changes how one decision is made.
type Override = scorer.Override

// Thresholds say when a worker is busy.
type Thresholds = scorer.Thresholds

// Errors of [Router.BestWorker]. They are wrapped in errors that name the model or worker.
var (
	// ErrNoWorkers: the model is known, but none of its workers can take a request.
	ErrNoWorkers = errors.New("no worker is available")
	// ErrUnknownModel: there are workers, and none of them serves the model.
	ErrUnknownModel = errors.New("the model does not exist")
	// ErrBadBlocks: Request.Blocks contradicts itself.
	ErrBadBlocks = errors.New("blocks do not fit together")
	// ErrBadRequest: a field of the request is out of range.
	ErrBadRequest = errors.New("bad request")
	// ErrDuplicate: a request with this id is in flight.
	ErrDuplicate = errors.New("a request with this id is in flight")
	// ErrFreed: the request was freed while it waited; it holds no slot.
	ErrFreed = errors.New("the request was freed while it waited")
	// ErrAllBusy: all workers that could take the request are above a threshold.
	ErrAllBusy = errors.New("all workers are busy")
	// ErrQueueFull: the request would have to wait, and the queue is full.
	ErrQueueFull = slots.ErrQueueFull
	// ErrDecisionTimeout: the decision took longer than the request's DecisionTimeout.
	ErrDecisionTimeout = errors.New("the decision took too long")
	// ErrTooLate: the request waited for longer than its target, or QueueWait, allows.
	ErrTooLate = errors.New("no worker became free in time")
	// ErrPinMissing: mode [Direct] needs a pinned worker.
	ErrPinMissing = errors.New("the request names no worker")
	// ErrPinnedUnknown: there is no such worker of the model.
	ErrPinnedUnknown = errors.New("the worker does not exist")
	// ErrPinnedNotAllowed: the pinned worker may not take the request.
	ErrPinnedNotAllowed = errors.New("the worker may not take the request")
	// ErrPinnedBusy: the pinned worker is above a threshold.
	ErrPinnedBusy = errors.New("the worker is busy")
	// ErrBadOverride: Request.Override is refused. The error also wraps the
	// [*scorer.SettingError] that names the field.
	ErrBadOverride = errors.New("override refused")
)
