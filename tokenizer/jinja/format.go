// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"math"
	"math/big"
	"strings"
	"unicode/utf8"
)

// percent is the string operator %. A safe string escapes what is put into it.
type percent struct {
	r      *renderer
	format string
	i      int
	out    strings.Builder
	safe   bool

	value  Value
	single bool // value is the only argument
	next   int  // argument; of a single one, how often it was taken
	keys   Value
}

func (r *renderer) percent(format, v Value) (Value, error) {
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
		if err := p.field(); err != nil {
			return Value{}, err
		}
		if err := r.grown(p.out.Len(), p.out.Len()-before); err != nil {
			return Value{}, err
		}
	}
	left := p.single && p.next == 0 || !p.single && p.next < len(v.Items())
	if left && !isMapping(v) {
		return Value{}, errorf(TypeError, "not all arguments converted during string formatting")
	}
	return Value{kind: format.kind, str: p.out.String()}, r.made(p.out.Len())
}

// isMapping reports whether % takes v for one: what can be indexed, and is neither a
// tuple nor a string.
func isMapping(v Value) bool {
	switch v.kind {
	case kindDict, kindList, kindRange, kindUndefined:
		return true
	}
	return false
}

func (p *percent) incomplete() error { return errorf(ValueError, "incomplete format") }

// argument returns the next one.
func (p *percent) argument() (Value, error) {
	p.next++
	switch {
	case p.single && p.next == 1:
		return p.value, nil
	case !p.single && p.next <= len(p.value.Items()):
		return p.value.Items()[p.next-1], nil
	}
	return Value{}, errorf(TypeError, "not enough arguments for format string")
}

// key reads "(name)" and makes what it stands for the only argument.
func (p *percent) key() error {
	if !isMapping(p.keys) {
		return errorf(TypeError, "format requires a mapping")
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
		return errorf(ValueError, "incomplete format key")
	}
	d := p.keys.Dict()
	if d == nil {
		if p.keys.kind == kindUndefined {
			return errUndefined(p.keys)
		}
		return errorf(TypeError, "%s indices must be integers or slices, not str", p.keys.typeName())
	}
	name := p.format[start : p.i-1]
	v, ok := d.Get(name)
	if !ok {
		return errorf(KeyError, "'%s'", name)
	}
	p.value, p.single, p.next = v, true, 0
	return nil
}

// size reads a width or precision.
func (p *percent) size() (int, error) {
	if p.i < len(p.format) && p.format[p.i] == '*' {
		p.i++
		v, err := p.argument()
		if err != nil {
			return 0, err
		}
		if !v.isInt() {
			return 0, errorf(TypeError, "* wants int")
		}
		if v.int() >= maxWidth || v.int() <= -maxWidth {
			return 0, errorf(LimitError, "a format wider than %d", maxWidth)
		}
		return int(v.int()), nil
	}
	n, rest, err := digitsOf(p.format[p.i:], 0)
	p.i = len(p.format) - len(rest)
	return n, err
}

// field writes what stands for a conversion, behind its %.
func (p *percent) field() error {
	if p.i < len(p.format) && p.format[p.i] == '(' {
		if err := p.key(); err != nil {
			return err
		}
	}
	s := spec{precision: -1}
	left := false
	for ; p.i < len(p.format); p.i++ {
		c := p.format[p.i]
		switch c {
		case '-':
			left = true
		case '+':
			s.sign = '+'
		case ' ':
			if s.sign == 0 {
				s.sign = ' '
			}
		case '#':
			s.alt = true
		case '0':
			s.zero = true
		}
		if strings.IndexByte("-+ #0", c) < 0 {
			break
		}
	}
	var err error
	if s.width, err = p.size(); err != nil {
		return err
	}
	if s.width < 0 {
		left, s.width = true, -s.width
	}
	if p.i < len(p.format) && p.format[p.i] == '.' {
		p.i++
		if s.precision, err = p.size(); err != nil {
			return err
		}
		s.precision = max(s.precision, 0)
	}
	if p.i < len(p.format) && strings.IndexByte("hlL", p.format[p.i]) >= 0 {
		p.i++
	}
	if p.i >= len(p.format) {
		return p.incomplete()
	}
	c, n := utf8.DecodeRuneInString(p.format[p.i:])
	p.i += n
	if c == '%' {
		p.out.WriteByte('%')
		return nil
	}
	v, err := p.argument()
	if err != nil {
		return err
	}
	if s.align = '>'; left {
		s.align = '<'
	}
	text, err := p.convert(v, c, s)
	p.out.WriteString(text)
	return err
}

