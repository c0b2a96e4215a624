// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net"
	"os"
	"sync"
	"time"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/durable"
)

// openDurable makes the reader of the stream of events, if the settings require one.
func (s *server) openDurable() (err error) {
	c := &s.conf
	if !c.DurableKVEvents || !s.router.WantsEvents() {
		return nil
	}
	s.durable, err = durable.New(s.events, durable.Config{
		Replica:           replicaName(c),
		Holdings:          s.holdings,
		Replicas:          c.NATSReplicas,
		Memory:            s.bus != nil && c.StateDir == "",
		SnapshotThreshold: c.RouterSnapshotThreshold,
		Retention:         c.KVEventsRetention,
		ResetStates:       c.RouterResetStates,
		Drain:             c.DrainTimeout,
		Log:               s.log,
		Meter:             s.metrics.Meter("events.durable"),
	})
	return err
}

// replicaName is the setting, or a name that stays the same after a restart with the same
// flags. It is "", for a random name, if the port is 0.
func replicaName(c *config) string {
	if c.Replica != "" {
		return c.Replica
	}
	host, err := os.Hostname()
	_, port, portErr := net.SplitHostPort(c.HTTPAddress)
	if err != nil || portErr != nil || port == "0" {
		return ""
	}
	return host + "-" + port
}

// readStream reads the stream of events as soon as there are workers whose events it
// stores. It first waits up to 10 s for the registry, so that the workers are known.
func (s *server) readStream(ctx context.Context) error {
	ready, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := every(ready, 10*time.Millisecond, func() {
		if s.registry.Ready() {
			cancel()
		}
	}); err != nil {
		return err
	}
	if !s.conf.RouterResetStates { // a reset is for the other replicas, too
		s.events.AwaitWanted(ctx, events.FeedDurable)
	}
	if ctx.Err() != nil {
		return nil
	}
	return s.durable.Run(ctx)
}

func (s *server) checks() []api.Check {
	checks := []api.Check{{Name: "registry", OK: s.registry.Ready}}
	if s.durable != nil {
		checks = append(checks, api.Check{Name: "events", OK: func() bool {
			return s.durable.Ready() || !s.events.Wants(events.FeedDurable)
		}}, api.Check{Name: "event_store", OK: func() bool {
			return s.durable.Stores() || !s.events.Wants(events.FeedDurable)
		}})
	}
	if s.pods != nil {
		checks = append(checks, api.Check{Name: "kubernetes", OK: s.pods.Works})
	}
	return checks
}

func (s *server) scopeName() string {
	scope := s.conf.Scope.WithDefaults()
	return scope.Namespace + "/" + scope.Component + "/" + scope.Endpoint
}

// position is the last message of the stream that was applied; 0 without a stream.
func (s *server) position() uint64 {
	if s.durable == nil {
		return 0
	}
	return s.durable.Position()
}

// expected are workers that only a snapshot contains.
type expected struct {
	mu sync.Mutex
	// mu guards the fields below.
	ids   []uint64
	since time.Time
}

func (e *expected) add(ids []uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ids, e.since = append(e.ids, ids...), time.Now()
}

// overdue returns the workers that have been expected for too long, and forgets them.
func (e *expected) overdue() (ids []uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if time.Since(e.since) >= expectFor {
		ids, e.ids = e.ids, nil
	}
	return ids
}

// expectFor is how long the workers of a snapshot have to register: longer than a record
// in the registry lives.
const expectFor = time.Minute

// forgetExpected removes workers of a snapshot that do not register. While the registry
// is not reachable no worker can register, so none is removed.
func (s *server) forgetExpected(ctx context.Context) error {
	return every(ctx, time.Second, func() {
		if !s.registry.Ready() || !s.podsKnown() {
			return
		}
		for _, id := range s.router.RemoveExpected(s.expected.overdue()) {
			s.events.Forget(id)
			s.log.Info("a worker of the snapshot has not registered; it is removed", "worker", id)
		}
	})
}
