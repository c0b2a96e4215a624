// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/wire"
)

// limited returns a context with a deadline for a few requests.
func (d *Reader) limited(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, d.timing.call)
}

// OpenStream opens the stream of a scope's component. It creates a missing one with the
// default retention.
func OpenStream(ctx context.Context, js jetstream.JetStream, scope wire.Scope, replicas int) (jetstream.Stream, error) {
	t := defaultTiming()
	return openStream(ctx, js, scope, replicas, jetstream.FileStorage, &t)
}

// openStream opens the stream of a scope's component, and creates a missing one. The first
// publisher or router that needs the stream creates it. An existing one stays as it is.
func openStream(
	ctx context.Context, js jetstream.JetStream, scope wire.Scope, replicas int, storage jetstream.StorageType, t *timing,
) (jetstream.Stream, error) {
	return bus.OpenOrCreate(ctx, js.Stream, js.CreateStream, scope.Stream(), jetstream.StreamConfig{
		Name:        scope.Stream(),
		Description: "kvroute: what happens in the caches of workers",
		Subjects:    []string{scope.StreamSubjects(events.Topic)},
		Retention:   jetstream.LimitsPolicy,
		Discard:     jetstream.DiscardOld,
		MaxAge:      t.maxAge,
		Duplicates:  min(t.duplicates, t.maxAge),
		Storage:     storage,
		Replicas:    replicas,
	})
}

// retain applies the configured retention to a stream that another process created.
func (d *Reader) retain(ctx context.Context, o *opened) (err error) {
	conf := o.stream.CachedInfo().Config
	if conf.MaxAge == d.conf.Retention {
		return nil
	}
	conf.MaxAge, conf.Duplicates = d.conf.Retention, min(conf.Duplicates, d.conf.Retention)
	if o.stream, err = d.js.UpdateStream(ctx, conf); err != nil {
		return fmt.Errorf("events: change the retention of stream %s: %w", conf.Name, bus.Explain(err))
	}
	return nil
}

func (d *Reader) storage() jetstream.StorageType {
	if d.conf.Memory {
		return jetstream.MemoryStorage
	}
	return jetstream.FileStorage
}

func (d *Reader) bucket(ctx context.Context, kind string, ttl time.Duration) (jetstream.KeyValue, error) {
	name := d.scope.Bucket(kind)
	return bus.OpenOrCreate(ctx, d.js.KeyValue, d.js.CreateKeyValue, name, jetstream.KeyValueConfig{
		Bucket: name, Description: "kvroute: " + kind + " of the events", TTL: ttl, History: 1,
		Replicas: d.conf.Replicas, Storage: d.storage(), MaxValueSize: 64 << 10,
	})
}

func (d *Reader) objectStore(ctx context.Context) (jetstream.ObjectStore, error) {
	name := d.scope.Bucket("snap")
	return bus.OpenOrCreate(ctx, d.js.ObjectStore, d.js.CreateObjectStore, name, jetstream.ObjectStoreConfig{
		Bucket: name, Description: "kvroute: snapshots of the index",
		Replicas: d.conf.Replicas, Storage: d.storage(),
	})
}

// epoch returns the current epoch. It raises the epoch once if the configuration says so.
func (d *Reader) epoch(ctx context.Context, o *opened) (e epoch, err error) {
	ctx, cancel := d.limited(ctx)
	defer cancel()
	if d.reset {
		if e, err = o.raiseEpoch(ctx, d.conf.Replica); err != nil {
			return e, fmt.Errorf("events: reset states: %w", err)
		}
		d.reset = false
		d.conf.Log.Warn("states are reset: all replicas forget what the workers cache", "epoch", e.N)
		return e, nil
	}
	return d.readEpoch(ctx, o)
}

// subscribe creates the consumer after the position. It deletes an existing one of this
// name, whose position belongs to lost state.
func (d *Reader) subscribe(ctx context.Context, o *opened) error {
	ctx, cancel := d.limited(ctx)
	defer cancel()
	if was, err := o.stream.Consumer(ctx, d.consumer); err == nil {
		if by := was.CachedInfo().Config.Metadata["instance"]; d.subscribed && by != "" && by != d.instance {
			// It was created after ours, so its owner is alive.
			d.consumer += "-" + d.instance
			d.conf.Log.Error("another process has this replica's name; this one goes on under a name of its own",
				"replica", d.conf.Replica, "consumer", d.consumer)
		}
	}
	if err := o.stream.DeleteConsumer(ctx, d.consumer); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return fmt.Errorf("events: delete consumer %s: %w", d.consumer, err)
	}
	var err error
	// No acknowledgements: they would only report what was applied. A message that is purged
	// before it is applied is in a snapshot.
	o.consumer, err = o.stream.CreateConsumer(ctx, jetstream.ConsumerConfig{
		Name:              d.consumer,
		Durable:           d.consumer,
		Description:       "kvroute replica " + d.conf.Replica,
		Metadata:          map[string]string{"instance": d.instance},
		FilterSubjects:    []string{o.subject},
		DeliverPolicy:     jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:       d.Position() + 1,
		AckPolicy:         jetstream.AckNonePolicy,
		InactiveThreshold: d.timing.inactive,
	})
	if err != nil {
		return fmt.Errorf("events: make consumer %s: %w", d.consumer, err)
	}
	d.subscribed = true
	d.pending.Store(int64(o.consumer.CachedInfo().NumPending))
	return nil
}
