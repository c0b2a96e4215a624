// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/internal/bus"
)

// settle brings the state to a position of the stream, unless it has one: to that
// of the newest good snapshot, or to where the epoch begins.
func (d *Durable) settle(ctx context.Context, o *opened, e *epoch) error {
	d.sub.mu.Lock()
	at, loaded := d.at, d.loaded
	d.sub.mu.Unlock()
	if another := at.stream != o.created; loaded && (at.epoch == e.N || another && at.epoch > e.N) {
		if another { // with a store that was deleted the epoch's number is gone, too
			// The messages of a new stream are all news.
			d.conf.Log.Warn("the stream of events is another one; it is read from its beginning")
			d.wanted.Store(true) // nobody else knows what was in the one before
			d.review.Store(true) // what was in it and did not come
			d.sub.mu.Lock()
			d.at, d.inherited = position{stream: o.created, epoch: e.N}, true
			d.sub.mu.Unlock()
		}
		return nil
	}
	return d.load(ctx, o, e)
}

// load replaces the state by the newest good snapshot of the epoch, or by nothing.
func (d *Durable) load(ctx context.Context, o *opened, e *epoch) error {
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
		case errors.Is(err, ErrSnapshot), errors.Is(err, jetstream.ErrObjectNotFound), errors.Is(err, jetstream.ErrDigestMismatch):
			d.wanted.Store(true)
			d.damaged = append(d.damaged, name)
			d.metrics.snapshot(ctx, snapshotDamaged, time.Since(begin))
			d.conf.Log.Warn("a snapshot is skipped", "object", name, "err", err)
		default:
			return err
		}
	}
	if err := d.replace(&Snapshot{}, nil, position{stream: o.created, seq: e.start(o.created), epoch: e.N}, e.N > 0); err != nil {
		return fmt.Errorf("events: forget everything: %w", err) // whoever was there when the epoch began holds something
	}
	return nil
}

// replace makes a snapshot, which is read without a lock, what is known at a position.
// Workers come and go meanwhile; events of the stream do not, since nobody reads it.
func (d *Durable) replace(s *Snapshot, whole func() error, at position, lost bool) error {
	d.sub.mu.Lock()
	d.sub.tracker.unsure = make(map[uint64]struct{})
	d.sub.mu.Unlock()
	var resume func()
	err := d.conf.Holdings.Restore(s, d.sub.streamed, func() error {
		if resume != nil {
			return nil
		}
		if whole != nil {
			if err := whole(); err != nil {
				return err
			}
		}
		resume = d.sub.pause(func() {})
		return nil
	})
	if resume != nil {
		defer resume()
	}
	d.sub.mu.Lock()
	defer d.sub.mu.Unlock()
	if err != nil {
		d.sub.tracker.unsure = nil
		return err
	}
	d.sub.tracker.restored(d.sub.conf.Now(), knowledge{s.Cursors, s.Waiting, s.States})
	d.review.Store(true)
	d.lost.Store(lost)
	d.at, d.loaded, d.inherited = at, true, s.Meta.Inherited
	return nil
}

