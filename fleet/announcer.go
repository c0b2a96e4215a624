// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/wire"
)

// AnnouncerConfig describes the worker of an [Announcer]. Record is required.
type AnnouncerConfig struct {
	Scope  wire.Scope
	Record Record
	// Replicas is the number of servers of a NATS cluster that keep the registry, if this
	// process creates it. Default 1.
	Replicas int
	// Load returns the load for a heartbeat. Default: heartbeats contain none.
	Load func() Load
	// Alive reports whether the engine is alive. While it is not, the announcer sends
	// neither records nor heartbeats. Default always.
	Alive func() bool
	// Now is the clock of the heartbeats' time stamps. Default [time.Now].
	Now func() time.Time
	// Log receives a line when the registry is not available. Default none.
	Log *slog.Logger
}

// Announcer registers a worker and keeps it registered.
//
// Invariant: while it runs and the worker is alive, the record was put at most putEvery
// ago, or the announcer tries again every second. A changed record is put at once.
type Announcer struct {
	conf       AnnouncerConfig
	registry   registration
	id         uint64
	changed    chan struct{}          // holds a token while the newest record has not been put
	registered chan struct{}          // closed once a record was put
	revision   uint64                 // of the record as Run put it last; 0 = never
	record     atomic.Pointer[[]byte] // as JSON
}

// NewAnnouncer returns an announcer on a connection that the caller closes. It returns an
// error for a record that registries would refuse.
func NewAnnouncer(nc *nats.Conn, conf AnnouncerConfig) (*Announcer, error) {
	if conf.Now == nil {
		conf.Now = time.Now
	}
	if conf.Alive == nil {
		conf.Alive = func() bool { return true }
	}
	conf.Log = meter.Log(conf.Log)
	a := &Announcer{
		conf: conf, registry: registration{nc, conf.Scope, conf.Replicas}, id: conf.Record.ID(),
		changed: make(chan struct{}, 1), registered: make(chan struct{}),
	}
	return a, a.Update(conf.Record)
}

// Registered is closed once the worker is registered.
func (a *Announcer) Registered() <-chan struct{} { return a.registered }

// Update changes the record. The worker keeps its id.
func (a *Announcer) Update(r Record) error {
	if _, err := r.Info(Networks{}); err != nil {
		return err
	}
	r.V, r.WorkerID = 1, a.id
	data, err := r.encode()
	if err != nil {
		return err
	}
	a.record.Store(&data)
	select {
	case a.changed <- struct{}{}:
	default:
	}
	return nil
}

// Run keeps the worker registered and sends its heartbeats until ctx ends. Then it removes
// the record.
func (a *Announcer) Run(ctx context.Context) error {
	beat := time.NewTicker(heartbeatEvery)
	defer beat.Stop()
	// The record is put again soon after a failure, and after a reconnection, since NATS may
	// have lost it.
	// At first it has changed: NewAnnouncer has left a token.
	next, connection := time.NewTimer(putEvery), a.registry.nc.Stats().Reconnects
	defer next.Stop()
	var retry bus.Retry
	for {
		select {
		case <-ctx.Done():
			a.leave(ctx)
			return nil
		case <-a.changed:
			next.Reset(0)
		case <-next.C:
			if !a.conf.Alive() {
				next.Reset(time.Second)
				continue
			}
			revision, err := a.registry.put(ctx, a.id, *a.record.Load())
			if err != nil && ctx.Err() == nil {
				wait := retry.After(err)
				a.conf.Log.Warn("the worker cannot register; it tries again", "err", err, "in", wait)
				next.Reset(wait)
				continue
			}
			a.revision = cmp.Or(revision, a.revision)
			select {
			case <-a.registered:
			default:
				close(a.registered)
			}
			a.heartbeat()
			next.Reset(putEvery)
		case <-beat.C:
			if now := a.registry.nc.Stats().Reconnects; now != connection {
				connection = now
				next.Reset(0)
			}
			if a.conf.Alive() {
				a.heartbeat()
			}
		}
	}
}

// leave removes the record. After a failure the record expires.
func (a *Announcer) leave(ctx context.Context) {
	if !a.registry.nc.IsConnected() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	err := a.registry.takeBack(ctx, a.id, *a.record.Load(), a.revision)
	switch {
	case errors.Is(err, errReplaced):
		a.conf.Log.Info("the worker's record stays: another process has put it since")
	case err != nil:
		a.conf.Log.Warn("the worker's record cannot be removed; it expires", "err", err)
	}
}

func (a *Announcer) heartbeat() {
	h := Heartbeat{WorkerID: a.id, TS: a.conf.Now().UnixMilli()}
	if a.conf.Load != nil {
		h.Load = a.conf.Load()
	}
	if err := a.registry.beat(&h); err != nil {
		a.conf.Log.Debug("a heartbeat cannot be sent", "err", err)
	}
}
