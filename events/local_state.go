// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"fmt"
	"time"

	"github.com/kvroute/kvroute/internal/bus"
)

// Holdings reads and replaces the content of the sink: the blocks that its events have built. Both
// functions are called while no event is applied. Mine selects the workers of the snapshot; it
// must not be called later.
type Holdings struct {
	// Dump fills in Meta.Pools, Ranks, Workers without StartedMS and Home, Parked, Runs
	// and Failed. Runs is read later, while events are applied. done must be called. ok is
	// false while that is not possible: the caller tries again.
	Dump func(s *Snapshot, mine func(worker uint64) bool) (done func(), ok bool)
	// Restore replaces the content of these workers by a snapshot, after it is read to its end and
	// whole returns nil. After an error the content must be as before. A snapshot without runs
	// removes everything.
	Restore func(s *Snapshot, mine func(worker uint64) bool, whole func() error) error
}

// Save writes a snapshot of the workers whose events no stream stores, so that [Subscriber.Load]
// of a later process can continue from it. It waits until a dump of the sink is possible, at most
// until ctx ends.
func (s *Subscriber) Save(ctx context.Context, h Holdings, write func(*Snapshot) error) error {
	for {
		snap, done, ok := s.beginSnapshot(h, false, func(*Snapshot) bool { return true })
		if ok {
			defer done()
			return write(snap)
		}
		if !bus.Wait(ctx, 20*time.Millisecond) {
			return fmt.Errorf("events: save: another dump is running: %w", context.Cause(ctx))
		}
	}
}

// beginSnapshot begins a snapshot of the workers whose events the stream stores, or of the others,
// between two events. begin is called at that moment, with mu held.
func (s *Subscriber) beginSnapshot(
	h Holdings, streamed bool, begin func(*Snapshot) bool,
) (snap *Snapshot, done func(), ok bool) {
	snap = &Snapshot{Created: s.conf.Now()}
	var sources map[uint64]Source
	resume := s.pause(func() {
		if ok = begin(snap); !ok {
			return
		}
		s.tracker.export(snap, streamed)
		sources = s.tracker.sources(streamed)
	})
	defer resume()
	if !ok {
		return nil, nil, false
	}
	done, ok = h.Dump(snap, func(worker uint64) bool {
		src, known := sources[worker]
		return known && src.Feed != FeedNone || !known && streamed
	})
	for i := range snap.Workers {
		w := &snap.Workers[i]
		w.StartedMS, w.Home = sources[w.ID].StartedMS, sources[w.ID].Home
	}
	return snap, done, ok
}

// Load restores the snapshot of an earlier process, before Run. whole is that of [Holdings].Restore. It returns
// the number of ranks. The state of a worker is used when [Subscriber.SetWorker] is called for the same
// process of the worker; the caller forgets the workers for which that does not happen. After an
// error nothing is restored.
func (s *Subscriber) Load(snap *Snapshot, whole func() error, h Holdings) (ranks int, err error) {
	if err := h.Restore(snap, s.unknown, whole); err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.unlock()
	return s.tracker.load(s.conf.Now(), snap), nil
}

// unknown reports whether SetWorker was not called for a worker.
func (s *Subscriber) unknown(worker uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, registered := s.tracker.workers[worker]
	return !registered
}
