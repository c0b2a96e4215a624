// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"slices"
	"unicode/utf8"
)

// Mend makes JSON of the beginning of a JSON object that was cut off somewhere: a
// string ends where it was cut, what is open is closed, and a member or element of
// which less is known goes. It returns nil if nothing of it is left. Of a text that
// was no beginning of JSON it makes none either.
//
// The text must not be changed while the result is used; the result is a copy.
func Mend(body []byte) []byte {
	var open []byte // '{' and '[', the outermost first
	safe := 0       // what is known whole: all before it
	depth := 0      // of what is open there
	key := false    // the next string is a name
	i := skipSpace(body, 0)
	if i == len(body) || body[i] != '{' {
		return nil
	}
	for i < len(body) {
		switch c := body[i]; c {
		case ' ', '\t', '\n', '\r', ':':
			i++
		case '{', '[':
			if open = append(open, c); len(open) > maxDepth {
				return nil
			}
			i++
			key = c == '{'
			safe, depth = i, len(open)
		case '}', ']':
			if len(open) == 0 || open[len(open)-1] != c-2 {
				return nil
			}
			open = open[:len(open)-1]
			i++
			key = false
			safe, depth = i, len(open)
		case ',':
			i++
			key = len(open) > 0 && open[len(open)-1] == '{'
		case '"':
			end, whole := stringEnd(body, i)
			switch {
			case whole && key:
				key = false
			case whole:
				safe, depth = end, len(open)
			case key:
				return closed(body[:safe], "", open[:depth])
			default:
				return closed(body[:end], `"`, open)
			}
			i = end
		default: // a number or a word
			end := i
			for end < len(body) && isWord(body[end]) {
				end++
			}
			switch {
			case end == i:
				return nil
			case end < len(body): // else there may be more of it
				safe, depth = end, len(open)
			}
			i = end
		}
		if len(open) == 0 && depth == 0 && safe == i && i > 0 {
			return append([]byte(nil), body[:i]...) // it was whole
		}
	}
	return closed(body[:safe], "", open[:depth])
}

// closed ends a text in which open is open.
func closed(text []byte, end string, open []byte) []byte {
	if len(open) == 0 {
		return nil
	}
	out := append(append(make([]byte, 0, len(text)+len(end)+len(open)), text...), end...)
	for _, c := range slices.Backward(open) {
		out = append(out, c+2)
	}
	return out
}

// stringEnd returns where the string that begins at i ends, or as much of it as
// makes sense by itself if it was cut: no half of an escape or of a character.
func stringEnd(body []byte, i int) (end int, whole bool) {
	for i++; i < len(body); {
		switch c := body[i]; {
		case c == '"':
			return i + 1, true
		case c == '\\':
			n := escapeLen(body[i:])
			if n == 0 {
				return i, false
			}
			i += n
		case c < utf8.RuneSelf:
			i++
		default:
			if !utf8.FullRune(body[i:]) {
				return i, false
			}
			_, n := utf8.DecodeRune(body[i:])
			i += n
		}
	}
	return i, false
}

// escapeLen returns the length of the escape that text begins with, that of a pair
// of surrogates as one; 0 if it is not all there.
func escapeLen(text []byte) int {
	switch {
	case len(text) < 2:
		return 0
	case text[1] != 'u':
		return 2
	case len(text) < 6:
		return 0
	}
	if high := text[2] == 'd' || text[2] == 'D'; !high || text[3] < '8' || text[3] > '9' && text[3]|0x20 > 'b' {
		return 6
	}
	// The other half may be missing altogether; only its beginning is too little.
	switch rest := text[6:]; {
	case len(rest) > 0 && rest[0] != '\\' || len(rest) > 1 && rest[1] != 'u':
		return 6
	case len(rest) < 6:
		return 0
	}
	return 12
}

func isWord(c byte) bool {
	return c == '-' || c == '+' || c == '.' || '0' <= c && c <= '9' || 'a' <= c|0x20 && c|0x20 <= 'z'
}

func skipSpace(body []byte, i int) int {
	for i < len(body) && (body[i] == ' ' || body[i] == '\t' || body[i] == '\n' || body[i] == '\r') {
		i++
	}
	return i
}
