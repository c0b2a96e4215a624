// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"math"
	"strings"
	"unicode/utf8"
)

// A scanner returns the end of the piece that begins at s[i], for i < end. It reads nothing before i,
// and nothing at or after end, which is the end of the text for it.
//
// t classifies the characters.
//
// looked is the end of the part of s that the answer depends on: another text with the same bytes up
// to looked has the same piece at i. It is end+1 if the answer depends on the end of the text.
//
// Each scanner implements one regular expression of a family of models as a backtracking engine
// matches it; tests compare them with such an engine.
type scanner func(t *classTable, s []byte, i, end int) (j, looked int)

// A rule is a scanner with its table of classes.
type rule struct {
	scan  scanner
	table func() *classTable
	// anywhere: from inside of a piece the scanner finds the same following pieces as from the start of
	// the piece.
	anywhere bool
	quick    func() *quick // finds most pieces without the scanner, nil if there is none
}

// patterns are the known expressions of rank files by name.
//
//nolint:gochecknoglobals // a table
var patterns = map[string]string{
	"gpt2":   `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`,
	"cl100k": `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
	"o200k":  `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
	"kimi":   `[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
}

// The regular expressions that have a scanner.
//
//nolint:gochecknoglobals // a table
var scanners = map[string]rule{
	patterns["gpt2"]:   {(*classTable).gpt2, classes, false, newQuick(gpt2Steps, false, false)},
	patterns["cl100k"]: {words(classLetter, 3), classes, false, newQuick(cl100kSteps, true, false)},
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`:             {words(classLetter, 1), classes, false, newQuick(qwen2Steps, true, false)},
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`: {words(classLetter|classMark, 1), classes, false, newQuick(qwen2Steps, true, false)},
	patterns["o200k"]: {cased(true, 3, "\r\n/"), classes, false, newQuick(o200kSteps, true, true)},
	`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`: {cased(false, 1, "\r\n/"), classes, false, newQuick(tekkenSteps, true, true)},
	patterns["kimi"]:   {kimi(), hanClasses, false, nil},
	`\p{N}{1,3}`:       {runs(classNumber, 3), classes, true, nil},
	`[0-9][0-9][0-9]`:  {scanThousands, classes, true, nil},
	`[一-龥぀-ゟ゠-ヿ]+`:     {runs(classKana, math.MaxInt), kanaClasses, true, nil},
	deepSeek("\\r\\n"): {(*classTable).deepSeek, classes, false, nil},
	deepSeek("\r\n"):   {(*classTable).deepSeek, classes, false, nil},
}

// deepSeek returns the last of DeepSeek's expressions; its files have the line
// ends as escapes or as they are.
func deepSeek(crlf string) string {
	return "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^" + crlf + `\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[` +
		crlf + `]*|\s*[` + crlf + `]+|\s+(?!\S)|\s+`
}

func (t *classTable) gpt2(s []byte, i, end int) (j, looked int) {
	if j := contraction(s, i, end, false); j > i {
		return j, reach(s, j, end)
	}
	k := i
	if s[i] == ' ' && i+1 < end {
		k++
	}
	switch class, n := t.at(s, k, end); {
	case class&classLetter != 0:
		j = t.run(s, k+n, end, classLetter)
	case class&classNumber != 0:
		j = t.run(s, k+n, end, classNumber)
	case class&classSpace == 0:
		j = t.runNot(s, k+n, end, classSpace|classLetter|classNumber)
	default:
		return t.blanks(s, i, end)
	}
	return j, max(reach(s, j, end), contractionReach(s, i, end))
}

// words is the family of cl100k: contractions first, then a word with at
// most one other character before it, up to digits numbers, punctuation with
// the line ends behind it, line ends, spaces.
func words(letters uint8, digits int) scanner {
	return func(t *classTable, s []byte, i, end int) (j, looked int) {
		if j := contraction(s, i, end, true); j > i {
			return j, reach(s, j, end)
		}
		class, n := t.at(s, i, end)
		if class&letters != 0 {
			j = t.run(s, i+n, end, letters)
			// A mark may be the character before the word, where it is no letter itself.
			return j, reach(s, j, end)
		}
		if class&classNumber != 0 {
			return t.numbers(s, i, end, digits)
		}
		if i+n < end && s[i] != '\r' && s[i] != '\n' {
			if next, m := t.at(s, i+n, end); next&letters != 0 {
				j = t.run(s, i+n+m, end, letters)
				return j, max(reach(s, j, end), contractionReach(s, i, end))
			}
		}
		j, looked = t.punctuation(s, i, end, classSpace|letters|classNumber, "\r\n")
		if j == i {
			return t.lines(s, i, end)
		}
		return j, max(looked, contractionReach(s, i, end))
	}
}

// kimi is o200k behind a rule for Chinese characters, which its other rules for
// letters do not take.
func kimi() scanner {
	others := cased(true, 3, "\r\n")
	return func(t *classTable, s []byte, i, end int) (j, looked int) {
		if class, n := t.at(s, i, end); class&classHan != 0 {
			j = t.run(s, i+n, end, classHan)
			return j, reach(s, j, end)
		}
		return others(t, s, i, end)
	}
}

// cased is the family of o200k: a word is a run of upper case and then a run
// of lower case, with at most one other character before it and, if suffixes is
// set, a contraction behind it. tail may stand behind punctuation.
func cased(suffixes bool, digits int, tail string) scanner {
	return func(t *classTable, s []byte, i, end int) (j, looked int) {
		class, n := t.at(s, i, end)
		first := i // where a word behind its leading character would begin
		if class&(classLetter|classNumber) == 0 && s[i] != '\r' && s[i] != '\n' {
			first = i + n
		}
		j, looked = t.word(s, i, first, end)
		if j > i {
			if suffixes {
				looked = max(looked, contractionReach(s, j, end))
				j = max(j, contraction(s, j, end, true))
			}
			return j, looked
		}
		if class&classNumber != 0 {
			return t.numbers(s, i, end, digits)
		}
		j, l := t.punctuation(s, i, end, classSpace|classLetter|classNumber, tail)
		if j == i {
			j, l = t.lines(s, i, end)
		}
		return j, max(l, looked)
	}
}

// word matches the first two alternatives of o200k at i, with the optional
// leading character (first > i) and then without it, the first alternative in
// both forms before the second. j is i if none matches.
func (t *classTable) word(s []byte, i, first, end int) (j, looked int) {
	for _, lower := range []bool{true, false} {
		for k := first; ; k = i {
			e, l := t.caseRuns(s, k, end, lower)
			looked = max(looked, l)
			if e > k {
				return e, looked
			}
			if k == i {
				break
			}
		}
	}
	return i, looked
}

// caseRuns matches U*l+ at i if lower is set, U+l* if not, where U and l are the
// classes of upper and lower case, which have letters and marks in common.
func (t *classTable) caseRuns(s []byte, i, end int, lower bool) (j, looked int) {
	if i >= end {
		return i, end + 1
	}
	upper := t.run(s, i, end, classUpper)
	j = t.run(s, upper, end, classLower)
	looked = reach(s, j, end)
	switch {
	case !lower && upper == i:
		return i, looked
	case !lower || j > upper:
		return j, looked
	}
	// No lower case behind the run: it gives back up to its last character that is both.
	for k := upper; k > i; {
		_, n := utf8.DecodeLastRune(s[i:k])
		if class, _ := t.at(s, k-n, end); class&classLower != 0 {
			return k, looked
		}
		k -= n
	}
	return i, looked
}

// deepSeek is the third of DeepSeek's expressions. Unlike the others it
// leaves characters unmatched, which form a piece up to the next match.
func (t *classTable) deepSeek(s []byte, i, end int) (j, looked int) {
	for k := i; k < end; {
		j, l := t.deepSeekMatch(s, k, end)
		looked = max(looked, l)
		if j > k {
			if k > i {
				return k, looked
			}
			return j, looked
		}
		_, n := t.at(s, k, end)
		k += n
	}
	return end, end + 1
}

func (t *classTable) deepSeekMatch(s []byte, i, end int) (j, looked int) {
	c := s[i]
	class, n := t.at(s, i, end)
	const letters = classLetter | classMark
	// An ASCII sign and the ASCII letters behind it.
	if c < 0x80 && class&(classPunct|classSymbol) != 0 {
		for j = i + 1; j < end && isASCIILetter(s[j]); j++ {
		}
		if j > i+1 {
			return j, reach(s, j, end)
		}
	}
	if class&letters != 0 {
		j = t.run(s, i, end, letters)
		return j, reach(s, j, end)
	}
	if c != '\r' && c != '\n' && class&(classPunct|classSymbol) == 0 && i+n < end {
		if next, _ := t.at(s, i+n, end); next&letters != 0 {
			j = t.run(s, i+n, end, letters)
			return j, reach(s, j, end)
		}
	}
	k := i
	if c == ' ' {
		k++
	}
	if j = t.run(s, k, end, classPunct|classSymbol); j > k {
		j = lineEnds(s, j, end, "\r\n")
		return j, reach(s, j, end)
	}
	if class&classSpace == 0 {
		return i, reach(s, i+n, end)
	}
	return t.lines(s, i, end)
}

func isASCIILetter(c byte) bool { return 'a' <= c|0x20 && c|0x20 <= 'z' }

// runs returns a scanner that ends a piece where the classes within mask change. A piece has at most
// most characters that have such a class.
func runs(mask uint8, most int) scanner {
	return func(t *classTable, s []byte, i, end int) (j, looked int) {
		class, n := t.at(s, i, end)
		want, count := class&mask, 1
		for j = i + n; j < end; j += n {
			if want != 0 && count == most {
				return j, j
			}
			if class, n = t.at(s, j, end); class&mask != want {
				break
			}
			count++
		}
		return j, reach(s, j, end)
	}
}

// After the step ByteLevel each byte is a character. The characters of some bytes are numbers: the
// digits, and the bytes that are ¹ ² ³ ¼ ½ ¾ in Latin-1. Such steps of Falcon's files split even
// characters of several bytes.
func isByteDigit(c byte) bool {
	return '0' <= c && c <= '9' || strings.IndexByte("\xb2\xb3\xb9\xbc\xbd\xbe", c) >= 0
}

// byteDigits returns a scanner that separates these numbers from other bytes, with at most most of
// them in a piece.
func byteDigits(most int) scanner {
	return func(_ *classTable, s []byte, i, end int) (j, looked int) {
		is := isByteDigit(s[i])
		for j = i + 1; j < end && isByteDigit(s[j]) == is; j++ {
			if is && j-i == most {
				return j, j
			}
		}
		return j, min(j, end) + 1
	}
}

// scanThousands is the expression [0-9][0-9][0-9], with what lies between two matches.
func scanThousands(_ *classTable, s []byte, i, end int) (j, looked int) {
	digit := func(k int) bool { return k < end && '0' <= s[k] && s[k] <= '9' }
	for j = i; j < end; j++ {
		if digit(j) && digit(j+1) && digit(j+2) {
			if j == i {
				return i + 3, i + 3
			}
			return j, j + 3
		}
	}
	return end, end + 1
}

// contraction returns the end of a contraction such as 's or 'll at i, or i. If
// fold is set, letter case does not matter, and the long s counts as one.
func contraction(s []byte, i, end int, fold bool) int {
	if i >= end || s[i] != '\'' || i+1 >= end {
		return i
	}
	letter := func(k int) byte {
		if k >= end {
			return 0
		}
		if fold && 'A' <= s[k] && s[k] <= 'Z' {
			return s[k] | 0x20
		}
		return s[k]
	}
	switch a, b := letter(i+1), letter(i+2); {
	case a == 's', a == 't', a == 'm', a == 'd':
		return i + 2
	case a == 'r' && b == 'e', a == 'v' && b == 'e', a == 'l' && b == 'l':
		return i + 3
	case fold && a == 0xc5 && b == 0xbf: // U+017F
		return i + 3
	}
	return i
}

// contractionReach returns what the search for a contraction at i may have
// looked at.
func contractionReach(s []byte, i, end int) int {
	switch {
	case i >= end:
		return end + 1
	case s[i] != '\'':
		return i + 1
	case i+3 > end:
		return end + 1
	}
	return i + 3
}

// reach returns where the character that ends a run at j ends: what a scanner
// has looked at. It is end+1 at the end of the text.
func reach(s []byte, j, end int) int {
	if j >= end {
		return end + 1
	}
	if s[j] < utf8.RuneSelf {
		return j + 1
	}
	return min(j+utf8.UTFMax, end+1)
}

// numbers matches \p{N}{1,most} at a number.
func (t *classTable) numbers(s []byte, i, end, most int) (j, looked int) {
	for j = i; most > 0 && j < end; most-- {
		class, n := t.at(s, j, end)
		if class&classNumber == 0 {
			break
		}
		j += n
	}
	if most == 0 {
		return j, j
	}
	return j, reach(s, j, end)
}

// punctuation matches an optional space, characters of none of the classes in
// not, and any of tail behind them. j is i if it does not match.
func (t *classTable) punctuation(s []byte, i, end int, not uint8, tail string) (j, looked int) {
	k := i
	if s[i] == ' ' {
		k++
	}
	j = t.runNot(s, k, end, not)
	if j == k {
		return i, reach(s, k, end)
	}
	j = lineEnds(s, j, end, tail)
	return j, reach(s, j, end)
}

func lineEnds(s []byte, j, end int, tail string) int {
	for j < end && (s[j] == tail[0] || s[j] == tail[1] || len(tail) > 2 && s[j] == tail[2]) {
		j++
	}
	return j
}

// lines matches \s*[\r\n]+|\s+(?!\S)|\s+ at a space.
func (t *classTable) lines(s []byte, i, end int) (j, looked int) {
	j = t.run(s, i, end, classSpace)
	for k := j; k > i; k-- {
		if c := s[k-1]; c == '\r' || c == '\n' {
			return k, reach(s, j, end)
		}
	}
	return t.blanks(s, i, end)
}

// blanks matches \s+(?!\S)|\s+ at a space: the whole run at the end of the
// text, else all of it but the last character, else that one.
func (t *classTable) blanks(s []byte, i, end int) (j, looked int) {
	j = t.run(s, i, end, classSpace)
	looked = reach(s, j, end)
	if j == end {
		return j, looked
	}
	_, n := utf8.DecodeLastRune(s[i:j])
	if j-n > i {
		j -= n
	}
	return j, looked
}
