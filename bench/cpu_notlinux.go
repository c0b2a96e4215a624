// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package bench

import "time"

// threadTime returns the time: here nobody tells a thread what it has used.
func threadTime() time.Duration { return time.Duration(time.Now().UnixNano()) }
