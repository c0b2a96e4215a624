// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
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

// rewrite returns the normal form of text, which may be text itself. A form of more than limit
// bytes is an error, found before much more memory than that is taken.
func (n *normalizer) rewrite(b *budget, text []byte, limit int) (out []byte, err error) {
	if b.spend(len(text) / quickBytes) {
		return nil, b.err
	}
	if len(text) == 0 {
		return nil, nil
	}
	out = text
	switch n.kind {
	case "Strip":
		if n.left {
			out = bytes.TrimLeftFunc(out, unicode.IsSpace)
		}
		if n.right {
			out = bytes.TrimRightFunc(out, unicode.IsSpace)
		}
	case "Prepend":
		if len(n.to)+len(text) > limit {
			return nil, errGrown
		}
		out = append([]byte(n.to), text...)
	case "Replace":
		out, err = n.replace(b, text, limit)
	default:
		if n.kind != "NFC" || !isNFC(text) {
			out, err = normalForm(b, text, n.kind, limit)
		}
	}
	if err == nil && len(out) > limit {
		err = errGrown
	}
	return out, err
}

func (n *normalizer) replace(b *budget, text []byte, limit int) ([]byte, error) {
	if n.regex == nil {
		if len(text)+bytes.Count(text, []byte(n.from))*(len(n.to)-len(n.from)) > limit {
			return nil, errGrown
		}
		return bytes.ReplaceAll(text, []byte(n.from), []byte(n.to)), nil
	}
	spans, err := n.regex.matches(b, nil, text)
	if err != nil {
		return nil, err
	}
	var out []byte
	at := uint32(0)
	for _, s := range spans {
		out = append(append(out, text[at:s.start]...), n.to...)
		if at = s.end; len(out) > limit {
			return nil, errGrown
		}
	}
	return append(out, text[at:]...), nil
}

// isNFC reports whether text is in NFC. If it is by current tables, it is by those of Unicode 9.0:
// later code points only prevent compositions.
func isNFC(text []byte) bool { return isPlain(text) || norm.NFC.IsNormal(text) }

// isPlain reports whether all characters of text are of ranges in which none decomposes in NFC, is
// reordered, or composes with the text before it. Most texts are plain.
func isPlain(text []byte) bool {
	t := plainClasses()
	for i := 0; i < len(text); {
		if i+8 <= len(text) && binary.LittleEndian.Uint64(text[i:])&0x8080808080808080 == 0 {
			i += 8
			continue
		}
		if t.ofThree(text, i, len(text)) != 0 {
			i += 3
			continue
		}
		class, n := t.at(text, i, len(text))
		if class == 0 {
			return false
		}
		i += n
	}
	return true
}

// closed reports whether text, appended to any text, leaves the NFC of that text unchanged.
func closed(text []byte) bool {
	return len(text) > 0 && (text[0] < utf8.RuneSelf || norm.NFC.Properties(text).BoundaryBefore())
}

func readNormalizers(s section) (all []normalizer, err error) {
	steps, err := s.steps("normalizers")
	for _, step := range steps {
		n, err := readNormalizer(step)
		if err != nil {
			return nil, err
		}
		all = append(all, n)
	}
	return all, err
}

func readNormalizer(s section) (n normalizer, err error) {
	var c struct {
		Type    string  `json:"type"`
		Prepend string  `json:"prepend"`
		Pattern pattern `json:"pattern"`
		Content string  `json:"content"`
		Left    *bool   `json:"strip_left"`
		Right   *bool   `json:"strip_right"`
	}
	if err := s.unmarshal(&c); err != nil {
		return n, err
	}
	for _, f := range [][2]string{{"prepend", c.Prepend}, {"content", c.Content}, {"pattern", c.Pattern.String}} {
		if err := bounded(f[0], f[1]); err != nil {
			return n, fmt.Errorf("%s: %w", c.Type, err)
		}
	}
	n.kind = c.Type
	switch c.Type {
	case "NFC", "NFD", "NFKC", "NFKD":
	case "Strip":
		if c.Left == nil || c.Right == nil {
			return n, errors.New("step Strip without strip_left and strip_right")
		}
		n.left, n.right = *c.Left, *c.Right
	case "Prepend":
		n.to = c.Prepend
	case "Replace":
		n.from, n.to = c.Pattern.String, c.Content
		if c.Pattern.Regex != "" {
			if n.regex, err = compile(c.Pattern.Regex); err != nil {
				return n, fmt.Errorf("step Replace: %w", err)
			}
		} else if n.from == "" {
			return n, errors.New("step Replace without a pattern")
		}
	default:
		return n, fmt.Errorf("cannot do %q exactly; known are NFC, NFD, NFKC, NFKD, Prepend, Replace, Strip, Sequence",
			c.Type)
	}
	return n, nil
}

// keepFirst returns an error if a step may drop the first character: the reference then does not treat
// the following text as the start.
func keepFirst(steps []normalizer) error {
	for _, n := range steps {
		drops := n.kind == "Strip" && n.left ||
			n.kind == "Replace" && (n.regex != nil || n.to == "" || utf8.RuneCountInString(n.from) > 1)
		if drops {
			return fmt.Errorf("prepend_scheme first behind a normalizer %s that may drop the first character", n.kind)
		}
	}
	return nil
}
