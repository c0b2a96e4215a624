// SPDX-License-Identifier: Apache-2.0

package events

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// Cursor is the last event that counted of a publisher of a rank. Of several
// publishers of one rank, the newest is the last.
type Cursor struct {
	WorkerID    uint64
	DPRank      uint32
	PublisherID uint64
	EventID     uint64
}

// Waiting is an event that waits for its worker, with its publisher. It has touched
// no cursor.
type Waiting struct {
	PublisherID uint64
	Event       RouterEvent
}

// streamed reports whether the events of a worker are those that the stream brings.
func (t *tracker) streamed(worker uint64) bool {
	return t.workers[worker].takes(FeedDurable) // also if it is not known yet
}

// exportCursors returns what the tracker knows by the stream, in an order that does
// not depend on chance.
func (t *tracker) exportCursors() (cursors []Cursor, waiting []Waiting) {
	for _, key := range slices.SortedFunc(maps.Keys(t.ranks), func(a, b rankKey) int {
		return cmp.Or(cmp.Compare(a.worker, b.worker), cmp.Compare(a.rank, b.rank))
	}) {
		if !t.streamed(key.worker) {
			continue
		}
		r := t.ranks[key]
		for _, p := range slices.Sorted(maps.Keys(r.cursors)) {
			if p != r.newest {
				cursors = append(cursors, Cursor{key.worker, key.rank, p, r.cursors[p]})
			}
		}
		if id, ok := r.cursors[r.newest]; ok {
			cursors = append(cursors, Cursor{key.worker, key.rank, r.newest, id})
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(t.waiting), func(a, b waitKey) int { return cmp.Compare(a.worker, b.worker) }) {
		if key.feed != FeedDurable {
			continue
		}
		for _, h := range t.waiting[key].events {
			waiting = append(waiting, Waiting{h.publisher, h.ev})
		}
	}
	return cursors, waiting
}

// importCursors replaces what the tracker knows by the stream, by what it was at a
// time. That two publishers
// speak for one rank is noticed anew when the older one is heard again. What waits
// has come now.
func (t *tracker) importCursors(now, at time.Time, cursors []Cursor, waiting []Waiting) {
	for _, r := range slices.Collect(maps.Values(t.ranks)) {
		if t.streamed(r.key.worker) {
			t.drop(r)
		}
	}
	for key := range t.waiting {
		if key.feed == FeedDurable {
			delete(t.waiting, key)
		}
	}
	t.forgetVoices(func(key waitKey, _ *voice) bool { return key.feed == FeedDurable })
	for _, c := range cursors {
		v := &voice{DialectUnknown, at}
		if c.PublisherID == 0 {
			v.dialect = DialectJSON
		}
		t.voices[waitKey{c.WorkerID, FeedDurable}] = v // of the newest publisher in the end
		if !t.streamed(c.WorkerID) || !t.workers[c.WorkerID].has(c.DPRank) {
			continue
		}
		if r := t.rank(rankKey{c.WorkerID, c.DPRank}); r != nil && len(r.cursors) < maxPublishers {
			r.cursors[c.PublisherID], r.newest = c.EventID, c.PublisherID
		}
	}
	for _, w := range waiting {
		t.accept(now, FeedDurable, w.PublisherID, w.Event)
	}
}
