// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
)

// play sends requests, one after the other. Each worker answers with the status that answer returns for it. The
// prompts have the given number of different beginnings, and come from one client. play returns the number of
// requests of each worker.
func play(t *testing.T, r *router.Router, c *clock, n, prefixes int, answer func(id uint64) int) map[uint64]int {
	t.Helper()
	got := map[uint64]int{}
	for i := range n {
		d := decided(t, r, fmt.Sprint("play", i), "abcd", func(q *router.Request) {
			q.Tokens, q.Client, q.Prefix = []uint32{uint32(i)}, 7, uint64(1+i%prefixes)
		})
		got[d.Worker.ID]++
		r.Served(d.ID, router.Response{Address: d.Address, Status: answer(d.Worker.ID)})
		r.Free(d.ID)
		c.now = c.now.Add(20 * time.Millisecond)
	}
	return got
}

// A worker that answers errors quickly has no load. After its first failures it gets few requests, in all modes.
func TestQuickErrorsAreNoCapacity(t *testing.T) {
	for _, mode := range []router.Mode{router.KV, router.LeastLoaded, router.RoundRobin, router.PowerOfTwo} {
		for _, status := range []int{401, 403, 404, 429, 500, 503} {
			c := &clock{time.Unix(1000, 0)}
			r := newRouter(t, router.Config{Mode: mode, AvoidFailing: 2 * time.Second, Now: c.read}, 4)
			got := play(t, r, c, 1000, 10, func(id uint64) int {
				if id == 2 {
					return status
				}
				return 200
			})
			if got[2] > 10+1000/20 || got[2] == 0 {
				t.Errorf("%s: the worker that answers %d got %d of 1000 requests", mode, status, got[2])
			}
			faults := byID(t, r)[2].Faults
			if len(faults) != 1 || faults[0].What != "answers_errors" || !strings.Contains(faults[0].Text, fmt.Sprint(status)) {
				if status != 429 && status != 503 { // few of those are needed to avoid it, too few to compare
					t.Errorf("%s: faults of the worker that answers %d: %v", mode, status, faults)
				}
			}
			// A worker that serves again gets its share again.
			c.now = c.now.Add(time.Minute)
			if got := play(t, r, c, 400, 10, func(uint64) int { return 200 }); got[2] < 50 {
				t.Errorf("%s: after its errors of %d the worker got %d of 400 requests", mode, status, got[2])
			}
			if faults := byID(t, r)[2].Faults; faults != nil {
				t.Errorf("%s: the worker that serves again has the faults %v", mode, faults)
			}
		}
	}
}

// The fault names the latest kind of errors, and its latest status.
func TestTheFaultNamesTheLatestErrors(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	r := newRouter(t, router.Config{Mode: router.RoundRobin, Now: c.read}, 2)
	for _, step := range []struct {
		status, times int
		want          []string
	}{
		{401, 8, []string{"answered 401 to about 7 "}},
		{500, 1, []string{"answered 401 to about 7 ", "its latest error, status 500, is another one"}},
		{503, 9, []string{"answered 503 to about "}},
		{404, 1, []string{"answered 503 to about ", "its latest error, status 404, is another one"}},
		{401, 8, []string{"answered 401 to about "}},
	} {
		for n := range step.times {
			d := decided(t, r, fmt.Sprint(step.status, n), "abcd", func(q *router.Request) {
				q.Pinned, q.Client, q.Prefix = &router.Worker{ID: 2}, 7, uint64(1+n)
			})
			r.Served(d.ID, router.Response{Address: d.Address, Status: step.status})
			r.Free(d.ID)
			c.pass(20 * time.Millisecond)
		}
		faults := byID(t, r)[2].Faults
		if len(faults) != 1 {
			t.Fatalf("after %d errors of %d: %v", step.times, step.status, faults)
		}
		for _, want := range step.want {
			if !strings.Contains(faults[0].Text, want) {
				t.Errorf("after %d errors of %d: %s; want %s", step.times, step.status, faults[0].Text, want)
			}
		}
		if named := strings.Contains(faults[0].Text, "latest"); named != (len(step.want) > 1) {
			t.Errorf("after %d errors of %d: %s", step.times, step.status, faults[0].Text)
		}
	}
}

