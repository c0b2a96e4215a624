// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// Engines read bodies with Python's json module and pydantic. This file reads all that they read, so that no engine
// finds a field that kvroute does not see. testdata/front.jsonl has what they read in odd bodies.

// boolean reads a boolean as pydantic does: also as the number 0 or 1, or as a word.
func (v value) boolean() (is, ok bool) {
	switch v.kind() {
	case 0:
		return false, false
	case 't':
		return true, true
	case 'f':
		return false, true
	case '"':
		switch strings.ToLower(string(unquote(v))) {
		case "1", "t", "true", "y", "yes", "on":
			return true, true
		case "0", "f", "false", "n", "no", "off":
			return false, true
		}
		return false, false
	}
	n, err := strconv.ParseFloat(string(v), 64)
	return n == 1, err == nil && (n == 0 || n == 1)
}

// isTrue reports whether v is true as pydantic reads it.
func (v value) isTrue() bool {
	is, ok := v.boolean()
	return is && ok
}

// plainBoolean returns true or false for another form of it, else v itself.
func (v value) plainBoolean() value {
	switch is, ok := v.boolean(); {
	case !ok:
		return v
	case is:
		return value("true")
	}
	return value("false")
}

// count reads a number of tokens or choices as pydantic does: also in a string, or as a number with a fraction of
// zero. It returns 0 for anything but a 32-bit unsigned integer.
func (v value) count() int {
	text := string(v)
	switch v.kind() {
	case 0:
		return 0
	case 't':
		return 1
	case '"':
		text = strings.TrimPrefix(strings.TrimSpace(string(unquote(v))), "+")
		if whole, zeros, fraction := strings.Cut(text, "."); fraction && zeros != "" && strings.Trim(zeros, "0") == "" {
			text = whole
		}
		if !strings.HasPrefix(text, "_") && !strings.HasSuffix(text, "_") && !strings.Contains(text, "__") {
			text = strings.ReplaceAll(text, "_", "")
		}
	}
	if n, err := strconv.ParseUint(text, 10, 32); err == nil {
		return int(n)
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || f != math.Trunc(f) || f < 0 || f > math.MaxUint32 || v.kind() == '"' {
		return 0
	}
	return int(f)
}

// charsets are the known values of charset in a content type. Engines ignore the charset, as kvroute does, and
// detect the encoding by the first bytes.
//
//nolint:gochecknoglobals // a table
var charsets = append(strings.Fields("utf-8 utf8 us-ascii ascii utf-16 utf-16le utf-16be utf-32 utf-32le utf-32be"), "")

// UnknownCharset reports whether a content type names a charset that kvroute does not know. A charset may be empty, in
// quotes, or repeated.
func UnknownCharset(contentType string) bool {
	if contentType == "application/json" {
		return false
	}
	_, params, _ := strings.Cut(contentType, ";")
	for param := range strings.SplitSeq(strings.ToLower(params), ";") {
		name, charset, _ := strings.Cut(param, "=")
		names := strings.HasPrefix(strings.TrimSpace(name), "charset")
		if names && !slices.Contains(charsets, strings.Trim(charset, " \t\"'")) {
			return true
		}
	}
	return false
}

// UTF8 returns the text of a body in UTF-8, without a byte order mark. Engines detect UTF-16 and UTF-32 by the first
// bytes, whatever the content type says. A body that is UTF-8 is not copied; a copy has at most 1.5 times the bytes.
// A body that ends inside a character stays as it is: it is not JSON.
func UTF8(body []byte) []byte {
	size, order, mark := encodingOf(body)
	body = body[mark:]
	if size == 1 || len(body)%size != 0 {
		return body
	}
	text := make([]byte, 0, len(body)*3/2)
	for i := 0; i < len(body); i += size {
		var r rune
		if size == 4 {
			r = rune(order.Uint32(body[i:]))
		} else if r = rune(order.Uint16(body[i:])); utf16.IsSurrogate(r) && i+4 <= len(body) {
			if pair := utf16.DecodeRune(r, rune(order.Uint16(body[i+2:]))); pair != utf8.RuneError {
				r, i = pair, i+2
			}
		}
		switch {
		case r < 0 || r > utf8.MaxRune:
			return body
		case utf16.IsSurrogate(r): // half a pair stays one, as in Python
			text = append(text, 0xE0|byte(r>>12), 0x80|byte(r>>6)&0x3F, 0x80|byte(r)&0x3F)
		default:
			text = utf8.AppendRune(text, r)
		}
	}
	return text
}

// IsUTF8 reports whether [UTF8] returns a part of the body, and not a copy.
func IsUTF8(body []byte) bool {
	size, _, _ := encodingOf(body)
	return size == 1
}

// encodingOf returns the bytes of a unit, their order, and the length of the byte order mark, as
// json.detect_encoding of Python does.
func encodingOf(b []byte) (size int, order binary.ByteOrder, mark int) {
	var little, big binary.ByteOrder = binary.LittleEndian, binary.BigEndian
	zero := func(i int) bool { return i < len(b) && b[i] == 0 }
	switch {
	case bytes.HasPrefix(b, []byte{0, 0, 0xFE, 0xFF}):
		return 4, big, 4
	case bytes.HasPrefix(b, []byte{0xFF, 0xFE, 0, 0}):
		return 4, little, 4
	case bytes.HasPrefix(b, []byte{0xFE, 0xFF}):
		return 2, big, 2
	case bytes.HasPrefix(b, []byte{0xFF, 0xFE}):
		return 2, little, 2
	case bytes.HasPrefix(b, []byte{0xEF, 0xBB, 0xBF}):
		return 1, nil, 3
	case len(b) < 2:
	case zero(0) && zero(1):
		return 4, big, 0
	case zero(0):
		return 2, big, 0
	case zero(1) && zero(2) && zero(3):
		return 4, little, 0
	case zero(1):
		return 2, little, 0
	}
	return 1, nil, 0
}
