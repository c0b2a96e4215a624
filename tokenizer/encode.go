// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"context"
	"unicode"
	"unicode/utf8"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// resume is a place in a text where encoding can continue without the text before it.
type resume struct {
	at    int  // in the text
	ids   int  // the number of ids up to there
	start bool // a stretch between added tokens begins there
}

// recorder collects the resume points of a text, one for each step of step bytes: the last place at or
// before the end of the step such that no decision up to the place depends on text behind that end.
type recorder struct {
	step int
	next int    // the end of the step that is due
	last resume // the last place; what it depends on ends at or before next
	mark int    // where what any decision so far depends on ends
	ends []resume
	size int    // of the text
	tail resume // the last place that depends on no text behind the text's end
}

// note records that the decisions so far depend on the text up to mark.
func (r *recorder) note(mark int) {
	for r.mark = max(r.mark, mark); r.mark > r.next; r.next += r.step {
		r.ends = append(r.ends, r.last)
	}
}

// place records a place between two decisions. Calls are in the order of the text.
func (r *recorder) place(p resume, mark int) {
	r.note(max(mark, p.at))
	if r.last = p; r.mark <= r.size {
		r.tail = p
	}
}

// encoder encodes one text.
type encoder struct {
	*work // its budget has the error that ends the encoding
	t     *Tokenizer
	dst   []uint32
	base  int // the ids in dst before this text
	text  []byte
	marks bool // the text has marks
	rec   *recorder
	begin int // where the stretch between added tokens begins
	check int // look at the context behind this place
	room  int // bytes that rewritten stretches may still take
}

func (t *Tokenizer) encode(ctx context.Context, dst []uint32, text []byte, f form, rec *recorder) ([]uint32, error) {
	e := encoder{
		work: t.take(), t: t, dst: dst, base: len(dst), text: text, marks: f == marked, rec: rec, check: checkEvery,
	}
	e.room = grows * max(leastRoom, len(text))
	e.budget = budget{ctx: ctx, size: len(text), left: checkEvery}
	defer t.give(e.work)
	from := resume{start: true}
	if rec != nil {
		from, e.base = rec.last, len(dst)-rec.last.ids
		e.check += from.at
	}
	if f == framed && from.at == 0 && from.ids == 0 {
		e.dst = append(e.dst, t.before...)
		if rec != nil {
			rec.last.ids = len(t.before)
		}
	}
	e.run(from)
	if e.err != nil {
		return e.dst, e.err
	}
	if rec != nil {
		rec.note(len(text) + 1) // ends all steps
	}
	if f == framed {
		e.dst = append(e.dst, t.after...)
	}
	return e.dst, nil
}

// run encodes the text from a resume point: stretch, added token or mark, stretch, …
func (e *encoder) run(from resume) {
	at, start := from.at, from.start
	if e.begin = at; e.t.chops && !start && !e.marks {
		e.begin = 0
		for token, _, ok := e.special(0); ok && token.start < at; token, _, ok = e.special(token.end) {
			e.begin = token.end
		}
	}
	for at < len(e.text) && e.err == nil {
		token, looked, ok := e.special(at)
		if !ok {
			if e.err == nil {
				e.stretch(at, len(e.text), len(e.text)+1, start)
			}
			return
		}
		if e.stretch(at, token.start, looked, start); e.err != nil {
			return
		}
		if token.id != noID {
			e.dst = append(e.dst, token.id)
		}
		at, start = token.end, true
		e.begin = at
		e.place(at, looked, true)
	}
}

// special returns the first mark at or after at, or the first added token that is found in the
// unchanged text. looked is the end of the text that this result depends on.
func (e *encoder) special(at int) (token found, looked int, ok bool) {
	if e.marks {
		start, end, id := chat.NextMark(e.text, at)
		return found{start, end, id}, start + 1, start >= 0
	}
	token, ok = e.t.raw.next(&e.budget, e.text, at)
	if ok {
		// The search looked behind the token for a longer one.
		looked = min(token.end+e.t.raw.reach, len(e.text)+1)
	}
	return token, looked, ok && e.err == nil
}

