// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"context"
	"encoding/json"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/beat"
	"github.com/kvroute/kvroute/router"
)

// receiver handles the messages of other routers. It belongs to one goroutine.
type receiver struct {
	*Sync
	peers  map[uint64]*peer     // other replicas
	dynamo map[uint64]time.Time // the last message of each router of Dynamo
	delays map[uint64]*latency  // by publisher
	reader syncReader

	reconnects uint64    // of the connection, at the last tick
	away       bool      // there was no connection at the last tick
	ticked     time.Time // the last tick
	warned     time.Time // when a late message was last logged
}

// peer is the state of another replica.
type peer struct {
	id   uint64
	name string
	seen time.Time // the last sign of life

	requests map[string]heldRequest
	next     uint64 // number of its next message

	ask   time.Time // when to request its list; zero while requests is the result of its messages
	tries int       // requests for the list without an answer
	list  partialList

	askIDs   time.Time // when to request the ids that workers gave out; zero: the peer has sent them, or cannot
	idsTries int
}

// heldRequest is a request of a peer.
type heldRequest struct {
	worker    router.Worker
	started   bool // it has its first token
	untracked bool // as in its Change: PrefillUntracked
	booked    bool // the router has a slot for it, because the worker is known
}

// partialList holds the first parts of a list.
type partialList struct {
	number   uint64 // of the peer's next message after the list
	arrived  int    // parts so far
	hashes   int    // in all requests so far
	requests map[string]syncEvent
}

func newReceiver(s *Sync) *receiver {
	return &receiver{
		Sync: s, peers: make(map[uint64]*peer), dynamo: make(map[uint64]time.Time), delays: make(map[uint64]*latency),
		reconnects: s.link.reconnects(), ticked: s.conf.Now(),
	}
}

func (r *receiver) run(done <-chan struct{}, in <-chan *nats.Msg) {
	often, rarely := min(max(r.times.presence/20, time.Millisecond),
		100*time.Millisecond), min(max(r.times.presence/4, time.Millisecond), time.Second/2)
	every := rarely
	tick := time.NewTimer(beat.Wait(every))
	defer tick.Stop()
	for crowd := false; ; {
		if now := len(r.peers) > 0; now != crowd { // only peers need precise times
			crowd = now
			every = map[bool]time.Duration{false: rarely, true: often}[crowd]
			tick.Reset(beat.Wait(every))
		}
		select {
		case <-done:
			return
		case m := <-in:
			r.message(m.Subject, m.Data)
		case <-tick.C:
			tick.Reset(beat.Wait(every))
			// A peer with waiting messages is not silent, so they are handled first.
			for range len(in) {
				m := <-in
				r.message(m.Subject, m.Data)
			}
			r.tick()
		}
	}
}

// message handles a message.
func (r *receiver) message(subject string, data []byte) {
	if subject == r.presence {
		r.present(data)
		return
	}
	env, err := events.DecodeEnvelope(data)
	switch {
	case err != nil:
		r.metrics.news.Count("bad")
	case env.PublisherID == r.conf.ID:
	case env.Topic == sessionTopic && subject == r.lists:
		r.ids(&env)
	case env.Topic == sessionTopic:
		r.session(env.Payload)
	case subject == r.lists:
		r.listPart(&env)
	default:
		r.changes(&env)
	}
}

// session handles a binding: of a session, or of an id that a worker gave out.
func (r *receiver) session(payload []byte) {
	if g, from, isGiven := readGiven(payload); isGiven {
		switch {
		case from == r.conf.ID || r.conf.BindGiven == nil:
		case r.conf.BindGiven(g):
			r.metrics.news.Count("given")
		default:
			r.metrics.news.Count("given_kept")
		}
		return
	}
	b, from, err := readSession(payload)
	switch {
	case err != nil:
		r.metrics.news.Count("bad")
	case from == r.conf.ID || r.conf.Bind == nil:
	case r.conf.Bind(b):
		r.metrics.news.Count("session")
	default:
		r.metrics.news.Count("session_kept")
	}
}

// present handles a presence.
func (r *receiver) present(data []byte) {
	var p Presence
	if err := json.Unmarshal(data, &p); err != nil {
		r.metrics.news.Count("bad")
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
			r.conf.Log.Info("a router replica has left", "replica", from.name, "id", from.id,
				"active_requests", len(from.requests))
			r.remove(from, "left")
		}
		return
	case from == nil && len(r.peers)+len(r.dynamo) >= syncPeers:
		r.metrics.news.Count("too_many")
		return
	case from == nil:
		from = r.join(now, &p)
	case *p.SyncSeq != from.next:
		r.requestList(now, from, "hole")
	case p.ActiveRequests != len(from.requests):
		r.requestList(now, from, "count")
	}
	from.seen, from.name, from.next = now, clip(p.Replica), *p.SyncSeq
	if p.ActiveRequests == 0 { // its list is empty
		r.replace(from, nil)
	}
}

