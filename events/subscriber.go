// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvroute/kvroute/internal/wire"
)

// SubscriberConfig says what a [Subscriber] listens to. Sink is required; the zero
// value of each other field means its default.
type SubscriberConfig struct {
	Scope wire.Scope
	Sink  Sink
	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log takes a line for each loss. Default none.
	Log *slog.Logger
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// Subscriber brings the events of a scope's workers to a sink.
type Subscriber struct {
	conf    SubscriberConfig
	nc      *nats.Conn
	metrics *metrics

	mu sync.Mutex
	// mu guards the field below. The sink is called under it: that is what keeps
	// the events of a worker in order.
	tracker *tracker
}

// NewSubscriber returns a subscriber on a connection that stays its caller's.
func NewSubscriber(nc *nats.Conn, conf SubscriberConfig) (*Subscriber, error) {
	if conf.Now == nil {
		conf.Now = time.Now
	}
	if conf.Log == nil {
		conf.Log = slog.New(slog.DiscardHandler)
	}
	if conf.Meter == nil {
		conf.Meter = noop.Meter{}
	}
	m, err := newMetrics(conf.Meter)
	if err != nil {
		return nil, err
	}
	return &Subscriber{conf: conf, nc: nc, metrics: m, tracker: newTracker(conf.Sink)}, nil
}

// Run listens until ctx ends. A connection that is lost meanwhile comes back by
// itself; what was published in between shows as a gap.
func (s *Subscriber) Run(ctx context.Context) error {
	subject := s.conf.Scope.Topic(Topic)
	sub, err := s.nc.Subscribe(subject, func(m *nats.Msg) { s.message(ctx, m.Data) })
	if err != nil {
		return fmt.Errorf("events: subscribe to %s: %w", subject, err)
	}
	// A burst of the whole fleet must fit; beyond that we are too slow, and the
	// loss shows as a gap.
	if err := sub.SetPendingLimits(1<<20, 256<<20); err != nil {
		return fmt.Errorf("events: set limits of %s: %w", subject, err)
	}
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	for lost := 0; ; {
		select {
		case <-ctx.Done():
			if err := sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
				return fmt.Errorf("events: unsubscribe from %s: %w", subject, err)
			}
			return nil
		case <-tick.C:
			s.expire(ctx)
			if n, err := sub.Dropped(); err == nil && n > lost {
				s.conf.Log.Warn("too slow for the events; messages were dropped", "messages", n-lost)
				s.metrics.count(ctx, outcomeSlow, n-lost)
				lost = n
			}
		}
	}
}

// WorkerKnown tells that the sink knows a worker from now on.
func (s *Subscriber) WorkerKnown(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tracker.known(id)
}

// Forget tells that the sink has forgotten a worker.
func (s *Subscriber) Forget(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tracker.forget(id)
}

func (s *Subscriber) expire(ctx context.Context) {
	s.mu.Lock()
	dropped := s.tracker.expire(s.conf.Now())
	s.mu.Unlock()
	if dropped > 0 {
		s.conf.Log.Warn("events of workers that never registered were dropped", "events", dropped)
		s.metrics.count(ctx, outcomeDropped, dropped)
	}
}

// message takes one message off the bus. Messages come one after the other.
func (s *Subscriber) message(ctx context.Context, data []byte) {
	e, err := DecodeEnvelope(data)
	if err != nil {
		s.metrics.count(ctx, outcomeBad, 1)
		s.conf.Log.Debug("a message is no envelope", "err", err)
		return
	}
	evs, bad, err := DecodeEvents(e.Payload)
	if err != nil {
		bad = 1
	}
	if bad > 0 {
		s.metrics.count(ctx, outcomeBad, bad)
		s.conf.Log.Debug("events could not be read", "publisher", e.PublisherID, "events", bad)
	}
	s.metrics.delay(ctx, s.conf.Now(), e.PublishedAt)

	now := s.conf.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ev := range evs {
		v := s.tracker.accept(now, e.PublisherID, ev)
		s.metrics.accepted(ctx, ev, v)
		switch {
		case v.gap:
			s.conf.Log.Warn("events of a worker are missing; what is known of it stays and may be wrong", "worker", ev.WorkerID, "dp_rank", ev.DPRank, "event", ev.EventID)
		case v.restart:
			s.conf.Log.Info("a worker's publisher started anew; its blocks are forgotten", "worker", ev.WorkerID, "dp_rank", ev.DPRank)
		case v.many:
			s.conf.Log.Warn("two publishers speak for one rank; its blocks are not cleared any more", "worker", ev.WorkerID, "dp_rank", ev.DPRank)
		}
	}
}
