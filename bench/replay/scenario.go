// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// Scenario describes a simulation. A setting that is 0 has its default.
type Scenario struct {
	Trace *Trace // required
	Rule  Rule   // required

	Speedup float64 // divides the times at which requests of an open loop are due; default 1
	// With Jitter no request passes the next one. It shows how far results depend on chance.
	Jitter time.Duration `yaml:"jitter" want:"0s to 1h" help:"<time> up to which each request of an open loop comes later, by the seed"`

	Workers int           `yaml:"workers" default:"8" want:"1 to 4096" help:"<number> of workers"`
	Engine  scorer.Engine // of each worker; default [scorer.Dense32B]
	// SharedAttention has a step read each distinct block once for all decoding requests. Otherwise it
	// reads a block once for each request that has it, as most kernels do.
	SharedAttention bool `yaml:"shared-prefix-attention" help:"engines read the keys and values of a shared prefix once a step for all requests; otherwise once for each request"`

	// Hybrid gives the engines' model side groups, which share the KVBlocks: one with a sliding window, or three with
	// states. The blocks of states have as many tokens as the setting says, a multiple of those of the trace. Not with
	// an oracle or PrefillWorkers.
	Hybrid string `yaml:"hybrid" help:"<kind=tokens>: window=1024 gives the model a group of layers with a sliding window, state=640 three groups of recurrent layers with states in blocks of so many tokens. A made-up workload then has blocks of 16 tokens, or of a state. Empty: full attention only"`

	KVBlocks int       `yaml:"kv-blocks" default:"2000" want:"1 to 67108864" help:"<blocks> of 512 tokens in a worker's cache"`
	Speeds   []float64 // divide the times of the engine, worker by worker; the default of each is 1

	// Each request goes to a random replica. A replica knows its own requests at once and those
	// of the others after SyncDelay, or never if that is negative. What replicas exchange is
	// what a router exchanges in production.
	Replicas  int           `yaml:"replicas" default:"1" want:"1 to 64" help:"<number> of router replicas"`
	SyncDelay time.Duration `yaml:"sync-delay" help:"<time> until replicas hear of each other's requests"`
	// SyncLost is when the replicas begin to lose all messages, for SyncLostFor. A request
	// whose end was lost ends when the router gives it up: the replicas here do not repair
	// their lists as those of package replicas do. SyncLostFor 0 loses nothing.
	SyncLost, SyncLostFor time.Duration
	// Groups divides the workers, in order, into router groups. Each group has its own
	// router. Above them is a router that every SummaryAge gets the load of each group and a
	// filter of each Stride-th block in its caches, as in production. Blocks of traces are larger
	// than those of engines, so the default of Stride is 1. Not with Replicas.
	Groups     int           `yaml:"groups" default:"1" want:"1 to 4096" help:"<number> of router groups below an upper router"`
	SummaryAge time.Duration `yaml:"summary-age" default:"1s" want:"more than 0s" help:"<time> between two summaries of a group"`
	Stride     int           `yaml:"summary-stride" default:"1" want:"1 to 65536" help:"<blocks> from one to the next that a summary names"`

	// Without events the routers guess what workers have cached, from the requests that they
	// sent and the capacities of the caches.
	Approximate bool          `yaml:"no-kv-events" help:"workers publish no cache events: routers guess"`
	EventDelay  time.Duration `yaml:"event-delay" want:"0s or more" help:"<time> until routers hear of cache events"`
	// The event after a lost one makes the replica forget the worker's blocks, as a gap does.
	EventLoss float64       `yaml:"event-loss" want:"0 to 1" help:"<share> of cache events that are lost"`
	Predict   time.Duration `yaml:"predict" want:"0s or more" help:"<time> for which routers expect a prompt in the cache of the worker that they sent it to; 0 = not at all"`

	// The first PrefillWorkers workers have the role prefill, the others the role decode. Not with
	// Groups, Changes, ForeignShare or an oracle.
	PrefillWorkers int `yaml:"prefill-workers" want:"0 to 4095" help:"<number> of workers, the first ones, that only compute prompts, while the others decode; 0 = each worker does both"`
	// KVBytesPerToken is the size of a token's keys and values with 2 bytes a number: layers x KV
	// heads x head size x 4. The default is that of Qwen3-32B, 64 x 8 x 128 x 4.
	KVBytesPerToken int     `yaml:"kv-bytes-per-token" want:"0 to 1e9" help:"<bytes> of a token's keys and values in a transfer: layers x KV heads x head size x 4. 0 is the engine's model: 131072 for 8b, 262144 for 32b, 327680 for 70b"`
	TransferRate    float64 `yaml:"transfer-rate" default:"50" want:"more than 0, at most 1e6" help:"<GB/s> at which a worker sends or receives blocks: 50 is the line rate of a 400 Gbit/s adapter"`
	// A worker copies blocks that another worker has, as the router names the source. Not with Groups, PrefillWorkers,
	// Approximate or an oracle.
	Pull          bool          `yaml:"pull" help:"workers copy parts of prompts from the host memory of others, if that is expected to be faster than to compute them. Host memory has the same blocks as the cache; kv-bytes-per-token and transfer-rate count"`
	PullDelay     time.Duration `yaml:"pull-delay" default:"27ms" want:"0s to 1h" help:"<time> that a copy takes apart from its tokens"`
	PullMinTokens int           `yaml:"pull-min-tokens" default:"2048" want:"more than 0" help:"least <tokens> to copy"`
	PullLimit     int           `yaml:"pull-limit" default:"4" want:"more than 0" help:"largest <number> of requests before their first token that copy from one worker"`
	PullCost      bool          `yaml:"pull-cost" help:"the cost of each worker knows that it can copy; kvroute serve has no such cost"`
	// The next four are settings of `kvroute serve`. Rules of ConditionalDisaggregation that need a
	// threshold are left out: these workers have no thresholds.
	ConditionalDisaggregation string  `yaml:"conditional-disaggregation" default:"never" want:"never or isl_bounding" help:"never or isl_bounding: no prefill leg for requests with a short or mostly cached prompt"`
	DisaggregationTokens      int     `yaml:"disaggregation-tokens" default:"2048" want:"more than 0" help:"<tokens> to compute from which a prompt is not short, for isl_bounding"`
	DisaggregationFraction    float64 `yaml:"disaggregation-fraction" default:"0.7" want:"more than 0, at most 1" help:"<share> of tokens to compute from which a prompt is not mostly cached, for isl_bounding"`
	DecodeOverlapScoreCredit  float64 `yaml:"decode-overlap-score-credit" want:"0 to 1e6" help:"<blocks> that a cached block of a decode worker is worth in its choice; 0 chooses it by load alone"`

	// The queue of each router, with the settings of `kvroute serve`. The router above router groups
	// has no queue. Not with ColdStart.
	RouterQueueThreshold *float64      `yaml:"router-queue-threshold" want:"0 or more" help:"<batches> of pending prefill on every worker above which requests wait; absent: requests never wait"`
	RouterQueuePolicy    string        `yaml:"router-queue-policy" default:"fcfs" want:"fcfs, lcfs or wspt" help:"fcfs, lcfs or wspt: which waiting request is next"`
	RouterQueueLimit     int           `yaml:"router-queue-limit" default:"10000" want:"more than 0" help:"<number> of requests that may wait, for each router"`
	QueueWait            time.Duration `yaml:"queue-wait" default:"9.5s" want:"more than 0s" help:"<time> that a request may wait before the router refuses it"`
	// PriorityShare of the requests, drawn by the seed, have the priorities StrictPriority and Priority
	// instead of those of the trace.
	PriorityShare  float64 `yaml:"priority-share" want:"0 to 1" help:"<share> of requests that have the priorities of strict-priority and priority, instead of those of a trace"`
	StrictPriority int     `yaml:"strict-priority" want:"0 to 2147483647" help:"strict <priority> of these requests: they come before all with a lower one"`
	Priority       float64 `yaml:"priority" want:"0 to 2147483647" help:"<seconds> by which these requests count as earlier (lcfs: later); for wspt, what is added to their weight of 1"`

	// Foreign requests reach workers without a router: all requests of a session do, or none.
	// Each goes to a random one of the first ForeignWorkers workers, since other clients know some
	// workers only. Not with Groups, PrefillWorkers, Changes or ColdStart.
	ForeignShare   float64       `yaml:"foreign-share" want:"0 to 1" help:"<share> below 1 of requests that reach workers without the routers; compare a rule with itself and reports=none"`
	ForeignWorkers int           `yaml:"foreign-workers" want:"0 to 4096" help:"<number> of the workers, the first ones, that these requests go to (default half of them)"`
	ReportEvery    time.Duration `yaml:"report-every" default:"2.5s" want:"1ms or more" help:"<time> between two reports of an engine's load"`

	Changes   []Change      // of the workers
	ColdStart time.Duration `yaml:"cold-start" want:"0s or more" help:"<time> at which new routers, which know nothing, replace the routers; 0 = never"`

	Seed uint64 `yaml:"seed" help:"first <seed>"`
	// Only the fields of [Result.Timing] depend on Timing.
	Timing bool `yaml:"timing" help:"measure what decisions cost here"`

	everyStep   bool                               // tests: plan each step alone
	slotChanged func(router.Change)                // tests: called with each change of a slot if there is one replica
	decided     func(req int32, d router.Decision) // tests: called with each decision
	holdout     float64                            // tests: HoldoutShare of the routers, by the sessions of the trace
	edit        func(*router.Config)               // tests: changes the configurations of the routers
}

