// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/wire"
)

// Periods of the worker's side. A record is put three times in its lifetime.
const (
	recordTTL      = 45 * time.Second
	putEvery       = 15 * time.Second
	heartbeatEvery = 2500 * time.Millisecond
)

// maxRecord is the size limit of a record as JSON, which the bucket enforces.
const maxRecord = 64 << 10

const (
	heartbeatTopic = "heartbeat"
	bucketTime     = 2 * time.Second // for one call to the bucket
)

// registration is the workers' side of a scope on the bus: the bucket of records, and the
// subjects of heartbeats.
type registration struct {
	nc       *nats.Conn
	scope    wire.Scope
	replicas int // servers of a NATS cluster that keep a new bucket
}

// Heartbeat is a worker's sign of life.
type Heartbeat struct {
	WorkerID uint64 `json:"worker_id"`
	TS       int64  `json:"ts_ms"`
	Load
}

// bucket opens the bucket of records, and creates it if it does not exist.
func (r *registration) bucket(ctx context.Context) (jetstream.KeyValue, error) {
	js, err := jetstream.New(r.nc)
	if err != nil {
		return nil, err
	}
	name := r.scope.Bucket("workers")
	return bus.OpenOrCreate(ctx, js.KeyValue, js.CreateKeyValue, name, jetstream.KeyValueConfig{
		Bucket: name, Description: "kvroute: records of workers",
		TTL: recordTTL, MaxValueSize: maxRecord, Replicas: max(1, r.replicas),
	})
}

// put puts a record, and returns its revision.
func (r *registration) put(ctx context.Context, id uint64, record []byte) (revision uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, bucketTime)
	defer cancel()
	bucket, err := r.bucket(ctx)
	if err != nil {
		return 0, err
	}
	revision, err = bucket.Put(ctx, wire.WorkerKey(id), record)
	return revision, bus.Explain(err)
}

// errReplaced means that another process has put the record since.
var errReplaced = errors.New("another process has put the record since")

// takeBack removes a record that this process has put with this revision, unless another
// process has put it since. It removes any record if the revision is 0. If the record is gone, the bucket may be a new one: then
// takeBack puts the record once more and removes that one, so that watchers notice it. It
// reads nothing, since workers need not have the right to read.
func (r *registration) takeBack(ctx context.Context, id uint64, record []byte, revision uint64) error {
	ctx, cancel := context.WithTimeout(ctx, bucketTime)
	defer cancel()
	bucket, err := r.bucket(ctx)
	if err != nil {
		return err
	}
	key := wire.WorkerKey(id)
	if revision == 0 {
		return bus.Explain(bucket.Delete(ctx, key))
	}
	if err = bucket.Delete(ctx, key, jetstream.LastRevision(revision)); !outOfSequence(err) {
		return err
	}
	if revision, err = bucket.Update(ctx, key, record, 0); err == nil {
		return bucket.Delete(ctx, key, jetstream.LastRevision(revision))
	}
	if outOfSequence(err) {
		return errReplaced
	}
	return err
}

// outOfSequence reports whether a key had another revision than expected.
func outOfSequence(err error) bool {
	refused, ok := errors.AsType[*jetstream.APIError](err)
	return ok && refused.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence
}

// beat publishes a heartbeat.
func (r *registration) beat(h *Heartbeat) error {
	data, err := json.Marshal(h)
	if err != nil {
		return fmt.Errorf("fleet: write a heartbeat: %w", err)
	}
	return r.nc.Publish(r.scope.Own(heartbeatTopic, wire.WorkerKey(h.WorkerID)), data)
}
