// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/slots"
	"github.com/kvroute/kvroute/tokenizer"
)

// Reason says in one word how a decision was reached.
type Reason string

// The reasons of a decision.
const (
	ReasonKV         Reason = "kv"          // lowest cost; some candidate holds blocks of the prompt
	ReasonLoad       Reason = "load"        // lowest cost; no candidate holds a block of the prompt
	ReasonRoundRobin Reason = "round-robin" // the next candidate in turn
	ReasonHoldout    Reason = "holdout"     // the next candidate in turn, to compare round robin with the mode; see [Side]
	ReasonMode       Reason = "mode"        // chosen by a mode that ignores caches
	ReasonPinned     Reason = "pinned"      // the request named the worker
	ReasonPreferred  Reason = "preferred"   // an upper router named the worker
	ReasonSession    Reason = "session"     // the session, or an id in the request, is bound to the worker
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
	Host       string         `json:"host,omitempty"` // Host header of requests to the worker
	Labels     Labels         `json:"labels,omitzero"`
	// Holdout is the side of the comparison of [Config.HoldoutShare]; empty if the request takes no part.
	// Conversation is equal for all requests of a conversation, and 0 without a side.
	Holdout      Side   `json:"holdout,omitempty"`
	Conversation uint64 `json:"-"`
	// Engine is the worker's registered engine. NameRank says that the request must name the
	// rank, because other ranks of the worker have the same address.
	Engine    string `json:"engine,omitempty"`
	NameRank  bool   `json:"name_rank,omitempty"`
	Bootstrap string `json:"bootstrap,omitempty"` // of a prefill leg, as registered
	// Group is the router group that the worker stands for. Member is the worker that the
	// group chose, if it was probed.
	Group  string  `json:"group,omitempty"`
	Member *Worker `json:"member,omitempty"`

	// Second is the worker that gets the request if Worker does not take it. It is set only in prefill
	// legs, and if the request has WantSecond. It has no address if there is no other candidate, if
	// the worker is pinned, or if a hard session is bound to it.
	Second Second `json:"second,omitzero"`
	// Third gets the request if Second does not take it either. It has no address if Second has none, or if
	// there is no third candidate. Prefill legs have none.
	Third Second `json:"third,omitzero"`

	// Prefill is the request's prefill leg: a decision of its own, for another worker. When the leg
	// has ended, the caller passes its ID to [Router.Free]. Prefill is nil if Worker computes the
	// prompt itself; in a split model NoLeg then says why. Callers must not change Prefill.
	Prefill *Decision `json:"prefill,omitempty"`
	NoLeg   NoLeg     `json:"no_prefill,omitempty"`
	// Source is the worker from which Worker copies a part of the prompt; nil if it copies none. It is set only with
	// [Config.Pull], for requests with MayPull. Callers must not change it.
	Source *Source `json:"kv_source,omitempty"`

	// How the prompt was tokenized, and the reason if its ids are not exact.
	TokenMode   tokenizer.Mode `json:"token_mode,omitempty"`
	TokenReason string         `json:"token_reason,omitempty"`
	TextBytes   int            `json:"text_bytes,omitempty"`   // of text that was encoded
	ReusedBytes int            `json:"reused_bytes,omitempty"` // part of TextBytes whose ids were known

	PromptTokens  int `json:"prompt_tokens"`            // length of the prompt
	PromptBlocks  int `json:"prompt_blocks"`            // full blocks in it
	OverlapBlocks int `json:"overlap_blocks"`           // leading blocks that the worker holds
	CachedTokens  int `json:"cached_tokens"`            // OverlapBlocks in tokens
	LoweredBlocks int `json:"lowered_blocks,omitempty"` // see [scorer.Input]
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
	// PrefillRate is the number of prompt tokens that the worker computes in a second, as measured; 0 until it is.
	// MarginalRate is the same without the time that each prompt needs besides its tokens; 0 until prompts of
	// different lengths were measured. ExpectedTTFT is the measured time to the first token, in ms: for the prompts
	// that the worker has to compute first, and for this one. It is 0 without a rate, and for fewer than 256 tokens,
	// which the rate says little about.
	PrefillRate  float64 `json:"prefill_rate,omitempty"`
	MarginalRate float64 `json:"marginal_prefill_rate,omitempty"`
	ExpectedTTFT float64 `json:"expected_ttft_ms,omitempty"`

	// The inputs that repeat the decision, together with Candidates: the random number, the
	// number of requests booked before (for round-robin), the settings with the request's
	// override, and the thresholds.
	BlockSize  int                `json:"block_size"`
	Draw       float64            `json:"draw"`
	Turn       uint64             `json:"turn"`
	Settings   *scorer.Settings   `json:"settings,omitempty"`   // not to be changed
	Thresholds *scorer.Thresholds `json:"thresholds,omitempty"` // not to be changed
	// Panic says that the worker is unhealthy or expired: no worker that may take the request is healthy,
	// degraded or starting.
	Panic bool `json:"panic,omitempty"`
	// DeviceRatio is [Config.DeviceRatio], in the mode DeviceAware.
	DeviceRatio float64 `json:"device_ratio,omitempty"`
	// ExpectedOutput is the length of the output that the costs expected, in tokens: as the request
	// said, or the mean output of the pool.
	ExpectedOutput float64 `json:"expected_output_tokens"`
	// ActivePrefix is about the candidate that has computed most of the prompt: the number of leading tokens
	// of the prompt that requests in flight there have, too. It is 0 if no cost depends on it.
	ActivePrefix int `json:"active_prefix_tokens,omitempty"`
	// Sharers is the number of requests in flight on that candidate; 0 if no cost depends on it.
	Sharers int `json:"active_prefix_requests,omitempty"`

	// The durations of the steps.
	QueueTime    time.Duration `json:"queue_ns"`
	TokenizeTime time.Duration `json:"tokenize_ns"`
	HashTime     time.Duration `json:"hash_ns"`
	MatchTime    time.Duration `json:"match_ns"`
	PickTime     time.Duration `json:"pick_ns"`            // with the wait for the pool's lock
	ProbeTime    time.Duration `json:"probe_ns,omitempty"` // of probes to router groups

	// Tokens are the ids of the whole prompt. They are set only if the request has WantTokens, the ids
	// are exact, and the prompt did not come as ids.
	Tokens []uint32 `json:"-"`

	// Candidates are the workers of the pool with the inputs of the choice, in worker
	// order. They are set if the request has Explain, and in kept decisions. In a pool with more
	// than 128 workers, kept decisions have the chosen worker and the 128 candidates with
	// the lowest costs; Omitted is the number of the other workers.
	Candidates []Candidate `json:"candidates,omitempty"`
	Omitted    int         `json:"candidates_omitted,omitempty"`

	// What happened after a kept decision; zero until it happens.
	FirstToken time.Time `json:"first_token,omitzero"`
	Freed      time.Time `json:"freed,omitzero"`
	// FirstTokenBy is how the first token was noticed or inferred. If FirstToken is zero and
	// FirstTokenBy is [SignEnd], nobody noticed the first token.
	FirstTokenBy Sign `json:"first_token_by,omitempty"`
	// Served is the address of the worker that answered, if it is not the chosen one.
	Served netip.AddrPort `json:"served,omitzero"`
	// Usage is what the response reports, if kvroute read it; see [Router.ReportUsage].
	Usage *Usage `json:"usage,omitempty"`

	// Inferred says that the first token of a request with MayInfer need not be observed: the worker has at most
	// [Config.InferTokens] to compute, and nothing else needs the observation. Represents is the number of requests for
	// which the time to the first token stands: above 1 if it is observed only because the request is in a sample.
	Inferred   bool `json:"-"`
	Represents int  `json:"-"`

	guessed bool // no event of the worker has named a part of OverlapBlocks yet
}

