// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// hybrid is a slow model of a worker with a hybrid model. Blocks are named by the number of tokens before their end,
// for each prompt of a tree of prompts: two prompts share their blocks up to the token where they part.
type hybrid struct {
	shape  indexer.Shape
	step   int            // tokens between two boundaries
	full   map[string]int // copies of blocks of full attention, by the tokens up to their end
	side   map[int]map[string]int
	random *rand.Rand
}

func newHybrid(rng *rand.Rand) *hybrid {
	h := &hybrid{full: map[string]int{}, side: map[int]map[string]int{}, random: rng}
	h.shape.Block = []int{1, 2, 4}[rng.IntN(3)]
	h.shape.Full = h.shape.Block * []int{1, 1, 2}[rng.IntN(3)]
	h.step = h.shape.Full
	for i := range 1 + rng.IntN(3) {
		g := indexer.SideGroup{Group: []int{3, 0, 7}[i], Needs: indexer.Needs(1 + rng.IntN(3)), Block: h.shape.Full}
		switch rng.IntN(4) {
		case 0:
			g.Block = max(1, h.shape.Full/2)
		case 1:
			g.Block = 2 * h.shape.Full
		}
		if g.Needs == indexer.NeedsState {
			g.Block = max(g.Block, h.shape.Full)
		} else {
			g.Tokens = 1 + rng.IntN(20)
		}
		if g.Needs == indexer.NeedsChunk {
			g.Tokens = g.Block * rng.IntN(6)
		}
		h.step = max(h.step, g.Block)
		h.shape.Sides = append(h.shape.Sides, g)
		h.side[g.Group] = map[string]int{}
	}
	return h
}

// usable returns the blocks of the index that a prompt can use.
func (h *hybrid) usable(prompt string) int {
	for l := (len(prompt) - 1) / h.step * h.step; l > 0; l -= h.step {
		if h.serves(prompt, l) {
			return l / h.shape.Block
		}
	}
	return 0
}

func (h *hybrid) serves(prompt string, l int) bool {
	for end := h.shape.Full; end <= l; end += h.shape.Full {
		if h.full[prompt[:end]] == 0 {
			return false
		}
	}
	for _, g := range h.shape.Sides {
		from := l - g.Block
		switch g.Needs {
		case indexer.NeedsUnknown, indexer.NeedsState: // the block that ends there
		case indexer.NeedsWindow:
			from = l - g.Tokens + 1
		case indexer.NeedsChunk:
			if from = 0; g.Tokens > 0 {
				from = l / g.Tokens * g.Tokens
			}
		}
		for end := l; end > max(0, from); end -= g.Block {
			if h.side[g.Group][prompt[:end]] == 0 {
				return false
			}
		}
	}
	return true
}

// keeps says which blocks between two boundaries a group keeps: any, or, if its blocks are shorter than a step, what
// it needs at some boundaries. The events do not say where the gaps are, and engines make no others.
func (h *hybrid) keeps(g indexer.SideGroup, from, to int) map[int]bool {
	keeps := map[int]bool{}
	for end := from + g.Block; end <= to; end += g.Block {
		keeps[end] = g.Block == h.step && h.random.IntN(5) > 0 || g.Needs == indexer.NeedsChunk
	}
	for l := from + h.step; l <= to && g.Block < h.step; l += h.step * (1 + h.random.IntN(2)) {
		for end := l; end > max(from, l-max(g.Tokens-1, g.Block)); end -= g.Block {
			keeps[end] = true
		}
	}
	return keeps
}

// id is the engine's name of a block.
func id(prompt string) uint64 {
	return indexer.AppendLocalHashes(nil, tokensOf(prompt), len(prompt), 7)[0]
}

func tokensOf(prompt string) (ids []uint32) {
	for _, c := range []byte(prompt) {
		ids = append(ids, uint32(c))
	}
	return ids
}

// storeFull returns the event for some blocks of full attention of a prompt.
func (h *hybrid) storeFull(prompt string, from, to int) indexer.Event {
	ev := indexer.Event{Kind: indexer.Stored}
	if from > 0 {
		ev.Parent, ev.HasParent = id(prompt[:from]), true
	}
	for end := from + h.shape.Block; end <= to; end += h.shape.Block {
		local := indexer.AppendLocalHashes(nil, tokensOf(prompt[end-h.shape.Block:end]), h.shape.Block, 1)[0]
		ev.Blocks = append(ev.Blocks, indexer.Block{External: id(prompt[:end]), Local: local})
		if end%h.shape.Full == 0 {
			h.full[prompt[:end]] = 1
		}
	}
	return ev
}

