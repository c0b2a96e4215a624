// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/tokenizer"
)

// book adds the request in s to the flights, and lets the pool decide and take a slot.
func (r *Router) book(ctx context.Context, p *pool, s *scratch) error {
	in := &s.input
	if in.ID == "" {
		return p.admit(ctx, r, s)
	}
	if !r.flights.begin(in.ID, flight{pool: p, session: in.session, number: in.number}) {
		return ErrDuplicate
	}
	ends := true
	defer func() {
		if ends {
			r.flights.end(in.ID, 0, in.number)
		}
	}()
	err := p.admit(ctx, r, s)
	if ends = err != nil && !errors.Is(err, errQueued); err != nil {
		return err
	}
	return r.booked(p, s)
}

// decided returns the decision in s, with the time that it took.
func (s *scratch) decided() *Decision {
	d := &s.result.decision
	d.PickTime = s.pickTime
	return d
}

// booked completes the flight of a request whose slot was just taken, by the decision in s. Then it calls
// the hooks.
func (r *Router) booked(p *pool, s *scratch) error {
	in, d := &s.input, s.decided()
	hooks := &r.conf.Hooks
	fl := flight{pool: p, session: in.session, number: in.number, origin: originOf(in.Request, in.hashes.local)}
	if in.SessionFinal {
		fl.session = 0
	} else if in.session != 0 && hooks.TellSession != nil {
		fl.name = new(in.Session)
	}
	fl.lapses, fl.rebind = !in.Owned, s.choices.worker.sessionMoves
	fl.chose(d.Worker, d.Second.Worker, d.Second.OverlapBlocks)
	fl.guess = p.known.guess(d.Time, &in.hashes, &s.result.booked, &in.overlap)
	r.expect(p, s)
	if fl.leg = d.Prefill != nil; fl.leg {
		r.beginLeg(p, s)
	}
	if hooks.Finished != nil {
		fl.outcome = r.beginOutcome(d, in.Arrival)
	}
	if !r.flights.change(in.ID, fl) {
		// Free was called between the booking and here. It did not free the slot, and it is
		// not called again.
		fl.guess.withdraw()
		r.confirms.Drop(in.number)
		p.update(r.conf.Now(), func(c *core) { c.slots.Free(in.ID) })
		if fl.leg {
			r.Abandon(legID(in.ID))
		}
		return ErrFreed
	}
	if hooks.Tell != nil {
		hooks.Tell(in.slotTaken(d))
	}
	if in.SessionFinal && in.session != 0 && hooks.TellSession != nil {
		hooks.TellSession(SessionBinding{Session: in.Session, Worker: d.Worker, Over: true})
	}
	return nil
}

// expect notes which blocks the worker of the request in s must store if kvroute makes the engine's ids. The worker
// of the prefill leg computes the prompt, if there is a leg.
func (r *Router) expect(p *pool, s *scratch) {
	in, d, ids := &s.input, &s.result.decision, &s.input.prompt.ids
	over, at := &in.overlap, &s.result.booked
	if ids.Class == 0 || s.target.judged == nil || d.Group != "" || !p.known.used {
		return
	}
	req := confirm.Request{
		Number: in.number, Worker: confirm.Worker{ID: d.Worker.ID, Rank: d.Worker.DPRank}, Class: ids.Class, BlockSize: p.blockSize,
		Seed: indexer.Seed(in.lora, in.Salt),
	}
	if d.Prefill != nil {
		over, at = &s.choices.legInput.overlap, &s.result.legBooked
		req.Worker = confirm.Worker{ID: d.Prefill.Worker.ID, Rank: d.Prefill.Worker.DPRank}
	}
	if at.unreported {
		return
	}
	switch {
	case ids.Mode == tokenizer.Exact, ids.Mode == tokenizer.ExactPrefix:
		n := confirm.Blocks(ids.Exact, p.blockSize)
		req.Local, req.Had, req.IDs = in.hashes.local[:min(n, len(in.hashes.local))], over.held(at.ordinal), ids.IDs[:ids.Exact]
	case ids.Checked != nil:
		req.Local = indexer.AppendLocalHashes(nil, ids.Checked, p.blockSize, req.Seed)
		req.Local = req.Local[:confirm.Blocks(len(ids.Checked), p.blockSize)]
		req.Had, req.IDs = p.known.held(at.ordinal, req.Local, new(heldBuffer)), ids.Checked
	}
	r.confirms.Expect(d.Time, s.target.judged.model, &req)
}

