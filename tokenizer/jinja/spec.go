// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"math"
	"math/big"
	"strconv"
	"strings"
	"unicode/utf8"
)

// spec is a format specification:
//
//	[[fill]align][sign][z][#][0][width][grouping][.precision][type]
type spec struct {
	fill      string
	align     byte // < > = ^, 0 if not given
	sign      byte // + - or a space, 0 if not given
	z, alt    bool
	zero      bool
	width     int
	group     byte // , or _, 0 if there is none
	precision int  // -1 if not given
	kind      byte // 0 if not given
}

// maxWidth bounds the width and the precision of a formatted value.
const maxWidth = 1 << 16

// parseSpec reads a specification. alignsRight says that zeros before the width go behind the sign.
func parseSpec(text string, alignsRight bool) spec {
	s := spec{precision: -1}
	rest := text
	if _, n := utf8.DecodeRuneInString(rest); len(rest) > n && strings.IndexByte("<>=^", rest[n]) >= 0 {
		s.fill, s.align, rest = rest[:n], rest[n], rest[n+1:]
	} else if rest != "" && strings.IndexByte("<>=^", rest[0]) >= 0 {
		s.align, rest = rest[0], rest[1:]
	}
	take := func(set string) byte {
		if rest == "" || strings.IndexByte(set, rest[0]) < 0 {
			return 0
		}
		c := rest[0]
		rest = rest[1:]
		return c
	}
	s.sign = take("+- ")
	s.z = take("z") != 0
	s.alt = take("#") != 0
	if s.fill == "" && take("0") != 0 {
		s.fill, s.zero = "0", true
		if s.align == 0 && alignsRight {
			s.align = '='
		}
	}
	s.width, rest = leadingNumber(rest, 0)
	s.group = take(",_")
	if s.group != 0 && rest != "" && (rest[0] == ',' || rest[0] == '_') {
		raise(ValueError, "Cannot specify both ',' and '_'.")
	}
	if take(".") != 0 {
		if s.precision, rest = leadingNumber(rest, -1); s.precision < 0 {
			raise(ValueError, "Format specifier missing precision")
		}
	}
	switch {
	case len(rest) > 1:
		raise(ValueError, "Invalid format specifier")
	case rest != "":
		s.kind = rest[0]
	}
	return s
}

// leadingNumber reads the number at the beginning of s, none without one.
func leadingNumber(s string, none int) (n int, rest string) {
	k := 0
	for ; k < len(s) && '0' <= s[k] && s[k] <= '9'; k++ {
		n = min(n*10+int(s[k]-'0'), maxWidth)
	}
	switch {
	case k == 0:
		return none, s
	case k > 18:
		raise(ValueError, "Too many decimal digits in format string")
	case n == maxWidth:
		raise(LimitError, "a format wider than %d", maxWidth)
	}
	return n, s[k:]
}

// format is format(v, text).
func (r *renderer) format(v Value, text string) string {
	switch {
	case text == "":
		return r.text(v)
	case v.isString():
		return r.formatString(v.str, parseSpec(text, false))
	case v.isInt() || v.kind == kindBig:
		s := parseSpec(text, true)
		if s.kind != 0 && strings.IndexByte("eEfFgG%", s.kind) >= 0 {
			return r.formatFloat(toFloat(v), s)
		}
		return r.formatInt(v, s)
	case v.kind == kindFloat:
		return r.formatFloat(v.float(), parseSpec(text, true))
	}
	panic(errorf(TypeError, "unsupported format string passed to %s.__format__", v.typeName()))
}

func (r *renderer) formatString(text string, s spec) string {
	switch {
	case s.kind != 0 && s.kind != 's':
		raise(ValueError, "Unknown format code '%c' for object of type 'str'", s.kind)
	case s.sign != 0 || s.z || s.alt || s.align == '=':
		raise(ValueError, "Sign, alternate form or '=' alignment not allowed in string format specifier")
	case s.group != 0:
		raise(ValueError, "Cannot specify '%c' with 's'.", s.group)
	}
	if s.precision >= 0 {
		text = substring(text, None(), Int(int64(s.precision)))
	}
	return r.filled("", text, s, '<')
}

// bigOf returns an integer of any size.
func (r *renderer) bigOf(v Value) *big.Int {
	text := digitsOf(v)
	r.tick(1 + len(text))
	n, _ := new(big.Int).SetString(text, 10)
	return n
}

func (r *renderer) formatInt(v Value, s spec) string {
	n := r.bigOf(v)
	prefix, base := "", 10
	switch s.kind {
	case 0, 'd', 'n':
	case 'b':
		base, prefix = 2, "0b"
	case 'o':
		base, prefix = 8, "0o"
	case 'x':
		base, prefix = 16, "0x"
	case 'X':
		base, prefix = 16, "0X"
	case 'c':
		if s.sign != 0 || s.alt || s.group != 0 || s.precision >= 0 {
			raise(ValueError, "Sign not allowed with integer format specifier 'c'")
		}
		return r.filled("", character(n), s, '>')
	default:
		raise(ValueError, "Unknown format code '%c' for object of type 'int'", s.kind)
	}
	if s.precision >= 0 {
		raise(ValueError, "Precision not allowed in integer format specifier")
	}
	if s.group == ',' && base != 10 || s.group != 0 && s.kind == 'n' {
		raise(ValueError, "Cannot specify '%c' with '%c'.", s.group, s.kind)
	}
	digits := new(big.Int).Abs(n).Text(base)
	if s.kind == 'X' {
		digits = strings.ToUpper(digits)
	}
	if !s.alt {
		prefix = ""
	}
	size := 3
	if base != 10 {
		size = 4
	}
	return r.number(n.Sign() < 0, prefix, digits, "", size, s)
}