// convert formats one value.
func (p *percent) convert(v Value, c rune, s spec) (string, error) {
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
			text = r.escaped(text)
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
			var err error
			if text, err = charOf(v.toBig()); err != nil {
				return "", err
			}
		case !v.isString() || utf8.RuneCountInString(text) != 1:
			return "", errorf(TypeError, "%%c requires int or char")
		}
		s.precision = -1
		return r.formatString(text, spec{align: s.align, width: s.width, precision: -1})
	case 'd', 'i', 'u', 'x', 'X', 'o':
		return p.integer(v, byte(c), s)
	case 'e', 'E', 'f', 'F', 'g', 'G':
		if p.safe && v.isString() {
			return "", errorf(ValueError, "could not convert string to float")
		}
		if v.kind == kindUndefined {
			return "", errUndefined(v)
		}
		if !v.isNumber() {
			return "", errorf(TypeError, "must be real number, not %s", v.typeName())
		}
		f, err := v.toFloat()
		if err != nil {
			return "", err
		}
		if s.kind = byte(c); s.zero && s.align == '>' && !math.IsInf(f, 0) && !math.IsNaN(f) {
			s.fill, s.align = "0", '='
		}
		return r.formatFloat(f, s)
	}
	return "", errorf(ValueError, "unsupported format character '%c'", c)
}

// integer formats a whole number, of which the precision is the least number of
// digits.
func (p *percent) integer(v Value, c byte, s spec) (string, error) {
	switch {
	case v.kind == kindUndefined:
		return "", errUndefined(v)
	case v.kind == kindFloat && strings.IndexByte("diu", c) >= 0:
		n, err := v.truncated()
		if err != nil {
			return "", err
		}
		v = n
	case !v.isInt() && v.kind != kindBig:
		return "", errorf(TypeError, "%%%c format: a real number is required, not %s", c, v.typeName())
	}
	n := v.toBig()
	base := map[byte]int{'x': 16, 'X': 16, 'o': 8}[c]
	if base == 0 {
		base = 10
	}
	if !p.r.spend(n.BitLen() / 8) {
		return "", p.r.broken
	}
	digits := new(big.Int).Abs(n).Text(base)
	prefix := ""
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
	var b []byte
	for _, c := range s {
		if c < utf8.RuneSelf {
			b = append(b, byte(c))
			continue
		}
		b = appendEscape(b, c)
	}
	return r.counted(b)
}

// appendEscape appends the escape of a character in a repr.
func appendEscape(dst []byte, c rune) []byte {
	const hex = "0123456789abcdef"
	digits, letter := 2, byte('x')
	switch {
	case c >= 0x10000:
		digits, letter = 8, 'U'
	case c >= 0x100:
		digits, letter = 4, 'u'
	}
	dst = append(dst, '\\', letter)
	for k := digits - 1; k >= 0; k-- {
		dst = append(dst, hex[c>>(4*k)&15])
	}
	return dst
}

// formatter is str.format: fields take their values from pos and named.
type formatter struct {
	r     *renderer
	pos   []Value
	named func(name string) (Value, bool)
	next  int // field without a name; -1 once fields have numbers
	safe  bool
}

func (f *formatter) write(text string, depth int) (string, error) {
	if depth > 3 {
		return "", errorf(ValueError, "Max string recursion exceeded")
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
			return "", errorf(ValueError, "Single '%c' encountered in format string", s[i])
		}
		end := fieldEnd(s, i+1)
		if end < 0 {
			return "", errorf(ValueError, "expected '}' before end of string")
		}
		out, err := f.field(s[i+1:end], depth)
		if err != nil {
			return "", err
		}
		b.WriteString(out)
		if err := f.r.grown(b.Len(), len(out)); err != nil {
			return "", err
		}
		s = s[end+1:]
	}
	return b.String(), nil
}

// fieldEnd returns where the field ends whose text begins at s[i]: at the brace that
// closes it. Braces within brackets do not count.
func fieldEnd(s string, i int) int {
	depth := 1
	bracket := false
	for ; i < len(s); i++ {
		switch s[i] {
		case '[':
			bracket = true
		case ']':
			bracket = false
		case '{':
			if !bracket {
				depth++
			}
		case '}':
			if bracket {
				continue
			}
			if depth--; depth == 0 {
				return i
			}
		}
	}
	return -1
}

