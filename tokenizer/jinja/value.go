// SPDX-License-Identifier: Apache-2.0

// Package jinja renders chat templates as Jinja2 renders them for the engines.
//
// It is the part of Jinja2 that chat templates use, with Python's values: what
// prints, compares, adds and fails here does so there. A template cannot reach
// anything but its variables, and steps, depth and output are bounded.
//
// The environment is that of the reference: an immutable sandbox, blocks trimmed,
// loop controls, the block "generation" as if it were not there. Templates cannot
// include or extend others.
//
// The package is pure. A [Template] and the values given to it are only read, so
// any number of goroutines may render it at once.
package jinja

import (
	"cmp"
	"iter"
	"maps"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

type kind uint8

const (
	kindUndefined kind = iota
	kindNone
	kindBool
	kindInt
	kindBig // of more than 64 bits
	kindFloat
	kindString
	kindSafe // a string that escapes what is added to it
	kindList
	kindTuple
	kindDict
	kindNamespace
	kindFunc
	kindLoop
	kindRange
	kindView      // what the methods of a dictionary give; str is its type
	kindGenerator // what gives its items once
	kindUnset     // no value: a variable that is not set
)

// Value is a Python value. The zero Value is undefined.
type Value struct {
	kind kind
	num  uint64 // of bool, int and float; of an undefined value, why it is
	str  string // of strings; of an undefined value, what is undefined
	ref  any    // *big.Int, *list, *Dict, *function, *loop, *span or *generator
}

// list is what a list or tuple has. Nothing changes items; but lists that a
// rendering made by adding to others share memory: grown is how much of it is in use
// by the longest of them, which may be added to in place.
type list struct {
	items []Value
	grown *int // nil: the memory is not to be written to
}

// Dict is a dictionary that keeps the order of its keys.
type Dict struct {
	keys   []Value
	values []Value
	index  map[string]int // of string keys, once there are many
}

// function is something that a template can call.
type function struct {
	name  string
	call  func(r *renderer, a *args) (Value, error)
	attr  func(r *renderer, name string) (Value, bool) // nil: it has none
	macro *macro                                       // that it is
}

// None returns Python's None.
func None() Value { return Value{kind: kindNone} }

// Bool returns a truth value.
func Bool(b bool) Value {
	if b {
		return Value{kind: kindBool, num: 1}
	}
	return Value{kind: kindBool}
}

// Int returns an integer.
func Int(n int64) Value { return Value{kind: kindInt, num: uint64(n)} }

// Float returns a floating point number.
func Float(f float64) Value { return Value{kind: kindFloat, num: math.Float64bits(f)} }

// String returns a string. It should be valid UTF-8.
func String(s string) Value { return Value{kind: kindString, str: s} }

// List returns a list of items, which is kept.
func List(items ...Value) Value { return Value{kind: kindList, ref: &list{items: items}} }

func tupleOf(items ...Value) Value { return Value{kind: kindTuple, ref: &list{items: items}} }

// FromDict returns d as a value.
func FromDict(d *Dict) Value { return Value{kind: kindDict, ref: d} }

func undefined(hint string) Value { return Value{str: hint} }

func funcOf(name string, f func(r *renderer, a *args) (Value, error)) Value {
	return Value{kind: kindFunc, ref: &function{name: name, call: f}}
}

// funcOf is the function for what a rendering makes.
func (r *renderer) funcOf(name string, f func(r *renderer, a *args) (Value, error)) Value {
	r.hold(2 * boxSize)
	return funcOf(name, f)
}

// IsNone reports whether v is None.
func (v Value) IsNone() bool { return v.kind == kindNone }

// IsUndefined reports whether v is undefined.
func (v Value) IsUndefined() bool { return v.kind == kindUndefined }

// Dict returns the dictionary that v is, nil if it is none.
func (v Value) Dict() *Dict {
	if v.kind != kindDict && v.kind != kindNamespace {
		return nil
	}
	return v.ref.(*Dict)
}

// Items returns the items of the list or tuple that v is, nil if it is none.
// They must not be changed.
func (v Value) Items() []Value {
	if v.kind != kindList && v.kind != kindTuple && v.kind != kindView {
		return nil
	}
	return v.ref.(*list).items
}

// Text returns the string that v is.
func (v Value) Text() (s string, ok bool) { return v.str, v.isString() }

// Truth reports whether Python counts v as true.
func (v Value) Truth() bool { return v.truth() }

func (v Value) int() int64       { return int64(v.num) }
func (v Value) float() float64   { return math.Float64frombits(v.num) }
func (v Value) big() *big.Int    { return v.ref.(*big.Int) }
func (v Value) isString() bool   { return v.kind == kindString || v.kind == kindSafe }
func (v Value) isSequence() bool { return v.kind == kindList || v.kind == kindTuple }
func (v Value) isInt() bool      { return v.kind == kindInt || v.kind == kindBool }
func (v Value) isNumber() bool   { return v.isInt() || v.kind == kindFloat || v.kind == kindBig }

// number returns a number as a float.
func (v Value) number() float64 {
	switch v.kind {
	case kindFloat:
		return v.float()
	case kindBig:
		f, _ := new(big.Float).SetInt(v.big()).Float64()
		return f
	}
	return float64(v.int())
}

func (v Value) toBig() *big.Int {
	if v.kind == kindBig {
		return v.big()
	}
	return big.NewInt(v.int())
}

func bigInt(n *big.Int) Value {
	if n.IsInt64() {
		return Int(n.Int64())
	}
	return Value{kind: kindBig, ref: n}
}

func (v Value) truth() bool {
	switch v.kind {
	case kindUndefined, kindNone:
		return false
	case kindBool, kindInt:
		return v.num != 0
	case kindFloat:
		return v.float() != 0
	case kindString, kindSafe:
		return v.str != ""
	case kindList, kindTuple, kindView:
		return len(v.ref.(*list).items) > 0
	case kindDict:
		return v.ref.(*Dict).Len() > 0
	case kindRange:
		return v.ref.(*span).count > 0
	case kindBig:
		return v.big().Sign() != 0
	}
	return true
}

// typeName is the name of Python's type.
func (v Value) typeName() string {
	switch v.kind {
	case kindUndefined:
		return "Undefined"
	case kindNone:
		return "NoneType"
	case kindBool:
		return "bool"
	case kindInt, kindBig:
		return "int"
	case kindFloat:
		return "float"
	case kindString:
		return "str"
	case kindSafe:
		return "Markup"
	case kindList:
		return "list"
	case kindTuple:
		return "tuple"
	case kindDict:
		return "dict"
	case kindNamespace:
		return "Namespace"
	case kindLoop:
		return "LoopContext"
	case kindRange:
		return "range"
	case kindView:
		return v.str
	case kindGenerator:
		if g, ok := v.ref.(*generator); ok {
			return g.name
		}
		return "generator"
	case kindFunc:
		if f, ok := v.ref.(*function); ok && f.macro != nil {
			return "Macro"
		}
	}
	return "function"
}

// appendStr appends what Python's str gives.
func (r *renderer) appendStr(dst []byte, v Value) []byte {
	switch v.kind {
	case kindUndefined:
		return dst
	case kindString, kindSafe:
		r.spend(len(v.str) / stringStep)
		return append(dst, v.str...)
	}
	return r.appendRepr(dst, v)
}

func (r *renderer) text(v Value) string {
	if v.isString() {
		return v.str
	}
	return r.counted(r.appendStr(nil, v))
}

func (r *renderer) repr(v Value) string { return r.counted(r.appendRepr(nil, v)) }

// counted returns b as a string that counts.
func (r *renderer) counted(b []byte) string {
	r.hold(2 * len(b))
	return string(b)
}

// appendRepr appends what Python's repr gives. A value that is too deep or too
// long stops the rendering: dst is then cut short.
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
	case kindBig:
		r.spend(v.big().BitLen() / 16)
		return v.big().Append(dst, 10)
	case kindFloat:
		return appendFloat(dst, v.float())
	case kindString:
		r.spend(len(v.str) / stringStep)
		return appendQuoted(dst, v.str)
	case kindSafe:
		r.spend(len(v.str) / stringStep)
		return append(appendQuoted(append(dst, "Markup("...), v.str), ')')
	case kindList, kindTuple, kindView, kindDict, kindNamespace:
		if r.deep == 0 {
			r.longest = len(dst) + r.o.MaxOutput
		}
		if r.enter() {
			dst = r.appendReprs(dst, v)
		}
		r.leave()
		return dst
	case kindFunc:
		if f := v.ref.(*function); f.macro != nil {
			return append(appendQuoted(append(dst, "<Macro "...), f.name), '>')
		}
		switch name := v.ref.(*function).name; name {
		case "dict":
			return append(dst, "<class 'dict'>"...)
		case "Namespace", "Cycler", "Joiner":
			return append(append(append(dst, "<class 'jinja2.utils."...), name...), "'>"...)
		default:
			return append(append(append(dst, "<function "...), name...), '>')
		}
	case kindRange:
		s := v.ref.(*span)
		dst = strconv.AppendInt(append(dst, "range("...), s.start, 10)
		dst = strconv.AppendInt(append(dst, ", "...), s.stop, 10)
		if s.step != 1 {
			dst = strconv.AppendInt(append(dst, ", "...), s.step, 10)
		}
		return append(dst, ')')
	case kindGenerator:
		return append(append(append(dst, '<'), v.ref.(*generator).name...), " object>"...)
	case kindLoop:
		l := v.ref.(*loop)
		dst = strconv.AppendInt(append(dst, "<LoopContext "...), int64(l.at+1), 10)
		return append(strconv.AppendInt(append(dst, '/'), int64(l.count), 10), '>')
	}
	return dst
}

