// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"
)

// quick finds pieces of ASCII text as the scanner of an expression does, but faster. It leaves other text to
// the scanner.
type quick struct {
	start [256]wordStart
	fold  uint64     // makes upper case lower case from the ninth byte of a word on, 0 if it ends there
	ends  [256]uint8 // what may stand behind a word: 0 leaves it to the scanner, afterLower ends it only behind lower case
	next  [quickEnd][256]uint8
}

// wordStart says, of the first byte of a word, what its first eight bytes may be.
type wordStart struct {
	fold uint64 // makes those lower case that may be upper case
	lead uint64 // the high bit of the first byte if it may stand before the word
}

const (
	always = iota + 1
	afterLower
)

// The states of quick and their names. The first 13 are within a piece: its start; a word; one, two and three
// digits; one space; one other blank; two or more blanks; a line end; blanks behind a line end; a sign that may stand
// before a word; other signs; a line end behind signs. The others end the piece.
const (
	quickNames  = "-wdefstbnmpqr.=<~?"
	quickEnd    = iota + 12 // before the character
	quickExact              // before the character, whatever the character is
	quickBefore             // one character earlier
	quickLine               // behind the last line end
	// The last one leaves the piece to the scanner.
)

// The next states, by state and by kind of character: letter, digit, space, other blank, line end, sign, slash,
// apostrophe, other.
//
//nolint:gochecknoglobals // tables
var (
	gpt2Steps = []string{
		"-wdsttqq??", "ww.......?", "d.d......?", "swdbbbqqq?", "t..bbb...?", "b<<bbb<<<?", "q.....qqq?",
	}
	cl100kSteps = []string{
		"-wdstnpp??", "ww.......?", "d.e......?", "e.f......?", "f=========", "sw.bbnqqq?", "tw.bbn...?",
		"b<<bbn<<<?", "n..mmn...?", "m~~mmn~~~?", "pw...rqqq?", "q....rqqq?", "r....r...?",
	}
	qwen2Steps = append(slices.Clone(cl100kSteps), "d=========")
	// Words are found before, or by the scanner.
	o200kSteps  = append(slices.Clone(cl100kSteps), "-?dstnpp??", "s?.bbnqqq?", "t?.bbn...?", "p?...rqqq?", "r....r.r.?")
	tekkenSteps = append(slices.Clone(o200kSteps), "d=========")
)

// kindOf returns the kind of a character.
func kindOf(c byte) int {
	switch {
	case isASCIILetter(c):
		return 0
	case '0' <= c && c <= '9':
		return 1
	case c >= utf8.RuneSelf:
		return 8
	}
	if k := strings.IndexByte(" \t\n/'\v\r\f", c); k >= 0 {
		return [...]int{2, 3, 4, 6, 7, 3, 4, 3}[k]
	}
	return 5
}

// newQuick returns a function that returns the tables of an expression. A word may begin with any sign or
// only with a space. If cased is set, only its first letter may be upper case.
func newQuick(steps []string, anySign, cased bool) func() *quick {
	return sync.OnceValue(func() *quick {
		q := &quick{fold: ones * 0x20}
		if cased {
			q.fold = 0
		}
		for c := range 256 {
			kind, x := kindOf(byte(c)), &q.start[c]
			for _, row := range steps {
				q.next[strings.IndexByte(quickNames, row[0])][c] = uint8(strings.IndexByte(quickNames, row[1+kind]))
			}
			x.fold = q.fold
			switch lead := c == ' ' || anySign && (kind == 3 || kind == 5 || kind == 6); {
			case lead:
				x.lead, x.fold = 0x80, q.fold|0x2000
			case kind == 0:
				x.fold |= 0x20
			}
			switch {
			case cased && 'A' <= c && c <= 'Z':
				q.ends[c] = afterLower
			case kind != 0 && kind != 8 && !(cased && kind == 7):
				q.ends[c] = always
			}
		}
		return q
	})
}

