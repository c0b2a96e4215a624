// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// maxKnown is the size limit in bytes of a translated expression. \p{L} alone becomes 6 KB.
const maxKnown = 1 << 20

// dialect translates an expression for regexp2. It supports only constructs that have the
// same meaning in Oniguruma, which reads tokenizer.json, and in Rust's fancy-regex, which
// reads rank files. It refuses all others and names them. Classes of Unicode and letter case
// become explicit ranges, from the tables of this package.
//
//	alternatives = sequence {"|" sequence}
//	sequence     = {item [("*"|"+"|"?"|"{n}"|"{n,}"|"{n,m}") ["?"]]}
//	item         = character | escape | "." | class | group
//	group        = ("(" | "(?:" | "(?>" | "(?=" | "(?!" | "(?i:") alternatives ")"
type dialect struct {
	strings.Builder // the translated expression
	expr            string
	i               int
	depth           int
	fold            bool // in (?i:
	tables          map[string][]runeRange
}

// item is what the translation must know of an item to check the items around it.
type item struct {
	empty bool   // it can match the empty text
	fold  bool   // it is a (?i: group
	chars string // in (?i: the letters that it matches, in lower case
}

func translate(expr string) (translated string, err error) {
	if !utf8.ValidString(expr) {
		return "", errors.New("not UTF-8")
	}
	defer func() {
		switch e := recover().(type) {
		case nil:
		case refusal:
			err = e.error
		default:
			panic(e)
		}
	}()
	d := &dialect{expr: expr, tables: map[string][]runeRange{}}
	empty := d.alternatives()
	switch {
	case d.i < len(expr):
		d.refuse(d.i, "a ) too many")
	case empty:
		d.refuse(0, "a match of the empty text")
	}
	return d.String(), nil
}

// refusal is the panic value that ends the translation of an expression.
type refusal struct{ error }

// refuse ends the translation. It never returns.
func (d *dialect) refuse(at int, what string) {
	panic(refusal{fmt.Errorf("at %d: %s cannot be done exactly", at, what)})
}

func (d *dialect) has(s string) bool { return strings.HasPrefix(d.expr[d.i:], s) }

// take reads s if the rest of the expression begins with it.
func (d *dialect) take(s string) bool {
	if !d.has(s) {
		return false
	}
	d.i += len(s)
	return true
}

// alternatives translates up to a ) or the end. It reports whether the part can match the empty text.
func (d *dialect) alternatives() (empty bool) {
	for {
		empty = d.sequence() || empty
		if !d.take("|") {
			return empty
		}
		d.WriteByte('|')
	}
}

// sequence translates up to a |, a ) or the end. It reports whether the part can match the empty text.
func (d *dialect) sequence() (empty bool) {
	empty = true
	var last item
	for d.i < len(d.expr) && !d.has("|") && !d.has(")") {
		at := d.i
		x := d.item()
		// Oniguruma takes some pairs of letters for one character: ss for ß.
		if x.fold && last.fold || joins(last.chars, x.chars) {
			d.refuse(at, "(?i: with letters that are together one character")
		}
		d.quantifier(&x)
		empty = empty && x.empty
		last = x
		if d.Len() > maxKnown {
			d.refuse(at, "an expression as large as this")
		}
	}
	return empty
}

// joins reports whether a letter of a and a letter of b are the beginning of the full case
// folding of one character.
func joins(a, b string) bool {
	for _, p := range []string{"ss", "st", "ff", "fi", "fl"} {
		if strings.Contains(a, p[:1]) && strings.Contains(b, p[1:]) {
			return true
		}
	}
	return false
}

