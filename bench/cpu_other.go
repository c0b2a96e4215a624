// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package bench

import (
	"errors"
	"time"
)

// CPUTime returns the time of the clock: only Linux's clocks of CPU time are read here.
func CPUTime() time.Duration { return time.Duration(time.Now().UnixNano()) }

// ThreadTime returns the time of the clock, as [CPUTime] does.
func ThreadTime() time.Duration { return CPUTime() }

// ProcessTime fails.
func ProcessTime(int) (time.Duration, error) {
	return 0, errors.New("bench: the CPU time of another process is read on Linux only")
}