// appendReprs is appendRepr for what holds other values.
func (r *renderer) appendReprs(dst []byte, v Value) []byte {
	switch v.kind {
	case kindTuple:
		dst = r.appendItems(append(dst, '('), v.Items())
		if len(v.Items()) == 1 {
			dst = append(dst, ',')
		}
		return append(dst, ')')
	case kindDict:
		return r.appendDict(dst, v.ref.(*Dict))
	case kindNamespace:
		return append(r.appendDict(append(dst, "<Namespace "...), v.ref.(*Dict)), '>')
	}
	if v.kind == kindView {
		return append(r.appendItems(append(append(dst, v.str...), "(["...), v.Items()), "])"...)
	}
	return append(r.appendItems(append(dst, '['), v.Items()), ']')
}

func (r *renderer) appendItems(dst []byte, items []Value) []byte {
	for i, it := range items {
		if !r.fits(len(dst)) {
			return dst
		}
		if i > 0 {
			dst = append(dst, ", "...)
		}
		dst = r.appendRepr(dst, it)
	}
	return dst
}

// appendFloat appends Python's repr of a float: the shortest digits that read
// back, with an exponent below 1e-4 and from 1e16 on.
func appendFloat(dst []byte, f float64) []byte {
	switch {
	case math.IsNaN(f):
		return append(dst, "nan"...)
	case math.IsInf(f, 1):
		return append(dst, "inf"...)
	case math.IsInf(f, -1):
		return append(dst, "-inf"...)
	}
	if a := math.Abs(f); f != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.AppendFloat(dst, f, 'e', -1, 64)
	}
	start := len(dst)
	dst = strconv.AppendFloat(dst, f, 'f', -1, 64)
	if !strings.Contains(string(dst[start:]), ".") {
		dst = append(dst, ".0"...)
	}
	return dst
}

