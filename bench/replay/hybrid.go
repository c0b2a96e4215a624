// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/indexer"
)

// stateGroups is the number of side groups of a model with states; one with a window has a single side group.
const stateGroups = 3

// hybrid describes the side groups of the engines' model. They keep what a hit needs at the last boundary of a prompt
// and at its junction, as vLLM's groups do by default (package enginesim has the same rule, compared with vLLM).
// Blocks of all groups share a cache.
//
// Left out: vLLM stores full blocks behind a short hit a second time, and its window groups hold blocks that they do
// not keep while they compute a prompt.
type hybrid struct {
	shape    indexer.Shape
	distinct int32 // blocks of the trace; block n of the side group g has the number n + g·distinct
	run      int   // blocks before a boundary that a hit needs there
	step     int   // blocks from one boundary to the next
}

// newHybrid returns the side groups of a setting, window=<tokens> or state=<tokens>, for a trace; nil if the setting
// is empty.
func newHybrid(text string, t *Trace) (*hybrid, error) {
	if text == "" {
		return nil, nil //nolint:nilnil // no side groups
	}
	window, tokens, err := parseHybrid(text)
	if err != nil {
		return nil, err
	}
	h, side, groups := &hybrid{distinct: int32(t.Distinct()), step: 1}, indexer.SideGroup{Block: t.BlockSize}, 1
	if window {
		side.Needs, side.Tokens = indexer.NeedsWindow, tokens
		h.run = (tokens - 1 + t.BlockSize - 1) / t.BlockSize
	} else {
		if tokens%t.BlockSize > 0 {
			return nil, fmt.Errorf("hybrid is %s, want a multiple of %d: the tokens in a block of the trace", text, t.BlockSize)
		}
		side.Needs, side.Block, groups = indexer.NeedsState, tokens, stateGroups
		h.run, h.step = 1, tokens/t.BlockSize
	}
	h.shape = indexer.Shape{Block: t.BlockSize, Full: t.BlockSize}
	for side.Group = 1; side.Group <= groups; side.Group++ {
		h.shape.Sides = append(h.shape.Sides, side)
	}
	return h, nil
}

func parseHybrid(text string) (window bool, tokens int, err error) {
	kind, number, _ := strings.Cut(text, "=")
	tokens, err = strconv.Atoi(number)
	if err != nil || tokens < 2 || tokens > 1<<20 || kind != "window" && kind != "state" {
		return false, 0, fmt.Errorf("hybrid is %q, want window=<tokens> or state=<tokens>, from 2 to %d", text, 1<<20)
	}
	return kind == "window", tokens, nil
}

// groups is the number of side groups.
func (h *hybrid) groups() int {
	if h == nil {
		return 0
	}
	return len(h.shape.Sides)
}

// sides are the blocks of side groups of a request: their numbers in the first side group.
type sides struct {
	held []int32 // blocks that the request references: first those of the hit, then those that the groups keep
	keep []int   // positions in the prompt of the kept blocks that are not computed yet, in order
}

// find returns the number of leading blocks that a prompt can use, of full cached ones, and the request's blocks of
// side groups.
func (h *hybrid) find(c *cache, r *Request, full int) (hit int, s sides) {
	last := min(len(r.Blocks), (r.Input-1)/(h.shape.Block*h.step)*h.step)
	junction := min(full, last) / h.step * h.step
	hit = h.usable(c, r, junction)
	s.held = append(s.held, r.Blocks[max(0, hit-h.run):hit]...)
	next := hit
	for _, end := range []int{junction, last} {
		for i := max(next, end-h.run); i < end; i++ {
			s.held = append(s.held, r.Blocks[i])
			s.keep = append(s.keep, i)
		}
		next = max(next, end)
	}
	return hit, s
}

// usable returns the last boundary, at most end blocks, at which all groups have the blocks that they need.
func (h *hybrid) usable(c *cache, r *Request, end int) int {
	for i := end - 1; i >= max(0, end-h.run); i-- {
		for g := range int32(h.groups()) {
			if c.leading([]int32{r.Blocks[i] + (g+1)*h.distinct}) == 0 {
				end = i / h.step * h.step // each longer prefix needs this block or lacks a later one
				i = end
				break
			}
		}
	}
	return end
}

// each calls a function with the number of a block in each side group.
func (h *hybrid) each(numbers []int32, do func(number []int32)) {
	for g := range int32(h.groups()) {
		for _, n := range numbers {
			do([]int32{n + (g+1)*h.distinct})
		}
	}
}

// clip shortens the next part of a prompt, so that it ends where a state is kept, or else at a boundary: engines have
// states only at the ends of parts.
func (h *hybrid) clip(s *sides, done, now, left int) int {
	if h == nil || h.shape.Sides[0].Needs != indexer.NeedsState {
		return now
	}
	end, step := done+now, h.step*h.shape.Block
	if whole := end / step * step; now < left && whole > done {
		end = whole
	}
	for _, i := range s.keep {
		if kept := (i + 1) * h.shape.Block; kept > done {
			end = min(end, kept)
		}
	}
	return end - done
}

// storeSides caches the kept blocks of a request's prompt before a position, and returns the numbers of those that
// are new.
func (e *engine) storeSides(req int32, to int) (fresh []int32) {
	s := &e.states[req].sides
	for len(s.keep) > 0 && s.keep[0] < to {
		n := e.reqs[req].Blocks[s.keep[0]]
		e.hybrid.each([]int32{n}, func(number []int32) {
			if e.cache.computed(number) == 0 {
				fresh = append(fresh, number[0])
			}
		})
		s.keep = s.keep[1:]
	}
	return fresh
}

// publishSides sends the events of new blocks of side groups, or of removed ones, by their numbers.
func (s *sim) publishSides(w int, kind indexer.Kind, numbers []int32) {
	h := s.hybrid
	for g := range int32(h.groups()) {
		var names []uint64
		for _, n := range numbers {
			if n/h.distinct == g+1 {
				names = append(names, s.Trace.blocks.chain[n%h.distinct])
			}
		}
		if len(names) > 0 {
			s.publish(w, indexer.Event{Kind: kind, Group: int(g) + 1, Externals: names, Shape: &h.shape})
		}
	}
}

// hybridResult has sums over the routed requests, in tokens.
type hybridResult struct {
	Promised int `json:"promised_tokens"` // that decisions expected to be cached
	Hit      int `json:"hit_tokens"`
	// SecondSharers is the part of Hit of second sharers: the requests that are the third with their first block. An
	// engine that has computed two prompts that share a beginning has what it needs to continue a third prompt after it.
	SecondSharers int `json:"second_sharers_hit_tokens"`

	seen map[int32]int // requests so far, by their first block
}

func (s *sim) hybridResult() *hybridResult {
	if s.hybrid == nil {
		return nil
	}
	return &hybridResult{seen: make(map[int32]int)}
}

// add adds a request. Requests are added in the order of the trace.
func (h *hybridResult) add(req *Request, state *state) {
	if h == nil {
		return
	}
	h.Promised += state.promised
	h.Hit += state.cached
	if len(req.Blocks) == 0 {
		return
	}
	if h.seen[req.Blocks[0]]++; h.seen[req.Blocks[0]] == 3 {
		h.SecondSharers += state.cached
	}
}
