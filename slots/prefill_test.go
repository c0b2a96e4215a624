// SPDX-License-Identifier: Apache-2.0

package slots_test

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/slots"
)

// slowWorker infers first tokens from plain lists: all bookings of a worker in order, and
// the state of each.
type slowWorker struct {
	booked  []*slowPrefill // bookings that are not freed, in order
	samples []float64      // all samples of the rate
	late    []bool         // for each observed first token
	began   time.Time
	broken  bool
	done    int // tokens computed since the waiting requests began
	newest  *slowPrefill
	seen    time.Time // time of the newest observed first token
}

type slowPrefill struct {
	id               string
	at, first        time.Time
	tokens           int
	assumed          float64 // rate
	number           int     // position among all bookings
	unseen, remote   bool
	started, counted bool
	confirmed        bool
	passed           bool // inferred because a later request started
}

func (w *slowWorker) waiting() (list []*slowPrefill) {
	for _, p := range w.booked {
		if !p.started {
			list = append(list, p)
		}
	}
	return list
}

func (w *slowWorker) reorders() bool {
	n := 0
	for i, late := range w.late {
		if late && i >= len(w.late)-16 {
			n++
		}
	}
	return n >= 4
}

func (w *slowWorker) rate() float64 {
	if len(w.samples) < 5 {
		return 0
	}
	last := slices.Sorted(slices.Values(w.samples[max(0, len(w.samples)-15):]))
	return last[len(last)/2]
}

func (w *slowWorker) count(p *slowPrefill) (tokens int) {
	if !p.counted {
		tokens = p.tokens
	}
	p.counted = true
	return tokens
}

// firstToken applies an observed first token and returns the requests inferred from it.
func (w *slowWorker) firstToken(now time.Time, p *slowPrefill, exact bool) (inferred []string) {
	before := p.started
	p.confirmed = true
	defer func() {
		p.started, p.first = true, now
	}()
	if p.remote {
		if !before && !p.counted {
			w.done += p.tokens
		}
		return nil
	}
	if exact {
		const grace = 250 * time.Millisecond
		overtaken := w.newest != nil && p.number < w.newest.number && now.Sub(w.seen) > grace
		if p.passed {
			overtaken = now.Sub(p.first) > grace
		}
		w.late = append(w.late, overtaken)
		if w.newest == nil || p.number > w.newest.number {
			w.newest, w.seen = p, now
		}
	}
	if w.reorders() {
		return nil
	}
	for _, o := range w.waiting() {
		if o.number >= p.number {
			continue
		}
		w.done += w.count(o)
		if !o.remote {
			o.started, o.first, o.passed = true, now, true
			inferred = append(inferred, o.id)
		}
	}
	if !before {
		w.done += w.count(p)
	}
	took := now.Sub(w.began)
	if !exact || before || took < 5*time.Millisecond {
		return inferred
	}
	if w.done >= 256 && !w.broken {
		rate := float64(w.done) / took.Seconds()
		if stay := now.Sub(p.at); p.tokens >= 256 && stay >= 5*time.Millisecond {
			rate = max(rate, float64(p.tokens)/stay.Seconds())
		}
		w.samples = append(w.samples, max(rate, 1))
	}
	w.began, w.done, w.broken = now, 0, false
	return inferred
}

// due returns the requests inferred by rate.
func (w *slowWorker) due(now time.Time) (inferred []string) {
	if len(w.waiting()) == 0 {
		return nil
	}
	// A call without a change in between may be skipped; it changes nothing.
	if w.broken {
		w.began, w.done, w.broken = now, 0, false
	}
	if w.reorders() {
		return nil
	}
	sum := w.done
	for _, p := range w.waiting() {
		if !p.counted {
			sum += p.tokens
		}
		rate := cmp.Or(w.rate(), p.assumed)
		if !p.unseen || rate == 0 {
			break
		}
		due := w.began.Add(time.Duration(float64(sum) / rate * float64(time.Second)))
		if now.Before(due) {
			break
		}
		if p.remote {
			continue
		}
		w.done += w.count(p)
		if p.started, p.first = true, due; due.Before(p.at) {
			p.first = p.at
		}
		inferred = append(inferred, p.id)
	}
	return inferred
}

