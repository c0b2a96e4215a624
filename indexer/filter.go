// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"encoding/binary"
	"fmt"
	"iter"
	"sync/atomic"
)

// Filter is a lossy set of sequence hashes, a Bloom filter. Added hashes are always
// found. About 0.8 % of other hashes are found, too, as long as the filter has no more
// hashes than it was made for. A router group publishes a filter, so that the router
// above knows which prefixes the group has: of every fourth block or so (see
// [Index.Checkpoints]), 10 bits each.
//
// Hash h sets bits (lo32(h) + i·(hi32(h) | 1)) mod m for i from 0 to k-1, in 64-bit
// arithmetic; m is a multiple of 64.
//
// One goroutine may add while any number of others call Has and Overlap: these find all
// hashes that were added before they were called.
type Filter struct {
	words []atomic.Uint64
	k     int
	n     int // number of hashes that set a bit; for the adding goroutine only
}

const (
	filterBits   = 10 // for each hash
	filterHashes = 7  // the best number for 10 bits
	// filterRow is the number of adjacent checkpoints that are looked up one by one.
	filterRow = 8
	// maxFilterHashes limits the bits for each hash in others' filters, because each bit
	// takes time.
	maxFilterHashes = 16
	// maxFilterWords is 128 MB, for the checkpoints of 400 M blocks. Hashes cannot reach
	// bits beyond 2^32.
	maxFilterWords = 1 << 24
)

// NewFilter returns an empty filter for n hashes: 10 bits each, in whole words of 64,
// at least one and at most 1<<24.
func NewFilter(n int) *Filter {
	words := maxFilterWords
	if n < maxFilterWords*64/filterBits {
		words = max(1, (n*filterBits+63)/64)
	}
	return &Filter{words: make([]atomic.Uint64, words), k: filterHashes}
}

// first returns the first bit of a hash, and the distance between two of its bits, modulo
// m. Two divisions suffice for all bits; they take most of the time.
func (f *Filter) first(h uint64) (at, step, m uint32) {
	m = uint32(len(f.words) * 64)
	return uint32(h) % m, (uint32(h>>32) | 1) % m, m
}

// next returns the bit one step behind another one. No sum exceeds 32 bits.
func next(at, step, m uint32) uint32 {
	if at += step; at >= m {
		at -= m
	}
	return at
}

// Add adds a hash.
func (f *Filter) Add(h uint64) {
	at, step, m := f.first(h)
	fresh := false
	for range f.k {
		word, bit := &f.words[at/64], uint64(1)<<(at%64)
		if word.Load()&bit == 0 {
			word.Or(bit)
			fresh = true
		}
		at = next(at, step, m)
	}
	if fresh {
		f.n++
	}
}

// Has reports whether a hash was added, or is a false positive.
func (f *Filter) Has(h uint64) bool {
	at, step, m := f.first(h)
	for range f.k {
		if f.words[at/64].Load()>>(at%64)&1 == 0 {
			return false
		}
		at = next(at, step, m)
	}
	return true
}

// Overlap returns how many leading blocks of a prompt are in the filter: stride for each
// of its consecutive checkpoints, which are blocks stride, 2·stride and so on, from the
// first. Stride must be positive. Blocks behind the last checkpoint do not count; false
// positives do.
//
// A worker that holds a block holds all earlier ones. So only some checkpoints are looked
// up: the first few, then checkpoints at growing distances, then by bisection. Each time
// two neighbours are looked up, since one may be a false positive. Blocks after a hole may
// count.
func (f *Filter) Overlap(sequence []uint64, stride int) (blocks int) {
	has := func(checkpoint int) bool { return f.Has(sequence[checkpoint*stride-1]) }
	// Of the first low checkpoints, all that were looked up are in the filter. Of the
	// first high, at least one is not, or the prompt has fewer.
	low, high := 0, len(sequence)/stride+1
	for low+1 < high && low < filterRow {
		if !has(low + 1) {
			return low * stride
		}
		low++
	}
	for step, bound := 2*filterRow, false; high-low > filterRow; {
		at := low + step
		if bound || at >= high {
			at = (low + high) / 2
		}
		if has(at) && has(at-1) {
			low, step = at, 2*step
		} else {
			high, bound = at, true
		}
	}
	for low+1 < high && has(low+1) {
		low++
	}
	return low * stride
}

// Bits returns m.
func (f *Filter) Bits() int { return len(f.words) * 64 }

// Hashes returns k.
func (f *Filter) Hashes() int { return f.k }

// Count is the number of different hashes that were added, without false positives at the
// time they were added. Only the goroutine that adds may call it.
func (f *Filter) Count() int { return f.n }

// Overfull reports whether the filter has at least a quarter more hashes than it was made
// for and needs to be replaced: then 2.5 % of other hashes are found, and the share grows
// fast. Only the goroutine that adds may call it.
func (f *Filter) Overfull() bool { return f.n*filterBits*4 >= f.Bits()*5 }

// AppendTo appends the filter's words to dst, little endian: Bits()/8 bytes.
func (f *Filter) AppendTo(dst []byte) []byte {
	for i := range f.words {
		dst = binary.LittleEndian.AppendUint64(dst, f.words[i].Load())
	}
	return dst
}

// ParseFilter makes a filter for n hashes, with m bits and k of them for each hash, from
// its words as [Filter.AppendTo] returns them. The data is copied.
func ParseFilter(m, k, n uint64, data []byte) (*Filter, error) {
	switch {
	case m == 0 || m%64 != 0 || m/64 > maxFilterWords:
		return nil, fmt.Errorf("indexer: filter: %d bits, want a multiple of 64 up to %d", m, maxFilterWords*64)
	case k == 0 || k > maxFilterHashes:
		return nil, fmt.Errorf("indexer: filter: %d bits a hash, want 1 to %d", k, maxFilterHashes)
	case n > m*maxFilterHashes:
		return nil, fmt.Errorf("indexer: filter: %d hashes in %d bits, want at most %d a bit", n, m, maxFilterHashes)
	case uint64(len(data)) != m/8:
		return nil, fmt.Errorf("indexer: filter: %d bytes of data, want %d for %d bits", len(data), m/8, m)
	}
	f := &Filter{words: make([]atomic.Uint64, m/64), k: int(k), n: int(n)}
	for i := range f.words {
		f.words[i].Store(binary.LittleEndian.Uint64(data[8*i:]))
	}
	return f, nil
}

// Checkpoints yields the sequence hashes of all blocks that any worker holds on the
// device and whose depth, counted from 1, is divisible by stride. Each is yielded once,
// as the index is when the loop begins. Its costs and the conditions of [ErrOvertaken]
// are those of [Index.Dump], which it reads. Stride must be positive.
//
// A caller finds the new blocks since an earlier time with a filter of that time.
func (x *Index) Checkpoints(stride int) iter.Seq2[uint64, error] {
	return func(yield func(uint64, error) bool) {
		ends := []uint64{0} // sequence hashes of the last blocks of runs
		for r, err := range x.Dump() {
			if err != nil {
				yield(0, err)
				return
			}
			var held uint64
			for _, h := range r.Holders {
				if h.Tier == Device {
					held |= ones(len(h.Externals)) << h.Start
				}
			}
			sequence := ends[r.Parent]
			for i, l := range r.Local {
				if sequence = NextSequenceHash(sequence, l); r.Depth+i == 0 {
					sequence = l
				}
				if (r.Depth+i+1)%stride == 0 && held>>i&1 != 0 && !yield(sequence, nil) {
					return
				}
			}
			ends = append(ends, sequence)
		}
	}
}
