// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"slices"
	"unicode/utf8"
)

// none stands for no token id and no merge.
const (
	noID    = ^uint32(0)
	noMerge = ^uint64(0)
)

// shortWord is the number of symbols up to which a scan for the next merge beats
// a heap.
const shortWord = 32

// vocab holds the tokens' bytes and finds ids by them. Immutable once built.
type vocab struct {
	token []string          // by id; empty for an unused id
	ids   map[string]uint32 // of the tokens that words may become
	most  int               // length of the longest of these in bytes
}

func newVocab(count int) *vocab { return &vocab{ids: make(map[string]uint32, count)} }

// get returns the bytes of a token, none for an unknown id.
func (v *vocab) get(id uint32) string {
	if int(id) >= len(v.token) {
		return ""
	}
	return v.token[id]
}

// put stores text as the bytes of id; find says whether lookups by the bytes
// shall see it.
func (v *vocab) put(text string, id uint32, find bool) {
	for int(id) >= len(v.token) {
		v.token = append(v.token, "")
	}
	v.token[id] = text
	if find {
		v.ids[text] = id
		v.most = max(v.most, len(text))
	}
}

// id returns the id of the token text, noID if there is none.
func (v *vocab) id(text []byte) uint32 {
	if id, ok := v.ids[string(text)]; ok {
		return id
	}
	return noID
}

// merges says what two neighbouring symbols become: the rank of the merge in the
// upper half, the id of the new symbol in the lower one. Open addressing, key
// and value side by side so that a lookup costs one cache line.
type merges struct {
	slots []mergeSlot
	shift uint
}

type mergeSlot struct{ key, value uint64 } // key is pair+1, 0 if the slot is free

// newMerges returns the table of all: of two merges of one pair the later counts.
func newMerges(all []mergeSlot) merges {
	n := max(4, bits.Len(uint(len(all)+len(all)/2)))
	m := merges{slots: make([]mergeSlot, 1<<n), shift: uint(64 - n)}
	for _, x := range all {
		i := m.slot(x.key - 1)
		for m.slots[i].key != 0 && m.slots[i].key != x.key {
			i = (i + 1) & (len(m.slots) - 1)
		}
		m.slots[i] = x
	}
	return m
}

// mergeOf returns the merge of two symbols to the symbol id.
func mergeOf(left, right uint32, rank uint64, id uint32) mergeSlot {
	return mergeSlot{pairOf(left, right) + 1, rank<<32 | uint64(id)}
}

// appendMerges appends a merge of each way to cut the token id into two tokens.
func (v *vocab) appendMerges(all []mergeSlot, rank uint64, id uint32) []mergeSlot {
	token := v.get(id)
	for k := 1; k < len(token); k++ {
		left, ok := v.ids[token[:k]]
		right, ok2 := v.ids[token[k:]]
		if ok && ok2 {
			all = append(all, mergeOf(left, right, rank, id))
		}
	}
	return all
}

func pairOf(left, right uint32) uint64 { return uint64(left)<<32 | uint64(right) }

func (m *merges) slot(pair uint64) int { return int(pair * 0x9e3779b97f4a7c15 >> m.shift) }

func (m *merges) get(left, right uint32) uint64 {
	pair := pairOf(left, right)
	for i := m.slot(pair); ; i = (i + 1) & (len(m.slots) - 1) {
		switch m.slots[i].key {
		case pair + 1:
			return m.slots[i].value
		case 0:
			return noMerge
		}
	}
}

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

// work is the memory that encoding one text needs, and the words it has seen.
type work struct {
	budget

	ids   []uint32
	pairs []uint64
	next  []int32
	prev  []int32
	heap  []uint64
	words []wordSlot
	short []shortSlot
	text  []byte
	// How many slots of the two were taken.
	wordCount, shortCount int
	// spaced is a word with its spaces written.
	spaced []byte
}

// shortSlot keeps the ids of a word of at most seven bytes that has one or two. key
// is the word's bytes, with its length in the last one.
type shortSlot struct {
	key uint64
	ids [2]uint32 // the second is noID if there is one
}

