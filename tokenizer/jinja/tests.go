// SPDX-License-Identifier: Apache-2.0

package jinja

import "strings"

// tests are the tests of Jinja2.
func tests() map[string]*builtin {
	all := map[string]*builtin{}
	add := func(name, parameters string, is func(r *renderer, v Value, a args) bool) {
		all[name] = define(parameters, func(r *renderer, v Value, a args) Value { return Bool(is(r, v, a)) })
	}
	for name, is := range map[string]func(Value) bool{
		"defined":   func(v Value) bool { return v.kind != kindUndefined },
		"undefined": Value.IsUndefined, "none": Value.IsNone, "string": Value.isString, "number": Value.isNumber,
		"integer":  func(v Value) bool { return v.kind == kindInt || v.kind == kindBig },
		"float":    func(v Value) bool { return v.kind == kindFloat },
		"boolean":  func(v Value) bool { return v.kind == kindBool },
		"true":     func(v Value) bool { return v.kind == kindBool && v.num == 1 },
		"false":    func(v Value) bool { return v.kind == kindBool && v.num == 0 },
		"mapping":  func(v Value) bool { return v.kind == kindDict },
		"escaped":  func(v Value) bool { return v.kind == kindSafe },
		"callable": func(v Value) bool { return v.kind == kindFunc || v.kind == kindUndefined || v.kind == kindLoop },
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
			add(name, "b!", func(r *renderer, v Value, a args) bool { return r.compareBy(op, v, a.values[0]) })
		}
	}
	all["in"].parameters[0] = "seq"
	divisible := func(r *renderer, v, by Value) bool { return r.equal(r.arithmetic("%", v, by), Int(0)) }
	add("divisibleby", "num!", func(r *renderer, v Value, a args) bool { return divisible(r, v, a.values[0]) })
	add("even", "", func(r *renderer, v Value, _ args) bool { return divisible(r, v, Int(2)) })
	add("odd", "", func(r *renderer, v Value, _ args) bool { return r.equal(r.arithmetic("%", v, Int(2)), Int(1)) })
	all["lower"], all["upper"] = unsupported("the test", "lower"), unsupported("the test", "upper")
	add("sameas", "other!", func(_ *renderer, v Value, a args) bool { return v == a.values[0] })
	add("filter", "", func(r *renderer, v Value, _ args) bool { return r.t.library.filters[v.str] != nil && v.isString() })
	add("test", "", func(r *renderer, v Value, _ args) bool { return r.t.library.tests[v.str] != nil && v.isString() })
	return all
}

func isSequence(v Value) bool {
	return v.isString() || v.isSequence() || v.kind == kindDict || v.kind == kindUndefined || v.kind == kindRange
}