// appendQuoted appends Python's repr of a string.
func appendQuoted(dst []byte, s string) []byte {
	quote := byte('\'')
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		quote = '"'
	}
	dst = append(dst, quote)
	for _, r := range s {
		switch {
		case r == rune(quote) || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r == '\n':
			dst = append(dst, `\n`...)
		case r == '\r':
			dst = append(dst, `\r`...)
		case r == '\t':
			dst = append(dst, `\t`...)
		case r < ' ' || r == 0x7f || r >= 0x80 && !strconv.IsPrint(r):
			dst = appendEscape(dst, r)
		default:
			dst = utf8.AppendRune(dst, r)
		}
	}
	return append(dst, quote)
}

// Len returns the number of keys.
func (d *Dict) Len() int { return len(d.keys) }

// NewDict returns an empty dictionary with room for n keys.
func NewDict(n int) *Dict {
	both := make([]Value, 2*n)
	return &Dict{keys: both[:0:n], values: both[n:n]}
}

// Set sets the value of a string key. A key that is there keeps its place.
func (d *Dict) Set(key string, v Value) { d.set(nil, String(key), v) }

// Get returns the value of a string key.
func (d *Dict) Get(key string) (Value, bool) {
	if d.index != nil {
		i, ok := d.index[key]
		if !ok {
			return Value{}, false
		}
		return d.values[i], true
	}
	for i := range d.keys {
		if k := &d.keys[i]; k.str == key && k.isString() {
			return d.values[i], true
		}
	}
	return Value{}, false
}

