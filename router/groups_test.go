// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// groupOf returns a router group in the form of a worker, with blocks of size 8.
func groupOf(id uint64) router.WorkerInfo {
	g := worker(id)
	g.Name, g.Group, g.NoEvents, g.Reorders = fmt.Sprint("g", id), fmt.Sprint("g", id), true, true
	return g
}

// flat is the default cost without attention, so that costs are round numbers.
func flat() scorer.Settings {
	s := scorer.Defaults()
	s.Attention, s.DecodeWeight = 0, 0
	return s
}

// watch is a clock that stands still.
type watch struct{ time.Time }

func (w *watch) now() time.Time          { return w.Time }
func (w *watch) advance(d time.Duration) { w.Time = w.Add(d) }

func newWatch() *watch { return &watch{time.Unix(1000, 0)} }

// filterOf returns a group's filter for some prompts: it has every fourth block.
func filterOf(prompts ...string) *indexer.Filter {
	f := indexer.NewFilter(1000)
	for _, p := range prompts {
		for i, h := range sequenceOf(p) {
			if (i+1)%4 == 0 {
				f.Add(h)
			}
		}
	}
	return f
}

func setSummary(t *testing.T, r *router.Router, id uint64, s router.Summary) {
	t.Helper()
	if !r.SetSummary(id, s) {
		t.Fatalf("group %d is unknown", id)
	}
}

// dryRun decides for a prompt without booking it.
func dryRun(t *testing.T, r *router.Router, letters string) router.Decision {
	t.Helper()
	d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt(letters), Explain: true})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func bookFor(t *testing.T, r *router.Router, id, letters string) router.Decision {
	t.Helper()
	d, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: "m", Tokens: prompt(letters), Owned: true, Explain: true})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func costsOf(d router.Decision) (costs []float64) {
	for _, c := range d.Candidates {
		costs = append(costs, math.Round(c.Cost*1e6)/1e6)
	}
	return costs
}

// A group costs the average load of its members plus the requests sent to it since its
// summary. The next summary replaces both.
func TestGroupsGoByTheirSummaries(t *testing.T) {
	w := newWatch()
	r := newRouter(t, router.Config{Scoring: flat(), Now: w.now, PredictTTL: -1}, 0)
	set(t, r, groupOf(1))
	set(t, r, groupOf(2))
	long := "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ" // 36 blocks
	first := router.Summary{Taken: w.now(), Healthy: 4, PendTokens: 4 * 40, ActiveRequests: 4 * 6, Filter: filterOf(long[:32]), Stride: 4}
	second := router.Summary{Taken: w.now(), Healthy: 5, Busy: 1, PendTokens: 4 * 10, ActiveRequests: 4 * 4, Filter: filterOf(long[:26]), Stride: 4}
	setSummary(t, r, 1, first)
	setSummary(t, r, 2, second)
	w.advance(time.Millisecond)
	// Of the prompt, 4 blocks are left to compute for one group and 12 for the other:
	// filters have every fourth block.
	for i, want := range [][]float64{{40 + 32*1.6, 10 + 96*1.4}, {48 + 32*1.625, 144.4}, {56 + 32*1.65, 144.4}, {64 + 32*1.675, 144.4}} {
		if d := bookFor(t, r, fmt.Sprint("a", i), long); d.Group != "g1" || !slices.Equal(costsOf(d), want) {
			t.Errorf("request %d goes to %s at costs %v, want g1 at %v", i, d.Group, costsOf(d), want)
		}
	}
	// One request has its first token and no longer counts as pending; another is over
	// and does not count at all.
	r.MarkPrefillCompleted("a0")
	r.Free("a1")
	if d, want := dryRun(t, r, long), []float64{40 + 64./4 + 32*(1+.1*(6+3./4)), 144.4}; !slices.Equal(costsOf(d), want) {
		t.Errorf("costs %v, want %v", costsOf(d), want)
	}
	w.advance(time.Second)
	first.Taken, first.Filter = w.now(), nil
	setSummary(t, r, 1, first)
	if d, want := dryRun(t, r, long), []float64{40 + 32*1.6, 144.4}; !slices.Equal(costsOf(d), want) {
		t.Errorf("after the next summary costs %v, want %v", costsOf(d), want)
	}
	// An old summary changes nothing; blocks added to the filter count.
	old := router.Summary{Taken: w.now().Add(-time.Second), Healthy: 1, PendTokens: 1e6}
	setSummary(t, r, 1, old)
	second.Taken, second.Filter, second.Added = w.now(), nil, []uint64{sequenceOf(long)[27], sequenceOf(long)[31], sequenceOf(long)[35]}
	setSummary(t, r, 2, second)
	if d, want := dryRun(t, r, long), []float64{40 + 32*1.6, 10 + 1*1.4}; !slices.Equal(costsOf(d), want) || d.Group != "g2" {
		t.Errorf("to %s at costs %v, want g2 at %v", d.Group, costsOf(d), want)
	}
	if r.SetSummary(9, first) {
		t.Error("the summary of an unknown group is accepted")
	}
	set(t, r, worker(3))
	if r.SetSummary(3, first) {
		t.Error("a worker takes a summary")
	}
}

