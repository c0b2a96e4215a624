// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"math/big"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/runenames"
)

type tokenKind uint8

const (
	tokEOF        tokenKind = iota
	tokData                 // text outside of tags
	tokBlockBegin           // {%
	tokBlockEnd
	tokVarBegin // {{
	tokVarEnd
	tokName
	tokString
	tokNumber
	tokOp
)

type token struct {
	kind  tokenKind
	text  string // of data, names, strings and operators
	value Value  // of numbers
	line  int
}

// maxTemplate and maxTokens bound a template, and with it the memory that reading it
// takes: some 300 bytes a token. The longest in use have 30 KB and 8,000 tokens.
const (
	maxTemplate = 1 << 20
	maxTokens   = 1 << 17
)

// lexer cuts a template into tokens, with the white space rules of trim_blocks
// and lstrip_blocks applied to the data.
type lexer struct {
	src          string
	at           int
	line         int
	lineStarting bool // what was read last ended with a line
	tokens       []token
}

// normalized returns the text with every line end a newline, less the last one.
func normalized(text string) string {
	if strings.Contains(text, "\r") {
		text = strings.ReplaceAll(strings.ReplaceAll(text, "\r\n", "\n"), "\r", "\n")
	}
	return strings.TrimSuffix(text, "\n")
}

func lex(text string) ([]token, error) {
	if len(text) > maxTemplate {
		return nil, errorf(LimitError, "template of more than %d bytes", maxTemplate)
	}
	if !utf8.ValidString(text) {
		return nil, errorf(SyntaxError, "the template is not UTF-8")
	}
	l := &lexer{src: normalized(text), line: 1, lineStarting: true}
	for l.at < len(l.src) {
		if err := l.next(); err != nil {
			err.Line = l.line
			return nil, err
		}
	}
	l.add(tokEOF, "")
	return l.tokens, nil
}

func (l *lexer) add(k tokenKind, text string) {
	l.tokens = append(l.tokens, token{kind: k, text: text, line: l.line})
}

// advance goes on by n bytes.
func (l *lexer) advance(n int) {
	s := l.src[l.at : l.at+n]
	l.line += strings.Count(s, "\n")
	l.at += n
	if n > 0 {
		l.lineStarting = s[n-1] == '\n'
	}
}

// next reads the data up to a tag, and the tag.
func (l *lexer) next() *Error {
	rest := l.src[l.at:]
	k := 0
	for {
		i := strings.IndexByte(rest[k:], '{')
		if i < 0 || k+i+1 >= len(rest) {
			l.add(tokData, rest)
			l.advance(len(rest))
			return nil
		}
		if k += i; strings.IndexByte("%{#", rest[k+1]) >= 0 {
			break
		}
		k++
	}
	data, open := rest[:k], rest[k+1]
	sign := byte(0)
	if k+2 < len(rest) && (rest[k+2] == '-' || rest[k+2] == '+') {
		sign = rest[k+2]
	}
	kept := data
	switch {
	case sign == '-':
		kept = strings.TrimRightFunc(data, isSpace)
	case sign != '+' && open != '{':
		// White space alone before the tag on its line goes.
		start := strings.LastIndexByte(data, '\n') + 1
		if (start > 0 || l.lineStarting) && strings.TrimLeftFunc(data[start:], isSpace) == "" {
			kept = data[:start]
		}
	}
	if kept != "" {
		l.add(tokData, kept)
	}
	l.advance(len(data))
	n := 2
	if sign != 0 {
		n = 3
	}
	switch open {
	case '#':
		return l.comment(n)
	case '%':
		if skipped, ok := l.rawBegin(n); ok {
			return l.raw(skipped)
		}
		l.add(tokBlockBegin, "")
		l.advance(n)
		return l.expression("%}", tokBlockEnd)
	}
	l.add(tokVarBegin, "")
	l.advance(n)
	return l.expression("}}", tokVarEnd)
}

func isSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }

// tail returns the length of what a tag's end takes along: with '-' all white
// space behind it, without a sign one newline, if trim is set.
func (l *lexer) tail(sign byte, at int, trim bool) int {
	rest := l.src[at:]
	switch {
	case sign == '-':
		return len(rest) - len(strings.TrimLeftFunc(rest, isSpace))
	case sign != '+' && trim && strings.HasPrefix(rest, "\n"):
		return 1
	}
	return 0
}

func (l *lexer) comment(n int) *Error {
	end := strings.Index(l.src[l.at+n:], "#}")
	if end < 0 {
		return errorf(SyntaxError, "missing end of comment tag")
	}
	at := l.at + n + end
	sign := byte(0)
	if end > 0 && (l.src[at-1] == '-' || l.src[at-1] == '+') {
		sign = l.src[at-1]
	}
	l.advance(at + 2 + l.tail(sign, at+2, true) - l.at)
	return nil
}

