// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"
	"sync"
	"time"

	"github.com/kvroute/kvroute/router"
)

// Limits of [Loads].
const (
	loadLife   = 10 * time.Second // of a report, as in the router
	maxReports = 8                // for one rank
)

// LoadVia is the source of a load report.
type LoadVia uint8

// The sources of load reports.
const (
	ViaHeartbeat LoadVia = iota // a share of all ranks' load; 0 also if it is unknown
	ViaBus                      // of a publisher, for a rank
	ViaMetrics                  // read by this router, for a rank
)

// Loads combines the load reports of each rank, such as the used blocks of its cache. The
// zero value is ready. Its methods may be called by any number of goroutines.
//
// A report counts for 10 s, and only the last one of each source. Of several publishers the
// largest value counts. A heartbeat counts only for a rank without other reports, because
// it contains the load of all ranks together.
type Loads struct {
	mu sync.Mutex
	// mu guards the field below.
	workers map[uint64]map[uint32][]rankReport // by id and rank
}

type rankReport struct {
	via       LoadVia
	publisher uint64
	blocks    int
	at        time.Time
}

// Report takes a report, and returns the blocks that are in use by all reports. counts is
// false if the report changes nothing. The publisher distinguishes reports from the bus.
func (l *Loads) Report(w router.Worker, via LoadVia, publisher uint64, blocks int, at time.Time) (used int, counts bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.workers == nil {
		l.workers = make(map[uint64]map[uint32][]rankReport)
	}
	ranks := l.workers[w.ID]
	if ranks == nil {
		ranks = make(map[uint32][]rankReport)
		l.workers[w.ID] = ranks
	}
	all := slices.DeleteFunc(ranks[w.DPRank], func(s rankReport) bool {
		return at.Sub(s.at) > loadLife || s.via == via && s.publisher == publisher
	})
	if len(all) == maxReports {
		all = slices.Delete(all, 0, 1) // the oldest one
	}
	all = append(all, rankReport{via, publisher, blocks, at})
	ranks[w.DPRank] = all
	for _, s := range all {
		switch {
		case via == ViaHeartbeat && s.via != ViaHeartbeat:
			return 0, false
		case s.via == via: // of several sources the newest counts
			used = max(used, s.blocks)
		}
	}
	return used, true
}

// Forget drops the reports of a worker.
func (l *Loads) Forget(id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.workers, id)
}
