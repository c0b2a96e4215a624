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
	p := jsonParser{b: string(b)}
	p.valid = utf8.ValidString(p.b)
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

// jsonParser makes values that share memory: strings without escapes are parts of
// one copy of the document.
type jsonParser struct {
	b     string
	i     int
	valid bool            // all of it is UTF-8
	text  strings.Builder // of strings with escapes; it never grows once it is in use
	stack []Value         // of the lists and objects that are being read
	slab  []Value         // room for items
}

// slabValues is how many values are made at once; a chat has about four a message.
const slabValues = 128

// take returns the values of the stack from start on, and takes them off it.
func (p *jsonParser) take(start int) []Value {
	n := len(p.stack) - start
	if n > len(p.slab) {
		p.slab = make([]Value, max(n, min(slabValues, len(p.b)/16+n)))
	}
	items := p.slab[:n:n]
	p.slab = p.slab[n:]
	copy(items, p.stack[start:])
	clear(p.stack[start:])
	p.stack = p.stack[:start]
	return items
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
	for _, w := range words() {
		if strings.HasPrefix(p.b[p.i:], w.text) {
			p.i += len(w.text)
			return w.v, nil
		}
	}
	return p.number()
}

// word is a value that JSON has a name for.
type word struct {
	text string
	v    Value
}

func words() [6]word {
	return [6]word{
		{"null", None()},
		{"true", Bool(true)},
		{"false", Bool(false)},
		{"NaN", Float(math.NaN())},
		{"Infinity", Float(math.Inf(1))},
		{"-Infinity", Float(math.Inf(-1))},
	}
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
	text := p.b[start:p.i]
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
	start := len(p.stack)
	for p.space(); ; p.space() {
		if p.i < len(p.b) && p.b[p.i] == ']' && len(p.stack) == start {
			p.i++
			return List(), nil
		}
		v, err := p.value(depth + 1)
		if err != nil {
			return Value{}, err
		}
		p.stack = append(p.stack, v)
		p.space()
		if p.i >= len(p.b) || p.b[p.i] != ',' && p.b[p.i] != ']' {
			return Value{}, p.fail("want , or ]")
		}
		p.i++
		if p.b[p.i-1] == ']' {
			return List(p.take(start)...), nil
		}
	}
}

func (p *jsonParser) object(depth int) (Value, error) {
	p.i++
	start := len(p.stack)
	for p.space(); ; p.space() {
		if p.i < len(p.b) && p.b[p.i] == '}' && len(p.stack) == start {
			p.i++
			return FromDict(&Dict{}), nil
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
		p.stack = append(p.stack, String(key), v)
		p.space()
		if p.i >= len(p.b) || p.b[p.i] != ',' && p.b[p.i] != '}' {
			return Value{}, p.fail("want , or }")
		}
		p.i++
		if p.b[p.i-1] == '}' {
			return FromDict(p.dict(start)), nil
		}
	}
}

// dict returns the dictionary of the keys and values from start on.
func (p *jsonParser) dict(start int) *Dict {
	pairs := p.stack[start:]
	n := len(pairs) / 2
	unique := n < indexFrom
	for i := 2; i < len(pairs) && unique; i += 2 {
		for k := 0; k < i; k += 2 {
			unique = unique && pairs[k].str != pairs[i].str
		}
	}
	if !unique {
		d := NewDict(n)
		for i := 0; i < len(pairs); i += 2 {
			d.Set(pairs[i].str, pairs[i+1])
		}
		p.take(start)
		return d
	}
	all := p.take(start)
	// The keys to the front.
	keys := make([]Value, 0, indexFrom)
	for i := 0; i < len(all); i += 2 {
		keys = append(keys, all[i])
	}
	for i := n - 1; i >= 0; i-- { // values move up to places that are free by then
		all[n+i] = all[2*i+1]
	}
	copy(all, keys)
	return &Dict{keys: all[:n:n], values: all[n:]}
}

func (p *jsonParser) string() (string, error) {
	p.i++
	start := p.i
	for ; p.i < len(p.b); p.i++ {
		switch c := p.b[p.i]; {
		case c == '"':
			p.i++
			return p.utf8(p.b[start : p.i-1])
		case c == '\\':
			return p.escaped(start)
		case c < ' ':
			return "", p.fail("control character in a string")
		}
	}
	return "", p.fail("unexpected end in a string")
}

func (p *jsonParser) utf8(s string) (string, error) {
	if !p.valid && !utf8.ValidString(s) {
		return "", p.fail("text that is not UTF-8")
	}
	return s, nil
}

// escaped reads the rest of a string from its first escape on.
func (p *jsonParser) escaped(start int) (string, error) {
	if p.text.Cap() == 0 {
		p.text.Grow(len(p.b) - start) // an escape is longer than what it stands for
	}
	from := p.text.Len()
	p.text.WriteString(p.b[start:p.i])
	for p.i < len(p.b) {
		c := p.b[p.i]
		p.i++
		switch {
		case c == '"':
			return p.utf8(p.text.String()[from:])
		case c < ' ':
			return "", p.fail("control character in a string")
		case c != '\\':
			plain := p.i - 1
			for p.i < len(p.b) && p.b[p.i] >= ' ' && p.b[p.i] != '"' && p.b[p.i] != '\\' {
				p.i++
			}
			p.text.WriteString(p.b[plain:p.i])
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
			p.text.WriteByte("\"\\/\b\f\n\r\t"[k])
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
		p.text.WriteRune(r)
	}
	return "", p.fail("unexpected end in a string")
}

func (p *jsonParser) hex() (rune, bool) {
	if p.i+4 > len(p.b) {
		return 0, false
	}
	n, err := strconv.ParseUint(p.b[p.i:p.i+4], 16, 16)
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