// Until a group publishes its blocks, the requests that this router sent there predict
// them: for the time of a prediction if the group publishes summaries, else for the time
// of a guess.
func TestWhatAGroupWasSentIsThere(t *testing.T) {
	w := newWatch()
	r := newRouter(t, router.Config{Now: w.now, PredictTTL: 10 * time.Second}, 0)
	set(t, r, groupOf(1))
	set(t, r, groupOf(2))
	setSummary(t, r, 1, router.Summary{Taken: w.now(), Healthy: 1, Interval: time.Hour, Filter: filterOf(), Stride: 4})
	r.SetSummary(2, router.Summary{Taken: w.now(), Healthy: 1, Interval: time.Hour, PendTokens: 1000})
	overlap := func() (all []int) {
		for _, c := range dryRun(t, r, "abcdefghij").Candidates {
			all = append(all, c.OverlapBlocks)
		}
		return all
	}
	if d := bookFor(t, r, "1", "abcdefghij"); d.Group != "g1" {
		t.Fatalf("the first goes to %s", d.Group)
	}
	setSummary(t, r, 1, router.Summary{Taken: w.now(), Healthy: 1, Interval: time.Hour, PendTokens: 5000})
	if d := bookFor(t, r, "2", "abcdefghijk"); d.Group != "g2" {
		t.Fatalf("the second goes to %s", d.Group)
	}
	if got := overlap(); !slices.Equal(got, []int{10, 10}) {
		t.Errorf("overlap %v, want all ten blocks on both", got)
	}
	w.advance(11 * time.Second)
	if got := overlap(); !slices.Equal(got, []int{0, 10}) {
		t.Errorf("after 11 s overlap %v, want it only for groups without a filter", got)
	}
	r.RemoveWorker(1)
	set(t, r, groupOf(1))
	setSummary(t, r, 1, router.Summary{Taken: w.now(), Healthy: 1, Interval: time.Hour, Filter: filterOf("abcdefgh"), Stride: 4})
	if got := overlap(); !slices.Equal(got, []int{8, 10}) {
		t.Errorf("overlap %v, want 8 of the filter", got)
	}
	r.RemoveWorker(1)
	set(t, r, groupOf(1))
	if got := overlap(); !slices.Equal(got, []int{0, 10}) {
		t.Errorf("a group that came back holds %v, want nothing", got)
	}
}

