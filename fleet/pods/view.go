// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/router"
)

// candidate is a worker of a source, with what decides which of two workers counts.
type candidate struct {
	*fleet.Record

	at     *place
	source int
	rank   int // 0 = ready, 1 = being deleted, 2 = not ready
}

// view passes on the workers of this moment. It returns the time until the next view if nothing changes.
func (f *Finder) view(number int) (next time.Duration) {
	now, wait := f.conf.Now(), idleView
	states, problems := make([]State, len(f.sources)), make(map[string]bool)
	all := make([][]placed, len(f.sources))
	for i, s := range f.sources {
		in := s.look(now)
		states[i] = State{Source: s.name, Listed: in.listed, Since: in.since}
		if in.err != nil {
			states[i].Error = in.err.Error()
		}
		if left := in.until.Sub(now); left > 0 {
			wait = min(wait, left)
		}
		all[i] = s.places(&in)
		f.findOwner(all[i])
	}
	problem := func(source int, text string) {
		if !problems[text] {
			states[source].Problems = append(states[source].Problems, text)
		}
		problems[text] = true
	}
	var candidates []*candidate
	for i := range all {
		for j := range all[i] {
			p := &all[i][j]
			if f.isOwn(&p.place) {
				states[i].LeftOut++
				problem(i, p.String()+": it is a pod of kvroute itself, which the source should not select")
				continue
			}
			known := f.remember(&p.place, number)
			rank, left := known.rank(&p.place, now)
			if left > 0 {
				wait = min(wait, left)
			}
			if rank < 0 {
				states[i].NeverReady++
				continue
			}
			for _, text := range p.problems {
				problem(i, p.String()+": "+text)
			}
			if len(p.records) == 0 {
				states[i].LeftOut++
			}
			candidates = p.appendCandidates(candidates, i, rank)
		}
	}
	records := f.choose(candidates, states, problem)
	for uid, k := range f.known {
		if k.view != number {
			delete(f.known, uid)
		}
	}
	for i := range states { // objects come in any order: each view lists the same problems
		all := slices.Sorted(slices.Values(states[i].Problems))
		states[i].Problems = slices.Clip(all[:min(len(all), shownProblems)])
	}
	f.mu.Lock()
	f.states = states
	f.mu.Unlock()
	f.report(problems)
	f.pass(records)
	return wait
}

// findOwner finds the controller of kvroute's own pod.
func (f *Finder) findOwner(all []placed) {
	for i := range all {
		if p := &all[i]; p.isPod && p.name == f.conf.Pod && f.inOwnNamespace(&p.place) && p.owner != "" {
			f.owner = p.owner
		}
	}
}

func (f *Finder) inOwnNamespace(at *place) bool {
	return f.conf.Client.Namespace == "" || f.conf.Client.Namespace == at.namespace
}

// isOwn reports whether a place is kvroute's own pod, or another pod of its controller.
func (f *Finder) isOwn(at *place) bool {
	return at.isPod && (at.name == f.conf.Pod && f.inOwnNamespace(at) || f.owner != "" && at.owner == f.owner)
}

// remember notes whether a place is ready, and when its deletion began.
func (f *Finder) remember(at *place, view int) *knownPlace {
	k := f.known[at.uid]
	if k == nil {
		k = &knownPlace{}
		f.known[at.uid] = k
	}
	k.view = view
	k.wasReady = k.wasReady || at.ready
	if at.deleted && at.grace > 0 && k.deadline.IsZero() {
		k.deadline = f.conf.Now().Add(at.grace) // not at.deadline: the clocks may differ
	}
	return k
}

// rank returns the state of a place: 0 = ready, 1 = being deleted, 2 = not ready, -1 = no worker. left is the time
// until the deadline of its deletion; 0 = there is none.
func (k *knownPlace) rank(at *place, now time.Time) (rank int, left time.Duration) {
	left = max(0, k.deadline.Sub(now))
	switch {
	case !k.wasReady, at.deleted && !k.deadline.IsZero() && left == 0:
		return -1, 0
	case at.deleted:
		return 1, left
	case at.ready:
		return 0, 0
	}
	return 2, 0
}

