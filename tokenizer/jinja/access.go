// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"math"
	"math/bits"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Flags of an undefined value, in num. The text of its error is made when it is needed.
const (
	isUnsafe    = 1 << 0 // the sandbox hides the attribute
	isAttribute = 1 << 1 // str is the name of an attribute that is missing
	isVariable  = 1 << 2 // str is the name of a variable that is missing
)

// missing returns the undefined value for an attribute that a value does not have.
func missing(name string) Value {
	if strings.HasPrefix(name, "__") {
		return Value{num: isAttribute | isUnsafe, str: name}
	}
	return Value{num: isAttribute, str: name}
}

// defined panics if one of the values is undefined.
func (r *renderer) defined(values ...Value) {
	for _, v := range values {
		switch {
		case v.kind != kindUndefined:
		case v.num&isUnsafe != 0:
			raise(SecurityError, "access to attribute '%s' is unsafe", v.str)
		case v.num&isAttribute != 0:
			raise(UndefinedError, "there is no attribute '%s'", v.str)
		case v.num&isVariable != 0:
			raise(UndefinedError, "'%s' is undefined", v.str)
		default:
			raise(UndefinedError, "%s", v.str)
		}
	}
}

// attr is v.name: an attribute, else an item. m are the methods of that name.
func (r *renderer) attr(v Value, name string, m *methods) Value {
	b := m.of(v)
	switch v.kind {
	case kindUndefined:
		r.defined(v)
	case kindLoop:
		if x, ok := r.loopAttr(v.ref.(*loop), name); ok {
			return x
		}
	case kindNamespace:
		if x, ok := v.Dict().Get(name); ok {
			if strings.HasPrefix(name, "_") {
				return Value{num: isAttribute | isUnsafe, str: name}
			}
			return x
		}
	case kindTuple:
		if i := slices.Index([]string{"grouper", "list"}, name); i >= 0 && v.str == groupTuple {
			return v.Items()[i]
		}
	case kindRange:
		if i := slices.Index([]string{"start", "stop", "step"}, name); i >= 0 {
			return Int(int64(rangeParts(v)[i]))
		}
	case kindFunc:
		f := v.ref.(*function)
		if f.attribute != nil {
			if x, ok := f.attribute(r, name); ok {
				return x
			}
		}
		if x, ok := f.macro.attribute(name); ok {
			return x
		}
		switch isDict := f.class == "dict"; {
		case isDict && name == "fromkeys":
			b = m.ofDict
		case isDict, slices.Contains(f.unsupported, name): // each dict.x is a type: dict['x']
			raise(Unsupported, "the attribute '%s' of the class %s", name, f.class)
		}
	case kindView:
		if name == "mapping" || name == "isdisjoint" && v.str != "dict_values" {
			raise(Unsupported, "the attribute '%s' of %s", name, v.str)
		}
	case kindInt, kindBool, kindBig, kindFloat:
		if x, ok := r.numberAttr(v, name); ok {
			return x
		}
	}
	switch b {
	case nil:
	case forbidden:
		return Value{num: isAttribute | isUnsafe, str: name}
	default:
		return r.newFunc(name, func(r *renderer, a args) Value { return r.invoke(b, v, a) })
	}
	if v.kind == kindDict {
		if x, ok := v.Dict().Get(name); ok {
			return x
		}
	}
	return missing(name)
}

