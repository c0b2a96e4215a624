// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"cmp"
	"math"
	"math/big"
	"slices"
	"strings"
)

// compareBy is the result of a comparison operator.
func (r *renderer) compareBy(op string, a, b Value) bool {
	switch op {
	case "==":
		return r.equal(a, b)
	case "!=":
		return !r.equal(a, b)
	case "in":
		return r.contains(b, a)
	case "not in":
		return !r.contains(b, a)
	}
	if isNaN(a) || isNaN(b) {
		return false
	}
	c := r.compare(a, b)
	switch op {
	case "<":
		return c < 0
	case "<=":
		return c <= 0
	case ">":
		return c > 0
	}
	return c >= 0
}

func isNaN(v Value) bool { return v.kind == kindFloat && math.IsNaN(v.float()) }

// equal is Python's ==.
func (r *renderer) equal(a, b Value) bool {
	switch {
	case a.kind == kindBig && b.kind != kindFloat || b.kind == kindBig && a.kind != kindFloat:
		return a.kind == b.kind && a.str == b.str
	case a.isNumber() && b.isNumber():
		return !isNaN(a) && !isNaN(b) && compareNumbers(a, b) == 0
	case a.isString() && b.isString():
		r.tick(min(len(a.str), len(b.str)) / scanStep)
		return a.str == b.str
	case a.kind != b.kind:
		return false
	}
	switch a.kind {
	case kindUndefined, kindNone:
		return true
	case kindList, kindTuple, kindRange:
		x, y := r.iterate(a), r.iterate(b)
		r.enter()
		defer r.leave()
		return slices.EqualFunc(x, y, func(v, w Value) bool {
			r.tick(1)
			return r.equal(v, w)
		})
	case kindView:
		if a.str == "dict_values" || a.str != b.str || len(a.Items()) != len(b.Items()) {
			return a.ref == b.ref
		}
		return !slices.ContainsFunc(a.Items(), func(v Value) bool { return !r.contains(b, v) })
	case kindDict:
		x, y := a.Dict(), b.Dict()
		r.enter()
		defer r.leave()
		for i, k := range x.keys {
			r.tick(1)
			if v, ok := r.lookup(y, k); !ok || !r.equal(x.values[i], v) {
				return false
			}
		}
		return x.Len() == y.Len()
	}
	return a.ref == b.ref
}

// compareNumbers compares two numbers, neither of them NaN, by their exact values.
func compareNumbers(a, b Value) int {
	if a.isInt() && b.isInt() {
		return cmp.Compare(a.int(), b.int())
	}
	exact := func(v Value) *big.Float {
		switch v.kind {
		case kindBig:
			n, _ := new(big.Int).SetString(v.str, 10)
			return new(big.Float).SetInt(n)
		case kindFloat:
			return new(big.Float).SetFloat64(v.float())
		}
		return new(big.Float).SetInt64(v.int())
	}
	return exact(a).Cmp(exact(b))
}

// compare is Python's order of two numbers, strings, lists or tuples.
func (r *renderer) compare(a, b Value) int {
	r.tick(1)
	switch {
	case a.isNumber() && b.isNumber():
		return compareNumbers(a, b)
	case a.isString() && b.isString():
		r.tick(min(len(a.str), len(b.str)) / scanStep)
		return strings.Compare(a.str, b.str) // the order of UTF-8 is that of code points
	case a.isSequence() && a.kind == b.kind:
		r.enter()
		defer r.leave()
		x, y := a.Items(), b.Items()
		for i := range min(len(x), len(y)) {
			if !r.equal(x[i], y[i]) {
				return r.compare(x[i], y[i])
			}
		}
		return len(x) - len(y)
	}
	r.defined(a, b)
	panic(errorf(TypeError, "'<' not supported between instances of '%s' and '%s'", a.typeName(), b.typeName()))
}

// contains is Python's "v in of".
func (r *renderer) contains(of, v Value) bool {
	switch of.kind {
	case kindString, kindSafe:
		r.defined(v)
		if !v.isString() {
			raise(TypeError, "'in <string>' requires string as left operand, not %s", v.typeName())
		}
		r.scanned(len(of.str))
		return strings.Contains(of.str, v.str)
	case kindDict:
		_, ok := r.lookup(of.Dict(), v)
		return ok
	case kindUndefined, kindList, kindTuple, kindView, kindRange, kindGenerator:
		if of.kind == kindView && of.str == "dict_keys" {
			r.hashable(v)
		}
		return slices.ContainsFunc(r.iterate(of), func(it Value) bool {
			r.tick(1)
			return r.equal(it, v)
		})
	}
	panic(errorf(TypeError, "argument of type '%s' is not iterable", of.typeName()))
}

// hashable panics unless v can be the key of a dictionary.
func (r *renderer) hashable(v Value) {
	switch v.kind {
	case kindView:
		if v.str != "dict_values" {
			raise(TypeError, "unhashable type: '%s'", v.typeName())
		}
	case kindList, kindDict:
		raise(TypeError, "unhashable type: '%s'", v.typeName())
	case kindTuple:
		r.enter()
		defer r.leave()
		for _, it := range v.Items() {
			r.tick(1)
			r.hashable(it)
		}
	}
}

// lookup returns the value of a key.
func (r *renderer) lookup(d *Dict, key Value) (Value, bool) {
	r.hashable(key)
	if i := r.findKey(d, key); i >= 0 {
		return d.values[i], true
	}
	return Value{}, false
}

// findKey returns the place of a key that may be other than a string, -1 if it is absent.
func (r *renderer) findKey(d *Dict, key Value) int {
	if key.isString() {
		return d.find(key.str)
	}
	return slices.IndexFunc(d.keys, func(k Value) bool {
		r.tick(1)
		return r.equal(k, key)
	})
}

// setKey sets the value of a key that may be other than a string.
func (r *renderer) setKey(d *Dict, key, v Value) {
	r.hashable(key)
	if i := r.findKey(d, key); i >= 0 {
		d.values[i] = v
	} else {
		d.add(key, v)
	}
}
