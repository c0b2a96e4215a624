// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/tokenizer"
)

// Request asks for a worker. Its slices and maps are only read, and not used after the
// call.
type Request struct {
	// ID makes the decision a booking: the worker's slot is taken until
	// [Router.Free]. It must be unique among the requests in flight, and have at
	// most 1,024 bytes. With no ID
	// the decision is read-only: no slot, no record, no waiting.
	ID string
	// Owned says that the caller will certainly call [Router.Free] when the request ends.
	// The slot of a request that is not owned is freed after 300 s without a sign of life.
	Owned bool

	// Model is the model name of the request: a base model or an adapter.
	Model string

	// Prompt is tokenized by the router. Tokens, if not nil, is used instead,
	// and Blocks instead of both.
	Prompt Prompt
	Tokens []uint32
	Blocks *Blocks

	// Unread says that the request could not be read. If there is only one model, the
	// request goes to it by load.
	Unread bool

	// Salt separates the request's blocks from those of other salts.
	Salt string

	// Unseen says that the first token will not be noticed when it comes, because the
	// response is no stream; see [Config.InferFirstTokens].
	Unseen bool
	// ExpectedOutput is how many tokens the response will have; 0 = unknown.
	ExpectedOutput int
	// MaxOutput is the largest number of tokens that the response may have; 0 = unknown.
	MaxOutput int
	// EmbeddingHit says that all embeddings of the request are cached; see [DeviceAware].
	EmbeddingHit bool

	// Pinned, if not nil, is the worker that must take the request: no costs are compared,
	// and the request waits only for that worker. AnyRank allows all ranks of the worker.
	Pinned  *Worker
	AnyRank bool
	// Preferred, if not nil, is the worker that takes the request if it is a candidate;
	// see [Decision.Member].
	Preferred *Worker
	// Allowed, if not nil, are the only workers that may take it; AllowedAddresses,
	// if not nil, the only addresses, port 0 standing for all ports.
	Allowed          []Worker
	AllowedAddresses []netip.AddrPort
	// A worker must have all of RequiredTaints. PreferredTaints have weights: the cost of a
	// worker is multiplied by e^−tanh(sum of the weights of its taints).
	RequiredTaints  []string
	PreferredTaints map[string]float64

	// PrefillPinned, if not nil, is the worker that must take the prefill leg; PrefillAnyRank
	// allows all of its ranks. Split says whether the request may have, or must have, such a leg.
	PrefillPinned  *Worker
	PrefillAnyRank bool
	Split          Split

	// Session names the conversation that the request belongs to; see
	// [SessionConfig]. SessionFinal says that this is its last request.
	Session      string
	SessionFinal bool

	// In the queue, a higher StrictPriority comes first; among equals Priority
	// is seconds (or weight) that the request is put ahead; see [scorer.QueuePolicy].
	StrictPriority int
	Priority       float64
	// TTFTTarget, if above 0, is the wanted time from the arrival to the first token.
	// QueueWait, if above 0, is how long the request may wait. A request that has waited
	// for the shorter of the two leaves the queue with [ErrTooLate].
	TTFTTarget, QueueWait time.Duration
	// DecisionTimeout, if above 0, is how long the decision may take, without the time in
	// the queue. The error is then [ErrDecisionTimeout].
	DecisionTimeout time.Duration
	// Labels are kept with the decision. They have no effect on it.
	Labels Labels
	// Arrival is for [Hooks.Finished]. It has no effect on the decision.
	Arrival Arrival
	// Waiting, if not nil, is called once if the request has to wait, before it
	// does, by the goroutine that called [Router.BestWorker]. split says that the request
	// may have a prefill leg after that.
	Waiting func(split bool)

	// Override changes the settings of this decision; mode [KV] only.
	Override *Override

	// Explain asks for [Decision.Candidates].
	Explain bool
	// WantTokens asks for [Decision.Tokens], WantSecond for [Decision.Second].
	WantTokens, WantSecond bool
}

// Labels describe a request to people.
type Labels struct {
	RequestID string        `json:"request_id,omitempty"`    // the client's; not always unique
	Class     string        `json:"policy_class,omitempty"`  // class of requests
	Fairness  string        `json:"fairness_id,omitempty"`   // tenant
	ITLTarget time.Duration `json:"itl_target_ns,omitempty"` // wanted time between two tokens
	Operation string        `json:"operation,omitempty"`     // the API's, by OpenTelemetry's names: chat, text_completion, …
}

// Blocks is a prompt that its caller has hashed, in blocks of the pool's size and
// with adapter and salt in the seed (package indexer).
type Blocks struct {
	Local    []uint64 // local hash of each full block
	Sequence []uint64 // sequence hashes of the same blocks
	Tokens   int      // length of the prompt
	// BlockSize is needed if the model's workers have blocks of several sizes: only workers
	// with this size have an overlap. 0 fits all.
	BlockSize int
}

