// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/binary"
	"math/bits"
	"unicode/utf8"
)

// quick tells which words of ASCII letters a scanner's expression takes, so that they are found without
// the scanner.
type quick uint8

const (
	noQuick   quick = iota
	afterAny        // letters, with one character before them that is no letter, digit, apostrophe or line end
	afterSign       // the same with a space only
	lowerCase       // like afterAny, where only the first letter may be upper case
)

// The kinds of ASCII characters.
const (
	kindLower = 1 << iota
	kindUpper
	kindLead  // may stand before a word
	kindASCII // any but the apostrophe
)

//nolint:gochecknoglobals // a table
var kinds = func() (k [256]uint8) {
	for c := range utf8.RuneSelf {
		switch {
		case 'a' <= c && c <= 'z':
			k[c] = kindLower | kindASCII
		case 'A' <= c && c <= 'Z':
			k[c] = kindUpper | kindASCII
		case c == '\'':
		case '0' <= c && c <= '9', c == '\r', c == '\n':
			k[c] = kindASCII
		default:
			k[c] = kindLead | kindASCII
		}
	}
	return k
}()

// end returns the end of the word at s[i], or i if the scanner must find the piece there: the word is of
// another form, or the character behind it is not ASCII, an apostrophe or s[hi].
func (q quick) end(s []byte, i, hi int) int {
	j := i
	if kinds[s[j]]&kindLead != 0 && (q != afterSign || s[j] == ' ') {
		j++
	}
	first := j
	if q == lowerCase {
		if j < hi && kinds[s[j]]&kindUpper != 0 {
			j++
		}
		first = j
		for j < hi && kinds[s[j]]&kindLower != 0 {
			j++
		}
	} else {
		j = letters(s, j, hi)
	}
	if j == first || j == hi || kinds[s[j]]&kindASCII == 0 {
		return i
	}
	return j
}

// letters returns the end of the ASCII letters that begin at s[j], at most hi.
func letters(s []byte, j, hi int) int {
	const (
		ones  = 0x0101010101010101
		highs = 0x8080808080808080
	)
	for ; hi-j >= 8; j += 8 {
		w := binary.LittleEndian.Uint64(s[j:])
		low := (w | ones*0x20) &^ highs // lower case; bytes with the high bit are no letters
		// The high bit of each byte of the two sums tells that the byte is at least a, and above z.
		others := (^((low + ones*(0x80-'a')) &^ (low + ones*(0x80-'z'-1))) | w) & highs
		if others != 0 {
			return j + bits.TrailingZeros64(others)/8
		}
	}
	for j < hi && kinds[s[j]]&(kindLower|kindUpper) != 0 {
		j++
	}
	return j
}

// middleSlot keeps the ids of a word of 8 to 16 bytes: its first and its last 8 bytes and its length.
type middleSlot struct {
	first, last uint64
	ids         [3]uint32
	length, n   uint16
}

func (x *middleSlot) same(y *middleSlot) bool {
	return x.first == y.first && x.last == y.last && x.length == y.length
}

// middleWord returns the slot of the word of x, or the slot where it would be kept.
func (w *work) middleWord(x *middleSlot) *middleSlot {
	h := (x.first ^ bits.RotateLeft64(x.last, 29) ^ uint64(x.length)) * 0x9e3779b97f4a7c15
	i := h >> 40 & uint64(len(w.middle)-1)
	slot := &w.middle[i]
	if slot.n == 0 || slot.same(x) {
		return slot
	}
	if beside := &w.middle[i^1]; beside.n == 0 || beside.same(x) {
		return beside
	}
	return slot
}

// keepMiddle remembers the ids of a word.
func (w *work) keepMiddle(x *middleSlot) {
	slot := w.middleWord(x)
	if slot.n == 0 {
		if w.middleCount++; 4*w.middleCount > len(w.middle) && len(w.middle) < mostWords {
			old := w.middle
			w.middle = make([]middleSlot, 4*len(old))
			for k := range old {
				if old[k].n != 0 {
					*w.middleWord(&old[k]) = old[k]
				}
			}
			slot = w.middleWord(x)
		}
	}
	*slot = *x
}

