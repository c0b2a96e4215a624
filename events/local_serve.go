// SPDX-License-Identifier: Apache-2.0

package events

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/wire"
)

// Headers of an answer.
const (
	headerPublisher = "Kvr-Publisher" // whose event ids they are, 16 hex digits
	headerPart      = "Kvr-Part"      // number of the part, from 0
	headerParts     = "Kvr-Parts"     // how many there are; absent: one
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

// listen opens what the publisher listens to. It returns what it has opened even
// if not all could be.
func (p *Publisher) listen() (subs []*nats.Subscription, err error) {
	open := func(subject string, take nats.MsgHandler) {
		sub, e := p.nc.Subscribe(subject, take)
		if e != nil {
			err = errors.Join(err, fmt.Errorf("events: subscribe to %s: %w", subject, e))
			return
		}
		subs = append(subs, sub)
	}
	if p.conf.LocalIndexer {
		open(querySubject(p.conf.Scope, p.conf.WorkerID, "*"), p.query)
		open(legacyQuerySubject(p.conf.Scope, p.conf.WorkerID), p.query)
	}
	if p.conf.Quiet {
		open(p.conf.Scope.Own(presenceTopic), func(m *nats.Msg) { p.tell(p.conf.Now(), m.Data) })
	}
	return subs, err
}

// query answers a message that asks for events.
func (p *Publisher) query(m *nats.Msg) {
	if m.Reply == "" {
		return
	}
	q, isJSON, err := DecodeQuery(m.Data)
	switch {
	case err != nil:
		p.respond(m.Reply, isJSON, &Answer{Message: "the query cannot be read"})
		return
	case q.Kind != recoveryKind:
		return // not for us, and never answered
	case q.WorkerID != p.conf.WorkerID:
		p.respond(m.Reply, isJSON, &Answer{Message: "this is another worker"})
		return
	}
	a := p.answer(&q)
	p.respond(m.Reply, isJSON, &a)
}

func (p *Publisher) answer(q *Query) Answer {
	p.answering.Lock()
	defer p.answering.Unlock()
	p.mu.Lock()
	p.sealLocked()
	a, content := p.local.answer(q)
	p.mu.Unlock()
	if content != nil {
		for i, ev := range RankEvents(content, 0) {
			a.Events = append(a.Events, RouterEvent{WorkerID: q.WorkerID, DPRank: q.DPRank, EventID: uint64(i) + 1, Event: ev})
		}
	}
	return a
}

func (p *Publisher) respond(to string, isJSON bool, a *Answer) {
	parts := a.parts()
	if isJSON {
		parts = []Answer{*a} // that dialect has no parts
	}
	for i := range parts {
		m := nats.NewMsg(to)
		if isJSON {
			m.Data = AppendJSONAnswer(nil, &parts[i])
		} else {
			m.Data = AppendAnswer(nil, &parts[i])
			m.Header.Set(headerPublisher, wire.WorkerKey(p.id))
		}
		if len(parts) > 1 {
			m.Header.Set(headerPart, strconv.Itoa(i))
			m.Header.Set(headerParts, strconv.Itoa(len(parts)))
		}
		if err := p.nc.PublishMsg(m); err != nil {
			p.conf.Log.Warn("a query about the worker's events cannot be answered", "err", err)
			return
		}
	}
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
	if len(p.lost) == 0 || !p.nc.IsConnected() {
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
		evs := RankEvents(frozen(r.index), 0)
		p.publishLocked(rank, indexer.Event{Kind: indexer.Cleared})
		for _, ev := range evs {
			p.publishLocked(rank, ev)
		}
	}
}
