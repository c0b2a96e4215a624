// SPDX-License-Identifier: Apache-2.0

package events

import (
	"strconv"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/wire"
)

// querySubject is where the local indexer of a worker's rank is asked.
func querySubject(scope wire.Scope, worker uint64, rank string) string {
	return scope.Own("query", wire.WorkerKey(worker), rank)
}

// legacyQuerySubject is where that of a worker of Dynamo 0.8 is asked, in JSON.
func legacyQuerySubject(scope wire.Scope, worker uint64) string {
	scope = scope.WithDefaults()
	return "namespace." + wire.Segment(scope.Namespace) + ".component." + wire.Segment(scope.Component) +
		".worker_kv_indexer_query." + strconv.FormatUint(worker, 10)
}

// presenceTopic is the last part of the subject on which routers say that they are
// there.
const presenceTopic = "presence"

// reply answers data that asks for events, or returns nil if it is not to be
// answered.
func (p *Publisher) reply(data []byte) (a *Answer, isJSON bool) {
	q, isJSON, err := DecodeQuery(data)
	switch {
	case err != nil:
		return &Answer{Message: "the query cannot be read"}, isJSON
	case q.Kind != recoveryKind:
		return nil, isJSON // not for us, and never answered
	case q.WorkerID != p.conf.WorkerID:
		return &Answer{Message: "this is another worker"}, isJSON
	}
	answer := p.answer(&q)
	return &answer, isJSON
}

func (p *Publisher) answer(q *Query) Answer {
	p.answering.Lock()
	defer p.answering.Unlock()
	p.mu.Lock()
	p.sealLocked()
	a, content := p.local.answer(q)
	p.mu.Unlock()
	a.complete(q, content)
	return a
}

// admit publishes an event without content for each rank whose last one may have
// been lost, if the bus is there to take it: readers see by its number what they
// miss. After a new connection that may be any.
func (p *Publisher) admit(reconnected bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if reconnected && !p.silent {
		for rank := range p.lastID {
			p.lost[rank] = true
		}
	}
	if len(p.lost) == 0 || !p.out.takes() {
		return
	}
	lost := p.lost
	p.lost = make(map[uint32]bool)
	for rank := range lost {
		p.publishLocked(rank, indexer.Event{Kind: indexer.Removed})
	}
}

// tell takes a router's message that it is there, or just looks at the clock. Who
// comes to be heard again is told what it missed.
func (p *Publisher) tell(now time.Time, presence []byte) {
	if !p.conf.Quiet {
		return
	}
	p.mu.Lock()
	if presence != nil {
		p.audience.hear(now, presence)
	}
	same := !p.audience.listens(now) == p.silent
	p.mu.Unlock()
	if same {
		return
	}
	p.answering.Lock()
	defer p.answering.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	silent := !p.audience.listens(now)
	if silent == p.silent {
		return
	}
	p.conf.Log.Info("routers want events, or want none any more", "wanted", !silent)
	p.silent = silent
	if silent || p.conf.LocalIndexer && !p.conf.Durable {
		return // who has missed something asks; who reads the stream does not
	}
	p.sealLocked()
	for rank, r := range p.local.ranks {
		evs, err := freeze(r.index).events()
		if err != nil { // it cannot be overtaken: we hold mu
			p.lost[rank] = true
			continue
		}
		evs = append(evs, r.parked.Waiting()[0]...)
		p.publishLocked(rank, indexer.Event{Kind: indexer.Cleared})
		for _, ev := range evs {
			p.publishLocked(rank, ev)
		}
	}
}
