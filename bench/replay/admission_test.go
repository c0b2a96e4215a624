// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/slots"
)

// prompts returns the fields of a prompt that shares nothing with those of other numbers.
func prompts(number, tokens int) string {
	ids := make([]string, (tokens+511)/512)
	for i := range ids {
		ids[i] = strconv.Itoa(1000*number + i)
	}
	return fmt.Sprintf(`"input_length":%d,"output_length":2,"hash_ids":[%s]`, tokens, strings.Join(ids, ","))
}

// admitted plays a scenario and returns the requests in the order in which their routers decided.
func admitted(t *testing.T, c Scenario) (order []int32) {
	t.Helper()
	c.decided = func(req int32, d router.Decision) {
		if d.Worker.ID != 0 {
			order = append(order, req)
		}
	}
	play(t, c)
	return order
}

// Requests that wait for a long prompt are admitted in the order of the policy, as package router
// admits them: see TestSubmittedRequestsKeepTheOrder. Priorities are those of the trace.
func TestQueueAdmitsByPolicy(t *testing.T) {
	for _, c := range []struct {
		policy slots.QueuePolicy
		jump   string // of B
		want   []int32
	}{
		{slots.FCFS, "", []int32{0, 4, 1, 2, 3}},
		{slots.LCFS, "", []int32{0, 4, 3, 2, 1}},
		{slots.WSPT, "", []int32{0, 4, 3, 2, 1}},
		{slots.FCFS, `,"priority":5`, []int32{0, 4, 2, 1, 3}},
		{slots.WSPT, `,"priority":9`, []int32{0, 4, 2, 3, 1}},
	} {
		trace := lines(t, prompts(1, 120_000),
			`"timestamp":1000,`+prompts(2, 8000), `"timestamp":2000,`+prompts(3, 1000)+c.jump, `"timestamp":3000,`+prompts(4, 500),
			`"timestamp":4000,"strict_priority":1,`+prompts(5, 8000))
		got := admitted(t, Scenario{Trace: trace, Rule: rule(t, Default), Workers: 1, Speedup: 1, RouterQueueThreshold: new(.5), RouterQueuePolicy: string(c.policy), QueueWait: time.Minute})
		if !slices.Equal(got, c.want) {
			t.Errorf("%s %s: admitted %v, want %v", c.policy, c.jump, got, c.want)
		}
	}
}

// overload is more than four workers can serve.
func overload(t *testing.T) Scenario {
	return Scenario{Trace: small(t), Rule: rule(t, Default), Workers: 4, KVBlocks: 1000, Speedup: 3, Seed: 1, RouterQueueThreshold: new(.5), QueueWait: time.Hour}
}

// Requests with a priority wait less, and have their first token earlier, than the same requests
// without it.
func TestPrioritisedRequestsAreFaster(t *testing.T) {
	for _, policy := range []slots.QueuePolicy{slots.FCFS, slots.LCFS, slots.WSPT} {
		for _, strict := range []int{0, 1} {
			c := overload(t)
			c.RouterQueuePolicy, c.PriorityShare, c.StrictPriority, c.Priority = string(policy), .2, strict, float64(20*(1-strict))
			q := play(t, c).Queue
			if q.Waited < 100 || q.Prioritised.Requests < 90 || q.Prioritised.Requests > 150 || q.Prioritised.Requests+q.Others.Requests != len(c.Trace.Requests) {
				t.Errorf("%s: %+v", policy, q)
			}
			if p, o := q.Prioritised, q.Others; p.TTFT.Mean > .6*o.TTFT.Mean || p.Wait.Mean > .5*o.Wait.Mean || p.TTFT.Mean < p.Wait.Mean {
				t.Errorf("%s, strict %d: prioritised %+v, others %+v", policy, strict, p, o)
			}
		}
	}
}

// queues are scenarios in which requests wait.
func queues(t *testing.T) map[string]Scenario {
	all := map[string]Scenario{}
	for name, change := range map[string]func(c *Scenario){
		"alone":     func(*Scenario) {},
		"priority":  func(c *Scenario) { c.PriorityShare, c.StrictPriority = .3, 2 },
		"wspt":      func(c *Scenario) { c.RouterQueuePolicy = "wspt" },
		"refusals":  func(c *Scenario) { c.QueueWait = 3 * time.Second },
		"full":      func(c *Scenario) { c.RouterQueueLimit = 20 },
		"no events": func(c *Scenario) { c.Approximate = true },
		"late":      func(c *Scenario) { c.EventDelay = 2 * time.Second },
		"replicas":  func(c *Scenario) { c.Replicas, c.SyncDelay = 3, 50*time.Millisecond },
		"groups":    func(c *Scenario) { c.Groups = 2 },
		"split":     func(c *Scenario) { c.PrefillWorkers = 2 },
		"foreign":   func(c *Scenario) { c.ForeignShare = .2 },
		"oracle":    func(c *Scenario) { c.Rule = rule(t, "oracle") },
		"other":     func(c *Scenario) { c.Rule = rule(t, "lmetric") },
		"leave":     func(c *Scenario) { c.Changes = []Change{{4 * time.Second, 1, Leave}, {9 * time.Second, 1, Join}} },
		"restart":   func(c *Scenario) { c.Changes = []Change{{4 * time.Second, 1, Restart}, {6 * time.Second, 2, Restart}} },
		"no group":  func(c *Scenario) { c.Groups, c.Changes = 4, []Change{{4 * time.Second, 1, Leave}} },
	} {
		c := overload(t)
		change(&c)
		all[name] = c
	}
	return all
}