// A group whose summary is missing, stale, or reports that all are busy is chosen only if
// no other group is left. A group without workers is never chosen.
func TestWhichGroupsAreCandidates(t *testing.T) {
	w := newWatch()
	good := router.Summary{Healthy: 2}
	for _, c := range []struct {
		name   string
		first  *router.Summary // of group 1; group 2 is healthy, but loaded
		age    time.Duration
		why    router.Exclusion
		health string
		alone  bool // group 1 is a candidate if group 2 is absent
	}{
		{"fresh", &good, 2 * time.Second, "", "healthy", true},
		{"stale", &good, 4 * time.Second, router.ExcludedStale, "degraded", true},
		{"slow", &router.Summary{Healthy: 2, Interval: 5 * time.Second}, 14 * time.Second, "", "healthy", true},
		{"slow and stale", &router.Summary{Healthy: 2, Interval: 5 * time.Second}, 16 * time.Second, router.ExcludedStale, "degraded", true},
		{"missing", nil, 0, router.ExcludedStale, "degraded", true},
		{"all busy", &router.Summary{Healthy: 2, Busy: 2, PendTokens: 10}, 0, router.ExcludedBusy, "healthy", true},
		{"some busy", &router.Summary{Healthy: 2, Busy: 1}, 0, "", "healthy", true},
		{"degraded", &router.Summary{Degraded: 2}, 0, router.ExcludedHealth, "degraded", true},
		{"empty", &router.Summary{}, 0, router.ExcludedHealth, "unhealthy", true},
		{"from the future", &router.Summary{Healthy: 1, Taken: w.now().Add(time.Hour)}, 0, "", "healthy", true},
	} {
		r := newRouter(t, router.Config{Now: w.now}, 0)
		set(t, r, groupOf(1))
		set(t, r, groupOf(2))
		if c.first != nil {
			s := *c.first
			if s.Taken.IsZero() {
				s.Taken = w.now().Add(-c.age)
			}
			setSummary(t, r, 1, s)
		}
		setSummary(t, r, 2, router.Summary{Healthy: 1, Taken: w.now(), PendTokens: 100_000})
		d := dryRun(t, r, "abcd")
		if got, want := d.Group, map[bool]string{true: "g1", false: "g2"}[c.why == ""]; got != want || d.Candidates[0].Excluded != c.why {
			t.Errorf("%s: to %s, g1 is excluded for %q; want %s and %q", c.name, got, d.Candidates[0].Excluded, want, c.why)
		}
		if got := r.Workers()[0].Health; got != c.health {
			t.Errorf("%s: health %s, want %s", c.name, got, c.health)
		}
		setSummary(t, r, 2, router.Summary{Taken: w.now()})
		d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("ab")})
		if c.alone && (err != nil || d.Group != "g1") || !c.alone && !errors.Is(err, router.ErrNoWorkers) {
			t.Errorf("%s: without group 2 the request goes to %q, error %v", c.name, d.Group, err)
		}
	}
}

// The status of a group has the age of its last summary.
func TestStateOfAGroup(t *testing.T) {
	w := newWatch()
	r := newRouter(t, router.Config{Now: w.now}, 0)
	set(t, r, groupOf(1))
	g := groupOf(2)
	g.Members = 8
	set(t, r, g)
	setSummary(t, r, 1, router.Summary{Taken: w.now(), Healthy: 3, Busy: 1, PendTokens: 7, ActiveRequests: 5, Queued: 2, QueuedTokens: 4, ActiveBlocks: 6, TotalBlocks: 100, Filter: filterOf(), Stride: 4})
	w.advance(time.Second)
	bookFor(t, r, "x", "abcde")
	states := r.Workers()
	s := states[0]
	if s.Summary == nil || *s.Summary != (router.SummaryState{Members: 2, Busy: 1, Queued: 2, Age: time.Second, Filtered: true}) ||
		s.Group != "g1" || s.KVEvents != "summary" || s.PendTokens != 11+40 || s.ActiveRequests != 8 || s.ActiveBlocks != 6 || s.TotalKVBlocks != 100 {
		t.Errorf("state %+v, summary %+v", s, s.Summary)
	}
	w.advance(3 * time.Second)
	s = r.Workers()[0]
	if !s.Summary.Stale || s.PendTokens != 40 || s.ActiveRequests != 1 {
		t.Errorf("stale: state %+v, summary %+v; want its own request alone", s, s.Summary)
	}
	if s = states[1]; s.Summary == nil || s.Summary.Age >= 0 || !s.Summary.Stale || s.KVEvents != "none" {
		t.Errorf("without a word: state %+v, summary %+v", s, s.Summary)
	}
	d := dryRun(t, r, "abc")
	if c := d.Candidates[1]; c.Members != 8 || c.SummaryAge >= 0 || c.Group != "g2" {
		t.Errorf("without a word: candidate %+v", c)
	}
	if c := d.Candidates[0]; c.SummaryAge != 4*time.Second || c.Members != 2 {
		t.Errorf("stale: candidate %+v", c)
	}
}

