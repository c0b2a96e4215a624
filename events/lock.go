// SPDX-License-Identifier: Apache-2.0

package events

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// lock is a right that at most one process has at a time: an entry of a bucket
// whose entries expire. Whoever made it has the right, as long as it replaces the
// entry in time; each replacement names the revision that it replaces, so one that
// comes too late fails.
type lock struct {
	bucket   jetstream.KeyValue
	key      string
	revision uint64
	value    []byte

	stop func()
	done sync.WaitGroup
}

// errLockLost ends the context of a lock's holder.
var errLockLost = errors.New("the lock is lost")

// takeLock takes the lock if it is free; else it returns nil. The context that it
// returns ends with the lock, which is refreshed every so often until release.
func takeLock(ctx context.Context, bucket jetstream.KeyValue, key, holder string, every time.Duration) (*lock, context.Context, error) {
	value, err := json.Marshal(struct {
		Replica string `json:"replica"`
		Token   uint64 `json:"token"`
	}{holder, rand.Uint64() & (1<<53 - 1)})
	if err != nil {
		return nil, nil, err
	}
	l := &lock{bucket: bucket, key: key, value: value}
	// An interrupted creation may arrive after remove has looked for it. The entry would
	// then keep every replica from the lock until it expires. So creation gets one more
	// second when ctx ends.
	taking, cancel := context.WithTimeout(context.WithoutCancel(ctx), every)
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, cancel) })()
	switch l.revision, err = bucket.Create(taking, key, value); {
	case errors.Is(err, jetstream.ErrKeyExists):
		return nil, nil, nil
	case err != nil:
		l.remove(ctx) // it may be ours: not every answer arrives
		return nil, nil, fmt.Errorf("take the lock: %w", err)
	}
	held, end := context.WithCancelCause(ctx)
	l.stop = func() { end(nil) }
	l.done.Go(func() { l.refresh(held, end, every) })
	return l, held, nil
}

func (l *lock) refresh(ctx context.Context, end context.CancelCauseFunc, every time.Duration) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(every):
		}
		limited, cancel := context.WithTimeout(ctx, every)
		revision, err := l.bucket.Update(limited, l.key, l.value, l.revision)
		cancel()
		if err != nil {
			// Whether it arrived or not: what we know of the revision is of no use.
			end(fmt.Errorf("%w: %w", errLockLost, err))
			return
		}
		l.revision = revision
	}
}

// release gives the lock back, if it is still held. If that fails it expires.
func (l *lock) release(ctx context.Context) {
	l.stop()
	l.done.Wait()
	l.remove(ctx)
}

// remove deletes the entry if it is ours, as its value says: of a replacement that was
// interrupted the revision is not known, and an entry that nobody deletes keeps all
// from the lock until it expires.
func (l *lock) remove(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	for range 3 { // a replacement that is still under way comes between
		e, err := l.bucket.Get(ctx, l.key)
		if err != nil || !bytes.Equal(e.Value(), l.value) ||
			l.bucket.Delete(ctx, l.key, jetstream.LastRevision(e.Revision())) == nil {
			return
		}
	}
}
