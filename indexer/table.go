// SPDX-License-Identifier: Apache-2.0

package indexer

import "math/bits"

// table finds the columns that have an external hash. It does not keep the hashes: an
// entry is 18 bits of the mixed hash, the cell and the id of the column, and a search
// compares the hash in the column. Where workers number their blocks alike, one hash has
// several entries.
//
// A segment is an array of buckets, each a cache line. The 18 bits of an entry, its
// stamp, select its bucket for any number of buckets, so a segment grows without the
// hashes. An entry that finds its bucket full is put into one of the next. Every bucket
// counts the entries that passed it; at a bucket that none passed, a search ends. There
// are many segments so that growing one does not take long.
type table struct {
	segments *[tableSegments]segment // nil while empty
	n        int
	touched  uint64
}

type segment struct {
	buckets []bucket
	n       int
}

// bucket holds up to ten entries, the first ones used.
type bucket struct {
	// tags are the lower halves of the entries' stamps, four to a word. Above
	// the last two are the number of entries and of those that went past.
	tags [3]uint64
	// ids are an entry's column, its cell and the upper two bits of its stamp.
	ids [bucketEntries]uint32
}

const (
	tableSegments = 1024
	bucketBytes   = 64
	bucketEntries = 10
	columnBits    = 24
	columnMask    = 1<<columnBits - 1
	cellBits      = 6
	idBits        = columnBits + cellBits
	stampBits     = tagBits + 32 - idBits
	tagBits       = 16
	tagMask       = 1<<tagBits - 1

	bucketOne  = 1 << 32 // one entry in tags[2]
	bucketPast = 1 << 36 // one that went past
	eachLane   = 1<<48 | 1<<32 | 1<<16 | 1
)

// spread mixes all bits of an external hash.
func spread(external uint64) uint64 {
	external ^= external >> 32
	external *= 0x9E3779B97F4A7C15
	external ^= external >> 29
	return external * 0xBF58476D1CE4E5B9
}

func segmentOf(h uint64) int  { return int(h >> 54) }
func stampOf(h uint64) uint64 { return h << 10 >> (64 - stampBits) }
func idOf(stamp uint64, column uint32, cell int) uint32 {
	return uint32(stamp>>tagBits)<<idBits | uint32(cell)<<columnBits | column
}

func (s *segment) homeOf(stamp uint64) int { return int(stamp * uint64(len(s.buckets)) >> stampBits) }

func (b *bucket) len() int   { return int(b.tags[2] >> 32 & 15) }
func (b *bucket) past() bool { return b.tags[2]>>36 != 0 }

func (b *bucket) tag(slot int) uint64 { return b.tags[slot>>2&3] >> (slot & 3 * tagBits) & tagMask }

// hits returns a word with a bit for each entry that has the tag, and rarely for another
// entry; slotOf returns the entry of a bit.
func (b *bucket) hits(tag uint64) uint64 {
	const low, high = eachLane, eachLane << 15
	tag *= eachLane
	x, y, z := b.tags[0]^tag, b.tags[1]^tag, b.tags[2]^tag
	x, y, z = (x-low)&^x&high, (y-low)&^y&high, (z-low)&^z&(high&(1<<32-1))
	return x>>15 | y>>14 | z>>13
}

func slotOf(hit int) int { return hit&3<<2 | hit>>4 }

// put adds an entry, for which there is room.
func (b *bucket) put(tag uint64, id uint32) {
	slot := b.len()
	b.tags[slot>>2&3] |= tag << (slot & 3 * tagBits)
	b.ids[slot] = id
	b.tags[2] += bucketOne
}

// cut removes an entry.
func (b *bucket) cut(slot int) {
	last := b.len() - 1
	moved := b.tag(last)
	b.tags[slot>>2&3] ^= (b.tag(slot) ^ moved) << (slot & 3 * tagBits)
	b.tags[last>>2&3] ^= b.tag(last) << (last & 3 * tagBits)
	b.ids[slot] = b.ids[last]
	b.ids[last] = 0
	b.tags[2] -= bucketOne
}

// find returns the segment of a hash, and the bucket where a search begins.
func (t *table) find(h uint64) (s *segment, at int) {
	if t.segments == nil {
		return nil, 0
	}
	s = &t.segments[segmentOf(h)]
	if s.n == 0 {
		return nil, 0
	}
	return s, s.homeOf(stampOf(h))
}

