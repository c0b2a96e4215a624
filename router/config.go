// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/slots"
)

// Mode is a way of choosing a worker.
type Mode string

// The modes. In all modes requests in flight are counted, and thresholds, pins, sessions
// and the queue work. KV reads prompts; the other modes read them only for a threshold or
// the queue.
const (
	// KV chooses the lowest cost of cached blocks and load.
	KV Mode = "kv"
	// Random draws one of the candidates.
	Random Mode = "random"
	// RoundRobin takes the candidates in turn.
	RoundRobin Mode = "round-robin"
	// Direct takes the worker that the request names, and refuses requests that name none.
	Direct Mode = "direct"
	// LeastLoaded takes a candidate with the fewest requests in flight.
	LeastLoaded Mode = "least-loaded"
	// PowerOfTwo draws two candidates and takes the one with fewer requests.
	PowerOfTwo Mode = "power-of-two"
	// DeviceAware chooses the class of devices, CPU or GPU, with fewer requests for its
	// speed, and in it a candidate with the fewest requests.
	DeviceAware Mode = "device-aware-weighted"
)

// Modes returns all modes, the default first.
func Modes() []Mode {
	return []Mode{KV, Random, RoundRobin, Direct, LeastLoaded, PowerOfTwo, DeviceAware}
}

