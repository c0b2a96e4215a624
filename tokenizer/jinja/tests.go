// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"slices"
	"strings"
)

// tests are the tests of Jinja2.
func tests() map[string]*builtin {
	all := map[string]*builtin{}
	add := func(name, parameters string, is func(r *renderer, v Value, a args) bool) {
		all[name] = define(parameters, func(r *renderer, v Value, a args) Value { return Bool(is(r, v, a)) })
	}
	for name, is := range map[string]func(Value) bool{
		"defined":   func(v Value) bool { return v.kind != kindUndefined },
		"undefined": Value.IsUndefined, "none": Value.IsNone, "string": Value.isString, "number": Value.isNumber,
		"integer": isOf(kindInt, kindBig), "float": isOf(kindFloat), "boolean": Value.IsBool,
		"true":    func(v Value) bool { return v == Bool(true) },
		"false":   func(v Value) bool { return v == Bool(false) },
		"mapping": isOf(kindDict), "escaped": isOf(kindSafe), "callable": isOf(kindFunc, kindUndefined, kindLoop),
		"sequence": isSequence,
		"iterable": func(v Value) bool {
			return isSequence(v) || v.kind == kindLoop || v.kind == kindView || v.kind == kindGenerator
		},
	} {
		add(name, "", func(_ *renderer, v Value, _ args) bool { return is(v) })
	}
	for op, names := range map[string]string{
		"==": "== eq equalto", "!=": "!= ne", "<": "< lt lessthan", "<=": "<= le", ">": "> gt greaterthan",
		">=": ">= ge", "in": "in",
	} {
		for name := range strings.FieldsSeq(names) {
			add(name, "_!", func(r *renderer, v Value, a args) bool { return r.compareBy(op, v, a.values[0]) })
		}
	}
	all["in"].parameters[0] = "seq"
	divisible := func(r *renderer, v, by Value) bool { return r.equal(r.arithmetic("%", v, by), Int(0)) }
	add("divisibleby", "num!", func(r *renderer, v Value, a args) bool { return divisible(r, v, a.values[0]) })
	add("even", "", func(r *renderer, v Value, _ args) bool { return divisible(r, v, Int(2)) })
	add("odd", "", func(r *renderer, v Value, _ args) bool { return r.equal(r.arithmetic("%", v, Int(2)), Int(1)) })
	add("lower", "", func(r *renderer, v Value, _ args) bool { return isLower(r.text(v)) })
	add("upper", "", func(r *renderer, v Value, _ args) bool { return isUpper(r.text(v)) })
	add("sameas", "other!", func(_ *renderer, v Value, a args) bool { return v == a.values[0] })
	named := func(what string, of func(*library) map[string]*builtin) {
		add(what, "", func(r *renderer, v Value, _ args) bool {
			r.hashable(v)
			return v.isString() && of(r.library)[v.str] != nil
		})
	}
	named("filter", func(l *library) map[string]*builtin { return l.filters })
	named("test", func(l *library) map[string]*builtin { return l.tests })
	return all
}

// isOf returns a test for some kinds of values.
func isOf(kinds ...kind) func(Value) bool {
	return func(v Value) bool { return slices.Contains(kinds, v.kind) }
}

func isSequence(v Value) bool {
	return v.isString() || v.isSequence() || v.kind == kindDict || v.kind == kindUndefined || v.kind == kindRange
}