// Events of hybrid models give the hits of the slow model after each event, in any order of groups.
func TestSidesModel(t *testing.T) {
	hits, fewer := 0, 0
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		h := newHybrid(rng)
		x := indexer.New(indexer.Config{})
		x.Apply(2, indexer.Event{Kind: indexer.Shaped, Shape: &h.shape})
		short := slices.ContainsFunc(h.shape.Sides, func(g indexer.SideGroup) bool { return g.Block < h.step })
		var prompts []string
		for range 6 {
			p := []byte{}
			if len(prompts) > 0 {
				other := prompts[rng.IntN(len(prompts))]
				p = append(p, other[:rng.IntN(len(other)/h.step+1)*h.step]...)
			}
			for range h.step * (1 + rng.IntN(8)) {
				p = append(p, byte('a'+rng.IntN(20)))
			}
			prompts = append(prompts, string(p))
		}
		for n := range 60 {
			p := prompts[rng.IntN(len(prompts))]
			g := h.shape.Sides[rng.IntN(len(h.shape.Sides))]
			held := h.side[g.Group]
			switch rng.IntN(10) {
			case 0, 1: // a step of the engine: blocks of full attention, from a block that is there on
				from := 0
				for from+h.shape.Full <= len(p) && h.full[p[:from+h.shape.Full]] > 0 {
					from += h.shape.Full
				}
				if to := from + rng.IntN((len(p)-from)/h.shape.Full+1)*h.shape.Full; to > from {
					x.Apply(2, h.storeFull(p, from, to))
				}
			case 2:
				for end := len(p) / h.shape.Full * h.shape.Full; end > 0; end -= h.shape.Full {
					if h.full[p[:end]] > 0 {
						delete(h.full, p[:end])
						ev := indexer.Event{Kind: indexer.Removed}
						for e := end; e > end-h.shape.Full; e -= h.shape.Block {
							ev.Externals = append(ev.Externals, id(p[:e]))
						}
						x.Apply(2, ev)
						break
					}
				}
			case 3: // one copy of a block of a side group leaves, or all copies
				for _, prefix := range slices.Sorted(maps.Keys(held)) {
					if rng.IntN(3) > 0 {
						continue
					}
					all := n%3 == 0
					if held[prefix]--; all || held[prefix] == 0 {
						delete(held, prefix)
					}
					x.Apply(2, indexer.Event{Kind: indexer.SideRemoved, Group: g.Group, Externals: []uint64{id(prefix), 99}, AllCopies: all})
					break
				}
			case 4:
				if n%20 == 0 {
					x.Apply(2, indexer.Event{Kind: indexer.Cleared})
					if x.Hybrid(2) {
						t.Fatal("a cleared worker has a shape")
					}
					x.Apply(2, indexer.Event{Kind: indexer.Shaped, Shape: &h.shape})
					clear(h.full)
					for _, held := range h.side {
						clear(held)
					}
				}
			default: // a step: the blocks of a group that survive it
				from := rng.IntN(len(p)/h.step+1) * h.step
				to := from + rng.IntN((len(p)-from)/h.step+1)*h.step
				ev := indexer.Event{Kind: indexer.SideStored, Group: g.Group, Shape: &h.shape}
				if from > 0 {
					ev.Parent, ev.HasParent = id(p[:from]), true
				}
				keeps := h.keeps(g, from, to)
				for end := from + g.Block; end <= to; end += g.Block {
					if keeps[end] {
						ev.Externals = append(ev.Externals, id(p[:end]))
						held[p[:end]]++
					}
				}
				x.Apply(2, ev)
			}
			if n%7 == 6 { // side groups are built again
				evs := x.Sides(2)
				x.Apply(2, indexer.Event{Kind: indexer.Shaped})
				for _, ev := range evs {
					x.Apply(2, ev)
				}
			}
			for _, p := range prompts {
				p += "zz"[:rng.IntN(2)]
				m := indexer.Matches{Device: make([]int32, 4), Tokens: len(p)}
				m.Lower[0] = make([]int32, 4)
				x.FindMatches(&m, indexer.AppendLocalHashes(nil, tokensOf(p), h.shape.Block, 1))
				want := h.usable(p)
				if got := int(m.Device[2]); got > want || got < want && !short {
					t.Fatalf("seed %d, event %d: shape %+v, prompt %s: %d blocks, want %d", seed, n, h.shape, p, m.Device[2], want)
				}
				if want > 0 {
					hits++
					if int(m.Device[2]) < want {
						fewer++
					}
				}
			}
			whole, entries := map[string]bool{}, 0
			for _, g := range h.shape.Sides {
				for prefix, copies := range h.side[g.Group] {
					if g.Block < h.step {
						entries++
					} else {
						whole[prefix] = true
					}
					entries += min(copies-1, 1)
				}
			}
			if n := x.SideBlocks(2); n != entries+len(whole) {
				t.Fatalf("seed %d: %d entries for side blocks, want %d", seed, n, entries+len(whole))
			}
		}
		x.RemoveWorker(2)
		if x.SideBlocks(2) != 0 || x.Blocks() != 0 {
			t.Fatal("blocks are left")
		}
	}
	if hits < 1000 || fewer > hits/50 {
		t.Errorf("%d hits, %d of them shorter than those of the model", hits, fewer)
	}
}

