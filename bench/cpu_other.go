// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package bench

import "time"

// cpuTime returns the time of the clock, where that of the cores is not known.
func cpuTime() time.Duration { return time.Duration(time.Now().UnixNano()) }
