// SPDX-License-Identifier: Apache-2.0

package events

import (
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// Feed is a way for events to come.
type Feed uint8

// The feeds. The zero one stands for all of them.
const (
	FeedAny     Feed = iota
	FeedCore         // NATS core
	FeedDurable      // JetStream
	FeedZMQ
	FeedPoll  // HTTP
	FeedPlane // Dynamo's event plane, as its workers' records say
	FeedNone  // events are not wanted
	feedSaved // none yet: the worker is known from an earlier process only, see [Subscriber.Load]
)

//nolint:gochecknoglobals // a table: the feeds that events come from, in the order in which waiting events are taken
var feeds = [...]Feed{FeedAny, FeedDurable, FeedCore, FeedZMQ, FeedPoll, FeedPlane}

// Source says where the events of a worker are taken from. The zero Source takes
// them all, of any rank.
type Source struct {
	Feed Feed
	// Queries says that a local indexer of the worker answers queries.
	Queries bool
	// DPStart and DPSize are the worker's ranks. A DPSize of 0 stands for any, and
	// is not for workers that answer queries.
	DPStart, DPSize uint32
	// StartedMS and Home name an incarnation of the worker and the place where
	// its blocks are counted. If either changes, the sink has forgotten them.
	StartedMS int64
	Home      string
	// Publisher is the one that speaks for all of the worker's ranks, as its record
	// says; 0 if that does not say. Of any other the events wait, for the record to
	// name it: see the package's promises.
	Publisher uint64
}

// asked reports whether workers of a feed are asked by [SubscriberConfig].Ask, not over
// the bus.
func (f Feed) asked() bool { return f == FeedZMQ || f == FeedPlane }

func (s Source) takes(feed Feed) bool {
	return s.Feed == feed || s.Feed == FeedAny || feed == FeedAny && s.Feed != FeedNone
}

// continues reports whether what an earlier process saved of a worker can be used: whether
// the worker is the same process, and counts its blocks in the same place. A worker without
// a start time must answer queries, which show whether it is the same.
func (s Source) continues(saved Source) bool {
	return s.Home == saved.Home && s.StartedMS == saved.StartedMS && (s.StartedMS != 0 || s.Queries) && s.Feed != FeedDurable
}

// hears reports whether a publisher may speak for the worker.
func (s Source) hears(publisher uint64) bool { return s.Publisher == 0 || s.Publisher == publisher }

func (s Source) has(rank uint32) bool {
	return s.DPSize == 0 || rank >= s.DPStart && rank-s.DPStart < s.DPSize
}

// setWorker takes what is known of a worker. Whoever calls it has told the sink
// first.
func (t *tracker) setWorker(now time.Time, id uint64, src Source) {
	old, told := t.workers[id]
	t.workers[id] = src
	if told && old == src {
		return
	}
	saved := told && old.Feed == feedSaved
	told = told && !saved
	restarted := told && (old.StartedMS != src.StartedMS || old.Home != src.Home)
	if restarted || old.takes(FeedDurable) != src.takes(FeedDurable) {
		t.doubtSnapshot(id)
	}
	// The tracker forgets what the sink has forgotten, or never got in order. A stream
	// brings everything in order, whether the worker is known or not.
	forgotten := restarted || !told && !saved && src.Queries && src.Feed != FeedDurable
	for _, r := range slices.Clone(t.owned[id].ranks) {
		switch {
		case forgotten || !src.has(r.key.rank) || src.Feed == FeedNone:
			t.drop(r)
		case !r.only(src.Publisher), saved && !src.continues(old):
			t.sink(id, r.key.rank, indexer.Event{Kind: indexer.Cleared}) // of a process that is gone
			t.drop(r)
		case saved:
			t.count("restored", 1)
			if !src.Queries {
				t.miss(now, r, StatePartial)
			}
		}
	}
	if src.Feed == FeedNone {
		t.known(now, id)
		return
	}
	for _, r := range t.owned[id].ranks {
		if t.tell(r); !told && r.told != StateOK {
			t.changed(id, r.key.rank, r.told) // who did not know the worker forgot it
		}
	}
	if t.stalled && src.Feed == FeedDurable {
		for n := range src.DPSize {
			t.rank(rankKey{id, src.DPStart + n})
		}
	}
	for n := range src.DPSize {
		t.setRank(now, rankKey{id, src.DPStart + n}, src)
	}
	t.known(now, id)
}

// only reports whether all that is known of a rank is by the publisher that its worker
// names, if it names one. What others said before that did not count.
func (r *rank) only(publisher uint64) bool {
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

// setRank begins or goes on with one rank of a worker that changed.
func (t *tracker) setRank(now time.Time, key rankKey, src Source) {
	r := t.ranks[key]
	if r != nil && !src.Queries {
		if r.repair != nil {
			t.giveUp(now, r) // nobody will answer
		}
		delete(t.repairs.timers, r)
		return
	}
	if r == nil {
		if !src.Queries || src.Feed == FeedDurable && !t.current {
			return // made by its first event, or at the end of the stream
		}
		if r = t.rank(key); r == nil {
			t.count("no_room", 1)
			return
		}
	}
	if src.Queries && r.repair == nil && (src.Feed != FeedDurable || t.current) {
		t.want(now, r, !r.cursor().set || r.state != StateOK, t.repairs.jitter(discoverySpread))
	}
}

// ChooseFeed says how to get the events of a worker that registered with a
// transport, and perhaps a local indexer: by the stream, if there is one, from a
// worker that publishes into it; by the bus from another one that can be asked for
// what the bus loses; else by the stream if there is one, else by the bus all the
// same; from where the record says if it names another place. Whoever has a local
// indexer is asked, whatever the feed: a stream loses events too, to its bounds, to
// whoever purges it, and with its store.
func ChooseFeed(transport string, localIndexer, durable bool) (feed Feed, queries bool) {
	switch transport {
	case "none", "heartbeat":
		return FeedNone, false
	case "zmq":
		return FeedZMQ, localIndexer
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
