// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/wire"
)

// AnnouncerConfig says whom an [Announcer] speaks for. Record is required.
type AnnouncerConfig struct {
	Scope  wire.Scope
	Record Record
	// Replicas is how many servers of a NATS cluster keep the registry, if this
	// process makes it. Default 1.
	Replicas int
	// Load is asked for each heartbeat. Nil says nothing of the load.
	Load func() Load
	// Alive is asked before each heartbeat: the record and the heartbeats of an
	// engine that is not alive stay out, and it ages. Default always.
	Alive func() bool
	// Now is the clock of the heartbeats' time stamps. Default [time.Now].
	Now func() time.Time
	// Log takes a line when the registry cannot be reached. Default none.
	Log *slog.Logger
}

// Announcer registers a worker and keeps it registered.
//
// Invariant: while it runs and the worker is alive, the record was put at most putEvery
// ago, or NATS does not take it and it is tried every second; a record that changed is
// put at once, the newest last.
type Announcer struct {
	conf       AnnouncerConfig
	nc         *nats.Conn
	id         uint64
	changed    chan struct{} // holds one token while the record is not as it was put
	registered chan struct{} // closed once the record was put
	revision   uint64        // of the record as Run put it; 0 if that is not known

	mu sync.Mutex
	// mu guards the field below.
	record []byte
}

// NewAnnouncer returns an announcer on a connection that stays its caller's. A
// record that registries would refuse is an error.
func NewAnnouncer(nc *nats.Conn, conf AnnouncerConfig) (*Announcer, error) {
	if _, err := conf.Record.Info(Networks{}); err != nil {
		return nil, err
	}
	if conf.Now == nil {
		conf.Now = time.Now
	}
	conf.Log = cmp.Or(conf.Log, slog.New(slog.DiscardHandler))
	id := conf.Record.ID()
	conf.Record.V, conf.Record.WorkerID = 1, id
	data, err := conf.Record.encode()
	if err != nil {
		return nil, err
	}
	return &Announcer{conf: conf, nc: nc, record: data, id: id, changed: make(chan struct{}, 1), registered: make(chan struct{})}, nil
}

// Registered is closed once the worker is registered.
func (a *Announcer) Registered() <-chan struct{} { return a.registered }

// Update changes the record. A worker stays who it is: its id does not change.
func (a *Announcer) Update(r Record) error {
	if _, err := r.Info(Networks{}); err != nil {
		return err
	}
	r.V, r.WorkerID = 1, a.id
	data, err := r.encode()
	if err != nil {
		return err
	}
	a.mu.Lock()
	a.record = data
	a.mu.Unlock()
	select {
	case a.changed <- struct{}{}:
	default:
	}
	return nil
}

func (a *Announcer) alive() bool { return a.conf.Alive == nil || a.conf.Alive() }

// Run registers the worker, keeps the record and the heartbeats coming until ctx
// ends, and takes the record back.
func (a *Announcer) Run(ctx context.Context) error {
	beat := time.NewTicker(heartbeatEvery)
	defer beat.Stop()
	// The record is put again soon after a failure and after NATS came back,
	// which may have lost it.
	next, connection := time.NewTimer(0), a.nc.Stats().Reconnects
	defer next.Stop()
	var retry bus.Retry
	for {
		select {
		case <-ctx.Done():
			return a.leave(ctx)
		case <-a.changed:
			next.Reset(0)
		case <-next.C:
			if !a.alive() {
				next.Reset(time.Second)
				continue
			}
			err := a.put(ctx)
			if err != nil && ctx.Err() == nil {
				wait := retry.After(err)
				a.conf.Log.Warn("the worker cannot register; it tries again", "err", err, "in", wait)
				next.Reset(wait)
				continue
			}
			select {
			case <-a.registered:
			default:
				close(a.registered)
			}
			a.heartbeat()
			next.Reset(putEvery)
		case <-beat.C:
			if now := a.nc.Stats().Reconnects; now != connection {
				connection = now
				next.Reset(0)
			}
			if a.alive() {
				a.heartbeat()
			}
		}
	}
}

func (a *Announcer) put(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	bucket, err := openBucket(ctx, a.nc, a.conf.Scope, a.conf.Replicas)
	if err != nil {
		return err
	}
	a.mu.Lock()
	record := a.record
	a.mu.Unlock()
	a.revision, err = bucket.Put(ctx, wire.WorkerKey(a.id), record)
	return err
}

// leave takes the record back, unless another process has put one since: the worker goes
// on with that. If it fails the record expires by itself.
func (a *Announcer) leave(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if !a.nc.IsConnected() {
		return nil
	}
	bucket, err := openBucket(ctx, a.nc, a.conf.Scope, a.conf.Replicas)
	if err == nil {
		err = a.takeBack(ctx, bucket)
	}
	switch {
	case errors.Is(err, errSucceeded):
		a.conf.Log.Info("the worker's record stays: another process has put one since")
	case err != nil:
		a.conf.Log.Warn("the worker's record could not be taken back; it expires", "err", err)
	}
	return nil
}

var errSucceeded = errors.New("the record is another process's")

// takeBack deletes the record as it was put. If that is not there any more it may be
// another process's, or the bucket another one, which has none: then it is put once more,
// so that who watches the bucket hears that it goes. Nothing is read, which workers may not.
func (a *Announcer) takeBack(ctx context.Context, bucket jetstream.KeyValue) error {
	key := wire.WorkerKey(a.id)
	if a.revision == 0 {
		return bucket.Delete(ctx, key)
	}
	err := bucket.Delete(ctx, key, jetstream.LastRevision(a.revision))
	if !outOfSequence(err) {
		return err
	}
	a.mu.Lock()
	record := a.record
	a.mu.Unlock()
	again, err := bucket.Update(ctx, key, record, 0)
	switch {
	case outOfSequence(err):
		return errSucceeded
	case err != nil:
		return err
	}
	return bucket.Delete(ctx, key, jetstream.LastRevision(again))
}

// outOfSequence says whether a key has another revision than was wanted.
func outOfSequence(err error) bool {
	refused, ok := errors.AsType[*jetstream.APIError](err)
	return ok && refused.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence
}

func (a *Announcer) heartbeat() {
	h := Heartbeat{WorkerID: a.id, TS: a.conf.Now().UnixMilli()}
	if a.conf.Load != nil {
		h.Load = a.conf.Load()
	}
	data, err := json.Marshal(h)
	if err != nil {
		a.conf.Log.Warn("a heartbeat cannot be written", "err", err)
		return
	}
	// What a lost heartbeat means is for the listener to judge.
	_ = a.nc.Publish(a.conf.Scope.Own(heartbeatTopic, wire.WorkerKey(a.id)), data)
}
