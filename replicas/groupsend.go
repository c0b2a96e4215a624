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

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// GroupPublisher publishes the load and the cached blocks of a router group to routers
// above, and answers their probes. Each replica of a group has one; a router above follows
// one of them.
//
// # Invariants
//
//   - The messages of a pool are numbered within epochs. A full summary begins an epoch and
//     contains all cached blocks; deltas contain the blocks since then. So a router with all
//     messages of an epoch has the publisher's filter.
//   - A request for a full summary, and a probe, go to one replica of the group. A probe
//     books nothing.
//
// Removed blocks leave the filter with the next full summary. Reading the index takes at
// most a twentieth of the time: with a very large index deltas come less often.
type GroupPublisher struct {
	conf          GroupPublisherConfig
	nc            *nats.Conn
	link          link
	subject       string // of summaries
	events        meter.Counter
	sent, size    meter.Counter // messages, and their bytes
	probesHandled meter.Counter

	// The fields below belong to the goroutine that publishes summaries.
	pools  map[poolName]*publishedPool
	epoch  uint64   // the last one
	hashes []uint64 // reused memory
}

// GroupPublisherConfig configures a [GroupPublisher]. Group, ID and Router are required;
// the zero value of each other field selects its default.
type GroupPublisherConfig struct {
	Scope wire.Scope
	Group string
	// ID is the number of the replica. It differs after each start.
	ID     uint64
	Router *router.Router
	// Interval is the time between two summaries. Default 1 s. FullEvery is the time between
	// two full summaries. Default 30 s.
	Interval, FullEvery time.Duration
	// Stride is the number of blocks from one block in the filter to the next. Default 4.
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
	// fullAgain is the least time from one full summary to a requested one, in intervals.
	fullAgain = 2
	// deltaMost is the largest number of messages for a delta: a full summary is smaller than
	// more of them.
	deltaMost  = 4
	walkShare  = 20   // reading the index takes at most this fraction of the time
	probeInbox = 1024 // waiting probes: answers to more would be late
	probeQueue = "routers"
	// hashesKept is the largest capacity of reused memory for hashes.
	hashesKept = 1 << 20
)

// poolName identifies the summaries of a pool.
type poolName struct {
	model     string
	blockSize int
}

// publishedPool is the state of a pool's summaries.
type publishedPool struct {
	epoch, next uint64
	filter      *indexer.Filter // nil if a full summary is due
	full        time.Time       // the last full summary
	walk        time.Time       // the index is read again then
	requested   bool            // a router above requested a full summary
	current     bool            // the router has the pool
}

// NewGroupPublisher returns a publisher on a connection that the caller closes. It does
// nothing before [GroupPublisher.Run].
func NewGroupPublisher(nc *nats.Conn, conf GroupPublisherConfig) (*GroupPublisher, error) {
	if conf.Group == "" || conf.ID == 0 || conf.Router == nil {
		return nil, errors.New("router group: Group, ID and Router are required")
	}
	if len(conf.Group) > maxGroupName {
		return nil, fmt.Errorf("router group: the name has %d bytes, want at most %d", len(conf.Group), maxGroupName)
	}
	conf.Interval = cmp.Or(conf.Interval, groupInterval)
	if ms := conf.Interval.Milliseconds(); ms < minGroupInterval || ms > maxGroupInterval {
		return nil, fmt.Errorf("router group: the interval is %v, want %v to %v", conf.Interval,
			minGroupInterval*time.Millisecond, maxGroupInterval*time.Millisecond)
	}
	conf.FullEvery, conf.Stride = cmp.Or(conf.FullEvery, fullEvery), cmp.Or(conf.Stride, groupStride)
	if conf.Stride < 1 || conf.Stride > maxStride {
		return nil, fmt.Errorf("router group: the stride is %d, want 1 to %d blocks", conf.Stride, maxStride)
	}
	if conf.Now == nil {
		conf.Now = time.Now
	}
	m := meter.New(conf.Meter)
	return &GroupPublisher{
		conf: conf, nc: nc, link: linkOf(nc), subject: conf.Scope.Group(conf.Group, summaryTopic),
		pools: make(map[poolName]*publishedPool),
		events: m.Counter("kvroute.group.events", "{event}",
			"What happened to summaries of router groups, by kind.", "kind"),
		sent: m.Counter("kvroute.group.sent", "{message}",
			"Summaries sent for the own router group, by kind.", "kind"),
		size: m.Counter("kvroute.group.sent.size", "By", "Size of the summaries sent, by kind.", "kind"),
		probesHandled: m.Counter("kvroute.group.answers", "{probe}",
			"Probes of the own router group, by what was answered.", "outcome"),
	}, m.Err()
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
			g.summarize(g.conf.Now())
		}
	}
}

