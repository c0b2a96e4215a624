// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"fmt"
	"maps"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// CheckRoom returns an error that wraps [ErrBadWorker] if [Router.SetWorker] would refuse a worker because too many
// models have workers.
func (r *Router) CheckRoom(info *WorkerInfo) error {
	if err := info.Check(); err != nil {
		return err
	}
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	key := poolKey{info.Models[0], r.blockSizeLocked(info)}
	if r.pools[key] != nil || len(r.pools) < maxPools {
		return nil
	}
	for key, p := range r.pools {
		if r.isEmptyLocked(key, p) {
			return nil
		}
	}
	return errNoRoom(info, key)
}

func errNoRoom(info *WorkerInfo, key poolKey) error {
	return fmt.Errorf("router: %w: worker %d: model %q would be number %d of at most %d models with workers", ErrBadWorker, info.ID, bounded(key.model), maxPools+1, maxPools)
}

// isEmptyLocked says whether a pool may be forgotten: it has no workers, and no card of its own name.
func (r *Router) isEmptyLocked(key poolKey, p *pool) bool {
	return len(p.names) == 0 && r.cards[key.model] == nil
}

// modelKept is the time for which a model without workers is known: requests get "no worker", not "unknown
// model". The router then forgets its index, sessions, thresholds and metrics.
const modelKept = time.Hour

// forgetModels removes the pools that had no workers for [modelKept]. Models with a card of their own name
// stay. The caller holds no lock.
func (r *Router) forgetModels(now time.Time) {
	r.fleet.RLock()
	some := false
	for _, p := range r.pools {
		some = some || len(p.names) == 0
	}
	r.fleet.RUnlock()
	if some && r.forgetEmptyPools(now) && r.conf.Hooks.Forgot != nil {
		r.conf.Hooks.Forgot()
	}
}

// forgetEmptyPools reports whether models were forgotten.
func (r *Router) forgetEmptyPools(now time.Time) bool {
	r.fleet.Lock()
	defer r.fleet.Unlock()
	before := len(r.pools)
	maps.DeleteFunc(r.pools, func(key poolKey, p *pool) bool {
		if !r.isEmptyLocked(key, p) {
			return false
		}
		if p.empty.IsZero() {
			p.empty = now
		}
		return now.Sub(p.empty) >= modelKept
	})
	if len(r.pools) == before {
		return false
	}
	r.renameLocked()
	names := *r.names.Load()
	maps.DeleteFunc(r.busy, func(model string, _ *scorer.Thresholds) bool { return names[model].pools == nil })
	return true
}

// forgetOneLocked removes the pool that has had no workers for the longest time, to make room for another model.
// It reports whether there is one.
func (r *Router) forgetOneLocked() bool {
	var oldest *pool
	for key, p := range r.pools {
		if !r.isEmptyLocked(key, p) {
			continue
		}
		since := func(p *pool) time.Time { return cmp.Or(p.empty, r.conf.Now()) } // Tick has not seen it yet
		if oldest == nil || since(p).Before(since(oldest)) {
			oldest = p
		}
	}
	if oldest != nil {
		delete(r.pools, oldest.poolKey)
	}
	return oldest != nil
}
