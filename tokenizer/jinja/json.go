// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// FromJSON reads JSON as Python's json module does: keys keep their order, of
// equal keys the last value counts at the first one's place, integers have any
// size, NaN and Infinity are numbers. Half a surrogate pair and text that is not
// UTF-8 are errors, which name the byte.
func FromJSON(b []byte) (v Value, err error) {
	p := jsonReader{s: string(b)}
	p.valid = utf8.ValidString(p.s)
	defer func() {
		switch e := recover().(type) {
		case nil:
		case jsonError:
			v, err = Value{}, fmt.Errorf("jinja: JSON: %s at byte %d", e, p.i)
		default:
			panic(e)
		}
	}()
	v = p.value(0)
	if p.peek() != 0 || p.i < len(p.s) {
		panic(jsonError("more behind the end"))
	}
	return v, nil
}

// jsonError is what the reader panics with.
type jsonError string

// jsonReader makes values that share memory: strings without escapes are parts of s.
type jsonReader struct {
	s     string
	i     int
	valid bool    // all of s is UTF-8
	stack []Value // of the lists and objects that are being read
	slab  []Value // room for the values of several lists and objects

	// unescaped holds the strings that had escapes. It never grows once it is in use: an
	// escape is at least as long as its character.
	unescaped strings.Builder
}

// slabSize is the number of values that are allocated at once; a message has about four.
const slabSize = 128

// take returns room for n values.
func (p *jsonReader) take(n int) []Value {
	if n > len(p.slab) {
		p.slab = make([]Value, max(n, min(slabSize, len(p.s)/16+n)))
	}
	room := p.slab[:n:n]
	p.slab = p.slab[n:]
	return room
}

// peek skips white space and returns the next byte, 0 at the end.
func (p *jsonReader) peek() byte {
	for ; p.i < len(p.s); p.i++ {
		if c := p.s[p.i]; c != ' ' && c != '\n' && c != '\t' && c != '\r' {
			return c
		}
	}
	return 0
}

// skip skips one of the bytes in set and returns it.
func (p *jsonReader) skip(set, want string) byte {
	c := p.peek()
	if c == 0 || strings.IndexByte(set, c) < 0 {
		panic(jsonError("want " + want))
	}
	p.i++
	return c
}

func (p *jsonReader) value(depth int) Value {
	if depth > maxNesting {
		panic(jsonError("nested too deep"))
	}
	switch p.peek() {
	case '{':
		return p.object(depth)
	case '[':
		return p.array(depth)
	case '"':
		return String(p.text())
	}
	for _, w := range jsonWords {
		if strings.HasPrefix(p.s[p.i:], w.text) {
			p.i += len(w.text)
			return w.v
		}
	}
	return p.number()
}

//nolint:gochecknoglobals // a table
var jsonWords = []struct {
	text string
	v    Value
}{
	{"null", None()},
	{"true", Bool(true)},
	{"false", Bool(false)},
	{"NaN", Float(math.NaN())},
	{"Infinity", Float(math.Inf(1))},
	{"-Infinity", Float(math.Inf(-1))},
}

func (p *jsonReader) array(depth int) Value {
	p.i++
	if p.peek() == ']' {
		p.i++
		return List()
	}
	start := len(p.stack)
	for {
		p.stack = append(p.stack, p.value(depth+1))
		if p.skip(",]", ", or ]") == ']' {
			items := p.take(len(p.stack) - start)
			copy(items, p.stack[start:])
			p.stack = p.stack[:start]
			return List(items...)
		}
	}
}

func (p *jsonReader) object(depth int) Value {
	p.i++
	if p.peek() == '}' {
		p.i++
		return FromDict(&Dict{})
	}
	start := len(p.stack)
	for {
		if p.peek() != '"' {
			panic(jsonError("want a key"))
		}
		p.stack = append(p.stack, String(p.text()))
		p.skip(":", ":")
		p.stack = append(p.stack, p.value(depth+1))
		if p.skip(",}", ", or }") == '}' {
			break
		}
	}
	pairs := p.stack[start:]
	d := &Dict{keys: p.take(len(pairs) / 2)[:0], values: p.take(len(pairs) / 2)[:0]}
	for i := 0; i < len(pairs); i += 2 {
		d.Set(pairs[i].str, pairs[i+1])
	}
	p.stack = p.stack[:start]
	return FromDict(d)
}

