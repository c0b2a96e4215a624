// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// Reasons why a worker cannot be registered or heard over HTTP.
var (
	ErrNotRegistered = errors.New("the worker is not registered")
	ErrConfigured    = errors.New("the worker is one of the configuration")
	ErrBusAway       = errors.New("the registry cannot be reached")
)

// behalfTime is how long the registry may take.
const behalfTime = 2 * time.Second

// Register registers a worker that does not speak NATS: its record goes into the
// registry, where all router replicas see it, for 45 s and for as long as [Registry.Beat]
// follows. The error says what is wrong with the record, or is [ErrConfigured] or
// [ErrBusAway], wrapped.
func (r *Registry) Register(ctx context.Context, record Record) (router.WorkerInfo, error) {
	info, err := record.Registered(r.conf.Networks)
	if err != nil {
		return info, err
	}
	record.V, record.WorkerID = 1, info.ID
	err = r.known(info.ID)
	if errors.Is(err, ErrConfigured) {
		return info, err
	}
	if err := r.put(ctx, &record); err != nil {
		return info, err
	}
	// Who registers may send a heartbeat before the registry has told us.
	r.locked(func(t *Table) {
		if err = t.Put(r.conf.Now(), record); err == nil {
			t.workers[info.ID].put = r.conf.Now()
		}
	})
	return info, err
}

// Deregister takes a worker's record back. The errors are [ErrNotRegistered],
// [ErrConfigured] and [ErrBusAway], wrapped.
func (r *Registry) Deregister(ctx context.Context, id uint64) error {
	if err := r.known(id); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, behalfTime)
	defer cancel()
	bucket, err := openBucket(ctx, r.nc, r.conf.Scope, r.conf.Replicas)
	if err == nil {
		err = bus.Explain(bucket.Delete(ctx, wire.WorkerKey(id)))
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrBusAway, err)
	}
	r.locked(func(t *Table) { t.Delete(id) })
	return nil
}

// Beat passes a worker's heartbeat on to all router replicas, and keeps its record in
// the registry. The errors are those of [Registry.Deregister].
func (r *Registry) Beat(ctx context.Context, h Heartbeat) error {
	if err := r.known(h.WorkerID); err != nil && !errors.Is(err, ErrConfigured) {
		return err
	}
	now := r.conf.Now()
	h.TS = now.UnixMilli()
	data, err := json.Marshal(h)
	if err != nil {
		return fmt.Errorf("fleet: write a heartbeat: %w", err)
	}
	if err := r.nc.Publish(r.conf.Scope.Own(heartbeatTopic, wire.WorkerKey(h.WorkerID)), data); err != nil {
		if errors.Is(err, nats.ErrMaxPayload) {
			return fmt.Errorf("fleet: the heartbeat has %d bytes: %w", len(data), err)
		}
		return fmt.Errorf("%w: %w", ErrBusAway, err)
	}
	var record *Record
	r.locked(func(t *Table) {
		t.Heartbeat(now, &h)
		if m := t.workers[h.WorkerID]; m != nil && !m.static && now.Sub(m.put) >= putEvery {
			m.put = now
			c := m.record
			record = &c
		}
	})
	if record == nil {
		return nil
	}
	return r.put(ctx, record)
}

// known says whether a worker is registered.
func (r *Registry) known(id uint64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch m := r.table.workers[id]; {
	case m == nil:
		return ErrNotRegistered
	case m.static:
		return ErrConfigured
	}
	return nil
}

func (r *Registry) put(ctx context.Context, record *Record) error {
	data, err := record.encode()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, behalfTime)
	defer cancel()
	bucket, err := openBucket(ctx, r.nc, r.conf.Scope, r.conf.Replicas)
	if err == nil {
		_, err = bucket.Put(ctx, wire.WorkerKey(record.WorkerID), data)
		err = bus.Explain(err)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrBusAway, err)
	}
	return nil
}

// Find returns the id of the worker that a text stands for: a name, or a number.
func (r *Registry) Find(text string) uint64 {
	id := wire.WorkerID(text)
	if n, err := strconv.ParseUint(text, 10, 64); err == nil && errors.Is(r.known(id), ErrNotRegistered) {
		return n
	}
	return id
}

// maxPrefixes bounds what a worker can make us keep.
const maxPrefixes = 1 << 16

// ParsePrefixes reads a heartbeat's prefixes: tokens held, by the first 16 hex digits of
// the SHA-256 of a prompt's beginning (token ids as little endian u32), whose length is
// a multiple of 16 tokens.
func ParsePrefixes(cached map[string]int) (map[uint64]int, error) {
	if len(cached) > maxPrefixes {
		return nil, fmt.Errorf("fleet: cached_prefixes has %d entries, want at most %d", len(cached), maxPrefixes)
	}
	prefixes := make(map[uint64]int, len(cached))
	for key, tokens := range cached {
		h, err := strconv.ParseUint(key, 16, 64)
		if err != nil || len(key) != 16 || tokens < 0 {
			return nil, fmt.Errorf("fleet: cached_prefixes has %q: %d, want 16 hex digits and a number of tokens", clip(key), tokens)
		}
		prefixes[h] = tokens
	}
	return prefixes, nil
}