// rawBegin reports whether the block that begins here is raw, and its length.
func (l *lexer) rawBegin(n int) (length int, ok bool) {
	s := strings.TrimLeftFunc(l.src[l.at+n:], isSpace)
	if !strings.HasPrefix(s, "raw") {
		return 0, false
	}
	s = strings.TrimLeftFunc(s[3:], isSpace)
	sign := byte(0)
	if strings.HasPrefix(s, "-") {
		sign = s[0]
		s = s[1:]
	}
	if !strings.HasPrefix(s, "%}") {
		return 0, false
	}
	at := len(l.src) - len(s) + 2
	return at + l.tail(sign, at, false) - l.at, true // a newline behind it stays
}

// raw reads data up to endraw.
func (l *lexer) raw(n int) *Error {
	l.advance(n)
	if l.at == len(l.src) {
		return nil // the reference does not miss its end
	}
	for k := l.at; ; k += 2 {
		i := strings.Index(l.src[k:], "{%")
		if i < 0 {
			return errorf(SyntaxError, "missing end of raw directive")
		}
		k += i
		s := l.src[k+2:]
		sign := byte(0)
		if s != "" && (s[0] == '-' || s[0] == '+') {
			sign = s[0]
			s = s[1:]
		}
		s = strings.TrimLeftFunc(s, isSpace)
		if !strings.HasPrefix(s, "endraw") {
			continue
		}
		s = strings.TrimLeftFunc(s[6:], isSpace)
		endSign := byte(0)
		if s != "" && (s[0] == '-' || s[0] == '+') {
			endSign = s[0]
			s = s[1:]
		}
		if !strings.HasPrefix(s, "%}") {
			continue
		}
		data := l.src[l.at:k]
		switch {
		case sign == '-':
			data = strings.TrimRightFunc(data, isSpace)
		case sign != '+':
			start := strings.LastIndexByte(data, '\n') + 1
			if (start > 0 || l.lineStarting) && strings.TrimLeftFunc(data[start:], isSpace) == "" {
				data = data[:start]
			}
		}
		l.add(tokData, data)
		at := len(l.src) - len(s) + 2
		l.advance(at + l.tail(endSign, at, true) - l.at)
		return nil
	}
}

// operators, the longer ones first.
//
//nolint:gochecknoglobals // a table
var operators = []string{"//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".", ":", "|", ",", ";"}

// expression reads the inside of a tag up to its end.
func (l *lexer) expression(end string, endKind tokenKind) *Error {
	depth := 0
	for l.at < len(l.src) {
		if len(l.tokens) > maxTokens {
			return errorf(LimitError, "template of more than %d tokens", maxTokens)
		}
		rest := l.src[l.at:]
		if depth == 0 {
			sign, n := byte(0), 0
			if rest[0] == '-' || rest[0] == '+' && end == "%}" {
				sign, n = rest[0], 1
			}
			if strings.HasPrefix(rest[n:], end) {
				l.add(endKind, "")
				at := l.at + n + 2
				l.advance(n + 2 + l.tail(sign, at, end == "%}"))
				return nil
			}
		}
		r, size := utf8.DecodeRuneInString(rest)
		switch {
		case isSpace(r):
			l.advance(size)
		case r == '"' || r == '\'':
			if err := l.quoted(rest); err != nil {
				return err
			}
		case r >= '0' && r <= '9':
			if err := l.number(rest); err != nil {
				return err
			}
		case r == '_' || unicode.IsLetter(r):
			n := size
			for n < len(rest) {
				r, size := utf8.DecodeRuneInString(rest[n:])
				if r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r) && !unicode.IsMark(r) {
					break
				}
				n += size
			}
			l.add(tokName, rest[:n])
			l.advance(n)
		default:
			op := ""
			for _, o := range operators {
				if strings.HasPrefix(rest, o) {
					op = o
					break
				}
			}
			switch op {
			case "":
				return errorf(SyntaxError, "unexpected char %q", r)
			case "(", "[", "{":
				depth++
			case ")", "]", "}":
				if depth--; depth < 0 {
					return errorf(SyntaxError, "unexpected %q", op)
				}
			}
			l.add(tokOp, op)
			l.advance(len(op))
		}
	}
	return errorf(SyntaxError, "unexpected end of template, expected %q", end)
}

