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
// replica, and [Announcer] is the worker's side. [DirectWorkers] passes workers to the router, with
// the data of engines that are read directly.
//
// # Guarantees
//
// The table reports a worker when its record arrives or changes, and when its health changes.
// Health follows from the age of the last record, heartbeat or answered probe ([Ages]):
//
//   - A worker that is not configured is removed after a time without record or heartbeat, unless it answered a
//     request in the last minute.
//   - An answered request is a sign of life, as an answered probe is.
//   - A worker that is probed is starting until it answers a probe or a request, and again after a restart. If its
//     probe is answered with 503, it is unhealthy at once, until a probe succeeds.
//   - The probes of a worker change its health at most once a second.
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

// maxWorkers bounds the memory that registrations can use.
const maxWorkers = 1 << 16

// Ages are the ages of a worker's last sign of life at which its health changes. The zero
// value of a field selects its default. If a worker of the configuration is probed less
// often than every 2.5 s, its ages count from the time when the next answer is 2.5 s late.
type Ages struct {
	Degraded  time.Duration // older: it gets requests while no worker is healthy. Default 7.5s
	Unhealthy time.Duration // older: it gets requests only if no worker is better. Default 15s
	Expired   time.Duration // this old: shown as expired. Default 30s
}

// MinAge is the least age: workers send heartbeats every 2.5 s.
const MinAge = 3 * time.Second

// Check returns an error for ages that are too short or not in order.
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

// removal is the age at which a registered worker is removed: not before its record
// expires, since other processes still find it there.
func (a Ages) removal() time.Duration { return max(recordTTL, a.Expired+a.Expired/2) }

// A worker that came back flapReturns times within flapWithin is degraded for flapRest.
const (
	flapReturns = 3
	flapWithin  = time.Minute
	flapRest    = 30 * time.Second
)

const (
	// answerCounts is the time after an answered request during which a registered worker is not removed, although
	// its record expired.
	answerCounts = time.Minute
	// flipEvery is the time between two changes of the result of a worker's probes.
	flipEvery = time.Second
	// missedCounts is the number of missed probes in a row after which a worker has a HealthCause, though it is healthy.
	missedCounts = 2
)

// Table is the set of known workers. [NewRegistry] makes one.
type Table struct {
	ages       Ages
	networks   reach.Networks
	room       func(router.WorkerInfo) error
	set        func(router.WorkerInfo)
	remove     func(id uint64)
	events     func(Record, router.WorkerInfo)
	load       func(router.WorkerInfo, Load)
	flapped    func()
	claimed    func(now router.WorkerInfo, before netip.AddrPort) // an id returned to the address that it had left
	followed   func(old, by router.WorkerInfo)                    // a worker started at the address of another one
	traffic    func(id uint64) Traffic
	silent     func(*member)       // a worker became unhealthy
	lost       func(*Left, *Probe) // a worker is removed because of its silence; the probe is its own
	left       []*Left             // the last workers that were removed, the oldest first
	unresolved []Left              // workers whose names have no address
	workers    map[uint64]*member
	latest     map[place]uint64 // the registered worker that started last, by place
}

// place is the address and number of a worker's first rank.
type place struct {
	address netip.AddrPort
	rank    uint32
}

func (m *member) place() place { return place{m.info.Address, m.info.DPStart} }

// member is a worker of the table.
type member struct {
	info   router.WorkerInfo
	record Record
	static bool      // from the configuration
	probed bool      // its health depends on answers to probes
	seen   time.Time // last sign of life
	kept   time.Time // last record or heartbeat
	good   bool      // a probe or a request was answered since the worker was added or restarted
	proved time.Time // last answered probe; without probes, last record or heartbeat
	probe  Probed    // result of the last probe
	cause  string    // of a result that is not ProbeAnswered, in words
	missed int       // probes in a row that it did not answer
	// answered is the time of the last answered request that the router reported.
	answered time.Time
	put      time.Time // when this process put its record; zero = never

	slack    time.Duration // the interval of its probes minus that of heartbeats
	followed bool          // another worker has started at its address, and it was silent since
	refused  bool          // its address refused a connection, and it was silent since
	sign     lastSign      // its state at its last sign of life

	flipped time.Time      // when the result of its probes changed last
	before  netip.AddrPort // its address until moved
	moved   time.Time

	returns [flapReturns]time.Time // its last returns from unhealthy, the newest last
	rest    time.Time              // it is degraded until then, because it flaps
}

