// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
)

// RunAll runs scenarios, as many at a time as there are cores, and returns their
// results in the order of the scenarios. After an error it runs no further ones.
func RunAll(ctx context.Context, all []Scenario) ([]*Result, error) {
	results, errs := make([]*Result, len(all)), make([]error, len(all))
	var next atomic.Int64
	var failed atomic.Bool
	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(all)) {
		wg.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(all) || failed.Load() {
					return
				}
				if results[i], errs[i] = Run(ctx, all[i]); errs[i] != nil {
					failed.Store(true)
				}
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return results, nil
}
