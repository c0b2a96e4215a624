// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// maxNesting bounds the nesting of JSON: Python's own limit is near a thousand.
const maxNesting = 900

// FromJSON reads JSON as Python's json module does: keys keep their order, of
// equal keys the last value counts at the first one's place, integers have any
// size, NaN and Infinity are numbers. Half a surrogate pair and text that is not
// UTF-8 are errors, which name the byte.
func FromJSON(b []byte) (Value, error) {
	p := jsonParser{b: b}
	p.space()
	v, err := p.value(0)
	if err != nil {
		return Value{}, err
	}
	if p.space(); p.i < len(b) {
		return Value{}, p.fail("more behind the end")
	}
	return v, nil
}

type jsonParser struct {
	b []byte
	i int
}

func (p *jsonParser) fail(what string) error {
	return fmt.Errorf("jinja: JSON: %s at byte %d", what, p.i)
}

func (p *jsonParser) space() {
	for p.i < len(p.b) && (p.b[p.i] == ' ' || p.b[p.i] == '\n' || p.b[p.i] == '\t' || p.b[p.i] == '\r') {
		p.i++
	}
}

func (p *jsonParser) value(depth int) (Value, error) {
	if depth > maxNesting {
		return Value{}, p.fail("nested too deep")
	}
	if p.i >= len(p.b) {
		return Value{}, p.fail("unexpected end")
	}
	switch c := p.b[p.i]; c {
	case '{':
		return p.object(depth)
	case '[':
		return p.array(depth)
	case '"':
		s, err := p.string()
		return String(s), err
	}
	for _, w := range []struct {
		text string
		v    Value
	}{
		{"null", None()},
		{"true", Bool(true)},
		{"false", Bool(false)},
		{"NaN", Float(math.NaN())},
		{"Infinity", Float(math.Inf(1))},
		{"-Infinity", Float(math.Inf(-1))},
	} {
		if len(p.b)-p.i >= len(w.text) && string(p.b[p.i:p.i+len(w.text)]) == w.text {
			p.i += len(w.text)
			return w.v, nil
		}
	}
	return p.number()
}

func (p *jsonParser) number() (Value, error) {
	start := p.i
	digits := func() int {
		n := 0
		for ; p.i < len(p.b) && '0' <= p.b[p.i] && p.b[p.i] <= '9'; p.i++ {
			n++
		}
		return n
	}
	if p.i < len(p.b) && p.b[p.i] == '-' {
		p.i++
	}
	zero := p.i < len(p.b) && p.b[p.i] == '0'
	if n := digits(); n == 0 || zero && n > 1 {
		p.i = start
		return Value{}, p.fail("want a value")
	}
	isFloat := false
	if p.i+1 < len(p.b) && p.b[p.i] == '.' && '0' <= p.b[p.i+1] && p.b[p.i+1] <= '9' {
		isFloat = true
		p.i++
		digits()
	}
	if p.i < len(p.b) && p.b[p.i]|0x20 == 'e' {
		at := p.i
		p.i++
		if p.i < len(p.b) && (p.b[p.i] == '+' || p.b[p.i] == '-') {
			p.i++
		}
		if digits() == 0 {
			p.i = at
		} else {
			isFloat = true
		}
	}
	text := string(p.b[start:p.i])
	if isFloat {
		f, err := strconv.ParseFloat(text, 64) // out of range is infinite, as in Python
		if err != nil && !math.IsInf(f, 0) {
			return Value{}, p.fail("bad number")
		}
		return Float(f), nil
	}
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return Int(n), nil
	}
	if len(text) > 4300 { // Python refuses more digits than that
		return Value{}, p.fail("integer of more than 4300 digits")
	}
	n, ok := new(big.Int).SetString(text, 10)
	if !ok {
		return Value{}, p.fail("bad number")
	}
	return bigInt(n), nil
}

func (p *jsonParser) array(depth int) (Value, error) {
	p.i++
	var items []Value
	for p.space(); ; p.space() {
		if p.i < len(p.b) && p.b[p.i] == ']' && len(items) == 0 {
			p.i++
			return List(), nil
		}
		v, err := p.value(depth + 1)
		if err != nil {
			return Value{}, err
		}
		items = append(items, v)
		p.space()
		if p.i >= len(p.b) || p.b[p.i] != ',' && p.b[p.i] != ']' {
			return Value{}, p.fail("want , or ]")
		}
		p.i++
		if p.b[p.i-1] == ']' {
			return List(items...), nil
		}
	}
}

