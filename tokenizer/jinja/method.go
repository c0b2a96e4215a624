// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// methodFunc is a method of Python's strings, lists or dictionaries.
type methodFunc func(r *renderer, v Value, a *args) (Value, error)

// methods are those of one name.
type methods struct{ ofString, ofDict, ofList, ofTuple methodFunc }

func methodsOf(name string) methods {
	m := methods{ofString: stringMethods()[name], ofDict: dictMethods()[name], ofList: listMethods()[name]}
	if name == "index" || name == "count" {
		m.ofTuple = m.ofList
	}
	return m
}

// of returns the method of v, nil if it has none of that name.
func (m *methods) of(v Value) methodFunc {
	switch v.kind {
	case kindString, kindSafe:
		return m.ofString
	case kindDict:
		return m.ofDict
	case kindList:
		return m.ofList
	case kindTuple:
		return m.ofTuple
	}
	return nil
}

// methodOf returns a method of v, nil if it has none of that name.
func methodOf(v Value, name string) methodFunc {
	m := methodsOf(name)
	return m.of(v)
}

// attribute is v.name, or undefined.
func (r *renderer) attribute(v Value, name string) Value {
	if m := methodOf(v, name); m != nil {
		return r.bound(v, name, m)
	}
	return noAttribute(v, name)
}

// bound returns a method of v as a value.
func (r *renderer) bound(v Value, name string, m methodFunc) Value {
	return r.funcOf(name, func(r *renderer, a *args) (Value, error) { return m(r, v, a) })
}

// unsafe is what stands for a method that would change its value.
func unsafe(r *renderer, v Value, _ *args) (Value, error) {
	return Value{}, errorf(SecurityError, "access to an attribute of '%s' object that changes it is unsafe", v.typeName())
}

var dictMethods = sync.OnceValue(func() map[string]methodFunc { //nolint:gochecknoglobals // a table
	m := map[string]methodFunc{
		"get": func(r *renderer, v Value, a *args) (Value, error) {
			if len(a.pos) == 0 {
				return Value{}, errorf(TypeError, "get expected at least 1 argument, got 0")
			}
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
		},
		"items": func(r *renderer, v Value, _ *args) (Value, error) {
			items, err := r.pairs(v.ref.(*Dict))
			return view("dict_items", items), err
		},
		"keys": func(r *renderer, v Value, _ *args) (Value, error) { return view("dict_keys", v.ref.(*Dict).keys), nil },
		"values": func(r *renderer, v Value, _ *args) (Value, error) {
			return view("dict_values", v.ref.(*Dict).values), nil
		},
		"copy": func(r *renderer, v Value, _ *args) (Value, error) { return v, nil },
	}
	for _, name := range []string{"update", "pop", "popitem", "setdefault", "clear"} {
		m[name] = unsafe
	}
	return m
})

// view is what the methods of a dictionary give: a list that prints otherwise.
func view(name string, items []Value) Value {
	return Value{kind: kindView, str: name, ref: &list{items: items}}
}

func (r *renderer) pairs(d *Dict) ([]Value, error) {
	if err := r.listed(3 * d.Len()); err != nil {
		return nil, err
	}
	items := make([]Value, d.Len())
	backing := make([]Value, 2*d.Len())
	for i := range items {
		p := backing[2*i : 2*i+2 : 2*i+2]
		p[0], p[1] = d.keys[i], d.values[i]
		items[i] = tupleOf(p...)
	}
	return items, nil
}

var listMethods = sync.OnceValue(func() map[string]methodFunc { //nolint:gochecknoglobals // a table
	m := map[string]methodFunc{
		"index": func(r *renderer, v Value, a *args) (Value, error) {
			for i, it := range v.Items() {
				if !r.spend(1) {
					return Value{}, r.broken
				}
				if len(a.pos) > 0 && r.equal(it, a.pos[0]) {
					return Int(int64(i)), nil
				}
			}
			return Value{}, errorf(ValueError, "value is not in list")
		},
		"count": func(r *renderer, v Value, a *args) (Value, error) {
			n := 0
			for _, it := range v.Items() {
				if !r.spend(1) {
					return Value{}, r.broken
				}
				if len(a.pos) > 0 && r.equal(it, a.pos[0]) {
					n++
				}
			}
			return Int(int64(n)), nil
		},
		"copy": func(r *renderer, v Value, _ *args) (Value, error) { return v, nil },
	}
	for _, name := range []string{"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"} {
		m[name] = unsafe
	}
	return m
})