// A group's summary is the sum over the workers that may take requests.
func TestSummarize(t *testing.T) {
	w := newWatch()
	limit := 100
	conf := router.Config{Now: w.now, Thresholds: scorer.Thresholds{PrefillTokens: &limit}, AvoidFailing: time.Minute}
	r := newRouter(t, conf, 5)
	if got := r.Summarize("other"); got != nil {
		t.Errorf("an unknown model: %+v", got)
	}
	change := func(id uint64, f func(*router.WorkerInfo)) {
		info := worker(id)
		info.TotalKVBlocks = 50
		f(&info)
		set(t, r, info)
	}
	for id := range uint64(5) {
		change(id+1, func(*router.WorkerInfo) {})
	}
	bookOn := func(id, letters string, on uint64) {
		t.Helper()
		if _, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: "m", Tokens: prompt(letters), Owned: true, Pinned: &router.Worker{ID: on}}); err != nil {
			t.Fatal(err)
		}
	}
	bookOn("1", "abc", 1)
	bookOn("2", "abd", 1)
	bookOn("3", "abcdefghijklmno", 2) // 120 tokens: busy
	bookOn("4", "a", 3)
	r.MarkPrefillCompleted("2")
	expect := func(name string, want router.Summary) {
		t.Helper()
		want.Model, want.BlockSize, want.Taken = "m", 8, w.now()
		if got := r.Summarize("m"); len(got) != 1 || fmt.Sprintf("%+v", got[0]) != fmt.Sprintf("%+v", want) {
			t.Errorf("%s:\n got %+v\nwant %+v", name, got, want)
		}
	}
	expect("one is busy", router.Summary{Healthy: 5, Busy: 1, PendTokens: 32, ActiveRequests: 3, ActiveBlocks: 5, TotalBlocks: 200, HeldTokens: 56})
	change(3, func(i *router.WorkerInfo) { i.Draining = true })
	change(4, func(i *router.WorkerInfo) { i.Health = router.Degraded })
	change(5, func(i *router.WorkerInfo) { i.Role = router.Prefill })
	expect("others do not count", router.Summary{Healthy: 2, Degraded: 1, Busy: 1, PendTokens: 24, ActiveRequests: 2, ActiveBlocks: 4, TotalBlocks: 50, HeldTokens: 48})
	r.Served("1", router.Response{Status: 503, Local: true, Address: worker(1).Address})
	expect("all are busy", router.Summary{Healthy: 1, Degraded: 2, Busy: 1, PendTokens: 120, ActiveRequests: 1, ActiveBlocks: 15, TotalBlocks: 50, HeldTokens: 120})
	change(2, func(i *router.WorkerInfo) { i.Health = router.Unhealthy })
	expect("some stand in", router.Summary{Degraded: 2, PendTokens: 24, ActiveRequests: 2, ActiveBlocks: 4, TotalBlocks: 100, HeldTokens: 48})
	change(1, func(i *router.WorkerInfo) { i.TotalKVBlocks = 0 })
	change(4, func(i *router.WorkerInfo) { i.Health = router.Expired })
	expect("a capacity is unknown", router.Summary{Degraded: 1, PendTokens: 24, ActiveRequests: 2, ActiveBlocks: 4, HeldTokens: 48})
	for id := range uint64(5) {
		r.RemoveWorker(id + 1)
	}
	expect("nobody is left", router.Summary{})
}

