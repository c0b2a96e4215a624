// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"unicode/utf8"
)

// maxDepth bounds the nesting of a tokenizer file; real ones have less than ten levels.
const maxDepth = 64

// section is a value of an object, and where it stands in the file.
type section struct {
	b    []byte
	base int
}

// null reports whether the section is absent or null.
func (s section) null() bool { return len(s.b) == 0 || string(s.b) == "null" }

// unmarshal reads a small section. The error says where in the file it is.
func (s section) unmarshal(into any) error {
	if err := json.NewDecoder(bytes.NewReader(s.b)).Decode(into); err != nil {
		return fmt.Errorf("%w at byte %d", err, s.base)
	}
	return nil
}

// sections are the values of an object by their keys. Of two equal keys the later
// counts, as everywhere in JSON.
type sections map[string]section

func (s section) sections() (sections, error) {
	all := sections{}
	r := s.reader()
	err := r.object(func(key []byte) error {
		name := string(key)
		r.space()
		start := r.i
		if err := r.skip(0); err != nil {
			return err
		}
		if all[name] = (section{r.b[start:r.i], r.base + start}); len(all) > 1000 {
			return r.fail("too many keys")
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return all, r.end()
}

// UnmarshalJSON lets encoding/json read an object as its sections.
func (m *sections) UnmarshalJSON(b []byte) (err error) {
	*m, err = section{slices.Clone(b), 0}.sections()
	return err
}

// compare orders keys as their values stand in the file.
func (m sections) compare(x, y string) int { return m[x].base - m[y].base }

func (s section) reader() reader { return reader{b: s.b, base: s.base} }

// reader reads a JSON text without building values: the vocabulary of a file has a million
// strings, of which only the bytes are needed. Its errors name the byte of the file.
type reader struct {
	b    []byte
	i    int
	base int // of b in the file
	text []byte
}

func (r *reader) fail(what string) error {
	return fmt.Errorf("%s at byte %d", what, r.base+r.i)
}

// object reads an object, and calls f with each key where its value begins. The key is
// good until f reads a string.
func (r *reader) object(f func(key []byte) error) error {
	return r.each('{', '}', func() error {
		key, err := r.string()
		if err == nil {
			err = r.open(':')
		}
		if err != nil {
			return err
		}
		return f(key)
	})
}

// list reads a list, and calls f where each value begins.
func (r *reader) list(f func() error) error { return r.each('[', ']', f) }

func (r *reader) each(open, end byte, f func() error) error {
	if err := r.open(open); err != nil {
		return err
	}
	for first := true; ; first = false {
		r.space()
		switch {
		case r.i >= len(r.b):
			return r.fail("the file ends")
		case r.b[r.i] == end:
			r.i++
			return nil
		case first:
		case r.b[r.i] != ',':
			return r.fail("want a comma or " + strconv.QuoteRune(rune(end)))
		default:
			r.i++
		}
		if err := f(); err != nil {
			return err
		}
	}
}

// end returns an error if something but white space follows.
func (r *reader) end() error {
	if r.space(); r.i < len(r.b) {
		return r.fail("more behind the end")
	}
	return nil
}

// skip reads any value.
func (r *reader) skip(depth int) error {
	if depth > maxDepth {
		return r.fail("nested too deep")
	}
	if r.space(); r.i >= len(r.b) {
		return r.fail("the file ends")
	}
	switch r.b[r.i] {
	case '"':
		_, err := r.string()
		return err
	case '{':
		return r.object(func([]byte) error { return r.skip(depth + 1) })
	case '[':
		return r.list(func() error { return r.skip(depth + 1) })
	}
	n := bytes.IndexAny(r.b[r.i:], ",]} \t\n\r")
	if n < 0 {
		n = len(r.b) - r.i
	}
	if n == 0 {
		return r.fail("want a value")
	}
	r.i += n
	return nil
}

// string reads a string. The result is good until the next call.
func (r *reader) string() ([]byte, error) {
	if err := r.open('"'); err != nil {
		return nil, err
	}
	start, escapes := r.i, false
	for ; r.i < len(r.b); r.i++ {
		switch c := r.b[r.i]; {
		case c == '"' && escapes:
			r.i++
			return r.unescaped(r.b[start-1 : r.i])
		case c == '"':
			r.i++
			return r.b[start : r.i-1], nil
		case c == '\\':
			r.i++
			escapes = true
		case c < ' ':
			return nil, r.fail("control character in a string")
		}
	}
	return nil, r.fail("the file ends in a string")
}

// unescaped returns what a quoted string with escapes means.
func (r *reader) unescaped(quoted []byte) ([]byte, error) {
	var s string
	if err := json.Unmarshal(quoted, &s); err != nil {
		return nil, r.fail(err.Error())
	}
	if bytes.Contains(bytes.ToLower(quoted), []byte(`\ud`)) && bytes.ContainsRune([]byte(s), utf8.RuneError) {
		return nil, r.fail("half a surrogate pair")
	}
	r.text = append(r.text[:0], s...)
	return r.text, nil
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

// open reads the byte c, which begins or parts values.
func (r *reader) open(c byte) error {
	if r.space(); r.i >= len(r.b) || r.b[r.i] != c {
		return r.fail("want " + strconv.QuoteRune(rune(c)))
	}
	r.i++
	return nil
}

func (r *reader) space() {
	for r.i < len(r.b) && (r.b[r.i] == ' ' || r.b[r.i] == '\t' || r.b[r.i] == '\n' || r.b[r.i] == '\r') {
		r.i++
	}
}

// pattern is a text or a regular expression, of which a file has one.
type pattern struct{ String, Regex string }
