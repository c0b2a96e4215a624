// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/saved"
)

// ensureState brings the state to a position of the stream, unless it has one: to that
// of the newest good snapshot, or to the beginning of the epoch.
func (d *Reader) ensureState(ctx context.Context, o *opened, e *epoch) error {
	at := d.position()
	if another := at.stream != o.created; at.loaded && (at.epoch == e.N || another && at.epoch > e.N) {
		if another { // the deletion of the store also deletes the epoch's number
			d.conf.Log.Warn("the stream of events is another one; it is read from its beginning")
			d.wanted.Store(true)     // only running replicas have the state
			d.queryAtEnd.Store(true) // messages of the deleted stream may be missing
			d.setPosition(position{stream: o.created, epoch: e.N, loaded: true, inherited: true})
		}
		return nil
	}
	return d.load(ctx, o, e)
}

// load replaces the state by the newest good snapshot of the epoch, or by an empty state.
func (d *Reader) load(ctx context.Context, o *opened, e *epoch) error {
	names, err := d.snapshots(ctx, o)
	if err != nil {
		return err
	}
	d.wanted.Store(false)
	d.base, d.damaged = head{}, nil
	for _, name := range names {
		begin := time.Now()
		s, err := d.restore(ctx, o, name, e)
		switch {
		case err == nil && s != nil:
			d.metrics.snapshot(ctx, snapshotRestored, time.Since(begin))
			d.base = head{Object: name, LastSeq: s.LastSeq, Stream: s.Meta.Stream}
			d.conf.Log.Info("a snapshot is restored", "object", name, "position", s.LastSeq, "workers", len(s.Workers))
			return nil
		case err == nil: // of another epoch
		case errors.Is(err, events.ErrSnapshot), errors.Is(err, jetstream.ErrObjectNotFound), errors.Is(err, jetstream.ErrDigestMismatch):
			d.wanted.Store(true)
			d.damaged = append(d.damaged, name)
			d.metrics.snapshot(ctx, snapshotDamaged, time.Since(begin))
			d.conf.Log.Warn("a snapshot is skipped", "object", name, "err", err)
		default:
			return err
		}
	}
	if err := d.replace(&events.Snapshot{}, nil, position{stream: o.created, seq: e.start(o.created), epoch: e.N}, e.N > 0); err != nil {
		return fmt.Errorf("events: forget everything: %w", err) // workers that existed when the epoch began hold something
	}
	return nil
}

// replace makes a snapshot the state at a position.
func (d *Reader) replace(s *events.Snapshot, whole func() error, at position, lost bool) error {
	at.loaded, at.inherited = true, s.Meta.Inherited
	return d.sub.ReplaceStreamed(d.conf.Holdings, s, whole, func() {
		d.queryAtEnd.Store(true)
		d.lost.Store(lost)
		d.setPosition(at)
	})
}

// restore replaces the state by a snapshot. It returns nil if the snapshot is of another
// epoch.
func (d *Reader) restore(ctx context.Context, o *opened, name string, e *epoch) (*events.Snapshot, error) {
	object, err := d.download(ctx, o, name)
	if err != nil {
		return nil, err
	}
	defer object.close()
	s, whole, err := saved.Read(object, d.scope)
	if err != nil {
		return nil, err
	}
	if s.Meta.Epoch != e.N {
		return nil, nil
	}
	at := position{stream: o.created, epoch: e.N}
	if s.Meta.Stream == o.created {
		at.seq = s.LastSeq
	}
	if err := d.replace(s, whole, at, false); err != nil {
		return nil, err
	}
	return s, nil
}

// mustRestore reports whether messages after the position were purged before the consumer was
// created, and a snapshot contains them. Without such a snapshot the messages are lost, unless
// all of them belong to other endpoints of the component: then the ids of events show a loss.
func (d *Reader) mustRestore(ctx context.Context, o *opened) (again bool, err error) {
	ctx, cancel := d.limited(ctx)
	defer cancel()
	h, _, err := o.head(ctx)
	if err != nil {
		return false, err
	}
	info, err := o.stream.Info(ctx, o.everybody())
	if err != nil {
		return false, fmt.Errorf("events: look at the stream: %w", err)
	}
	others := d.others(o, info)
	position := d.position() // it does not change: no session is open
	gone := info.State.NumDeleted > 0 || info.State.FirstSeq > position.seq+1
	newer := h.Stream == position.stream && h.Epoch == position.epoch && h.LastSeq > position.seq
	if gone && newer && !d.wanted.Load() {
		d.unload()
		return true, nil
	}
	if info.State.FirstSeq <= position.seq+1 {
		return false, nil
	}
	d.queryAtEnd.Store(true)
	if position.seq > 0 {
		d.moveTo(info.State.FirstSeq - 1)
	}
	at := []any{"position", position.seq, "first", info.State.FirstSeq}
	switch {
	case others:
		d.conf.Log.Info("the stream begins behind the position; what is gone may be of other endpoints", at...)
	case position.seq == 0:
		d.lost.Store(true)
		d.conf.Log.Info("the stream has lost its beginning, and there is no snapshot", at...)
	default:
		d.lost.Store(true)
		d.conf.Log.Warn("messages of the stream are gone and in no snapshot", at...)
	}
	return false, nil
}

// others reports whether the stream has messages of other endpoints, and remembers it.
func (d *Reader) others(o *opened, info *jetstream.StreamInfo) bool {
	_, own := info.State.Subjects[o.subject]
	others := len(info.State.Subjects) > 1 || !own && len(info.State.Subjects) > 0
	if others {
		d.shared.Store(true)
	}
	return others
}

// everybody selects the subjects of all endpoints of the component.
func (o *opened) everybody() jetstream.StreamInfoOpt {
	return jetstream.WithSubjectFilter(o.component)
}

// purgedBehind reports whether messages directly after a position were purged. Missing
// events there may then be more than a publisher's loss.
func (d *Reader) purgedBehind(ctx context.Context, o *opened, at uint64) bool {
	ctx, cancel := d.limited(ctx)
	defer cancel()
	info, err := o.stream.Info(ctx)
	if err != nil {
		d.conf.Log.Debug("the stream cannot be looked at", "err", err)
		return false
	}
	return info.State.FirstSeq > at+1
}
