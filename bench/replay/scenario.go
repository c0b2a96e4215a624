// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// Scenario describes a simulation. The zero value of each field means its default.
type Scenario struct {
	Trace *Trace // required
	Rule  Rule   // required

	// Speedup divides the times at which requests of an open loop are due.
	// Default 1.
	Speedup float64
	// Jitter is the most by which a request of an open loop comes later, by the seed; no
	// request passes the next one. It shows how far results depend on chance. Default 0.
	Jitter time.Duration

	Workers  int           // default 8
	Engine   scorer.Engine // of each worker; default [scorer.Dense32B]
	KVBlocks int           // capacity of a worker's cache, in blocks of the trace; default 2,000
	// Speeds divide the times of the engine, worker by worker. The default of each is 1.
	Speeds []float64

	// Replicas is the number of router replicas; each request goes to a random one. A
	// replica knows its own requests at once and those of the others after SyncDelay, or
	// never if that is negative. What replicas exchange is what a router exchanges in
	// production. Default 1.
	Replicas  int
	SyncDelay time.Duration
	// SyncLost is when the replicas begin to lose all messages, for SyncLostFor. A request
	// whose end was lost ends when the router gives it up: the replicas here do not repair
	// their lists as those of package replicas do. SyncLostFor 0 loses nothing.
	SyncLost, SyncLostFor time.Duration
	// Groups divides the workers, in order, into router groups. Each group has its own
	// router. Above them is a router that every SummaryAge (default 1 s) gets the load of
	// each group and a filter of each Stride-th block in its caches, as in production. The
	// default of Stride is 1, since blocks of traces are larger than those of engines.
	// Default 1, which is no groups. Not with Replicas.
	Groups     int
	SummaryAge time.Duration
	Stride     int

	EventDelay time.Duration // of the workers' cache events
	// EventLoss is the share of cache events that a replica does not get. The worker's next
	// event makes the replica forget the worker's blocks, as a gap does.
	EventLoss float64

	// Predict is how long the routers expect a prompt in the cache of the worker that they
	// sent it to, before its events arrive; 0 = not at all.
	Predict time.Duration
	// Approximate: the workers publish no events. The routers guess what workers have
	// cached, from the requests that they sent and the capacities of the caches.
	Approximate bool

	// PrefillWorkers is how many workers, the first ones, compute prompts only. The others
	// get the KV cache at Transfer tokens a second and make the output. 0 = each worker
	// does both. Not with Replicas, Groups, Changes, ColdStart or an oracle.
	PrefillWorkers int
	// Transfer is by default 190,000: 50 GB/s of a cache with 262 kB a token.
	Transfer float64

	// ForeignShare is the share of requests, 0 to below 1, that reach workers without a
	// router. All requests of a session do, or none. Each goes to a random one of the first
	// ForeignWorkers workers (default half: other clients know some workers only). Engines
	// report their load every ReportEvery, by default 2.5 s, unless the rule ignores it.
	// Not with Groups, PrefillWorkers, Changes or ColdStart.
	ForeignShare   float64
	ForeignWorkers int
	ReportEvery    time.Duration

	Changes []Change // of the workers
	// ColdStart is when new routers without any blocks and requests replace the routers;
	// 0 = never.
	ColdStart time.Duration

	Seed uint64

	// Timing measures the routers' decisions on the real clock. Only the fields
	// of [Result.Timing] depend on it.
	Timing bool

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

const (
	maxWorkers  = 4096
	maxReplicas = 64
	maxKVBlocks = 1 << 26
	maxJitter   = time.Hour
	maxStride   = 1 << 16
)

func (c Scenario) withDefaults() (Scenario, error) {
	if c.Speedup == 0 {
		c.Speedup = 1
	}
	if c.Workers == 0 {
		c.Workers = 8
	}
	if c.Engine == (scorer.Engine{}) {
		c.Engine = scorer.Dense32B()
	}
	if c.KVBlocks == 0 {
		c.KVBlocks = 2000
	}
	c.Replicas, c.Groups = cmp.Or(c.Replicas, 1), cmp.Or(c.Groups, 1)
	c.SummaryAge, c.Stride = cmp.Or(c.SummaryAge, time.Second), cmp.Or(c.Stride, 1)
	c.Transfer = cmp.Or(c.Transfer, 190_000)
	c.ForeignWorkers, c.ReportEvery = cmp.Or(c.ForeignWorkers, (c.Workers+1)/2), cmp.Or(c.ReportEvery, 2500*time.Millisecond)
	positive := func(v float64) bool { return v > 0 && !math.IsInf(v, 0) }
	switch {
	case c.Trace == nil || len(c.Trace.Requests) == 0:
		return c, fmt.Errorf("replay: no trace")
	case c.Jitter < 0 || c.Jitter > maxJitter:
		return c, fmt.Errorf("replay: jitter is %v, want 0 to %v", c.Jitter, maxJitter)
	case !positive(c.Speedup):
		return c, fmt.Errorf("replay: speedup is %v, want a number above 0", c.Speedup)
	case c.Workers < 1 || c.Workers > maxWorkers:
		return c, fmt.Errorf("replay: %d workers, want 1 to %d", c.Workers, maxWorkers)
	case c.KVBlocks < 1 || c.KVBlocks > maxKVBlocks:
		return c, fmt.Errorf("replay: %d KV blocks, want 1 to %d", c.KVBlocks, maxKVBlocks)
	case len(c.Speeds) > c.Workers:
		return c, fmt.Errorf("replay: %d speeds for %d workers", len(c.Speeds), c.Workers)
	case slices.ContainsFunc(c.Speeds, func(v float64) bool { return !positive(v) }):
		return c, fmt.Errorf("replay: speeds are %v, want numbers above 0", c.Speeds)
	case c.Replicas < 1 || c.Replicas > maxReplicas:
		return c, fmt.Errorf("replay: %d replicas, want 1 to %d", c.Replicas, maxReplicas)
	case c.Groups < 1 || c.Groups > c.Workers:
		return c, fmt.Errorf("replay: %d groups of %d workers", c.Groups, c.Workers)
	case c.Stride < 1 || c.Stride > maxStride:
		return c, fmt.Errorf("replay: a stride of %d blocks, want 1 to %d", c.Stride, maxStride)
	case c.Groups > 1 && c.Replicas > 1:
		return c, fmt.Errorf("replay: %d groups and %d replicas, want one of them 1", c.Groups, c.Replicas)
	case c.EventDelay < 0 || c.Predict < 0 || c.SummaryAge < 0 || c.ColdStart < 0:
		return c, fmt.Errorf("replay: event delay %v, prediction %v, summary age %v and cold start %v must not be negative", c.EventDelay, c.Predict, c.SummaryAge, c.ColdStart)
	case !(c.EventLoss >= 0 && c.EventLoss <= 1):
		return c, fmt.Errorf("replay: event loss is %v, want 0 to 1", c.EventLoss)
	}
	switch alone := c.Replicas == 1 && c.Groups == 1 && len(c.Changes) == 0 && c.ColdStart == 0 && !c.Rule.Oracle; {
	case c.SyncLost < 0 || c.SyncLostFor < 0:
		return c, fmt.Errorf("replay: sync lost at %v for %v, want no negative times", c.SyncLost, c.SyncLostFor)
	case c.PrefillWorkers < 0 || c.PrefillWorkers > 0 && c.PrefillWorkers >= c.Workers:
		return c, fmt.Errorf("replay: %d prefill workers of %d workers, want at least one of either kind", c.PrefillWorkers, c.Workers)
	case c.PrefillWorkers > 0 && !alone:
		return c, errors.New("replay: prefill workers go with one router, and workers that stay; there is no oracle for them")
	case !(c.ForeignShare >= 0 && c.ForeignShare < 1):
		return c, fmt.Errorf("replay: foreign share is %v, want 0 to below 1", c.ForeignShare)
	case c.ForeignWorkers < 1 || c.ForeignWorkers > c.Workers:
		return c, fmt.Errorf("replay: foreign requests go to %d workers, want 1 to %d", c.ForeignWorkers, c.Workers)
	case c.ReportEvery < time.Millisecond:
		return c, fmt.Errorf("replay: engines report every %v, want at least 1ms", c.ReportEvery)
	case c.ForeignShare > 0 && (c.Groups > 1 || c.PrefillWorkers > 0 || len(c.Changes) > 0 || c.ColdStart > 0):
		return c, errors.New("replay: foreign requests go with workers and routers that stay, and with neither groups nor prefill workers")
	case c.Approximate && c.Rule.Oracle:
		return c, errors.New("replay: the oracle knows all caches: not without events")
	case !positive(c.Transfer):
		return c, fmt.Errorf("replay: transfer is %v tokens a second, want a number above 0", c.Transfer)
	}
	for _, ch := range c.Changes {
		if ch.Worker < 0 || ch.Worker >= c.Workers || ch.At < 0 || !slices.Contains([]ChangeKind{Join, Leave, Restart}, ch.Kind) {
			return c, fmt.Errorf("replay: change %+v, want join, leave or restart of a worker from 0 to %d", ch, c.Workers-1)
		}
	}
	return c, nil
}