// The words of a text are kept in tables that grow fourfold each time that they are a
// quarter full, up to 2 MiB, and 256 KiB for short ones: a text of some kilobytes touches
// no more memory than the processor's cache has. A word has two places, its own and the
// one beside it; a third word for them takes its own.
const (
	fewWords  = 1 << 11
	mostWords = 1 << 15
	fewShort  = 1 << 10
	mostShort = 1 << 14
)

func newWork() *work {
	return &work{words: make([]wordSlot, fewWords), short: make([]shortSlot, fewShort)}
}

// word returns the slot that has the word, or the one for it.
func (w *work) word(key *[4]uint64) *wordSlot {
	h := (key[0] ^ bits.RotateLeft64(key[1], 23)) * 0x9e3779b97f4a7c15
	h = (h ^ key[2] ^ bits.RotateLeft64(key[3], 17)) * 0xbf58476d1ce4e5b9
	i := (h ^ h>>32) & uint64(len(w.words)-1)
	slot := &w.words[i]
	if slot.key == *key || slot.key[3] == 0 {
		return slot
	}
	if beside := &w.words[i^1]; beside.key == *key || beside.key[3] == 0 {
		return beside
	}
	return slot
}

// keep remembers the ids of a word.
func (w *work) keep(key *[4]uint64, ids []uint32) {
	slot := w.word(key)
	if slot.key[3] == 0 {
		if w.wordCount++; 4*w.wordCount > len(w.words) && len(w.words) < mostWords {
			old := w.words
			w.words = make([]wordSlot, 4*len(old))
			for k := range old {
				if old[k].key[3] != 0 {
					*w.word(&old[k].key) = old[k]
				}
			}
			slot = w.word(key)
		}
	}
	slot.key = *key
	slot.n = uint32(copy(slot.ids[:], ids))
}

// shortWord is word for a short one.
func (w *work) shortWord(key uint64) *shortSlot {
	i := key * 0x9e3779b97f4a7c15 >> 32 & uint64(len(w.short)-1)
	slot := &w.short[i]
	if slot.key == key || slot.key == 0 {
		return slot
	}
	if beside := &w.short[i^1]; beside.key == key || beside.key == 0 {
		return beside
	}
	return slot
}

// keepShort is keep for a short word, of one or two ids.
func (w *work) keepShort(s shortSlot) {
	slot := w.shortWord(s.key)
	if slot.key == 0 {
		if w.shortCount++; 4*w.shortCount > len(w.short) && len(w.short) < mostShort {
			old := w.short
			w.short = make([]shortSlot, 4*len(old))
			for _, x := range old {
				if x.key != 0 {
					*w.shortWord(x.key) = x
				}
			}
			slot = w.shortWord(s.key)
		}
	}
	*slot = s
}

// wordSlot keeps the ids of one word: 64 bytes, one cache line. key is the word's
// bytes, with its length in the last one; a word of no length is no word.
type wordSlot struct {
	key [4]uint64
	ids [7]uint32
	n   uint32
}

// cutFrom is the length in bytes from which a word is cut before it is merged.
const cutFrom = 12

// append appends the ids of the word s[i:j] to dst; of a long one only some, all of
// them right, if w.err says that time is up.
func (b *bpe) append(dst []uint32, w *work, s []byte, i, j int) []uint32 {
	n := j - i
	if n == 1 && b.bytePair != nil {
		if id := b.byteID[s[i]]; id != noID {
			return append(dst, id)
		}
	}
	if b.cuts == nil || n < cutFrom || n <= longestKey && s[i] < utf8.RuneSelf && s[j-1] < utf8.RuneSelf {
		return b.seen(dst, w, s, i, j, b.whole)
	}
	if b.partial && slices.ContainsFunc(s[i:j], func(c byte) bool { return b.byteID[c] == noID }) {
		return b.seen(dst, w, s, i, j, b.whole)
	}
	if b.whole && n <= b.vocab.most && b.cuts.isLong(s, i, j) {
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
			dst = b.part(dst, w, s, i, k)
			i = k
		}
		switch {
		case n == 0:
			k := b.cuts.next(s, i, j)
			dst = b.part(dst, w, s, i, k)
			i = k
		case from+3*n == j || n < maxThrees || i == from:
			k := b.cuts.next(s, from+3*(n-1), j)
			dst = b.part(dst, w, s, i, k)
			i = k
		}
		if w.spend(i - from) {
			break
		}
	}
	return dst
}

