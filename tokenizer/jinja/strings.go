// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"html"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// text returns a method that takes no arguments and makes another string.
func textMethod(name string, f func(string) string) methodFunc {
	return taking(name, 0, 0, func(r *renderer, v Value, _ *args) (Value, error) {
		if err := r.tick(len(v.str) / 8); err != nil {
			return Value{}, err
		}
		s := f(v.str)
		return Value{kind: v.kind, str: s}, r.made(len(s))
	})
}

func isMethod(name string, f func(string) bool) methodFunc {
	return taking(name, 0, 0, func(r *renderer, v Value, _ *args) (Value, error) {
		return Bool(f(v.str)), r.tick(len(v.str) / 8)
	})
}

// every returns a test that all characters of a string that is not empty pass.
func every(f func(rune) bool) func(string) bool {
	return func(s string) bool { return s != "" && strings.IndexFunc(s, func(r rune) bool { return !f(r) }) < 0 }
}

// part returns the characters of v between the arguments i and i+1, and how many
// stand before them; !ok if there is no such place.
func (r *renderer) part(v Value, a *args, i int) (s string, skipped int, ok bool, err error) {
	if len(a.pos) <= i {
		return v.str, 0, true, nil
	}
	if err := r.tick(len(v.str) / stringStep); err != nil {
		return "", 0, false, err
	}
	lo, hi, err := a.bounds(i, utf8.RuneCountInString(v.str))
	if err != nil || lo > hi {
		return "", 0, false, err
	}
	return sliceString(v.str, Int(int64(lo)), Int(int64(hi))), lo, true, nil
}

func affixMethod(name string, has func(s, x string) bool) methodFunc {
	return taking(name, 1, 3, func(r *renderer, v Value, a *args) (Value, error) {
		of := a.pos[:1]
		if a.pos[0].kind == kindTuple {
			of = a.pos[0].Items()
		}
		s, _, ok, err := r.part(v, a, 1)
		if err != nil {
			return Value{}, err
		}
		for _, x := range of {
			if !r.spend(1 + min(len(x.str), len(s))/scanStep) {
				return Value{}, r.broken
			}
			if !x.isString() {
				return Value{}, errorf(TypeError, "%s first arg must be str or a tuple of str, not %s", name, x.typeName())
			}
			if ok && has(s, x.str) {
				return Bool(true), nil
			}
		}
		return Bool(false), nil
	})
}

func findMethod(name string, last, must bool) methodFunc {
	return taking(name, 1, 3, func(r *renderer, v Value, a *args) (Value, error) {
		x, err := a.must(name, 0, "")
		if err != nil {
			return Value{}, err
		}
		s, skipped, ok, err := r.part(v, a, 1)
		if err != nil {
			return Value{}, err
		}
		if err := r.tick(len(s) / stringStep); err != nil {
			return Value{}, err
		}
		i := -1
		switch {
		case ok && last:
			i = strings.LastIndex(s, x)
		case ok:
			i = strings.Index(s, x)
		}
		switch {
		case i >= 0:
			return Int(int64(skipped + utf8.RuneCountInString(s[:i]))), nil
		case must:
			return Value{}, errorf(ValueError, "substring not found")
		}
		return Int(-1), nil
	})
}

func partitionMethod(name string, last bool) methodFunc {
	return taking(name, 1, 1, func(r *renderer, v Value, a *args) (Value, error) {
		sep, err := a.must(name, 0, "")
		if err != nil {
			return Value{}, err
		}
		if sep == "" {
			return Value{}, errorf(ValueError, "empty separator")
		}
		if err := r.listed(3 + len(v.str)/scanStep); err != nil {
			return Value{}, err
		}
		i := strings.Index(v.str, sep)
		if last {
			i = strings.LastIndex(v.str, sep)
		}
		like := func(s string) Value { return Value{kind: v.kind, str: s} }
		switch {
		case i < 0 && last:
			return tupleOf(like(""), like(""), v), nil
		case i < 0:
			return tupleOf(v, like(""), like("")), nil
		}
		return tupleOf(like(v.str[:i]), like(sep), like(v.str[i+len(sep):])), nil
	})
}