// numberAttr is an attribute or method of a number.
func (r *renderer) numberAttr(v Value, name string) (x Value, ok bool) {
	method := func(x Value) (Value, bool) {
		return r.newFunc(name, func(_ *renderer, a args) Value {
			if len(a.values) > 0 {
				raise(TypeError, "%s() takes no arguments", name)
			}
			return x
		}), true
	}
	isFloat := v.kind == kindFloat
	switch name {
	case "real":
		return r.sign("+", v), true
	case "imag":
		return r.arithmetic("*", v, Int(0)), true
	case "conjugate":
		return method(r.sign("+", v))
	case "is_integer":
		if !isFloat {
			raise(Unsupported, "int.is_integer, which only some versions of Python have")
		}
		f := v.float()
		return method(Bool(f == math.Trunc(f) && !math.IsInf(f, 0)))
	case "as_integer_ratio":
		raise(Unsupported, "the method '%s' of a %s", name, v.typeName())
	case "hex", "fromhex":
		if isFloat {
			raise(Unsupported, "the method '%s' of a float", name)
		}
	case "to_bytes", "from_bytes":
		if !isFloat {
			raise(Unsupported, "the method '%s' of an int", name)
		}
	}
	if isFloat {
		return Value{}, false
	}
	switch name {
	case "numerator":
		return r.sign("+", v), true
	case "denominator":
		return Int(1), true
	case "bit_length":
		return method(Int(int64(r.bigOf(v).BitLen())))
	case "bit_count":
		n := 0
		for _, word := range r.bigOf(v).Bits() {
			n += bits.OnesCount(uint(word))
		}
		return method(Int(int64(n)))
	}
	return Value{}, false
}

// item is v[k]: an item, else an attribute.
func (r *renderer) item(v, k Value) Value {
	switch v.kind {
	case kindUndefined:
		r.defined(v)
	case kindDict:
		if k.kind != kindList && k.kind != kindDict {
			if x, ok := r.lookup(v.Dict(), k); ok {
				return x
			}
		}
	case kindList, kindTuple, kindRange:
		if i, ok := place(k, len(v.Items())); ok {
			return v.Items()[i]
		}
	case kindString, kindSafe:
		if k.isInt() {
			r.scanned(len(v.str))
			if i, ok := place(k, utf8.RuneCountInString(v.str)); ok {
				from := runeOffset(v.str, int64(i))
				_, n := utf8.DecodeRuneInString(v.str[from:])
				return v.withText(v.str[from : from+n])
			}
		}
	}
	if k.isString() {
		r.tick(len(k.str) / stringStep)
		return r.attr(v, k.str, r.library.named(k.str))
	}
	return undefined(v.typeName() + " object has no element " + r.repr(k))
}

// place returns the index that k stands for in a sequence of n items; a negative k counts from the end.
func place(k Value, n int) (int, bool) {
	if !k.isInt() {
		return 0, false
	}
	i := k.int()
	if i < 0 {
		i += int64(n)
	}
	return int(i), i >= 0 && i < int64(n)
}

// slice is v[start:stop:step]. An absent part stands for None.
func (r *renderer) slice(v, start, stop, step Value) Value {
	r.defined(v, start, stop, step)
	for _, part := range []*Value{&start, &stop, &step} {
		if part.kind == kindBig {
			*part = Int(int64(r.bigOf(*part).Sign()) << 40) // beyond any end
		}
		if !part.isInt() && !part.IsNone() {
			raise(TypeError, "slice indices must be integers or None")
		}
	}
	by := int64(1)
	if !step.IsNone() {
		by = step.int()
	}
	switch {
	case by == 0:
		raise(ValueError, "slice step cannot be zero")
	case v.isString() && by == 1:
		r.scanned(4 * len(v.str))
		return v.withText(substring(v.str, start, stop))
	case v.kind == kindDict:
		raise(TypeError, "unhashable type: 'slice'")
	case !v.isString() && !v.isSequence() && v.kind != kindRange:
		raise(TypeError, "'%s' object is not subscriptable", v.typeName())
	}
	items := r.iterate(v)
	n := int64(len(items))
	lo, hi := int64(0), n // the first one, and the one before which to stop
	if by < 0 {
		lo, hi = n-1, -1
	}
	bound := func(part Value, byDefault int64) int64 {
		if part.IsNone() {
			return byDefault
		}
		i := part.int()
		if i < 0 {
			i += n
		}
		if by < 0 {
			return min(max(i, -1), n-1)
		}
		return min(max(i, 0), n)
	}
	lo, hi = bound(start, lo), bound(stop, hi)
	if v.kind == kindRange {
		parts := rangeParts(v)
		return rangeOf(r, Value{}, args{values: []Value{
			Int(int64(parts[0]) + lo*int64(parts[2])), Int(int64(parts[0]) + hi*int64(parts[2])), Int(int64(parts[2]) * by),
		}})
	}
	if by == 1 && v.kind == kindList {
		return List(items[lo:max(lo, hi):max(lo, hi)]...)
	}
	r.listed(len(items))
	out := make([]Value, 0, max(0, (hi-lo)/by))
	for i := lo; by > 0 && i < hi || by < 0 && i > hi; i += by {
		out = append(out, items[i])
		if by > n || by < -n {
			break
		}
	}
	if !v.isString() {
		return sequence(v.kind, out)
	}
	var s strings.Builder
	for _, it := range out {
		s.WriteString(it.str)
	}
	return v.withText(s.String())
}

