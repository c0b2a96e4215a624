// SPDX-License-Identifier: Apache-2.0

package events

import "github.com/kvroute/kvroute/indexer"

// maxEventBlocks is the largest number of blocks in an event. Longer ones are split, because
// NATS refuses messages above 1 MiB.
const maxEventBlocks = 4096

// Parts calls do for an event, or for each part of an event that is too long.
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
		if ev.Kind == indexer.SideStored && !ev.Pairs {
			ev.Parent, ev.HasParent = first.Externals[maxEventBlocks-1], true
		}
		ev.Externals = ev.Externals[maxEventBlocks:]
	}
	do(ev)
}

// maxJoinedBlocks is the largest number of blocks in joined events.
const maxJoinedBlocks = 128

// Join appends ev to the event before it, if one event can have the effect of both. The memory after
// the slices of the event before must be free.
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
		before.Blocks = append(before.Blocks, ev.Blocks...)
		return true
	case indexer.Removed:
		if len(before.Externals)+len(ev.Externals) > maxJoinedBlocks {
			return false
		}
		before.Externals = append(before.Externals, ev.Externals...)
		return true
	default:
		return false
	}
}

// Weight is the memory of an event, in blocks.
func Weight(ev *indexer.Event) int { return 1 + len(ev.Blocks) + len(ev.Externals) }
