// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/internal/wire"
)

// The methods below are for the reader of [FeedDurable], package durable. It calls one of them at a time,
// except Bus and Audit.

// Bus returns the connection to NATS and the scope.
func (s *Subscriber) Bus() (*nats.Conn, wire.Scope) { return s.nc, s.conf.Scope }

// TakeStreamed applies one message of the stream. It calls applied when the message is applied and before
// anything else changes; gap reports that events before the message are missing and not requested.
func (s *Subscriber) TakeStreamed(ctx context.Context, data []byte, applied func(gap bool)) {
	s.applyMessage(ctx, FeedDurable, data, nil, applied)
}

// SnapshotStreamed begins a snapshot of the workers whose events the stream stores. It calls begin between
// two messages; if begin returns false, there is no snapshot. done must be called.
func (s *Subscriber) SnapshotStreamed(h Holdings, begin func(*Snapshot) bool) (snap *Snapshot, done func(), ok bool) {
	return s.beginSnapshot(h, true, begin)
}

// ReplaceStreamed replaces the state of the workers whose events the stream stores by a snapshot, and then
// calls replaced before anything else changes. After an error the state is as before. The snapshot is read
// without a lock: workers come and go meanwhile, but the reader applies no message.
func (s *Subscriber) ReplaceStreamed(h Holdings, snap *Snapshot, whole func() error, replaced func()) error {
	s.change(func(t *tracker, _ time.Time) { t.unsure = make(map[uint64]struct{}) })
	var resume func()
	err := h.Restore(snap, s.streamed, func() error {
		if resume != nil {
			return nil
		}
		if whole != nil {
			if err := whole(); err != nil {
				return err
			}
		}
		resume = s.pause(func() {})
		return nil
	})
	if resume != nil {
		defer resume()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.tracker.unsure = nil
		return err
	}
	s.tracker.restore(s.conf.Now(), snap)
	replaced()
	return nil
}

// StreamEnd reports that the stream was read nearly to its end: workers are queried for later events. lost
// says that messages may be missing.
func (s *Subscriber) StreamEnd(lost bool) {
	s.change(func(t *tracker, now time.Time) { t.repairAtStreamEnd(now, lost) })
}

// Stall reports whether JetStream has ceased to store events. Ranks that use the stream are suspect until it
// stores them again.
func (s *Subscriber) Stall(stalled bool) {
	s.change(func(t *tracker, _ time.Time) { t.stall(stalled) })
}

// Audit queries all workers with a local indexer, because events may be lost. why is for the log.
func (s *Subscriber) Audit(why string) {
	s.change((*tracker).audit)
	s.conf.Log.Info("all workers are queried for missing events", "why", why)
}
