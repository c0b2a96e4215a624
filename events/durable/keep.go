// SPDX-License-Identifier: Apache-2.0

package durable

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

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/bus"
)

// keep checks, while the stream is read, whether it is still the same stream and epoch, and
// whether a snapshot is due. It returns the reason why the session must end.
func (d *Reader) keep(ctx context.Context, o *opened) error {
	for bus.Wait(ctx, d.timing.keepEvery*9/10+rand.N(d.timing.keepEvery/5)) {
		if now := time.Now(); now.Sub(d.lastProbe) >= d.timing.probe {
			d.lastProbe = now
			d.probe(ctx, o)
		}
		due, err := d.findDue(ctx, o)
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
			limited, cancel := d.limited(ctx)
			err = d.purge(limited, o)
			cancel()
		} else {
			err = d.snapshot(ctx, o)
		}
		if err != nil && ctx.Err() == nil {
			d.conf.Log.Warn("a snapshot failed; it is tried again", "err", err)
		}
	}
	return nil
}

// probe finds out whether JetStream stores events. A replica that only reads does not notice a
// full store.
func (d *Reader) probe(ctx context.Context, o *opened) {
	limited, cancel := d.limited(ctx)
	defer cancel()
	_, err := o.locks.Put(limited, keyProbe, []byte(d.instance))
	switch {
	case ctx.Err() != nil || !d.nc.IsConnected():
		return
	case err == nil:
		d.refusals = 0
		if d.refuses.CompareAndSwap(true, false) {
			d.conf.Log.Info("JetStream stores events again")
			d.sub.Stall(false)
			d.sub.Audit("JetStream did not store events")
		}
		return
	}
	// A single failure may come from a slow server, or from the election of a leader.
	if d.refusals++; d.refusals < 2 {
		return
	}
	if d.refuses.CompareAndSwap(false, true) {
		d.conf.Log.Warn("JetStream does not store events, so ranks are suspect: give it more storage, or delete other data in it", "err", bus.Explain(err))
		d.sub.Stall(true)
	}
	if now := time.Now(); now.Sub(d.lastAudit) >= d.timing.audit {
		d.lastAudit = now
		d.sub.Audit("JetStream does not store events")
	}
}

// The work that may be due.
type due int

const (
	nothing due = iota
	purgeDue
	snapshotDue
)

// findDue returns the work that is due, or the reason why the session must end.
func (d *Reader) findDue(ctx context.Context, o *opened) (todo due, err error) {
	ctx, cancel := d.limited(ctx)
	defer cancel()
	info, err := o.stream.Info(ctx, o.everybody())
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound), err == nil && info.Created.UnixNano() != o.created:
		return nothing, errNewStream
	case err != nil:
		return nothing, err
	}
	d.others(o, info)
	e, err := d.readEpoch(ctx, o)
	if err != nil {
		return nothing, err
	}
	h, _, err := o.head(ctx)
	if err != nil {
		return nothing, err
	}
	at := d.position()
	if e.N != at.epoch {
		return nothing, errEpoch
	}
	if err := d.delivers(ctx, o, at.seq); err != nil {
		return nothing, err
	}
	if h.Stream != at.stream || h.Epoch != at.epoch {
		h = head{}
	}
	if h.Inherited && !at.inherited && !slices.Contains(d.damaged, h.Object) {
		d.unload()
		return nothing, errInherited
	}
	start := max(h.LastSeq, e.start(o.created))
	messages := int(info.State.Subjects[o.subject])
	many, news := messages > d.conf.SnapshotThreshold, at.seq > h.LastSeq
	age := time.Since(info.Created)
	if h.Object != "" {
		age = time.Since(time.UnixMilli(h.CreatedMS))
	}
	switch {
	case d.wanted.Load() && (news || h.Object == "" || at.inherited && !h.Inherited),
		news && many && (at.seq-start)*2 > uint64(d.conf.SnapshotThreshold),
		news && info.State.FirstSeq > start+1, // the stream no longer begins at the end of the snapshot
		news && age >= d.timing.snapshotAge && (h.Object != "" || messages > 0):
		todo = snapshotDue
	case many && h.PreviousSeq >= info.State.FirstSeq: // a consumer had not got all messages
		todo = purgeDue
	}
	return todo, nil
}