// appendCandidates appends the workers of a place in a state.
func (p *placed) appendCandidates(list []*candidate, source, rank int) []*candidate {
	for i := range p.records {
		r := &p.records[i]
		switch rank {
		case 1:
			r = new(*r)
			r.Draining = true
			r.Pod = &router.Pod{Namespace: r.Pod.Namespace, Name: r.Pod.Name, UID: r.Pod.UID, Deadline: p.deadline}
		case 2:
			r = new(*r)
			r.NotReady = p.notReady
		}
		list = append(list, &candidate{r, &p.place, source, rank})
	}
	return list
}

// choose returns the records that count: of two with one id that of the first source, of two at one address that of the
// pod in the better state, or else of the younger pod.
func (f *Finder) choose(candidates []*candidate, states []State, problem func(source int, text string)) []fleet.Record {
	slices.SortStableFunc(candidates, func(a, b *candidate) int { return cmp.Or(a.source-b.source, a.rank-b.rank) })
	byID := make(map[uint64]*candidate, len(candidates))
	var unique []*candidate
	for _, c := range candidates {
		first := byID[c.ID()]
		if first == nil {
			byID[c.ID()] = c
			unique = append(unique, c)
		} else if first.source != c.source {
			problem(c.source, fmt.Sprintf("%s: %s selects it, too, and counts", c.at, f.sources[first.source].name))
		}
	}
	slices.SortStableFunc(unique, func(a, b *candidate) int {
		return cmp.Or(a.rank-b.rank, b.at.created.Compare(a.at.created), a.source-b.source, strings.Compare(a.Name, b.Name))
	})
	byAddress := make(map[string]*candidate, len(unique))
	records := make([]fleet.Record, 0, len(unique))
	for _, c := range unique {
		state := &states[c.source]
		if first := byAddress[c.Address]; first != nil {
			state.LeftOut++
			problem(c.source, fmt.Sprintf("%s: its address %s is that of %s", c.at, c.Address, first.at))
			continue
		}
		byAddress[c.Address] = c
		records = append(records, *c.Record)
		*[]*int{&state.Ready, &state.Draining, &state.NotReady}[c.rank]++
	}
	slices.SortFunc(records, func(a, b fleet.Record) int { return strings.Compare(a.Name, b.Name) })
	return records
}

// report logs new problems.
func (f *Finder) report(problems map[string]bool) {
	logged := 0
	for text := range problems {
		if f.problems[text] {
			continue
		}
		if logged++; logged <= shownProblems {
			f.conf.Log.Warn("something is wrong with a pod of Kubernetes", "problem", text)
		}
	}
	if logged > shownProblems {
		f.conf.Log.Warn("something is wrong with more pods of Kubernetes", "more", logged-shownProblems)
	}
	f.problems = problems
}

// pass passes on the records, and logs which workers have changed their states.
func (f *Finder) pass(records []fleet.Record) {
	now, changed := make(map[uint64]string, len(records)), 0
	for i := range records {
		r := &records[i]
		state := "ready"
		switch {
		case r.Draining:
			state = "being deleted"
		case r.NotReady != "":
			state = r.NotReady
		}
		now[r.ID()] = state
		before, known := f.last[r.ID()]
		if before == state {
			continue
		}
		if changed++; changed > shownProblems {
			continue
		}
		f.conf.Log.Info("the state of a pod", "worker", r.Name, "address", r.Address, "state", state, "new", !known)
	}
	if changed > shownProblems {
		f.conf.Log.Info("more pods have changed their states", "workers", len(records), "changed", changed)
	}
	f.last = now
	if err := f.conf.Changed(records); err != nil {
		f.conf.Log.Error("the workers of Kubernetes are refused; the old ones stay", "err", err)
	}
}
