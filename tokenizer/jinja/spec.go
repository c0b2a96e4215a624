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
// [[fill]align][sign][z][#][0][width][grouping][.precision][type].
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

// maxWidth bounds the width and precision of what is formatted.
const maxWidth = 1 << 16

// parseSpec reads a specification; the value's own alignment says what the zero
// before the width means.
func parseSpec(text string, alignsRight bool) (spec, error) {
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
	var err error
	if s.width, rest, err = digitsOf(rest, 0); err != nil {
		return s, err
	}
	s.group = take(",_")
	if s.group != 0 && rest != "" && (rest[0] == ',' || rest[0] == '_') {
		return s, errorf(ValueError, "Cannot specify both ',' and '_'.")
	}
	if take(".") != 0 {
		if s.precision, rest, err = digitsOf(rest, -1); err != nil {
			return s, err
		}
		if s.precision < 0 {
			return s, errorf(ValueError, "Format specifier missing precision")
		}
	}
	switch {
	case len(rest) > 1:
		return s, errorf(ValueError, "Invalid format specifier")
	case rest != "":
		s.kind = rest[0]
	}
	return s, nil
}

// digitsOf reads a number from the beginning of s; none if there is none.
func digitsOf(s string, none int) (n int, rest string, err error) {
	k := 0
	for ; k < len(s) && '0' <= s[k] && s[k] <= '9'; k++ {
		if n = n*10 + int(s[k]-'0'); n >= maxWidth {
			n = maxWidth
		}
	}
	switch {
	case k == 0:
		return none, s, nil
	case k > 18:
		return 0, s, errorf(ValueError, "Too many decimal digits in format string")
	case n == maxWidth:
		return 0, s, errorf(LimitError, "a format wider than %d", maxWidth)
	}
	return n, s[k:], nil
}

// format is format(v, text).
func (r *renderer) format(v Value, text string) (string, error) {
	if text == "" {
		return r.text(v), nil
	}
	switch {
	case v.isString():
		s, err := parseSpec(text, false)
		if err != nil {
			return "", err
		}
		return r.formatString(v.str, s)
	case v.isInt() || v.kind == kindBig:
		s, err := parseSpec(text, true)
		if err != nil {
			return "", err
		}
		if s.kind != 0 && strings.IndexByte("eEfFgG%", s.kind) >= 0 {
			f, err := v.toFloat()
			if err != nil {
				return "", err
			}
			return r.formatFloat(f, s)
		}
		return r.formatInt(v.toBig(), s)
	case v.kind == kindFloat:
		s, err := parseSpec(text, true)
		if err != nil {
			return "", err
		}
		return r.formatFloat(v.float(), s)
	}
	return "", errorf(TypeError, "unsupported format string passed to %s.__format__", v.typeName())
}

func (r *renderer) formatString(text string, s spec) (string, error) {
	switch {
	case s.kind != 0 && s.kind != 's':
		return "", errorf(ValueError, "Unknown format code '%c' for object of type 'str'", s.kind)
	case s.sign != 0 || s.z || s.alt || s.align == '=':
		return "", errorf(ValueError, "Sign, alternate form or '=' alignment not allowed in string format specifier")
	case s.group != 0:
		return "", errorf(ValueError, "Cannot specify '%c' with 's'.", s.group)
	}
	if s.precision >= 0 {
		text = sliceString(text, None(), Int(int64(s.precision)))
	}
	return r.padded("", text, s, '<')
}

