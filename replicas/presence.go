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
	presentEvery  = 2 * time.Second // who is not heard three times is gone
)

// Presence is what a router replica says of itself.
type Presence struct {
	RouterID  uint64 `json:"router_id"`
	StartedMS int64  `json:"started_ms"`
	Version   string `json:"version,omitempty"`
	// WantsEvents says whether it reads the workers' events. While no replica
	// does, workers need not send them.
	WantsEvents bool `json:"wants_events"`
	// Replica is its name, the same after a restart, Group that of the workers it
	// routes to, where there are several groups.
	Replica string `json:"replica,omitempty"`
	Group   string `json:"group,omitempty"`

	// What [Sync] says: the number of the next message, how many requests are in
	// flight by the messages before, and their digest in 16 hex digits. Absent of
	// replicas that do not tell.
	SyncSeq        *uint64 `json:"sync_seq,omitempty"`
	ActiveRequests int     `json:"active_requests,omitempty"`
	Digest         string  `json:"digest,omitempty"`
	// Leaving says that this is its last word: what it had in flight is over.
	Leaving bool `json:"leaving,omitempty"`
}

// AnnouncePresence says every two seconds that a router replica is there, until ctx
// ends.
func AnnouncePresence(ctx context.Context, nc *nats.Conn, scope wire.Scope, p Presence) error {
	data, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("replicas: write presence: %w", err)
	}
	subject := scope.Own(presenceTopic)
	tick := time.NewTicker(presentEvery)
	defer tick.Stop()
	for {
		if nc.IsConnected() {
			// What a lost message means is for the listener to judge.
			_ = nc.Publish(subject, data)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}