var jsonNumber = regexp.MustCompile(`^-?(0|[1-9]\d*)((\.\d+)?([eE][-+]?\d+)?)`)

// number reads a number. What follows it and does not belong to it, such as the dot
// of "1.", is left.
func (p *jsonReader) number() Value {
	m := jsonNumber.FindStringSubmatch(p.s[p.i:])
	if m == nil || strings.Trim(p.s[p.i+len(m[0]):min(p.i+len(m[0])+1, len(p.s))], "0123456789") == "" && p.i+len(m[0]) < len(p.s) {
		panic(jsonError("want a value"))
	}
	p.i += len(m[0])
	if m[2] != "" {
		f, _ := strconv.ParseFloat(m[0], 64) // out of range is infinite, as in Python
		return Float(f)
	}
	if len(m[0]) > 4300 { // Python's own limit
		panic(jsonError("integer of more than 4300 digits"))
	}
	return integer(m[0])
}

// text reads a string.
func (p *jsonReader) text() string {
	p.i++
	start := p.i
	end := p.plain()
	s := p.s[start:end]
	if p.s[end] == '\\' {
		if p.unescaped.Cap() == 0 {
			p.unescaped.Grow(len(p.s) - start)
		}
		from := p.unescaped.Len()
		for p.unescaped.WriteString(s); p.s[p.i] == '\\'; {
			p.unescaped.WriteRune(p.escape())
			start = p.i
			p.unescaped.WriteString(p.s[start:p.plain()])
		}
		s = p.unescaped.String()[from:]
	}
	if !p.valid && !utf8.ValidString(s) {
		panic(jsonError("text that is not UTF-8"))
	}
	p.i++
	return s
}

// plain skips to the next quote or backslash of a string.
func (p *jsonReader) plain() int {
	for ; p.i < len(p.s); p.i++ {
		switch c := p.s[p.i]; {
		case c == '"' || c == '\\':
			return p.i
		case c < ' ':
			panic(jsonError("control character in a string"))
		}
	}
	panic(jsonError("unexpected end in a string"))
}

func (p *jsonReader) escape() rune {
	if p.i += 2; p.i > len(p.s) {
		panic(jsonError("unexpected end in a string"))
	}
	c := p.s[p.i-1]
	if c != 'u' {
		k := strings.IndexByte(`"\/bfnrt`, c)
		if k < 0 {
			panic(jsonError("unknown escape"))
		}
		return rune("\"\\/\b\f\n\r\t"[k])
	}
	r := p.hex()
	if utf16.IsSurrogate(r) && strings.HasPrefix(p.s[p.i:], `\u`) {
		p.i += 2
		r = utf16.DecodeRune(r, p.hex())
		if r == utf8.RuneError {
			r = 0xd800
		}
	}
	if utf16.IsSurrogate(r) {
		panic(jsonError("bad escape, or half a surrogate pair,"))
	}
	return r
}

func (p *jsonReader) hex() rune {
	n, err := strconv.ParseUint(p.s[p.i:min(p.i+4, len(p.s))], 16, 16)
	if err != nil || p.i+4 > len(p.s) {
		panic(jsonError("bad escape, or half a surrogate pair,"))
	}
	p.i += 4
	return rune(n)
}

// AppendJSON appends v as Python's json.dumps writes it, without \u escapes. It
// fails for values that JSON does not have.
func AppendJSON(dst []byte, v Value) (out []byte, err error) {
	r := &renderer{o: Options{MaxOutput: math.MaxInt - len(dst)}, steps: math.MaxInt, memory: math.MaxInt}
	defer catch(&err, "", &r.line)
	return r.appendJSON(dst, v, &jsonStyle{comma: ", ", colon: ": "}, 0), nil
}

// toJSON is the filter tojson.
func toJSON(r *renderer, v Value, a args) Value {
	style := jsonStyle{comma: ", ", colon: ": ", ascii: a.values[0].Truth(), sortKeys: a.values[3].Truth()}
	if indent, ok := a.given(1); ok {
		style.pretty, style.comma = true, ","
		if style.indent = indent.str; !indent.isString() {
			style.indent = strings.Repeat(" ", min(max(a.integer(1, 0), 0), 1000))
		}
	}
	if separators, ok := a.given(2); ok {
		pair := r.iterate(separators)
		if len(pair) != 2 || !pair[0].isString() || !pair[1].isString() {
			panic(errorf(TypeError, "separators must be two strings"))
		}
		style.comma, style.colon = pair[0].str, pair[1].str
	}
	start := len(r.out)
	r.out = r.appendJSON(r.out, v, &style, 0)
	return String(r.cut(start))
}