func (p *jsonParser) object(depth int) (Value, error) {
	p.i++
	d := &Dict{}
	for p.space(); ; p.space() {
		if p.i < len(p.b) && p.b[p.i] == '}' && d.Len() == 0 {
			p.i++
			return FromDict(d), nil
		}
		if p.i >= len(p.b) || p.b[p.i] != '"' {
			return Value{}, p.fail("want a key")
		}
		key, err := p.string()
		if err != nil {
			return Value{}, err
		}
		p.space()
		if p.i >= len(p.b) || p.b[p.i] != ':' {
			return Value{}, p.fail("want :")
		}
		p.i++
		p.space()
		v, err := p.value(depth + 1)
		if err != nil {
			return Value{}, err
		}
		d.Set(key, v)
		p.space()
		if p.i >= len(p.b) || p.b[p.i] != ',' && p.b[p.i] != '}' {
			return Value{}, p.fail("want , or }")
		}
		p.i++
		if p.b[p.i-1] == '}' {
			return FromDict(d), nil
		}
	}
}

func (p *jsonParser) string() (string, error) {
	p.i++
	start := p.i
	for p.i < len(p.b) {
		switch c := p.b[p.i]; {
		case c == '"':
			p.i++
			s := string(p.b[start : p.i-1])
			if !utf8.ValidString(s) {
				return "", p.fail("text that is not UTF-8")
			}
			return s, nil
		case c == '\\':
			return p.escaped(start)
		case c < ' ':
			return "", p.fail("control character in a string")
		}
		p.i++
	}
	return "", p.fail("unexpected end in a string")
}

func (p *jsonParser) escaped(start int) (string, error) {
	var b strings.Builder
	b.Write(p.b[start:p.i])
	for p.i < len(p.b) {
		c := p.b[p.i]
		p.i++
		switch {
		case c == '"':
			if !utf8.ValidString(b.String()) {
				return "", p.fail("text that is not UTF-8")
			}
			return b.String(), nil
		case c < ' ':
			return "", p.fail("control character in a string")
		case c != '\\':
			b.WriteByte(c)
			continue
		case p.i >= len(p.b):
			return "", p.fail("unexpected end in a string")
		}
		c = p.b[p.i]
		p.i++
		if c != 'u' {
			k := strings.IndexByte(`"\/bfnrt`, c)
			if k < 0 {
				return "", p.fail("unknown escape")
			}
			b.WriteByte("\"\\/\b\f\n\r\t"[k])
			continue
		}
		r, ok := p.hex()
		if ok && utf16.IsSurrogate(r) && p.i+1 < len(p.b) && p.b[p.i] == '\\' && p.b[p.i+1] == 'u' {
			p.i += 2
			var low rune
			low, ok = p.hex()
			r = utf16.DecodeRune(r, low)
			if r == utf8.RuneError {
				ok = false
			}
		}
		if !ok || utf16.IsSurrogate(r) {
			return "", p.fail("bad escape, or half a surrogate pair,")
		}
		b.WriteRune(r)
	}
	return "", p.fail("unexpected end in a string")
}

func (p *jsonParser) hex() (rune, bool) {
	if p.i+4 > len(p.b) {
		return 0, false
	}
	n, err := strconv.ParseUint(string(p.b[p.i:p.i+4]), 16, 16)
	p.i += 4
	return rune(n), err == nil
}

// jsonOptions are the arguments of tojson.
type jsonOptions struct {
	ascii, sortKeys bool
	indent          string // of one level
	pretty          bool
	comma, colon    string
}

