// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/router"
)

// peers is what is held of other replicas. It belongs to one goroutine.
type peers struct {
	*Sync
	all    map[uint64]*peer
	delays map[uint64]*lateness // by publisher
	reader syncReader

	// First tokens that came before their requests, as workers tell them, and when.
	early map[earlyMark]time.Time

	breaks uint64    // connections lost so far
	away   bool      // there was no connection at the last tick
	ticked time.Time // the last tick
	alarm  time.Time // the last line about late messages
}

// earlyMark is about a request of a replica, or of any (0): a worker does not know.
type earlyMark struct {
	router uint64
	id     string
	worker router.Worker
}

// peer is another replica. Of one without presence only the requests are known.
type peer struct {
	id     uint64
	name   string
	native bool
	seen   time.Time // the last sign of life

	// What it told: its requests, their digest by its own words, and the number of its
	// next message. whole says that nothing is missing before that.
	requests map[string]heldRequest
	digest   uint64
	next     uint64
	whole    bool
	behind   int // presences in a row by which next is too large

	ask   time.Time // when to ask it for everything, unless it is whole
	tries int
	parts *partial // of an answer

	freed map[string]time.Time // ends that came first, only of who is not native
}

// heldRequest is a peer's request.
type heldRequest struct {
	worker  router.Worker
	started bool // by its own words
	booked  bool // the router knows of it
	since   time.Time
	waiting *router.Change // what to tell the router once the worker is known
}

// partial is an answer of which parts are missing.
type partial struct {
	sequence uint64
	parts    int
	next     int
	events   map[string]syncEvent
}

func newPeers(s *Sync) *peers {
	return &peers{
		Sync: s, all: make(map[uint64]*peer), delays: make(map[uint64]*lateness), early: make(map[earlyMark]time.Time),
		breaks: s.link.breaks(), ticked: s.conf.Now(),
	}
}

// message takes a message of the bus.
func (p *peers) message(subject string, data []byte) {
	if subject == p.presence {
		p.present(data)
		return
	}
	if len(data) > 0 && data[0] == '{' {
		p.legacy(data)
		return
	}
	env, err := events.DecodeEnvelope(data)
	switch {
	case err != nil:
		p.metrics.count(syncBad)
		return
	case env.PublisherID == p.conf.ID:
		return
	}
	if env.Topic == sessionTopic {
		p.session(env.Payload)
		return
	}
	now := p.conf.Now()
	if subject == p.answers {
		p.metrics.count(syncIn)
		p.answered(now, &env)
		return
	}
	from := p.all[env.PublisherID]
	if from != nil && from.native {
		from.seen = now
		if env.Sequence < from.next {
			p.metrics.count(syncRepeated)
			return
		}
		if env.Sequence > from.next {
			p.doubt(now, from, "hole")
		}
		from.next = env.Sequence + 1
	}
	p.metrics.count(syncIn)
	p.late(now, &env)
	_, bad, err := p.reader.read(env.Payload, func(e *syncEvent) { p.event(now, env.PublisherID, e) })
	if err != nil {
		bad++
	}
	if p.metrics.add(syncBadEvent, bad); bad > 0 && from != nil && from.native {
		p.doubt(now, from, "unreadable")
	}
}

// legacy takes a message of Dynamo 0.8, which is one change as JSON.
func (p *peers) legacy(data []byte) {
	e, err := readLegacy(data)
	if err != nil {
		p.metrics.count(syncBad)
		return
	}
	p.metrics.count(syncIn)
	p.event(p.conf.Now(), e.router, &e)
}

// session takes where a session of another router is bound.
func (p *peers) session(payload []byte) {
	b, from, err := readSession(payload)
	switch {
	case err != nil:
		p.metrics.count(syncBad)
	case from == p.conf.ID || p.conf.Session == nil:
	case p.conf.Session(b):
		p.metrics.count(syncSession)
	default:
		p.metrics.count(syncSessionKept)
	}
}

