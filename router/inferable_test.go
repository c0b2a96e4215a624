// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvroute/kvroute/router"
)

// A first token is inferred only if the worker has little to compute and nothing else needs the observation.
func TestInferable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conf := router.Config{InferFirstTokens: true, InferTokens: 100, ObservePerMinute: 6, Sessions: router.SessionConfig{TTL: time.Hour}}
		r := newRouter(t, conf, 1)
		held := newRouter(t, router.Config{InferFirstTokens: true, InferTokens: 100, HoldoutShare: 1}, 1)
		none := newRouter(t, router.Config{InferFirstTokens: true}, 1)
		n := 0
		inferred := func(r *router.Router, tokens int, change func(*router.Request)) (yes bool, represents int) {
			t.Helper()
			n++
			id := fmt.Sprint("request ", n)
			req := router.Request{ID: id, Owned: true, Model: "m", MayInfer: true, Tokens: long(id, tokens)}
			if change != nil {
				change(&req)
			}
			d, err := r.BestWorker(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			r.FirstToken(id, router.SignEnd)
			r.Free(id)
			return d.Inferred, d.Represents
		}
		check := func(what string, r *router.Router, tokens int, change func(*router.Request), want bool, represents int) {
			t.Helper()
			if got, n := inferred(r, tokens, change); got != want || n != represents {
				t.Errorf("%s: inferred %v, represents %d; want %v and %d", what, got, n, want, represents)
			}
		}
		check("the first request of a worker", r, 50, nil, false, 1)
		check("a short request", r, 100, nil, true, 0)
		check("a long request", r, 101, nil, false, 1)
		check("a request whose response needs an observer", r, 50, func(q *router.Request) { q.MayInfer = false }, false, 1)
		check("a request in the sample", r, 50, func(q *router.Request) { q.Represents = 20 }, false, 20)
		check("a long request in the sample", r, 500, func(q *router.Request) { q.Represents = 20 }, false, 1)
		inSession := func(q *router.Request) { q.Session = "s" }
		check("the first request of a session", r, 50, inSession, false, 1)
		check("the next request of a session", r, 50, inSession, true, 0)
		time.Sleep(10 * time.Second)
		check("a request after the interval", r, 50, nil, false, 1)
		check("the request after it", r, 50, nil, true, 0)
		inferred(held, 50, nil)
		check("a request that is compared", held, 50, nil, false, 1)
		inferred(none, 50, nil)
		check("a request without InferTokens", none, 50, nil, false, 1)

		if _, err := r.BestWorker(t.Context(), router.Request{ID: "left", Owned: true, Model: "m", Tokens: long("left", 50)}); err != nil {
			t.Fatal(err)
		}
		r.Leave("left", true)
		check("a request after one that was left", r, 50, nil, false, 1)
	})
}

// A first token that is inferred needs no rate of the worker, and its time is that at which the worker was ready.
func TestInferredAtTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRouter(t, router.Config{InferFirstTokens: true, InferTokens: 100}, 1)
		for _, id := range []string{"observed", "inferred"} {
			d, err := r.BestWorker(t.Context(), router.Request{ID: id, Owned: true, Model: "m", MayInfer: true, Tokens: long(id, 90)})
			if err != nil {
				t.Fatal(err)
			}
			begins(r, &d)
			if id == "observed" {
				r.FirstToken(id, router.SignObserver)
			}
		}
		began := time.Now()
		time.Sleep(time.Second)
		r.Free("inferred")
		d, known := r.Decision("inferred")
		if after := d.FirstToken.Sub(began); !known || d.FirstTokenBy != router.SignRate || after <= 0 || after > 20*time.Millisecond {
			t.Errorf("first token after %v by %q, want some ms by rate", after, d.FirstTokenBy)
		}
	})
}

// begins passes the headers of a stream on, whose first token nobody reports if it is inferred.
func begins(r *router.Router, d *router.Decision) {
	r.Served(d.ID, router.Response{Address: d.Address, Asked: 1, Status: 200, TokenAwaited: true, TokenUnseen: d.Inferred})
}

// Of a worker that hangs, no first token is inferred if it sends no headers. If it sends headers, none is inferred after
// the next one that would be observed.
func TestAWorkerThatHangsIsNotInferred(t *testing.T) {
	for responds, least := range map[bool]int{false: 99, true: 80} {
		hang(t, responds, least)
	}
}

