// SPDX-License-Identifier: Apache-2.0

// Package router decides which worker a request goes to.
//
// A [Router] knows workers, what they cache and what they are busy with. The caller
// passes in workers ([Router.SetWorker]) and the events of their caches
// ([Router.ApplyEvent]); the load follows from the requests that the router routed
// itself. [Router.BestWorker] turns a prompt into tokens, tokens into block hashes, hashes into each worker's
// overlap, and overlap and load into a cost; the lowest cost wins and the request
// takes a slot there, until [Router.Free].
//
// # Guarantees
//
// Workers of one base model with blocks of one size are a pool; pools share
// nothing. Two requests decided
// at the same time are decided one after the other, so the second sees the slot
// of the first. Only workers that were passed in are ever chosen. It never fails
// a request because of its prompt: what it cannot tokenize is routed by load.
//
// It does not retry, starts no goroutine, and uses the network only through the functions
// [Config.Probe]. Requests wait only if a queue is configured. Slots,
// sessions and the queue expire when [Router.Run] runs, or the caller calls [Router.Tick].
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
	"strings"
	"time"

	"github.com/kvroute/kvroute/scorer"
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

// The states of health. Only healthy workers are candidates; degraded workers are if no
// worker of the pool is healthy. An expired worker is about to be removed.
const (
	Healthy Health = iota
	Degraded
	Unhealthy
	Expired

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
	case Unhealthy:
		return "unhealthy"
	default:
		return "expired"
	}
}

// EventSource says how the events of a worker's cache arrive. The router only passes it on
// to the readers of events.
type EventSource struct {
	Transport string // "nats", "jetstream", "zmq", "http_poll", "none"; empty = unknown
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
	// RankAddresses overrides Address for single ranks, by absolute rank.
	RankAddresses map[uint32]netip.AddrPort

	Models []string // names of the base model; the first one names the pool
	LoRA   []string // adapters that it serves
	Role   Role

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

	Engine string // one of the Engine constants, in any spelling; or another one
	// ModelCard names the [Card] of its model. Default: the model's name.
	ModelCard string
	// KVEvents says in one word how well the worker's cache is known; "" = well. Only shown.
	KVEvents string
	// Bootstrap is the address of SGLang's bootstrap server on a prefill worker, host:port.
	Bootstrap string
	// Group, if not empty, makes this a router group of that name. Address is the group's
	// gateway. The group reports its load and its cache; see [Router.SetSummary].
	// Members is the number of its workers until the first report.
	Group     string
	Members   int
	Draining  bool  // gets no new requests, keeps its blocks
	StartedMS int64 // a changed value means that the process restarted empty
	Health    Health
	Events    EventSource
}

func (i *WorkerInfo) hasRank(rank uint32) bool {
	return rank >= i.DPStart && rank-i.DPStart < max(1, i.DPSize)
}

func (i *WorkerInfo) rankAddress(rank uint32) netip.AddrPort {
	if a, ok := i.RankAddresses[rank]; ok {
		return a
	}
	return i.Address
}

// wantsRank says whether requests for a rank must name the rank: other ranks have the same
// address, and the engine reads the rank of a request.
func (i *WorkerInfo) wantsRank(rank uint32) bool {
	_, own := i.RankAddresses[rank]
	return i.DPSize > 1 && !own && i.Engine == EngineVLLM
}

// The engines that kvroute treats in their own ways.
const (
	EngineVLLM   = "vllm"
	EngineSGLang = "sglang"
	EngineTRTLLM = "trtllm"
	EngineDynamo = "dynamo"      // a frontend of Dynamo, which forwards to the worker that a request names
	EngineSim    = "kvroute-sim" // kvroute's simulated engine
)

// engineName returns one name for all spellings of an engine.
func engineName(s string) string {
	switch s = strings.ToLower(s); s {
	case "tensorrt-llm", "tensorrt_llm", "tensorrtllm":
		return EngineTRTLLM
	}
	return s
}

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
	Address   netip.AddrPort // of the chosen worker
	BlockSize int
	Prompt    Prompt
	IDs       []uint32
}

// Prompt is the prompt of a request as raw JSON spans of its body.
type Prompt = chat.Request

// Override changes how one decision is made.
type Override = scorer.Override

// Thresholds say when a worker is busy.
type Thresholds = scorer.Thresholds

// Reason says in one word how a decision was reached.
type Reason string

// The reasons of a decision.
const (
	ReasonKV         Reason = "kv"          // lowest cost; some candidate holds blocks of the prompt
	ReasonLoad       Reason = "load"        // lowest cost; no candidate holds a block of the prompt
	ReasonRoundRobin Reason = "round-robin" // the next candidate in turn
	ReasonMode       Reason = "mode"        // chosen by a mode that ignores caches
	ReasonPinned     Reason = "pinned"      // the request named the worker
	ReasonPreferred  Reason = "preferred"   // an upper router named the worker
	ReasonSession    Reason = "session"     // the session is bound to the worker
	// ReasonUnread: the request had to be routed before it could be read, so the
	// choice was made by load.
	ReasonUnread Reason = "fallback:unread"
	// ReasonTokenizer: the prompt could not be turned into tokens, so the
	// choice was made by load.
	ReasonTokenizer Reason = "fallback:tokenizer"
)

