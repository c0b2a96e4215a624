// SPDX-License-Identifier: Apache-2.0

package events

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/records"
	"github.com/kvroute/kvroute/internal/wire"
)

// Snapshot is all that a router replica has made of the events up to a position of
// the stream. docs/protocol.md has the form that it has as a file.
type Snapshot struct {
	// BlockSize is that of all pools, or 0 if they differ.
	BlockSize int
	Created   time.Time // to the ms
	LastSeq   uint64    // position in the stream: the last message applied; 0 = none
	Meta      SnapshotMeta
	// Owners are the holders of the runs, by number.
	Owners []Owner
	// Workers say of each worker process what makes it recognized before it has
	// registered. What stands in there is the router's business.
	Workers []json.RawMessage
	Cursors []Cursor
	// Waiting are events that are in no run, since their worker was not known.
	Waiting []Waiting
	// Parked are events, and removals of their blocks, that are in no run, since the
	// parent of their blocks was not there. They are applied behind the runs.
	Parked []RouterEvent
	// States are the ranks that are not known well.
	States []RankState
	// Runs are the pools' runs, one pool after the other, each with the number of
	// its pool in Meta.Pools; see [indexer.Run]. It can be read once. The slices of
	// a run are good until the next one.
	Runs iter.Seq2[int, indexer.Run]
	// Failed is asked, when Runs has ended, whether that was too early. Nil is for
	// runs that always end well; those of [ReadSnapshot] tell otherwise.
	Failed func() error
}

// SnapshotMeta is the free part of a snapshot. Unknown keys are ignored.
type SnapshotMeta struct {
	Model  string `json:"model,omitempty"` // of a file without Pools: its only one's
	Writer string `json:"writer,omitempty"`
	Epoch  uint64 `json:"epoch,omitempty"`
	Stream int64  `json:"stream,omitempty"` // when the stream was made, unix ns: LastSeq means nothing in another
	// Inherited says that it has what was known before the stream was made.
	Inherited bool           `json:"inherited,omitempty"`
	Pools     []SnapshotPool `json:"pools,omitempty"`
}

// SnapshotPool names one of the indexes in a snapshot.
type SnapshotPool struct {
	Model     string `json:"model"`
	BlockSize int    `json:"block_size"`
}

// Owner is a rank of a worker with a tier of its storage.
type Owner struct {
	WorkerID uint64
	DPRank   uint32
	Tier     indexer.Tier
}

// ErrSnapshot is wrapped by errors about bytes that are no whole snapshot, or one
// of another scope.
var ErrSnapshot = records.ErrBad

func badSnapshot(format string, args ...any) error {
	return fmt.Errorf("events: %w: "+format, append([]any{ErrSnapshot}, args...)...)
}

const (
	snapshotMagic   = "KVRSNAP1"
	snapshotVersion = 1
	snapshotSeed    = 1337 // of the hashes in it
)

// The types of records. Others are skipped.
const (
	recordMeta    = 1
	recordOwner   = 2
	recordCursor  = 3
	recordNode    = 4
	recordWorker  = 5 // JSON of a worker
	recordPool    = 6 // the nodes behind it are of this pool
	recordWaiting = 7 // an event that waits for its worker
	recordParked  = 8 // an event that waits for its parent
	recordState   = 9 // of a rank that is not known well
)

// Bounds of what a reader keeps beside the index. They are those of what a replica
// keeps of a fleet, and guard against files that only look good.
const (
	maxSnapshotOwners  = 1 << 20
	maxSnapshotCursors = maxRanks * maxPublishers
	maxSnapshotWorkers = 1 << 16
	maxSnapshotPools   = 1 << 10
	maxSnapshotParked  = 1 << 20
)

// scopeDigest stands for the scope in a snapshot's header.
func scopeDigest(s wire.Scope) uint64 {
	s = s.WithDefaults()
	return xxh3.HashString(s.Namespace + "\x00" + s.Component + "\x00" + s.Endpoint)
}

// written tells of a snapshot that was written.
type written struct {
	bytes  int64
	digest uint64 // XXH3 of all bytes
	nodes  uint64
}

// WriteSnapshot writes a snapshot of a scope as a stream; of the runs it keeps none.
// It returns the number of bytes.
func WriteSnapshot(w io.Writer, scope wire.Scope, s *Snapshot) (int64, error) {
	out, err := writeSnapshot(w, scope, s)
	return out.bytes, err
}

func writeSnapshot(w io.Writer, scope wire.Scope, s *Snapshot) (written, error) {
	return writeState(w, snapshotMagic, scope, s)
}

// writeState is writeSnapshot for files with another magic.
func writeState(w io.Writer, magic string, scope wire.Scope, s *Snapshot) (written, error) {
	out := &snapshotWriter{Writer: records.NewWriter(w, s.header(magic, scope))}
	if err := out.all(s); err != nil {
		return written{}, fmt.Errorf("events: write snapshot: %w", err)
	}
	return written{bytes: out.Bytes(), digest: out.Digest(), nodes: out.nodes}, nil
}

type snapshotWriter struct {
	*records.Writer
	nodes uint64
	extra []extra
}

// extra says that a run of the dump became several nodes: from the next run on, ids
// are larger by so many.
type extra struct{ after, by uint32 }