// word returns the string that an argument must be; def where it is absent or None.
func (a *args) word(f string, i int, name, def string) (string, error) {
	v, ok := a.get(i, name)
	switch {
	case !ok || v.IsNone():
		return def, nil
	case v.kind == kindUndefined:
		return "", errUndefined(v)
	case !v.isString():
		return "", errorf(TypeError, "%s() argument %d must be str, not %s", f, i+1, v.typeName())
	}
	return v.str, nil
}

// count returns the integer that an argument must be; def where it is absent or None.
func (a *args) count(f string, i int, name string, def int) (int, error) {
	v, ok := a.get(i, name)
	switch {
	case !ok || v.IsNone():
		return def, nil
	case v.kind == kindUndefined:
		return 0, errUndefined(v)
	case !v.isInt():
		return 0, errorf(TypeError, "%s() argument %d must be int, not %s", f, i+1, v.typeName())
	}
	const limit = 1 << 30
	return int(min(max(v.int(), -limit), limit)), nil
}

// trimmed is strip, lstrip and rstrip: chars is None or a set of characters.
func trimmed(s string, a *args, f string, left, right bool) (string, error) {
	set, err := a.word(f, 0, "chars", "")
	if err != nil {
		return "", err
	}
	is := isSpace
	if v, ok := a.get(0, "chars"); ok && !v.IsNone() {
		is = func(r rune) bool { return strings.ContainsRune(set, r) }
	}
	if left {
		s = strings.TrimLeftFunc(s, is)
	}
	if right {
		s = strings.TrimRightFunc(s, is)
	}
	return s, nil
}

