// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/router"
)

// outgoing is what a replica says of itself. It belongs to one goroutine.
type outgoing struct {
	*Sync
	sequence uint64 // of the next message
	mirror   map[string]*ownRequest
	digest   uint64
	bindings uint64 // number of the next message about a session

	told                     syncTold // memory to be used again
	events, payload, message []byte
}

// ownRequest is a request in flight, as an answer tells of it.
type ownRequest struct {
	router.Change
	started bool
}

func newOutgoing(s *Sync) *outgoing {
	return &outgoing{Sync: s, mirror: make(map[string]*ownRequest)}
}

// take sends what the router told. While nobody listens it only notes it, and that there
// was something by a number in the sequence: who held an earlier state misses it.
func (o *outgoing) take() {
	told, quiet := o.queue.take(o.told), o.queue.quiet.Load()
	o.events = o.events[:0]
	n, skipped := 0, false
	for i := range told.changes {
		c := &told.changes[i]
		if c.from >= 0 {
			c.Sequence = told.hashes[c.from:c.to:c.to]
		}
		e, ok := o.note(&c.Change)
		if !ok {
			continue
		}
		if quiet && c.Owner == 0 {
			if !skipped {
				skipped = true
				o.sequence++
			}
			continue
		}
		before := len(o.events)
		o.events = appendSyncEvent(o.events, &e)
		if n > 0 && len(o.events) > o.space() {
			last := o.events[before:]
			o.publish(o.events[:before], n)
			o.events, n = append(o.events[:0], last...), 0
		}
		o.metrics.sent(c.Kind)
		if n++; n == syncBatch || o.conf.Single {
			o.publish(o.events, n)
			o.events, n = o.events[:0], 0
		}
	}
	if n > 0 {
		o.publish(o.events, n)
	}
	o.own.Store(int64(len(o.mirror)))
	told.reset()
	o.told = told
}

// space is how many bytes of events a message has room for.
func (o *outgoing) space() int { return max(o.link.room()-1024, 4096) }

// note changes the mirror by what happened. It reports whether others should know.
func (o *outgoing) note(c *router.Change) (e syncEvent, news bool) {
	e = syncEvent{router: o.conf.ID, Change: *c}
	if c.Owner != 0 { // another one's first token
		e.router = c.Owner
		return e, true
	}
	own := o.mirror[c.ID]
	if c.Kind == router.SlotTaken {
		if own != nil || c.ID == "" || len(c.ID) > maxSyncID {
			return e, false
		}
		if most := (o.space() - 2*maxSyncID) / 9; len(c.Sequence) > most {
			e.Sequence = e.Sequence[:most] // the rest of so long a prompt weighs little
		}
		own = &ownRequest{Change: e.Change}
		own.Sequence = slices.Clone(e.Sequence)
		o.mirror[c.ID] = own
		o.digest ^= digestOf(own.ID, own.Worker, false)
		return e, true
	}
	if own == nil {
		return e, false // it never had a slot
	}
	o.digest ^= digestOf(own.ID, own.Worker, own.started)
	switch c.Kind {
	case router.SlotTaken: // see above
	case router.FirstToken:
		news = !own.started
		own.started = true
	case router.SlotMoved:
		news = true
		own.Worker, own.CachedTokens, own.OverlapBlocks = c.Worker, c.CachedTokens, 0
	case router.SlotFreed:
		delete(o.mirror, c.ID)
		e.Worker = own.Worker
		return e, true
	}
	o.digest ^= digestOf(own.ID, own.Worker, own.started)
	e.Worker = own.Worker
	return e, news
}

// publish sends n events. While there is no connection they are lost, with their
// number in the sequence, so that everybody notices.
func (o *outgoing) publish(encoded []byte, n int) {
	payload := encoded
	if !o.conf.Single {
		payload = msgp.AppendString(msgp.AppendMapHeader(o.payload[:0], 1), "events")
		payload = msgp.AppendArrayHeader(payload, uint32(n))
		payload = append(payload, encoded...)
		o.payload = payload
	}
	o.post(o.topic, syncTopic, o.sequence, payload)
	o.sequence++
}