// held returns how many leading blocks of the prompt a worker has by its events, on any tier.
func (o *overlap) held(ord int) int {
	if ord >= len(o.blocks) {
		return 0
	}
	n := o.blocks[ord]
	if ord < len(o.pending) {
		n -= o.pending[ord]
	}
	for _, lower := range o.lower {
		if ord < len(lower) {
			n += lower[ord]
		}
	}
	return int(n)
}

// beginOutcome begins the outcome of a request that was just booked.
func (r *Router) beginOutcome(d *Decision, a Arrival) *openOutcome {
	if a.Began.IsZero() {
		a.Began = d.Time.Add(-d.TokenizeTime - d.HashTime - d.MatchTime - d.QueueTime)
	}
	o := &openOutcome{outcome: Outcome{Arrival: a}}
	d.copyTo(&o.outcome.Decision, nil, 0, nil, d.Prefill)
	return o
}

// flights holds the requests in flight: from the decision to the end of the response.
type flights struct {
	mu sync.Mutex
	// mu guards the fields below.
	byID map[string]flight
	// peerBytes is the memory of each peer's requests, and under 0 of all of them.
	peerBytes map[uint64]int
	// endedEarly has the ends of peers' requests that may begin only now, and until when they
	// are remembered.
	endedEarly *simplelru.LRU[string, time.Time]
}

const (
	endedLife = 60 * time.Second
	maxEnded  = 1 << 16 // ends, about 10 MB
)

// flight is what the router remembers of a request in flight. It has 128 bytes: a map allocates
// larger values one by one.
type flight struct {
	pool    *pool        // that has the request's slot; nil for no flight
	number  uint64       // of the decision: unique among flights, never 0
	peer    uint64       // router replica that booked the request; 0 = this one
	ids     [2]uint64    // of the workers that the request was booked on, and of the second choice
	ranks   [2]uint32    // of these workers
	origin  origin       // zero for a peer's request
	held    int32        // blocks of the prompt that the second choice holds
	rebind  bool         // bind the session even if it is bound to another worker
	lapses  bool         // the request ends when it loses its slot, because no caller has to free it
	leg     bool         // the request has a prefill leg, which ends with its first token or its end
	session uint64       // to be bound at the first token; 0 = none
	name    *string      // of the session; nil unless other replicas must learn of it
	guess   guess        // predicted blocks, until the first token confirms them
	outcome *openOutcome // nil without [Hooks.Finished], for legs, and for peers' requests
}

// chose notes the workers of a decision, and how many blocks of the prompt the second choice holds.
func (f *flight) chose(first, second Worker, held int) {
	f.ids, f.ranks, f.held = [2]uint64{first.ID, second.ID}, [2]uint32{first.DPRank, second.DPRank}, int32(held)
}

// first is the worker that the request was booked on.
func (f *flight) first() Worker { return Worker{f.ids[0], f.ranks[0]} }

// second is the second choice; the zero value without one.
func (f *flight) second() Worker { return Worker{f.ids[1], f.ranks[1]} }

// The memory of peers' requests is limited, because a program on the bus may make up any number of them.
const (
	maxPeerBytes    = 192 << 20 // of one peer: about 300,000 requests
	maxAllPeerBytes = 256 << 20
	requestBytes    = 512 // of a request with its slot, without its id and its blocks
)