// TestTwoTiers runs random requests in a fleet of three groups, and an upper router that
// receives their summaries late, twice, out of order, or not at all. A slow model records
// everything. The upper router's load of a group must equal the group's last summary plus
// the requests sent there since, minus those of earlier requests that have ended.
// Once each group has published and no message is lost, the upper router knows the load
// exactly, and of each prompt at least the best worker's blocks, rounded down to a
// checkpoint.
func TestTwoTiers(t *testing.T) {
	const stride = 4
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 1))
		w := newWatch()
		upper := newRouter(t, router.Config{Now: w.now, PredictTTL: -1, Seed: seed}, 0)
		lower := map[uint64]*router.Router{}
		for id := uint64(1); id <= 3; id++ {
			set(t, upper, groupOf(id))
			lower[id] = newRouter(t, router.Config{Now: w.now, Seed: seed}, 4)
		}
		type sent struct {
			group   uint64
			at      time.Time
			pend    int
			started bool
		}
		type ended struct { // what a request that was sent at a time no longer contributes
			sent
			at             time.Time
			requests, pend int
		}
		var over []ended
		flying := map[string]*sent{}
		last := map[uint64]*router.Summary{}
		settled := map[uint64]map[string]bool{1: {}, 2: {}, 3: {}} // requests in the last summary
		hear := func(id uint64, s router.Summary) {
			setSummary(t, upper, id, s)
			if was := last[id]; was == nil || !s.Taken.Before(was.Taken) {
				last[id] = &s
			}
			for name, f := range flying {
				if f.group == id && !f.at.After(last[id].Taken) {
					settled[id][name] = true
				}
			}
		}
		summary := func(id uint64, full bool) router.Summary {
			s := lower[id].Summarize("m")[0]
			if full {
				s.Filter, s.Stride = indexer.NewFilter(5000), stride
				for h, err := range lower[id].Checkpoints("m", 8, stride) {
					if err != nil {
						t.Fatal(err)
					}
					s.Filter.Add(h)
				}
			}
			return s
		}
		text := func() string {
			b := make([]byte, 2+rng.IntN(14))
			for i := range b {
				b[i] = byte('a' + rng.IntN(2))
			}
			return string(b)
		}
		var held []router.Summary // late summaries, each with its group in Queued
		for step := range 400 {
			w.advance(time.Duration(rng.IntN(20)) * time.Millisecond)
			id := uint64(1 + rng.IntN(3))
			switch rng.IntN(8) {
			case 0, 1, 2:
				name, p := fmt.Sprint(step), text()
				d := bookFor(t, upper, name, p)
				for _, c := range d.Candidates {
					g, requests, pend := c.Worker.ID, 0, 0
					for other, f := range flying {
						if f.group != g || settled[g][other] && c.Excluded != router.ExcludedStale {
							continue
						}
						requests++
						if !f.started {
							pend += f.pend
						}
					}
					if s := last[g]; s != nil && w.now().Sub(s.Taken) <= 3*time.Second {
						reported, pending := s.ActiveRequests, s.PendTokens
						for _, e := range over {
							if e.group == g && !e.sent.at.After(s.Taken) && e.at.After(s.Taken) {
								reported -= e.requests
								pending -= e.pend
							}
						}
						requests, pend = requests+max(0, reported), pend+max(0, pending)
					}
					if c.ActiveRequests != requests || c.PendTokens != pend {
						t.Fatalf("seed %d, step %d: group %d has %d requests and %d tokens, want %d and %d", seed, step, g, c.ActiveRequests, c.PendTokens, requests, pend)
					}
				}
				at := w.now()
				if s := last[d.Worker.ID]; s != nil && !at.After(s.Taken) {
					at = s.Taken.Add(1) // booked after the summary, at the same time
				}
				flying[name] = &sent{group: d.Worker.ID, at: at, pend: d.PrefillTokens}
				to := bookFor(t, lower[d.Worker.ID], name, p)
				store(lower[d.Worker.ID], to.Worker, p)
			case 3:
				for name, f := range flying {
					upper.MarkPrefillCompleted(name)
					lower[f.group].MarkPrefillCompleted(name)
					if !f.started {
						over = append(over, ended{*f, w.now(), 0, f.pend})
					}
					f.started = true
					break
				}
			case 4:
				for name, f := range flying {
					upper.Free(name)
					lower[f.group].Free(name)
					e := ended{*f, w.now(), 1, 0}
					if !f.started {
						e.pend = f.pend
					}
					over = append(over, e)
					delete(flying, name)
					break
				}
			case 5, 6:
				s := summary(id, rng.IntN(4) == 0)
				switch rng.IntN(4) {
				case 0: // the summary is lost
				case 1:
					if s.Filter == nil {
						s.Model = fmt.Sprint(id)
						held = append(held, s)
					}
				default:
					hear(id, s)
				}
			case 7:
				if n := len(held); n > 0 {
					s := held[rng.IntN(n)] // a late summary arrives, perhaps for the second time
					hear(uint64(s.Model[0]-'0'), s)
				}
			}
		}
		w.advance(time.Millisecond)
		if seed%2 == 0 { // the upper router restarts: the summaries contain the requests that it sent
			upper = newRouter(t, router.Config{Now: w.now, PredictTTL: -1}, 0)
			for id := uint64(1); id <= 3; id++ {
				set(t, upper, groupOf(id))
			}
		}
		for id := range lower {
			hear(id, summary(id, true))
		}
		for range 100 {
			p := text()
			for i, c := range dryRun(t, upper, p).Candidates {
				s := lower[uint64(i+1)].Summarize("m")[0]
				if c.PendTokens != s.PendTokens || c.ActiveRequests != s.ActiveRequests || c.Members != s.Members() {
					t.Fatalf("seed %d: group %d has load %+v, the upper router has %+v", seed, i+1, s, c)
				}
				best := 0
				for _, m := range dryRun(t, lower[uint64(i+1)], p).Candidates {
					best = max(best, m.OverlapBlocks)
				}
				if c.OverlapBlocks < best/stride*stride {
					t.Errorf("seed %d: group %d holds %d blocks of %s, the upper router counts %d", seed, i+1, best, p, c.OverlapBlocks)
				}
			}
		}
	}
}

