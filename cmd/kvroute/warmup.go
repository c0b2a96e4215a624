// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"time"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvroute/kvroute/events"
)

// A replica that has just started knows no workers and no caches. Until it does, Envoy's health
// checks get NOT_SERVING, so that other replicas get the requests. Requests that arrive before a
// worker is known fail open.

const (
	// warmUpLimit is the longest time without requests: a replica must come into service even if the
	// registry does not answer.
	warmUpLimit = 15 * time.Second
	warmUpEvery = 20 * time.Millisecond
)

// serving sets the status of the health checks of readiness. "liveness" stays SERVING: a
// replica must not be restarted while it drains.
func (s *server) serving(status healthpb.HealthCheckResponse_ServingStatus) {
	for _, name := range []string{"", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"} {
		s.health.SetServingStatus(name, status)
	}
}

// warmUp waits until the workers and their caches are known, and then accepts requests.
func (s *server) warmUp(ctx context.Context) error {
	late := time.Now().Add(warmUpLimit)
	ctx, done := context.WithCancel(ctx)
	defer done()
	return every(ctx, warmUpEvery, func() {
		fleet, late := s.registry.Ready() && s.podsKnown(), time.Now().After(late)
		if fleet || late {
			s.started.Store(true)
		}
		if late {
			s.log.Warn("requests are accepted, though not everything is known yet", "registry", fleet)
		}
		if late || fleet && (s.durable == nil || s.durable.Ready() || !s.events.Wants(events.FeedDurable)) {
			s.serving(healthpb.HealthCheckResponse_SERVING)
			done()
		}
	})
}