// quoted reads a string, with Python's escapes.
func (l *lexer) quoted(rest string) *Error {
	var b strings.Builder
	for i := 1; i < len(rest); i++ {
		c := rest[i]
		switch {
		case c == rest[0]:
			l.add(tokString, b.String())
			l.advance(i + 1)
			return nil
		case c != '\\' || i+1 >= len(rest):
			b.WriteByte(c)
			continue
		}
		i++
		digits := 0
		switch c := rest[i]; c {
		case '\n':
		case '\\', '\'', '"':
			b.WriteByte(c)
		case 'a', 'b', 'f', 'n', 'r', 't', 'v':
			b.WriteByte("\a\b\f\n\r\t\v"[strings.IndexByte("abfnrtv", c)])
		case 'x':
			digits = 2
		case 'u':
			digits = 4
		case 'U':
			digits = 8
		case '0', '1', '2', '3', '4', '5', '6', '7':
			n := 1
			for n < 3 && i+n < len(rest) && rest[i+n] >= '0' && rest[i+n] <= '7' {
				n++
			}
			u, _ := strconv.ParseUint(rest[i:i+n], 8, 16) // checked just now
			b.WriteRune(rune(u))
			i += n - 1
		case 'N':
			name, _, ok := strings.Cut(rest[i+1:], "}")
			if !ok || len(name) < 2 || name[0] != '{' {
				return errorf(SyntaxError, "malformed \\N character escape")
			}
			r, ok := runesByName()[strings.ToUpper(name[1:])]
			if !ok {
				return errorf(SyntaxError, "unknown Unicode character name %.100q", name[1:])
			}
			b.WriteRune(r)
			i += len(name) + 1
		default:
			b.WriteByte('\\')
			b.WriteByte(c)
		}
		if digits > 0 {
			if i+digits >= len(rest) {
				return errorf(SyntaxError, "truncated escape in a string")
			}
			u, err := strconv.ParseUint(rest[i+1:i+1+digits], 16, 32)
			if err != nil || u > unicode.MaxRune || u >= 0xd800 && u < 0xe000 {
				return errorf(SyntaxError, "bad escape in a string")
			}
			b.WriteRune(rune(u))
			i += digits
		}
	}
	return errorf(SyntaxError, "a string has no end")
}

// runesByName are the characters by their names in Unicode, without the names that
// Python computes (ideographs, Hangul) and without aliases.
//
//nolint:gochecknoglobals // a table that few templates need
var runesByName = sync.OnceValue(func() map[string]rune {
	all := map[string]rune{}
	for r := range rune(unicode.MaxRune) {
		if name := runenames.Name(r); name != "" && name[0] != '<' {
			all[name] = r
		}
	}
	return all
})

// number reads an integer or a float. Digits may be parted by underscores.
func (l *lexer) number(rest string) *Error {
	n := 0
	digits := func(set string) bool {
		start := n
		for n < len(rest) && (strings.IndexByte(set, rest[n]|0x20) >= 0 || strings.IndexByte(set, rest[n]) >= 0 || rest[n] == '_' && n > start) {
			n++
		}
		for n > start && rest[n-1] == '_' {
			n--
		}
		return n > start
	}
	const decimal = "0123456789"
	float := false
	base := 10
	if rest[0] == '0' && len(rest) > 1 {
		for prefix, of := range map[byte]struct {
			base int
			set  string
		}{'x': {16, "0123456789abcdef"}, 'o': {8, "01234567"}, 'b': {2, "01"}} {
			if rest[1]|0x20 == prefix {
				n = 2
				if !digits(of.set) {
					return errorf(SyntaxError, "bad number")
				}
				base = of.base
			}
		}
	}
	if base == 10 {
		digits(decimal)
		if n+1 < len(rest) && rest[n] == '.' && rest[n+1] >= '0' && rest[n+1] <= '9' {
			n++
			digits(decimal)
			float = true
		}
		if n < len(rest) && rest[n]|0x20 == 'e' {
			at := n
			n++
			if n < len(rest) && (rest[n] == '+' || rest[n] == '-') {
				n++
			}
			if digits(decimal) {
				float = true
			} else {
				n = at
			}
		}
	}
	text := strings.ReplaceAll(rest[:n], "_", "")
	t := token{kind: tokNumber, line: l.line}
	if float {
		f, _ := strconv.ParseFloat(text, 64) // out of range is infinite
		t.value = Float(f)
	} else {
		if base != 10 {
			text = text[2:]
		}
		if len(text) > 4300 {
			return errorf(SyntaxError, "integer of more than 4300 digits")
		}
		v, ok := new(big.Int).SetString(text, base)
		if !ok {
			return errorf(SyntaxError, "bad number")
		}
		t.value = bigInt(v)
	}
	l.tokens = append(l.tokens, t)
	l.advance(n)
	return nil
}
