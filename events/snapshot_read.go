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

// ReadSnapshot reads a scope's snapshot up to its runs, which are read as they are
// asked for. Only when Runs has ended and the returned function gives nil was the
// snapshot whole and unchanged: nothing should be believed before.
func ReadSnapshot(r io.Reader, scope wire.Scope) (*Snapshot, func() error, error) {
	return readState(r, snapshotMagic, scope)
}

// readState is ReadSnapshot for files with another magic.
func readState(r io.Reader, magic string, scope wire.Scope) (*Snapshot, func() error, error) {
	file, h, err := records.NewReader(r, magic, snapshotVersion)
	if err != nil {
		return nil, nil, fmt.Errorf("events: read snapshot: %w", err)
	}
	in := &snapshotReader{file: file}
	s, err := in.head(h, scope)
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

type snapshotReader struct {
	file  *records.Reader
	nodes uint64
	ended bool
	err   error

	// The record that was read last.
	kind    byte
	payload []byte

	owners int
	last   []uint64 // by node: the sequence hash of its last block
	run    indexer.Run
	seq    []uint64
	cells  []uint64 // the memory of the run's externals
}

func (in *snapshotReader) head(h *records.Header, scope wire.Scope) (*Snapshot, error) {
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(h.Body[at:]) }
	switch {
	case u64(20) != snapshotSeed:
		return nil, badSnapshot("its hashes have seed %d, want %d", u64(20), snapshotSeed)
	case u64(28) != scopeDigest(scope):
		return nil, badSnapshot("it is of another scope")
	case u64(4) > 1<<53:
		return nil, badSnapshot("it is of the year %d", time.UnixMilli(int64(u64(4))).Year())
	}
	return &Snapshot{
		BlockSize: int(binary.LittleEndian.Uint32(h.Body[0:])),
		Created:   time.UnixMilli(int64(u64(4))),
		LastSeq:   u64(12),
	}, nil
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

// beginning reads what stands before the runs. The first record of those is left
// in in.payload.
func (in *snapshotReader) beginning(s *Snapshot) error {
	for {
		if err := in.next(); err != nil {
			return err
		}
		f := fields{in.payload, false}
		var err error
		switch in.kind {
		case recordMeta:
			err = json.Unmarshal(in.payload, &s.Meta)
		case recordOwner:
			i, o := f.uvarint(), Owner{WorkerID: f.uvarint(), DPRank: uint32(f.uvarint()), Tier: indexer.Tier(f.uvarint())}
			if i != uint64(len(s.Owners)) || i >= maxSnapshotOwners {
				return badSnapshot("owner %d, want %d and at most %d", i, len(s.Owners), maxSnapshotOwners)
			}
			s.Owners = append(s.Owners, o)
		case recordWorker:
			if len(s.Workers) >= maxSnapshotWorkers {
				return badSnapshot("more than %d workers", maxSnapshotWorkers)
			}
			s.Workers = append(s.Workers, slices.Clone(in.payload))
		case recordCursor:
			if len(s.Cursors) >= maxSnapshotCursors {
				return badSnapshot("more than %d cursors", maxSnapshotCursors)
			}
			s.Cursors = append(s.Cursors, Cursor{WorkerID: f.uvarint(), DPRank: uint32(f.uvarint()), PublisherID: f.uvarint(), EventID: f.uvarint()})
		case recordWaiting:
			if len(s.Waiting) >= maxWaitingWorkers*maxWaitingEvents {
				return badSnapshot("more than %d events wait", maxWaitingWorkers*maxWaitingEvents)
			}
			w := Waiting{PublisherID: f.uvarint()}
			w.Event, err = decodeEvent(f.rest)
			s.Waiting = append(s.Waiting, w)
		case recordParked:
			if len(s.Parked) >= maxSnapshotParked {
				return badSnapshot("more than %d events wait for their parents", maxSnapshotParked)
			}
			var ev RouterEvent
			ev, err = decodeEvent(in.payload)
			s.Parked = append(s.Parked, ev)
		case recordState:
			if len(s.States) >= maxRanks {
				return badSnapshot("more than %d states", maxRanks)
			}
			r := RankState{WorkerID: f.uvarint(), DPRank: uint32(f.uvarint()), State: State(min(f.uvarint(), uint64(StateSuspect)))}
			r.Missed = time.UnixMilli(int64(f.uvarint()))
			s.States = append(s.States, r)
		case recordNode, recordPool, records.End:
			in.owners = len(s.Owners)
			if len(s.Meta.Pools) > maxSnapshotPools {
				return badSnapshot("%d pools, at most %d are allowed", len(s.Meta.Pools), maxSnapshotPools)
			}
			return nil
		}
		if err != nil || f.bad {
			return badSnapshot("record %d of type %d cannot be read: %v", in.file.Records(), in.kind, err)
		}
	}
}

// runs hands out the runs, beginning with the record that was read already.
func (in *snapshotReader) runs(s *Snapshot, yield func(int, indexer.Run) bool) error {
	pool, base := 0, uint64(0)
	pools := max(1, len(s.Meta.Pools))
	for !in.ended {
		switch in.kind {
		case recordPool:
			f := fields{in.payload, false}
			n := f.uvarint()
			if f.bad || n >= uint64(pools) || int(n) < pool || int(n) == pool && in.nodes > base {
				return badSnapshot("record %d begins pool %d of %d behind pool %d", in.file.Records(), n, pools, pool)
			}
			pool, base = int(n), in.nodes
		case recordNode:
			if err := in.node(base); err != nil {
				return err
			}
			if !yield(pool, in.run) {
				return badSnapshot("its runs were not read to the end")
			}
		case recordMeta, recordOwner, recordWorker, recordCursor, recordWaiting, recordParked, recordState:
			return badSnapshot("record %d of type %d stands behind the nodes", in.file.Records(), in.kind)
		}
		if err := in.next(); err != nil {
			return err
		}
	}
	return nil
}

// node reads a run. base is the number of nodes before its pool.
func (in *snapshotReader) node(base uint64) error {
	bad := func(what string, v uint64) error {
		return badSnapshot("node %d: %s %d is out of range", in.nodes+1, what, v)
	}
	f := fields{in.payload, false}
	id, parent, n := f.uvarint(), f.uvarint(), f.uvarint()
	switch {
	case id != in.nodes+1 || id > 1<<32-1:
		return bad("id", id)
	case parent >= id || parent != 0 && parent <= base:
		return bad("parent", parent)
	case n == 0 || n > uint64(len(f.rest)/8):
		return bad("length", n)
	}
	in.nodes++
	r := &in.run
	r.ID, r.Parent = uint32(id-base), 0
	seq := uint64(0)
	if parent != 0 {
		r.Parent, seq = uint32(parent-base), in.last[parent-1]
	}
	r.Local, in.seq = r.Local[:0], in.seq[:0]
	for i := range n {
		l := f.u64()
		if i == 0 && parent == 0 {
			seq = l
		} else {
			seq = indexer.NextSequenceHash(seq, l)
		}
		r.Local, in.seq = append(r.Local, l), append(in.seq, seq)
	}
	in.last = append(in.last, seq)
	owners := f.uvarint()
	if owners > uint64(len(f.rest)) {
		return bad("number of owners", owners)
	}
	// At most so many hashes are in it; the holders' slices may not move.
	in.cells = slices.Grow(in.cells[:0], len(f.rest)/8)
	r.Holders = r.Holders[:0]
	for range owners {
		ord, ranges := f.uvarint(), f.uvarint()
		if ord >= uint64(in.owners) {
			return bad("owner", ord)
		}
		if ranges > uint64(len(f.rest)) {
			return bad("number of ranges", ranges)
		}
		first := len(r.Holders)
		for range ranges {
			start, length := f.uvarint(), f.uvarint()
			if start > n || length > n-start {
				return bad("range", start+length)
			}
			r.Holders = append(r.Holders, indexer.Holder{Worker: int(ord), Start: int(start), Externals: in.seq[start : start+length]})
		}
		if f.byte() == 0 {
			continue // the engine's hashes are ours
		}
		for i := first; i < len(r.Holders); i++ {
			h := &r.Holders[i]
			at := len(in.cells)
			if len(h.Externals) > len(f.rest)/8 {
				return bad("number of hashes", uint64(len(h.Externals)))
			}
			for range h.Externals {
				in.cells = append(in.cells, f.u64())
			}
			h.Externals = in.cells[at:]
		}
	}
	if f.bad || len(f.rest) > 0 {
		return badSnapshot("node %d cannot be read", id)
	}
	return nil
}

// fields reads a record's payload. After bad bytes it reads zeros.
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

func (f *fields) u64() uint64 {
	if len(f.rest) < 8 {
		f.rest, f.bad = nil, true
		return 0
	}
	v := binary.LittleEndian.Uint64(f.rest)
	f.rest = f.rest[8:]
	return v
}

func (f *fields) byte() byte {
	if len(f.rest) == 0 {
		f.bad = true
		return 0
	}
	v := f.rest[0]
	f.rest = f.rest[1:]
	return v
}
