// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/router"
)

// endpointFile keeps Envoy's pool up to date, so that it serves today's workers
// while no kvroute is there. Two replicas may keep one file: each writes all of it
// under a name of its own and renames that.
//
// A fleet without workers is never written, nor one before it is known: it may be what
// is known so far, or not any more, and the last workers known are a better guess. A file
// that somebody removed is written again, with those: the next Envoy does not start
// without it.
type endpointFile struct {
	path    string
	known   func() bool // whether the fleet is
	workers func() []router.WorkerState
	log     *slog.Logger

	written []netip.AddrPort
}

// endpointFileEvery is how often the fleet is compared with the file.
const endpointFileEvery = 500 * time.Millisecond

// run keeps the file until ctx ends. The first write must succeed, later ones are
// tried again.
func (f *endpointFile) run(ctx context.Context) error {
	if _, err := os.Stat(f.path); os.IsNotExist(err) {
		// Envoy does not start without it.
		if err := f.write(nil); err != nil {
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

// update writes the file if the fleet has changed, or the file is gone.
func (f *endpointFile) update() error {
	pool := poolOf(f.workers())
	if !f.known() || len(pool) == 0 {
		pool = f.written
	}
	if slices.Equal(pool, f.written) {
		if _, err := os.Stat(f.path); !os.IsNotExist(err) {
			return nil
		}
	}
	if err := f.write(pool); err != nil {
		return err
	}
	f.written = pool
	f.log.Debug("the endpoint file has changed", "endpoints", len(pool))
	return nil
}

func (f *endpointFile) write(pool []netip.AddrPort) error {
	h := fnv.New64a()
	fmt.Fprint(h, pool)
	out, err := os.CreateTemp(filepath.Dir(f.path), "."+filepath.Base(f.path)+".*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(out.Name()) }() // fails if it was renamed
	// Envoy may be another user.
	err = out.Chmod(0o644)
	if err == nil {
		_, err = out.Write(envoy.Endpoints(fmt.Sprintf("%016x", h.Sum64()), pool))
	}
	if closed := out.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return err
	}
	return os.Rename(out.Name(), f.path)
}

// poolOf returns the addresses of the workers that can take any request: of each model
// the healthy ones, or if there are none, those that may be, or all. A model's last
// workers stay, for a list of choices (see docs/envoy.md) only reaches who is in the pool.
func poolOf(workers []router.WorkerState) (pool []netip.AddrPort) {
	tier := func(w *router.WorkerState) int {
		healthy := w.Health == router.Healthy.String()
		switch {
		case healthy && !w.Draining && !w.Failing:
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
		if w := &workers[i]; serves(w) && tier(w) == best[w.Model] {
			pool = append(pool, w.Address)
		}
	}
	slices.SortFunc(pool, netip.AddrPort.Compare)
	return slices.Compact(pool)
}
