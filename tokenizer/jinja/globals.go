// SPDX-License-Identifier: Apache-2.0

package jinja

import "slices"

func globals() map[string]Value {
	return map[string]Value{
		"raise_exception": funcOf("raise_exception", func(r *renderer, a *args) (Value, error) {
			v, _ := a.get(0, "message")
			return Value{}, errorf(Raise, "%s", r.text(v))
		}),
		"strftime_now": funcOf("strftime_now", func(r *renderer, a *args) (Value, error) {
			format, err := a.word("strftime_now", 0, "format", "")
			if err == nil {
				err = r.tick(2 * len(format))
			}
			if err != nil {
				return Value{}, err
			}
			return String(strftime(r.o.Now, format)), nil
		}),
		"range": funcOf("range", rangeOf),
		"dict": {kind: kindFunc, ref: &function{
			name: "dict",
			call: func(r *renderer, a *args) (Value, error) {
				d, err := dictOf(r, a)
				return FromDict(d), err
			},
			attr: func(r *renderer, name string) (Value, bool) {
				if name != "fromkeys" {
					return Value{}, false
				}
				return r.bound(FromDict(nil), name, dictMethods()[name]), true
			},
		}},
		"namespace": funcOf("Namespace", func(r *renderer, a *args) (Value, error) {
			d, err := dictOf(r, a)
			return Value{kind: kindNamespace, ref: d}, err
		}),
		"cycler": funcOf("Cycler", func(r *renderer, a *args) (Value, error) {
			if len(a.pos) == 0 {
				return Value{}, errorf(RunError, "at least one item has to be provided")
			}
			return cyclerOf(a.pos), nil
		}),
		"joiner": funcOf("Joiner", func(r *renderer, a *args) (Value, error) {
			sep, err := a.word("joiner", 0, "sep", ", ")
			used := false
			return funcOf("joiner", func(*renderer, *args) (Value, error) {
				if used {
					return String(sep), nil
				}
				used = true
				return String(""), nil
			}), err
		}),
	}
}

// cyclerOf makes a cycler, with its methods.
func cyclerOf(items []Value) Value {
	items = slices.Clone(items)
	at := 0
	return Value{kind: kindFunc, ref: &function{
		name: "Cycler",
		call: func(*renderer, *args) (Value, error) {
			return Value{}, errorf(TypeError, "'Cycler' object is not callable")
		},
		attr: func(r *renderer, name string) (Value, bool) {
			switch name {
			case "current":
				return items[at], true
			case "reset":
				return r.funcOf(name, func(*renderer, *args) (Value, error) {
					at = 0
					return None(), nil
				}), true
			case "next":
				return r.funcOf(name, func(*renderer, *args) (Value, error) {
					x := items[at]
					at = (at + 1) % len(items)
					return x, nil
				}), true
			}
			return Value{}, false
		},
	}}
}

// attrOfFunction is an attribute of a macro or another function.
func (r *renderer) attrOfFunction(v Value, name string) (Value, bool) {
	f := v.ref.(*function)
	if f.attr != nil {
		return f.attr(r, name)
	}
	if f.macro == nil {
		return Value{}, false
	}
	switch name {
	case "name":
		return String(f.name), true
	case "arguments":
		items := make([]Value, len(f.macro.names))
		for i, n := range f.macro.names {
			items[i] = String(n)
		}
		return tupleOf(items...), r.listed(len(items)) == nil
	case "catch_kwargs":
		return Bool(f.macro.reads.kwargs), true
	case "catch_varargs":
		return Bool(f.macro.reads.varargs), true
	case "caller":
		return Bool(f.macro.reads.caller), true
	}
	return Value{}, false
}

// dictOf is Python's dict: of a dictionary or pairs, and keywords.
func dictOf(r *renderer, a *args) (*Dict, error) {
	if len(a.pos) > 1 {
		return nil, errorf(TypeError, "dict expected at most 1 argument, got %d", len(a.pos))
	}
	var pairs []Value
	if len(a.pos) > 0 {
		var err error
		if d := a.pos[0].Dict(); d != nil {
			pairs, err = r.pairs(d)
		} else {
			pairs, err = r.iterate(a.pos[0])
		}
		if err != nil {
			return nil, err
		}
	}
	if err := r.listed(3 * (len(pairs) + len(a.kw))); err != nil {
		return nil, err
	}
	d := NewDict(len(pairs) + len(a.kw))
	for i, it := range pairs {
		p, err := r.iterate(it)
		switch {
		case err != nil:
			return nil, errorf(TypeError, "cannot convert dictionary update sequence element #%d to a sequence", i)
		case len(p) != 2:
			return nil, errorf(ValueError, "dictionary update sequence element #%d has length %d; 2 is required", i, len(p))
		case !r.hashable(p[0]):
			return nil, errorf(TypeError, "unhashable type: '%s'", p[0].typeName())
		}
		d.set(r, p[0], p[1])
	}
	for i, name := range a.kwNames {
		d.Set(name, a.kw[i])
	}
	return d, r.broken
}

// maxRange is the sandbox's own limit.
const maxRange = 100_000

func rangeOf(r *renderer, a *args) (Value, error) {
	var n [3]int64
	for i, v := range a.pos {
		if !v.isInt() || i > 2 {
			return Value{}, errorf(TypeError, "'%s' object cannot be interpreted as an integer", v.typeName())
		}
		n[i] = v.int()
	}
	start, stop, step := n[0], n[1], int64(1)
	switch len(a.pos) {
	case 0:
		return Value{}, errorf(TypeError, "range expected at least 1 argument, got 0")
	case 1:
		start, stop = 0, n[0]
	case 3:
		step = n[2]
	}
	if step == 0 {
		return Value{}, errorf(ValueError, "range() arg 3 must not be zero")
	}
	return r.rangeOf(start, stop, step)
}

func (r *renderer) rangeOf(start, stop, step int64) (Value, error) {
	const limit = 1 << 40 // so that nothing overflows
	count := int64(0)
	switch {
	case max(start, -start) > limit || max(stop, -stop) > limit:
		count = maxRange + 1
	case step > 0 && stop > start:
		count = (stop-start-1)/step + 1
	case step < 0 && stop < start:
		count = (start-stop-1)/-step + 1
	}
	if count > maxRange {
		return Value{}, errorf(OverflowError, "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).", maxRange)
	}
	r.hold(boxSize)
	return Value{kind: kindRange, ref: &span{start, stop, step, int(count)}}, nil
}
