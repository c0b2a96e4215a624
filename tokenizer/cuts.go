// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"math/bits"
	"unicode/utf8"
)

// wordCuts says where a word of bytes may be cut before it is merged: between
// two characters that no token has side by side, since a merge across the cut
// would make such a token. Words of scripts without spaces are as long as
// sentences; cut, they are short enough to merge quickly and to be seen again.
//
// A token may begin or end inside of a character. What it has at a boundary
// between characters is then a part of one: the beginning of the character behind
// the boundary or the end of the one before.
type wordCuts struct {
	near  [128][2]uint64 // pairs of ASCII characters
	pairs pairSet        // other pairs, of characters or parts of them
	parts [256][4]uint64 // last byte before and first byte behind a boundary of which a token has but a part
}

// bytesOf packs up to four bytes; different bytes give different numbers.
func bytesOf(s []byte) uint32 {
	v := uint32(0)
	for _, c := range s {
		v = v<<8 | uint32(c)
	}
	return v
}

func newWordCuts(v *vocab) *wordCuts {
	c := &wordCuts{}
	count := 0
	c.each(v, func([]byte, []byte) { count++ })
	c.pairs = newPairSet(count)
	c.each(v, func(left, right []byte) { c.pairs.add(bytesOf(left), bytesOf(right)) })
	c.pairs.fit()
	return c
}

// pairSet is a set of pairs. Most lookups are of pairs that are not in it, and
// end at a bit of a table that stays in the processor's cache.
type pairSet struct {
	all    merges // the values do not matter
	count  int
	filter []uint64
	shift  uint
}

func newPairSet(count int) pairSet { return pairSet{all: newMerges(count)} }

func (p *pairSet) add(a, b uint32) {
	if p.all.get(a, b) == noMerge {
		p.all.put(pairOf(a, b), 0)
		p.count++
	}
}

// fit makes the set ready for lookups.
func (p *pairSet) fit() {
	p.all.fit(p.count)
	n := min(max(10, bits.Len(uint(p.count)*8)), 21)
	p.filter, p.shift = make([]uint64, 1<<(n-6)), uint(64-n)
	for _, s := range p.all.slots {
		if s.key != 0 {
			h := p.hash(s.key - 1)
			p.filter[h>>6] |= 1 << (h & 63)
		}
	}
}

func (p *pairSet) hash(pair uint64) uint64 { return (pair ^ pair>>29) * 0xd6e8feb86659fd93 >> p.shift }

func (p *pairSet) has(a, b uint32) bool {
	h := p.hash(pairOf(a, b))
	return p.filter[h>>6]>>(h&63)&1 != 0 && p.all.get(a, b) != noMerge
}

// each calls f with what each token has on both sides of each boundary between
// characters inside of it. Pairs of ASCII go to near.
func (c *wordCuts) each(v *vocab, f func(left, right []byte)) {
	for id := range v.token {
		t := v.get(uint32(id))
		for k := 1; k < len(t); k++ {
			if !utf8.RuneStart(t[k]) {
				continue
			}
			if t[k-1] < utf8.RuneSelf && t[k] < utf8.RuneSelf {
				c.near[t[k-1]][t[k]>>6] |= 1 << (t[k] & 63)
				continue
			}
			start := k - 1
			for start > 0 && start > k-utf8.UTFMax && !utf8.RuneStart(t[start]) {
				start--
			}
			left := t[start:k]
			r, n := utf8.DecodeRune(t[k:])
			right := t[k : k+n]
			if r == utf8.RuneError && n == 1 {
				right = t[k:min(len(t), k+utf8.UTFMax)]
				for e := 1; e < len(right); e++ {
					if utf8.RuneStart(right[e]) {
						right = right[:e]
						break
					}
				}
			}
			if !utf8.Valid(left) || !utf8.Valid(right) {
				c.parts[t[k-1]][t[k]>>6] |= 1 << (t[k] & 63)
			}
			f(left, right)
		}
	}
}

// next returns the end of the part of the word s[:end] that begins at i.
func (c *wordCuts) next(s []byte, i, end int) int {
	left := i // of the character before j
	for j := i + runeLen(s, i, end); j < end; {
		n := runeLen(s, j, end)
		if !c.together(s, left, j, j+n) {
			return j
		}
		left, j = j, j+n
	}
	return end
}

func runeLen(s []byte, i, end int) int {
	if s[i] < utf8.RuneSelf {
		return 1
	}
	_, n := decode(s, i, end)
	return n
}

// together reports whether a token may have the end of s[i:j] and the beginning
// of s[j:k], two characters, side by side. Bytes that are no character are never
// parted from what stands beside them.
func (c *wordCuts) together(s []byte, i, j, k int) bool {
	a, b := s[j-1], s[j]
	if a < utf8.RuneSelf && b < utf8.RuneSelf {
		return c.near[a][b>>6]>>(b&63)&1 != 0
	}
	if a >= utf8.RuneSelf && j-i == 1 || b >= utf8.RuneSelf && k-j == 1 {
		return true
	}
	if c.pairs.has(bytesOf(s[i:j]), bytesOf(s[j:k])) {
		return true
	}
	if c.parts[a][b>>6]>>(b&63)&1 == 0 {
		return false
	}
	for l := i; l < j; l++ {
		for r := j + 1; r <= k; r++ {
			if c.pairs.has(bytesOf(s[l:j]), bytesOf(s[j:r])) {
				return true
			}
		}
	}
	return false
}
