// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"fmt"
	"math"
	"math/big"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"
)

type (
	filter func(r *renderer, v Value, a *args) (Value, error)
	test   func(r *renderer, v Value, a *args) (bool, error)
)

//nolint:gochecknoglobals // tables
var (
	filterTable = sync.OnceValue(filters)
	testTable   = sync.OnceValue(tests)
	globalTable = sync.OnceValue(globals)
)

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
		"dict": funcOf("dict", func(r *renderer, a *args) (Value, error) {
			d, err := dictOf(r, a)
			return FromDict(d), err
		}),
		"namespace": funcOf("namespace", func(r *renderer, a *args) (Value, error) {
			d, err := dictOf(r, a)
			return Value{kind: kindNamespace, ref: d}, err
		}),
		"cycler": funcOf("cycler", func(r *renderer, a *args) (Value, error) {
			if len(a.pos) == 0 {
				return Value{}, errorf(TypeError, "at least one item has to be provided")
			}
			return cyclerOf(a.pos), nil
		}),
		"joiner": funcOf("joiner", func(r *renderer, a *args) (Value, error) {
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

func dictOf(r *renderer, a *args) (*Dict, error) {
	d := NewDict(len(a.kw))
	if len(a.pos) > 0 {
		from := a.pos[0]
		if of := from.Dict(); of != nil {
			for i, k := range of.keys {
				if err := r.tick(itemSteps); err != nil {
					return nil, err
				}
				d.set(r, k, of.values[i])
			}
		} else {
			for _, it := range from.Items() {
				p := it.Items()
				if len(p) != 2 || !r.hashable(p[0]) {
					return nil, errorf(ValueError, "dictionary update sequence has an element that is no pair")
				}
				d.set(r, p[0], p[1])
			}
		}
	}
	if err := r.listed(2 * d.Len()); err != nil {
		return nil, err
	}
	for i, name := range a.kwNames {
		d.Set(name, a.kw[i])
	}
	return d, nil
}

// maxRange is the sandbox's own limit.
const maxRange = 100_000

func rangeOf(r *renderer, a *args) (Value, error) {
	var n [3]int64
	for i, v := range a.pos {
		if v.kind == kindUndefined {
			return Value{}, errUndefined(v)
		}
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

func tests() map[string]test {
	cased := func(this, other func(string) string) test {
		return func(r *renderer, v Value, _ *args) (bool, error) {
			s := r.text(v)
			return s == this(s) && s != other(s), r.tick(len(s) / 8)
		}
	}
	order := func(op comparison) test {
		return func(r *renderer, v Value, a *args) (bool, error) {
			x, _ := a.get(0, "other")
			return r.compared(op, v, x)
		}
	}
	number := func(f func(n int64) bool) test {
		return func(r *renderer, v Value, _ *args) (bool, error) {
			if v.kind == kindUndefined {
				return false, errUndefined(v)
			}
			if !v.isNumber() {
				return false, errorf(TypeError, "not all arguments converted during string formatting")
			}
			return f(int64(v.number())), nil
		}
	}
	t := map[string]test{
		"lower": cased(strings.ToLower, strings.ToUpper),
		"upper": cased(strings.ToUpper, strings.ToLower),
		"odd":   number(func(n int64) bool { return n%2 != 0 }), "even": number(func(n int64) bool { return n%2 == 0 }),
		"divisibleby": func(r *renderer, v Value, a *args) (bool, error) {
			x, _ := a.get(0, "num")
			m, err := r.arithmetic("%", v, x)
			return err == nil && !m.truth(), err
		},
		"in": func(r *renderer, v Value, a *args) (bool, error) {
			x, _ := a.get(0, "seq")
			return r.contains(x, v)
		},
		"sameas": func(r *renderer, v Value, a *args) (bool, error) {
			x, _ := a.get(0, "other")
			return v.kind == x.kind && v.num == x.num && v.str == x.str && (v.ref == x.ref), nil
		},
		"filter": func(r *renderer, v Value, _ *args) (bool, error) { return r.filters[r.text(v)] != nil, nil },
		"test":   func(r *renderer, v Value, _ *args) (bool, error) { return r.tests[r.text(v)] != nil, nil },
	}
	for name, f := range quickTests() {
		t[name] = func(_ *renderer, v Value, _ *args) (bool, error) { return f(v), nil }
	}
	for op, names := range map[comparison][]string{
		isEqual: {"eq", "equalto", "=="}, isUnequal: {"ne", "!="}, isLess: {"lt", "lessthan", "<"}, isAtMost: {"le", "<="}, isMore: {"gt", "greaterthan", ">"}, isAtLeast: {"ge", ">="},
	} {
		for _, n := range names {
			t[n] = order(op)
		}
	}
	return t
}

// key returns what an attribute name or path of a filter picks of an item.
func (r *renderer) key(v, attribute Value) (Value, error) {
	if err := r.tick(1); err != nil {
		return Value{}, err
	}
	if attribute.isInt() {
		return r.item(v, attribute)
	}
	for part := range strings.SplitSeq(r.text(attribute), ".") {
		err := r.tick(1 + len(part)/stringStep)
		if err != nil {
			return Value{}, err
		}
		k := String(part)
		if n, e := strconv.Atoi(part); e == nil {
			k = Int(int64(n))
		}
		if v, err = r.item(v, k); err != nil {
			return Value{}, err
		}
	}
	return v, nil
}

// folded is how sorting sees a value: strings without case.
func (r *renderer) folded(v Value) Value {
	if v.isString() {
		r.spend(1 + len(v.str)/stringStep)
		return String(strings.ToLower(v.str))
	}
	return v
}

// keyed returns the items with the values that they are ordered by.
func (r *renderer) keyed(items []Value, attribute Value, fold bool) ([][2]Value, error) {
	if err := r.listed(3 * len(items)); err != nil {
		return nil, err
	}
	out := make([][2]Value, len(items))
	for i, it := range items {
		k := it
		if attribute.kind != kindUndefined && !attribute.IsNone() {
			var parts []Value
			for part := range strings.SplitSeq(r.text(attribute), ",") {
				x, err := r.key(it, String(part))
				if err != nil {
					return nil, err
				}
				if fold {
					x = r.folded(x)
				}
				parts = append(parts, x)
			}
			if k = parts[0]; len(parts) > 1 {
				k = tupleOf(parts...)
			}
		} else if fold {
			k = r.folded(k)
		}
		out[i] = [2]Value{k, it}
	}
	return out, r.broken
}

func (r *renderer) sorted(items []Value, attribute Value, fold, reverse bool) ([]Value, error) {
	all, err := r.keyed(items, attribute, fold)
	if err != nil {
		return nil, err
	}
	err = sortBy(all, func(a, b [2]Value) (int, error) {
		c, err := r.compare(a[0], b[0])
		if reverse {
			c = -c
		}
		return c, err
	})
	out := make([]Value, len(all))
	for i, x := range all {
		out[i] = x[1]
	}
	return out, err
}

// predicate returns the test that select and its like apply to an item, from the
// arguments behind the first skip ones.
func (r *renderer) predicate(a *args, skip int) (func(v Value) (bool, error), error) {
	var attribute Value
	pos := a.pos
	if skip > 0 {
		if len(pos) == 0 {
			return nil, errorf(TypeError, "missing parameter for attribute name")
		}
		attribute, pos = pos[0], pos[1:]
	}
	check := func(v Value) (bool, error) { return v.truth(), nil }
	if len(pos) > 0 {
		t, ok := r.tests[r.text(pos[0])]
		if !ok {
			return nil, errorf(RuntimeError, "No test named '%s'.", r.text(pos[0]))
		}
		rest := &args{pos: pos[1:], kwNames: a.kwNames, kw: a.kw}
		check = func(v Value) (bool, error) { return t(r, v, rest) }
	}
	return func(v Value) (bool, error) {
		if err := r.tick(1 + itemSteps); err != nil {
			return false, err
		}
		if skip > 0 {
			var err error
			if v, err = r.key(v, attribute); err != nil {
				return false, err
			}
		}
		return check(v)
	}, nil
}

func selecting(skip int, want bool) filter {
	return func(r *renderer, v Value, a *args) (Value, error) {
		items, err := r.iterate(v)
		if err != nil {
			return Value{}, err
		}
		ok, err := r.predicate(a, skip)
		if err != nil {
			return Value{}, err
		}
		var out []Value
		for _, it := range items {
			yes, err := ok(it)
			if err != nil {
				return Value{}, err
			}
			if yes == want {
				out = append(out, it)
			}
		}
		return List(out...), nil
	}
}

func mapped(r *renderer, v Value, a *args) (Value, error) {
	items, err := r.iterate(v)
	if err != nil {
		return Value{}, err
	}
	if err := r.listed(len(items)); err != nil {
		return Value{}, err
	}
	out := make([]Value, len(items))
	if attribute, ok := a.named("attribute"); ok && len(a.pos) == 0 {
		def, hasDef := a.named("default")
		for i, it := range items {
			x, err := r.key(it, attribute)
			if err != nil {
				return Value{}, err
			}
			if hasDef && x.kind == kindUndefined {
				x = def
			}
			out[i] = x
		}
		return List(out...), nil
	}
	if len(a.pos) == 0 {
		return Value{}, errorf(TypeError, "map requires a filter argument")
	}
	f, ok := r.filters[r.text(a.pos[0])]
	if !ok {
		return Value{}, errorf(RuntimeError, "No filter named '%s'.", r.text(a.pos[0]))
	}
	rest := &args{pos: a.pos[1:], kwNames: a.kwNames, kw: a.kw}
	for i, it := range items {
		if out[i], err = f(r, it, rest); err != nil {
			return Value{}, err
		}
		if err := r.tick(1); err != nil {
			return Value{}, err
		}
	}
	return List(out...), nil
}

func lengthOf(r *renderer, v Value, _ *args) (Value, error) {
	switch v.kind {
	case kindUndefined:
		return Int(0), nil
	case kindString, kindSafe:
		return Int(int64(utf8.RuneCountInString(v.str))), r.scanned(len(v.str))
	case kindList, kindTuple, kindView:
		return Int(int64(len(v.Items()))), nil
	case kindDict:
		return Int(int64(v.ref.(*Dict).Len())), nil
	case kindLoop:
		return Int(int64(v.ref.(*loop).count)), nil
	case kindRange:
		return Int(int64(v.ref.(*span).count)), nil
	}
	return Value{}, errorf(TypeError, "object of type '%s' has no len()", v.typeName())
}

func tojson(r *renderer, v Value, a *args) (Value, error) {
	o := jsonOptions{comma: ", ", colon: ": "}
	x, _ := a.get(0, "ensure_ascii")
	o.ascii = x.truth()
	if x, ok := a.get(1, "indent"); ok && !x.IsNone() {
		o.pretty, o.comma = true, ","
		if x.isString() {
			o.indent = x.str
		} else if n := x.int(); n > 0 && n < 1000 {
			o.indent = strings.Repeat(" ", int(n))
		}
	}
	if x, ok := a.get(2, "separators"); ok && len(x.Items()) == 2 {
		o.comma, o.colon = r.text(x.Items()[0]), r.text(x.Items()[1])
	}
	x, _ = a.get(3, "sort_keys")
	o.sortKeys = x.truth()
	start := len(r.out)
	b, err := r.appendJSON(r.out, v, &o, 0)
	r.out = b[:start] // grown once, not each time
	if err != nil {
		return Value{}, err
	}
	s := string(b[start:])
	return String(s), nil
}

func filters() map[string]filter {
	text := func(f func(string) string) filter {
		return func(r *renderer, v Value, _ *args) (Value, error) {
			in := r.text(v)
			if err := r.tick(len(in) / 4); err != nil {
				return Value{}, err
			}
			s := f(in)
			return String(s), r.made(len(s))
		}
	}
	ofItems := func(f func(r *renderer, items []Value, a *args) (Value, error)) filter {
		return func(r *renderer, v Value, a *args) (Value, error) {
			items, err := r.iterate(v)
			if err != nil {
				return Value{}, err
			}
			return f(r, items, a)
		}
	}
	extreme := func(sign int) filter {
		return ofItems(func(r *renderer, items []Value, a *args) (Value, error) {
			sensitive, _ := a.get(0, "case_sensitive")
			attribute, _ := a.get(1, "attribute")
			all, err := r.keyed(items, attribute, !sensitive.truth())
			if err != nil || len(all) == 0 {
				return undefined("No aggregated item, sequence was empty."), err
			}
			best := all[0]
			for _, x := range all[1:] {
				c, err := r.compare(x[0], best[0])
				if err != nil {
					return Value{}, err
				}
				if c*sign > 0 {
					best = x
				}
			}
			return best[1], nil
		})
	}
	def := func(r *renderer, v Value, a *args) (Value, error) {
		x, ok := a.get(0, "default_value")
		if !ok {
			x = String("")
		}
		also, _ := a.get(1, "boolean")
		if v.kind == kindUndefined || also.truth() && !v.truth() {
			return x, nil
		}
		return v, nil
	}
	escape := func(r *renderer, v Value, _ *args) (Value, error) {
		if v.kind == kindSafe {
			return v, nil
		}
		s := escaped(r.text(v))
		return Value{kind: kindSafe, str: s}, r.made(len(s))
	}
	toList := func(r *renderer, v Value, _ *args) (Value, error) {
		items, err := r.iterate(v)
		return List(items...), err
	}
	f := map[string]filter{
		"tojson": tojson, "length": lengthOf, "count": lengthOf, "list": toList, "default": def, "d": def,
		"string": func(r *renderer, v Value, _ *args) (Value, error) {
			if v.kind == kindSafe {
				return v, nil
			}
			return String(r.text(v)), nil
		},
		"safe": func(r *renderer, v Value, _ *args) (Value, error) { return Value{kind: kindSafe, str: r.text(v)}, nil },
		"e":    escape, "escape": escape,
		"forceescape": func(r *renderer, v Value, _ *args) (Value, error) {
			s := escaped(r.text(v))
			return Value{kind: kindSafe, str: s}, r.made(len(s))
		},
		"upper": text(strings.ToUpper), "lower": text(strings.ToLower), "capitalize": text(capitalized), "title": text(titleWords),
		"trim": func(r *renderer, v Value, a *args) (Value, error) {
			s, err := trimmed(r.text(v), a, "strip", true, true)
			if v.kind == kindSafe {
				return Value{kind: kindSafe, str: s}, err
			}
			return String(s), err
		},
		"replace": func(r *renderer, v Value, a *args) (Value, error) {
			if v.isString() {
				return r.replace(v, a)
			}
			return r.replace(String(r.text(v)), a)
		},
		"join": ofItems(joined), "map": mapped,
		"select": selecting(0, true), "reject": selecting(0, false), "selectattr": selecting(1, true), "rejectattr": selecting(1, false),
		"first": ofItems(func(r *renderer, items []Value, _ *args) (Value, error) {
			if len(items) == 0 {
				return undefined("No first item, sequence was empty."), nil
			}
			return items[0], nil
		}),
		"last": func(r *renderer, v Value, _ *args) (Value, error) {
			items, err := r.iterate(v)
			if err != nil {
				return Value{}, errorf(TypeError, "'%s' object is not reversible", v.typeName())
			}
			if len(items) == 0 {
				return undefined("No last item, sequence was empty."), nil
			}
			return items[len(items)-1], nil
		},
		"items": func(r *renderer, v Value, _ *args) (Value, error) {
			switch {
			case v.kind == kindUndefined:
				return List(), nil
			case v.kind != kindDict:
				return Value{}, errorf(TypeError, "Can only get item pairs from a mapping.")
			}
			items, err := r.pairs(v.ref.(*Dict))
			return List(items...), err
		},
		"dictsort": dictsort,
		"sort": ofItems(func(r *renderer, items []Value, a *args) (Value, error) {
			reverse, _ := a.get(0, "reverse")
			sensitive, _ := a.get(1, "case_sensitive")
			attribute, _ := a.get(2, "attribute")
			out, err := r.sorted(items, attribute, !sensitive.truth(), reverse.truth())
			return List(out...), err
		}),
		"unique": ofItems(func(r *renderer, items []Value, a *args) (Value, error) {
			sensitive, _ := a.get(0, "case_sensitive")
			attribute, _ := a.get(1, "attribute")
			all, err := r.keyed(items, attribute, !sensitive.truth())
			if err != nil {
				return Value{}, err
			}
			seen := &Dict{}
			var out []Value
			for _, x := range all {
				if !r.hashable(x[0]) {
					return Value{}, errorf(TypeError, "unhashable type: '%s'", x[0].typeName())
				}
				if seen.find(r, x[0]) < 0 {
					seen.set(r, x[0], None())
					out = append(out, x[1])
				}
				if err := r.tick(1 + seen.Len()/64); err != nil {
					return Value{}, err
				}
			}
			return List(out...), nil
		}),
		"reverse": func(r *renderer, v Value, _ *args) (Value, error) {
			items, err := r.iterate(v)
			if err != nil {
				return Value{}, err
			}
			if err := r.listed(len(items)); err != nil {
				return Value{}, err
			}
			items = slices.Clone(items)
			slices.Reverse(items)
			if !v.isString() {
				return List(items...), nil
			}
			var b strings.Builder
			for _, it := range items {
				b.WriteString(it.str)
			}
			return String(b.String()), nil
		},
		"min": extreme(-1), "max": extreme(1),
		"sum": ofItems(func(r *renderer, items []Value, a *args) (Value, error) {
			attribute, _ := a.get(0, "attribute")
			total, ok := a.get(1, "start")
			if !ok {
				total = Int(0)
			}
			all, err := r.keyed(items, attribute, false)
			for _, x := range all {
				if err == nil {
					total, err = r.add(total, x[0])
				}
			}
			return total, err
		}),
		"batch": ofItems(func(r *renderer, items []Value, a *args) (Value, error) {
			n, err := a.count("batch", 0, "linecount", 0)
			if err != nil || n <= 0 {
				return List(), err
			}
			fill, filled := a.get(1, "fill_with")
			var out []Value
			for at := 0; at < len(items); at += n {
				size := min(n, len(items)-at)
				if filled {
					size = min(n, maxRange)
				}
				if err := r.listed(2 + size); err != nil {
					return Value{}, err
				}
				row := slices.Clone(items[at:min(at+n, len(items))])
				for filled && !fill.IsNone() && len(row) < n && len(row) < maxRange {
					row = append(row, fill)
				}
				out = append(out, List(row...))
			}
			return List(out...), nil
		}),
		"slice": ofItems(func(r *renderer, items []Value, a *args) (Value, error) {
			n, err := a.count("slice", 0, "slices", 0)
			if err != nil || n <= 0 || n > maxRange {
				return List(), err
			}
			fill, filled := a.get(1, "fill_with")
			if err := r.listed(len(items) + 3*n); err != nil {
				return Value{}, err
			}
			per, more := len(items)/n, len(items)%n
			var out []Value
			at := 0
			for i := range n {
				size := per
				if i < more {
					size++
				}
				row := slices.Clone(items[at : at+size])
				at += size
				if filled && !fill.IsNone() && i >= more && more > 0 {
					row = append(row, fill)
				}
				out = append(out, List(row...))
			}
			return List(out...), nil
		}),
		"groupby": ofItems(func(r *renderer, items []Value, a *args) (Value, error) {
			attribute, _ := a.get(0, "attribute")
			sensitive, _ := a.named("case_sensitive")
			items, err := r.sorted(items, attribute, !sensitive.truth(), false)
			if err != nil {
				return Value{}, err
			}
			all, err := r.keyed(items, attribute, !sensitive.truth())
			if err != nil {
				return Value{}, err
			}
			var out []Value
			for i := 0; i < len(all); {
				j := i
				var group []Value
				for ; j < len(all) && r.equal(all[j][0], all[i][0]); j++ {
					group = append(group, all[j][1])
				}
				k, err := r.key(all[i][1], attribute)
				if err != nil {
					return Value{}, err
				}
				out = append(out, tupleOf(k, List(group...)))
				i = j
			}
			return List(out...), nil
		}),
		"abs": func(r *renderer, v Value, _ *args) (Value, error) {
			switch {
			case v.kind == kindUndefined:
				return Value{}, errUndefined(v)
			case v.kind == kindFloat:
				return Float(math.Abs(v.float())), nil
			case v.isNumber():
				return bigInt(new(big.Int).Abs(v.toBig())), nil
			}
			return Value{}, errorf(TypeError, "bad operand type for abs(): '%s'", v.typeName())
		},
		"round": round, "int": toInteger,
		"float": func(r *renderer, v Value, a *args) (Value, error) {
			if err := r.tick(len(v.str) / 8); err != nil {
				return Value{}, err
			}
			d, ok := a.get(0, "default")
			if !ok {
				d = Float(0)
			}
			switch {
			case v.isNumber():
				return Float(v.number()), nil
			case v.isString():
				if n, err := strconv.ParseFloat(strings.TrimFunc(v.str, isSpace), 64); err == nil || math.IsInf(n, 0) {
					return Float(n), nil
				}
			}
			return d, nil
		},
		"indent": indent, "attr": func(r *renderer, v Value, a *args) (Value, error) {
			name, err := a.word("attr", 0, "name", "")
			if err != nil {
				return Value{}, err
			}
			return r.attribute(v, name), nil
		},
		"wordcount": func(r *renderer, v Value, _ *args) (Value, error) {
			if err := r.tick(len(v.str) / 4); err != nil {
				return Value{}, err
			}
			return Int(int64(len(strings.FieldsFunc(r.text(v), func(r rune) bool { return r != '_' && !unicode.IsLetter(r) && !unicode.IsNumber(r) })))), nil
		},
		"center": func(r *renderer, v Value, a *args) (Value, error) {
			if len(a.pos) == 0 && len(a.kw) == 0 {
				a = &args{pos: []Value{Int(80)}}
			}
			return stringMethods()["center"](r, String(r.text(v)), a)
		},
		"striptags": text(func(s string) string {
			var b strings.Builder
			for {
				i := strings.IndexByte(s, '<')
				if i < 0 {
					break
				}
				end := strings.IndexByte(s[i:], '>')
				if strings.HasPrefix(s[i:], "<!--") {
					if end = strings.Index(s[i:], "-->"); end >= 0 {
						end += 2
					}
				}
				if end < 0 {
					break
				}
				b.WriteString(s[:i])
				s = s[i+end+1:]
			}
			b.WriteString(s)
			return strings.Join(strings.Fields(b.String()), " ")
		}),
		"urlencode": func(r *renderer, v Value, _ *args) (Value, error) {
			quote := func(s, safe string) string {
				s = strings.ReplaceAll(url.QueryEscape(s), "+", "%20")
				if safe != "" {
					s = strings.ReplaceAll(s, "%2F", "/")
				}
				return s
			}
			var list [][]Value
			if d := v.Dict(); d != nil {
				for i := range d.keys {
					list = append(list, []Value{d.keys[i], d.values[i]})
				}
			} else if v.isSequence() {
				for _, it := range v.Items() {
					list = append(list, it.Items())
				}
			} else {
				s := quote(r.text(v), "/")
				return String(s), r.made(3 * len(s))
			}
			var parts []string
			for _, p := range list {
				if len(p) != 2 {
					return Value{}, errorf(ValueError, "not enough values to unpack")
				}
				parts = append(parts, strings.ReplaceAll(quote(r.text(p[0]), ""), "%20", "+")+"="+strings.ReplaceAll(quote(r.text(p[1]), ""), "%20", "+"))
			}
			s := strings.Join(parts, "&")
			return String(s), r.made(len(s))
		},
		"xmlattr": func(r *renderer, v Value, a *args) (Value, error) {
			d := v.Dict()
			if d == nil {
				return Value{}, errorf(TypeError, "'%s' object has no items", v.typeName())
			}
			var parts []string
			for i, k := range d.keys {
				if x := d.values[i]; !x.IsNone() && x.kind != kindUndefined {
					if strings.ContainsAny(r.text(k), " \t\n\f\r/>=") {
						return Value{}, errorf(ValueError, "Invalid character in attribute name: %s", r.repr(k))
					}
					parts = append(parts, escaped(r.text(k))+`="`+escaped(r.text(x))+`"`)
				}
			}
			s := strings.Join(parts, " ")
			if space, ok := a.get(0, "autospace"); s != "" && (!ok || space.truth()) {
				s = " " + s
			}
			return String(s), nil
		},
		"pprint": func(r *renderer, v Value, _ *args) (Value, error) { return String(r.repr(v)), nil },
		"format": func(r *renderer, v Value, a *args) (Value, error) {
			x := tupleOf(a.pos...)
			if len(a.kw) > 0 {
				d, err := dictOf(r, &args{kwNames: a.kwNames, kw: a.kw})
				if err != nil {
					return Value{}, err
				}
				x = FromDict(d)
			}
			s, err := r.percent(r.text(v), x)
			return String(s), err
		},
	}
	return f
}

// titleWords is the filter title: a capital behind each of - ( { [ < and white space.
func titleWords(s string) string {
	var b strings.Builder
	first := true
	for _, r := range s {
		switch {
		case isSpace(r) || strings.ContainsRune("-({[<", r):
			first = true
			b.WriteRune(r)
		case first:
			b.WriteRune(unicode.ToUpper(r))
			first = false
		default:
			b.WriteRune(unicode.ToLower(r))
		}
	}
	return b.String()
}

func joined(r *renderer, items []Value, a *args) (Value, error) {
	sep, err := a.word("join", 0, "d", "")
	if err != nil {
		return Value{}, err
	}
	attribute, picks := a.get(1, "attribute")
	var b []byte
	for i, it := range items {
		if err := r.tick(1 + len(sep)/stringStep); err != nil {
			return Value{}, err
		}
		if i > 0 {
			b = append(b, sep...)
		}
		if picks && !attribute.IsNone() {
			if it, err = r.key(it, attribute); err != nil {
				return Value{}, err
			}
		}
		if b = r.appendStr(b, it); len(b) > r.o.MaxOutput {
			break
		}
	}
	return String(string(b)), r.made(len(b))
}

func dictsort(r *renderer, v Value, a *args) (Value, error) {
	d := v.Dict()
	if v.kind == kindUndefined {
		return Value{}, errUndefined(v)
	}
	if d == nil {
		return Value{}, errorf(TypeError, "'%s' object has no attribute 'items'", v.typeName())
	}
	sensitive, _ := a.get(0, "case_sensitive")
	by, _ := a.get(1, "by")
	reverse, _ := a.get(2, "reverse")
	pick := 0
	switch r.text(by) {
	case "", "key":
	case "value":
		pick = 1
	default:
		return Value{}, errorf(ValueError, `You can only sort by either "key" or "value"`)
	}
	items, err := r.pairs(d)
	if err != nil {
		return Value{}, err
	}
	err = sortBy(items, func(x, y Value) (int, error) {
		p, q := x.Items()[pick], y.Items()[pick]
		if !sensitive.truth() {
			p, q = r.folded(p), r.folded(q)
		}
		c, err := r.compare(p, q)
		if reverse.truth() {
			c = -c
		}
		return c, err
	})
	return List(items...), err
}

func round(r *renderer, v Value, a *args) (Value, error) {
	n, err := a.count("round", 0, "precision", 0)
	if err != nil {
		return Value{}, err
	}
	how, err := a.word("round", 1, "method", "common")
	switch {
	case err != nil:
		return Value{}, err
	case v.kind == kindUndefined:
		return Value{}, errUndefined(v)
	case !v.isNumber():
		return Value{}, errorf(TypeError, "type %s doesn't define __round__ method", v.typeName())
	case v.kind != kindFloat && how == "common":
		return roundInt(v.toBig(), -n), nil
	}
	n = min(max(n, -300), 300)
	x, scale := v.number(), math.Pow(10, float64(n))
	switch how {
	case "ceil":
		return Float(math.Ceil(x*scale) / scale), nil
	case "floor":
		return Float(math.Floor(x*scale) / scale), nil
	case "common":
		if n >= 0 {
			f, _ := strconv.ParseFloat(strconv.FormatFloat(x, 'f', n, 64), 64) // correctly rounded, as Python
			return Float(f), nil
		}
		return Float(math.RoundToEven(x*scale) / scale), nil
	}
	return Value{}, errorf(ValueError, "method must be common, ceil or floor")
}

// roundInt makes the last zeros digits of x zeros, halves to even.
func roundInt(x *big.Int, zeros int) Value {
	if zeros <= 0 {
		return bigInt(x)
	}
	if zeros > x.BitLen() { // 2**bits is less than half of 10**zeros
		return Int(0)
	}
	unit := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(zeros)), nil)
	rest := new(big.Int)
	q, _ := new(big.Int).DivMod(x, unit, rest) // rounded down
	if c := rest.Lsh(rest, 1).Cmp(unit); c > 0 || c == 0 && q.Bit(0) == 1 {
		q.Add(q, big.NewInt(1))
	}
	return bigInt(q.Mul(q, unit))
}

func toInteger(r *renderer, v Value, a *args) (Value, error) {
	d, ok := a.get(0, "default")
	if !ok {
		d = Int(0)
	}
	base, err := a.count("int", 1, "base", 10)
	if err == nil {
		err = r.tick(len(v.str) / 4)
	}
	if err != nil {
		return Value{}, err
	}
	switch {
	case v.kind == kindBig:
		return v, nil
	case v.isInt():
		return Int(v.int()), nil
	case v.kind == kindFloat:
		if f := v.float(); !math.IsNaN(f) && !math.IsInf(f, 0) {
			n, _ := new(big.Float).SetFloat64(f).Int(nil)
			return bigInt(n), nil
		}
	case v.isString():
		s := strings.ReplaceAll(strings.TrimFunc(v.str, isSpace), "_", "")
		if base != 10 {
			s = strings.TrimPrefix(strings.ToLower(s), map[int]string{2: "0b", 8: "0o", 16: "0x"}[base])
		}
		if base >= 2 && base <= 36 && len(s) <= 4300 {
			if n, ok := new(big.Int).SetString(s, base); ok {
				return bigInt(n), nil
			}
		}
		if f, err := strconv.ParseFloat(s, 64); err == nil && base == 10 && !math.IsInf(f, 0) && !math.IsNaN(f) {
			n, _ := new(big.Float).SetFloat64(f).Int(nil)
			return bigInt(n), nil
		}
	}
	return d, nil
}

func indent(r *renderer, v Value, a *args) (Value, error) {
	pad := "    "
	if w, ok := a.get(0, "width"); ok {
		if w.isString() {
			pad = w.str
		} else {
			pad = strings.Repeat(" ", int(min(max(w.int(), 0), 10_000)))
		}
	}
	first, _ := a.get(1, "first")
	blank, _ := a.get(2, "blank")
	lines := strings.Split(strings.TrimSuffix(r.text(v)+"\n", "\n"), "\n")
	if err := r.made(len(r.text(v)) + len(lines)*len(pad)); err != nil {
		return Value{}, err
	}
	if err := r.listed(len(lines)); err != nil {
		return Value{}, err
	}
	var b strings.Builder
	for i, l := range lines {
		if i > 0 {
			b.WriteByte('\n')
		}
		if (i > 0 || first.truth()) && (l != "" || blank.truth()) {
			b.WriteString(pad)
		}
		b.WriteString(l)
	}
	return String(b.String()), nil
}

// strftime is C's, with the flags of glibc.
func strftime(t time.Time, format string) string {
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' || i+1 == len(format) {
			b.WriteByte(format[i])
			continue
		}
		i++
		flag := byte(0)
		if strings.IndexByte("-_0^#", format[i]) >= 0 && i+1 < len(format) {
			flag = format[i]
			i++
		}
		number := func(n, width int, pad string) {
			s := strconv.Itoa(n)
			switch flag {
			case '-':
				pad = ""
			case '_':
				pad = " "
			case '0':
				pad = "0"
			}
			if pad != "" && len(s) < width {
				s = strings.Repeat(pad, width-len(s)) + s
			}
			b.WriteString(s)
		}
		word := func(s string) {
			if flag == '^' {
				s = strings.ToUpper(s)
			}
			b.WriteString(s)
		}
		hour := (t.Hour()+11)%12 + 1
		_, week := t.ISOWeek()
		switch format[i] {
		case 'a':
			word(t.Format("Mon"))
		case 'A':
			word(t.Format("Monday"))
		case 'b', 'h':
			word(t.Format("Jan"))
		case 'B':
			word(t.Format("January"))
		case 'c':
			b.WriteString(t.Format("Mon Jan _2 15:04:05 2006"))
		case 'C':
			number(t.Year()/100, 2, "0")
		case 'd':
			number(t.Day(), 2, "0")
		case 'D', 'x':
			b.WriteString(t.Format("01/02/06"))
		case 'e':
			number(t.Day(), 2, " ")
		case 'f':
			fmt.Fprintf(&b, "%06d", t.Nanosecond()/1000)
		case 'F':
			b.WriteString(t.Format("2006-01-02"))
		case 'H':
			number(t.Hour(), 2, "0")
		case 'I':
			number(hour, 2, "0")
		case 'j':
			number(t.YearDay(), 3, "0")
		case 'k':
			number(t.Hour(), 2, " ")
		case 'l':
			number(hour, 2, " ")
		case 'm':
			number(int(t.Month()), 2, "0")
		case 'M':
			number(t.Minute(), 2, "0")
		case 'n':
			b.WriteByte('\n')
		case 'p':
			word(t.Format("PM"))
		case 'P':
			b.WriteString(t.Format("pm"))
		case 'r':
			b.WriteString(t.Format("03:04:05 PM"))
		case 'R':
			b.WriteString(t.Format("15:04"))
		case 's':
			fmt.Fprint(&b, t.Unix())
		case 'S':
			number(t.Second(), 2, "0")
		case 't':
			b.WriteByte('\t')
		case 'T', 'X':
			b.WriteString(t.Format("15:04:05"))
		case 'u':
			number((int(t.Weekday())+6)%7+1, 1, "")
		case 'U':
			number((t.YearDay()+6-int(t.Weekday()))/7, 2, "0")
		case 'V':
			number(week, 2, "0")
		case 'w':
			number(int(t.Weekday()), 1, "")
		case 'W':
			number((t.YearDay()+6-(int(t.Weekday())+6)%7)/7, 2, "0")
		case 'y':
			number(t.Year()%100, 2, "0")
		case 'Y':
			number(t.Year(), 1, "")
		case 'G':
			year, _ := t.ISOWeek()
			number(year, 1, "")
		case 'z', 'Z':
			// Python's naive local time has no zone.
		case '%':
			b.WriteByte('%')
		default:
			b.WriteByte('%')
			if flag != 0 {
				b.WriteByte(flag)
			}
			b.WriteByte(format[i])
		}
	}
	return b.String()
}