// entry returns the column and the cell of the entry that a hit stands for, or column 0
// if the entry has another hash.
func (b *bucket) entry(hits, h uint64) (column uint32, cell int) {
	id := b.ids[slotOf(bits.TrailingZeros64(hits))%bucketEntries]
	if id>>idBits != uint32(stampOf(h)>>tagBits) {
		return 0, 0
	}
	return id & columnMask, int(id >> columnBits & (1<<cellBits - 1)) // an empty place has column 0
}

// after returns the next bucket of a search after some steps, or -1 if the search ends.
func (s *segment) after(at, steps int) int {
	switch {
	case !s.buckets[at].past() || steps >= len(s.buckets):
		return -1
	case at+1 == len(s.buckets):
		return 0
	}
	return at + 1
}

func (t *table) add(h uint64, column uint32, cell int) {
	if t.segments == nil {
		t.segments = new([tableSegments]segment)
	}
	number := segmentOf(h)
	s := &t.segments[number]
	if s.n*20 >= len(s.buckets)*bucketEntries*17 {
		s.grow(number)
	}
	stamp := stampOf(h)
	s.put(stamp, idOf(stamp, column, cell))
	s.n++
	t.n++
}

func (s *segment) put(stamp uint64, id uint32) {
	at := s.homeOf(stamp)
	b := &s.buckets[at]
	for b.len() == bucketEntries {
		b.tags[2] += bucketPast
		if at++; at == len(s.buckets) {
			at = 0
		}
		b = &s.buckets[at]
	}
	b.put(stamp&tagMask, id)
}

func (t *table) remove(h uint64, column uint32, cell int) {
	s := &t.segments[segmentOf(h)]
	stamp := stampOf(h)
	id := idOf(stamp, column, cell)
	at := s.homeOf(stamp)
	for !s.buckets[at].remove(stamp&tagMask, id) {
		s.buckets[at].tags[2] -= bucketPast
		if at++; at == len(s.buckets) {
			at = 0
		}
	}
	s.n--
	t.n--
	if t.n == 0 {
		t.segments = nil
	} else if s.n == 0 {
		*s = segment{}
	} else if s.n*3 < len(s.buckets)*bucketEntries && len(s.buckets) > 4 {
		s.resize(s.n*3/2/bucketEntries + 1)
	}
}

// remove removes an entry if it is in this bucket.
func (b *bucket) remove(tag uint64, id uint32) bool {
	for hits := b.hits(tag); hits != 0; hits &= hits - 1 {
		if slot := slotOf(bits.TrailingZeros64(hits)); b.ids[slot] == id && b.tag(slot) == tag {
			b.cut(slot)
			return true
		}
	}
	return false
}

// grow makes a full segment larger by half. The first size of a segment depends on its
// number, so the segments do not all grow at the same time, and the table as a whole is
// always about two thirds full.
func (s *segment) grow(number int) {
	size := len(s.buckets) + len(s.buckets)/2 + 1
	if len(s.buckets) < 8 && size >= 8 {
		size = 8 + number%5
	}
	s.resize(size)
}

func (s *segment) resize(size int) {
	old := s.buckets
	s.buckets = append([]bucket(nil), make([]bucket, size)...)
	s.buckets = s.buckets[:cap(s.buckets)] // use all that the allocator provides
	for i := range old {
		b := &old[i]
		for slot := range b.len() {
			id := b.ids[slot]
			s.put(uint64(id>>idBits)<<tagBits|b.tag(slot), id)
		}
	}
}

func (t *table) bytes() (n int) {
	if t.segments == nil {
		return 0
	}
	n = tableSegments * 32
	for i := range t.segments {
		n += heapSize(bucketBytes * cap(t.segments[i].buckets))
	}
	return n
}

// touch loads the buckets of n hashes into the processor's cache, all at once, so that
// the following lookups do not wait for memory one by one.
func (t *table) touch(n int, hash func(i int) uint64) {
	sum := uint64(0)
	for i := range n {
		if s, at := t.find(hash(i)); s != nil {
			sum += s.buckets[at].tags[0]
		}
	}
	t.touched = sum // prevents the compiler from removing the loop
}
