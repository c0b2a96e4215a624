// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"encoding/json"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/router"
)

// receiver takes what other routers publish. It belongs to one goroutine.
type receiver struct {
	*Sync
	peers     map[uint64]*peer     // other replicas
	strangers map[uint64]time.Time // routers of Dynamo, and when their last message came
	latencies map[uint64]*latency  // by publisher
	reader    syncReader

	reconnects uint64    // of the connection, at the last tick
	away       bool      // there was no connection at the last tick
	ticked     time.Time // the last tick
	warned     time.Time // when a late message was logged last
}

// peer is another replica.
type peer struct {
	id   uint64
	name string
	seen time.Time // the last sign of life

	requests map[string]heldRequest
	next     uint64 // number of its next message

	ask   time.Time // when to request its list; zero while requests is what its messages made
	tries int       // requests for the list that were not answered
	list  *partialList
}

// heldRequest is a request of a peer.
type heldRequest struct {
	worker  router.Worker
	started bool // it has its first token
	booked  bool // the router has a slot for it: it knows the worker
}

// partialList is a list of which parts have not come.
type partialList struct {
	number      uint64 // of the peer's next message behind it
	next, parts int
	requests    map[string]syncEvent
}

func newReceiver(s *Sync) *receiver {
	return &receiver{
		Sync: s, peers: make(map[uint64]*peer), strangers: make(map[uint64]time.Time), latencies: make(map[uint64]*latency),
		reconnects: s.link.reconnects(), ticked: s.conf.Now(),
	}
}

func (r *receiver) run(done <-chan struct{}, in <-chan *nats.Msg) {
	tick := time.NewTicker(min(max(r.times.presence/20, time.Millisecond), 100*time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case m := <-in:
			r.message(m.Subject, m.Data)
		case <-tick.C:
			// A peer whose messages wait here is not silent: these come first.
			for range len(in) {
				m := <-in
				r.message(m.Subject, m.Data)
			}
			r.tick()
		}
	}
}

func (r *receiver) message(subject string, data []byte) {
	if subject == r.presence {
		r.present(data)
		return
	}
	env, err := events.DecodeEnvelope(data)
	switch {
	case err != nil:
		r.metrics.count(syncBad)
	case env.PublisherID == r.conf.ID:
	case env.Topic == sessionTopic:
		r.session(env.Payload)
	case subject == r.lists:
		r.listPart(&env)
	default:
		r.changes(&env)
	}
}

func (r *receiver) session(payload []byte) {
	b, from, err := readSession(payload)
	switch {
	case err != nil:
		r.metrics.count(syncBad)
	case from == r.conf.ID || r.conf.Bind == nil:
	case r.conf.Bind(b):
		r.metrics.count(syncSession)
	default:
		r.metrics.count(syncSessionKept)
	}
}

// changes takes a message about requests.
func (r *receiver) changes(env *events.Envelope) {
	now := r.conf.Now()
	from := r.peers[env.PublisherID]
	if from != nil {
		from.seen = now
		if env.Sequence != from.next {
			r.requestList(now, from, "hole")
		}
		if env.Sequence < from.next {
			// It came twice, or another process used the number.
			r.metrics.count(syncRepeated)
			return
		}
		from.next = env.Sequence + 1
	}
	r.metrics.count(syncIn)
	r.measure(now, env)
	_, bad, err := r.reader.read(env.Payload, func(e *syncEvent) {
		r.metrics.received(e.Kind)
		if from != nil && e.router == from.id {
			r.peerChange(now, from, e)
		} else {
			r.strangerChange(now, e)
		}
	})
	if err != nil {
		bad++
	}
	if r.metrics.add(syncBadEvent, bad); bad > 0 && from != nil {
		r.requestList(now, from, "unreadable")
	}
}

// measure notes how late a message is, and logs it if that is too late to decide by.
func (r *receiver) measure(now time.Time, env *events.Envelope) {
	l := r.latencies[env.PublisherID]
	if l == nil {
		if len(r.latencies) >= 4*syncPeers { // workers publish, too
			clear(r.latencies)
		}
		l = new(latency)
		r.latencies[env.PublisherID] = l
	}
	late := l.of(now, env.PublishedAt)
	r.metrics.delayed(late)
	if late <= syncLate {
		return
	}
	r.metrics.count(syncTooLate)
	if now.Sub(r.warned) >= time.Minute {
		r.warned = now
		r.conf.Log.Warn("other replicas' changes come late; decisions are worse for it", "delay", late, "publisher", env.PublisherID)
	}
}