const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// notLower returns the high bits of the bytes of w that are no lower-case letters.
func notLower(w uint64) uint64 {
	low := w &^ highs // bytes with the high bit are no letters
	// The high bit of each byte of the two sums tells that the byte is at least a, and above z.
	return (^((low + ones*(0x80-'a')) &^ (low + ones*(0x80-'z'-1))) | w) & highs
}

// batch is how many pieces are found before their ids are looked up: the processor then works on several at
// a time.
const batch = 128

// scan finds pieces from s[i] on as a scanner does, up to a piece that the scanner must find, or that depends on
// s[calm-1] or s[hi]. It returns their number. A piece begins more than 16 bytes before s[hi].
func (q *quick) scan(ends *[batch]int, s []byte, i, hi, calm int) (n int) {
	for s = s[:hi]; n < batch && i+16 < hi; n++ {
		start := &q.start[s[i]]
		var end int
		if others := notLower(binary.LittleEndian.Uint64(s[i:])|start.fold) &^ start.lead; others != 0 {
			end = i + bits.TrailingZeros64(others)/8
		} else {
			end = i + 8 + bits.TrailingZeros64(notLower(binary.LittleEndian.Uint64(s[i+8:])|q.fold)|1<<63)/8
		}
		looked := end + 1
		if behind := q.ends[s[end]]; end <= i+int(start.lead>>7) || behind != always && (behind != afterLower || s[end-1] < 'a') {
			if end, looked = q.piece(s, i); end == i {
				break
			}
		}
		if looked >= calm || s[end] >= utf8.RuneSelf {
			break
		}
		ends[n], i = end, end
	}
	return n
}

// piece returns the end of the piece at s[i] and what it depends on, as a scanner does, or i if the scanner
// must find it.
func (q *quick) piece(s []byte, i int) (end, looked int) {
	state := uint8(0)
	for j := i; j < len(s); j++ {
		if state = q.next[state][s[j]]; state < quickEnd {
			continue
		}
		switch state {
		case quickEnd:
			return j, j + 1
		case quickExact:
			return j, j
		case quickBefore:
			return j - 1, j + 1
		case quickLine:
			for looked = j + 1; s[j-1] != '\r' && s[j-1] != '\n'; j-- {
			}
			return j, looked
		}
		break
	}
	return i, 0
}

// quickWords is step with the last scanner, for words of bytes: it finds most words and their ids
// without a call. The ids, and the places that the recorder keeps, are those of step. offers says that
// the places between pieces are offered to the recorder.
func (e *encoder) quickWords(p *splitter, lo, hi, looked int, offers bool) {
	s, w, b := e.text, e.work, &e.t.bpe
	offer := func(at, looked int) {
		if e.look(at); offers && e.err == nil {
			e.offer(at, looked)
		}
	}
	for i := lo; i < hi && e.err == nil; {
		n := p.quick.scan(&w.ends, s, i, hi, e.calm(offers))
		if n > 0 {
			e.dst = b.appendAll(e.dst, w, s, i, w.ends[:n])
			i = w.ends[n-1]
			offer(i, i+1)
		}
		if n < batch && e.err == nil {
			j, l := p.scan(p.table, s, i, hi)
			if l > hi {
				l = looked
			}
			e.dst = b.append(e.dst, w, s, i, j)
			offer(j, l)
			i = j
		}
	}
}

// appendAll is append for words that follow each other from s[i] on. More than 16 bytes follow the beginning of
// each.
func (b *bpe) appendAll(dst []uint32, w *work, s []byte, i int, ends []int) []uint32 {
	short, flag := w.short, wholeFlag(b.whole)
	for _, j := range ends {
		n := j - i
		key := shortKeyOf(s[i:], n, flag)
		k := key.hash() & uint64(len(short)-1)
		// The word has the first slot or the second one. A branch here would often be mispredicted.
		other := short[k].key.first ^ key.first | short[k].key.last ^ key.last
		slot := &short[k^(other|-other)>>63]
		if slot.key == key && slot.count() <= mostShortIDs && n <= mostShortKey {
			dst = slot.appendTo(dst)
		} else {
			if dst = b.append(dst, w, s, i, j); w.err != nil {
				break
			}
			short = w.short
		}
		i = j
	}
	return dst
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