// No single client can switch a worker off, and no worker is avoided for errors that all of them answer.
func TestErrorsThatAreNotTheWorkers(t *testing.T) {
	for name, c := range map[string]struct {
		prefixes int
		answer   func(id uint64) int
		share    int // least number of requests of worker 2, of 400
	}{
		"one client, one prompt":  {1, func(id uint64) int { return map[bool]int{true: 401, false: 200}[id == 2] }, 80},
		"one client, two prompts": {2, func(id uint64) int { return map[bool]int{true: 404, false: 200}[id == 2] }, 80},
		"all workers":             {10, func(uint64) int { return 500 }, 80},
		"mistakes of clients":     {10, func(id uint64) int { return map[bool]int{true: 422, false: 200}[id == 2] }, 80},
	} {
		now := &clock{time.Unix(1000, 0)}
		r := newRouter(t, router.Config{Mode: router.RoundRobin, AvoidFailing: 2 * time.Second, Now: now.read}, 4)
		if got := play(t, r, now, 400, c.prefixes, c.answer); got[2] < c.share {
			t.Errorf("%s: worker 2 got %d of 400 requests", name, got[2])
		}
	}
	// Different clients count as different prompts do.
	now := &clock{time.Unix(1000, 0)}
	r := newRouter(t, router.Config{AvoidFailing: 2 * time.Second, Now: now.read}, 2)
	for i := range 6 {
		d := decided(t, r, fmt.Sprint(i), "abcd", func(q *router.Request) {
			q.Pinned, q.Client, q.Prefix = &router.Worker{ID: 1}, uint64(1+i%3), 5
		})
		_, avoided := r.Served(d.ID, router.Response{Address: d.Address, Status: 404})
		if (len(avoided) == 1) != (i == 4) {
			t.Errorf("response %d: avoided %v", i, avoided)
		}
		r.Free(d.ID)
	}
}

// The requests of one client with one prompt begin no back-off and make no fault, wherever the worker's answers are
// learned from. Those of unknown requests count as one client's.
func TestOneClientSwitchesNoWorkerOff(t *testing.T) {
	for name, told := range map[string]func(r *router.Router, id string, resp router.Response) []router.Avoided{
		"served": func(r *router.Router, id string, resp router.Response) []router.Avoided {
			_, avoided := r.Served(id, resp)
			return avoided
		},
		"log":              func(r *router.Router, id string, resp router.Response) []router.Avoided { return r.Attempted(id, resp) },
		"log, without ids": func(r *router.Router, _ string, resp router.Response) []router.Avoided { return r.Attempted("", resp) },
	} {
		for _, resp := range []router.Response{{Status: 429}, {Status: 500}, {Status: 502}, {Status: 503}, {Status: 504}, {Status: 504, Late: true}} {
			if name != "served" && !router.MayBeRepeated(resp.Status) {
				continue
			}
			for _, clients := range []uint64{1, 3} {
				c := newClock()
				r := newRouter(t, router.Config{AvoidFailing: time.Second, Now: c.read}, 2)
				avoided := 0
				for i := range uint64(60) {
					d := decided(t, r, "a", "ab", func(q *router.Request) { q.Pinned, q.Client, q.Prefix = &router.Worker{ID: 2}, 1+i%clients, 7 })
					resp.Address = d.Address
					avoided += len(told(r, d.ID, resp))
					r.Free(d.ID)
					c.pass(700 * time.Millisecond)
				}
				want := clients == 3 && name != "log, without ids"
				if faults := byID(t, r)[2].Faults; (avoided > 0) != want || (len(faults) > 0) != want {
					t.Errorf("%s, %+v of %d clients: avoided %d times, faults %v", name, resp, clients, avoided, faults)
				}
			}
		}
	}
}