// part appends the ids of s[i:j], which is a part of a word. What is known of short
// ones is appended without a branch that depends on the number of ids: the text
// decides that, and no processor foresees it.
func (b *bpe) part(dst []uint32, w *work, s []byte, i, j int) []uint32 {
	if j-i > 7 || i+8 > len(s) {
		return b.seen(dst, w, s, i, j, false)
	}
	n := uint64(j-i) & 7
	key := binary.LittleEndian.Uint64(s[i:i+8])&(1<<(8*n)-1) | n<<56
	slot := w.shortWord(key)
	if slot.key == key {
		dst = append(dst, slot.ids[0], slot.ids[1])
		less := 0
		if slot.ids[1] == noID {
			less = 1
		}
		return dst[:len(dst)-less]
	}
	if id := b.alone(s, i, j); id != noID {
		w.keepShort(shortSlot{key, [2]uint32{id, noID}})
		return append(dst, id)
	}
	return b.seenShort(dst, w, s, i, j, false)
}

// alone returns the token of s[i:j] if that is one character of three bytes, as
// most are that stand alone, and a single token; else noID.
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

// prepareSingle fills in what characters alone become.
func (b *bpe) prepareSingle() {
	b.single = make([]uint32, 1<<16)
	w := &work{}
	var ids []uint32
	for r := range b.single {
		b.single[r] = noID
		if r < 0x800 || !utf8.ValidRune(rune(r)) {
			continue
		}
		if ids = b.merge(ids[:0], w, utf8.AppendRune(nil, rune(r)), false); len(ids) == 1 {
			b.single[r] = ids[0]
		}
	}
}

// longestKey is the longest word that is kept with its ids.
const longestKey = 31

// seen appends the ids of s[i:j], a word or, if whole is not set, a part of one.
// Short ones are looked up among those seen before.
func (b *bpe) seen(dst []uint32, w *work, s []byte, i, j int, whole bool) []uint32 {
	switch n := j - i; {
	case n <= 7 && i+8 <= len(s):
		return b.seenShort(dst, w, s, i, j, whole)
	case n > longestKey:
		return b.merge(dst, w, s[i:j], whole)
	}
	return b.seenLong(dst, w, s, i, j, whole)
}

// seenLong is seen for at most longestKey bytes.
func (b *bpe) seenLong(dst []uint32, w *work, s []byte, i, j int, whole bool) []uint32 {
	key := wordKey(s, i, j)
	if whole {
		key[3] |= 1 << 63
	}
	slot := w.word(&key)
	if slot.key == key {
		switch slot.n {
		case 1:
			return append(dst, slot.ids[0])
		case 2:
			return append(dst, slot.ids[0], slot.ids[1])
		}
		return append(dst, slot.ids[:slot.n]...)
	}
	n := len(dst)
	dst = b.merge(dst, w, s[i:j], whole)
	if got := dst[n:]; len(got) <= len(slot.ids) {
		w.keep(&key, got)
	}
	return dst
}

// seenShort is seen for at most seven bytes, behind which there is another one. Words
// of more than two ids are among the long ones.
func (b *bpe) seenShort(dst []uint32, w *work, s []byte, i, j int, whole bool) []uint32 {
	n := uint64(j - i)
	key := binary.LittleEndian.Uint64(s[i:])&(1<<(8*n)-1) | n<<56
	if whole {
		key |= 1 << 63
	}
	slot := w.shortWord(key)
	if slot.key == key {
		if slot.ids[1] == noID {
			return append(dst, slot.ids[0])
		}
		return append(dst, slot.ids[0], slot.ids[1])
	}
	at := len(dst)
	dst = b.seenLong(dst, w, s, i, j, whole)
	switch got := dst[at:]; len(got) {
	case 1:
		w.keepShort(shortSlot{key, [2]uint32{got[0], noID}})
	case 2:
		w.keepShort(shortSlot{key, [2]uint32{got[0], got[1]}})
	}
	return dst
}