// Each request is served once or refused, and each slot is taken once and freed once between two
// routings. No router has a slot or a waiting request at the end. The same seed gives the same bytes.
func TestQueueLosesNothing(t *testing.T) {
	for name, c := range queues(t) {
		taken, served, takes := map[string]bool{}, map[int32]int{}, 0
		c.slotChanged = func(change router.Change) { // with replicas it is not called
			if leg := strings.HasSuffix(change.ID, "/prefill"); !leg && change.Kind == router.SlotTaken {
				if taken[change.ID] {
					t.Errorf("%s: %s takes a second slot", name, change.ID)
				}
				taken[change.ID] = true
				takes++
			} else if change.Kind == router.SlotFreed {
				delete(taken, change.ID)
			}
		}
		if c.Groups > 1 {
			c.slotChanged = nil // routers of both tiers would call it
		}
		c.decided = func(req int32, d router.Decision) {
			if d.Worker.ID != 0 && d.Group == "" {
				served[req]++
			}
		}
		s, err := newSim(context.Background(), c)
		if err != nil {
			t.Fatal(err)
		}
		r, err := s.play()
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		decided, all := 0, len(c.Trace.Requests)
		for req, n := range served {
			decided += n
			if s.states[req].refused && r.Retried == 0 {
				t.Errorf("%s: request %d has a worker and is refused", name, req)
			}
		}
		if r.Retried == 0 && decided+r.Queue.Refused+r.Foreign != all || len(served)+r.Queue.Refused+r.Foreign < all || decided > all+r.Retried {
			t.Errorf("%s: %d requests, %d decisions for %d, %d refused, %d foreign, %d retried", name, all, decided, len(served), r.Queue.Refused, r.Foreign, r.Retried)
		}
		if c.Groups <= 1 && c.Replicas <= 1 && takes != decided {
			t.Errorf("%s: %d decisions, %d slots taken", name, decided, takes)
		}
		if r.Queue.Waited < 50 || (r.Queue.Refused > 0) != (name == "refusals" || name == "full") || s.waiting != 0 || len(taken) != 0 {
			t.Errorf("%s: %d waited, %d refused; at the end %d wait, %d slots", name, r.Queue.Waited, r.Queue.Refused, s.waiting, len(taken))
		}
		for i := range s.states {
			if state := &s.states[i]; state.waits || time.Duration(state.waited) > c.QueueWait {
				t.Errorf("%s: request %d waits at the end: %v, waited %v", name, i, state.waits, time.Duration(state.waited))
			}
		}
		if c.Replicas <= 1 { // messages to other replicas are under way
			for _, replica := range s.routers {
				for _, w := range replica.router.Workers() {
					if w.ActiveRequests != 0 || w.PendTokens != 0 {
						t.Errorf("%s: load at the end: %+v", name, w)
					}
				}
			}
		}
		c.slotChanged, c.decided = nil, nil
		if again := play(t, c); encode(t, again) != encode(t, r) {
			t.Errorf("%s: two runs of one seed differ", name)
		}
	}
}

// A request that waited for more than 10 s counts its own cached blocks again, not those of a later
// request.
func TestWaitingRequestsKeepTheirPrompt(t *testing.T) {
	trace := lines(t, prompts(1, 8192), `"timestamp":10000,`+prompts(2, 200_000), `"timestamp":11000,`+prompts(1, 8192), `"timestamp":12000,`+prompts(3, 8192))
	cached := map[int32]int{}
	c := Scenario{Trace: trace, Rule: rule(t, Default), Workers: 1, RouterQueueThreshold: new(1.), QueueWait: time.Hour}
	c.decided = func(req int32, d router.Decision) { cached[req] = d.CachedTokens }
	if r := play(t, c); r.Queue.Wait.P99 < 15 || cached[2] != 8192 || cached[3] != 0 {
		t.Errorf("%+v, cached tokens %v; want 8192 of request 2", r.Queue.Wait, cached)
	}
}

