// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"sync"
	"sync/atomic"

	"github.com/kvroute/kvroute/router"
)

// syncQueue is what the router told and nobody has taken yet.
//
// It holds at most limit changes, and the ends of requests whose beginning it took. At
// the limit first tokens go first, then beginnings. Of a request whose beginning went
// nothing else is kept: nobody knows of it.
type syncQueue struct {
	limit      int
	wake, full chan struct{} // have room for one
	// quiet says that nobody listens: changes wake nobody before they are a message's
	// worth. Who ends it takes what has gathered.
	quiet atomic.Bool

	mu sync.Mutex
	// mu guards the fields below.
	syncTold
	marks   int
	skipped map[string]struct{} // requests whose beginning went
}

// syncTold are changes in the order in which they were told. The sequence of each is
// in hashes.
type syncTold struct {
	changes []toldChange
	hashes  []uint64
}

type toldChange struct {
	router.Change
	from, to int // in hashes
}

// put takes a change, and returns what had to go: the names of kinds, empty for none.
func (q *syncQueue) put(c *router.Change) (lost string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.skipped) > 0 && c.Owner == 0 {
		if _, skipped := q.skipped[c.ID]; skipped {
			if c.Kind == router.SlotFreed {
				delete(q.skipped, c.ID)
			}
			return ""
		}
	}
	if len(q.changes) >= q.limit {
		if c.Kind != router.FirstToken && q.marks > 0 {
			q.dropMarks()
			lost = router.FirstToken.String()
		}
		switch {
		case len(q.changes) < q.limit:
		case c.Kind == router.SlotTaken:
			if q.skipped == nil {
				q.skipped = make(map[string]struct{})
			}
			q.skipped[c.ID] = struct{}{}
			return c.Kind.String()
		case c.Kind == router.FirstToken:
			return c.Kind.String()
		}
	}
	if c.Kind == router.FirstToken {
		q.marks++
	}
	from := len(q.hashes)
	q.hashes = append(q.hashes, c.Sequence...)
	one := toldChange{*c, from, len(q.hashes)}
	one.Sequence = nil
	if c.Sequence == nil {
		one.from = -1
	}
	q.changes = append(q.changes, one)
	if !q.quiet.Load() {
		signal(q.wake)
	}
	if len(q.changes) >= syncBatch {
		signal(q.full)
	}
	return lost
}

func (q *syncQueue) dropMarks() {
	kept := q.changes[:0]
	for _, c := range q.changes {
		if c.Kind != router.FirstToken {
			kept = append(kept, c)
		}
	}
	clear(q.changes[len(kept):])
	q.changes, q.marks = kept, 0
}

// take returns what was told, in exchange for memory that is used again.
func (q *syncQueue) take(empty syncTold) syncTold {
	q.mu.Lock()
	defer q.mu.Unlock()
	select {
	case <-q.full: // it was about these
	default:
	}
	told := q.syncTold
	q.syncTold, q.marks = empty, 0
	return told
}

// reset empties t but for its memory, unless that is much.
func (t *syncTold) reset() {
	const keep = 1 << 20
	clear(t.changes) // they hold ids
	t.changes, t.hashes = t.changes[:0], t.hashes[:0]
	if cap(t.hashes) > keep {
		t.hashes = nil
	}
	if cap(t.changes) > 8*syncBatch {
		t.changes = nil
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