func (d *dialect) quantifier(x *item) {
	if d.i == len(d.expr) {
		return
	}
	at := d.i
	low, exact := 0, false
	switch c := d.expr[d.i]; c {
	case '*', '?', '+':
		d.i++
		if c == '+' {
			low = 1
		}
	case '{':
		counts, _, closed := strings.Cut(d.expr[d.i:], "}")
		if !closed {
			d.refuse(at, "{")
		}
		d.i += len(counts) + 1
		a, b, two := strings.Cut(counts[1:], ",")
		n, err := strconv.ParseUint(a, 10, 10)
		m, err2 := strconv.ParseUint(cmp.Or(b, a), 10, 10)
		if err != nil || err2 != nil || m < n || b != "" && m == 0 {
			d.refuse(at, d.expr[at:d.i])
		}
		low, exact = int(n), !two
		if exact && n == 0 {
			d.refuse(at, "{0}")
		}
	default:
		return
	}
	switch {
	case x.empty:
		d.refuse(at, "to repeat what can match nothing")
	case d.fold, x.fold && d.expr[at:d.i] != "?":
		d.refuse(at, "to repeat in (?i:")
	case exact && d.has("?"):
		d.refuse(at, "{n}?")
	}
	d.take("?")
	if d.i < len(d.expr) && strings.IndexByte("*+?{", d.expr[d.i]) >= 0 {
		d.refuse(d.i, "a possessive or second quantifier")
	}
	d.WriteString(d.expr[at:d.i])
	x.empty = low == 0
}

func (d *dialect) item() item {
	at := d.i
	switch c := d.expr[d.i]; c {
	case '(':
		return d.group()
	case '[':
		return d.class()
	case '.':
		if d.fold {
			d.refuse(at, ". in (?i:")
		}
		d.i++
		d.WriteString(`[^\x0a]`)
		return item{}
	case '^', '$', '*', '+', '?', '{', '}', ']':
		d.refuse(at, string(c)+" here")
	}
	return d.write(at, d.one(), false)
}

func (d *dialect) group() item {
	at := d.i
	open := ""
	for _, s := range []string{"(?:", "(?>", "(?=", "(?!", "(?i:", "("} {
		if d.take(s) {
			open = s
			break
		}
	}
	switch {
	case open == "(" && (d.has("?") || d.has("*")):
		d.refuse(at, d.expr[at:min(at+4, len(d.expr))])
	case d.fold:
		d.refuse(at, "a group in (?i:")
	case d.depth == maxDepth:
		d.refuse(at, "a group as deep as this")
	}
	fold := open == "(?i:"
	if fold || open == "(" {
		d.WriteString("(?:") // the cases are written out, and nothing refers to groups
	} else {
		d.WriteString(open)
	}
	d.depth++
	d.fold = fold
	empty := d.alternatives()
	d.fold = false
	d.depth--
	if !d.take(")") {
		d.refuse(at, "( without )")
	}
	d.WriteByte(')')
	return item{empty: empty || open == "(?=" || open == "(?!", fold: fold}
}

// class reads what stands in brackets: characters, ranges and escapes.
func (d *dialect) class() item {
	open := d.i
	d.i++
	not := d.take("^")
	var set []runeRange
	var halves [2]bool // \p{Lm} and \p{Lo}, for which there is a table of both only
	for first := true; ; first = false {
		at := d.i
		switch {
		case at == len(d.expr):
			d.refuse(open, "[ without ]")
		case d.has("]") && first:
			d.refuse(at, "] as the first in brackets")
		case d.take("]"):
			if halves[0] != halves[1] {
				d.refuse(open, `one of \p{Lm} and \p{Lo}`)
			}
			return d.write(open, set, not)
		case d.has("["), d.has("--"), d.has("~~"), d.has("&&"):
			d.refuse(at, d.expr[at:at+1]+" in brackets")
		case d.has("-") && !first && !d.has("-]"):
			d.refuse(at, "- between these")
		case d.take(`\p{Lm}`):
			halves[0] = true
			set = append(set, d.table("LmLo")...)
			continue
		case d.take(`\p{Lo}`):
			halves[1] = true
			continue
		}
		one := d.one()
		if d.has("-") && !d.has("-]") {
			d.i++
			if d.i == len(d.expr) || d.has("[") || d.has("-") || d.has("&&") {
				d.refuse(at, "this range")
			}
			to := d.one()
			if !single(one) || !single(to) || one[0].lo > to[0].lo {
				d.refuse(at, "this range")
			}
			one = []runeRange{{one[0].lo, to[0].lo}}
		}
		set = append(set, one...)
	}
}

