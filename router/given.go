// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// Workers give out ids of what they keep: stored responses and open sessions. Only the worker that gave out an id
// knows it, so requests with the id go there.
//
// # Invariants
//
//   - An id is bound to one rank of one worker. The first binding stays until it expires, or its worker leaves.
//   - Only responses of workers bind ids ([Router.Gave]); requests only look them up. So a client cannot move the
//     id of another client.
//   - At most maxGiven ids are bound, in about 40 MB. An id expires givenLife after its last use.
//   - A request with an unknown id waits, because the report of the response that gave it out, or another replica's
//     message, may come a moment after the client has the id.
//   - Of an id only a hash is kept and published: whoever knows an id may read the response.
//   - A new router gets the bindings of another replica, or of its own earlier process, by [Router.PeerGave]. Their
//     workers may become known later.

const (
	maxGiven   = 1 << 18
	givenLife  = 24 * time.Hour
	maxGivenID = 256 // bytes of an id; a longer one is not bound
	// givenWait is how long a request waits for the worker of an unknown id: far longer than a report or a message takes.
	givenWait = 250 * time.Millisecond
	// maxGivers is more than the requests that end while the observer of a short response waits for its turn.
	maxGivers = 4096
)

// givenIDs are the bound ids. Any goroutine may use them.
type givenIDs struct {
	mu sync.Mutex
	// mu guards the fields below. The least recently used id expires first.
	byKey *simplelru.LRU[GivenKey, givenID]
	// awaited has the unknown ids that requests wait for.
	awaited map[GivenKey]*awaitedID
	// givers are the workers that [Router.Giver] returned last, by request.
	givers *simplelru.LRU[string, Worker]
	// changes counts the bindings that were made.
	changes uint64
}

type awaitedID struct {
	bound    chan struct{} // is closed when the id is bound
	requests int
}

type givenID struct {
	worker Worker
	until  time.Time
}

// GivenKey is the key of an id that a worker gave out: the beginning of its SHA-256; 0 for no id.
type GivenKey uint64

// GivenBinding says which worker gave out an id.
type GivenBinding struct {
	Key    GivenKey
	Worker Worker
}

// keyOf returns the key of an id, 0 if the id is empty or too long to be bound.
func keyOf(id string) GivenKey {
	if id == "" || len(id) > maxGivenID {
		return 0
	}
	sum := sha256.Sum256([]byte(id))
	return GivenKey(max(1, binary.BigEndian.Uint64(sum[:])))
}

func newGivenIDs() *givenIDs {
	byKey, _ := simplelru.NewLRU[GivenKey, givenID](maxGiven, nil) // fails for a size below 1 only
	givers, _ := simplelru.NewLRU[string, Worker](maxGivers, nil)
	return &givenIDs{byKey: byKey, awaited: make(map[GivenKey]*awaitedID), givers: givers}
}

// worker returns the worker that an id is bound to, and notes the use of the id.
func (g *givenIDs) worker(now time.Time, key GivenKey) (w Worker, bound bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	b, known := g.byKey.Peek(key)
	if !known || !now.Before(b.until) {
		return Worker{}, false
	}
	g.byKey.Add(key, givenID{b.worker, now.Add(givenLife)})
	return b.worker, true
}

// bind binds an id to a worker. A bound id keeps its worker if stays reports so.
func (g *givenIDs) bind(now time.Time, key GivenKey, w Worker, stays func(Worker) bool) (news bool) {
	old, bound := g.worker(now, key)
	if bound && (old == w || stays(old)) {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.byKey.Add(key, givenID{w, now.Add(givenLife)})
	g.changes++
	if a := g.awaited[key]; a != nil {
		close(a.bound)
		delete(g.awaited, key)
	}
	return true
}

// await is worker, and waits for an id that is not bound: until it is bound, ctx ends, or givenWait or half of the time
// until ctx's deadline is over.
func (g *givenIDs) await(ctx context.Context, now func() time.Time, key GivenKey) (w Worker, bound bool) {
	if w, bound = g.worker(now(), key); bound || key == 0 {
		return w, bound
	}
	a := g.begin(key)
	if a == nil { // it was bound just now
		return g.worker(now(), key)
	}
	limit := givenWait
	if end, limited := ctx.Deadline(); limited { // the decision needs time, too
		limit = min(limit, time.Until(end)/2)
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-a.bound:
	case <-timer.C:
	case <-ctx.Done():
	}
	g.mu.Lock()
	if a.requests--; a.requests == 0 && g.awaited[key] == a {
		delete(g.awaited, key)
	}
	g.mu.Unlock()
	return g.worker(now(), key)
}

// begin notes that a request waits for an id. It returns nil if the id is in the table.
func (g *givenIDs) begin(key GivenKey) *awaitedID {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.byKey.Contains(key) {
		return nil
	}
	a := g.awaited[key]
	if a == nil {
		a = &awaitedID{bound: make(chan struct{})}
		g.awaited[key] = a
	}
	a.requests++
	return a
}

// expire drops the ids that have not been used for long.
func (g *givenIDs) expire(now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, b, some := g.byKey.GetOldest(); some && !now.Before(b.until); _, b, some = g.byKey.GetOldest() {
		g.byKey.RemoveOldest()
	}
}

func (g *givenIDs) len() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.byKey.Len()
}

