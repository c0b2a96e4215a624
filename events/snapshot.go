// SPDX-License-Identifier: Apache-2.0

package events

import (
	"encoding/binary"
	"encoding/json"
	"iter"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/records"
)

// Snapshot is a router replica's state of some workers' caches, with the number of the last event
// of each rank. Package saved writes and reads it: the object store has snapshots of the workers whose
// events the stream stores, and --state-dir those of the other workers.
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
	// Failed returns why Runs ended early. Nil is for runs that always end well.
	Failed func() error
	// Owners are ranks that kvroute reads from their engines. They can be read once, after Runs.
	Owners iter.Seq[*Owner]
}

// Owner is a rank that kvroute reads from its engine, with all blocks that the engine has. An engine may have
// several copies of a block, in each group of its cache; the index counts each block once.
type Owner struct {
	// Info is what package engines knows of the rank besides the blocks.
	Info json.RawMessage
	// Events build the blocks of side groups in the index.
	Events []RouterEvent
	// Blocks are all other blocks, by their place. They can be read once, before the next owner.
	Blocks iter.Seq2[Place, *OwnedBlock]
}

// Place is where an engine has a block.
type Place struct {
	DPRank uint32
	Tier   indexer.Tier
	Group  int // of the engine's cache
}

// OwnedBlock is a block that an engine has.
type OwnedBlock struct {
	ID, Local, Seed, Parent uint64
	Copies                  uint32 // at least 1
	HasParent               bool
	Published               bool // the index has the block
	// A block of another size than the index's has one of these.
	Part   bool     // smaller than the index's block
	Tokens []uint32 // of a part
	Parts  []uint64 // of a published part: the ids of the parts before it
	Locals []uint64 // of a larger block: the hashes of its parts
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

// AppendHashes appends hashes, each as 8 bytes in little-endian order.
func AppendHashes(b []byte, hashes []uint64) []byte {
	for _, h := range hashes {
		b = binary.LittleEndian.AppendUint64(b, h)
	}
	return b
}