// indexFrom is the number of keys from which a map finds them.
const indexFrom = 12

// find returns the place of a key, -1 if it is absent. Only keys that are no strings need r.
func (d *Dict) find(r *renderer, key Value) int {
	if key.isString() {
		if d.index != nil {
			if i, ok := d.index[key.str]; ok {
				return i
			}
			return -1
		}
		for i := range d.keys {
			if d.keys[i].isString() && d.keys[i].str == key.str {
				return i
			}
		}
		return -1
	}
	for i := range d.keys {
		if i%2 == 1 && !r.spend(1) {
			return -1
		}
		if r.equal(d.keys[i], key) {
			return i
		}
	}
	return -1
}

func (d *Dict) get(r *renderer, key Value) (Value, bool) {
	if i := d.find(r, key); i >= 0 {
		return d.values[i], true
	}
	return Value{}, false
}

func (d *Dict) set(r *renderer, key, v Value) {
	if i := d.find(r, key); i >= 0 {
		d.values[i] = v
		return
	}
	d.keys, d.values = append(d.keys, key), append(d.values, v)
	switch {
	case d.index != nil && key.isString():
		d.index[key.str] = len(d.keys) - 1
	case d.index == nil && len(d.keys) >= indexFrom:
		d.index = make(map[string]int, 2*len(d.keys))
		for i, k := range d.keys {
			if k.isString() {
				d.index[k.str] = i
			}
		}
	}
}

func (r *renderer) appendDict(dst []byte, d *Dict) []byte {
	dst = append(dst, '{')
	for i := range d.keys {
		if !r.fits(len(dst)) {
			return dst
		}
		if i > 0 {
			dst = append(dst, ", "...)
		}
		dst = append(r.appendRepr(dst, d.keys[i]), ": "...)
		dst = r.appendRepr(dst, d.values[i])
	}
	return append(dst, '}')
}

// equal is Python's ==. Values that are too deep stop the rendering.
func (r *renderer) equal(a, b Value) bool {
	switch {
	case a.isNumber() && b.isNumber():
		if a.isInt() && b.isInt() {
			return a.num == b.num
		}
		if a.kind == kindFloat || b.kind == kindFloat {
			return !a.isNaN() && !b.isNaN() && compareNumbers(a, b) == 0
		}
		return a.toBig().Cmp(b.toBig()) == 0
	case a.isString() && b.isString():
		if len(a.str) != len(b.str) {
			return false
		}
		r.spend(len(a.str) / scanStep)
		return a.str == b.str
	case a.kind != b.kind:
		return false
	}
	switch a.kind {
	case kindUndefined, kindNone:
		return true
	case kindView:
		if a.str != b.str || a.str == "dict_values" || len(a.Items()) != len(b.Items()) {
			return a.ref == b.ref
		}
		for _, it := range a.Items() {
			if ok, err := r.contains(b, it); !ok || err != nil {
				return false
			}
		}
		return true
	case kindRange:
		x, y := a.ref.(*span), b.ref.(*span)
		return x.count == y.count && (x.count == 0 || x.start == y.start && (x.count == 1 || x.step == y.step))
	case kindList, kindTuple:
		x, y := a.Items(), b.Items()
		if len(x) != len(y) {
			return false
		}
		defer r.leave()
		if !r.enter() {
			return false
		}
		for i := range x {
			if !r.spend(1) || !r.equal(x[i], y[i]) {
				return false
			}
		}
		return true
	case kindDict:
		x, y := a.ref.(*Dict), b.ref.(*Dict)
		if x.Len() != y.Len() {
			return false
		}
		defer r.leave()
		if !r.enter() {
			return false
		}
		for i, k := range x.keys {
			v, ok := y.get(r, k)
			if !r.spend(1) || !ok || !r.equal(x.values[i], v) {
				return false
			}
		}
		return true
	}
	return a.ref == b.ref
}