// Second is the worker that gets a request if the chosen worker does not take it.
type Second struct {
	Worker        Worker         `json:"worker"`
	WorkerName    string         `json:"worker_name,omitempty"`
	Address       netip.AddrPort `json:"address"`
	Host          string         `json:"host,omitempty"`           // as of [Decision]
	NameHost      bool           `json:"-"`                        // it answers this Host only, and a choice before it has another one
	NameRank      bool           `json:"name_rank,omitempty"`      // as [Decision.NameRank]
	OverlapBlocks int            `json:"overlap_blocks"`           // leading blocks of the prompt that the worker holds
	LoweredBlocks int            `json:"lowered_blocks,omitempty"` // as [Decision.LoweredBlocks]

	guessed bool // as in [Decision]
}

// Sign is how a first token was noticed.
type Sign string

// The signs.
const (
	SignTold     Sign = "told"             // the caller reported it: [Router.MarkPrefillCompleted]
	SignObserver Sign = "observer"         // it was seen in the response
	SignHeaders  Sign = "response-headers" // the headers of a stream came: the worker sends them with the first token
	SignOrder    Sign = slots.ByOrder      // inferred: a request that was booked later on the worker has its first token
	SignRate     Sign = slots.ByRate       // inferred: the worker should have computed the prompt by now
	SignEnd      Sign = "end"              // only the whole response, or its end, was seen
)

