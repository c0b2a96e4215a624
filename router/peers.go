// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"strings"
	"time"

	"github.com/kvroute/kvroute/slots"
)

// Router replicas send each other the changes of their slots, so each one knows the whole
// load. [Hooks.Tell] gets the changes of the router's own requests; [Router.PeerChanged]
// takes the changes of other replicas. Package replicas carries them.
//
// # Invariants
//
//   - For each own request with a slot, Tell gets SlotTaken once, first, and SlotFreed once.
//     The changes between them come in the order in which they happened. Only a first token
//     that is noticed or inferred while the request begins or ends may come before or
//     after. An inferred first token is reported again when it is noticed.
//   - A peer's request is a flight like an own one. Its key is unique, and it has at most
//     one slot. Only its peer moves or frees it.
//   - Changes of a peer's requests change load and predictions of caches: never an own
//     request, a session, or the turn of workers. Sessions of a peer
//     ([Router.PeerSession]) change nothing else.

// ChangeKind is the kind of a [Change].
type ChangeKind uint8

// The kinds of changes.
const (
	SlotTaken     ChangeKind = iota + 1
	FirstToken               // its prompt is computed
	PrefillFailed            // its prefill leg failed: the worker computes the prompt
	SlotMoved                // another worker serves the request
	SlotFreed
)

// String returns the kind in lower case.
func (k ChangeKind) String() string {
	names := [...]string{"unknown", "taken", "first_token", "prefill_failed", "moved", "freed"}
	if int(k) >= len(names) {
		k = 0
	}
	return names[k]
}

// Change is a change of a request's slot.
type Change struct {
	Kind ChangeKind
	ID   string // of the request, at the replica that booked it
	// Owner is the replica that booked the request, if the first token of its request was
	// noticed here; 0 otherwise.
	Owner uint64
	// Worker has the slot after the change: for SlotTaken and SlotMoved, and for the first
	// token of a peer's request.
	Worker Worker
	// Abandoned is set in a SlotFreed if no worker served the request; Left, too, if its load
	// stays on the worker, as [Router.Leave] says.
	Abandoned, Left bool

	// CachedTokens is the part of the prompt that the worker has cached: for SlotTaken and
	// SlotMoved.
	CachedTokens int

	// The rest is for SlotTaken. Sequence are the sequence hashes of the prompt's full
	// blocks, valid during the call only.
	Sequence         []uint64
	PromptTokens     int
	OverlapBlocks    int
	ExpectedOutput   int // tokens; 0 = unknown
	PrefillUntracked bool
	// Guessed says that no engine has these hashes.
	Guessed bool
	// Expires says that the peer's death will not be reported, and that its changes may come
	// in any order: the request ends after 300 s without a sign of life, and an end that
	// comes before its beginning is remembered for 60 s.
	Expires bool
}

// tellPeers passes a change to other replicas. No lock is held.
func (r *Router) tellPeers(c Change) {
	if r.conf.Hooks.Tell != nil {
		r.conf.Hooks.Tell(c)
	}
}

// slotTaken returns the change of a booking.
func (in *decisionInput) slotTaken(d *Decision) Change {
	return Change{
		Kind: SlotTaken, ID: in.ID, Worker: d.Worker, Sequence: in.hashes.sequence,
		PromptTokens: in.prompt.tokens, CachedTokens: in.prompt.tokens - d.PrefillTokens, OverlapBlocks: d.OverlapBlocks,
		ExpectedOutput: in.ExpectedOutput, PrefillUntracked: !d.Settings.TrackPrefill, Guessed: in.hashes.ownHashes,
	}
}

// peerKey makes the id of a peer's request unique, because two replicas may use the same id:
// it adds the peer's number in 16 hex digits, unless the id begins with it.
func peerKey(peer uint64, id string) string {
	prefix := fmt.Sprintf("%016x", peer)
	if strings.HasPrefix(id, prefix+"-") {
		return id
	}
	return prefix + ":" + id // behind "-" it could be another request's id
}

// peerNumbers is the first number of peers' flights: above those of all decisions.
const peerNumbers = 1 << 63

