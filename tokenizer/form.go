// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"slices"
	"sync"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
	"golang.org/x/text/unicode/rangetable"
)

// forms maps a normal form's name to the form that decomposes its characters.
//
//nolint:gochecknoglobals // a table
var forms = map[string]norm.Form{"NFC": norm.NFD, "NFD": norm.NFD, "NFKC": norm.NFKD, "NFKD": norm.NFKD}

// old holds the code points of Unicode 9.0. The reference tokenizers compose by
// the tables of that version: later code points neither compose nor move.
//
//nolint:gochecknoglobals // a table
var old = rangetable.Assigned("9.0.0")

// compositions maps a starter and the character behind it to the character that they
// compose to. Hangul is not in it.
//
//nolint:gochecknoglobals // a table
var compositions = sync.OnceValue(func() map[[2]rune]rune {
	m := map[[2]rune]rune{}
	for r := rune(0xc0); r < 0x30000; r++ { // all compositions are in the first three planes
		d := norm.NFD.PropertiesString(string(r)).Decomposition()
		last, n := utf8.DecodeLastRune(d)
		if n == len(d) || !unicode.Is(old, r) || !norm.NFC.IsNormalString(string(r)) {
			continue
		}
		head := norm.NFC.Bytes(d[:len(d)-n])
		if first, size := utf8.DecodeRune(head); size == len(head) {
			m[[2]rune{first, last}] = r
		}
	}
	return m
})

// Hangul syllables decompose and compose by arithmetic.
const (
	hangulBase, hangulCount   = 0xac00, 11172
	leadBase, leadCount       = 0x1100, 19
	vowelBase, vowelCount     = 0x1161, 21
	trailBase, trailCount     = 0x11a7, 28
	markClass, markRune, rest = 24, 1<<24 - 1, -1
)

// compose returns the character that a and b compose to, or rest if they do not compose.
func compose(a, b rune) rune {
	l, v, s := a-leadBase, b-vowelBase, a-hangulBase
	switch {
	case 0 <= l && l < leadCount && 0 <= v && v < vowelCount:
		return hangulBase + (l*vowelCount+v)*trailCount
	case 0 <= s && s < hangulCount && s%trailCount == 0 && trailBase < b && b < trailBase+trailCount:
		return a + b - trailBase
	}
	if c, ok := compositions()[[2]rune{a, b}]; ok {
		return c
	}
	return rest
}

// formWriter writes a normal form. A starter and the marks behind it are held until the
// next starter. x/text does the same, but inserts U+034F after 30 marks.
type formWriter struct {
	dst      []byte
	composes bool
	starter  rune     // rest means no starter
	marks    []uint32 // each with its combining class in the bits from markClass on
	spare    []uint32
}

// add takes the next decomposed character.
func (w *formWriter) add(r rune, class uint8) {
	if class != 0 {
		w.marks = append(w.marks, uint32(class)<<markClass|uint32(r))
		return
	}
	w.settle()
	if w.composes && len(w.marks) == 0 && w.starter != rest {
		if c := compose(w.starter, r); c != rest {
			w.starter = c
			return
		}
	}
	w.write()
	w.starter = r
}

// settle orders the held marks by their classes and composes them with the starter.
func (w *formWriter) settle() {
	if !slices.IsSortedFunc(w.marks, func(a, b uint32) int { return int(a>>markClass) - int(b>>markClass) }) {
		var next [257]int // a counting sort: a run of marks may be as long as the text
		for _, m := range w.marks {
			next[m>>markClass+1]++
		}
		for k := range 256 {
			next[k+1] += next[k]
		}
		w.spare = slices.Grow(w.spare[:0], len(w.marks))[:len(w.marks)]
		for _, m := range w.marks {
			w.spare[next[m>>markClass]] = m
			next[m>>markClass]++
		}
		w.marks, w.spare = w.spare, w.marks
	}
	if !w.composes || w.starter == rest {
		return
	}
	kept, last := w.marks[:0], uint32(0)
	for _, m := range w.marks {
		if m>>markClass > last { // a kept mark of the same class blocks the later ones
			if c := compose(w.starter, rune(m&markRune)); c != rest {
				w.starter = c
				continue
			}
		}
		last = m >> markClass
		kept = append(kept, m)
	}
	w.marks = kept
}

// finish settles and writes what is held.
func (w *formWriter) finish() {
	w.settle()
	w.write()
}

// write writes what is held.
func (w *formWriter) write() {
	if w.starter != rest {
		w.dst = utf8.AppendRune(w.dst, w.starter)
	}
	for _, m := range w.marks {
		w.dst = utf8.AppendRune(w.dst, rune(m&markRune))
	}
	w.starter, w.marks = rest, w.marks[:0]
}

// decomposed adds the parts of the character r, which is s.
func (w *formWriter) decomposed(form norm.Form, r rune, s []byte) {
	if k := r - hangulBase; 0 <= k && k < hangulCount {
		w.add(leadBase+k/(vowelCount*trailCount), 0)
		w.add(vowelBase+k/trailCount%vowelCount, 0)
		if k %= trailCount; k > 0 {
			w.add(trailBase+k, 0)
		}
		return
	}
	if !unicode.Is(old, r) {
		w.add(r, 0)
		return
	}
	p := form.Properties(s)
	d := p.Decomposition()
	if d == nil {
		w.add(r, p.CCC())
		return
	}
	for len(d) > 0 {
		r, n := utf8.DecodeRune(d)
		w.add(r, form.Properties(d).CCC())
		d = d[n:]
	}
}

// normalForm returns the normal form kind of text by the tables of Unicode 9.0.
func normalForm(b *budget, text []byte, kind string, limit int) ([]byte, error) {
	w := formWriter{starter: rest, composes: kind == "NFC" || kind == "NFKC"}
	next := 0 // where to look at the time
	for i := 0; i < len(text); {
		if i >= next {
			if next += rewriteStep; b.spend(rewriteStep) {
				return nil, b.err
			}
			if len(w.dst) > limit {
				return nil, errGrown
			}
		}
		// Of a run of plain characters only the last one may compose or decompose.
		last, end := i, i
		for end < len(text) && end < next {
			r, n := utf8.DecodeRune(text[end:])
			if r >= utf8.RuneSelf && (kind != "NFC" || plainClasses().of(r) == 0) {
				break
			}
			last, end = end, end+n
		}
		if last > i {
			w.finish()
			w.dst = append(w.dst, text[i:last]...)
		}
		r, n := utf8.DecodeRune(text[last:])
		if r == utf8.RuneError && n == 1 { // a byte that is no character stays
			w.finish()
			w.dst = append(w.dst, text[last])
		} else {
			w.decomposed(forms[kind], r, text[last:last+n])
		}
		i = last + n
	}
	w.finish()
	return w.dst, nil
}
