// SPDX-License-Identifier: Apache-2.0

package indexer

// Kind says what happened to a worker's cache.
type Kind uint8

// The three kinds of event.
const (
	Stored Kind = iota + 1
	Removed
	Cleared
)

// Tier is where a worker keeps a block.
type Tier uint8

// The storage tiers, fastest first.
const (
	Device Tier = iota
	HostPinned
	Disk
	External
)

// String returns how a tier is called on the wire.
func (t Tier) String() string {
	return [...]string{"device", "host_pinned", "disk", "external"}[min(t, External)]
}

// Block names one cached block: External is the engine's own opaque id, Local
// the hash of the block's tokens under our scheme (see [AppendLocalHashes]).
type Block struct {
	External uint64
	Local    uint64
}

// Event is one change of a worker's cache, already in order and without the
// transport's numbers: cursors and gaps are the sender's business.
type Event struct {
	Kind Kind
	Tier Tier

	// Parent is the external hash of the block before Blocks[0]. It counts
	// only if HasParent is set; otherwise Blocks[0] begins a sequence.
	Parent    uint64
	HasParent bool

	// Blocks are the blocks of a Stored event; each one's parent is the one
	// before it.
	Blocks []Block

	// Externals are the blocks of a Removed event.
	Externals []uint64
}
