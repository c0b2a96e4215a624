// SPDX-License-Identifier: Apache-2.0

// Package replica connects the router's indexes to the snapshots in package events. It has
// no state of its own.
package replica

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/router"
)

// Config names a router's parts.
type Config struct {
	Router *router.Router
	// Direct reports whether package engines orders the events of a worker, which it reads
	// from the engine. Such workers are in no snapshot, and a restore leaves them as they are.
	Direct func(id uint64) bool
	// Expect is called with workers that are known from a snapshot only; see
	// [router.Restored].
	Expect func(ids []uint64)
	Log    *slog.Logger
}

// Holdings returns the functions with which package events takes and restores snapshots.
func Holdings(c Config) events.Holdings { return events.Holdings{Dump: c.dump, Restore: c.restore} }

// dump fills a snapshot.
func (c *Config) dump(s *events.Snapshot, mine func(uint64) bool) (done func(), ok bool) {
	ours := func(id uint64) bool { return mine(id) && !c.Direct(id) }
	d, ok := c.Router.Dump(ours)
	if !ok {
		return nil, false
	}
	for _, p := range d.Pools {
		s.Meta.Pools = append(s.Meta.Pools, events.SnapshotPool(p))
	}
	for _, w := range d.Holders {
		s.Ranks = append(s.Ranks, events.RankName{WorkerID: w.ID, DPRank: w.DPRank})
	}
	for i := range d.Workers {
		data, err := json.Marshal(&d.Workers[i])
		if err != nil {
			c.Log.Warn("a worker is left out of the snapshot", "worker", d.Workers[i].ID, "err", err)
			continue
		}
		s.Workers = append(s.Workers, events.SnapshotWorker{ID: d.Workers[i].ID, Info: data})
	}
	for _, p := range d.Parked {
		s.Parked = append(s.Parked, events.RouterEvent{WorkerID: p.Worker.ID, DPRank: p.Worker.DPRank, Event: p.Event})
	}
	s.Runs, s.Failed = d.Runs, d.Err
	return d.Close, true
}

// restore replaces the router's state by a snapshot.
func (c *Config) restore(s *events.Snapshot, mine func(uint64) bool, whole func() error) error {
	contents := router.Contents{Runs: s.Runs, Keep: func(id uint64) bool { return !mine(id) || c.Direct(id) }}
	for _, p := range s.Meta.Pools {
		contents.Pools = append(contents.Pools, router.PoolContents(p))
	}
	for _, r := range s.Ranks {
		contents.Holders = append(contents.Holders, router.Worker{ID: r.WorkerID, DPRank: r.DPRank})
	}
	for _, w := range s.Workers {
		var info router.WorkerInfo
		if err := json.Unmarshal(w.Info, &info); err != nil {
			return fmt.Errorf("%w: a worker cannot be read: %w", events.ErrSnapshot, err)
		}
		contents.Workers = append(contents.Workers, info)
	}
	for _, ev := range s.Parked {
		at := router.Worker{ID: ev.WorkerID, DPRank: ev.DPRank}
		contents.Parked = append(contents.Parked, router.ParkedEvent{Worker: at, Event: ev.Event})
	}
	out, err := c.Router.Restore(contents, whole)
	if err != nil && !errors.Is(err, router.ErrDumping) {
		err = fmt.Errorf("%w: %w", events.ErrSnapshot, err)
		if whole != nil { // an error of the reader does not mean that the snapshot is damaged
			err = cmp.Or(whole(), err)
		}
	}
	if err != nil {
		return err
	}
	c.Expect(out.Expected)
	if s.Runs != nil {
		c.Log.Info("the index is restored", "blocks", out.Blocks, "skipped", out.Skipped, "not_registered", len(out.Expected))
	}
	return nil
}
