// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"html"
	"net/url"
	"strings"
	"unicode"
	"unicode/utf8"
)

// soft is a value as a string; a safe one stays safe.
func (r *renderer) soft(v Value) Value {
	if v.isString() {
		return v
	}
	return String(r.text(v))
}

// textFilter is a filter that changes a string.
func textFilter(f func(string) string) filterOf {
	m := textMethod("filter", f)
	return filterOf{"", func(r *renderer, v Value, _ *args) (Value, error) { return m(r, r.soft(v), &args{}) }}
}

func textFilters() map[string]filterOf {
	return map[string]filterOf{
		"tojson": {"ensure_ascii indent separators sort_keys", tojson},
		"string": {"", func(r *renderer, v Value, _ *args) (Value, error) { return r.soft(v), r.broken }},
		"safe": {"", func(r *renderer, v Value, _ *args) (Value, error) {
			return Value{kind: kindSafe, str: r.text(v)}, r.broken
		}},
		"escape": {"", func(r *renderer, v Value, _ *args) (Value, error) { return r.escape(v) }},
		"forceescape": {"", func(r *renderer, v Value, _ *args) (Value, error) {
			return r.escape(String(r.text(v)))
		}},
		"upper": textFilter(upper), "lower": textFilter(lower), "capitalize": textFilter(capitalized),
		"title": {"", func(r *renderer, v Value, _ *args) (Value, error) {
			s := r.text(v)
			if err := r.tick(len(s) / 4); err != nil {
				return Value{}, err
			}
			s = titleWords(s)
			return String(s), r.made(len(s))
		}},
		"trim": {"chars", func(r *renderer, v Value, a *args) (Value, error) {
			return r.trimmed(r.soft(v), a, "strip", true, true)
		}},
		"replace": {"old! new! count", func(r *renderer, v Value, a *args) (Value, error) {
			b := &args{pos: []Value{String(r.text(v))}}
			for i, name := range []string{"old", "new"} {
				x, _ := a.get(i, name)
				b.pos = append(b.pos, String(r.text(x)))
			}
			if n, ok := a.get(2, "count"); ok && !n.IsNone() {
				b.pos = append(b.pos, n)
			}
			v, b.pos = b.pos[0], b.pos[1:]
			return r.replace(v, b)
		}},
		"join": {"d attribute", ofItems(joined)}, "indent": {"width first blank", indent},
		"wordcount": {"", func(r *renderer, v Value, _ *args) (Value, error) {
			s := r.text(v)
			if err := r.tick(len(s) / 4); err != nil {
				return Value{}, err
			}
			n, in := 0, false
			for _, c := range s {
				is := isWord(c)
				if is && !in {
					n++
				}
				in = is
			}
			return Int(int64(n)), nil
		}},
		"center": {"width", func(r *renderer, v Value, a *args) (Value, error) {
			width, ok := a.get(0, "width")
			if !ok {
				width = Int(80)
			}
			return stringMethods()["center"](r, r.soft(v), &args{pos: []Value{width}})
		}},
		"striptags": {"", func(r *renderer, v Value, _ *args) (Value, error) {
			s := r.text(v)
			if err := r.made(2 * len(s)); err != nil {
				return Value{}, err
			}
			return String(stripTags(s)), nil
		}},
		"urlencode": {"", urlEncode}, "xmlattr": {"autospace", xmlAttributes},
		"urlize": {"trim_url_limit nofollow target rel extra_schemes", urlize},
		"pprint": {"", prettyPrint}, "format": {"*", formatFilter},
		"truncate": {"length killwords end leeway", truncate},
		"wordwrap": {"width break_long_words wrapstring break_on_hyphens", wordWrap},
	}
}

// isWord is \w of Python's expressions.
func isWord(c rune) bool { return c == '_' || unicode.IsLetter(c) || isNumericRune(c) }

func joined(r *renderer, items []Value, a *args) (Value, error) {
	sep := ""
	if d, ok := a.get(0, "d"); ok {
		sep = r.text(d)
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
			var err error
			if it, err = r.key(it, attribute); err != nil {
				return Value{}, err
			}
		}
		if b = r.appendStr(b, it); len(b) > r.o.MaxOutput {
			break
		}
	}
	if err := r.made(len(b)); err != nil {
		return Value{}, err
	}
	return String(r.counted(b)), r.broken
}

