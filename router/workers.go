// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/slots"
)

// ranks is the table of a pool's workers. It has an entry for each rank of each worker process. The
// number of an entry is the ordinal of the rank: slots, indexes and choices name workers by ordinals.
//
// Invariants:
//
//   - Every rank of every worker has one ordinal, and order holds the ordinals in use, sorted by Worker.
//   - An ordinal is used again only after its slots and sessions are dropped and, by the pool, its
//     blocks are purged from the index.
//   - changes grows with every ordinal that is handed out, so an overlap that was counted earlier never
//     counts for the new worker of an ordinal. It also grows when workers change, and when a worker
//     begins to be avoided: plainCandidates hold for one value of changes.
type ranks struct {
	entries []entry
	free    []int // ordinals to hand out again
	order   []int
	changes uint64
	splits  bool // some workers take prefill legs, and some the decode of split requests
	// counts are numbers of ranks by what they are: a change of one worker must not read all.
	counts struct{ prefill, decode, group int }

	turn     uint64 // bookings so far
	heldTurn uint64 // those of the side round-robin, without prefill legs
	legs     uint64 // those of prefill legs
}

// entry is the state of the worker with an ordinal. What every decision reads comes first.
type entry struct {
	properties  scorer.Input // of info; without load
	since       uint64       // value of ranks.changes when the worker got the ordinal
	learned     learned      // by audit
	report      engineReport
	worker      Worker
	info        *WorkerInfo
	group       *group // last report of a router group; nil for workers, and before the first report
	routed      uint64 // requests sent here
	speed       speed
	events      indexer.State // empty if it is ok
	hasEvents   bool          // an event of the worker came
	avoid       avoidance
	sign        time.Time // when its last response was passed on as a sign of life
	tries       tries     // of this worker
	failures    uint64    // requests that it refused or failed
	health      Health    // of info, at healthSince
	healthSince time.Time // when its health became what it is
	audit       audit
	observed    time.Time // when the last request was booked whose first token is observed
}

// setInfo replaces the information about a worker.
func (e *entry) setInfo(info *WorkerInfo) {
	if e.info = info; info.Health <= Degraded {
		e.tries = tries{}
	}
	e.properties = scorer.Input{
		CPU: info.CPU, DecodeOnly: info.Role == Decode,
		MaxBatchedTokens: info.MaxBatchedTokens, MaxRequests: info.MaxNumSeqs,
		LastCold: e.properties.LastCold, Speed: e.properties.Speed,
	}
	if info.Group != "" {
		e.properties.Members = max(1, info.Members)
	}
}

// noteHealth notes when the health of a worker became what it is.
func (r *ranks) noteHealth(now time.Time, id uint64) {
	for _, ord := range r.ordinals(id) {
		if e := &r.entries[ord]; e.healthSince.IsZero() || e.health != e.info.Health {
			e.health, e.healthSince = e.info.Health, now
		}
	}
}

// healthNow returns the health of a worker for a decision, and the reason if it is not
// healthy.
func (r *ranks) healthNow(now time.Time, e *entry) (Health, Exclusion) {
	switch {
	case e.info.Health != Healthy:
		return e.info.Health, ExcludedHealth
	case r.avoids(now, e):
		return Degraded, ExcludedFailing
	case e.info.Group != "":
		return e.groupHealth(now)
	}
	return Healthy, ""
}

// end is the time until which the worker is avoided, at least.
func (a *avoidance) end() time.Time {
	if a.trial.After(a.until) {
		return a.trial
	}
	return a.until
}

// ends returns when the worker is avoided no longer: by time, and, if waits is set, only after more bookings.
func (a *avoidance) ends(booked uint64) (until time.Time, waits bool) {
	return a.end(), a.trying && a.failures >= freeFailures && booked-a.booked < triesEvery
}

// bookings returns the number of bookings so far of the kind that a worker takes: prefill legs, or others.
func (r *ranks) bookings(e *entry) uint64 {
	if e.info.Role == Prefill {
		return r.legs
	}
	return r.turn - r.legs
}

// avoids says whether a worker gets no requests because it failed.
func (r *ranks) avoids(now time.Time, e *entry) bool {
	until, waits := e.avoid.ends(r.bookings(e))
	return waits || now.Before(until)
}

// trialPeriod returns for how long a worker that fails is tried by a single request.
func (c *Config) trialPeriod(of Role) time.Duration {
	if of == Prefill {
		return max(c.AvoidFailing, c.Split.LegTimeout)
	}
	return c.AvoidFailing
}

