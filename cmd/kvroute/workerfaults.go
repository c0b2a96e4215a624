// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
	"slices"
	"sync"

	"github.com/kvroute/kvroute/router"
)

// workerFaults passes the faults of workers to the router, and logs each one when it begins and when it
// ends. A fault whose text changes goes on. Its methods may be called by any number of goroutines.
type workerFaults struct {
	pass func(id uint64, source string, faults []router.Fault)
	log  *slog.Logger

	mu sync.Mutex
	// mu guards the field below, and orders the calls of pass.
	known map[uint64]map[string][]router.Fault // of the workers that the router knows, by source
}

func newWorkerFaults(pass func(uint64, string, []router.Fault), log *slog.Logger) *workerFaults {
	return &workerFaults{pass: pass, log: log, known: make(map[uint64]map[string][]router.Fault)}
}

// add adds a worker. It reports whether the worker is new. Only added workers have faults.
func (f *workerFaults) add(id uint64) (isNew bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if isNew = f.known[id] == nil; isNew {
		f.known[id] = make(map[string][]router.Fault)
	}
	return isNew
}

// forget removes a worker with its faults.
func (f *workerFaults) forget(id uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.known, id)
}

// set replaces the faults that a source has found on a worker.
func (f *workerFaults) set(id uint64, source string, faults []router.Fault) {
	f.mu.Lock()
	of := f.known[id]
	var before []router.Fault
	if of != nil {
		before = of[source]
		of[source] = faults
		f.pass(id, source, faults)
	}
	f.mu.Unlock()
	if of != nil {
		f.report(id, before, faults)
	}
}

// with returns the workers that have faults of a source.
func (f *workerFaults) with(source string) (ids []uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, of := range f.known {
		if len(of[source]) > 0 {
			ids = append(ids, id)
		}
	}
	return ids
}

// report logs the faults of a worker that began or ended. The registry has logged the beginning of a silence.
func (f *workerFaults) report(id uint64, before, faults []router.Fault) {
	for _, fault := range without(faults, before) {
		if fault.What != silentFault {
			f.log.Warn("a worker has a fault", "worker", id, "fault", fault.What, "text", fault.Text)
		}
	}
	for _, fault := range without(before, faults) {
		f.log.Info("a worker's fault has ended", "worker", id, "fault", fault.What)
	}
}

// without returns the first fault of each name that the other list does not have.
func without(faults, others []router.Fault) (left []router.Fault) {
	for _, fault := range faults {
		same := func(o router.Fault) bool { return o.What == fault.What }
		if !slices.ContainsFunc(others, same) && !slices.ContainsFunc(left, same) {
			left = append(left, fault)
		}
	}
	return left
}