// check refuses requests with fields that are out of range or contradict each other.
func (req *Request) check() error {
	if b := req.Blocks; b != nil && (len(b.Local) != len(b.Sequence) || b.Tokens < 0 || b.Tokens > scorer.MostTokens) {
		return fmt.Errorf("%w: %d local and %d sequence hashes of %d tokens", ErrBadBlocks, len(b.Local), len(b.Sequence), b.Tokens)
	}
	if len(req.PreferredTaints) > 0 { // the loop over an empty map is slow
		for name, weight := range req.PreferredTaints {
			if math.IsNaN(weight) || math.IsInf(weight, 0) {
				return fmt.Errorf("%w: weight of the preferred taint %q is %v, want a finite number", ErrBadRequest, bounded(name), weight)
			}
		}
	}
	switch {
	case len(req.RequiredTaints) > maxTaints || len(req.PreferredTaints) > maxTaints:
		return fmt.Errorf("%w: %d required and %d preferred taints, want at most %d of a kind", ErrBadRequest, len(req.RequiredTaints), len(req.PreferredTaints), maxTaints)
	case len(req.ID) > maxID || isLeg(req.ID):
		return fmt.Errorf("%w: ID has %d bytes, want at most %d, and no %q at its end", ErrBadRequest, len(req.ID), maxID, legSuffix)
	case req.Split != SplitAuto && req.Split != SplitNever && req.Split != SplitAlways:
		return fmt.Errorf("%w: Split is %q, want aggregated or disaggregated", ErrBadRequest, bounded(string(req.Split)))
	case math.IsNaN(req.Priority) || math.IsInf(req.Priority, 0):
		return fmt.Errorf("%w: Priority is %v, want a finite number", ErrBadRequest, req.Priority)
	case req.ExpectedOutput < 0 || req.MaxOutput < 0:
		return fmt.Errorf("%w: ExpectedOutput is %d and MaxOutput %d, want 0 or more tokens", ErrBadRequest, req.ExpectedOutput, req.MaxOutput)
	case req.TTFTTarget < 0 || req.QueueWait < 0 || req.DecisionTimeout < 0:
		return fmt.Errorf("%w: TTFTTarget, QueueWait and DecisionTimeout are %v, %v and %v, want 0 or more", ErrBadRequest, req.TTFTTarget, req.QueueWait, req.DecisionTimeout)
	}
	return nil
}

// timed returns a context that ends after the request's DecisionTimeout.
func (req *Request) timed(ctx context.Context) (context.Context, context.CancelFunc) {
	if req.DecisionTimeout == 0 {
		return ctx, func() {}
	}
	return context.WithTimeoutCause(ctx, req.DecisionTimeout, ErrDecisionTimeout)
}

// mayWait returns how long the request may wait in the queue; 0 = without a limit.
func (req *Request) mayWait() time.Duration {
	if req.TTFTTarget == 0 || req.QueueWait == 0 {
		return max(req.TTFTTarget, req.QueueWait)
	}
	return min(req.TTFTTarget, req.QueueWait)
}

// question is a request with all that is computed before the pool's lock is taken.
type question struct {
	*Request

	lora     string        // adapter of the request
	adapter  string        // the same, or empty if workers do not register their adapters
	tokens   int           // length of the prompt; 0 if unknown
	local    []uint64      // local hashes of its full blocks
	sequence []uint64      // their sequence hashes
	overlap  []int32       // by ordinal, counted at version
	pending  []int32       // part of overlap that is only predicted
	lower    [3][]int32    // blocks behind these in host memory, on disk, in external storage
	version  uint64        // value of core.changes when overlap was counted
	matched  time.Time     // time of that count
	session  uint64        // hash of the session's name; 0 = none
	rebind   bool          // the session is bound to a worker that does not take this request
	taints   []taint       // Request.PreferredTaints, sorted
	reason   Reason        // of the decision, unless there is a better one
	number   uint64        // of the decision; see keptDecisions
	explain  bool          // fill in workspace.seen
	guessed  bool          // no engine has these hashes
	answers  []ProbeAnswer // of router groups
	probed   time.Time     // when the router groups were asked

	workspace *workspace

	// Of a request with a prefill leg, the leg. Of a prefill leg, the worker that decodes.
	leg    *legQuestion
	decode *WorkerInfo

	flights *flights // that has the request; nil for a request without an id

	// The fields below are set by a booking.
	ordinal    int
	generation uint64 // entry.since of the worker
	unreported bool   // neither events nor summaries report the worker's blocks
}

// freed says whether a request that is being decided was freed already.
func (q *question) freed() bool { return q.flights != nil && q.flights.get(q.ID).number != q.number }

// taint is one of Request.PreferredTaints. Weights are added in a fixed order, because
// another order could round to another cost.
type taint struct {
	name   string
	weight float64
}

// errMustWait is the outcome of a decision that puts the request into the queue.
var errMustWait = errors.New("the request must wait")

