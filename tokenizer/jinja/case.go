// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/cases"
	"golang.org/x/text/language"
)

// isASCII reports whether s has ASCII characters only.
func isASCII(s string) bool {
	return strings.IndexFunc(s, func(c rune) bool { return c >= utf8.RuneSelf }) < 0
}

// upper is str.upper, with the full mappings of Unicode: ß becomes SS.
func upper(s string) string {
	if isASCII(s) {
		return strings.ToUpper(s)
	}
	return cases.Upper(language.Und).String(s)
}

// lower is str.lower: a sigma at the end of a word has another form.
func lower(s string) string {
	if isASCII(s) {
		return strings.ToLower(s)
	}
	return cases.Lower(language.Und).String(s)
}

// capitalized makes the first character a capital and the others small.
func capitalized(s string) string {
	_, n := utf8.DecodeRuneInString(s)
	return cases.Title(language.Und).String(s[:n]) + lower(s)[len(lower(s[:n])):]
}

// titled is str.title: the first of each run of letters becomes a capital.
func titled(s string) string {
	return words(s, func(c rune) bool { return !isCased(c) }, capitalized)
}

// titleWords is the filter title: a capital behind white space and each of - ( { [ <.
func titleWords(s string) string {
	ends := func(c rune) bool { return isSpace(c) || strings.ContainsRune("-({[<", c) }
	return words(s, ends, func(word string) string {
		_, n := utf8.DecodeRuneInString(word)
		return upper(word[:n]) + lower(word[n:])
	})
}

// words changes the words between the characters that end one.
func words(s string, ends func(rune) bool, change func(string) string) string {
	var b strings.Builder
	start := 0
	for i, c := range s + " " {
		if ends(c) {
			b.WriteString(change(s[start:i]))
			b.WriteString(s[i:min(i+utf8.RuneLen(c), len(s))])
			start = i + utf8.RuneLen(c)
		}
	}
	return b.String()
}

// isCased reports whether Unicode counts c as a letter with a case.
func isCased(c rune) bool {
	return unicode.In(c, unicode.Lower, unicode.Other_Lowercase, unicode.Upper, unicode.Other_Uppercase, unicode.Title)
}
