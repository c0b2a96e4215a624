// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
)

// hungLegs plays an hour of requests, one each pause, to a model whose prefill workers hang from the beginning, and
// returns how many requests waited for a leg in the first minute and after it, and how many of the later ones at once.
// Then the workers serve again: recovered is when the first leg was served after that, 0 if none was.
func hungLegs(t *testing.T, pause time.Duration, prefills int, clients uint64) (first, later, atOnce int, recovered time.Duration) {
	t.Helper()
	const leg, hour = 30 * time.Second, time.Hour
	c := newClock()
	begin := c.read()
	roles := []router.Role{router.Decode, router.Prefill, router.Prefill}
	r := splitOf(t, router.Config{AvoidFailing: 2 * time.Second, Now: c.read, Split: router.SplitConfig{LegTimeout: leg}}, roles[:1+prefills]...)
	type event struct {
		at time.Duration
		do func()
	}
	var events []event
	under, n := 0, 0
	for now, next := time.Duration(0), time.Duration(0); now < hour+20*time.Minute; now = c.read().Sub(begin) {
		for i := 0; i < len(events); i++ {
			if events[i].at <= now {
				do := events[i].do
				events = append(events[:i], events[i+1:]...)
				do()
				i--
			}
		}
		if now >= next {
			next += pause
			n++
			d := decided(t, r, fmt.Sprint(n), "abcd", func(q *router.Request) { q.Client, q.Prefix = uint64(n)%clients+1, 1 })
			if d.Prefill == nil {
				r.Free(d.ID)
				c.pass(time.Second)
				continue
			}
			if now >= hour { // it serves again
				r.Served(d.Prefill.ID, router.Response{Address: d.Prefill.Address, Asked: 1, Status: 200})
				if recovered == 0 {
					recovered = now - hour
				}
				r.Free(d.Prefill.ID)
				r.Free(d.ID)
				c.pass(time.Second)
				continue
			}
			if under++; now < time.Minute {
				first++
			} else {
				later++
				atOnce = max(atOnce, under)
			}
			late := func(d *router.Decision) {
				r.Served(d.Prefill.ID, router.Response{Address: d.Prefill.Address, Asked: 1, Late: true})
			}
			end := now + leg
			if prefills > 1 {
				events = append(events, event{now + leg/2, func() { late(&d) }})
				events = append(events, event{end, func() {
					r.Served(d.Prefill.ID, router.Response{Address: d.Prefill.Second.Address, Asked: 1, Late: true})
				}})
			} else {
				events = append(events, event{end, func() { late(&d) }})
			}
			events = append(events, event{end, func() { _ = r.PrefillFailed(d.ID); r.Free(d.ID); under-- }})
		}
		c.pass(time.Second)
	}
	return first, later, atOnce, recovered
}

// A worker whose legs hang is tried by one request at a time, after back-offs that get longer, at any rate of
// requests and also if they are of one client.
func TestHungPrefillWorkersCostLittle(t *testing.T) {
	for _, prefills := range []int{1, 2} {
		for _, clients := range []uint64{1, 5} {
			for _, pause := range []time.Duration{time.Second, 5 * time.Second, 20 * time.Second, 2 * time.Minute, 5 * time.Minute} {
				first, later, atOnce, recovered := hungLegs(t, pause, prefills, clients)
				// The first leg fails after 30 s.
				if first > int(30*time.Second/pause)+2 || later > 11*prefills || atOnce > 2 || recovered == 0 || recovered > 10*time.Minute {
					t.Errorf("%d prefill workers, %d clients, a request each %v: %d wait in the first minute, %d in the rest of an hour, %d at once; a leg is served %v after the mend",
						prefills, clients, pause, first, later, atOnce, recovered)
				}
			}
		}
	}
}
