// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"fmt"
	"math/bits"
	"slices"
	"unicode/utf8"
)

// shortWord is the number of symbols up to which a scan for the next merge beats
// a heap.
const shortWord = 64

// bpe merges the symbols of a word until no merge is left. Immutable once built.
type bpe struct {
	vocab  *vocab
	merges merges
	whole  bool     // a word that is a token is that token, whatever the merges say
	single []uint32 // by code point below 0x10000: what the character alone becomes, noID if more than one token

	// Words of bytes: a symbol a byte, and what two bytes become.
	byteID   [256]uint32
	bytePair []uint64 // by first byte·256 + second; nil for words of characters
	cuts     *wordCuts
	partial  bool // some byte is no token: it vanishes or is unknown, and what stands beside it may merge

	// Words of characters.
	space    []byte      // what a space in a word is written as, nil if as itself
	fallback [256]uint32 // <0xNN>
	hasBytes bool        // fallback is complete
	unk      uint32      // noID: unknown characters vanish
	fuseUnk  bool
}

// cutFrom is the length in bytes from which a word is cut before it is merged, and longASCII the most of
// those of ASCII.
const (
	cutFrom   = 12
	longASCII = 31
)

// append appends the ids of the word s[i:j] to dst. If w.err reports that the time is over, it appends
// only the first ids of a long word.
func (b *bpe) append(dst []uint32, w *work, s []byte, i, j int) []uint32 {
	n := j - i
	if b.cuts == nil || n < cutFrom || n <= longASCII && s[i] < utf8.RuneSelf && s[j-1] < utf8.RuneSelf {
		return b.seen(dst, w, s, i, j, b.whole)
	}
	if b.partial && slices.ContainsFunc(s[i:j], func(c byte) bool { return b.byteID[c] == noID }) {
		return b.seen(dst, w, s, i, j, b.whole)
	}
	if b.whole && n <= b.vocab.most && b.cuts.long.hasKey(endsOf(s, i, j)) {
		if id := b.vocab.id(s[i:j]); id != noID {
			return append(dst, id)
		}
	}
	return b.parts(dst, w, s, i, j)
}

// parts is append for a word that is cut.
func (b *bpe) parts(dst []uint32, w *work, s []byte, i, j int) []uint32 {
	for i < j {
		from := i
		n, cuts := b.cuts.threes(s, i, j)
		// The parts of the run of characters of three bytes, but the last one.
		for cuts != 0 {
			k := from + 3*bits.TrailingZeros64(cuts)
			cuts &= cuts - 1
			dst = b.seen(dst, w, s, i, k, false)
			i = k
		}
		switch {
		case n == 0:
			k := b.cuts.next(s, i, j)
			dst = b.seen(dst, w, s, i, k, false)
			i = k
		case from+3*n == j || n < maxThrees || i == from:
			k := b.cuts.next(s, from+3*(n-1), j)
			dst = b.seen(dst, w, s, i, k, false)
			i = k
		}
		if w.spend(i - from) {
			break
		}
	}
	return dst
}

// alone returns the token of s[i:j] if it is a single character of three bytes and a single token,
// else noID.
func (b *bpe) alone(s []byte, i, j int) uint32 {
	if j-i != 3 || b.single == nil || s[i] < 0xe1 {
		return noID
	}
	r, n := decode(s, i, j)
	if n != 3 {
		return noID
	}
	return b.single[r]
}

// prepareSingle fills the table of the tokens of single characters.
func (b *bpe) prepareSingle() {
	b.single = make([]uint32, 1<<16)
	w := newWork()
	var ids []uint32
	var char []byte
	onlyTokens := b.bytePair != nil && !b.partial // merges of all bytes of a character can only make its own token
	for r := range b.single {
		b.single[r] = noID
		if r < 0x800 || !utf8.ValidRune(rune(r)) {
			continue
		}
		if char = utf8.AppendRune(char[:0], rune(r)); onlyTokens && b.vocab.id(char) == noID {
			continue
		}
		if ids = b.merge(ids[:0], w, char, false); len(ids) == 1 {
			b.single[r] = ids[0]
		}
	}
}

// seen appends the ids of s[i:j], a word or, if whole is not set, a part of one. It looks the word up
// among those seen before.
func (b *bpe) seen(dst []uint32, w *work, s []byte, i, j int, whole bool) []uint32 {
	if j-i <= mostShortKey && i+16 <= len(s) {
		return b.seenShort(dst, w, s, i, j, whole)
	}
	return b.seenLong(dst, w, s[i:j], whole)
}

