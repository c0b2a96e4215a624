// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"math"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"testing/fstest"
	"time"
)

// Without settings, bodies and streams fit the memory limit of the process, whether Go or the cgroup
// has the limit.
func TestBodiesAndStreamsFitTheMemoryLimit(t *testing.T) {
	const v1, v2 = "sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory.max"
	for name, c := range map[string]struct {
		files   map[string]string
		env     int64 // GOMEMLIMIT
		set     config
		held    int64
		streams int
		goLimit int64
	}{
		"no limit":             {held: 512 << 20, streams: 40_000, goLimit: math.MaxInt64},
		"a machine":            {files: map[string]string{"proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\n"}, held: 512 << 20, streams: 40_000, goLimit: 8 << 30},
		"a small machine":      {files: map[string]string{"proc/meminfo": "MemTotal:        1048576 kB\n", v2: "max\n"}, held: 128 << 20, streams: 2730, goLimit: 512 << 20},
		"a container":          {files: map[string]string{v2: "1073741824\n"}, held: 256 << 20, streams: 5461, goLimit: 1<<30 - 1<<30/10},
		"a container, v1":      {files: map[string]string{v1: "1073741824\n"}, held: 256 << 20, streams: 5461, goLimit: 1<<30 - 1<<30/10},
		"containers unlimited": {files: map[string]string{v1: "9223372036854771712\n", v2: "max\n"}, held: 512 << 20, streams: 40_000, goLimit: math.MaxInt64},
		"a unit of a system": {
			files: map[string]string{"proc/self/cgroup": "3:cpu:/x\n0::/system.slice/kvroute.service\n", "sys/fs/cgroup/system.slice/kvroute.service/memory.max": "2147483648\n"},
			held:  512 << 20, streams: 10922, goLimit: 2<<30 - 2<<30/10,
		},
		"GOMEMLIMIT":   {files: map[string]string{v2: "1073741824\n"}, env: 4 << 30, held: 1 << 30, streams: 21845, goLimit: 4 << 30},
		"much of it":   {env: 64 << 30, held: 16 << 30, streams: 40_000, goLimit: 64 << 30},
		"the settings": {files: map[string]string{v2: "1073741824\n"}, set: config{MaxHeldBytes: 5, MaxStreams: 6}, held: 5, streams: 6, goLimit: 1<<30 - 1<<30/10},
	} {
		t.Run(name, func(t *testing.T) {
			before := debug.SetMemoryLimit(math.MaxInt64)
			defer debug.SetMemoryLimit(before)
			if c.env > 0 {
				debug.SetMemoryLimit(c.env)
			}
			root := fstest.MapFS{}
			for file, text := range c.files {
				root[file] = &fstest.MapFile{Data: []byte(text)}
			}
			got := c.set
			got.fitMemory(memoryLimit(root))
			if got.MaxHeldBytes != c.held || got.MaxStreams != c.streams {
				t.Errorf("%d bytes of bodies and %d streams, want %d and %d", got.MaxHeldBytes, got.MaxStreams, c.held, c.streams)
			}
			if n := debug.SetMemoryLimit(-1); n != c.goLimit {
				t.Errorf("Go's limit is %d, want %d", n, c.goLimit)
			}
		})
	}
}

// The garbage collector leaves a large heap less garbage than by default, a small one as much.
func TestGarbageOfALargeHeapIsBounded(t *testing.T) {
	for _, c := range []struct{ live, most, percent uint64 }{
		{0, 128, 100}, {50, 128, 100}, {128, 128, 100}, {256, 128, 50}, {512, 128, 25}, {5000, 128, 25},
	} {
		if got := garbagePercent(c.live, c.most); got != c.percent {
			t.Errorf("%d bytes in use and %d of garbage: %d %%, want %d", c.live, c.most, got, c.percent)
		}
	}

	t.Setenv("GOGC", "")
	before := debug.SetGCPercent(100)
	defer debug.SetGCPercent(before)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	boundGarbage(ctx, 4<<20)
	large := make([]byte, 16<<20)
	now := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	eventually(t, "less garbage", func() bool {
		runtime.GC()
		metrics.Read(now)
		return now[0].Value.Uint64() == 25
	})
	// GOGC counts, if it is set.
	t.Setenv("GOGC", "100")
	debug.SetGCPercent(100)
	boundGarbage(ctx, 4<<20)
	for range 20 {
		runtime.GC()
		time.Sleep(time.Millisecond)
	}
	if metrics.Read(now); now[0].Value.Uint64() != 100 {
		t.Errorf("the target is %d %% although GOGC is set", now[0].Value.Uint64())
	}
	runtime.KeepAlive(large)
}
