// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"slices"
	"strconv"
	"strings"
	"sync"
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

// filterOf is a filter and its arguments' names, of which those that must be given
// have an exclamation mark behind them; "*" is any.
type filterOf struct {
	names string
	f     filter
}

// filters are those of Jinja, but random, which has no right answer.
func filters() map[string]filter {
	table := map[string]filter{}
	for _, of := range []map[string]filterOf{textFilters(), numberFilters(), listFilters()} {
		for name, x := range of {
			table[name] = x.f
			if x.names != "*" {
				s := signatureOf(x.names)
				table[name] = func(r *renderer, v Value, a *args) (Value, error) {
					if err := s.check(name, a); err != nil {
						return Value{}, err
					}
					return x.f(r, v, a)
				}
			}
		}
	}
	for name, same := range map[string]string{"count": "length", "d": "default", "e": "escape"} {
		table[name] = table[same]
	}
	return table
}

func signatureOf(names string) *signature {
	s := &signature{}
	for name := range strings.FieldsSeq(names) {
		if needed, ok := strings.CutSuffix(name, "!"); ok {
			name = needed
			s.least++
		}
		s.names = append(s.names, name)
	}
	s.most = len(s.names)
	return s
}

// ofItems is a filter of what can be gone over.
func ofItems(f func(r *renderer, items []Value, a *args) (Value, error)) filter {
	return func(r *renderer, v Value, a *args) (Value, error) {
		items, err := r.iterate(v)
		if err != nil {
			return Value{}, err
		}
		return f(r, items, a)
	}
}

// lazily makes a filter that gives a generator, whose errors come when it is used. One of
// truly takes what is not true for a list of nothing, numbers and none as well.
func lazily(truly bool, f func(r *renderer, items []Value, a *args) ([]Value, error)) filter {
	return func(r *renderer, v Value, a *args) (Value, error) {
		kept := &args{pos: slices.Clone(a.pos), kwNames: slices.Clone(a.kwNames), kw: slices.Clone(a.kw)}
		if err := r.listed(2 + len(a.pos) + len(a.kw)); err != nil {
			return Value{}, err
		}
		return r.generated("generator", func() ([]Value, error) {
			if truly && !v.truth() {
				return nil, nil
			}
			items, err := r.iterate(v)
			if err != nil {
				return nil, err
			}
			return f(r, items, kept)
		}), nil
	}
}

func listFilters() map[string]filterOf {
	return map[string]filterOf{
		"length": {"", lengthOf},
		"list": {"", func(r *renderer, v Value, _ *args) (Value, error) {
			items, err := r.iterate(v)
			return List(items...), err
		}},
		"default": {"default_value boolean", func(_ *renderer, v Value, a *args) (Value, error) {
			x, ok := a.get(0, "default_value")
			if !ok {
				x = String("")
			}
			also, _ := a.get(1, "boolean")
			if v.kind == kindUndefined || also.truth() && !v.truth() {
				return x, nil
			}
			return v, nil
		}},
		"map":    {"*", mapped},
		"select": {"*", selecting(0, true)}, "reject": {"*", selecting(0, false)},
		"selectattr": {"*", selecting(1, true)}, "rejectattr": {"*", selecting(1, false)},
		"first": {"", ofItems(func(_ *renderer, items []Value, _ *args) (Value, error) {
			if len(items) == 0 {
				return undefined("No first item, sequence was empty."), nil
			}
			return items[0], nil
		})},
		"last": {"", func(r *renderer, v Value, _ *args) (Value, error) {
			items, err := r.iterate(v)
			switch {
			case err != nil || v.kind == kindGenerator:
				return Value{}, errorf(TypeError, "'%s' object is not reversible", v.typeName())
			case len(items) == 0:
				return undefined("No last item, sequence was empty."), nil
			}
			return items[len(items)-1], nil
		}},
		"items": {"", func(r *renderer, v Value, _ *args) (Value, error) {
			return r.generated("generator", func() ([]Value, error) {
				switch {
				case v.kind == kindUndefined:
					return nil, nil
				case v.kind != kindDict:
					return nil, errorf(TypeError, "Can only get item pairs from a mapping.")
				}
				return r.pairs(v.ref.(*Dict))
			}), nil
		}},
		"dictsort": {"case_sensitive by reverse", dictsort},
		"sort": {"reverse case_sensitive attribute", ofItems(func(r *renderer, items []Value, a *args) (Value, error) {
			reverse, _ := a.get(0, "reverse")
			sensitive, _ := a.get(1, "case_sensitive")
			attribute, _ := a.get(2, "attribute")
			out, err := r.sorted(items, attribute, None(), true, !sensitive.truth(), reverse.truth())
			return List(out...), err
		})},
		"unique":  {"case_sensitive attribute", lazily(false, unique)},
		"reverse": {"", reversed},
		"min":     {"case_sensitive attribute", extreme(-1)},
		"max":     {"case_sensitive attribute", extreme(1)},
		"sum":     {"attribute start", sum},
		"batch":   {"linecount! fill_with", lazily(false, batched)},
		"slice":   {"slices! fill_with", lazily(false, sliced)},
		"groupby": {"attribute! default case_sensitive", grouping},
		"attr": {"name!", func(r *renderer, v Value, a *args) (Value, error) {
			name, err := a.must("attr", 0, "name")
			if err != nil {
				return Value{}, err
			}
			return r.attribute(v, name), nil
		}},
	}
}