// wordKey returns the up to 31 bytes of s[i:j], and their number in the last byte.
func wordKey(s []byte, i, j int) (key [4]uint64) {
	n := j - i
	if i+32 > len(s) {
		var end [32]byte
		copy(end[:], s[i:j])
		s, i = end[:], 0
	}
	s = s[i : i+32]
	key[0] = binary.LittleEndian.Uint64(s)
	if n <= 8 {
		key[0] &= ^uint64(0) >> (64 - 8*uint(n))
	} else {
		key[1] = binary.LittleEndian.Uint64(s[8:])
		if n <= 16 {
			key[1] &= ^uint64(0) >> (128 - 8*uint(n))
		} else {
			key[2] = binary.LittleEndian.Uint64(s[16:])
			if n <= 24 {
				key[2] &= ^uint64(0) >> (192 - 8*uint(n))
			} else {
				key[3] = binary.LittleEndian.Uint64(s[24:]) & (^uint64(0) >> (256 - 8*uint(n)))
			}
		}
	}
	key[3] |= uint64(n) << 56
	return key
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

// written returns a word with its spaces as the model writes them. Words are looked
// up as they are in the text, so that this is done once for each.
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

// mergeShort merges by scanning for the lowest rank, leftmost first.
func (b *bpe) mergeShort(dst, ids []uint32, word []byte) []uint32 {
	var pairs [shortWord]uint64
	n := len(ids) - 1 // of pairs
	if b.bytePair != nil && len(ids) == len(word) {
		for i := range n {
			pairs[i] = b.bytePair[int(word[i])<<8|int(word[i+1])]
		}
	} else {
		for i := range n {
			pairs[i] = b.merges.get(ids[i], ids[i+1])
		}
	}
	for n > 0 {
		// By the rank alone: of equal ones, which SentencePiece has, the leftmost.
		best, at := noMerge, 0
		for i, p := range pairs[:n] {
			if p>>32 < best>>32 {
				best, at = p, i
			}
		}
		if best == noMerge {
			break
		}
		ids[at] = uint32(best)
		copy(ids[at+1:n], ids[at+2:n+1])
		copy(pairs[at:n-1], pairs[at+1:n])
		n--
		if at > 0 {
			pairs[at-1] = b.merges.get(ids[at-1], ids[at])
		}
		if at < n {
			pairs[at] = b.merges.get(ids[at], ids[at+1])
		}
	}
	return append(dst, ids[:n+1]...)
}

// mergeLong merges with a heap of (rank, position) over a linked list of symbols,
// in O(n log n). It appends nothing if time is up before its end. An entry of the heap counts only while the pair at its position
// still has that rank.
func (b *bpe) mergeLong(dst []uint32, w *work, ids []uint32) []uint32 {
	n := len(ids)
	w.grow(n)
	pairs, next, prev, heap := w.pairs[:n], w.next[:n], w.prev[:n], w.heap[:0]
	for i := range n {
		if i&4095 == 4095 && w.spend(4096) {
			return dst
		}
		next[i], prev[i] = int32(i+1), int32(i-1)
		pairs[i] = noMerge
		if i+1 < n {
			if pairs[i] = b.merges.get(ids[i], ids[i+1]); pairs[i] != noMerge {
				heap = append(heap, pairs[i]>>32<<32|uint64(i))
			}
		}
	}
	for i := len(heap)/2 - 1; i >= 0; i-- {
		if i&4095 == 4095 && w.spend(4096) {
			return dst
		}
		siftDown(heap, i)
	}
	renew := func(at int32) {
		pairs[at] = noMerge
		if nx := next[at]; int(nx) < n {
			if pairs[at] = b.merges.get(ids[at], ids[nx]); pairs[at] != noMerge {
				heap = push(heap, pairs[at]>>32<<32|uint64(at))
			}
		}
	}
	for len(heap) > 0 {
		// A step jumps about in the memory: as dear as 16 bytes of text.
		if w.spend(16) {
			return dst
		}
		top := heap[0]
		last := len(heap) - 1
		heap[0] = heap[last]
		heap = heap[:last]
		siftDown(heap, 0)
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

func (w *work) grow(n int) {
	if cap(w.next) < n {
		w.pairs = make([]uint64, n)
		w.next = make([]int32, n)
		w.prev = make([]int32, n)
		w.heap = make([]uint64, 0, n)
	}
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

func siftDown(heap []uint64, i int) {
	for {
		down := 2*i + 1
		if down >= len(heap) {
			return
		}
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
