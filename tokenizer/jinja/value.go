// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"iter"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

type kind uint8

const (
	kindUndefined kind = iota
	kindNone
	kindBool
	kindInt
	kindBig // an integer of more than 64 bits; it can only be printed, and compared with another one
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
	kindView      // the result of a dictionary's keys, values or items
	kindGenerator // gives its items once
	kindUnset     // no value: a variable or an argument that is not set
)

// Value is a Python value. The zero Value is undefined.
type Value struct {
	kind kind
	num  uint64 // bool, int, float; undefined: the flags in access.go
	str  string // strings; big: the digits; undefined: what is undefined; range: its repr; view and generator: the type
	ref  any    // *list, *Dict, *function, *loop or *generator
}

// list holds the items of a list, tuple, range or view. The items never change. Lists
// made by addition share memory: grown is the length of the longest of them, and only
// the list of that length may be appended to in place.
type list struct {
	items []Value
	grown *int // nil: the memory must not be written to
}

// Dict is a dictionary that keeps the order of its keys.
type Dict struct {
	keys   []Value
	values []Value
	index  map[string]int // place of each string key, from indexFrom keys on
}

// indexFrom is the number of keys from which a map finds them.
const indexFrom = 12

// function is a value that a template can call.
type function struct {
	name  string
	call  func(r *renderer, a args) Value
	macro *macro // set for macros
	class string // the text of a class; "" for other functions
	// unsupported are the attributes of a class that this package does not have.
	unsupported []string
	// attribute returns an attribute of an object with methods, such as a cycler; nil for a function.
	attribute func(r *renderer, name string) (Value, bool)
}

// generator makes its items when they are first used.
type generator struct {
	items func() []Value // nil: used up
}

