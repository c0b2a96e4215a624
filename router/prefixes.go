// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// maxPrefixes bounds the answer of HotPrefixes.
const maxPrefixes = 50

// Prefix is a prefix that recent prompts have in common.
type Prefix struct {
	Model    string   `json:"model"`
	Hash     string   `json:"hash"`               // sequence hash of its last block, 16 hex digits
	Blocks   int      `json:"blocks"`             // length from the beginning of the prompt, at most 64
	Requests int      `json:"requests"`           // recent ones that begin with it
	Workers  int      `json:"workers"`            // that have all of it cached, on any tier
	Children []Prefix `json:"children,omitempty"` // longer prefixes, the most frequent first
}

// HotPrefixes returns the prefixes that at least two of the last 512 booked requests have in
// common, as trees, the most frequent first. It returns at most 50 in all. A prefix is as long as
// possible: the next block differs between its requests, or some of them end there. It looks at
// the first 64 blocks of each prompt.
func (r *Router) HotPrefixes() []Prefix {
	list := r.recent.list()
	slices.SortFunc(list, func(a, b beginning) int {
		return cmp.Or(a.pool.compare(b.pool), slices.Compare(a.sequence, b.sequence))
	})
	root := new(sharedPrefix)
	open := root.extend(list) // prefixes whose parents are in the tree
	for n := 0; n < maxPrefixes && len(open) > 0; n++ {
		first := slices.MinFunc(open, (*sharedPrefix).compare)
		open = slices.DeleteFunc(open, func(p *sharedPrefix) bool { return p == first })
		first.parent.children = append(first.parent.children, first)
		open = append(open, first.extend(first.prompts)...)
	}
	s := r.scratch.Get().(*scratch)
	defer r.release(s)
	return append([]Prefix{}, r.describePrefixes(root.children, s)...) // a list in JSON, not null
}

// describePrefixes counts the workers that have the prefixes. In the index this counts as a use of the
// blocks, as for a decision.
func (r *Router) describePrefixes(list []*sharedPrefix, s *scratch) (described []Prefix) {
	for _, p := range list {
		first := p.prompts[0]
		d := Prefix{Model: first.pool.model, Hash: fmt.Sprintf("%016x", first.sequence[p.blocks-1]), Blocks: p.blocks, Requests: len(p.prompts)}
		r.fleet.RLock()
		pool := r.pools[first.pool]
		r.fleet.RUnlock()
		if pool != nil {
			d.Workers = pool.holders(first.local[:p.blocks], first.sequence[:p.blocks], s, r.conf.Now())
		}
		d.Children = r.describePrefixes(p.children, s)
		described = append(described, d)
	}
	return described
}

// sharedPrefix is a prefix of two or more prompts, which are sorted.
type sharedPrefix struct {
	prompts  []beginning
	blocks   int
	parent   *sharedPrefix
	children []*sharedPrefix
}

// compare orders the prefixes by importance; a prefix comes before those that continue it.
func (p *sharedPrefix) compare(q *sharedPrefix) int {
	a, b := &p.prompts[0], &q.prompts[0]
	return cmp.Or(cmp.Compare(len(q.prompts), len(p.prompts)), cmp.Compare(p.blocks, q.blocks),
		cmp.Compare(a.sequence[p.blocks-1], b.sequence[q.blocks-1]), a.pool.compare(b.pool))
}

// extend returns the next longer prefixes of sorted prompts that begin with p.
func (p *sharedPrefix) extend(prompts []beginning) (longer []*sharedPrefix) {
	for len(prompts) > 0 {
		first := &prompts[0]
		n := 1
		for n < len(prompts) && len(first.sequence) > p.blocks && prompts[n].pool == first.pool && prompts[n].sequence[p.blocks] == first.sequence[p.blocks] {
			n++
		}
		if n > 1 {
			// The prompts are sorted: all of them share what the first and the last one share.
			last, blocks := &prompts[n-1], p.blocks+1
			for blocks < len(first.sequence) && first.sequence[blocks] == last.sequence[blocks] {
				blocks++
			}
			longer = append(longer, &sharedPrefix{prompts: prompts[:n], blocks: blocks, parent: p})
		}
		prompts = prompts[n:]
	}
	return longer
}

// holders returns the number of workers that have all blocks of a prompt cached.
func (p *pool) holders(local, sequence []uint64, s *scratch, now time.Time) (n int) {
	p.match(now, &hashes{local: local, sequence: sequence}, s)
	o := &s.overlap
	p.each(func(ord int, e *entry) {
		if ord >= len(o.blocks) || e.info.Health == expected {
			return
		}
		held := o.blocks[ord]
		for _, tier := range o.lower {
			held += tier[ord]
		}
		if int(held) >= len(sequence) {
			n++
		}
	})
	return n
}
