// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/bus"
)

// Run reads the stream until ctx ends, then takes a last snapshot. After any fault of NATS it
// tries again, and keeps its state meanwhile.
func (d *Reader) Run(ctx context.Context) error {
	var last *opened
	var retry bus.Retry
	for {
		o, err := d.session(ctx)
		d.live.Store(false)
		if o != nil {
			last = o
		}
		if ctx.Err() != nil {
			break
		}
		d.metrics.reopened(err)
		d.conf.Log.Warn("the stream of events is opened anew", "err", err)
		wait := d.timing.retry
		if errors.Is(err, bus.ErrNoJetStream) {
			wait = retry.After(err)
		}
		bus.Wait(ctx, wait/4+rand.N(wait))
	}
	if last != nil {
		d.leave(ctx, last)
	}
	return nil
}

// leave takes a last snapshot, if there are new messages.
func (d *Reader) leave(ctx context.Context, o *opened) {
	if !d.nc.IsConnected() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.conf.Drain)
	defer cancel()
	if err := d.snapshot(ctx, o); err != nil {
		d.conf.Log.Warn("the last snapshot failed", "err", err)
	}
}

// session opens everything, and reads the stream until a fault.
func (d *Reader) session(ctx context.Context) (*opened, error) {
	o, err := d.open(ctx)
	if err != nil {
		return nil, err
	}
	ctx, end := context.WithCancelCause(ctx)
	var parts sync.WaitGroup
	defer parts.Wait()
	defer end(nil)
	parts.Go(func() { end(d.keep(ctx, o)) })
	if err := d.read(ctx, o); err != nil && ctx.Err() == nil {
		return o, err
	}
	return o, context.Cause(ctx)
}

// open opens or creates all that is needed in NATS, brings the state to a position of the
// stream, and creates the consumer that continues from there.
func (d *Reader) open(ctx context.Context) (*opened, error) {
	o, err := d.openStores(ctx)
	if err != nil {
		return nil, err
	}
	for {
		e, err := d.epoch(ctx, o)
		if err != nil {
			return nil, err
		}
		if err := d.ensureState(ctx, o, &e); err != nil {
			return nil, err
		}
		if err := d.subscribe(ctx, o); err != nil {
			return nil, err
		}
		again, err := d.mustRestore(ctx, o)
		if err != nil {
			return nil, err
		}
		if !again {
			d.setPending(d.pending.Load())
			return o, nil
		}
	}
}

// openStores opens or creates the stream, the buckets and the object store.
func (d *Reader) openStores(ctx context.Context) (o *opened, err error) {
	ctx, cancel := d.limited(ctx)
	defer cancel()
	o = &opened{subject: d.scope.Topic(events.Topic), component: d.scope.StreamSubjects(events.Topic)}
	if o.stream, err = openStream(ctx, d.js, d.scope, d.conf.Replicas, d.storage(), &d.timing); err != nil {
		return nil, err
	}
	if d.conf.Retention > 0 {
		if err := d.retain(ctx, o); err != nil {
			return nil, err
		}
	}
	o.created = o.stream.CachedInfo().Created.UnixNano()
	if o.state, err = d.bucket(ctx, "state", 0); err != nil {
		return nil, err
	}
	if o.locks, err = d.bucket(ctx, "lock", d.timing.lockTTL); err != nil {
		return nil, err
	}
	o.objects, err = d.objectStore(ctx)
	return o, err
}

// setPending notes how many messages are not applied yet.
func (d *Reader) setPending(n int64) {
	d.pending.Store(n)
	if n >= nearEnd {
		return
	}
	if d.queryAtEnd.CompareAndSwap(true, false) {
		d.sub.StreamEnd(d.lost.Load())
		d.lost.Store(false)
	}
	d.live.Store(true)
}

// read applies the messages that the consumer delivers.
func (d *Reader) read(ctx context.Context, o *opened) error {
	messages, err := o.consumer.Messages(jetstream.PullMaxMessagesWithBytesLimit(d.timing.fetch, fetchBytes))
	if err != nil {
		return fmt.Errorf("events: read the stream: %w", err)
	}
	defer messages.Stop()
	defer context.AfterFunc(ctx, messages.Stop)()
	for delivered := uint64(1); ; delivered++ {
		m, err := messages.Next()
		if ctx.Err() != nil {
			return nil
		}
		var meta *jetstream.MsgMetadata
		if err == nil {
			meta, err = m.Metadata()
		}
		if err != nil {
			return fmt.Errorf("events: read the stream: %w", err)
		}
		if meta.Sequence.Consumer != delivered {
			return errMissed
		}
		if err := d.applyMessage(ctx, o, m.Data(), meta); err != nil {
			return err
		}
	}
}

// applyMessage applies a message, unless it was applied before.
func (d *Reader) applyMessage(ctx context.Context, o *opened, data []byte, meta *jetstream.MsgMetadata) error {
	before, at := d.Position(), meta.Sequence.Stream
	if at <= before {
		d.metrics.twice.Count()
	} else {
		missing := false
		d.sub.TakeStreamed(ctx, data, func(gap bool) {
			// If other endpoints share the stream, their messages are skipped, too.
			if missing = before > 0 && at > before+1 && (gap || !d.shared.Load()); !missing {
				d.moveTo(at)
			}
		})
		if missing {
			if d.purgedBehind(ctx, o, before) {
				d.lost.Store(true)
				return errPurged // the next session restores a snapshot of a later position, if there is one
			}
			d.moveTo(at)
		}
	}
	d.setPending(int64(meta.NumPending))
	return nil
}
