// SPDX-License-Identifier: Apache-2.0

package router

import (
	"sync/atomic"
	"time"
)

// clock is time.Now at half its price, of which a decision and its end pay six: it
// reads the clock that only goes forward, and adds the time of day of its last
// winding.
type clock struct {
	wound atomic.Pointer[time.Time]
}

func newClock() *clock {
	c := new(clock)
	c.wind()
	return c
}

// wind takes the time of day anew, which somebody may have set.
func (c *clock) wind() { c.wound.Store(new(time.Now())) }

func (c *clock) now() time.Time {
	t := c.wound.Load()
	return t.Add(time.Since(*t))
}