func (o *snapshotWriter) all(s *Snapshot) error {
	meta, err := json.Marshal(s.Meta)
	if err != nil {
		return err
	}
	if err := o.Record(recordMeta, func(b []byte) []byte { return append(b, meta...) }); err != nil {
		return err
	}
	for i, owner := range s.Owners {
		err = errors.Join(err, o.Record(recordOwner, func(b []byte) []byte {
			return appendUvarints(b, uint64(i), owner.WorkerID, uint64(owner.DPRank), uint64(owner.Tier))
		}))
	}
	for _, worker := range s.Workers {
		err = errors.Join(err, o.Record(recordWorker, func(b []byte) []byte { return append(b, worker...) }))
	}
	for _, c := range s.Cursors {
		err = errors.Join(err, o.Record(recordCursor, func(b []byte) []byte {
			return appendUvarints(b, c.WorkerID, uint64(c.DPRank), c.PublisherID, c.EventID)
		}))
	}
	for _, r := range s.States {
		err = errors.Join(err, o.Record(recordState, func(b []byte) []byte {
			return appendUvarints(b, r.WorkerID, uint64(r.DPRank), uint64(r.State), uint64(max(0, r.Missed.UnixMilli())))
		}))
	}
	for i := range s.Waiting {
		err = errors.Join(err, o.Record(recordWaiting, func(b []byte) []byte {
			return appendEvent(binary.AppendUvarint(b, s.Waiting[i].PublisherID), &s.Waiting[i].Event)
		}))
	}
	for i := range s.Parked {
		Parts(s.Parked[i].Event, func(ev indexer.Event) { // a record has its bound, too
			r := s.Parked[i]
			r.Event = ev
			err = errors.Join(err, o.Record(recordParked, func(b []byte) []byte { return appendEvent(b, &r) }))
		})
	}
	if err != nil {
		return err
	}
	if err := o.runs(s); err != nil {
		return err
	}
	if s.Failed != nil {
		if err := s.Failed(); err != nil {
			return err
		}
	}
	return o.Close(o.nodes)
}

// header makes the file's. Its body has block size, time, position, seed and scope.
func (s *Snapshot) header(magic string, scope wire.Scope) records.Header {
	h := records.Header{Magic: magic, Version: snapshotVersion}
	le := binary.LittleEndian
	le.PutUint32(h.Body[0:], uint32(s.BlockSize))
	le.PutUint64(h.Body[4:], uint64(s.Created.UnixMilli()))
	le.PutUint64(h.Body[12:], s.LastSeq)
	le.PutUint64(h.Body[20:], snapshotSeed)
	le.PutUint64(h.Body[28:], scopeDigest(scope))
	return h
}

func appendUvarints(b []byte, values ...uint64) []byte {
	for _, v := range values {
		b = binary.AppendUvarint(b, v)
	}
	return b
}

// runs writes the nodes. The ids of each pool's runs begin with 1; in the file they
// go on.
func (o *snapshotWriter) runs(s *Snapshot) error {
	if s.Runs == nil {
		return nil
	}
	pool, base := -1, uint32(0)
	for p, r := range s.Runs {
		if p != pool {
			pool, base, o.extra = p, uint32(o.nodes), nil
			if len(s.Meta.Pools) > 0 {
				if err := o.Record(recordPool, func(b []byte) []byte { return appendUvarints(b, uint64(p)) }); err != nil {
					return err
				}
			}
		}
		parent := uint64(0)
		if r.Parent != 0 {
			parent = uint64(base + r.Parent + o.more(r.Parent))
		}
		if err := o.run(parent, &r); err != nil {
			return err
		}
	}
	return nil
}

// more returns by how much the id of a run of the dump has grown.
func (o *snapshotWriter) more(run uint32) uint32 {
	for _, e := range slices.Backward(o.extra) {
		if run > e.after {
			return e.by
		}
	}
	return 0
}

// run writes a run as a node, or as several of the same blocks if it has too many
// holders for one record: a reader that knows nothing of it finds them at one place.
func (o *snapshotWriter) run(parent uint64, r *indexer.Run) error {
	const room = records.Max - 64 // for what stands before the owners
	if 8*len(r.Local) > room/2 {
		return fmt.Errorf("a run has %d blocks, too many for a record", len(r.Local))
	}
	holders := r.Holders
	for first := true; first || len(holders) > 0; first = false {
		size, n := 8*len(r.Local), 0
		for n < len(holders) {
			size += 32 + 8*len(holders[n].Externals)
			if n > 0 && size > room {
				break
			}
			n++
		}
		o.nodes++
		if !first {
			by := uint32(1)
			if l := len(o.extra); l > 0 {
				by += o.extra[l-1].by
			}
			o.extra = append(o.extra, extra{after: r.ID, by: by})
		}
		if err := o.node(parent, r.Local, holders[:n]); err != nil {
			return err
		}
		holders = holders[n:]
	}
	return nil
}

func (o *snapshotWriter) node(parent uint64, local []uint64, holders []indexer.Holder) error {
	return o.Record(recordNode, func(b []byte) []byte {
		b = appendUvarints(b, o.nodes, parent, uint64(len(local)))
		for _, l := range local {
			b = binary.LittleEndian.AppendUint64(b, l)
		}
		b = binary.AppendUvarint(b, uint64(len(holders)))
		for _, h := range holders {
			b = appendUvarints(b, uint64(h.Worker), 1, uint64(h.Start), uint64(len(h.Externals)))
			b = append(b, 1)
			for _, e := range h.Externals {
				b = binary.LittleEndian.AppendUint64(b, e)
			}
		}
		return b
	})
}
