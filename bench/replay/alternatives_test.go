// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
)

// The alternatives to the summary of a group's prefixes, in the smallest form that can be
// measured; see docs/adr/0006-prefix-summary.md. Each is a set of the sequence hashes of
// checkpoints, one every 64 tokens.
type prefixSet interface {
	has(h uint64) bool
	bytes() int
}

type exactSet map[uint64]struct{}

func (s exactSet) has(h uint64) bool { _, ok := s[h]; return ok }
func (s exactSet) bytes() int        { return 8 * len(s) }

type bloomSet struct{ *indexer.Filter }

func (s bloomSet) has(h uint64) bool { return s.Has(h) }
func (s bloomSet) bytes() int        { return s.Bits() / 8 }

func newBloom(hashes []uint64, bits int) bloomSet {
	f := indexer.NewFilter(len(hashes) * bits / 10)
	for _, h := range hashes {
		f.Add(h)
	}
	return bloomSet{f}
}

// cuckooSet is a cuckoo filter: fingerprints of so many bits, four a bucket, in one of
// two buckets. The buckets' numbers add up to the fingerprint's hash, so that there may
// be any number of them, and all bytes are used.
type cuckooSet struct {
	cells []uint32 // four a bucket; 0 is free
	bits  int
}

// newCuckoo fills 95 of 100 cells.
func newCuckoo(hashes []uint64, bits int) *cuckooSet {
	s := &cuckooSet{cells: make([]uint32, 4*max(1, len(hashes)*100/95/4)), bits: bits}
	for _, h := range hashes {
		mark, at := s.place(h)
		if s.put(mark, at) || s.put(mark, s.other(mark, at)) {
			continue
		}
		for kick := 0; ; kick++ {
			if kick == 500 {
				break // one is lost
			}
			cell := &s.cells[4*at+(int(h)+kick*7)&3]
			mark, *cell = *cell, mark
			if at = s.other(mark, at); s.put(mark, at) {
				break
			}
		}
	}
	return s
}

func (s *cuckooSet) place(h uint64) (mark uint32, at int) {
	return max(1, uint32(h>>32)&(1<<s.bits-1)), int(uint32(h)) % (len(s.cells) / 4)
}

func (s *cuckooSet) other(mark uint32, at int) int {
	n := len(s.cells) / 4
	return (int(indexer.NextSequenceHash(0, uint64(mark))%uint64(n)) - at + n) % n
}

func (s *cuckooSet) put(mark uint32, at int) bool {
	bucket := s.cells[4*at : 4*at+4]
	if i := slices.Index(bucket, 0); i >= 0 {
		bucket[i] = mark
		return true
	}
	return false
}

func (s *cuckooSet) has(h uint64) bool {
	mark, at := s.place(h)
	second := s.other(mark, at)
	return slices.Contains(s.cells[4*at:4*at+4], mark) || slices.Contains(s.cells[4*second:4*second+4], mark)
}

func (s *cuckooSet) bytes() int { return len(s.cells) * s.bits / 8 }

// treeSet is the upper part of the tree of prefixes: the checkpoints asked for most,
// those higher up first. Four bytes each are enough, as a fixed number of hash bits needs
// no pointers: a tree that is written down needs no less.
type treeSet map[uint32]struct{}

func (s treeSet) has(h uint64) bool { _, ok := s[uint32(h)]; return ok }
func (s treeSet) bytes() int        { return 4 * len(s) }

// summaryWorld is groups of workers with LRU caches, without time.
type summaryWorld struct {
	trace   *Trace
	per     int // checkpoints a block
	caches  [][]*cache
	uses    [][]int32 // by group and block: requests that went there with it
	next    int
	members int
}

func newSummaryWorld(t *Trace, per, groups, members, blocks int) *summaryWorld {
	w := &summaryWorld{trace: t, per: per, members: members}
	for range groups {
		var g []*cache
		for range members {
			g = append(g, newCache(blocks, t.Distinct()))
		}
		w.caches, w.uses = append(w.caches, g), append(w.uses, make([]int32, t.Distinct()))
	}
	return w
}

// best returns how many blocks of a prompt the best member of a group has, and who that is.
func (w *summaryWorld) best(g int, prompt []int32) (blocks, member int) {
	for m, c := range w.caches[g] {
		if n := c.leading(prompt); n > blocks {
			blocks, member = n, m
		}
	}
	return blocks, member
}

// serve has a request computed where most of it is, or, if that is next to nothing, by
// the next worker.
func (w *summaryWorld) serve(prompt []int32) {
	most, g, m := len(prompt)/10, -1, 0
	for i := range w.caches {
		if n, member := w.best(i, prompt); n > most {
			most, g, m = n, i, member
		}
	}
	if g < 0 {
		g, m = w.next%len(w.caches), w.next/len(w.caches)%w.members
		w.next++
	}
	c := w.caches[g][m]
	c.acquire(prompt)
	c.computed(prompt)
	c.release(prompt)
	c.trim(c.capacity)
	for _, n := range prompt {
		w.uses[g][n]++
	}
}

// checkpoint returns the hash of a block's checkpoint i.
func (w *summaryWorld) checkpoint(block int32, i int) uint64 {
	if i == w.per-1 {
		return w.trace.blocks.chain[block]
	}
	return indexer.NextSequenceHash(w.trace.blocks.chain[block], uint64(i))
}