// seenLong is seen for a word that is not short.
func (b *bpe) seenLong(dst []uint32, w *work, word []byte, whole bool) []uint32 {
	known := w.long[wholeFlag(whole)>>63]
	if ids, ok := known[string(word)]; ok {
		return append(dst, ids...)
	}
	at := len(dst)
	if dst = b.merge(dst, w, word, whole); w.err == nil && len(word) <= longKey {
		if len(known) == mostLong {
			clear(known)
		}
		known[string(word)] = slices.Clone(dst[at:])
	}
	return dst
}

// seenShort is seen for at most mostShortKey bytes, which end 16 bytes behind the first or later. A word
// of more than mostShortIDs ids is among the long ones from the second time on.
func (b *bpe) seenShort(dst []uint32, w *work, s []byte, i, j int, whole bool) []uint32 {
	key, at := shortKeyOf(s[i:], j-i, wholeFlag(whole)), len(dst)
	slot := w.shortWord(key)
	switch {
	case slot.key != key:
	case slot.count() > mostShortIDs:
		return b.seenLong(dst, w, s[i:j], whole)
	default:
		return slot.appendTo(dst)
	}
	if id := b.alone(s, i, j); id != noID && !whole {
		dst = append(dst, id)
	} else {
		dst = b.merge(dst, w, s[i:j], whole)
	}
	if got := dst[at:]; len(got) > 0 {
		w.keepShort(newShortSlot(key, got))
	}
	return dst
}

// wholeFlag returns what tells the key of a word from that of an equal part of one.
func wholeFlag(whole bool) uint64 {
	if whole {
		return 1 << 63
	}
	return 0
}

// merge appends the ids of word without looking it up among the words seen.
func (b *bpe) merge(dst []uint32, w *work, word []byte, whole bool) []uint32 {
	if b.space != nil {
		word = b.written(w, word)
	}
	if whole && len(word) <= b.vocab.most {
		if id := b.vocab.id(word); id != noID {
			return append(dst, id)
		}
	}
	if len(word) > shortWord && w.spend(len(word)) {
		return dst
	}
	ids := b.symbols(w, word)
	w.ids = ids
	if len(word) > shortWord && w.err != nil {
		return dst
	}
	switch {
	case len(ids) < 2:
		return append(dst, ids...)
	case len(ids) <= shortWord:
		return b.mergeShort(dst, ids, word)
	}
	return b.mergeLong(dst, w, ids)
}

// written returns a word with its spaces as the model writes them.
func (b *bpe) written(w *work, word []byte) []byte {
	k := bytes.IndexByte(word, ' ')
	if k < 0 {
		return word
	}
	out := w.spaced[:0]
	for ; k >= 0; k = bytes.IndexByte(word, ' ') {
		out = append(append(out, word[:k]...), b.space...)
		word = word[k+1:]
	}
	w.spaced = append(out, word...)
	return w.spaced
}

// symbols appends what the word consists of before any merge.
func (b *bpe) symbols(w *work, word []byte) []uint32 {
	ids := w.ids[:0]
	unknown := false // the symbol before is an unknown character
	if b.bytePair != nil {
		ids = slices.Grow(ids, len(word))
		for _, c := range word {
			if id := b.byteID[c]; id != noID {
				ids, unknown = append(ids, id), false
			} else if b.unk != noID && !(unknown && b.fuseUnk) {
				ids, unknown = append(ids, b.unk), true
			}
		}
		return ids
	}
	for len(word) > 0 {
		_, n := utf8.DecodeRune(word)
		char := word[:n]
		if word = word[n:]; len(word) > shortWord && w.spend(8) {
			break
		}
		if id := b.vocab.id(char); id != noID {
			ids, unknown = append(ids, id), false
			continue
		}
		if b.hasBytes {
			for _, c := range char {
				ids = append(ids, b.fallback[c])
			}
			continue
		}
		if b.unk != noID && !(unknown && b.fuseUnk) {
			ids = append(ids, b.unk)
		}
		unknown = true
	}
	return ids
}