// try notes that the worker gets a request. It reports whether a trial period begins: for a prefill leg, also if the
// worker should get more other bookings before, since its pool may have none.
func (a *avoidance) try(now time.Time, period time.Duration, booked uint64, leg bool) bool {
	if until, waits := a.ends(booked); !a.trying || waits && !leg || now.Before(until) {
		return false
	}
	if !a.trial.IsZero() {
		a.counts(true) // the try before got no response in time
	}
	a.trial, a.booked = now.Add(period), booked
	return true
}

// signEvery is the time between two signs of life of a worker that are passed on.
const signEvery = time.Second

// signed notes a sign of life. It reports whether it is to be passed on.
func (e *entry) signed(now time.Time) bool {
	if now.Sub(e.sign) < signEvery {
		return false
	}
	e.sign = now
	return true
}

// address is the address of the rank.
func (e *entry) address() netip.AddrPort { return e.info.rankAddress(e.worker.DPRank) }

// isAt says whether the rank may have received a request at an address with a Host header; "" = unknown.
func (e *entry) isAt(a netip.AddrPort, host string) bool {
	return e.address() == a && (host == "" || !e.info.OwnHost || e.info.Host == host)
}

// silent says whether no events of a worker are expected. noEvents is [Config.NoEvents].
func (e *entry) silent(noEvents bool) bool {
	return noEvents || e.info.NoEvents || e.info.BlockSize == 0 || e.unheard()
}

// unheard says whether a worker may publish no events and has published none yet.
func (e *entry) unheard() bool { return e.info.EventsUnsure && !e.hasEvents }

// unreported says whether a worker's cache is unknown: neither events nor a group's filter cover it.
// noEvents is [Config.NoEvents].
func (e *entry) unreported(noEvents bool) bool {
	return e.silent(noEvents) && (e.group == nil || !e.group.filtered)
}

// search returns the place of a worker in the order, or the place where it would be.
func (r *ranks) search(w Worker) (at int, found bool) {
	return slices.BinarySearchFunc(r.order, w, func(ord int, w Worker) int {
		return r.entries[ord].worker.Compare(w)
	})
}

// find returns the ordinal of a worker.
func (r *ranks) find(w Worker) (ord int, found bool) {
	at, found := r.search(w)
	if found {
		ord = r.order[at]
	}
	return ord, found
}

// process returns the range of a process's ranks in the order.
func (r *ranks) process(id uint64) (from, to int) {
	from, _ = r.search(Worker{ID: id})
	for to = from; to < len(r.order) && r.entries[r.order[to]].worker.ID == id; to++ {
	}
	return from, to
}

// ordinals returns the ordinals of a process's ranks.
func (r *ranks) ordinals(id uint64) (ordinals []int) {
	from, to := r.process(id)
	return slices.Clone(r.order[from:to])
}

// pin returns the range of a request's pinned worker, or of its ranks, in the order.
func (r *ranks) pin(req *Request) (from, to int) {
	if req.AnyRank {
		return r.process(req.Pinned.ID)
	}
	at, known := r.search(*req.Pinned)
	if !known {
		return 0, 0
	}
	return at, at + 1
}

// lane is the lane of the queue in which a request waits.
func (r *ranks) lane(req *Request) int {
	if req.Pinned != nil {
		if from, to := r.pin(req); from < to {
			return r.order[from]
		}
	}
	return slots.AnyWorker
}

// at returns the ordinal of a worker with the address a, −1 if no worker has it. It tries ord first, then
// second, which is the most likely other worker. If both have the address, asked decides, the number of workers
// that the proxy tried. If a is not valid, at returns ord.
func (r *ranks) at(ord int, a netip.AddrPort, second Worker, asked int) int {
	has := func(ord int) bool { return r.entries[ord].address() == a }
	if !a.IsValid() {
		return ord
	}
	other, known := r.find(second)
	switch isOther := known && has(other); {
	case isOther && (asked > 1 || !has(ord)):
		return other
	case has(ord):
		return ord
	}
	for _, other := range r.order {
		if has(other) {
			return other
		}
	}
	return -1
}

// workersAt returns the ids of the workers at an address. A worker that answers one Host header only is left out if
// host is another one; an empty host is any.
func (r *ranks) workersAt(a netip.AddrPort, host string) (ids []uint64) {
	for _, ord := range r.order {
		if e := &r.entries[ord]; e.isAt(a, host) && !slices.Contains(ids, e.worker.ID) {
			ids = append(ids, e.worker.ID)
		}
	}
	return ids
}

