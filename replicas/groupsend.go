// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// GroupPublisher publishes for a router group what its workers do and hold, to routers
// above, and answers what a request would find there. Every replica of a group has one;
// a router above follows one of them.
//
// # Invariants
//
//   - Messages of a pool are numbered within epochs. A full begins an epoch and has all
//     that the group holds; a delta has what came since. So a router with all messages of
//     an epoch has the filter of the publisher.
//   - A request for a full, and a probe, go to one replica of the group. A probe books
//     nothing.
//
// Blocks that were removed leave the filter with the next full. A walk over the index
// takes at most a twentieth of the time: with a very large index deltas come less often.
type GroupPublisher struct {
	conf    GroupPublisherConfig
	nc      *nats.Conn
	link    link
	metrics *groupMetrics
	subject string // of summaries

	// The fields below belong to the goroutine that publishes summaries.
	pools   map[poolName]*publishedPool
	epoch   uint64   // the last one
	hashes  []uint64 // memory that is used again
	message []byte   // the same
}

// GroupPublisherConfig says what is published. Group, ID and Router are required; the zero
// value of each other field means its default.
type GroupPublisherConfig struct {
	Scope wire.Scope
	Group string
	// ID is the replica's own number, another one at each start.
	ID     uint64
	Router *router.Router
	// Interval is the time between two summaries. Default 1 s. FullEvery is the time between
	// two fulls. Default 30 s.
	Interval, FullEvery time.Duration
	// Stride is the distance in blocks between two that a summary has. Default 4.
	Stride int

	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

const (
	groupInterval = time.Second
	fullEvery     = 30 * time.Second
	groupStride   = 4
	// fullAgain is the least time between two fulls, in intervals, if one is requested.
	fullAgain = 2
	// deltaMost is how many messages a delta takes at most: a full has more in less.
	deltaMost = 4
	// walkShare bounds the time for walks over the index: one part of so many.
	walkShare  = 20
	probeInbox = 1024 // probes that wait: more would be answered too late
	probeQueue = "routers"
)

// poolName is the subject of a summary.
type poolName struct {
	model     string
	blockSize int
}

// publishedPool is what was published of a pool.
type publishedPool struct {
	epoch, next uint64
	filter      *indexer.Filter // nil if a full is due
	full, walk  time.Time       // when the last full was published, and when the next delta may be
	requested   bool            // a router above requested a full
	current     bool            // the router has the pool
}

var errGroupPublisher = errors.New("Group, ID and Router are required")

// NewGroupPublisher returns a publisher on a connection that stays its caller's. It does
// nothing before [GroupPublisher.Run].
func NewGroupPublisher(nc *nats.Conn, conf GroupPublisherConfig) (*GroupPublisher, error) {
	p, err := newGroupPublisher(conf, linkOf(nc))
	if err == nil {
		p.nc = nc
	}
	return p, err
}

func newGroupPublisher(conf GroupPublisherConfig, to link) (*GroupPublisher, error) {
	if conf.Group == "" || conf.ID == 0 || conf.Router == nil {
		return nil, fmt.Errorf("router group: %w", errGroupPublisher)
	}
	if len(conf.Group) > maxGroupName {
		return nil, fmt.Errorf("router group: the name has %d bytes, want at most %d", len(conf.Group), maxGroupName)
	}
	conf.Interval = cmp.Or(conf.Interval, groupInterval)
	if ms := conf.Interval.Milliseconds(); ms < minGroupInterval || ms > maxGroupInterval {
		return nil, fmt.Errorf("router group: the interval is %v, want %v to %v", conf.Interval, minGroupInterval*time.Millisecond, maxGroupInterval*time.Millisecond)
	}
	conf.FullEvery, conf.Stride = cmp.Or(conf.FullEvery, fullEvery), cmp.Or(conf.Stride, groupStride)
	if conf.Stride < 1 || conf.Stride > maxStride {
		return nil, fmt.Errorf("router group: the stride is %d, want 1 to %d blocks", conf.Stride, maxStride)
	}
	if conf.Now == nil {
		conf.Now = time.Now
	}
	m, err := newGroupMetrics(cmp.Or[metric.Meter](conf.Meter, noop.Meter{}))
	if err != nil {
		return nil, err
	}
	return &GroupPublisher{
		conf: conf, link: to, metrics: m,
		subject: conf.Scope.Group(conf.Group, summaryTopic), pools: make(map[poolName]*publishedPool),
	}, nil
}

// Run publishes until ctx ends.
func (g *GroupPublisher) Run(ctx context.Context) error {
	requested, probes := make(chan *nats.Msg, 16), make(chan *nats.Msg, probeInbox)
	subs := subscriptions{nc: g.nc}
	defer subs.end()
	if err := subs.add(g.conf.Scope.Group(g.conf.Group, summaryTopic, getTopic), probeQueue, requested); err != nil {
		return err
	}
	if err := subs.add(g.conf.Scope.Group(g.conf.Group, probeTopic), probeQueue, probes); err != nil {
		return err
	}
	var answering sync.WaitGroup
	answering.Go(func() { g.answerProbes(ctx, probes) })
	defer answering.Wait()
	tick := time.NewTicker(g.conf.Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-requested:
			g.requestFull()
		case <-tick.C:
			g.summarize(g.conf.Now()) //nolint:contextcheck // counters need none
		}
	}
}

