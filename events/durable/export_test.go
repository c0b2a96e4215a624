// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"context"
	"encoding/json"
	"io"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// TakeLock takes the lock of a bucket for an instance, if the lock is free or left over by the instance.
func TakeLock(ctx context.Context, kv jetstream.KeyValue, instance string, every time.Duration) (held context.Context, release func(), ok bool) {
	l, held, err := takeLock(ctx, kv, "snapshot", "test", instance, every)
	if err != nil || l == nil {
		return nil, nil, false
	}
	return held, func() { l.release(ctx) }, true
}

// Hurry shortens a Reader's intervals from a minute to about a second; more makes further
// changes.
func (d *Reader) Hurry(more ...func(*Timing)) {
	t := Timing{
		Inactive: 5 * time.Second, LockTTL: 2 * time.Second, LockEvery: 500 * time.Millisecond,
		KeepEvery: 20 * time.Millisecond, SnapshotAge: time.Hour, SnapshotRest: 50 * time.Millisecond,
	}
	for _, change := range more {
		change(&t)
	}
	d.timing.inactive, d.timing.lockTTL, d.timing.lockEvery = t.Inactive, t.LockTTL, t.LockEvery
	d.timing.keepEvery, d.timing.snapshotAge, d.timing.snapshotRest = t.KeepEvery, t.SnapshotAge, t.SnapshotRest
	d.timing.retry = 20 * time.Millisecond
	d.timing.call = 5 * time.Second
	d.timing.probe, d.timing.audit = 100*time.Millisecond, time.Second
	d.timing.stall = 2 * time.Second
	if t.Fetch > 0 {
		d.timing.fetch = t.Fetch
	}
}

// Timing holds the intervals and limits that tests change.
type Timing struct {
	Inactive, LockTTL, LockEvery, KeepEvery, SnapshotAge, SnapshotRest time.Duration
	// Fetch is the number of messages fetched ahead; 0 keeps the default.
	Fetch int
}

// Consumer returns the name of the consumer.
func (d *Reader) Consumer() string { return d.consumer }

// OpenObject opens an object of a store for reading, and does not count its chunks before.
func OpenObject(ctx context.Context, objects jetstream.ObjectStore, name string, stall time.Duration) (r io.Reader, done func(), err error) {
	o, err := openObject(ctx, objects, name, time.Minute, stall)
	if err != nil {
		return nil, nil, err
	}
	return o, o.close, nil
}

// WriteKey writes a key in the same way as the head is written.
func WriteKey(ctx context.Context, kv jetstream.KeyValue, key string, v any, revision uint64) error {
	return writeKey(ctx, kv, key, v, revision)
}

// GoldenEpoch and GoldenHead are values of the keys in the bucket of the stream's state.
var (
	GoldenEpoch = epoch{N: 2, Start: 43, Stream: 1755000000000000000, Replica: "replica-a"}
	GoldenHead  = head{
		Object: "index-00000000000000000042", LastSeq: 42, CreatedMS: 1755000000500, Bytes: 700, Epoch: 2, Stream: 1755000000000000000,
		Inherited: true, Previous: "index-00000000000000000040", PreviousSeq: 40,
	}
)

// ReadKey decodes such a value.
func ReadKey(file string, data []byte) (any, error) {
	if file == "epoch.json" {
		var e epoch
		err := json.Unmarshal(data, &e)
		return e, err
	}
	var h head
	err := json.Unmarshal(data, &h)
	return h, err
}
