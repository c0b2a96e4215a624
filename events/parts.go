// SPDX-License-Identifier: Apache-2.0

package events

import (
	"slices"

	"github.com/kvroute/kvroute/indexer"
)

// maxEventBlocks is how many blocks an event of ours has at most: one that is
// longer is told in parts, because a bus refuses messages of a megabyte.
const maxEventBlocks = 4096

// Parts calls do for an event, or one after the other for the parts of one that
// would be too long a message.
func Parts(ev indexer.Event, do func(indexer.Event)) {
	for len(ev.Blocks) > maxEventBlocks {
		first := ev
		first.Blocks = ev.Blocks[:maxEventBlocks:maxEventBlocks]
		do(first)
		ev.Parent, ev.HasParent = first.Blocks[maxEventBlocks-1].External, true
		ev.Blocks = ev.Blocks[maxEventBlocks:]
	}
	for len(ev.Externals) > maxEventBlocks {
		first := ev
		first.Externals = ev.Externals[:maxEventBlocks:maxEventBlocks]
		do(first)
		ev.Externals = ev.Externals[maxEventBlocks:]
	}
	do(ev)
}

// maxJoinedBlocks is how many blocks joined events have at most.
const maxJoinedBlocks = 128

// Join makes ev part of the event before it, if together they say the same.
func Join(last *RouterEvent, dpRank uint32, ev *indexer.Event) bool {
	before := &last.Event
	if last.DPRank != dpRank || before.Kind != ev.Kind || before.Tier != ev.Tier {
		return false
	}
	switch ev.Kind {
	case indexer.Stored:
		n := len(before.Blocks)
		if n == 0 || !ev.HasParent || ev.Parent != before.Blocks[n-1].External || n+len(ev.Blocks) > maxJoinedBlocks {
			return false
		}
		before.Blocks = append(slices.Clip(before.Blocks), ev.Blocks...)
		return true
	case indexer.Removed:
		if len(before.Externals)+len(ev.Externals) > maxJoinedBlocks {
			return false
		}
		before.Externals = append(slices.Clip(before.Externals), ev.Externals...)
		return true
	default:
		return false
	}
}

// Weight is what an event weighs in memory, in blocks.
func Weight(ev *indexer.Event) int { return 1 + len(ev.Blocks) + len(ev.Externals) }
