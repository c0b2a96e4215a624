// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// CheckSchedule returns an error if the schedule of the probes is no heap of all targets.
func (p *Prober) CheckSchedule() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, t := range p.queue {
		switch {
		case t.at != i || p.targets[t.key] != t:
			return fmt.Errorf("%v is at %d, and believes that it is at %d", t.key, i, t.at)
		case i > 0 && t.next.Before(p.queue[(i-1)/2].next):
			return fmt.Errorf("%v is due before the one above it", t.key)
		}
	}
	if len(p.queue) != len(p.targets) {
		return fmt.Errorf("%d of %d targets are in the schedule", len(p.queue), len(p.targets))
	}
	return nil
}

// Due returns the workers whose probes are due at a time.
func (p *Prober) Due(now time.Time) []uint64 {
	due, _ := p.due(now)
	return slices.Sorted(maps.Keys(due))
}

// ModelsDue returns when a worker's engine is asked for its models next.
func (p *Prober) ModelsDue(id uint64) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.targets[probeKey{id, kindModels}].next
}

// KeepAtMost sets the limit of records.
func (d *Dynamo) KeepAtMost(records int) { d.limit = records }

// NewTable returns an empty table with the default ages and no other functions.
func NewTable(networks Networks, set func(router.WorkerInfo), remove func(id uint64)) *Table {
	t := newTable(&RegistryConfig{
		Networks: networks, Set: set, Remove: remove,
		Events: func(Record, router.WorkerInfo) {}, Load: func(router.WorkerInfo, Load) {},
	})
	t.flapped, t.claimed, t.followed = func() {}, func(router.WorkerInfo, netip.AddrPort) {}, func(_, _ router.WorkerInfo) {}
	t.traffic, t.silent, t.lost = func(uint64) Traffic { return Traffic{} }, func(*member) {}, func(*Left, *Probe) {}
	return t
}

// TakeHeartbeat and TakeEntry handle messages from NATS.
func (r *Registry) TakeHeartbeat(m *nats.Msg) { r.heartbeat(m) }

func (r *Registry) TakeEntry(e jetstream.KeyValueEntry) {
	r.entry(e, time.Time{})
}

// These names are exported for tests only.
const (
	TransportDynamo = transportDynamo
)

var (
	EngineLoad = engineLoad
	ErrNoLoad  = errNoLoad
)

// Judge, PutNow, BeatNow and Deleted change a registry without NATS.
func (r *Registry) Judge() { r.locked(func(t *Table) { t.Tick(r.conf.Now(), false) }) }

func (r *Registry) PutNow(t testing.TB, record Record) {
	t.Helper()
	r.locked(func(tab *Table) {
		if err := tab.Put(r.conf.Now(), record); err != nil {
			t.Error(err)
		}
	})
}

func (r *Registry) BeatNow(name string) {
	r.locked(func(t *Table) { t.Heartbeat(r.conf.Now(), &Heartbeat{WorkerID: wire.WorkerID(name)}) })
}

func (r *Registry) Deleted(name string) {
	r.locked(func(t *Table) { t.Delete(r.conf.Now(), wire.WorkerID(name)) })
}

// Dial replaces the client of etcd.
func (e *DynamoEtcd) Dial(dial func(clientv3.Config) (*clientv3.Client, error)) { e.dial = dial }