// Load is the load in a worker's last report.
type Load struct {
	Running       int     `json:"batch_size"`
	Waiting       int     `json:"waiting"`
	KVUtilization float64 `json:"kv_cache_util"` // 0 to 1
	KVUsedBlocks  int     `json:"kv_used_blocks"`
}

// newTable returns an empty table for a registry, which sets its other functions. Its methods
// call the functions of the configuration before they return.
func newTable(conf *RegistryConfig) *Table {
	return &Table{
		ages: conf.Ages.withDefaults(), networks: conf.Networks,
		room: conf.Room, set: conf.Set, remove: conf.Remove, events: conf.Events, load: conf.Load, traffic: conf.Traffic,
		workers: make(map[uint64]*member), latest: make(map[place]uint64),
	}
}

// SetStatic replaces the workers of the configuration. After an error nothing has changed.
// A new worker with probes counts as seen now.
func (t *Table) SetStatic(now time.Time, records []Record) error {
	next := make(map[uint64]*member, len(records))
	for i := range records {
		if old := t.workers[records[i].ID()]; old.isPod(&records[i]) {
			next[old.info.ID] = old
			continue
		}
		info, err := records[i].Info(t.networks)
		if err != nil {
			return err
		}
		info.EventsUnsure = records[i].Events == (Events{}) && info.Group == "" && info.BlockSize > 0
		next[info.ID] = &member{info: info, record: records[i], static: true}
		if p := records[i].Health; p.isSent() {
			next[info.ID].probed, next[info.ID].slack = true, slack(p)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(t.workers)) {
		if t.workers[id].static && next[id] == nil {
			cause := "it is no longer configured"
			if t.workers[id].record.Pod != nil {
				cause = "its pod was removed, or is no longer selected"
			}
			t.departs(now, t.workers[id], Removed, cause)
			t.drop(id)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(next)) {
		m, old := next[id], t.workers[id]
		if m == old {
			continue
		}
		m.seen = now
		if old != nil && !old.static {
			t.leave(old)
		}
		if old.isSameProcess(m) {
			// Reading its entry again is no sign of life.
			m.seen, m.returns, m.rest, m.info.Health = old.seen, old.returns, old.rest, old.info.Health
			m.good, m.probe, m.answered, m.info.Refuses = old.good, old.probe, old.answered, old.info.Refuses
			m.refused, m.sign, m.proved, m.info.Unproved = old.refused, old.sign, old.proved, old.info.Unproved
			m.cause, m.missed, m.info.HealthCause = old.cause, old.missed, old.info.HealthCause
		} else {
			m.info.Health, m.info.Unproved = t.health(now, m), t.unproved(now, m)
			m.info.HealthCause = m.healthCause(now, m.info.Health)
		}
		if t.workers[id] = m; old == nil {
			t.returns(&m.info)
		}
		t.set(m.info)
		t.events(m.record, m.info)
	}
	return nil
}

// Put adds or changes the worker of a record that was put into the registry at the time
// now, which may be in the past. A worker of the configuration with the same id stays.
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
		// A reconnection may only have read the record again, so followed does not change.
		m.seen, m.kept = later(m.seen, now), later(m.kept, now)
		m.beats(now)
		t.judge(now, m)
		return nil
	}
	if t.room != nil {
		if err := t.room(info); err != nil {
			return err
		}
	}
	if m == nil {
		if len(t.workers) >= maxWorkers {
			return fmt.Errorf("fleet: worker %q (%d) would be one above the limit of %d", clip(info.Name), info.ID, maxWorkers)
		}
		m = &member{}
		t.workers[info.ID] = m
		t.returns(&info)
	}
	info.Health = m.info.Health
	if before := m.info.Address; before.IsValid() && before != info.Address {
		if info.Address == m.before && now.Sub(m.moved) < t.ages.removal() {
			t.claimed(info, before)
		}
		m.before, m.moved = before, now
	}
	started := m.info.Address != info.Address || m.info.DPStart != info.DPStart || m.record.StartedMS != r.StartedMS
	if started {
		t.leave(m)
	}
	m.info, m.record, m.probed, m.followed, m.refused = info, r, r.Health.isSent(), false, false
	if !m.probed {
		m.probe = ProbeFailed
	}
	m.seen, m.kept = later(m.seen, now), later(m.kept, now)
	if started {
		m.good, m.proved, m.answered, m.missed = false, time.Time{}, time.Time{}, 0
		t.start(now, m)
	}
	m.beats(now)
	m.info.Health, m.info.Unproved = t.health(now, m), t.unproved(now, m)
	m.info.HealthCause = m.healthCause(now, m.info.Health)
	t.set(m.info)
	t.events(m.record, m.info)
	return nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// start compares a worker that started at an address with the one that started there
// before. The older one may be the same process before a restart under another name.
func (t *Table) start(now time.Time, m *member) {
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
	m.followed = true
	t.followed(m.info, by.info)
}

// leave notes that a registered worker is no longer at its address.
func (t *Table) leave(m *member) {
	if t.latest[m.place()] == m.info.ID {
		delete(t.latest, m.place())
	}
}

// slack is the time that the answers to a probe may be further apart than heartbeats.
func slack(p *Probe) time.Duration {
	every := p.every(probeEvery)
	return max(0, every+every/16-heartbeatEvery) // [Prober] varies the interval
}

// Delete removes a worker that left the registry.
func (t *Table) Delete(now time.Time, id uint64) {
	if m := t.workers[id]; m != nil && !m.static {
		t.departs(now, m, Removed, "its record was deleted")
		t.drop(id)
	}
}

// Heartbeat takes a heartbeat. It returns false if the worker is unknown.
func (t *Table) Heartbeat(now time.Time, h *Heartbeat) bool {
	m := t.workers[h.WorkerID]
	if m == nil {
		return false
	}
	m.seen, m.kept, m.followed, m.refused = now, now, false, false
	m.beats(now)
	t.load(m.info, h.Load)
	t.judge(now, m)
	return true
}

// Probed notes the result of a probe. If another worker has started at its address, that worker was probed.
func (t *Table) Probed(now time.Time, id uint64, result Probed) { t.probedFor(now, id, result, "") }

// probedFor is Probed with the cause of a result that is not [ProbeAnswered], in words for people.
func (t *Table) probedFor(now time.Time, id uint64, result Probed, cause string) {
	m := t.workers[id]
	if m == nil || m.followed {
		return
	}
	if result != m.probe {
		if now.Sub(m.flipped) < flipEvery {
			return // the next probe counts
		}
		m.flipped = now
	}
	m.missed++
	if m.probe, m.cause = result, cause; result == ProbeAnswered {
		m.seen, m.proved, m.good, m.refused, m.missed = now, now, true, false, 0
	}
	t.judge(now, m)
}

// Answered notes that a worker answered a request. If another worker has started at its address, that worker
// answered.
func (t *Table) Answered(now time.Time, id uint64) {
	if m := t.workers[id]; m != nil && !m.followed {
		m.seen, m.answered, m.good, m.refused = later(m.seen, now), now, true, false
		t.judge(now, m)
	}
}

// Tick updates the health of all workers, and removes registered ones that were silent for
// too long. While the bus is away it considers only probed workers of the configuration.
func (t *Table) Tick(now time.Time, away bool) {
	for _, id := range slices.Sorted(maps.Keys(t.workers)) {
		m := t.workers[id]
		switch {
		case m.static && !m.probed, away && !m.static:
		case !m.static && now.Sub(m.kept) >= t.ages.removal() && now.Sub(m.answered) >= answerCounts:
			t.fallsSilent(now, m)
			t.drop(id)
		default:
			t.note(m)
			t.judge(now, m)
		}
	}
}

// Refresh counts all registered workers as seen now, after the bus was away.
func (t *Table) Refresh(now time.Time) {
	for _, m := range t.workers {
		if !m.static {
			m.seen, m.kept = now, now
			m.beats(now)
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
