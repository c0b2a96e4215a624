// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// Group is a router group as the configuration names it: workers behind a router of their
// own, which requests are sent to through that router's gateway.
type Group struct {
	Name    string `json:"name"`    // as its routers call it
	Address string `json:"address"` // ip:port of its gateway
	// Models are the base models that it serves, as far as they are to be known before it
	// says so itself; BlockSize the tokens in a block of their workers, and Members how
	// many workers it has.
	Models    []string `json:"models,omitempty"`
	BlockSize int      `json:"block_size,omitempty"`
	Members   int      `json:"members,omitempty"`
}

// candidate is what the group is to the router for a base model: a worker that reports no events.
func (c *Group) candidate(model string, blockSize int) fleet.Record {
	return fleet.Record{
		WorkerID: GroupWorkerID(c.Name, model), Name: c.Name, Group: c.Name, Members: c.Members,
		Address: c.Address, Models: []string{model}, BlockSize: blockSize,
		Events: fleet.Events{Transport: "none"}, Reorders: true,
	}
}

// GroupWorkerID is the id of the candidate that a group is for a base model. Both names may
// have slashes, so the length says where the first one ends.
func GroupWorkerID(group, model string) uint64 {
	return wire.WorkerID(fmt.Sprintf("%d/%s/%s", len(group), group, model))
}

// Groups listens to router groups, and passes their summaries to the router.
//
// # Invariants
//
//   - For each model of a group there is one candidate, from when the model is known.
//   - Of the replicas of a group one is followed for each model, as long as it is heard and
//     none of its messages is missing. What the group is known to hold is what that replica
//     published in an epoch: the full that began it, and all deltas up to the first missing
//     message. Until a full is whole the one before counts.
//   - After a missing message a full is requested, again and again, at most once in 2 s. The
//     replica that publishes it is followed from then on.
//   - Memory is bounded: so many groups as configured, so many models of each, and for each
//     model the filter that counts and one that is on its way.
type Groups struct {
	conf    GroupsConfig
	nc      *nats.Conn
	link    link
	metrics *groupMetrics

	mu sync.Mutex
	// mu guards the fields below.
	groups  map[string]*heardGroup
	unknown map[string]bool // unknown groups that the log names
}

// GroupsConfig says which groups there are. Set and Summary are required; the zero value
// of each other field means its default.
type GroupsConfig struct {
	Scope  wire.Scope
	Groups []Group

	// Set takes the candidates that the groups are, all of them, whenever they change;
	// after an error nothing is as if it had not been called. Summary takes what one of
	// them says, as [router.Router.SetSummary] does.
	Set     func([]fleet.Record) error
	Summary func(id uint64, s router.Summary) (known bool)

	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log takes a line for each group that is heard, or no more. Default none.
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
	// groupForget is how long a model is known that the configuration does not name and
	// the group does not speak of any more.
	groupForget = 10 * time.Minute
	// groupSilence is after how many intervals another replica of the group is followed.
	groupSilence = 2
	// A replica whose messages seem this late, one as late as the other, has set its clock:
	// messages that waited would catch up.
	groupClock    = time.Second
	groupClockFor = 3 // messages
)

// heardGroup is a group of the configuration.
type heardGroup struct {
	Group
	feeds map[string]*groupFeed // by model
	asked time.Time             // for all
	fresh bool                  // as the log has it
}

// groupFeed is what a group says of a model.
type groupFeed struct {
	model     string
	blockSize int
	fixed     bool // the configuration has it
	heard     time.Time
	interval  time.Duration

	router      uint64
	epoch, next uint64
	broken      bool // a message of the epoch is missing
	whole       bool // its full was heard
	stride      int
	parts       []byte // of the full, so far
	arrived     int
	late        latency
	lag         time.Duration // by which the last message was late
	lags        int           // messages in a row that were late, and no less than the one before
}

var errGroupless = errors.New("the functions Set and Summary are required")