// Config says how a [Router] decides. The zero value of a field is its default.
type Config struct {
	// Mode is the way of choosing. Default [KV].
	Mode Mode

	// Scoring is the cost of a worker in the mode KV. Without a policy it is
	// [scorer.Defaults]. With settings that ignore overlap the router keeps no index, and
	// refuses an override that needs one.
	Scoring scorer.Settings
	// Rule, if not nil, chooses in the mode KV instead of Scoring. It is called under the
	// pool's lock, with candidates in worker order.
	Rule scorer.Rule
	// DeviceRatio is the number of CPUs that do the work of one GPU, in the mode
	// DeviceAware. Default 8.
	DeviceRatio float64

	// Thresholds say when a worker is too busy to be a candidate, for models without
	// thresholds by [Router.SetThresholds]. Default: never.
	Thresholds scorer.Thresholds
	// Queue says which requests wait, and how.
	Queue QueueConfig
	// Sessions says whether a conversation stays on its worker.
	Sessions SessionConfig

	// Split says when another worker computes the prompt than the one that generates.
	Split SplitConfig

	// Pull says when a worker copies a part of a prompt from another one.
	Pull PullConfig

	// HoldoutShare is the share of the requests, 0 to 1, that are routed round robin, so that their times to first
	// tokens can be compared with those of the others; see [Side]. The share is drawn by conversation. Default 0.
	HoldoutShare float64

	// NoActiveBlocks ignores the blocks of requests in flight. Their prefill tokens and
	// their number count as before.
	NoActiveBlocks bool
	// EstimateOutput estimates the length of outputs that are not reported by
	// [Router.AddOutputTokens]: each request makes OutputRate tokens a second after its
	// first token. If OutputRate is 0, the rate is that of reported outputs on the same
	// worker, or else that of Scoring.Engine. It is for callers that cannot see the tokens
	// of a response.
	EstimateOutput bool
	OutputRate     float64
	// InferFirstTokens infers first tokens that are not reported: when a request that was
	// booked on the same worker later has its first token, or when the worker should have
	// computed the prompt at the rate that was measured. See package slots.
	InferFirstTokens bool
	// InferTokens is the largest number of tokens that a worker has to compute for a request with MayInfer whose
	// first token nobody observes; see [Decision.Inferred]. It needs InferFirstTokens. Default 0: all are observed.
	InferTokens int
	// ObservePerMinute is the number of requests a minute for which Inferred is not set, evenly spaced, on each rank.
	// They measure its rate, and show that it does not hang. Default 30.
	ObservePerMinute int
	// NoSpeeds treats all workers as equally fast. Else costs depend on the speeds of workers, which
	// follow from their times to first tokens and their registered prefill throughputs.
	NoSpeeds bool
	// PrefillThroughput is the number of prompt tokens that a worker computes in a second,
	// for [Decision.CoarseTTFT]. Default 50,000.
	PrefillThroughput float64

	// BlockSize is the number of tokens in a block of workers that do not register it. 0
	// takes the size of the model's other workers, or 16 without others.
	BlockSize int

	// MaxBlocks bounds the (block, worker) pairs that a pool remembers from events. At the
	// bound the least recently used ends of chains are removed. A worker's TotalKVBlocks
	// bounds its part. Default 1<<24.
	MaxBlocks int

	// NoEvents is for fleets without events: the router predicts the caches from the
	// requests that it sent, and ignores events.
	NoEvents bool
	// GuessTTL is how long a prediction for a worker without events counts after the last
	// request that confirms it. Default 120 s.
	GuessTTL time.Duration
	// PredictTTL is how long a worker with events counts as holding the blocks of a request
	// before its events confirm them. It should exceed the wait in the worker's queue, the
	// prefill and the delay of events. Default 10 s; negative turns it off.
	PredictTTL time.Duration

	// AvoidFailing is the initial time for which a worker that refused or failed a request
	// gets no requests, while other workers can take them. Default 0: off.
	AvoidFailing time.Duration

	// Cards are the models known beforehand; see [Router.SetCards].
	Cards []Card

	// Hooks tell the caller what happens to requests, workers and sessions.
	Hooks Hooks

	// Probe, if not nil, asks router groups about a request, and returns the answers that
	// came in time. The decision waits for Probe: it must return soon, and must not keep
	// the argument's slices.
	Probe func(context.Context, Probe) []ProbeAnswer

	// ExplainDrift adds the texts around the first different token to [ModelState.Classes]. They are parts of prompts.
	ExplainDrift bool

	// StrictModels refuses models without a tokenizer, as if they did not exist.
	StrictModels bool

	// Seed makes random choices, such as those between equal costs, reproducible. Any value.
	Seed uint64

	// KeepDecisions is the number of recent decisions that are kept, each of some 400
	// bytes for each worker of its pool, up to 128 workers. Default 1,024; negative keeps none.
	KeepDecisions int

	// Now is the clock. Default [time.Now].
	Now func() time.Time

	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// Hooks are functions that a [Router] calls when something has happened. Each may be nil. A hook may be
// called by several goroutines at once, without a lock of the router, and by the goroutine that handles
// the request: it must return soon, must not block, and must copy what it keeps.
type Hooks struct {
	// Finished gets the outcome of each booked request at its end.
	Finished func(Outcome)
	// Used gets the decision of a request with the usage in its response, when the usage is read: before
	// or after the end of the request.
	Used func(Decision)
	// Departs says that a worker's cache differs from what the router knows of it, by the usage in its
	// responses, or that it agrees again.
	Departs func(w Worker, departs bool)
	// Learned says that a worker's responses depart from its events by another rule than before; see [AuditState]. The
	// rule is empty if they no longer do. Predictions follow the rule.
	Learned func(w Worker, rule string)
	// Answered gets the id of a worker that answered a request with a status below 500, at most once a second
	// for each worker.
	Answered func(id uint64)
	// Panic says that a request of a model went to an unhealthy worker, because no worker is healthy, degraded or
	// starting, or that a later request no longer had to.
	Panic func(model string, begins bool)
	// Forgot says that models were forgotten: [Router.Models] has no longer all models that it had.
	Forgot func()
	// Observe gets each booked request whose prompt was tokenized exactly, before the decision returns.
	Observe func(Observation)
	// Judged gets each changed verdict on the token ids of a model; see package confirm.
	Judged func(Judgement)
	// Flags gets the faults of a worker by the flags that its engine reports, before and now, when a fault begins or
	// ends. It must not call the router.
	Flags func(id uint64, before, now []Fault)
	// Tell gets each change of the slots of the router's own requests, and first tokens of other
	// replicas' requests that were noticed here; see [Change].
	Tell func(Change)
	// TellSession gets the binding of a session when a request of the router binds it or uses it, and
	// the end of the session.
	TellSession func(SessionBinding)
	// TellGiven gets each id that a worker gave out in its response; see [Router.Gave].
	TellGiven func(GivenBinding)
}

// QueueConfig says which requests wait for a worker, and in which order.
type QueueConfig struct {
	// Threshold is a number of batches of pending prefill tokens. A request waits while
	// every candidate has more, or is above a busy threshold. nil means that no request
	// waits.
	Threshold *float64
	// Policy is the order. Default [slots.FCFS].
	Policy slots.QueuePolicy
	// Limit is the largest number of waiting requests, by pool. Default 10,000.
	Limit int
}

// SessionConfig says whether the requests of a session go to one worker. A session
// is bound to the worker of the first of its requests that got a first token, and
// stays so while it is used.
type SessionConfig struct {
	// TTL is how long a session stays bound without a request, from 1 s to
	// 31,536,000 s. 0 turns sessions off.
	TTL time.Duration
	// Hard refuses a request whose session's worker cannot take it, instead of
	// binding the session to another one. A worker that leaves ends its sessions.
	Hard bool
	// Limit is the largest number of sessions, by pool; the least recently used session is
	// removed first. Default 100,000.
	Limit int
}

func (c Config) withDefaults() (Config, error) {
	c.Mode = cmp.Or(c.Mode, KV)
	if c.Scoring.Policy == "" {
		c.Scoring = scorer.Defaults()
	}
	c.PredictTTL = cmp.Or(c.PredictTTL, 10*time.Second)
	c.DeviceRatio = cmp.Or(c.DeviceRatio, 8)
	c.PrefillThroughput = cmp.Or(c.PrefillThroughput, 50_000)
	c.KeepDecisions = cmp.Or(c.KeepDecisions, 1024)
	c.ObservePerMinute = cmp.Or(c.ObservePerMinute, 30)
	c.Split.Skip = cmp.Or(c.Split.Skip, SkipNever)
	c.Split.SkipTokens, c.Split.SkipFraction = cmp.Or(c.Split.SkipTokens, 2048), cmp.Or(c.Split.SkipFraction, .7)
	q, s := &c.Queue, &c.Sessions
	q.Policy = cmp.Or(q.Policy, slots.FCFS)
	const least, most = math.SmallestNonzeroFloat64, math.MaxFloat64
	for _, err := range []error{
		c.Scoring.Validate(), c.Thresholds.Validate(), q.Policy.Validate(), c.Split.check(&c.Thresholds, q.Threshold),
		c.Pull.check(),
		check("Mode", c.Mode, slices.Contains(Modes(), c.Mode), fmt.Sprintf("one of %v", Modes())),
		within("BlockSize", c.BlockSize, 0, maxBlockSize, fmt.Sprintf("0 to %d tokens", maxBlockSize)),
		within("GuessTTL", c.GuessTTL, 0, math.MaxInt64, "0 or more"),
		within("AvoidFailing", c.AvoidFailing, 0, time.Hour, "0 to 1h"),
		within("DeviceRatio", c.DeviceRatio, least, most, "a finite number above 0"),
		within("HoldoutShare", c.HoldoutShare, 0, 1, "0 to 1"),
		within("InferTokens", c.InferTokens, 0, math.MaxInt, "a number of tokens"),
		within("ObservePerMinute", c.ObservePerMinute, 1, math.MaxInt, "1 or more"),
		within("PrefillThroughput", c.PrefillThroughput, least, most, "a finite number above 0"),
		within("OutputRate", c.OutputRate, 0, most, "a finite number of tokens a second, 0 or more"),
		check("OutputRate", c.OutputRate, c.OutputRate == 0 || c.EstimateOutput, "0 without EstimateOutput"),
		within("Queue.Threshold", *cmp.Or(q.Threshold, new(0.)), 0, most, "a finite number, 0 or more"),
		within("Queue.Limit", q.Limit, 0, math.MaxInt, "a number of requests"),
		within("Sessions.TTL", cmp.Or(s.TTL, minSessionTTL), minSessionTTL, maxSessionTTL, fmt.Sprintf("0 or %v to %v", minSessionTTL, maxSessionTTL)),
		within("Sessions.Limit", s.Limit, 0, math.MaxInt, "a number of sessions"),
	} {
		if err != nil {
			return c, fmt.Errorf("router: %w", err)
		}
	}
	q.Limit, s.Limit = cmp.Or(q.Limit, 10_000), cmp.Or(s.Limit, 100_000)
	return c, nil
}

// check returns an error about a field whose value is out of range.
func check(field string, value any, ok bool, want string) error {
	if ok {
		return nil
	}
	return fmt.Errorf("%s is %v, want %s", field, value, want)
}

// within is check for a range.
func within[T cmp.Ordered](field string, value, low, high T, want string) error {
	return check(field, value, value >= low && value <= high, want)
}

const (
	minSessionTTL = time.Second
	maxSessionTTL = 31_536_000 * time.Second
	// maxBlockSize is far above any engine's. It guards against a typing error that makes
	// every prompt shorter than a block.
	maxBlockSize = 1 << 16
	// maxPools bounds the memory for registrations, and the values of the label "model".
	maxPools = 1024
	// maxRanks bounds the ranks of one worker process.
	maxRanks = 1024
	// maxID bounds the ids of requests, which are kept in memory.
	maxID = 1024
	// mostWeight bounds the weight of a preferred taint: the effect is the same from 20 on,
	// and a sum of such weights is finite.
	mostWeight = 1e6
	// maxTaints bounds the taints of a worker, and those of a request: each candidate is
	// compared with them under the pool's lock.
	maxTaints = 256
)

// indexed says whether cached blocks can change a decision.
func (c *Config) indexed() bool { return c.Mode != KV || c.Rule != nil || c.Scoring.UsesOverlap() }
