// SPDX-License-Identifier: Apache-2.0

// Package tokenizer turns text into the token ids of an engine's model.
//
// [Load] reads a model's own files and refuses what it cannot do exactly: ids
// are those of the reference implementation, or there are none. [Cache] keeps
// the ids of texts that begin alike, so that the next turn of a conversation
// costs its new text only.
//
// A [Model] puts a request through its chat template and encodes the text. For
// models without files, and requests that cannot be done exactly, there is
// text-block mode: four bytes of a canonical text count as one token. Equal
// prompts meet in it, but no engine knows its ids.
//
// The package is pure: no network, no clock, no log, and it knows nothing of
// blocks.
package tokenizer

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Tokenizer is the tokenizer of one model. It is immutable; any number of
// goroutines may use it at once.
type Tokenizer struct {
	raw    *finder // tokens that are found in the text as it is
	normed *finder // tokens that are found in the normal form

	normalizers []normalizer
	steps       []splitter
	scan        []scanner // the steps, if all of them are scanners
	nfc         bool      // the only normalizer is NFC
	cuts        *cuts     // SentencePiece-style text, cut where no merge can cross
	bpe         bpe

	before, after []uint32          // special tokens around a text
	control       map[string]uint32 // tokens that no text becomes, by their names
	byteLevel     bool
	strip         int // spaces that decoding takes from the start

	// Slow says why encoding goes through a general regular expression engine,
	// some ten times slower and without reuse of prefixes; empty if it does not.
	Slow string

	identity uint64 // of this Tokenizer in a [Cache]

	mu   sync.Mutex
	free []*work
}

// identities numbers the tokenizers of this process.
//
//nolint:gochecknoglobals // a counter
var identities atomic.Uint64

// checkEvery is how much text is encoded between two looks at the context.
const checkEvery = 64 << 10

// keepBytes bounds the scratch memory that is kept for the next text.
const keepBytes = 1 << 20

// Append appends the ids of text to dst: what the reference's encode gives for
// it, with the special tokens around it if special is set. It allocates nothing
// but what dst lacks, scratch memory for the first texts, and, for files marked
// Slow, what the regular expression engine needs.
//
// text should be valid UTF-8; other bytes are characters of no class. The error
// is the context's, or that of an expression that took too long; the ids
// appended until then are right as far as they go.
func (t *Tokenizer) Append(ctx context.Context, dst []uint32, text []byte, special bool) ([]uint32, error) {
	return t.encode(ctx, dst, text, formOf(special), nil)
}

// AppendMarked appends the ids of a text in which control tokens stand as marks
// ([chat.AppendMark]). Between two marks is a text of its own: nothing of what
// stands on the other side of a mark has an effect on its ids, and what reads like
// a special token in it is text.
func (t *Tokenizer) AppendMarked(ctx context.Context, dst []uint32, text []byte) ([]uint32, error) {
	return t.encode(ctx, dst, text, marked, nil)
}

// form says what is done with special tokens.
type form uint64

const (
	bare   form = iota // found in the text
	framed             // and put around it
	marked             // they stand in the text as marks, and are not looked for
)

func formOf(special bool) form {
	if special {
		return framed
	}
	return bare
}

// ID returns the id of the token whose text is exactly content: a control token,
// an added token, or one of the vocabulary.
func (t *Tokenizer) ID(content string) (id uint32, ok bool) {
	if id, ok = t.control[content]; ok {
		return id, true
	}
	for _, f := range []*finder{t.raw, t.normed} {
		if f == nil {
			continue
		}
		for _, a := range f.tokens {
			if string(a.content) == content {
				return a.id, true
			}
		}
	}
	id = t.bpe.vocab.id([]byte(content))
	return id, id != noID
}

// Size returns the number of ids, unused ones included: the highest id plus one.
func (t *Tokenizer) Size() int { return len(t.bpe.vocab.token) }

// Forget drops the scratch memory that is kept for later texts, and with it the
// ids of the words seen: what a fresh Tokenizer does not have either.
func (t *Tokenizer) Forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.free = nil
}

func (t *Tokenizer) take() *work {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := len(t.free); n > 0 {
		w := t.free[n-1]
		t.free = t.free[:n-1]
		return w
	}
	return &work{words: make([]wordSlot, wordSlots)}
}

func (t *Tokenizer) give(w *work) {
	if cap(w.ids)*4 > keepBytes {
		w.ids = nil
	}
	if cap(w.next)*16 > keepBytes {
		w.pairs, w.next, w.prev, w.heap = nil, nil, nil, nil
	}
	if cap(w.heap)*8 > keepBytes {
		w.heap = nil
	}
	if cap(w.text) > keepBytes {
		w.text = nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.free) < runtime.GOMAXPROCS(0) {
		t.free = append(t.free, w)
	}
}

// resume is a place in a text from which encoding can go on without what stands
// before it.
type resume struct {
	at    int  // in the text
	ids   int  // the number of ids up to there
	start bool // a stretch between added tokens begins there
}