// Giver returns the worker that answers a request in flight, also one of another replica: the worker at an address
// that the proxy reports, or, if the address is not valid, the worker that the request was sent to. The worker of a
// request that has ended is known if it is among the latest 4,096 for which Giver was called before.
func (r *Router) Giver(request string, at netip.AddrPort) (w Worker, known bool) {
	fl := r.flights.get(request)
	if fl.pool == nil {
		return r.given.giver(request)
	}
	fl.pool.read(func(c *core) {
		ord, booked := c.slots.Worker(request)
		if !booked {
			return
		}
		if ord = c.at(ord, at, fl.second(), 0); ord >= 0 {
			w, known = c.entries[ord].worker, true
		}
	})
	if known {
		r.given.noteGiver(request, w)
	}
	return w, known
}

func (g *givenIDs) noteGiver(request string, w Worker) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.givers.Add(request, w)
}

func (g *givenIDs) giver(request string) (w Worker, known bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.givers.Peek(request)
}

// Gave notes that a worker gave out an id in its response: later requests with the id go there, see [Request.Held].
// It reports whether the id is bound to the worker now. An id that is bound to another worker of the fleet stays
// there, and an id above 256 bytes is not bound.
func (r *Router) Gave(id string, by Worker) bool {
	key := keyOf(id)
	if key == 0 {
		return false
	}
	now := r.conf.Now()
	if !r.given.bind(now, key, by, r.hasWorker) {
		w, bound := r.given.worker(now, key)
		return bound && w == by
	}
	if r.conf.Hooks.TellGiven != nil {
		r.conf.Hooks.TellGiven(GivenBinding{key, by})
	}
	return true
}

// PeerGave takes the binding of an id from another router replica, or from an earlier process. It reports whether
// anything changed. An id that is bound to a worker of the fleet stays there.
func (r *Router) PeerGave(b GivenBinding) (news bool) {
	return b.Key != 0 && r.given.bind(r.conf.Now(), b.Key, b.Worker, r.hasWorker)
}

// GivenBindings returns the bindings of all ids, the least recently used first.
func (r *Router) GivenBindings() []GivenBinding {
	g := r.given
	g.mu.Lock()
	defer g.mu.Unlock()
	all := make([]GivenBinding, 0, g.byKey.Len())
	for _, key := range g.byKey.Keys() {
		b, _ := g.byKey.Peek(key)
		all = append(all, GivenBinding{key, b.worker})
	}
	return all
}

// GivenChanges returns how many bindings were made since the start.
func (r *Router) GivenChanges() uint64 {
	r.given.mu.Lock()
	defer r.given.mu.Unlock()
	return r.given.changes
}

// hasWorker reports whether a rank is in the fleet.
func (r *Router) hasWorker(w Worker) (known bool) {
	if p := r.poolOf(w.ID); p != nil {
		p.read(func(c *core) { _, known = c.find(w) })
	}
	return known
}

// Holder returns a decision for the worker that gave out an id. It books nothing. It is for requests about what the
// worker keeps that compute nothing, so the load of the worker does not matter. For an unknown id it waits up to 250
// ms, or until ctx ends.
func (r *Router) Holder(ctx context.Context, id string) (d Decision, known bool) {
	w, bound := r.given.await(ctx, r.conf.Now, keyOf(id))
	p := r.poolOf(w.ID)
	if !bound || p == nil {
		return d, false
	}
	d, err := r.BestWorker(ctx, Request{Model: p.model, Held: id})
	return d, err == nil && d.Worker == w
}

// reachable reports whether a worker is healthy enough for requests that no other worker can answer. If no
// worker is healthy, each one is.
func (c *core) reachable(now time.Time, ord int) bool {
	serves := func(ord int) bool {
		h, _ := c.healthNow(now, &c.entries[ord])
		return h <= Degraded
	}
	return serves(ord) || !slices.ContainsFunc(c.order, serves)
}

// hold pins the request in s to the worker that gave out the id in it. Without such a worker, or if the worker cannot
// take the request, hold removes the id: the request goes to any worker, which answers that it does not know the id.
func (r *Router) hold(ctx context.Context, s *scratch) {
	req, adapter := &s.request, s.target.adapter
	id := req.Held
	if req.Held = ""; req.Pinned != nil {
		return
	}
	var w Worker
	var bound bool
	if s.submitted { // it must not wait
		w, bound = r.given.worker(r.conf.Now(), keyOf(id))
	} else {
		w, bound = r.given.await(ctx, r.conf.Now, keyOf(id))
	}
	p := r.poolOf(w.ID)
	if !bound || !slices.Contains(s.target.pools, p) {
		return
	}
	p.read(func(c *core) {
		ord, known := c.find(w)
		if !known || !c.reachable(r.conf.Now(), ord) {
			return
		}
		info := c.entries[ord].info
		if info.Role.takes(decodePart) && (adapter == "" || info.lists(adapter)) &&
			Allows(req.AllowedAddresses, info.rankAddress(w.DPRank)) {
			req.Pinned, req.Held = &w, id
		}
	})
}
