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
		d := decided(t, r, fmt.Sprint("play", i), "abcd", func(q *router.Request) { q.Tokens = []uint32{uint32(i)} })
		got[d.Worker.ID]++
		r.Served(d.ID, router.Response{Address: d.Address, Status: answer(d.Worker.ID), Client: 7, Prefix: uint64(1 + i%prefixes)})
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
		d := decided(t, r, fmt.Sprint(i), "abcd", func(q *router.Request) { q.Pinned = &router.Worker{ID: 1} })
		_, avoided := r.Served(d.ID, router.Response{Address: d.Address, Status: 404, Client: uint64(1 + i%3), Prefix: 5})
		if (len(avoided) == 1) != (i == 4) {
			t.Errorf("response %d: avoided %v", i, avoided)
		}
		r.Free(d.ID)
	}
}

// After a back-off one request tries the worker, and the others stay away until it has answered.
func TestOneRequestTriesAWorker(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	r := newRouter(t, router.Config{AvoidFailing: 2 * time.Second, Now: c.read}, 2)
	store(r, router.Worker{ID: 1}, "abcd")
	cached := func(id string) router.Decision { return decided(t, r, id, "abcd") }
	r.Served(cached("a").ID, router.Response{Address: worker(1).Address, Status: 503})
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
	r.Served("d", router.Response{Address: worker(1).Address, Status: 503})
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

// A worker is avoided for as long as it asked for, but at most a minute, and not less than without Retry-After. A
// response that the proxy did not pass on counts the same, however often it is reported.
func TestRetryAfterIsHonoured(t *testing.T) {
	one := worker(1).Address
	for _, q := range []struct{ asked, want time.Duration }{
		{0, 2 * time.Second},
		{time.Second, 2 * time.Second},
		{10 * time.Second, 10 * time.Second},
		{365 * 24 * time.Hour, time.Minute},
		{math.MaxInt64, time.Minute},
		{-time.Hour, 2 * time.Second},
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
					begins += len(r.Attempted(resp))
					r.Free(d.ID)
				}
				if begins != 1 {
					t.Errorf("%d, Retry-After %v: the worker is said to be avoided %d times", status, q.asked, begins)
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
	if got := r.Attempted(router.Response{Address: worker(1).Address, Status: 429, RetryAfter: 5 * time.Second}); len(got) != 0 {
		t.Errorf("a back-off begins twice: %v", got)
	}
	if w := byID(t, r)[1]; w.Refuses || !w.Failing || !slices.Equal(signs, []uint64{1}) {
		t.Errorf("the worker that answered 429 is %+v; signs of life %v", w, signs)
	}
	for _, at := range []netip.AddrPort{{}, netip.MustParseAddrPort("10.9.9.9:1")} {
		if got := r.Attempted(router.Response{Address: at, Status: 429, RetryAfter: time.Minute}); got != nil {
			t.Errorf("%v: %v is avoided", at, got)
		}
	}
	// Two workers behind one HTTP router: it does not say which of them answered.
	for id, host := range map[uint64]string{2: "a.example", 3: "b.example"} {
		info := worker(id)
		info.Address, info.Host, info.OwnHost = netip.MustParseAddrPort("10.0.0.99:80"), host, true
		set(t, r, info)
	}
	if got := r.Attempted(router.Response{Address: netip.MustParseAddrPort("10.0.0.99:80"), Status: 429}); got != nil {
		t.Errorf("%v is avoided", got)
	}
	for host, want := range map[string]uint64{"b.example": 3, "c.example": 0} {
		got := r.Attempted(router.Response{Address: netip.MustParseAddrPort("10.0.0.99:80"), Host: host, Status: 429})
		if want == 0 && got != nil || want != 0 && (len(got) != 1 || got[0].ID != want) {
			t.Errorf("host %s: %v is avoided, want %d", host, got, want)
		}
	}
	off := newRouter(t, router.Config{}, 2)
	if got := off.Attempted(router.Response{Address: worker(1).Address, Status: 429, RetryAfter: time.Minute}); got != nil || byID(t, off)[1].Failing {
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
