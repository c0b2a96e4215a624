// SPDX-License-Identifier: Apache-2.0

package confirm

import (
	"iter"
	"slices"
	"sync"

	"github.com/kvroute/kvroute/indexer"
)

const (
	// logWords limits what is remembered of a worker's stored blocks, allWords of all workers', in words of 8 bytes:
	// 2 MB and 16 MB.
	logWords = 1 << 18
	allWords = 1 << 21
	// eventWords is the size of a storedEvent, in words.
	eventWords = 8
	// allTokens limits the ids of stored blocks of all workers: 4 MB, and as much for the ends of events of one token.
	allTokens = 1 << 20
)

// log has the events of stored blocks of a worker while requests are open. Its halves are written once: a snapshot may
// be read without a lock. When the newer half is full, it becomes the older one.
type log struct {
	stored uint64 // number of events so far
	first  uint64 // number of the first event in the halves
	old    half
	recent half
	apart  bool // the next event must be one of its own: a request was booked, or the log is being read
}

type half struct {
	events []storedEvent
	hashes []uint64 // local hashes of the events
}

// storedEvent is a sequence of stored blocks, of one event or of several that continue each other.
type storedEvent struct {
	number      uint64
	parent      uint64
	end         uint64 // external hash of the last block
	hasParent   bool
	from, to    int   // in the half's hashes
	began, last int64 // when the first and the last part came, unix ns
}

func (h *half) words() int { return len(h.hashes) + eventWords*len(h.events) }

// since returns the events from a number on, older ones first, with their blocks.
func (l *log) since(number uint64) iter.Seq2[*storedEvent, []uint64] {
	return func(yield func(*storedEvent, []uint64) bool) {
		for _, h := range []*half{&l.old, &l.recent} {
			for i := range h.events {
				if ev := &h.events[i]; ev.number >= number && !yield(ev, h.hashes[ev.from:ev.to]) {
					return
				}
			}
		}
	}
}

// fits reports whether blocks of an event have room.
func (l *log) fits(blocks int) bool { return blocks+eventWords <= logWords/2 }

// append appends the blocks of an event that fit, and returns how many words that adds.
func (l *log) append(at int64, ev *indexer.Event) (words int) {
	n := len(ev.Blocks)
	if l.recent.words()+n+eventWords > logWords/2 {
		words -= l.old.words()
		l.first += uint64(len(l.old.events))
		l.old, l.recent = l.recent, half{}
	}
	h := &l.recent
	for i := range ev.Blocks {
		h.hashes = append(h.hashes, ev.Blocks[i].Local)
	}
	end, to := ev.Blocks[n-1].External, len(h.hashes)
	if last := len(h.events) - 1; !l.apart && last >= 0 && ev.HasParent && h.events[last].end == ev.Parent {
		e := &h.events[last]
		e.end, e.to, e.last = end, to, at
		return words + n
	}
	h.events = append(h.events, storedEvent{l.stored, ev.Parent, end, ev.HasParent, to - n, to, at, at})
	l.stored++
	l.apart = false
	return words + n + eventWords
}

// drop empties the log, and returns how many words it had.
func (l *log) drop() (words int) {
	words = l.old.words() + l.recent.words()
	l.old, l.recent, l.first = half{}, half{}, l.stored
	return words
}

// tokens are the ids of blocks that workers stored last, of all workers.
type tokens struct {
	mu sync.Mutex
	// mu guards the fields below.
	halves  [2]tokenHalf // the older one first
	readers int          // of the halves, without the lock: they are not overwritten meanwhile
}

type tokenHalf struct {
	ids  []uint32
	ends []int32 // of each event
}

// append copies the ids of an event.
func (t *tokens) append(ids []uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := &t.halves
	if len(h[1].ids)+len(ids) > allTokens/2 {
		next := tokenHalf{h[0].ids[:0], h[0].ends[:0]}
		if t.readers > 0 || cap(next.ids) < allTokens/2 {
			next = tokenHalf{ids: make([]uint32, 0, allTokens/2)}
		}
		h[0], h[1] = h[1], next
	}
	h[1].ids = append(h[1].ids, ids...)
	h[1].ends = append(h[1].ends, int32(len(h[1].ids)))
}

// find sets the token ids of the stored blocks that have the keys of wanted as local hashes of a seed, and reports
// whether there are some. It is slow, but holds no lock meanwhile.
func (t *tokens) find(wanted map[uint64][]uint32, size int, seed uint64) (found bool) {
	t.mu.Lock()
	halves := t.halves
	t.readers++
	t.mu.Unlock()
	defer func() {
		t.mu.Lock()
		t.readers--
		t.mu.Unlock()
	}()
	var hashes []uint64
	for _, h := range halves {
		from := int32(0)
		for _, end := range h.ends {
			ids := h.ids[from:end]
			hashes = indexer.AppendLocalHashes(hashes[:0], ids, size, seed)
			for i, hash := range hashes {
				if _, ok := wanted[hash]; ok {
					wanted[hash], found = slices.Clone(ids[i*size:][:size]), true
				}
			}
			from = end
		}
	}
	return found
}