// An index that is built again from the events of Sides has the same hits after later events. Blocks whose predecessor
// is unknown do not become predecessors of each other: the engine may name the predecessors later.
func TestSidesBuiltAgain(t *testing.T) {
	const sequences, blocks, copies = 16, 8, 3
	shape := &indexer.Shape{Block: 1, Full: 4, Sides: []indexer.SideGroup{{Group: 1, Needs: indexer.NeedsWindow, Block: 1, Tokens: 7}}}
	x, again := indexer.New(indexer.Config{}), indexer.New(indexer.Config{})
	apply := func(ev indexer.Event) { x.Apply(0, ev); again.Apply(0, ev) }
	locals, ids := [sequences][]uint64{}, [sequences][]uint64{}
	apply(indexer.Event{Kind: indexer.Shaped, Shape: shape})
	for i := range sequences {
		var full []indexer.Block
		for j := range uint64(blocks) {
			id := (uint64(i)*blocks + j + 1) * 0x9E3779B97F4A7C15
			full = append(full, indexer.Block{External: id, Local: id ^ 77})
			locals[i], ids[i] = append(locals[i], id^77), append(ids[i], id)
		}
		apply(indexer.Event{Kind: indexer.Stored, Blocks: full})
		for range copies {
			apply(indexer.Event{Kind: indexer.SideStored, Group: 1, Externals: ids[i][blocks-1:]})
		}
	}
	rebuild := func() {
		again.Apply(0, indexer.Event{Kind: indexer.Shaped})
		evs := x.Sides(0)
		if len(evs) != 2 {
			t.Errorf("%d events, want the shape and one with all blocks", len(evs))
		}
		for _, ev := range evs {
			again.Apply(0, ev)
		}
	}
	check := func(when string, want int32) {
		t.Helper()
		for i := range sequences {
			for name, x := range map[string]*indexer.Index{"the index": x, "the one built again": again} {
				m := indexer.Matches{Device: make([]int32, 1), Tokens: blocks + 1}
				if x.FindMatches(&m, locals[i]); m.Device[0] != want {
					t.Errorf("%s, sequence %d, %s: %d blocks, want %d", when, i, name, m.Device[0], want)
				}
			}
		}
	}
	rebuild()
	check("last blocks only", 0)
	for i := range sequences {
		apply(indexer.Event{Kind: indexer.SideStored, Group: 1, Externals: ids[i]})
	}
	check("all blocks", blocks)
	rebuild()
	for removed := range copies + 2 {
		want := int32(blocks)
		if removed > copies {
			want = 4 // the boundary before
		}
		check(fmt.Sprintf("%d copies removed", removed), want)
		for i := range sequences {
			apply(indexer.Event{Kind: indexer.SideRemoved, Group: 1, Externals: ids[i][blocks-1:]})
		}
	}
}

