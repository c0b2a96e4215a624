// SPDX-License-Identifier: Apache-2.0

package saved

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/records"
	"github.com/kvroute/kvroute/internal/wire"
)

// Limits of the memory that a reader uses besides the index. They equal the limits of a replica's
// state.
const (
	maxRanks   = 1 << 20
	maxStates  = 1 << 18
	maxCursors = 8 * maxStates
	maxWaiting = 1 << 18
	maxWorkers = 1 << 16
	maxPools   = 1 << 10
	maxEvents  = 1 << 20
)

// Read reads a scope's snapshot up to its runs. The runs are read when they are used. The
// snapshot was complete and unchanged only if Runs has ended and the returned function then
// returns nil. Before that, no part of it may be used.
func Read(r io.Reader, scope wire.Scope) (*events.Snapshot, func() error, error) {
	file, h, err := records.NewReader(r, magic, version)
	if err != nil {
		return nil, nil, fmt.Errorf("events: read snapshot: %w", err)
	}
	in := &reader{file: file}
	s, err := readHeader(h, scope)
	if err != nil {
		return nil, nil, err
	}
	if in.err = in.beginning(s); in.err != nil {
		return nil, nil, in.err
	}
	s.Runs = func(yield func(int, indexer.Run) bool) {
		if in.err == nil {
			in.err = in.runs(s, yield)
		}
	}
	s.Owners = func(yield func(*events.Owner) bool) {
		for in.err == nil && in.kind == recordOwner && !in.ended {
			if in.err = in.owner(yield); in.err != nil {
				return
			}
		}
	}
	return s, func() error {
		for range s.Owners { // reads owners that nobody reads
		}
		if in.err == nil && !in.ended {
			return bad("its runs were not read to the end")
		}
		return in.err
	}, nil
}

func readHeader(h *records.Header, scope wire.Scope) (*events.Snapshot, error) {
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(h.Body[at:]) }
	switch {
	case u64(16) != seed:
		return nil, bad("its hashes have seed %d, want %d", u64(16), seed)
	case u64(24) != scopeDigest(scope):
		return nil, bad("it is of another scope")
	case u64(0) > 1<<53:
		return nil, bad("it is of the year %d", time.UnixMilli(int64(u64(0))).Year())
	}
	return &events.Snapshot{Created: time.UnixMilli(int64(u64(0))), LastSeq: u64(8)}, nil
}

type reader struct {
	file  *records.Reader
	nodes uint64
	ended bool
	err   error

	// The last record.
	kind    byte
	payload []byte

	ranks int
	run   indexer.Run
	cells []uint64 // the memory of the run's externals
}

// next reads a record of a known type.
func (in *reader) next() (err error) {
	in.kind = recordBlocks + 1
	for in.kind > recordBlocks && in.kind != records.End && err == nil {
		in.kind, in.payload, err = in.file.Next()
	}
	switch {
	case !errors.Is(err, io.EOF):
		if err != nil {
			err = fmt.Errorf("events: read snapshot: %w", err)
		}
		return err
	case in.file.Count() != in.nodes:
		return bad("it has %d nodes, want %d", in.nodes, in.file.Count())
	}
	in.ended = true
	return nil
}

// beginning reads the records before the runs. It leaves the first record of the runs in
// in.payload.
func (in *reader) beginning(s *events.Snapshot) error {
	for {
		if err := in.next(); err != nil {
			return err
		}
		f := fields{in.payload, false}
		var err error
		n, limit := 0, 1 // how many records of the type there are, and may be
		switch in.kind {
		case recordMeta:
			err = json.Unmarshal(in.payload, &s.Meta)
			n, limit = len(s.Meta.Pools), maxPools
		case recordRank:
			s.Ranks = append(s.Ranks, f.rank())
			n, limit = len(s.Ranks), maxRanks
		case recordWorker:
			var w events.SnapshotWorker
			err = json.Unmarshal(in.payload, &w)
			s.Workers = append(s.Workers, w)
			n, limit = len(s.Workers), maxWorkers
		case recordCursor:
			s.Cursors = append(s.Cursors,
				events.Cursor{RankName: f.rank(), PublisherID: f.uvarint(), EventID: f.uvarint()})
			n, limit = len(s.Cursors), maxCursors
		case recordWaiting:
			w := events.Waiting{PublisherID: f.uvarint()}
			w.Event, err = events.DecodeEvent(f.rest)
			s.Waiting = append(s.Waiting, w)
			n, limit = len(s.Waiting), maxWaiting
		case recordParked:
			var ev events.RouterEvent
			ev, err = events.DecodeEvent(in.payload)
			s.Parked = append(s.Parked, ev)
			n, limit = len(s.Parked), maxEvents
		case recordState:
			r := events.RankState{RankName: f.rank(), State: savedStates[min(f.uvarint(), uint64(len(savedStates)-1))]}
			r.Missed = time.UnixMilli(int64(f.uvarint()))
			s.States = append(s.States, r)
			n, limit = len(s.States), maxStates
		case recordNode, recordHolders, recordPool, recordOwner, records.End:
			in.ranks = len(s.Ranks)
			return nil
		}
		if err != nil || f.bad {
			return bad("record %d of type %d cannot be read: %v", in.file.Records(), in.kind, err)
		}
		if n > limit {
			return bad("more than %d records or pools, up to record %d of type %d", limit, in.file.Records(), in.kind)
		}
	}
}