// A refused request has no times, and its user goes on with the next one.
func TestRefusedRequests(t *testing.T) {
	c := overload(t)
	trace := *c.Trace
	trace.Users = make([]User, 40)
	for i := range trace.Requests {
		u := &trace.Users[i%len(trace.Users)]
		u.Requests = append(u.Requests, int32(i))
	}
	c.Trace, c.QueueWait, c.RouterQueueLimit, c.PriorityShare, c.Priority = &trace, 100*time.Millisecond, 5, .5, 1
	r := play(t, c)
	q := r.Queue
	if q.Refused < 50 || q.Refused != q.Prioritised.Refused+q.Others.Refused || r.Requests != len(trace.Requests) || q.Wait.P99 > .1 || r.Foreign != 0 {
		t.Errorf("%+v", q)
	}
	if r.LRUShare != 0 || r.TTFT.Mean < q.Wait.Mean || r.HitRate <= 0 || r.HitRate >= 1 {
		t.Errorf("%+v", r)
	}
}

// A queue that no request enters changes no byte but its own field.
func TestUnusedQueueChangesNothing(t *testing.T) {
	c := overload(t)
	c.RouterQueueThreshold = nil
	plain := play(t, c)
	c.RouterQueueThreshold = new(1e9)
	r := play(t, c)
	if r.Queue == nil || r.Queue.Waited != 0 || r.Queue.Prioritised != nil || strings.Contains(encode(t, plain), "queue") {
		t.Errorf("%+v", r.Queue)
	}
	if r.Queue = nil; encode(t, r) != encode(t, plain) {
		t.Errorf("with an unused queue\n%s\nwithout\n%s", encode(t, r), encode(t, plain))
	}
}

func TestTableOfAQueue(t *testing.T) {
	c := overload(t)
	c.PriorityShare, c.StrictPriority = .3, 1
	with := play(t, c)
	c.PriorityShare = 0
	var b strings.Builder
	if err := writeTable(&b, []*Result{with, play(t, c)}); err != nil {
		t.Fatal(err)
	}
	rows := strings.Split(b.String(), "\n")
	tail := func(row string) string { f := strings.Fields(row); return strings.Join(f[max(0, len(f)-10):], " ") }
	q := with.Queue
	want := fmt.Sprintf("%d 0 %.3f %.2f %.3f %.2f %.2f %.3f %.2f %.2f", q.Waited, q.Wait.Mean, q.Wait.P99,
		q.Prioritised.TTFT.Mean, q.Prioritised.TTFT.P99, q.Prioritised.E2E.Mean, q.Others.TTFT.Mean, q.Others.TTFT.P99, q.Others.E2E.Mean)
	if len(rows) != 4 || !strings.Contains(rows[0], "waited  refused  queue mean  p99 s  priority TTFT mean") || tail(rows[1]) != want || !strings.HasSuffix(tail(rows[2]), " - - - - - -") {
		t.Errorf("%s\nwant %s", b.String(), want)
	}
}

func TestTracesKeepPriorities(t *testing.T) {
	trace := lines(t, prompts(1, 500)+`,"priority":2.5`, `"timestamp":9,"strict_priority":3,`+prompts(2, 500))
	var b strings.Builder
	if err := trace.WriteMooncake(&b); err != nil {
		t.Fatal(err)
	}
	back, err := readMooncake("back", strings.NewReader(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	if a, z := back.Requests[0], back.Requests[1]; a.Priority != 2.5 || a.StrictPriority != 0 || z.Priority != 0 || z.StrictPriority != 3 || strings.Count(b.String(), "priority") != 2 {
		t.Errorf("%+v", back.Requests)
	}
	for text, want := range map[string]string{
		`"strict_priority":-1,`: "line 1: strict_priority is -1, want 0 to",
		`"priority":-1e10,`:     "line 1: priority is -1e+10, want -2147483647 to",
	} {
		if _, err := readMooncake("x", strings.NewReader("{"+text+prompts(1, 500)+"}")); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

func TestBadQueues(t *testing.T) {
	for want, change := range map[string]func(c *Scenario){
		`router-queue-threshold is`:                                            func(c *Scenario) { c.RouterQueueThreshold = new(-1.) },
		`router-queue-policy is "random", want fcfs, lcfs or wspt`:             func(c *Scenario) { c.RouterQueuePolicy = "random" },
		`router-queue-limit is "-1", want more than 0`:                         func(c *Scenario) { c.RouterQueueLimit = -1 },
		`queue-wait is "-1s", want more than 0s`:                               func(c *Scenario) { c.QueueWait = -time.Second },
		`priority-share is "2", want 0 to 1`:                                   func(c *Scenario) { c.PriorityShare = 2 },
		`strict-priority is "-1", want 0 to 2147483647`:                        func(c *Scenario) { c.StrictPriority = -1 },
		`priority is "-1", want 0 to 2147483647`:                               func(c *Scenario) { c.Priority = -1 },
		"strict-priority and priority are 0: set one of them above 0":          func(c *Scenario) { c.PriorityShare = .5 },
		"router-queue-threshold cannot be combined with cold-start: leave out": func(c *Scenario) { c.ColdStart = time.Second },
	} {
		c := overload(t)
		change(&c)
		if _, err := Run(context.Background(), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