// quickWords is step with the last scanner, for words of bytes: it finds most words and their ids
// without a call. The ids, and the places that the recorder keeps, are those of step. offers says that
// the places between pieces are offered to the recorder.
func (e *encoder) quickWords(p *splitter, lo, hi, looked int, offers bool) {
	s, w, b := e.text, e.w, e.t.bpe
	dst, short := e.dst, w.short
	pending, ids := -1, 0 // the last place that was not offered, and the ids up to there
	calm := e.calm(offers)
	for i := lo; i < hi; {
		j := p.quick.end(s, i, hi)
		l := j + 1
		if j == i {
			if j, l = p.scan(p.table, s, i, hi); l > hi {
				l = looked
			}
		}
		switch n := j - i; {
		case n <= 7 && i+8 <= len(s):
			key := binary.LittleEndian.Uint64(s[i:])&(1<<(8*uint(n))-1) | uint64(n)<<56
			if b.whole {
				key |= 1 << 63
			}
			at := key * 0x9e3779b97f4a7c15 >> 32 & uint64(len(short)-1)
			slot := &short[at]
			if slot.key != key {
				if slot = &short[at^1]; slot.key != key {
					dst = b.append(dst, w, s, i, j)
					short = w.short
					break
				}
			}
			if dst = append(dst, slot.ids[0], slot.ids[1]); slot.ids[1] == noID {
				dst = dst[:len(dst)-1]
			}
		case 8 <= n && n <= 16:
			dst = b.middle(dst, w, s, i, j)
			short = w.short
		default:
			dst = b.append(dst, w, s, i, j)
			short = w.short
		}
		if i = j; w.err == nil && j < hi && l == j+1 && l < calm && kinds[s[j]]&kindASCII != 0 {
			pending, ids = j, len(dst)
			continue
		}
		e.dst = dst
		if e.look(j); e.err != nil {
			return
		}
		if offers {
			e.offerPending(pending, ids)
			e.offer(j, l)
		}
		pending, calm = -1, e.calm(offers)
	}
	if e.dst = dst; offers {
		e.offerPending(pending, ids)
	}
}

func (e *encoder) offerPending(at, ids int) {
	if at < 0 {
		return
	}
	all := e.dst
	e.dst = all[:ids]
	e.offer(at, at+1)
	e.dst = all
}

// calm returns the end of the text in which no place between pieces needs attention, unless it is the
// last one: the recorder's step does not end there, and the context is not checked.
func (e *encoder) calm(offers bool) int {
	switch {
	case e.rec == nil || !offers:
		return e.check
	case !e.marks && (e.t.raw.loose() || e.t.normed.loose()):
		return 0
	}
	return min(e.check, e.rec.next-e.t.reach())
}

// reach is how far a search for added tokens looks ahead of a place.
func (t *Tokenizer) reach() (n int) {
	for _, f := range []*finder{t.raw, t.normed} {
		if f != nil {
			n = max(n, f.reach)
		}
	}
	return n
}

// middle is append for a word of 8 to 16 bytes.
func (b *bpe) middle(dst []uint32, w *work, s []byte, i, j int) []uint32 {
	x := middleSlot{first: binary.LittleEndian.Uint64(s[i:]), last: binary.LittleEndian.Uint64(s[j-8:]), length: uint16(j - i)}
	at := len(dst)
	if slot := w.middleWord(&x); slot.n != 0 && slot.same(&x) {
		return append(dst, slot.ids[0], slot.ids[1], slot.ids[2])[:at+int(slot.n)]
	}
	dst = b.append(dst, w, s, i, j)
	if got := dst[at:]; len(got) > 0 && len(got) <= len(x.ids) && w.err == nil {
		x.n = uint16(copy(x.ids[:], got))
		w.keepMiddle(&x)
	}
	return dst
}
