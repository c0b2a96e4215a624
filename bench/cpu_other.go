// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package bench

import "time"

// CPUTime returns the time of the clock, where that of the cores is not known.
func CPUTime() time.Duration { return time.Duration(time.Now().UnixNano()) }
