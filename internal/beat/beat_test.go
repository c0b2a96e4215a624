// SPDX-License-Identifier: Apache-2.0

package beat

import (
	"testing"
	"time"
)

// Two timers of one period end at the same moments, whenever they began, and once a period, also if they end early or late.
func TestTimersEndTogether(t *testing.T) {
	const period = time.Second
	begin := time.Unix(1_800_000_000, 0)
	for _, after := range []time.Duration{0, time.Nanosecond, 400 * time.Millisecond, 600 * time.Millisecond, period - time.Nanosecond} {
		now := begin.Add(after)
		first := waitAt(now, period)
		if first < period/2 || first > period+period/2 {
			t.Errorf("begun %v after a moment, the first wait is %v", after, first)
		}
		now = now.Add(first)
		if !now.Equal(now.Truncate(period)) {
			t.Errorf("begun %v after a moment, the timer ends at %v", after, now)
		}
		for _, late := range []time.Duration{-time.Millisecond, 0, 30 * time.Millisecond} {
			if wait := waitAt(now.Add(late), period); wait != period-late {
				t.Errorf("a timer that ended %v late waits %v, want until the next moment", late, wait)
			}
		}
	}
}

func TestWait(t *testing.T) {
	if wait := Wait(time.Hour); wait < 30*time.Minute || wait > 90*time.Minute {
		t.Errorf("wait for %v, want half a period to one and a half", wait)
	}
}
