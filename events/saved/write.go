// SPDX-License-Identifier: Apache-2.0

// Package saved is the form in which kvroute keeps for a restart how it knows workers' caches: snapshots
// in the object store, and the files of --state-dir for workers on the bus and for engines. docs/protocol.md
// describes the file. Both directions keep one record in memory.
package saved

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/records"
	"github.com/kvroute/kvroute/internal/wire"
)

func bad(format string, args ...any) error {
	return fmt.Errorf("events: %w: "+format, append([]any{events.ErrSnapshot}, args...)...)
}

const (
	magic   = "KVRSNAP2"
	version = 1
	seed    = 1337 // of the hashes in it
)

// The types of records. Readers skip others.
const (
	recordMeta    = 1
	recordRank    = 2 // of a holder
	recordCursor  = 3
	recordNode    = 4
	recordWorker  = 5
	recordPool    = 6  // the nodes that follow belong to this pool
	recordWaiting = 7  // an event that waits for its worker
	recordParked  = 8  // an event that waits for its parent
	recordState   = 9  // of a rank that is partial or suspect
	recordHolders = 10 // more holders of the node before
	recordOwner   = 11 // the records of the next two types that follow belong to it
	recordSides   = 12 // an event about side groups
	recordBlocks  = 13 // blocks at a place
)

// savedStates are the states by their numbers in a snapshot.
//
//nolint:gochecknoglobals // a table
var savedStates = [...]indexer.State{indexer.StateOK, indexer.StatePartial, indexer.StateSuspect}

// scopeDigest identifies the scope in a snapshot's header.
func scopeDigest(s wire.Scope) uint64 {
	s = s.WithDefaults()
	return xxh3.HashString(s.Namespace + "\x00" + s.Component + "\x00" + s.Endpoint)
}

// Write writes a snapshot of a scope as a stream. It keeps one run in memory.
// It returns the number of bytes.
func Write(w io.Writer, scope wire.Scope, s *events.Snapshot) (int64, error) {
	out := &writer{Writer: records.NewWriter(w, header(s, scope))}
	if err := out.all(s); err != nil {
		return 0, fmt.Errorf("events: write snapshot: %w", err)
	}
	return out.Bytes(), nil
}

// header makes the file's header. Its body has time, position, seed and scope.
func header(s *events.Snapshot, scope wire.Scope) records.Header {
	h := records.Header{Magic: magic, Version: version}
	le := binary.LittleEndian
	le.PutUint64(h.Body[0:], uint64(s.Created.UnixMilli()))
	le.PutUint64(h.Body[8:], s.LastSeq)
	le.PutUint64(h.Body[16:], seed)
	le.PutUint64(h.Body[24:], scopeDigest(scope))
	return h
}

type writer struct {
	*records.Writer

	err error
}

func (o *writer) all(s *events.Snapshot) error {
	o.json(recordMeta, s.Meta)
	for _, r := range s.Ranks {
		o.numbers(recordRank, r.WorkerID, uint64(r.DPRank))
	}
	for i := range s.Workers {
		o.json(recordWorker, &s.Workers[i])
	}
	for _, c := range s.Cursors {
		o.numbers(recordCursor, c.WorkerID, uint64(c.DPRank), c.PublisherID, c.EventID)
	}
	for _, r := range s.States {
		o.numbers(recordState, r.WorkerID, uint64(r.DPRank), uint64(slices.Index(savedStates[:], r.State)), uint64(max(0, r.Missed.UnixMilli())))
	}
	for i := range s.Waiting {
		o.record(recordWaiting, func(b []byte) []byte {
			return events.AppendEvent(binary.AppendUvarint(b, s.Waiting[i].PublisherID), &s.Waiting[i].Event)
		})
	}
	o.events(recordParked, s.Parked)
	nodes := o.runs(s)
	if o.err == nil && s.Failed != nil {
		o.err = s.Failed()
	}
	if o.err != nil {
		return o.err
	}
	if s.Owners != nil {
		for owner := range s.Owners {
			if o.owner(owner); o.err != nil {
				return o.err
			}
		}
	}
	return o.Close(nodes)
}

// record writes a record, unless an earlier one failed.
func (o *writer) record(kind byte, payload func([]byte) []byte) {
	if o.err == nil {
		o.err = o.Record(kind, payload)
	}
}

// events writes events, in parts because a record has a maximum size. Blocks of side groups come last: of them, the
// records that no reader takes are left out, so that prompts need these blocks again after a restart.
func (o *writer) events(kind byte, all []events.RouterEvent) {
	n := 0
	for _, side := range [...]bool{false, true} {
		for _, r := range all {
			if side != (r.Event.Kind == indexer.SideStored) {
				continue
			}
			events.Parts(r.Event, func(ev indexer.Event) {
				if n++; n <= maxEvents {
					r.Event = ev
					o.record(kind, func(b []byte) []byte { return events.AppendEvent(b, &r) })
				}
			})
		}
	}
}

func (o *writer) numbers(kind byte, values ...uint64) {
	o.record(kind, func(b []byte) []byte { return appendUvarints(b, values...) })
}

func (o *writer) json(kind byte, v any) {
	data, err := json.Marshal(v)
	o.err = errors.Join(o.err, err)
	o.record(kind, func(b []byte) []byte { return append(b, data...) })
}

func appendUvarints(b []byte, values ...uint64) []byte {
	for _, v := range values {
		b = binary.AppendUvarint(b, v)
	}
	return b
}

// runs writes a node for each run and returns their number.
func (o *writer) runs(s *events.Snapshot) (nodes uint64) {
	if s.Runs == nil {
		return 0
	}
	pool := -1
	for p, r := range s.Runs {
		if p != pool {
			pool = p
			o.numbers(recordPool, uint64(p))
		}
		if nodes++; !o.run(&r) {
			break
		}
	}
	return nodes
}

// run writes a node, and more records with the holders that have no room in the first one.
func (o *writer) run(r *indexer.Run) (ok bool) {
	const room = records.Max - 64 // for the numbers of a node
	if 8*len(r.Local) > room/2 {
		o.err = errors.Join(o.err, fmt.Errorf("a run has %d blocks, too many for a record", len(r.Local)))
		return false
	}
	kind, holders, size := byte(recordNode), r.Holders, 8*len(r.Local)
	for {
		n := 0
		for ; n < len(holders); n++ {
			if size += 32 + 8*len(holders[n].Externals); n > 0 && size > room {
				break
			}
		}
		o.record(kind, func(b []byte) []byte {
			if kind == recordNode {
				b = events.AppendHashes(appendUvarints(b, uint64(r.Parent), uint64(len(r.Local))), r.Local)
			}
			for _, h := range holders[:n] {
				b = events.AppendHashes(appendUvarints(b, uint64(h.Worker), uint64(h.Tier), uint64(h.Start), uint64(len(h.Externals))),
					h.Externals)
			}
			return b
		})
		if holders = holders[n:]; len(holders) == 0 || o.err != nil {
			return o.err == nil
		}
		kind, size = recordHolders, 0
	}
}