// place reports a place between two decisions to the recorder.
func (e *encoder) place(at, looked int, start bool) {
	if e.rec == nil {
		return
	}
	// A search for an added token begins at each place, and looks ahead.
	if !e.marks {
		looked = max(looked, at+e.t.reach())
	}
	e.rec.place(resume{at, len(e.dst) - e.base, start}, min(looked, len(e.text)+1))
}

// stretch encodes text[lo:hi], which contains no added token of the unchanged text. start is set if a
// stretch begins at lo. The end hi depends on the text up to looked.
func (e *encoder) stretch(lo, hi, looked int, start bool) {
	if lo >= hi {
		return
	}
	t := e.t
	switch {
	case t.cuts != nil:
		e.pieces(lo, hi, looked, start && t.cuts.prefixed(e.text[lo:hi], lo == 0 || e.marks))
	case t.chops && t.scan != nil:
		e.chopped(lo, hi, looked)
	case t.scan != nil && (!t.nfc || isNFC(e.text[lo:hi])):
		e.words(lo, hi, looked)
	default:
		e.general(e.text[lo:hi], (lo == 0 || e.marks) && start)
		if e.rec != nil {
			// Nothing inside of it is a place to resume at.
			e.rec.note(looked)
		}
	}
}

// Kimi's class encodes a stretch in slices of at most mostSlice characters. It also cuts a run of
// spaces, or of other characters, after mostAlike characters.
const (
	mostSlice = 400_000
	mostAlike = 25_000
)

// chopped is words with the slices of Kimi's class.
func (e *encoder) chopped(lo, hi, looked int) {
	size, alike, space := 0, 0, false
	for i := e.begin; i < hi && e.err == nil; {
		r, n := utf8.DecodeRune(e.text[i:hi])
		if is := unicode.IsSpace(r) || 0x1c <= r && r <= 0x1f; is != space { // as Python sees spaces
			alike, space = 0, is
		}
		if size == mostSlice || alike == mostAlike {
			e.words(lo, i, i+n)
			lo, alike = max(lo, i), 0
			size %= mostSlice
		}
		size++
		alike++
		i += n
	}
	e.words(lo, hi, looked)
}

// words encodes a stretch that scanners split and that no normalizer changes.
func (e *encoder) words(lo, hi, looked int) {
	start := lo // before it, the search for added tokens sees nothing
	for lo < hi && e.err == nil {
		token, ok := e.normed().next(&e.budget, e.text[start:hi], lo-start)
		if e.err != nil {
			return
		}
		if !ok {
			e.step(0, lo, hi, looked)
			return
		}
		token.start += start
		token.end += start
		end := token.end + e.t.normed.reach
		if end > hi {
			end = looked
		}
		if e.step(0, lo, token.start, end); e.err != nil {
			return
		}
		e.dst = append(e.dst, token.id)
		switch lo = token.end; {
		case e.rec == nil:
		case e.t.normed.loose(): // a search from here would not see what stands before
			e.rec.note(end)
		default:
			e.place(lo, end, true)
		}
	}
}

// normed finds the added tokens of the normal form.
func (e *encoder) normed() *finder {
	if e.marks {
		return nil
	}
	return e.t.normed
}

// step splits text[lo:hi] with the scanner at depth, and each piece with the following scanners.
func (e *encoder) step(depth, lo, hi, looked int) {
	p, last := &e.t.scan[depth], depth == len(e.t.scan)-1
	if last && p.quick != nil && e.t.bpe.bytePair != nil {
		e.quickWords(p, lo, hi, looked, depth == e.t.resumes)
		return
	}
	for i := lo; i < hi && e.err == nil; {
		j, l := p.scan(p.table, e.text, i, hi)
		if l > hi {
			l = looked
		}
		if last {
			e.dst = e.t.bpe.append(e.dst, e.work, e.text, i, j)
			if e.look(j); e.err != nil {
				return
			}
		} else {
			e.step(depth+1, i, j, l)
		}
		if depth == e.t.resumes && e.err == nil {
			e.offer(j, l)
		}
		i = j
	}
}

// after is called after each piece.
func (e *encoder) after(at, looked int) {
	e.offer(at, looked)
	e.look(at)
}

