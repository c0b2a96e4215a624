// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"time"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/router"
)

// openSync makes what tells the other replicas of this one's requests, for a router
// that tells s of them.
func (s *server) openSync() (err error) {
	if !s.conf.RouterReplicaSync {
		return nil
	}
	s.sync, err = fleet.NewSync(s.nc, fleet.SyncConfig{
		Scope: s.scope, ID: s.id, Presence: s.presence(), Single: !s.conf.SyncBatch,
		Changed: s.router.PeerChanged, Gone: s.router.RemovePeer, FirstToken: s.router.MarkPrefillCompleted,
		Log: s.log, Meter: s.metrics.Meter("fleet"),
	})
	return err
}

// tell is what the router tells of its slots, to whoever wants to know.
func (s *server) tell() func(router.Change) {
	if !s.conf.RouterReplicaSync {
		return nil
	}
	return func(c router.Change) { s.sync.Tell(c) }
}

func (s *server) presence() fleet.Presence {
	return fleet.Presence{
		RouterID: s.id, StartedMS: time.Now().UnixMilli(), Version: buildVersion(),
		WantsEvents: s.router.WantsEvents(), Replica: replicaName(&s.conf), Group: s.conf.Group,
	}
}

// beHeard says that this replica is there, and with the sync what it does, until ctx
// ends.
func (s *server) beHeard(ctx context.Context) error {
	if s.sync != nil {
		return s.sync.Run(ctx)
	}
	return fleet.AnnouncePresence(ctx, s.nc, s.scope, s.presence())
}

// workerChanged says that a worker came, or went with its slots.
func (s *server) workerChanged(id uint64, there bool) {
	if s.sync != nil {
		s.sync.WorkerChanged(id, there)
	}
}