// Requesting checkpoints of an unknown model or worker is an error.
func TestCheckpointsOfNobody(t *testing.T) {
	r := newRouter(t, router.Config{}, 1)
	for _, c := range []struct {
		model string
		size  int
	}{{"other", 8}, {"m", 16}} {
		for _, err := range r.Checkpoints(c.model, c.size, 4) {
			if !errors.Is(err, router.ErrNoModel) {
				t.Errorf("%+v: error %v", c, err)
			}
		}
	}
	n := 0
	store(r, router.Worker{ID: 1}, "abcdefghi")
	for h, err := range r.Checkpoints("m", 8, 4) {
		if n++; err != nil || !slices.Contains([]uint64{sequenceOf("abcd")[3], sequenceOf("abcdefgh")[7]}, h) {
			t.Errorf("checkpoint %x, error %v", h, err)
		}
	}
	if n != 2 {
		t.Errorf("%d checkpoints of nine blocks, want 2", n)
	}
}

// A probed group answers exactly, and its own choice stands unless another request came
// in between.
func TestProbe(t *testing.T) {
	w := newWatch()
	var asked []router.Probe
	var answers []router.ProbeAnswer
	between := func() {}
	r := newRouter(t, router.Config{Scoring: flat(), Now: w.now, Probe: func(_ context.Context, p router.Probe) []router.ProbeAnswer {
		p.Local = slices.Clone(p.Local)
		asked = append(asked, p)
		w.advance(time.Millisecond)
		between()
		return answers
	}}, 0)
	bookFor(t, newRouter(t, router.Config{Probe: func(context.Context, router.Probe) []router.ProbeAnswer {
		t.Error("a pool without groups is probed")
		return nil
	}}, 1), "x", "ab")
	set(t, r, groupOf(1))
	set(t, r, groupOf(2))
	set(t, r, groupOf(3))
	for id := uint64(1); id <= 2; id++ {
		setSummary(t, r, id, router.Summary{Taken: w.now(), Interval: time.Hour, Healthy: 2, PendTokens: 1000, ActiveRequests: 10})
	}
	answers = []router.ProbeAnswer{
		{Group: "g1", Worker: router.Worker{ID: 71, DPRank: 1}, OverlapBlocks: 3, PendTokens: 10, ActiveRequests: 2},
		{Group: "g3", Worker: router.Worker{ID: 73}, Busy: true},
		{Group: "other", Worker: router.Worker{ID: 74}},
	}
	d := bookFor(t, r, "1", "abcd")
	if d.Group != "g1" || d.Member == nil || *d.Member != (router.Worker{ID: 71, DPRank: 1}) || d.OverlapBlocks != 3 || d.ProbeTime != time.Millisecond {
		t.Errorf("decision %+v", d)
	}
	if want := []float64{10 + 8*1.2, 500 + 32*1.5, 0}; !slices.Equal(costsOf(d), want) {
		t.Errorf("costs %v, want %v", costsOf(d), want)
	}
	if c := d.Candidates; !c[0].Probed || c[1].Probed || c[2].Probed || c[2].Excluded != router.ExcludedStale || c[0].Members != 1 {
		t.Errorf("candidates %+v", c)
	}
	if p := asked[0]; p.ID != "1" || p.Model != "m" || p.BlockSize != 8 || p.Tokens != 32 || len(p.Local) != 4 || !slices.Equal(p.Groups, []string{"g1", "g2", "g3"}) {
		t.Errorf("asked %+v", p)
	}
	// The group may not yet have booked a request that was sent there just before.
	w.advance(router.GroupTransit - 2*time.Millisecond)
	if d = bookFor(t, r, "under way", "abcd"); d.Group != "g1" || d.Member != nil || d.Candidates[0].PendTokens != 10+8/2 || d.Candidates[0].ActiveRequests != 2 {
		t.Errorf("decision %+v, member %v, candidate %+v", d, d.Member, d.Candidates[0])
	}
	w.advance(router.GroupTransit)
	if d = dryRun(t, r, "abcd"); d.Member == nil || d.Candidates[0].PendTokens != 10 {
		t.Errorf("all has arrived: decision %+v, candidate %+v", d, d.Candidates[0])
	}
	// Another request is sent there while the answer is on its way.
	between = func() {
		between = func() {}
		bookFor(t, r, "3", "wxyz")
	}
	if d = bookFor(t, r, "2", "abcd"); d.Group != "g1" || d.Member != nil || d.Candidates[0].PendTokens != 10+8/2 {
		t.Errorf("decision %+v, member %v, candidate %+v", d, d.Member, d.Candidates[0])
	}
	// If no other group is left, the busy one is chosen.
	setSummary(t, r, 1, router.Summary{Taken: w.now()})
	setSummary(t, r, 2, router.Summary{Taken: w.now()})
	answers = answers[1:]
	setSummary(t, r, 3, router.Summary{Taken: w.now(), Healthy: 1})
	if d = bookFor(t, r, "4", "abcd"); d.Group != "g3" || d.Member != nil {
		t.Errorf("decision %+v", d)
	}
	// A probe reaches a group whose summaries are lost.
	w.advance(2 * time.Hour)
	answers = []router.ProbeAnswer{{Group: "g2", Worker: router.Worker{ID: 72}, OverlapBlocks: 99, PendTokens: 1}}
	setSummary(t, r, 1, router.Summary{Taken: w.now().Add(-time.Hour), Healthy: 1})
	setSummary(t, r, 2, router.Summary{Taken: w.now().Add(-time.Hour), Healthy: 1})
	if d = bookFor(t, r, "5", "abcd"); d.Group != "g2" || d.Member == nil || d.OverlapBlocks != 4 || d.Candidates[0].Excluded != router.ExcludedStale {
		t.Errorf("decision %+v", d)
	}
	// A request that names the group, or has no whole block, sends no probe.
	n := len(asked)
	if _, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("ab"), Pinned: &router.Worker{ID: 1}}); err != nil {
		t.Error(err)
	}
	if dryRun(t, r, ""); len(asked) != n {
		t.Errorf("%d were asked in vain", len(asked)-n)
	}
}