// requestFull makes a full due for all pools.
func (g *GroupPublisher) requestFull() {
	for _, p := range g.pools {
		p.requested = true
	}
}

// summarize publishes what is due of all pools.
func (g *GroupPublisher) summarize(now time.Time) {
	if !g.link.connected() {
		clear(g.pools) // with a connection it begins with a full
		return
	}
	for _, p := range g.pools {
		p.current = false
	}
	for _, m := range g.conf.Router.Models() {
		for _, sum := range g.conf.Router.Summarize(m.Model) {
			g.pool(now, &sum)
		}
	}
	maps.DeleteFunc(g.pools, func(_ poolName, p *publishedPool) bool { return !p.current })
}

// pool publishes what is due of a pool.
func (g *GroupPublisher) pool(now time.Time, sum *router.Summary) {
	name := poolName{sum.Model, sum.BlockSize}
	p := g.pools[name]
	if p == nil {
		p = new(publishedPool)
		g.pools[name] = p
	}
	p.current = true
	m := summary{
		group: g.conf.Group, model: sum.Model, blockSize: sum.BlockSize, router: g.conf.ID,
		kind: summaryLoad, stride: g.conf.Stride, taken: sum.Taken, interval: g.conf.Interval, load: *sum,
	}
	switch {
	case sum.Silent:
		m.stride = 0
		if p.epoch == 0 || p.filter != nil {
			p.filter = nil
			g.begin(now, p)
		}
		g.publish(p, &m)
	case p.filter == nil || now.Sub(p.full) >= g.conf.FullEvery || p.requested && now.Sub(p.full) >= fullAgain*g.conf.Interval:
		g.full(now, p, &m)
	case !now.Before(p.walk):
		g.delta(now, p, &m)
	default:
		g.publish(p, &m)
	}
}

// begin begins an epoch. Its number is above all before it, those of other replicas
// included, as far as clocks agree.
func (g *GroupPublisher) begin(now time.Time, p *publishedPool) {
	g.epoch = max(g.epoch+1, uint64(max(0, now.UnixMilli()))<<20|rand.Uint64N(1<<20))
	p.epoch, p.next = g.epoch, 0
}

