// SPDX-License-Identifier: Apache-2.0

// Package tokenizer turns text into the token ids of an engine's model.
//
// [Load] reads a model's own files. It refuses files that it cannot follow exactly: ids are equal to
// those of the reference implementation, or there is an error. [Cache] keeps the ids of text prefixes,
// so the next turn of a conversation costs only its new text.
//
// A [Model] renders a request with its chat template and encodes the text. Models without files, and
// requests that cannot be exact, use text-block mode: each id stands for four bytes of a canonical
// text. Equal prompts have equal ids in that mode, but no engine knows these ids.
//
// The package is pure: no network, clock or log. It does not know blocks.
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
	bpe                    // what merges the symbols of a word

	before, after []uint32          // special tokens around a text
	special       map[string]uint32 // ids of control tokens, which no text becomes, and of added tokens, by their texts
	mistral       *chat.Mistral     // the files are Mistral's own; else nil
	byteLevel     bool
	chops         bool // long stretches are encoded in slices, as Kimi's class does
	tools         toolsCode

	// Slow is the reason why encoding uses the general path, with a regular expression engine or with
	// copies of the text. That path is up to ten times slower and reuses no prefixes. Empty: it does not
	// use that path.
	Slow string
	// Doubt is the reason why ids may differ from the engine's: something that the engine may know and the
	// files do not contain. Empty: no such reason is known.
	Doubt string

	identity uint64 // of this Tokenizer in a [Cache]

	free freeList[*work]
}

// identities numbers the tokenizers of this process.
//
//nolint:gochecknoglobals // a counter
var identities atomic.Uint64

// keepBytes is the limit of the scratch memory that is kept for the next text.
const keepBytes = 1 << 20

// Append appends the ids of text to dst, as the reference's encode returns them. If special is set, it
// puts the special tokens around the text. It allocates memory only to extend dst, for scratch space
// with the first texts, for unseen words of 16 bytes or more, and, if Slow is set, to rewrite the text or to
// run regular expressions.
//
// text should be valid UTF-8; invalid bytes are characters without a class. Append fails if ctx ends,
// if an expression takes too long, or if the rewritten text has more than four times the size of text
// and more than 4 MiB. The ids that it appended before the error are correct.
func (t *Tokenizer) Append(ctx context.Context, dst []uint32, text []byte, special bool) ([]uint32, error) {
	return t.encode(ctx, dst, text, formOf(special), nil)
}

// form is the treatment of special tokens in a text.
type form uint64

const (
	bare   form = iota // found in the text
	framed             // and put around it
	// marked: control tokens stand in the text as marks ([chat.AppendMark]). The text between two marks is
	// encoded by itself: the text on the other side of a mark has no effect on its ids. Text that reads
	// like a special token is encoded as text.
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
	id = t.vocab.id([]byte(content))
	return id, id != noID
}

// Size returns the number of ids, unused ones included: the highest id plus one.
func (t *Tokenizer) Size() int { return len(t.vocab.token) }

// Forget drops the scratch memory that is kept for later texts, with the ids of words from earlier
// texts.
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
		w.scratch = scratch{}
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

// Decode appends the text of ids to dst. A text may begin with the space that some models put before
// each text, and may end inside of a character. Unknown ids have no text.
func (t *Tokenizer) Decode(dst []byte, ids []uint32) []byte {
	for _, id := range ids {
		b := t.vocab.get(id)
		switch c := slices.Index(t.fallback[:], id); {
		case t.byteLevel:
			dst = append(dst, b...)
		case t.hasBytes && c >= 0:
			dst = append(dst, byte(c))
		default:
			dst = append(dst, strings.ReplaceAll(b, "▁", " ")...)
		}
	}
	return dst
}
