// SPDX-License-Identifier: Apache-2.0

// Package fleet keeps the set of workers and their health.
//
// Workers come from three sources:
//
//   - the list in the configuration;
//   - the records of NVIDIA Dynamo's discovery ([Dynamo]), which are treated like such a list;
//   - a registry in a NATS key-value bucket: each worker puts its record there and sends
//     heartbeats, or has a router do both over HTTP ([Registry.Register]).
//
// A worker of any source may ask to be probed ([Prober]). A configured worker without probes is
// always healthy. [Table] does the bookkeeping, [Registry] feeds it from NATS in a router
// replica, and [Announcer] is the worker's side.
//
// # Guarantees
//
// The table reports a worker when its record arrives or changes, and when its health changes.
// Health follows from the age of the last record, heartbeat or answered probe ([Ages]):
//
//   - A worker that is not configured is removed after a time without record or heartbeat.
//   - When a registry starts, a worker without a recent record is degraded until its next
//     heartbeat.
//   - A worker that came back from unhealthy three times within a minute stays degraded until it
//     was healthy for 30 s.
//   - An unchanged record counts as a heartbeat.
//   - A record is refused if nothing can be routed by it, or if its key is not its worker's id.
//
// Each id belongs to one worker, and its last record counts, so a worker may move. If two
// processes claim one id, all replicas use the last record. A warning is reported when the
// address returns to an earlier one within 45 s.
//
// If two workers have the same address and first rank, the one that started earlier is unhealthy
// at once, until it sends a heartbeat or another record. For workers behind one frontend this
// takes 2.5 s. Records without a start time are not compared.
//
// While NATS is down no worker becomes unhealthy for lack of heartbeats: ages count from the
// moment NATS is back.
//
// # Concurrency
//
// The methods of [Registry] and [Announcer] may be called by any number of
// goroutines; a [Table] belongs to one at a time.
package fleet

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
)

// maxWorkers bounds what registrations can make us keep.
const maxWorkers = 1 << 16

// Ages say how old a worker's last sign of life is when its health changes. The zero
// value of each field means its default. Of a worker of the configuration that is probed
// less often than every 2.5 s, ages count from when its next answer is overdue by that.
type Ages struct {
	Degraded  time.Duration // older: gets requests while no worker is healthy. Default 7.5s
	Unhealthy time.Duration // older: gets none. Default 15s
	Expired   time.Duration // so old: the same, for those who look. Default 30s
}

// MinAge is how short an age may be: workers send heartbeats every 2.5 s.
const MinAge = 3 * time.Second

// Check refuses ages that no worker could keep to, or that are not in order.
func (a Ages) Check() error {
	if a = a.withDefaults(); a.Degraded < MinAge || a.Unhealthy < a.Degraded || a.Expired < a.Unhealthy || a.Expired > time.Hour {
		return fmt.Errorf("fleet: ages are %v, %v and %v, want at least %v, none below the one before, at most 1h", a.Degraded, a.Unhealthy, a.Expired, MinAge)
	}
	return nil
}

func (a Ages) withDefaults() Ages {
	return Ages{
		Degraded:  cmp.Or(a.Degraded, 7500*time.Millisecond),
		Unhealthy: cmp.Or(a.Unhealthy, 15*time.Second),
		Expired:   cmp.Or(a.Expired, 30*time.Second),
	}
}

// forget is when a worker that is not of the configuration is forgotten: not before its
// record has gone from the registry, where others find it.
func (a Ages) forget() time.Duration { return max(recordTTL, a.Expired+a.Expired/2) }

// A worker flaps if it came back so often within so long; then it has to be well
// for a while before it is healthy.
const (
	flapReturns = 3
	flapWithin  = time.Minute
	flapRest    = 30 * time.Second
)

// Table is the set of workers known. The zero value is not ready; make one with
// [NewTable].
type Table struct {
	ages     Ages
	networks reach.Networks
	set      func(router.WorkerInfo)
	remove   func(id uint64)
	events   func(Record, router.WorkerInfo) // nil if nobody wants to know
	load     func(router.WorkerInfo, Load)   // the same
	prefixes func(id uint64, p map[string]int)
	flapped  func()
	claimed  func(now router.WorkerInfo, was netip.AddrPort) // an id is back at an address that it just left
	followed func(old, by router.WorkerInfo)                 // another worker has started at one's address
	workers  map[uint64]*member
	latest   map[place]uint64 // of those registered there, who started last
}

// place is where the first rank of a worker is.
type place struct {
	address netip.AddrPort
	rank    uint32
}

