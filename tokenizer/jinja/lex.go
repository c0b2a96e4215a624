// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"cmp"
	"math/big"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
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

	unsupported string // an escape of the string, "" without one
}

// maxTemplate and maxTokens limit a template, and so the memory for parsing it: about
// 300 bytes for a token. The longest templates in use have 30 KB and 8,000 tokens.
const (
	maxTemplate = 1 << 20
	maxTokens   = 1 << 17
)

// lexer cuts a template into tokens, and removes white space around tags as
// trim_blocks and lstrip_blocks say.
type lexer struct {
	src       string
	at        int
	line      int
	lineStart bool // src[:at] is empty or ends with a newline
	tokens    []token
}

var (
	tagStart  = regexp.MustCompile(`\{[%{#]`)
	rawStart  = regexp.MustCompile(`^\s*raw\s*(-?)%\}`)
	rawEnd    = regexp.MustCompile(`\{%([-+]?)\s*endraw\s*([-+]?)%\}`)
	numbers   = regexp.MustCompile(`^(0[xX](_?[0-9a-fA-F])+|0[oO](_?[0-7])+|0[bB](_?[01])+|\d(_?\d)*((\.\d(_?\d)*)?[eE][-+]?\d(_?\d)*|\.\d(_?\d)*)?)`)
	surrogate = regexp.MustCompile(`^\\(u|U0000)[dD][89a-fA-F][0-9a-fA-F]{2}`)
	octals    = regexp.MustCompile(`^[0-7]{1,3}`)
	operators = regexp.MustCompile(`^(//|\*\*|==|!=|>=|<=|[-+/*%~\[\](){}<>=.:|,;])`)
)

func (l *lexer) lex(text string) {
	if len(text) > maxTemplate {
		raise(LimitError, "template of more than %d bytes", maxTemplate)
	}
	if !utf8.ValidString(text) {
		raise(SyntaxError, "the template is not UTF-8")
	}
	text = strings.ReplaceAll(strings.ReplaceAll(text, "\r\n", "\n"), "\r", "\n")
	l.src, l.line, l.lineStart = strings.TrimSuffix(text, "\n"), 1, true
	for l.at < len(l.src) {
		l.next()
	}
	l.add(tokEOF, "")
}

func (l *lexer) rest() string { return l.src[l.at:] }

func (l *lexer) add(k tokenKind, text string) {
	l.tokens = append(l.tokens, token{kind: k, text: text, line: l.line})
}

func (l *lexer) advance(n int) {
	s := l.src[l.at : l.at+n]
	l.line += strings.Count(s, "\n")
	l.at += n
	if n > 0 {
		l.lineStart = s[n-1] == '\n'
	}
}

// sign returns the sign for white space at the beginning of s: "-", "+" or "".
func sign(s string) string {
	if s != "" && (s[0] == '-' || s[0] == '+') {
		return s[:1]
	}
	return ""
}

// next reads the text up to a tag, and the tag.
func (l *lexer) next() {
	tag := tagStart.FindStringIndex(l.rest())
	if tag == nil {
		l.add(tokData, l.rest())
		l.advance(len(l.rest()))
		return
	}
	kind, s := l.rest()[tag[0]+1], sign(l.rest()[tag[1]:])
	l.data(tag[0], s, kind != '{')
	inside := 2 + len(s)
	switch kind {
	case '#':
		end := strings.Index(l.rest()[inside:], "#}")
		if end < 0 {
			raise(SyntaxError, "missing end of comment tag")
		}
		end += inside
		l.endTag(end+2, sign(l.rest()[max(end-1, inside):end]), true)
	case '%':
		if m := rawStart.FindStringSubmatch(l.rest()[inside:]); m != nil {
			l.endTag(inside+len(m[0]), m[1], false)
			l.raw()
			return
		}
		l.add(tokBlockBegin, "")
		l.advance(inside)
		l.expression("%}", tokBlockEnd)
	default:
		l.add(tokVarBegin, "")
		l.advance(inside)
		l.expression("}}", tokVarEnd)
	}
}

// data adds the text of n bytes before a tag. The sign "-" removes all white space before the
// tag. Without a sign, white space is removed if it is all that stands before a block on its line.
func (l *lexer) data(n int, sign string, block bool) {
	text := l.rest()[:n]
	if sign == "-" {
		text = strings.TrimRightFunc(text, isSpace)
	} else if sign == "" && block {
		start := strings.LastIndexByte(text, '\n') + 1
		if (start > 0 || l.lineStart) && strings.TrimLeftFunc(text[start:], isSpace) == "" {
			text = text[:start]
		}
	}
	if text != "" {
		l.add(tokData, text)
	}
	l.advance(n)
}

// endTag reads a tag of n bytes and the white space after it that it removes: all of it with the
// sign "-"; without a sign one newline if trim is set.
func (l *lexer) endTag(n int, sign string, trim bool) {
	l.advance(n)
	switch {
	case sign == "-":
		l.advance(len(l.rest()) - len(strings.TrimLeftFunc(l.rest(), isSpace)))
	case sign == "" && trim && strings.HasPrefix(l.rest(), "\n"):
		l.advance(1)
	}
}

