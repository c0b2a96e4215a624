// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"syscall"
	"time"
	"unsafe"
)

// CPUTime returns how long the cores have worked for this process. Other processes on
// the machine do not count.
func CPUTime() time.Duration {
	const process = 2 // CLOCK_PROCESS_CPUTIME_ID
	t, _ := clock(process)
	return t
}

// ThreadTime returns how long a core has worked for the calling thread.
func ThreadTime() time.Duration {
	const thread = 3 // CLOCK_THREAD_CPUTIME_ID
	t, _ := clock(thread)
	return t
}

// ProcessTime returns how long the cores have worked for another process.
func ProcessTime(pid int) (time.Duration, error) {
	const sched = 2 // the clock of what its threads have run, see clock_getcpuclockid(3)
	t, err := clock(uintptr(^pid<<3 | sched))
	if err != nil {
		return 0, fmt.Errorf("bench: CPU time of process %d: %w", pid, err)
	}
	return t, nil
}

func clock(id uintptr) (time.Duration, error) {
	var t syscall.Timespec
	if _, _, err := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, id, uintptr(unsafe.Pointer(&t)), 0); err != 0 {
		return 0, err
	}
	return time.Duration(t.Nano()), nil
}