// NewGroups returns a listener on a connection that stays its caller's. It does nothing
// before [Groups.Run] but to set the candidates that the configuration names.
func NewGroups(nc *nats.Conn, conf GroupsConfig) (*Groups, error) {
	g, err := newGroups(conf, linkOf(nc))
	if err == nil {
		g.nc = nc
	}
	return g, err
}

func newGroups(conf GroupsConfig, to link) (*Groups, error) {
	if conf.Set == nil || conf.Summary == nil {
		return nil, fmt.Errorf("router groups: %w", errGroupless)
	}
	if conf.Now == nil {
		conf.Now = time.Now
	}
	conf.Log = cmp.Or(conf.Log, slog.New(slog.DiscardHandler))
	conf.Meter = cmp.Or[metric.Meter](conf.Meter, noop.Meter{})
	g := &Groups{conf: conf, link: to, unknown: make(map[string]bool)}
	var err error
	if g.metrics, err = newGroupMetrics(conf.Meter); err != nil {
		return nil, err
	}
	if err := g.metrics.observe(conf.Meter, g.ages); err != nil {
		return nil, err
	}
	return g, g.Replace(conf.Groups)
}

// CheckGroups refuses a list of groups that makes no sense. The error says which of them.
func CheckGroups(groups []Group) error {
	if len(groups) > maxGroups {
		return fmt.Errorf("%d router groups, want at most %d", len(groups), maxGroups)
	}
	names := make(map[string]bool, len(groups))
	for i := range groups {
		c := &groups[i]
		switch {
		case c.Name == "" || len(c.Name) > maxGroupName:
			return fmt.Errorf("router group %d: name has %d bytes, want 1 to %d", i, len(c.Name), maxGroupName)
		case names[c.Name]:
			return fmt.Errorf("router group %q: the name is there twice", clip(c.Name))
		case len(c.Models) > maxGroupModels || slices.Contains(c.Models, ""):
			return fmt.Errorf("router group %q: models is a list of %d, want at most %d names", clip(c.Name), len(c.Models), maxGroupModels)
		case c.Members < 0:
			return fmt.Errorf("router group %q: members is %d, want 0 or more", clip(c.Name), c.Members)
		}
		candidate := c.candidate("any", c.BlockSize)
		if _, err := candidate.Info(fleet.Networks{}); err != nil {
			return fmt.Errorf("router group: %w", err)
		}
		names[c.Name] = true
	}
	return nil
}