// jsonStyle are the arguments of tojson.
type jsonStyle struct {
	ascii, sortKeys bool
	pretty          bool   // each item on a line of its own
	indent          string // of one level
	comma, colon    string
}

// appendJSON appends what Python's json.dumps gives.
func (r *renderer) appendJSON(dst []byte, v Value, style *jsonStyle, level int) []byte {
	if level == 0 {
		r.longest = len(dst) + r.o.MaxOutput
	}
	if level > maxNesting {
		panic(errorf(RecursionError, "maximum recursion depth exceeded"))
	}
	switch v.kind {
	case kindNone:
		return append(dst, "null"...)
	case kindBool:
		return strconv.AppendBool(dst, v.num != 0)
	case kindInt, kindBig:
		return r.appendRepr(dst, v)
	case kindFloat:
		switch f := v.float(); {
		case math.IsNaN(f):
			return append(dst, "NaN"...)
		case math.IsInf(f, 1):
			return append(dst, "Infinity"...)
		case math.IsInf(f, -1):
			return append(dst, "-Infinity"...)
		}
		return appendFloat(dst, v.float())
	case kindString, kindSafe:
		r.tick(1 + len(v.str)/stringStep)
		r.fits(len(dst) + len(v.str))
		return appendJSONString(dst, v.str, style.ascii)
	case kindList, kindTuple:
		dst = append(dst, '[')
		for i, it := range v.Items() {
			dst = r.appendJSON(r.nextJSON(dst, i, style, level+1), it, style, level+1)
		}
		return append(newLine(dst, len(v.Items()) > 0, style, level), ']')
	case kindDict:
		return r.appendJSONObject(dst, v.ref.(*Dict), style, level)
	}
	panic(errorf(TypeError, "Object of type %s is not JSON serializable", v.typeName()))
}

// nextJSON appends what stands before item i of a list or object.
func (r *renderer) nextJSON(dst []byte, i int, style *jsonStyle, level int) []byte {
	r.fits(len(dst) + len(style.comma) + level*len(style.indent))
	if i > 0 {
		dst = append(dst, style.comma...)
	}
	return newLine(dst, true, style, level)
}

func newLine(dst []byte, wanted bool, style *jsonStyle, level int) []byte {
	if !style.pretty || !wanted {
		return dst
	}
	dst = append(dst, '\n')
	for range level {
		dst = append(dst, style.indent...)
	}
	return dst
}

func (r *renderer) appendJSONObject(dst []byte, d *Dict, style *jsonStyle, level int) []byte {
	order := make([]int, d.Len())
	for i := range order {
		order[i] = i
	}
	r.tick(d.Len())
	if style.sortKeys {
		slices.SortStableFunc(order, func(a, b int) int { return r.compare(d.keys[a], d.keys[b]) })
	}
	dst = append(dst, '{')
	for n, i := range order {
		dst = r.nextJSON(dst, n, style, level+1)
		switch k := d.keys[i]; k.kind {
		case kindString, kindSafe:
			r.fits(len(dst) + len(k.str))
			dst = appendJSONString(dst, k.str, style.ascii)
		case kindNone, kindBool, kindInt, kindBig, kindFloat:
			dst = append(r.appendJSON(append(dst, '"'), k, style, level+1), '"')
		default:
			panic(errorf(TypeError, "keys must be str, int, float, bool or None, not %s", k.typeName()))
		}
		dst = r.appendJSON(append(dst, style.colon...), d.values[i], style, level+1)
	}
	return append(newLine(dst, d.Len() > 0, style, level), '}')
}

func appendJSONString(dst []byte, s string, ascii bool) []byte {
	dst = append(dst, '"')
	for _, c := range s {
		switch {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', byte(c))
		case c >= ' ' && (c <= 0x7e || !ascii):
			dst = utf8.AppendRune(dst, c)
		case strings.ContainsRune("\b\f\n\r\t", c):
			dst = append(dst, '\\', "bfnrt"[strings.IndexRune("\b\f\n\r\t", c)])
		default:
			for _, unit := range utf16.AppendRune(nil, c) {
				dst = fmt.Appendf(dst, `\u%04x`, unit)
			}
		}
	}
	return append(dst, '"')
}
