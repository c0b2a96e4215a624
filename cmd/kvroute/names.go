// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
	"sync"
)

// workerNames makes log lines name workers: every package logs the attribute "worker" as
// an id, and people know workers by their names. Its methods may be called by any number
// of goroutines.
type workerNames struct{ byID sync.Map }

// set notes the name of a worker. An empty name forgets it.
func (n *workerNames) set(id uint64, name string) {
	if name == "" {
		n.byID.Delete(id)
		return
	}
	n.byID.Store(id, name)
}

// replace is for [slog.HandlerOptions]. It also leaves out the rank 0, which most workers
// have alone.
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