// restore replaces the state by a snapshot. It returns nil if that is of another
// epoch.
func (d *Durable) restore(ctx context.Context, o *opened, name string, e *epoch) (*Snapshot, error) {
	object, err := d.download(ctx, o, name)
	if err != nil {
		return nil, err
	}
	defer object.close()
	s, whole, err := ReadSnapshot(object, d.scope)
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

// overtaken reports whether messages behind the position were purged before the
// consumer was there to hold them: then a snapshot contains them. If none does they
// are lost, unless they were all of other endpoints of the component, which purge what
// is theirs. The events' own numbers will tell.
func (d *Durable) overtaken(ctx context.Context, o *opened) (again bool, err error) {
	err = d.limited(ctx, func(ctx context.Context) error {
		var h head
		if _, err := readKey(ctx, o.state, keyHead, &h); err != nil {
			return fmt.Errorf("events: %w", err)
		}
		info, err := o.stream.Info(ctx, o.everybody())
		if err != nil {
			return fmt.Errorf("events: look at the stream: %w", err)
		}
		position := d.position() // it does not change: no session is open
		gone := info.State.NumDeleted > 0 || info.State.FirstSeq > position.seq+1
		newer := h.Stream == position.stream && h.Epoch == position.epoch && h.LastSeq > position.seq
		if again = gone && newer && !d.wanted.Load(); again {
			d.unload()
			return nil
		}
		if info.State.FirstSeq <= position.seq+1 {
			return nil
		}
		d.review.Store(true)
		others := 0
		for subject := range info.State.Subjects {
			if subject != o.subject {
				others++
			}
		}
		at := []any{"position", position.seq, "first", info.State.FirstSeq}
		switch {
		case others > 0:
			d.conf.Log.Info("the stream begins behind the position; what is gone may be of other endpoints", at...)
		case position.seq == 0:
			d.lost.Store(true)
			d.conf.Log.Info("the stream has lost its beginning, and there is no snapshot", at...)
		default:
			d.lost.Store(true)
			d.conf.Log.Warn("messages of the stream are gone and in no snapshot", at...)
		}
		return nil
	})
	return again, err
}

// everybody asks for the subjects of all endpoints of the component.
func (o *opened) everybody() jetstream.StreamInfoOpt {
	return jetstream.WithSubjectFilter(o.component)
}

// purgedBehind reports whether messages directly behind a position are gone. That
// events are missing there may then be more than their publisher's loss.
func (d *Durable) purgedBehind(ctx context.Context, o *opened, at uint64) (gone bool) {
	if err := d.limited(ctx, func(ctx context.Context) error {
		info, err := o.stream.Info(ctx)
		gone = err == nil && info.State.FirstSeq > at+1
		return err
	}); err != nil {
		d.conf.Log.Debug("the state of the stream is not known", "err", err)
	}
	return gone
}

// keep looks after the stream while it is read: whether it still is the one, and
// whether a snapshot is due. It returns why the session must end.
func (d *Durable) keep(ctx context.Context, o *opened) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(d.timing.keepEvery*9/10 + rand.N(d.timing.keepEvery/5)):
		}
		if now := time.Now(); now.Sub(d.lastExpire) >= 5*time.Second {
			d.lastExpire = now
			d.sub.expire(ctx)
		}
		if now := time.Now(); now.Sub(d.lastProbe) >= d.timing.probe {
			d.lastProbe = now
			d.probe(ctx, o)
		}
		due, err := d.look(ctx, o)
		if err != nil {
			if errors.Is(err, errEpoch) || errors.Is(err, errNewStream) || errors.Is(err, errConsumer) || errors.Is(err, errInherited) {
				return err
			}
			d.conf.Log.Debug("the state of the stream is not known", "err", err)
			continue
		}
		if due == nothing || time.Since(d.lastTaken) < d.timing.snapshotRest {
			continue
		}
		d.lastTaken = time.Now()
		if due == purgeDue {
			err = d.limited(ctx, func(ctx context.Context) error { return d.purge(ctx, o) })
		} else {
			err = d.snapshot(ctx, o)
		}
		if err != nil && ctx.Err() == nil {
			d.conf.Log.Warn("a snapshot failed; it is tried again", "err", err)
		}
	}
}

// probe finds out whether JetStream stores events. A full store, or a full stream that
// refuses new messages, takes none, and a replica that only reads does not notice.
func (d *Durable) probe(ctx context.Context, o *opened) {
	err := d.limited(ctx, func(ctx context.Context) error {
		if _, err := o.locks.Put(ctx, keyProbe, []byte(d.instance)); err != nil {
			return err
		}
		info, err := o.stream.Info(ctx, jetstream.WithSubjectFilter(o.subject))
		if err != nil {
			return nil //nolint:nilerr // look says what is wrong with the stream
		}
		return fullStream(info, o.subject)
	})
	switch {
	case ctx.Err() != nil || !d.sub.nc.IsConnected():
		return
	case err == nil:
		d.refusals = 0
		if d.refuses.CompareAndSwap(true, false) {
			d.conf.Log.Info("JetStream stores events again")
			d.sub.stall(false)
			d.sub.audit("JetStream did not store events")
		}
		return
	}
	// A single failure may be a server's that is slow, or chooses a leader.
	if d.refusals++; d.refusals < 2 {
		return
	}
	if d.refuses.CompareAndSwap(false, true) {
		d.conf.Log.Warn("JetStream does not store events: it is full or fails. Ranks are suspect until it does: give it more storage, or delete what else is in it", "err", bus.Explain(err))
		d.sub.stall(true)
	}
	if now := time.Now(); now.Sub(d.lastAudit) >= d.timing.audit {
		d.lastAudit = now
		d.sub.audit("JetStream does not store events")
	}
}

// largestMessage is more than a message of a publisher has.
const largestMessage = 1 << 20

