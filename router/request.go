// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/slots"
)

// Request asks for a worker. Its slices and maps are only read, and not used after the
// call.
type Request struct {
	// ID makes the decision a booking: the request has a slot until [Router.Free]. The ID must be
	// unique among the requests in flight, and have at most 1,024 bytes. Without an ID the
	// decision changes nothing: the request has no slot, is not kept and does not wait.
	ID string
	// Owned says that the caller will certainly call [Router.Free] when the request ends.
	// The slot of a request that is not owned is freed after 300 s without a sign of life.
	Owned bool

	// Model is the model name of the request: a base model or an adapter. "" means the only model with workers.
	Model string

	// Prompt is tokenized by the router. Tokens, if not nil, is used instead,
	// and Blocks instead of both.
	Prompt Prompt
	Tokens []uint32
	Blocks *Blocks

	// Unread says that the request could not be read. If only one model has workers, the
	// request goes to it by load.
	Unread bool

	// Uncached says that the engine computes the whole prompt, cached or not: no cached block counts.
	Uncached bool

	// Salt separates the request's blocks from those of other salts.
	Salt string

	// Unseen says that nobody can notice the first token when it comes, because the response
	// is not a stream; see [Config.InferFirstTokens].
	Unseen bool
	// MayInfer says that the caller can leave the first token unobserved; see [Decision.Inferred]. If Represents is
	// above 0, the caller observes it anyway, as one of a random sample, in which it stands for so many requests.
	MayInfer   bool
	Represents int
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
	// Allowed, if not nil, are the only workers that may take the request. AllowedAddresses, if
	// not nil, are the only addresses; port 0 means any port.
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

	// Held is the id of something that a worker keeps, such as the response that the request continues; see
	// [Router.Gave]. The request goes to that worker, also if the worker drains, and gets no second choice. If no
	// worker of the model gave out the id, or the worker is unhealthy, Held changes nothing. The decision waits up to
	// 250 ms for an unknown id, whose report may be on its way; [Router.Submit] does not wait.
	Held string

	// Requests with a higher StrictPriority leave the queue first. Among requests with the same
	// StrictPriority, Priority moves this one ahead: a time in seconds, or a weight; see
	// [slots.QueuePolicy].
	StrictPriority int
	Priority       float64
	// TTFTTarget, if above 0, is the wanted time from the arrival to the first token.
	// QueueWait, if above 0, is how long the request may wait. A request that has waited
	// for the shorter of the two leaves the queue with [ErrTooLate].
	TTFTTarget, QueueWait time.Duration
	// DecisionTimeout, if above 0, is how long the decision may take, without the time in
	// the queue. The error is then [ErrDecisionTimeout].
	DecisionTimeout time.Duration
	// Client and Prefix say where the request comes from: hashes of the client's address and of the beginning of the
	// prompt; 0 = unknown. A worker is avoided because of its answers only if they went to at least three clients or
	// prefixes. Without both, the first block of the prompt is the prefix. They have no effect on the decision.
	Client, Prefix uint64
	// Labels are kept with the decision. They have no effect on it.
	Labels Labels
	// Arrival is for [Hooks.Finished]. It has no effect on the decision.
	Arrival Arrival
	// Waiting, if not nil, is called once if the request has to wait in the queue, at the
	// beginning of the wait, by the goroutine that called [Router.BestWorker]. split says that
	// the request may have a prefill leg after the wait.
	Waiting func(split bool)

	// Override changes the settings of this decision; mode [KV] only.
	Override *Override

	// Explain asks for [Decision.Candidates].
	Explain bool
	// WantTokens asks for [Decision.Tokens], WantSecond for [Decision.Second].
	WantTokens, WantSecond bool
	// RankPerAttempt says that each worker that is tried gets a request with its own rank. Otherwise
	// a request that names its rank names the same one to the second choice.
	RankPerAttempt bool
	// MayPull says that the request can name a source; see [Decision.Source].
	MayPull bool
	// HostPerAttempt says that each worker that is tried gets a request with its own Host header. Otherwise the
	// second choice gets the first one's.
	HostPerAttempt bool
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
	// with this size have an overlap. With 0 the hashes count for all
	// of them.
	BlockSize int
}

// check refuses requests with fields that are out of range or contradict each other.
func (req *Request) check() error {
	if b := req.Blocks; b != nil && (len(b.Local) != len(b.Sequence) || b.Tokens < 0 || b.Tokens > slots.MostTokens) {
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

// pinnedByID says that the router pinned the worker that gave out Held: otherwise [Router.hold] has removed Held.
func (req *Request) pinnedByID() bool { return req.Held != "" }

// legSuffix ends the ids of prefill legs. Other replicas recognise a leg by it.
const legSuffix = "/prefill"

func legID(id string) string { return id + legSuffix }

func isLeg(id string) bool { return strings.HasSuffix(id, legSuffix) }

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

// Allows reports whether a list as [Request.AllowedAddresses] has an address. Port 0 in the list stands for any port,
// and nil allows each address.
func Allows(list []netip.AddrPort, a netip.AddrPort) bool {
	return list == nil || slices.ContainsFunc(list, func(l netip.AddrPort) bool {
		return l.Addr() == a.Addr() && (l.Port() == 0 || l.Port() == a.Port())
	})
}

// pinnedError adds the pinned worker to an error.
func (req *Request) pinnedError(err error) error {
	if req.AnyRank {
		return fmt.Errorf("worker %d: %w", req.Pinned.ID, err)
	}
	return fmt.Errorf("worker %d, rank %d: %w", req.Pinned.ID, req.Pinned.DPRank, err)
}
