// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"
	"sync"
	"time"

	"github.com/kvroute/kvroute/router"
)

// Bounds of what [Loads] keeps.
const (
	loadLife   = 10 * time.Second // as the router's own for what it is told
	maxSpeaker = 8                // for one rank
)

// LoadVia is a way in which an engine's load comes to be known.
type LoadVia uint8

// The ways.
const (
	ViaHeartbeat LoadVia = iota // of all ranks together, and 0 also where it is not known
	ViaBus                      // of a publisher, for a rank
	ViaMetrics                  // read by this router, for a rank
	ViaHeader                   // in a response
)

// Loads says how many blocks of a rank's cache are in use, by all who speak of it. The zero
// value is ready. Its methods may be called by any number of goroutines.
//
// What was said within 10 s counts, of each speaker the last. Several publishers are
// believed as far as the one that says most. A heartbeat counts only for a rank of which
// nobody else speaks: it knows of all ranks together at most.
type Loads struct {
	mu sync.Mutex
	// mu guards the field below.
	workers map[uint64]map[uint32][]loadSaid // by id and rank
}

type loadSaid struct {
	via       LoadVia
	publisher uint64
	blocks    int
	at        time.Time
}

// Say takes what is said of a rank at a time. It returns how many blocks are in use then,
// and false if this changes nothing. Publisher tells those on the bus apart.
func (l *Loads) Say(w router.Worker, via LoadVia, publisher uint64, blocks int, at time.Time) (used int, counts bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.workers == nil {
		l.workers = make(map[uint64]map[uint32][]loadSaid)
	}
	ranks := l.workers[w.ID]
	if ranks == nil {
		ranks = make(map[uint32][]loadSaid)
		l.workers[w.ID] = ranks
	}
	all := slices.DeleteFunc(ranks[w.DPRank], func(s loadSaid) bool {
		return at.Sub(s.at) > loadLife || s.via == via && s.publisher == publisher
	})
	if len(all) == maxSpeaker {
		all = slices.Delete(all, 0, 1) // who has been silent for longest
	}
	all = append(all, loadSaid{via, publisher, blocks, at})
	ranks[w.DPRank] = all
	for _, s := range all {
		switch {
		case via == ViaHeartbeat && s.via != ViaHeartbeat:
			return 0, false
		case s.via == via: // of other ways the newest counts
			used = max(used, s.blocks)
		}
	}
	return used, true
}

// Forget forgets a worker.
func (l *Loads) Forget(id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.workers, id)
}