// The proxy asked the second choice, so the first one gave no response, or one that the proxy repeated. The
// back-off ends if the proxy's log then says that it responded to this request.
func TestALateLogAbsolvesTheFirstChoice(t *testing.T) {
	c := newClock()
	r := newRouter(t, router.Config{AvoidFailing: time.Second, Now: c.read}, 2)
	d := decided(t, r, "a", "abcd", func(q *router.Request) { q.Client = 1 })
	r.Served("a", router.Response{Address: d.Second.Address, Asked: 2, Status: 200})
	first := router.Response{Address: d.Address, Status: 503}
	if r.Attempted("other", first); !byID(t, r)[d.Worker.ID].Failing {
		t.Error("the answer to another request ends the back-off")
	}
	r.Attempted("a", first)
	if w := byID(t, r)[d.Worker.ID]; w.Failing || w.Refuses {
		t.Errorf("the worker responded, and is %+v", w)
	}
}

// At any rate of requests, a worker gets at most a twentieth of them after its first ten failures, also if its
// probes are good. It gets requests again soon after it works again.
func TestTriesAreFew(t *testing.T) {
	for _, mode := range []router.Mode{router.KV, router.LeastLoaded, router.RoundRobin, router.PowerOfTwo} {
		for name, resp := range map[string]router.Response{
			"401": {Status: 401}, "429": {Status: 429}, "500": {Status: 500}, "refused": {Status: 503, Local: true}, "late": {Status: 504, Late: true}, "hangs": {},
		} {
			for _, pause := range []time.Duration{50 * time.Millisecond, time.Second, 3 * time.Second, 40 * time.Second, 5 * time.Minute} {
				c := newClock()
				r := newRouter(t, router.Config{Mode: mode, AvoidFailing: 2 * time.Second, Now: c.read}, 4)
				const bad, requests = 2, 600
				failed, late, works := 0, 0, false
				play := func(i int) (tried bool) {
					d := decided(t, r, fmt.Sprint(i), "ab", func(q *router.Request) { q.Client = uint64(1 + i%5) })
					if d.Worker.ID == bad && !works {
						if failed++; failed > 10 {
							late++
						}
						if resp.Address = d.Address; resp.Status != 0 {
							r.Served(d.ID, resp)
						}
					} else {
						r.Served(d.ID, router.Response{Address: d.Address, Status: 200})
					}
					r.Free(d.ID)
					for left := pause; left > 0; left -= 2500 * time.Millisecond {
						c.pass(min(left, 2500*time.Millisecond))
						r.Probed(bad, i%7 > 0 || name != "refused")
					}
					return d.Worker.ID == bad
				}
				if name == "hangs" {
					d := decided(t, r, "first", "ab", func(q *router.Request) { q.Pinned = &router.Worker{ID: bad} })
					r.Served(d.ID, router.Response{Address: d.Address, Status: 503, Local: true})
					r.Free(d.ID)
				}
				for i := range requests {
					play(i)
				}
				if late > (requests-10)/20 {
					t.Errorf("%s, %s, a request each %v: %d of %d requests after the first ten failures", mode, name, pause, late, requests-failed+late)
				}
				works = true
				waited := 0
				for !play(requests+waited) && waited < 2000 {
					waited++
				}
				if limit := 25 + int(33*time.Second/pause); waited > limit {
					t.Errorf("%s, %s, a request each %v: the worker works again, and waited for %d requests", mode, name, pause, waited)
				}
			}
		}
	}
}

