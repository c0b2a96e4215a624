// SPDX-License-Identifier: Apache-2.0

package events

import (
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// voice is the dialect in which a worker is understood on a feed. Whoever bridges an
// old fleet to a new one may have a worker heard in two; their ids have nothing to do
// with each other.
//
// Invariant: the events of a worker that count on a feed are of one dialect until
// that was silent for silentFor; then what it told is forgotten.
type voice struct {
	dialect Dialect // DialectUnknown stands for either of those with an envelope
	heard   time.Time
}

// silentFor is how long the dialect of a worker is not heard before another one
// takes its place.
const silentFor = 30 * time.Second

// speaks reports whether a worker's events of a dialect, sent at a time, count.
func (t *tracker) speaks(sent time.Time, feed Feed, worker uint64, d Dialect) bool {
	key := waitKey{worker, feed}
	v := t.voices[key]
	switch {
	case v == nil:
		if len(t.voices) < maxRanks {
			t.voices[key] = &voice{d, sent}
		}
		return true
	case v.dialect == DialectUnknown && d != DialectJSON:
		v.dialect = d
	case v.dialect != d && sent.Sub(v.heard) < silentFor:
		return false
	case v.dialect != d:
		v.dialect = d
		if src, told := t.workers[worker]; !told || src.takes(feed) {
			for _, r := range slices.Clone(t.owned[worker].ranks) {
				t.sink(worker, r.key.rank, indexer.Event{Kind: indexer.Cleared})
				t.drop(r)
			}
		}
	}
	if sent.After(v.heard) {
		v.heard = sent
	}
	return true
}

// forgetVoices forgets the dialects of the workers and feeds named.
func (t *tracker) forgetVoices(of func(waitKey, *voice) bool) {
	for key, v := range t.voices {
		if of(key, v) {
			delete(t.voices, key)
		}
	}
}
