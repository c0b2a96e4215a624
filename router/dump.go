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
// a parent before its children, numbered from 0, one event for each worker, tier and
// run of blocks without a branch. Blocks that a worker holds behind one that it does
// not hold are left out: an event cannot tell where they belong, and nothing finds
// them. What is only guessed is no event. Decisions and events go on meanwhile. The
// error is w's.
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
	// left are the last blocks of the events that were left out: what comes
	// behind them is left out, too.
	left map[leftOut]bool
}

type leftOut struct {
	worker   int
	external uint64
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
	d.workers, d.left = make(map[int]Worker), make(map[leftOut]bool)
	p.mu.Lock()
	for _, ord := range p.core.order {
		d.workers[ord] = p.core.entries[ord].worker
	}
	p.mu.Unlock()
	next, stop := iter.Pull(indexer.Chains(p.known.index().Dump()))
	defer stop()
	chain, more := next()
	r.fleet.RUnlock()
	for ; more; chain, more = next() {
		if err := d.write(&chain); err != nil {
			return err
		}
	}
	return nil
}

// write writes an event.
func (d *dumper) write(c *indexer.Chain) error {
	worker, known := d.workers[c.Worker]
	if !known || len(c.Event.Blocks) == 0 {
		return nil
	}
	if c.Start > 0 && (!c.Event.HasParent || d.left[leftOut{c.Worker, c.Event.Parent}]) {
		d.left[leftOut{c.Worker, c.Event.Blocks[len(c.Event.Blocks)-1].External}] = true
		return nil
	}
	var e dumpedEvent
	e.WorkerID, e.Tier, e.Event.ID, e.Event.Rank = worker.ID, tierName(c.Event.Tier), d.next, worker.DPRank
	stored := &e.Event.Data.Stored
	if c.Event.HasParent {
		stored.Parent = &c.Event.Parent
	}
	for _, b := range c.Event.Blocks {
		stored.Blocks = append(stored.Blocks, dumpedBlock{External: b.External, Local: b.Local})
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
	return nil
}

// tierName is how a tier is called on the wire.
func tierName(t indexer.Tier) string {
	switch t {
	case indexer.HostPinned:
		return "host_pinned"
	case indexer.Disk:
		return "disk"
	case indexer.External:
		return "external"
	default:
		return "device"
	}
}