// workspace is the memory of one decision. It belongs to the request and not to the pool,
// so that it stays in the cache of the request's processor.
type workspace struct {
	part       part
	request    scorer.Request
	verdicts   []Exclusion // along core.order; empty for candidates
	candidates []int       // ordinals, in worker order
	inputs     []scorer.Input
	held       int  // sum of the inputs' OverlapBlocks
	whole      bool // the inputs are complete; else see [core.complete]
	costs      []float64
	chances    []float64   // of being drawn, along candidates
	seen       []Candidate // in worker order, if the question asks to explain
	lowest     []float64   // costs of a kept decision's candidates, sorted
}

// prepare checks the request in s and fills in what does not depend on the pool.
func (r *Router) prepare(s *scratch) (target, error) {
	req := &s.request
	names := *r.names.Load()
	t, ok := names[req.Model]
	switch {
	case !ok && len(names) == 0:
		return t, fmt.Errorf("router: model %q: %w", bounded(req.Model), ErrNoWorkers)
	case !ok:
		return t, fmt.Errorf("router: model %q: %w", bounded(req.Model), ErrUnknownModel)
	case r.conf.StrictModels && (t.card == nil || t.card.Prompts == nil):
		return t, fmt.Errorf("router: model %q has no tokenizer: %w", bounded(req.Model), ErrUnknownModel)
	}
	if err := req.check(); err != nil {
		return t, fmt.Errorf("router: model %q: %w", bounded(req.Model), err)
	}
	// It is empty; a literal would be made elsewhere and copied here, as below.
	q := &s.question
	q.Request, q.lora, q.adapter, q.workspace = req, t.lora, t.adapter, &s.workspace
	q.explain = req.Explain || req.ID != "" && r.conf.KeepDecisions > 0
	if r.conf.Sessions.TTL > 0 && req.Session != "" {
		q.session = sessionKey(req.Session)
	}
	if len(req.PreferredTaints) > 0 {
		s.taints = s.taints[:0]
		for name, weight := range req.PreferredTaints {
			s.taints = append(s.taints, taint{name, min(max(weight, -mostWeight), mostWeight)})
		}
		slices.SortFunc(s.taints, func(a, b taint) int { return strings.Compare(a.name, b.name) })
		q.taints = s.taints
	}
	d := &s.decision
	*d = Decision{}
	d.ID, d.Model, d.Mode, d.Labels = req.ID, t.pools[0].model, r.conf.Mode, req.Labels
	return t, nil
}

// release gives the memory of a decision back, without the request's data. Memory that an
// unusually long prompt made large is not kept.
func (r *Router) release(s *scratch) {
	if cap(s.tokens) > 1<<20 {
		return
	}
	s.request, s.question, s.encoded, s.hasRead, s.hashed = Request{}, question{}, tokenizer.Prompt{}, false, time.Time{}
	s.target, s.pool, s.submitted = target{}, nil, false
	clear(s.taints)
	r.scratch.Put(s)
}

// allows reports whether a list has an address. Port 0 in the list stands for any port.
func allows(list []netip.AddrPort, a netip.AddrPort) bool {
	return slices.ContainsFunc(list, func(l netip.AddrPort) bool {
		return l.Addr() == a.Addr() && (l.Port() == 0 || l.Port() == a.Port())
	})
}

// pinError says why the pinned worker is not a candidate; nil if it is one.
// In the mode Direct a worker that does not exist is also a lack of workers.
func (c *core) pinError(q *question) error {
	from, to := c.pin(q)
	switch {
	case len(c.candidates) > 0:
		return nil
	case from == to && c.conf.Mode == Direct:
		return q.pinned(fmt.Errorf("%w: %w", ErrPinnedUnknown, ErrNoWorkers))
	case from == to:
		return q.pinned(ErrPinnedUnknown)
	}
	switch why := c.verdicts[to-1]; why {
	case ExcludedDraining, ExcludedHealth:
		return q.pinned(fmt.Errorf("%w: %s", ErrNoWorkers, why))
	default:
		return q.pinned(fmt.Errorf("%w: %s", ErrPinnedNotAllowed, why))
	}
}

// pin returns the range of the pinned worker, or of its ranks, in the order.
func (c *core) pin(q *question) (from, to int) {
	if q.AnyRank {
		return c.ranks(q.Pinned.ID)
	}
	at, known := c.search(*q.Pinned)
	if !known {
		return 0, 0
	}
	return at, at + 1
}

// lane is the lane of the queue in which a request waits.
func (c *core) lane(q *question) int {
	if q.Pinned != nil {
		if from, to := c.pin(q); from < to {
			return c.order[from]
		}
	}
	return scorer.AnyWorker
}

// pinned adds the pinned worker to an error.
func (q *question) pinned(err error) error {
	if q.AnyRank {
		return fmt.Errorf("worker %d: %w", q.Pinned.ID, err)
	}
	return fmt.Errorf("worker %d, rank %d: %w", q.Pinned.ID, q.Pinned.DPRank, err)
}
