// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// listener receives the events of one rank, as kvroute does, and counts copies of blocks by
// the engine's own hashes. It knows nothing of tokens, prefixes and the index.
type listener struct {
	cancel context.CancelFunc
	done   chan struct{}

	mu sync.Mutex
	// mu guards the fields below.
	copies  map[uint64]int
	stored  int // blocks, ever
	removed int
	cleared int // how often
	next    uint64
	err     error
}

// listen subscribes to a rank and requests the batches that were sent before. The
// endpoints are those of that rank.
func listen(ctx context.Context, live, replay zmtp.Endpoint) *listener {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	l := &listener{cancel: cancel, done: make(chan struct{}), copies: make(map[uint64]int)}
	sub := bench.Must(zmtp.Dial(ctx, live, zmtp.Sub))
	context.AfterFunc(ctx, func() { _ = sub.Close() }) // Read then ends
	bench.NoError(sub.Subscribe(""))
	l.replay(ctx, replay)
	go func() {
		defer close(l.done)
		for {
			frames, err := sub.Read()
			if err == nil {
				err = l.take(frames)
			}
			if err != nil {
				l.mu.Lock()
				l.err = err
				l.mu.Unlock()
				return
			}
		}
	}()
	return l
}

func (l *listener) stop() {
	l.cancel()
	<-l.done
}

// replay requests all earlier batches.
func (l *listener) replay(ctx context.Context, at zmtp.Endpoint) {
	c := bench.Must(zmtp.Dial(ctx, at, zmtp.Dealer))
	defer func() { _ = c.Close() }() // nothing more is wanted
	request := engines.ReplayFrames(0)
	bench.NoError(c.Write(request[:]...))
	for {
		frames := bench.Must(c.Read())
		if bench.Must(engines.SplitFrames(frames)).End {
			return
		}
		bench.NoError(l.take(frames))
	}
}

func (l *listener) take(frames [][]byte) error {
	f, err := engines.SplitFrames(frames)
	if err != nil {
		return err
	}
	b, err := engines.DecodeBatch(f.Body)
	if err != nil {
		return err
	}
	if b.Drops != (engines.Drops{}) {
		return fmt.Errorf("batch %d: left out %v", f.Sequence, b.Drops)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if f.Sequence < l.next {
		return nil // came both ways
	}
	if f.Sequence != l.next {
		return fmt.Errorf("batch %d follows batch %d", f.Sequence, int64(l.next)-1)
	}
	l.next++
	for _, ev := range b.Events {
		switch ev.Kind {
		case engines.EngineStored:
			l.stored += len(ev.Hashes)
			for _, h := range ev.Hashes {
				l.copies[h]++
			}
		case engines.EngineRemoved:
			l.removed += len(ev.Hashes)
			for _, h := range ev.Hashes {
				if l.copies[h]--; l.copies[h] <= 0 {
					delete(l.copies, h)
				}
			}
		case engines.EngineCleared:
			l.cleared++
			clear(l.copies)
		case engines.EngineMoved, engines.EngineStarted:
			return fmt.Errorf("batch %d: an event of kind %d of a vLLM", f.Sequence, ev.Kind)
		}
	}
	return nil
}

// heard is the state of a listener.
type heard struct {
	hashes                            []uint64 // sorted
	stored, removed, cleared, batches int
}

func (l *listener) heard() heard {
	l.mu.Lock()
	defer l.mu.Unlock()
	bench.NoError(l.err)
	return heard{slices.Sorted(maps.Keys(l.copies)), l.stored, l.removed, l.cleared, int(l.next)}
}