// A shape or an event without sense lowers hits, and has no other effect.
func TestOddSides(t *testing.T) {
	one := indexer.SideGroup{Group: 1, Needs: indexer.NeedsState, Block: 4}
	local := indexer.AppendLocalHashes(nil, tokensOf("abcdefgh"), 4, 1)
	for name, c := range map[string]struct {
		shape indexer.Shape
		want  int32
	}{
		"a state that is there":      {indexer.Shape{Block: 4, Full: 4, Sides: []indexer.SideGroup{one}}, 1},
		"a group without blocks":     {indexer.Shape{Block: 4, Full: 4, Sides: []indexer.SideGroup{one, {Group: 2, Needs: indexer.NeedsWindow, Block: 4, Tokens: 9}}}, 0},
		"an unknown rule":            {indexer.Shape{Block: 4, Full: 4, Sides: []indexer.SideGroup{one, {Group: 2, Block: 4}}}, 0},
		"a window without size":      {indexer.Shape{Block: 4, Full: 4, Sides: []indexer.SideGroup{one, {Group: 2, Needs: indexer.NeedsWindow, Block: 4}}}, 0},
		"blocks of no tokens":        {indexer.Shape{Block: 4, Full: 4, Sides: []indexer.SideGroup{one, {Group: 2, Needs: indexer.NeedsState}}}, 0},
		"blocks of 2^31 tokens":      {indexer.Shape{Block: 4, Full: 4, Sides: []indexer.SideGroup{one, {Group: 2, Needs: indexer.NeedsState, Block: 1 << 31}}}, 0},
		"a multiple of 2^40":         {indexer.Shape{Block: 4, Full: 4, Sides: []indexer.SideGroup{one, {Group: 2, Needs: indexer.NeedsState, Block: 1<<20 + 1}}}, 0},
		"10,000 groups":              {indexer.Shape{Block: 4, Full: 4, Sides: slices.Repeat([]indexer.SideGroup{one}, 10_000)}, 0},
		"17 groups":                  {indexer.Shape{Block: 4, Full: 4, Sides: slices.Repeat([]indexer.SideGroup{one}, 17)}, 0},
		"full blocks of no tokens":   {indexer.Shape{Block: 4, Sides: []indexer.SideGroup{one}}, 0},
		"full blocks of 2^31 tokens": {indexer.Shape{Block: 4, Full: 1 << 31, Sides: []indexer.SideGroup{one}}, 0},
		"an index without blocks":    {indexer.Shape{Full: 4, Sides: []indexer.SideGroup{one}}, 0},
		"negative sizes":             {indexer.Shape{Block: 4, Full: -4, Sides: []indexer.SideGroup{one, {Group: 2, Needs: indexer.NeedsWindow, Block: -4, Tokens: -9}}}, 0},
		"only larger full blocks":    {indexer.Shape{Block: 4, Full: 8}, 0},
	} {
		x := indexer.New(indexer.Config{})
		x.Apply(0, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1, Local: local[0]}, {External: 2, Local: local[1]}}})
		x.Apply(0, indexer.Event{Kind: indexer.SideStored, Group: 1, Externals: []uint64{1}}) // before the shape is known
		x.Apply(0, indexer.Event{Kind: indexer.Shaped, Shape: &c.shape})
		x.Apply(0, indexer.Event{Kind: indexer.SideStored, Group: 1, Externals: []uint64{1}})
		x.Apply(0, indexer.Event{Kind: indexer.SideStored, Group: 9, Externals: []uint64{2}})
		x.Apply(0, indexer.Event{Kind: indexer.SideStored, Group: 1, Tier: indexer.Disk, Externals: []uint64{2}})
		for worker, ids := range [][]uint64{0: {2, 2, 7}, 5: {1, 2}} { // counts do not fall below 0, nor those of another worker
			if out := x.Apply(worker, indexer.Event{Kind: indexer.SideRemoved, Group: 1, Externals: ids}); out.Unknown != len(ids) {
				t.Errorf("%s: %+v for the removal of %d unknown blocks of worker %d", name, out, len(ids), worker)
			}
		}
		if out := x.Apply(0, indexer.Event{Kind: indexer.SideStored, Group: 1, Externals: []uint64{1, 2, 3}, Pairs: true}); out.Invalid != 3 {
			t.Errorf("%s: %+v for a pair and a half", name, out)
		}
		// Another worker has side blocks of the same ids, and no full ones.
		x.Apply(1, indexer.Event{Kind: indexer.SideStored, Group: 1, Externals: []uint64{1, 2}, Shape: &c.shape})
		m := indexer.Matches{Device: make([]int32, 2), Tokens: 8}
		if x.FindMatches(&m, local); m.Device[0] != c.want || m.Device[1] != 0 {
			t.Errorf("%s: %d blocks, want %d and none of another worker", name, m.Device, c.want)
		}
		x.Apply(0, indexer.Event{Kind: indexer.Shaped})
		if x.FindMatches(&m, local); m.Device[0] != 2 {
			t.Errorf("%s: %d blocks of a plain worker, want 2", name, m.Device[0])
		}
	}
}