// one reads a character or an escape and returns the code points that it matches.
func (d *dialect) one() []runeRange {
	at := d.i
	r, n := utf8.DecodeRuneInString(d.expr[d.i:])
	d.i += n
	if r != '\\' {
		return []runeRange{{r, r}}
	}
	if d.i == len(d.expr) {
		d.refuse(at, `\ at the end`)
	}
	c := d.expr[d.i]
	d.i++
	switch k := strings.IndexByte("tnvfr", c); {
	case k >= 0:
		r = '\t' + rune(k)
	case strings.IndexByte(`\.+*?()[]{}|^$-/&~#"!,:;=@% `, c) >= 0:
		r = rune(c)
	case c == 's':
		return d.table("s")
	case c == 'S':
		return complement(d.table("s"))
	case c == 'u' && d.i+4 <= len(d.expr):
		n, err := strconv.ParseUint(d.expr[d.i:d.i+4], 16, 16)
		if err != nil || !utf8.ValidRune(rune(n)) {
			d.refuse(at, `\u`)
		}
		d.i += 4
		r = rune(n)
	case c == 'p' || c == 'P':
		open := d.take("{")
		name, _, closed := strings.Cut(d.expr[d.i:], "}")
		if !open || !closed {
			d.refuse(at, `\p without {…}`)
		}
		d.i += len(name) + 1
		if !slices.Contains([]string{"L", "N", "M", "P", "S", "Lu", "Ll", "Lt", "Han"}, name) {
			d.refuse(at, d.expr[at:d.i])
		}
		if c == 'P' {
			return complement(d.table(name))
		}
		return d.table(name)
	default:
		_, n := utf8.DecodeRuneInString(d.expr[at+1:])
		d.refuse(at, d.expr[at:at+1+n])
	}
	return []runeRange{{r, r}}
}

// write writes a set of code points. In (?i: it adds the other cases of the characters.
func (d *dialect) write(at int, set []runeRange, not bool) (x item) {
	if d.fold {
		if not {
			d.refuse(at, "[^ in (?i:")
		}
		for _, c := range slices.Clone(set) {
			if c.lo != c.hi || c.lo >= utf8.RuneSelf {
				d.refuse(at, "more than a character of ASCII in (?i:")
			}
			lower := unicode.ToLower(c.lo)
			x.chars += string(lower)
			for r := unicode.SimpleFold(lower); r != lower; r = unicode.SimpleFold(r) {
				set = append(set, runeRange{r, r})
			}
			set = append(set, runeRange{lower, lower})
		}
	}
	d.WriteByte('[')
	if not {
		d.WriteByte('^')
	}
	for _, r := range set {
		d.WriteString(literal(r.lo))
		if r.lo != r.hi {
			d.WriteString("-" + literal(r.hi))
		}
	}
	d.WriteByte(']')
	return x
}

// named maps the names of classes in \p{…}, and s for \s, to the bits of a table: of hanClasses
// for Han, else of classes.
//
//nolint:gochecknoglobals // a table
var named = map[string]uint8{
	"L": classLetter, "N": classNumber, "M": classMark, "P": classPunct, "S": classSymbol, "s": classSpace,
	"Han": classHan,
}

// table returns the code points of a class as ranges in order.
func (d *dialect) table(name string) []runeRange {
	if t := d.tables[name]; t != nil {
		return t
	}
	t := classes()
	if name == "Han" {
		t = hanClasses()
	}
	var set []runeRange
	for r := rune(0); r <= utf8.MaxRune; r++ {
		class := t.of(r)
		in := class&named[name] != 0
		switch cases := class & (classUpper | classLower); name {
		case "Ll":
			in = cases == classLower
		case "Lu": // no version of Unicode since 3.1 has added to Lt
			in = cases == classUpper && !unicode.Is(unicode.Lt, r)
		case "Lt":
			in = unicode.Is(unicode.Lt, r)
		case "LmLo":
			in = class&classLetter != 0 && cases == classUpper|classLower
		}
		switch n := len(set); {
		case !in:
		case n > 0 && set[n-1].hi == r-1:
			set[n-1].hi = r
		default:
			set = append(set, runeRange{r, r})
		}
	}
	d.tables[name] = set
	return set
}
