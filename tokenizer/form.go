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

// compositions maps a starter and the character behind it to the character that they compose to.
//
//nolint:gochecknoglobals // a table
var compositions = sync.OnceValue(func() map[[2]rune]rune {
	m := map[[2]rune]rune{}
	for r := rune(0xc0); r < 0x30000; r++ { // all compositions are in the first three planes
		d := norm.NFD.String(string(r))
		last, n := utf8.DecodeLastRuneInString(d)
		head := norm.NFC.String(d[:len(d)-n])
		if first, size := utf8.DecodeRuneInString(head); head != "" && size == len(head) && unicode.Is(old, r) && norm.NFC.IsNormalString(string(r)) {
			m[[2]rune{first, last}] = r
		}
	}
	return m
})

// Bits of the marks and values of a formWriter.
const (
	noRune    = -1
	markClass = 56 // a mark's combining class is above this bit
	markPlace = 24 // the number of marks before it is above this bit, the mark itself below
	markRune  = 1<<markPlace - 1
)

// formWriter writes a normal form. A starter and the marks behind it are held until the
// next starter. x/text does the same, but inserts U+034F after 30 marks.
type formWriter struct {
	dst        []byte
	decomposes norm.Form
	composes   bool
	starter    rune     // noRune if there is none
	marks      []uint64 // class, place and code point
}

// add takes the next decomposed character.
func (w *formWriter) add(r rune, class uint8) {
	if class != 0 {
		w.marks = append(w.marks, uint64(class)<<markClass|uint64(len(w.marks))<<markPlace|uint64(r))
		return
	}
	w.settle()
	if w.composes && len(w.marks) == 0 && w.starter != noRune {
		if c, ok := compositions()[[2]rune{w.starter, r}]; ok {
			w.starter = c
			return
		}
	}
	w.write()
	w.starter = r
}

// settle orders the held marks by their classes and composes them with the starter.
func (w *formWriter) settle() {
	slices.Sort(w.marks)
	if !w.composes || w.starter == noRune || len(w.marks) == 0 {
		return
	}
	kept, last := w.marks[:0], uint64(0)
	for _, m := range w.marks {
		if m>>markClass > last { // a kept mark of the same class blocks the later ones
			if c, ok := compositions()[[2]rune{w.starter, rune(m & markRune)}]; ok {
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
	if w.starter != noRune {
		w.dst = utf8.AppendRune(w.dst, w.starter)
	}
	for _, m := range w.marks {
		w.dst = utf8.AppendRune(w.dst, rune(m&markRune))
	}
	w.starter, w.marks = noRune, w.marks[:0]
}

// take adds the parts of the character r, whose bytes are char.
func (w *formWriter) take(r rune, char []byte) {
	switch p := w.decomposes.Properties(char); {
	case r == utf8.RuneError: // a byte that is no character stays
		w.finish()
		w.dst = append(w.dst, char...)
	case !unicode.Is(old, r):
		w.add(r, 0)
	case 0xac00 <= r && r < 0xac00+11172: // syllables of Hangul decompose by arithmetic
		k := r - 0xac00
		w.add(0x1100+k/(21*28), 0)
		w.add(0x1161+k/28%21, 0)
		if k%28 > 0 {
			w.add(0x11a7+k%28, 0)
		}
	case p.Decomposition() == nil:
		w.add(r, p.CCC())
	default:
		for d := p.Decomposition(); len(d) > 0; {
			r, n := utf8.DecodeRune(d)
			w.add(r, w.decomposes.Properties(d).CCC())
			d = d[n:]
		}
	}
}

// normalForm returns the normal form kind of text by the tables of Unicode 9.0.
func normalForm(b *budget, text []byte, kind string, limit int) ([]byte, error) {
	w := formWriter{starter: noRune, decomposes: forms[kind], composes: kind == "NFC" || kind == "NFKC"}
	next, plain := 0, plainClasses() // next is where to look at the time
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
			if r >= utf8.RuneSelf && (kind != "NFC" || plain.of(r) == 0) {
				break
			}
			last, end = end, end+n
		}
		if last > i {
			w.finish()
			w.dst = append(w.dst, text[i:last]...)
		}
		r, n := utf8.DecodeRune(text[last:])
		w.take(r, text[last:last+n])
		i = last + n
	}
	w.finish()
	return w.dst, nil
}