func (r *renderer) formatInt(n *big.Int, s spec) (string, error) {
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
			return "", errorf(ValueError, "Sign not allowed with integer format specifier 'c'")
		}
		c, err := charOf(n)
		if err != nil {
			return "", err
		}
		return r.padded("", c, s, '>')
	default:
		return "", errorf(ValueError, "Unknown format code '%c' for object of type 'int'", s.kind)
	}
	if s.precision >= 0 {
		return "", errorf(ValueError, "Precision not allowed in integer format specifier")
	}
	if s.group == ',' && base != 10 || s.group != 0 && s.kind == 'n' {
		return "", errorf(ValueError, "Cannot specify '%c' with '%c'.", s.group, s.kind)
	}
	if !r.spend(n.BitLen() / 8) {
		return "", r.broken
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

// charOf is chr(n).
func charOf(n *big.Int) (string, error) {
	if !n.IsInt64() || n.Int64() < 0 || n.Int64() > utf8.MaxRune {
		return "", errorf(OverflowError, "%%c arg not in range(0x110000)")
	}
	c := rune(n.Int64())
	if !utf8.ValidRune(c) {
		return "", errorf(ValueError, "half a surrogate pair")
	}
	return string(c), nil
}

func (r *renderer) formatFloat(f float64, s spec) (string, error) {
	kind, precision := s.kind, s.precision
	switch kind {
	case 'e', 'E', 'f', 'F', 'g', 'G', '%', 0:
	case 'n':
		kind = 'g'
	default:
		return "", errorf(ValueError, "Unknown format code '%c' for object of type 'float'", s.kind)
	}
	if s.group != 0 && s.kind == 'n' {
		return "", errorf(ValueError, "Cannot specify '%c' with 'n'.", s.group)
	}
	tail := ""
	if kind == '%' {
		f, tail, kind = f*100, "%", 'f'
	}
	if precision < 0 && kind != 0 {
		precision = 6
	}
	if err := r.made(max(precision, 0)); err != nil {
		return "", err
	}
	a := math.Abs(f)
	var text string
	switch {
	case math.IsInf(f, 0):
		text = "inf"
	case math.IsNaN(f):
		text = "nan"
	case kind == 0 && precision < 0:
		text = string(appendFloat(nil, a))
		if s.alt {
			text = pointed(text)
		}
	case kind == 0:
		text = general(a, precision, s.alt, true)
	case kind == 'g' || kind == 'G':
		text = general(a, precision, s.alt, false)
	default:
		text = strconv.FormatFloat(a, kind|0x20, precision, 64)
		if s.alt {
			text = pointed(text)
		}
	}
	if 'A' <= kind && kind <= 'Z' {
		text = strings.ToUpper(text)
	}
	whole := strings.IndexFunc(text, func(r rune) bool { return r < '0' || r > '9' })
	if whole < 0 {
		whole = len(text)
	}
	negative := math.Signbit(f) && !math.IsNaN(f)
	if s.z && strings.Trim(text, "0.") == "" {
		negative = false
	}
	return r.number(negative, "", text[:whole], text[whole:]+tail, 3, s)
}

// general is the format g of a number that is not negative; with point, at least one
// digit follows one.
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
	digits, e, ok := strings.Cut(s, "e")
	if ok {
		return digits + ".e" + e
	}
	return digits + "."
}

// number puts a number together: the digits before its point, in groups of size,
// and what is behind them.
func (r *renderer) number(negative bool, prefix, digits, rest string, size int, s spec) (string, error) {
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
		digits = grouped(digits, size, s.group)
	}
	return r.padded(sign+prefix, digits+rest, s, '>')
}

func grouped(digits string, size int, by byte) string {
	var b strings.Builder
	for i := range len(digits) {
		if i > 0 && (len(digits)-i)%size == 0 {
			b.WriteByte(by)
		}
		b.WriteByte(digits[i])
	}
	return b.String()
}

// padded fills a text up to the width of s. sign is what stands before the filling
// of =.
func (r *renderer) padded(sign, text string, s spec, align byte) (string, error) {
	n := s.width - utf8.RuneCountInString(text) - len(sign)
	fill := s.fill
	if fill == "" {
		fill = " "
	}
	if err := r.made(len(sign) + len(text) + max(n, 0)*len(fill)); err != nil {
		return "", err
	}
	if n <= 0 {
		return sign + text, nil
	}
	if s.align != 0 {
		align = s.align
	}
	switch align {
	case '<':
		return sign + text + strings.Repeat(fill, n), nil
	case '^':
		return strings.Repeat(fill, n/2) + sign + text + strings.Repeat(fill, n-n/2), nil
	case '=':
		return sign + strings.Repeat(fill, n) + text, nil
	}
	return strings.Repeat(fill, n) + sign + text, nil
}
