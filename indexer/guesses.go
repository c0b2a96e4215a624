// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"slices"
	"time"
)

// Guesses are the predictions for a worker: pieces of prompts, each behind an earlier
// one, and the prompts, the least recently used first.
type Guesses struct {
	Pieces  []Piece
	Prompts []Prompt
}

// Piece is a number of consecutive blocks. Parent is the number of the piece before
// it, from 1; 0 for none.
type Piece struct {
	Parent   uint32
	Sequence []uint64
}

// Prompt ends with a piece, given by its number from 1. Left is the time until
// it expires.
type Prompt struct {
	Piece uint32
	Left  time.Duration
}

// Blocks counts the blocks.
func (g *Guesses) Blocks() (n int) {
	for i := range g.Pieces {
		n += len(g.Pieces[i].Sequence)
	}
	return n
}

// Guesses returns the predictions for a worker. The slices are the caller's.
func (a *Approx) Guesses(now time.Time, worker int) (out Guesses) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
	g := a.of(worker)
	if g == nil || g.prompts == nil {
		return out
	}
	numbers := map[*guessNode]uint32{&a.tree.root: 0}
	var line []*guessNode
	for _, key := range g.prompts.Keys() {
		p, _ := g.prompts.Peek(key)
		n := p.end
		for line = line[:0]; ; n = n.parent {
			if _, some := numbers[n]; some {
				break
			}
			line = append(line, n)
		}
		for _, n := range slices.Backward(line) {
			out.Pieces = append(out.Pieces, Piece{numbers[n.parent], slices.Clone(n.sequence)})
			numbers[n] = uint32(len(out.Pieces))
		}
		out.Prompts = append(out.Prompts, Prompt{numbers[p.end], time.Duration(p.dies*step - a.now)})
	}
	return out
}

// Restore gives a worker without predictions the result of [Approx.Guesses], maybe of an
// earlier process. Expired and invalid prompts are left out. It returns how many blocks
// count because of it.
func (a *Approx) Restore(now time.Time, worker int, generation uint64, from Guesses) (taken int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
	g := a.of(worker)
	if g == nil || g.generation != generation || g.prompts != nil {
		return 0
	}
	longest := ceil(a.now+int64(a.conf.TTL), step)
	oldest := int64(0)
	for _, p := range from.Prompts {
		sequence := from.path(p.Piece)
		if n := min(len(sequence), g.limit, a.conf.MaxBlocks); n > 0 && p.Left > 0 {
			// A prompt never expires before the one before it in the list.
			oldest = max(oldest, min(longest, ceil(a.now+int64(p.Left), step)))
			a.insert(worker, g, sequence[:n], oldest)
		}
	}
	return g.blocks
}

// path returns the blocks up to the end of a piece, or no blocks if the numbers are
// wrong.
func (g *Guesses) path(piece uint32) (sequence []uint64) {
	var line []*Piece
	for n := piece; n > 0; {
		if int(n) > len(g.Pieces) {
			return nil
		}
		p := &g.Pieces[n-1]
		// The number of the parent must be lower, so the loop ends.
		if len(p.Sequence) == 0 || p.Parent >= n {
			return nil
		}
		line = append(line, p)
		n = p.Parent
	}
	for _, p := range slices.Backward(line) {
		sequence = append(sequence, p.Sequence...)
	}
	return sequence
}
