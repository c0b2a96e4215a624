// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"runtime"
	"sync/atomic"
)

// gate is a lock for many readers and one writer at a time, whose holders are
// done within microseconds: those who wait spin, since to sleep and be woken
// takes longer than what they wait for.
//
// A reader waits for at most one writer. It counts itself in the same step that
// tells it whether a writer is there; the next writer waits for all counted.
//
// Writers exclude each other by other means before they come here.
type gate struct {
	// state is how often a writer has left (upper half), whether one is here or
	// waits for readers to leave (bit 31), and the readers counted.
	state atomic.Uint64
	// leaving is the number of readers that the writer waits for.
	leaving atomic.Int64
	// clock numbers the matches; it lies here since whoever has just counted
	// himself has this cache line.
	clock atomic.Uint64
	_     [40]byte // nobody else on this cache line
}

const (
	gateWriter  = 1 << 31
	gateReaders = gateWriter - 1
	gateEpoch   = 1 << 32
	// gateSpins is how often to look before letting others run: about 100 ns.
	gateSpins = 100
)

func (g *gate) rlock() {
	s := g.state.Add(1)
	if s&gateWriter == 0 {
		return
	}
	for spins := 0; g.state.Load()/gateEpoch == s/gateEpoch; spins++ {
		if spins > gateSpins {
			runtime.Gosched()
		}
	}
}

func (g *gate) runlock() {
	if g.state.Add(^uint64(0))&gateWriter != 0 {
		g.leaving.Add(-1)
	}
}

func (g *gate) lock() {
	readers := int64(g.state.Add(gateWriter) & gateReaders)
	if readers == 0 || g.leaving.Add(readers) == 0 {
		return
	}
	for spins := 0; g.leaving.Load() != 0; spins++ {
		if spins > gateSpins {
			runtime.Gosched()
		}
	}
}

func (g *gate) unlock() { g.state.Add(gateEpoch - gateWriter) }
