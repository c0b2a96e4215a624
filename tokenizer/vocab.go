// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/binary"
	"math/bits"
)

// Values that stand for no token and for no merge.
const (
	noID    = ^uint32(0)
	noMerge = ^uint64(0)
)

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

// put stores text as the bytes of id. If find is set, id finds the token by its bytes.
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

// merges holds what two neighbouring symbols become: the rank of the merge in the upper half of a
// value, the id of the new symbol in the lower half. It is a hash table with open addressing, so a
// lookup costs one cache line. With a Go map, encoding unknown words took 5 to 10 % longer.
type merges struct {
	slots []mergeSlot
	shift uint
}

type mergeSlot struct{ key, value uint64 } // key is pair+1, 0 if the slot is free

// newMerges returns a table of all merges. Of two merges of one pair it keeps the later.
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

// appendMerges appends a merge for each way to cut the token id into two tokens.
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

// work is the scratch memory for one text, with the ids of words from earlier texts.
type work struct {
	budget

	ids    []uint32
	pairs  []uint64
	next   []int32
	prev   []int32
	heap   []uint64
	words  []wordSlot
	short  []shortSlot
	middle []middleSlot
	text   []byte
	// How many slots of the three were taken.
	wordCount, shortCount, middleCount int
	// spaced is a word with its spaces written.
	spaced []byte
}

// The tables of words grow fourfold when a quarter is used, up to 2 MiB, and 256 KiB for short words,
// so a short text touches no more memory than the processor's cache has. A word has two slots, its own
// and the neighbour; a third word replaces the one in its own slot.
const (
	fewWords  = 1 << 11
	mostWords = 1 << 15
	fewShort  = 1 << 10
	mostShort = 1 << 14
)

func newWork() *work {
	return &work{words: make([]wordSlot, fewWords), short: make([]shortSlot, fewShort), middle: make([]middleSlot, fewWords)}
}

// wordSlot keeps the ids of one word: 64 bytes, one cache line. key has the word's bytes, and
// its length in the last byte. The slot is free if the length is 0.
type wordSlot struct {
	key [4]uint64
	ids [7]uint32
	n   uint32
}

// word returns the slot of the word, or the slot where it would be kept.
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

// shortSlot keeps the one or two ids of a word of at most seven bytes. key has the word's
// bytes, and its length in the last byte.
type shortSlot struct {
	key uint64
	ids [2]uint32 // the second is noID if the word has one id
}

// shortWord returns the slot of a short word, or the slot where it would be kept.
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

// keepShort remembers the ids of a short word.
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

// longestKey is the length in bytes of the longest word whose ids are kept.
const longestKey = 31

// wordKey returns the bytes of a word of at most 31 bytes, with their number in the last byte.
func wordKey(word []byte) (key [4]uint64) {
	var b [32]byte
	b[31] = byte(copy(b[:longestKey], word))
	for k := range key {
		key[k] = binary.LittleEndian.Uint64(b[8*k:])
	}
	return key
}

func (w *work) grow(n int) {
	if cap(w.next) < n {
		w.pairs = make([]uint64, n)
		w.next = make([]int32, n)
		w.prev = make([]int32, n)
		w.heap = make([]uint64, 0, n)
	}
}
