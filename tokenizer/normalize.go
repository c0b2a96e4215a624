// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// normalizer rewrites a stretch of text between two added tokens.
type normalizer struct {
	kind        string // the type's name in the file: NFC, Prepend, Replace, …
	from, to    string
	regex       *regex // Replace with a regular expression
	left, right bool   // Strip
}

// quickBytes is how many bytes are copied in the time in which one is encoded.
const quickBytes = 16

// errGrown says that rewriting makes a text too large: a few steps of a hostile
// file make gigabytes of a few bytes.
var errGrown = errors.New("the file's rewriting makes too large a text")

// A text may take grows times its size rewritten, a small one grows times leastRoom. A
// space that becomes ▁ takes three times its own.
const (
	grows     = 4
	leastRoom = 1 << 20
)

// append appends the normal form of text to dst. A stretch without text has no
// normal form but itself. A form of more than limit bytes is an error, found before
// the memory for it is taken.
func (n *normalizer) append(b *budget, dst, text []byte, limit int) ([]byte, error) {
	if b.spend(len(text) / quickBytes) {
		return dst, b.err
	}
	switch {
	case len(text) == 0:
		return dst, nil
	case n.kind == "NFC" && isNFC(text):
		if len(text) > limit {
			return dst, errGrown
		}
		return append(dst, text...), nil
	case n.kind == "Lowercase":
		return n.each(b, dst, text, limit, appendLower)
	case n.kind == "StripAccents":
		return n.each(b, dst, text, limit, func(dst []byte, r rune) []byte {
			if unicode.Is(accents(), r) {
				return dst
			}
			return utf8.AppendRune(dst, r)
		})
	case n.kind == "Strip":
		if n.left {
			text = bytes.TrimLeftFunc(text, unicode.IsSpace)
		}
		if n.right {
			text = bytes.TrimRightFunc(text, unicode.IsSpace)
		}
		if len(text) > limit {
			return dst, errGrown
		}
		return append(dst, text...), nil
	}
	if _, ok := forms[n.kind]; ok {
		return appendForm(b, dst, text, n.kind, limit)
	}
	switch {
	case n.kind == "Prepend":
		if len(n.to)+len(text) > limit {
			return dst, errGrown
		}
		return append(append(dst, n.to...), text...), nil
	case n.regex == nil:
		if len(text)+bytes.Count(text, []byte(n.from))*(len(n.to)-len(n.from)) > limit {
			return dst, errGrown
		}
		return append(dst, bytes.ReplaceAll(text, []byte(n.from), []byte(n.to))...), nil
	}
	spans, err := n.regex.matches(b, nil, text)
	size := len(text)
	for _, s := range spans {
		size += len(n.to) - int(s.end-s.start)
	}
	if err == nil && size > limit {
		err = errGrown
	}
	if err != nil {
		return dst, err
	}
	at := 0
	for _, s := range spans {
		dst = append(dst, text[at:s.start]...)
		dst = append(dst, n.to...)
		at = int(s.end)
	}
	return append(dst, text[at:]...), nil
}

// each rewrites text character by character. Bytes that are no character stay.
func (n *normalizer) each(b *budget, dst, text []byte, limit int, f func(dst []byte, r rune) []byte) ([]byte, error) {
	start := len(dst)
	next := 0 // where to look at the time
	for i := 0; i < len(text); {
		if i >= next {
			if next += rewriteStep; b.spend(rewriteStep) {
				return dst, b.err
			}
			if len(dst)-start > limit {
				return dst[:start], errGrown
			}
		}
		r, size := utf8.DecodeRune(text[i:])
		if r == utf8.RuneError && size == 1 {
			dst = append(dst, text[i])
		} else {
			dst = f(dst, r)
		}
		i += size
	}
	if len(dst)-start > limit {
		return dst[:start], errGrown
	}
	return dst, nil
}

// rewriteStep is how many bytes are rewritten between two looks at the time.
const rewriteStep = 16 << 10

// appendLower appends the small form of one character: a sigma has one, wherever it
// stands.
func appendLower(dst []byte, r rune) []byte {
	if r == 'İ' {
		return append(dst, "i\u0307"...)
	}
	if to, ok := newLower[r]; ok {
		return utf8.AppendRune(dst, to)
	}
	return utf8.AppendRune(dst, unicode.ToLower(r))
}

// isNFC reports whether text is its own normal form. A text that is so by
// today's tables is so by those of 9.0: later code points only ever keep apart
// what would compose.
func isNFC(text []byte) bool { return isPlain(text) || norm.NFC.IsNormal(text) }

