// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"html"
	"net/url"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// textFilters are the filters of texts that few chat templates use.
func textFilters() map[string]*builtin {
	return map[string]*builtin{
		"forceescape": plain(func(r *renderer, v Value) Value { return r.safe(String(r.text(v))) }),
		"center": define("width", func(r *renderer, v Value, a args) Value {
			return r.padded(r.soft(v), a.integer(0, 80), " ", true, true)
		}),
		"indent": define("width first blank", indented), "wordcount": plain(wordCount),
		"striptags": plain(func(r *renderer, v Value) Value { return r.withoutTags(r.text(v)) }),
		"truncate":  define("length killwords end leeway", truncatedTo), "urlencode": plain(urlEncoded),
		"xmlattr": define("autospace", xmlAttributes), "pprint": plain(prettyPrinted),
		"wordwrap": define("width break_long_words wrapstring break_on_hyphens", wordWrapped),
		"urlize":   define("trim_url_limit nofollow target rel extra_schemes", linkAddresses),
	}
}

// isWord is \w of Python's expressions.
func isWord(c rune) bool { return c == '_' || unicode.IsLetter(c) || isNumeric(c) }

// indented puts width spaces, or a text, before each line but the first.
func indented(r *renderer, v Value, a args) Value {
	r.defined(v)
	if !v.isString() {
		raise(TypeError, "unsupported operand type(s) for +=: '%s' and 'str'", v.typeName())
	}
	pad := a.or(0, Int(4))
	if !pad.isString() {
		n := max(a.integer(0, 4), 0)
		r.made(n)
		pad = String(strings.Repeat(" ", n))
	}
	lines := r.lines(v.str+"\n", false)
	r.made(len(v.str) + len(lines)*(1+len(pad.str)))
	for i, l := range lines {
		if i == 0 && a.or(1, Bool(false)).Truth() || i > 0 && (l != "" || a.or(2, Bool(false)).Truth()) {
			lines[i] = pad.str + l
		}
	}
	return v.withText(strings.Join(lines, "\n"))
}

// lines cuts a string at its line ends, which stay if keep is true.
func (r *renderer) lines(s string, keep bool) (parts []string) {
	r.tick(1 + len(s)/4)
	for s != "" {
		i := strings.IndexAny(s, "\n\r\v\f\x1c\x1d\x1e\u0085\u2028\u2029")
		if i < 0 {
			i = len(s)
		}
		_, n := utf8.DecodeRuneInString(s[i:])
		if strings.HasPrefix(s[i:], "\r\n") {
			n = 2
		}
		end := i
		if keep {
			end += n
		}
		r.hold(valueSize)
		r.tick(itemSteps)
		parts, s = append(parts, s[:end]), s[i+n:]
	}
	return parts
}

// padded fills a text up to a width, on the left, on the right, or on both sides.
func (r *renderer) padded(v Value, width int, fill string, left, right bool) Value {
	r.scanned(len(v.str))
	n := width - utf8.RuneCountInString(v.str)
	if n <= 0 {
		return v
	}
	r.made(len(v.str) + n*len(fill))
	before := 0
	if left {
		before = n
		if right {
			before = n/2 + n&width&1
		}
	}
	return v.withText(strings.Repeat(fill, before) + v.str + strings.Repeat(fill, n-before))
}

func wordCount(r *renderer, v Value) Value {
	s := r.text(v)
	r.tick(1 + len(s)/4)
	n, inside := 0, false
	for _, c := range s {
		is := isWord(c)
		if is && !inside {
			n++
		}
		inside = is
	}
	return Int(int64(n))
}

// withoutTags removes tags and comments, makes runs of white space single spaces, and reads entities.
func (r *renderer) withoutTags(s string) Value {
	r.made(2 * len(s))
	var b strings.Builder
	for {
		i := strings.IndexByte(s, '<')
		if i < 0 {
			break
		}
		end := strings.IndexByte(s[i:], '>')
		if strings.HasPrefix(s[i:], "<!--") {
			const before, after = len("<!--"), len("--")
			if end = strings.Index(s[i+before:], "-->"); end >= 0 {
				end += before + after
			}
		}
		if end < 0 {
			break
		}
		b.WriteString(s[:i])
		s = s[i+end+1:]
		r.tick(1)
	}
	b.WriteString(s)
	return String(html.UnescapeString(strings.Join(strings.FieldsFunc(b.String(), isSpace), " ")))
}

