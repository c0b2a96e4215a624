// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"math"
	"math/big"
	"strings"
	"unicode/utf8"
)

// formatOf is the filter format: % with the arguments, or with those given by name.
func formatOf(r *renderer, v Value, a args) Value {
	if len(a.names) > 0 {
		if len(a.positional()) > 0 {
			raise(FilterError, "can't handle positional and keyword arguments at the same time")
		}
		return r.percent(r.soft(v), FromDict(r.dictOf(a)))
	}
	r.listed(len(a.values))
	return r.percent(r.soft(v), tuple(a.kept().values...))
}

// percent is the operator % of strings. A safe string escapes the texts that are put into it.
type percent struct {
	r      *renderer
	format string
	i      int // place in format
	out    strings.Builder
	safe   bool

	value  Value
	single bool // value is the only argument
	next   int  // argument; of a single one, how often it was taken
	keys   Value
}

func (r *renderer) percent(format, v Value) Value {
	p := &percent{r: r, format: format.str, safe: format.kind == kindSafe, value: v, single: v.kind != kindTuple, keys: v}
	for p.i < len(p.format) {
		k := strings.IndexByte(p.format[p.i:], '%')
		if k < 0 {
			k = len(p.format) - p.i
		}
		p.out.WriteString(p.format[p.i : p.i+k])
		if p.i += k; p.i >= len(p.format) {
			break
		}
		p.i++
		before := p.out.Len()
		p.field()
		r.grown(p.out.Len(), p.out.Len()-before)
	}
	left := p.single && p.next == 0 || !p.single && p.next < len(v.Items())
	if left && !isMapping(v) {
		raise(TypeError, "not all arguments converted during string formatting")
	}
	r.made(p.out.Len())
	return Value{kind: format.kind, str: p.out.String()}
}

// grown counts n more bytes of a string that has size bytes.
func (r *renderer) grown(size, n int) {
	if size > r.MaxOutput {
		n = size
	}
	r.made(n)
}

// isMapping reports whether % takes v for a mapping: v can be indexed, and is neither a tuple nor a string.
func isMapping(v Value) bool {
	switch v.kind {
	case kindDict, kindList, kindRange, kindUndefined:
		return true
	}
	return false
}

// argument returns the next argument.
func (p *percent) argument() Value {
	p.next++
	switch {
	case p.single && p.next == 1:
		return p.value
	case !p.single && p.next <= len(p.value.Items()):
		return p.value.Items()[p.next-1]
	}
	return raise(TypeError, "not enough arguments for format string")
}

// key reads "(name)" and makes the value of that name the only argument.
func (p *percent) key() {
	if !isMapping(p.keys) {
		raise(TypeError, "format requires a mapping")
	}
	start, depth := p.i+1, 1
	for p.i++; p.i < len(p.format) && depth > 0; p.i++ {
		switch p.format[p.i] {
		case '(':
			depth++
		case ')':
			depth--
		}
	}
	if depth > 0 {
		raise(ValueError, "incomplete format key")
	}
	p.r.defined(p.keys)
	d := p.keys.Dict()
	if d == nil {
		raise(TypeError, "%s indices must be integers or slices, not str", p.keys.typeName())
	}
	name := p.format[start : p.i-1]
	v, ok := d.Get(name)
	if !ok {
		raise(KeyError, "'%s'", name)
	}
	p.value, p.single, p.next = v, true, 0
}

// size reads a width or precision.
func (p *percent) size() int {
	if p.i < len(p.format) && p.format[p.i] == '*' {
		p.i++
		v := p.argument()
		switch {
		case !v.isInt():
			raise(TypeError, "* wants int")
		case v.int() >= maxWidth || v.int() <= -maxWidth:
			raise(LimitError, "a format wider than %d", maxWidth)
		}
		return int(v.int())
	}
	n, rest := leadingNumber(p.format[p.i:], 0)
	p.i = len(p.format) - len(rest)
	return n
}

// flags reads the flags of a conversion. left says that the text goes to the left.
func (p *percent) flags(s *spec) (left bool) {
	for ; p.i < len(p.format); p.i++ {
		switch c := p.format[p.i]; {
		case c == '-':
			left = true
		case c == '+':
			s.sign = '+'
		case c == ' ' && s.sign == 0:
			s.sign = ' '
		case c == ' ':
		case c == '#':
			s.alt = true
		case c == '0':
			s.zero = true
		default:
			return left
		}
	}
	return left
}

