// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"regexp"
	"slices"
	"strings"
	"sync"
	"unicode"
)

// wordWrap is Python's textwrap, line by line.
func wordWrap(r *renderer, v Value, a *args) (Value, error) {
	width, err := a.count(0, "width", 79)
	if err != nil {
		return Value{}, err
	}
	breakWords, ok := a.get(1, "break_long_words")
	if !ok {
		breakWords = Bool(true)
	}
	sep, err := a.word("wordwrap", 2, "wrapstring", "\n")
	if err != nil {
		return Value{}, err
	}
	hyphens, ok := a.get(3, "break_on_hyphens")
	if !ok {
		hyphens = Bool(true)
	}
	switch {
	case v.kind == kindUndefined:
		return Value{}, errUndefined(v)
	case !v.isString():
		return Value{}, errorf(AttributeError, "'%s' object has no attribute 'splitlines'", v.typeName())
	}
	lines, err := r.lines(v.str, false)
	if err != nil {
		return Value{}, err
	}
	w := wrapper{width: width, words: breakWords.truth(), hyphens: hyphens.truth()}
	var b strings.Builder
	for i, line := range lines {
		if width <= 0 {
			return Value{}, errorf(ValueError, "invalid width %d (must be > 0)", width)
		}
		// Characters take four bytes, and parts of them a header each.
		if !r.hold(32*len(line)) || !r.spend(len(line)) {
			return Value{}, r.broken
		}
		if i > 0 {
			b.WriteString(sep)
		}
		for k, l := range w.wrap([]rune(line)) {
			if k > 0 {
				b.WriteString(sep)
			}
			b.WriteString(l)
			if err := r.grown(b.Len(), len(l)+len(sep)); err != nil {
				return Value{}, err
			}
		}
	}
	return String(b.String()), r.made(b.Len())
}

type wrapper struct {
	width          int
	words, hyphens bool // long words may be broken; lines may end behind a hyphen
}

func isBlank(c rune) bool { return strings.ContainsRune("\t\n\v\f\r ", c) }

func allSpace(s []rune) bool {
	return !slices.ContainsFunc(s, func(c rune) bool { return !isSpace(c) })
}

// chunks parts a line into runs of white space and what cannot be broken.
func (w *wrapper) chunks(s []rune) (out [][]rune) {
	for i := 0; i < len(s); {
		j := i + 1
		switch {
		case isBlank(s[i]):
			for j < len(s) && isBlank(s[j]) {
				j++
			}
		case !w.hyphens:
			for j < len(s) && !isBlank(s[j]) {
				j++
			}
		case dash(s, i) > 0:
			j = i + dash(s, i)
		default:
			j = wordEnd(s, i)
		}
		out = append(out, s[i:j])
		i = j
	}
	return out
}

// dash returns how long the dash of several hyphens is that stands at s[i], between
// words.
func dash(s []rune, i int) int {
	j := i
	for j < len(s) && s[j] == '-' {
		j++
	}
	if j-i < 2 || j == len(s) || !isWord(s[j]) || i == 0 || !endsWord(s[i-1]) {
		return 0
	}
	return j - i
}

func endsWord(c rune) bool { return isWord(c) || strings.ContainsRune(`!"'&.,?`, c) }

// wordEnd returns where the word at s[i] may be parted first: behind a hyphen between
// letters, at white space, before a dash.
func wordEnd(s []rune, i int) int {
	letter := func(k int) bool { return k >= 0 && k < len(s) && isWord(s[k]) && !unicode.IsDigit(s[k]) }
	hyphen := func(k int) bool { return k >= 0 && k < len(s) && s[k] == '-' }
	for e := i + 1; ; e++ {
		if hyphen(e) && letter(e-1) && (letter(e-2) || hyphen(e-2) && letter(e-3)) &&
			letter(e+1) && (letter(e+2) || hyphen(e+2) && letter(e+3)) {
			return e + 1
		}
		if e == len(s) || isBlank(s[e]) || dash(s, e) > 0 {
			return e
		}
	}
}

func (w *wrapper) wrap(s []rune) (lines []string) {
	chunks := w.chunks(s)
	for len(chunks) > 0 {
		var line []rune
		last := 0 // where the last chunk of the line begins
		if len(lines) > 0 && allSpace(chunks[0]) {
			chunks = chunks[1:]
		}
		for len(chunks) > 0 && len(line)+len(chunks[0]) <= w.width {
			last = len(line)
			line = append(line, chunks[0]...)
			chunks = chunks[1:]
		}
		if len(chunks) > 0 && len(chunks[0]) > w.width {
			n := 0
			if w.words {
				n = w.room(chunks[0], w.width-len(line))
			} else if len(line) == 0 {
				n = len(chunks[0])
			}
			if n > 0 || w.words {
				last = len(line)
				line = append(line, chunks[0][:n]...)
				if chunks[0] = chunks[0][n:]; len(chunks[0]) == 0 {
					chunks = chunks[1:]
				}
			}
		}
		if len(line) > 0 && allSpace(line[last:]) {
			line = line[:last]
		}
		if len(line) > 0 {
			lines = append(lines, string(line))
		}
	}
	return lines
}

// room returns how much of a long word goes into a line that has so much left.
func (w *wrapper) room(chunk []rune, left int) int {
	if !w.hyphens || len(chunk) <= left {
		return min(left, len(chunk))
	}
	for k := left - 1; k > 0; k-- {
		if chunk[k] == '-' {
			if slices.ContainsFunc(chunk[:k], func(c rune) bool { return c != '-' }) {
				return k + 1
			}
			break
		}
	}
	return left
}