// For random inputs the inferred first tokens equal those of the lists. Each is reported
// once, only for waiting requests of this router, and nothing is left after the end.
func TestInferredFirstTokensEqualSlowModel(t *testing.T) {
	seen := map[string]int{}
	for seed := range uint64(24) {
		rng := rand.New(rand.NewPCG(seed, 7))
		var s slots.Table
		s.InferFirstTokens()
		workers := []*slowWorker{{}, {}}
		where := map[string]int{}
		live := map[string]*slowPrefill{}
		now, number := at(0), 0
		inferences := map[string]int{}
		gone := func(id string) {
			w := workers[where[id]]
			if list := w.waiting(); len(list) > 0 && list[0].id == id {
				w.broken = true
			}
			w.booked = slices.DeleteFunc(w.booked, func(p *slowPrefill) bool { return p.id == id })
			if len(w.booked) == 0 {
				w.newest, w.done, w.broken = nil, 0, false
			}
			delete(live, id)
		}
		book := func(id string, on int, p *slowPrefill) {
			w := workers[on]
			if len(w.waiting()) == 0 {
				w.began, w.done, w.broken = now, 0, false
			}
			number++
			p.id, p.at, p.number, p.counted, p.passed = id, now, number, false, false
			w.booked, where[id], live[id] = append(w.booked, p), on, p
		}
		for step := range 800 {
			now = now.Add(time.Duration(rng.IntN(60)) * time.Millisecond)
			id := ""
			if ids := slices.Sorted(maps.Keys(live)); len(ids) > 0 {
				// First tokens come mostly in order; otherwise every worker would count
				// as reordering.
				id = ids[rng.IntN(len(ids))]
				if w := workers[where[id]].waiting(); len(w) > 0 && rng.IntN(int(2+seed%8)) > 0 {
					id = w[rng.IntN(min(2, len(w)))].id
				}
			}
			var want []string
			var what string
			switch op := rng.IntN(100); {
			case op < 30 || id == "":
				id = fmt.Sprintf("r%05d", step)
				what = "booked " + id
				p := &slowPrefill{tokens: rng.IntN(3000), unseen: rng.IntN(2) == 0, remote: rng.IntN(6) == 0, assumed: float64(rng.IntN(2) * 40_000)}
				b := slots.Booking{Worker: rng.IntN(2), PromptTokens: p.tokens, Unseen: p.unseen, AssumedRate: p.assumed, Number: uint64(number + 1), Owned: true}
				if p.remote {
					b.Replica = 3
				}
				s.Add(now, id, &b)
				book(id, b.Worker, p)
			case op < 60:
				exact := rng.IntN(3) > 0
				what = fmt.Sprintf("first token of %s, exact %v", id, exact)
				p := live[id]
				wasStarted, wasTold := p.started, p.confirmed
				if !wasTold {
					want = workers[where[id]].firstToken(now, p, exact)
				}
				if news, inferred := s.FirstToken(now, id, exact); news == wasTold || news && inferred != wasStarted {
					t.Fatalf("seed %d, %s: news %v, inferred %v; reported before %v, started %v", seed, what, news, inferred, wasTold, wasStarted)
				}
				if s.MarkPrefillCompleted(now, id) {
					t.Fatalf("seed %d, %s: the first token has an effect twice", seed, what)
				}
			case op < 80:
				what = "freed " + id
				s.Free(id)
				gone(id)
			case op < 84:
				p, to := live[id], 1-where[id]
				what = "moved " + id
				if s.Move(now, id, to, 0) {
					copied := *p
					gone(id)
					book(id, to, &copied)
				}
			case op < 88:
				what = "unseen " + id
				s.SetUnseen(id)
				live[id].unseen = true
			default:
				on := rng.IntN(2)
				what = fmt.Sprint("looked at ", on)
				want = workers[on].due(now)
				if got := s.InferByRate(now, on); got != len(want) {
					t.Fatalf("seed %d, step %d, %s: %d due, want %v", seed, step, what, got, want)
				}
			}
			var got []string
			for _, i := range s.TakeInferred() {
				got = append(got, i.ID)
				seen[i.By]++
				if inferences[i.ID]++; inferences[i.ID] > 1 || !i.At.Equal(live[i.ID].first) || live[i.ID].remote {
					t.Fatalf("seed %d, %s: inference %+v is number %d of its request, of a replica: %v", seed, what, i, inferences[i.ID], live[i.ID].remote)
				}
			}
			if !slices.Equal(got, want) {
				t.Fatalf("seed %d, step %d, %s: inferred %v, want %v", seed, step, what, got, want)
			}
			for on, w := range workers {
				l, pend := s.Load(on), 0
				for _, p := range w.waiting() {
					pend += p.tokens
				}
				rate, reorders := s.PrefillRate(on)
				if reorders {
					seen["reorders"]++
				}
				if l.Waiting != len(w.waiting()) || l.PendTokens != pend || l.Requests != len(w.booked) || rate != w.rate() || reorders != w.reorders() {
					t.Fatalf("seed %d, step %d, %s: worker %d: %+v, rate %v, reorders %v; want %d of %d waiting with %d, %v, %v",
						seed, step, what, on, l, rate, reorders, len(w.waiting()), len(w.booked), pend, w.rate(), w.reorders())
				}
			}
		}
		for id := range live {
			s.Free(id)
		}
		for on := range workers {
			if l := s.Load(on); l != (slots.Load{}) || s.InferByRate(now.Add(time.Hour), on) != 0 {
				t.Fatalf("seed %d: worker %d is left with %+v", seed, on, l)
			}
		}
	}
	for _, what := range []string{slots.ByOrder, slots.ByRate, "reorders"} {
		if seen[what] < 100 {
			t.Errorf("%s was seen %d times: the test tests too little", what, seen[what])
		}
	}
}