// Of the shapes of a worker 32 are followed. Then no prefix counts, blocks of side groups are refused, and another
// shape has no effect until the worker is cleared. An index that is built again has the same hits.
func TestShapesAreBounded(t *testing.T) {
	const followed = 32
	x := indexer.New(indexer.Config{})
	local := indexer.AppendLocalHashes(nil, tokensOf("abcdefgh"), 4, 1)
	full := indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1, Local: local[0]}, {External: 2, Local: local[1]}}}
	hit := func(x *indexer.Index) int32 {
		m := indexer.Matches{Device: make([]int32, 1), Tokens: 9}
		x.FindMatches(&m, local)
		return m.Device[0]
	}
	shaped := func(n int) indexer.Event { // a group that stays, and one that changes
		return indexer.Event{Kind: indexer.SideStored, Group: 1, Externals: []uint64{2}, Shape: &indexer.Shape{Block: 4, Full: 4, Sides: []indexer.SideGroup{
			{Group: 1, Needs: indexer.NeedsState, Block: 4}, {Group: 2, Needs: indexer.NeedsWindow, Block: 4, Tokens: 1 + n%2},
		}}}
	}
	for round := range 2 {
		x.Apply(0, full)
		for n := range followed {
			second := shaped(n)
			second.Group = 2
			if out := x.Apply(0, shaped(n)); out.Refused > 0 || out.Stored+out.Duplicate != 1 {
				t.Fatalf("round %d, shape %d: %+v", round, n, out)
			}
			if x.Apply(0, second); hit(x) != 2 || !x.Boundaries(0).Sides {
				t.Fatalf("round %d, shape %d: %d blocks, want 2", round, n, hit(x))
			}
		}
		for n := followed; n < 2*followed; n++ {
			if out := x.Apply(0, shaped(n)); out != (indexer.Outcome{Refused: 1}) {
				t.Errorf("round %d, shape %d: %+v, want a refused block", round, n, out)
			}
			for _, shape := range []*indexer.Shape{nil, shaped(n).Shape, {Block: 4, Full: 8}} {
				if out := x.Apply(0, indexer.Event{Kind: indexer.Shaped, Shape: shape}); out != (indexer.Outcome{Refused: 1}) {
					t.Errorf("round %d, shape %d: %+v, want it refused", round, n, out)
				}
			}
			if hit(x) != 0 || x.SideBlocks(0) != 0 || x.Boundaries(0) != (indexer.Boundaries{Sides: true}) {
				t.Errorf("round %d, shape %d: %d blocks of %d, boundaries %+v", round, n, hit(x), x.SideBlocks(0), x.Boundaries(0))
			}
		}
		again := indexer.New(indexer.Config{})
		again.Apply(0, full)
		for _, ev := range x.Sides(0) {
			again.Apply(0, ev)
		}
		if hit(again) != 0 {
			t.Errorf("round %d: %d blocks of an index that is built again, want 0", round, hit(again))
		}
		x.Apply(0, indexer.Event{Kind: indexer.Cleared})
	}
}

