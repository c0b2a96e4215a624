// SPDX-License-Identifier: Apache-2.0

package router

import (
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// plainEnds are the boundaries of a worker that can use each prefix that it holds.
//
//nolint:gochecknoglobals // a constant
var plainEnds = indexer.Boundaries{Step: 1}

// withChunk returns a shape whose chunks have a size if the events do not name it.
func withChunk(s *indexer.Shape, chunk int) *indexer.Shape {
	unknown := func(g indexer.SideGroup) bool { return g.Needs == indexer.NeedsChunk && g.Tokens == 0 }
	if !slices.ContainsFunc(s.Sides, unknown) {
		return s
	}
	to := *s
	to.Sides = slices.Clone(s.Sides)
	for i := range to.Sides {
		if unknown(to.Sides[i]) {
			to.Sides[i].Tokens = chunk
		}
	}
	return &to
}

// insertHybrid predicts what a hybrid worker will have cached of a prompt. The engine computes at least the last token,
// so it keeps the blocks of its side groups at the last boundary before that token. It also keeps them at the prompt's
// junction: the end of the blocks of full attention that the worker holds, if it cannot use all of them. A later
// prompt can use the prediction only up to one of these two places, which are ends of predicted prompts. Tokens of the
// output are not predicted: side groups keep nothing there. The results are those of [indexer.Approx.Insert].
func (k *known) insertHybrid(
	now time.Time, h *hashes, g *guess, ends indexer.Boundaries, o *overlap,
) (stamp, last uint64) {
	end, junction := lastBoundary(ends, h.tokens, k.block), 0
	if end > len(h.sequence) {
		return 0, 0
	}
	if o != nil && ends.Sides && end > 0 && g.ordinal < len(o.whole) && g.generation <= o.version {
		if at := int(o.whole[g.ordinal]) / ends.Step * ends.Step; int(o.blocks[g.ordinal]) < at && at < end {
			junction = at
		}
	}
	return g.in.InsertWhole(now, g.ordinal, g.generation, h.sequence[:end], junction)
}

// lastBoundary returns the blocks up to the last boundary of a prompt, behind which at least one token follows; 0 if
// there is none, or if the rule is unknown.
func lastBoundary(ends indexer.Boundaries, tokens, block int) int {
	if ends.Step <= 0 || block <= 0 {
		return 0
	}
	return max(0, tokens-1) / block / ends.Step * ends.Step
}

// usable returns how many of the n leading blocks that are predicted for a worker a prompt can use.
func (k *known) usable(ends indexer.Boundaries, ordinal int, n int32, h *hashes) int32 {
	if ends == plainEnds {
		return n
	}
	most := min(int(n), lastBoundary(ends, h.tokens, k.block))
	switch {
	case most == 0:
		return 0
	case ends.Sides:
		return int32(k.predicted.End(ordinal, h.sequence[:most], ends.Step))
	}
	return int32(most / ends.Step * ends.Step)
}
