// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"slices"
	"strings"
	"sync"
)

// methodFunc is a method of Python's strings, lists or dictionaries.
type methodFunc func(r *renderer, v Value, a *args) (Value, error)

// methods are those of one name.
type methods struct{ ofString, ofSafe, ofDict, ofList, ofTuple, ofRange methodFunc }

// methodTables are the methods of all kinds of values.
type methodTables struct{ ofString, ofSafe, ofDict, ofList map[string]methodFunc }

func tablesOfMethods() methodTables {
	return methodTables{stringMethods(), safeMethods(), dictMethods(), listMethods()}
}

func (t *methodTables) named(name string) methods {
	m := methods{ofString: t.ofString[name], ofDict: t.ofDict[name], ofList: t.ofList[name]}
	m.ofSafe = m.ofString
	if f := t.ofSafe[name]; f != nil {
		m.ofSafe = f
	}
	if name == "index" || name == "count" {
		m.ofTuple, m.ofRange = m.ofList, m.ofList
	}
	return m
}

// of returns the method of v, nil if it has none of that name.
func (m *methods) of(v Value) methodFunc {
	switch v.kind {
	case kindString:
		return m.ofString
	case kindSafe:
		return m.ofSafe
	case kindDict:
		return m.ofDict
	case kindList:
		return m.ofList
	case kindTuple:
		return m.ofTuple
	case kindRange:
		return m.ofRange
	}
	return nil
}

// methodOf returns a method of v, nil if it has none of that name.
func (r *renderer) methodOf(v Value, name string) methodFunc {
	m := r.methods.named(name)
	return m.of(v)
}

// attribute is v.name, or undefined.
func (r *renderer) attribute(v Value, name string) Value {
	if m := r.methodOf(v, name); m != nil {
		return r.bound(v, name, m)
	}
	if x, ok := field(v, name); ok {
		return x
	}
	return noAttribute(v, name)
}

// field is an attribute of v that is no method.
func field(v Value, name string) (Value, bool) {
	switch {
	case v.kind == kindRange:
		s := v.ref.(*span)
		switch name {
		case "start":
			return Int(s.start), true
		case "stop":
			return Int(s.stop), true
		case "step":
			return Int(s.step), true
		}
	case v.kind == kindTuple && v.str == groupName:
		switch name {
		case "grouper":
			return v.Items()[0], true
		case "list":
			return v.Items()[1], true
		}
	}
	return Value{}, false
}

// bound returns a method of v as a value.
func (r *renderer) bound(v Value, name string, m methodFunc) Value {
	return r.funcOf(name, func(r *renderer, a *args) (Value, error) { return m(r, v, a) })
}

// signature says which arguments something takes: least and most positional ones,
// of which those in names may be given by name. A most below zero is any number.
type signature struct {
	least, most int
	names       []string
}

// check fails for arguments that what is called does not take.
func (s *signature) check(name string, a *args) error {
	if len(a.kwNames) == 0 && len(a.pos) >= s.least && (len(a.pos) <= s.most || s.most < 0) {
		return nil
	}
	if len(a.pos) > s.most && s.most >= 0 {
		return errorf(TypeError, "%s() takes at most %d arguments (%d given)", name, s.most, len(a.pos))
	}
	for k, kw := range a.kwNames {
		i := slices.Index(s.names, kw)
		switch {
		case i < 0 || kw == "":
			return errorf(TypeError, "%s() got an unexpected keyword argument '%s'", name, kw)
		case i < len(a.pos) || slices.Contains(a.kwNames[:k], kw):
			return errorf(TypeError, "%s() got multiple values for argument '%s'", name, kw)
		}
	}
	for i := len(a.pos); i < s.least; i++ {
		if i >= len(s.names) || !slices.Contains(a.kwNames, s.names[i]) {
			return errorf(TypeError, "%s() is missing argument %d", name, i+1)
		}
	}
	return nil
}

