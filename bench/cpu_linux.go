// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"syscall"
	"time"
	"unsafe"
)

// threadTime returns how long a core has worked for this thread. What getrusage says of a
// thread comes in ticks of some ms.
func threadTime() time.Duration {
	const threadClock = 3 // CLOCK_THREAD_CPUTIME_ID
	var t syscall.Timespec
	if _, _, failed := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, threadClock, uintptr(unsafe.Pointer(&t)), 0); failed != 0 {
		return 0
	}
	return time.Duration(t.Nano())
}