// late measures how old a message is, and says so if it is too old to decide by.
func (p *peers) late(now time.Time, env *events.Envelope) {
	l := p.delays[env.PublisherID]
	if l == nil {
		if len(p.delays) >= 4*syncPeers { // workers publish, too
			clear(p.delays)
		}
		l = new(lateness)
		p.delays[env.PublisherID] = l
	}
	delay := l.of(now, env.PublishedAt)
	p.metrics.delayed(delay)
	if delay <= syncLate {
		return
	}
	p.metrics.count(syncTooLate)
	if now.Sub(p.alarm) >= time.Minute {
		p.alarm = now
		p.conf.Log.Warn("what other replicas tell of their load comes late; decisions are worse for it", "delay", delay, "publisher", env.PublisherID)
	}
}

// doubt says that what is held of a peer is not all.
func (p *peers) doubt(now time.Time, from *peer, why string) {
	from.parts = nil
	if !from.whole && !from.ask.IsZero() {
		return // it is about to be asked
	}
	from.whole, from.tries = false, 0
	from.ask = now.Add(within(p.period.jitter))
	p.metrics.asking(why)
}

// peer returns the peer with an id, a new one if it must be; nil if there are too many.
func (p *peers) peer(now time.Time, id uint64) *peer {
	from := p.all[id]
	if from == nil {
		if len(p.all) >= syncPeers {
			p.metrics.count(syncTooMany)
			return nil
		}
		from = &peer{id: id, seen: now, requests: make(map[string]heldRequest)}
		p.all[id] = from
		p.queue.quiet.Store(false)
	}
	return from
}

// event takes one change.
func (p *peers) event(now time.Time, publisher uint64, e *syncEvent) {
	p.metrics.received(e.Kind)
	switch {
	case e.Kind == 0:
		return // of a kind to come
	case e.Kind == router.FirstToken && (e.router == p.conf.ID || e.router == e.Worker.ID || publisher != e.router && p.native(e.router)):
		p.marked(now, e)
		return
	case e.router == p.conf.ID:
		return
	}
	from := p.peer(now, e.router)
	if from == nil {
		return
	}
	if !from.native {
		from.seen = now
	}
	held, known := from.requests[e.ID]
	switch e.Kind {
	case router.SlotTaken:
		if known {
			p.metrics.count(syncDuplicate)
			return
		}
		if _, ended := from.freed[e.ID]; ended {
			p.metrics.count(syncDuplicate)
			return
		}
		p.took(now, from, e)
	case router.FirstToken:
		if !known {
			p.remember(now, e)
			p.metrics.count(syncUnknown)
			return
		}
		if held.started {
			p.metrics.count(syncDuplicate)
			return
		}
		p.start(from, e.ID, held)
	case router.SlotMoved:
		if !known {
			p.metrics.count(syncUnknown)
			return
		}
		p.move(from, e, held)
	case router.SlotFreed:
		if !known {
			p.metrics.count(syncUnknown)
		}
		p.free(now, from, e, known)
	}
}

func (p *peers) native(id uint64) bool { return p.all[id] != nil && p.all[id].native }

// marked takes a first token that was noticed by somebody else than the request's
// replica: another one, or the worker itself, which does not know whose it is.
func (p *peers) marked(now time.Time, e *syncEvent) {
	if e.router == p.conf.ID || e.router == e.Worker.ID {
		if p.conf.FirstToken(e.ID); e.router == p.conf.ID {
			return
		}
	}
	found := false
	for _, from := range p.all {
		if from.id != e.router && e.router != e.Worker.ID {
			continue
		}
		held, known := from.requests[e.ID]
		if !known || e.router == e.Worker.ID && held.worker != e.Worker {
			continue
		}
		found = true
		if held.booked {
			p.conf.Changed(from.id, router.Change{Kind: router.FirstToken, ID: e.ID, Worker: held.worker})
		} else if held.waiting != nil {
			held.waiting.PrefillUntracked = true
		}
	}
	if !found {
		p.remember(now, e)
	}
}

// remember keeps a first token for a request that may come.
func (p *peers) remember(now time.Time, e *syncEvent) {
	mark := earlyMark{e.router, e.ID, e.Worker}
	if e.router == e.Worker.ID {
		mark.router = 0
	}
	if len(p.early) < syncMemory {
		p.early[mark] = now
	}
}

