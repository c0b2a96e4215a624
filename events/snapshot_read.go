// SPDX-License-Identifier: Apache-2.0

package events

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/records"
	"github.com/kvroute/kvroute/internal/wire"
)

// Limits of the memory that a reader uses besides the index. They equal the limits of a replica's
// state.
const (
	maxSnapshotRanks   = 1 << 20
	maxSnapshotCursors = maxRanks * maxPublishers
	maxSnapshotWorkers = 1 << 16
	maxSnapshotPools   = 1 << 10
	maxSnapshotParked  = 1 << 20
)

// ReadSnapshot reads a scope's snapshot up to its runs. The runs are read when they are used. The
// snapshot was complete and unchanged only if Runs has ended and the returned function then
// returns nil. Before that, no part of it may be used.
func ReadSnapshot(r io.Reader, scope wire.Scope) (*Snapshot, func() error, error) {
	file, h, err := records.NewReader(r, snapshotMagic, snapshotVersion)
	if err != nil {
		return nil, nil, fmt.Errorf("events: read snapshot: %w", err)
	}
	in := &snapshotReader{file: file}
	s, err := readHeader(h, scope)
	if err != nil {
		return nil, nil, err
	}
	if in.err = in.beginning(s); in.err != nil {
		return nil, nil, in.err
	}
	s.Runs = func(yield func(int, indexer.Run) bool) {
		if in.err == nil && !in.ended {
			in.err = in.runs(s, yield)
		}
	}
	return s, func() error {
		if in.err == nil && !in.ended {
			return badSnapshot("its runs were not read to the end")
		}
		return in.err
	}, nil
}

func readHeader(h *records.Header, scope wire.Scope) (*Snapshot, error) {
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(h.Body[at:]) }
	switch {
	case u64(16) != snapshotSeed:
		return nil, badSnapshot("its hashes have seed %d, want %d", u64(16), snapshotSeed)
	case u64(24) != scopeDigest(scope):
		return nil, badSnapshot("it is of another scope")
	case u64(0) > 1<<53:
		return nil, badSnapshot("it is of the year %d", time.UnixMilli(int64(u64(0))).Year())
	}
	return &Snapshot{Created: time.UnixMilli(int64(u64(0))), LastSeq: u64(8)}, nil
}

type snapshotReader struct {
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

// next reads a record.
func (in *snapshotReader) next() (err error) {
	switch in.kind, in.payload, err = in.file.Next(); {
	case !errors.Is(err, io.EOF):
		if err != nil {
			err = fmt.Errorf("events: read snapshot: %w", err)
		}
		return err
	case in.file.Count() != in.nodes:
		return badSnapshot("it has %d nodes, want %d", in.nodes, in.file.Count())
	}
	in.ended = true
	return nil
}

// beginning reads the records before the runs. It leaves the first record of the runs in
// in.payload.
func (in *snapshotReader) beginning(s *Snapshot) error {
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
			n, limit = len(s.Meta.Pools), maxSnapshotPools
		case recordRank:
			s.Ranks = append(s.Ranks, f.rank())
			n, limit = len(s.Ranks), maxSnapshotRanks
		case recordWorker:
			var w SnapshotWorker
			err = json.Unmarshal(in.payload, &w)
			s.Workers = append(s.Workers, w)
			n, limit = len(s.Workers), maxSnapshotWorkers
		case recordCursor:
			s.Cursors = append(s.Cursors,
				Cursor{RankName: f.rank(), PublisherID: f.uvarint(), EventID: f.uvarint()})
			n, limit = len(s.Cursors), maxSnapshotCursors
		case recordWaiting:
			w := Waiting{PublisherID: f.uvarint()}
			w.Event, err = decodeEvent(f.rest)
			s.Waiting = append(s.Waiting, w)
			n, limit = len(s.Waiting), maxWaitingWorkers*maxWaitingEvents
		case recordParked:
			var ev RouterEvent
			ev, err = decodeEvent(in.payload)
			s.Parked = append(s.Parked, ev)
			n, limit = len(s.Parked), maxSnapshotParked
		case recordState:
			r := RankState{RankName: f.rank(), State: savedStates[min(f.uvarint(), uint64(len(savedStates)-1))]}
			r.Missed = time.UnixMilli(int64(f.uvarint()))
			s.States = append(s.States, r)
			n, limit = len(s.States), maxRanks
		case recordNode, recordHolders, recordPool, records.End:
			in.ranks = len(s.Ranks)
			return nil
		}
		if err != nil || f.bad {
			return badSnapshot("record %d of type %d cannot be read: %v", in.file.Records(), in.kind, err)
		}
		if n > limit {
			return badSnapshot("more than %d records or pools, up to record %d of type %d", limit, in.file.Records(), in.kind)
		}
	}
}

// runs yields the runs, beginning with the record that was read already.
func (in *snapshotReader) runs(s *Snapshot, yield func(int, indexer.Run) bool) error {
	pool, id := -1, uint32(0)
	for !in.ended {
		switch in.kind {
		case recordPool:
			f := fields{in.payload, false}
			n := f.uvarint()
			if f.bad || n >= uint64(len(s.Meta.Pools)) || int(n) <= pool {
				return badSnapshot("record %d begins pool %d of %d behind pool %d", in.file.Records(), n, len(s.Meta.Pools), pool)
			}
			pool, id = int(n), 0
		case recordNode:
			if pool < 0 {
				return badSnapshot("record %d is a node without a pool", in.file.Records())
			}
			id++
			if err := in.node(id); err != nil {
				return err
			}
			if !yield(pool, in.run) {
				return badSnapshot("its runs were not read to the end")
			}
			continue // the next record is read
		case recordMeta, recordRank, recordWorker, recordCursor, recordWaiting, recordParked, recordState, recordHolders:
			return badSnapshot("record %d of type %d stands behind the nodes", in.file.Records(), in.kind)
		}
		if err := in.next(); err != nil {
			return err
		}
	}
	return nil
}

// node reads a run with all its holders, and the record that follows.
func (in *snapshotReader) node(id uint32) error {
	f := fields{in.payload, false}
	parent, n := f.uvarint(), f.uvarint()
	switch {
	case id == 0 || parent >= uint64(id):
		return badSnapshot("node %d of its pool has the parent %d", id, parent)
	case n == 0 || n > uint64(len(f.rest)/8):
		return badSnapshot("node %d of its pool has %d blocks", id, n)
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
func (in *snapshotReader) holders(f *fields) error {
	r := &in.run
	in.cells = slices.Grow(in.cells, len(f.rest)/8) // so that the slices of this record do not move
	for len(f.rest) > 0 {
		rank, tier, start, n := f.uvarint(), f.uvarint(), f.uvarint(), f.uvarint()
		if f.bad || rank >= uint64(in.ranks) || tier > uint64(indexer.External) || start > uint64(len(r.Local)) ||
			n > uint64(len(r.Local))-start || n > uint64(len(f.rest)/8) {
			return badSnapshot("record %d: tier %d of rank %d cannot hold %d blocks from block %d on", in.file.Records(), tier,
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

func (f *fields) rank() RankName {
	return RankName{WorkerID: f.uvarint(), DPRank: uint32(f.uvarint())}
}

// hashes appends n hashes. Its caller has checked that there are as many.
func (f *fields) hashes(to []uint64, n uint64) []uint64 {
	for range n {
		to = append(to, binary.LittleEndian.Uint64(f.rest))
		f.rest = f.rest[8:]
	}
	return to
}