// requestFull makes a full summary of each pool due.
func (g *GroupPublisher) requestFull() {
	for _, p := range g.pools {
		p.requested = true
	}
}

// summarize publishes the due summary of each pool.
func (g *GroupPublisher) summarize(now time.Time) {
	if !g.link.connected() {
		clear(g.pools) // after a reconnection full summaries are due
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

// pool publishes the due summary of a pool.
func (g *GroupPublisher) pool(now time.Time, sum *router.Summary) {
	name := poolName{sum.Model, sum.BlockSize}
	p := g.pools[name]
	if p == nil {
		p = new(publishedPool)
		g.pools[name] = p
	}
	p.current = true
	m := newSummary(g.conf.Group, g.conf.ID, g.conf.Interval, g.conf.Stride, sum)
	switch {
	case sum.Silent:
		m.Stride = 0
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

// begin begins an epoch. Its number is larger than that of all earlier epochs, of other
// replicas too if their clocks agree.
func (g *GroupPublisher) begin(now time.Time, p *publishedPool) {
	g.epoch = max(g.epoch+1, uint64(max(0, now.UnixMilli()))<<20|rand.Uint64N(1<<20))
	p.epoch, p.next = g.epoch, 0
}

// full publishes all cached blocks.
func (g *GroupPublisher) full(now time.Time, p *publishedPool, m *summary) {
	began := time.Now()
	if _, err := g.walk(m, func(uint64) bool { return true }, math.MaxInt); err != nil {
		g.events.Count("overtaken") // the former filter stays until the index can be read
		if p.filter == nil {
			g.begin(now, p)
		}
		g.publish(p, m)
		return
	}
	n := len(g.hashes)
	p.filter = indexer.NewFilter(n + n/8 + 256) // with room for the blocks until the next full summary
	for _, h := range g.hashes {
		p.filter.Add(h)
	}
	if cap(g.hashes) > hashesKept {
		g.hashes = nil
	}
	g.begin(now, p)
	p.full, p.requested, p.walk = now, false, g.nextWalk(now, began)
	m.Kind = summaryFull
	for part, content := range filterParts(p.filter, g.link.room()-4096) {
		m.Filter, m.content = part, content
		g.publish(p, m)
	}
}

// delta publishes the cached blocks that are not in the filter.
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
		g.events.Count("overtaken") // the blocks found so far are cached nevertheless
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
	m.Kind = summaryDelta
	for part := range slices.Chunk(g.hashes, maxSummaryAdds) {
		if p.filter == nil {
			return // the message before could not be sent
		}
		m.content = events.AppendHashes(m.content[:0], part)
		g.publish(p, m)
	}
}

// walk collects the wanted checkpoints of the index in g.hashes. It stops above the largest
// number, and returns true.
func (g *GroupPublisher) walk(m *summary, want func(h uint64) bool, most int) (more bool, err error) {
	g.hashes = g.hashes[:0]
	for h, err := range g.conf.Router.Checkpoints(m.Model, m.BlockSize, g.conf.Stride) {
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

// nextWalk returns when the index may be read again after a reading that began then.
func (g *GroupPublisher) nextWalk(now, began time.Time) time.Time {
	return now.Add(max(g.conf.Interval, walkShare*time.Since(began)) - g.conf.Interval/4)
}

// publish sends a message. If it cannot be sent, a full summary is due, since its number is
// missing.
func (g *GroupPublisher) publish(p *publishedPool, m *summary) {
	m.Epoch, m.Seq = p.epoch, p.next
	p.next++
	data, err := encode(m, m.content)
	if err == nil {
		err = g.link.send(g.subject, "", data)
	}
	if err != nil {
		g.events.Count("unsent")
		p.filter = nil
		return
	}
	g.sent.Count(m.Kind)
	g.size.Add(len(data), m.Kind)
}

// answerProbes answers probes until ctx ends.
func (g *GroupPublisher) answerProbes(ctx context.Context, probes <-chan *nats.Msg) {
	for {
		select {
		case <-ctx.Done():
			return
		case m := <-probes:
			g.probesHandled.Count(g.answer(ctx, m))
		}
	}
}

// answer answers a probe.
func (g *GroupPublisher) answer(ctx context.Context, m *nats.Msg) (outcome string) {
	p, err := readProbe(m.Data)
	if err != nil || m.Reply == "" {
		return "bad"
	}
	outcome = "answered"
	a, err := g.conf.Router.Answer(ctx, p)
	if err != nil {
		a, outcome = router.ProbeAnswer{Busy: true}, "no_worker"
	} else if a.Busy {
		outcome = "busy"
	}
	a.Group = g.conf.Group
	data, err := encodeProbeAnswer(&a, &p)
	if err != nil || g.link.publish(m.Reply, "", data) != nil {
		return "unsent"
	}
	return outcome
}
