// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"math"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

//nolint:gochecknoglobals // tables
var (
	percentField = regexp.MustCompile(`^([-+ 0]*)(\d*)(?:\.(\d*))?([a-zA-Z%])`)
	formatField  = regexp.MustCompile(`^(\d*|[A-Za-z_]\w*)(?:!([rs]))?(?::([^{}]*))?\}`)
	formatSpec   = regexp.MustCompile(`^(?:(.)?([<>^]))?([-+ ]?)(0?)(\d*)(,?)(?:\.(\d+))?([a-zA-Z%]?)$`)
)

// spec says how a value is formatted. It is what % and str.format have in common.
type spec struct {
	fill      string
	align     string // <, > or ^; "" is > for numbers and < for strings
	sign      string // of numbers that are not negative: "", "+" or " "
	zero      bool   // fill numbers with zeros behind the sign
	comma     bool   // between thousands
	width     int    // in characters
	precision int    // -1 if none is given
	kind      string // conversion, "" if none is given
}

// formatNumber reads a width or precision, or returns a default for "".
func (r *renderer) formatNumber(text string, byDefault int) int {
	if text == "" {
		return byDefault
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		panic(errorf(ValueError, "Too many decimal digits in format string"))
	}
	if n > r.o.MaxOutput {
		panic(errorf(LimitError, "a format wider than %d", r.o.MaxOutput))
	}
	return n
}

// percent is the operator % of strings.
func (r *renderer) percent(format, v Value) Value {
	if format.kind == kindSafe {
		panic(errorf(Unsupported, "the operator %% of a safe string"))
	}
	values := []Value{v}
	if v.kind == kindTuple {
		values = v.Items()
	}
	start := len(r.out)
	for rest := format.str; ; {
		text, after, found := strings.Cut(rest, "%")
		if r.write(String(text)); !found {
			break
		}
		m := percentField.FindStringSubmatch(after)
		if m == nil {
			panic(errorf(Unsupported, "the format %%%.20s", after))
		}
		if rest = after[len(m[0]):]; m[4] == "%" {
			r.write(String("%"))
			continue
		}
		if len(values) == 0 {
			panic(errorf(TypeError, "not enough arguments for format string"))
		}
		s := spec{width: r.formatNumber(m[2], 0), precision: r.formatNumber(m[3], -1), kind: m[4], align: ">", zero: strings.Contains(m[1], "0")}
		if strings.Contains(m[1], "-") {
			s.align, s.zero = "<", false
		}
		if i := strings.LastIndexAny(m[1], "+ "); i >= 0 {
			s.sign = m[1][i : i+1]
		}
		r.write(String(r.format(r.percentValue(values[0], &s), s)))
		values = values[1:]
	}
	if len(values) > 0 && v.kind != kindDict && v.kind != kindList && v.kind != kindRange {
		panic(errorf(TypeError, "not all arguments converted during string formatting"))
	}
	return String(r.cut(start))
}

// percentValue converts a value as a conversion of % says, and the conversion to one
// of str.format.
func (r *renderer) percentValue(v Value, s *spec) Value {
	switch s.kind {
	case "s", "r":
		text := r.text(v)
		if s.kind == "r" {
			text = r.repr(v)
		}
		s.kind, s.zero, s.sign = "s", false, ""
		return String(text)
	case "i", "u":
		s.kind = "d"
	}
	r.defined(v)
	if !strings.Contains("dxXfFeE", s.kind) {
		panic(errorf(Unsupported, "the conversion %%%s", s.kind))
	}
	if !v.isNumber() {
		panic(errorf(TypeError, "%%%s format: a number is required, not %s", s.kind, v.typeName()))
	}
	switch {
	case s.precision >= 0 && strings.Contains("dxX", s.kind):
		panic(errorf(Unsupported, "a precision of %%%s", s.kind))
	case v.kind == kindFloat && s.kind == "d":
		return truncated(v.float())
	case v.kind == kindFloat && strings.Contains("xX", s.kind):
		panic(errorf(TypeError, "%%%s format: an integer is required, not float", s.kind))
	}
	return v
}

// formatted is str.format.
func formatted(r *renderer, v Value, a args) Value {
	start, next := len(r.out), 0
	for rest := v.str; ; {
		i := strings.IndexAny(rest, "{}")
		if i < 0 {
			r.write(String(rest))
			return v.withText(r.cut(start))
		}
		r.write(String(rest[:i]))
		if rest = rest[i:]; strings.HasPrefix(rest, "{{") || strings.HasPrefix(rest, "}}") {
			r.write(String(rest[:1]))
			rest = rest[2:]
			continue
		}
		m := formatField.FindStringSubmatch(rest[1:])
		if m == nil || rest[0] == '}' {
			if !strings.ContainsAny(rest[1:], "{}") {
				panic(errorf(ValueError, "single %q in a format", rest[:1]))
			}
			panic(errorf(Unsupported, "the format %.20s", rest))
		}
		x, ok := a.named(m[1])
		if k, err := strconv.Atoi(m[1]); err == nil || m[1] == "" {
			switch {
			case m[1] != "" && next > 0 || m[1] == "" && next < 0:
				panic(errorf(ValueError, "automatic and manual field numbers in one format"))
			case m[1] != "":
				next = -1
			default:
				k = next
				next++
			}
			if k >= len(a.positional()) {
				panic(errorf(IndexError, "Replacement index %d out of range for positional args tuple", k))
			}
			x, ok = a.values[k], true
		}
		if !ok {
			panic(errorf(KeyError, "'%s'", m[1]))
		}
		r.write(String(r.formatField(v, x, m[2], m[3])))
		rest = rest[1+len(m[0]):]
	}
}