var stringMethods = sync.OnceValue(func() map[string]methodFunc { //nolint:gochecknoglobals // a table
	text := func(f func(string) string) methodFunc {
		return func(r *renderer, v Value, _ *args) (Value, error) {
			if err := r.tick(len(v.str) / 8); err != nil {
				return Value{}, err
			}
			s := f(v.str)
			return Value{kind: v.kind, str: s}, r.made(len(s))
		}
	}
	strip := func(name string, left, right bool) methodFunc {
		return func(r *renderer, v Value, a *args) (Value, error) {
			s, err := trimmed(v.str, a, name, left, right)
			if set, ok := a.get(0, "chars"); err == nil {
				n := (len(v.str) - len(s)) / 8
				if ok {
					n *= 1 + len(set.str)/8
				}
				err = r.tick(n)
			}
			return Value{kind: v.kind, str: s}, err
		}
	}
	is := func(f func(string) bool) methodFunc {
		return func(r *renderer, v Value, _ *args) (Value, error) { return Bool(f(v.str)), r.tick(len(v.str) / 8) }
	}
	all := func(f func(rune) bool) func(string) bool {
		return func(s string) bool { return s != "" && strings.IndexFunc(s, func(r rune) bool { return !f(r) }) < 0 }
	}
	affix := func(has func(s, x string) bool) methodFunc {
		return func(r *renderer, v Value, a *args) (Value, error) {
			if len(a.pos) == 0 {
				return Value{}, errorf(TypeError, "startswith() takes at least 1 argument (0 given)")
			}
			of := []Value{a.pos[0]}
			if a.pos[0].kind == kindTuple {
				of = a.pos[0].Items()
			}
			s := v.str
			if len(a.pos) > 1 {
				stop := None()
				if len(a.pos) > 2 {
					stop = a.pos[2]
				}
				s = sliceString(s, a.pos[1], stop)
			}
			if len(a.pos) > 1 {
				r.spend(len(v.str) / stringStep)
			}
			for _, x := range of {
				if !r.spend(1 + min(len(x.str), len(s))/scanStep) {
					return Value{}, r.broken
				}
				if x.kind == kindUndefined {
					return Value{}, errUndefined(x)
				}
				if !x.isString() {
					return Value{}, errorf(TypeError, "startswith first arg must be str or a tuple of str, not %s", x.typeName())
				}
				if has(s, x.str) {
					return Bool(true), nil
				}
			}
			return Bool(false), nil
		}
	}
	find := func(last, must bool) methodFunc {
		return func(r *renderer, v Value, a *args) (Value, error) {
			x, err := a.word("find", 0, "sub", "")
			if err != nil {
				return Value{}, err
			}
			r.spend(len(v.str) / stringStep)
			skipped := ""
			s := v.str
			if len(a.pos) > 1 {
				s = sliceString(s, a.pos[1], None())
				skipped = v.str[:len(v.str)-len(s)]
			}
			i := strings.Index(s, x)
			if last {
				i = strings.LastIndex(s, x)
			}
			if i < 0 {
				if must {
					return Value{}, errorf(ValueError, "substring not found")
				}
				return Int(-1), nil
			}
			return Int(int64(utf8.RuneCountInString(skipped) + utf8.RuneCountInString(s[:i]))), nil
		}
	}
	partition := func(last bool) methodFunc {
		return func(r *renderer, v Value, a *args) (Value, error) {
			sep, err := a.word("partition", 0, "sep", "")
			if err != nil {
				return Value{}, err
			}
			if sep == "" {
				return Value{}, errorf(ValueError, "empty separator")
			}
			r.spend(len(v.str) / scanStep)
			i := strings.Index(v.str, sep)
			if last {
				i = strings.LastIndex(v.str, sep)
			}
			switch {
			case i < 0 && last:
				return tupleOf(String(""), String(""), String(v.str)), nil
			case i < 0:
				return tupleOf(String(v.str), String(""), String("")), nil
			}
			return tupleOf(String(v.str[:i]), String(sep), String(v.str[i+len(sep):])), nil
		}
	}
	pad := func(name string, left, right bool) methodFunc {
		return func(r *renderer, v Value, a *args) (Value, error) {
			width, err := a.count(name, 0, "width", 0)
			if err != nil {
				return Value{}, err
			}
			fill, err := a.word(name, 1, "fillchar", " ")
			if err != nil {
				return Value{}, err
			}
			r.spend(len(v.str) / scanStep)
			n := width - utf8.RuneCountInString(v.str)
			if n <= 0 {
				return v, nil
			}
			if err := r.made(n * len(fill)); err != nil {
				return Value{}, err
			}
			before := 0
			if left {
				before = n
				if right {
					before = n/2 + n&width&1
				}
			}
			return String(strings.Repeat(fill, before) + v.str + strings.Repeat(fill, n-before)), nil
		}
	}
	return map[string]methodFunc{
		"strip": strip("strip", true, true), "lstrip": strip("lstrip", true, false), "rstrip": strip("rstrip", false, true),
		"upper": text(strings.ToUpper), "lower": text(strings.ToLower), "casefold": text(strings.ToLower),
		"title": text(titled), "capitalize": text(capitalized), "swapcase": text(func(s string) string {
			return strings.Map(func(r rune) rune {
				if unicode.IsUpper(r) {
					return unicode.ToLower(r)
				}
				return unicode.ToUpper(r)
			}, s)
		}),
		"split": func(r *renderer, v Value, a *args) (Value, error) { return r.split(v, a, false) }, "rsplit": func(r *renderer, v Value, a *args) (Value, error) { return r.split(v, a, true) },
		"splitlines": splitLines,
		"startswith": affix(strings.HasPrefix), "endswith": affix(strings.HasSuffix),
		"find": find(false, false), "rfind": find(true, false), "index": find(false, true), "rindex": find(true, true),
		"partition": partition(false), "rpartition": partition(true),
		"ljust": pad("ljust", false, true), "rjust": pad("rjust", true, false), "center": pad("center", true, true),
		"replace": func(r *renderer, v Value, a *args) (Value, error) { return r.replace(v, a) },
		"removeprefix": func(r *renderer, v Value, a *args) (Value, error) {
			x, err := a.word("removeprefix", 0, "prefix", "")
			return Value{kind: v.kind, str: strings.TrimPrefix(v.str, x)}, err
		},
		"removesuffix": func(r *renderer, v Value, a *args) (Value, error) {
			x, err := a.word("removesuffix", 0, "suffix", "")
			return Value{kind: v.kind, str: strings.TrimSuffix(v.str, x)}, err
		},
		"count": func(r *renderer, v Value, a *args) (Value, error) {
			x, err := a.word("count", 0, "sub", "")
			r.spend(len(v.str) / scanStep)
			return Int(int64(strings.Count(v.str, x))), r.sound(err)
		},
		"join": func(r *renderer, v Value, a *args) (Value, error) {
			if len(a.pos) == 0 {
				return Value{}, errorf(TypeError, "join() takes exactly one argument (0 given)")
			}
			items, err := r.iterate(a.pos[0])
			if err != nil {
				return Value{}, err
			}
			if err := r.listed(len(items)); err != nil {
				return Value{}, err
			}
			size := 0
			parts := make([]string, len(items))
			for i, it := range items {
				if !it.isString() {
					return Value{}, errorf(TypeError, "sequence item %d: expected str instance, %s found", i, it.typeName())
				}
				parts[i] = it.str
				size += len(it.str) + len(v.str)
			}
			if err := r.made(size); err != nil {
				return Value{}, err
			}
			return String(strings.Join(parts, v.str)), nil
		},
		"zfill": func(r *renderer, v Value, a *args) (Value, error) {
			width, err := a.count("zfill", 0, "width", 0)
			if err != nil {
				return Value{}, err
			}
			r.spend(len(v.str) / scanStep)
			n := width - utf8.RuneCountInString(v.str)
			if err := r.made(max(n, 0)); err != nil || n <= 0 {
				return v, err
			}
			sign := ""
			s := v.str
			if s != "" && (s[0] == '-' || s[0] == '+') {
				sign, s = s[:1], s[1:]
			}
			return String(sign + strings.Repeat("0", n) + s), nil
		},
		"isdigit": is(all(func(r rune) bool { return unicode.IsDigit(r) || superDigit(r) })), "isdecimal": is(all(unicode.IsDigit)), "isnumeric": is(all(unicode.IsNumber)),
		"isalpha": is(all(unicode.IsLetter)), "isalnum": is(all(func(r rune) bool { return unicode.IsLetter(r) || unicode.IsNumber(r) })), "isspace": is(all(isSpace)),
		"isupper": is(func(s string) bool { return s == strings.ToUpper(s) && s != strings.ToLower(s) }),
		"islower": is(func(s string) bool { return s == strings.ToLower(s) && s != strings.ToUpper(s) }),
		"istitle": is(func(s string) bool { return s != "" && s == titled(s) && s != strings.ToLower(s) }),
		"format":  func(r *renderer, v Value, a *args) (Value, error) { return r.braces(v, a) },
		"encode":  unsafe, "format_map": unsafe, "translate": unsafe,
	}
})

