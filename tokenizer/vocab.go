// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/binary"
	"math/bits"
	"strings"
)

// Values that stand for no token and for no merge.
const (
	noID    = ^uint32(0)
	noMerge = ^uint64(0)
)

// vocab holds the tokens' bytes and finds ids by them. Immutable once built.
type vocab struct {
	token []string // by id; empty for an unused id
	// The tokens that words may become are in two tables. Tokens of 1 to mostVocabKey bytes are in short, a hash
	// table with open addressing, in which a slot has the token and its id. A slot is free if it is zero.
	short []shortKey
	count int // used slots of short
	long  map[string]uint32
	most  int // length of the longest of these tokens in bytes
	texts strings.Builder
}

// The length in bytes of the longest token in short. Bits 32 to 55 of a slot's last word are free in the key of such
// a token, and have its id.
const (
	mostVocabKey = 12
	vocabIDShift = 32
	vocabIDMask  = (1<<24 - 1) << vocabIDShift
)

// newVocab returns a vocabulary without tokens, and with room for count.
func newVocab(count int) *vocab {
	return &vocab{
		token: make([]string, 0, count),
		short: make([]shortKey, 1<<bits.Len(uint(count+count/2))),
		long:  map[string]uint32{},
	}
}

// get returns the bytes of a token, none for an unknown id.
func (v *vocab) get(id uint32) string {
	if int(id) >= len(v.token) {
		return ""
	}
	return v.token[id]
}

// put stores text as the bytes of a token. If find is set, id finds the token by its bytes.
func (v *vocab) put(text []byte, id uint32, find bool) {
	for int(id) >= len(v.token) {
		v.token = append(v.token, "")
	}
	v.token[id] = v.keep(text)
	switch {
	case !find:
		return
	case len(text) == 0 || len(text) > mostVocabKey:
		v.long[v.token[id]] = id
	default:
		v.putShort(keyOf(text), id)
	}
	v.most = max(v.most, len(text))
}

// keep returns a copy of text. Many copies share one allocation.
func (v *vocab) keep(text []byte) string {
	if v.texts.Cap()-v.texts.Len() < len(text) {
		v.texts = strings.Builder{}
		v.texts.Grow(max(16<<10, len(text)))
	}
	v.texts.Write(text)
	all := v.texts.String()
	return all[len(all)-len(text):]
}

func (v *vocab) putShort(key shortKey, id uint32) {
	slot := v.slot(key)
	if slot.last == 0 {
		if v.count++; 3*v.count > 2*len(v.short) {
			old := v.short
			v.short = make([]shortKey, 2*len(old))
			for _, x := range old {
				if x.last != 0 {
					*v.slot(shortKey{x.first, x.last &^ vocabIDMask}) = x
				}
			}
			slot = v.slot(key)
		}
	}
	*slot = shortKey{key.first, key.last | uint64(id)<<vocabIDShift}
}

// slot returns the slot of a token in short, or a free one if the token is not there.
func (v *vocab) slot(key shortKey) *shortKey {
	mask := uint64(len(v.short) - 1)
	for i := key.hash() & mask; ; i = (i + 1) & mask {
		if x := &v.short[i]; x.last == 0 || x.first == key.first && x.last&^vocabIDMask == key.last {
			return x
		}
	}
}

// id returns the id of the token text, noID if there is none.
func (v *vocab) id(text []byte) uint32 {
	if len(text) == 0 || len(text) > mostVocabKey {
		if id, ok := v.long[string(text)]; ok {
			return id
		}
		return noID
	}
	return v.shortID(keyOf(text))
}

// shortID is id for a token of 1 to mostVocabKey bytes.
func (v *vocab) shortID(key shortKey) uint32 {
	if slot := v.slot(key); slot.last != 0 {
		return uint32(slot.last & vocabIDMask >> vocabIDShift)
	}
	return noID
}

// merges holds what two neighbouring symbols become: the rank of the merge in the upper half of a
// value, the id of the new symbol in the lower half. It is a hash table with open addressing, so a
// lookup costs one cache line. With a Go map, encoding unknown words took 5 to 10 % longer. A filter comes before the
// table. It is much smaller, so it stays in the processor's cache, and it rejects most pairs that have no merge.
type merges struct {
	filter pairSet
	slots  []mergeSlot
	shift  uint
}

type mergeSlot struct{ key, value uint64 } // key is pair+1, 0 if the slot is free

// newMerges returns a table of all merges. Of two merges of one pair it keeps the later.
func newMerges(all []mergeSlot) merges {
	n := max(4, bits.Len(uint(len(all)+len(all)/2)))
	m := merges{slots: make([]mergeSlot, 1<<n), shift: uint(64 - n)}
	m.filter.pairs = make([]uint64, 0, len(all))
	for _, x := range all {
		m.filter.pairs = append(m.filter.pairs, x.key-1)
		i := m.slot(x.key - 1)
		for m.slots[i].key != 0 && m.slots[i].key != x.key {
			i = (i + 1) & (len(m.slots) - 1)
		}
		m.slots[i] = x
	}
	m.filter.fill()
	return m
}

// mergeOf returns the merge of two symbols to the symbol id.
func mergeOf(left, right uint32, rank uint64, id uint32) mergeSlot {
	return mergeSlot{pairOf(left, right) + 1, rank<<32 | uint64(id)}
}

func pairOf(left, right uint32) uint64 { return uint64(left)<<32 | uint64(right) }

func (m *merges) slot(pair uint64) int { return int(pair * 0x9e3779b97f4a7c15 >> m.shift) }

