// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bufio"
	"encoding/json"
	"io"
	"iter"
	"maps"
	"slices"

	"github.com/kvroute/kvroute/indexer"
)

// The form of a stored event, as NVIDIA Dynamo's routers write it.
type dumpedEvent struct {
	WorkerID uint64 `json:"worker_id"`
	Tier     string `json:"storage_tier"`
	Event    struct {
		ID   uint64 `json:"event_id"`
		Data struct {
			Stored dumpedBlocks `json:"stored"`
		} `json:"data"`
		Rank uint32 `json:"dp_rank"`
	} `json:"event"`
}

type dumpedBlocks struct {
	Parent *uint64       `json:"parent_hash"`
	Start  *uint32       `json:"start_position"`
	Blocks []dumpedBlock `json:"blocks"`
}

type dumpedBlock struct {
	External uint64 `json:"block_hash"`
	Local    uint64 `json:"tokens_hash"`
	Media    *int   `json:"mm_extra_info"`
}

// DumpEvents writes the index as a JSON array of stored events that make it again:
// a parent before its children, numbered from 0, one event for each worker and run
// of blocks without a branch. Blocks that a worker holds behind one that it does
// not hold are left out: nothing finds them. What is only guessed is no event.
// Decisions and events go on meanwhile. The error is w's.
func (r *Router) DumpEvents(w io.Writer) error {
	r.dumping.Lock() // a second dump would wait for the first with the fleet in its hands
	defer r.dumping.Unlock()
	r.fleet.RLock()
	pools := slices.SortedFunc(maps.Keys(r.pools), poolKey.compare)
	r.fleet.RUnlock()
	d := dumper{out: bufio.NewWriterSize(w, 1<<16), before: "["}
	for _, key := range pools {
		if err := r.dumpPool(key, &d); err != nil {
			return err
		}
	}
	if d.before == "[" {
		_, _ = d.out.WriteString("[") // Flush tells of an error
	}
	_, _ = d.out.WriteString("]\n")
	return d.out.Flush()
}

// dumper writes events.
type dumper struct {
	out    *bufio.Writer
	before string // what separates an event from what was written
	next   uint64

	workers map[int]Worker
	// ends are the external hashes of the last block of each run, by the
	// ordinals of those who hold it and all before.
	ends map[uint32]map[int]uint64
}

func (r *Router) dumpPool(key poolKey, d *dumper) error {
	// The dump shows the index as it is at its first step: until then no worker
	// may come or go.
	r.fleet.RLock()
	p := r.pools[key]
	if p == nil || p.known == nil {
		r.fleet.RUnlock()
		return nil
	}
	d.workers, d.ends = make(map[int]Worker), make(map[uint32]map[int]uint64)
	p.mu.Lock()
	for _, ord := range p.core.order {
		d.workers[ord] = p.core.entries[ord].worker
	}
	p.mu.Unlock()
	next, stop := iter.Pull(p.known.index.Dump())
	defer stop()
	run, more := next()
	r.fleet.RUnlock()
	for ; more; run, more = next() {
		if err := d.write(&run); err != nil {
			return err
		}
	}
	return nil
}

// write writes the events of a run.
func (d *dumper) write(run *indexer.Run) error {
	ends := make(map[int]uint64)
	slices.SortStableFunc(run.Holders, func(a, b indexer.Holder) int { return a.Start - b.Start })
	type place struct{ worker, block int }
	last := make(map[place]uint64) // external hash of the block before a place, in this run
	for _, h := range run.Holders {
		worker, known := d.workers[h.Worker]
		if !known || len(h.Externals) == 0 {
			continue
		}
		var e dumpedEvent
		e.WorkerID, e.Tier, e.Event.ID, e.Event.Rank = worker.ID, "device", d.next, worker.DPRank
		stored := &e.Event.Data.Stored
		if h.Start > 0 || run.Parent != 0 {
			parent, held := last[place{h.Worker, h.Start}]
			if h.Start == 0 {
				parent, held = d.ends[run.Parent][h.Worker]
			}
			if !held {
				continue
			}
			stored.Parent = &parent
		}
		for i, external := range h.Externals {
			stored.Blocks = append(stored.Blocks, dumpedBlock{External: external, Local: run.Local[h.Start+i]})
			last[place{h.Worker, h.Start + i + 1}] = external
		}
		if h.Start+len(h.Externals) == len(run.Local) {
			ends[h.Worker] = h.Externals[len(h.Externals)-1]
		}
		text, err := json.Marshal(&e)
		if err != nil {
			return err
		}
		_, _ = d.out.WriteString(d.before)
		if _, err := d.out.Write(text); err != nil {
			return err
		}
		d.before, d.next = ",\n", d.next+1
	}
	d.ends[run.ID] = ends
	return nil
}
