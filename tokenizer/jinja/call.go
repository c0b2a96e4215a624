// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"slices"
	"strings"
)

// args are the arguments of a call. The last len(names) values are given by name. A function
// must not keep values, because later calls use their memory.
type args struct {
	values []Value
	names  []string
}

// kept returns arguments that may be kept.
func (a args) kept() args { return args{slices.Clone(a.values), a.names} }

func (a args) positional() []Value { return a.values[:len(a.values)-len(a.names)] }

// named returns the argument of a name.
func (a args) named(name string) (Value, bool) {
	if i := slices.Index(a.names, name); i >= 0 {
		return a.values[len(a.values)-len(a.names)+i], true
	}
	return Value{}, false
}

// builtin is a filter, test, method or global function. f gets the value that a
// filter, test or method is applied to, and one argument for each parameter.
type builtin struct {
	parameters []string // "" for those that cannot be given by name
	required   int      // how many, from the first
	any        bool     // f gets the arguments as they are given
	f          func(r *renderer, v Value, a args) Value
}

// define returns a builtin. In parameters, "!" marks a required parameter and "_" one that cannot be
// given by name; "*" alone stands for any number of arguments.
func define(parameters string, f func(r *renderer, v Value, a args) Value) *builtin {
	b := &builtin{any: parameters == "*", f: f}
	for name := range strings.FieldsSeq(parameters) {
		name, required := strings.CutSuffix(name, "!")
		if required {
			b.required++
		}
		b.parameters = append(b.parameters, strings.TrimPrefix(name, "_"))
	}
	return b
}

// plain returns a builtin without parameters.
func plain(f func(r *renderer, v Value) Value) *builtin {
	return define("", func(r *renderer, v Value, _ args) Value { return f(r, v) })
}

// unsupported returns a builtin that fails when it is called.
func unsupported(what, name string) *builtin {
	return define("*", func(*renderer, Value, args) Value { return raise(Unsupported, "%s '%s'", what, name) })
}

// invoke calls a builtin.
func (r *renderer) invoke(b *builtin, v Value, a args) Value {
	if b.any {
		return b.f(r, v, a)
	}
	start := len(r.stack)
	bound := args{values: r.bind(b, a)}
	v = b.f(r, v, bound)
	r.stack = r.stack[:start]
	return v
}

// bind puts the arguments of a call into the order of the parameters. Those that are
// not given are unset.
func (r *renderer) bind(b *builtin, a args) []Value {
	n, given := len(b.parameters), a.positional()
	if len(given) > n {
		raise(TypeError, "at most %d arguments expected, got %d", n, len(given))
	}
	start := len(r.stack)
	r.stack = append(r.stack, given...)
	for range n - len(given) {
		r.stack = append(r.stack, Value{kind: kindUnset})
	}
	bound := r.stack[start:]
	for k, name := range a.names {
		i := slices.Index(b.parameters, name)
		switch {
		case i < 0 || name == "":
			raise(TypeError, "unexpected keyword argument '%s'", name)
		case bound[i].kind != kindUnset:
			raise(TypeError, "multiple values for argument '%s'", name)
		}
		bound[i] = a.values[len(given)+k]
	}
	for i := range b.required {
		if bound[i].kind == kindUnset {
			raise(TypeError, "missing argument %d", i+1)
		}
	}
	return bound
}

// call calls a value.
func (r *renderer) call(f Value, a args) Value {
	switch f.kind {
	case kindFunc:
		if call := f.ref.(*function).call; call != nil {
			return call(r, a)
		}
	case kindLoop:
		l := f.ref.(*loop)
		if l.again == nil {
			raise(TypeError, "the loop must have the 'recursive' marker to be called recursively")
		}
		if len(a.values) != 1 {
			raise(TypeError, "a loop takes 1 argument, got %d", len(a.values))
		}
		return l.again(r, a.values[0])
	}
	r.defined(f)
	return raise(TypeError, "'%s' object is not callable", f.typeName())
}

// given returns argument i; false if it is absent or None.
func (a args) given(i int) (Value, bool) {
	v := a.values[i]
	return v, v.kind != kindUnset && !v.IsNone()
}

// or returns argument i, or a default if it is absent.
func (a args) or(i int, byDefault Value) Value {
	if v := a.values[i]; v.kind != kindUnset {
		return v
	}
	return byDefault
}

// text returns argument i, which must be a string.
func (a args) text(i int) string {
	v := a.values[i]
	if !v.isString() {
		raise(TypeError, "argument %d must be str, not %s", i+1, v.typeName())
	}
	return v.str
}

// integer returns argument i, which must be an integer, or a default if it is absent.
// Numbers that no length or count reaches are cut to +-2^30.
func (a args) integer(i, byDefault int) int {
	v := a.or(i, Int(int64(byDefault)))
	if v.kind == kindBig {
		raise(OverflowError, "Python int too large to convert to C ssize_t")
	}
	if !v.isInt() {
		raise(TypeError, "'%s' object cannot be interpreted as an integer", v.typeName())
	}
	const limit = 1 << 30
	return int(min(max(v.int(), -limit), limit))
}
