// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"maps"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

func filters() map[string]*builtin {
	all := map[string]*builtin{
		"default": define("default_value boolean", defaultOf),
		"map":     lazily(mapped),
		"select":  selecting(false, true), "reject": selecting(false, false), "selectattr": selecting(true, true),
		"rejectattr": selecting(true, false),
		"sort":       define("reverse case_sensitive attribute", sorted),
		"dictsort":   define("case_sensitive by reverse", dictSorted),
		"join":       define("d attribute", joined), "tojson": define("ensure_ascii indent separators sort_keys", toJSON),
		"int": define("default base", toInt), "float": define("default", toFloatOf),
		"upper": ofText(upper), "lower": ofText(lower), "capitalize": ofText(capitalized), "title": ofText(titleWords),
		"format": define("*", formatOf),
	}
	for name, f := range map[string]func(*renderer, Value) Value{
		"length": lengthOf, "list": toList, "first": firstOf, "last": lastOf, "items": itemsOf, "reverse": reversed,
		"string": (*renderer).soft, "escape": (*renderer).safe, "safe": markedSafe,
	} {
		all[name] = plain(f)
	}
	all["random"] = unsupported("the filter", "random") // of which no result is the right one
	all["trim"] = define("chars", func(r *renderer, v Value, a args) Value { return r.stripped(r.soft(v), a, true, true) })
	all["replace"] = define("old! new! count", func(r *renderer, v Value, a args) Value {
		old, replacement := String(r.text(a.values[0])), String(r.text(a.values[1]))
		return replaced(r, String(r.text(v)), args{values: []Value{old, replacement, a.values[2]}})
	})
	maps.Copy(all, moreFilters())
	maps.Copy(all, textFilters())
	for name, same := range map[string]string{"count": "length", "d": "default", "e": "escape"} {
		all[name] = all[same]
	}
	return all
}

// soft returns a value as a string. A safe string stays safe.
func (r *renderer) soft(v Value) Value {
	if v.isString() {
		return v
	}
	return String(r.text(v))
}

func markedSafe(r *renderer, v Value) Value { return Value{kind: kindSafe, str: r.text(v)} }

// ofText returns a filter that changes a string.
func ofText(f func(string) string) *builtin {
	return plain(func(r *renderer, v Value) Value { return r.changed(r.soft(v), f) })
}

// lazily returns a filter whose result is a generator: f runs, and may fail, when the
// generator is used. None and other false values count as an empty list.
func lazily(f func(r *renderer, items []Value, a args) []Value) *builtin {
	return define("*", func(r *renderer, v Value, a args) Value {
		r.listed(len(a.values))
		a = a.kept()
		return r.newGenerator(func() []Value {
			if !v.Truth() {
				return nil
			}
			return f(r, r.iterate(v), a)
		})
	})
}

func lengthOf(r *renderer, v Value) Value {
	n := 0
	switch v.kind {
	case kindUndefined:
	case kindString, kindSafe:
		r.scanned(len(v.str))
		n = utf8.RuneCountInString(v.str)
	case kindList, kindTuple, kindView, kindRange:
		n = len(v.Items())
	case kindDict:
		n = v.Dict().Len()
	case kindLoop:
		n = len(v.ref.(*loop).items)
	default:
		raise(TypeError, "object of type '%s' has no len()", v.typeName())
	}
	return Int(int64(n))
}

func toList(r *renderer, v Value) Value { return List(r.iterate(v)...) }

func defaultOf(_ *renderer, v Value, a args) Value {
	if v.kind == kindUndefined || a.values[1].Truth() && !v.Truth() {
		return a.or(0, String(""))
	}
	return v
}

func firstOf(r *renderer, v Value) Value {
	if items := r.iterate(v); len(items) > 0 {
		return items[0]
	}
	return undefined("No first item, sequence was empty.")
}

func lastOf(r *renderer, v Value) Value {
	if v.kind == kindGenerator {
		raise(TypeError, "'generator' object is not reversible")
	}
	if items := r.iterate(v); len(items) > 0 {
		return items[len(items)-1]
	}
	return undefined("No last item, sequence was empty.")
}

func itemsOf(r *renderer, v Value) Value {
	return r.newGenerator(func() []Value {
		switch v.kind {
		case kindUndefined:
			return nil
		case kindDict:
			return r.pairs(v.Dict())
		}
		panic(errorf(TypeError, "Can only get item pairs from a mapping."))
	})
}

// key returns what the attribute of a filter names in an item: a key, an index, or
// several with dots between them.
func (r *renderer) key(v, attribute Value) Value { return r.keyOr(v, attribute, None()) }

