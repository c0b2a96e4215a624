// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"iter"
	"slices"
	"strconv"

	"github.com/kvroute/kvroute/indexer"
)

// DumpedEvent is an event for blocks that a worker holds. The events of a dump, applied in
// their order to an empty index, make an equal index, except for the blocks behind a hole.
type DumpedEvent struct {
	Worker   Worker
	Position int // of the first block in its sequence
	// Hole: the worker does not hold the block before the first one, so Event has
	// no parent although Position is not 0.
	Hole  bool
	Event indexer.Event // Stored

	sequence uint64 // of the first block, if the events are sorted
}

// MaxSorted is the largest number of blocks that [Dump.Events] sorts: about 150 MB.
const MaxSorted = 1 << 20

// Events turns the runs into events, parents before children. They can be read once, need the
// memory of one run, and the slices of an event are valid until the next one.
//
// Sorted gives one event for each block, ordered by worker, tier, position and
// sequence hash: two routers with equal indexes give equal events, except for the engines'
// hashes. It keeps all events in memory. With more than [MaxSorted] it gives none, and an
// error.
//
// [Dump.Err] returns the error after the last event.
func (d *Dump) Events(sorted bool) iter.Seq[DumpedEvent] {
	if sorted {
		return d.sorted
	}
	return func(yield func(DumpedEvent) bool) {
		for c := range indexer.Chains(func(yield func(indexer.Run) bool) {
			for _, run := range d.Runs {
				if !yield(run) {
					return
				}
			}
		}) {
			if !yield(d.event(&c)) {
				return
			}
		}
	}
}

func (d *Dump) event(c *indexer.Chain) DumpedEvent {
	return DumpedEvent{Worker: d.Holders[c.Worker], Position: c.Start, Hole: c.Start > 0 && !c.Event.HasParent, Event: c.Event}
}

func (d *Dump) sorted(yield func(DumpedEvent) bool) {
	var all []DumpedEvent
	var ends []uint64   // by run of a pool: the sequence hash of its last block
	var seq []uint64    // of the run's blocks
	var run indexer.Run // the one that the chains are of
	pool := -1
	for c := range indexer.Chains(func(yield func(indexer.Run) bool) {
		for p, r := range d.Runs {
			if p != pool {
				pool, ends = p, append(ends[:0], 0)
			}
			seq = seq[:0]
			at := ends[r.Parent]
			for i, l := range r.Local {
				if r.Depth+i == 0 {
					at = l
				} else {
					at = indexer.NextSequenceHash(at, l)
				}
				seq = append(seq, at)
			}
			ends, run = append(ends, at), r
			if !yield(r) {
				return
			}
		}
	}) {
		if len(all)+len(c.Event.Blocks) > MaxSorted {
			d.err = fmt.Errorf("router: more than %d blocks to sort", MaxSorted)
			return
		}
		ev, blocks := d.event(&c), slices.Clone(c.Event.Blocks)
		for i := range blocks {
			one := ev
			one.Position, one.Event.Blocks, one.sequence = ev.Position+i, blocks[i:i+1:i+1], seq[c.Start-run.Depth+i]
			if i > 0 {
				one.Hole, one.Event.HasParent, one.Event.Parent = false, true, blocks[i-1].External
			}
			all = append(all, one)
		}
	}
	if d.err != nil {
		return
	}
	slices.SortFunc(all, func(a, b DumpedEvent) int {
		return cmp.Or(a.Worker.Compare(b.Worker), cmp.Compare(a.Event.Tier, b.Event.Tier), cmp.Compare(a.Position, b.Position), cmp.Compare(a.sequence, b.sequence),
			cmp.Compare(a.Event.Blocks[0].External, b.Event.Blocks[0].External))
	})
	for _, ev := range all {
		if !yield(ev) {
			return
		}
	}
}

// AppendJSON appends the event in the JSON form of NVIDIA Dynamo's routers, with the given id.
func (ev *DumpedEvent) AppendJSON(b []byte, id int) []byte {
	b = strconv.AppendUint(append(b, `{"worker_id":`...), ev.Worker.ID, 10)
	b = append(append(b, `,"storage_tier":"`...), ev.Event.Tier.String()...)
	b = strconv.AppendInt(append(b, `","event":{"event_id":`...), int64(id), 10)
	b = append(b, `,"data":{"stored":{"parent_hash":`...)
	if ev.Event.HasParent {
		b = strconv.AppendUint(b, ev.Event.Parent, 10)
	} else {
		b = append(b, "null"...)
	}
	b = append(b, `,"start_position":`...)
	if ev.Hole {
		b = strconv.AppendInt(b, int64(ev.Position), 10)
	} else {
		b = append(b, "null"...)
	}
	b = append(b, `,"blocks":[`...)
	for i, block := range ev.Event.Blocks {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(append(b, `{"block_hash":`...), block.External, 10)
		b = strconv.AppendUint(append(b, `,"tokens_hash":`...), block.Local, 10)
		b = append(b, `,"mm_extra_info":null}`...)
	}
	b = strconv.AppendUint(append(b, `]}},"dp_rank":`...), uint64(ev.Worker.DPRank), 10)
	return append(b, "}}"...)
}

// DumpEvents writes the index as a JSON array of stored events that make it again:
// a parent before its children, numbered from 0, one event for each worker, tier and
// run of blocks without a branch. It leaves out blocks behind one that the worker does not
// hold: an event cannot name their place, and no request matches them. It leaves out predicted
// blocks. It waits for other dumps until ctx ends, and is of one moment; see [Router.Dump].
// After an error of w or of the dump, the array has no end.
func (r *Router) DumpEvents(ctx context.Context, w io.Writer) error {
	d, err := r.AwaitDump(ctx)
	if err != nil {
		return err
	}
	defer d.Close()
	out := bufio.NewWriterSize(w, 1<<16)
	_ = out.WriteByte('[') // Flush returns the error
	left := make(leftOut)
	n := 0
	var line []byte
	for ev := range d.Events(false) {
		if left.out(&ev) {
			continue
		}
		if line = line[:0]; n > 0 {
			line = append(line, ",\n"...)
		}
		line = ev.AppendJSON(line, n)
		if _, err := out.Write(line); err != nil {
			return err
		}
		n++
	}
	if err := d.Err(); err != nil {
		return err
	}
	_, _ = out.WriteString("]\n")
	return out.Flush()
}

// leftOut has the last blocks of the events that were left out. Events that continue them are
// left out, too.
type leftOut map[heldBy]bool

type heldBy struct {
	worker   Worker
	external uint64
}

// maxLeftOut bounds the size of leftOut, to about 40 MB. When it is full, all events with a
// parent are left out.
const maxLeftOut = 1 << 19

// out reports whether an event is behind a hole.
func (l leftOut) out(ev *DumpedEvent) bool {
	full := len(l) >= maxLeftOut
	if ev.Position == 0 || ev.Event.HasParent && !full && !l[heldBy{ev.Worker, ev.Event.Parent}] {
		return false
	}
	if !full {
		l[heldBy{ev.Worker, ev.Event.Blocks[len(ev.Event.Blocks)-1].External}] = true
	}
	return true
}