// A worker computes 10,000 tokens a second, one request after the other. After some
// observed first tokens, the others are inferred within a tenth of their time.
func TestTheRateIsLearned(t *testing.T) {
	var s slots.Table
	s.InferFirstTokens()
	free, now := at(0), at(0)
	end := func(tokens int) time.Time {
		if free.Before(now) {
			free = now
		}
		free = free.Add(time.Duration(tokens) * 100 * time.Microsecond)
		return free
	}
	for i := range 20 {
		id := fmt.Sprint("seen", i)
		s.Add(now, id, &slots.Booking{PromptTokens: 1000 + 100*i, Owned: true})
		now = end(1000 + 100*i)
		s.MarkPrefillCompleted(now, id)
	}
	if rate, reorders := s.PrefillRate(0); rate < 9_900 || rate > 10_100 || reorders {
		t.Fatalf("rate %v, reorders %v; want 10,000", rate, reorders)
	}
	s.Add(now, "a", &slots.Booking{PromptTokens: 4000, Unseen: true, Owned: true})
	s.Add(now, "b", &slots.Booking{PromptTokens: 2000, Unseen: true, Owned: true})
	for _, c := range []struct {
		after time.Duration
		pend  int
	}{{380 * time.Millisecond, 6000}, {420 * time.Millisecond, 2000}, {580 * time.Millisecond, 2000}, {620 * time.Millisecond, 0}} {
		s.InferByRate(now.Add(c.after), 0)
		if got := s.Load(0).PendTokens; got != c.pend {
			t.Errorf("after %v: %d tokens pending, want %d", c.after, got, c.pend)
		}
	}
}