// keyOr is key with a default for each part that is undefined; None stands for no default.
func (r *renderer) keyOr(v, attribute, byDefault Value) Value {
	or := func(v Value) Value {
		if v.kind == kindUndefined && !byDefault.IsNone() && byDefault.kind != kindUndefined {
			return byDefault
		}
		return v
	}
	r.tick(1)
	switch {
	case attribute.IsNone() || attribute.kind == kindUnset:
		return v
	case !attribute.isString():
		return or(r.item(v, attribute))
	}
	for part := range strings.SplitSeq(attribute.str, ".") {
		k := String(part)
		if n, err := strconv.ParseUint(part, 10, 31); part != "" && part[0] <= '9' && err == nil {
			k = Int(int64(n))
		}
		r.tick(1 + len(part)/stringStep)
		v = or(r.item(v, k))
	}
	return v
}

// keyed is an item with the value that it is ordered by.
type keyed struct{ key, item Value }

// keys returns the items with the values that attribute names in them. Strings are in lower
// case, unless caseSensitive is true.
func (r *renderer) keys(items []Value, attribute, caseSensitive Value) []keyed {
	r.listed(3 * len(items))
	out := make([]keyed, len(items))
	for i, it := range items {
		k := r.key(it, attribute)
		if k.isString() && !caseSensitive.Truth() {
			r.tick(1 + len(k.str)/stringStep)
			k = String(lower(k.str))
		}
		out[i] = keyed{k, it}
	}
	return out
}

func sorted(r *renderer, v Value, a args) Value {
	items := r.iterate(v)
	attribute, given := a.given(2)
	if !given {
		return r.inOrder(r.keys(items, None(), a.values[1]), a.values[0].Truth())
	}
	parts := []Value{attribute}
	if attribute.isString() {
		parts = nil
		for part := range strings.SplitSeq(attribute.str, ",") {
			parts = append(parts, String(part))
		}
	}
	all := make([]keyed, len(items))
	for i, it := range items {
		all[i].item = it
	}
	keys := make([][]Value, len(items)) // as in Jinja2, lists: undefined ones are equal there
	for _, part := range parts {
		for i, k := range r.keys(items, part, a.values[1]) {
			keys[i] = append(keys[i], k.key)
		}
	}
	for i := range all {
		all[i].key = tuple(keys[i]...)
	}
	return r.inOrder(all, a.values[0].Truth())
}

func dictSorted(r *renderer, v Value, a args) Value {
	r.defined(v)
	d, pick := v.Dict(), 0
	if d == nil || v.kind != kindDict {
		raise(AttributeError, "'%s' object has no attribute 'items'", v.typeName())
	}
	switch by := a.or(1, String("key")); by.str {
	case "key":
	case "value":
		pick = 1
	default:
		raise(FilterError, `You can only sort by either "key" or "value"`)
	}
	return r.inOrder(r.keys(r.pairs(d), Int(int64(pick)), a.values[0]), a.values[2].Truth())
}

// inOrder returns the items sorted by their keys.
func (r *renderer) inOrder(all []keyed, reverse bool) Value {
	slices.SortStableFunc(all, func(x, y keyed) int {
		if reverse {
			x, y = y, x
		}
		return r.compare(x.key, y.key)
	})
	out := make([]Value, len(all))
	for i, x := range all {
		out[i] = x.item
	}
	return List(out...)
}

func reversed(r *renderer, v Value) Value {
	if v.isString() {
		return r.slice(v, None(), None(), Int(-1))
	}
	if !isSequence(v) && v.kind != kindView && v.kind != kindGenerator {
		raise(FilterError, "argument must be iterable")
	}
	items := r.iterate(v)
	r.listed(len(items))
	items = slices.Clone(items)
	slices.Reverse(items)
	if v.kind == kindGenerator {
		return List(items...)
	}
	return r.newGenerator(func() []Value { return items })
}

// selecting returns one of the filters select, reject, selectattr and rejectattr.
func selecting(byAttribute, want bool) *builtin {
	return lazily(func(r *renderer, items []Value, a args) (out []Value) {
		attribute := None()
		if byAttribute {
			if len(a.positional()) == 0 {
				raise(FilterError, "Missing parameter for attribute name")
			}
			attribute, a.values = a.values[0], a.values[1:]
		}
		var test *builtin
		if len(a.positional()) > 0 {
			name := a.values[0]
			if test = r.library.tests[name.str]; test == nil || !name.isString() {
				raise(RuntimeError, "No test named %s.", r.repr(name))
			}
			a.values = a.values[1:]
		}
		for _, it := range items {
			r.tick(itemSteps)
			is := r.key(it, attribute)
			if test != nil {
				is = r.invoke(test, is, a)
			}
			if is.Truth() == want {
				out = append(out, it)
				r.hold(2 * valueSize)
			}
		}
		return out
	})
}