// fullStream returns an error if a stream that refuses new messages at its limits has
// reached one. At its limit of bytes that is so when the largest message, or the last
// tenth, has no room.
func fullStream(info *jetstream.StreamInfo, subject string) error {
	c, s := &info.Config, &info.State
	full := func(limit string, value int64) error {
		return fmt.Errorf("stream %s has reached its %s of %d, and its discard policy refuses new messages: raise the limit, or set the policy to old", c.Name, limit, value)
	}
	switch {
	case c.Discard != jetstream.DiscardNew:
		return nil
	case c.MaxMsgs > 0 && s.Msgs >= uint64(c.MaxMsgs):
		return full("max_msgs", c.MaxMsgs)
	case c.MaxBytes > 0 && int64(s.Bytes)+min(largestMessage, c.MaxBytes/10) > c.MaxBytes:
		return full("max_bytes", c.MaxBytes)
	case c.DiscardNewPerSubject && c.MaxMsgsPerSubject > 0 && s.Subjects[subject] >= uint64(c.MaxMsgsPerSubject):
		return full("max_msgs_per_subject", c.MaxMsgsPerSubject)
	}
	return nil
}

// What may be due.
type due int

const (
	nothing due = iota
	purgeDue
	snapshotDue
)

// look finds out what is due.
func (d *Durable) look(ctx context.Context, o *opened) (todo due, err error) {
	err = d.limited(ctx, func(ctx context.Context) error {
		info, err := o.stream.Info(ctx, o.everybody())
		switch {
		case errors.Is(err, jetstream.ErrStreamNotFound), err == nil && info.Created.UnixNano() != o.created:
			return errNewStream
		case err != nil:
			return err
		}
		var e epoch
		if _, err := readKey(ctx, o.state, keyEpoch, &e); err != nil {
			return err
		}
		var h head
		if _, err := readKey(ctx, o.state, keyHead, &h); err != nil {
			return err
		}
		d.sub.mu.Lock()
		at, inherited := d.at, d.inherited
		d.sub.mu.Unlock()
		if e.N != at.epoch {
			return errEpoch
		}
		if err := d.delivers(ctx, o, at.seq); err != nil {
			return err
		}
		if h.Stream != at.stream || h.Epoch != at.epoch {
			h = head{}
		}
		if h.Inherited && !inherited && !slices.Contains(d.damaged, h.Object) {
			d.unload()
			return errInherited
		}
		start := max(h.LastSeq, e.start(o.created))
		messages := int(info.State.Subjects[o.subject])
		threshold := d.conf.SnapshotThreshold
		purgeable := h.PreviousSeq >= info.State.FirstSeq
		switch {
		case d.wanted.Load() && (at.seq > h.LastSeq || h.Object == "" || inherited && !h.Inherited):
			todo = snapshotDue
		case at.seq <= h.LastSeq:
			if messages > threshold && purgeable {
				todo = purgeDue
			}
		case messages > threshold && (at.seq-start)*2 > uint64(threshold):
			todo = snapshotDue
		case messages > threshold && purgeable:
			// The snapshot is new; somebody has not read what it contains.
			todo = purgeDue
		case info.State.FirstSeq > start+1:
			// The stream does not begin where the snapshot ends any more.
			todo = snapshotDue
		case h.Object == "":
			if messages > 0 && time.Since(info.Created) >= d.timing.snapshotAge {
				todo = snapshotDue
			}
		case time.Since(time.UnixMilli(h.CreatedMS)) >= d.timing.snapshotAge:
			todo = snapshotDue
		}
		return nil
	})
	return todo, err
}

// delivers looks whether the consumer is there, and is ours, and delivers. What the
// client asks of a consumer that is gone it may never get an answer to.
func (d *Durable) delivers(ctx context.Context, o *opened, at uint64) error {
	info, err := o.consumer.Info(ctx)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return errConsumer
	}
	if err != nil {
		return err
	}
	now := time.Now()
	if at != o.progress || o.since.IsZero() || info.NumPending == 0 && info.Delivered.Stream <= at {
		o.progress, o.since = at, now
	}
	if info.Config.Metadata["instance"] != d.instance || now.Sub(o.since) > d.timing.stall {
		return errConsumer
	}
	return nil
}