func (m *member) place() place { return place{m.info.Address, m.info.DPStart} }

// member is a worker of the set.
type member struct {
	info   router.WorkerInfo
	record Record    // as it was put
	static bool      // from the configuration
	probed bool      // has to answer probes
	seen   time.Time // last sign of life
	kept   time.Time // when its record or a heartbeat came last
	put    time.Time // when we put its record, if we did

	slack    time.Duration // by which answers to its probes are further apart than heartbeats
	followed bool          // another one has started at its address, and it has been silent since

	before netip.AddrPort // where it was until moved
	moved  time.Time

	returns [flapReturns]time.Time // when it came back the last times, the newest last
	rests   time.Time              // until when it is degraded for that
}

// Load is what a worker last said of its work.
type Load struct {
	Running       int     `json:"batch_size"`
	Waiting       int     `json:"waiting"`
	KVUtilization float64 `json:"kv_cache_util"` // 0 to 1
	KVUsedBlocks  int     `json:"kv_used_blocks"`
}

// NewTable returns an empty table. Whenever a worker is to be told of, it calls
// set or remove, before the method that brought the news returns. Networks are those that
// workers may have addresses in. Ages are the default ones.
func NewTable(networks reach.Networks, set func(router.WorkerInfo), remove func(id uint64)) *Table {
	return &Table{
		ages: Ages{}.withDefaults(), networks: networks, set: set, remove: remove,
		workers: make(map[uint64]*member), latest: make(map[place]uint64),
	}
}