// A good probe ends the back-off of a worker that gave no response, or whose probe failed since. It begins a single
// try, and it ends no back-off of a worker that answers its probes and fails requests, or that asked for a pause.
func TestAGoodProbeLetsATryThrough(t *testing.T) {
	refused := router.Response{Status: 503, Local: true}
	for name, q := range map[string]struct {
		resp  router.Response
		first bool // result of a probe after the failure
		ends  bool // whether a good probe ends the back-off
	}{
		"refused":                   {refused, true, true},
		"refused, then a bad probe": {refused, false, true},
		"500":                       {router.Response{Status: 500}, true, false},
		"500, then a bad probe":     {router.Response{Status: 500}, false, true},
		"a pause":                   {router.Response{Status: 429, RetryAfter: 30 * time.Second}, true, false},
		"a pause, then a bad probe": {router.Response{Status: 503, RetryAfter: 30 * time.Second}, false, true},
	} {
		c := newClock()
		r := newRouter(t, router.Config{AvoidFailing: 16 * time.Second, Now: c.read}, 2)
		n := 0
		to := func(id uint64, resp router.Response) {
			n++
			d := decided(t, r, fmt.Sprint(n), "ab", func(q *router.Request) { q.Pinned, q.Client = &router.Worker{ID: id}, uint64(n) })
			resp.Address = d.Address
			r.Served(d.ID, resp)
			r.Free(d.ID)
		}
		r.Probed(1, true)
		to(2, router.Response{Status: 200})
		for range 5 {
			to(1, q.resp)
		}
		if !byID(t, r)[1].Failing {
			t.Fatalf("%s: the worker is not avoided", name)
		}
		c.pass(time.Second)
		if r.Probed(1, q.first); q.first == false {
			if !byID(t, r)[1].Failing {
				t.Errorf("%s: a bad probe ends the back-off", name)
			}
			r.Probed(1, true)
		}
		if failing := byID(t, r)[1].Failing; failing == q.ends {
			t.Errorf("%s: after a good probe, failing is %v", name, failing)
		}
		if !q.ends {
			continue
		}
		// A try that fails begins a back-off again. The second good probe ends it, the third one does not.
		for i := range 2 {
			to(1, refused)
			if r.Probed(1, true); byID(t, r)[1].Failing != (i == 1) {
				t.Errorf("%s: after %d tries, failing is %v", name, i+1, i == 0)
			}
		}
		for range 20 {
			to(2, router.Response{Status: 200})
		}
		if r.Probed(1, true); byID(t, r)[1].Failing {
			t.Errorf("%s: after 20 requests a good probe lets no try through", name)
		}
		to(1, router.Response{Status: 200})
		to(1, refused)
		if r.Probed(1, true); byID(t, r)[1].Failing {
			t.Errorf("%s: a good response does not begin the count of tries again", name)
		}
	}
	newRouter(t, router.Config{}, 0).Probed(77, true)
}

// The only worker of a model is compared with no other. It is not avoided, and its fault says so.
func TestTheOnlyWorker(t *testing.T) {
	for n, want := range map[int]string{
		1: "no other worker of the model can take requests: kvroute does not avoid it",
		2: "no other worker of the model answered a request in the last 30 minutes: kvroute avoids it",
	} {
		c := newClock()
		r := newRouter(t, router.Config{AvoidFailing: time.Second, Now: c.read}, n)
		answer := func(i, status int) {
			d := decided(t, r, fmt.Sprint(i), "ab", func(q *router.Request) { q.Pinned, q.Client = &router.Worker{ID: 1}, uint64(1+i) })
			r.Served(d.ID, router.Response{Address: d.Address, Status: status})
			r.Free(d.ID)
		}
		for i := range 6 {
			answer(i, 401)
		}
		w := byID(t, r)[1]
		if len(w.Faults) != 1 || w.Faults[0].What != "answers_errors" || !strings.Contains(w.Faults[0].Text, want) || w.Failing != (n == 2) {
			t.Errorf("%d workers: failing %v, faults %v", n, w.Failing, w.Faults)
		}
		for i := range 60 {
			answer(100+i, map[bool]int{true: 429, false: 200}[i%3 == 0])
		}
		if w := byID(t, r)[1]; n == 1 && len(w.Faults) > 0 {
			t.Errorf("the only worker answers 429 to a third of its requests, and has the faults %v", w.Faults)
		}
	}
}

