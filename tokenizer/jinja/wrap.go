// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"regexp"
	"slices"
	"strings"
	"sync"
	"unicode"
)

// wordWrapped is Python's textwrap, line by line.
func wordWrapped(r *renderer, v Value, a args) Value {
	w := wrapper{width: a.integer(0, 79), words: a.or(1, Bool(true)).Truth(), hyphens: a.or(3, Bool(true)).Truth()}
	separator := "\n"
	if _, given := a.given(2); given {
		separator = a.text(2)
	}
	r.defined(v)
	if !v.isString() {
		raise(AttributeError, "'%s' object has no attribute 'splitlines'", v.typeName())
	}
	var lines []string
	for _, line := range r.lines(v.str, false) {
		if w.width <= 0 {
			raise(ValueError, "invalid width %d (must be > 0)", w.width)
		}
		// Characters take four bytes, and parts of them a header each.
		r.hold(32 * len(line))
		r.tick(1 + len(line))
		lines = append(lines, strings.Join(w.wrap([]rune(line)), separator))
	}
	size := 0
	for _, l := range lines {
		size += len(l) + len(separator)
	}
	r.made(size)
	return String(strings.Join(lines, separator))
}

// wrapper breaks lines of at most width characters.
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

// dash returns the length of a dash of several hyphens between words that stands at s[i], 0 without one.
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

// wordEnd returns the first place at which the word at s[i] may be parted: behind a hyphen between
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
		last := 0 // place of the line's last chunk
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

// room returns the number of characters of a long word that go into a line with so many left.
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
		web: regexp.MustCompile(`(?i)^((https?://|www\.)(([` + w + `%-]+\.)+)?([a-z]{2,63}|xn--[` + w + `%]{2,59})|` +
			`([` + w + `%-]{2,63}\.)+(com|net|int|edu|gov|org|info|mil)|` +
			`(https?://)(((\p{Nd}{1,3})(\.\p{Nd}{1,3}){3})|(\[([\p{Nd}a-f]{0,4}:){2}([\p{Nd}a-f]{0,4}:?){1,6}\])))` +
			`(:\p{Nd}{1,5})?([/?#]\S*)?$`),
		email:  regexp.MustCompile(`^\S+@[` + w + `][` + w + `.-]*\.[` + w + `]+$`),
		scheme: regexp.MustCompile(`^([` + w + `.+-]{2,}:/{0,2})$`),
	}
})

// linkAddresses is urlize: it makes links of addresses.
func linkAddresses(r *renderer, v Value, a args) Value {
	limit := -1
	if _, given := a.given(0); given {
		limit = a.integer(0, 0)
	}
	rel := []string{"noopener"}
	if x := a.values[3]; x.isString() {
		rel = append(rel, strings.FieldsFunc(x.str, isSpace)...)
	}
	if a.or(1, Bool(false)).Truth() {
		rel = append(rel, "nofollow")
	}
	slices.Sort(rel)
	attributes := ` rel="` + escaper.Replace(strings.Join(slices.Compact(rel), " ")) + `"`
	if x := a.values[2]; x.isString() && x.str != "" {
		attributes += ` target="` + escaper.Replace(x.str) + `"`
	}
	var schemes []string
	if given, ok := a.given(4); ok {
		for _, it := range r.iterate(given) {
			if !it.isString() || !urlTables().scheme.MatchString(it.str) {
				raise(FilterError, "%s is not a valid URI scheme prefix.", r.repr(it))
			}
			schemes = append(schemes, it.str)
		}
	}
	var b strings.Builder
	for s := r.safe(v).str; s != ""; {
		n := strings.IndexFunc(s, isSpace)
		if n < 0 {
			n = len(s)
		}
		r.tick(1 + n) // the expressions read a word several times
		word := linked(s[:n], limit, attributes, schemes)
		b.WriteString(word)
		s = s[n:]
		n = len(s) - len(strings.TrimLeftFunc(s, isSpace))
		b.WriteString(s[:n])
		s = s[n:]
		r.made(len(word) + n)
		if b.Len() > r.MaxOutput {
			raise(LimitError, "a value of more than %d bytes", r.MaxOutput)
		}
	}
	return String(b.String())
}

// trimWord cuts any of the parts off an end of a word, as often as they are there.
func trimWord(word string, cut func(s, part string) (string, bool), parts ...string) string {
	for trimmed := true; trimmed; {
		trimmed = false
		for _, p := range parts {
			if rest, ok := cut(word, p); ok {
				word, trimmed = rest, true
			}
		}
	}
	return word
}

// linked returns a word, as a link if it is an address.
func linked(word string, limit int, attributes string, schemes []string) string {
	whole := trimWord(word, strings.CutPrefix, "(", "<", "&lt;")
	middle := trimWord(whole, strings.CutSuffix, ")", ">", ".", ",", "\n", "&gt;")
	head, tail := word[:len(word)-len(whole)], whole[len(middle):]
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
	email, isMail := strings.CutPrefix(middle, "mailto:")
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
	case isMail && rules.email.MatchString(email):
		middle = `<a href="` + middle + `">` + email + `</a>`
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
