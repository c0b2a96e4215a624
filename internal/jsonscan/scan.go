// SPDX-License-Identifier: Apache-2.0

// Package jsonscan walks over JSON texts without building values. As Python's json module, it takes NaN, Infinity and
// -Infinity for numbers.
//
// It is pure. Its only memory is the text itself, and a bit for each level of nesting.
package jsonscan

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// Scanner reads one JSON text from its beginning to its end and checks its grammar. Errors name the
// byte. After an error nothing more may be read.
type Scanner struct {
	In      []byte
	At      int // bytes of In that were read
	Base    int // where In begins in a larger text; errors count from the beginning of that text
	Deepest int // maximum levels of nesting; 0: any number

	Escaped bool // the last string that was read has escapes

	// Values that Skip has read: numbers, and all others.
	Numbers, Others int

	depth int
}

// Fail returns an error that names the current byte.
func (s *Scanner) Fail(what string) error { return fmt.Errorf("%s at byte %d", what, s.Base+s.At) }

// Peek skips white space and returns the byte after it, 0 at the end.
func (s *Scanner) Peek() byte {
	for ; s.At < len(s.In); s.At++ {
		switch c := s.In[s.At]; c {
		case ' ', '\t', '\n', '\r':
		default:
			return c
		}
	}
	return 0
}

// End returns an error unless only white space is left.
func (s *Scanner) End() error {
	if s.Peek(); s.At < len(s.In) {
		return s.Fail("unexpected data after the end")
	}
	return nil
}

// Skip reads one value of any type. Its memory is a bit for each level of nesting.
func (s *Scanner) Skip() error {
	var open nesting
	for {
		within, err := s.begin(&open)
		for err == nil && !within { // a value has ended
			if open.levels == 0 {
				return nil
			}
			within, err = s.follow(&open)
		}
		if err != nil {
			return err
		}
	}
}

// begin reads a value without the items of an object or list. within reports that another value comes next: the
// first item.
func (s *Scanner) begin(open *nesting) (within bool, err error) {
	c := s.Peek()
	if c != '{' && c != '[' {
		return false, s.scalar(c)
	}
	s.Others++
	if err := s.enter(); err != nil {
		return false, err
	}
	open.push(c == '{')
	if next := s.Peek(); next == c+2 { // the closing bracket
		s.leave()
		open.levels--
		return false, nil
	}
	if c == '{' {
		_, err = s.name()
	}
	return true, err
}

// follow reads what stands behind an item: a comma, and within an object the next name, or the closing bracket.
func (s *Scanner) follow(open *nesting) (within bool, err error) {
	object := open.top()
	switch c := s.Peek(); {
	case c == ',':
		if s.At++; object {
			_, err = s.name()
		}
		return true, err
	case c == '}' && object, c == ']' && !object:
		s.leave()
		open.levels--
		return false, nil
	case object:
		return false, s.Fail(wantObjectEnd)
	}
	return false, s.Fail(wantListEnd)
}

// nesting has a bit for each open object or list: 1 for an object.
type nesting struct {
	levels int
	first  uint64
	more   []uint64 // of the levels above 64
}

func (n *nesting) word(level int) *uint64 {
	if level < 64 {
		return &n.first
	}
	if level/64 > len(n.more) {
		n.more = append(n.more, 0)
	}
	return &n.more[level/64-1]
}

func (n *nesting) push(object bool) {
	w, bit := n.word(n.levels), uint64(1)<<(n.levels%64)
	if *w &^= bit; object {
		*w |= bit
	}
	n.levels++
}

func (n *nesting) top() (object bool) { return *n.word(n.levels - 1)>>((n.levels-1)%64)&1 == 1 }

// scalar reads a value that is no object and no list. c is its first byte.
func (s *Scanner) scalar(c byte) error {
	switch {
	case c == '-' || '0' <= c && c <= '9':
		s.Numbers++
		if s.word("-Infinity") {
			return nil
		}
		return s.number()
	case c == '"':
		s.Others++
		_, err := s.String()
		return err
	}
	s.Others++
	if s.At == len(s.In) {
		return s.Fail("unexpected end")
	}
	if s.word("true") || s.word("false") || s.word("null") || s.word("NaN") || s.word("Infinity") {
		return nil
	}
	return s.Fail("want a value")
}

// word reads a word, and reports whether it is there.
func (s *Scanner) word(word string) bool {
	if rest := s.In[s.At:]; len(rest) < len(word) || string(rest[:len(word)]) != word {
		return false
	}
	s.At += len(word)
	return true
}

// Value reads one value of any type and returns its text, without white space around it.
func (s *Scanner) Value() ([]byte, error) {
	s.Peek()
	start := s.At
	err := s.Skip()
	return s.In[start:s.At:s.At], err
}

const (
	wantObjectEnd = "want a comma or the object's end"
	wantListEnd   = "want a comma or the list's end"
)

// Object reads an object. It calls member with each name, in quotes as [Scanner.String] returns it, and
// member must read the value.
func (s *Scanner) Object(member func(name []byte) error) error {
	return s.each('{', '}', wantObjectEnd, func() error {
		name, err := s.name()
		if err != nil {
			return err
		}
		return member(name)
	})
}