func superDigit(r rune) bool {
	return r == '²' || r == '³' || r == '¹' || r >= 0x2070 && r <= 0x2089
}

func capitalized(s string) string {
	r, n := utf8.DecodeRuneInString(s)
	if n == 0 {
		return s
	}
	return string(unicode.ToTitle(r)) + strings.ToLower(s[n:])
}

// titled makes the first letter of each run of letters a capital.
func titled(s string) string {
	in := false
	return strings.Map(func(r rune) rune {
		cased := unicode.IsUpper(r) || unicode.IsLower(r) || unicode.IsTitle(r)
		defer func() { in = cased }()
		switch {
		case !cased:
			return r
		case in:
			return unicode.ToLower(r)
		}
		return unicode.ToTitle(r)
	}, s)
}

func (r *renderer) split(v Value, a *args, fromRight bool) (Value, error) {
	sep, err := a.word("split", 0, "sep", "")
	if err != nil {
		return Value{}, err
	}
	limit, err := a.count("split", 1, "maxsplit", -1)
	if err != nil {
		return Value{}, err
	}
	if err := r.made(len(v.str)); err != nil {
		return Value{}, err
	}
	var parts []string
	given, ok := a.get(0, "sep")
	switch {
	case !ok || given.IsNone():
		parts = r.fields(v.str, limit, fromRight)
	case sep == "":
		return Value{}, errorf(ValueError, "empty separator")
	case limit < 0:
		if err := r.listed(strings.Count(v.str, sep)); err != nil {
			return Value{}, err
		}
		parts = strings.Split(v.str, sep)
	case fromRight:
		s := v.str
		for ; limit > 0 && r.spend(itemSteps); limit-- {
			i := strings.LastIndex(s, sep)
			if i < 0 {
				break
			}
			parts = append(parts, s[i+len(sep):])
			s = s[:i]
		}
		parts = append(parts, s)
		for i, j := 0, len(parts)-1; i < j; i, j = i+1, j-1 {
			parts[i], parts[j] = parts[j], parts[i]
		}
	default:
		if err := r.listed(min(limit, strings.Count(v.str, sep))); err != nil {
			return Value{}, err
		}
		parts = strings.SplitN(v.str, sep, limit+1)
	}
	items := make([]Value, len(parts))
	for i, p := range parts {
		items[i] = Value{kind: v.kind, str: p}
	}
	return List(items...), nil
}