func (v Value) isNaN() bool { return v.kind == kindFloat && math.IsNaN(v.float()) }

// compareNumbers compares two numbers, none of them NaN, by their exact values.
func compareNumbers(a, b Value) int {
	const exact = 1 << 53
	small := func(v Value) bool { return v.kind == kindFloat || v.isInt() && v.int() > -exact && v.int() < exact }
	if small(a) && small(b) || a.kind == kindFloat && math.IsInf(a.float(), 0) || b.kind == kindFloat && math.IsInf(b.float(), 0) {
		return cmp.Compare(a.number(), b.number())
	}
	x, y := new(big.Float), new(big.Float)
	for _, to := range []struct {
		f *big.Float
		v Value
	}{{x, a}, {y, b}} {
		if to.v.kind == kindFloat {
			to.f.SetFloat64(to.v.float())
		} else {
			to.f.SetInt(to.v.toBig())
		}
	}
	return x.Cmp(y)
}

// compare is Python's order of a and b, which must be two numbers, strings or
// sequences.
func (r *renderer) compare(a, b Value) (int, error) {
	if err := r.tick(1); err != nil {
		return 0, err
	}
	switch {
	case a.isInt() && b.isInt():
		return cmp.Compare(a.int(), b.int()), nil
	case a.isNumber() && b.isNumber():
		return compareNumbers(a, b), nil
	case a.isString() && b.isString():
		r.spend(min(len(a.str), len(b.str)) / scanStep)
		return strings.Compare(a.str, b.str), nil // of UTF-8, the order of code points
	case a.isSequence() && a.kind == b.kind:
		defer r.leave()
		if !r.enter() {
			return 0, r.broken
		}
		x, y := a.Items(), b.Items()
		for i := range min(len(x), len(y)) {
			if !r.spend(1) {
				return 0, r.broken
			}
			if !r.equal(x[i], y[i]) {
				return r.compare(x[i], y[i])
			}
		}
		return len(x) - len(y), nil
	case a.kind == kindUndefined || b.kind == kindUndefined:
		return 0, errUndefined(a, b)
	}
	return 0, errorf(TypeError, "'<' not supported between instances of '%s' and '%s'", a.typeName(), b.typeName())
}

// All returns the string keys and their values, in order.
func (d *Dict) All() iter.Seq2[string, Value] {
	return func(yield func(string, Value) bool) {
		for i, k := range d.keys {
			if k.isString() && !yield(k.str, d.values[i]) {
				return
			}
		}
	}
}

// Clone returns a dictionary with the same keys and values.
func (d *Dict) Clone() *Dict {
	return &Dict{keys: slices.Clone(d.keys), values: slices.Clone(d.values), index: maps.Clone(d.index)}
}

// IsList reports whether v is a list, even an empty one.
func (v Value) IsList() bool { return v.kind == kindList }

// AppendJSON appends v as Python's json.dumps writes it, without \u escapes. It
// fails for values that are none of JSON's.
func AppendJSON(dst []byte, v Value) ([]byte, error) {
	r := &renderer{o: Options{MaxOutput: math.MaxInt - len(dst)}, left: math.MaxInt, room: math.MaxInt}
	return r.appendJSON(dst, v, &jsonOptions{comma: ", ", colon: ": "}, 0)
}
