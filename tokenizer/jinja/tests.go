// SPDX-License-Identifier: Apache-2.0

package jinja

import "sync"

// quickTests are those that ask of nothing but the value.
var quickTests = sync.OnceValue(func() map[string]func(Value) bool { //nolint:gochecknoglobals // a table
	return map[string]func(Value) bool{
		"defined": func(v Value) bool { return v.kind != kindUndefined }, "undefined": Value.IsUndefined,
		"none": Value.IsNone, "string": Value.isString, "number": Value.isNumber,
		"integer": func(v Value) bool { return v.kind == kindInt || v.kind == kindBig },
		"float":   func(v Value) bool { return v.kind == kindFloat },
		"boolean": func(v Value) bool { return v.kind == kindBool },
		"true":    func(v Value) bool { return v.kind == kindBool && v.num == 1 },
		"false":   func(v Value) bool { return v.kind == kindBool && v.num == 0 },
		"mapping": func(v Value) bool { return v.kind == kindDict },
		"sequence": func(v Value) bool {
			return v.isString() || v.isSequence() || v.kind == kindDict || v.kind == kindUndefined || v.kind == kindRange
		},
		"iterable": func(v Value) bool {
			switch v.kind {
			case kindLoop, kindDict, kindUndefined, kindRange, kindView, kindGenerator:
				return true
			}
			return v.isString() || v.isSequence()
		},
		"callable": func(v Value) bool { return v.kind == kindFunc || v.kind == kindUndefined || v.kind == kindLoop },
		"escaped":  func(v Value) bool { return v.kind == kindSafe },
	}
})

// testOf is a test and its arguments' names, as of filters.
type testOf struct {
	names string
	f     test
}

func tests() map[string]test {
	cased := func(is func(string) bool) testOf {
		return testOf{"", func(r *renderer, v Value, _ *args) (bool, error) {
			s := r.text(v)
			return is(s), r.tick(len(s) / 8)
		}}
	}
	parity := func(odd int64) testOf {
		return testOf{"", func(r *renderer, v Value, _ *args) (bool, error) {
			m, err := r.arithmetic("%", v, Int(2))
			return err == nil && r.equal(m, Int(odd)), err
		}}
	}
	table := map[string]testOf{
		"lower": cased(isLowerString), "upper": cased(isUpperString), "odd": parity(1), "even": parity(0),
		"divisibleby": {"num!", func(r *renderer, v Value, a *args) (bool, error) {
			x, _ := a.get(0, "num")
			m, err := r.arithmetic("%", v, x)
			return err == nil && r.equal(m, Int(0)), err
		}},
		"in": {"seq!", func(r *renderer, v Value, a *args) (bool, error) {
			x, _ := a.get(0, "seq")
			return r.contains(x, v)
		}},
		"sameas": {"other!", func(_ *renderer, v Value, a *args) (bool, error) {
			x, _ := a.get(0, "other")
			return v.kind == x.kind && v.num == x.num && v.str == x.str && (v.ref == x.ref), nil
		}},
		"filter": {"", func(r *renderer, v Value, _ *args) (bool, error) {
			return v.isString() && r.filters[v.str] != nil, nil
		}},
		"test": {"", func(r *renderer, v Value, _ *args) (bool, error) {
			return v.isString() && r.tests[v.str] != nil, nil
		}},
	}
	for name, f := range quickTests() {
		table[name] = testOf{"", func(_ *renderer, v Value, _ *args) (bool, error) { return f(v), nil }}
	}
	for op, names := range map[comparison][]string{
		isEqual: {"eq", "equalto", "=="}, isUnequal: {"ne", "!="}, isLess: {"lt", "lessthan", "<"}, isAtMost: {"le", "<="}, isMore: {"gt", "greaterthan", ">"}, isAtLeast: {"ge", ">="},
	} {
		for _, n := range names {
			table[n] = testOf{"b!", func(r *renderer, v Value, a *args) (bool, error) {
				x, _ := a.get(0, "b")
				return r.compared(op, v, x)
			}}
		}
	}
	checked := map[string]test{}
	for name, x := range table {
		s := signatureOf(x.names)
		checked[name] = func(r *renderer, v Value, a *args) (bool, error) {
			if err := s.check(name, a); err != nil {
				return false, err
			}
			return x.f(r, v, a)
		}
	}
	return checked
}
