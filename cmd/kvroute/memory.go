// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"io/fs"
	"math"
	"os"
	"path"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strconv"
	"strings"
)

// memoryLimit returns how many bytes the process may use, and whether an operator has set that limit: Go's limit
// (GOMEMLIMIT), otherwise that of the process's cgroup under root, otherwise half of the machine's memory. A limit of
// the cgroup becomes Go's, less a tenth for memory that Go does not count. 0 means that no limit is known.
func memoryLimit(root fs.FS) (limit int64, set bool) {
	if n := debug.SetMemoryLimit(-1); n != math.MaxInt64 {
		return n, true
	}
	if n := cgroupLimit(root); n > 0 {
		debug.SetMemoryLimit(n - n/10)
		return n, true
	}
	n := machineMemory(root) / 2
	if n > 0 {
		debug.SetMemoryLimit(n)
	}
	return n, false
}

// machineMemory reads the size of the machine's memory, 0 if it is unknown.
func machineMemory(root fs.FS) int64 {
	text, _ := fs.ReadFile(root, "proc/meminfo") // unreadable: not Linux
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "MemTotal:" && f[2] == "kB" {
			if n, err := strconv.ParseInt(f[1], 10, 64); err == nil && n > 0 && n < 1<<50 {
				return n << 10
			}
		}
	}
	return 0
}

// cgroupLimit reads the smallest memory limit of the process's cgroup and of the mount of
// cgroups, version 2 or 1. In a container only the mount has the process's files.
func cgroupLimit(root fs.FS) (least int64) {
	groups, _ := fs.ReadFile(root, "proc/self/cgroup") // unreadable: no limit is found
	files := []string{"sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"}
	for line := range strings.Lines(string(groups)) {
		switch f := strings.SplitN(strings.TrimSpace(line), ":", 3); {
		case len(f) != 3:
		case f[1] == "":
			files = append(files, path.Join("sys/fs/cgroup", f[2], "memory.max"))
		case f[1] == "memory":
			files = append(files, path.Join("sys/fs/cgroup/memory", f[2], "memory.limit_in_bytes"))
		}
	}
	for _, file := range files {
		text, _ := fs.ReadFile(root, file)
		n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64) // "max" is no number
		// Version 1 writes a number near 2⁶³ for no limit.
		if err == nil && n > 0 && n < 1<<60 && (least == 0 || n < least) {
			least = n
		}
	}
	return least
}

// fitMemory sets the settings that depend on the memory limit: a quarter of it is for
// request bodies, another quarter for streams. Bodies get at most 512 MiB unless an operator has set the limit.
func (c *config) fitMemory(limit int64, set bool) {
	// streamBytes is the memory of a request in flight beside its body: two goroutines'
	// stacks and gRPC's buffers, measured with 2,000 streams.
	const streamBytes = 48 << 10
	const unset = 512 << 20
	held, streams := int64(unset), 40_000 // so many pass Envoy's circuit breaker
	if limit > 0 {
		held, streams = limit/4, int(min(40_000, max(1, limit/4/streamBytes)))
	}
	if !set {
		held = min(held, unset)
	}
	c.MaxHeldBytes, c.MaxStreams = cmp.Or(c.MaxHeldBytes, held), cmp.Or(c.MaxStreams, streams)
}

// mostGarbage is how many bytes of garbage a large heap may collect before Go collects it.
const mostGarbage = 128 << 20

// boundGarbage bounds the garbage of a large heap until ctx ends. By Go's default a heap grows to twice the size of what
// is in use. Most of kvroute's large heap is tables without pointers, which cost nothing to collect, so a collection is
// cheap. After each collection the heap may grow by most bytes, but by at least a quarter and at most its size. If an
// operator has set GOGC, that value applies.
func boundGarbage(ctx context.Context, most uint64) {
	type collected struct{ _ *collected } // with a pointer, since cleanups of small objects without one may not run
	runtime.AddCleanup(new(collected), func(most uint64) {
		if ctx.Err() != nil || os.Getenv("GOGC") != "" {
			return
		}
		now := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/gogc:percent"}}
		metrics.Read(now)
		percent := garbagePercent(now[0].Value.Uint64(), most)
		// A change stops the process for a moment, and small ones change little.
		if is := now[1].Value.Uint64(); percent*8 > is*9 || percent*9 < is*8 {
			debug.SetGCPercent(int(percent))
		}
		boundGarbage(ctx, most)
	}, most)
}

// garbagePercent is the value of GOGC with which a heap grows by most bytes.
func garbagePercent(live, most uint64) uint64 {
	return min(max(100*most/max(live, 1), 25), 100)
}