func padMethod(name string, left, right bool) methodFunc {
	return taking(name, 1, 2, func(r *renderer, v Value, a *args) (Value, error) {
		width, err := a.count(0, "", 0)
		if err != nil {
			return Value{}, err
		}
		fill := " "
		if len(a.pos) > 1 {
			if fill, err = a.must(name, 1, ""); err != nil {
				return Value{}, err
			}
			if v.kind == kindSafe && a.pos[1].kind == kindString {
				fill = r.escaped(fill)
			}
		}
		if utf8.RuneCountInString(fill) != 1 {
			return Value{}, errorf(TypeError, "The fill character must be exactly one character long")
		}
		if err := r.scanned(len(v.str)); err != nil {
			return Value{}, err
		}
		n := width - utf8.RuneCountInString(v.str)
		if n <= 0 {
			return v, nil
		}
		if err := r.made(len(v.str) + n*len(fill)); err != nil {
			return Value{}, err
		}
		before := 0
		if left {
			before = n
			if right {
				before = n/2 + n&width&1
			}
		}
		return Value{kind: v.kind, str: strings.Repeat(fill, before) + v.str + strings.Repeat(fill, n-before)}, nil
	})
}

func stripMethod(name string, left, right bool) methodFunc {
	return taking(name, 0, 1, func(r *renderer, v Value, a *args) (Value, error) { return r.trimmed(v, a, name, left, right) })
}

func affixless(name string, cut func(s, x string) string) methodFunc {
	return taking(name, 1, 1, func(_ *renderer, v Value, a *args) (Value, error) {
		x, err := a.must(name, 0, "")
		return Value{kind: v.kind, str: cut(v.str, x)}, err
	})
}

var stringMethods = sync.OnceValue(func() map[string]methodFunc { //nolint:gochecknoglobals // a table
	return map[string]methodFunc{
		"strip": stripMethod("strip", true, true), "lstrip": stripMethod("lstrip", true, false), "rstrip": stripMethod("rstrip", false, true),
		"upper": textMethod("upper", upper), "lower": textMethod("lower", lower), "casefold": textMethod("casefold", casefold),
		"title": textMethod("title", titled), "capitalize": textMethod("capitalize", capitalized), "swapcase": textMethod("swapcase", swapcase),
		"split":      taking("split", 0, 2, func(r *renderer, v Value, a *args) (Value, error) { return r.split(v, a, false) }, "sep", "maxsplit"),
		"rsplit":     taking("rsplit", 0, 2, func(r *renderer, v Value, a *args) (Value, error) { return r.split(v, a, true) }, "sep", "maxsplit"),
		"splitlines": taking("splitlines", 0, 1, splitLines, "keepends"),
		"startswith": affixMethod("startswith", strings.HasPrefix), "endswith": affixMethod("endswith", strings.HasSuffix),
		"find": findMethod("find", false, false), "rfind": findMethod("rfind", true, false), "index": findMethod("index", false, true), "rindex": findMethod("rindex", true, true),
		"partition": partitionMethod("partition", false), "rpartition": partitionMethod("rpartition", true),
		"ljust": padMethod("ljust", false, true), "rjust": padMethod("rjust", true, false), "center": padMethod("center", true, true),
		"replace":      taking("replace", 2, 3, func(r *renderer, v Value, a *args) (Value, error) { return r.replace(v, a) }),
		"removeprefix": affixless("removeprefix", strings.TrimPrefix), "removesuffix": affixless("removesuffix", strings.TrimSuffix),
		"count": taking("count", 1, 3, func(r *renderer, v Value, a *args) (Value, error) {
			x, err := a.must("count", 0, "")
			if err != nil {
				return Value{}, err
			}
			s, _, ok, err := r.part(v, a, 1)
			if err != nil || !ok {
				return Int(0), err
			}
			return Int(int64(strings.Count(s, x))), r.tick(len(s) / stringStep)
		}),
		"join": taking("join", 1, 1, joinStrings), "zfill": taking("zfill", 1, 1, zfill),
		"expandtabs": taking("expandtabs", 0, 1, expandTabs, "tabsize"),
		"translate":  taking("translate", 1, 1, translate), "maketrans": taking("maketrans", 1, 3, makeTrans),
		"isdigit": isMethod("isdigit", every(isDigitRune)), "isdecimal": isMethod("isdecimal", every(unicode.IsDigit)), "isnumeric": isMethod("isnumeric", every(isNumericRune)),
		"isalpha": isMethod("isalpha", every(unicode.IsLetter)), "isspace": isMethod("isspace", every(isSpace)),
		"isalnum": isMethod("isalnum", every(func(r rune) bool { return unicode.IsLetter(r) || isNumericRune(r) })),
		"isupper": isMethod("isupper", isUpperString), "islower": isMethod("islower", isLowerString), "istitle": isMethod("istitle", isTitleString),
		"isascii": isMethod("isascii", isASCII), "isidentifier": isMethod("isidentifier", isIdentifier),
		"isprintable": isMethod("isprintable", func(s string) bool { return s == "" || every(isPrintable)(s) }),
		"format": func(r *renderer, v Value, a *args) (Value, error) {
			return r.formatted(v, a.pos, a.named)
		},
		"format_map": taking("format_map", 1, 1, func(r *renderer, v Value, a *args) (Value, error) {
			d := a.pos[0]
			return r.formatted(v, nil, func(name string) (Value, bool) {
				if of := d.Dict(); of != nil {
					return of.Get(name)
				}
				return Value{}, false
			})
		}),
		"encode": bytesOf,
	}
})