// indent puts width spaces, or a text, before each line but the first.
func indent(r *renderer, v Value, a *args) (Value, error) {
	switch {
	case v.kind == kindUndefined:
		return Value{}, errUndefined(v)
	case !v.isString():
		return Value{}, errorf(TypeError, "unsupported operand type(s) for +=: '%s' and 'str'", v.typeName())
	}
	pad := "    "
	if w, ok := a.get(0, "width"); ok {
		switch {
		case w.isString():
			pad = w.str
		case w.isInt():
			n := min(max(w.int(), 0), int64(r.o.MaxOutput)+1)
			if err := r.made(int(n)); err != nil {
				return Value{}, err
			}
			pad = strings.Repeat(" ", int(n))
		default:
			return Value{}, errorf(TypeError, "can't multiply sequence by non-int of type '%s'", w.typeName())
		}
	}
	first, _ := a.get(1, "first")
	blank, _ := a.get(2, "blank")
	lines, err := r.lines(v.str+"\n", false)
	if err != nil {
		return Value{}, err
	}
	if err := r.made(len(v.str) + len(lines)*(1+len(pad))); err != nil {
		return Value{}, err
	}
	var b strings.Builder
	for i, l := range lines {
		if i > 0 {
			b.WriteByte('\n')
		}
		if i == 0 && first.truth() || i > 0 && (l != "" || blank.truth()) {
			b.WriteString(pad)
		}
		b.WriteString(l)
	}
	return Value{kind: v.kind, str: b.String()}, nil
}

// stripTags takes tags and comments out, makes runs of white space spaces, and reads
// entities.
func stripTags(s string) string {
	var b strings.Builder
	for {
		i := strings.IndexByte(s, '<')
		if i < 0 {
			break
		}
		end := strings.IndexByte(s[i:], '>')
		if strings.HasPrefix(s[i:], "<!--") {
			if end = strings.Index(s[i+4:], "-->"); end >= 0 {
				end += 4 + 2
			}
		}
		if end < 0 {
			break
		}
		b.WriteString(s[:i])
		s = s[i+end+1:]
	}
	b.WriteString(s)
	return html.UnescapeString(strings.Join(strings.FieldsFunc(b.String(), isSpace), " "))
}

func urlEncode(r *renderer, v Value, _ *args) (Value, error) {
	quote := func(v Value, query bool) string {
		s := r.text(v)
		if !r.hold(6*len(s)) || !r.spend(len(s)) {
			return ""
		}
		s = url.QueryEscape(s)
		if !query {
			s = strings.ReplaceAll(strings.ReplaceAll(s, "+", "%20"), "%2F", "/")
		}
		return s
	}
	var items []Value
	var err error
	switch v.kind {
	case kindDict:
		items, err = r.pairs(v.ref.(*Dict))
	case kindList, kindTuple, kindView, kindRange, kindGenerator, kindUndefined:
		items, err = r.iterate(v)
	default:
		return String(quote(v, false)), r.broken
	}
	if err != nil {
		return Value{}, err
	}
	var b strings.Builder
	for i, it := range items {
		p, err := r.iterate(it)
		if err != nil {
			return Value{}, errorf(TypeError, "cannot unpack non-iterable %s object", it.typeName())
		}
		if len(p) != 2 {
			return Value{}, errorf(ValueError, "not enough values to unpack (expected 2, got %d)", len(p))
		}
		if i > 0 {
			b.WriteByte('&')
		}
		b.WriteString(quote(p[0], true) + "=" + quote(p[1], true))
		if err := r.grown(b.Len(), 1); err != nil {
			return Value{}, err
		}
	}
	return String(b.String()), r.made(b.Len())
}

func xmlAttributes(r *renderer, v Value, a *args) (Value, error) {
	d := v.Dict()
	if v.kind == kindUndefined {
		return Value{}, errUndefined(v)
	}
	if d == nil {
		return Value{}, errorf(AttributeError, "'%s' object has no attribute 'items'", v.typeName())
	}
	space, given := a.get(0, "autospace")
	var b strings.Builder
	for i, k := range d.keys {
		x := d.values[i]
		if x.IsNone() || x.kind == kindUndefined {
			continue
		}
		switch {
		case !k.isString():
			return Value{}, errorf(TypeError, "expected string or bytes-like object, got '%s'", k.typeName())
		case strings.ContainsAny(k.str, " \t\n\v\f\r/>="):
			return Value{}, errorf(ValueError, "Invalid character in attribute name: %s", r.repr(k))
		}
		if b.Len() > 0 || !given || space.truth() {
			b.WriteByte(' ')
		}
		key, err := r.escape(k)
		if err != nil {
			return Value{}, err
		}
		text, err := r.escape(x)
		if err != nil {
			return Value{}, err
		}
		b.WriteString(key.str + `="` + text.str + `"`)
		if err := r.grown(b.Len(), len(k.str)); err != nil {
			return Value{}, err
		}
	}
	return String(b.String()), r.made(b.Len())
}