// fields parts at runs of white space, at most limit times if that is not negative.
func (r *renderer) fields(s string, limit int, fromRight bool) (parts []string) {
	if fromRight && limit >= 0 {
		s = strings.TrimRightFunc(s, isSpace)
		for s != "" && r.spend(itemSteps) {
			if len(parts) == limit {
				parts = append(parts, s)
				break
			}
			i := strings.LastIndexFunc(s, isSpace)
			if i < 0 {
				parts = append(parts, s)
				break
			}
			_, n := utf8.DecodeRuneInString(s[i:])
			parts = append(parts, s[i+n:])
			s = strings.TrimRightFunc(s[:i], isSpace)
		}
		for i, j := 0, len(parts)-1; i < j; i, j = i+1, j-1 {
			parts[i], parts[j] = parts[j], parts[i]
		}
		return parts
	}
	s = strings.TrimLeftFunc(s, isSpace)
	for s != "" && r.spend(itemSteps) {
		if limit >= 0 && len(parts) == limit {
			return append(parts, strings.TrimRightFunc(s, isSpace))
		}
		i := strings.IndexFunc(s, isSpace)
		if i < 0 {
			return append(parts, s)
		}
		parts = append(parts, s[:i])
		s = strings.TrimLeftFunc(s[i:], isSpace)
	}
	return parts
}

func splitLines(r *renderer, v Value, a *args) (Value, error) {
	keep, _ := a.get(0, "keepends")
	if err := r.tick(len(v.str) / 4); err != nil {
		return Value{}, err
	}
	var items []Value
	s := v.str
	for s != "" && r.spend(itemSteps) {
		i := strings.IndexAny(s, "\n\r\v\f\x1c\x1d\x1e\u0085\u2028\u2029")
		if i < 0 {
			items = append(items, String(s))
			break
		}
		_, n := utf8.DecodeRuneInString(s[i:])
		if strings.HasPrefix(s[i:], "\r\n") {
			n = 2
		}
		if keep.truth() {
			items = append(items, String(s[:i+n]))
		} else {
			items = append(items, String(s[:i]))
		}
		s = s[i+n:]
	}
	return List(items...), nil
}

func (r *renderer) replace(v Value, a *args) (Value, error) {
	var s [2]string
	for i, name := range []string{"old", "new"} {
		x, ok := a.get(i, name)
		switch {
		case !ok:
			return Value{}, errorf(TypeError, "replace expected at least 2 arguments")
		case x.kind == kindUndefined:
			return Value{}, errUndefined(x)
		case !x.isString():
			return Value{}, errorf(TypeError, "replace() argument %d must be str, not %s", i+1, x.typeName())
		}
		s[i] = x.str
	}
	n, err := a.count("replace", 2, "count", -1)
	if err != nil {
		return Value{}, err
	}
	times := strings.Count(v.str, s[0])
	if n >= 0 {
		times = min(times, n)
	}
	if err := r.made(len(v.str) + times*len(s[1])); err != nil {
		return Value{}, err
	}
	return Value{kind: v.kind, str: strings.Replace(v.str, s[0], s[1], n)}, nil
}

