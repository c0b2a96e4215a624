// SPDX-License-Identifier: Apache-2.0

package slots_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/slots"
)

// TestGroupCosts: a group's cost has the means of its last report plus the requests
// since, divided by its members.
func TestGroupCosts(t *testing.T) {
	settings := scorer.Defaults()
	settings.Attention = 0
	const prompt, block = 10_000, 100
	r := scorer.Request{PromptTokens: prompt, BlockSize: block}
	in := []scorer.Input{
		{Members: 4, PendTokens: 4 * 4000, ActiveRequests: 4 * 6, OverlapBlocks: (prompt - 500) / block},
		{Members: 4, PendTokens: 4 * 1000, ActiveRequests: 4 * 4, OverlapBlocks: (prompt - 3000) / block},
	}
	costs := make([]float64, 2)
	for i, want := range [][2]float64{{4800, 5200}, {4937.5, 5200}, {5075, 5200}, {5212.5, 5200}} {
		chosen := settings.Choose(&r, in, costs)
		if costs[0] != want[0] || costs[1] != want[1] {
			t.Errorf("request %d: costs %v, want %v", i, costs, want)
		}
		if first := want[0] < want[1]; first != (chosen == 0) {
			t.Errorf("request %d goes to group %d", i, chosen+1)
		}
		in[0].PendTokens += 500
		in[0].ActiveRequests++
	}
}

// TestMembersOfOneAreNone: a group of one is a worker.
func TestMembersOfOneAreNone(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	r := scorer.Request{PromptTokens: 4096, BlockSize: 16, OutputTokens: 300}
	for _, policy := range scorer.Policies() {
		settings := scorer.Defaults()
		settings, err := settings.With(&scorer.Override{Cost: &policy})
		if err != nil {
			t.Fatal(err)
		}
		overlap := func() int { return rng.IntN(200) }
		if policy == scorer.Tokens {
			overlap = func() int { return 100 } // copies between groups of several workers have no extra cost
		}
		one := make([]scorer.Input, 5)
		many := make([]scorer.Input, len(one))
		for i := range one {
			one[i] = scorer.Input{
				OverlapBlocks: overlap(), PendTokens: rng.IntN(20_000), ActiveRequests: rng.IntN(30),
				ActiveBlocks: rng.IntN(1000), AdditionalBlocks: rng.IntN(200), DecodeTokens: rng.IntN(50_000), WaitingTokens: rng.IntN(9000),
			}
			k := 1 + rng.IntN(6)
			m := one[i]
			m.Members, m.PendTokens, m.ActiveRequests, m.ActiveBlocks, m.DecodeTokens, m.WaitingTokens = k, k*m.PendTokens, k*m.ActiveRequests, k*m.ActiveBlocks, k*m.DecodeTokens, k*m.WaitingTokens
			many[i] = m
		}
		a, b := make([]float64, len(one)), make([]float64, len(one))
		if settings.Choose(&r, one, a) != settings.Choose(&r, many, b) || fmt.Sprint(a) != fmt.Sprint(b) {
			t.Errorf("%s: workers cost %v, groups of the same mean load %v", policy, a, b)
		}
		if scorer.LeastLoaded(one, .3) != scorer.LeastLoaded(many, .3) || scorer.PowerOfTwo(one, .3) != scorer.PowerOfTwo(many, .3) {
			t.Errorf("%s: a mode looks at sums", policy)
		}
	}
}