// safeMethods are those that a string which escapes has besides.
var safeMethods = sync.OnceValue(func() map[string]methodFunc { //nolint:gochecknoglobals // a table
	return map[string]methodFunc{
		"unescape": taking("unescape", 0, 0, func(r *renderer, v Value, _ *args) (Value, error) {
			s := html.UnescapeString(v.str)
			return String(s), r.made(len(v.str))
		}),
		"striptags": taking("striptags", 0, 0, func(r *renderer, v Value, _ *args) (Value, error) {
			s := stripTags(v.str)
			return String(s), r.made(2 * len(v.str))
		}),
		"escape": taking("escape", 1, 1, func(r *renderer, _ Value, a *args) (Value, error) {
			return r.escape(a.pos[0])
		}),
	}
})

// formatted is str.format with these arguments.
func (r *renderer) formatted(v Value, pos []Value, named func(string) (Value, bool)) (Value, error) {
	f := formatter{r: r, pos: pos, named: named, safe: v.kind == kindSafe}
	s, err := f.write(v.str, 1)
	return Value{kind: v.kind, str: s}, r.sound(err)
}

// escape is markupsafe's: a safe string stays as it is.
func (r *renderer) escape(v Value) (Value, error) {
	if v.kind == kindSafe {
		return v, nil
	}
	return Value{kind: kindSafe, str: r.escaped(r.text(v))}, r.broken
}

func joinStrings(r *renderer, v Value, a *args) (Value, error) {
	items, err := r.iterate(a.pos[0])
	if err != nil {
		return Value{}, err
	}
	if a.pos[0].kind == kindUndefined {
		items = nil
	}
	if err := r.listed(len(items)); err != nil {
		return Value{}, err
	}
	size := 0
	parts := make([]string, len(items))
	for i, it := range items {
		switch {
		case v.kind == kindSafe:
			if it, err = r.escape(it); err != nil {
				return Value{}, err
			}
		case !it.isString():
			return Value{}, errorf(TypeError, "sequence item %d: expected str instance, %s found", i, it.typeName())
		}
		parts[i] = it.str
		size += len(it.str) + len(v.str)
	}
	if err := r.made(size); err != nil {
		return Value{}, err
	}
	return Value{kind: v.kind, str: strings.Join(parts, v.str)}, nil
}

