// SPDX-License-Identifier: Apache-2.0

package indexer

import "encoding/binary"

// table finds the columns in which an external hash stands. It does not keep the
// hashes: an entry is 18 bits of the hash's mix, the cell and the number of the
// column, and who asks looks there. Different entries for one hash are the rule
// where workers number their blocks alike.
//
// A segment is one array with linear probing, in the order of the entries' 18
// bits, and those alone say where an entry belongs: growing is one pass in order,
// removing closes the gap, looking for what is not there ends early, and a table
// that is nearly full is still fast. There are many segments so that no growing
// takes long.
type table struct {
	segments *[tableSegments]segment // nil while empty
	n        int
	touched  byte
}

type segment struct {
	data []byte // entries of 6 bytes, and 2 more so that each can be read as 8
	n    int32
	home int32 // entries belong to one of so many places; some room follows
	last int32 // the last place; it stays empty, and so ends every search
}

const (
	tableSegments = 1024
	entryBytes    = 6
	entryMask     = 1<<48 - 1
	columnBits    = 24
	columnMask    = 1<<columnBits - 1
	cellBits      = 6
	tagShift      = columnBits + cellBits
	tagBits       = 48 - tagShift
)

// spread makes all bits of an external hash count.
func spread(external uint64) uint64 {
	external ^= external >> 32
	external *= 0x9E3779B97F4A7C15
	external ^= external >> 29
	return external * 0xBF58476D1CE4E5B9
}

func segmentOf(h uint64) int { return int(h >> 54) }
func tagOf(h uint64) uint64  { return h << 10 >> (64 - tagBits) }

func entryOf(h uint64, column uint32, cell int) uint64 {
	return tagOf(h)<<tagShift | uint64(cell)<<columnBits | uint64(column)
}

func entryAt(data []byte, p int) uint64 {
	return binary.LittleEndian.Uint64(data[p*entryBytes:]) & entryMask
}

func setEntry(data []byte, p int, v uint64) {
	b := data[p*entryBytes:]
	_ = b[5]
	binary.LittleEndian.PutUint32(b, uint32(v))
	binary.LittleEndian.PutUint16(b[4:], uint16(v>>32))
}

func (s *segment) homeOf(tag uint64) int { return int(tag * uint64(s.home) >> tagBits) }

// find returns the place of the first entry that may be of hash h; next goes on
// from there.
func (t *table) find(h uint64) (s *segment, p int) {
	if t.segments == nil {
		return nil, 0
	}
	s = &t.segments[segmentOf(h)]
	if s.n == 0 {
		return nil, 0
	}
	return s, s.homeOf(tagOf(h))
}

// next returns the column and the cell of the first entry of hash h at or behind p,
// and the place behind it; column 0 is none.
func (s *segment) next(h uint64, p int) (column uint32, cell, behind int) {
	tag := tagOf(h)
	for {
		v := entryAt(s.data, p)
		p++
		if v>>tagShift < tag && v != 0 {
			continue
		}
		if v>>tagShift == tag {
			return uint32(v & columnMask), int(v >> columnBits & (1<<cellBits - 1)), p // an empty place has column 0
		}
		return 0, 0, p
	}
}

func (t *table) add(h uint64, column uint32, cell int) {
	if t.segments == nil {
		t.segments = new([tableSegments]segment)
	}
	number := segmentOf(h)
	s := &t.segments[number]
	if s.n*6 >= s.home*5 {
		s.grow(number)
	}
	for e := s.add(entryOf(h, column, cell)); e != 0; e = s.add(e) {
		s.grow(number)
	}
	s.n++
	t.n++
}

// add puts an entry into its place, and those behind it one place on. It returns
// the entry, of all, for which there is no room.
func (s *segment) add(entry uint64) (left uint64) {
	data, last := s.data, int(s.last)
	p := s.homeOf(entry >> tagShift)
	v := entryAt(data, p)
	for v>>tagShift <= entry>>tagShift && v != 0 {
		p++
		v = entryAt(data, p)
	}
	for v != 0 {
		next := entryAt(data, p+1)
		binary.LittleEndian.PutUint64(data[p*entryBytes:], entry) // the two bytes too many are written again
		entry, v = v, next
		p++
	}
	if p >= last {
		return entry
	}
	setEntry(data, p, entry)
	return 0
}

func (t *table) remove(h uint64, column uint32, cell int) {
	number := segmentOf(h)
	s := &t.segments[number]
	data := s.data
	entry := entryOf(h, column, cell)
	p := s.homeOf(tagOf(h))
	for entryAt(data, p) != entry {
		p++
	}
	for v := entryAt(data, p+1); v != 0 && s.homeOf(v>>tagShift) <= p; v = entryAt(data, p+1) {
		setEntry(data, p, v)
		p++
	}
	setEntry(data, p, 0)
	s.n--
	t.n--
	if t.n == 0 {
		t.segments = nil
	} else if s.n == 0 {
		*s = segment{}
	} else if s.n*3 < s.home && s.home > 32 {
		s.resize(int(s.n) * 3 / 2)
	}
}

// grow makes a full segment larger by half. It was given its first size, or when
// it was small, by its number: the segments do not all grow at the same time, and
// the table as a whole is always about two thirds full.
func (s *segment) grow(number int) {
	if s.home < 16 {
		s.resize(8 + number%13 + int(s.n))
		return
	}
	s.resize(int(s.home) * 3 / 2)
}

func (s *segment) resize(home int) {
	old := *s
	room := home + 12 + home/64
	for {
		*s = segment{data: make([]byte, room*entryBytes+2), n: old.n, home: int32(home), last: int32(room - 1)}
		if s.fill(old.data) {
			return
		}
		room += room/2 + 8
	}
}

// fill takes over the entries of a smaller or larger segment.
func (s *segment) fill(old []byte) bool {
	data, home, last, p := s.data, uint64(s.home), int(s.last), 0
	for len(old) > entryBytes {
		v := binary.LittleEndian.Uint64(old) & entryMask
		old = old[entryBytes:]
		// Written as 8 bytes, and empty ones, too: what comes next writes over it.
		if p = max(p, int(v>>tagShift*home>>tagBits)); p >= last {
			return false
		}
		binary.LittleEndian.PutUint64(data[p*entryBytes:], v)
		if v != 0 {
			p++
		}
	}
	return true
}

func (t *table) bytes() (n int) {
	if t.segments == nil {
		return 0
	}
	n = tableSegments * 40
	for i := range t.segments {
		n += heapSize(cap(t.segments[i].data))
	}
	return n
}

// touch asks memory for the places of all hashes at once, so that those who look
// them up one after the other do not wait for each.
func (t *table) touch(hashes []uint64) {
	if t.segments == nil {
		return
	}
	sum := byte(0)
	for _, h := range hashes {
		if s := &t.segments[segmentOf(h)]; s.n > 0 {
			sum += s.data[s.homeOf(tagOf(h))*entryBytes]
		}
	}
	t.touched = sum // so that the compiler does not leave it out
}