// key returns what an attribute name or path of a filter picks of an item.
func (r *renderer) key(v, attribute Value) (Value, error) {
	if err := r.tick(1); err != nil {
		return Value{}, err
	}
	switch {
	case attribute.IsNone():
		return v, nil
	case !attribute.isString():
		return r.item(v, attribute)
	}
	for part := range strings.SplitSeq(r.text(attribute), ".") {
		err := r.tick(1 + len(part)/stringStep)
		if err != nil {
			return Value{}, err
		}
		k := String(part)
		if n, e := strconv.Atoi(part); e == nil && part[0] >= '0' {
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
		return String(lower(v.str))
	}
	return v
}

// keyed returns the items with the values that they are ordered by: what attribute
// picks, or def where that is undefined. several says that attribute may be names
// with commas between them.
func (r *renderer) keyed(items []Value, attribute, def Value, several, fold bool) ([][2]Value, error) {
	if err := r.listed(3 * len(items)); err != nil {
		return nil, err
	}
	out := make([][2]Value, len(items))
	for i, it := range items {
		k := it
		if attribute.kind != kindUndefined && !attribute.IsNone() {
			var parts []Value
			names := []Value{attribute}
			if several && attribute.isString() {
				names = names[:0]
				for part := range strings.SplitSeq(attribute.str, ",") {
					names = append(names, String(part))
				}
			}
			for _, name := range names {
				x, err := r.key(it, name)
				if err != nil {
					return nil, err
				}
				if x.kind == kindUndefined && !def.IsNone() {
					x = def
				}
				if fold {
					x = r.folded(x)
				}
				parts = append(parts, x)
			}
			if k = parts[0]; several {
				k = tupleOf(parts...) // of which undefined ones are equal
			}
		} else if fold {
			k = r.folded(k)
		}
		out[i] = [2]Value{k, it}
	}
	return out, r.broken
}

func (r *renderer) sorted(items []Value, attribute, def Value, several, fold, reverse bool) ([]Value, error) {
	all, err := r.keyed(items, attribute, def, several, fold)
	if err != nil {
		return nil, err
	}
	err = sortBy(all, func(a, b [2]Value) (int, error) {
		if reverse {
			a, b = b, a
		}
		return r.compare(a[0], b[0])
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
			return nil, errorf(FilterError, "Missing parameter for attribute name")
		}
		attribute, pos = pos[0], pos[1:]
	}
	check := func(v Value) (bool, error) { return v.truth(), nil }
	if len(pos) > 0 {
		t, ok := r.tests[pos[0].str]
		if !ok {
			return nil, errorf(RuntimeError, "No test named %s.", r.repr(pos[0]))
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
	return lazily(true, func(r *renderer, items []Value, a *args) ([]Value, error) {
		ok, err := r.predicate(a, skip)
		if err != nil {
			return nil, err
		}
		var out []Value
		for _, it := range items {
			yes, err := ok(it)
			if err != nil {
				return nil, err
			}
			if yes == want {
				out = append(out, it)
				r.hold(2 * valueSize)
			}
		}
		return out, nil
	})
}

func mapped(r *renderer, v Value, a *args) (Value, error) {
	return lazily(true, mappedItems)(r, v, a)
}

func mappedItems(r *renderer, items []Value, a *args) ([]Value, error) {
	if err := r.listed(len(items)); err != nil {
		return nil, err
	}
	out := make([]Value, len(items))
	if attribute, ok := a.named("attribute"); ok && len(a.pos) == 0 {
		def, hasDef := a.named("default")
		for _, name := range a.kwNames {
			if name != "attribute" && name != "default" {
				return nil, errorf(FilterError, "Unexpected keyword argument '%s'", name)
			}
		}
		for i, it := range items {
			x, err := r.key(it, attribute)
			if err != nil {
				return nil, err
			}
			if hasDef && !def.IsNone() && x.kind == kindUndefined {
				x = def
			}
			out[i] = x
		}
		return out, nil
	}
	if len(a.pos) == 0 {
		return nil, errorf(FilterError, "map requires a filter argument")
	}
	f, ok := r.filters[a.pos[0].str]
	if !ok || !a.pos[0].isString() {
		return nil, errorf(RuntimeError, "No filter named %s.", r.repr(a.pos[0]))
	}
	rest := &args{pos: a.pos[1:], kwNames: a.kwNames, kw: a.kw}
	for i, it := range items {
		var err error
		if out[i], err = f(r, it, rest); err != nil {
			return nil, err
		}
		if err := r.tick(1); err != nil {
			return nil, err
		}
	}
	return out, nil
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

func extreme(sign int) filter {
	return ofItems(func(r *renderer, items []Value, a *args) (Value, error) {
		sensitive, _ := a.get(0, "case_sensitive")
		attribute, _ := a.get(1, "attribute")
		all, err := r.keyed(items, attribute, None(), false, !sensitive.truth())
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

func sum(r *renderer, v Value, a *args) (Value, error) {
	total, ok := a.get(1, "start")
	if !ok {
		total = Int(0)
	}
	if total.isString() {
		return Value{}, errorf(TypeError, "sum() can't sum strings [use ''.join(seq) instead]")
	}
	items, err := r.iterate(v)
	if err != nil {
		return Value{}, err
	}
	attribute, _ := a.get(0, "attribute")
	all, err := r.keyed(items, attribute, None(), false, false)
	for _, x := range all {
		if err == nil {
			total, err = r.add(total, x[0])
		}
	}
	return total, err
}

func unique(r *renderer, items []Value, a *args) ([]Value, error) {
	sensitive, _ := a.get(0, "case_sensitive")
	attribute, _ := a.get(1, "attribute")
	all, err := r.keyed(items, attribute, None(), false, !sensitive.truth())
	if err != nil {
		return nil, err
	}
	seen := &Dict{}
	var out []Value
	for _, x := range all {
		if !r.hashable(x[0]) {
			return nil, errorf(TypeError, "unhashable type: '%s'", x[0].typeName())
		}
		if seen.find(r, x[0]) < 0 {
			seen.set(r, x[0], None())
			out = append(out, x[1])
			r.hold(6 * valueSize)
		}
		if err := r.tick(1 + seen.Len()/64); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func reversed(r *renderer, v Value, _ *args) (Value, error) {
	if v.isString() {
		return r.slice(v, [3]Value{None(), None(), Int(-1)})
	}
	items, err := r.iterate(v)
	if err != nil {
		return Value{}, errorf(FilterError, "argument must be iterable")
	}
	if err := r.listed(len(items)); err != nil {
		return Value{}, err
	}
	items = slices.Clone(items)
	slices.Reverse(items)
	name := "list_reverseiterator"
	if v.kind == kindGenerator {
		return List(items...), nil
	}
	return r.generated(name, func() ([]Value, error) { return items, nil }), nil
}

func batched(r *renderer, items []Value, a *args) ([]Value, error) {
	size, _ := a.get(0, "linecount")
	fill, _ := a.get(1, "fill_with")
	n := len(items) // none is as long as a size that is not positive, or no number
	if size.isInt() && size.int() > 0 {
		n = int(min(size.int(), maxRange))
	}
	var out []Value
	if len(items) > 0 && size.isInt() && size.int() == 0 {
		out = append(out, List())
	}
	for at := 0; at < len(items); at += n {
		row := items[at:min(at+n, len(items))]
		filled := len(row)
		if fill.kind != kindUndefined && !fill.IsNone() {
			if !size.isNumber() {
				return nil, errorf(TypeError, "'<' not supported between instances of 'int' and '%s'", size.typeName())
			}
			filled = max(filled, min(int(size.number()), maxRange))
		}
		if err := r.listed(2 + filled); err != nil {
			return nil, err
		}
		row = append(make([]Value, 0, filled), row...)
		for len(row) < filled {
			row = append(row, fill)
		}
		out = append(out, List(row...))
	}
	return out, nil
}

func sliced(r *renderer, items []Value, a *args) ([]Value, error) {
	n, err := a.count(0, "slices", 0)
	switch {
	case err != nil:
		return nil, errorf(TypeError, "unsupported operand type(s) for //: 'int' and 'str'")
	case n == 0:
		return nil, errorf(ZeroDivision, "integer division or modulo by zero")
	case n < 0:
		return nil, nil
	}
	fill, _ := a.get(1, "fill_with")
	if n > maxRange {
		return nil, errorf(LimitError, "more than %d slices", maxRange)
	}
	if err := r.listed(len(items) + 3*n); err != nil {
		return nil, err
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
		if fill.kind != kindUndefined && !fill.IsNone() && i >= more {
			row = append(row, fill)
		}
		out = append(out, List(row...))
	}
	return out, nil
}

// groupName marks the pairs of groupby, which have names.
const groupName = "_GroupTuple"

func grouping(r *renderer, v Value, a *args) (Value, error) {
	items, err := r.iterate(v)
	if err != nil {
		return Value{}, err
	}
	attribute, _ := a.get(0, "attribute")
	def, ok := a.get(1, "default")
	if !ok {
		def = None()
	}
	sensitive, _ := a.get(2, "case_sensitive")
	if items, err = r.sorted(items, attribute, def, false, !sensitive.truth(), false); err != nil {
		return Value{}, err
	}
	all, err := r.keyed(items, attribute, def, false, !sensitive.truth())
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
		if k.kind == kindUndefined && !def.IsNone() {
			k = def
		}
		if err := r.listed(6 + 2*len(group)); err != nil {
			return Value{}, err
		}
		pair := tupleOf(k, List(group...))
		pair.str = groupName
		out = append(out, pair)
		i = max(j, i+1)
	}
	return List(out...), r.broken
}

func dictsort(r *renderer, v Value, a *args) (Value, error) {
	sensitive, _ := a.get(0, "case_sensitive")
	by, given := a.get(1, "by")
	reverse, _ := a.get(2, "reverse")
	pick := 0
	switch {
	case !given || by.isString() && by.str == "key":
	case by.isString() && by.str == "value":
		pick = 1
	default:
		return Value{}, errorf(FilterError, `You can only sort by either "key" or "value"`)
	}
	d := v.Dict()
	switch {
	case v.kind == kindUndefined:
		return Value{}, errUndefined(v)
	case d == nil:
		return Value{}, errorf(AttributeError, "'%s' object has no attribute 'items'", v.typeName())
	}
	items, err := r.pairs(d)
	if err != nil {
		return Value{}, err
	}
	err = sortBy(items, func(x, y Value) (int, error) {
		if reverse.truth() {
			x, y = y, x
		}
		p, q := x.Items()[pick], y.Items()[pick]
		if !sensitive.truth() {
			p, q = r.folded(p), r.folded(q)
		}
		return r.compare(p, q)
	})
	return List(items...), err
}
