// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
	"unsafe"

	"github.com/kvroute/kvroute/internal/jsonscan"
)

// FromJSON reads JSON as Python's json module does: keys keep their order, of
// equal keys the last value counts at the first one's place, integers have any
// size, NaN and Infinity are numbers. Half a surrogate pair and text that is not
// UTF-8 are errors, which name the byte.
func FromJSON(b []byte) (v Value, err error) {
	p := jsonReader{Scanner: jsonscan.Scanner{In: slices.Clone(b), Deepest: maxNesting}, stack: make([]Value, 0, 8)}
	if v, err = p.value(); err == nil {
		err = p.End()
	}
	if err == nil && !utf8.Valid(b) {
		err = errors.New("text that is not UTF-8")
	}
	if err != nil {
		return Value{}, fmt.Errorf("jinja: JSON: %w", err)
	}
	return v, nil
}

// jsonReader makes values that share memory: strings are parts of a copy of the text.
type jsonReader struct {
	jsonscan.Scanner
	stack []Value // of the lists and objects that are being read
	slab  []Value // room for the values of several lists and objects
}

// slabSize is the number of values that are allocated at once; a message has about four. A short text has few
// messages.
const slabSize = 128

// take returns room for n values.
func (p *jsonReader) take(n int) []Value {
	if n > len(p.slab) {
		p.slab = make([]Value, max(n, min(slabSize, len(p.In)/128+n)))
	}
	room := p.slab[:n:n]
	p.slab = p.slab[n:]
	return room
}

func (p *jsonReader) value() (v Value, err error) {
	start := len(p.stack)
	switch p.Peek() {
	case '{':
		err = p.Object(func(name []byte) error {
			key, err := p.text(name)
			if err != nil {
				return err
			}
			p.stack = append(p.stack, key)
			return p.push()
		})
		pairs := p.stack[start:]
		d := &Dict{keys: p.take(len(pairs) / 2)[:0], values: p.take(len(pairs) / 2)[:0]}
		for i := 0; i+1 < len(pairs); i += 2 {
			d.Set(pairs[i].str, pairs[i+1])
		}
		p.stack = p.stack[:start]
		return FromDict(d), err
	case '[':
		err = p.List(p.push)
		items := p.take(len(p.stack) - start)
		copy(items, p.stack[start:])
		p.stack = p.stack[:start]
		return List(items...), err
	case '"':
		quoted, err := p.String()
		if err != nil {
			return v, err
		}
		return p.text(quoted)
	}
	return p.word()
}

// push reads a value and puts it onto the stack.
func (p *jsonReader) push() error {
	v, err := p.value()
	p.stack = append(p.stack, v)
	return err
}

// text returns the text of a string, which takes the string's place in the copy.
func (p *jsonReader) text(quoted []byte) (Value, error) {
	text := quoted[1 : len(quoted)-1]
	if p.Escaped {
		var whole bool
		if text, whole = jsonscan.Unquote(quoted[:0], quoted); !whole {
			return Value{}, p.Fail("half a surrogate pair")
		}
	}
	return String(unsafe.String(unsafe.SliceData(text), len(text))), nil
}

// word reads a number, or a name such as null.
func (p *jsonReader) word() (Value, error) {
	for text, v := range jsonWords {
		if c := p.Peek(); (c > '9' || c == '-') && bytes.HasPrefix(p.In[p.At:], []byte(text)) {
			p.At += len(text)
			return v, nil
		}
	}
	number, err := p.Value()
	if err != nil {
		return Value{}, err
	}
	text := string(number)
	if strings.ContainsAny(text, ".eE") {
		f, _ := strconv.ParseFloat(text, 64) // out of range is infinite, as in Python
		return Float(f), nil
	}
	if len(text) > 4300 { // Python's own limit
		return Value{}, p.Fail("integer of more than 4300 digits")
	}
	return integer(text), nil
}

// jsonWords are the names in JSON. The last three are Python's.
//
//nolint:gochecknoglobals // a table
var jsonWords = map[string]Value{
	"null": None(), "true": Bool(true), "false": Bool(false), "NaN": Float(math.NaN()), "Infinity": Float(math.Inf(1)),
	"-Infinity": Float(math.Inf(-1)),
}

// AppendJSON appends v as Python's json.dumps writes it, without \u escapes. It
// fails for values that JSON does not have.
func AppendJSON(dst []byte, v Value) (out []byte, err error) { return appendJSON(dst, v, false) }

// AppendASCII is AppendJSON with \u escapes for all that is not ASCII, which is Python's default.
func AppendASCII(dst []byte, v Value) (out []byte, err error) { return appendJSON(dst, v, true) }

func appendJSON(dst []byte, v Value, ascii bool) (out []byte, err error) {
	r := &renderer{Options: Options{MaxOutput: math.MaxInt - len(dst)}, steps: math.MaxInt, memory: math.MaxInt}
	defer catch(&err, "", &r.line)
	return r.appendJSON(dst, v, &jsonStyle{comma: ", ", colon: ": ", ascii: ascii}, 0), nil
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
			raise(TypeError, "separators must be two strings")
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
		r.longest = len(dst) + r.MaxOutput
	}
	if level > maxNesting {
		raise(RecursionError, "maximum recursion depth exceeded")
	}
	switch v.kind {
	case kindNone:
		return append(dst, "null"...)
	case kindBool:
		return strconv.AppendBool(dst, v.num != 0)
	case kindInt, kindBig:
		return r.appendRepr(dst, v)
	case kindFloat:
		return appendFloat(dst, v.float(), "NaN", "Infinity")
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
		return r.appendJSONObject(dst, v.Dict(), style, level)
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
			raise(TypeError, "keys must be str, int, float, bool or None, not %s", k.typeName())
		}
		dst = r.appendJSON(append(dst, style.colon...), d.values[i], style, level+1)
	}
	return append(newLine(dst, d.Len() > 0, style, level), '}')
}

func appendJSONString(dst []byte, s string, ascii bool) []byte {
	dst = append(dst, '"')
	from := 0 // of the characters that stand for themselves
	bytes, valid := unsafe.Slice(unsafe.StringData(s), len(s)), !ascii && utf8.ValidString(s)
	for i := 0; i < len(s); {
		if valid {
			if i += jsonscan.Plain(bytes[i:]); i == len(s) {
				break
			}
		}
		c, n := rune(s[i]), 1
		if c >= utf8.RuneSelf {
			c, n = utf8.DecodeRuneInString(s[i:])
		}
		i += n
		if c >= ' ' && c != '"' && c != '\\' && (c <= 0x7e || !ascii && (c != utf8.RuneError || n > 1)) {
			continue
		}
		dst = append(dst, s[from:i-n]...)
		from = i
		switch {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', byte(c))
		case '\b' <= c && c <= '\r' && c != '\v':
			dst = append(dst, '\\', "btn fr"[c-'\b'])
		case c >= ' ' && !ascii:
			dst = utf8.AppendRune(dst, c)
		default:
			for _, unit := range utf16.AppendRune(nil, c) {
				dst = fmt.Appendf(dst, `\u%04x`, unit)
			}
		}
	}
	return append(append(dst, s[from:]...), '"')
}
