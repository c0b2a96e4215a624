// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// methods holds the methods of one name: nil if a kind of value does not have the method.
type methods struct{ ofString, ofSafe, ofDict, ofList, ofTuple *builtin }

//nolint:gochecknoglobals // a constant
var noMethods = &methods{}

// named returns the methods of a name.
func (l *library) named(name string) *methods {
	if m := l.methods[name]; m != nil {
		return m
	}
	return noMethods
}

// of returns the method of v, nil if v does not have it.
func (m *methods) of(v Value) *builtin {
	switch v.kind {
	case kindSafe:
		if m.ofSafe != nil {
			return m.ofSafe
		}
		return m.ofString
	case kindString:
		return m.ofString
	case kindDict:
		return m.ofDict
	case kindList:
		return m.ofList
	case kindTuple, kindRange:
		return m.ofTuple
	}
	return nil
}

// Methods that the sandbox forbids because they change a value.
const (
	changesOfDict = "update pop popitem setdefault clear"
	changesOfList = "append extend insert pop remove clear sort reverse"
)

//nolint:gochecknoglobals // a constant
var forbidden = define("*", func(_ *renderer, v Value, _ args) Value {
	return raise(SecurityError, "a method that would change a %s", v.typeName())
})

func allMethods() map[string]*methods {
	all := map[string]*methods{}
	named := func(name string) *methods {
		if all[name] == nil {
			all[name] = &methods{}
		}
		return all[name]
	}
	for name, b := range stringMethods() {
		named(name).ofString = b
	}
	for name := range strings.FieldsSeq(changesOfDict) {
		named(name).ofDict = forbidden
	}
	for name := range strings.FieldsSeq(changesOfList) {
		named(name).ofList = forbidden
	}
	for name, b := range rareMethods() {
		named(name).ofString = b
	}
	for name, b := range safeMethods() {
		named(name).ofSafe = b
	}
	named("format").ofString, named("format_map").ofString = define("*", formatted), define("_!", formattedByMap)
	named("encode").ofString = unsupported("the method", "encode")
	named("get").ofDict = define("_! _", func(r *renderer, v Value, a args) Value {
		if x, ok := r.lookup(v.Dict(), a.values[0]); ok {
			return x
		}
		return a.or(1, None())
	})
	named("fromkeys").ofDict = define("_! _", func(r *renderer, _ Value, a args) Value {
		keys := r.iterate(a.values[0])
		r.listed(3 * len(keys))
		d := &Dict{}
		for _, k := range keys {
			r.setKey(d, k, a.or(1, None()))
		}
		return FromDict(d)
	})
	named("keys").ofDict = plain(func(r *renderer, v Value) Value { return r.view("dict_keys", v.Dict().keys) })
	named("values").ofDict = plain(func(r *renderer, v Value) Value { return r.view("dict_values", v.Dict().values) })
	named("items").ofDict = plain(func(r *renderer, v Value) Value { return r.view("dict_items", r.pairs(v.Dict())) })
	itself := plain(func(_ *renderer, v Value) Value { return v })
	named("copy").ofDict, named("copy").ofList = itself, itself
	named("count").ofList = define("_!", func(r *renderer, v Value, a args) Value {
		n := 0
		for _, it := range v.Items() {
			r.tick(1)
			if r.equal(it, a.values[0]) {
				n++
			}
		}
		return Int(int64(n))
	})
	named("index").ofList = define("_! _ _", func(r *renderer, v Value, a args) Value {
		items := v.Items()
		bound := func(i, byDefault int) int {
			x := a.integer(i, byDefault)
			if x < 0 {
				return max(x+len(items), 0)
			}
			return min(x, len(items))
		}
		for i, to := bound(1, 0), bound(2, len(items)); i < to; i++ {
			r.tick(1)
			if r.equal(items[i], a.values[0]) {
				return Int(int64(i))
			}
		}
		return raise(ValueError, "%s is not in list", r.repr(a.values[0]))
	})
	named("count").ofTuple, named("index").ofTuple = named("count").ofList, named("index").ofList
	return all
}