// snapshot writes a snapshot, if nobody else is at it and there is something new,
// and shortens the stream by what it contains.
func (d *Durable) snapshot(ctx context.Context, o *opened) (err error) {
	begin := time.Now()
	l, ctx, err := takeLock(ctx, o.locks, "snapshot", d.conf.Replica, d.timing.lockEvery)
	if err != nil {
		return err
	}
	if l == nil {
		d.conf.Log.Info("a snapshot is left out, since another replica holds the lock of snapshots")
		return nil
	}
	defer l.release(ctx)
	defer func() {
		if cause := context.Cause(ctx); err != nil && cause != nil {
			err = fmt.Errorf("%w: %w", cause, err)
		}
	}()
	var before head
	revision, err := readKey(ctx, o.state, keyHead, &before)
	if err != nil {
		return err
	}
	s, done, ok := d.cut(o)
	if !ok {
		return nil
	}
	defer done()
	if before.Stream == s.Meta.Stream && before.Epoch == s.Meta.Epoch && before.LastSeq >= s.LastSeq && !d.wanted.Load() {
		// There is one. Whoever wrote it may have been stopped before it tidied up.
		return d.tidy(ctx, o, before.Object, before.Previous)
	}
	if before.Stream == s.Meta.Stream && before.Epoch == s.Meta.Epoch && before.Inherited && !s.Meta.Inherited {
		return nil // it knows more, and is taken first
	}
	h, err := d.upload(ctx, o, s)
	if err == nil {
		h.Previous, h.PreviousSeq = d.before(&before, o, h.Object, h.Epoch)
		err = writeKey(ctx, o.state, keyHead, h, revision)
	}
	if err != nil {
		d.metrics.snapshot(ctx, snapshotFailed, time.Since(begin))
		// The store may be full of what nobody needs.
		return errors.Join(err, d.tidy(ctx, o, before.Object, before.Previous))
	}
	d.wanted.Store(false)
	d.metrics.snapshot(ctx, snapshotWritten, time.Since(begin))
	d.conf.Log.Info("a snapshot is written", "object", h.Object, "bytes", h.Bytes, "seconds", time.Since(begin).Seconds())
	return errors.Join(d.tidy(ctx, o, h.Object, h.Previous), d.purge(ctx, o))
}

// unload has the next session begin with the newest snapshot.
func (d *Durable) unload() {
	d.sub.mu.Lock()
	defer d.sub.mu.Unlock()
	d.loaded = false
}

// cut begins a snapshot between two messages.
func (d *Durable) cut(o *opened) (s *Snapshot, done func(), ok bool) {
	return d.sub.cut(d.conf.Holdings, true, func(s *Snapshot) bool {
		s.LastSeq = d.at.seq
		s.Meta = SnapshotMeta{Writer: d.conf.Replica, Epoch: d.at.epoch, Stream: d.at.stream, Inherited: d.inherited}
		return d.loaded && d.at.stream == o.created
	})
}

// purge removes the messages that the snapshot before the newest contains and that
// everybody who reads them has acknowledged: if the newest is damaged, that one and the
// stream still make everything.
func (d *Durable) purge(ctx context.Context, o *opened) error {
	var h head
	if _, err := readKey(ctx, o.state, keyHead, &h); err != nil {
		return err
	}
	if h.Stream != o.created {
		return nil
	}
	floor, err := d.floor(ctx, o)
	if err != nil {
		return err
	}
	upTo := min(h.PreviousSeq, floor)
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx) // the lock may be lost
	}
	if upTo == 0 {
		return nil
	}
	if err := o.stream.Purge(ctx, jetstream.WithPurgeSubject(o.subject), jetstream.WithPurgeSequence(upTo+1)); err != nil {
		return fmt.Errorf("purge the stream: %w", err)
	}
	return nil
}

// floor returns the position up to which every consumer of the subject has got the
// messages, and acknowledged them if it is one that does.
func (d *Durable) floor(ctx context.Context, o *opened) (uint64, error) {
	floor := uint64(math.MaxUint64)
	consumers := o.stream.ListConsumers(ctx)
	for c := range consumers.Info() {
		if reads(&c.Config, o.subject) {
			floor = min(floor, c.AckFloor.Stream)
		}
	}
	if err := consumers.Err(); err != nil {
		return 0, fmt.Errorf("list the consumers: %w", err)
	}
	return floor, nil
}

// reads reports whether a consumer may get messages of a subject. A filter with a wildcard
// counts as if it covered the subject.
func reads(c *jetstream.ConsumerConfig, subject string) bool {
	filters := slices.DeleteFunc(append(slices.Clone(c.FilterSubjects), c.FilterSubject), func(f string) bool { return f == "" })
	return len(filters) == 0 || slices.ContainsFunc(filters, func(f string) bool { return f == subject || strings.ContainsAny(f, "*>") })
}