// strangerChange takes a change that is not about a request of its publisher: of a router
// of Dynamo, of a worker, or a first token that a peer noticed.
func (r *receiver) strangerChange(now time.Time, e *syncEvent) {
	_, known := r.strangers[e.router]
	switch {
	case e.Kind == 0: // of a kind to come
	case e.Kind == router.FirstToken && e.router == e.Worker.ID:
		// A worker says so. It does not know whose request that is.
		if !r.conf.FirstToken(e.ID) {
			for id := range r.strangers {
				r.conf.Apply(id, e.Change)
			}
		}
	case e.Kind == router.FirstToken && e.router == r.conf.ID:
		r.conf.FirstToken(e.ID)
	case e.router == r.conf.ID || r.peers[e.router] != nil: // the owner publishes it itself
	case !known && len(r.strangers)+len(r.peers) >= syncPeers:
		r.metrics.count(syncTooMany)
	default:
		if r.strangers[e.router] = now; !known {
			r.heardRouter(now)
		}
		e.Expires = true
		if !r.conf.Apply(e.router, e.Change) {
			r.metrics.count(syncUnknown)
		}
	}
}

// peerChange takes a change of a peer's request.
func (r *receiver) peerChange(now time.Time, from *peer, e *syncEvent) {
	held, known := from.requests[e.ID]
	switch {
	case e.Kind == 0: // of a kind to come
	case e.Kind == router.SlotTaken && !known:
		r.take(from, e)
	case e.Kind == router.SlotTaken, e.Kind == router.FirstToken && held.started:
		r.metrics.count(syncDuplicate)
	case !known:
		r.metrics.count(syncUnknown)
	case e.Kind == router.FirstToken:
		r.start(from, e.ID, held)
	case e.Kind == router.SlotMoved:
		if r.move(from, e, held); !held.booked {
			r.requestList(now, from, "worker") // what the slot is to hold is not known any more
		}
	case e.Kind == router.SlotFreed:
		r.free(from, e, held)
	}
}

func (r *receiver) take(from *peer, e *syncEvent) {
	if len(from.requests) >= syncRequests {
		r.metrics.count(syncTooMany)
		return
	}
	held := heldRequest{worker: e.Worker, booked: r.conf.Apply(from.id, e.Change)}
	if from.requests[e.ID] = held; e.started {
		r.start(from, e.ID, held)
	}
}

func (r *receiver) start(from *peer, id string, held heldRequest) {
	held.started = true
	if from.requests[id] = held; held.booked {
		r.conf.Apply(from.id, router.Change{Kind: router.FirstToken, ID: id, Worker: held.worker})
	}
}

func (r *receiver) move(from *peer, e *syncEvent, held heldRequest) {
	held.worker = e.Worker
	if held.booked {
		held.booked = r.conf.Apply(from.id, e.Change)
	}
	from.requests[e.ID] = held
}

func (r *receiver) free(from *peer, e *syncEvent, held heldRequest) {
	if delete(from.requests, e.ID); held.booked {
		r.conf.Apply(from.id, e.Change)
	}
}

// present takes a presence.
func (r *receiver) present(data []byte) {
	var p Presence
	if err := json.Unmarshal(data, &p); err != nil {
		r.metrics.count(syncBad)
		return
	}
	if p.RouterID == r.conf.ID || p.RouterID == 0 || p.SyncSeq == nil {
		return
	}
	now := r.conf.Now()
	from := r.peers[p.RouterID]
	switch {
	case p.Leaving:
		if from != nil {
			r.conf.Log.Info("a router replica has left", "replica", from.name, "id", from.id, "active_requests", len(from.requests))
			r.remove(from, syncLeft)
		}
		return
	case from == nil && len(r.peers)+len(r.strangers) >= syncPeers:
		r.metrics.count(syncTooMany)
		return
	case from == nil:
		from = r.join(now, &p)
	case *p.SyncSeq != from.next:
		r.requestList(now, from, "hole")
	case p.ActiveRequests != len(from.requests):
		r.requestList(now, from, "count")
	}
	from.seen, from.name, from.next = now, clip(p.Replica), *p.SyncSeq
	if p.ActiveRequests == 0 { // this is its whole list
		r.replace(from, nil)
	}
}

// join begins to hold a peer's requests.
func (r *receiver) join(now time.Time, p *Presence) *peer {
	from := &peer{id: p.RouterID, requests: make(map[string]heldRequest)}
	// Changes that came before its presence counted as those of a router of Dynamo.
	delete(r.strangers, from.id)
	r.conf.Remove(from.id)
	r.peers[from.id] = from
	r.heardRouter(now)
	signal(r.announce)
	r.conf.Log.Info("a router replica has come", "replica", clip(p.Replica), "id", from.id, "active_requests", p.ActiveRequests)
	if p.ActiveRequests > 0 {
		r.requestList(now, from, "new")
	}
	return from
}

// remove ends a peer with all of its requests.
func (r *receiver) remove(from *peer, why string) {
	r.metrics.count(why)
	r.conf.Remove(from.id)
	delete(r.peers, from.id)
	delete(r.latencies, from.id)
}

// requestList has a peer's list requested by one of the next ticks.
func (r *receiver) requestList(now time.Time, from *peer, why string) {
	if !from.ask.IsZero() {
		return
	}
	from.ask, from.tries, from.list = now.Add(r.upTo(r.times.jitter)), 0, nil
	r.metrics.requested(why)
}

// upTo returns a random part of a time, so that replicas do not act at once.
func (r *receiver) upTo(d time.Duration) time.Duration {
	return time.Duration(rand.Float64() * float64(d))
}