// substring is s[start:stop], in characters.
func substring(s string, start, stop Value) string {
	from, to := 0, len(s)
	if !start.IsNone() {
		from = runeOffset(s, start.int())
	}
	if !stop.IsNone() {
		to = runeOffset(s, stop.int())
	}
	return s[from:max(from, to)]
}

// runeOffset returns the byte at which character i begins; a negative i counts from
// the end. Characters that do not exist are at the nearer end.
func runeOffset(s string, i int64) int {
	if i >= 0 {
		for at := range s {
			if i == 0 {
				return at
			}
			i--
		}
		return len(s)
	}
	at := len(s)
	for ; i < 0 && at > 0; i++ {
		_, n := utf8.DecodeLastRuneInString(s[:at])
		at -= n
	}
	return at
}

// iterate returns the items that Python gets of a value. They must not be changed.
func (r *renderer) iterate(v Value) []Value {
	switch v.kind {
	case kindUndefined:
		return nil
	case kindList, kindTuple, kindView, kindRange:
		return v.Items()
	case kindDict:
		return v.Dict().keys
	case kindGenerator:
		g := v.ref.(*generator)
		f := g.items
		if f == nil {
			return nil
		}
		g.items = nil
		return f()
	case kindString, kindSafe:
		n := utf8.RuneCountInString(v.str)
		r.listed(n)
		items := make([]Value, 0, n)
		for i, c := range v.str {
			items = append(items, String(v.str[i:i+utf8.RuneLen(c)])) // those of a safe string are not safe
		}
		return items
	}
	if v.kind == kindLoop {
		raise(Unsupported, "a loop over the variable 'loop'")
	}
	panic(errorf(TypeError, "'%s' object is not iterable", v.typeName()))
}

// loopAttr is an attribute of the variable "loop".
func (r *renderer) loopAttr(l *loop, name string) (Value, bool) {
	n := len(l.items)
	number := func(i int) (Value, bool) { return Int(int64(i)), true }
	switch name {
	case "index":
		return number(l.at + 1)
	case "index0":
		return number(l.at)
	case "revindex":
		return number(n - l.at)
	case "revindex0":
		return number(n - l.at - 1)
	case "length":
		return number(n)
	case "first":
		return Bool(l.at == 0), true
	case "last":
		return Bool(l.at == n-1), true
	case "previtem":
		if l.at > 0 {
			return l.items[l.at-1], true
		}
		return undefined("there is no previous item"), true
	case "nextitem":
		if l.at < n-1 {
			return l.items[l.at+1], true
		}
		return undefined("there is no next item"), true
	case "depth":
		return number(l.depth + 1)
	case "depth0":
		return number(l.depth)
	case "cycle":
		return r.newFunc("cycle", func(_ *renderer, a args) Value {
			if len(a.positional()) == 0 {
				raise(TypeError, "no items for cycling given")
			}
			return a.values[l.at%len(a.positional())]
		}), true
	case "changed":
		return r.newFunc("changed", func(r *renderer, a args) Value {
			v := tuple(a.kept().values...)
			r.listed(len(a.values))
			changed := l.last == nil || !r.equal(*l.last, v)
			l.last = &v
			return Bool(changed)
		}), true
	}
	return Value{}, false
}

// isSpace reports whether Python counts c as white space.
func isSpace(c rune) bool { return unicode.IsSpace(c) || c >= 0x1c && c <= 0x1f }
