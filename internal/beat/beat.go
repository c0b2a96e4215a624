// SPDX-License-Identifier: Apache-2.0

// Package beat lets the periodic work of a process happen at common moments. An idle process wakes for
// each of its timers, so it wakes less often if several of them end together.
package beat

import "time"

// Wait returns the time until the next common moment of a period: a multiple of the period by the clock. A timer that
// is set to Wait whenever it ends, ends once a period. The first wait is half a period to one and a half. period must
// be positive.
func Wait(period time.Duration) time.Duration {
	return waitAt(time.Now(), period)
}

func waitAt(now time.Time, period time.Duration) time.Duration {
	wait := period - time.Duration(now.UnixNano())%period
	if wait < period/2 {
		wait += period // a timer may end a little early, by the clock
	}
	return wait
}