// character is chr(n).
func character(n *big.Int) string {
	if !n.IsInt64() || n.Int64() < 0 || n.Int64() > utf8.MaxRune {
		raise(OverflowError, "%%c arg not in range(0x110000)")
	}
	if !utf8.ValidRune(rune(n.Int64())) {
		raise(Unsupported, "half a surrogate pair")
	}
	return string(rune(n.Int64()))
}

func (r *renderer) formatFloat(f float64, s spec) string {
	kind, precision := s.kind, s.precision
	switch kind {
	case 'e', 'E', 'f', 'F', 'g', 'G', '%', 0:
	case 'n':
		kind = 'g'
	default:
		raise(ValueError, "Unknown format code '%c' for object of type 'float'", s.kind)
	}
	if s.group != 0 && s.kind == 'n' {
		raise(ValueError, "Cannot specify '%c' with 'n'.", s.group)
	}
	tail := ""
	if kind == '%' {
		f, tail, kind = f*100, "%", 'f'
	}
	if precision < 0 && kind != 0 {
		precision = 6
	}
	r.made(max(precision, 0))
	a := math.Abs(f)
	var text string
	switch {
	case math.IsInf(f, 0):
		text = "inf"
	case math.IsNaN(f):
		text = "nan"
	case kind == 0 && precision < 0:
		if text = string(appendFloat(nil, a, "nan", "inf")); s.alt {
			text = pointed(text)
		}
	case kind == 0:
		text = general(a, precision, s.alt, true)
	case kind == 'g' || kind == 'G':
		text = general(a, precision, s.alt, false)
	default:
		if text = strconv.FormatFloat(a, kind|0x20, precision, 64); s.alt {
			text = pointed(text)
		}
	}
	if 'A' <= kind && kind <= 'Z' {
		text = strings.ToUpper(text)
	}
	whole := strings.IndexFunc(text, func(c rune) bool { return c < '0' || c > '9' })
	if whole < 0 {
		whole = len(text)
	}
	negative := math.Signbit(f) && !math.IsNaN(f)
	if s.z && strings.Trim(text, "0.") == "" {
		negative = false
	}
	return r.number(negative, "", text[:whole], text[whole:]+tail, 3, s)
}

// general is the format g of a number that is not negative. With point, at least one digit follows a point.
func general(a float64, precision int, alt, point bool) string {
	precision = max(precision, 1)
	text := strconv.FormatFloat(a, 'e', precision-1, 64)
	digits, e, _ := strings.Cut(text, "e")
	exponent, _ := strconv.Atoi(e)
	most := precision
	if point {
		most--
	}
	if exponent < -4 || exponent >= most {
		if !alt && strings.Contains(digits, ".") {
			digits = strings.TrimRight(strings.TrimRight(digits, "0"), ".")
		} else if alt {
			digits = pointed(digits)
		}
		return digits + text[strings.IndexByte(text, 'e'):]
	}
	text = strconv.FormatFloat(a, 'f', max(precision-1-exponent, 0), 64)
	switch {
	case alt:
		return pointed(text)
	case strings.Contains(text, "."):
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	if point && !strings.Contains(text, ".") {
		text += ".0"
	}
	return text
}

// pointed puts a point behind the digits of a number that has none.
func pointed(s string) string {
	if strings.Contains(s, ".") {
		return s
	}
	if digits, e, ok := strings.Cut(s, "e"); ok {
		return digits + ".e" + e
	}
	return s + "."
}

// number puts a number together: the digits before its point, in groups of size, and the rest behind them.
func (r *renderer) number(negative bool, prefix, digits, rest string, size int, s spec) string {
	sign := ""
	switch {
	case negative:
		sign = "-"
	case s.sign == '+' || s.sign == ' ':
		sign = string(s.sign)
	}
	if s.group != 0 && digits != "" {
		if s.fill == "0" && s.align == '=' {
			// Zeros are grouped, too.
			want := s.width - len(sign) - len(prefix) - utf8.RuneCountInString(rest)
			have := len(digits)
			for have+(have-1)/size < want {
				have++
			}
			digits = strings.Repeat("0", have-len(digits)) + digits
		}
		digits = inGroups(digits, size, s.group)
	}
	return r.filled(sign+prefix, digits+rest, s, '>')
}

func inGroups(digits string, size int, by byte) string {
	var b strings.Builder
	for i := range len(digits) {
		if i > 0 && (len(digits)-i)%size == 0 {
			b.WriteByte(by)
		}
		b.WriteByte(digits[i])
	}
	return b.String()
}

// filled fills a text up to the width of s. sign stands before the filling of the alignment =.
func (r *renderer) filled(sign, text string, s spec, align byte) string {
	n := s.width - utf8.RuneCountInString(text) - len(sign)
	fill := s.fill
	if fill == "" {
		fill = " "
	}
	r.made(len(sign) + len(text) + max(n, 0)*len(fill))
	if n <= 0 {
		return sign + text
	}
	if s.align != 0 {
		align = s.align
	}
	switch align {
	case '<':
		return sign + text + strings.Repeat(fill, n)
	case '^':
		return strings.Repeat(fill, n/2) + sign + text + strings.Repeat(fill, n-n/2)
	case '=':
		return sign + strings.Repeat(fill, n) + text
	}
	return strings.Repeat(fill, n) + sign + text
}