// field is the text of one field: name!conversion:spec.
func (f *formatter) field(field string, depth int) (string, error) {
	conversion := ""
	end := len(field)
	bracket := false
	for k := range len(field) {
		if c := field[k]; c == '[' {
			bracket = true
		} else if c == ']' {
			bracket = false
		} else if !bracket && (c == '!' || c == ':') {
			end = k
			break
		}
	}
	name, rest := field[:end], field[end:]
	if strings.ContainsAny(name, "{") {
		return "", errorf(ValueError, "unexpected '{' in field name")
	}
	if strings.HasPrefix(rest, "!") {
		c, n := utf8.DecodeRuneInString(rest[1:])
		if n == 0 {
			return "", errorf(ValueError, "end of string while looking for conversion specifier")
		}
		conversion, rest = string(c), rest[1+n:]
		if rest != "" && rest[0] != ':' {
			return "", errorf(ValueError, "expected ':' after conversion specifier")
		}
	}
	text := strings.TrimPrefix(rest, ":")
	v, err := f.value(name)
	if err != nil {
		return "", err
	}
	switch conversion {
	case "":
	case "s":
		v = String(f.r.text(v))
	case "r":
		v = String(f.r.repr(v))
	case "a":
		v = String(f.r.asciiOnly(f.r.repr(v)))
	default:
		return "", errorf(ValueError, "Unknown conversion specifier %s", conversion)
	}
	if text, err = f.write(text, depth+1); err != nil {
		return "", err
	}
	if !f.safe {
		return f.r.format(v, text)
	}
	if v.kind == kindSafe {
		if text != "" {
			return "", errorf(ValueError, "Unsupported format specification for Markup.")
		}
		return v.str, nil
	}
	out, err := f.r.format(v, text)
	return f.r.escaped(out), err
}

// value returns what a field's name stands for.
func (f *formatter) value(field string) (Value, error) {
	end := strings.IndexAny(field, ".[")
	if end < 0 {
		end = len(field)
	}
	name, rest := field[:end], field[end:]
	i, number := 0, false
	switch {
	case name == "":
		if f.next < 0 {
			return Value{}, errorf(ValueError, "cannot switch from manual field specification to automatic field numbering")
		}
		i, number = f.next, true
		f.next++
	case strings.Trim(name, "0123456789") == "":
		if f.next > 0 {
			return Value{}, errorf(ValueError, "cannot switch from automatic field numbering to manual field specification")
		}
		f.next = -1
		var err error
		if i, _, err = digitsOf(name, 0); err != nil {
			return Value{}, err
		}
		number = true
	}
	var v Value
	var ok bool
	switch {
	case number && i >= len(f.pos):
		return Value{}, errorf(IndexError, "Replacement index %d out of range for positional args tuple", i)
	case number:
		v = f.pos[i]
	default:
		if v, ok = f.named(name); !ok {
			return Value{}, errorf(KeyError, "'%s'", name)
		}
	}
	return f.within(v, rest)
}

// within follows the attributes and indexes behind a field's name.
func (f *formatter) within(v Value, rest string) (Value, error) {
	for rest != "" {
		if !f.r.spend(1) {
			return Value{}, f.r.broken
		}
		var err error
		if rest[0] == '.' {
			end := strings.IndexAny(rest[1:], ".[") + 1
			if end == 0 {
				end = len(rest)
			}
			if end == 1 {
				return Value{}, errorf(ValueError, "Empty attribute in format string")
			}
			m := f.r.methods.named(rest[1:end])
			v, err = f.r.attr(v, rest[1:end], &m)
			rest = rest[end:]
		} else {
			end := strings.IndexByte(rest, ']')
			switch {
			case rest[0] != '[':
				return Value{}, errorf(ValueError, "Only '.' or '[' may follow ']' in format field specifier")
			case end < 0:
				return Value{}, errorf(ValueError, "Missing ']' in format string")
			case end == 1:
				return Value{}, errorf(ValueError, "Empty attribute in format string")
			}
			k := String(rest[1:end])
			if strings.Trim(k.str, "0123456789") == "" {
				n, _, err := digitsOf(k.str, 0)
				if err != nil {
					return Value{}, err
				}
				k = Int(int64(n))
			}
			v, err = f.r.item(v, k)
			rest = rest[end+1:]
		}
		if err != nil {
			return Value{}, err
		}
	}
	return v, nil
}

// grown counts n bytes more of a string that has size bytes.
func (r *renderer) grown(size, n int) error {
	if size > r.o.MaxOutput {
		return r.made(size)
	}
	return r.made(n)
}