func hang(t *testing.T, responds bool, least int) {
	synctest.Test(t, func(t *testing.T) {
		r := newRouter(t, router.Config{InferFirstTokens: true, InferTokens: 100}, 1)
		const requests = 100
		for i := range requests { // 10 a second, of which the first one alone has a first token
			id := fmt.Sprint(i)
			d, err := r.BestWorker(t.Context(), router.Request{ID: id, Owned: true, Model: "m", MayInfer: true, Tokens: long(id, 50)})
			if err != nil {
				t.Fatal(err)
			}
			if responds {
				begins(r, &d)
			}
			if i == 0 {
				r.FirstToken(id, router.SignObserver)
			}
			time.Sleep(100 * time.Millisecond)
		}
		if w := r.Workers()[0]; w.PendTokens < 50*least {
			t.Errorf("with headers %v, %d of %d tokens are pending", responds, w.PendTokens, 50*requests)
		}
	})
}

// event is a first token or an end in a simulation.
type event struct {
	at    time.Time
	apply func()
}

type agenda []event

func (a agenda) Len() int           { return len(a) }
func (a agenda) Less(i, j int) bool { return a[i].at.Before(a[j].at) }
func (a agenda) Swap(i, j int)      { a[i], a[j] = a[j], a[i] }
func (a *agenda) Push(x any)        { *a = append(*a, x.(event)) }
func (a *agenda) Pop() any {
	last := (*a)[len(*a)-1]
	*a = (*a)[:len(*a)-1]
	return last
}

// With most first tokens inferred, the load that is booked is as near to the engines' own as with all of them observed,
// requests wait no longer, and the sample has the right mean time to the first token.
func TestInferredLoadIsAsGood(t *testing.T) {
	type result struct {
		off, wait, sampled float64 // tokens, ms, ms
		observed           int
	}
	const requests, workers, tokensPerMS = 6000, 4, 10
	simulate := func(inferTokens int) (got result) {
		synctest.Test(t, func(t *testing.T) {
			r := newRouter(t, router.Config{InferFirstTokens: true, InferTokens: inferTokens, Seed: 1}, workers)
			rng := rand.New(rand.NewPCG(5, 5))
			var due agenda
			var free [workers + 1]time.Time // when the worker has computed its prompts
			var pend [workers + 1]int
			var weight float64
			start := time.Now()
			next := start
			for i := range requests {
				next = next.Add(time.Duration(rng.ExpFloat64() * float64(20*time.Millisecond)))
				tokens := 16 + rng.IntN(300)
				if rng.IntN(10) == 0 {
					tokens = 1000 + rng.IntN(4000)
				}
				represents := 0
				if rng.IntN(20) == 0 {
					represents = 20
				}
				output := time.Duration(rng.IntN(300)) * 20 * time.Millisecond
				for len(due) > 0 && due[0].at.Before(next) {
					e := heap.Pop(&due).(event)
					time.Sleep(time.Until(e.at))
					e.apply()
				}
				time.Sleep(time.Until(next))
				id := fmt.Sprint(i)
				d, err := r.BestWorker(t.Context(), router.Request{
					ID: id, Owned: true, Model: "m", MayInfer: true, Represents: represents, Tokens: long(id+"x", tokens),
				})
				if err != nil {
					t.Fatal(err)
				}
				w := d.Worker.ID
				now := time.Now()
				if free[w].Before(now) {
					free[w] = now
				}
				// The engine needs the time of a step beside that of the tokens.
				free[w] = free[w].Add(time.Duration(tokens)*time.Millisecond/tokensPerMS + 5*time.Millisecond)
				pend[w] += tokens
				first := free[w]
				wait := first.Sub(now).Seconds() * 1000
				if got.wait += wait / requests; d.Represents > 0 {
					got.sampled += wait * float64(d.Represents)
					weight += float64(d.Represents)
				}
				if !d.Inferred {
					got.observed++
				}
				begins(r, &d)
				heap.Push(&due, event{first, func() {
					if pend[w] -= tokens; !d.Inferred {
						r.FirstToken(id, router.SignObserver)
					}
				}})
				heap.Push(&due, event{first.Add(output), func() { r.Free(id) }})
				if i%10 != 0 {
					continue
				}
				for _, s := range r.Workers() {
					got.off += math.Abs(float64(s.PendTokens-pend[s.Worker.ID])) / workers / (requests / 10)
				}
			}
			got.sampled /= weight
		})
		return got
	}
	all, some := simulate(0), simulate(512)
	t.Logf("all observed: %+v; some: %+v", all, some)
	if all.observed != requests || some.observed > requests/5 {
		t.Errorf("%d and %d of %d requests are observed", all.observed, some.observed, requests)
	}
	if some.off > all.off+20 || some.wait > all.wait*1.03 {
		t.Errorf("with some observed, the load of a worker is off by %.1f tokens, and requests wait %.1f ms; with all, %.1f tokens and %.1f ms",
			some.off, some.wait, all.off, all.wait)
	}
	if some.sampled < some.wait*.9 || some.sampled > some.wait*1.1 {
		t.Errorf("the mean time to the first token is %.1f ms by the sample, in fact %.1f ms", some.sampled, some.wait)
	}
}
