// SPDX-License-Identifier: Apache-2.0

// Package replica joins what a router knows of caches to the snapshots of the
// events that it knows it from. It has no state of its own.
package replica

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// Config says what makes a router's state.
type Config struct {
	Router *router.Router
	// Direct tells of workers whose engines are heard without the bus: what is
	// known of them has no place in a snapshot, and stays when one is restored.
	Direct func(id uint64) bool
	// Expect is told of workers that are known from a snapshot only; see
	// [router.Restored].
	Expect func(ids []uint64)
	Log    *slog.Logger
}

// Holdings makes a router what snapshots are taken of and restored to.
func Holdings(c Config) events.Holdings { return events.Holdings{Dump: c.dump, Restore: c.restore} }

// tiers is the number of storage tiers, each of which is an owner of its own in a
// snapshot.
const tiers = int(indexer.External) + 1

// dump fills a snapshot with what the router knows of caches.
func (c *Config) dump(s *events.Snapshot, streamed func(uint64) bool) (done func(), ok bool) {
	d, ok := c.Router.Dump()
	if !ok {
		return nil, false
	}
	for i, p := range d.Pools {
		s.Meta.Pools = append(s.Meta.Pools, events.SnapshotPool{Model: p.Model, BlockSize: p.BlockSize})
		if i == 0 {
			s.BlockSize = p.BlockSize
		} else if s.BlockSize != p.BlockSize {
			s.BlockSize = 0
		}
	}
	ours := make([]bool, len(d.Holders))
	for i, w := range d.Holders {
		ours[i] = streamed(w.ID) && !c.Direct(w.ID)
		for t := range tiers {
			s.Owners = append(s.Owners, events.Owner{WorkerID: w.ID, DPRank: w.DPRank, Tier: indexer.Tier(t)})
		}
	}
	for i := range d.Workers {
		if id := d.Workers[i].ID; !streamed(id) || c.Direct(id) {
			continue
		}
		data, err := json.Marshal(&d.Workers[i])
		if err != nil {
			c.Log.Warn("a worker is left out of the snapshot", "worker", d.Workers[i].ID, "err", err)
			continue
		}
		s.Workers = append(s.Workers, data)
	}
	for _, p := range c.Router.ParkedEvents() {
		if streamed(p.Worker.ID) && !c.Direct(p.Worker.ID) {
			s.Parked = append(s.Parked, events.RouterEvent{WorkerID: p.Worker.ID, DPRank: p.Worker.DPRank, Event: p.Event})
		}
	}
	s.Failed = d.Err
	s.Runs = func(yield func(int, indexer.Run) bool) {
		for p, run := range d.Runs {
			kept := run.Holders[:0]
			for _, h := range run.Holders {
				if ours[h.Worker] {
					h.Worker, h.Tier = h.Worker*tiers+int(h.Tier), indexer.Device
					kept = append(kept, h)
				}
			}
			run.Holders = kept
			if !yield(p, run) {
				return
			}
		}
	}
	return d.Close, true
}

// restore puts a snapshot in the place of what the router knows.
func (c *Config) restore(s *events.Snapshot, streamed func(uint64) bool, whole func() error) error {
	contents := router.Contents{Keep: func(id uint64) bool { return !streamed(id) || c.Direct(id) }}
	for _, p := range s.Meta.Pools {
		contents.Pools = append(contents.Pools, router.PoolContents{Model: p.Model, BlockSize: p.BlockSize})
	}
	if len(contents.Pools) == 0 && s.Meta.Model != "" {
		contents.Pools = []router.PoolContents{{Model: s.Meta.Model, BlockSize: s.BlockSize}}
	}
	for _, o := range s.Owners {
		contents.Holders = append(contents.Holders, router.Worker{ID: o.WorkerID, DPRank: o.DPRank})
	}
	for _, data := range s.Workers {
		var info router.WorkerInfo
		if err := json.Unmarshal(data, &info); err != nil {
			return fmt.Errorf("%w: a worker cannot be read: %w", events.ErrSnapshot, err)
		}
		contents.Workers = append(contents.Workers, info)
	}
	if s.Runs != nil {
		contents.Runs = func(yield func(int, indexer.Run) bool) {
			for p, run := range s.Runs {
				for i := range run.Holders {
					run.Holders[i].Tier = s.Owners[run.Holders[i].Worker].Tier
				}
				if !yield(p, run) {
					return
				}
			}
		}
	}
	out, err := c.Router.Restore(contents, whole)
	if err != nil {
		if errors.Is(err, router.ErrDumping) {
			return err
		}
		if whole != nil {
			if cause := whole(); cause != nil {
				return cause // that it could not be read is no fault of the snapshot
			}
		}
		return fmt.Errorf("%w: %w", events.ErrSnapshot, err)
	}
	for _, ev := range s.Parked {
		if !contents.Keep(ev.WorkerID) {
			// Of a worker that is not known any more nothing is.
			c.Router.ApplyEvent(router.Worker{ID: ev.WorkerID, DPRank: ev.DPRank}, ev.Event)
		}
	}
	c.Expect(out.Expected)
	if s.Runs != nil {
		c.Log.Info("what the workers cache is known again", "blocks", out.Blocks, "skipped", out.Skipped, "not_registered", len(out.Expected))
	}
	return nil
}
