// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"strings"
	"unicode/utf8"
)

// wordCuts finds where a word of bytes may be cut before it is merged: between two characters that are
// side by side in no token, since a merge across the cut would make such a token. Words of scripts
// without spaces are as long as sentences. Their parts are short enough to merge quickly and to
// repeat.
//
// A token may begin or end inside of a character. At a boundary between characters it then has a part
// of one: the beginning of the next character or the end of the one before.
type wordCuts struct {
	neighbours
	partly pairSet        // pairs of which at least one is a part of a character
	parts  [256][4]uint64 // last byte before and first byte behind a boundary, of those
	long   pairSet        // tokens of at least cutFrom bytes, by both of their ends
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
	for _, token := range v.token {
		t := []byte(token)
		for k := 1; k < len(t); k++ {
			switch a, b := t[k-1], t[k]; {
			case a < utf8.RuneSelf && b < utf8.RuneSelf:
				c.neighbours.add(rune(a), rune(b))
			case utf8.RuneStart(b):
				c.add(lastOf(t[:k]), firstOf(t[k:]))
			}
		}
		if len(t) >= cutFrom {
			c.long.pairs = append(c.long.pairs, endsOf(t, 0, len(t)))
		}
	}
	c.pairs.fit()
	c.partly.fit()
	c.long.fit()
	return c
}

// add adds a pair of characters, or of parts of some.
func (c *wordCuts) add(left, right []byte) {
	if utf8.Valid(left) && utf8.Valid(right) {
		a, _ := utf8.DecodeRune(left)
		b, _ := utf8.DecodeRune(right)
		c.neighbours.add(a, b)
		return
	}
	a, b := left[len(left)-1], right[0]
	c.parts[a][b>>6] |= 1 << (b & 63)
	c.partly.add(bytesOf(left), bytesOf(right))
}

// lastOf returns the last character of t, or the part of it that t has.
func lastOf(t []byte) []byte {
	start := len(t) - 1
	for start > max(0, len(t)-utf8.UTFMax) && !utf8.RuneStart(t[start]) {
		start--
	}
	return t[start:]
}

// firstOf returns the first character of t, or the part of it that t has.
func firstOf(t []byte) []byte {
	if r, n := utf8.DecodeRune(t); r != utf8.RuneError || n > 1 {
		return t[:n]
	}
	end := 1
	for end < min(len(t), utf8.UTFMax) && !utf8.RuneStart(t[end]) {
		end++
	}
	return t[:end]
}

// neighbours are the pairs of characters that some token has side by side, and maybe a few others.
type neighbours struct {
	near  [utf8.RuneSelf][2]uint64 // those of two ASCII characters
	pairs pairSet
}

func (n *neighbours) add(a, b rune) {
	if a < utf8.RuneSelf && b < utf8.RuneSelf {
		n.near[a][b>>6] |= 1 << (b & 63)
		return
	}
	n.pairs.add(uint32(a), uint32(b))
}

func (n *neighbours) have(a, b rune) bool {
	if a < utf8.RuneSelf && b < utf8.RuneSelf {
		return n.near[a][b>>6]>>(b&63)&1 != 0
	}
	return n.pairs.has(uint32(a), uint32(b))
}

// pairSet is a set of pairs that may also report pairs that are not in it, about one in fifty. For
// cuts this is safe: kvroute then does not cut. A lookup reads one word of a table that stays in the
// processor's cache.
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
	p.fill()
}

