// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"html"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/cases"
)

// rareMethods are the methods of strings that few chat templates use.
func rareMethods() map[string]*builtin {
	all := map[string]*builtin{
		"rindex":    finding(strings.LastIndex, true),
		"partition": partitioning(strings.Index, false), "rpartition": partitioning(strings.LastIndex, true),
		"splitlines": define("keepends", func(r *renderer, v Value, a args) Value {
			return r.texts(r.lines(v.str, a.or(0, Bool(false)).Truth()), v)
		}),
		"zfill": define("_!", zeroFilled), "expandtabs": define("tabsize", withoutTabs),
		"translate": define("_!", translated), "maketrans": define("_! _ _", translationTable),
	}
	for name, f := range map[string]func(string) string{"casefold": cases.Fold().String, "swapcase": swapCase} {
		all[name] = plain(func(r *renderer, v Value) Value { return r.changed(v, f) })
	}
	for name, sides := range map[string][2]bool{"ljust": {false, true}, "rjust": {true, false}, "center": {true, true}} {
		all[name] = define("_! _", func(r *renderer, v Value, a args) Value {
			fill := " "
			if a.values[1].kind != kindUnset {
				if fill = a.text(1); v.kind == kindSafe {
					fill = r.safe(a.values[1]).str
				}
			}
			if utf8.RuneCountInString(fill) != 1 {
				raise(TypeError, "The fill character must be exactly one character long")
			}
			return r.padded(v, a.integer(0, 0), fill, sides[0], sides[1])
		})
	}
	for name, is := range map[string]func(string) bool{
		"isdigit": every(isDigit), "isdecimal": every(unicode.IsDigit), "isnumeric": every(isNumeric), "isalpha": every(unicode.IsLetter),
		"isspace": every(isSpace), "isalnum": every(func(c rune) bool { return unicode.IsLetter(c) || isNumeric(c) }),
		"isupper": isUpper, "islower": isLower, "istitle": isTitle, "isascii": isASCII, "isidentifier": isIdentifier,
		"isprintable": func(s string) bool {
			return strings.IndexFunc(s, func(c rune) bool { return c != ' ' && !strconv.IsPrint(c) }) < 0
		},
	} {
		all[name] = plain(func(r *renderer, v Value) Value {
			r.tick(1 + len(v.str)/8)
			return Bool(is(v.str))
		})
	}
	return all
}

// safeMethods are the methods of safe strings only.
func safeMethods() map[string]*builtin {
	return map[string]*builtin{
		"unescape": plain(func(r *renderer, v Value) Value {
			r.made(len(v.str))
			return String(html.UnescapeString(v.str))
		}),
		"striptags": plain(func(r *renderer, v Value) Value { return r.withoutTags(v.str) }),
		"escape":    define("_!", func(r *renderer, _ Value, a args) Value { return r.safe(a.values[0]) }),
	}
}

// every returns a test that all characters of a string pass, if there are any.
func every(is func(rune) bool) func(string) bool {
	return func(s string) bool { return s != "" && strings.IndexFunc(s, func(c rune) bool { return !is(c) }) < 0 }
}

// part returns the text between the bounds in arguments 1 and 2 and the number of characters before it. It
// returns !ok if there is no such place.
func (r *renderer) part(v Value, a args) (s string, skipped int, ok bool) {
	r.scanned(4 * len(v.str))
	if a.values[1].kind == kindUnset {
		return v.str, 0, true
	}
	n := utf8.RuneCountInString(v.str)
	bound := func(i, byDefault int) int {
		if _, given := a.given(i); !given {
			return byDefault
		}
		x := a.integer(i, 0)
		if x < 0 {
			x = max(x+n, 0)
		}
		return x
	}
	from, to := bound(1, 0), min(bound(2, n), n)
	if from > to {
		return "", 0, false
	}
	return substring(v.str, Int(int64(from)), Int(int64(to))), from, true
}

func partitioning(index func(s, x string) int, fromRight bool) *builtin {
	return define("_!", func(r *renderer, v Value, a args) Value {
		separator := a.text(0)
		if separator == "" {
			raise(ValueError, "empty separator")
		}
		r.listed(3)
		r.scanned(len(v.str))
		switch i := index(v.str, separator); {
		case i >= 0:
			return tuple(v.withText(v.str[:i]), v.withText(separator), v.withText(v.str[i+len(separator):]))
		case fromRight:
			return tuple(v.withText(""), v.withText(""), v)
		}
		return tuple(v, v.withText(""), v.withText(""))
	})
}