// loop is the variable "loop" inside a loop.
type loop struct {
	items []Value
	at    int
	depth int                              // calls of a recursive loop around it
	again func(r *renderer, v Value) Value // of a recursive loop
	last  *Value                           // that loop.changed got last
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

// List returns a list that keeps items.
func List(items ...Value) Value { return sequence(kindList, items) }

// Object returns a dictionary of pairs: a name, its value, a name, its value, … A value may be a Go string.
func Object(pairs ...any) Value {
	d := NewDict(len(pairs) / 2)
	for i := 0; i < len(pairs); i += 2 {
		v, ok := pairs[i+1].(Value)
		if !ok {
			v = String(pairs[i+1].(string))
		}
		d.Set(pairs[i].(string), v)
	}
	return FromDict(d)
}

// FromDict returns d as a value.
func FromDict(d *Dict) Value { return Value{kind: kindDict, ref: d} }

func tuple(items ...Value) Value { return sequence(kindTuple, items) }

func sequence(k kind, items []Value) Value { return Value{kind: k, ref: &list{items: items}} }

// integer returns the integer with the given decimal digits.
func integer(digits string) Value {
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil {
		return Value{kind: kindBig, str: digits}
	}
	return Int(n)
}

// undefined returns an undefined value. message is that of the error of using it.
func undefined(message string) Value { return Value{str: message} }

// IsNone reports whether v stands for None.
func (v Value) IsNone() bool { return v.kind == kindNone }

// IsUndefined reports whether v is undefined.
func (v Value) IsUndefined() bool { return v.kind == kindUndefined }

// IsBool reports whether v is a truth value.
func (v Value) IsBool() bool { return v.kind == kindBool }

// IsList reports whether v is a list, even an empty one.
func (v Value) IsList() bool { return v.kind == kindList }

// Dict returns the dictionary that v is, nil if v is not a dictionary.
func (v Value) Dict() *Dict {
	if v.kind != kindDict && v.kind != kindNamespace {
		return nil
	}
	return v.ref.(*Dict)
}

// Items returns the items of a list, tuple, range or view, nil for other values. The caller must
// not change them.
func (v Value) Items() []Value {
	if l, ok := v.ref.(*list); ok {
		return l.items
	}
	return nil
}

// Text returns the string that v is.
func (v Value) Text() (s string, ok bool) { return v.str, v.isString() }

// Get returns the value of a key of the dictionary v; undefined if v is not a
// dictionary or does not have the key.
func (v Value) Get(key string) Value {
	d := v.Dict()
	if d == nil {
		return Value{}
	}
	x, _ := d.Get(key)
	return x
}

// Bytes returns about how much memory a value that was read from JSON takes, without its texts.
func (v Value) Bytes() int {
	n := valueSize
	for _, item := range v.Items() {
		n += boxSize + item.Bytes()
	}
	if d := v.Dict(); d != nil {
		n += 2 * boxSize
		for _, value := range d.values {
			n += 2*valueSize + value.Bytes() // with the key and its place in the index
		}
	}
	return n
}

func (v Value) int() int64       { return int64(v.num) }
func (v Value) float() float64   { return math.Float64frombits(v.num) }
func (v Value) isString() bool   { return v.kind == kindString || v.kind == kindSafe }
func (v Value) isSequence() bool { return v.kind == kindList || v.kind == kindTuple }
func (v Value) isInt() bool      { return v.kind == kindInt || v.kind == kindBool }
func (v Value) isNumber() bool   { return v.isInt() || v.kind == kindFloat || v.kind == kindBig }

// withText returns a string of the same kind as v.
func (v Value) withText(s string) Value { return Value{kind: v.kind, str: s} }

// Truth reports whether Python counts v as true.
func (v Value) Truth() bool {
	switch v.kind {
	case kindUndefined, kindNone, kindUnset:
		return false
	case kindBool, kindInt:
		return v.num != 0
	case kindFloat:
		return v.float() != 0
	case kindString, kindSafe:
		return v.str != ""
	case kindList, kindTuple, kindView, kindRange:
		return len(v.Items()) > 0
	case kindDict:
		return v.Dict().Len() > 0
	}
	return true
}

// typeName is the name of Python's type.
func (v Value) typeName() string {
	switch v.kind {
	case kindView, kindGenerator:
		return v.str
	case kindFunc:
		if v.ref != nil && v.ref.(*function).macro != nil {
			return "Macro"
		}
	}
	return [...]string{
		"Undefined", "NoneType", "bool", "int", "int", "float", "str", "Markup", "list", "tuple", "dict", "Namespace",
		"function", "LoopContext", "range", kindUnset: "",
	}[v.kind]
}

// NewDict returns an empty dictionary with room for n keys.
func NewDict(n int) *Dict {
	both := make([]Value, 2*n)
	return &Dict{keys: both[:0:n], values: both[n:n]}
}

// Len returns the number of keys.
func (d *Dict) Len() int { return len(d.keys) }

// Clone returns a dictionary with the same keys and values.
func (d *Dict) Clone() *Dict {
	return &Dict{keys: slices.Clone(d.keys), values: slices.Clone(d.values), index: maps.Clone(d.index)}
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

// Get returns the value of a string key.
func (d *Dict) Get(key string) (Value, bool) {
	if i := d.find(key); i >= 0 {
		return d.values[i], true
	}
	return Value{}, false
}

// find returns the place of a string key, -1 if it is absent.
func (d *Dict) find(key string) int {
	if d.index != nil {
		if i, ok := d.index[key]; ok {
			return i
		}
		return -1
	}
	for i := range d.keys {
		if k := &d.keys[i]; k.str == key && k.isString() {
			return i
		}
	}
	return -1
}

// Set sets the value of a string key. An existing key keeps its place.
func (d *Dict) Set(key string, v Value) {
	if i := d.find(key); i >= 0 {
		d.values[i] = v
		return
	}
	d.add(String(key), v)
}

// add appends a key that the dictionary does not have.
func (d *Dict) add(key, v Value) {
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

// escaper replaces the characters that HTML gives a meaning, as markupsafe does.
//
//nolint:gochecknoglobals // a table
var escaper = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", "'", "&#39;", `"`, "&#34;")

// SetDefault sets the value of a string key that the dictionary does not have.
func (d *Dict) SetDefault(key string, v Value) {
	if d.find(key) < 0 {
		d.add(String(key), v)
	}
}
