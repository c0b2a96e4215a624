// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"fmt"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// maxDepth bounds the nesting of a tokenizer file; real ones have less than ten levels.
const maxDepth = 64

// reader reads a JSON text without building values: the vocabulary of a file
// has a million strings, of which only the bytes are wanted. Its errors say at
// which byte of the file they are.
type reader struct {
	b    []byte
	i    int
	base int // of b in the file
	text []byte
}

func (r *reader) fail(what string) error {
	return fmt.Errorf("%s at byte %d", what, r.base+r.i)
}

func (r *reader) space() {
	for r.i < len(r.b) {
		switch r.b[r.i] {
		case ' ', '\t', '\n', '\r':
			r.i++
		default:
			return
		}
	}
}

// open reads the byte c, which begins or parts values.
func (r *reader) open(c byte) error {
	r.space()
	if r.i >= len(r.b) || r.b[r.i] != c {
		return r.fail("want " + strconv.QuoteRune(rune(c)))
	}
	r.i++
	return nil
}

// more reports whether another element follows, and reads the comma before it;
// first is true before the first element, end is the byte that ends them all.
func (r *reader) more(first bool, end byte) (bool, error) {
	r.space()
	switch {
	case r.i >= len(r.b):
		return false, r.fail("the file ends")
	case r.b[r.i] == end:
		r.i++
		return false, nil
	case first:
		return true, nil
	case r.b[r.i] != ',':
		return false, r.fail("want a comma or " + strconv.QuoteRune(rune(end)))
	}
	r.i++
	return true, nil
}

// string reads a string. The result is good until the next call.
func (r *reader) string() ([]byte, error) {
	if err := r.open('"'); err != nil {
		return nil, err
	}
	start := r.i
	for r.i < len(r.b) {
		switch c := r.b[r.i]; {
		case c == '"':
			r.i++
			return r.b[start : r.i-1], nil
		case c == '\\':
			return r.escaped(start)
		case c < ' ':
			return nil, r.fail("control character in a string")
		}
		r.i++
	}
	return nil, r.fail("the file ends in a string")
}

func (r *reader) escaped(start int) ([]byte, error) {
	r.text = append(r.text[:0], r.b[start:r.i]...)
	for r.i < len(r.b) {
		c := r.b[r.i]
		r.i++
		switch {
		case c == '"':
			return r.text, nil
		case c < ' ':
			return nil, r.fail("control character in a string")
		case c != '\\':
			r.text = append(r.text, c)
			continue
		}
		if r.i >= len(r.b) {
			break
		}
		c = r.b[r.i]
		r.i++
		switch c {
		case '"', '\\', '/':
			r.text = append(r.text, c)
		case 'b':
			r.text = append(r.text, '\b')
		case 'f':
			r.text = append(r.text, '\f')
		case 'n':
			r.text = append(r.text, '\n')
		case 'r':
			r.text = append(r.text, '\r')
		case 't':
			r.text = append(r.text, '\t')
		case 'u':
			u, err := r.hex4()
			if err != nil {
				return nil, err
			}
			if utf16.IsSurrogate(u) {
				if r.i+1 < len(r.b) && r.b[r.i] == '\\' && r.b[r.i+1] == 'u' {
					r.i += 2
					low, err := r.hex4()
					if err != nil {
						return nil, err
					}
					u = utf16.DecodeRune(u, low)
				}
				if utf16.IsSurrogate(u) || u == utf8.RuneError {
					return nil, r.fail("half a surrogate pair")
				}
			}
			r.text = utf8.AppendRune(r.text, u)
		default:
			return nil, r.fail("unknown escape")
		}
	}
	return nil, r.fail("the file ends in a string")
}

func (r *reader) hex4() (rune, error) {
	if r.i+4 > len(r.b) {
		return 0, r.fail("the file ends in a string")
	}
	u, err := strconv.ParseUint(string(r.b[r.i:r.i+4]), 16, 16)
	if err != nil {
		return 0, r.fail("want four hexadecimal digits")
	}
	r.i += 4
	return rune(u), nil
}

// uint reads a number without sign or fraction.
func (r *reader) uint() (uint32, error) {
	r.space()
	start := r.i
	n := uint64(0)
	for r.i < len(r.b) && '0' <= r.b[r.i] && r.b[r.i] <= '9' && n <= 1<<32 {
		n = n*10 + uint64(r.b[r.i]-'0')
		r.i++
	}
	if r.i == start || n >= 1<<32 {
		r.i = start
		return 0, r.fail("want a token id")
	}
	return uint32(n), nil
}

// skip reads any value.
func (r *reader) skip(depth int) error {
	if depth > maxDepth {
		return r.fail("nested too deep")
	}
	r.space()
	if r.i >= len(r.b) {
		return r.fail("the file ends")
	}
	switch c := r.b[r.i]; c {
	case '"':
		_, err := r.string()
		return err
	case '{', '[':
		end := c + 2 // the bracket that closes it, in ASCII
		r.i++
		for first := true; ; first = false {
			ok, err := r.more(first, end)
			if !ok {
				return err
			}
			if c == '{' {
				if err := r.key(); err != nil {
					return err
				}
			}
			if err := r.skip(depth + 1); err != nil {
				return err
			}
		}
	}
	start := r.i
	for r.i < len(r.b) {
		switch r.b[r.i] {
		case ',', ']', '}', ' ', '\t', '\n', '\r':
			if r.i == start {
				return r.fail("want a value")
			}
			return nil
		}
		r.i++
	}
	if r.i == start {
		return r.fail("want a value")
	}
	return nil
}

func (r *reader) key() error {
	if _, err := r.string(); err != nil {
		return err
	}
	return r.open(':')
}

// section is a value of an object, and where it stands in the file.
type section struct {
	b    []byte
	base int
}

func (s section) reader() reader { return reader{b: s.b, base: s.base} }

// null reports whether the section is absent or null.
func (s section) null() bool { return len(s.b) == 0 || string(s.b) == "null" }

// sections returns the values of the object s by their keys. Of two equal keys
// the later counts, as everywhere in JSON.
func (s section) sections() (map[string]section, error) {
	r := s.reader()
	if err := r.open('{'); err != nil {
		return nil, err
	}
	all := map[string]section{}
	for first := true; ; first = false {
		ok, err := r.more(first, '}')
		if err != nil {
			return nil, err
		}
		if !ok {
			break
		}
		key, err := r.string()
		if err != nil {
			return nil, err
		}
		name := string(key)
		if err := r.open(':'); err != nil {
			return nil, err
		}
		r.space()
		start := r.i
		if err := r.skip(0); err != nil {
			return nil, err
		}
		all[name] = section{r.b[start:r.i], r.base + start}
		if len(all) > 1000 {
			return nil, r.fail("too many keys")
		}
	}
	r.space()
	if r.i < len(r.b) {
		return nil, r.fail("more behind the end")
	}
	return all, nil
}