func zeroFilled(r *renderer, v Value, a args) Value {
	n := a.integer(0, 0) - utf8.RuneCountInString(v.str)
	if n <= 0 {
		return v
	}
	r.made(len(v.str) + n)
	sign, s := "", v.str
	if s != "" && (s[0] == '-' || s[0] == '+') {
		sign, s = s[:1], s[1:]
	}
	return v.withText(sign + strings.Repeat("0", n) + s)
}

func withoutTabs(r *renderer, v Value, a args) Value {
	size, column := a.integer(0, 8), 0
	var b strings.Builder
	for _, c := range v.str {
		switch {
		case c == '\t' && size > 0:
			n := size - column%size
			column += n
			r.made(b.Len() + n)
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
	r.made(b.Len())
	return v.withText(b.String())
}

// translated replaces characters as a table says: a dictionary by code points, or a sequence.
func translated(r *renderer, v Value, a args) Value {
	table := a.values[0]
	var b strings.Builder
	for _, c := range v.str {
		r.tick(1)
		var to Value
		known := false
		switch table.kind {
		case kindDict:
			to, known = r.lookup(table.Dict(), Int(int64(c)))
		case kindString, kindSafe, kindList, kindTuple, kindRange:
			to = r.item(table, Int(int64(c)))
			known = to.kind != kindUndefined
		default:
			raise(TypeError, "'%s' object is not subscriptable", table.typeName())
		}
		switch {
		case !known:
			b.WriteRune(c)
		case to.IsNone():
		case to.isString():
			r.made(b.Len() + len(to.str))
			b.WriteString(to.str)
		case to.isInt():
			if to.int() < 0 || to.int() > utf8.MaxRune {
				raise(ValueError, "character mapping must be in range(0x110000)")
			}
			b.WriteRune(rune(to.int()))
		default:
			raise(TypeError, "character mapping must return integer, None or str")
		}
	}
	r.made(b.Len())
	return v.withText(b.String())
}

// translationTable is str.maketrans: of a dictionary, or of texts.
func translationTable(r *renderer, _ Value, a args) Value {
	table := &Dict{}
	put := func(c rune, v Value) {
		r.hold(3 * valueSize)
		r.setKey(table, Int(int64(c)), v)
	}
	if a.values[1].kind == kindUnset {
		from := a.values[0].Dict()
		if from == nil || a.values[0].kind != kindDict {
			raise(TypeError, "if you give only one argument to maketrans it must be a dict")
		}
		for i, k := range from.keys {
			c, n := utf8.DecodeRuneInString(k.str)
			switch {
			case k.isInt():
				r.hold(3 * valueSize)
				r.setKey(table, k, from.values[i])
			case !k.isString():
				raise(TypeError, "keys in translate table must be strings or integers")
			case n == 0 || n < len(k.str):
				raise(ValueError, "string keys in translate table must be of length 1")
			default:
				put(c, from.values[i])
			}
		}
		return FromDict(table)
	}
	from, to := []rune(a.text(0)), []rune(a.text(1))
	if len(from) != len(to) {
		raise(ValueError, "the first two maketrans arguments must have equal length")
	}
	for i, c := range from {
		put(c, Int(int64(to[i])))
	}
	if a.values[2].kind != kindUnset {
		for _, c := range a.text(2) {
			put(c, None())
		}
	}
	return FromDict(table)
}

func isLowercase(c rune) bool { return unicode.In(c, unicode.Lower, unicode.Other_Lowercase) }
func isUppercase(c rune) bool { return unicode.In(c, unicode.Upper, unicode.Other_Uppercase) }

// swapCase makes capitals small and small letters capitals.
func swapCase(s string) string {
	var b strings.Builder
	small := lower(s)
	same := utf8.RuneCountInString(small) == utf8.RuneCountInString(s) // but for İ
	for i, c := range s {
		next := ""
		if same {
			_, n := utf8.DecodeRuneInString(small)
			next, small = small[:n], small[n:]
		}
		switch {
		case isUppercase(c) && next != "":
			b.WriteString(next) // a sigma at the end of a word has another form
		case isUppercase(c):
			b.WriteString(lower(s[i : i+utf8.RuneLen(c)]))
		case isLowercase(c):
			b.WriteString(upper(s[i : i+utf8.RuneLen(c)]))
		default:
			b.WriteRune(c)
		}
	}
	return b.String()
}

// isLower is str.islower, isUpper str.isupper.
func isLower(s string) bool { return onlyCase(s, isLowercase, isUppercase) }
func isUpper(s string) bool { return onlyCase(s, isUppercase, isLowercase) }

func onlyCase(s string, is, isNot func(rune) bool) (found bool) {
	for _, c := range s {
		if isNot(c) || unicode.IsTitle(c) {
			return false
		}
		found = found || is(c)
	}
	return found
}

// isTitle is str.istitle.
func isTitle(s string) (found bool) {
	inWord := false
	for _, c := range s {
		switch {
		case isUppercase(c) || unicode.IsTitle(c):
			if inWord {
				return false
			}
			found, inWord = true, true
		case isLowercase(c):
			if !inWord {
				return false
			}
		default:
			inWord = false
		}
	}
	return found
}

// isIdentifier is str.isidentifier.
func isIdentifier(s string) bool {
	for i, c := range s {
		start := c == '_' || unicode.IsLetter(c) || unicode.In(c, unicode.Nl, unicode.Other_ID_Start)
		if !start && (i == 0 || !unicode.In(c, unicode.Mn, unicode.Mc, unicode.Nd, unicode.Pc, unicode.Other_ID_Continue)) {
			return false
		}
	}
	return s != ""
}

// isDigit is str.isdigit of a character.
func isDigit(c rune) bool { return unicode.IsDigit(c) || unicode.Is(digitTables().digits, c) }

// isNumeric is str.isnumeric of a character.
func isNumeric(c rune) bool { return unicode.IsNumber(c) || unicode.Is(digitTables().numerics, c) }

// Characters that Python counts as digits though they are no decimal ones, and as numeric though Unicode puts
// them in no category N, in hexadecimal. Python's isdigit, isdecimal and isnumeric for each code point gave them.
const (
	digitRanges = "b2-b3 b9 1369-1371 19da 2070 2074-2079 2080-2089 2460-2468 2474-247c 2488-2490 24ea 24f5-24fd " +
		"24ff 2776-277e 2780-2788 278a-2792 10a40-10a43 10e60-10e68 11052-1105a 1f100-1f10a"
	numericRanges = "3405 3483 382a 3b4d 4e00 4e03 4e07 4e09 4e5d 4e8c 4e94 4e96 4ebf-4ec0 4edf 4ee8 4f0d 4f70 5104 5146 " +
		"5169 516b 516d 5341 5343-5345 534c 53c1-53c4 56db 58f1 58f9 5e7a 5efe-5eff 5f0c-5f0e 5f10 62fe 634c 67d2 6f06 " +
		"7396 767e 8086 842c 8cae 8cb3 8d30 9621 9646 964c 9678 96f6 f96b f973 f978 f9b2 f9d1 f9d3 f9fd 20001 20064 " +
		"200e2 20121 2092a 20983 2098c 2099c 20aea 20afd 20b19 22390 22998 23b1b 2626d 2f890"
)

type numberTables struct{ digits, numerics *unicode.RangeTable }

var digitTables = sync.OnceValue(func() numberTables { //nolint:gochecknoglobals // tables
	read := func(text string) *unicode.RangeTable {
		t := &unicode.RangeTable{}
		for item := range strings.FieldsSeq(text) {
			from, to, isRange := strings.Cut(item, "-")
			if !isRange {
				to = from
			}
			lo, _ := strconv.ParseUint(from, 16, 32) // constants
			hi, _ := strconv.ParseUint(to, 16, 32)
			t.R32 = append(t.R32, unicode.Range32{Lo: uint32(lo), Hi: uint32(hi), Stride: 1})
		}
		slices.SortFunc(t.R32, func(a, b unicode.Range32) int { return int(a.Lo) - int(b.Lo) })
		return t
	}
	return numberTables{read(digitRanges), read(numericRanges)}
})
