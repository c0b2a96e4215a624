// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// output collects the events that a batch produces.
type output struct {
	events    []events.RouterEvent
	blocks    []indexer.Block // of the events, in one list
	externals []uint64        // of the events, in one list
	drops     Drops
	rank      uint32

	unknownKind string // of a group
	unsteady    bool   // the groups changed too often
}

// maxJoined limits the blocks of joined events: the index applies them with its lock held.
const maxJoined = 128

func (o *output) add(ev indexer.Event) {
	o.events = append(o.events, events.RouterEvent{DPRank: o.rank, Event: ev})
}

// last returns the last event if more blocks may join it. Its list is the end of blocks or externals.
func (o *output) last(kind indexer.Kind, tier indexer.Tier) *indexer.Event {
	if n := len(o.events); n > 0 {
		if e := &o.events[n-1]; e.DPRank == o.rank && e.Event.Kind == kind && e.Event.Tier == tier && len(e.Event.Blocks)+len(e.Event.Externals) < maxJoined {
			return &e.Event
		}
	}
	return nil
}

func (o *output) stored(tier indexer.Tier, hash uint64, k *cachedBlock) {
	first := len(o.blocks)
	o.blocks = appendBlocks(o.blocks, hash, k)
	if last := o.last(indexer.Stored, tier); last != nil && k.HasParent && o.blocks[first-1].External == k.Parent {
		last.Blocks = o.blocks[first-len(last.Blocks):]
		return
	}
	o.add(indexer.Event{
		Kind: indexer.Stored, Tier: tier, Parent: k.Parent, HasParent: k.HasParent, Blocks: o.blocks[first:],
	})
}

func (o *output) removed(tier indexer.Tier, externals ...uint64) {
	first := len(o.externals)
	o.externals = append(o.externals, externals...)
	if last := o.last(indexer.Removed, tier); last != nil {
		last.Externals = o.externals[first-len(last.Externals):]
	} else if len(externals) > 0 {
		o.add(indexer.Event{Kind: indexer.Removed, Tier: tier, Externals: o.externals[first:]})
	}
}

func (o *output) drop(reason DropReason, blocks int) { o.drops[reason] += blocks }
