// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// MarkPrefillCompleted notes the first token of a booked request, or of a request that
// another replica booked: its prompt tokens no longer wait to be computed. It returns false
// for an id without a slot and for a repetition, which are both harmless.
func (r *Router) MarkPrefillCompleted(id string) bool { return r.FirstToken(id, SignTold) }

// FirstToken is [Router.MarkPrefillCompleted] with the way in which the first token was
// noticed. With [SignEnd] the first token came at some time before.
func (r *Router) FirstToken(id string, by Sign) bool {
	fl := r.flights.confirm(id)
	if fl.pool == nil {
		return false
	}
	if fl.leg {
		r.endLeg(id, true)
	}
	now := r.conf.Now()
	var news, inferred bool
	var bound SessionBinding
	fl.pool.update(now, func(c *core) {
		news, inferred = c.prefillCompleted(now, id, fl.session, fl.rebind, by)
		if news && fl.name != nil {
			ord, _ := c.sessions.worker(now, fl.session)
			bound.Worker = c.entries[ord].worker
		}
	})
	switch {
	case !news:
		return false
	case fl.peer != 0:
		r.tellPeers(Change{Kind: FirstToken, ID: id, Owner: fl.peer, Worker: fl.first})
		return true
	}
	if fl.name != nil {
		bound.Session = *fl.name
		if fl.rebind { // other replicas may have the old binding
			r.conf.Hooks.TellSession(SessionBinding{Session: bound.Session, Worker: bound.Worker, Over: true})
		}
		r.conf.Hooks.TellSession(bound)
	}
	r.note(&fl, func(d *Decision) { d.FirstToken, d.FirstTokenBy = now, by })
	r.tellPeers(Change{Kind: FirstToken, ID: id})
	if !inferred {
		r.metrics.firstTokens.AddTo(fl.pool.labels.signs[by], 1)
	}
	return true
}

// prefillCompleted notes the first token of a request, and binds its session. inferred
// says that the first token was inferred before.
func (c *core) prefillCompleted(now time.Time, id string, session uint64, rebind bool, by Sign) (news, inferred bool) {
	waited, expected := c.slots.Wait(now, id)
	news, inferred = c.slots.FirstToken(now, id, by != SignEnd)
	ord, _ := c.slots.Worker(id)
	if news && by != SignEnd && expected > 0 {
		c.noteFirstToken(ord, expected, waited)
	}
	if news && session != 0 {
		c.sessions.bind(now, session, ord, rebind)
	}
	return news, inferred
}

// AddOutputTokens notes that a booked request has k more tokens of output, which
// fill blocks on its worker. It is optional, and a sign of life of requests that
// are not owned. It reports whether the request has a slot.
func (r *Router) AddOutputTokens(id string, k int) (taken bool) {
	fl := r.flights.get(id)
	if fl.pool == nil || fl.peer != 0 {
		return false
	}
	now := r.conf.Now()
	fl.pool.read(func(c *core) { taken = c.slots.AddOutputTokens(now, id, k) })
	return taken
}

// Free gives the slot of a booked request back. It reports whether the request was
// in flight: false for an unknown id and for a repetition, both harmless.
func (r *Router) Free(id string) bool { return r.free(r.flights.end(id, 0, 0), id, true) }

// Abandon is [Router.Free] for a request that its worker did not serve: its blocks
// do not count as cached there because of it, unless its first token was noted.
func (r *Router) Abandon(id string) bool {
	fl := r.flights.end(id, 0, 0)
	fl.guess.withdraw()
	return r.free(fl, id, false)
}

func (r *Router) free(fl flight, id string, served bool) bool {
	if fl.pool == nil {
		return false
	}
	if fl.leg {
		r.endLeg(id, served)
	}
	now := r.conf.Now()
	var silent bool
	fl.pool.update(now, func(c *core) {
		if w := c.waiting[id]; w != nil {
			c.remove(w, ErrFreed)
		} else {
			silent = c.end(now, id)
		}
	})
	if silent && served {
		r.note(&fl, func(d *Decision) { d.FirstTokenBy = SignEnd })
		r.metrics.firstTokens.AddTo(fl.pool.labels.signs[SignEnd], 1)
	}
	r.finish(&fl, id, now, served)
	r.tellPeers(Change{Kind: SlotFreed, ID: id, Abandoned: !served})
	return true
}

// beginOutcome begins the outcome of a request that was just booked.
func (r *Router) beginOutcome(d *Decision, a Arrival) *openOutcome {
	if r.conf.Hooks.Finished == nil {
		return nil
	}
	if a.Began.IsZero() {
		a.Began = d.Time.Add(-d.TokenizeTime - d.HashTime - d.MatchTime - d.QueueTime)
	}
	o := &openOutcome{outcome: Outcome{Decision: *d, Arrival: a}}
	o.outcome.Candidates, o.outcome.Omitted, o.outcome.Tokens = nil, 0, nil
	return o
}

// note changes the kept decision of a request in flight, and its outcome.
func (r *Router) note(fl *flight, change func(*Decision)) {
	r.kept.change(fl.number, change)
	fl.outcome.change(func(o *Outcome) { change(&o.Decision) })
}

// finish reports the outcome of a request that has ended. No lock is held.
func (r *Router) finish(fl *flight, id string, now time.Time, served bool) {
	if parent, isLeg := strings.CutSuffix(id, legSuffix); isLeg {
		r.flights.get(parent).outcome.change(func(o *Outcome) { o.LegEnded = now })
		return
	}
	r.note(fl, func(d *Decision) { d.Freed = now })
	var done Outcome
	fl.outcome.change(func(o *Outcome) {
		o.Abandoned = !served
		done = *o
	})
	if fl.outcome != nil {
		r.conf.Hooks.Finished(done)
	}
}