// What the answer to a probe does not contain is the mean over the group's members, as without a
// probe: the predicted time to the first token does not grow with the size of the group.
func TestAProbedGroupHasTheMeanOfItsDecodes(t *testing.T) {
	w := newWatch()
	var answers []router.ProbeAnswer
	r := newRouter(t, router.Config{Scoring: flat(), Now: w.now, Probe: func(context.Context, router.Probe) []router.ProbeAnswer { return answers }}, 0)
	set(t, r, groupOf(1))
	setSummary(t, r, 1, router.Summary{Taken: w.now(), Interval: time.Hour, Healthy: 4})
	for i := range 8 {
		id := fmt.Sprint(i)
		if bookFor(t, r, id, "abcd"); i < 4 {
			r.FirstToken(id, router.SignTold)
		}
	}
	w.advance(time.Minute)
	setSummary(t, r, 1, router.Summary{Taken: w.now(), Interval: time.Hour, Healthy: 4, HeldTokens: 128})
	without := dryRun(t, r, "wxyz")
	answers = []router.ProbeAnswer{{Group: "g1", Worker: router.Worker{ID: 71}, ActiveRequests: 1}}
	probed := dryRun(t, r, "wxyz")
	c, was := probed.Candidates[0], without.Candidates[0]
	if was.Members != 4 || was.DecodeTokens != 128 || was.WaitingRequests != 4 || c.Members != 1 || c.DecodeTokens != 32 || c.WaitingRequests != 1 {
		t.Errorf("without a probe %+v, with a probe %+v", was.Input, c.Input)
	}
	if probed.EstimatedTTFT != without.EstimatedTTFT {
		t.Errorf("first token expected in %v ms, without a probe in %v ms", probed.EstimatedTTFT, without.EstimatedTTFT)
	}
}