// field writes the value of a conversion, behind its %.
func (p *percent) field() {
	if p.i < len(p.format) && p.format[p.i] == '(' {
		p.key()
	}
	s := spec{precision: -1}
	left := p.flags(&s)
	if s.width = p.size(); s.width < 0 {
		left, s.width = true, -s.width
	}
	if p.i < len(p.format) && p.format[p.i] == '.' {
		p.i++
		s.precision = max(p.size(), 0)
	}
	if p.i < len(p.format) && strings.IndexByte("hlL", p.format[p.i]) >= 0 {
		p.i++
	}
	if p.i >= len(p.format) {
		raise(ValueError, "incomplete format")
	}
	c, n := utf8.DecodeRuneInString(p.format[p.i:])
	p.i += n
	if c == '%' {
		p.out.WriteByte('%')
		return
	}
	if s.align = '>'; left {
		s.align = '<'
	}
	p.out.WriteString(p.convert(p.argument(), c, s))
}

// convert formats one value.
func (p *percent) convert(v Value, c rune, s spec) string {
	r := p.r
	switch c {
	case 's', 'r', 'a':
		text := v.str
		if c != 's' {
			text = r.repr(v)
		} else if !v.isString() {
			text = r.text(v)
		}
		if p.safe && (c != 's' || v.kind != kindSafe) {
			text = r.safe(String(text)).str
		}
		if c == 'a' {
			text = r.asciiOnly(text)
		}
		s.sign, s.alt, s.zero = 0, false, false
		return r.formatString(text, s)
	case 'c':
		text := v.str
		switch {
		case v.isInt() || v.kind == kindBig:
			text = character(r.bigOf(v))
		case !v.isString() || utf8.RuneCountInString(text) != 1:
			raise(TypeError, "%%c requires int or char")
		}
		return r.formatString(text, spec{align: s.align, width: s.width, precision: -1})
	case 'd', 'i', 'u', 'x', 'X', 'o':
		return p.integer(v, byte(c), s)
	case 'e', 'E', 'f', 'F', 'g', 'G':
		if p.safe && v.isString() {
			raise(ValueError, "could not convert string to float")
		}
		if r.defined(v); !v.isNumber() {
			raise(TypeError, "must be real number, not %s", v.typeName())
		}
		f := toFloat(v)
		if s.kind = byte(c); s.zero && s.align == '>' && !math.IsInf(f, 0) && !math.IsNaN(f) {
			s.fill, s.align = "0", '='
		}
		return r.formatFloat(f, s)
	}
	panic(errorf(ValueError, "unsupported format character '%c'", c))
}

// integer formats a whole number, of which the precision is the least number of digits.
func (p *percent) integer(v Value, c byte, s spec) string {
	p.r.defined(v)
	switch {
	case v.kind == kindFloat && strings.IndexByte("diu", c) >= 0:
		v = truncated(v.float())
	case !v.isInt() && v.kind != kindBig:
		raise(TypeError, "%%%c format: a real number is required, not %s", c, v.typeName())
	}
	n := p.r.bigOf(v)
	base := map[byte]int{'x': 16, 'X': 16, 'o': 8}[c]
	if base == 0 {
		base = 10
	}
	digits, prefix := new(big.Int).Abs(n).Text(base), ""
	if s.alt && base != 10 {
		prefix = "0" + string(c)
	}
	if c == 'X' {
		digits = strings.ToUpper(digits)
	}
	if more := s.precision - len(digits); more > 0 {
		digits = strings.Repeat("0", more) + digits
	}
	if s.zero && s.align == '>' {
		s.fill, s.align = "0", '='
	}
	return p.r.number(n.Sign() < 0, prefix, digits, "", 3, s)
}

// asciiOnly escapes all characters of a repr that are not ASCII.
func (r *renderer) asciiOnly(s string) string {
	if isASCII(s) {
		return s
	}
	r.made(10 * len(s))
	const hex = "0123456789abcdef"
	var b []byte
	for _, c := range s {
		digits, letter := 2, byte('x')
		switch {
		case c < utf8.RuneSelf:
			b = append(b, byte(c))
			continue
		case c >= 0x10000:
			digits, letter = 8, 'U'
		case c >= 0x100:
			digits, letter = 4, 'u'
		}
		b = append(b, '\\', letter)
		for k := digits - 1; k >= 0; k-- {
			b = append(b, hex[c>>(4*k)&15])
		}
	}
	return string(b)
}

// formatter is str.format: fields take their values from positional and named arguments.
type formatter struct {
	r     *renderer
	given []Value
	named func(name string) (Value, bool)
	next  int // field without a name; -1 once fields have numbers
	safe  bool
}

// formatted is str.format.
func formatted(r *renderer, v Value, a args) Value {
	f := formatter{r: r, given: a.positional(), named: a.named, safe: v.kind == kindSafe}
	return v.withText(f.write(v.str, 1))
}

// formattedByMap is str.format_map.
func formattedByMap(r *renderer, v Value, a args) Value {
	d := a.values[0]
	f := formatter{r: r, safe: v.kind == kindSafe, named: func(name string) (Value, bool) {
		if of := d.Dict(); of != nil {
			return of.Get(name)
		}
		return Value{}, false
	}}
	return v.withText(f.write(v.str, 1))
}

