// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/internal/wire"
)

const (
	presenceTopic = "presence"
	presentEvery  = 2 * time.Second // a replica is gone after three missing ones
)

// Presence is the message that a router replica runs.
type Presence struct {
	RouterID  uint64 `json:"router_id"`
	StartedMS int64  `json:"started_ms"`
	Version   string `json:"version,omitempty"`
	// Replica is its name, the same after a restart. Group is the name of its router group.
	Replica string `json:"replica,omitempty"`
	Group   string `json:"group,omitempty"`

	// SyncSeq is the number of its next message about requests. ActiveRequests is the number of
	// its requests in flight after the messages before. Absent without [Sync].
	SyncSeq        *uint64 `json:"sync_seq,omitempty"`
	ActiveRequests int     `json:"active_requests,omitempty"`
	// Leaving is set in its last presence: its requests have ended.
	Leaving bool `json:"leaving,omitempty"`
}

// AnnouncePresence publishes the presence of a replica without [Sync] every 2 s, until ctx
// ends.
func AnnouncePresence(ctx context.Context, nc *nats.Conn, scope wire.Scope, p Presence) error {
	data, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("write presence: %w", err)
	}
	subject := scope.Own(presenceTopic)
	tick := time.NewTicker(presentEvery)
	defer tick.Stop()
	for {
		if nc.IsConnected() {
			// After a failure the next presence is soon enough.
			_ = nc.Publish(subject, data)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}
