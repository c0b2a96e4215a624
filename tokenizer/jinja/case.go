// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// Letter case as Python's strings have it: full mappings, so that ß becomes SS, and
// a sigma at the end of a word its final form.

// caseTables are the generated tables, ready for use.
type caseTables struct {
	upper, title, fold map[rune]string
	digits, numerics   []runeRange
}

type runeRange struct{ lo, hi rune }

var cases = sync.OnceValue(func() *caseTables { //nolint:gochecknoglobals // tables
	long := func(text string) map[rune]string {
		m := map[rune]string{}
		for s := range strings.SplitSeq(text, " ") {
			r, n := utf8.DecodeRuneInString(s)
			m[r] = s[n:]
		}
		return m
	}
	ranges := func(text string) (out []runeRange) {
		number := func(s string) rune {
			n, _ := strconv.ParseInt(s, 16, 32)
			return rune(n)
		}
		for s := range strings.SplitSeq(text, " ") {
			lo, hi, two := strings.Cut(s, "-")
			if !two {
				hi = lo
			}
			out = append(out, runeRange{number(lo), number(hi)})
		}
		return out
	}
	return &caseTables{long(longUpper), long(longTitle), long(folds), ranges(digitRanges), ranges(numericRanges)}
})

func inRanges(r rune, ranges []runeRange) bool {
	for _, x := range ranges {
		if r <= x.hi {
			return r >= x.lo
		}
	}
	return false
}

// isASCII reports whether s has no characters but those of ASCII.
func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// isLowercase, isUppercase and isCased are the properties of these names.
func isLowercase(r rune) bool {
	return unicode.IsLower(r) || r >= utf8.RuneSelf && unicode.Is(unicode.Other_Lowercase, r)
}

func isUppercase(r rune) bool {
	return unicode.IsUpper(r) || r >= utf8.RuneSelf && unicode.Is(unicode.Other_Uppercase, r)
}

func isCased(r rune) bool { return isLowercase(r) || isUppercase(r) || unicode.IsTitle(r) }

// isIgnorable reports whether r does not count where cased letters are looked for
// around another: the property Case_Ignorable.
func isIgnorable(r rune) bool {
	return unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf, unicode.Lm, unicode.Sk) || strings.ContainsRune("'.:·\u0387\u055f\u05f4\u2018\u2019\u2024\u2027\ufe13\ufe52\ufe55\uff07\uff0e\uff1a", r)
}

const (
	capitalSigma = 'Σ'
	smallSigma   = 'σ'
	finalSigma   = 'ς'
)

// sigma returns the small form of the sigma at s[i].
func sigma(s string, i int) rune {
	before, after := s[:i], s[i+utf8.RuneLen(capitalSigma):]
	before = strings.TrimRightFunc(before, isIgnorable)
	after = strings.TrimLeftFunc(after, isIgnorable)
	last, _ := utf8.DecodeLastRuneInString(before)
	next, _ := utf8.DecodeRuneInString(after)
	if before != "" && isCased(last) && (after == "" || !isCased(next)) {
		return finalSigma
	}
	return smallSigma
}

// writeLower writes the small form of r, which stands at s[i].
func writeLower(b *strings.Builder, s string, i int, r rune) {
	switch r {
	case capitalSigma:
		b.WriteRune(sigma(s, i))
	case 'İ':
		b.WriteString("i\u0307")
	default:
		b.WriteRune(unicode.ToLower(r))
	}
}

func writeLong(b *strings.Builder, r rune, long map[rune]string, short func(rune) rune) {
	if s, ok := long[r]; ok {
		b.WriteString(s)
		return
	}
	b.WriteRune(short(r))
}

func lower(s string) string {
	if isASCII(s) {
		return strings.ToLower(s)
	}
	var b strings.Builder
	b.Grow(len(s))
	for i, r := range s {
		writeLower(&b, s, i, r)
	}
	return b.String()
}