// TestUnreportedEqualsSlowModel compares the unreported requests with a list of all past
// operations, for random operations.
func TestUnreportedEqualsSlowModel(t *testing.T) {
	type booked struct {
		worker, pend, held  int
		at                  time.Time
		reports, unreported bool
	}
	type ended struct {
		worker      int
		load        slots.ReportLoad
		arrived, at time.Time
	}
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 7))
		var s slots.Table
		model := map[string]*booked{}
		var ends []ended // all past endings
		reported := [3]time.Time{}
		over := func(b *booked, now time.Time, requests int) {
			if b.reports {
				ends = append(ends, ended{b.worker, slots.ReportLoad{Requests: requests, PendTokens: b.pend, HeldTokens: requests * b.held}, b.at, now})
			}
		}
		arrival := func(w int, now time.Time) time.Time { // after the last report
			if !now.After(reported[w]) {
				return reported[w].Add(1)
			}
			return now
		}
		now := at(0)
		for step := range 2000 {
			now = now.Add(time.Duration(rng.IntN(3)) * time.Millisecond)
			id := fmt.Sprint(rng.IntN(40))
			b := model[id]
			switch w := rng.IntN(3); rng.IntN(10) {
			case 0, 1, 2, 3:
				booking := slots.Booking{Worker: w, PromptTokens: rng.IntN(500), CachedTokens: rng.IntN(100), Owned: true, Reports: w != 2}
				if s.Add(now, id, &booking) != (b == nil) {
					t.Fatalf("seed %d, step %d: a slot is taken twice", seed, step)
				}
				if b == nil {
					model[id] = &booked{w, max(0, booking.PromptTokens-booking.CachedTokens), booking.PromptTokens, arrival(w, now), w != 2, w != 2}
				}
			case 4:
				s.MarkPrefillCompleted(now, id)
				if b != nil {
					over(b, now, 0)
					b.pend = 0
				}
			case 5:
				cached := rng.IntN(100)
				if load := s.Load(w); s.Move(now, id, w, cached) {
					before := load.PendTokens
					over(b, now, 1)
					b.worker, b.at, b.unreported = w, arrival(w, now), b.reports
					b.pend = s.Load(w).PendTokens - before
				}
			case 6, 7:
				if s.Finish(now, id); b != nil {
					over(b, now, 1)
				}
				delete(model, id)
			case 8:
				until := now.Add(-time.Duration(rng.IntN(20)) * time.Millisecond)
				if until.Before(reported[w]) || s.Load(w) == (slots.Load{}) {
					break // reports come in order, and only from workers that had requests
				}
				s.Reported(w, until)
				reported[w] = until
				for _, b := range model {
					if b.worker == w && !b.at.After(until) {
						b.unreported = false
					}
				}
			case 9:
				if rng.IntN(40) == 0 {
					s.RemoveWorker(w)
					for id, b := range model {
						if b.worker == w {
							delete(model, id)
						}
					}
					ends = slices.DeleteFunc(ends, func(e ended) bool { return e.worker == w })
					reported[w] = time.Time{}
				}
			}
			for w := range 3 {
				back := now.Add(-time.Duration(rng.IntN(20)) * time.Millisecond)
				var booked, later, gone slots.ReportLoad
				add := func(to *slots.ReportLoad, l slots.ReportLoad) {
					to.Requests += l.Requests
					to.PendTokens += l.PendTokens
					to.HeldTokens += l.HeldTokens
				}
				for _, b := range model {
					if b.worker != w || !b.unreported {
						continue
					}
					l := slots.ReportLoad{Requests: 1, PendTokens: b.pend, HeldTokens: b.held}
					add(&booked, l)
					if b.at.After(back) {
						add(&later, l)
					}
				}
				for _, e := range ends {
					if e.worker == w && !e.arrived.After(reported[w]) && e.at.After(reported[w]) {
						add(&gone, e.load)
					}
				}
				for _, c := range []struct {
					what      string
					got, want slots.ReportLoad
				}{{"over since its report", s.Over(w), gone}, {"unreported", s.Unreported(w), booked}, {"unreported since a time", s.UnreportedSince(w, back), later}} {
					if c.got != c.want {
						t.Fatalf("seed %d, step %d: of worker %d %+v is %s, want %+v", seed, step, w, c.got, c.what, c.want)
					}
				}
			}
		}
	}
}

// The number of kept endings is bounded. Requests whose endings were dropped count until
// the next report.
func TestEndingsAreBounded(t *testing.T) {
	var s slots.Table
	const n = 20_000
	for i := range n {
		s.Add(at(0), fmt.Sprint(i), &slots.Booking{PromptTokens: 10, Owned: true, Reports: true})
	}
	s.Reported(0, at(1))
	for i := range n {
		s.Finish(at(2), fmt.Sprint(i))
	}
	if over := s.Over(0); over != (slots.ReportLoad{Requests: n, PendTokens: 10 * n, HeldTokens: 10 * n}) {
		t.Errorf("%+v is over, want all of %d requests", over, n)
	}
	if kept := s.Endings(0); kept > 4096 {
		t.Errorf("%d endings are kept", kept)
	}
	s.Reported(0, at(3))
	if over := s.Over(0); over != (slots.ReportLoad{}) || s.Endings(0) != 0 {
		t.Errorf("reported: %+v is over, %d endings are kept", over, s.Endings(0))
	}
}
