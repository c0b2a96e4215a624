// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"unicode/utf16"
	"unicode/utf8"
)

func oldJSON(dst []byte, s string, ascii bool) []byte {
	dst = append(dst, '"')
	for _, c := range s {
		switch {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', byte(c))
		case c >= ' ' && (c <= 0x7e || !ascii):
			dst = utf8.AppendRune(dst, c)
		case strings.ContainsRune("\b\f\n\r\t", c):
			dst = append(dst, '\\', "bfnrt"[strings.IndexRune("\b\f\n\r\t", c)])
		default:
			for _, unit := range utf16.AppendRune(nil, c) {
				dst = fmt.Appendf(dst, `\u%04x`, unit)
			}
		}
	}
	return append(dst, '"')
}

// A string is written like character by character.
func TestJSONStrings(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 50_000 {
		var b []byte
		for range r.IntN(12) {
			b = append(b, []string{"a", "plain text", "\"", "\\", string(rune(r.IntN(0x90))), "\xc3", "é\ufffd", "🚀", string([]byte{byte(r.IntN(256))})}[r.IntN(9)]...)
		}
		for _, ascii := range []bool{true, false} {
			if got, want := appendJSONString(nil, string(b), ascii), oldJSON(nil, string(b), ascii); string(got) != string(want) {
				t.Fatalf("%q: %s, want %s", b, got, want)
			}
		}
	}
}