// fill is fit for pairs of which few are equal.
func (p *pairSet) fill() {
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

// next returns the end of the part of the word s[:end] that begins at i.
func (c *wordCuts) next(s []byte, i, end int) int {
	a, n := decode(s, i, end)
	for {
		j := i + n
		if j >= end {
			return end
		}
		b, m := decode(s, j, end)
		if !c.together(s, i, j, j+m, a, b) {
			return j
		}
		i, n, a = j, m, b
	}
}

// maxThrees is how many characters threes looks at: one bit each.
const maxThrees = 64

// threes examines the characters of three bytes from s[i] on. There are n of them, or more if n is
// maxThrees. Bit k of cuts is set if a word may be cut before the character at i+3*k. The result does
// not say whether a word may be cut after the last one.
func (c *wordCuts) threes(s []byte, i, end int) (n int, cuts uint64) {
	left, ok := threeBytes(s, i, end)
	if !ok {
		return 0, 0
	}
	for n = 1; n < maxThrees; n++ {
		k := i + 3*n
		right, ok := threeBytes(s, k, end)
		if !ok {
			break
		}
		var cut uint64
		if !c.pairs.has(uint32(left), uint32(right)) {
			cut = 1
		}
		if c.parted(0x80|byte(left)&0x3f, 0xe0|byte(right>>12)) && cut != 0 && c.inParts(s, k-3, k, k+3) {
			cut = 0
		}
		cuts |= cut << (n & 63)
		left = right
	}
	return n, cuts
}

// together reports whether a token may have the end of s[i:j] and the beginning
// of s[j:k], the characters a and b, side by side. Bytes that are no character are never
// parted from what stands beside them.
func (c *wordCuts) together(s []byte, i, j, k int, a, b rune) bool {
	if a == utf8.RuneError && j-i == 1 || b == utf8.RuneError && k-j == 1 {
		return true
	}
	return c.have(a, b) || c.parted(s[j-1], s[j]) && c.inParts(s, i, j, k)
}

// parted reports whether parts of characters with these bytes at their boundary may be
// side by side in a token.
func (c *wordCuts) parted(a, b byte) bool { return c.parts[a][b>>6]>>(b&63)&1 != 0 }

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

// cuts finds where SentencePiece-style text may be cut: between two characters that are side by side
// in no token, since a merge across the cut would make such a token.
type cuts struct {
	space []byte // what a space is written as
	rune  rune   // the same
	never bool   // no stretch is prefixed
	first bool   // only the one at the text's start
	force bool   // also one that begins with a space
	split bool   // every space begins a piece
	neighbours
}

func (c *cuts) prefixed(stretch []byte, atStart bool) bool {
	if c.never || c.first && !atStart {
		return false
	}
	if c.force {
		return true
	}
	r, _ := utf8.DecodeRune(stretch)
	return c.written(r) != c.rune
}

// written returns the character that stands for r.
func (c *cuts) written(r rune) rune {
	if r == ' ' {
		return c.rune
	}
	return r
}

// pieceFrom is the length in bytes from which a piece ends at the next possible place. Shorter pieces
// end only before a space or between two characters beyond ASCII, because each piece costs a lookup.
const pieceFrom = 10

// scan is a scanner.
func (c *cuts) scan(s []byte, i, end int) (j, looked int) {
	r, n := decode(s, i, end)
	a := c.written(r)
	for j = i + n; j < end; j += n {
		if b := s[j]; b < utf8.RuneSelf {
			r, n = rune(b), 1
		} else {
			r, n = decode(s, j, end)
		}
		b := c.written(r)
		if b == c.rune && c.split || (b == c.rune || min(a, b) >= utf8.RuneSelf || j-i >= pieceFrom) && !c.have(a, b) {
			return j, j + n
		}
		a = b
	}
	return j, end + 1
}

// planCuts returns where SentencePiece-style text may be cut, nil if its files
// are of another kind.
func (t *Tokenizer) planCuts() *cuts {
	c := &cuts{}
	var space string
	switch {
	case len(t.normalizers) == 2 && len(t.steps) == 0:
		p, r := t.normalizers[0], t.normalizers[1]
		if p.kind != "Prepend" || r.kind != "Replace" || r.regex != nil || r.from != " " || r.to != p.to {
			return nil
		}
		space, c.force = r.to, true
	case len(t.normalizers) == 1 && len(t.steps) == 0:
		r := t.normalizers[0]
		if r.kind != "Replace" || r.regex != nil || r.from != " " {
			return nil
		}
		space, c.never = r.to, true
	case len(t.normalizers) == 0 && len(t.steps) > 0 && t.steps[0].space != nil:
		p := t.steps[0]
		if len(t.steps) == 2 && string(t.steps[1].literal) == string(p.space) && t.steps[1].behavior == "MergedWithNext" {
			c.split = true
		} else if len(t.steps) != 1 {
			return nil
		}
		space, c.never, c.first = string(p.space), p.prefix == nil, p.first
	default:
		return nil
	}
	c.space = []byte(space)
	var n int
	if c.rune, n = utf8.DecodeRuneInString(space); n != len(space) || space == "" {
		return nil
	}
	for _, token := range t.vocab.token {
		a, n := utf8.DecodeRuneInString(token)
		for _, b := range token[n:] {
			c.add(a, b)
			a = b
		}
	}
	c.pairs.fit()
	// A merge of byte tokens would cross a cut between characters.
	for _, m := range t.merges.slots {
		if m.key == 0 {
			continue
		}
		for _, id := range []uint32{uint32((m.key - 1) >> 32), uint32(m.key - 1)} {
			if b := t.vocab.get(id); len(b) == 6 && strings.HasPrefix(b, "<0x") {
				return nil
			}
		}
	}
	return c
}
