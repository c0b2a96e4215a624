// SPDX-License-Identifier: Apache-2.0

package events

import (
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// Feed is a source from which events arrive.
type Feed uint8

// The feeds. The zero value stands for all of them.
const (
	FeedAny     Feed = iota
	FeedCore         // NATS core
	FeedDurable      // JetStream
	FeedZMQ
	FeedPoll  // HTTP
	FeedPlane // Dynamo's event plane, at the addresses in its workers' records; queries go to [SubscriberConfig].Ask
	FeedNone  // events are not wanted
	feedSaved // none yet: the worker is known from an earlier process only, see [Subscriber.Load]
)

// String returns the feed's name in metrics. A query without a worker counts as one over NATS.
func (f Feed) String() string {
	return [...]string{"nats", "nats", "stream", "zmq", "polling", "plane", "none", "saved"}[f]
}

// Source is where the events of a worker come from. The zero Source accepts every feed and rank.
type Source struct {
	Feed Feed
	// Queries: a local indexer of the worker answers queries.
	Queries bool
	// DPStart and DPSize are the worker's ranks. A DPSize of 0 stands for any rank. Workers
	// with Queries need a DPSize.
	DPStart, DPSize uint32
	// StartedMS identifies the worker's process, and Home the index that its blocks are in. If
	// either changes, the sink has removed the blocks.
	StartedMS int64
	Home      string
	// Publisher is the publisher that the worker's record names, or 0. Events of any other
	// publisher wait until the record names it: see the package comment.
	Publisher uint64
}

func (s Source) takes(feed Feed) bool {
	return s.Feed == feed || s.Feed == FeedAny || feed == FeedAny && s.Feed != FeedNone
}

// continues reports whether an earlier process's saved state of a worker can be used: whether the
// worker is the same process, and its blocks are in the same index. A worker without a start time
// must answer queries, which show whether it is the same.
func (s Source) continues(saved Source) bool {
	return s.sameProcess(saved) && (s.StartedMS != 0 || s.Queries) && s.Feed != FeedDurable
}

// sameProcess reports whether the sink keeps a worker's blocks when its source changes.
func (s Source) sameProcess(old Source) bool {
	return s.StartedMS == old.StartedMS && s.Home == old.Home
}

// accepts reports whether events of a publisher are accepted.
func (s Source) accepts(publisher uint64) bool { return s.Publisher == 0 || s.Publisher == publisher }

func (s Source) has(rank uint32) bool {
	return s.DPSize == 0 || rank >= s.DPStart && rank-s.DPStart < s.DPSize
}

// setWorker sets the source of a worker. The sink knows the worker already.
func (t *tracker) setWorker(now time.Time, id uint64, src Source) {
	old, registered := t.workers[id]
	t.workers[id] = src
	if registered && old == src {
		return
	}
	saved := registered && old.Feed == feedSaved
	registered = registered && !saved
	restored := t.restored[id]
	delete(t.restored, id)
	restarted := registered && !src.sameProcess(old) || restored != (Source{}) && !src.sameProcess(restored)
	if restarted || old.takes(FeedDurable) != src.takes(FeedDurable) {
		t.markUnsure(id)
	}
	// The tracker forgets what the sink has forgotten, or never got in order. A stream
	// brings everything in order, whether the worker is known or not.
	forgotten := restarted || !registered && !saved && src.Queries && src.Feed != FeedDurable
	for _, r := range t.ranksOf(id) {
		switch {
		case forgotten || !src.has(r.DPRank) || src.Feed == FeedNone:
			t.drop(r)
		case !r.isOnlyFrom(src.Publisher), saved && !src.continues(old):
			t.wipe(r) // of a process that is gone
			t.drop(r)
		case saved:
			t.count(id, "restored", 1)
			if !src.Queries {
				t.miss(now, r, indexer.StatePartial)
			}
		}
	}
	if src.Feed == FeedNone {
		t.applyWaiting(now, id)
		return
	}
	for _, r := range t.ranksOf(id) {
		if t.report(r); !registered && r.reported != indexer.StateOK {
			t.changed(r.RankName, r.reported) // an unknown worker's state was not kept
		}
	}
	for n := range src.DPSize {
		key := RankName{id, src.DPStart + n}
		if t.stalled && src.Feed == FeedDurable {
			t.rank(key)
		}
		t.setRank(now, key, src)
	}
	t.applyWaiting(now, id)
}

// isOnlyFrom reports whether everything known of a rank is from the publisher that the worker's
// record names, if it names one.
func (r *rank) isOnlyFrom(publisher uint64) bool {
	if publisher == 0 || len(r.cursors) == 0 {
		return true
	}
	id, ok := r.cursors[publisher]
	if ok && r.newest == publisher && !r.many {
		clear(r.cursors)
		r.cursors[publisher] = id
		return true
	}
	return false
}

// setRank updates one rank after a change of its worker.
func (t *tracker) setRank(now time.Time, key RankName, src Source) {
	r := t.ranks[key]
	if r != nil && !src.Queries {
		if r.repair != nil {
			t.giveUp(now, r) // the worker does not answer any more
		}
		delete(t.repairs.timers, r)
		return
	}
	if r == nil {
		if !src.Queries || src.Feed == FeedDurable && !t.current {
			return // made by its first event, or at the end of the stream
		}
		if r = t.rank(key); r == nil {
			t.count(key.WorkerID, "no_room", 1)
			return
		}
	}
	if src.Queries && r.repair == nil && (src.Feed != FeedDurable || t.current) {
		t.startRepair(now, r, !r.cursor().set || r.state != indexer.StateOK, t.repairs.jitter(discoverySpread))
	}
}

// ChooseFeed returns the feed of a worker by the transport in its record, and whether the
// worker is queried. durable says that there is a stream:
//
//   - A record that names another source than NATS decides.
//   - A worker that publishes into the stream is read from the stream, if there is one.
//   - Otherwise a worker with a local indexer is read from NATS core, which may lose events.
//   - Otherwise the stream is read, or NATS core without a stream.
//
// A worker with a local indexer is queried whatever its feed is: a stream loses events, too.
func ChooseFeed(transport string, localIndexer, durable bool) (feed Feed, queries bool) {
	switch transport {
	case "none":
		return FeedNone, false
	case "zmq":
		return FeedZMQ, false
	case "http_poll":
		return FeedPoll, false
	case "dynamo":
		return FeedPlane, localIndexer
	case "jetstream":
		if durable {
			return FeedDurable, localIndexer
		}
	}
	switch {
	case localIndexer:
		return FeedCore, true
	case durable:
		return FeedDurable, false
	}
	return FeedCore, false
}