// name reads the name of a member, and the colon.
func (s *Scanner) name() ([]byte, error) {
	if s.Peek() != '"' {
		return nil, s.Fail("want a field name")
	}
	name, err := s.String()
	if err != nil {
		return nil, err
	}
	if s.Peek() != ':' {
		return nil, s.Fail("want a colon")
	}
	s.At++
	return name, nil
}

// List reads a list. It calls element before each value, and element must read the value.
func (s *Scanner) List(element func() error) error {
	return s.each('[', ']', wantListEnd, element)
}

func (s *Scanner) each(open, end byte, want string, read func() error) error {
	if s.Peek() != open {
		return s.Fail("want " + strconv.QuoteRune(rune(open)))
	}
	if err := s.enter(); err != nil {
		return err
	}
	for more := s.Peek() != end; more; {
		if err := read(); err != nil {
			return err
		}
		switch s.Peek() {
		case ',':
			s.At++
		case end:
			more = false
		default:
			return s.Fail(want)
		}
	}
	s.leave()
	return nil
}

// enter reads an opening bracket.
func (s *Scanner) enter() error {
	if s.depth++; s.Deepest > 0 && s.depth > s.Deepest {
		return s.Fail("nested too deep")
	}
	s.At++
	return nil
}

// leave reads a closing bracket.
func (s *Scanner) leave() {
	s.At++
	s.depth--
}

// String reads a string and returns it with its quotes; see [Unquote]. Its bytes need not be UTF-8.
func (s *Scanner) String() ([]byte, error) {
	if s.Peek() != '"' {
		return nil, s.Fail("want a string")
	}
	start := s.At
	s.At++
	s.Escaped = false
	for {
		s.At += Plain(s.In[s.At:])
		if s.At == len(s.In) {
			return nil, s.Fail("unexpected end of a string")
		}
		switch s.In[s.At] {
		case '"':
			s.At++
			return s.In[start:s.At:s.At], nil
		case '\\':
			s.Escaped = true
			if s.At+1 < len(s.In) && short[s.In[s.At+1]] != 0 {
				s.At += 2
			} else if err := s.escape(); err != nil {
				return nil, err
			}
		default:
			return nil, s.Fail("control character in a string")
		}
	}
}

// Plain returns how many bytes at the beginning of in stand for themselves in a
// string: all but quotes, backslashes and control characters. Bodies are long
// strings for the most part, so it looks at eight bytes at a time.
func Plain(in []byte) int {
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

// short maps the letters of short escapes to the characters that they stand for, all other bytes to 0.
//
//nolint:gochecknoglobals // a table
var short = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// escape reads a backslash and four hexadecimal digits: short escapes are read before.
func (s *Scanner) escape() error {
	if s.At++; s.At == len(s.In) {
		return s.Fail("unexpected end of a string")
	}
	if s.In[s.At] != 'u' {
		return s.Fail("bad escape in a string")
	}
	s.At++
	for range 4 {
		if s.At == len(s.In) || !isHex(s.In[s.At]) {
			return s.Fail("bad escape in a string")
		}
		s.At++
	}
	return nil
}

func isHex(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c|0x20 && c|0x20 <= 'f'
}

func (s *Scanner) number() error {
	s.accept('-', '-')
	ok := s.accept('0', '0') || s.digits()
	if ok && s.accept('.', '.') {
		ok = s.digits()
	}
	if ok && s.accept('e', 'E') {
		s.accept('+', '-')
		ok = s.digits()
	}
	if !ok {
		return s.Fail("bad number")
	}
	return nil
}

// accept reads the next byte if it is a or b.
func (s *Scanner) accept(a, b byte) bool {
	if s.At < len(s.In) && (s.In[s.At] == a || s.In[s.At] == b) {
		s.At++
		return true
	}
	return false
}

// digits reads digits and reports whether there were any.
func (s *Scanner) digits() bool {
	start := s.At
	for s.At < len(s.In) && '0' <= s.In[s.At] && s.In[s.At] <= '9' {
		s.At++
	}
	return s.At > start
}

// Unquote returns the text of a string that a [Scanner] has read. Without escapes it is a part of quoted, else it is
// appended to dst, which may be quoted[:0]. Half a surrogate pair becomes U+FFFD; whole is then false.
func Unquote(dst, quoted []byte) (text []byte, whole bool) {
	in := quoted[1 : len(quoted)-1]
	n := Plain(in)
	if n == len(in) {
		return in, true
	}
	for whole = true; ; n = Plain(in) {
		dst = append(dst, in[:n]...)
		if in = in[n:]; len(in) == 0 {
			return dst, whole
		}
		if c := short[in[1]]; c != 0 {
			dst, in = append(dst, c), in[2:]
			continue
		}
		r := unit(in)
		in = in[6:]
		if utf16.IsSurrogate(r) {
			var low rune
			if len(in) >= 6 && in[0] == '\\' && in[1] == 'u' {
				low = unit(in)
			}
			if r = utf16.DecodeRune(r, low); r == utf8.RuneError {
				whole = false
			} else {
				in = in[6:]
			}
		}
		dst = utf8.AppendRune(dst, r)
	}
}

// unit returns the value of the escape \uXXXX at the beginning of in.
func unit(in []byte) rune {
	n, _ := strconv.ParseUint(string(in[2:6]), 16, 16) // four hexadecimal digits
	return rune(n)
}
