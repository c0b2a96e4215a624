// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
	"sync"
)

// workerNames replaces ids of workers in log lines by names: packages log the attribute
// "worker" as an id. Its methods may be called by any number of goroutines.
type workerNames struct{ byID sync.Map }

// set sets the name of a worker. An empty name removes it.
func (n *workerNames) set(id uint64, name string) {
	if name == "" {
		n.byID.Delete(id)
		return
	}
	n.byID.Store(id, name)
}

// replace is for [slog.HandlerOptions]. It also removes the rank 0, the only one of most
// workers.
func (n *workerNames) replace(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() != slog.KindUint64 {
		return a
	}
	switch a.Key {
	case "worker":
		if name, known := n.byID.Load(a.Value.Uint64()); known {
			return slog.Any(a.Key, name)
		}
	case "rank", "dp_rank":
		if a.Value.Uint64() == 0 {
			return slog.Attr{}
		}
	}
	return a
}
