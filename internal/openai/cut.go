// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"slices"
	"unicode/utf8"
)

// ending is where a text breaks off.
type ending struct {
	text []byte // as much of it as makes sense
	// quoted says that it ends inside of a string, which is no name. name is of the
	// member that the string is, nil for none, and before how much of the text makes
	// sense without it.
	quoted bool
	name   []byte
	before int
	open   []opened // what is open there, the outermost first; nothing if it is whole
}

// opened is an object or a list that is not closed.
type opened struct {
	kind  byte   // '{' or '['
	name  []byte // of the member of the object around it that it is, nil for none
	start int    // of it in the text
	// before is how much of the text makes sense without it: all that stands before
	// it, and before its name.
	before int
}

// endOf finds where the beginning of a JSON object breaks off: what is left makes
// sense, and with its end is JSON again. A string ends where it was cut, and a member or
// element of which less is known is not there. Of other texts there is nothing.
func endOf(body []byte) ending {
	var open []opened
	safe := 0  // what is known whole: all before it
	depth := 0 // of what is open there
	key := false
	var name []byte // of the value to come
	i := skipSpace(body, 0)
	if i == len(body) || body[i] != '{' {
		return ending{}
	}
	for i < len(body) {
		switch c := body[i]; c {
		case ' ', '\t', '\n', '\r', ':':
			i++
		case '{', '[':
			if open = append(open, opened{c, name, i, safe}); len(open) > maxDepth {
				return ending{}
			}
			i++
			key, name = c == '{', nil
			safe, depth = i, len(open)
		case '}', ']':
			if len(open) == 0 || open[len(open)-1].kind != c-2 {
				return ending{}
			}
			open = open[:len(open)-1]
			i++
			key, name = false, nil
			safe, depth = i, len(open)
		case ',':
			i++
			key, name = len(open) > 0 && open[len(open)-1].kind == '{', nil
		case '"':
			end, whole := stringEnd(body, i)
			switch {
			case whole && key:
				key, name = false, body[i+1:end-1]
			case whole:
				safe, depth = end, len(open)
			case key:
				return ending{text: body[:safe], open: open[:depth]}
			default:
				return ending{text: body[:end], quoted: true, name: name, before: safe, open: open}
			}
			i = end
		default: // a number or a word
			end := i
			for end < len(body) && isWord(body[end]) {
				end++
			}
			switch {
			case end == i:
				return ending{}
			case end < len(body): // else there may be more of it
				safe, depth = end, len(open)
			}
			i = end
		}
		if len(open) == 0 && depth == 0 && safe == i && i > 0 {
			return ending{text: body[:i]} // it was whole
		}
	}
	return ending{text: body[:safe], open: open[:depth]}
}

// with returns the text with an end: tail goes on with the string that it breaks off
// in, if it does, and more has what is put behind that into the objects and lists that
// are open, the outermost first. All of it must be JSON that fits there. It is a copy,
// and nil if there is nothing.
func (e *ending) with(tail string, more []string) []byte {
	if len(e.text) == 0 || len(e.open) == 0 && e.text[len(e.text)-1] != '}' {
		return nil
	}
	size := len(e.text) + len(tail) + 1 + len(e.open)
	for _, m := range more {
		size += 1 + len(m)
	}
	out := append(make([]byte, 0, size), e.text...)
	if e.quoted {
		out = append(append(out, tail...), '"')
	}
	for i, o := range slices.Backward(e.open) {
		if i < len(more) && more[i] != "" {
			if len(out) > o.start+1 { // it is not empty
				out = append(out, ',')
			}
			out = append(out, more[i]...)
		}
		out = append(out, o.kind+2)
	}
	return out
}

// without returns the text as it is without the i-th of what is open.
func (e *ending) without(i int) ending {
	return ending{text: e.text[:e.open[i].before], open: e.open[:i]}
}

// unquoted returns the text as it is without the string that it breaks off in.
func (e *ending) unquoted() ending {
	if !e.quoted {
		return *e
	}
	return ending{text: e.text[:e.before], open: e.open}
}

// in reports whether the i-th of what is open is a member of that name.
func (e *ending) in(i int, name string) bool {
	return i < len(e.open) && string(e.open[i].name) == name
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