// maxFormatDepth is the nesting of fields in specifications that Python allows.
const maxFormatDepth = 3

func (f *formatter) write(text string, depth int) string {
	if depth > maxFormatDepth {
		raise(ValueError, "Max string recursion exceeded")
	}
	var b strings.Builder
	for s := text; s != ""; {
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
		if s[i] == '}' || i+1 == len(s) {
			raise(ValueError, "Single '%c' encountered in format string", s[i])
		}
		end := fieldEnd(s, i+1)
		if end < 0 {
			raise(ValueError, "expected '}' before end of string")
		}
		out := f.field(s[i+1:end], depth)
		b.WriteString(out)
		f.r.grown(b.Len(), len(out))
		s = s[end+1:]
	}
	return b.String()
}

// fieldEnd returns the place of the brace that closes the field whose text begins at s[i], -1 without one.
// Braces within brackets do not count.
func fieldEnd(s string, i int) int {
	depth, bracket := 1, false
	for ; i < len(s); i++ {
		switch c := s[i]; {
		case c == '[' || c == ']':
			bracket = c == '['
		case bracket:
		case c == '{':
			depth++
		case c == '}':
			if depth--; depth == 0 {
				return i
			}
		}
	}
	return -1
}

// field is the text of one field: name!conversion:spec.
func (f *formatter) field(field string, depth int) string {
	end, bracket := len(field), false
	for k := range len(field) {
		if c := field[k]; c == '[' || c == ']' {
			bracket = c == '['
		} else if !bracket && (c == '!' || c == ':') {
			end = k
			break
		}
	}
	name, rest := field[:end], field[end:]
	if strings.Contains(name, "{") {
		raise(ValueError, "unexpected '{' in field name")
	}
	conversion := ""
	if strings.HasPrefix(rest, "!") {
		c, n := utf8.DecodeRuneInString(rest[1:])
		if n == 0 {
			raise(ValueError, "end of string while looking for conversion specifier")
		}
		if conversion, rest = string(c), rest[1+n:]; rest != "" && rest[0] != ':' {
			raise(ValueError, "expected ':' after conversion specifier")
		}
	}
	v := f.value(name)
	switch conversion {
	case "":
	case "s":
		v = String(f.r.text(v))
	case "r":
		v = String(f.r.repr(v))
	case "a":
		v = String(f.r.asciiOnly(f.r.repr(v)))
	default:
		raise(ValueError, "Unknown conversion specifier %s", conversion)
	}
	text := f.write(strings.TrimPrefix(rest, ":"), depth+1)
	switch {
	case !f.safe:
		return f.r.format(v, text)
	case v.kind != kindSafe:
		return f.r.safe(String(f.r.format(v, text))).str
	case text != "":
		raise(ValueError, "Unsupported format specification for Markup.")
	}
	return v.str
}

// value returns the value of a field's name.
func (f *formatter) value(field string) Value {
	end := strings.IndexAny(field, ".[")
	if end < 0 {
		end = len(field)
	}
	name, rest := field[:end], field[end:]
	i, number := 0, false
	switch {
	case name == "":
		if f.next < 0 {
			raise(ValueError, "cannot switch from manual field specification to automatic field numbering")
		}
		i, number = f.next, true
		f.next++
	case strings.Trim(name, "0123456789") == "":
		if f.next > 0 {
			raise(ValueError, "cannot switch from automatic field numbering to manual field specification")
		}
		f.next = -1
		i, _ = leadingNumber(name, 0)
		number = true
	}
	switch {
	case number && i >= len(f.given):
		raise(IndexError, "Replacement index %d out of range for positional args tuple", i)
	case number:
		return f.within(f.given[i], rest)
	}
	v, ok := f.named(name)
	if !ok {
		raise(KeyError, "'%s'", name)
	}
	return f.within(v, rest)
}

// within follows the attributes and indexes behind a field's name.
func (f *formatter) within(v Value, rest string) Value {
	for rest != "" {
		f.r.tick(1)
		if rest[0] == '.' {
			end := strings.IndexAny(rest[1:], ".[") + 1
			if end == 0 {
				end = len(rest)
			}
			if end == 1 {
				raise(ValueError, "Empty attribute in format string")
			}
			name := rest[1:end]
			v, rest = f.r.attr(v, name, f.r.library.named(name)), rest[end:]
			continue
		}
		end := strings.IndexByte(rest, ']')
		switch {
		case rest[0] != '[':
			raise(ValueError, "Only '.' or '[' may follow ']' in format field specifier")
		case end < 0:
			raise(ValueError, "Missing ']' in format string")
		case end == 1:
			raise(ValueError, "Empty attribute in format string")
		}
		k := String(rest[1:end])
		if strings.Trim(k.str, "0123456789") == "" {
			n, _ := leadingNumber(k.str, 0)
			k = Int(int64(n))
		}
		v, rest = f.r.item(v, k), rest[end+1:]
	}
	return v
}
