// SPDX-License-Identifier: Apache-2.0

package router

import (
	"runtime"
	"sync"
)

// quickMutex is a mutex for what takes less than a microsecond. Who finds it taken
// tries for some time before it is put to sleep: to be woken takes many times as
// long as the lock is held, and whoever is asleep makes the next one wait for its
// waking, so that two processors would get less done than one.
type quickMutex struct {
	mu sync.Mutex
}

const (
	// lockTries is how often the lock is tried before sleep: some 10 µs, the time
	// that a dozen holders take, and less than a waking.
	lockTries = 256
	// lockPause is how long is waited in between, in turns of an empty loop: others
	// should not have to share the lock's cache line all the time.
	lockPause = 64
)

// Lock takes the lock.
func (m *quickMutex) Lock() {
	if m.mu.TryLock() {
		return
	}
	if runtime.GOMAXPROCS(0) > 1 { // else whoever holds it cannot run meanwhile
		for range lockTries {
			for range lockPause {
			}
			if m.mu.TryLock() {
				return
			}
		}
	}
	m.mu.Lock()
}

// Unlock gives it back.
func (m *quickMutex) Unlock() { m.mu.Unlock() }