// runs yields the runs, beginning with the record that was read already.
func (in *reader) runs(s *events.Snapshot, yield func(int, indexer.Run) bool) error {
	pool, id := -1, uint32(0)
	for !in.ended {
		switch in.kind {
		case recordPool:
			f := fields{in.payload, false}
			n := f.uvarint()
			if f.bad || n >= uint64(len(s.Meta.Pools)) || int(n) <= pool {
				return bad("record %d begins pool %d of %d behind pool %d", in.file.Records(), n, len(s.Meta.Pools), pool)
			}
			pool, id = int(n), 0
		case recordNode:
			if pool < 0 {
				return bad("record %d is a node without a pool", in.file.Records())
			}
			id++
			if err := in.node(id); err != nil {
				return err
			}
			if !yield(pool, in.run) {
				return bad("its runs were not read to the end")
			}
			continue // the next record is read
		case recordOwner:
			return nil
		case recordMeta, recordRank, recordWorker, recordCursor, recordWaiting, recordParked, recordState, recordHolders,
			recordSides, recordBlocks:
			return bad("record %d of type %d stands behind the nodes", in.file.Records(), in.kind)
		}
		if err := in.next(); err != nil {
			return err
		}
	}
	return nil
}

// node reads a run with all its holders, and the record that follows.
func (in *reader) node(id uint32) error {
	f := fields{in.payload, false}
	parent, n := f.uvarint(), f.uvarint()
	switch {
	case id == 0 || parent >= uint64(id):
		return bad("node %d of its pool has the parent %d", id, parent)
	case n == 0 || n > uint64(len(f.rest)/8):
		return bad("node %d of its pool has %d blocks", id, n)
	}
	in.nodes++
	r := &in.run
	r.ID, r.Parent = id, uint32(parent)
	r.Local, r.Holders, in.cells = f.hashes(r.Local[:0], n), r.Holders[:0], in.cells[:0]
	for {
		if err := in.holders(&f); err != nil {
			return err
		}
		if err := in.next(); err != nil || in.ended || in.kind != recordHolders {
			return err
		}
		f = fields{in.payload, false}
	}
}

// holders reads the holders in a record.
func (in *reader) holders(f *fields) error {
	r := &in.run
	in.cells = slices.Grow(in.cells, len(f.rest)/8) // so that the slices of this record do not move
	for len(f.rest) > 0 {
		rank, tier, start, n := f.uvarint(), f.uvarint(), f.uvarint(), f.uvarint()
		if f.bad || rank >= uint64(in.ranks) || tier > uint64(indexer.External) || start > uint64(len(r.Local)) ||
			n > uint64(len(r.Local))-start || n > uint64(len(f.rest)/8) {
			return bad("record %d: tier %d of rank %d cannot hold %d blocks from block %d on", in.file.Records(), tier,
				rank, n, start)
		}
		at := len(in.cells)
		in.cells = f.hashes(in.cells, n)
		r.Holders = append(r.Holders,
			indexer.Holder{Worker: int(rank), Tier: indexer.Tier(tier), Start: int(start), Externals: in.cells[at:]})
	}
	return nil
}

// fields reads a record's payload. After bad bytes it returns zeros.
type fields struct {
	rest []byte
	bad  bool
}

func (f *fields) uvarint() uint64 {
	v, n := binary.Uvarint(f.rest)
	if n <= 0 {
		f.rest, f.bad = nil, true
		return 0
	}
	f.rest = f.rest[n:]
	return v
}

func (f *fields) rank() events.RankName {
	return events.RankName{WorkerID: f.uvarint(), DPRank: uint32(f.uvarint())}
}

// hashes appends n hashes. Its caller has checked that there are as many.
func (f *fields) hashes(to []uint64, n uint64) []uint64 {
	for range n {
		to = append(to, binary.LittleEndian.Uint64(f.rest))
		f.rest = f.rest[8:]
	}
	return to
}
