// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// KeepAtMost sets the limit of records.
func (d *Dynamo) KeepAtMost(records int) { d.limit = records }

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