// Change is a change of a worker. The requests that were on a worker that
// leaves or restarts are routed again at once.
type Change struct {
	At     time.Duration
	Worker int // from 0; a worker whose first change is Join is absent before
	Kind   ChangeKind
}

// ChangeKind is a kind of change of a worker.
type ChangeKind string

// The changes of a worker.
const (
	Join    ChangeKind = "join"
	Leave   ChangeKind = "leave"
	Restart ChangeKind = "restart" // with an empty cache, at once
)

const (
	maxWorkers = 4096
	kvBytes32B = 262_144
)

func (c Scenario) withDefaults() (Scenario, error) {
	c.Speedup = cmp.Or(c.Speedup, 1)
	c.Engine = cmp.Or(c.Engine, scorer.Dense32B())
	if err := bench.Complete(&c); err != nil {
		return c, err
	}
	c.ForeignWorkers = cmp.Or(c.ForeignWorkers, (c.Workers+1)/2)
	c.KVBytesPerToken = cmp.Or(c.KVBytesPerToken, kvBytes32B)
	positive := func(v float64) bool { return v > 0 && !math.IsInf(v, 0) }
	stable := len(c.Changes) == 0 && c.ColdStart == 0
	switch {
	case c.Trace == nil || len(c.Trace.Requests) == 0:
		return c, errors.New("no trace")
	case !positive(c.Speedup):
		return c, fmt.Errorf("speedup is %v, want a number above 0", c.Speedup)
	case len(c.Speeds) > c.Workers:
		return c, fmt.Errorf("%d speeds for %d workers", len(c.Speeds), c.Workers)
	case slices.ContainsFunc(c.Speeds, func(v float64) bool { return !positive(v) }):
		return c, fmt.Errorf("speeds are %v, want numbers above 0", c.Speeds)
	case c.Groups > c.Workers:
		return c, fmt.Errorf("%d groups of %d workers", c.Groups, c.Workers)
	case c.Groups > 1 && c.Replicas > 1:
		return c, fmt.Errorf("%d groups and %d replicas, want one of them 1", c.Groups, c.Replicas)
	case c.SyncLost < 0 || c.SyncLostFor < 0:
		return c, fmt.Errorf("sync lost at %v for %v, want no negative times", c.SyncLost, c.SyncLostFor)
	case c.ForeignShare == 1:
		return c, errors.New("foreign share is 1, want 0 to below 1")
	case c.ForeignWorkers > c.Workers:
		return c, fmt.Errorf("foreign requests go to %d workers, want 1 to %d", c.ForeignWorkers, c.Workers)
	case c.ForeignShare > 0 && (c.Groups > 1 || c.PrefillWorkers > 0 || !stable):
		return c, errors.New("foreign requests go with workers and routers that stay, and with neither groups nor prefill workers")
	case c.Hybrid != "" && (c.Rule.Oracle || c.PrefillWorkers > 0):
		return c, errors.New("hybrid goes with neither an oracle nor prefill workers")
	case c.Approximate && c.Rule.Oracle:
		return c, errors.New("the oracle knows all caches: not without events")
	}
	if err := c.checkQueue(); err != nil {
		return c, err
	}
	if err := c.checkPull(); err != nil {
		return c, err
	}
	for _, ch := range c.Changes {
		if ch.Worker < 0 || ch.Worker >= c.Workers || ch.At < 0 || !slices.Contains([]ChangeKind{Join, Leave, Restart}, ch.Kind) {
			return c, fmt.Errorf("change %+v, want join, leave or restart of a worker from 0 to %d", ch, c.Workers-1)
		}
	}
	return c, c.checkSplit()
}