// After a back-off one request tries the worker, and the others stay away until it has answered.
func TestOneRequestTriesAWorker(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	r := newRouter(t, router.Config{AvoidFailing: 2 * time.Second, Now: c.read}, 2)
	store(r, router.Worker{ID: 1}, "abcd")
	cached := func(id string) router.Decision { return decided(t, r, id, "abcd") }
	r.Served(cached("a").ID, router.Response{Address: worker(1).Address, Status: 503, Local: true})
	c.now = c.now.Add(2 * time.Second)
	if d := cached("b"); d.Worker.ID != 1 {
		t.Fatalf("the trial goes to %v", d.Worker)
	}
	if d := cached("c"); d.Worker.ID != 2 {
		t.Errorf("a second request during the trial goes to %v", d.Worker)
	}
	r.Served("b", router.Response{Address: worker(1).Address, Status: 200})
	if d := cached("d"); d.Worker.ID != 1 {
		t.Errorf("after the trial a request goes to %v", d.Worker)
	}
	// A trial that does not end is followed by another one.
	c.now = c.now.Add(10 * time.Second)
	r.Served("d", router.Response{Address: worker(1).Address, Status: 503, Local: true})
	for i := range 3 {
		c.now = c.now.Add(4 * time.Second)
		if d := cached(fmt.Sprint("trial", i)); d.Worker.ID != 1 {
			t.Errorf("trial %d goes to %v", i, d.Worker)
		}
		if d := cached(fmt.Sprint("other", i)); d.Worker.ID != 2 {
			t.Errorf("beside trial %d a request goes to %v", i, d.Worker)
		}
	}
}

// If no worker is healthy, unhealthy ones serve: the reports may be wrong. Those that accept no connection do not.
func TestPanic(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	var panics []bool
	r := newRouter(t, router.Config{
		Mode: router.RoundRobin, AvoidFailing: time.Second, Now: c.read,
		Hooks: router.Hooks{Panic: func(_ string, begins bool) { panics = append(panics, begins) }},
	}, 0)
	health := func(id uint64, h router.Health, more ...func(*router.WorkerInfo)) {
		w := worker(id)
		w.Health = h
		for _, m := range more {
			m(&w)
		}
		set(t, r, w)
	}
	health(1, router.Unhealthy)
	health(2, router.Expired)
	health(3, router.Unhealthy, func(w *router.WorkerInfo) { w.Refuses = true })
	health(4, router.Healthy, func(w *router.WorkerInfo) { w.Draining = true })
	n := 0
	chosen := func() (ids []uint64) {
		for range 4 {
			n++
			d, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(n), Model: "m", Tokens: prompt("ab")})
			if err != nil {
				return nil
			}
			if ids = append(ids, d.Worker.ID); !d.Panic {
				t.Errorf("the decision for %v does not say that no worker is healthy", d.Worker)
			}
			r.Free(d.ID)
		}
		slices.Sort(ids)
		return slices.Compact(ids)
	}
	if got := chosen(); !slices.Equal(got, []uint64{1, 2}) {
		t.Errorf("requests went to %v, want 1 and 2", got)
	}
	// A worker that just refused a request is left out.
	for _, id := range []uint64{1, 2} {
		d := decided(t, r, fmt.Sprint("refused", id), "ab", func(q *router.Request) { q.Pinned = &router.Worker{ID: id} })
		r.Served(d.ID, router.Response{Address: d.Address, Status: 503, Local: true})
		r.Free(d.ID)
		want := map[uint64][]uint64{1: {2}, 2: {3}}[id] // 3: only its probe is refused, and that may be kvroute's own fault
		if got := chosen(); !slices.Equal(got, want) {
			t.Errorf("after a refusal of %d requests went to %v, want %v", id, got, want)
		}
	}
	d := decided(t, r, "last", "ab")
	r.Served(d.ID, router.Response{Address: d.Address, Status: 503, Local: true})
	r.Free(d.ID)
	if got := chosen(); got != nil {
		t.Errorf("all workers refuse, and requests went to %v", got)
	}
	if c.now = c.now.Add(time.Minute); chosen() == nil {
		t.Error("refusals are not forgotten after a minute")
	}
	health(5, router.Starting)
	if d := decided(t, r, "start", "ab"); d.Worker.ID != 5 || d.Panic {
		t.Errorf("a starting worker exists, and the request went to %v, panic %v", d.Worker, d.Panic)
	}
	if !slices.Equal(panics, []bool{true, false}) {
		t.Errorf("the hook was called with %v", panics)
	}
}

