// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"slices"
	"sync"
	"unicode/utf8"
)

// Classes of code points as the patterns of pre-tokenizers name them, in
// Unicode 16.0: what the reference tokenizers' regex engine uses, whatever
// version Go's own tables are of.
const (
	classLetter = 1 << iota // \p{L}
	classUpper              // \p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}
	classLower              // \p{Ll}\p{Lm}\p{Lo}\p{M}
	classNumber             // \p{N}
	classMark               // \p{M}
	classSpace              // \s
	classPunct              // \p{P}
	classSymbol             // \p{S}
)

// classHan is \p{Han} in the table for Kimi's expression, which asks for no mark.
const classHan = classMark

// classRange says the class of the code points lo to hi, both included. The
// spaces are not in the generated table: \s is not a category.
type classRange struct {
	lo, hi rune
	class  uint8
}

// spaces are the 25 code points of \s.
//
//nolint:gochecknoglobals // a table
var spaces = [...]rune{
	'\t', '\n', '\v', '\f', '\r', ' ', 0x85, 0xa0, 0x1680,
	0x2000, 0x2001, 0x2002, 0x2003, 0x2004, 0x2005, 0x2006, 0x2007, 0x2008, 0x2009, 0x200a,
	0x2028, 0x2029, 0x202f, 0x205f, 0x3000,
}

// classTable gives the class of any code point in two steps: pages of 256, of
// which most are equal to each other.
type classTable struct {
	page  [(utf8.MaxRune + 1) / 256]uint8
	class [][256]uint8
	// three is the class of all characters of three bytes of which the first two
	// are those of the place: 64 code points, 0 if not all are of one class.
	three [1024]uint8
}

//nolint:gochecknoglobals // tables
var (
	asciiClass = buildASCII()
	classes    = sync.OnceValue(func() *classTable { return buildClasses(func([]uint8) {}) })
	// hanClasses are those of an expression that takes Chinese characters, of any class,
	// for nothing else.
	hanClasses = sync.OnceValue(func() *classTable {
		return buildClasses(func(all []uint8) {
			for c := range all {
				all[c] &^= classHan
			}
			for _, r := range hanRanges {
				for c := r.lo; c <= r.hi; c++ {
					all[c] = all[c]&^(classUpper|classLower) | classHan
				}
			}
		})
	})
	// digitClasses are those of the step Digits, which knows newer numbers.
	digitClasses = sync.OnceValue(func() *classTable {
		return buildClasses(func(all []uint8) {
			for _, r := range newDigits {
				for c := r.lo; c <= r.hi; c++ {
					all[c] |= classNumber
				}
			}
		})
	})
	puncts  = sync.OnceValue(func() *runeSet { return runeSetOf(punctRanges[:]) })
	accents = sync.OnceValue(func() *runeSet { return runeSetOf(accentRanges[:]) })
)

func buildASCII() (t [128]uint8) {
	for _, r := range classRanges {
		for c := r.lo; c <= r.hi && c < 128; c++ {
			t[c] |= r.class
		}
	}
	for _, c := range spaces {
		if c < 128 {
			t[c] |= classSpace
		}
	}
	return t
}

// buildClasses returns the table of Unicode 16.0 as change makes it.
func buildClasses(change func(all []uint8)) *classTable {
	all := make([]uint8, utf8.MaxRune+1)
	for _, r := range classRanges {
		for c := r.lo; c <= r.hi; c++ {
			all[c] = r.class
		}
	}
	for _, c := range spaces {
		all[c] |= classSpace
	}
	change(all)
	t := &classTable{}
	seen := map[[256]uint8]uint8{}
	for p := range t.page {
		var page [256]uint8
		copy(page[:], all[p*256:])
		n, ok := seen[page]
		if !ok {
			n = uint8(len(t.class)) // 16.0 has 160 different pages; a test says so
			seen[page] = n
			t.class = append(t.class, page)
		}
		t.page[p] = n
	}
	for p := range t.three {
		t.three[p] = all[p*64]
		for _, c := range all[p*64 : p*64+64] {
			if c != t.three[p] {
				t.three[p] = 0
				break
			}
		}
	}
	return t
}

// runeSet has a bit for each code point.
type runeSet [(utf8.MaxRune + 64) / 64]uint64

func runeSetOf(ranges []classRange) *runeSet {
	var s runeSet
	for _, r := range ranges {
		for c := r.lo; c <= r.hi; c++ {
			s[c>>6] |= 1 << (c & 63)
		}
	}
	return &s
}

func (s *runeSet) has(r rune) bool { return s[r>>6]>>(r&63)&1 != 0 }

// ofThree returns the class of the character at s[i] if it has three bytes, and is
// one of many of that class; else 0.
func (t *classTable) ofThree(s []byte, i, end int) uint8 {
	if i+3 > end {
		return 0
	}
	b := s[i : i+3 : i+3]
	if b[0]&0xf0 != 0xe0 || b[1]&0xc0 != 0x80 || b[2]&0xc0 != 0x80 {
		return 0
	}
	return t.three[uint(b[0]&0xf)<<6|uint(b[1]&0x3f)]
}

func (t *classTable) of(r rune) uint8 { return t.class[t.page[r>>8]][r&0xff] }

// isWord reports whether r is a word character, \w of the reference.
func isWord(r rune) bool {
	if classes().of(r)&(classLetter|classMark) != 0 {
		return true
	}
	return inRanges(wordRanges[:], r)
}

// isHan reports whether r is of the script Han.
func isHan(r rune) bool { return inRanges(hanRanges[:], r) }

func inRanges(ranges []classRange, r rune) bool {
	_, ok := slices.BinarySearchFunc(ranges, r, func(w classRange, r rune) int {
		switch {
		case w.hi < r:
			return -1
		case w.lo > r:
			return 1
		}
		return 0
	})
	return ok
}