// took holds a request, and tells the router.
func (p *peers) took(now time.Time, from *peer, e *syncEvent) {
	if len(from.requests) >= syncRequests {
		p.metrics.count(syncTooMany)
		return
	}
	c := e.Change
	c.Expires = !from.native
	held := heldRequest{worker: c.Worker, started: e.started, since: now}
	from.digest ^= digestOf(e.ID, c.Worker, e.started)
	if held.booked = p.conf.Changed(from.id, c); !held.booked {
		c.Sequence = slices.Clone(c.Sequence)
		held.waiting = &c
	}
	from.requests[e.ID] = held
	started := e.started
	for _, by := range [...]uint64{0, from.id} {
		mark := earlyMark{by, e.ID, c.Worker}
		if _, early := p.early[mark]; early {
			delete(p.early, mark)
			started = true
		}
	}
	switch {
	case started && held.booked:
		p.conf.Changed(from.id, router.Change{Kind: router.FirstToken, ID: e.ID, Worker: c.Worker})
	case started && !held.started:
		held.waiting.PrefillUntracked = true
	}
}

// start notes the first token of a request that is held, by its replica's words.
func (p *peers) start(from *peer, id string, held heldRequest) {
	from.digest ^= digestOf(id, held.worker, held.started) ^ digestOf(id, held.worker, true)
	held.started = true
	from.requests[id] = held
	if held.booked {
		p.conf.Changed(from.id, router.Change{Kind: router.FirstToken, ID: id, Worker: held.worker})
	}
}

func (p *peers) move(from *peer, e *syncEvent, held heldRequest) {
	from.digest ^= digestOf(e.ID, held.worker, held.started) ^ digestOf(e.ID, e.Worker, held.started)
	held.worker = e.Worker
	switch {
	case held.waiting != nil:
		held.waiting.Worker, held.waiting.CachedTokens = e.Worker, e.CachedTokens
	case held.booked:
		// If its new worker is not known it counts nowhere until it is asked for again.
		held.booked = p.conf.Changed(from.id, e.Change)
	}
	from.requests[e.ID] = held
	p.settle(from, e.ID)
}

func (p *peers) free(now time.Time, from *peer, e *syncEvent, known bool) {
	held := from.requests[e.ID]
	if known {
		from.digest ^= digestOf(e.ID, held.worker, held.started)
		delete(from.requests, e.ID)
	} else if from.native {
		return // a peer's messages come in order: it never told of that one
	}
	if !from.native && len(from.freed) < syncMemory {
		if from.freed == nil {
			from.freed = make(map[string]time.Time)
		}
		from.freed[e.ID] = now
	}
	if held.booked || !known {
		c := e.Change
		c.Expires = !from.native
		p.conf.Changed(from.id, c)
	}
}

// settle tells the router of a request whose worker was not known before.
func (p *peers) settle(from *peer, id string) {
	held := from.requests[id]
	if held.booked || held.waiting == nil || !p.conf.Changed(from.id, *held.waiting) {
		return
	}
	held.booked, held.waiting = true, nil
	from.requests[id] = held
	if held.started {
		p.conf.Changed(from.id, router.Change{Kind: router.FirstToken, ID: id, Worker: held.worker})
	}
}