func upper(s string) string {
	if isASCII(s) {
		return strings.ToUpper(s)
	}
	var b strings.Builder
	b.Grow(len(s))
	for _, r := range s {
		writeLong(&b, r, cases().upper, unicode.ToUpper)
	}
	return b.String()
}

func casefold(s string) string {
	var b strings.Builder
	for i, r := range s {
		if as, ok := cases().fold[r]; ok {
			b.WriteString(as)
			continue
		}
		if r == capitalSigma {
			b.WriteRune(smallSigma)
			continue
		}
		writeLower(&b, s, i, r)
	}
	return b.String()
}

// capitalized makes the first character a capital and the others small.
func capitalized(s string) string {
	var b strings.Builder
	for i, r := range s {
		if i == 0 {
			writeLong(&b, r, cases().title, unicode.ToTitle)
			continue
		}
		writeLower(&b, s, i, r)
	}
	return b.String()
}

// titled makes the first letter of each run of letters a capital, the others small.
func titled(s string) string {
	var b strings.Builder
	in := false
	for i, r := range s {
		if in {
			writeLower(&b, s, i, r)
		} else {
			writeLong(&b, r, cases().title, unicode.ToTitle)
		}
		in = isCased(r)
	}
	return b.String()
}

// titleWords is the filter title: a capital behind each run of white space and of
// - ( { [ <.
func titleWords(s string) string {
	var b strings.Builder
	separates := func(r rune) bool { return isSpace(r) || strings.ContainsRune("-({[<", r) }
	for s != "" {
		n := strings.IndexFunc(s, func(r rune) bool { return !separates(r) })
		if n < 0 {
			n = len(s)
		}
		b.WriteString(s[:n])
		s = s[n:]
		n = strings.IndexFunc(s, separates)
		if n < 0 {
			n = len(s)
		}
		_, first := utf8.DecodeRuneInString(s[:n])
		b.WriteString(upper(s[:first]))
		b.WriteString(lower(s[first:n]))
		s = s[n:]
	}
	return b.String()
}

func swapcase(s string) string {
	var b strings.Builder
	for i, r := range s {
		switch {
		case isUppercase(r):
			writeLower(&b, s, i, r)
		case isLowercase(r):
			writeLong(&b, r, cases().upper, unicode.ToUpper)
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

// isLowerString and isUpperString are str.islower and str.isupper.
func isLowerString(s string) bool {
	cased := false
	for _, r := range s {
		if isUppercase(r) || unicode.IsTitle(r) {
			return false
		}
		cased = cased || isLowercase(r)
	}
	return cased
}

func isUpperString(s string) bool {
	cased := false
	for _, r := range s {
		if isLowercase(r) || unicode.IsTitle(r) {
			return false
		}
		cased = cased || isUppercase(r)
	}
	return cased
}

// isTitleString is str.istitle.
func isTitleString(s string) bool {
	cased, before := false, false
	for _, r := range s {
		switch {
		case isUppercase(r) || unicode.IsTitle(r):
			if before {
				return false
			}
			cased, before = true, true
		case isLowercase(r):
			if !before {
				return false
			}
		default:
			before = false
		}
	}
	return cased
}

func isDigitRune(r rune) bool { return unicode.IsDigit(r) || inRanges(r, cases().digits) }

func isNumericRune(r rune) bool { return unicode.IsNumber(r) || inRanges(r, cases().numerics) }

func isPrintable(r rune) bool { return r == ' ' || strconv.IsPrint(r) }

// isIdentifier is str.isidentifier.
func isIdentifier(s string) bool {
	for i, r := range s {
		start := r == '_' || unicode.IsLetter(r) || unicode.In(r, unicode.Nl, unicode.Other_ID_Start)
		if !start && (i == 0 || !unicode.In(r, unicode.Mn, unicode.Mc, unicode.Nd, unicode.Pc, unicode.Other_ID_Continue)) {
			return false
		}
	}
	return s != ""
}