// SetStatic replaces the workers of the configuration. If one of the records is
// wrong nothing changes, and the error says which and why. One that is to be probed
// counts as seen now.
func (t *Table) SetStatic(now time.Time, records []Record) error {
	next := make(map[uint64]*member, len(records))
	byID := make(map[uint64]Record, len(records))
	for i := range records {
		info, err := records[i].Info(t.networks)
		if err != nil {
			return err
		}
		info.EventsUnsure = records[i].Events == (Events{}) && info.Group == "" && info.BlockSize > 0
		byID[info.ID] = records[i]
		next[info.ID] = &member{info: info, record: records[i], static: true}
		if p := records[i].Health; p != nil {
			next[info.ID].probed, next[info.ID].slack = true, slack(p)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(t.workers)) {
		if t.workers[id].static && next[id] == nil {
			t.drop(id)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(next)) {
		m, old := next[id], t.workers[id]
		m.seen = now
		if old != nil && !old.static {
			t.leave(old)
		}
		if old != nil && old.static && old.probed && m.probed && old.info.Address == m.info.Address {
			// It is not well because its entry was read again.
			m.seen, m.returns, m.rests, m.info.Health = old.seen, old.returns, old.rests, old.info.Health
		}
		t.workers[id] = m
		t.set(m.info)
		t.tellEvents(byID[id], next[id].info)
	}
	return nil
}

// Put takes a record of the registry, put at the time now, which may lie a while back. A
// static worker of the same id goes first: the record is only a sign of life that it does
// not need.
func (t *Table) Put(now time.Time, r Record) error {
	info, err := r.Registered(t.networks)
	if err != nil {
		return err
	}
	m := t.workers[info.ID]
	if m != nil && m.static {
		return nil
	}
	if m != nil && reflect.DeepEqual(m.record, r) {
		// It may only have been read again after NATS was away: who was followed stays so.
		m.seen, m.kept = later(m.seen, now), later(m.kept, now)
		t.judge(now, m)
		return nil
	}
	if m == nil {
		if len(t.workers) >= maxWorkers {
			return fmt.Errorf("fleet: worker %q (%d) would be one above the limit of %d", clip(info.Name), info.ID, maxWorkers)
		}
		m = &member{}
		t.workers[info.ID] = m
	}
	info.Health = m.info.Health
	if was := m.info.Address; was.IsValid() && was != info.Address {
		if info.Address == m.before && now.Sub(m.moved) < t.ages.forget() && t.claimed != nil {
			t.claimed(info, was)
		}
		m.before, m.moved = was, now
	}
	begins := m.info.Address != info.Address || m.info.DPStart != info.DPStart || m.record.StartedMS != r.StartedMS
	if begins {
		t.leave(m)
	}
	m.info, m.record, m.probed, m.followed = info, r, r.Health != nil, false
	m.seen, m.kept = later(m.seen, now), later(m.kept, now)
	if begins {
		t.begin(now, m)
	}
	m.info.Health = t.health(now, m)
	t.set(m.info)
	t.tellEvents(r, m.info)
	return nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// begin compares a worker that comes to an address with the one that came there last: one
// of them may be what the other was before it started anew under another name.
func (t *Table) begin(now time.Time, m *member) {
	other := t.workers[t.latest[m.place()]]
	if other != nil && other != m && m.record.StartedMS > 0 && other.record.StartedMS > m.record.StartedMS {
		t.follow(m, other)
		return
	}
	t.latest[m.place()] = m.info.ID
	if other != nil && other != m && other.record.StartedMS > 0 && other.record.StartedMS < m.record.StartedMS {
		t.follow(other, m)
		t.judge(now, other)
	}
}

func (t *Table) follow(m, by *member) {
	if m.followed = true; t.followed != nil {
		t.followed(m.info, by.info)
	}
}

// leave takes the news that a registered worker is not at its address any more.
func (t *Table) leave(m *member) {
	if t.latest[m.place()] == m.info.ID {
		delete(t.latest, m.place())
	}
}

// slack is by how much longer than between heartbeats a probed worker may be silent.
func slack(p *Probe) time.Duration {
	every := p.every(probeEvery)
	return max(0, every+every/16-heartbeatEvery) // due asks a little early or late
}

func (t *Table) tellEvents(r Record, info router.WorkerInfo) {
	if t.events != nil {
		t.events(r, info)
	}
}

// Delete takes the news that a worker left the registry.
func (t *Table) Delete(id uint64) {
	if m := t.workers[id]; m != nil && !m.static {
		t.drop(id)
	}
}

// Heartbeat takes a sign of life. It returns false if the worker is not registered.
func (t *Table) Heartbeat(now time.Time, h *Heartbeat) bool {
	m := t.workers[h.WorkerID]
	if m == nil {
		return false
	}
	if m.seen, m.kept, m.followed = now, now, false; t.load != nil {
		t.load(m.info, h.Load)
	}
	if t.prefixes != nil && h.CachedPrefixes != nil && m.record.Events.Transport == "heartbeat" {
		t.prefixes(h.WorkerID, h.CachedPrefixes)
	}
	t.judge(now, m)
	return true
}

// Alive takes the news that a worker answered a probe. Where another one has started
// since, that one did.
func (t *Table) Alive(now time.Time, id uint64) {
	if m := t.workers[id]; m != nil && !m.followed {
		m.seen = now
		t.judge(now, m)
	}
}

// Tick looks for workers that have been silent for too long. While the bus is away
// only those are looked at that are probed and do not need it.
func (t *Table) Tick(now time.Time, away bool) {
	for _, id := range slices.Sorted(maps.Keys(t.workers)) {
		m := t.workers[id]
		switch {
		case m.static && !m.probed, away && !m.static:
		case !m.static && now.Sub(m.kept) >= t.ages.forget():
			t.drop(id)
		default:
			t.judge(now, m)
		}
	}
}

// Refresh counts a silence that was not the workers' fault as over: everyone
// registered was last seen at now.
func (t *Table) Refresh(now time.Time) {
	for _, m := range t.workers {
		if !m.static {
			m.seen, m.kept = now, now
		}
	}
}

func (t *Table) drop(id uint64) {
	if m := t.workers[id]; !m.static {
		t.leave(m)
	}
	delete(t.workers, id)
	t.remove(id)
}

// judge tells of m if its health has changed.
func (t *Table) judge(now time.Time, m *member) {
	if health := t.health(now, m); health != m.info.Health {
		m.info.Health = health
		t.set(m.info)
	}
}

// health works out how a worker is, and remembers when it comes back.
func (t *Table) health(now time.Time, m *member) router.Health {
	if m.static && !m.probed {
		return router.Healthy
	}
	switch age := now.Sub(m.seen) - m.slack; {
	case age >= t.ages.Expired:
		return router.Expired
	case age > t.ages.Unhealthy || m.followed:
		return router.Unhealthy
	case age > t.ages.Degraded:
		return router.Degraded
	}
	if m.info.Health == router.Unhealthy || m.info.Health == router.Expired {
		copy(m.returns[:], m.returns[1:])
		m.returns[flapReturns-1] = now
		if !m.returns[0].IsZero() && now.Sub(m.returns[0]) <= flapWithin {
			m.rests = now.Add(flapRest)
			if t.flapped != nil {
				t.flapped()
			}
		}
	}
	if now.Before(m.rests) {
		return router.Degraded
	}
	return router.Healthy
}