// formatField is the text of a field of str.format, which a safe string escapes.
func (r *renderer) formatField(format, v Value, conversion, text string) string {
	switch conversion {
	case "r":
		v = String(r.repr(v))
	case "s":
		v = String(r.text(v))
	}
	m := formatSpec.FindStringSubmatch(text)
	if m == nil || format.kind == kindSafe && text != "" {
		panic(errorf(Unsupported, "the format %.20q", text))
	}
	if format.kind == kindSafe {
		return r.safe(v).str
	}
	if text != "" && !v.isNumber() && !v.isString() {
		panic(errorf(TypeError, "unsupported format string passed to %s.__format__", v.typeName()))
	}
	if v.kind == kindBool {
		if v = Int(v.int()); text == "" {
			v = String(r.text(Bool(v.num != 0)))
		}
	}
	s := spec{fill: m[1], align: m[2], sign: strings.Trim(m[3], "-"), zero: m[4] != "", comma: m[6] != "", kind: m[8]}
	s.width, s.precision = r.formatNumber(m[5], 0), r.formatNumber(m[7], -1)
	if s.zero && s.align != "" { // as a fill, unless there is one
		if s.zero = false; s.fill == "" {
			s.fill = "0"
		}
	}
	return r.format(v, s)
}

// format formats a value.
func (r *renderer) format(v Value, s spec) string {
	isNumber := v.isNumber()
	text, negative := r.text(v), false
	if isNumber {
		text, negative = r.formatDigits(v, s)
	} else {
		if s.kind != "" && s.kind != "s" || s.sign != "" || s.comma {
			panic(errorf(ValueError, "Unknown format code '%s' for object of type '%s'", s.kind, v.typeName()))
		}
		if s.zero {
			panic(errorf(Unsupported, "zeros before a text"))
		}
		if s.precision >= 0 {
			text = text[:runeOffset(text, int64(s.precision))]
		}
	}
	sign := s.sign
	if negative {
		sign = "-"
	}
	n := s.width - utf8.RuneCountInString(text) - len(sign)
	if n <= 0 {
		return sign + text
	}
	fill := s.fill
	if fill == "" {
		fill = " "
	}
	r.made(len(text) + n*len(fill))
	before := 0
	switch {
	case s.zero && s.comma:
		panic(errorf(Unsupported, "zeros and commas in a format"))
	case s.zero:
		return sign + strings.Repeat("0", n) + text
	case s.align == ">" || s.align == "" && isNumber:
		before = n
	case s.align == "^":
		before = n / 2
	}
	return strings.Repeat(fill, before) + sign + text + strings.Repeat(fill, n-before)
}

// formatDigits formats a number without its sign.
func (r *renderer) formatDigits(v Value, s spec) (digits string, negative bool) {
	kind, precision := s.kind, s.precision
	if kind == "" && precision < 0 {
		if kind = "d"; v.kind == kindFloat {
			digits, negative = strings.CutPrefix(r.repr(v), "-")
			return grouped(digits, s.comma), negative
		}
	}
	switch {
	case strings.Contains("dxX", kind) && kind != "":
		if v.kind == kindFloat || precision >= 0 || s.comma && kind != "d" {
			panic(errorf(ValueError, "Unknown format code '%s' for object of type '%s'", kind, v.typeName()))
		}
		base := 10
		if kind != "d" {
			base = 16
		}
		digits, negative = strings.CutPrefix(v.toBig().Text(base), "-")
	case strings.Contains("fFeE%", kind) && kind != "":
		if precision < 0 {
			precision = 6
		}
		f := toFloat(v)
		verb := byte('f')
		if kind == "%" {
			f *= 100
		} else {
			verb = kind[0] | 0x20
		}
		digits, negative = strings.CutPrefix(strconv.FormatFloat(f, verb, min(precision, 1000), 64), "-")
		if math.IsInf(f, 0) || math.IsNaN(f) {
			digits = strings.ToLower(strings.TrimPrefix(digits, "+"))
		}
		if kind == "%" {
			digits += "%"
		}
	default:
		panic(errorf(Unsupported, "the format code '%s' of a number", kind))
	}
	if kind == "X" || kind == "E" || kind == "F" {
		digits = strings.ToUpper(digits)
	}
	return grouped(digits, s.comma), negative
}

// grouped puts commas between the thousands.
func grouped(digits string, comma bool) string {
	if !comma {
		return digits
	}
	whole := strings.IndexFunc(digits, func(c rune) bool { return c < '0' || c > '9' })
	if whole < 0 {
		whole = len(digits)
	}
	for i := whole - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}

// formatOf is the filter format: % with the arguments.
func formatOf(r *renderer, v Value, a args) Value {
	if len(a.names) > 0 {
		panic(errorf(Unsupported, "the filter 'format' with names"))
	}
	r.listed(len(a.values))
	return r.percent(r.soft(v), tuple(a.kept().values...))
}