// held returns the checkpoints that a group has, those asked for most first.
func (w *summaryWorld) held(g int) (hashes []uint64) {
	var blocks []int32
	for page := range w.caches[g][0].pages {
		for i := range pageBlocks {
			n := int32(page*pageBlocks + i)
			if slices.ContainsFunc(w.caches[g], func(c *cache) bool { return c.pages[page] != nil && c.pages[page][i].cached }) {
				blocks = append(blocks, n)
			}
		}
	}
	// A block's number is above that of the one before it.
	slices.SortStableFunc(blocks, func(a, b int32) int { return cmp.Compare(w.uses[g][b], w.uses[g][a]) })
	for _, n := range blocks {
		for i := range w.per {
			hashes = append(hashes, w.checkpoint(n, i))
		}
	}
	return hashes
}

// estimate returns the checkpoints of a prompt that a set has from the first on.
func (w *summaryWorld) estimate(s prefixSet, prompt []int32) (n int) {
	for _, b := range prompt {
		for i := range w.per {
			if !s.has(w.checkpoint(b, i)) {
				return n
			}
			n++
		}
	}
	return n
}

// summaryError is what estimates were off by.
type summaryError struct {
	bytes, sets      int
	asked, found     int // checkpoints that are not there, and those found
	estimates        int
	off, over, under float64 // tokens
	choices          int
	regret           float64 // tokens that the chosen group has less than the best
}

func summaryKinds(hashes []uint64) map[string]prefixSet {
	exact, tree := exactSet{}, treeSet{}
	for _, h := range hashes {
		exact[h] = struct{}{}
	}
	for _, h := range hashes[:len(hashes)*10/32] { // the bytes of 10 bits each
		tree[uint32(h)] = struct{}{}
	}
	return map[string]prefixSet{
		"exact set": exact, "Bloom, 10 bits": newBloom(hashes, 10), "Bloom, 14 bits": newBloom(hashes, 14),
		"cuckoo, 9 bits": newCuckoo(hashes, 9), "cuckoo, 13 bits": newCuckoo(hashes, 13), "top of the tree": tree,
	}
}

// Each kind of summary is taken of the same caches, at six times of the second half of a trace, and asked
// about the next requests. A Bloom filter never says less than the set that it stands for,
// and is off by less than a tenth of what the top of the tree of as many bytes is.
func TestSummaryAlternatives(t *testing.T) {
	if testing.Short() {
		return
	}
	chat, err := LoadMooncake(fixtures.Need(t, "traces", "mooncake_conversation.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	conversations, err := LoadConversations(fixtures.Need(t, "traces", "cc_weka_sessions.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	agentic, err := conversations.recorded()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		trace  *Trace
		per    int
		blocks int
	}{{"chat", chat, 8, 1334}, {"agentic", agentic, 1, 10_000}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			const groups, members, samples, requests = 4, 8, 6, 100
			w := newSummaryWorld(c.trace, c.per, groups, members, c.blocks)
			errs := map[string]*summaryError{}
			served := 0
			for sample := range samples {
				for to := len(c.trace.Requests) * (sample + samples) / (2*samples + 2); served < to; served++ {
					w.serve(c.trace.Requests[served].Blocks)
				}
				var sets []map[string]prefixSet
				for g := range groups {
					sets = append(sets, summaryKinds(w.held(g)))
				}
				for i := range requests {
					w.query(sets, c.trace.Requests[served+i].Blocks, errs)
				}
			}
			for _, name := range slices.Sorted(maps.Keys(errs)) {
				t.Log(name, errs[name])
			}
			bloom, tree := errs["Bloom, 10 bits"], errs["top of the tree"]
			if bloom.under > 0 || 10*bloom.off > tree.off {
				t.Errorf("a Bloom filter is off by %.0f tokens, %.0f of them too few, the top of the tree by %.0f", bloom.off, bloom.under, tree.off)
			}
		})
	}
}

// query asks all groups' summaries about a prompt.
func (w *summaryWorld) query(groups []map[string]prefixSet, prompt []int32, errs map[string]*summaryError) {
	token := float64(w.trace.BlockSize / w.per)
	for name := range groups[0] {
		e := errs[name]
		if e == nil {
			e = &summaryError{}
			errs[name] = e
		}
		most, chosen, there := -1, 0, 0
		for g, sets := range groups {
			s := sets[name]
			exists, _ := w.best(g, prompt)
			exists *= w.per
			got := w.estimate(s, prompt)
			e.bytes, e.sets, e.estimates = e.bytes+s.bytes(), e.sets+1, e.estimates+1
			e.off += token * math.Abs(float64(got-exists))
			e.over += token * float64(max(0, got-exists))
			e.under += token * float64(max(0, exists-got))
			if got > most {
				most, chosen = got, exists
			}
			there = max(there, exists)
			exact := sets["exact set"]
			for _, b := range prompt {
				if h := w.checkpoint(b, 0); !exact.has(h) {
					e.asked++
					if s.has(h) {
						e.found++
					}
				}
			}
		}
		e.choices++
		e.regret += token * float64(there-chosen)
	}
}

// String gives the row of the table.
func (e *summaryError) String() string {
	n := float64(e.estimates)
	return fmt.Sprintf("%d kB, %.2f %% found wrongly, off by %.1f tokens (%.1f too many, %.1f too few), %.1f fewer in the group chosen",
		e.bytes/e.sets/1000, 100*float64(e.found)/float64(max(1, e.asked)), e.off/n, e.over/n, e.under/n, e.regret/float64(e.choices))
}
