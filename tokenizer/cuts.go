// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/binary"
	"math/bits"
	"slices"
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
	near   [128][2]uint64 // pairs of ASCII characters
	pairs  pairSet        // other pairs of characters
	partly pairSet        // pairs of which at least one is a part of a character
	parts  [256][4]uint64 // last byte before and first byte behind a boundary, of those
	long   pairSet        // tokens of at least cutFrom bytes, by both of their ends
}

// isLong reports whether s[i:j], of at least cutFrom bytes, may be a token.
func (c *wordCuts) isLong(s []byte, i, j int) bool {
	return c.long.hasKey(endsOf(s, i, j))
}

// endsOf mixes the first and last eight bytes of s[i:j], and its length.
func endsOf(s []byte, i, j int) uint64 {
	first, last := binary.LittleEndian.Uint64(s[i:j]), binary.LittleEndian.Uint64(s[j-8:j])
	return first*0x9e3779b97f4a7c15 ^ bits.RotateLeft64(last, 31) ^ uint64(j-i)<<56
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
	c.each(v, func(left, right []byte) {
		if utf8.Valid(left) && utf8.Valid(right) {
			c.pairs.add(bytesOf(left), bytesOf(right))
			return
		}
		a, b := left[len(left)-1], right[0]
		c.parts[a][b>>6] |= 1 << (b & 63)
		c.partly.add(bytesOf(left), bytesOf(right))
	})
	for id := range v.token {
		if t := v.get(uint32(id)); len(t) >= cutFrom {
			c.long.pairs = append(c.long.pairs, endsOf(t, 0, len(t)))
		}
	}
	c.pairs.fit()
	c.partly.fit()
	c.long.fit()
	return c
}

// pairSet is a set of pairs that may also claim some that are not in it, which for
// cuts is safe: they are then not made. One pair in fifty does, and a lookup is
// of one word of a table that stays in the processor's cache.
type pairSet struct {
	pairs  []uint64 // until fit
	filter []uint64 // two bits of one word for each pair
	shift  uint
}

func (p *pairSet) add(a, b uint32) { p.pairs = append(p.pairs, pairOf(a, b)) }

// fit makes the set ready for lookups.
func (p *pairSet) fit() {
	slices.Sort(p.pairs)
	p.pairs = slices.Compact(p.pairs)
	n := min(max(4, bits.Len(uint(len(p.pairs))*16)-6), 15) // 256 KiB at most
	p.filter, p.shift = make([]uint64, 1<<n), uint(64-n)
	for _, pair := range p.pairs {
		word, mask := p.place(pair)
		p.filter[word] |= mask
	}
	p.pairs = nil
}

func (p *pairSet) place(pair uint64) (word, mask uint64) {
	h := (pair ^ pair>>29) * 0xd6e8feb86659fd93
	return h >> p.shift, 1<<(h>>20&63) | 1<<(h>>26&63)
}

func (p *pairSet) has(a, b uint32) bool { return p.hasKey(pairOf(a, b)) }

func (p *pairSet) hasKey(key uint64) bool {
	word, mask := p.place(key)
	return p.filter[word]&mask == mask
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
			f(left, right)
		}
	}
}

// next returns the end of the part of the word s[:end] that begins at i.
func (c *wordCuts) next(s []byte, i, end int) int {
	n := runeLen(s, i, end)
	for {
		j := i + n
		if j >= end {
			return end
		}
		m := runeLen(s, j, end)
		if !c.together(s, i, j, j+m) {
			return j
		}
		i, n = j, m
	}
}

// threePacked returns the three bytes of the character at s[i], 0 if it has not
// three, or is not of the ranges where all such bytes are one.
func threePacked(s []byte, i, end int) uint32 {
	if i+3 > end {
		return 0
	}
	b := s[i : i+3 : i+3]
	v := uint32(b[0])<<16 | uint32(b[1])<<8 | uint32(b[2])
	if v&0xc0c0 != 0x8080 || b[0] < 0xe1 || b[0] > 0xec {
		return 0
	}
	return v
}

// maxThrees is how many characters threes looks at: one bit each.
const maxThrees = 64

// threes looks at the characters of three bytes from s[i] on: there are n, or more
// if n is maxThrees, and bit k of cuts is set if a word may be cut before the one at
// i+3*k. It is not known whether it may be cut behind the last one.
func (c *wordCuts) threes(s []byte, i, end int) (n int, cuts uint64) {
	left := threePacked(s, i, end)
	if left == 0 {
		return 0, 0
	}
	for n = 1; n < maxThrees; n++ {
		right := threePacked(s, i+3*n, end)
		if right == 0 {
			break
		}
		var cut uint64
		if !c.pairs.has(left, right) {
			cut = 1
		}
		if c.parts[left&0xff][right>>22]>>(right>>16&63)&1 != 0 && cut != 0 {
			if k := i + 3*n; c.inParts(s, k-3, k, k+3) {
				cut = 0
			}
		}
		cuts |= cut << (n & 63)
		left = right
	}
	return n, cuts
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
	return c.pairs.has(bytesOf(s[i:j]), bytesOf(s[j:k])) || c.parts[a][b>>6]>>(b&63)&1 != 0 && c.inParts(s, i, j, k)
}

// inParts reports whether a token may have parts of the characters s[i:j] and
// s[j:k] side by side.
func (c *wordCuts) inParts(s []byte, i, j, k int) bool {
	for l := i; l < j; l++ {
		for r := j + 1; r <= k; r++ {
			if c.partly.has(bytesOf(s[l:j]), bytesOf(s[j:r])) {
				return true
			}
		}
	}
	return false
}
