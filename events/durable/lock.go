// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/internal/bus"
)

// lock is held by at most one process at a time: it is an entry of a bucket whose entries
// expire. The process that created the entry holds the lock while it replaces the entry in
// time. Each replacement names the replaced revision, so a late one fails.
type lock struct {
	bucket   jetstream.KeyValue
	key      string
	revision uint64
	value    []byte

	stop func()
	done sync.WaitGroup
}

// errLockLost is the cause of the end of a holder's context.
var errLockLost = errors.New("the lock is lost")

// takeLock takes the lock if it is free, or if an earlier lock of the same instance was left
// over; otherwise it returns nil. An instance is one process of a replica. It holds at most one
// lock of a key at a time. The returned context ends when the lock is lost. The lock is refreshed
// with this period until release.
func takeLock(
	ctx context.Context, bucket jetstream.KeyValue, key, replica, instance string, every time.Duration,
) (*lock, context.Context, error) {
	value := []byte(replica + " " + instance)
	l := &lock{bucket: bucket, key: key, value: value}
	// An interrupted creation may arrive after remove has looked for it. The entry would
	// then keep every replica from the lock until it expires. So creation gets one more
	// second when ctx ends.
	taking, cancel := context.WithTimeout(context.WithoutCancel(ctx), every)
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, cancel) })()
	var err error
	l.revision, err = bucket.Create(taking, key, value)
	if errors.Is(err, jetstream.ErrKeyExists) {
		e, failed := bucket.Get(taking, key)
		if failed != nil || !bytes.Equal(e.Value(), value) {
			return nil, nil, nil
		}
		l.revision, err = bucket.Update(taking, key, value, e.Revision()) // the entry expires later
	}
	if err != nil {
		l.remove(ctx) // it may be ours: the answer may be lost
		return nil, nil, fmt.Errorf("take the lock: %w", err)
	}
	held, end := context.WithCancelCause(ctx)
	l.stop = func() { end(nil) }
	l.done.Go(func() { l.refresh(held, end, every) })
	return l, held, nil
}

func (l *lock) refresh(ctx context.Context, end context.CancelCauseFunc, every time.Duration) {
	for bus.Wait(ctx, every) {
		limited, cancel := context.WithTimeout(ctx, every)
		revision, err := l.bucket.Update(limited, l.key, l.value, l.revision)
		cancel()
		if err != nil {
			// The revision is unknown now.
			end(fmt.Errorf("%w: %w", errLockLost, err))
			return
		}
		l.revision = revision
	}
}

// release deletes the lock, if it is still held. If that fails, the lock expires.
func (l *lock) release(ctx context.Context) {
	l.stop()
	l.done.Wait()
	l.remove(ctx)
}

// remove deletes the entry if its value is ours. The revision is unknown after an interrupted
// replacement, and a leftover entry would block the lock until it expires.
func (l *lock) remove(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	for range 3 { // a late replacement may change the revision
		e, err := l.bucket.Get(ctx, l.key)
		if err != nil || !bytes.Equal(e.Value(), l.value) ||
			l.bucket.Delete(ctx, l.key, jetstream.LastRevision(e.Revision())) == nil {
			return
		}
	}
}
