// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// ledger is what engines announced, by rank. It receives the events as kvroute does, and counts
// copies of blocks of full attention by the engines' own hashes. It knows nothing of tokens,
// prefixes and the index.
type ledger struct {
	mayStoreMore bool // the engines: Dynamo's mock engines sometimes store a block again
	keeps        bool // all batches, to find the causes of wrong predictions

	mu sync.Mutex
	// mu guards the fields below.
	ranks map[events.RankName]*account
	err   error
}

// account is the blocks of one rank.
type account struct {
	copies                   map[uint64]int
	stored, removed, cleared int          // stored and removed are blocks, cleared is how often
	expected                 int          // blocks that it must have stored
	sides                    map[int]bool // groups without full attention, whose blocks are not counted
	batches                  []engines.EngineBatch
}

func newLedger() *ledger { return &ledger{ranks: make(map[events.RankName]*account)} }

// with runs a function that reads or changes the account of a rank.
func (l *ledger) with(at events.RankName, do func(*account)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ranks[at] == nil {
		l.ranks[at] = &account{copies: make(map[uint64]int), sides: make(map[int]bool)}
	}
	do(l.ranks[at])
}

// expect adds blocks that a rank must store.
func (l *ledger) expect(at events.RankName, blocks int) {
	l.with(at, func(a *account) { a.expected += blocks })
}

// forget closes the account of a rank that has ended.
func (l *ledger) forget(at events.RankName) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.ranks, at)
}

// announced returns the blocks of all ranks. If a rank has not announced the blocks that it must
// have stored, or more of them, missing says so.
func (l *ledger) announced() (blocks []blockAt, missing string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	bench.NoError(l.err)
	for at, a := range l.ranks {
		if a.stored < a.expected || a.stored > a.expected && !l.mayStoreMore {
			missing += fmt.Sprintf("%v announced %d blocks, want %d; ", at, a.stored, a.expected)
		}
		for hash := range a.copies {
			blocks = append(blocks, blockAt{worker: at.WorkerID, rank: at.DPRank, external: hash})
		}
	}
	return blocks, missing
}

// totals adds up the accounts.
func (l *ledger) totals() (stored, removed int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.ranks {
		stored, removed = stored+a.stored, removed+a.removed
	}
	return stored, removed
}

func (l *ledger) add(at events.RankName, kind indexer.Kind, hashes []uint64) {
	l.with(at, func(a *account) {
		switch kind {
		case indexer.Stored:
			a.stored += len(hashes)
			for _, h := range hashes {
				a.copies[h]++
			}
		case indexer.Removed:
			a.removed += len(hashes)
			for _, h := range hashes {
				if a.copies[h]--; a.copies[h] <= 0 {
					delete(a.copies, h)
				}
			}
		case indexer.Cleared:
			a.cleared++
			clear(a.copies)
		case indexer.Shaped, indexer.SideStored, indexer.SideRemoved: // only full attention is counted
		}
	})
}

// addMessage adds the events of a message of Dynamo's event plane.
func (l *ledger) addMessage(envelope []byte) {
	m := bench.Must(events.DecodeMessage(envelope))
	if m.Bad > 0 {
		bench.NoError(fmt.Errorf("a message with %d bad events", m.Bad))
	}
	for _, ev := range m.Events {
		hashes := ev.Event.Externals
		for _, b := range ev.Event.Blocks {
			hashes = append(hashes, b.External)
		}
		l.add(events.RankName{WorkerID: ev.WorkerID, DPRank: ev.DPRank}, ev.Event.Kind, hashes)
	}
}

// addBatch adds the events of a batch of vLLM's.
func (l *ledger) addBatch(at events.RankName, body []byte) {
	b := bench.Must(engines.DecodeBatch(body))
	if b.Drops != (engines.Drops{}) {
		bench.NoError(fmt.Errorf("%v: left out %v", at, b.Drops))
	}
	if l.keeps {
		l.with(at, func(a *account) { a.batches = append(a.batches, b) })
	}
	kinds := map[engines.EngineKind]indexer.Kind{engines.EngineStored: indexer.Stored, engines.EngineRemoved: indexer.Removed, engines.EngineCleared: indexer.Cleared}
	for _, ev := range b.Events {
		kind, known := kinds[ev.Kind]
		if !known {
			bench.NoError(fmt.Errorf("%v: an event of kind %d of a vLLM", at, ev.Kind))
		}
		if kind == indexer.Cleared || !l.isSide(at, &ev) {
			l.add(at, kind, ev.Hashes)
		}
	}
}

// isSide reports whether an event is of a group without full attention. Removals do not name the kind of their group.
func (l *ledger) isSide(at events.RankName, ev *engines.EngineEvent) (side bool) {
	l.with(at, func(a *account) {
		if ev.Kind == engines.EngineStored && ev.Spec != "" && ev.Spec != "full_attention" {
			a.sides[ev.Group] = true
		}
		side = a.sides[ev.Group]
	})
	return side
}

// try receives something, and remembers an error.
func (l *ledger) try(receive func()) (ok bool) {
	err := bench.Try(receive)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = errors.Join(l.err, err)
	return err == nil
}

// subscribe connects to a socket with events.
func subscribe(ctx context.Context, at zmtp.Endpoint, topic string) *zmtp.Conn {
	conn := bench.Must(zmtp.Dial(ctx, at, zmtp.Sub))
	bench.NoError(conn.Subscribe(topic))
	return conn
}

// follow receives each message of a connection until stop is called or one is wrong.
func (l *ledger) follow(conn *zmtp.Conn, receive func(engines.Frames)) (stop func()) {
	var reader sync.WaitGroup
	reader.Go(func() {
		for {
			frames, err := conn.Read()
			if err != nil || !l.try(func() { receive(bench.Must(engines.SplitFrames(frames))) }) {
				return // it is stopped, or the check notices the error or missing blocks
			}
		}
	})
	return func() {
		_ = conn.Close() // Read then ends
		reader.Wait()
	}
}

// hear follows a rank of a vLLM, from the first batch that it sent. The engine repeats the
// earlier ones on request.
func (l *ledger) hear(ctx context.Context, at events.RankName, live, replay zmtp.Endpoint) (stop func()) {
	next := uint64(0)
	receive := func(f engines.Frames) {
		if f.Sequence > next {
			bench.NoError(fmt.Errorf("%v: batch %d follows batch %d", at, f.Sequence, int64(next)-1))
		}
		if f.Sequence == next { // else it came both ways
			next++
			l.addBatch(at, f.Body)
		}
	}
	later := subscribe(ctx, live, "")
	conn := bench.Must(zmtp.Dial(ctx, replay, zmtp.Dealer))
	defer func() { _ = conn.Close() }() // nothing more is wanted
	request := engines.ReplayFrames(0)
	bench.NoError(conn.Write(request[:]...))
	for {
		f := bench.Must(engines.SplitFrames(bench.Must(conn.Read())))
		if f.End {
			return l.follow(later, receive)
		}
		receive(f)
	}
}
