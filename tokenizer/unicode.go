// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"fmt"
	"sync"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/rangetable"
)

// Classes of code points, as the patterns of pre-tokenizers name them. They are those of
// Unicode 16.0, which the reference's regex engine uses. Go's tables may have another version.
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

// classRange is the class of the code points lo to hi, both included. The generated table has
// no spaces, because \s is not a category.
type classRange struct {
	lo, hi rune
	class  uint8
}

// classTable gives the class of any code point in two steps: the number of its page of 256
// code points, then the class within the page. Most pages are equal to another one.
type classTable struct {
	ascii [utf8.RuneSelf]uint8
	page  [(utf8.MaxRune + 1) / 256]uint8
	class [][256]uint8
	// three is the common class of the 64 characters of three bytes that have the same first
	// two bytes; 0 if their classes differ.
	three [1024]uint8
}

// The bits of tables for one step or expression.
const (
	classHan   = classMark   // hanClasses: \p{Han}
	classSign  = classPunct  // signClasses: what Punctuation takes for a sign
	classKana  = classLetter // kanaClasses: Chinese characters and kana
	classWord  = classLetter // wordClasses: \w
	classPlain = classLetter // plainClasses: what NFC leaves as it is, whatever stands beside it
)

//nolint:gochecknoglobals // tables
var (
	classes = newClasses(func([]uint8) {})
	// hanClasses are the classes of Kimi's expression. It names no marks, and its other classes
	// contain no Chinese characters.
	hanClasses = newClasses(func(all []uint8) {
		change(all, []classRange{{hi: utf8.MaxRune}}, classHan, 0)
		change(all, hanRanges[:], classUpper|classLower, classHan)
	})
	// digitClasses are the classes of the step Digits, whose Unicode version has more numbers.
	digitClasses = newClasses(func(all []uint8) { change(all, newDigits[:], 0, classNumber) })
	signClasses  = newClasses(only(punctRanges[:], classSign))
	kanaClasses  = newClasses(only([]classRange{{lo: '一', hi: '龥'}, {lo: '぀', hi: 'ヿ'}}, classKana))
	wordClasses  = newClasses(func(all []uint8) {
		for c := range all {
			if all[c]&classMark != 0 {
				all[c] |= classWord
			}
		}
		change(all, wordRanges[:], 0, classWord)
	})
	plainClasses = newClasses(only([]classRange{
		{lo: 0, hi: 0x2ff}, {lo: 0x3400, hi: 0x9fff}, // Latin, Chinese
		{lo: 0x400, hi: 0x482}, {lo: 0x2010, hi: 0x2027}, // Cyrillic, punctuation
		{lo: 0x3000, hi: 0x3029}, {lo: 0x3030, hi: 0x3098}, {lo: 0x30a0, hi: 0x312f}, // kana
		{lo: 0xac00, hi: 0xd7a3}, {lo: 0xff01, hi: 0xff60}, // Hangul syllables, wide forms
	}, classPlain))
)

// only sets the class of the code points in ranges, and clears that of all others.
func only(ranges []classRange, class uint8) func(all []uint8) {
	return func(all []uint8) {
		clear(all)
		change(all, ranges, 0, class)
	}
}

// change clears the bits without and sets the bits with in the classes of all code points in ranges.
func change(all []uint8, ranges []classRange, without, with uint8) {
	for _, r := range ranges {
		for c := r.lo; c <= r.hi; c++ {
			all[c] = all[c]&^without | with
		}
	}
}

// newClasses returns a function that returns the table of Unicode 16.0 as edit changes it.
func newClasses(edit func(all []uint8)) func() *classTable {
	return sync.OnceValue(func() *classTable {
		all := make([]uint8, utf8.MaxRune+1)
		for _, r := range classRanges {
			change(all, []classRange{r}, 0, r.class)
		}
		// No version of Unicode since 6.3 has changed White_Space.
		rangetable.Visit(unicode.White_Space, func(c rune) { all[c] |= classSpace })
		edit(all)
		t := &classTable{}
		copy(t.ascii[:], all)
		seen := map[[256]uint8]uint8{}
		for p := range t.page {
			page := [256]uint8(all[p*256:])
			n, ok := seen[page]
			if !ok {
				n = uint8(len(t.class)) // 16.0 has 160 different pages; a test says so
				seen[page] = n
				t.class = append(t.class, page)
			}
			t.page[p] = n
		}
		for p := range t.three {
			if block := all[p*64:][:64]; bytes.Count(block, block[:1]) == len(block) {
				t.three[p] = block[0]
			}
		}
		return t
	})
}

// ofThree returns the class of the character at s[i] if it has three bytes and its 63 neighbours
// have the same class; else 0.
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

// at returns the class and the length of the character at s[i], i < end.
func (t *classTable) at(s []byte, i, end int) (class uint8, n int) {
	if c := s[i]; c < utf8.RuneSelf {
		return t.ascii[c], 1
	}
	r, n := decode(s, i, end)
	if r == utf8.RuneError && n == 1 {
		return 0, 1
	}
	return t.of(r), n
}

// decode is utf8.DecodeRune of s[i:end]. It is faster for characters of three bytes, which most
// long words consist of.
func decode(s []byte, i, end int) (rune, int) {
	if r, ok := threeBytes(s, i, end); ok {
		return r, 3
	}
	return utf8.DecodeRune(s[i:end])
}

// threeBytes returns the character at s[i] if it has three bytes and its first byte is one with
// which all second and third bytes are valid.
func threeBytes(s []byte, i, end int) (rune, bool) {
	if i+3 > end {
		return 0, false
	}
	b := s[i : i+3 : i+3]
	if b[0] < 0xe1 || b[0] > 0xec || b[1]&0xc0 != 0x80 || b[2]&0xc0 != 0x80 {
		return 0, false
	}
	return rune(b[0]&0xf)<<12 | rune(b[1]&0x3f)<<6 | rune(b[2]&0x3f), true
}

// run returns the end of the run of characters of the classes in mask.
func (t *classTable) run(s []byte, i, end int, mask uint8) int {
	for i < end {
		if c := s[i]; c < utf8.RuneSelf {
			if t.ascii[c]&mask == 0 {
				return i
			}
			i++
			continue
		}
		if class := t.ofThree(s, i, end); class != 0 {
			if class&mask == 0 {
				return i
			}
			i += 3
			continue
		}
		class, n := t.at(s, i, end)
		if class&mask == 0 {
			return i
		}
		i += n
	}
	return i
}

// runNot returns the end of the run of characters of none of the classes in mask.
func (t *classTable) runNot(s []byte, i, end int, mask uint8) int {
	for i < end {
		class, n := t.at(s, i, end)
		if class&mask != 0 {
			return i
		}
		i += n
	}
	return i
}

type runeRange struct{ lo, hi rune }

// complement returns all other code points. The ranges of set are in order and do not touch.
func complement(set []runeRange) []runeRange {
	var out []runeRange
	next := rune(0)
	for _, r := range set {
		if r.lo > next {
			out = append(out, runeRange{next, r.lo - 1})
		}
		next = r.hi + 1
	}
	if next <= utf8.MaxRune {
		out = append(out, runeRange{next, utf8.MaxRune})
	}
	return out
}

func single(set []runeRange) bool { return len(set) == 1 && set[0].lo == set[0].hi }

// literal returns a code point in the form in which it means itself inside of brackets.
func literal(r rune) string {
	if r < 0x80 {
		return fmt.Sprintf(`\x%02x`, r)
	}
	if 0xd800 <= r && r < 0xe000 {
		return fmt.Sprintf(`\u%04x`, r)
	}
	return string(r)
}
