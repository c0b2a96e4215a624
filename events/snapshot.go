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

// Snapshot is a router replica's state of some workers' caches, with the number of the last event
// of each rank. The object store has snapshots of the workers whose events the stream stores, and
// --state-dir one of the other workers. docs/protocol.md describes the file.
type Snapshot struct {
	Created time.Time // to the ms
	LastSeq uint64    // position in the stream: the last message applied; 0 = none
	Meta    SnapshotMeta
	// Ranks are the holders of the runs, by number.
	Ranks   []RankName
	Workers []SnapshotWorker
	Cursors []Cursor
	// Waiting are events that are in no run, because their worker was unknown.
	Waiting []Waiting
	// Parked are events, and removals of their blocks, that are in no run, because the
	// parent of their blocks was unknown. A reader applies them after the runs.
	Parked []RouterEvent
	// States are the ranks that are partial or suspect.
	States []RankState
	// Runs are the pools' runs, one pool after the other, each with the number of
	// its pool in Meta.Pools; see [indexer.Run]. The number of a holder is that of its
	// rank. The runs can be read once; the slices of a run are valid until the next one.
	Runs iter.Seq2[int, indexer.Run]
	// Failed returns why Runs ended early. Nil is for runs that always end well. The reader
	// of a file gets such a function from [ReadSnapshot].
	Failed func() error
}

// SnapshotMeta is the part of a snapshot that is JSON. Readers ignore unknown keys.
type SnapshotMeta struct {
	Writer string `json:"writer,omitempty"`
	Epoch  uint64 `json:"epoch,omitempty"`
	Stream int64  `json:"stream,omitempty"` // creation time of the stream, unix ns: LastSeq has no meaning in another one
	// Inherited means that the snapshot has state from before the stream was created.
	Inherited bool           `json:"inherited,omitempty"`
	Pools     []SnapshotPool `json:"pools,omitempty"`
}

// SnapshotPool names one of the indexes in a snapshot.
type SnapshotPool struct {
	Model     string `json:"model"`
	BlockSize int    `json:"block_size"`
}

// RankName names a rank of a worker.
type RankName struct {
	WorkerID uint64
	DPRank   uint32
}

// SnapshotWorker is a worker process.
type SnapshotWorker struct {
	ID uint64 `json:"id"`
	// StartedMS and Home are those of its [Source].
	StartedMS int64  `json:"started_ms,omitempty"`
	Home      string `json:"home,omitempty"`
	// Info is the router's record of the worker, by which the router recognizes the worker before
	// it registers.
	Info json.RawMessage `json:"info,omitempty"`
}

// ErrSnapshot is wrapped by errors about bytes that are no complete snapshot, or one
// of another scope.
var ErrSnapshot = records.ErrBad

func badSnapshot(format string, args ...any) error {
	return fmt.Errorf("events: %w: "+format, append([]any{ErrSnapshot}, args...)...)
}

const (
	snapshotMagic   = "KVRSNAP2"
	snapshotVersion = 1
	snapshotSeed    = 1337 // of the hashes in it
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

// WriteSnapshot writes a snapshot of a scope as a stream. It keeps one run in memory.
// It returns the number of bytes.
func WriteSnapshot(w io.Writer, scope wire.Scope, s *Snapshot) (int64, error) {
	out := &snapshotWriter{Writer: records.NewWriter(w, s.header(scope))}
	if err := out.all(s); err != nil {
		return 0, fmt.Errorf("events: write snapshot: %w", err)
	}
	return out.Bytes(), nil
}

// header makes the file's header. Its body has time, position, seed and scope.
func (s *Snapshot) header(scope wire.Scope) records.Header {
	h := records.Header{Magic: snapshotMagic, Version: snapshotVersion}
	le := binary.LittleEndian
	le.PutUint64(h.Body[0:], uint64(s.Created.UnixMilli()))
	le.PutUint64(h.Body[8:], s.LastSeq)
	le.PutUint64(h.Body[16:], snapshotSeed)
	le.PutUint64(h.Body[24:], scopeDigest(scope))
	return h
}

type snapshotWriter struct {
	*records.Writer

	err error
}

func (o *snapshotWriter) all(s *Snapshot) error {
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
			return appendEvent(binary.AppendUvarint(b, s.Waiting[i].PublisherID), &s.Waiting[i].Event)
		})
	}
	for i := range s.Parked {
		Parts(s.Parked[i].Event, func(ev indexer.Event) { // a record has a maximum size
			r := s.Parked[i]
			r.Event = ev
			o.record(recordParked, func(b []byte) []byte { return appendEvent(b, &r) })
		})
	}
	nodes := o.runs(s)
	if o.err == nil && s.Failed != nil {
		o.err = s.Failed()
	}
	if o.err != nil {
		return o.err
	}
	return o.Close(nodes)
}

// record writes a record, unless an earlier one failed.
func (o *snapshotWriter) record(kind byte, payload func([]byte) []byte) {
	if o.err == nil {
		o.err = o.Record(kind, payload)
	}
}

func (o *snapshotWriter) numbers(kind byte, values ...uint64) {
	o.record(kind, func(b []byte) []byte { return appendUvarints(b, values...) })
}

func (o *snapshotWriter) json(kind byte, v any) {
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
func (o *snapshotWriter) runs(s *Snapshot) (nodes uint64) {
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
func (o *snapshotWriter) run(r *indexer.Run) (ok bool) {
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
				b = AppendHashes(appendUvarints(b, uint64(r.Parent), uint64(len(r.Local))), r.Local)
			}
			for _, h := range holders[:n] {
				b = AppendHashes(appendUvarints(b, uint64(h.Worker), uint64(h.Tier), uint64(h.Start), uint64(len(h.Externals))),
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

// AppendHashes appends hashes, each as 8 bytes in little-endian order.
func AppendHashes(b []byte, hashes []uint64) []byte {
	for _, h := range hashes {
		b = binary.LittleEndian.AppendUint64(b, h)
	}
	return b
}
