// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// Groups follows the summaries of router groups and passes them to the router.
//
// # Invariants
//
//   - Each known model of a group is one candidate.
//   - For each model, Groups follows one replica of the group, until that replica is silent
//     or one of its messages is missing. The known content of the group's caches is that of
//     one epoch of the replica: its full summary, and all deltas up to the first missing
//     message. Until all parts of a full summary have arrived, the former content counts.
//   - After a missing message, Groups requests a full summary at most every 2 s. It then
//     follows the replica that publishes one.
//   - The memory is bounded by the configured groups, 64 models of each, and for each model
//     the filter that counts and one that is arriving.
type Groups struct {
	conf   GroupsConfig
	nc     *nats.Conn
	link   link
	events meter.Counter

	mu sync.Mutex
	// mu guards the fields below.
	groups  map[string]*followedGroup
	unknown map[string]bool // unknown groups that are in the log
}

// GroupsConfig configures [Groups]. Set and Summary are required; the zero value of each
// other field selects its default.
type GroupsConfig struct {
	Scope  wire.Scope
	Groups []Group

	// Set takes all candidates whenever they change. After an error the former ones stay.
	// Summary takes a candidate's summary; see [router.Router.SetSummary].
	Set     func([]fleet.Record) error
	Summary func(id uint64, s router.Summary) (known bool)

	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log receives a line for each group whose summaries begin or cease to arrive. Default
	// none.
	Log *slog.Logger
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

const (
	maxGroups      = 1024
	maxGroupModels = 64
	maxUnknown     = 16
	groupAskEvery  = 2 * time.Second
	groupTick      = 250 * time.Millisecond
	groupInbox     = 8192
	groupForget    = 10 * time.Minute // of silence, until a model that is not configured is removed

	// Numbers of intervals without a summary.
	groupSilent = 2 // until another replica of the group is followed
	groupStale  = 3 // until the group counts as stale
	// groupClock is the number of intervals after which a change of a replica's clock no
	// longer counts as a delay; see [latency].
	groupClock = 5
)

// followedGroup is a configured group.
type followedGroup struct {
	Group
	feeds     map[string]*groupFeed // by model
	requested time.Time             // the last request for a full summary
	fresh     bool                  // as in the log
}

// groupFeed is the state of a group's summaries of one model.
type groupFeed struct {
	model     string
	blockSize int
	latest    time.Time // the last message of the followed replica
	interval  time.Duration

	router      uint64 // the followed replica
	epoch, next uint64 // and its next message
	broken      bool   // a message of the epoch is missing
	whole       bool   // the full summary of the epoch has arrived
	arrived     int    // parts of the full summary so far, and their bytes
	parts       []byte
	delay       latency
}

// NewGroups returns Groups on a connection that the caller closes. It sets the configured
// candidates; [Groups.Run] does the rest.
func NewGroups(nc *nats.Conn, conf GroupsConfig) (*Groups, error) {
	if conf.Set == nil || conf.Summary == nil {
		return nil, errors.New("router groups: the functions Set and Summary are required")
	}
	if conf.Now == nil {
		conf.Now = time.Now
	}
	conf.Log = meter.Log(conf.Log)
	g := &Groups{conf: conf, nc: nc, link: linkOf(nc), unknown: make(map[string]bool)}
	m := meter.New(conf.Meter)
	g.events = m.Counter("kvroute.group.events", "{event}",
		"What happened to summaries of router groups, by kind.", "kind")
	m.Gauge("kvroute.group.summary.age",
		"s", "Age of the last summary of a router group, by group and model.", g.observeAges)
	m.Gauge("kvroute.group.candidates", "{group}",
		"Router groups, one for each model of theirs, by state of their summaries.", g.observeStates)
	if err := m.Err(); err != nil {
		return nil, err
	}
	return g, g.Replace(conf.Groups)
}

// Replace replaces the configured groups. The state of groups that stay is kept. After an
// error nothing has changed.
func (g *Groups) Replace(groups []Group) error {
	if err := CheckGroups(groups); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	before := g.groups
	g.groups = make(map[string]*followedGroup, len(groups))
	for _, c := range groups {
		h := &followedGroup{Group: c, feeds: make(map[string]*groupFeed)}
		if old := before[c.Name]; old != nil {
			h.requested, h.fresh = old.requested, old.fresh
			maps.Copy(h.feeds, old.feeds)
			maps.DeleteFunc(h.feeds,
				func(model string, f *groupFeed) bool { return f.latest.IsZero() && !slices.Contains(c.Models, model) })
		}
		for _, model := range c.Models {
			if h.feeds[model] == nil {
				h.feeds[model] = &groupFeed{model: model, blockSize: c.BlockSize}
			}
		}
		g.groups[c.Name] = h
	}
	err := g.setLocked()
	if err != nil {
		g.groups = before
	}
	return err
}

// setLocked sets the candidates.
func (g *Groups) setLocked() error {
	var all []fleet.Record
	for _, h := range g.groups {
		for _, f := range h.feeds {
			all = append(all, h.candidate(f.model, f.blockSize))
		}
	}
	slices.SortFunc(all, func(a, b fleet.Record) int { return cmp.Compare(a.WorkerID, b.WorkerID) })
	return g.conf.Set(all)
}

// Run follows the groups until ctx ends.
func (g *Groups) Run(ctx context.Context) error {
	in := make(chan *nats.Msg, groupInbox)
	subs := subscriptions{nc: g.nc}
	defer subs.end()
	if err := subs.add(g.conf.Scope.Group("*", summaryTopic), "", in); err != nil {
		return err
	}
	tick := time.NewTicker(groupTick)
	defer tick.Stop()
	for g.tick(); ; {
		select {
		case <-ctx.Done():
			return nil
		case m := <-in:
			g.take(m.Data)
		case <-tick.C:
			g.tick()
		}
	}
}

// take handles a summary.
func (g *Groups) take(data []byte) {
	s, err := readSummary(data)
	if err != nil {
		g.events.Count("bad")
		return
	}
	now := g.conf.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	h := g.groups[s.Group]
	if h == nil {
		g.unknownLocked(s.Group)
		return
	}
	f := g.feedLocked(now, h, &s)
	if f == nil {
		return
	}
	outcome, filter := f.take(now, &s)
	g.events.Count(outcome)
	if f.broken && s.Stride > 0 {
		g.requestLocked(now, h)
	}
	if outcome == "old" || outcome == "repeated" {
		return
	}
	sum := s.routerSummary()
	sum.Taken = now.Add(-f.delay.of(now, uint64(s.TakenMS), groupClock*s.interval()) - router.GroupTransit)
	sum.Filter = filter
	if outcome == summaryDelta {
		sum.Added = readHashes(s.content)
	}
	if !g.conf.Summary(groupWorkerID(h.Name, s.Model), sum) {
		g.events.Count("refused")
	}
}

func (g *Groups) unknownLocked(group string) {
	g.events.Count("unknown_group")
	if !g.unknown[group] && len(g.unknown) < maxUnknown {
		g.unknown[group] = true
		g.conf.Log.Warn("a router group publishes that the configuration does not name", "group", clip(group))
	}
}

// feedLocked returns the feed of a summary, and makes it if the model or its block size is
// new. It returns nil if the summary does not count.
func (g *Groups) feedLocked(now time.Time, h *followedGroup, s *summary) *groupFeed {
	before := h.feeds[s.Model]
	switch {
	case before == nil && len(h.feeds) >= maxGroupModels:
		g.events.Count("too_many")
		return nil
	case before != nil && before.blockSize == s.BlockSize:
		return before
	case before != nil && before.blockSize != 0 && before.recent(now, groupSilent):
		g.events.Count("block_size")
		return nil
	}
	f := &groupFeed{model: s.Model, blockSize: s.BlockSize}
	h.feeds[s.Model] = f
	if err := g.setLocked(); err != nil {
		if h.feeds[s.Model] = before; before == nil {
			delete(h.feeds, s.Model)
		}
		g.events.Count("refused")
		g.conf.Log.Warn("a model of a router group is refused", "group", h.Name, "model", clip(s.Model), "err", err)
		return nil
	}
	g.conf.Log.Info("a router group serves a model", "group", h.Name, "model", f.model, "block_size", f.blockSize)
	return f
}

// recent reports whether the last message is at most this number of intervals old.
func (f *groupFeed) recent(now time.Time, intervals int) bool {
	return !f.latest.IsZero() && now.Sub(f.latest) <= time.Duration(intervals)*f.interval
}

// take handles a message of the feed. The outcome is the message's kind, or why its content
// does not count. The filter is set if a full summary is complete now.
func (f *groupFeed) take(now time.Time, s *summary) (outcome string, filter *indexer.Filter) {
	if s.Epoch != f.epoch || s.Router != f.router {
		if !f.follows(now, s) {
			return "old", nil
		}
		if f.router != s.Router {
			f.delay = latency{} // each replica has its own clock
		}
		f.router, f.epoch, f.next = s.Router, s.Epoch, 0
		f.broken, f.whole, f.parts, f.arrived = false, false, nil, 0
	}
	if s.Seq < f.next {
		return "repeated", nil
	}
	missing := s.Seq > f.next
	f.latest, f.interval, f.next = now, s.interval(), s.Seq+1
	if f.broken {
		return "behind_hole", nil
	}
	if !missing {
		if filter, f.broken = f.content(s); !f.broken {
			return s.Kind, filter
		}
	}
	f.broken, f.parts = true, nil
	return "hole", nil
}

// follows reports whether to follow a message of another epoch. A newer epoch of the same
// replica is followed, and any epoch if the followed replica is silent. If a message of the
// followed replica is missing, any epoch is followed from its first message on.
func (f *groupFeed) follows(now time.Time, s *summary) bool {
	switch {
	case !f.recent(now, groupSilent):
		return true
	case s.Router == f.router:
		return s.Epoch > f.epoch
	}
	return f.broken && s.Seq == 0
}

// content handles the content of the next message of an epoch. broken is true if the
// content does not follow the messages before.
func (f *groupFeed) content(s *summary) (filter *indexer.Filter, broken bool) {
	if s.Kind != summaryFull {
		return nil, !f.whole && (s.Kind == summaryDelta || s.Stride > 0)
	}
	p := &s.Filter
	if p.Part != f.arrived || f.whole || uint64(len(f.parts)+len(s.content)) > p.M/8 {
		return nil, true
	}
	f.arrived++
	if f.parts = append(f.parts, s.content...); f.arrived < p.Parts {
		return nil, false
	}
	filter, err := indexer.ParseFilter(p.M, p.K, p.N, f.parts)
	f.parts, f.whole = nil, err == nil
	return filter, err != nil
}

// requestLocked requests a full summary of a group.
func (g *Groups) requestLocked(now time.Time, h *followedGroup) {
	if now.Sub(h.requested) < groupAskEvery || !g.link.connected() {
		return
	}
	h.requested = now
	if g.link.publish(g.conf.Scope.Group(h.Name, summaryTopic, getTopic), "", nil) != nil {
		g.events.Count("unsent")
		return
	}
	g.events.Count("asked")
}

// tick requests missing summaries, logs groups that become fresh or stale, and removes
// models that have been silent for long.
func (g *Groups) tick() {
	now := g.conf.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, h := range g.groups {
		fresh, missing, models := false, len(h.feeds) == 0, len(h.feeds)
		for model, f := range h.feeds {
			missing = missing || f.broken || f.latest.IsZero()
			fresh = fresh || f.recent(now, groupStale)
			if now.Sub(f.latest) > groupForget && !slices.Contains(h.Models, model) {
				delete(h.feeds, model)
			}
		}
		if missing {
			g.requestLocked(now, h)
		}
		if fresh && !h.fresh {
			g.conf.Log.Info("summaries of a router group arrive", "group", h.Name)
		} else if !fresh && h.fresh {
			g.conf.Log.Warn("summaries of a router group no longer arrive; it gets requests only if no other group is available",
				"group", h.Name)
		}
		h.fresh = fresh
		if len(h.feeds) < models {
			if err := g.setLocked(); err != nil {
				g.conf.Log.Warn("router groups are refused", "err", err)
			}
		}
	}
}

func (g *Groups) observeAges(o meter.Observe) {
	now := g.conf.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, h := range g.groups {
		for _, f := range h.feeds {
			if !f.latest.IsZero() {
				o(now.Sub(f.latest).Seconds(), "group", h.Name, "model", f.model)
			}
		}
	}
}

func (g *Groups) observeStates(o meter.Observe) {
	now := g.conf.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	var fresh, stale, missing float64
	for _, h := range g.groups {
		if len(h.feeds) == 0 {
			missing++
		}
		for _, f := range h.feeds {
			switch {
			case f.recent(now, groupStale):
				fresh++
			case f.latest.IsZero():
				missing++
			default:
				stale++
			}
		}
	}
	o(fresh, "state", "fresh")
	o(stale, "state", "stale")
	o(missing, "state", "missing")
}
