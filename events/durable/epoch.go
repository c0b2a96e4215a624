// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// epoch is the number of times that the states were reset. When it begins, all replicas drop
// their state, and read the stream from the same message on.
type epoch struct {
	N uint64 `json:"epoch"` // 0: never raised
	// Start is the first message of the epoch, in the stream that was created at the
	// time Stream (unix ns). All messages of a later stream belong to the epoch.
	Start   uint64 `json:"start"`
	Stream  int64  `json:"stream"`
	Replica string `json:"replica"` // that raised it
}

// start returns the position before the epoch's first message in a stream.
func (e *epoch) start(stream int64) uint64 {
	if e.Stream != stream || e.Start == 0 {
		return 0
	}
	return e.Start - 1
}

// head names the newest snapshot, and the one to restore if the newest is damaged.
type head struct {
	Object    string `json:"object"`
	LastSeq   uint64 `json:"last_seq"`
	CreatedMS int64  `json:"created_ms"`
	Bytes     int64  `json:"bytes"`
	Epoch     uint64 `json:"epoch"`
	Stream    int64  `json:"stream"`
	// Inherited: the snapshot has state that is older than the stream. A replica without such
	// state restores it in place of its own.
	Inherited bool `json:"inherited,omitempty"`
	// Previous is the snapshot before, "" if there is no good one. PreviousSeq is its position,
	// 0 if that is of another stream.
	Previous    string `json:"previous,omitempty"`
	PreviousSeq uint64 `json:"previous_seq,omitempty"`
}

// head reads the head and its revision.
func (o *opened) head(ctx context.Context) (h head, revision uint64, err error) {
	revision, err = readKey(ctx, o.state, keyHead, &h)
	return h, revision, err
}

// previous returns Previous and PreviousSeq of a new head: the newest known snapshot that is not
// damaged.
func (d *Reader) previous(h *head, o *opened, newest string, epoch uint64) (object string, seq uint64) {
	known := []head{d.base}
	if h.Epoch == epoch {
		known = []head{*h, {Object: h.Previous, LastSeq: h.PreviousSeq, Stream: h.Stream}, d.base}
	}
	for _, k := range known {
		switch {
		case k.Object == "" || k.Object == newest || slices.Contains(d.damaged, k.Object):
		case k.Stream != o.created:
			return k.Object, 0
		default:
			return k.Object, k.LastSeq
		}
	}
	return "", 0
}

// Keys of the bucket of states.
const (
	keyEpoch = "epoch"
	keyHead  = "head"
	keyProbe = "probe" // in the bucket of locks, whose entries expire
)

// readKey reads a key into v. revision is 0 if the key is missing or was deleted. A value that
// cannot be decoded counts as missing, but keeps its revision.
func readKey[T any](ctx context.Context, bucket jetstream.KeyValue, key string, v *T) (revision uint64, err error) {
	e, err := bucket.Get(ctx, key)
	switch {
	case errors.Is(err, jetstream.ErrKeyNotFound):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("read %s: %w", key, err)
	}
	if json.Unmarshal(e.Value(), v) != nil {
		*v = *new(T)
	}
	return e.Revision(), nil
}

// writeKey writes a key if its revision is unchanged.
func writeKey[T any](ctx context.Context, bucket jetstream.KeyValue, key string, v T, revision uint64) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if revision == 0 {
		_, err = bucket.Create(ctx, key, data)
	} else {
		_, err = bucket.Update(ctx, key, data, revision)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", key, err)
	}
	return nil
}

// maxEpoch is the largest number of an epoch. Resets by hand stay far below it.
const maxEpoch = 1 << 53

// readEpoch returns the current epoch. It refuses an epoch that begins above the stream's next message, which no
// replica writes: every replica would drop all messages up to there. The epoch before it then stays, which is that
// of the state or, without a state, of the newest snapshot.
func (d *Reader) readEpoch(ctx context.Context, o *opened) (e epoch, err error) {
	revision, err := readKey(ctx, o.state, keyEpoch, &e)
	at := d.position()
	if err != nil || e.N < maxEpoch && (e.Stream != o.created || at.stream == o.created && e.Start <= at.seq+1) {
		return e, err
	}
	info, err := o.stream.Info(ctx) // later than the epoch, so it contains all messages before the epoch
	if err != nil {
		return e, fmt.Errorf("look at the stream: %w", err)
	}
	if e.N < maxEpoch && e.Start <= info.State.LastSeq+1 {
		return e, nil
	}
	if d.refusedEpoch != revision {
		d.refusedEpoch = revision
		d.metrics.epochs.Add(1)
		d.conf.Log.Error("the epoch in the state bucket is refused: it begins above the last message of the stream; reset the states to replace it",
			"epoch", e.N, "start", e.Start, "last", info.State.LastSeq, "replica", e.Replica)
	}
	if at.loaded {
		return epoch{N: at.epoch}, nil
	}
	h, _, err := o.head(ctx)
	return epoch{N: h.Epoch}, err
}

// raiseEpoch begins a new epoch after the last message of the stream, and removes the state
// of the one before.
func (o *opened) raiseEpoch(ctx context.Context, replica string) (epoch, error) {
	var e epoch
	revision, err := readKey(ctx, o.state, keyEpoch, &e)
	if err != nil {
		return e, err
	}
	info, err := o.stream.Info(ctx)
	if err != nil {
		return e, fmt.Errorf("look at the stream: %w", err)
	}
	if e.N >= maxEpoch-1 { // no replica uses it, or the one after it
		e.N = uint64(time.Now().Unix())
	}
	e = epoch{N: e.N + 1, Start: info.State.LastSeq + 1, Stream: info.Created.UnixNano(), Replica: replica}
	if err := writeKey(ctx, o.state, keyEpoch, e, revision); err != nil {
		return e, err
	}
	// From here on no replica reads the old state. Leftovers do no harm.
	if err := o.state.Delete(ctx, keyHead); err != nil {
		return e, fmt.Errorf("delete %s: %w", keyHead, err)
	}
	return e, o.purgeBefore(ctx, e.Start)
}

// purgeBefore removes the messages before a position of the stream.
func (o *opened) purgeBefore(ctx context.Context, seq uint64) error {
	err := o.stream.Purge(ctx, jetstream.WithPurgeSubject(o.subject), jetstream.WithPurgeSequence(seq))
	if err != nil {
		return fmt.Errorf("purge the stream: %w", err)
	}
	return nil
}
