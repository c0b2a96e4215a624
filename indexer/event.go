// SPDX-License-Identifier: Apache-2.0

package indexer

// Kind is the kind of a change of a worker's cache.
type Kind uint8

// The kinds of event. The last three are of hybrid models.
const (
	Stored Kind = iota + 1
	Removed
	Cleared     // the worker has no blocks, and no [Shape] until the next event names one
	Shaped      // the worker has another [Shape]
	SideStored  // a side group has one more copy of some blocks
	SideRemoved // a side group has one copy less of some blocks, or none
)

// Tier is the memory in which a worker keeps a block.
type Tier uint8

// The storage tiers, fastest first.
const (
	Device Tier = iota
	HostPinned
	Disk
	External
)

// String returns the tier's name in messages.
func (t Tier) String() string {
	return [...]string{"device", "host_pinned", "disk", "external"}[min(t, External)]
}

// Block names one cached block: External is the engine's own opaque id, Local
// the hash of the block's tokens under our scheme (see [AppendLocalHashes]).
type Block struct {
	External uint64
	Local    uint64
}

// Event is one change of a worker's cache, in order and without sequence numbers: the
// sender handles cursors and gaps.
type Event struct {
	Kind Kind
	Tier Tier

	// Parent is the external hash of the block before Blocks[0]. It counts
	// only if HasParent is set; otherwise Blocks[0] begins a sequence.
	Parent    uint64
	HasParent bool

	// Pairs means that Externals of a SideStored event has pairs: a block of the group after the block before it, or
	// after itself if that is unknown. Pairs come in any order.
	Pairs bool

	// AllCopies means that a SideRemoved event removes all copies of its blocks.
	AllCopies bool

	// Blocks are the blocks of a Stored event. The parent of each further one is the
	// previous one.
	Blocks []Block

	// Externals are the blocks of a Removed event, and of events of a side group.
	Externals []uint64

	// Shape is that of a Shaped event; nil = no rule but that of full attention. It is not retained.
	Shape *Shape
	// Group is the number of the side group. Events of side groups are of the device. The blocks of a SideStored event
	// are in the order of their sequence, with gaps where the group does not keep a block; Parent is a block before them.
	Group int
}