// A response below 500 is a sign of life, passed on at most once a second.
func TestResponsesAreSignsOfLife(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	var signs []uint64
	r := newRouter(t, router.Config{Now: c.read, Hooks: router.Hooks{Answered: func(id uint64) { signs = append(signs, id) }}}, 1)
	for i, q := range []struct {
		wait   time.Duration
		resp   router.Response
		passed bool
	}{
		{0, router.Response{Status: 200}, true},
		{time.Second / 2, router.Response{Status: 200}, false},
		{time.Second / 2, router.Response{Status: 429}, true},
		{time.Second, router.Response{Status: 500}, false},
		{time.Second, router.Response{Status: 503, Local: true}, false},
		{time.Second, router.Response{Nowhere: true, Status: 404}, false},
		{0, router.Response{Status: 404}, true},
	} {
		c.now = c.now.Add(q.wait)
		signs = nil
		d := decided(t, r, fmt.Sprint(i), "ab")
		if !q.resp.Nowhere {
			q.resp.Address = worker(1).Address
		}
		if r.Served(d.ID, q.resp); (len(signs) == 1) != q.passed {
			t.Errorf("response %d, %+v: signs %v", i, q.resp, signs)
		}
	}
	d := decided(t, r, "stranger", "ab")
	signs = nil
	if r.Served(d.ID, router.Response{Address: netip.MustParseAddrPort("10.9.9.9:1"), Status: 200, Asked: 1}); signs != nil {
		t.Errorf("a response of an unknown address is a sign of %v", signs)
	}
}

// A worker is avoided for as long as it asked for, but at most a minute. A
// response that the proxy did not pass on counts the same, however often it is reported.
func TestRetryAfterIsHonoured(t *testing.T) {
	one := worker(1).Address
	for _, q := range []struct{ asked, want time.Duration }{
		{0, 0},
		{time.Second, time.Second},
		{10 * time.Second, 10 * time.Second},
		{365 * 24 * time.Hour, time.Minute},
		{math.MaxInt64, time.Minute},
		{-time.Hour, 0},
	} {
		for _, status := range []int{429, 503} {
			for _, passedOn := range []bool{true, false} {
				c := newClock()
				r := newRouter(t, router.Config{AvoidFailing: 2 * time.Second, Now: c.read}, 2)
				resp := router.Response{Address: one, Status: status, RetryAfter: q.asked}
				begins := 0
				for i := range 3 {
					d := decided(t, r, fmt.Sprint(i), "abcd", func(q *router.Request) { q.Pinned = &router.Worker{ID: 1} })
					if passedOn {
						_, avoided := r.Served(d.ID, resp)
						begins += len(avoided)
					}
					begins += len(r.Attempted(d.ID, resp))
					r.Free(d.ID)
				}
				if begins != min(1, int(q.want)) {
					t.Errorf("%d, Retry-After %v: the worker is said to be avoided %d times", status, q.asked, begins)
				}
				if q.want == 0 {
					if byID(t, r)[1].Failing {
						t.Errorf("%d, Retry-After %v: the worker is avoided", status, q.asked)
					}
					continue
				}
				if c.pass(q.want - 1); !byID(t, r)[1].Failing {
					t.Errorf("%d, Retry-After %v: the worker is not avoided for %v", status, q.asked, q.want)
				}
				if c.pass(1); byID(t, r)[1].Failing {
					t.Errorf("%d, Retry-After %v: the worker is avoided for more than %v", status, q.asked, q.want)
				}
			}
		}
	}
}