// peerSize is the memory of a peer's request, without its blocks, in bytes.
func peerSize(id string) int { return requestBytes + 2*len(id) }

// hasRoom says whether the memory of peers' requests has room for one more.
func (f *flights) hasRoom(id string, peer uint64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := peerSize(id)
	return f.peerBytes[peer]+n <= maxPeerBytes && f.peerBytes[0]+n <= maxAllPeerBytes
}

// countLocked adds the memory of a peer's request, or removes it (by = -1).
func (f *flights) countLocked(id string, peer uint64, by int) {
	if peer == 0 {
		return
	}
	n := by * peerSize(id)
	f.peerBytes[0] += n
	if f.peerBytes[peer] += n; f.peerBytes[peer] == 0 {
		delete(f.peerBytes, peer)
	}
}

// origin is the client of a request and the beginning of its prompt, as short hashes; see [Request.Client]. All
// requests of an unknown origin have the zero value, so they count as one.
type origin struct{ client, prefix uint32 }

// originOf returns the origin of a request. blocks are the local hashes of its prompt.
func originOf(req *Request, blocks []uint64) origin {
	o := origin{uint32(req.Client), uint32(req.Prefix)}
	if o == (origin{}) && len(blocks) > 0 {
		o.prefix = uint32(blocks[0])
	}
	return o
}

// begin returns false if a request with this id is in flight.
func (f *flights) begin(id string, fl flight) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, exists := f.byID[id]; exists {
		return false
	}
	f.byID[id] = fl
	f.countLocked(id, fl.peer, 1)
	return true
}

// change replaces what is known of a request. It returns false if the request has ended.
func (f *flights) change(id string, fl flight) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.byID[id].number != fl.number {
		return false
	}
	f.byID[id] = fl
	return true
}

// get returns what is known of a request; its pool is nil if the request is not in flight.
func (f *flights) get(id string) flight {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.byID[id]
}

// confirm is get at the first token of a request. The token confirms the guess, so the flight has it no
// more.
func (f *flights) confirm(id string) flight {
	f.mu.Lock()
	defer f.mu.Unlock()
	fl, exists := f.byID[id]
	if fl.guess = (guess{}); exists {
		f.byID[id] = fl
	}
	return fl
}

// end removes the request of a replica and returns it. A number other than 0 must be the
// request's: another request may have the same id by now.
func (f *flights) end(id string, peer, number uint64) flight {
	f.mu.Lock()
	defer f.mu.Unlock()
	fl, exists := f.byID[id]
	if !exists || fl.peer != peer || number != 0 && fl.number != number {
		return flight{}
	}
	delete(f.byID, id)
	f.countLocked(id, peer, -1)
	return fl
}

// noteEnd remembers the end of a peer's request.
func (f *flights) noteEnd(now time.Time, id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if until, _ := f.endedEarly.Peek(id); !now.Before(until) {
		f.endedEarly.Add(id, now.Add(endedLife))
	}
}

// hasEnded says whether the end of a peer's request is remembered.
func (f *flights) hasEnded(now time.Time, id string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	until, _ := f.endedEarly.Peek(id)
	return now.Before(until)
}

// endAll removes all requests of a replica.
func (f *flights) endAll(peer uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.byID, func(id string, fl flight) bool {
		if fl.peer != peer {
			return false
		}
		f.countLocked(id, peer, -1)
		return true
	})
}

// sweep removes requests that have lost their slot, by time or with their worker, and that
// no caller has to free. It returns those of this replica.
func (f *flights) sweep() (ended []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.byID, func(id string, fl flight) bool {
		// This takes a pool's lock under ours. Nothing takes them in the other order.
		lost := fl.lapses && !fl.pool.holds(id)
		if lost && fl.peer == 0 {
			ended = append(ended, id)
		}
		if lost {
			f.countLocked(id, fl.peer, -1)
		}
		return lost
	})
	return ended
}