// Decision says where a request goes, and why.
type Decision struct {
	ID         string         `json:"id"`
	Time       time.Time      `json:"time"`
	Model      string         `json:"model"`
	Mode       Mode           `json:"mode"`
	Reason     Reason         `json:"reason"`
	Worker     Worker         `json:"worker"`
	WorkerName string         `json:"worker_name,omitempty"`
	Address    netip.AddrPort `json:"address"`
	Labels     Labels         `json:"labels,omitzero"`
	// Engine is the worker's registered engine. NameRank says that the request must name the
	// rank, because other ranks of the worker have the same address.
	Engine    string `json:"engine,omitempty"`
	NameRank  bool   `json:"name_rank,omitempty"`
	Bootstrap string `json:"bootstrap,omitempty"` // of a prefill leg, as registered
	// Group is the router group that the worker stands for. Member is the worker that the
	// group chose, if it was probed.
	Group  string  `json:"group,omitempty"`
	Member *Worker `json:"member,omitempty"`

	// Second is where the request goes if the worker does not take it, if the request asked
	// for it. It has no address if there is no other candidate, if the worker is pinned, or
	// if a hard session is bound to it.
	Second Second `json:"second,omitzero"`

	// Prefill is the request's prefill leg: a decision of its own, for another worker, with
	// the id that [Router.Free] takes when the leg has ended. It is nil if the worker computes the
	// prompt itself; NoLeg then says why, in a split model. Neither is to be changed.
	Prefill *Decision `json:"prefill,omitempty"`
	NoLeg   NoLeg     `json:"no_prefill,omitempty"`

	// How the prompt was tokenized, and the reason if its ids are not exact.
	TokenMode   tokenizer.Mode `json:"token_mode,omitempty"`
	TokenReason string         `json:"token_reason,omitempty"`
	TextBytes   int            `json:"text_bytes,omitempty"`   // of text that was encoded
	ReusedBytes int            `json:"reused_bytes,omitempty"` // part of TextBytes whose ids were known

	PromptTokens  int `json:"prompt_tokens"`  // length of the prompt
	PromptBlocks  int `json:"prompt_blocks"`  // full blocks in it
	OverlapBlocks int `json:"overlap_blocks"` // leading blocks that the worker holds
	CachedTokens  int `json:"cached_tokens"`  // OverlapBlocks in tokens
	// MeanCachedTokens is the mean of the candidates' cached tokens: what a random choice would
	// find, in the caches as they are.
	MeanCachedTokens float64 `json:"mean_cached_tokens"`
	PrefillTokens    int     `json:"prefill_tokens"` // left to compute
	Cost             float64 `json:"cost"`           // in the policy's unit; lower is better; 0 if no costs were compared

	// Policy is the policy of the cost, empty if no costs were compared. Equal is the number
	// of candidates with the same cost, the worker included.
	Policy scorer.Policy `json:"policy,omitempty"`
	Equal  int           `json:"equal,omitempty"`

	// Estimates of the time to the first token, in ms: by the number of tokens, and by the
	// model of the engine.
	CoarseTTFT    float64 `json:"coarse_ttft_ms"`
	EstimatedTTFT float64 `json:"estimated_ttft_ms"`

	// The inputs that repeat the decision, together with Candidates: the random number, the
	// number of requests booked before (for round-robin), the settings with the request's
	// override, and the thresholds.
	BlockSize  int                `json:"block_size"`
	Draw       float64            `json:"draw"`
	Turn       uint64             `json:"turn"`
	Settings   *scorer.Settings   `json:"settings,omitempty"`   // not to be changed
	Thresholds *scorer.Thresholds `json:"thresholds,omitempty"` // not to be changed
	// DeviceRatio is [Config.DeviceRatio], in the mode DeviceAware.
	DeviceRatio float64 `json:"device_ratio,omitempty"`
	// ExpectedOutput is the length of the output that the costs expected, in tokens: as the request
	// said, or the mean output of the pool.
	ExpectedOutput float64 `json:"expected_output_tokens"`
	// ActivePrefix is how many leading tokens of the prompt are computed on the candidate that has most of
	// them, and are also those of a request in flight there; 0 also if no candidate was idle.
	ActivePrefix int `json:"active_prefix_tokens,omitempty"`
	// Sharers is the number of requests on that candidate; 0 without ActivePrefix.
	Sharers int `json:"active_prefix_requests,omitempty"`

	// Durations of the steps.
	QueueTime    time.Duration `json:"queue_ns"`
	TokenizeTime time.Duration `json:"tokenize_ns"`
	HashTime     time.Duration `json:"hash_ns"`
	MatchTime    time.Duration `json:"match_ns"`
	PickTime     time.Duration `json:"pick_ns"`            // waiting for the pool's lock included
	ProbeTime    time.Duration `json:"probe_ns,omitempty"` // asking router groups

	// Tokens is the whole prompt as ids if the request asked for it, the ids are exact, and the prompt
	// did not come as ids.
	Tokens []uint32 `json:"-"`

	// Candidates are the workers of the pool with the inputs of the choice, in worker
	// order. They are set if the request asked to explain, and in kept decisions. In a
	// pool with more than 128 workers, kept decisions have the chosen one and the 128 candidates with
	// the lowest costs; Omitted is the number of the other workers.
	Candidates []Candidate `json:"candidates,omitempty"`
	Omitted    int         `json:"candidates_omitted,omitempty"`

	// Later events of a kept decision; zero until then.
	FirstToken time.Time `json:"first_token,omitzero"`
	Freed      time.Time `json:"freed,omitzero"`
	// FirstTokenBy is how the first token was noticed or inferred. With [SignEnd] and no
	// time, it was not noticed.
	FirstTokenBy Sign `json:"first_token_by,omitempty"`
	// Served is the worker that answered, if it is not the chosen one.
	Served netip.AddrPort `json:"served,omitzero"`
	// Usage is what the response reports, if kvroute read it; see [Router.ReportUsage].
	Usage *Usage `json:"usage,omitempty"`
}