func zfill(r *renderer, v Value, a *args) (Value, error) {
	width, err := a.count(0, "", 0)
	if err != nil {
		return Value{}, err
	}
	n := width - utf8.RuneCountInString(v.str)
	if err := r.made(len(v.str) + max(n, 0)); err != nil || n <= 0 {
		return v, err
	}
	sign := ""
	s := v.str
	if s != "" && (s[0] == '-' || s[0] == '+') {
		sign, s = s[:1], s[1:]
	}
	return Value{kind: v.kind, str: sign + strings.Repeat("0", n) + s}, nil
}

func expandTabs(r *renderer, v Value, a *args) (Value, error) {
	size, err := a.count(0, "tabsize", 8)
	if err != nil {
		return Value{}, err
	}
	var b strings.Builder
	column := 0
	for _, c := range v.str {
		switch {
		case c == '\t' && size > 0:
			n := size - column%size
			column += n
			if err := r.grown(b.Len(), n); err != nil {
				return Value{}, err
			}
			b.WriteString(strings.Repeat(" ", n))
		case c == '\t':
		case c == '\n' || c == '\r':
			column = 0
			b.WriteRune(c)
		default:
			column++
			b.WriteRune(c)
		}
	}
	return Value{kind: v.kind, str: b.String()}, r.made(b.Len())
}

func translate(r *renderer, v Value, a *args) (Value, error) {
	table := a.pos[0]
	var b strings.Builder
	for _, c := range v.str {
		to, ok, err := r.translation(table, int64(c))
		switch {
		case err != nil:
			return Value{}, err
		case !ok:
			b.WriteRune(c)
		case to.IsNone():
		case to.isString():
			b.WriteString(to.str)
		case to.isInt():
			if to.int() < 0 || to.int() > utf8.MaxRune {
				return Value{}, errorf(ValueError, "character mapping must be in range(0x110000)")
			}
			b.WriteRune(rune(to.int()))
		default:
			return Value{}, errorf(TypeError, "character mapping must return integer, None or str")
		}
		if err := r.grown(b.Len(), 1+len(to.str)); err != nil {
			return Value{}, err
		}
	}
	return Value{kind: v.kind, str: b.String()}, r.made(b.Len())
}

// translation is table[c]; !ok if there is nothing.
func (r *renderer) translation(table Value, c int64) (to Value, ok bool, err error) {
	switch table.kind {
	case kindDict:
		to, ok = table.ref.(*Dict).get(r, Int(c))
		return to, ok, r.broken
	case kindString, kindSafe, kindList, kindTuple, kindRange:
		to, err = r.item(table, Int(c))
		return to, to.kind != kindUndefined, err
	}
	return Value{}, false, errorf(TypeError, "'%s' object is not subscriptable", table.typeName())
}

func makeTrans(r *renderer, _ Value, a *args) (Value, error) {
	d := &Dict{}
	put := func(c rune, v Value) {
		d.set(r, Int(int64(c)), v)
		r.hold(3 * valueSize)
	}
	if len(a.pos) == 1 {
		from := a.pos[0].Dict()
		if from == nil {
			return Value{}, errorf(TypeError, "if you give only one argument to maketrans it must be a dict")
		}
		for i, k := range from.keys {
			switch c, n := utf8.DecodeRuneInString(k.str); {
			case k.isInt():
				d.set(r, Int(k.int()), from.values[i])
				r.hold(3 * valueSize)
			case !k.isString():
				return Value{}, errorf(TypeError, "keys in translate table must be strings or integers")
			case n == 0 || n < len(k.str):
				return Value{}, errorf(ValueError, "string keys in translate table must be of length 1")
			default:
				put(c, from.values[i])
			}
		}
		return FromDict(d), r.broken
	}
	var texts [3]string
	for i := range a.pos {
		var err error
		if texts[i], err = a.must("maketrans", i, ""); err != nil {
			return Value{}, err
		}
	}
	from, to := []rune(texts[0]), []rune(texts[1])
	if len(from) != len(to) {
		return Value{}, errorf(ValueError, "the first two maketrans arguments must have equal length")
	}
	for i, c := range from {
		put(c, Int(int64(to[i])))
	}
	for _, c := range texts[2] {
		put(c, None())
	}
	return FromDict(d), r.broken
}
