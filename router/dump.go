// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bufio"
	"context"
	"io"
	"iter"
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
}

// Events turns the runs into events, parents before children. They can be read once, need the
// memory of one run, and the slices of an event are valid until the next one.
//
// [Dump.Err] returns the error after the last event.
func (d *Dump) Events() iter.Seq[DumpedEvent] {
	return func(yield func(DumpedEvent) bool) {
		for c := range indexer.Chains(func(yield func(indexer.Run) bool) {
			for _, run := range d.Runs {
				if !yield(run) {
					return
				}
			}
		}) {
			ev := DumpedEvent{Worker: d.Holders[c.Worker], Position: c.Start, Hole: c.Start > 0 && !c.Event.HasParent, Event: c.Event}
			if !yield(ev) {
				return
			}
		}
	}
}

// AppendJSON appends the event in the JSON form of NVIDIA Dynamo's routers, with the given id.
func (ev *DumpedEvent) AppendJSON(b []byte, id int) []byte {
	number := func(before string, n uint64) { b = strconv.AppendUint(append(b, before...), n, 10) }
	number(`{"worker_id":`, ev.Worker.ID)
	b = append(append(b, `,"storage_tier":"`...), ev.Event.Tier.String()...)
	number(`","event":{"event_id":`, uint64(id))
	b = append(b, `,"data":{"stored":{"parent_hash":`...)
	if ev.Event.HasParent {
		number("", ev.Event.Parent)
	} else {
		b = append(b, "null"...)
	}
	b = append(b, `,"start_position":`...)
	if ev.Hole {
		number("", uint64(ev.Position))
	} else {
		b = append(b, "null"...)
	}
	b = append(b, `,"blocks":[`...)
	for i, block := range ev.Event.Blocks {
		if i > 0 {
			b = append(b, ',')
		}
		number(`{"block_hash":`, block.External)
		number(`,"tokens_hash":`, block.Local)
		b = append(b, `,"mm_extra_info":null}`...)
	}
	number(`]}},"dp_rank":`, uint64(ev.Worker.DPRank))
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
	for ev := range d.Events() {
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