// isPlain reports whether all characters of text are of ranges in which nothing
// decomposes for good, moves or composes with what stands before it: most text.
func isPlain(text []byte) bool {
	three := plainThree()
	for i := 0; i < len(text); {
		if i+8 <= len(text) && binary.LittleEndian.Uint64(text[i:])&highBits == 0 {
			i += 8
			continue
		}
		if text[i] < utf8.RuneSelf {
			i++
			continue
		}
		if i+3 <= len(text) {
			b := text[i : i+3 : i+3]
			if b[0]&0xf0 == 0xe0 && b[1]&0xc0 == 0x80 && b[2]&0xc0 == 0x80 && three[uint(b[0]&0xf)<<6|uint(b[1]&0x3f)] {
				i += 3
				continue
			}
		}
		r, n := decode(text, i, len(text))
		if !isPlainRune(r) {
			return false
		}
		i += n
	}
	return true
}

func isPlainRune(r rune) bool {
	switch {
	case r < 0x300, 0x3400 <= r && r < 0xa000: // Latin, Chinese
	case 0x400 <= r && r < 0x483, 0x2010 <= r && r < 0x2028: // Cyrillic, punctuation
	case 0x3000 <= r && r < 0x302a, 0x3030 <= r && r < 0x3099, 0x30a0 <= r && r < 0x3130: // kana
	case 0xac00 <= r && r < 0xd7a4, 0xff01 <= r && r < 0xff61: // Hangul syllables, wide forms
	default:
		return false
	}
	return true
}

// plainThree says of the first two of three bytes whether all of the 64 characters
// that begin with them are plain.
//
//nolint:gochecknoglobals // a table
var plainThree = sync.OnceValue(func() *[1024]bool {
	var t [1024]bool
	for p := range t {
		t[p] = p >= 0x800/64 // below, three bytes are no character
		for c := range rune(64) {
			t[p] = t[p] && isPlainRune(rune(p)*64+c)
		}
	}
	return &t
})

// closed reports whether nothing that follows can change the normal form of what
// stands before text.
func closed(text []byte) bool {
	return len(text) > 0 && (text[0] < utf8.RuneSelf || norm.NFC.Properties(text).BoundaryBefore())
}

func readNormalizers(s section) ([]normalizer, error) {
	if s.null() {
		return nil, nil
	}
	var c struct {
		Type        string            `json:"type"`
		Normalizers []json.RawMessage `json:"normalizers"`
		Prepend     string            `json:"prepend"`
		Pattern     pattern           `json:"pattern"`
		Content     string            `json:"content"`
		Left        *bool             `json:"strip_left"`
		Right       *bool             `json:"strip_right"`
	}
	if err := s.unmarshal(&c); err != nil {
		return nil, fmt.Errorf("normalizer: %w", err)
	}
	for _, f := range [][2]string{{"prepend", c.Prepend}, {"content", c.Content}, {"pattern", c.Pattern.String}} {
		if err := bounded(f[0], f[1]); err != nil {
			return nil, fmt.Errorf("normalizer: %s: %w", c.Type, err)
		}
	}
	switch c.Type {
	case "Sequence":
		var all []normalizer
		for _, raw := range c.Normalizers {
			n, err := readNormalizers(section{raw, s.base})
			if err != nil {
				return nil, err
			}
			if all = append(all, n...); len(all) > maxDepth {
				return nil, fmt.Errorf("normalizer: more than %d steps", maxDepth)
			}
		}
		return all, nil
	case "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents":
		return []normalizer{{kind: c.Type}}, nil
	case "Strip":
		if c.Left == nil || c.Right == nil {
			return nil, fmt.Errorf("normalizer: Strip without strip_left and strip_right")
		}
		return []normalizer{{kind: c.Type, left: *c.Left, right: *c.Right}}, nil
	case "Prepend":
		return []normalizer{{kind: c.Type, to: c.Prepend}}, nil
	case "Replace":
		n := normalizer{kind: c.Type, from: c.Pattern.String, to: c.Content}
		if c.Pattern.Regex != "" {
			var err error
			if n.regex, err = compile(c.Pattern.Regex); err != nil {
				return nil, fmt.Errorf("normalizer: Replace: %w", err)
			}
		} else if n.from == "" {
			return nil, fmt.Errorf("normalizer: Replace without a pattern")
		}
		return []normalizer{n}, nil
	}
	return nil, fmt.Errorf("normalizer: cannot do %q exactly; known are NFC, NFD, NFKC, NFKD, Lowercase, Prepend, Replace, Strip, StripAccents, Sequence", c.Type)
}

// keepFirst returns an error if a step may drop the first character: the reference
// does not take what follows for the start of the text then.
func keepFirst(steps []normalizer) error {
	for _, n := range steps {
		drops := n.kind == "StripAccents" || n.kind == "Strip" && n.left ||
			n.kind == "Replace" && (n.regex != nil || n.to == "" || utf8.RuneCountInString(n.from) > 1)
		if drops {
			return fmt.Errorf("pre_tokenizer: prepend_scheme first behind a normalizer %s that may drop the first character", n.kind)
		}
	}
	return nil
}

// pattern is a text or a regular expression, of which a file has one.
type pattern struct{ String, Regex string }
