// SPDX-License-Identifier: Apache-2.0

// Package fleet knows which workers there are, and how they are.
//
// Workers come from two sources into one set: a list in the configuration, always
// healthy, and a registry in a NATS key-value bucket, where each worker puts its
// record and sends heartbeats. [Table] is the bookkeeping, [Registry] feeds it from
// NATS in a router replica, [Announcer] is the worker's side.
//
// # What is promised
//
// A worker is told of when its record comes or changes, with its health, and again
// with each change of its health: healthy while its last sign of life is at most
// 7.5 s old, degraded to 15 s, then unhealthy, expired from 30 s on, and forgotten
// 45 s after it. A record put again unchanged is a sign of life and no news. Records
// that nothing can be routed by are refused, and so are records under a key that is
// not their worker's id. While NATS is away nobody is heard, yet nobody is called
// ill for it: ages count from the moment NATS is back.
//
// # Concurrency
//
// The methods of [Registry] and [Announcer] may be called by any number of
// goroutines; a [Table] belongs to one at a time.
package fleet

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/kvroute/kvroute/router"
)

// maxWorkers bounds what registrations can make us keep.
const maxWorkers = 1 << 16

// Ages of a worker's last sign of life.
const (
	degradedAfter  = 7500 * time.Millisecond
	unhealthyAfter = 15 * time.Second
	expiredAfter   = 30 * time.Second
	forgetAfter    = 45 * time.Second
)

// Table is the set of workers known. The zero value is not ready; make one with
// [NewTable].
type Table struct {
	networks []netip.Prefix
	set      func(router.WorkerInfo)
	remove   func(id uint64)
	events   func(Record, router.WorkerInfo) // nil if nobody wants to know
	workers  map[uint64]*member
}

// member is a worker of the set.
type member struct {
	info   router.WorkerInfo
	record Record    // as it was put
	static bool      // from the configuration
	seen   time.Time // last sign of life
	load   Load
}

// Load is what a worker last said of its work.
type Load struct {
	Running       int     `json:"batch_size"`
	Waiting       int     `json:"waiting"`
	KVUtilization float64 `json:"kv_cache_util"` // 0 to 1
	KVUsedBlocks  int     `json:"kv_used_blocks"`
}

// NewTable returns an empty table. Whenever a worker is to be told of, it calls
// set or remove, before the method that brought the news returns. Networks, if any,
// are those that workers may have addresses in.
func NewTable(networks []netip.Prefix, set func(router.WorkerInfo), remove func(id uint64)) *Table {
	return &Table{networks: networks, set: set, remove: remove, workers: make(map[uint64]*member)}
}

// SetStatic replaces the workers of the configuration. If one of the records is
// wrong nothing changes, and the error says which and why.
func (t *Table) SetStatic(records []Record) error {
	next := make(map[uint64]*member, len(records))
	byID := make(map[uint64]Record, len(records))
	for i := range records {
		info, err := records[i].Info(t.networks)
		if err != nil {
			return err
		}
		if err := records[i].Events.check(t.networks, false); err != nil {
			return fmt.Errorf("fleet: worker %q (%d): %w", clip(info.Name), info.ID, err)
		}
		byID[info.ID] = records[i]
		next[info.ID] = &member{info: info, static: true}
	}
	for _, id := range slices.Sorted(maps.Keys(t.workers)) {
		if t.workers[id].static && next[id] == nil {
			t.drop(id)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(next)) {
		t.workers[id] = next[id]
		t.set(next[id].info)
		t.tellEvents(byID[id], next[id].info)
	}
	return nil
}

// Put takes a record of the registry, put at the time now. A static worker of the
// same id goes first: the record is only a sign of life that it does not need.
func (t *Table) Put(now time.Time, r Record) error {
	info, err := r.Info(t.networks)
	if err != nil {
		return err
	}
	if err := r.Events.check(t.networks, true); err != nil {
		return fmt.Errorf("fleet: worker %q (%d): %w", clip(info.Name), info.ID, err)
	}
	m := t.workers[info.ID]
	if m != nil && m.static {
		return nil
	}
	if m != nil && m.info.Health == router.Healthy && reflect.DeepEqual(m.record, r) {
		m.seen = now
		return nil
	}
	if m == nil {
		if len(t.workers) >= maxWorkers {
			return fmt.Errorf("fleet: worker %q (%d) would be one above the limit of %d", clip(info.Name), info.ID, maxWorkers)
		}
		m = &member{}
		t.workers[info.ID] = m
	}
	m.info, m.record, m.seen = info, r, now
	t.set(info)
	t.tellEvents(r, info)
	return nil
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
func (t *Table) Heartbeat(now time.Time, id uint64, load Load) bool {
	m := t.workers[id]
	if m == nil {
		return false
	}
	m.seen, m.load = now, load
	t.judge(now, m)
	return true
}

// Tick looks for workers that have been silent for too long.
func (t *Table) Tick(now time.Time) {
	for _, id := range slices.Sorted(maps.Keys(t.workers)) {
		m := t.workers[id]
		switch {
		case m.static:
		case now.Sub(m.seen) >= forgetAfter:
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
		m.seen = now
	}
}

func (t *Table) drop(id uint64) {
	delete(t.workers, id)
	t.remove(id)
}

// judge tells of m if its health has changed.
func (t *Table) judge(now time.Time, m *member) {
	health := router.Healthy
	switch age := now.Sub(m.seen); {
	case m.static:
	case age >= expiredAfter:
		health = router.Expired
	case age > unhealthyAfter:
		health = router.Unhealthy
	case age > degradedAfter:
		health = router.Degraded
	}
	if health != m.info.Health {
		m.info.Health = health
		t.set(m.info)
	}
}