// Run calls [Router.Tick] until ctx ends.
func (r *Router) Run(ctx context.Context) error {
	const every = 15 * time.Second // slots are looked at every 30 s at most
	t := time.NewTicker(every)
	defer t.Stop()
	var due <-chan time.Time
	if r.conf.InferFirstTokens && r.conf.Queue.Threshold != nil {
		// Requests in the queue wait for prefills, which may end without any report.
		due = time.Tick(inferQueued)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
			r.Tick()
		case <-due:
			now := r.conf.Now()
			for _, p := range r.allPools() {
				p.update(now, func(c *core) {
					if c.queue.Len() > 0 { // else the next decision infers
						c.infer(now)
					}
				})
			}
		}
	}
}

// Tick applies the passing of time: slots that are not owned, sessions and waiting requests
// expire. It may be called at any rate, and must be called now and then if such slots or
// sessions are used; see [Router.Run].
func (r *Router) Tick() {
	now := r.conf.Now()
	for _, p := range r.allPools() {
		p.update(now, func(c *core) {
			c.expired += c.slots.Expire(now)
			c.sessions.expire(now)
			c.infer(now)
			c.expire(now)
		})
	}
	for _, id := range r.flights.sweep() {
		r.tellPeers(Change{Kind: SlotFreed, ID: id})
	}
}

func (r *Router) allPools() []*pool {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	return slices.Collect(maps.Values(r.pools))
}

const (
	// inferEvery is how old the inferred first tokens may be at a decision: much less than a
	// prefill that matters takes.
	inferEvery = time.Millisecond
	// inferQueued is how often first tokens are inferred while requests wait in a queue.
	inferQueued = 50 * time.Millisecond
)

// infer starts the requests whose prefill should be done by now. It is called before
// loads are read.
//
// It looks at every rank, since the decision that follows does so, too: to keep the ranks
// sorted by what is due next would cost more than the comparison saves.
func (c *core) infer(now time.Time) {
	if !c.conf.InferFirstTokens || now.Sub(c.inferredAt) < inferEvery {
		return
	}
	c.inferredAt = now
	inferred := 0
	for _, ord := range c.order {
		inferred += c.slots.InferByRate(now, ord)
	}
	if inferred > 0 {
		c.pump(now)
	}
}

// noteInferred notes first tokens that a pool has inferred. No lock is held.
func (r *Router) noteInferred(p *pool, list []scorer.Inference) {
	for _, i := range list {
		if i.Number >= peerNumbers {
			continue // counted by the replica that booked it
		}
		if fl := r.flights.get(i.ID); fl.number == i.Number {
			r.note(&fl, func(d *Decision) { d.FirstToken, d.FirstTokenBy = i.At, Sign(i.By) })
		}
		r.metrics.firstTokens.AddTo(p.labels.signs[Sign(i.By)], 1)
		r.tellPeers(Change{Kind: FirstToken, ID: i.ID})
	}
}

// describe fills in the decision's fields about the chosen candidate.
func (c *core) describe(q *question, chosen int, d *Decision) {
	ord, in := c.candidates[chosen], &c.inputs[chosen]
	e := &c.entries[ord]
	d.OverlapBlocks = in.OverlapBlocks
	d.CachedTokens = in.OverlapBlocks * c.blockSize
	d.MeanCachedTokens = float64(c.held*c.blockSize) / float64(len(c.inputs))
	// The engine computes the last token of a prompt even if it holds them all.
	d.PrefillTokens = max(min(1, q.tokens), q.tokens-d.CachedTokens)
	d.CoarseTTFT = scorer.CoarseTTFT(d.PrefillTokens, in.ActiveRequests, c.throughput(e))
	d.EstimatedTTFT = d.Settings.ModelTTFT(&c.request, in)
	d.Worker, d.WorkerName, d.Address = e.worker, e.info.Name, e.info.rankAddress(e.worker.DPRank)
	d.Engine, d.NameRank, d.Group, d.Bootstrap = e.info.Engine, e.info.wantsRank(e.worker.DPRank), e.info.Group, e.info.Bootstrap
	d.Member = c.member(q, ord)
}

// takeSlot books a slot on the chosen candidate. It returns false if a request with this
// id has a slot.
func (c *core) takeSlot(now time.Time, q *question, chosen int, d *Decision) bool {
	ord := c.candidates[chosen]
	e := &c.entries[ord]
	reuse := d.Settings.AssumeKVReuse
	if q.leg != nil {
		reuse = c.settings.AssumeKVReuse // the decode settings leave it out of the comparison only
	}
	if !c.slots.Add(now, q.ID, &scorer.Booking{
		Worker: ord, Blocks: q.sequence, BlockSize: c.blockSize,
		PromptTokens: q.tokens, CachedTokens: q.tokens - d.PrefillTokens,
		ExpectedOutput: q.ExpectedOutput, ExpectedTTFT: expectedTTFT(d, &c.inputs[chosen]), Owned: q.Owned, Unseen: q.Unseen && q.leg == nil, Number: q.number,
		BlocksUntracked: c.conf.NoActiveBlocks || q.decode != nil, PrefillUntracked: !d.Settings.TrackPrefill, NoReuse: !reuse,
		Reports: e.info.Group != "",
	}) {
		return false
	}
	c.turn++
	e.routed++
	if q.tokens > 0 && q.leg == nil {
		c.typical.note(q.tokens, d.PrefillTokens)
	}
	q.ordinal, q.generation = ord, e.since
	q.unreported = c.unknown(e)
	if c.held == 0 {
		e.properties.LastCold = c.turn
	}
	c.sessions.touch(now, q.session, q.SessionFinal)
	return true
}
