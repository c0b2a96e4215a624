// SPDX-License-Identifier: Apache-2.0

package natstest

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// Holdings returns the content of an index, in a form that does not depend on the order of its
// events.
func Holdings(x *indexer.Index) []string {
	type end struct {
		depth int
		seq   uint64
	}
	ends := []end{{}}
	var lines []string
	for r, err := range x.Dump() {
		if err != nil {
			panic(err) // indexer.ErrOvertaken: too many changes came during the dump
		}
		at, depth, begin := ends[r.Parent].seq, ends[r.Parent].depth, ends[r.Parent].depth
		var seqs []uint64
		for _, l := range r.Local {
			if depth == 0 {
				at = l
			} else {
				at = indexer.NextSequenceHash(at, l)
			}
			depth++
			seqs = append(seqs, at)
		}
		ends = append(ends, end{depth, at})
		for _, h := range r.Holders {
			for i, e := range h.Externals {
				lines = append(lines, fmt.Sprintf("%d %d %d %016x %x", h.Worker, h.Tier, begin+h.Start+i, seqs[h.Start+i], e))
			}
		}
	}
	slices.Sort(lines)
	return lines
}

// Soon fails if do does not return while something else blocks.
func Soon(t testing.TB, what string, do func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); do() }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatalf("%s has to wait", what)
	}
}
