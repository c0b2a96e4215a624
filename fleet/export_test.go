// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// KeepAtMost has fewer records kept than Dynamo's stores will have for long.
func (d *Dynamo) KeepAtMost(records int) { d.most = records }

// TakeHeartbeat and TakeEntry take what the bus brings.
func (r *Registry) TakeHeartbeat(m *nats.Msg) { r.heartbeat(context.Background(), m) }

func (r *Registry) TakeEntry(e jetstream.KeyValueEntry) {
	r.entry(context.Background(), e, time.Time{})
}