// join begins to hold a peer's requests.
func (r *receiver) join(now time.Time, p *Presence) *peer {
	from := &peer{id: p.RouterID, requests: make(map[string]heldRequest)}
	// Before its presence, its changes counted as those of a router of Dynamo.
	delete(r.dynamo, from.id)
	r.conf.Remove(from.id)
	r.peers[from.id] = from
	r.othersSeen.Store(now.UnixNano())
	signal(r.announce)
	r.conf.Log.Info("a router replica has come", "replica", clip(p.Replica), "id", from.id,
		"active_requests", p.ActiveRequests)
	if p.ActiveRequests > 0 {
		r.requestList(now, from, "new")
	}
	r.requestIDs(now, from)
	return from
}

// remove removes a peer with all its requests.
func (r *receiver) remove(from *peer, why string) {
	r.metrics.news.Count(why)
	r.conf.Remove(from.id)
	delete(r.peers, from.id)
	delete(r.delays, from.id)
}

// changes handles a message about requests.
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
			r.metrics.news.Count("repeated")
			return
		}
		from.next = env.Sequence + 1
	}
	r.metrics.news.Count("received")
	r.measure(now, env)
	_, bad, err := r.reader.read(env.Payload, func(e *syncEvent) {
		r.metrics.received[e.Kind].Add(1)
		if from != nil && e.router == from.id {
			r.apply(now, from, e)
		} else {
			r.applyOther(now, e)
		}
	})
	if err != nil {
		bad++
	}
	if r.metrics.news.Add(bad, "bad_event"); bad > 0 && from != nil {
		r.requestList(now, from, "unreadable")
	}
}

// measure measures the delay of a message, and logs one that is too late for good decisions.
func (r *receiver) measure(now time.Time, env *events.Envelope) {
	l := r.delays[env.PublisherID]
	if l == nil {
		if len(r.delays) >= 4*syncPeers { // workers publish, too
			clear(r.delays)
		}
		l = new(latency)
		r.delays[env.PublisherID] = l
	}
	late := l.of(now, env.PublishedAt, time.Minute)
	r.metrics.delay.Record(context.Background(), late.Seconds())
	if late <= syncLate {
		return
	}
	r.metrics.news.Count("late")
	if now.Sub(r.warned) >= time.Minute {
		r.warned = now
		r.conf.Log.Warn("other replicas' changes come late; decisions are worse for it", "delay", late,
			"publisher", env.PublisherID)
	}
}

// apply applies a change to the requests of its publisher.
func (r *receiver) apply(now time.Time, from *peer, e *syncEvent) {
	held, known := from.requests[e.ID]
	switch {
	case e.Kind == 0: // a kind of a later version
		return
	case e.Kind == router.SlotTaken && !known && len(from.requests) >= syncRequests:
		r.metrics.news.Count("too_many")
		return
	case e.Kind == router.SlotTaken && known, e.Kind == router.FirstToken && held.started:
		r.metrics.news.Count("duplicate")
		return
	case e.Kind != router.SlotTaken && !known:
		r.metrics.news.Count("unknown")
		return
	}
	switch e.Kind {
	case router.SlotTaken:
		held = heldRequest{worker: e.Worker, untracked: e.PrefillUntracked, booked: r.conf.Apply(from.id, e.Change)}
		if held.started = e.started; e.started && held.booked {
			r.conf.Apply(from.id, router.Change{Kind: router.FirstToken, ID: e.ID, Worker: e.Worker})
		}
	case router.FirstToken:
		held.started = true
	case router.PrefillFailed:
		held.untracked = false
	case router.SlotMoved:
		held.worker = e.Worker
	case router.SlotFreed:
		delete(from.requests, e.ID)
	}
	if e.Kind != router.SlotTaken && held.booked {
		applied := r.conf.Apply(from.id, e.Change)
		held.booked = applied || e.Kind != router.SlotMoved
	}
	if e.Kind == router.SlotFreed {
		return
	}
	if from.requests[e.ID] = held; !held.booked && e.Kind == router.SlotMoved {
		r.requestList(now, from, "worker") // the blocks of the request are unknown here
	}
}

// applyOther applies a change that is not about a request of its publisher: of a router of
// Dynamo, of a worker, or a first token that a peer received.
func (r *receiver) applyOther(now time.Time, e *syncEvent) {
	_, known := r.dynamo[e.router]
	switch {
	case e.Kind == 0: // a kind of a later version
	case e.Kind == router.FirstToken && e.router == e.Worker.ID:
		// A worker publishes it. It does not know which router owns the request.
		if !r.conf.FirstToken(e.ID) {
			for id := range r.dynamo {
				r.conf.Apply(id, e.Change)
			}
		}
	case e.Kind == router.FirstToken && e.router == r.conf.ID:
		r.conf.FirstToken(e.ID)
	case e.router == r.conf.ID || r.peers[e.router] != nil: // the owner publishes it itself
	case !known && len(r.dynamo)+len(r.peers) >= syncPeers:
		r.metrics.news.Count("too_many")
	default:
		r.dynamo[e.router] = now
		r.othersSeen.Store(now.UnixNano())
		e.Expires = true
		if !r.conf.Apply(e.router, e.Change) {
			r.metrics.news.Count("unknown")
		}
	}
}