// The word of the proxy on an attempt is a sign of life, and takes back that the worker refused the connection.
// It concerns the worker at that address only.
func TestAttempts(t *testing.T) {
	c := newClock()
	var signs []uint64
	r := newRouter(t, router.Config{AvoidFailing: time.Second, Now: c.read, Hooks: router.Hooks{Answered: func(id uint64) { signs = append(signs, id) }}}, 3)
	d := decided(t, r, "a", "abcd", func(q *router.Request) { q.Pinned = &router.Worker{ID: 1} })
	r.Served(d.ID, router.Response{Address: worker(2).Address, Status: 200, Asked: 2})
	if w := byID(t, r)[1]; !w.Refuses || !w.Failing {
		t.Errorf("the first choice is %+v", w)
	}
	signs = nil
	if got := r.Attempted("", router.Response{Address: worker(1).Address, Status: 429, RetryAfter: 5 * time.Second}); len(got) != 0 {
		t.Errorf("a back-off begins twice: %v", got)
	}
	if w := byID(t, r)[1]; w.Refuses || !w.Failing || !slices.Equal(signs, []uint64{1}) {
		t.Errorf("the worker that answered 429 is %+v; signs of life %v", w, signs)
	}
	for _, at := range []netip.AddrPort{{}, netip.MustParseAddrPort("10.9.9.9:1")} {
		if got := r.Attempted("", router.Response{Address: at, Status: 429, RetryAfter: time.Minute}); got != nil {
			t.Errorf("%v: %v is avoided", at, got)
		}
	}
	// Two workers behind one HTTP router: it does not say which of them answered.
	for id, host := range map[uint64]string{2: "a.example", 3: "b.example"} {
		info := worker(id)
		info.Address, info.Host, info.OwnHost = netip.MustParseAddrPort("10.0.0.99:80"), host, true
		set(t, r, info)
	}
	if got := r.Attempted("", router.Response{Address: netip.MustParseAddrPort("10.0.0.99:80"), Status: 429}); got != nil {
		t.Errorf("%v is avoided", got)
	}
	for host, want := range map[string]uint64{"b.example": 3, "c.example": 0} {
		got := r.Attempted("", router.Response{Address: netip.MustParseAddrPort("10.0.0.99:80"), Host: host, Status: 429, RetryAfter: time.Minute})
		if want == 0 && got != nil || want != 0 && (len(got) != 1 || got[0].ID != want) {
			t.Errorf("host %s: %v is avoided, want %d", host, got, want)
		}
	}
	off := newRouter(t, router.Config{}, 2)
	if got := off.Attempted("", router.Response{Address: worker(1).Address, Status: 429, RetryAfter: time.Minute}); got != nil || byID(t, off)[1].Failing {
		t.Errorf("without AvoidFailing: %v", got)
	}
}

func TestReadRetryAfter(t *testing.T) {
	now := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	for text, want := range map[string]time.Duration{
		"": 0, "0": 0, "7": 7 * time.Second, "31536000": 365 * 24 * time.Hour, "99999999999999999999999": math.MaxInt64,
		"-3": 0, "1.5": 0, "soon": 0, "7s": 0, " ": 0, "\x00": 0,
		"Fri, 27 Nov 2026 12:00:30 GMT": 30 * time.Second, "Fri, 27 Nov 2026 11:00:00 GMT": 0, "Fri, 27 Nov": 0,
		"Sunday, 27-Nov-27 12:00:00 GMT": 365 * 24 * time.Hour,
	} {
		if got := router.ReadRetryAfter(text, now); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

// Workers that answer errors are avoided although most workers do: one that serves shows that they could.
func TestMostWorkersAnswerErrors(t *testing.T) {
	c := &clock{now: time.Unix(1000, 0)}
	for name, bad := range map[string]func(id uint64) bool{
		"two of three": func(id uint64) bool { return id < 3 },
		"all":          func(uint64) bool { return true },
	} {
		r := newRouter(t, router.Config{AvoidFailing: 2 * time.Second, Mode: router.RoundRobin, Now: c.read}, 3)
		late := 0
		for i := range 120 {
			c.now = c.now.Add(100 * time.Millisecond)
			d := decided(t, r, fmt.Sprint(name, i), "abcd", func(q *router.Request) { q.Client = uint64(i) + 1 })
			resp := router.Response{Address: d.Address, Asked: 1, Status: 200}
			if bad(d.Worker.ID) {
				resp.Status = 404
				if i >= 60 {
					late++
				}
			}
			r.Served(d.ID, resp)
			r.Free(d.ID)
		}
		failing := 0
		for _, w := range byID(t, r) {
			if w.Failing {
				failing++
			}
		}
		if want := map[bool]int{true: 2}[name == "two of three"]; failing != want || want == 2 && late > 6 {
			t.Errorf("%s: %d workers are avoided, want %d; %d of the last 60 requests failed", name, failing, want, late)
		}
	}
}
