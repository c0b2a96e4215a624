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
	"slices"
	"strings"
	"sync/atomic"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Tokenizer is the tokenizer of one model. It is immutable; any number of
// goroutines may use it at once.
type Tokenizer struct {
	raw    *finder // tokens that are found in the text as it is
	normed *finder // tokens that are found in the normal form

	normalizers []normalizer
	steps       []splitter
	scan        []splitter // the steps, if all of them are scanners that keep their pieces apart
	resumes     int        // the scanner behind whose pieces encoding may resume
	nfc         bool       // the only normalizer is NFC
	cuts        *cuts      // SentencePiece-style text, cut where no merge can cross
	bpe         bpe

	before, after []uint32          // special tokens around a text
	special       map[string]uint32 // ids of control tokens, which no text becomes, and of added tokens, by their texts
	user          *finder           // tokens that part SentencePiece-style text, of which none begins anew
	mistral       *chat.Mistral     // the files are Mistral's own; else nil
	byteLevel     bool
	chops         bool // long stretches are encoded in slices, as Kimi's class does
	toolsInCode   bool // chats with tools are rendered by code of the model's own

	// Slow says why encoding goes the general way, with a regular expression engine
	// or copies of the text: up to ten times slower, and without reuse of prefixes.
	// Empty if it does not.
	Slow string
	// Doubt says what the files leave open that the engine may know, so that ids may
	// not be the engine's. Empty if nothing is known of that kind.
	Doubt string

	identity uint64 // of this Tokenizer in a [Cache]

	free freeList[*work]
}

// identities numbers the tokenizers of this process.
//
//nolint:gochecknoglobals // a counter
var identities atomic.Uint64

// keepBytes bounds the scratch memory that is kept for the next text.
const keepBytes = 1 << 20

// Append appends the ids of text to dst: what the reference's encode gives for
// it, with the special tokens around it if special is set. It allocates nothing
// but what dst lacks, scratch memory for the first texts, and, for files marked
// Slow, what rewriting the text or the regular expression engine needs.
//
// text should be valid UTF-8; other bytes are characters of no class. The error
// is the context's, or that of an expression that took too long, or of a file whose
// rewriting makes more than four times the text of it, and 4 MiB; the ids
// appended until then are right as far as they go.
func (t *Tokenizer) Append(ctx context.Context, dst []uint32, text []byte, special bool) ([]uint32, error) {
	return t.encode(ctx, dst, text, formOf(special), nil)
}

// form says what is done with special tokens.
type form uint64

const (
	bare   form = iota // found in the text
	framed             // and put around it
	// marked: control tokens stand in the text as marks ([chat.AppendMark]). Between two marks
	// is a text of its own: nothing of what stands on the other side of a mark has an effect on
	// its ids, and what reads like a special token in it is text.
	marked
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
	if id, ok = t.special[content]; ok {
		return id, true
	}
	id = t.bpe.vocab.id([]byte(content))
	return id, id != noID
}

// Size returns the number of ids, unused ones included: the highest id plus one.
func (t *Tokenizer) Size() int { return len(t.bpe.vocab.token) }

// Forget drops the scratch memory that is kept for later texts, and with it the
// ids of the words seen: what a fresh Tokenizer does not have either.
func (t *Tokenizer) Forget() {
	for ok := true; ok; {
		_, ok = t.free.take()
	}
}

func (t *Tokenizer) take() *work {
	if w, ok := t.free.take(); ok {
		return w
	}
	return newWork()
}

func (t *Tokenizer) give(w *work) {
	w.budget = budget{}
	if 4*cap(w.ids)+16*cap(w.next)+8*cap(w.heap)+cap(w.text)+cap(w.spaced) > keepBytes {
		w.ids, w.pairs, w.next, w.prev, w.heap, w.text, w.spaced = nil, nil, nil, nil, nil, nil, nil
	}
	t.free.give(w)
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

// Decode appends the text of ids to dst, with the space that some files put before a
// text. It may end inside of a character, if the ids do. Unknown ids have no text.
func (t *Tokenizer) Decode(dst []byte, ids []uint32) []byte {
	for _, id := range ids {
		b := t.bpe.vocab.get(id)
		switch c := slices.Index(t.bpe.fallback[:], id); {
		case t.byteLevel:
			dst = append(dst, b...)
		case t.bpe.hasBytes && c >= 0:
			dst = append(dst, byte(c))
		default:
			dst = append(dst, strings.ReplaceAll(b, "▁", " ")...)
		}
	}
	return dst
}
