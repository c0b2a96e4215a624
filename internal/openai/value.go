// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"encoding/json"
	"strconv"

	"github.com/kvroute/kvroute/internal/jsonscan"
)

// value is one valid JSON value of the body, without white space around it. It is nil for null and
// for an absent member. Methods for one type find nothing in values of other types, which only the
// engine can judge.
type value []byte

// kind returns the first byte: a quote for a string, a bracket for a list and so on; 0
// for nil.
func (v value) kind() byte {
	if len(v) == 0 {
		return 0
	}
	return v[0]
}

// each calls take for each element of a list.
func (v value) each(take func(v value)) {
	if v.kind() == '[' {
		s := jsonscan.Scanner{In: v}
		_ = s.List(func() error { // valid, so there is no error
			element, err := readValue(&s)
			if err == nil {
				take(element)
			}
			return err
		})
	}
}

// members calls take for each member of an object.
func (v value) members(take func(name []byte, v value)) {
	if v.kind() == '{' {
		_ = readObject(&jsonscan.Scanner{In: v}, take) // valid, so there is no error
	}
}

// member returns the value of an object's member by name, the last one if there are several.
func (v value) member(name string) (found value) {
	v.members(func(n []byte, v value) {
		if string(n) == name {
			found = v
		}
	})
	return found
}

// has reports whether an object has a member, with any value.
func (v value) has(name string) (found bool) {
	v.members(func(n []byte, _ value) { found = found || string(n) == name })
	return found
}

// readObject reads an object, and calls take with each member.
func readObject(s *jsonscan.Scanner, take func(name []byte, v value)) error {
	return s.Object(func(name []byte) error {
		v, err := readValue(s)
		if err == nil {
			take(unquote(name), v)
		}
		return err
	})
}

// readValue reads the next value.
func readValue(s *jsonscan.Scanner) (value, error) {
	v, err := s.Value()
	if err != nil || v[0] == 'n' { // null
		return nil, err
	}
	return v, nil
}

// filled reports whether v is a list that is not empty.
func (v value) filled() bool {
	s := jsonscan.Scanner{In: v, At: 1}
	return v.kind() == '[' && s.Peek() != ']'
}

// first returns the first element of a list, nil if there is none.
func (v value) first() value {
	if !v.filled() {
		return nil
	}
	element, _ := readValue(&jsonscan.Scanner{In: v, At: 1}) // valid, so there is no error
	return element
}

// textOr returns the text of a string, or another text if v is not a string.
func (v value) textOr(other string) string {
	if v.kind() != '"' {
		return other
	}
	return string(unquote(v))
}

// textAt returns the text of an object's member, "" if it is not a string.
func (v value) textAt(name string) string { return v.member(name).textOr("") }

// or returns v, or another value for nil.
func (v value) or(other string) value {
	if v == nil {
		return value(other)
	}
	return v
}

// prompts returns the length of a list of prompts, 0 for another value: a list of token ids is one
// prompt.
func (v value) prompts() (n int) {
	if kind := v.first().kind(); kind != '"' && kind != '[' {
		return 0
	}
	v.each(func(value) { n++ })
	return n
}

// ids returns a list of token ids, nil for an empty list or one with other values.
func (v value) ids() []uint32 {
	if !v.filled() {
		return nil
	}
	list := make([]uint32, 0, len(v)/4)
	v.each(func(v value) {
		if list == nil {
			return
		}
		id, err := strconv.ParseUint(string(v), 10, 32)
		if list = append(list, uint32(id)); err != nil {
			list = nil
		}
	})
	return list
}

// unquote returns the text of a string. It is a part of raw unless it has escapes.
func unquote(raw []byte) []byte {
	text, _ := jsonscan.Unquote(nil, raw)
	return text
}

// The functions below make values.

// quote is the inverse of unquote.
func quote(text []byte) value {
	out, _ := json.Marshal(string(text)) // strings always marshal
	return out
}

// join returns several strings as one.
func join(strings []value, between string) value {
	out := value{'"'}
	for i, s := range strings {
		if i > 0 {
			out = append(out, between...)
		}
		out = append(out, s[1:len(s)-1]...)
	}
	return append(out, '"')
}

// list returns a list of values, in which nil is null.
func list(values []value) value {
	out := value{'['}
	for i, v := range values {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, v.or("null")...)
	}
	return append(out, ']')
}

// field is a member of an object.
type field struct {
	name  string
	value value
}

// object returns an object of the fields whose value is not nil.
func object(fields ...field) value {
	out := value{'{'}
	for _, f := range fields {
		if f.value == nil {
			continue
		}
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(append(append(out, '"'), f.name...), '"', ':')
		out = append(out, f.value...)
	}
	return append(out, '}')
}