// The expressions of urlize.
type urlRules struct{ web, email, scheme *regexp.Regexp }

var urlTables = sync.OnceValue(func() *urlRules { //nolint:gochecknoglobals // expressions
	const w = `\p{L}\p{N}_`
	return &urlRules{
		web: regexp.MustCompile(`(?i)^((https?://|www\.)(([` + w + `%-]+\.)+)?([a-z]{2,63}|xn--[` + w + `%]{2,59})|([` + w + `%-]{2,63}\.)+(com|net|int|edu|gov|org|info|mil)|` +
			`(https?://)(((\p{Nd}{1,3})(\.\p{Nd}{1,3}){3})|(\[([\p{Nd}a-f]{0,4}:){2}([\p{Nd}a-f]{0,4}:?){1,6}\])))(:\p{Nd}{1,5})?([/?#]\S*)?$`),
		email:  regexp.MustCompile(`^\S+@[` + w + `][` + w + `.-]*\.[` + w + `]+$`),
		scheme: regexp.MustCompile(`^([` + w + `.+-]{2,}:/{0,2})$`),
	}
})

// urlize makes links of addresses.
func urlize(r *renderer, v Value, a *args) (Value, error) {
	limit := -1
	if x, ok := a.get(0, "trim_url_limit"); ok && !x.IsNone() {
		var err error
		if limit, err = a.count(0, "trim_url_limit", 0); err != nil {
			return Value{}, err
		}
	}
	rel := []string{"noopener"}
	if x, _ := a.get(3, "rel"); x.isString() {
		rel = append(rel, strings.FieldsFunc(x.str, isSpace)...)
	}
	if x, _ := a.get(1, "nofollow"); x.truth() {
		rel = append(rel, "nofollow")
	}
	slices.Sort(rel)
	attributes := ` rel="` + escaped(strings.Join(slices.Compact(rel), " ")) + `"`
	if x, _ := a.get(2, "target"); x.isString() && x.str != "" {
		attributes += ` target="` + escaped(x.str) + `"`
	}
	given, _ := a.get(4, "extra_schemes")
	var schemes []string
	if !given.IsNone() {
		items, err := r.iterate(given)
		if err != nil {
			return Value{}, err
		}
		for _, it := range items {
			if !it.isString() || !urlTables().scheme.MatchString(it.str) {
				return Value{}, errorf(FilterError, "%s is not a valid URI scheme prefix.", r.repr(it))
			}
			schemes = append(schemes, it.str)
		}
	}
	e, err := r.escape(v)
	if err != nil {
		return Value{}, err
	}
	var b strings.Builder
	for s := e.str; s != ""; {
		n := strings.IndexFunc(s, isSpace)
		if n < 0 {
			n = len(s)
		}
		// The expressions look at a word some times.
		if err := r.tick(1 + n); err != nil {
			return Value{}, err
		}
		word := linked(s[:n], limit, attributes, schemes)
		b.WriteString(word)
		s = s[n:]
		n = len(s) - len(strings.TrimLeftFunc(s, isSpace))
		b.WriteString(s[:n])
		s = s[n:]
		if err := r.grown(b.Len(), len(word)+n); err != nil {
			return Value{}, err
		}
	}
	return String(b.String()), nil
}

// linked returns a word, as a link if it is an address.
func linked(word string, limit int, attributes string, schemes []string) string {
	middle := word
	for trimmed := true; trimmed; {
		trimmed = false
		for _, p := range []string{"(", "<", "&lt;"} {
			if rest, ok := strings.CutPrefix(middle, p); ok {
				middle, trimmed = rest, true
			}
		}
	}
	head := word[:len(word)-len(middle)]
	whole := middle
	for trimmed := true; trimmed; {
		trimmed = false
		for _, p := range []string{")", ">", ".", ",", "\n", "&gt;"} {
			if rest, ok := strings.CutSuffix(middle, p); ok {
				middle, trimmed = rest, true
			}
		}
	}
	tail := whole[len(middle):]
	for _, p := range [][2]string{{"(", ")"}, {"<", ">"}, {"&lt;", "&gt;"}} {
		opened := strings.Count(middle, p[0])
		if opened <= strings.Count(middle, p[1]) {
			continue
		}
		for range min(opened, strings.Count(tail, p[1])) {
			end := strings.Index(tail, p[1]) + len(p[1])
			middle, tail = middle+tail[:end], tail[end:]
		}
	}
	rules := urlTables()
	switch {
	case rules.web.MatchString(middle):
		shown := middle
		if runes := []rune(middle); limit >= 0 && len(runes) > limit {
			shown = string(runes[:limit]) + "..."
		}
		to := middle
		if !strings.HasPrefix(to, "https://") && !strings.HasPrefix(to, "http://") {
			to = "https://" + to
		}
		middle = `<a href="` + to + `"` + attributes + `>` + shown + `</a>`
	case strings.HasPrefix(middle, "mailto:") && rules.email.MatchString(middle[7:]):
		middle = `<a href="` + middle + `">` + middle[7:] + `</a>`
	case strings.Contains(middle, "@") && !strings.HasPrefix(middle, "www.") && !strings.HasPrefix(middle, "@") &&
		!strings.Contains(middle, ":") && rules.email.MatchString(middle):
		middle = `<a href="mailto:` + middle + `">` + middle + `</a>`
	default:
		for _, s := range schemes {
			if middle != s && strings.HasPrefix(middle, s) {
				middle = `<a href="` + middle + `"` + attributes + `>` + middle + `</a>`
			}
		}
	}
	return head + middle + tail
}