// outdated returns the ordinals of info's process whose blocks are invalid: of ranks that
// info does not have, and of all ranks if the process restarted. The caller purges them
// from the index before it calls [core.setWorker].
func (r *ranks) outdated(info *WorkerInfo) (ordinals []int) {
	for _, ord := range r.ordinals(info.ID) {
		e := &r.entries[ord]
		if !info.hasRank(e.worker.DPRank) || e.info.StartedMS != info.StartedMS {
			ordinals = append(ordinals, ord)
		}
	}
	return ordinals
}

// add gives a rank an ordinal.
func (r *ranks) add(w Worker, info *WorkerInfo) (ord int) {
	r.changes++
	r.count(info, 1)
	e := entry{worker: w, since: r.changes}
	e.setInfo(info)
	if last := len(r.free) - 1; last >= 0 {
		ord, r.free = r.free[last], r.free[:last]
		r.entries[ord] = e
	} else {
		ord = len(r.entries)
		r.entries = append(r.entries, e)
	}
	at, _ := r.search(w)
	r.order = slices.Insert(r.order, at, ord)
	return ord
}

// drop takes the ordinal of a rank back. The caller has removed its slots and sessions.
func (r *ranks) drop(ord int) {
	at, _ := r.search(r.entries[ord].worker)
	r.count(r.entries[ord].info, -1)
	r.order = slices.Delete(r.order, at, at+1)
	r.entries[ord] = entry{}
	r.free = append(r.free, ord)
}

// changed notes that the workers changed, and whether the pool has workers for prefill legs and
// workers for decodes.
func (r *ranks) changed() {
	r.changes++
	r.splits = r.counts.prefill > 0 && r.counts.decode > 0
}

// size is one more than the largest ordinal so far: the length of a slice that is indexed by ordinal.
func (r *ranks) size() int { return len(r.entries) }

func (i *WorkerInfo) hasRank(rank uint32) bool {
	return rank >= i.DPStart && rank-i.DPStart < max(1, i.DPSize)
}

func (i *WorkerInfo) rankAddress(rank uint32) netip.AddrPort {
	if a, ok := i.RankAddresses[rank]; ok {
		return a
	}
	return i.Address
}

// wantsRank says whether requests for a rank must name the rank: other ranks have the same
// address, and the engine reads the rank of a request.
func (i *WorkerInfo) wantsRank(rank uint32) bool {
	_, own := i.RankAddresses[rank]
	return i.DPSize > 1 && !own && engine.Of(i.Engine).ReadsRank
}

// part is the part of a request that a worker is chosen for.
type part uint8

const (
	whole           part = iota // prefill and decode
	wholeAggregated             // the same, on a worker that cannot transfer blocks
	decodePart
	prefillPart
)

// takes reports whether a worker of this role may take a part.
func (r Role) takes(p part) bool {
	switch p {
	case prefillPart:
		return r == Prefill || r == Both
	case wholeAggregated:
		return r.aggregated()
	default:
		return r != Prefill
	}
}

// takes reports whether a worker may take a part. Workers of some engines refuse whole requests if they
// have a role other than [Aggregated].
func (i *WorkerInfo) takes(p part) bool {
	return i.Role.takes(p) && (p != whole || i.Role.aggregated() || !engine.Of(i.Engine).RefusesWhole)
}

func (r Role) aggregated() bool { return r == "" || r == Aggregated }

// other is a worker that gets a request if those before it do not take it.
type other struct {
	ord     int  // -1 for none
	overlap int  // blocks of the prompt that it holds
	lowered int  // see [scorer.Input.LoweredBlocks]
	guessed bool // as in [Decision]
}

// choiceOf returns a worker as a second or third choice after the first one. named says that a choice before it has
// another Host than the first one.
func (r *ranks) choiceOf(in *decisionInput, first *entry, o other, named bool) Second {
	if o.ord < 0 {
		return Second{}
	}
	e := &r.entries[o.ord]
	host := e.info.Host
	named = named || host != first.info.Host
	nameHost := named && in.HostPerAttempt && (e.info.OwnHost || first.info.OwnHost)
	if nameHost {
		host = cmp.Or(host, e.address().String()) // not the Host of the choice before
	}
	return Second{e.worker, e.info.Name, e.address(), host, nameHost, e.info.wantsRank(e.worker.DPRank), o.overlap, o.lowered, o.guessed}
}