// PeerChanged takes a change of another router replica's request. It returns false if the
// worker or the request is not known. It then keeps nothing, except the end of a request whose
// changes may come in any order ([Change.Expires]). A request that moves to an unknown worker loses
// its slot. A repeated SlotTaken changes nothing. Changes of one peer must come in order, one at a time.
func (r *Router) PeerChanged(peer uint64, c Change) (known bool) {
	if peer == 0 || c.ID == "" || len(c.ID) > maxID {
		return false
	}
	key := peerKey(peer, c.ID)
	now := r.conf.Now()
	// Under the lock a worker cannot be removed, and its ordinal cannot be reused.
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	if c.Kind == SlotTaken {
		return r.peerTook(now, peer, key, &c)
	}
	fl := r.flights.get(key)
	if fl.pool == nil || fl.peer != peer {
		if c.Kind == SlotFreed && c.Expires {
			r.flights.noteEnd(now, key) // the request's SlotTaken may still come, and must not take a slot
		}
		return false
	}
	switch c.Kind {
	case SlotTaken: // see above
	case FirstToken:
		r.flights.confirm(key)
		fl.pool.update(now, func(core *core) {
			_, known = core.slots.Worker(key)
			core.prefillCompleted(now, key, 0, false, SignTold)
		})
	case PrefillFailed:
		fl.pool.update(now, func(core *core) {
			_, known = core.slots.Worker(key)
			core.slots.ComputePrompt(key)
		})
	case SlotMoved:
		known = r.peerMoved(now, key, fl, &c)
	case SlotFreed:
		r.flights.end(key, peer, 0)
		if c.Abandoned {
			fl.guess.withdraw()
		}
		fl.pool.update(now, func(core *core) {
			if c.Left {
				known = core.slots.Leave(now, key).Existed
			} else {
				known = core.slots.Finish(now, key).Existed
			}
		})
		if c.Expires {
			r.flights.noteEnd(now, key) // a repeated SlotTaken must not take a slot
		}
	}
	return known
}

// peerTook books a peer's request. The fleet is held.
func (r *Router) peerTook(now time.Time, peer uint64, key string, c *Change) (known bool) {
	p := r.owners[c.Worker.ID]
	if p == nil {
		return false
	}
	if c.Expires && r.flights.hasEnded(now, key) {
		return true
	}
	if !r.flights.hasRoom(key, peer) {
		r.metrics.peersRefused.Add(1)
		return false
	}
	fl := flight{pool: p, peer: peer, number: peerNumbers + r.peerFlights.Add(1)}
	fl.chose(c.Worker, Worker{}, 0)
	if !r.flights.begin(key, fl) {
		was := r.flights.get(key)
		if was.peer != peer || was.pool != nil && was.pool.holds(key) {
			return true
		}
		// It lost its slot with its worker, which is back.
		r.flights.end(key, peer, 0)
		r.flights.begin(key, fl)
	}
	var at booking
	booked := false
	p.update(now, func(core *core) {
		if at.ordinal, known = core.find(c.Worker); !known {
			return
		}
		e, cached := &core.entries[at.ordinal], c.CachedTokens
		if c.PromptTokens > 0 && cached < 0 {
			cached = c.OverlapBlocks * core.blockSize
		}
		if booked = core.slots.Add(now, key, &slots.Booking{
			Worker: at.ordinal, Blocks: c.Sequence, BlockSize: core.blockSize,
			PromptTokens: c.PromptTokens, CachedTokens: max(0, cached), ExpectedOutput: c.ExpectedOutput,
			Owned: !c.Expires, Replica: peer, Number: fl.number, BlocksUntracked: core.conf.NoActiveBlocks || isLeg(c.ID),
			PrefillUntracked: c.PrefillUntracked, NoReuse: !core.settings.AssumeKVReuse, Reports: e.info.Group != "",
		}); booked {
			e.report.disclose(now, len(c.Sequence), syncLag)
		}
		at.generation, at.unreported = e.since, e.unreported(core.conf.NoEvents)
	})
	if !booked {
		r.flights.end(key, peer, fl.number)
		return known
	}
	fl.lapses, fl.guess = true, p.known.guess(now, &hashes{sequence: c.Sequence, tokens: c.PromptTokens, ownHashes: c.Guessed}, &at, nil)
	r.flights.change(key, fl)
	return true
}

// peerMoved moves a peer's request. The fleet is held.
func (r *Router) peerMoved(now time.Time, key string, fl flight, c *Change) (known bool) {
	var s serving
	fl.pool.update(now, func(core *core) {
		_, booked := core.slots.Worker(key)
		to, there := core.find(c.Worker)
		if known = booked && there; known {
			core.moveSlot(now, key, to, max(0, c.CachedTokens), len(c.Sequence), &s)
		} else {
			core.slots.Free(key)
		}
	})
	switch {
	case !known:
		r.flights.end(key, fl.peer, 0)
	case s.moved:
		fl.chose(c.Worker, Worker{}, 0)
		r.guessMoved(now, key, fl, s)
	}
	return known
}

// RemovePeer removes all requests of another router replica.
func (r *Router) RemovePeer(peer uint64) {
	if peer == 0 {
		return
	}
	now := r.conf.Now()
	r.flights.endAll(peer)
	for _, p := range r.allPools() {
		p.update(now, func(c *core) { c.slots.RemoveReplica(peer) })
	}
}