// look checks the budget and the context.
func (e *encoder) look(at int) {
	if e.err == nil && at >= e.check {
		e.check = at + checkEvery
		e.err = e.ctx.Err()
	}
}

// offer reports a place to the recorder where all steps begin without state.
func (e *encoder) offer(at, looked int) {
	switch {
	case e.rec == nil:
	case at < len(e.text) && !utf8.RuneStart(e.text[at]), // a step behind ByteLevel parts characters
		!e.marks && (e.t.raw.loose() || e.t.normed.loose()) || e.t.nfc && at < len(e.text) && !closed(e.text[at:]):
		e.rec.note(looked)
	default:
		e.place(at, looked, false)
	}
}

// general encodes a stretch that normalizers change or that expressions split.
func (e *encoder) general(text []byte, first bool) {
	if e.late() != nil {
		return
	}
	for k := range e.t.normalizers {
		if text, e.err = e.t.normalizers[k].rewrite(&e.budget, text, e.room); e.err != nil {
			return
		}
	}
	e.room -= len(text) // so that many short stretches do not grow without bound either
	for at := 0; at < len(text) && e.err == nil; first = false {
		token, ok := e.normed().next(&e.budget, text, at)
		if e.err != nil {
			return
		}
		end := len(text)
		if ok {
			end = token.start
		}
		e.parted(text[at:end], first && at == 0)
		if !ok || e.err != nil {
			return
		}
		e.dst = append(e.dst, token.id)
		at = token.end
	}
}

func (e *encoder) parted(text []byte, first bool) {
	if len(text) == 0 {
		return
	}
	p := pieces{text, []span{{0, uint32(len(text))}}}
	for k := range e.t.steps {
		if p, e.err = e.t.steps[k].split(&e.budget, p, first, e.room+len(text)); e.err != nil {
			return
		}
	}
	e.room -= max(0, len(p.text)-len(text))
	for _, s := range p.spans {
		if e.spend(int(s.end - s.start)) {
			break
		}
		e.dst = e.t.bpe.append(e.dst, e.work, p.text, int(s.start), int(s.end))
	}
}

// pieces encodes a stretch text[lo:hi] of SentencePiece-style text, with a space before it if prefix is set. A space is written ▁. Pieces
// end where no merge can cross.
func (e *encoder) pieces(lo, hi, looked int, prefix bool) {
	c, bpe := e.t.cuts, &e.t.bpe
	word := e.work.text[:0]
	if prefix {
		word = append(word, c.space...)
		if lo == hi {
			e.dst = bpe.append(e.dst, e.work, word, 0, len(word))
		}
	}
	for i := lo; i < hi && e.err == nil; {
		if len(word) == 0 {
			if i = e.lone(i, hi); i == hi {
				break
			}
		}
		j, l := c.scan(e.text, i, hi)
		if l > hi {
			l = looked
		}
		if id := bpe.alone(e.text, i, j); id != noID && len(word) == 0 {
			e.dst = append(e.dst, id)
			i = j
			e.after(j, l)
			continue
		}
		if len(word) == 0 {
			e.dst = bpe.append(e.dst, e.work, e.text, i, j)
		} else {
			word = append(word, e.text[i:j]...)
			e.dst = bpe.append(e.dst, e.work, word, 0, len(word))
			word = word[:0]
		}
		if e.err != nil {
			break
		}
		i = j
		e.after(j, l)
	}
	e.work.text = word[:0]
}

// lone encodes characters of three bytes from text[i] on. It stops at the first character that is not
// a token, that may merge with the next one, or whose next one has not three bytes. It returns the
// place where it stopped. Most text of Chinese or Japanese is encoded here.
func (e *encoder) lone(i, hi int) int {
	c, single := e.t.cuts, e.t.single
	a, ok := threeBytes(e.text, i, hi)
	for ok {
		var b rune
		if b, ok = threeBytes(e.text, i+3, hi); !ok || c.pairs.has(uint32(a), uint32(b)) {
			return i
		}
		id := single[a]
		if id == noID {
			return i
		}
		e.dst = append(e.dst, id)
		i += 3
		a = b
		if e.rec != nil || i >= e.check {
			if e.after(i, i+3); e.err != nil {
				return i
			}
		}
	}
	return i
}