// recorder takes the resume points of a text, one for each step of step bytes:
// the last place at or before the end of the step such that nothing up to the
// place depends on what stands behind that end.
type recorder struct {
	step int
	next int    // the end of the step that is due
	last resume // the last place; what it depends on ends at or before next
	mark int    // where what any decision so far depends on ends
	add  func(r resume)
}

// note is told of where the text ends on which the decisions so far depend.
func (r *recorder) note(mark int) {
	for r.mark = max(r.mark, mark); r.mark > r.next; r.next += r.step {
		r.add(r.last)
	}
}

// place is told of each place between two decisions, in order.
func (r *recorder) place(p resume, mark int) {
	r.note(max(mark, p.at))
	r.last = p
}

// finish records the steps up to the end of the text.
func (r *recorder) finish(length int) {
	for ; r.next <= length; r.next += r.step {
		r.add(r.last)
	}
}

// encoder encodes one text.
type encoder struct {
	t     *Tokenizer
	w     *work
	ctx   context.Context //nolint:containedctx // an encoder lives for one call
	dst   []uint32
	base  int // the ids in dst before this text
	text  []byte
	marks bool // the text has marks
	rec   *recorder
	check int // look at the context behind this place
	err   error
}

func (t *Tokenizer) encode(ctx context.Context, dst []uint32, text []byte, f form, rec *recorder) ([]uint32, error) {
	e := encoder{t: t, w: t.take(), dst: dst, base: len(dst), text: text, marks: f == marked, rec: rec, ctx: ctx, check: checkEvery}
	defer t.give(e.w)
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
		rec.finish(len(text))
	}
	if f == framed {
		e.dst = append(e.dst, t.after...)
	}
	return e.dst, nil
}

// run encodes the text from a resume point: stretch, added token, stretch, …
func (e *encoder) run(from resume) {
	if e.marks {
		e.runMarked(from)
		return
	}
	at, start := from.at, from.start
	for at < len(e.text) && e.err == nil {
		token, ok := e.t.raw.next(e.text, at)
		if !ok {
			e.stretch(at, len(e.text), len(e.text)+1, start)
			return
		}
		// What says that the stretch ends here: the token, and why no longer one.
		looked := min(token.end+e.t.raw.reach, len(e.text)+1)
		e.stretch(at, token.start, looked, start)
		e.dst = append(e.dst, token.id)
		at, start = token.end, true
		e.place(at, looked, true)
	}
}

// runMarked encodes the text from a resume point: stretch, mark, stretch, …
func (e *encoder) runMarked(from resume) {
	at, start := from.at, from.start
	for at < len(e.text) && e.err == nil {
		k, end, id := chat.NextMark(e.text, at)
		if k < 0 {
			e.stretch(at, len(e.text), len(e.text)+1, start)
			return
		}
		e.stretch(at, k, k+1, start)
		if id != chat.NoID {
			e.dst = append(e.dst, id)
		}
		at, start = end, true
		e.place(at, at, true)
	}
}

// place tells the recorder of a place between two decisions.
func (e *encoder) place(at, looked int, start bool) {
	if e.rec == nil {
		return
	}
	// A search for an added token begins at each place, and looks ahead.
	if e.t.raw != nil && !e.marks {
		looked = max(looked, at+e.t.raw.reach)
	}
	if e.t.normed != nil && !e.marks {
		looked = max(looked, at+e.t.normed.reach)
	}
	e.rec.place(resume{at, len(e.dst) - e.base, start}, min(looked, len(e.text)+1))
}