// Candidate is one worker that a decision looked at. If the worker was excluded, its cost
// and the fields about the prompt are 0.
type Candidate struct {
	Worker     Worker         `json:"worker"`
	WorkerName string         `json:"worker_name,omitempty"`
	Address    netip.AddrPort `json:"address"`

	// Group is the name of a router group, SummaryAge the age of its summary; below 0 without a
	// summary. Probed is set if the group answered a probe: load and overlap are then those of
	// the worker that the group would choose.
	Group      string        `json:"group,omitempty"`
	SummaryAge time.Duration `json:"summary_age_ns,omitempty"`
	Probed     bool          `json:"probed,omitempty"`

	// Lacks is the kind of the side group that lowers OverlapBlocks, because it lacks a block, and LacksGroup the
	// number of this group in the engine. Rule is the rule of the audit by which OverlapBlocks is lower than events
	// promise. The three fields make a Candidate no larger: alignment leaves as many bytes unused behind Probed.
	Lacks      Limit `json:"lacks,omitempty"`
	Rule       Limit `json:"rule,omitempty"`
	LacksGroup int32 `json:"lacks_group,omitempty"`

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
	ExcludedRefused  Exclusion = "refused"     // not healthy, as all workers, and accepts no connections
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

// makeDecision makes the decision of one choice. list, if not nil, are the workers to be shown with it, leg is
// the decision of the prefill leg, and queued the time that the request waited in the queue. d is empty.
func (c *core) makeDecision(
	in *decisionInput, ch *choice, list *listing, leg *Decision, noLeg NoLeg, queued time.Duration, d *Decision,
) {
	load := &ch.inputs[ch.chosen]
	ord := ch.candidates[ch.chosen]
	e := &c.entries[ord]
	ids := &in.prompt.ids
	d.ID, d.Time, d.Model, d.Mode, d.Reason, d.Labels = in.ID, ch.time, in.model, ch.mode, ch.reason, in.Labels
	d.Worker, d.WorkerName, d.Address, d.Host = e.worker, e.info.Name, e.address(), e.info.Host
	d.Engine, d.NameRank = e.info.Engine, e.info.wantsRank(e.worker.DPRank)
	d.Bootstrap, d.Group = e.info.Bootstrap, e.info.Group
	d.Panic = ch.panics
	d.Holdout, d.Conversation = in.holdout.side, in.holdout.conversation
	d.Prefill, d.NoLeg = leg, noLeg

	d.TokenMode, d.TokenReason, d.TextBytes, d.ReusedBytes = ids.Mode, ids.Reason, ids.Size, ids.Reused
	d.PromptTokens, d.PromptBlocks = in.prompt.tokens, len(in.hashes.local)
	d.OverlapBlocks, d.CachedTokens = load.OverlapBlocks, load.OverlapBlocks*c.blockSize
	d.LoweredBlocks, d.guessed = load.LoweredBlocks, load.PendingBlocks > 0
	d.MeanCachedTokens = float64(ch.overlapBlocks*c.blockSize) / float64(len(ch.inputs))

	d.Cost, d.Policy, d.Equal = ch.costs[ch.chosen], ch.policy, ch.equal
	d.BlockSize, d.DeviceRatio = c.blockSize, ch.deviceRatio
	d.Draw, d.Turn, d.ExpectedOutput = ch.request.U, ch.request.Turn, ch.request.OutputTokens
	d.ActivePrefix, d.Sharers = ch.request.ActivePrefix, ch.request.Sharers
	d.Settings, d.Thresholds = ch.settings, c.thresholds

	d.QueueTime, d.TokenizeTime, d.HashTime = queued, in.prompt.took, in.hashes.took
	d.MatchTime, d.ProbeTime = in.overlap.took, in.probed.took
	if leg == nil {
		d.PrefillTokens = d.toCompute(load.OverlapBlocks)
		d.CoarseTTFT = scorer.CoarseTTFT(d.PrefillTokens, load.ActiveRequests, c.throughput(e))
		d.EstimatedTTFT = ch.settings.ModelTTFT(&ch.request, load)
		d.PrefillRate, _ = c.slots.PrefillRate(ord)
		perToken, fixed := c.slots.PrefillTime(ord)
		if perToken > 0 {
			d.MarginalRate = 1 / perToken
		}
		d.ExpectedTTFT = measuredTTFT(load.PendTokens+d.PrefillTokens, load.WaitingRequests, d.PrefillRate, perToken, fixed)
	} else { // the prompt arrives computed
		d.CoarseTTFT, d.EstimatedTTFT, d.ExpectedTTFT = leg.CoarseTTFT, leg.EstimatedTTFT, leg.ExpectedTTFT
	}
	if len(in.probed.answers) > 0 {
		d.Member = in.member(e, &c.slots, ord)
	}
	if in.WantSecond && in.Pinned == nil && (ch.reason != ReasonSession || !c.conf.Sessions.Hard) {
		second, third := c.second(in, ch, leg)
		d.Second = c.choiceOf(in, e, second, false)
		if ch.part != prefillPart {
			d.Third = c.choiceOf(in, e, third, d.Second.NameHost)
		}
	}
	if c.conf.Pull.On && leg == nil && in.MayPull && ch.part != prefillPart {
		d.Source, d.Second, d.Third = c.pulls.name(&c.conf.Pull, &c.ranks, in, ch, d)
	}
	if d.Represents = 1; in.inferable(c, ch.time, ord, d) {
		d.Inferred, d.Represents = in.Represents == 0, in.Represents
	}
	if list != nil && in.listCandidates {
		d.Candidates, d.Omitted = slices.Clone(list.workers), list.omitted
	}
}

// leastRated is the number of tokens from which on a prefill rate tells the time to the first token: with fewer, most
// of the time is that of a step and of the network.
const leastRated = 256

// measuredTTFT returns the time to the first token, in ms, of a prompt that makes a worker compute these tokens, behind
// the prompts of the waiting requests: by the line through its first tokens, else by its rate. It is 0 if neither is
// known.
func measuredTTFT(tokens, waiting int, rate, perToken, fixed float64) float64 {
	switch {
	case rate == 0 || tokens < leastRated:
		return 0
	case perToken > 0:
		return 1000 * (float64(tokens)*perToken + float64(1+waiting)*fixed)
	}
	return 1000 * float64(tokens) / rate
}

// toCompute is the number of prompt tokens that a worker with these cached blocks has to compute. An engine
// computes the last token of a prompt even if all tokens are cached.
func (d *Decision) toCompute(overlapBlocks int) int {
	return max(min(1, d.PromptTokens), d.PromptTokens-overlapBlocks*d.BlockSize)
}

// copyTo copies the decision, with other candidates, token ids and prefill leg.
func (d *Decision) copyTo(to *Decision, candidates []Candidate, omitted int, tokens []uint32, leg *Decision) {
	*to = *d
	to.Candidates, to.Omitted, to.Tokens, to.Prefill = candidates, omitted, tokens, leg
}

// Brief returns a copy of the decision and of its prefill leg without candidates; nil for nil.
func (d *Decision) Brief() *Decision {
	if d == nil {
		return nil
	}
	b := new(Decision)
	d.copyTo(b, nil, 0, nil, d.Prefill.Brief())
	return b
}

// Computing returns the decision about the worker that computes the prompt: the prefill leg's, or d.
func (d *Decision) Computing() *Decision { return cmp.Or(d.Prefill, d) }

// later is what happened to a booked request after its decision. A zero value means that nothing happened.
type later struct {
	firstToken   time.Time
	firstTokenBy Sign
	freed        time.Time
	served       netip.AddrPort
	usage        *Usage
	noLeg        NoLeg
	pull         PullOutcome
}

// add adds later events to a kept decision.
func (d *Decision) add(l later) {
	if !l.firstToken.IsZero() {
		d.FirstToken = l.firstToken
	}
	if !l.freed.IsZero() {
		d.Freed = l.freed
	}
	if l.served.IsValid() {
		d.Served = l.served
	}
	d.FirstTokenBy = cmp.Or(l.firstTokenBy, d.FirstTokenBy)
	d.Usage = cmp.Or(l.usage, d.Usage)
	d.NoLeg = cmp.Or(l.noLeg, d.NoLeg)
	if l.pull != "" && d.Source != nil {
		s := *d.Source // other copies of the decision have the same one
		s.Outcome = l.pull
		d.Source = &s
	}
}

// listing has the workers of a choice that people see, in worker order.
type listing struct {
	workers []Candidate
	omitted int // number of the other workers

	// Buffers.
	chances []float64 // probability of being drawn, for each candidate
	lowest  []float64 // see costBound
}

// keptCandidates bounds the candidates of a kept decision, so that the memory of kept decisions
// does not grow with the fleet.
const keptCandidates = 128

// list sets the list of workers that explains a choice. It runs before the booking, which changes loads. The
// list has every worker of the pool. In a pool with more than keptCandidates workers it has only the
// chosen worker and the candidates with the lowest costs, unless the request has Explain.
func (c *core) list(in *decisionInput, ch *choice, l *listing) {
	drawn := ch.policy != "" && ch.settings.Temperature > 0
	if drawn {
		l.chances = slices.Grow(l.chances[:0], len(ch.costs))[:len(ch.costs)]
		scorer.Probabilities(ch.costs, ch.settings.Temperature, l.chances)
	}
	all, bound, equal := in.Explain || len(c.order) <= keptCandidates, 0., 0
	if !all {
		bound, equal = l.costBound(ch.costs)
	}
	l.workers = l.workers[:0]
	next := 0 // the next candidate; candidates have the order of c.order
	for i, ord := range c.order {
		at := next
		if at < len(ch.candidates) && ch.candidates[at] == ord {
			next++
		}
		switch {
		case all, at < next && at == ch.chosen:
		case at == next, ch.costs[at] > bound, ch.costs[at] == bound && equal == 0:
			continue
		case ch.costs[at] == bound:
			equal--
		}
		l.workers = append(l.workers, Candidate{})
		e, to := &c.entries[ord], &l.workers[len(l.workers)-1]
		to.Worker, to.WorkerName, to.Address = e.worker, e.info.Name, e.address()
		to.TotalBlocks, to.ReportedBlocks, to.Excluded = e.info.TotalKVBlocks, e.reported(ch.time), ch.exclusions[i]
		to.Foreign = c.foreign(ch.time, e, in.prompt.tokens)
		if e.info.Group != "" {
			to.Group, to.SummaryAge = e.info.Group, e.group.age(ch.time)
			to.Probed = to.Excluded == "" && in.probeOf(e) != nil
		}
		if to.Excluded != "" {
			c.load(ch.time, ord, in.prompt.tokens, &to.Input)
			e.setKVUse(ch.time, &to.Input)
			continue
		}
		if to.Input, to.Cost = ch.inputs[at], ch.costs[at]; !ch.allInputs {
			c.complete(ch, ord, in.hashes.sequence, &to.Input)
		}
		if to.UnusableBlocks > 0 || to.LoweredBlocks > 0 {
			nameLimits(c.entries[ord].learned.rule, &in.overlap, ord, to)
		}
		if ch.policy == scorer.Tokens || ch.policy == scorer.PredictedTTFT || ch.policy == scorer.Weighted {
			to.DecodeDelay = ch.settings.DecodeDelay(&ch.request, &to.Input)
		}
		if drawn {
			to.Probability = l.chances[at]
		}
	}
	l.omitted = len(c.order) - len(l.workers)
}

// costBound returns the highest cost that is listed, if the keptCandidates lowest costs are, and how many
// candidates with exactly this cost are listed.
func (l *listing) costBound(costs []float64) (bound float64, equal int) {
	low := l.lowest[:0]
	for _, cost := range costs {
		if most := keptCandidates - 1; len(low) <= most || cost < low[most] {
			at, _ := slices.BinarySearch(low, cost)
			low = slices.Insert(low[:min(len(low), most)], at, cost)
		}
	}
	l.lowest = low
	bound = low[len(low)-1]
	below, _ := slices.BinarySearch(low, bound)
	return bound, len(low) - below
}