// raw reads text up to endraw.
func (l *lexer) raw() {
	if l.rest() == "" {
		return // the reference does not require the end here
	}
	m := rawEnd.FindStringSubmatchIndex(l.rest())
	if m == nil {
		raise(SyntaxError, "missing end of raw directive")
	}
	before, after := l.rest()[m[2]:m[3]], l.rest()[m[4]:m[5]]
	l.data(m[0], before, true)
	l.endTag(m[1]-m[0], after, true)
}

// expression reads the inside of a tag up to its end.
func (l *lexer) expression(end string, endKind tokenKind) {
	open := 0 // brackets
	for l.at < len(l.src) {
		if len(l.tokens) > maxTokens {
			raise(LimitError, "template of more than %d tokens", maxTokens)
		}
		rest := l.rest()
		s := sign(rest)
		if s == "+" && end == "}}" {
			s = ""
		}
		if open == 0 && strings.HasPrefix(rest[len(s):], end) {
			l.add(endKind, "")
			l.endTag(len(s)+2, s, end == "%}")
			return
		}
		c, size := utf8.DecodeRuneInString(rest)
		switch {
		case isSpace(c):
			l.advance(size)
		case c == '"' || c == '\'':
			l.quoted(rest)
		case c >= '0' && c <= '9':
			l.number(numbers.FindString(rest))
		case c == '_' || unicode.IsLetter(c):
			n := strings.IndexFunc(rest, func(c rune) bool {
				return c != '_' && !unicode.IsLetter(c) && !unicode.IsDigit(c) && !unicode.IsMark(c)
			})
			if n < 0 {
				n = len(rest)
			}
			l.add(tokName, rest[:n])
			l.advance(n)
		default:
			op := operators.FindString(rest)
			switch op {
			case "":
				raise(SyntaxError, "unexpected char %q", c)
			case "(", "[", "{":
				open++
			case ")", "]", "}":
				if open--; open < 0 {
					raise(SyntaxError, "unexpected %q", op)
				}
			}
			l.add(tokOp, op)
			l.advance(len(op))
		}
	}
	raise(SyntaxError, "unexpected end of template, expected %q", end)
}

// quoted reads a string, with Python's escapes.
func (l *lexer) quoted(s string) {
	var b strings.Builder
	unsupported := ""
	for i := 1; i < len(s); {
		switch c := s[i]; {
		case c == s[0]:
			l.tokens = append(l.tokens, token{kind: tokString, text: b.String(), line: l.line, unsupported: unsupported})
			l.advance(i + 1)
			return
		case c != '\\' || i+1 == len(s):
			b.WriteByte(c)
			i++
		default:
			c, rest := unescape(s[i:])
			if len(c) > 1 && c[0] == '\\' {
				unsupported = "the escape " + c // the name of a character, or half a surrogate pair
			}
			b.WriteString(c)
			i = len(s) - len(rest)
		}
	}
	raise(SyntaxError, "a string has no end")
}

// unescape returns the text of the escape at the beginning of s, and what follows it.
func unescape(s string) (text, rest string) {
	switch c := s[1]; c {
	case '\n':
		return "", s[2:]
	case '\'', '"':
		return s[1:2], s[2:]
	case 'a', 'b', 'f', 'n', 'r', 't', 'v', '\\', 'x', 'u', 'U':
		r, _, rest, err := strconv.UnquoteChar(s, '"')
		if half := surrogate.FindString(s); err != nil && half != "" {
			return half, s[len(half):] // see quoted
		}
		if err != nil {
			raise(SyntaxError, "bad escape in a string")
		}
		return string(r), rest
	case 'N':
		name, rest, ok := strings.Cut(s[2:], "}")
		if !ok || len(name) < 2 || name[0] != '{' {
			raise(SyntaxError, "malformed \\N character escape")
		}
		return s[:3+len(name)], rest // see quoted
	}
	if digits := octals.FindString(s[1:]); digits != "" {
		n, _ := strconv.ParseUint(digits, 8, 16) // cannot fail
		return string(rune(n)), s[1+len(digits):]
	}
	return s[:1], s[1:]
}

func (l *lexer) number(text string) {
	digits := strings.ReplaceAll(text, "_", "")
	if len(digits) > 4300 {
		raise(SyntaxError, "number of more than 4300 digits")
	}
	t := token{kind: tokNumber, line: l.line}
	n, err := strconv.ParseInt(digits, 0, 64) // the prefix is the base
	switch t.value = Int(n); {
	case strings.Trim(digits, "0123456789") == "":
		t.value = integer(cmp.Or(strings.TrimLeft(digits, "0"), "0"))
	case err != nil:
		if n, ok := new(big.Int).SetString(digits, 0); ok {
			t.value = integer(n.String())
			break
		}
		f, _ := strconv.ParseFloat(digits, 64) // out of range is infinite
		t.value = Float(f)
	}
	l.tokens = append(l.tokens, t)
	l.advance(len(text))
}