func (m *merges) get(left, right uint32) uint64 {
	pair := pairOf(left, right)
	if !m.filter.hasKey(pair) {
		return noMerge
	}
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
	scratch

	ends [batch]int
	// short has the ids of short words in shortCount of its slots. long has those of other words: first of parts
	// of words, then of whole words.
	short      []shortSlot
	shortCount int
	long       [2]map[string][]uint32
}

// scratch is the memory whose size depends on the longest text and word.
type scratch struct {
	ids   []uint32
	pairs []uint64
	next  []int32
	prev  []int32
	heap  []uint64
	text  []byte
	// spaced is a word with its spaces written.
	spaced []byte
}

// The table of short words grows fourfold when a quarter is used, up to 2 MiB, so a short text touches no
// more memory than the processor's cache has. A word has two slots, its own and the neighbour; a third word
// replaces the one in its own slot. A full map of other words is cleared.
const (
	fewShort  = 1 << 10
	mostShort = 1 << 16
	mostLong  = 1 << 12 // words in a map
	longKey   = 128     // length in bytes of the longest word in a map
)

func newWork() *work {
	return &work{short: make([]shortSlot, fewShort), long: [2]map[string][]uint32{{}, {}}}
}

// mostShortKey is the length in bytes of the longest short word.
const mostShortKey = 15

// shortSlot keeps the ids of a short word: 32 bytes, half a cache line. It is free if count is 0.
type shortSlot struct {
	key shortKey
	ids [2]uint64 // the ids in shortID bits each, and their number in the last byte
}

const (
	shortID      = 24
	mostShortIDs = 5
)

// newShortSlot returns the slot of a word. If the ids do not fit, its count is above mostShortIDs.
func newShortSlot(key shortKey, ids []uint32) shortSlot {
	x, n := shortSlot{key: key}, len(ids)
	for k, id := range ids[:min(n, mostShortIDs)] {
		if id >= 1<<shortID {
			n = mostShortIDs + 1
		}
		x.ids[0] |= uint64(id) << (shortID * k)
		x.ids[1] |= bits.RotateLeft64(uint64(id), shortID*k) &^ (uint64(id) << (shortID * k))
	}
	x.ids[1] = x.ids[1]&(1<<56-1) | uint64(min(n, mostShortIDs+1))<<56
	return x
}

func (x *shortSlot) count() int { return int(x.ids[1] >> 56) }

// appendTo appends the ids.
func (x *shortSlot) appendTo(dst []uint32) []uint32 {
	const mask = 1<<shortID - 1
	a, b, n := x.ids[0], x.ids[1], len(dst)
	dst = append(dst, uint32(a&mask), uint32(a>>24&mask), uint32((a>>48|b<<16)&mask), uint32(b>>8&mask),
		uint32(b>>32&mask))
	return dst[:n+x.count()]
}

//nolint:gochecknoglobals // a table
var shortMasks = func() (m [mostShortKey + 1]shortKey) {
	for n := range uint(len(m)) {
		m[n] = shortKey{1<<(8*min(n, 8)) - 1, 1<<(8*(max(n, 8)-8)) - 1}
	}
	return m
}()

// shortKey has the bytes of a short word, and its length in the last byte.
type shortKey struct{ first, last uint64 }

// shortKeyOf returns the key of the short word s[:n]; s has 16 bytes or more.
func shortKeyOf(s []byte, n int, flag uint64) shortKey {
	mask := &shortMasks[n&15]
	return shortKey{
		binary.LittleEndian.Uint64(s) & mask.first, binary.LittleEndian.Uint64(s[8:])&mask.last | uint64(n)<<56 | flag,
	}
}

// keyOf is shortKeyOf for a text of at most mostShortKey bytes, without bytes behind it.
func keyOf(text []byte) shortKey {
	k := shortKey{last: uint64(len(text)) << 56}
	switch n := len(text); {
	case n >= 8:
		k.first = binary.LittleEndian.Uint64(text)
		k.last |= binary.LittleEndian.Uint64(text[n-8:]) >> (8 * (16 - n))
	case n >= 4:
		k.first = uint64(binary.LittleEndian.Uint32(text[n-4:]))<<(8*(n-4)) | uint64(binary.LittleEndian.Uint32(text))
	default:
		for i, c := range text {
			k.first |= uint64(c) << (8 * i)
		}
	}
	return k
}

func (k shortKey) hash() uint64 {
	return (k.first ^ bits.RotateLeft64(k.last, 29)) * 0x9e3779b97f4a7c15 >> 40
}

// shortWord returns the slot of a short word, or the slot where it would be kept.
func (w *work) shortWord(key shortKey) *shortSlot {
	i := key.hash() & uint64(len(w.short)-1)
	slot := &w.short[i]
	if slot.key == key || slot.count() == 0 {
		return slot
	}
	if beside := &w.short[i^1]; beside.key == key || beside.count() == 0 {
		return beside
	}
	return slot
}

// keepShort remembers the ids of a short word.
func (w *work) keepShort(s shortSlot) {
	slot := w.shortWord(s.key)
	if slot.count() == 0 {
		if w.shortCount++; 4*w.shortCount > len(w.short) && len(w.short) < mostShort {
			old := w.short
			w.short = make([]shortSlot, 4*len(old))
			for _, x := range old {
				if x.count() != 0 {
					*w.shortWord(x.key) = x
				}
			}
			slot = w.shortWord(s.key)
		}
	}
	*slot = s
}

func (w *work) grow(n int) {
	if cap(w.next) < n {
		w.pairs = make([]uint64, n)
		w.next = make([]int32, n)
		w.prev = make([]int32, n)
		w.heap = make([]uint64, 0, n)
	}
}
