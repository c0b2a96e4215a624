// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvroute/kvroute/scorer"
)

// Mode is a way of choosing.
type Mode string

// The modes. In all of them requests in flight are counted, and thresholds, pins,
// sessions and the queue work; prompts are read by KV, and by the others only
// where a threshold or the queue asks for it.
const (
	// KV chooses the lowest cost of cached blocks and load.
	KV Mode = "kv"
	// Random draws one of the candidates.
	Random Mode = "random"
	// RoundRobin takes the candidates in turn, whatever they cache or do.
	RoundRobin Mode = "round-robin"
	// Direct takes the worker that the request names, and refuses others.
	Direct Mode = "direct"
	// LeastLoaded takes a candidate with the fewest requests in flight.
	LeastLoaded Mode = "least-loaded"
	// PowerOfTwo draws two candidates and takes the one with fewer requests.
	PowerOfTwo Mode = "power-of-two"
	// DeviceAware takes a candidate with the fewest requests of the class of
	// devices, CPU or not, that has fewer for its strength.
	DeviceAware Mode = "device-aware-weighted"
)

// Modes returns all modes, the default first.
func Modes() []Mode {
	return []Mode{KV, Random, RoundRobin, Direct, LeastLoaded, PowerOfTwo, DeviceAware}
}

// Config says how a [Router] decides. The zero value of each field means its
// default.
type Config struct {
	// Mode is the way of choosing. Default [KV].
	Mode Mode

	// Scoring says what a worker costs in the mode KV. Without a policy it is
	// [scorer.Defaults]. Settings that look at no overlap keep no index; an
	// override that would need one is refused.
	Scoring scorer.Settings
	// Rule, if not nil, chooses in the mode KV instead of Scoring. It is called under the
	// pool's lock, with candidates in worker order.
	Rule scorer.Rule
	// DeviceRatio is how many CPUs do the work of one other device, in the mode
	// DeviceAware. Default 8.
	DeviceRatio float64

	// Thresholds say when a worker is too busy to be a candidate, for models
	// that have none of their own by [Router.SetThresholds]. Default: never.
	Thresholds scorer.Thresholds
	// Queue says which requests wait, and how.
	Queue QueueConfig
	// Sessions says whether a conversation stays with its worker.
	Sessions SessionConfig

	// NoActiveBlocks leaves the blocks of requests in flight out of the account;
	// their prefill tokens and their number stay.
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
	// computed the prompt at the rate that was measured. See package scorer.
	InferFirstTokens bool
	// PrefillThroughput is what a worker computes, in tokens per second, for
	// [Decision.CoarseTTFT]. Default 50,000.
	PrefillThroughput float64

	// BlockSize is the number of tokens in a block of workers that do not say.
	// 0 takes that of the model's other workers, or 16 if there are none.
	BlockSize int

	// MaxBlocks bounds the (block, worker) pairs that a pool remembers from events.
	// At the bound the ends of the chains go first that were asked for longest
	// ago. A worker's own TotalKVBlocks bounds its share. Default 1<<24.
	MaxBlocks int

	// NoEvents is for fleets that do not tell what they cache: the router
	// guesses from the requests that it sent, and takes no events.
	NoEvents bool
	// GuessTTL is how long such a guess counts after the last request that
	// confirms it. Default 120 s.
	GuessTTL time.Duration
	// PredictTTL is how long a worker counts as holding the blocks of a request
	// sent there before its events say so. It should exceed the wait in the
	// worker's queue, the prefill and the delay of events. Default 10 s; negative
	// for not at all.
	PredictTTL time.Duration

	// AvoidFailing is for how long a worker is kept out of decisions that refused
	// a request or failed, while others can take them; longer if it fails again.
	// Default 0: for no time.
	AvoidFailing time.Duration

	// Cards are the models known beforehand; see [Router.SetCards].
	Cards []Card

	// Observe, if not nil, is told of each booked request whose prompt was
	// tokenized exactly, before the decision returns: it must be quick, and must
	// copy what it keeps.
	Observe func(Observation)

	// Remote, if not nil, asks a worker for the ids of a prompt whose model has no
	// tokenizer here. The decision waits for it: it must return soon after ctx
	// ends, and keep nothing of the prompt.
	Remote func(ctx context.Context, worker netip.AddrPort, model string, p Prompt) ([]uint32, error)

	// Probe, if not nil, asks router groups what a request would find there, and returns
	// the answers that came in time. The decision waits for it: it must return soon, and
	// keep nothing of the question.
	Probe func(context.Context, Probe) []ProbeAnswer

	// Tell, if not nil, is told of each change of the slots of the router's own
	// requests, and of first tokens of others' that were noticed here. It must not
	// block nor call the router, and must copy what it keeps; see [Change].
	Tell func(Change)

	// TellSession, if not nil, is told of each use of a session of the router's own
	// requests that binds it, or goes where it is bound, and of its end, as Tell is.
	TellSession func(SessionBinding)

	// StrictModels refuses models without a card that makes exact prompts, as
	// if they did not exist.
	StrictModels bool

	// Seed makes ties and draws reproducible. Any value.
	Seed uint64

	// KeepDecisions is how many recent decisions can be asked for, each of some 270
	// bytes for each worker of its pool. Default 1,024; negative keeps none.
	KeepDecisions int

	// Now is the clock. Default [time.Now].
	Now func() time.Time

	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// QueueConfig says which requests wait for a worker, and in which order.
type QueueConfig struct {
	// Threshold is how many batches of pending prefill tokens each candidate
	// must have, more than this, for a request to wait instead of being sent to
	// one. nil means that no request waits; with the queue, requests for which all
	// workers are above a busy threshold wait, too.
	Threshold *float64
	// Policy is the order. Default [scorer.FCFS].
	Policy scorer.QueuePolicy
	// Limit is the largest number that waits, by pool. Default 10,000.
	Limit int
}

// SessionConfig says whether the requests of a session go to one worker. A session
// is bound to the worker of the first of its requests that got a first token, and
// stays so while it is used.
type SessionConfig struct {
	// TTL is how long a session stays bound without a request, from 1 s to
	// 31,536,000 s. 0 means that sessions do not matter.
	TTL time.Duration
	// Hard refuses a request whose session's worker cannot take it, instead of
	// binding the session to another one. A worker that leaves ends its sessions.
	Hard bool
	// Limit is the largest number of sessions remembered, by pool; the one unused
	// for the longest goes first. Default 100,000.
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
	c.Meter = cmp.Or[metric.Meter](c.Meter, noop.Meter{})
	q, s := &c.Queue, &c.Sessions
	q.Policy = cmp.Or(q.Policy, scorer.FCFS)
	threshold := *cmp.Or(q.Threshold, new(0.))
	for _, err := range []error{
		c.Scoring.Validate(), c.Thresholds.Validate(), q.Policy.Validate(),
		check("Mode", c.Mode, slices.Contains(Modes(), c.Mode), fmt.Sprintf("one of %v", Modes())),
		check("BlockSize", c.BlockSize, c.BlockSize >= 0 && c.BlockSize <= maxBlockSize, fmt.Sprintf("0 to %d tokens", maxBlockSize)),
		check("GuessTTL", c.GuessTTL, c.GuessTTL >= 0, "0 or more"),
		check("AvoidFailing", c.AvoidFailing, c.AvoidFailing >= 0 && c.AvoidFailing <= time.Hour, "0 to 1h"),
		check("DeviceRatio", c.DeviceRatio, c.DeviceRatio > 0 && !math.IsInf(c.DeviceRatio, 0), "a finite number above 0"),
		check("PrefillThroughput", c.PrefillThroughput, c.PrefillThroughput > 0 && !math.IsInf(c.PrefillThroughput, 0), "a finite number above 0"),
		check("OutputRate", c.OutputRate, c.OutputRate >= 0 && !math.IsInf(c.OutputRate, 0), "a finite number of tokens a second, 0 or more"),
		check("OutputRate", c.OutputRate, c.OutputRate == 0 || c.EstimateOutput, "0 without EstimateOutput"),
		check("Queue.Threshold", threshold, threshold >= 0 && !math.IsInf(threshold, 0), "a finite number, 0 or more"),
		check("Queue.Limit", q.Limit, q.Limit >= 0, "a number of requests"),
		check("Sessions.TTL", s.TTL, s.TTL == 0 || s.TTL >= minSessionTTL && s.TTL <= maxSessionTTL, fmt.Sprintf("0 or %v to %v", minSessionTTL, maxSessionTTL)),
		check("Sessions.Limit", s.Limit, s.Limit >= 0, "a number of sessions"),
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

const (
	minSessionTTL = time.Second
	maxSessionTTL = 31_536_000 * time.Second
	// maxBlockSize is far above any engine's; it guards against a typing error
	// that would make every prompt shorter than a block.
	maxBlockSize = 1 << 16
	// maxPools bounds what registrations can make us keep, and the values of
	// the label "model".
	maxPools = 1024
	// maxRanks bounds the ranks of one worker process.
	maxRanks = 1024
	// maxID bounds the ids of requests, which are kept for as long as they are in
	// flight.
	maxID = 1024
	// mostWeight is what a preferred taint weighs at most, either way: the effect is
	// the same from 20 on, and a sum of such weights is finite.
	mostWeight = 1e6
	// maxTaints bounds those of one worker, and those that a request names of a kind:
	// each candidate is held against them under the pool's lock.
	maxTaints = 256
)

// indexed says whether what workers hold can change a decision.
func (c *Config) indexed() bool { return c.Mode != KV || c.Rule != nil || c.Scoring.UsesOverlap() }