// lineOfPrint is how long a value is that pprint writes in one line.
const lineOfPrint = 80

// prettyPrint writes a value as Python's pprint does if it takes one line; how a
// longer one is broken into lines is not known here.
func prettyPrint(r *renderer, v Value, _ *args) (Value, error) {
	sorted, err := r.sortedKeys(v)
	if err != nil {
		return Value{}, err
	}
	s := r.repr(sorted)
	if err := r.sound(nil); err != nil {
		return Value{}, err
	}
	if utf8.RuneCountInString(s) > lineOfPrint {
		return Value{}, errorf(LimitError, "pprint of more than one line")
	}
	return String(s), nil
}

// sortedKeys returns a value of which all dictionaries have their keys in order.
func (r *renderer) sortedKeys(v Value) (Value, error) {
	defer r.leave()
	if !r.enter() {
		return v, r.broken
	}
	switch v.kind {
	case kindList, kindTuple:
		if err := r.listed(len(v.Items())); err != nil {
			return v, err
		}
		items := make([]Value, len(v.Items()))
		for i, it := range v.Items() {
			var err error
			if items[i], err = r.sortedKeys(it); err != nil {
				return v, err
			}
		}
		return Value{kind: v.kind, ref: &list{items: items}}, nil
	case kindDict:
		pairs, err := r.pairs(v.ref.(*Dict))
		if err != nil {
			return v, err
		}
		if err := sortBy(pairs, func(a, b Value) (int, error) { return r.compare(a.Items()[0], b.Items()[0]) }); err != nil {
			return v, r.sound(errorf(LimitError, "pprint of keys that have no order"))
		}
		d := NewDict(len(pairs))
		for _, p := range pairs {
			x, err := r.sortedKeys(p.Items()[1])
			if err != nil {
				return v, err
			}
			d.set(r, p.Items()[0], x)
		}
		return FromDict(d), nil
	}
	return v, nil
}

func formatFilter(r *renderer, v Value, a *args) (Value, error) {
	x := tupleOf(a.pos...)
	if len(a.kw) > 0 {
		if len(a.pos) > 0 {
			return Value{}, errorf(FilterError, "can't handle positional and keyword arguments at the same time")
		}
		d, err := dictOf(r, &args{kwNames: a.kwNames, kw: a.kw})
		if err != nil {
			return Value{}, err
		}
		x = FromDict(d)
	}
	return r.percent(r.soft(v), x)
}

func truncate(r *renderer, v Value, a *args) (Value, error) {
	length, err := a.count(0, "length", 255)
	if err != nil {
		return Value{}, err
	}
	kill, _ := a.get(1, "killwords")
	end, ok := a.get(2, "end")
	if !ok {
		end = String("...")
	}
	leeway := 5
	if x, ok := a.get(3, "leeway"); ok && !x.IsNone() {
		if leeway, err = a.count(3, "leeway", 0); err != nil {
			return Value{}, err
		}
	}
	tail := utf8.RuneCountInString(end.str)
	switch {
	case !end.isString():
		return Value{}, errorf(TypeError, "object of type '%s' has no len()", end.typeName())
	case length < tail:
		return Value{}, errorf(AssertionError, "expected length >= %d, got %d", tail, length)
	case leeway < 0:
		return Value{}, errorf(AssertionError, "expected leeway >= 0, got %d", leeway)
	case v.kind == kindUndefined:
		return v, nil
	case !v.isString():
		return Value{}, errorf(TypeError, "object of type '%s' has no len()", v.typeName())
	}
	if err := r.scanned(len(v.str)); err != nil {
		return Value{}, err
	}
	if utf8.RuneCountInString(v.str) <= length+leeway {
		return v, nil
	}
	s := sliceString(v.str, None(), Int(int64(length-tail)))
	if i := strings.LastIndexByte(s, ' '); i >= 0 && !kill.truth() {
		s = s[:i]
	}
	return r.add(Value{kind: v.kind, str: s}, end)
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
	if x, ok := a.get(2, "separators"); ok && !x.IsNone() {
		pair, err := r.iterate(x)
		switch {
		case err != nil:
			return Value{}, errorf(TypeError, "cannot unpack non-iterable %s object", x.typeName())
		case len(pair) != 2:
			return Value{}, errorf(ValueError, "expected 2 separators, got %d", len(pair))
		case !pair[0].isString() || !pair[1].isString():
			return Value{}, errorf(TypeError, "separators must be strings")
		}
		o.comma, o.colon = pair[0].str, pair[1].str
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