// The answer to a probe is the choice that a request would get; a probe books nothing.
func TestAnswer(t *testing.T) {
	limit := 100
	r := newRouter(t, router.Config{Scoring: flat(), Thresholds: scorer.Thresholds{PrefillTokens: &limit}}, 2)
	store(r, router.Worker{ID: 2}, "abc")
	probe := router.Probe{Model: "m", BlockSize: 8, Tokens: 32, Local: indexer.AppendLocalHashes(nil, prompt("abcd"), 8, indexer.Seed("", ""))}
	for id := range uint64(2) {
		if _, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(id), Model: "m", Tokens: prompt("x"), Pinned: &router.Worker{ID: id + 1}}); err != nil {
			t.Fatal(err)
		}
	}
	want := router.ProbeAnswer{Worker: router.Worker{ID: 2}, OverlapBlocks: 3, PendTokens: 8, ActiveBlocks: 1, ActiveRequests: 1, HeldTokens: 8, Cost: 8 + 8*1.1}
	before := loads(r)
	if got, err := r.Answer(t.Context(), probe); err != nil || got != want || loads(r) != before {
		t.Errorf("answer %+v, error %v, loads %s; want %+v", got, err, loads(r), want)
	}
	for id := range uint64(2) {
		if _, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint("l", id), Model: "m", Tokens: prompt("yyyyyyyyyyyyyyyyy"), Pinned: &router.Worker{ID: id + 1}}); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := r.Answer(t.Context(), probe); err != nil || !got.Busy {
		t.Errorf("all are busy: answer %+v, error %v", got, err)
	}
	probe.Model = "other"
	if _, err := r.Answer(t.Context(), probe); !errors.Is(err, router.ErrUnknownModel) {
		t.Errorf("error %v", err)
	}
}

// The preferred worker takes the request whatever its cost. If it cannot, another worker
// does. Both cases have a second choice.
func TestPreferredWorker(t *testing.T) {
	limit := 1000
	r := newRouter(t, router.Config{Thresholds: scorer.Thresholds{PrefillTokens: &limit}}, 3)
	decide := func(w router.Worker) router.Decision {
		t.Helper()
		d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("abc"), Preferred: &w, WantSecond: true, Explain: true})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	store(r, router.Worker{ID: 1}, "abc")
	d := decide(router.Worker{ID: 2})
	if d.Worker.ID != 2 || d.Reason != router.ReasonPreferred || d.Cost != d.Candidates[1].Cost || d.Equal != 2 || d.Second.Worker.ID != 1 {
		t.Errorf("decision %+v", d)
	}
	for _, w := range []router.Worker{{ID: 9}, {ID: 2, DPRank: 1}} {
		if d = decide(w); d.Worker.ID != 1 || d.Reason != router.ReasonKV {
			t.Errorf("the preferred worker %v does not exist: decision %+v", w, d)
		}
	}
	if _, err := r.BestWorker(t.Context(), router.Request{ID: "x", Model: "m", Tokens: make([]uint32, 2000), Pinned: &router.Worker{ID: 2}}); err != nil {
		t.Fatal(err)
	}
	if d = decide(router.Worker{ID: 2}); d.Worker.ID != 1 || d.Reason != router.ReasonKV {
		t.Errorf("the preferred worker is busy: decision %+v", d)
	}
}
