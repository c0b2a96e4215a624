// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"net/netip"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/router"
)

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