// second returns the worker that gets the request if the chosen one does not take it, and the one that gets it
// if that one does not take it either. They are the candidates of two other
// processes with the lowest costs, and workers that failed last or are not healthy only if there is no other. Of equal
// costs, the fewest pending tokens decide, then the fewest requests. Without such a candidate they are workers that are
// avoided or degraded, since these may serve all the same. There are three conditions:
//
//   - If the request must name one rank for all, the workers have the same rank. With RankPerAttempt
//     each of them gets its own rank.
//   - If the request has a prefill leg, they have the engine of the leg's worker, because the
//     request contains parameters of the leg. They are other processes than that worker.
//   - If one of them answers one Host header only, the first one has the same Host header, unless each of them gets
//     its own (HostPerAttempt).
func (r *ranks) second(in *decisionInput, ch *choice, leg *Decision) (second, third other) {
	first := &r.entries[ch.candidates[ch.chosen]]
	named := !in.RankPerAttempt && first.info.wantsRank(first.worker.DPRank)
	fits := func(e *entry) bool {
		switch {
		case e.worker.ID == first.worker.ID:
		case !in.HostPerAttempt && e.info.OwnHost && e.info.Host != first.info.Host:
		case leg != nil && (e.worker.ID == leg.Worker.ID || e.info.Engine != leg.Engine):
		case named && (e.worker.DPRank != first.worker.DPRank || !e.info.wantsRank(e.worker.DPRank)):
			// The request names one rank for all workers.
		default:
			return true
		}
		return false
	}
	doubtful := func(i int) bool {
		e := &r.entries[ch.candidates[i]]
		return e.avoid.trying || e.avoid.failing || e.info.Refuses || e.info.Health > Degraded
	}
	cheaper := func(i, j int) bool {
		a, b := &ch.inputs[i], &ch.inputs[j]
		return ch.costs[i] < ch.costs[j] || ch.costs[i] == ch.costs[j] &&
			cmp.Or(cmp.Compare(a.PendTokens, b.PendTokens), cmp.Compare(a.ActiveRequests, b.ActiveRequests)) < 0
	}
	less := func(i, j int) bool {
		if of, other := doubtful(i), doubtful(j); of != other {
			return other
		}
		return cheaper(i, j)
	}
	best, next := -1, -1
	certain := false // next is not doubtful
	for i, ord := range ch.candidates {
		// To read thousands of entries is slow, so a candidate whose cost excludes it is skipped before.
		if next >= 0 && (certain && !cheaper(i, next) || !less(i, next)) {
			continue
		}
		e := &r.entries[ord]
		switch {
		case !fits(e):
		case best < 0:
			best = i
		case r.entries[ch.candidates[best]].worker.ID == e.worker.ID:
			if less(i, best) {
				best = i
			}
		case less(i, best):
			best, next = i, best
		default:
			next = i
		}
		certain = next >= 0 && !doubtful(next)
	}
	second, third = ch.other(best), ch.other(next)
	if second.ord < 0 {
		second = other{ord: r.lastResort(ch, fits, 0)}
	}
	if second.ord >= 0 && third.ord < 0 {
		third = other{ord: r.lastResort(ch, fits, r.entries[second.ord].worker.ID)}
	}
	return second, third
}

// other returns a candidate as another choice, none for -1.
func (ch *choice) other(i int) other {
	if i < 0 {
		return other{ord: -1}
	}
	in := &ch.inputs[i]
	return other{ch.candidates[i], in.OverlapBlocks, in.LoweredBlocks, in.PendingBlocks > 0}
}

// lastResort returns the worker that is degraded, or whose back-off ends first, and that did not fail without a
// response; -1 without one. It is not of the process besides.
func (r *ranks) lastResort(ch *choice, fits func(*entry) bool, besides uint64) (ord int) {
	ord = -1
	for i, other := range r.order {
		e := &r.entries[other]
		if why := ch.exclusions[i]; why != ExcludedFailing && (why != ExcludedHealth || e.info.Health != Degraded) {
			continue
		}
		if e.worker.ID == besides || e.avoid.refuses(ch.time) || !fits(e) {
			continue
		}
		if ord < 0 || e.avoid.end().Before(r.entries[ord].avoid.end()) {
			ord = other
		}
	}
	return ord
}