// present takes what a replica says of itself.
func (p *peers) present(data []byte) {
	var said Presence
	if err := json.Unmarshal(data, &said); err != nil {
		p.metrics.count(syncBad)
		return
	}
	if said.RouterID == p.conf.ID || said.RouterID == 0 || said.SyncSeq == nil {
		return
	}
	digest, err := strconv.ParseUint(said.Digest, 16, 64)
	if err != nil {
		p.metrics.count(syncBad)
		return
	}
	now := p.conf.Now()
	if said.Leaving {
		p.left(said.RouterID)
		return
	}
	from := p.peer(now, said.RouterID)
	if from == nil {
		return
	}
	from.seen, from.name = now, clip(said.Replica)
	behind := from.behind
	from.behind = 0
	switch {
	case !from.native:
		// What came before counts as a stranger's, whose requests end by themselves.
		p.conf.Gone(from.id)
		*from = peer{id: from.id, name: from.name, native: true, seen: now, requests: make(map[string]heldRequest), next: *said.SyncSeq}
		p.conf.Log.Info("a router replica has come", "replica", from.name, "id", from.id, "active_requests", said.ActiveRequests)
		signal(p.greet)
		if from.whole = said.ActiveRequests == 0; !from.whole {
			p.doubt(now, from, "new")
		}
	case *said.SyncSeq < from.next && behind < syncBehind:
		// It says less than we know: it came twice, or late. If that goes on, what we know
		// was not its word.
		from.behind = behind + 1
	case *said.SyncSeq == from.next && said.ActiveRequests == len(from.requests) && digest == from.digest:
		from.whole, from.ask = true, time.Time{}
	case said.ActiveRequests == 0:
		// This is an answer to all questions.
		p.replace(now, from, nil)
		from.next, from.whole, from.ask = *said.SyncSeq, true, time.Time{}
	default:
		why := "digest"
		if *said.SyncSeq > from.next {
			why = "hole"
		}
		from.next = *said.SyncSeq
		p.doubt(now, from, why)
	}
}

// left ends a replica that says that it leaves. Nothing of it follows, since what it
// says comes in order.
func (p *peers) left(id uint64) {
	from := p.all[id]
	if from == nil {
		return
	}
	p.conf.Log.Info("a router replica has left", "replica", from.name, "id", id, "active_requests", len(from.requests))
	p.metrics.count(syncLeft)
	p.conf.Gone(id)
	delete(p.all, id)
	delete(p.delays, id)
}

// answered takes a part of what a replica holds.
func (p *peers) answered(now time.Time, env *events.Envelope) {
	from := p.all[env.PublisherID]
	if from == nil || !from.native {
		return // it is gone by now
	}
	from.seen = now
	got := from.parts
	from.parts = nil
	var all []syncEvent
	said, bad, err := p.reader.read(env.Payload, func(e *syncEvent) {
		if e.Kind == router.SlotTaken && e.router == from.id {
			e.Sequence = slices.Clone(e.Sequence)
			all = append(all, *e)
		}
	})
	if err != nil || bad > 0 || said.parts < 1 || said.part >= said.parts {
		p.metrics.count(syncBad)
		return
	}
	if said.part == 0 {
		got = &partial{sequence: env.Sequence, parts: said.parts, events: make(map[string]syncEvent, len(all))}
	}
	if got == nil || got.next != said.part || got.parts != said.parts || got.sequence != env.Sequence {
		return // parts are missing; it is asked again
	}
	for i := range all {
		got.events[all[i].ID] = all[i]
	}
	if got.next++; got.next < got.parts {
		from.parts = got
		return
	}
	if got.sequence < from.next {
		return // we know more
	}
	p.replace(now, from, got.events)
	from.next, from.whole, from.ask = got.sequence, true, time.Time{}
}

// replace makes what is held of a peer exactly these requests.
func (p *peers) replace(now time.Time, from *peer, all map[string]syncEvent) {
	for id, held := range from.requests {
		if _, there := all[id]; !there {
			p.free(now, from, &syncEvent{router: from.id, Change: router.Change{Kind: router.SlotFreed, ID: id, Worker: held.worker}}, true)
		}
	}
	for id := range all {
		e := all[id]
		held, known := from.requests[id]
		if !known {
			p.took(now, from, &e)
			continue
		}
		if held.worker != e.Worker {
			to := e
			to.Kind = router.SlotMoved
			p.move(from, &to, held)
			held = from.requests[id]
		}
		if !held.booked {
			held.waiting = &e.Change
			from.requests[id] = held
			p.settle(from, id)
			held = from.requests[id]
		}
		if e.started && !held.started {
			p.start(from, id, held)
		} else if held.started && !e.started { // cannot be, but then the digests must agree
			from.digest ^= digestOf(id, held.worker, true) ^ digestOf(id, held.worker, false)
			held.started = false
			from.requests[id] = held
		}
	}
}

