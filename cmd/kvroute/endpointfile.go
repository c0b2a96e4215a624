// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/router"
)

// endpointFile writes the addresses of the workers to a file that Envoy reads as its pool,
// so that Envoy serves them while no kvroute runs. Several replicas may write one file:
// each writes a temporary file of its own and renames it.
//
// Without workers, or before the registry has answered, the file keeps the last known workers. A
// file that was removed is written again: Envoy does not start without it.
type endpointFile struct {
	path    string
	id      uint64      // of this replica
	known   func() bool // reports whether the registry has answered
	workers func() []router.WorkerState
	// chosen says that Envoy sends also the requests that kvroute decides only to workers of the file
	// (--second-choice list): the file then has all workers.
	chosen bool
	log    *slog.Logger

	pool, others []netip.AddrPort // as written last
}

// endpointFileEvery is the time between two updates.
const endpointFileEvery = 500 * time.Millisecond

// run updates the file until ctx ends. The first write must succeed; later ones are
// retried.
func (f *endpointFile) run(ctx context.Context) error {
	if _, err := os.Stat(f.path); os.IsNotExist(err) {
		if err := f.write(nil, nil); err != nil {
			return fmt.Errorf("endpoint-file: %w", err)
		}
	}
	failed := false
	update := func() {
		err := f.update()
		switch {
		case err != nil && !failed:
			f.log.Error("the endpoint file is not up to date", "err", err)
		case err == nil && failed:
			f.log.Info("the endpoint file is up to date again")
		}
		failed = err != nil
	}
	update()
	return every(ctx, endpointFileEvery, update)
}

// update writes the file if the workers have changed, or the file was removed.
func (f *endpointFile) update() error {
	pool, others := poolOf(f.workers())
	if !f.chosen {
		others = nil
	}
	if !f.known() || len(pool)+len(others) == 0 {
		pool, others = f.pool, f.others
	}
	if slices.Equal(pool, f.pool) && slices.Equal(others, f.others) {
		if _, err := os.Stat(f.path); !os.IsNotExist(err) {
			return nil
		}
	}
	if err := f.write(pool, others); err != nil {
		return err
	}
	f.pool, f.others = pool, others
	return nil
}

func (f *endpointFile) write(pool, others []netip.AddrPort) error {
	h := fnv.New64a()
	fmt.Fprint(h, pool, others)
	temporary := fmt.Sprintf("%s.%016x", f.path, f.id)
	defer func() { _ = os.Remove(temporary) }() // fails if it was renamed
	const mode = 0o644                          // Envoy may run as another user
	if err := os.WriteFile(temporary, envoy.Endpoints(fmt.Sprintf("%016x", h.Sum64()), pool, others), mode); err != nil {
		return err
	}
	if err := os.Chmod(temporary, mode); err != nil { // whatever the umask
		return err
	}
	return os.Rename(temporary, f.path)
}

// poolOf returns the addresses of the workers that can take any request: of each model the healthy workers that are
// not avoided; without any, the degraded ones; without any, all. A worker that a request tries again is not avoided
// here. A model never has an empty pool. others are the remaining workers: kvroute may choose each of them, for a
// request that no other worker may take, or to try whether it serves. Workers that answer requests with their own
// Host header only are among others: a request that kvroute did not route has the client's.
func poolOf(workers []router.WorkerState) (pool, others []netip.AddrPort) {
	tier := func(w *router.WorkerState) int {
		healthy := w.Health == router.Healthy.String()
		switch {
		case w.OwnHost:
			return 3
		case healthy && !w.Draining && (!w.Failing || w.Tried):
			return 0
		case healthy || w.Health == router.Degraded.String():
			return 1
		}
		return 2
	}
	serves := func(w *router.WorkerState) bool { return w.Role != router.Prefill && w.Address.IsValid() }
	best := map[string]int{}
	for i := range workers {
		w := &workers[i]
		if t, ok := best[w.Model]; serves(w) && (!ok || tier(w) < t) {
			best[w.Model] = tier(w)
		}
	}
	for i := range workers {
		switch w := &workers[i]; {
		case !serves(w):
		case !w.OwnHost && tier(w) == best[w.Model]:
			pool = append(pool, w.Address)
		default:
			others = append(others, w.Address)
		}
	}
	slices.SortFunc(pool, netip.AddrPort.Compare)
	pool = slices.Compact(pool)
	others = slices.DeleteFunc(others, func(a netip.AddrPort) bool {
		_, found := slices.BinarySearchFunc(pool, a, netip.AddrPort.Compare)
		return found
	})
	slices.SortFunc(others, netip.AddrPort.Compare)
	return pool, slices.Compact(others)
}