// Replace replaces the groups of the configuration. What is known of those that stay
// stays. After an error nothing has changed.
func (g *Groups) Replace(groups []Group) error {
	if err := CheckGroups(groups); err != nil {
		return err
	}
	next := make(map[string]*heardGroup, len(groups))
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, c := range groups {
		h := &heardGroup{Group: c, feeds: make(map[string]*groupFeed)}
		if was := g.groups[c.Name]; was != nil {
			h.asked, h.fresh = was.asked, was.fresh
			for model, f := range was.feeds {
				if !f.fixed || slices.Contains(c.Models, model) {
					kept := *f
					kept.fixed = slices.Contains(c.Models, model)
					h.feeds[model] = &kept
				}
			}
		}
		for _, model := range c.Models {
			if h.feeds[model] == nil {
				h.feeds[model] = &groupFeed{model: model, blockSize: c.BlockSize, fixed: true}
			}
		}
		next[c.Name] = h
	}
	was := g.groups
	g.groups = next
	if err := g.setLocked(); err != nil {
		g.groups = was
		return err
	}
	return nil
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

// Run listens until ctx ends.
func (g *Groups) Run(ctx context.Context) error {
	in := make(chan *nats.Msg, groupInbox)
	subs := subscriptions{nc: g.nc}
	defer subs.end()
	if err := subs.add(g.conf.Scope.Group("*", summaryTopic), "", in); err != nil {
		return err
	}
	tick := time.NewTicker(groupTick)
	defer tick.Stop()
	for g.tick(); ; { //nolint:contextcheck // counters need none
		select {
		case <-ctx.Done():
			return nil
		case m := <-in:
			g.take(m.Data) //nolint:contextcheck // counters need none
		case <-tick.C:
			g.tick() //nolint:contextcheck // counters need none
		}
	}
}

// take takes a message.
func (g *Groups) take(data []byte) {
	s, err := readSummary(data)
	if err != nil {
		g.metrics.count(groupBad)
		return
	}
	now := g.conf.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	h := g.groups[s.group]
	if h == nil {
		g.metrics.count(groupUnknown)
		if !g.unknown[s.group] && len(g.unknown) < maxUnknown {
			g.unknown[s.group] = true
			g.conf.Log.Warn("a router group speaks that the configuration does not name", "group", clip(s.group))
		}
		return
	}
	f := h.feeds[s.model]
	switch {
	case f == nil && len(h.feeds) >= maxGroupModels:
		g.metrics.count(groupTooMany)
		return
	case f == nil:
		f = &groupFeed{model: s.model, blockSize: s.blockSize}
		h.feeds[s.model] = f
		if !g.changedLocked(h, f) {
			delete(h.feeds, s.model)
			return
		}
	case f.blockSize != s.blockSize && f.blockSize != 0 && f.heardWithin(now):
		g.metrics.count(groupBlockSize)
		return
	case f.blockSize != s.blockSize:
		was := *f
		*f = groupFeed{model: s.model, blockSize: s.blockSize, fixed: was.fixed}
		if !g.changedLocked(h, f) {
			*f = was
			return
		}
	}
	outcome, filter := f.take(now, &s)
	g.metrics.count(outcome)
	if f.broken && s.stride > 0 {
		g.ask(now, h)
	}
	if outcome == groupOld || outcome == groupRepeated {
		return
	}
	sum := s.load
	sum.Model, sum.BlockSize, sum.Interval, sum.Stride = s.model, s.blockSize, s.interval, s.stride
	sum.Taken = f.takenAt(now, &s, g.metrics)
	if sum.Filter = filter; outcome == groupDelta {
		sum.Added = s.hashes()
	}
	if s.stride == 0 {
		sum.Silent = true
	}
	if !g.conf.Summary(GroupWorkerID(h.Name, s.model), sum) {
		g.metrics.count(groupRefused)
	}
}

// changedLocked sets the candidates after one has changed.
func (g *Groups) changedLocked(h *heardGroup, f *groupFeed) bool {
	if err := g.setLocked(); err != nil {
		g.metrics.count(groupRefused)
		g.conf.Log.Warn("a model of a router group is refused", "group", h.Name, "model", clip(f.model), "err", err)
		return false
	}
	g.conf.Log.Info("a router group serves a model", "group", h.Name, "model", f.model, "block_size", f.blockSize)
	return true
}

// heardWithin reports whether a message of the feed came within two intervals.
func (f *groupFeed) heardWithin(now time.Time) bool {
	return !f.heard.IsZero() && now.Sub(f.heard) <= groupSilence*f.interval
}

// take puts a message where it belongs in its epoch. It returns what it was, and a filter
// that has become whole by it.
func (f *groupFeed) take(now time.Time, s *summary) (outcome string, filter *indexer.Filter) {
	switch {
	case s.epoch == f.epoch && s.router == f.router:
	case f.follows(now, s):
		if f.router != s.router {
			f.late, f.lag, f.lags = latency{}, 0, 0 // another clock
		}
		f.router, f.epoch, f.next = s.router, s.epoch, 0
		f.broken, f.whole, f.parts, f.arrived = false, false, nil, 0
	default:
		return groupOld, nil
	}
	if s.seq < f.next {
		return groupRepeated, nil
	}
	f.heard, f.interval = now, s.interval
	if s.seq > f.next && !f.broken {
		outcome = groupHole
		f.broken, f.parts = true, nil
	}
	f.next = s.seq + 1
	if f.broken {
		return cmp.Or(outcome, groupBehindHole), nil
	}
	switch s.kind {
	case summaryFull:
		return f.full(s)
	case summaryDelta:
		if !f.whole {
			f.broken = true // its full did not come first
			return groupHole, nil
		}
		return groupDelta, nil
	}
	if !f.whole && s.stride > 0 {
		f.broken = true
		return groupHole, nil
	}
	return groupLoad, nil
}

// follows says whether a message of another epoch is followed: of the same replica if the
// epoch is newer; of any replica if the one that was followed is silent; and if a message
// of that one is missing, from the first message of an epoch on.
func (f *groupFeed) follows(now time.Time, s *summary) bool {
	switch {
	case !f.heardWithin(now):
		return true
	case s.router == f.router:
		return s.epoch > f.epoch
	}
	return f.broken && s.seq == 0
}

// full takes a part of a full, which come in their order.
func (f *groupFeed) full(s *summary) (outcome string, filter *indexer.Filter) {
	p := &s.filter
	if p.part != f.arrived || f.whole || uint64(len(f.parts)+len(p.data)) > p.m/8 {
		f.broken, f.parts = true, nil
		return groupHole, nil
	}
	f.arrived++
	f.parts = append(f.parts, p.data...)
	if f.arrived < p.parts {
		return groupFull, nil
	}
	filter, err := indexer.ParseFilter(p.m, p.k, p.n, f.parts)
	if f.parts = nil; err != nil {
		f.broken = true
		return groupBad, nil
	}
	f.whole, f.stride = true, s.stride
	return groupFull, filter
}

// takenAt is when a summary was taken, by our clock.
func (f *groupFeed) takenAt(now time.Time, s *summary, m *groupMetrics) time.Time {
	at := uint64(max(0, s.taken.UnixMilli()))
	late := f.late.of(now, at)
	if late > groupClock && late >= f.lag-groupClock/10 {
		f.lags++
	} else {
		f.lags = 0
	}
	if f.lag = late; f.lags >= groupClockFor {
		m.count(groupClockSet)
		f.late, f.lag, f.lags = latency{}, 0, 0
		late = f.late.of(now, at)
	}
	return now.Add(-late - router.GroupTransit)
}

// ask requests a full of a group.
func (g *Groups) ask(now time.Time, h *heardGroup) {
	if now.Sub(h.asked) < groupAskEvery || !g.link.connected() {
		return
	}
	h.asked = now
	if g.link.publish(g.conf.Scope.Group(h.Name, summaryTopic, getTopic), "", nil) != nil {
		g.metrics.count(groupUnsent)
		return
	}
	g.metrics.count(groupAsked)
}

// tick does what time alone brings.
func (g *Groups) tick() {
	now := g.conf.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, h := range g.groups {
		fresh, unknown, forgot := false, len(h.feeds) == 0, false
		for model, f := range h.feeds {
			unknown = unknown || f.broken || f.heard.IsZero()
			fresh = fresh || f.fresh(now)
			if !f.fixed && now.Sub(f.heard) > groupForget {
				delete(h.feeds, model)
				forgot = true
			}
		}
		if unknown {
			g.ask(now, h)
		}
		if fresh != h.fresh {
			if h.fresh = fresh; fresh {
				g.conf.Log.Info("a router group is heard", "group", h.Name)
			} else {
				g.conf.Log.Warn("a router group is not heard any more; it is used only where no other is", "group", h.Name)
			}
		}
		if forgot {
			if err := g.setLocked(); err != nil {
				g.conf.Log.Warn("router groups are refused", "err", err)
			}
		}
	}
}

// fresh reports whether a message of the feed came within three intervals.
func (f *groupFeed) fresh(now time.Time) bool {
	return !f.heard.IsZero() && now.Sub(f.heard) <= 3*f.interval
}

// groupAge is how old what a group said of a model is; below 0 it said nothing.
type groupAge struct {
	group, model string
	age          time.Duration
	fresh        bool
}

// ages returns how old everything is.
func (g *Groups) ages() (all []groupAge) {
	now := g.conf.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, h := range g.groups {
		for _, f := range h.feeds {
			a := groupAge{group: h.Name, model: f.model, age: -1, fresh: f.fresh(now)}
			if !f.heard.IsZero() {
				a.age = now.Sub(f.heard)
			}
			all = append(all, a)
		}
		if len(h.feeds) == 0 {
			all = append(all, groupAge{group: h.Name, age: -1})
		}
	}
	return all
}
