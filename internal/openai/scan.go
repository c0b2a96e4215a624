// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"encoding/binary"
	"fmt"
	"math/bits"
)

// maxDepth bounds the levels of nesting and with them the stack. Engines refuse
// far less.
const maxDepth = 512

// scanner walks over one JSON text and checks its grammar.
type scanner struct {
	in    []byte
	at    int // bytes read
	depth int

	// Values seen so far: numbers, and all others.
	numbers, others int
}

func (s *scanner) malformed(what string) *Error {
	return bad("", fmt.Sprintf("the body is not valid JSON: %s at byte %d", what, s.at))
}

// peek steps over white space and returns the byte behind it, 0 at the end.
func (s *scanner) peek() byte {
	for ; s.at < len(s.in); s.at++ {
		switch c := s.in[s.at]; c {
		case ' ', '\t', '\n', '\r':
		default:
			return c
		}
	}
	return 0
}

// skip reads one value of any type.
func (s *scanner) skip() *Error {
	s.others++
	switch c := s.peek(); {
	case c == '"':
		return s.string()
	case c == '{':
		return s.object(nil)
	case c == '[':
		return s.list(nil)
	case c == '-' || '0' <= c && c <= '9':
		s.others--
		s.numbers++
		return s.number()
	case c == 't':
		return s.word("true")
	case c == 'f':
		return s.word("false")
	case c == 'n':
		return s.word("null")
	case s.at == len(s.in):
		return s.malformed("unexpected end")
	}
	return s.malformed("want a value")
}

// object reads an object. take, if not nil, is given the name and the value of each
// member.
func (s *scanner) object(take func(name []byte, v value)) *Error {
	if s.depth++; s.depth > maxDepth {
		return s.malformed("nested too deep")
	}
	s.at++ // {
	for more := s.peek() != '}'; more; {
		if s.peek() != '"' {
			return s.malformed("want a field name")
		}
		start := s.at
		if err := s.string(); err != nil {
			return err
		}
		name := s.in[start:s.at]
		if s.peek() != ':' {
			return s.malformed("want a colon")
		}
		s.at++
		s.peek()
		start = s.at
		if err := s.skip(); err != nil {
			return err
		}
		if take != nil {
			take(unquote(name), span(s.in[start:s.at:s.at]))
		}
		switch s.peek() {
		case ',':
			s.at++
		case '}':
			more = false
		default:
			return s.malformed("want a comma or the object's end")
		}
	}
	s.at++ // }
	s.depth--
	return nil
}

// span returns nil for null.
func span(v value) value {
	if v[0] == 'n' {
		return nil
	}
	return v
}

// list reads a list. take, if not nil, is given each element.
func (s *scanner) list(take func(v value)) *Error {
	if s.depth++; s.depth > maxDepth {
		return s.malformed("nested too deep")
	}
	s.at++ // [
	for more := s.peek() != ']'; more; {
		s.peek()
		start := s.at
		if err := s.skip(); err != nil {
			return err
		}
		if take != nil {
			take(span(s.in[start:s.at:s.at]))
		}
		switch s.peek() {
		case ',':
			s.at++
		case ']':
			more = false
		default:
			return s.malformed("want a comma or the list's end")
		}
	}
	s.at++ // ]
	s.depth--
	return nil
}

func (s *scanner) word(w string) *Error {
	if rest := s.in[s.at:]; len(rest) < len(w) || string(rest[:len(w)]) != w {
		return s.malformed("want a value")
	}
	s.at += len(w)
	return nil
}

// string reads a string. Its bytes need not be UTF-8: the engine judges that.
func (s *scanner) string() *Error {
	s.at++ // "
	for {
		s.at += plain(s.in[s.at:])
		if s.at == len(s.in) {
			return s.malformed("unexpected end of a string")
		}
		switch s.in[s.at] {
		case '"':
			s.at++
			return nil
		case '\\':
			if err := s.escape(); err != nil {
				return err
			}
		default:
			return s.malformed("control character in a string")
		}
	}
}

// plain returns how many bytes at the beginning of in stand for themselves in a
// string: all but quotes, backslashes and control characters. Bodies are long
// strings for the most part, so it looks at eight bytes at a time.
func plain(in []byte) int {
	const (
		ones  = 0x0101010101010101
		highs = 0x8080808080808080
	)
	n := 0
	for ; len(in)-n >= 8; n += 8 {
		w := binary.LittleEndian.Uint64(in[n:])
		quote, slash := w^ones*'"', w^ones*'\\'
		// Subtracting borrows from a byte's high bit if the byte is too small.
		// A borrow may spoil the bytes after it, never those before: the lowest
		// mark is right.
		marks := ((quote-ones)&^quote | (slash-ones)&^slash | (w-ones*' ')&^w) & highs
		if marks != 0 {
			return n + bits.TrailingZeros64(marks)/8
		}
	}
	for n < len(in) && in[n] >= ' ' && in[n] != '"' && in[n] != '\\' {
		n++
	}
	return n
}

// escape reads a backslash and what belongs to it.
func (s *scanner) escape() *Error {
	if s.at++; s.at == len(s.in) {
		return s.malformed("unexpected end of a string")
	}
	switch s.in[s.at] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		s.at++
		return nil
	case 'u':
		s.at++
		for range 4 {
			if s.at == len(s.in) || !isHex(s.in[s.at]) {
				return s.malformed("bad escape in a string")
			}
			s.at++
		}
		return nil
	}
	return s.malformed("bad escape in a string")
}

func isHex(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}

func (s *scanner) number() *Error {
	s.accept('-', '-')
	if !s.accept('0', '0') && !s.digits() {
		return s.malformed("bad number")
	}
	if s.accept('.', '.') && !s.digits() {
		return s.malformed("bad number")
	}
	if s.accept('e', 'E') {
		s.accept('+', '-')
		if !s.digits() {
			return s.malformed("bad number")
		}
	}
	return nil
}

// accept reads the next byte if it is a or b.
func (s *scanner) accept(a, b byte) bool {
	if s.at < len(s.in) && (s.in[s.at] == a || s.in[s.at] == b) {
		s.at++
		return true
	}
	return false
}

// digits reads digits and reports whether there were any.
func (s *scanner) digits() bool {
	start := s.at
	for s.at < len(s.in) && '0' <= s.in[s.at] && s.in[s.at] <= '9' {
		s.at++
	}
	return s.at > start
}
