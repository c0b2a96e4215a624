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

	Workers  int           `yaml:"workers" default:"8" want:"1 to 4096" help:"<number> of workers"`
	Engine   scorer.Engine // of each worker; default [scorer.Dense32B]
	KVBlocks int           `yaml:"kv-blocks" default:"2000" want:"1 to 67108864" help:"<blocks> of 512 tokens in a worker's cache"`
	Speeds   []float64     // divide the times of the engine, worker by worker; the default of each is 1

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

	// The first PrefillWorkers workers compute prompts only. The others get the KV cache at
	// Transfer tokens a second and make the output. The default of Transfer is 50 GB/s of a cache
	// with 262 kB a token. Not with Replicas, Groups, Changes, ColdStart or an oracle.
	PrefillWorkers int     `yaml:"prefill-workers" want:"0 to 4095" help:"<number> of workers that compute prompts only, while the others decode; 0 = each does both"`
	Transfer       float64 `yaml:"transfer" default:"190000" want:"more than 0, at most 1e12" help:"<tokens> a second that go from prefill to decode"`

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

	everyStep bool                               // tests: plan each step alone
	decided   func(req int32, d router.Decision) // tests: called with each decision
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

const maxWorkers = 4096

func (c Scenario) withDefaults() (Scenario, error) {
	c.Speedup = cmp.Or(c.Speedup, 1)
	c.Engine = cmp.Or(c.Engine, scorer.Dense32B())
	if err := bench.Complete(&c); err != nil {
		return c, fmt.Errorf("replay: %w", err)
	}
	c.ForeignWorkers = cmp.Or(c.ForeignWorkers, (c.Workers+1)/2)
	positive := func(v float64) bool { return v > 0 && !math.IsInf(v, 0) }
	stable := len(c.Changes) == 0 && c.ColdStart == 0
	switch {
	case c.Trace == nil || len(c.Trace.Requests) == 0:
		return c, errors.New("replay: no trace")
	case !positive(c.Speedup):
		return c, fmt.Errorf("replay: speedup is %v, want a number above 0", c.Speedup)
	case len(c.Speeds) > c.Workers:
		return c, fmt.Errorf("replay: %d speeds for %d workers", len(c.Speeds), c.Workers)
	case slices.ContainsFunc(c.Speeds, func(v float64) bool { return !positive(v) }):
		return c, fmt.Errorf("replay: speeds are %v, want numbers above 0", c.Speeds)
	case c.Groups > c.Workers:
		return c, fmt.Errorf("replay: %d groups of %d workers", c.Groups, c.Workers)
	case c.Groups > 1 && c.Replicas > 1:
		return c, fmt.Errorf("replay: %d groups and %d replicas, want one of them 1", c.Groups, c.Replicas)
	case c.SyncLost < 0 || c.SyncLostFor < 0:
		return c, fmt.Errorf("replay: sync lost at %v for %v, want no negative times", c.SyncLost, c.SyncLostFor)
	case c.PrefillWorkers > 0 && c.PrefillWorkers >= c.Workers:
		return c, fmt.Errorf("replay: %d prefill workers of %d workers, want at least one of either kind", c.PrefillWorkers, c.Workers)
	case c.PrefillWorkers > 0 && (c.Replicas > 1 || c.Groups > 1 || !stable || c.Rule.Oracle):
		return c, errors.New("replay: prefill workers go with one router, and workers that stay; there is no oracle for them")
	case c.ForeignShare == 1:
		return c, errors.New("replay: foreign share is 1, want 0 to below 1")
	case c.ForeignWorkers > c.Workers:
		return c, fmt.Errorf("replay: foreign requests go to %d workers, want 1 to %d", c.ForeignWorkers, c.Workers)
	case c.ForeignShare > 0 && (c.Groups > 1 || c.PrefillWorkers > 0 || !stable):
		return c, errors.New("replay: foreign requests go with workers and routers that stay, and with neither groups nor prefill workers")
	case c.Approximate && c.Rule.Oracle:
		return c, errors.New("replay: the oracle knows all caches: not without events")
	}
	for _, ch := range c.Changes {
		if ch.Worker < 0 || ch.Worker >= c.Workers || ch.At < 0 || !slices.Contains([]ChangeKind{Join, Leave, Restart}, ch.Kind) {
			return c, fmt.Errorf("replay: change %+v, want join, leave or restart of a worker from 0 to %d", ch, c.Workers-1)
		}
	}
	return c, nil
}