// view is the result of a dictionary's method.
func (r *renderer) view(name string, items []Value) Value {
	r.hold(boxSize)
	return Value{kind: kindView, str: name, ref: &list{items: items}}
}

// pairs returns the keys and values of a dictionary as tuples.
func (r *renderer) pairs(d *Dict) []Value {
	r.listed(5 * d.Len())
	items, pairs, boxes := make([]Value, d.Len()), make([]Value, 2*d.Len()), make([]list, d.Len())
	for i := range items {
		boxes[i].items = pairs[2*i : 2*i+2 : 2*i+2]
		boxes[i].items[0], boxes[i].items[1] = d.keys[i], d.values[i]
		items[i] = Value{kind: kindTuple, ref: &boxes[i]}
	}
	return items
}

func stringMethods() map[string]*builtin {
	all := map[string]*builtin{
		"replace": define("_! _! _", replaced), "join": define("_!", joinTexts),
		"find": finding(strings.Index, false), "rfind": finding(strings.LastIndex, false),
		"index":      finding(strings.Index, true),
		"startswith": affix(strings.HasPrefix), "endswith": affix(strings.HasSuffix),
		"count": define("_! _ _", func(r *renderer, v Value, a args) Value {
			s, _, ok := r.part(v, a)
			if !ok {
				return Int(0)
			}
			return Int(int64(strings.Count(s, a.text(0))))
		}),
	}
	for name, f := range map[string]func(string) string{
		"upper": upper, "lower": lower, "capitalize": capitalized, "title": titled,
	} {
		all[name] = plain(func(r *renderer, v Value) Value { return r.changed(v, f) })
	}
	for name, sides := range map[string][2]bool{"strip": {true, true}, "lstrip": {true, false}, "rstrip": {false, true}} {
		all[name] = define("_", func(r *renderer, v Value, a args) Value { return r.stripped(v, a, sides[0], sides[1]) })
	}
	for name, fromRight := range map[string]bool{"split": false, "rsplit": true} {
		all[name] = define("sep maxsplit", func(r *renderer, v Value, a args) Value { return r.split(v, a, fromRight) })
	}
	for name, cut := range map[string]func(s, affix string) string{
		"removeprefix": strings.TrimPrefix, "removesuffix": strings.TrimSuffix,
	} {
		all[name] = define("_!", func(_ *renderer, v Value, a args) Value { return v.withText(cut(v.str, a.text(0))) })
	}
	return all
}

// changed applies f to a string.
func (r *renderer) changed(v Value, f func(string) string) Value {
	r.tick(len(v.str) / 8)
	s := f(v.str)
	r.made(len(s))
	return v.withText(s)
}

// stripped removes white space, or the characters in argument 0, on both sides.
func (r *renderer) stripped(v Value, a args, left, right bool) Value {
	is, set := isSpace, ""
	if _, given := a.given(0); given {
		set = a.text(0)
		is = func(c rune) bool { return strings.ContainsRune(set, c) }
	}
	s := v.str
	if left {
		s = strings.TrimLeftFunc(s, is)
	}
	if right {
		s = strings.TrimRightFunc(s, is)
	}
	r.tick((len(v.str) - len(s)) / 8 * (1 + len(set)/8))
	return v.withText(s)
}

// affix returns startswith or endswith, for one string or any of a tuple.
func affix(has func(s, x string) bool) *builtin {
	return define("_! _ _", func(r *renderer, v Value, a args) Value {
		of := a.values[:1]
		if of[0].kind == kindTuple {
			of = of[0].Items()
		}
		s, _, ok := r.part(v, a)
		for _, x := range of {
			if !x.isString() {
				raise(TypeError, "first argument must be str or a tuple of str, not %s", x.typeName())
			}
			r.scanned(len(x.str))
			if ok && has(s, x.str) {
				return Bool(true)
			}
		}
		return Bool(false)
	})
}