// Second is the worker that gets a request if the chosen worker does not take it.
type Second struct {
	Worker        Worker         `json:"worker"`
	WorkerName    string         `json:"worker_name,omitempty"`
	Address       netip.AddrPort `json:"address"`
	OverlapBlocks int            `json:"overlap_blocks"` // leading blocks of the prompt that the worker holds
}

// Sign is how a first token was noticed.
type Sign string

// The signs.
const (
	SignTold     Sign = "told"             // the caller reported it: [Router.MarkPrefillCompleted]
	SignObserver Sign = "observer"         // it was seen in the response
	SignHeaders  Sign = "response-headers" // the headers of a stream came: the worker sends them with the first token
	SignOrder    Sign = scorer.ByOrder     // inferred: a request that was booked later on the worker has its first token
	SignRate     Sign = scorer.ByRate      // inferred: the worker should have computed the prompt by now
	SignEnd      Sign = "end"              // only the whole response, or its end, was seen
)

// Candidate is one worker that a decision looked at. If the worker was excluded, its cost
// and the fields about the prompt are 0.
type Candidate struct {
	Worker     Worker         `json:"worker"`
	WorkerName string         `json:"worker_name,omitempty"`
	Address    netip.AddrPort `json:"address"`

	// The name of a router group and the age of its summary, below 0 without a summary.
	// Probed is set if the group answered a probe: load and overlap are those of the
	// worker that it would choose.
	Group      string        `json:"group,omitempty"`
	SummaryAge time.Duration `json:"summary_age_ns,omitempty"`
	Probed     bool          `json:"probed,omitempty"`

	scorer.Input // of the cost; the load includes Foreign

	ReportedBlocks int `json:"reported_blocks,omitempty"` // in use by the engine's own report of the last 10 s
	// Foreign is the part of the load that the engine reported and that neither this router
	// nor its replicas sent.
	Foreign     Foreign `json:"foreign,omitzero"`
	TotalBlocks int     `json:"total_blocks,omitempty"` // capacity; 0 = unknown
	Cost        float64 `json:"cost"`
	// DecodeDelay is the part of the cost for the requests that decode on the worker, in tokens; 0 if the
	// policy has no such part.
	DecodeDelay float64   `json:"decode_delay_tokens,omitempty"`
	Probability float64   `json:"probability,omitempty"` // of being drawn, with a temperature
	Excluded    Exclusion `json:"excluded,omitempty"`    // why the worker could not be chosen; empty if it could
}

// Exclusion is why a worker could not be chosen.
type Exclusion string

// The exclusions.
const (
	ExcludedHealth   Exclusion = "health"      // not healthy, while other workers are
	ExcludedFailing  Exclusion = "failing"     // failed lately, while other workers did not
	ExcludedStale    Exclusion = "stale"       // a router group without a recent summary, while others have one
	ExcludedDraining Exclusion = "draining"    // takes no new requests
	ExcludedRole     Exclusion = "role"        // has another role than the part of the request needs
	ExcludedAdapter  Exclusion = "adapter"     // does not have the adapter
	ExcludedPin      Exclusion = "pin"         // the request names another worker
	ExcludedAllowed  Exclusion = "not_allowed" // not among the workers that the request allows
	ExcludedTaint    Exclusion = "taint"       // lacks a taint that the request requires
	ExcludedBusy     Exclusion = "busy"        // above a threshold
	ExcludedSession  Exclusion = "session"     // the session is bound to another worker
)

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
	ErrQueueFull = scorer.ErrQueueFull
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
