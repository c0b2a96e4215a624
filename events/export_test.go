// SPDX-License-Identifier: Apache-2.0

package events

import (
	"fmt"
	"strings"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// Tracker lets tests drive the subscriber's bookkeeping without NATS.
type Tracker struct{ t *tracker }

// NewTracker returns an empty one.
func NewTracker(sink Sink) Tracker { return Tracker{newTracker(sink)} }

// Accept takes an event and returns what is true of the verdict, in words.
func (t Tracker) Accept(now time.Time, publisher uint64, ev RouterEvent) string {
	var words []string
	for f := range strings.FieldsSeq(strings.Trim(fmt.Sprintf("%+v", t.t.accept(now, publisher, ev)), "{}")) {
		if name, ok := strings.CutSuffix(f, ":true"); ok {
			words = append(words, name)
		}
	}
	return strings.Join(words, " ")
}

// Known, Forget and Expire are the tracker's.
func (t Tracker) Known(worker uint64)      { t.t.known(worker) }
func (t Tracker) Forget(worker uint64)     { t.t.forget(worker) }
func (t Tracker) Expire(now time.Time) int { return t.t.expire(now) }
func (t Tracker) Waiting() (workers, evs int) {
	for _, q := range t.t.waiting {
		evs += len(q.events)
	}
	return len(t.t.waiting), evs
}

// Ranks counts the ranks whose cursors are kept.
func (t Tracker) Ranks() int { return len(t.t.ranks) }

// MaxWaitingEvents and MaxWaitingWorkers are bounds.
const (
	MaxWaitingEvents  = maxWaitingEvents
	MaxWaitingWorkers = maxWaitingWorkers
	MaxPending        = maxPending
	MaxRanks          = maxRanks
)

// Told returns what the index must know at most: the ids that stand for blocks
// which the engine has, by rank and tier. It also counts what is kept.
func (e *Engine) Told() (told map[uint32]map[indexer.Tier]map[uint64]bool, weight int) {
	told = make(map[uint32]map[indexer.Tier]map[uint64]bool)
	for rank, r := range e.ranks {
		told[rank] = make(map[indexer.Tier]map[uint64]bool)
		for at, blocks := range r.places {
			if told[rank][at.tier] == nil {
				told[rank][at.tier] = make(map[uint64]bool)
			}
			for hash, k := range blocks {
				weight += k.weight()
				if k.published {
					for _, id := range appendExternals(nil, hash, &k) {
						told[rank][at.tier][id] = true
					}
				}
			}
		}
	}
	return told, weight
}
