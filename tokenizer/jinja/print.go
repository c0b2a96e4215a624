// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// text is Python's str of a value.
func (r *renderer) text(v Value) string {
	switch v.kind {
	case kindUndefined:
		return ""
	case kindString, kindSafe:
		return v.str
	}
	return r.repr(v)
}

func (r *renderer) repr(v Value) string {
	b := r.appendRepr(nil, v)
	r.hold(2 * len(b))
	return string(b)
}

// write writes Python's str of a value.
func (r *renderer) write(v Value) {
	switch v.kind {
	case kindUndefined:
	case kindString, kindSafe:
		r.tick(len(v.str) / stringStep)
		r.out = append(r.out, v.str...)
	default:
		r.out = r.appendRepr(r.out, v)
	}
	r.checkOutput()
}

// appendRepr appends Python's repr of a value.
func (r *renderer) appendRepr(dst []byte, v Value) []byte {
	switch v.kind {
	case kindUndefined:
		return append(dst, "Undefined"...)
	case kindNone:
		return append(dst, "None"...)
	case kindBool:
		if v.num != 0 {
			return append(dst, "True"...)
		}
		return append(dst, "False"...)
	case kindInt:
		return strconv.AppendInt(dst, v.int(), 10)
	case kindBig, kindRange:
		return append(dst, v.str...)
	case kindFloat:
		return appendFloat(dst, v.float(), "nan", "inf")
	case kindString:
		r.tick(len(v.str) / stringStep)
		return appendQuoted(dst, v.str)
	case kindSafe:
		r.tick(len(v.str) / stringStep)
		return append(appendQuoted(append(dst, "Markup("...), v.str), ')')
	case kindList, kindTuple, kindView, kindDict, kindNamespace:
		if r.nesting == 0 {
			r.longest = len(dst) + r.MaxOutput
		}
		r.enter()
		dst = r.appendItems(dst, v)
		r.leave()
		return dst
	case kindFunc:
		switch f := v.ref.(*function); {
		case f.macro != nil && f.name == "":
			return append(dst, "<Macro anonymous>"...)
		case f.macro != nil:
			return append(appendQuoted(append(dst, "<Macro "...), f.name), '>')
		case f.class != "":
			return append(append(append(dst, "<class '"...), f.class...), "'>"...)
		}
	case kindLoop:
		l := v.ref.(*loop)
		return fmt.Appendf(dst, "<LoopContext %d/%d>", l.at+1, len(l.items))
	}
	panic(errorf(Unsupported, "the text of a %s, which has an address in it", v.typeName()))
}

// appendItems is appendRepr for values that hold others.
func (r *renderer) appendItems(dst []byte, v Value) []byte {
	before, after := "[", "]"
	switch v.kind {
	case kindTuple:
		before, after = "(", ")"
		if len(v.Items()) == 1 {
			after = ",)"
		}
	case kindView:
		before, after = v.str+"([", "])"
	case kindDict:
		before, after = "{", "}"
	case kindNamespace:
		before, after = "<Namespace {", "}>"
	}
	dst = append(dst, before...)
	next := func(i int) {
		if r.fits(len(dst)); i > 0 {
			dst = append(dst, ", "...)
		}
	}
	for i, it := range v.Items() {
		next(i)
		dst = r.appendRepr(dst, it)
	}
	if d := v.Dict(); d != nil {
		for i, k := range d.keys {
			next(i)
			dst = append(r.appendRepr(dst, k), ": "...)
			dst = r.appendRepr(dst, d.values[i])
		}
	}
	return append(dst, after...)
}

// appendFloat appends Python's repr of a float: the fewest digits that give the same
// number, with an exponent below 1e-4 and from 1e16 on. nan and infinity are the names of the other values.
func appendFloat(dst []byte, f float64, nan, infinity string) []byte {
	switch {
	case math.IsNaN(f):
		return append(dst, nan...)
	case math.IsInf(f, 1):
		return append(dst, infinity...)
	case math.IsInf(f, -1):
		return append(append(dst, '-'), infinity...)
	}
	if a := math.Abs(f); f != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.AppendFloat(dst, f, 'e', -1, 64)
	}
	text := strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(text, ".") {
		text += ".0"
	}
	return append(dst, text...)
}

// appendQuoted appends Python's repr of a string.
func appendQuoted(dst []byte, s string) []byte {
	quote := '\''
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		quote = '"'
	}
	dst = append(dst, byte(quote))
	for _, c := range s {
		switch k := strings.IndexRune("\n\r\t", c); {
		case c == quote || c == '\\':
			dst = append(dst, '\\', byte(c))
		case k >= 0:
			dst = append(dst, '\\', "nrt"[k])
		case c >= ' ' && c < 0x7f || c >= 0x80 && strconv.IsPrint(c):
			dst = utf8.AppendRune(dst, c)
		case c < 0x100:
			dst = fmt.Appendf(dst, `\x%02x`, c)
		case c < 0x10000:
			dst = fmt.Appendf(dst, `\u%04x`, c)
		default:
			dst = fmt.Appendf(dst, `\U%08x`, c)
		}
	}
	return append(dst, byte(quote))
}
