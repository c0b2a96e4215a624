// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"time"

	"github.com/kvroute/kvroute/engines/localindex"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// presenceTopic is the last part of the subject on which routers say that they are
// there.
const presenceTopic = "presence"

// reply answers data that asks for events, or returns nil if it is not to be
// answered.
func (p *Publisher) reply(data []byte) *events.Answer {
	q, err := events.DecodeQuery(data)
	switch {
	case err != nil:
		return &events.Answer{Message: "the query cannot be read"}
	case q.Kind != events.RecoveryKind:
		return nil // not for us, and never answered
	case q.WorkerID != p.conf.WorkerID:
		return &events.Answer{Message: "this is another worker"}
	}
	answer := p.answer(&q)
	return &answer
}

func (p *Publisher) answer(q *events.Query) events.Answer {
	p.answering.Lock()
	defer p.answering.Unlock()
	p.mu.Lock()
	p.sealLocked()
	a, content := p.local.Answer(q)
	p.mu.Unlock()
	localindex.Complete(&a, q, content)
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
	for _, rank := range p.local.Ranks() {
		content, waiting := p.local.Rank(rank)
		evs, err := content.Events()
		if err != nil { // it cannot be overtaken: we hold mu
			p.lost[rank] = true
			continue
		}
		evs = append(evs, waiting...)
		p.publishLocked(rank, indexer.Event{Kind: indexer.Cleared})
		for _, ev := range evs {
			p.publishLocked(rank, ev)
		}
	}
}