// braces is str.format, for plain fields: {}, {0}, {name}, with widths and
// precisions as percent knows them.
func (r *renderer) braces(v Value, a *args) (Value, error) {
	var b strings.Builder
	next := 0
	for s := v.str; s != ""; {
		i := strings.IndexAny(s, "{}")
		if i < 0 {
			b.WriteString(s)
			break
		}
		b.WriteString(s[:i])
		if i+1 < len(s) && s[i+1] == s[i] {
			b.WriteByte(s[i])
			s = s[i+2:]
			continue
		}
		end := strings.IndexByte(s[i:], '}')
		if s[i] == '}' || end < 0 {
			return Value{}, errorf(ValueError, "Single '%c' encountered in format string", s[i])
		}
		field, spec, _ := strings.Cut(s[i+1:i+end], ":")
		s = s[i+end+1:]
		var x Value
		var ok bool
		if field == "" {
			x, ok = a.get(next, "")
			next++
		} else if n, err := strconv.Atoi(field); err == nil && n >= 0 {
			x, ok = a.get(n, "")
		} else {
			x, ok = a.named(field)
		}
		if !ok {
			return Value{}, errorf(ValueError, "Replacement index %s out of range", field)
		}
		text, err := r.formatted(x, spec)
		if err != nil {
			return Value{}, err
		}
		b.WriteString(text)
		if err := r.grown(b.Len(), len(text)); err != nil {
			return Value{}, err
		}
	}
	return Value{kind: v.kind, str: b.String()}, nil
}

// grown counts n bytes more of a string that has size bytes.
func (r *renderer) grown(size, n int) error {
	if size > r.o.MaxOutput {
		return r.made(size)
	}
	return r.made(n)
}

// formatted is format(v, spec) for [[fill]align][0][width][,][.precision][type].
func (r *renderer) formatted(v Value, spec string) (string, error) {
	if spec == "" {
		return r.text(v), nil
	}
	bad := func() (string, error) { return "", errorf(ValueError, "Invalid format specifier %q", spec) }
	fill, align := " ", byte(0)
	rest := spec
	if r, n := utf8.DecodeRuneInString(rest); len(rest) > n && strings.IndexByte("<>^", rest[n]) >= 0 {
		fill, align, rest = string(r), rest[n], rest[n+1:]
	} else if strings.IndexByte("<>^", rest[0]) >= 0 {
		align, rest = rest[0], rest[1:]
	}
	if strings.HasPrefix(rest, "0") && align == 0 {
		fill, align = "0", '>'
	}
	number := func() int {
		n := 0
		for rest != "" && rest[0] >= '0' && rest[0] <= '9' && n < 1<<20 {
			n, rest = n*10+int(rest[0]-'0'), rest[1:]
		}
		return n
	}
	width := number()
	comma := strings.HasPrefix(rest, ",")
	rest = strings.TrimPrefix(rest, ",")
	precision := -1
	if strings.HasPrefix(rest, ".") {
		rest = rest[1:]
		precision = number()
	}
	if width >= 1<<16 || precision >= 1<<10 {
		return bad()
	}
	var text string
	switch {
	case (rest == "f" || rest == "F") && v.isNumber():
		if precision < 0 {
			precision = 6
		}
		text = strconv.FormatFloat(v.number(), 'f', precision, 64)
	case rest == "e" && v.isNumber():
		if precision < 0 {
			precision = 6
		}
		text = strconv.FormatFloat(v.number(), 'e', precision, 64)
	case rest == "%" && v.isNumber():
		if precision < 0 {
			precision = 6
		}
		text = strconv.FormatFloat(100*v.number(), 'f', precision, 64) + "%"
	case (rest == "x" || rest == "X" || rest == "b" || rest == "o") && v.isInt():
		text = strconv.FormatInt(v.int(), map[string]int{"x": 16, "X": 16, "b": 2, "o": 8}[rest])
		if rest == "X" {
			text = strings.ToUpper(text)
		}
	case rest == "d" && v.isInt(), rest == "" && v.isNumber() && precision < 0:
		text = r.text(v)
		if v.kind == kindBool {
			text = strconv.FormatInt(v.int(), 10)
		}
	case (rest == "" || rest == "s") && v.isString() && !comma:
		text = v.str
		if precision >= 0 {
			text = sliceString(text, None(), Int(int64(precision)))
		}
	default:
		return bad()
	}
	if comma {
		whole, fraction, point := strings.Cut(text, ".")
		var b strings.Builder
		for i := range len(whole) {
			if i > 0 && (len(whole)-i)%3 == 0 && whole[i-1] != '-' {
				b.WriteByte(',')
			}
			b.WriteByte(whole[i])
		}
		if text = b.String(); point {
			text += "." + fraction
		}
	}
	if n := width - utf8.RuneCountInString(text); n > 0 {
		switch {
		case align == '^':
			text = strings.Repeat(fill, n/2) + text + strings.Repeat(fill, n-n/2)
		case align == '>' || align == 0 && v.isNumber():
			if fill == "0" && strings.HasPrefix(text, "-") {
				text = "-" + strings.Repeat(fill, n) + text[1:]
			} else {
				text = strings.Repeat(fill, n) + text
			}
		default:
			text += strings.Repeat(fill, n)
		}
	}
	return text, nil
}

