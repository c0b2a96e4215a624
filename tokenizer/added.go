// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"slices"
	"sort"
	"unicode"
	"unicode/utf8"
)

// added is a token that is searched for in the text before the text is split.
type added struct {
	id         uint32
	content    []byte
	lstrip     bool // includes the white space before it
	rstrip     bool // includes the white space behind it
	singleWord bool // is found only where no word character is next to it
}

// finder finds the leftmost added token. Of several that begin at one place it finds the
// longest. It is immutable once built; a nil finder finds nothing.
type finder struct {
	tokens []added // sorted by content; of equal contents the last one is found
	first  [256]bool
	starts []byte // the bytes that are set in first
	reach  int    // number of bytes that a search at one place may read
	single bool   // at least one token is a singleWord
}

func newFinder(tokens []added) *finder {
	f := &finder{tokens: slices.DeleteFunc(slices.Clone(tokens), func(a added) bool { return len(a.content) == 0 })}
	slices.SortStableFunc(f.tokens, func(a, b added) int { return bytes.Compare(a.content, b.content) })
	for _, a := range f.tokens {
		f.first[a.content[0]] = true
		f.single = f.single || a.singleWord
		f.reach = max(f.reach, len(a.content)+utf8.UTFMax)
	}
	if f.reach == 0 {
		return nil
	}
	for c, is := range f.first {
		if is {
			f.starts = append(f.starts, byte(c))
		}
	}
	return f
}

// loose reports whether a rejected match may hide another one. A search from a later place may then
// find a token that this search did not.
func (f *finder) loose() bool { return f != nil && f.single }

// found is an added token in s[start:end].
type found struct {
	start, end int
	id         uint32
}

// next returns the first token in s that begins at from or later. A token does not include white space
// before from. The search stops without a result when the budget is spent.
func (f *finder) next(b *budget, s []byte, from int) (found, bool) {
	if f == nil {
		return found{}, false
	}
	for i := from; i < len(s); {
		if !f.first[s[i]] {
			i = f.skip(s, i+1)
			continue
		}
		k, end, looked := f.longest(s, i)
		if b.spend(looked) {
			break
		}
		if k < 0 {
			i++
			continue
		}
		a := &f.tokens[k]
		if a.singleWord && (wordBefore(s, i) || wordAt(s, end)) {
			i = end // the match is ignored, and no other match may begin inside of it
			continue
		}
		m := found{i, end, a.id}
		if a.lstrip {
			m.start = from + len(bytes.TrimRightFunc(s[from:m.start], unicode.IsSpace))
		}
		if a.rstrip {
			m.end = len(s) - len(bytes.TrimLeftFunc(s[m.end:], unicode.IsSpace))
		}
		return m, true
	}
	return found{}, false
}

const (
	fewStarts  = 4   // number of different first bytes up to which skip searches for each of them
	skipWindow = 512 // bytes that skip searches for all first bytes before it continues
)

// skip returns the first place from i on at which a token may begin.
func (f *finder) skip(s []byte, i int) int {
	if len(f.starts) > fewStarts {
		return i
	}
	for i < len(s) {
		window := s[i:min(i+skipWindow, len(s))]
		n := len(window)
		for _, c := range f.starts {
			if k := bytes.IndexByte(window[:n], c); k >= 0 {
				n = k
			}
		}
		if i += n; n < len(window) {
			break
		}
	}
	return i
}

// longest returns the index and the end of the longest token that begins at s[i]; the index is
// -1 if there is none. looked is the number of bytes that it has read.
func (f *finder) longest(s []byte, i int) (token, end, looked int) {
	token = -1
	from, to := 0, len(f.tokens) // the tokens that begin with s[i:i+n]
	for n := 0; ; n++ {
		for from < to && len(f.tokens[from].content) == n {
			token, end = from, i+n
			from++
		}
		if from == to || i+n == len(s) {
			return token, end, n
		}
		c := s[i+n]
		if f.tokens[from].content[n] == f.tokens[to-1].content[n] { // all remaining tokens have the same byte
			if f.tokens[from].content[n] != c {
				return token, end, n
			}
			continue
		}
		from += sort.Search(to-from, func(k int) bool { return f.tokens[from+k].content[n] >= c })
		to = from + sort.Search(to-from, func(k int) bool { return f.tokens[from+k].content[n] > c })
	}
}

// wordBefore and wordAt report whether a word character stands before or at i.
func wordBefore(s []byte, i int) bool {
	_, n := utf8.DecodeLastRune(s[:i])
	return wordAt(s[:i], i-n)
}

func wordAt(s []byte, i int) bool {
	if i >= len(s) {
		return false
	}
	class, _ := wordClasses().at(s, i, len(s))
	return class&classWord != 0
}
