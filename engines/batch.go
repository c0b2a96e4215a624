// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"math"

	"github.com/kvroute/kvroute/indexer"
)

// DropReason says why blocks of an engine's events are not indexed.
type DropReason int

// The reasons. Blocks are counted; an event that names no block counts as one.
const (
	DropNone      DropReason = iota // the block is indexed
	DropBad                         // the event cannot be read
	DropKind                        // the kind of the event is unknown
	DropMedium                      // the block is on an unknown medium
	DropForeign                     // the block is not in this worker's cache
	DropGroup                       // a part of a group's block, or a block of a group whose kind is not named, or of a smaller window
	DropGroupKind                   // see storeSide; also one for each change of a group's kind
	DropKeys                        // the engine hashed the block with unknown extra keys
	DropLoRA                        // the adapter has a number and no name
	DropParent                      // the parent is unknown, so the salt is unknown
	DropBlock                       // an unknown block moved between tiers
	DropSize                        // the block size neither divides the scope's nor is a multiple of it
	DropTokens                      // the event has fewer or more tokens than its blocks
	DropConflict                    // stored again with another hash; the first one stays
	DropFull                        // the engine has more blocks than are remembered
	DropLost                        // an event id is missing: all known blocks are forgotten
	dropReasons                     // the number of reasons
)

// String returns the reason's value of the metric's attribute.
func (r DropReason) String() string {
	return [...]string{
		"", "bad", "kind", "medium", "foreign", "group", "group_kind", "keys", "lora", "parent", "block", "size", "tokens", "conflict",
		"full", "lost", "",
	}[min(max(r, 0), dropReasons)]
}

// Drops counts blocks that are not indexed, by reason.
type Drops [dropReasons]int

// EngineKind is the kind of an engine's event.
type EngineKind uint8

// The kinds. An event of another kind only has an id and a window.
const (
	EngineStored  EngineKind = iota + 1
	EngineRemoved            // from Tier, or from all tiers if AnyTier is set
	EngineCleared
	EngineMoved   // from tier From to Tier, or to an unknown tier if GoneTo is set
	EngineStarted // the engine has an attention window of WindowSize
)

// EngineEvent is one event in the engine's own terms. [Engine] translates it for the
// index.
type EngineEvent struct {
	Kind    EngineKind
	Rank    uint32
	HasRank bool

	Tier, From      indexer.Tier
	AnyTier, GoneTo bool

	// Hashes are the engine's ids of consecutive blocks of one sequence. Parent is the
	// block before the first one.
	Hashes    []uint64
	Parent    uint64
	HasParent bool

	Tokens    []uint32
	BlockSize int

	LoRA      string
	HasLoRAID bool // the adapter has a number
	// Salt is the cache salt if HasSalt is set. Otherwise the blocks have their parent's.
	Salt    string
	HasSalt bool
	// Objects are the hashes of each block's images and other objects. It may be shorter
	// than Hashes.
	Objects [][]uint64
	// Usable is the number of leading blocks without unknown extra keys.
	Usable int

	Group int    // the group of the engine's cache
	Spec  string // the group's kind; "" if the event does not name it
	// Window is the group's attention window in tokens; 0 = none, or not named.
	Window int

	// ID and WindowSize are TensorRT-LLM's. SameID means that the previous event of the
	// batch has the same id: both are parts of one event.
	ID         uint64
	HasID      bool
	SameID     bool
	WindowSize int
}

// EngineBatch is one message of an engine.
type EngineBatch struct {
	Events []EngineEvent
	Drops  Drops

	time float64 // seconds since 1970; 0 if the batch does not have it exactly
	// The events' hashes and tokens, in one list each.
	hashes []uint64
	tokens []uint32
	// removal is the last event that removes one block, removed its place in Events. From hash on,
	// the block's id is in it. It is empty while there is no such event.
	removal       []byte
	removed, hash int
}

const (
	// maxEngineRanks is far above the number of ranks of an engine.
	maxEngineRanks = 1024
	// maxGroup limits the number of an engine's cache groups; engines have a few.
	maxGroup = 256
	// tiers is the number of tiers of a cache.
	tiers = int(indexer.External) + 1
)

// batchPrint identifies a batch: its number, and a hash of its bytes.
type batchPrint struct{ sequence, digest uint64 }

// isEvidence reports whether a batch can prove that two sockets are the same: it has events and a time
// that is not a whole number of seconds.
func (b *EngineBatch) isEvidence() bool {
	return len(b.Events) > 0 && b.time > 0 && b.time != math.Trunc(b.time)
}

// Fault is something wrong with a worker's engine that a person must mend. What is one of the names in
// docs/workers.md, and Text a sentence that says what was found and what to change.
type Fault struct{ What, Text string }

// The faults that this package finds.
const (
	faultSameEvents   = "same_events"          // two workers share an event socket
	faultRefused      = "event_socket_refused" // an event or replay socket is unavailable
	faultEventSockets = "event_sockets"        // the engine has other event sockets than the worker's settings, or none
	faultBlockSize    = "block_size"           // the engine has another block size than the worker's settings
	faultEngineFlags  = "engine_flags"         // the engine reports flags for prompts that cannot be read
)