// mapped is the filter map: it applies a filter, or reads an attribute.
func mapped(r *renderer, items []Value, a args) []Value {
	r.listed(len(items))
	out := make([]Value, len(items))
	if attribute, ok := a.named("attribute"); ok && len(a.positional()) == 0 {
		byDefault, given := a.named("default")
		if !given {
			byDefault = None()
		}
		if i := slices.IndexFunc(a.names, func(n string) bool { return n != "attribute" && n != "default" }); i >= 0 {
			raise(FilterError, "Unexpected keyword argument '%s'", a.names[i])
		}
		for i, it := range items {
			out[i] = r.keyOr(it, attribute, byDefault)
		}
		return out
	}
	if len(a.positional()) == 0 {
		raise(FilterError, "map requires a filter argument")
	}
	name := a.values[0]
	f := r.library.filters[name.str]
	if f == nil || !name.isString() {
		raise(RuntimeError, "No filter named %s.", r.repr(name))
	}
	a.values = a.values[1:]
	for i, it := range items {
		r.tick(1)
		out[i] = r.invoke(f, it, a)
	}
	return out
}

func joined(r *renderer, v Value, a args) Value {
	sep := r.text(a.or(0, String("")))
	start := len(r.out)
	for i, it := range r.iterate(v) {
		if i > 0 {
			r.write(String(sep))
		}
		r.tick(1)
		r.write(r.key(it, a.values[1]))
	}
	return String(r.cut(start))
}

// truncated returns a float as an integer.
func truncated(f float64) Value {
	switch {
	case math.IsInf(f, 0):
		raise(OverflowError, "cannot convert float infinity to integer")
	case math.IsNaN(f):
		raise(ValueError, "cannot convert float NaN to integer")
	}
	return integer(strconv.FormatFloat(math.Trunc(f)+0, 'f', 0, 64))
}

// toInt is int: the default where v is not a number.
func toInt(r *renderer, v Value, a args) Value {
	r.defined(v)
	switch {
	case v.kind == kindFloat && !math.IsNaN(v.float()):
		return truncated(v.float())
	case v.kind == kindBig || v.kind == kindInt:
		return v
	case v.kind == kindBool:
		return Int(v.int())
	case v.isString():
		s := r.numeral(v.str)
		if n, ok := parseInt(s, a.integer(1, 10)); ok {
			return n
		}
		if f, err := strconv.ParseFloat(s, 64); err == nil && !math.IsInf(f, 0) && !math.IsNaN(f) {
			return truncated(f)
		}
	}
	return a.or(0, Int(0))
}

// parseInt is Python's int of a text without white space around it.
func parseInt(s string, base int) (Value, bool) {
	if base != 0 && (base < 2 || base > 36) {
		return Value{}, false
	}
	sign, digits := "", s
	if digits != "" && strings.ContainsRune("+-", rune(digits[0])) {
		sign, digits = strings.TrimPrefix(digits[:1], "+"), digits[1:]
	}
	for _, p := range []struct {
		text string
		base int
	}{{"0x", 16}, {"0o", 8}, {"0b", 2}} {
		if rest, ok := strings.CutPrefix(lower(digits), p.text); ok && (base == 0 || base == p.base) {
			base, digits = p.base, strings.TrimPrefix(rest, "_")
			break
		}
	}
	if base == 0 {
		if base = 10; strings.HasPrefix(digits, "0") && strings.Trim(digits, "0_") != "" {
			return Value{}, false
		}
	}
	n, ok := new(big.Int).SetString(sign+digits, base)
	if !ok || strings.HasPrefix(digits, "+") || strings.HasPrefix(digits, "-") {
		return Value{}, false
	}
	return integer(n.String()), true
}

func toFloatOf(r *renderer, v Value, a args) Value {
	r.defined(v)
	switch {
	case v.isNumber():
		return Float(toFloat(v))
	case v.isString():
		if f, err := strconv.ParseFloat(r.numeral(v.str), 64); err == nil || math.IsInf(f, 0) {
			return Float(f)
		}
	}
	return a.or(0, Float(0))
}

// numeral returns the text of a number without the white space around it and with ASCII digits. Underscores
// between digits are left out. A text that Python does not read is empty.
func (r *renderer) numeral(s string) string {
	r.tick(1 + len(s)/4)
	s = strings.TrimFunc(s, isSpace)
	if len(s) > 4300 {
		return ""
	}
	if !isASCII(s) {
		s = strings.Map(func(c rune) rune {
			if unicode.IsDigit(c) {
				return '0' + decimalOf(c)
			}
			return c
		}, s)
	}
	if !strings.Contains(s, "_") {
		return s
	}
	for i := range len(s) {
		if s[i] == '_' && (i == 0 || i+1 == len(s) || !isWordByte(s[i-1]) || !isWordByte(s[i+1])) {
			return ""
		}
	}
	return strings.ReplaceAll(s, "_", "")
}

// isWordByte reports whether an underscore may stand beside a character of a number.
func isWordByte(c byte) bool { return '0' <= c && c <= '9' || 'a' <= c|0x20 && c|0x20 <= 'z' }

// decimalOf returns the value of a decimal digit: each ten of them follow each other.
func decimalOf(c rune) rune {
	for n := range rune(10) {
		if !unicode.IsDigit(c - n - 1) {
			return n % 10
		}
	}
	// A run of several tens, as the mathematical digits.
	from := c
	for unicode.IsDigit(from - 1) {
		from--
	}
	return (c - from) % 10
}