// delivers checks whether the consumer exists, is ours and delivers. The client may wait
// forever for a consumer that was deleted.
func (d *Reader) delivers(ctx context.Context, o *opened, at uint64) error {
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

// snapshot writes a snapshot, if no other replica does and there are new messages, and purges
// the stream.
func (d *Reader) snapshot(ctx context.Context, o *opened) (err error) {
	begin := time.Now()
	l, ctx, err := takeLock(ctx, o.locks, "snapshot", d.conf.Replica, d.instance, d.timing.lockEvery)
	if err != nil {
		return err
	}
	if l == nil {
		d.conf.Log.Info("no snapshot is taken: another replica holds the lock")
		return nil
	}
	defer l.release(ctx)
	defer func() {
		if cause := context.Cause(ctx); err != nil && cause != nil {
			err = fmt.Errorf("%w: %w", cause, err)
		}
	}()
	before, revision, err := o.head(ctx)
	if err != nil {
		return err
	}
	s, done, ok := d.beginSnapshot(o)
	if !ok {
		return nil
	}
	defer done()
	if before.Stream == s.Meta.Stream && before.Epoch == s.Meta.Epoch && before.LastSeq >= s.LastSeq && !d.wanted.Load() {
		// There is one. Its writer may have ended before it tidied up.
		return d.tidy(ctx, o, before.Object, before.Previous)
	}
	if before.Stream == s.Meta.Stream && before.Epoch == s.Meta.Epoch && before.Inherited && !s.Meta.Inherited {
		return nil // that one has more state, and is restored first
	}
	h, err := d.upload(ctx, o, s)
	if err == nil {
		h.Previous, h.PreviousSeq = d.previous(&before, o, h.Object, h.Epoch)
		err = writeKey(ctx, o.state, keyHead, h, revision)
	}
	if err != nil {
		d.metrics.snapshot(ctx, snapshotFailed, time.Since(begin))
		// The store may be full of unused data.
		return errors.Join(err, d.tidy(ctx, o, before.Object, before.Previous))
	}
	d.wanted.Store(false)
	d.metrics.snapshot(ctx, snapshotWritten, time.Since(begin))
	d.conf.Log.Info("a snapshot is written", "object", h.Object, "bytes", h.Bytes, "seconds", time.Since(begin).Seconds())
	return errors.Join(d.tidy(ctx, o, h.Object, h.Previous), d.purge(ctx, o))
}

// unload makes the next session begin with the newest snapshot.
func (d *Reader) unload() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.at.loaded = false
}

// beginSnapshot begins a snapshot between two messages.
func (d *Reader) beginSnapshot(o *opened) (s *events.Snapshot, done func(), ok bool) {
	return d.sub.SnapshotStreamed(d.conf.Holdings, func(s *events.Snapshot) bool {
		at := d.position()
		s.LastSeq = at.seq
		s.Meta = events.SnapshotMeta{Writer: d.conf.Replica, Epoch: at.epoch, Stream: at.stream, Inherited: at.inherited}
		return at.loaded && at.stream == o.created && !d.lost.Load() // later the ranks are partial
	})
}

// purge removes the messages that the snapshot before the newest contains and that every
// consumer has got. If the newest snapshot is damaged, the one before and the stream still have
// the whole state.
func (d *Reader) purge(ctx context.Context, o *opened) error {
	h, _, err := o.head(ctx)
	if err != nil {
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
	return o.purgeBefore(ctx, upTo+1)
}

// floor returns the position up to which every consumer of the subject has got the messages,
// and has acknowledged them if it acknowledges.
func (d *Reader) floor(ctx context.Context, o *opened) (uint64, error) {
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
	filters := slices.DeleteFunc(append(slices.Clone(c.FilterSubjects), c.FilterSubject),
		func(f string) bool { return f == "" })
	return len(filters) == 0 ||
		slices.ContainsFunc(filters, func(f string) bool { return f == subject || strings.ContainsAny(f, "*>") })
}