// stretch encodes text[lo:hi], which has no added token of the first kind. start
// says whether a stretch begins at lo, and looked what its end depends on.
func (e *encoder) stretch(lo, hi, looked int, start bool) {
	if lo >= hi {
		return
	}
	t := e.t
	switch {
	case t.cuts != nil:
		e.characters(lo, hi, looked, start)
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

// words encodes a stretch that needs no rewriting and is parted by scanners.
func (e *encoder) words(lo, hi, looked int) {
	for lo < hi && e.err == nil {
		token, ok := e.normed().next(e.text[:hi], lo)
		if !ok {
			e.step(0, lo, hi, looked)
			return
		}
		end := token.end + e.t.normed.reach
		if end > hi {
			end = looked
		}
		e.step(0, lo, token.start, end)
		e.dst = append(e.dst, token.id)
		lo = token.end
		e.place(lo, end, true)
	}
}

// normed finds the added tokens of the normal form.
func (e *encoder) normed() *finder {
	if e.marks {
		return nil
	}
	return e.t.normed
}

// step parts text[lo:hi] with the scanner at depth and the ones behind it.
func (e *encoder) step(depth, lo, hi, looked int) {
	scan, last := e.t.scan[depth], depth == len(e.t.scan)-1
	for i := lo; i < hi && e.err == nil; {
		j, l := scan(e.text, i, hi)
		if l > hi {
			l = looked
		}
		if last {
			e.dst = e.t.bpe.append(e.dst, e.w, e.text, i, j)
			e.after(j, l)
		} else {
			e.step(depth+1, i, j, l)
		}
		i = j
	}
}

// after is called behind each piece.
func (e *encoder) after(at, looked int) {
	switch {
	case e.rec == nil:
	case !e.marks && (e.t.raw.loose() || e.t.normed.loose()) || e.t.nfc && at < len(e.text) && !closed(e.text[at:]):
		e.rec.note(looked)
	default:
		e.place(at, looked, false)
	}
	if at >= e.check {
		e.check = at + checkEvery
		e.err = e.ctx.Err()
	}
}

// general encodes a stretch that must be rewritten, or parted by expressions.
func (e *encoder) general(text []byte, first bool) {
	if e.err = e.ctx.Err(); e.err != nil {
		return
	}
	for k := range e.t.normalizers {
		if text, e.err = e.t.normalizers[k].append(nil, text); e.err != nil {
			return
		}
	}
	for at := 0; at < len(text) && e.err == nil; first = false {
		token, ok := e.normed().next(text, at)
		end := len(text)
		if ok {
			end = token.start
		}
		e.parted(text[at:end], first && at == 0)
		if !ok {
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
		if p, e.err = e.t.steps[k].split(p, first); e.err != nil {
			return
		}
	}
	for _, s := range p.spans {
		e.dst = e.t.bpe.append(e.dst, e.w, p.text, int(s.start), int(s.end))
	}
}

// characters encodes a stretch of SentencePiece-style text: a space is written
// ▁, one may stand before the stretch, and pieces end where no merge can cross.
func (e *encoder) characters(lo, hi, looked int, start bool) {
	c := e.t.cuts
	word := e.w.text[:0]
	if start && c.prefixed(e.text[lo:hi], lo == 0 || e.marks) {
		word = append(word, c.space...)
	}
	for i := lo; i < hi && e.err == nil; {
		j, l := c.scan(e.text, i, hi)
		if l > hi {
			l = looked
		}
		if id := e.t.bpe.alone(e.text, i, j); id != noID && len(word) == 0 {
			e.dst = append(e.dst, id)
			i = j
			e.after(j, l)
			continue
		}
		for _, b := range e.text[i:j] {
			if b == ' ' {
				word = append(word, c.space...)
			} else {
				word = append(word, b)
			}
		}
		e.dst = e.t.bpe.append(e.dst, e.w, word, 0, len(word))
		word = word[:0]
		i = j
		e.after(j, l)
	}
	e.w.text = word[:0]
}

// cuts says where SentencePiece-style text may be cut: between two characters
// that stand side by side in no token, since a merge across the cut would make
// such a token.
type cuts struct {
	space []byte // what a space is written as
	rune  rune   // the same
	never bool   // no stretch is prefixed
	first bool   // only the one at the text's start
	force bool   // also one that begins with a space
	split bool   // every space begins a piece
	pairs pairSet
	near  [128][2]uint64 // those of two ASCII characters
}

func (c *cuts) prefixed(stretch []byte, atStart bool) bool {
	if c.never || c.first && !atStart {
		return false
	}
	if c.force {
		return true
	}
	r, _ := utf8.DecodeRune(stretch)
	return c.written(r) != c.rune
}

// written returns the character that stands for r.
func (c *cuts) written(r rune) rune {
	if r == ' ' {
		return c.rune
	}
	return r
}

func (c *cuts) keep(a, b rune) {
	if a < 128 && b < 128 {
		c.near[a][b>>6] |= 1 << (b & 63)
		return
	}
	c.pairs.add(uint32(a), uint32(b))
}

// together reports whether some token has a and b side by side.
func (c *cuts) together(a, b rune) bool {
	if a < 128 && b < 128 {
		return c.near[a][b>>6]>>(b&63)&1 != 0
	}
	return c.pairs.has(uint32(a), uint32(b))
}

// pieceFrom is the length in bytes from which a piece ends at any place where it
// may. Shorter ones end before a space, or between two characters beyond ASCII,
// of which words are short: each piece costs a lookup.
const pieceFrom = 10

// scan is a scanner.
func (c *cuts) scan(s []byte, i, end int) (j, looked int) {
	r, n := decode(s, i, end)
	a := c.written(r)
	for j = i + n; j < end; j += n {
		if b := s[j]; b < utf8.RuneSelf {
			r, n = rune(b), 1
		} else {
			r, n = decode(s, j, end)
		}
		b := c.written(r)
		if b == c.rune && c.split || (b == c.rune || min(a, b) >= utf8.RuneSelf || j-i >= pieceFrom) && !c.together(a, b) {
			return j, j + n
		}
		a = b
	}
	return j, end + 1
}

// FirstDiff returns the index of the first id in which a and b differ: the
// length of the shorter if it is the beginning of the other, -1 if they are
// equal.
func FirstDiff(a, b []uint32) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	if len(a) == len(b) {
		return -1
	}
	return n
}