// listPart takes a part of a peer's list.
func (r *receiver) listPart(env *events.Envelope) {
	r.metrics.count(syncIn)
	from := r.peers[env.PublisherID]
	if from == nil || from.ask.IsZero() {
		return // it is gone, or its list was not requested
	}
	from.seen = r.conf.Now()
	list := from.list
	from.list = nil // unless the part is the next one
	var part []syncEvent
	said, bad, err := r.reader.read(env.Payload, func(e *syncEvent) {
		if e.Kind == router.SlotTaken && e.router == from.id {
			one := *e
			one.Sequence = slices.Clone(e.Sequence)
			part = append(part, one)
		}
	})
	if err != nil || bad > 0 || said.parts < 1 || said.part >= said.parts {
		r.metrics.count(syncBad)
		return
	}
	if said.part == 0 {
		list = &partialList{number: env.Sequence, parts: said.parts, requests: make(map[string]syncEvent, len(part))}
	}
	if list == nil || list.next != said.part || list.parts != said.parts || list.number != env.Sequence || len(list.requests) > syncRequests {
		return // parts are missing, or it is too long; it is requested again
	}
	for _, e := range part {
		list.requests[e.ID] = e
	}
	if list.next++; list.next < list.parts {
		from.list = list
		return
	}
	from.next = list.number
	r.replace(from, list.requests)
}

// replace makes what is held of a peer exactly these requests.
func (r *receiver) replace(from *peer, list map[string]syncEvent) {
	for id, held := range from.requests {
		if _, there := list[id]; !there {
			r.free(from, &syncEvent{Change: router.Change{Kind: router.SlotFreed, ID: id, Worker: held.worker}}, held)
		}
	}
	for id, e := range list {
		held, known := from.requests[id]
		switch {
		case !known || !held.booked:
			r.take(from, &e)
			continue
		case held.worker != e.Worker:
			moved := e
			moved.Kind = router.SlotMoved
			r.move(from, &moved, held)
			held = from.requests[id]
		}
		if e.started && !held.started {
			r.start(from, id, held)
		}
	}
	from.ask, from.tries, from.list = time.Time{}, 0, nil
}

// tick does what time alone brings. All messages that came before it have been taken.
func (r *receiver) tick() {
	now := r.conf.Now()
	if !r.hears(now) {
		return
	}
	known, dropped := r.workers.take()
	var active int
	views := []PeerView{}
	for _, id := range slices.Sorted(maps.Keys(r.peers)) {
		from := r.peers[id]
		if now.Sub(from.seen) > 3*r.times.presence {
			r.conf.Log.Warn("a router replica is gone", "replica", from.name, "id", id, "active_requests", len(from.requests))
			r.remove(from, syncGone)
			continue
		}
		r.workersChanged(now, from, known, dropped)
		if !from.ask.IsZero() && !now.Before(from.ask) {
			from.tries++
			from.ask = now.Add(r.times.ask*time.Duration(min(from.tries, 5)) + r.upTo(r.times.jitter))
			if r.link.send(r.listRequests(id), r.lists, nil) == nil {
				r.metrics.count(syncAsked)
			}
		}
		active += len(from.requests)
		views = append(views, PeerView{id, from.name, len(from.requests), from.ask.IsZero()})
	}
	maps.DeleteFunc(r.strangers, func(_ uint64, seen time.Time) bool { return now.Sub(seen) > syncStranger })
	if len(r.peers)+len(r.strangers) > 0 {
		r.heardRouter(now)
	} else if now.UnixNano()-r.listened.Load() > int64(syncQuietAfter) {
		r.own.setQuiet(true)
	}
	r.metrics.hold(len(r.peers)+len(r.strangers), active)
	r.views.Store(&views)
}

// hears reports whether there is a connection. While there is none
// no peer ages; after this process stood still each has at least the time of a presence and a half.
func (r *receiver) hears(now time.Time) bool {
	connected, reconnects := r.link.connected(), r.link.reconnects()
	missed, stalled := !connected || r.away || reconnects != r.reconnects, now.Sub(r.ticked) > r.times.presence
	for _, from := range r.peers {
		if missed {
			from.seen = now
		} else if latest := now.Add(-3 * r.times.presence / 2); stalled && from.seen.Before(latest) {
			from.seen = latest
		}
		if missed && connected {
			r.requestList(now, from, "reconnection")
		}
	}
	r.ticked, r.away, r.reconnects = now, !connected, reconnects
	return connected
}

// workersChanged takes the news of workers for what is held of a peer. A request on a
// worker that is known now is booked by the peer's list.
func (r *receiver) workersChanged(now time.Time, from *peer, known, dropped []uint64) {
	if len(known)+len(dropped) == 0 {
		return
	}
	for id, held := range from.requests {
		if held.booked && slices.Contains(dropped, held.worker.ID) {
			held.booked = false
			from.requests[id] = held
		}
		if !held.booked && slices.Contains(known, held.worker.ID) {
			r.requestList(now, from, "worker")
		}
	}
}
