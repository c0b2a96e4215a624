// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/indexer"
)

// stateGroups is the number of side groups of a model with states: Qwen3-Next has three groups of recurrent layers
// for each group of full attention.
const stateGroups = 3

// hybrid describes the side groups of a hybrid model. They are numbered from 1 on; the group of full attention is 0.
// They keep blocks as vLLM's groups do by default (prefix-cache-retention-interval 0): the blocks that a hit needs at
// the last boundary of a prompt, and at its junction. That is the end of the cached full blocks, if the groups could
// not use all of them.
//
// All groups have blocks of one size, and share the capacity and the queue of eviction of the cache. Left out: vLLM
// frees blocks when they leave the window, here they stay until the request ends; and it waits a step for a state
// that another request computes, here the state is found at once.
type hybrid struct {
	window int // tokens of the sliding window; 0 = the groups have states
	run    int // blocks before a boundary that a hit needs there
	shape  indexer.Shape
}

// parseHybrid returns the side groups that a setting names, window=<tokens> or state=<tokens in a block>, and the
// tokens in a block: the block of a state is as long as all other blocks.
func parseHybrid(text string, block int) (*hybrid, int, error) {
	if text == "" {
		return nil, block, nil
	}
	kind, number, _ := strings.Cut(text, "=")
	tokens, err := strconv.Atoi(number)
	if err != nil || tokens < 2 || tokens > 1<<20 || kind != "window" && kind != "state" {
		return nil, 0, fmt.Errorf("--hybrid is %q, want window=<tokens> or state=<tokens>, from 2 to %d", text, 1<<20)
	}
	h, groups := &hybrid{run: 1}, stateGroups
	side := indexer.SideGroup{Needs: indexer.NeedsState}
	if kind == "state" {
		block = max(block, tokens) // as vLLM does
	} else {
		h.window, groups = tokens, 1
		h.run = (tokens - 1 + block - 1) / block
		side.Needs, side.Tokens = indexer.NeedsWindow, tokens
	}
	h.shape = indexer.Shape{Block: block, Full: block}
	for side.Group = 1; side.Group <= groups; side.Group++ {
		side.Block = block
		h.shape.Sides = append(h.shape.Sides, side)
	}
	return h, block, nil
}

// spec is vLLM's name of the kind of a group; "" for a model with full attention only.
func (h *hybrid) spec(group int) string {
	switch {
	case h == nil:
		return ""
	case group == 0:
		return "full_attention"
	case h.window > 0:
		return "sliding_window"
	default:
		return "mamba"
	}
}

// sideKey is the key of a block of a side group in the cache. sequence is the hash of all tokens up to its end.
func sideKey(sequence uint64, group int) uint64 {
	return indexer.NextSequenceHash(sequence, uint64(group))
}

// sideBlocks are the blocks of side groups that a request holds or will store.
type sideBlocks struct {
	held    []uint64 // keys of the blocks that the request references
	keep    []int    // numbers of the prompt's blocks that each group keeps, in order, without those that were cached
	reserve int      // blocks that the request may still fill
}

// find returns the longest usable prefix of a prompt that is cached, at most most blocks; how many of its blocks are
// unused; and the blocks of side groups of a request with the prompt.
func (c *cache) find(p *prefix, most int) (blocks, unused int, s sideBlocks) {
	blocks, unused = c.hit(p.sequence[:min(most, len(p.sequence))])
	if c.hybrid == nil {
		return blocks, unused, s
	}
	full, run := blocks, c.hybrid.run
	blocks = c.usable(p, full)
	_, unused = c.hit(p.sequence[:blocks])
	for g := range c.hybrid.shape.Sides {
		for _, h := range p.sequence[max(0, blocks-run):blocks] {
			key := sideKey(h, g+1)
			if s.held = append(s.held, key); c.blocks[key].refs == 0 {
				unused++
			}
		}
	}
	next := blocks
	for _, end := range []int{full, most} { // the junction, and the last boundary
		for i := max(next, end-run); i < end; i++ {
			s.keep = append(s.keep, i)
		}
		next = max(next, end)
	}
	s.reserve = len(c.hybrid.shape.Sides) * max(len(s.keep), min(run, len(p.sequence))+1)
	return blocks, unused, s
}

// usable returns the longest prefix, at most end blocks, at which each side group has the blocks that it needs.
func (c *cache) usable(p *prefix, end int) int {
	for i := end - 1; i >= max(0, end-c.hybrid.run); i-- {
		for g := range c.hybrid.shape.Sides {
			if c.blocks[sideKey(p.sequence[i], g+1)] == nil {
				end = i // each longer prefix needs this block or lacks a later one
				break
			}
		}
	}
	return end
}

// keepSides references the blocks that side groups keep of the blocks from number have up to number end, and caches new
// ones. Each group publishes an event, even if it keeps no block.
func (c *cache) keepSides(p *prefix, s *sideBlocks, have, end int) {
	if c.hybrid == nil || have >= end {
		return
	}
	keep := s.keep
	for len(keep) > 0 && keep[0] < have {
		keep = keep[1:]
	}
	for g := range c.hybrid.shape.Sides {
		ev := Change{
			Event:  indexer.Event{Kind: indexer.SideStored, Group: g + 1, Shape: &c.hybrid.shape},
			Tokens: p.tokens[have*p.size : end*p.size], LoRA: p.keys.lora, Spec: c.hybrid.spec(g + 1), Window: c.hybrid.window,
		}
		if have > 0 {
			ev.HasParent, ev.Parent = true, c.blocks[p.sequence[have-1]].External
		}
		for _, i := range keep {
			if i >= end {
				break
			}
			if i == 0 {
				ev.Salt = p.keys.salt
			}
			key, full := sideKey(p.sequence[i], g+1), c.blocks[p.sequence[i]]
			b := c.blocks[key]
			isNew := b == nil
			if isNew {
				b = &block{Block: full.Block, refs: 1, group: g + 1}
				c.blocks[key] = b
			} else {
				c.acquire([]uint64{key})
			}
			if !isNew && c.copies {
				c.spare = append(c.spare, b)
			}
			if isNew || c.copies {
				ev.Externals = append(ev.Externals, b.External)
			}
			s.held = append(s.held, key)
			c.reserved--
			s.reserve--
		}
		c.publish(ev)
	}
}

// clip shortens the next part of a request's prompt, of n tokens, so that it ends where a state is kept, or at the
// end of a block: engines have states only at the ends of parts.
func (c *cache) clip(r *request, n int) int {
	if c.hybrid == nil || c.hybrid.window > 0 {
		return n
	}
	end := r.computed + n
	if whole := end / r.size * r.size; end < r.prompt && whole > r.computed {
		end = whole
	}
	for _, i := range r.sides.keep {
		if kept := (i + 1) * r.size; kept > r.computed {
			end = min(end, kept)
		}
	}
	return end - r.computed
}

// removed is the removal of one copy of a block.
func (c *cache) removed(b *block) Change {
	ev := Change{Event: indexer.Event{Kind: indexer.Removed, Group: b.group, Externals: []uint64{b.External}}, Spec: c.hybrid.spec(b.group)}
	if b.group > 0 {
		ev.Kind = indexer.SideRemoved
	}
	return ev
}