func truncatedTo(r *renderer, v Value, a args) Value {
	length, leeway := a.integer(0, 255), 5
	end := a.or(2, String("..."))
	if _, given := a.given(3); given {
		leeway = a.integer(3, 0)
	}
	tail := utf8.RuneCountInString(end.str)
	switch {
	case !end.isString():
		raise(TypeError, "object of type '%s' has no len()", end.typeName())
	case length < tail:
		raise(AssertionError, "expected length >= %d, got %d", tail, length)
	case leeway < 0:
		raise(AssertionError, "expected leeway >= 0, got %d", leeway)
	case v.kind == kindUndefined:
		return v
	case int(lengthOf(r, v).int()) <= length+leeway:
		return v
	case !v.isString():
		raise(TypeError, "'%s' object has no attribute 'rsplit'", v.typeName())
	}
	s := substring(v.str, None(), Int(int64(length-tail)))
	if i := strings.LastIndexByte(s, ' '); i >= 0 && !a.or(1, Bool(false)).Truth() {
		s = s[:i]
	}
	return r.add(v.withText(s), end)
}

func urlEncoded(r *renderer, v Value) Value {
	quote := func(v Value, query bool) string {
		s := r.text(v)
		r.made(3 * len(s))
		s = url.QueryEscape(s)
		if !query {
			s = strings.ReplaceAll(strings.ReplaceAll(s, "+", "%20"), "%2F", "/")
		}
		return s
	}
	var items []Value
	switch v.kind {
	case kindDict:
		items = r.pairs(v.Dict())
	case kindList, kindTuple, kindView, kindRange, kindGenerator, kindUndefined:
		items = r.iterate(v)
	default:
		return String(quote(v, false))
	}
	var parts []string
	for _, it := range items {
		if it.kind == kindNone || it.isNumber() {
			raise(TypeError, "cannot unpack non-iterable %s object", it.typeName())
		}
		pair := r.iterate(it)
		if len(pair) != 2 {
			raise(ValueError, "not enough values to unpack (expected 2, got %d)", len(pair))
		}
		r.hold(valueSize)
		parts = append(parts, quote(pair[0], true)+"="+quote(pair[1], true))
	}
	return String(strings.Join(parts, "&"))
}

func xmlAttributes(r *renderer, v Value, a args) Value {
	r.defined(v)
	d := v.Dict()
	if d == nil || v.kind != kindDict {
		raise(AttributeError, "'%s' object has no attribute 'items'", v.typeName())
	}
	var parts []string
	for i, k := range d.keys {
		x := d.values[i]
		if x.IsNone() || x.kind == kindUndefined {
			continue
		}
		switch {
		case !k.isString():
			raise(TypeError, "expected string or bytes-like object, got '%s'", k.typeName())
		case strings.ContainsAny(k.str, " \t\n\v\f\r/>="):
			raise(ValueError, "Invalid character in attribute name: %s", r.repr(k))
		}
		r.hold(valueSize)
		parts = append(parts, r.safe(k).str+`="`+r.safe(x).str+`"`)
	}
	text := strings.Join(parts, " ")
	if r.made(len(text)); text != "" && a.or(0, Bool(true)).Truth() {
		text = " " + text
	}
	return String(text)
}

// lineOfPrint is the length of a value that pprint writes in one line.
const lineOfPrint = 80

// prettyPrinted writes a value as Python's pprint does, if it takes one line.
func prettyPrinted(r *renderer, v Value) Value {
	s := r.repr(r.withSortedKeys(v))
	if utf8.RuneCountInString(s) > lineOfPrint {
		raise(Unsupported, "pprint of more than one line")
	}
	return String(s)
}

// withSortedKeys returns a value of which all dictionaries have their keys in order.
func (r *renderer) withSortedKeys(v Value) Value {
	r.enter()
	defer r.leave()
	switch v.kind {
	case kindList, kindTuple:
		r.listed(len(v.Items()))
		items := make([]Value, len(v.Items()))
		for i, it := range v.Items() {
			items[i] = r.withSortedKeys(it)
		}
		return sequence(v.kind, items)
	case kindDict:
		pairs := r.pairs(v.Dict())
		for _, p := range pairs {
			if !p.Items()[0].isString() {
				raise(Unsupported, "pprint of keys other than strings")
			}
		}
		slices.SortStableFunc(pairs, func(a, b Value) int { return r.compare(a.Items()[0], b.Items()[0]) })
		d := NewDict(len(pairs))
		for _, p := range pairs {
			d.Set(p.Items()[0].str, r.withSortedKeys(p.Items()[1]))
		}
		return FromDict(d)
	}
	return v
}
