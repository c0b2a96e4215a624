// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/dlclark/regexp2"
)

// regexTime bounds one search: a backtracking engine can need exponential time
// for an expression that somebody put into a file. It is a time by the clock, which
// on a busy machine passes while nothing is computed: an honest search takes
// microseconds, and must not fail for that.
const regexTime = 2 * time.Second

// regex is an expression without a scanner of ours, run by a backtracking engine.
type regex struct {
	re   *regexp2.Regexp
	expr string // as it stands in the file
}

func compile(expr string) (*regex, error) {
	if len(expr) > 16<<10 {
		return nil, fmt.Errorf("expression of %d bytes, more than 16 KiB", len(expr))
	}
	known, err := withClasses(expr)
	if err != nil {
		return nil, err
	}
	re, err := regexp2.Compile(known, regexp2.None)
	if err != nil {
		return nil, fmt.Errorf("expression %q: %w", expr, err)
	}
	re.MatchTimeout = regexTime
	return &regex{re, expr}, nil
}

// matches appends the spans of text that the expression matches, in bytes.
func (r *regex) matches(dst []span, text []byte) ([]span, error) {
	m, err := r.re.FindRunesMatch([]rune(string(text)))
	at, bytes := 0, 0 // the same place in runes and in bytes
	to := func(index int) uint32 {
		for ; at < index; at++ {
			_, n := utf8.DecodeRune(text[bytes:])
			bytes += n
		}
		return uint32(bytes)
	}
	for ; m != nil && err == nil; m, err = r.re.FindNextMatch(m) {
		if m.Length > 0 {
			start := to(m.Index)
			dst = append(dst, span{start, to(m.Index + m.Length)})
		}
	}
	if err != nil {
		return dst, fmt.Errorf("tokenizer: match %q: %w", r.expr, err)
	}
	return dst, nil
}

// classOf are the general categories for which we have tables of our own. The
// engine's tables are Go's, of an older Unicode.
//
//nolint:gochecknoglobals // a table
var classOf = map[string]uint8{
	"L": classLetter, "N": classNumber, "M": classMark, "P": classPunct, "S": classSymbol,
}

// withClasses replaces \p{L} and its like in an expression by the ranges of our
// tables, inside and outside of brackets.
func withClasses(expr string) (string, error) {
	var b strings.Builder
	inside := false
	for i := 0; i < len(expr); i++ {
		c := expr[i]
		switch {
		case c == '\\' && i+1 < len(expr) && (expr[i+1] == 'p' || expr[i+1] == 'P'):
			not := expr[i+1] == 'P'
			end := strings.IndexByte(expr[i:], '}')
			if i+2 >= len(expr) || expr[i+2] != '{' || end < 0 {
				return "", fmt.Errorf(`expression %q: want \p{…} at %d`, expr, i)
			}
			name := expr[i+3 : i+end]
			class, ok := classOf[name]
			switch {
			case !ok:
				b.WriteString(expr[i : i+end+1])
			case inside:
				writeRanges(&b, class, not)
			default:
				b.WriteByte('[')
				writeRanges(&b, class, not)
				b.WriteByte(']')
			}
			i += end
			continue
		case c == '\\' && i+1 < len(expr):
			b.WriteByte(c)
			i++
			c = expr[i]
		case c == '[' && !inside:
			inside = true
		case c == ']':
			inside = false
		}
		b.WriteByte(c)
	}
	return b.String(), nil
}

func writeRanges(b *strings.Builder, class uint8, not bool) {
	t := classes()
	for lo := rune(0); lo <= utf8.MaxRune; {
		in := t.of(lo)&class != 0
		hi := lo
		for hi < utf8.MaxRune && (t.of(hi+1)&class != 0) == in {
			hi++
		}
		if in != not {
			fmt.Fprintf(b, `%s-%s`, literal(lo), literal(hi))
		}
		lo = hi + 1
	}
}

// literal writes a code point so that it means itself inside of brackets.
func literal(r rune) string {
	if r < 0x80 {
		return fmt.Sprintf(`\x%02x`, r)
	}
	if 0xd800 <= r && r < 0xe000 {
		return fmt.Sprintf(`\u%04x`, r)
	}
	return string(r)
}
