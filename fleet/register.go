// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// Reasons why a worker cannot register or send a heartbeat over HTTP.
var (
	ErrNotRegistered = errors.New("the worker is not registered")
	ErrConfigured    = errors.New("the worker is one of the configuration")
	ErrBusAway       = errors.New("the registry cannot be reached")
)

// Register puts the record of a worker that has no connection to NATS into the registry.
// All router replicas see it there for 45 s after the last [Registry.Beat]. The error
// describes what is wrong with the record, or wraps [ErrConfigured] or [ErrBusAway].
func (r *Registry) Register(ctx context.Context, record Record) (router.WorkerInfo, error) {
	info, err := record.Registered(r.conf.Networks)
	if err != nil {
		return info, err
	}
	record.V, record.WorkerID = 1, info.ID
	if err := r.known(info.ID); errors.Is(err, ErrConfigured) {
		return info, err
	}
	if r.conf.Room != nil { // before the record reaches other replicas
		if err := r.conf.Room(info); err != nil {
			return info, err
		}
	}
	if err := r.put(ctx, &record); err != nil {
		return info, err
	}
	// The worker may send a heartbeat before the bucket's watcher delivers the record.
	r.locked(func(t *Table) {
		now := r.conf.Now()
		if err = t.Put(now, record); err == nil {
			t.workers[info.ID].put = now
		}
	})
	return info, err
}

// Deregister removes a worker's record. The errors wrap [ErrNotRegistered],
// [ErrConfigured] or [ErrBusAway].
func (r *Registry) Deregister(ctx context.Context, id uint64) error {
	if err := r.known(id); err != nil {
		return err
	}
	if err := r.registration.takeBack(ctx, id, nil, 0); err != nil {
		return fmt.Errorf("%w: %w", ErrBusAway, err)
	}
	r.locked(func(t *Table) { t.Delete(r.conf.Now(), id) })
	return nil
}

// Beat publishes a worker's heartbeat for all router replicas, and puts its record again
// when that is due. The errors are those of [Registry.Deregister].
func (r *Registry) Beat(ctx context.Context, h Heartbeat) error {
	if err := r.known(h.WorkerID); err != nil && !errors.Is(err, ErrConfigured) {
		return err
	}
	now := r.conf.Now()
	h.TS = now.UnixMilli()
	if err := r.registration.beat(&h); err != nil {
		return fmt.Errorf("%w: %w", ErrBusAway, err)
	}
	var due *Record
	r.locked(func(t *Table) {
		t.Heartbeat(now, &h)
		if w := t.workers[h.WorkerID]; w != nil && !w.static && now.Sub(w.put) >= putEvery {
			w.put = now
			due = new(w.record)
		}
	})
	if due == nil {
		return nil
	}
	return r.put(ctx, due)
}

// known returns an error unless the worker is registered.
func (r *Registry) known(id uint64) (err error) {
	r.locked(func(t *Table) {
		switch w := t.workers[id]; {
		case w == nil:
			err = ErrNotRegistered
		case w.static:
			err = ErrConfigured
		}
	})
	return err
}

func (r *Registry) put(ctx context.Context, record *Record) error {
	data, err := record.encode()
	if err != nil {
		return err
	}
	if _, err := r.registration.put(ctx, record.WorkerID, data); err != nil {
		return fmt.Errorf("%w: %w", ErrBusAway, err)
	}
	return nil
}

// Find returns the id of a worker by its name or its number.
func (r *Registry) Find(text string) uint64 {
	id := wire.WorkerID(text)
	if n, err := strconv.ParseUint(text, 10, 64); err == nil && errors.Is(r.known(id), ErrNotRegistered) {
		return n
	}
	return id
}