// requestList has one of the next ticks request a peer's list.
func (r *receiver) requestList(now time.Time, from *peer, why string) {
	if from.ask.IsZero() {
		from.ask, from.tries, from.list = now.Add(r.upTo(r.times.jitter)), 0, partialList{}
		r.metrics.lists.Count(why)
	}
}

// upTo returns a random part of a duration, so that replicas do not act at once.
func (r *receiver) upTo(d time.Duration) time.Duration {
	return time.Duration(rand.Float64() * float64(d))
}

// listPart handles a part of a peer's list. If a part is missing, the list is requested
// again.
func (r *receiver) listPart(env *events.Envelope) {
	r.metrics.news.Count("received")
	from := r.peers[env.PublisherID]
	if from == nil || from.ask.IsZero() {
		return // the peer is gone, or no list was requested
	}
	from.seen = r.conf.Now()
	list := from.list
	from.list = partialList{}
	var part []syncEvent
	hashes := 0
	position, bad, err := r.reader.read(env.Payload, func(e *syncEvent) {
		if e.Kind == router.SlotTaken && e.router == from.id {
			one := *e
			one.Sequence = slices.Clone(e.Sequence)
			hashes += len(e.Sequence)
			part = append(part, one)
		}
	})
	if err != nil || bad > 0 || position.part >= position.parts {
		r.metrics.news.Count("bad")
		return
	}
	if position.part == 0 {
		list = partialList{number: env.Sequence, requests: make(map[string]syncEvent, len(part))}
	}
	if list.hashes += hashes; list.hashes > syncHashes {
		r.metrics.news.Count("too_many")
		return
	}
	if list.requests == nil || list.arrived != position.part || list.number != env.Sequence || len(list.requests) > syncRequests {
		return
	}
	for _, e := range part {
		list.requests[e.ID] = e
	}
	if list.arrived++; list.arrived < position.parts {
		from.list = list
		return
	}
	from.next = list.number
	r.replace(from, list.requests)
}

// replace replaces the requests held of a peer by a list.
func (r *receiver) replace(from *peer, list map[string]syncEvent) {
	now := r.conf.Now()
	for id, held := range from.requests {
		e, stays := list[id]
		if stays && held.booked && held.worker == e.Worker && (e.started || !held.started && held.untracked == e.PrefillUntracked) {
			continue
		}
		r.apply(now, from, &syncEvent{Change: router.Change{Kind: router.SlotFreed, ID: id, Worker: held.worker}})
	}
	for id, e := range list {
		held, known := from.requests[id]
		if known && e.started && !held.started {
			e.Kind = router.FirstToken
		}
		if !known || e.Kind == router.FirstToken {
			r.apply(now, from, &e)
		}
	}
	from.ask, from.tries, from.list = time.Time{}, 0, partialList{}
}

// tick does what depends on time. All messages that came before have been handled.
func (r *receiver) tick() {
	now := r.conf.Now()
	if !r.checkConnection(now) {
		return
	}
	known, dropped := r.workers.take()
	status := &syncStatus{peers: []PeerView{}}
	for _, id := range slices.Sorted(maps.Keys(r.peers)) {
		from := r.peers[id]
		if now.Sub(from.seen) > 3*r.times.presence {
			r.conf.Log.Warn("a router replica is gone", "replica", from.name, "id", id, "active_requests", len(from.requests))
			r.remove(from, "gone")
			continue
		}
		r.workersChanged(now, from, known, dropped)
		if !from.ask.IsZero() && !now.Before(from.ask) {
			from.tries++
			from.ask = now.Add(r.times.ask*time.Duration(min(from.tries, 5)) + r.upTo(r.times.jitter))
			if r.link.send(r.listRequests(id), r.lists, nil) == nil {
				r.metrics.news.Count("asked")
			}
		}
		r.askIDsOf(now, from)
		status.peers = append(status.peers, PeerView{id, from.name, len(from.requests), from.ask.IsZero()})
	}
	maps.DeleteFunc(r.dynamo, func(_ uint64, seen time.Time) bool { return now.Sub(seen) > syncDynamo })
	if status.routers = len(r.peers) + len(r.dynamo); status.routers > 0 {
		r.othersSeen.Store(now.UnixNano())
	}
	r.status.Store(status)
}

// checkConnection reports whether there is a connection. When a connection returns, the ages of all
// peers begin at 0 again. After a pause of this process, a peer that was not heard for longer than 1.5
// presence periods counts as heard 1.5 periods ago: the messages of the pause may still be unread.
func (r *receiver) checkConnection(now time.Time) bool {
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
			r.requestIDs(now, from)
		}
	}
	r.ticked, r.away, r.reconnects = now, !connected, reconnects
	return connected
}

// workersChanged updates a peer's requests after the router has added or dropped workers.
// The peer's list books the requests on an added worker.
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