// full publishes all that the workers hold.
func (g *GroupPublisher) full(now time.Time, p *publishedPool, m *summary) {
	began := time.Now()
	if _, err := g.walk(m, func(uint64) bool { return true }, math.MaxInt); err != nil {
		// Until the index can be read, the old filter stays.
		g.metrics.count(groupOvertaken)
		if p.filter == nil {
			g.begin(now, p)
		}
		g.publish(p, m)
		return
	}
	n := len(g.hashes)
	p.filter = indexer.NewFilter(n + n/8 + 256) // with room for what comes until the next full
	for _, h := range g.hashes {
		p.filter.Add(h)
	}
	const most = 1 << 20
	if cap(g.hashes) > most {
		g.hashes = nil // it is as large as the index, and needed only now and then
	}
	g.begin(now, p)
	p.full, p.requested, p.walk = now, false, g.nextWalk(now, began)
	m.kind = summaryFull
	for _, part := range filterParts(p.filter, g.link.room()-4096) {
		m.filter = part
		g.publish(p, m)
	}
}

// delta publishes what the workers hold that the filter does not have.
func (g *GroupPublisher) delta(now time.Time, p *publishedPool, m *summary) {
	began := time.Now()
	add := func(h uint64) bool {
		if p.filter.Has(h) {
			return false
		}
		p.filter.Add(h)
		return true
	}
	many, err := g.walk(m, add, deltaMost*maxSummaryAdds)
	if err != nil {
		g.metrics.count(groupOvertaken) // what was found is true all the same
	}
	if many || p.filter.Overfull() {
		g.full(now, p, m)
		return
	}
	p.walk = g.nextWalk(now, began)
	if len(g.hashes) == 0 {
		g.publish(p, m)
		return
	}
	m.kind = summaryDelta
	for part := range slices.Chunk(g.hashes, maxSummaryAdds) {
		if p.filter == nil {
			return // a message could not be sent
		}
		m.added = appendHashes(m.added[:0], part)
		g.publish(p, m)
	}
}

// walk collects in g.hashes the checkpoints of the index that are wanted. It stops at most
// so many, and returns true if there are more.
func (g *GroupPublisher) walk(m *summary, want func(h uint64) bool, most int) (more bool, err error) {
	g.hashes = g.hashes[:0]
	for h, err := range g.conf.Router.Checkpoints(m.model, m.blockSize, g.conf.Stride) {
		if err != nil {
			return false, err
		}
		if !want(h) {
			continue
		}
		if g.hashes = append(g.hashes, h); len(g.hashes) > most {
			return true, nil
		}
	}
	return false, nil
}

// nextWalk is when the next walk may begin after one that began then.
func (g *GroupPublisher) nextWalk(now, began time.Time) time.Time {
	return now.Add(max(g.conf.Interval, walkShare*time.Since(began)) - g.conf.Interval/4)
}

// publish sends a message. One that cannot be sent leaves a gap, so a full is due.
func (g *GroupPublisher) publish(p *publishedPool, m *summary) {
	m.epoch, m.seq = p.epoch, p.next
	p.next++
	g.message = appendSummary(g.message[:0], m)
	if g.link.send(g.subject, "", g.message) != nil {
		g.metrics.count(groupUnsent)
		p.filter = nil
		return
	}
	g.metrics.sent(m.kind, len(g.message))
}

// answerProbes answers probes until ctx ends.
func (g *GroupPublisher) answerProbes(ctx context.Context, probes <-chan *nats.Msg) {
	var b []byte
	for {
		select {
		case <-ctx.Done():
			return
		case m := <-probes:
			var outcome string
			if b, outcome = g.answer(ctx, b[:0], m); outcome != groupBadProbe && g.link.publish(m.Reply, "", b) != nil {
				outcome = groupUnsent
			}
			g.metrics.answered(ctx, outcome)
		}
	}
}

func (g *GroupPublisher) answer(ctx context.Context, b []byte, m *nats.Msg) (answer []byte, outcome string) {
	p, err := readProbe(m.Data)
	if err != nil || m.Reply == "" {
		return b, groupBadProbe
	}
	outcome = groupAnswered
	a, err := g.conf.Router.Answer(ctx, p)
	if err != nil {
		a, outcome = router.ProbeAnswer{Busy: true}, groupNoWorker
	} else if a.Busy {
		outcome = groupBusy
	}
	a.Group = g.conf.Group
	return appendProbeAnswer(b, &a, &p), outcome
}