func finding(index func(s, x string) int, mustFind bool) *builtin {
	return define("_! _ _", func(r *renderer, v Value, a args) Value {
		x := a.text(0)
		s, skipped, ok := r.part(v, a)
		if i := index(s, x); i >= 0 && ok {
			return Int(int64(skipped + utf8.RuneCountInString(s[:i])))
		}
		if mustFind {
			raise(ValueError, "substring not found")
		}
		return Int(-1)
	})
}

// split cuts a string at a separator, or at runs of white space.
func (r *renderer) split(v Value, a args, fromRight bool) Value {
	r.scanned(4 * len(v.str))
	limit := a.integer(1, -1)
	if _, given := a.given(0); !given {
		if limit >= 0 {
			return r.texts(r.fields(v.str, limit, fromRight), v)
		}
		r.hold(len(v.str) * valueSize / 4)
		return r.texts(strings.FieldsFunc(v.str, isSpace), v)
	}
	sep := a.text(0)
	if sep == "" {
		raise(ValueError, "empty separator")
	}
	n := strings.Count(v.str, sep)
	if limit < 0 {
		limit = n
	}
	r.listed(min(limit, n))
	if !fromRight {
		return r.texts(strings.SplitN(v.str, sep, limit+1), v)
	}
	var parts []string
	s := v.str
	for i := strings.LastIndex(s, sep); i >= 0 && limit > 0; i = strings.LastIndex(s, sep) {
		parts, s = append(parts, s[i+len(sep):]), s[:i]
		limit--
	}
	parts = append(parts, s)
	slices.Reverse(parts)
	return r.texts(parts, v)
}

// fields cuts a string at runs of white space, at most limit times, from the left or from the right.
func (r *renderer) fields(s string, limit int, fromRight bool) (parts []string) {
	trim, index := strings.TrimLeftFunc, strings.IndexFunc
	if fromRight {
		trim, index = strings.TrimRightFunc, strings.LastIndexFunc
	}
	for s = trim(s, isSpace); s != ""; s = trim(s, isSpace) {
		r.hold(valueSize)
		i := index(s, isSpace)
		if i < 0 || limit == 0 {
			if parts = append(parts, s); limit == 0 && fromRight {
				parts[len(parts)-1] = s
			}
			break
		}
		_, n := utf8.DecodeRuneInString(s[i:])
		limit--
		if fromRight {
			parts, s = append(parts, s[i+n:]), s[:i]
		} else {
			parts, s = append(parts, s[:i]), s[i+n:]
		}
	}
	if fromRight {
		slices.Reverse(parts)
	}
	return parts
}

// texts returns parts as a list of strings, safe ones if like is safe.
func (r *renderer) texts(parts []string, like Value) Value {
	r.listed(len(parts))
	items := make([]Value, len(parts))
	for i, p := range parts {
		items[i] = like.withText(p)
	}
	return List(items...)
}

// replaced is str.replace. A safe string escapes what it puts in.
func replaced(r *renderer, v Value, a args) Value {
	old, replacement := a.text(0), a.text(1)
	if v.kind == kindSafe {
		replacement = r.safe(a.values[1]).str
	}
	n := -1
	if _, given := a.given(2); given {
		n = a.integer(2, -1)
	}
	times := strings.Count(v.str, old)
	if n >= 0 {
		times = min(times, n)
	}
	r.made(len(v.str) + times*len(replacement))
	return v.withText(strings.Replace(v.str, old, replacement, n))
}

// joinTexts is str.join. A safe string escapes what it joins.
func joinTexts(r *renderer, v Value, a args) Value {
	items := r.iterate(a.values[0])
	r.listed(len(items))
	size, parts := 0, make([]string, len(items))
	for i, it := range items {
		if v.kind == kindSafe {
			it = r.safe(it)
		} else if !it.isString() {
			raise(TypeError, "sequence item %d: expected str instance, %s found", i, it.typeName())
		}
		parts[i] = it.str
		size += len(it.str) + len(v.str)
	}
	r.made(size)
	return v.withText(strings.Join(parts, v.str))
}