// appendJSON appends what Python's json.dumps gives.
func (r *renderer) appendJSON(dst []byte, v Value, o *jsonOptions, level int) ([]byte, error) {
	if level == 0 {
		r.longest = len(dst) + r.o.MaxOutput
	}
	if level > maxNesting {
		return dst, errorf(RecursionError, "maximum recursion depth exceeded")
	}
	// more says whether n bytes may follow, before they are written.
	more := func(n int) error {
		if r.spend(1+n/stringStep) && r.fits(len(dst)+n) {
			return nil
		}
		return r.broken
	}
	newline := func(level int) {
		if o.pretty {
			dst = append(dst, '\n')
			for range level {
				dst = append(dst, o.indent...)
			}
		}
	}
	var err error
	switch v.kind {
	case kindNone:
		return append(dst, "null"...), nil
	case kindBool:
		return strconv.AppendBool(dst, v.num != 0), nil
	case kindInt, kindBig:
		return r.appendRepr(dst, v), nil
	case kindFloat:
		switch f := v.float(); {
		case math.IsNaN(f):
			return append(dst, "NaN"...), nil
		case math.IsInf(f, 1):
			return append(dst, "Infinity"...), nil
		case math.IsInf(f, -1):
			return append(dst, "-Infinity"...), nil
		}
		return r.appendRepr(dst, v), nil
	case kindString, kindSafe:
		if err := more(len(v.str)); err != nil {
			return dst, err
		}
		return appendJSONString(dst, v.str, o.ascii), nil
	case kindList, kindTuple:
		dst = append(dst, '[')
		for i, it := range v.Items() {
			if err := more(len(o.comma) + (level+1)*len(o.indent)); err != nil {
				return dst, err
			}
			if i > 0 {
				dst = append(dst, o.comma...)
			}
			newline(level + 1)
			if dst, err = r.appendJSON(dst, it, o, level+1); err != nil {
				return dst, err
			}
		}
		if len(v.Items()) > 0 {
			newline(level)
		}
		return append(dst, ']'), nil
	case kindDict:
		d := v.ref.(*Dict)
		if err := more(d.Len()); err != nil {
			return dst, err
		}
		order := make([]int, d.Len())
		for i := range order {
			order[i] = i
		}
		if o.sortKeys {
			if err := sortBy(order, func(a, b int) (int, error) { return r.compare(d.keys[a], d.keys[b]) }); err != nil {
				return dst, err
			}
		}
		dst = append(dst, '{')
		for n, i := range order {
			if err := more(len(o.comma) + len(o.colon) + (level+1)*len(o.indent) + len(d.keys[i].str)); err != nil {
				return dst, err
			}
			if n > 0 {
				dst = append(dst, o.comma...)
			}
			newline(level + 1)
			switch k := d.keys[i]; k.kind {
			case kindString, kindSafe:
				dst = appendJSONString(dst, k.str, o.ascii)
			case kindNone, kindBool, kindInt, kindBig, kindFloat:
				dst = append(dst, '"')
				if dst, err = r.appendJSON(dst, k, o, level+1); err != nil {
					return dst, err
				}
				dst = append(dst, '"')
			default:
				return dst, errorf(TypeError, "keys must be str, int, float, bool or None, not %s", k.typeName())
			}
			dst = append(dst, o.colon...)
			if dst, err = r.appendJSON(dst, d.values[i], o, level+1); err != nil {
				return dst, err
			}
		}
		if d.Len() > 0 {
			newline(level)
		}
		return append(dst, '}'), nil
	}
	return dst, errorf(TypeError, "Object of type %s is not JSON serializable", v.typeName())
}

func appendJSONString(dst []byte, s string, ascii bool) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r < ' ':
			if k := strings.IndexRune("\b\f\n\r\t", r); k >= 0 {
				dst = append(dst, '\\', "bfnrt"[k])
			} else {
				dst = append(dst, '\\', 'u', '0', '0', hex[r>>4], hex[r&15])
			}
		case ascii && r > 0x7e:
			units := utf16.AppendRune(nil, r)
			for _, u := range units {
				dst = append(dst, '\\', 'u', hex[u>>12], hex[u>>8&15], hex[u>>4&15], hex[u&15])
			}
		default:
			dst = utf8.AppendRune(dst, r)
		}
	}
	return append(dst, '"')
}

// sortBy sorts s stably with an order that may fail.
func sortBy[T any](s []T, order func(a, b T) (int, error)) (err error) {
	// Insertion into halves: a merge sort whose order can stop it.
	if len(s) < 2 {
		return nil
	}
	m := len(s) / 2
	if err := sortBy(s[:m], order); err != nil {
		return err
	}
	if err := sortBy(s[m:], order); err != nil {
		return err
	}
	left := append([]T(nil), s[:m]...)
	right := s[m:]
	for i := 0; len(left) > 0; i++ {
		if len(right) == 0 {
			copy(s[i:], left)
			break
		}
		c, err := order(right[0], left[0])
		if err != nil {
			return err
		}
		if c < 0 {
			s[i], right = right[0], right[1:]
		} else {
			s[i], left = left[0], left[1:]
		}
	}
	return nil
}