// A worker that hangs computes nothing, whatever its rate was: requests behind one whose
// first token would be observed wait with it.
func TestAHangingWorkerStaysLoaded(t *testing.T) {
	var s slots.Table
	s.InferFirstTokens()
	for i := range 8 {
		id := fmt.Sprint("seen", i)
		s.Add(at(float64(i)), id, &slots.Booking{PromptTokens: 1000, Owned: true})
		s.MarkPrefillCompleted(at(float64(i)+.1), id)
	}
	s.Add(at(10), "watched", &slots.Booking{PromptTokens: 1000, Owned: true})
	s.Add(at(10), "not", &slots.Booking{PromptTokens: 1000, Unseen: true, Owned: true})
	if n := s.InferByRate(at(1000), 0); n != 0 || s.Load(0).PendTokens != 2000 {
		t.Errorf("%d inferred on a worker that hangs, %+v", n, s.Load(0))
	}
	// Requests also wait if its client gives up: the next one begins then, if at all.
	s.Free("watched")
	if n := s.InferByRate(at(1000), 0); n != 0 {
		t.Errorf("%d inferred when the first request was given up", n)
	}
	s.Add(at(1000), "watched", &slots.Booking{PromptTokens: 1000, Owned: true})
	s.Free("not")
	s.Add(at(1000), "not", &slots.Booking{PromptTokens: 1000, Unseen: true, Owned: true})
	s.MarkPrefillCompleted(at(1000.1), "watched")
	if n := s.InferByRate(at(1000.3), 0); n != 1 || s.Load(0).PendTokens != 0 {
		t.Errorf("%d inferred behind a first token, %+v", n, s.Load(0))
	}
}

// Requests computed in one step have their first tokens at the same time. This must not
// give an infinite rate.
func TestABatchIsOneSample(t *testing.T) {
	var s slots.Table
	s.InferFirstTokens()
	for i := range 20 {
		for j := range 4 {
			s.Add(at(float64(i)), fmt.Sprint(i, "-", j), &slots.Booking{PromptTokens: 1000, Owned: true})
		}
		for j := range 4 {
			s.MarkPrefillCompleted(at(float64(i)+.4+float64(j)/10_000), fmt.Sprint(i, "-", j))
		}
	}
	if rate, _ := s.PrefillRate(0); rate < 2_000 || rate > 20_000 {
		t.Errorf("rate %v; want about 10,000", rate)
	}
}

// Each request takes 40 ms besides its tokens, as cold prompts after short ones showed: the rate is too low for long
// prompts, and the fit is not. One first token in five that is late by seconds changes it little.
func TestTheFixedTimeOfAPromptIsMeasured(t *testing.T) {
	for phase := range 10 {
		late := float64(3 * (phase % 2))
		var s slots.Table
		s.InferFirstTokens()
		now := 0.
		prompt := func(i, tokens int) {
			id := fmt.Sprint(i)
			s.Add(at(now), id, &slots.Booking{PromptTokens: tokens, Owned: true})
			now += .04 + float64(tokens)/10_000
			if (i+phase)%5 == 2 {
				now += late
			}
			s.MarkPrefillCompleted(at(now), id)
			s.Free(id)
			now++
		}
		for i := range 8 {
			prompt(i, 400)
		}
		if perToken, fixed := s.PrefillTime(0); perToken != 0 || fixed != 0 {
			t.Errorf("prompts of one length show %v s a token and %v s", perToken, fixed)
		}
		for i, tokens := range []int{60, 3000, 500, 900, 100, 2000, 350, 80, 1200, 60, 400, 2500, 90, 700, 300} {
			prompt(i, tokens)
			perToken, fixed := s.PrefillTime(0)
			if i == 1 && perToken != 0 {
				t.Errorf("two prompts of another length show %v s a token", perToken)
			}
			if rate, _ := s.PrefillRate(0); i >= 7 && (perToken < .98e-4 || perToken > 1.02e-4 || fixed < .035 || fixed > .045 || rate > 9_000) {
				t.Errorf("late by %v s, prompt %d: %v s a token and %v s besides, rate %v; want 0.0001, 0.04 and a lower rate than 9,000", late, i, perToken, fixed, rate)
			}
		}
		for i := range 40 {
			prompt(i, 400)
		}
		if perToken, _ := s.PrefillTime(0); perToken != 0 {
			t.Errorf("the prompts of other lengths are long ago, and a token takes %v s", perToken)
		}
	}
}

func BenchmarkFirstTokenOfAPrompt(b *testing.B) {
	var s slots.Table
	s.InferFirstTokens()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		now := at(float64(i))
		s.Add(now, "a", &slots.Booking{PromptTokens: 300 + 700*(i%4), Owned: true})
		s.MarkPrefillCompleted(now.Add(100*time.Millisecond), "a")
		s.Free("a")
	}
}
