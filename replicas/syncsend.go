// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/msgpack"
	"github.com/kvroute/kvroute/router"
)

// sender publishes the messages of a replica. It belongs to one goroutine.
type sender struct {
	*Sync
	flushed        time.Time // when changes were last sent
	next, bindings uint64    // numbers of the next messages about requests and sessions

	// Reused memory.
	changes                         []syncEvent
	events, entry, payload, message []byte
}

// syncBatch is the largest number of changes in a message.
const syncBatch = 256

func newSender(s *Sync) *sender { return &sender{Sync: s} }

func (s *sender) run(done <-chan struct{}, asked <-chan *nats.Msg) {
	s.present(false)
	tick := time.NewTicker(s.times.presence)
	defer tick.Stop()
	var flush, reopen <-chan time.Time
	open := asked // nil for a while after a list was sent
	for {
		select {
		case <-done:
			s.present(true)
			return
		case <-s.own.wake:
			flush = time.After(max(syncDelay, syncSpacing-time.Since(s.flushed)))
		case <-flush:
			s.flush(false)
			flush = nil
		case b := <-s.sessions:
			s.postBinding(encodeSession(&b, s.conf.ID))
		case b := <-s.given:
			s.postBinding(encodeGiven(b, s.conf.ID))
		case <-tick.C:
			s.present(false)
		case <-s.announce:
			s.present(false)
		case m := <-open:
			lists, ids := replySubjects(m, open)
			s.sendList(lists)
			s.sendIDs(ids)
			open, reopen = nil, time.After(syncListEvery)
		case <-reopen:
			open, reopen = asked, nil
		}
	}
}

func (s *sender) postBinding(payload []byte) {
	s.post(s.sessionTopic, sessionTopic, s.bindings, payload)
	s.bindings++
}

// replySubjects returns the reply subjects of all waiting requests: for the list of requests, and for ids.
func replySubjects(first *nats.Msg, more <-chan *nats.Msg) (lists, ids []string) {
	for m := first; ; {
		to := &lists
		if string(m.Data) == askIDs {
			to = &ids
		}
		if m.Reply != "" && !slices.Contains(*to, m.Reply) {
			*to = append(*to, m.Reply)
		}
		select {
		case m = <-more:
		default:
			return lists, ids
		}
	}
}

// flush sends the waiting changes. Without a connection, or without another router, they
// are dropped and their numbers skipped, so that peers notice.
func (s *sender) flush(withList bool) ownState {
	state := s.own.take(s.changes, withList)
	s.flushed = time.Now()
	unsent := len(state.changes) > 0 && s.alone()
	if state.skipped || unsent {
		s.next++
	}
	if !unsent {
		s.sendAll(state.changes)
	}
	clear(state.changes) // they hold ids and hashes
	s.changes = state.changes[:0]
	return state
}

// sendAll sends changes in as many messages as necessary.
func (s *sender) sendAll(changes []syncEvent) {
	if len(changes) == 0 {
		return
	}
	for i := range changes {
		s.metrics.sent[changes[i].Kind].Add(1)
	}
	s.pack(len(changes), syncBatch, s.room(), func(i int) *syncEvent { return &changes[i] }, func(list []byte) {
		w := msgpack.Writer{B: s.payload[:0]}
		w.Map(1)
		s.payload = append(w.B, list...)
		s.post(s.topic, syncTopic, s.next, s.payload)
		s.next++
	})
}

// pack encodes n events as the entry "events" of as many messages as necessary, at least one. An
// entry has at most this number of events and of bytes, or one event. It is valid during the call
// of emit only.
func (s *sender) pack(n, most, room int, event func(i int) *syncEvent, emit func(entry []byte)) {
	s.events = s.events[:0]
	packed := 0
	cut := func(end int) {
		w := msgpack.Writer{B: s.entry[:0]}
		w.List("events", packed)
		s.entry = append(w.B, s.events[:end]...)
		emit(s.entry)
		s.events, packed = append(s.events[:0], s.events[end:]...), 0
	}
	for i := range n {
		before := len(s.events)
		s.events = appendSyncEvent(s.events, s.fit(event(i)))
		if packed > 0 && (packed == most || len(s.events) > room) {
			cut(before)
		}
		packed++
	}
	cut(len(s.events))
}

// room returns the number of bytes of changes that fit into a message.
func (s *sender) room() int { return max(s.link.room()-1024, 4096) }

// fit shortens the hashes of a prompt that is too long for one message.
func (s *sender) fit(e *syncEvent) *syncEvent {
	if most := (s.room() - 2*maxSyncID) / 9; len(e.Sequence) > most {
		e.Sequence = e.Sequence[:most]
	}
	return e
}

// present publishes the presence, after all changes so far.
func (s *sender) present(leaving bool) {
	state := s.flush(false)
	p := s.conf.Presence
	p.RouterID, p.SyncSeq, p.ActiveRequests, p.Leaving = s.conf.ID, new(s.next), state.active, leaving
	data, err := json.Marshal(p)
	if err == nil {
		err = s.link.send(s.presence, "", data)
	}
	if err != nil {
		s.metrics.news.Count("unsent")
	}
}

// sendList sends the list of all requests in flight, after all changes so far.
func (s *sender) sendList(to []string) {
	if len(to) == 0 {
		return
	}
	state := s.flush(true)
	s.othersSeen.Store(s.conf.Now().UnixNano()) // the peer's presence may not have arrived yet
	parts := s.listParts(state.list)
	for i, part := range parts {
		var w msgpack.Writer
		w.Map(3)
		w.Uint("part", number(i))
		w.Uint("parts", number(len(parts)))
		payload := append(w.B, part...)
		for _, subject := range to {
			s.post(subject, syncTopic, s.next, payload)
		}
	}
	s.metrics.news.Count("answered")
}

// listParts encodes a list in parts of at most 512 KiB, or one request.
func (s *sender) listParts(list []ownRequest) (parts [][]byte) {
	s.pack(len(list), len(list), min(512<<10, s.room()), func(i int) *syncEvent {
		e := syncEvent{router: s.conf.ID, started: list[i].started, Change: list[i].Change}
		e.Kind = router.SlotTaken
		return &e
	}, func(entry []byte) { parts = append(parts, slices.Clone(entry)) })
	return parts
}

// post sends an envelope.
func (s *sender) post(subject, topic string, number uint64, payload []byte) {
	s.message = events.AppendEnvelope(s.message[:0], events.Envelope{
		PublisherID: s.conf.ID, Sequence: number, PublishedAt: uint64(max(0, s.conf.Now().UnixMilli())),
		Topic: topic, Payload: payload,
	})
	if s.link.send(subject, "", s.message) != nil {
		s.metrics.news.Count("unsent")
		return
	}
	s.metrics.news.Count("sent")
}