// tick does what time alone brings. All messages that came before it have been taken.
func (p *peers) tick() {
	now := p.conf.Now()
	stalled := now.Sub(p.ticked) > p.period.presence
	p.ticked = now
	if connected := p.link.connected(); !connected || stalled {
		// Who could not be heard is not silent: it has the time that a presence takes once more.
		// Without a connection that time does not even begin.
		latest := now
		if connected {
			latest = now.Add(-3 * p.period.presence / 2)
		}
		for _, from := range p.all {
			if from.seen.Before(latest) {
				from.seen = latest
			}
		}
		if p.away = p.away || !connected; !connected {
			return
		}
	}
	if breaks := p.link.breaks(); p.away || breaks != p.breaks {
		p.away, p.breaks = false, breaks
		for _, from := range p.all {
			if from.seen = now; from.native {
				p.doubt(now, from, "reconnection")
			}
		}
	}
	came, gone := p.workers.take()
	if len(gone) > 0 {
		p.unbook(gone)
	}
	var active int
	views := []PeerView{}
	for _, id := range slices.Sorted(maps.Keys(p.all)) {
		from := p.all[id]
		if p.silent(now, from) {
			continue
		}
		active += len(from.requests)
		if from.native {
			views = append(views, PeerView{from.id, from.name, len(from.requests), from.whole})
		}
		if len(came) > 0 {
			p.settleAll(now, from, came)
		}
		if !from.whole && !from.ask.IsZero() && !now.Before(from.ask) {
			from.tries++
			from.ask = now.Add(p.period.ask*time.Duration(min(from.tries, 5)) + within(p.period.jitter))
			if p.link.publish(p.questions(id), p.answers, nil) == nil {
				p.metrics.count(syncAsked)
			}
		}
	}
	maps.DeleteFunc(p.early, func(_ earlyMark, at time.Time) bool { return now.Sub(at) > syncEarlyFor })
	if len(p.all) > 0 {
		p.listened.Store(now.UnixNano())
	}
	p.queue.quiet.Store(now.UnixNano()-p.listened.Load() > int64(syncQuietAfter))
	p.metrics.hold(len(p.all), active)
	p.heard.Store(&views)
}

// unbook takes note that the router has dropped all slots on some workers.
func (p *peers) unbook(gone []uint64) {
	for _, from := range p.all {
		for id, held := range from.requests {
			if held.booked && slices.Contains(gone, held.worker.ID) {
				held.booked = false
				from.requests[id] = held
			}
		}
	}
}

// settleAll tries what waits for workers that came. What is not known in full any more
// has to be asked for.
func (p *peers) settleAll(now time.Time, from *peer, came []uint64) {
	for id, held := range from.requests {
		switch {
		case held.booked || !slices.Contains(came, held.worker.ID):
		case held.waiting != nil:
			p.settle(from, id)
		case from.native && now.Sub(held.since) < syncGhostFor:
			p.doubt(now, from, "worker")
		}
	}
}

// silent ends who has been silent for too long, and what nobody will end. It reports
// whether the peer is gone.
func (p *peers) silent(now time.Time, from *peer) bool {
	if from.native {
		for id, held := range from.requests {
			if held.waiting != nil && now.Sub(held.since) > syncWorkerFor {
				held.waiting = nil
				from.requests[id] = held
			}
		}
		if now.Sub(from.seen) <= 3*p.period.presence {
			return false
		}
		p.conf.Log.Warn("a router replica is gone", "replica", from.name, "id", from.id, "active_requests", len(from.requests))
		p.metrics.count(syncGone)
		p.conf.Gone(from.id)
		delete(p.all, from.id)
		return true
	}
	maps.DeleteFunc(from.freed, func(_ string, at time.Time) bool { return now.Sub(at) > syncEarlyFor })
	maps.DeleteFunc(from.requests, func(_ string, held heldRequest) bool { return now.Sub(held.since) > syncGhostFor })
	if now.Sub(from.seen) > syncGhostFor && len(from.requests) == 0 {
		delete(p.all, from.id)
		return true
	}
	return false
}