// taking returns f as a method that takes least to most arguments, with those names
// if they may be given by name.
func taking(name string, least, most int, f methodFunc, names ...string) methodFunc {
	s := &signature{least, most, names}
	return func(r *renderer, v Value, a *args) (Value, error) {
		if err := s.check(name, a); err != nil {
			return Value{}, err
		}
		return f(r, v, a)
	}
}

// bytesOf is what stands for a method that gives bytes, which templates do not have
// here.
func bytesOf(_ *renderer, _ Value, _ *args) (Value, error) {
	return Value{}, errorf(LimitError, "values of type bytes")
}

// changes reports whether a method of that name would change v, which the sandbox
// does not allow.
func changes(v Value, name string) bool {
	switch v.kind {
	case kindDict:
		return slices.Contains([]string{"update", "pop", "popitem", "setdefault", "clear"}, name)
	case kindList:
		return slices.Contains([]string{"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"}, name)
	}
	return false
}

var dictMethods = sync.OnceValue(func() map[string]methodFunc { //nolint:gochecknoglobals // a table
	return map[string]methodFunc{
		"get": taking("get", 1, 2, func(r *renderer, v Value, a *args) (Value, error) {
			if !r.hashable(a.pos[0]) {
				return Value{}, errorf(TypeError, "unhashable type: '%s'", a.pos[0].typeName())
			}
			if x, ok := v.ref.(*Dict).get(r, a.pos[0]); ok {
				return x, nil
			}
			if len(a.pos) > 1 {
				return a.pos[1], nil
			}
			return None(), nil
		}),
		"items": taking("items", 0, 0, func(r *renderer, v Value, _ *args) (Value, error) {
			items, err := r.pairs(v.ref.(*Dict))
			return view("dict_items", items), err
		}),
		"keys": taking("keys", 0, 0, func(r *renderer, v Value, _ *args) (Value, error) {
			return view("dict_keys", v.ref.(*Dict).keys), r.listed(0)
		}),
		"values": taking("values", 0, 0, func(r *renderer, v Value, _ *args) (Value, error) {
			return view("dict_values", v.ref.(*Dict).values), r.listed(0)
		}),
		"copy": taking("copy", 0, 0, func(r *renderer, v Value, _ *args) (Value, error) { return v, nil }),
		"fromkeys": taking("fromkeys", 1, 2, func(r *renderer, _ Value, a *args) (Value, error) {
			keys, err := r.iterate(a.pos[0])
			if err != nil {
				return Value{}, err
			}
			value := None()
			if len(a.pos) > 1 {
				value = a.pos[1]
			}
			if err := r.listed(3 * len(keys)); err != nil {
				return Value{}, err
			}
			d := NewDict(len(keys))
			for _, k := range keys {
				if !r.hashable(k) {
					return Value{}, errorf(TypeError, "unhashable type: '%s'", k.typeName())
				}
				d.set(r, k, value)
			}
			return FromDict(d), r.broken
		}),
	}
})

// view is what the methods of a dictionary give.
func view(name string, items []Value) Value {
	return Value{kind: kindView, str: name, ref: &list{items: items}}
}

func (r *renderer) pairs(d *Dict) ([]Value, error) {
	if err := r.listed(5 * d.Len()); err != nil {
		return nil, err
	}
	items := make([]Value, d.Len())
	backing := make([]Value, 2*d.Len())
	boxes := make([]list, d.Len())
	for i := range items {
		p := backing[2*i : 2*i+2 : 2*i+2]
		p[0], p[1] = d.keys[i], d.values[i]
		boxes[i].items = p
		items[i] = Value{kind: kindTuple, ref: &boxes[i]}
	}
	return items, nil
}