// mergeShort merges by scanning for the lowest rank, leftmost first. A symbol stays where it begins, and
// a bit of live says that it is there.
func (b *bpe) mergeShort(dst, ids []uint32, word []byte) []uint32 {
	var all [shortWord]uint64
	pairs, live := all[:len(ids)], ^uint64(0)>>(shortWord-len(ids))
	for i := range pairs[1:] {
		if b.bytePair != nil && len(ids) == len(word) {
			pairs[i] = b.bytePair[int(word[i])<<8|int(word[i+1])]
		} else {
			pairs[i] = b.merges.get(ids[i], ids[i+1])
		}
	}
	pairs[len(ids)-1] = noMerge
	for {
		// By the rank alone: of equal ones, which SentencePiece has, the leftmost. The processor predicts no
		// branch on a rank, and min has none.
		best := noMerge
		for i, p := range pairs {
			best = min(best, p>>32<<32|uint64(i))
		}
		if best >= noMerge>>32<<32 {
			break
		}
		at := int(uint32(best))
		right := live & (^uint64(1) << at) // the symbols behind it
		gone := bits.TrailingZeros64(right)
		ids[at], pairs[gone] = uint32(pairs[at]), noMerge
		live &^= 1 << gone
		if pairs[at] = noMerge; right&(right-1) != 0 {
			pairs[at] = b.merges.get(ids[at], ids[bits.TrailingZeros64(right&(right-1))])
		}
		if left := live & (1<<at - 1); left != 0 {
			k := bits.Len64(left) - 1
			pairs[k] = b.merges.get(ids[k], ids[at])
		}
	}
	for ; live != 0; live &= live - 1 {
		dst = append(dst, ids[bits.TrailingZeros64(live)])
	}
	return dst
}

// mergeLong merges with a heap of (rank, position) over a linked list of symbols, in O(n log n). It
// appends nothing if the time is over before its end. An entry of the heap is valid only while the
// pair at its position has that rank.
func (b *bpe) mergeLong(dst []uint32, w *work, ids []uint32) []uint32 {
	n := len(ids)
	w.grow(n)
	pairs, next, prev, heap := w.pairs[:n], w.next[:n], w.prev[:n], w.heap[:0]
	renew := func(at int32) {
		pairs[at] = noMerge
		if nx := next[at]; int(nx) < n {
			if pairs[at] = b.merges.get(ids[at], ids[nx]); pairs[at] != noMerge {
				heap = push(heap, pairs[at]>>32<<32|uint64(at))
			}
		}
	}
	for i := range int32(n) {
		if i&4095 == 4095 && w.spend(4096) {
			return dst
		}
		next[i], prev[i] = i+1, i-1
		renew(i)
	}
	for len(heap) > 0 {
		// The step has cache misses: it costs as much as 16 bytes of text.
		if w.spend(16) {
			return dst
		}
		top := heap[0]
		last := len(heap) - 1
		heap[0] = heap[last]
		heap = heap[:last]
		siftDown(heap)
		at := int32(uint32(top))
		if pairs[at] == noMerge || pairs[at]>>32 != top>>32 {
			continue
		}
		gone := next[at]
		ids[at] = uint32(pairs[at])
		pairs[gone] = noMerge
		next[at] = next[gone]
		if int(next[at]) < n {
			prev[next[at]] = at
		}
		renew(at)
		if prev[at] >= 0 {
			renew(prev[at])
		}
	}
	w.heap = heap[:0]
	for i := int32(0); int(i) < n; i = next[i] {
		dst = append(dst, ids[i])
	}
	return dst
}

func push(heap []uint64, v uint64) []uint64 {
	heap = append(heap, v)
	for i := len(heap) - 1; i > 0; {
		up := (i - 1) / 2
		if heap[up] <= heap[i] {
			break
		}
		heap[up], heap[i] = heap[i], heap[up]
		i = up
	}
	return heap
}

// siftDown moves the first element of a heap to its place.
func siftDown(heap []uint64) {
	for i, down := 0, 1; down < len(heap); down = 2*i + 1 {
		if down+1 < len(heap) && heap[down+1] < heap[down] {
			down++
		}
		if heap[i] <= heap[down] {
			return
		}
		heap[i], heap[down] = heap[down], heap[i]
		i = down
	}
}

// prepareBytes makes the tables for words of bytes.
func (b *bpe) prepareBytes() {
	for c := range 256 {
		b.byteID[c] = b.vocab.id([]byte{byte(c)})
		b.partial = b.partial || b.byteID[c] == noID
	}
	b.bytePair = make([]uint64, 1<<16)
	for k := range b.bytePair {
		b.bytePair[k] = noMerge
		if l, r := b.byteID[k>>8], b.byteID[k&0xff]; l != noID && r != noID {
			b.bytePair[k] = b.merges.get(l, r)
		}
	}
	b.cuts = newWordCuts(b.vocab)
	b.prepareSingle()
}

// prepareFallback finds the tokens that stand for single bytes.
func (b *bpe) prepareFallback() error {
	n := 0
	for c := range 256 {
		if b.fallback[c] = b.vocab.id(fmt.Appendf(nil, "<0x%02X>", c)); b.fallback[c] != noID {
			n++
		}
	}
	if n != 0 && n != 256 {
		return unsupported("model: byte_fallback with %d of 256 byte tokens", n)
	}
	b.hasBytes = n == 256
	return nil
}