// session sends where a session is bound.
func (o *outgoing) session(b router.SessionBinding) {
	o.post(o.sessionTopic, sessionTopic, o.bindings, encodeSession(&b, o.conf.ID))
	o.bindings++
}

func (o *outgoing) post(subject, topic string, sequence uint64, payload []byte) {
	o.message = events.AppendEnvelope(o.message[:0], events.Envelope{
		PublisherID: o.conf.ID, Sequence: sequence, PublishedAt: uint64(max(0, o.conf.Now().UnixMilli())),
		Topic: topic, Payload: payload,
	})
	if !o.link.connected() || o.link.publish(subject, "", o.message) != nil {
		o.metrics.count(syncUnsent)
		return
	}
	o.metrics.count(syncOut)
}

// present says that this replica is there, and what others should hold of it.
func (o *outgoing) present() { o.say(false) }

// leave sends what is left, and that nothing will follow.
func (o *outgoing) leave() { o.say(true) }

func (o *outgoing) say(leaving bool) {
	o.take()
	if !o.link.connected() {
		return
	}
	p := o.conf.Presence
	p.Leaving = leaving
	sequence := o.sequence
	p.RouterID, p.SyncSeq, p.ActiveRequests, p.Digest = o.conf.ID, &sequence, len(o.mirror), fmt.Sprintf("%016x", o.digest)
	data, err := json.Marshal(p)
	if err == nil {
		err = o.link.publish(o.presence, "", data)
	}
	if err != nil {
		o.metrics.count(syncUnsent)
	}
}

// answer tells those who ask of all requests in flight.
func (o *outgoing) answer(to []string) {
	if len(to) == 0 {
		return
	}
	o.take()
	// Who asked listens, though its presence may not have been read yet.
	o.listened.Store(o.conf.Now().UnixNano())
	o.queue.quiet.Store(false)
	const part = 512 << 10
	var parts [][]byte
	var buf []byte
	n := 0
	cut := func() {
		p := msgp.AppendArrayHeader(msgp.AppendString(nil, "events"), uint32(n))
		parts = append(parts, append(p, buf...))
		buf, n = buf[:0], 0
	}
	room := min(part, o.space())
	for _, own := range o.mirror {
		e := syncEvent{router: o.conf.ID, started: own.started, Change: own.Change}
		before := len(buf)
		if buf = appendSyncEvent(buf, &e); n > 0 && len(buf) > room {
			last := slices.Clone(buf[before:])
			buf = buf[:before]
			cut()
			buf = append(buf, last...)
		}
		n++
	}
	if n > 0 || len(parts) == 0 {
		cut()
	}
	for i, p := range parts {
		payload := msgp.AppendInt(msgp.AppendString(msgp.AppendMapHeader(nil, 3), "part"), i)
		payload = msgp.AppendInt(msgp.AppendString(payload, "parts"), len(parts))
		payload = append(payload, p...)
		for _, reply := range to {
			o.post(reply, syncTopic, o.sequence, payload)
		}
	}
	o.metrics.count(syncAnswered)
}

// lateness measures how long messages take, by clocks that need not agree: the quickest
// of the last minutes counts as immediate.
type lateness struct {
	now, before int64 // the smallest difference of the clocks in ms, in this minute and the last
	since       time.Time
	some        bool
}

func (l *lateness) of(now time.Time, publishedMS uint64) time.Duration {
	diff := now.UnixMilli() - int64(publishedMS)
	switch {
	case !l.some:
		l.now, l.before, l.since, l.some = diff, diff, now, true
	case now.Sub(l.since) >= time.Minute:
		l.before, l.now, l.since = l.now, diff, now
	}
	l.now = min(l.now, diff)
	return time.Duration(diff-min(l.now, l.before)) * time.Millisecond
}