var listMethods = sync.OnceValue(func() map[string]methodFunc { //nolint:gochecknoglobals // a table
	return map[string]methodFunc{
		"index": taking("index", 1, 3, func(r *renderer, v Value, a *args) (Value, error) {
			items, err := r.iterate(v)
			if err != nil {
				return Value{}, err
			}
			lo, hi, err := a.bounds(1, len(items))
			if err != nil {
				return Value{}, err
			}
			for i := lo; i < hi; i++ {
				if !r.spend(1) {
					return Value{}, r.broken
				}
				if r.equal(items[i], a.pos[0]) {
					return Int(int64(i)), nil
				}
			}
			return Value{}, errorf(ValueError, "value is not in list")
		}),
		"count": taking("count", 1, 1, func(r *renderer, v Value, a *args) (Value, error) {
			items, err := r.iterate(v)
			if err != nil {
				return Value{}, err
			}
			n := 0
			for _, it := range items {
				if !r.spend(1) {
					return Value{}, r.broken
				}
				if r.equal(it, a.pos[0]) {
					n++
				}
			}
			return Int(int64(n)), nil
		}),
		"copy": taking("copy", 0, 0, func(r *renderer, v Value, _ *args) (Value, error) { return v, nil }),
	}
})

// bounds reads a start and an end of n items from the arguments i and i+1, as slices
// have them. lo may be behind hi, and behind n.
func (a *args) bounds(i, n int) (lo, hi int, err error) {
	hi = n
	for k, to := range []*int{&lo, &hi} {
		if i+k >= len(a.pos) || a.pos[i+k].IsNone() {
			continue
		}
		v := a.pos[i+k]
		if !v.isInt() {
			return 0, 0, errorf(TypeError, "slice indices must be integers or None or have an __index__ method")
		}
		x := v.int()
		if x < 0 {
			x = max(x+int64(n), 0)
		}
		*to = int(min(x, int64(n)+1))
	}
	return lo, min(hi, n), nil
}

// word returns the string that an argument must be; def where it is absent or None.
func (a *args) word(f string, i int, name, def string) (string, error) {
	v, ok := a.get(i, name)
	switch {
	case !ok || v.IsNone():
		return def, nil
	case v.kind == kindUndefined:
		return "", errorf(TypeError, "%s() argument %d must be str, not Undefined", f, i+1)
	case !v.isString():
		return "", errorf(TypeError, "%s() argument %d must be str, not %s", f, i+1, v.typeName())
	}
	return v.str, nil
}

// must is word for an argument that cannot be None.
func (a *args) must(f string, i int, name string) (string, error) {
	if v, _ := a.get(i, name); v.IsNone() {
		return "", errorf(TypeError, "%s() argument %d must be str, not None", f, i+1)
	}
	return a.word(f, i, name, "")
}

// count returns the integer that an argument must be; def where it is absent.
func (a *args) count(i int, name string, def int) (int, error) {
	v, ok := a.get(i, name)
	switch {
	case !ok:
		return def, nil
	case v.kind == kindBig:
		return 0, errorf(OverflowError, "Python int too large to convert to C ssize_t")
	case !v.isInt():
		return 0, errorf(TypeError, "'%s' object cannot be interpreted as an integer", v.typeName())
	}
	const limit = 1 << 30
	return int(min(max(v.int(), -limit), limit)), nil
}

// trimmed is strip, lstrip and rstrip: chars is None or a set of characters.
func (r *renderer) trimmed(v Value, a *args, f string, left, right bool) (Value, error) {
	set, err := a.word(f, 0, "chars", "")
	if err != nil {
		return Value{}, err
	}
	is := isSpace
	chars, given := a.get(0, "chars")
	if given = given && !chars.IsNone(); given {
		is = func(r rune) bool { return strings.ContainsRune(set, r) }
	}
	s := v.str
	if left {
		s = strings.TrimLeftFunc(s, is)
	}
	if right {
		s = strings.TrimRightFunc(s, is)
	}
	n := (len(v.str) - len(s)) / 8
	if given {
		n *= 1 + len(set)/8
	}
	return Value{kind: v.kind, str: s}, r.tick(n)
}