// A match of hybrid workers does not allocate, and a group that stays the same keeps its blocks when another one
// appears.
func TestHybridMatch(t *testing.T) {
	const blocks = 1000
	x := indexer.New(indexer.Config{})
	window := indexer.SideGroup{Group: 1, Needs: indexer.NeedsWindow, Block: 1, Tokens: 65}
	var full []indexer.Block
	var local, last []uint64
	for i := range uint64(blocks) {
		full, local = append(full, indexer.Block{External: i + 1, Local: i + 5000}), append(local, i+5000)
		if i >= blocks-64 {
			last = append(last, i+1)
		}
	}
	for w := range 4 {
		x.Apply(w, indexer.Event{Kind: indexer.Stored, Blocks: full})
		shape := &indexer.Shape{Block: 1, Full: 1, Sides: []indexer.SideGroup{window}}
		x.Apply(w, indexer.Event{Kind: indexer.SideStored, Group: 1, Externals: last, Shape: shape})
		shape = &indexer.Shape{Block: 1, Full: 1, Sides: []indexer.SideGroup{{Group: 0, Needs: indexer.NeedsState, Block: 1}, window}}
		x.Apply(w, indexer.Event{Kind: indexer.SideStored, Group: 0, Externals: []uint64{blocks, 3}, Shape: shape})
	}
	m := indexer.Matches{Device: make([]int32, 4)}
	if n := testing.AllocsPerRun(100, func() { x.FindMatches(&m, local) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
	if !slices.Equal(m.Device, []int32{blocks, blocks, blocks, blocks}) {
		t.Errorf("%d blocks", m.Device)
	}
	if x.FindMatches(&m, local[:blocks-1]); m.Device[0] != 0 {
		t.Errorf("%d blocks of a shorter prompt", m.Device[0])
	}
}

func BenchmarkHybridMatch(b *testing.B) {
	for _, sides := range []int{0, 1, 5} {
		b.Run(fmt.Sprint(sides), func(b *testing.B) {
			x := indexer.New(indexer.Config{})
			shape := &indexer.Shape{Block: 16, Full: 16}
			var full []indexer.Block
			var local, last []uint64
			for i := range uint64(512) {
				h := i * 0x9E3779B97F4A7C15
				full, local = append(full, indexer.Block{External: h, Local: h ^ 77}), append(local, h^77)
				if i >= 512-64 {
					last = append(last, h)
				}
			}
			for g := range sides {
				shape.Sides = append(shape.Sides, indexer.SideGroup{Group: g, Needs: indexer.NeedsWindow, Block: 16, Tokens: 1024})
			}
			for w := range 8 {
				x.Apply(w, indexer.Event{Kind: indexer.Stored, Blocks: full})
				for g := range sides {
					x.Apply(w, indexer.Event{Kind: indexer.SideStored, Group: g, Externals: last, Shape: shape})
				}
			}
			m := indexer.Matches{Device: make([]int32, 8)}
			for b.Loop() {
				x.FindMatches(&m, local)
			}
			if m.Device[7] != 512 {
				b.Fatal(m.Device)
			}
		})
	}
}

// One match gives the usable blocks, the held ones, and where usable prefixes end, as three calls do.
func TestMatchOfHeldBlocks(t *testing.T) {
	x := indexer.New(indexer.Config{})
	local := indexer.AppendLocalHashes(nil, tokensOf("abcdefgh"), 4, 1)
	full := indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1, Local: local[0]}, {External: 2, Local: local[1]}}}
	x.Apply(0, full)
	x.Apply(2, full)
	x.Apply(2, indexer.Event{Kind: indexer.SideStored, Group: 1, Externals: []uint64{1}, Shape: &indexer.Shape{
		Block: 4, Full: 4, Sides: []indexer.SideGroup{{Group: 1, Needs: indexer.NeedsState, Block: 4}},
	}})
	ends := []indexer.Boundaries{x.Boundaries(0), x.Boundaries(1), x.Boundaries(2)}
	lacking := slices.Clone(ends)
	lacking[2].Lacks, lacking[2].Group = indexer.NeedsState, 1
	for _, c := range []struct {
		local         []uint64
		device, whole []int32
		ends          []indexer.Boundaries
	}{{local, []int32{2, 0, 1}, []int32{2, 0, 2}, lacking}, {nil, make([]int32, 3), make([]int32, 3), ends}} {
		m := indexer.Matches{Device: []int32{9, 9, 9}, Held: []int32{9, 9, 9}, Ends: make([]indexer.Boundaries, 3)}
		if x.FindMatches(&m, c.local); !slices.Equal(m.Device, c.device) || !slices.Equal(m.Held, c.whole) || !slices.Equal(m.Ends, c.ends) {
			t.Errorf("%+v, want %v, %v and %v", m, c.device, c.whole, c.ends)
		}
	}
}