// percent is the string operator %.
func (r *renderer) percent(format string, v Value) (string, error) {
	values := []Value{v}
	if v.kind == kindTuple {
		values = v.Items()
	}
	var b strings.Builder
	used := 0
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			b.WriteByte(format[i])
			continue
		}
		i++
		if i < len(format) && format[i] == '%' {
			b.WriteByte('%')
			continue
		}
		var x Value
		keyed := false
		if i < len(format) && format[i] == '(' {
			end := strings.IndexByte(format[i:], ')')
			d := v.Dict()
			if end < 0 || d == nil {
				return "", errorf(TypeError, "format requires a mapping")
			}
			x, _ = d.Get(format[i+1 : i+end])
			keyed = true
			i += end + 1
		}
		start := i
		for i < len(format) && strings.IndexByte("-+ #0123456789.", format[i]) >= 0 {
			i++
		}
		if i >= len(format) {
			return "", errorf(ValueError, "incomplete format")
		}
		if !keyed {
			if used >= len(values) {
				return "", errorf(TypeError, "not enough arguments for format string")
			}
			x = values[used]
			used++
		}
		spec := format[start:i]
		align := ">"
		if strings.HasPrefix(spec, "-") {
			align, spec = "<", spec[1:]
		}
		spec = strings.TrimLeft(spec, "+ #")
		if !strings.HasPrefix(spec, "0") {
			spec = align + spec
		}
		var text string
		var err error
		switch c := format[i]; c {
		case 's':
			text, err = r.formatted(String(r.text(x)), spec+"s")
		case 'r':
			text, err = r.formatted(String(r.repr(x)), spec+"s")
		case 'd', 'i', 'u':
			if !x.isNumber() {
				return "", errorf(TypeError, "%%d format: a real number is required, not %s", x.typeName())
			}
			text, err = r.formatted(toInt(x), spec+"d")
		case 'f', 'F', 'e':
			if !x.isNumber() {
				return "", errorf(TypeError, "must be real number, not %s", x.typeName())
			}
			text, err = r.formatted(x, spec+strings.ToLower(string(c)))
		case 'x', 'X', 'o':
			text, err = r.formatted(x, spec+string(c))
		default:
			return "", errorf(ValueError, "unsupported format character '%c'", c)
		}
		if err != nil {
			return "", err
		}
		b.WriteString(text)
		if err := r.grown(b.Len(), len(text)); err != nil {
			return "", err
		}
	}
	if used < len(values) && v.kind != kindDict {
		if used > 0 || v.kind == kindTuple || !strings.Contains(format, "%(") {
			return "", errorf(TypeError, "not all arguments converted during string formatting")
		}
	}
	return b.String(), nil
}

func toInt(v Value) Value {
	if v.kind == kindFloat {
		return Int(int64(v.float()))
	}
	if v.kind == kindBool {
		return Int(v.int())
	}
	return v
}
