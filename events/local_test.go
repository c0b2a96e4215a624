// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/engines/publish"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/saved"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
)

// A malformed query gets an error as its answer; queries of other kinds get no answer.
func TestOtherQueries(t *testing.T) {
	t.Parallel()
	nc := bus(t)
	p := startProcess(t, nc, publish.Config{Scope: wire.Scope{Namespace: "dynamo", Component: "backend"}, WorkerID: 4944555206676074229, LocalIndexer: true}, 1)
	p.Publish(0, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1 << 63, Local: 2}}})
	native := wire.Scope{Namespace: "dynamo", Component: "backend"}.Own("query", wire.WorkerKey(4944555206676074229), "0")
	query := func(subject, data string) (*nats.Msg, error) {
		return nc.Request(subject, []byte(data), 300*time.Millisecond)
	}
	for _, c := range []struct{ subject, query, want string }{
		{native, "nonsense", "error 0 last 0"},
		{native, string(events.AppendQuery(nil, events.Query{WorkerID: 7})), "error 0 last 0"},
		{native, string(events.AppendQuery(nil, events.Query{WorkerID: 4944555206676074229})), "dump 1 last 1"},
	} {
		m, err := query(c.subject, c.query)
		if err != nil {
			t.Errorf("%s: %v", c.query, err)
			continue
		}
		a, err := events.DecodeAnswer(m.Data)
		if got := describe(&a); err != nil || got != c.want {
			t.Errorf("%s: %s, %v; want %s", c.query, got, err, c.want)
		}
		if publisher := m.Header.Get("Kvr-Publisher"); publisher == "" {
			t.Errorf("%s: publisher %q", c.query, publisher)
		}
	}
	if m, err := query(native, string(events.AppendQuery(nil, events.Query{WorkerID: 4944555206676074229, Kind: "other"}))); !errors.Is(err, nats.ErrTimeout) {
		t.Errorf("another kind of question is answered: %v, %v", m, err)
	}
}

// Saved state is loaded unchanged. A file with any changed byte, a truncated file and a file of
// another scope are refused.
func TestState(t *testing.T) {
	t.Parallel()
	nc := bus(t)
	scope := wire.Scope{Namespace: "s"}
	b := newBed(t, nc, events.SubscriberConfig{Scope: scope})
	running(t, b.sub.Run)
	var ps []*liveWorker
	for id := uint64(1); id <= 3; id++ {
		p := startProcess(t, nc, publish.Config{Scope: scope, WorkerID: id, LocalIndexer: true}, id)
		p.change(int(id) * 40)
		b.sub.SetWorker(id, source(1))
		ps = append(ps, p)
	}
	empty := startProcess(t, nc, publish.Config{Scope: scope, WorkerID: 4, LocalIndexer: true}, 4)
	empty.Publish(0, indexer.Event{Kind: indexer.Cleared})
	b.sub.SetWorker(4, source(1))
	b.sub.SetWorker(5, source(1)) // no process answers for worker 5
	b.equal(append(ps, empty)...)
	eventually(t, func() bool { steady, _ := b.sub.Ranks(); return steady == 4 })

	held := b.holdings(6)
	save := func(b *bed, w io.Writer) error { return b.sub.Save(t.Context(), b.holdings(6), writer(w, b.scope)) }
	load := func(b *bed, r io.Reader) (int, error) { return b.load(r, 6) }
	var file bytes.Buffer
	if err := save(b, &file); err != nil {
		t.Fatal(err)
	}

	// A rank that is about to be read is saved as suspect, so that it is read again.
	var without bytes.Buffer
	b.sub.Doubt(1, 0)
	if err := save(b, &without); err != nil {
		t.Fatal(err)
	}
	doubted := newBed(t, nc, events.SubscriberConfig{Scope: scope})
	if n, err := load(doubted, &without); n != 4 || err != nil {
		t.Errorf("%d ranks are back, %v; want those of 4 workers", n, err)
	}
	if _, others := doubted.sub.Ranks(); others != 1 {
		t.Errorf("%d ranks are in doubt, want 1", others)
	}

	later := newBed(t, nc, events.SubscriberConfig{Scope: scope})
	if n, err := load(later, bytes.NewReader(file.Bytes())); n != 4 || err != nil {
		t.Fatalf("%d ranks are back, %v; want those of 4 workers", n, err)
	}
	ps[0].change(5)
	running(t, later.sub.Run)
	for id := uint64(1); id <= 4; id++ {
		later.sub.SetWorker(id, source(1))
	}
	later.equal(append(ps, empty)...)
	eventually(t, func() bool { steady, _ := later.sub.Ranks(); return steady == 4 })
	if c := later.counts(); c["ask_dump"] != 0 || c["ask_range"] < 3 || c["restored"] != 4 { // an event that follows at once replaces a range
		t.Errorf("asked %v, want ranges only", c)
	}

	fresh := newBed(t, nc, events.SubscriberConfig{Scope: scope})
	refused := func(what string, data []byte) {
		t.Helper()
		n, err := load(fresh, bytes.NewReader(data))
		if steady, others := fresh.sub.Ranks(); !errors.Is(err, events.ErrSnapshot) || n+steady+others+fresh.index.Blocks() != 0 {
			t.Errorf("%s: %d ranks, %v", what, n, err)
		}
	}
	for i := range file.Len() {
		damaged := bytes.Clone(file.Bytes())
		damaged[i] ^= 0x40
		if i < 200 || i%3 == 0 {
			refused(fmt.Sprint("with byte ", i, " changed"), damaged)
		}
		if i%7 == 0 {
			refused(fmt.Sprint("cut at ", i), file.Bytes()[:i])
		}
	}
	refused("with more behind it", append(bytes.Clone(file.Bytes()), 0))
	if n, err := load(newBed(t, nc, events.SubscriberConfig{}), bytes.NewReader(file.Bytes())); !errors.Is(err, events.ErrSnapshot) {
		t.Errorf("of another scope: %d ranks, %v", n, err)
	}
	broken := errors.New("broken")
	if _, err := load(fresh, io.MultiReader(bytes.NewReader(file.Bytes()[:50]), failing{broken})); !errors.Is(err, broken) {
		t.Errorf("a reader's error becomes %v", err)
	}
	if err := save(b, failing{broken}); !errors.Is(err, broken) {
		t.Errorf("a writer's error becomes %v", err)
	}
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := b.sub.Save(short, events.Holdings{Dump: func(*events.Snapshot, func(uint64) bool) (func(), bool) { return nil, false }}, writer(io.Discard, scope)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a dump that is never possible becomes %v", err)
	}
	overtaken := held
	overtaken.Dump = func(s *events.Snapshot, mine func(uint64) bool) (func(), bool) {
		done, ok := held.Dump(s, mine)
		s.Failed = func() error { return broken }
		return done, ok
	}
	if err := b.sub.Save(t.Context(), overtaken, writer(io.Discard, scope)); !errors.Is(err, broken) {
		t.Errorf("that the dump was overtaken becomes %v", err)
	}
	if _, err := load(fresh, strings.NewReader("KVREVTS2 and what followed then")); !errors.Is(err, events.ErrSnapshot) || !strings.Contains(err.Error(), "KVREVTS2") {
		t.Errorf("a file of an older form: %v", err)
	}
	// Workers that have not registered again by then are saved again.
	var again bytes.Buffer
	waiting := newBed(t, nc, events.SubscriberConfig{Scope: scope})
	if _, err := load(waiting, bytes.NewReader(file.Bytes())); err != nil {
		t.Fatal(err)
	}
	if err := save(waiting, &again); err != nil {
		t.Fatal(err)
	}
	last := newBed(t, nc, events.SubscriberConfig{Scope: scope})
	if n, err := load(last, &again); n != 4 || err != nil {
		t.Fatalf("%d ranks are back, %v; want those of 4 workers", n, err)
	}
	running(t, last.sub.Run)
	for id := uint64(1); id <= 4; id++ {
		last.sub.SetWorker(id, source(1))
	}
	last.equal(append(ps, empty)...)
	if c := last.counts(); c["ask_dump"] != 0 || c["restored"] != 4 {
		t.Errorf("asked %v, want ranges only", c)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error)  { return 0, f.err }
func (f failing) Write([]byte) (int, error) { return 0, f.err }

func TestChooseFeed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		transport      string
		local, durable bool
		feed           events.Feed
		queries        bool
	}{
		{"", false, false, events.FeedCore, false},
		{"", true, false, events.FeedCore, true},
		{"", false, true, events.FeedDurable, false},
		{"", true, true, events.FeedCore, true},
		{"nats", true, true, events.FeedCore, true},
		{"nats", false, true, events.FeedDurable, false},
		{"jetstream", false, true, events.FeedDurable, false},
		{"jetstream", true, true, events.FeedDurable, true},
		{"jetstream", true, false, events.FeedCore, true},
		{"jetstream", false, false, events.FeedCore, false},
		{"zmq", false, true, events.FeedZMQ, false},
		{"zmq", true, true, events.FeedZMQ, false},
		{"http_poll", false, true, events.FeedPoll, false},
		{"none", true, true, events.FeedNone, false},
	} {
		if feed, queries := events.ChooseFeed(c.transport, c.local, c.durable); feed != c.feed || queries != c.queries {
			t.Errorf("%+v: feed %d, queries %v", c, feed, queries)
		}
	}
}

// A fleet with all kinds of feeds: events of a worker are taken from its own feed, copies from
// other feeds are ignored, and each reader is notified when a worker needs its feed.
func TestAMixedFleet(t *testing.T) {
	t.Parallel()
	nc := bus(t)
	b := newBed(t, nc, events.SubscriberConfig{})
	running(t, b.sub.Run)
	wanted := make(chan struct{})
	go func() { defer close(wanted); b.sub.AwaitWanted(t.Context(), events.FeedDurable) }()
	say := func(kind events.Feed, worker, id uint64) {
		b.sub.Take(t.Context(), kind, events.AppendEnvelope(nil, events.Envelope{
			PublisherID: 9, Topic: events.Topic,
			Payload: events.AppendEvents(nil, []events.RouterEvent{stored(worker, id)}),
		}), nil)
	}
	blocks := func(want ...int) {
		t.Helper()
		got := make([]int, len(want))
		for i := range got {
			got[i] = b.index.WorkerBlocks(i + 1)
		}
		if !slices.Equal(got, want) {
			t.Errorf("the workers hold %v blocks, want %v", got, want)
		}
	}
	p := startProcess(t, nc, publish.Config{WorkerID: 1, LocalIndexer: true}, 1)
	p.Publish(0, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1, Local: 1}}})
	b.unknown[2] = true
	say(events.FeedDurable, 2, 1) // not registered yet: events wait, separately for each feed
	say(events.FeedCore, 2, 2)
	blocks(0, 0)
	delete(b.unknown, 2)
	b.sub.SetWorker(1, source(1))
	b.sub.SetWorker(2, events.Source{Feed: events.FeedDurable, DPSize: 1})
	b.sub.SetWorker(3, events.Source{Feed: events.FeedZMQ, DPSize: 1})
	b.sub.SetWorker(4, events.Source{Feed: events.FeedNone, DPSize: 1})
	natstest.Soon(t, "the stream's reader", func() { <-wanted })
	eventually(t, func() bool { return b.index.WorkerBlocks(1) == 1 })
	blocks(1, 1, 0, 0)
	for _, kind := range []events.Feed{events.FeedCore, events.FeedDurable, events.FeedZMQ, events.FeedPoll} {
		for worker := uint64(2); worker <= 4; worker++ {
			say(kind, worker, 2)
		}
	}
	blocks(1, 2, 1, 0)

	// Worker 3 changes to the stream, which has its earlier events.
	b.sub.SetWorker(3, events.Source{Feed: events.FeedDurable, DPSize: 1})
	say(events.FeedZMQ, 3, 3)
	say(events.FeedDurable, 3, 2)
	say(events.FeedDurable, 3, 3)
	say(events.FeedDurable, 3, 4)
	blocks(1, 2, 3, 0)
	// Worker 4 publishes its first events, worker 2 is gone.
	b.sub.SetWorker(4, events.Source{Feed: events.FeedZMQ, DPSize: 1})
	say(events.FeedZMQ, 4, 1)
	blocks(1, 2, 3, 1)
	b.sub.Forget(2)
	b.sub.Forget(3)
	if b.sub.Wants(events.FeedDurable) || !b.sub.Wants(events.FeedZMQ) {
		t.Error("the feeds of the workers are not known")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	natstest.Soon(t, "a reader that ends", func() { b.sub.AwaitWanted(ctx, events.FeedDurable) })
}

// An event that waits for its parent is saved, even by a process in which its worker has not
// registered again: the cursor is past the event, so no worker sends it again.
func TestWhatWaitsForItsParentIsSaved(t *testing.T) {
	t.Parallel()
	nc := bus(t)
	p := startProcess(t, nc, publish.Config{WorkerID: 1, LocalIndexer: true}, 1)
	p.change(20)
	b := newBed(t, nc, events.SubscriberConfig{})
	running(t, b.sub.Run)
	b.sub.SetWorker(1, source(1))
	b.equal(p)
	chain := func(parent uint64, blocks ...uint64) indexer.Event {
		ev := indexer.Event{Kind: indexer.Stored, HasParent: parent > 0, Parent: parent << 32}
		for _, n := range blocks {
			ev.Blocks = append(ev.Blocks, indexer.Block{External: n << 32, Local: n})
		}
		return ev
	}
	first, second, third := chain(0, 1, 2), chain(2, 3, 4), chain(4, 5)
	goes := indexer.Event{Kind: indexer.Removed, Externals: []uint64{3 << 32}}
	for _, ev := range []indexer.Event{third, second, goes} {
		p.Publish(0, ev)
	}
	eventually(t, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.parked.Events()[1]) == 3
	})

	var file bytes.Buffer
	save := func(b *bed) {
		t.Helper()
		file.Reset()
		if err := b.sub.Save(t.Context(), b.holdings(2), writer(&file, b.scope)); err != nil {
			t.Fatal(err)
		}
	}
	load := func() *bed {
		t.Helper()
		later := newBed(t, nc, events.SubscriberConfig{})
		if n, err := later.load(&file, 2); n != 1 || err != nil {
			t.Fatalf("%d ranks are back, %v; want 1", n, err)
		}
		return later
	}
	save(b)
	save(load()) // saved by a process in which the worker did not register again
	later := load()
	running(t, later.sub.Run)
	later.sub.SetWorker(1, source(1))
	p.Publish(0, first)
	for _, ev := range []indexer.Event{first, second, third, goes} {
		p.truth.Apply(0, ev)
	}
	later.equal(p)
	if c := later.counts(); c["ask_dump"] != 0 {
		t.Errorf("asked %v, want no dump", c)
	}
}

// The blocks of side groups, and their copies, are saved.
func TestHybridRanksAreSaved(t *testing.T) {
	t.Parallel()
	nc := bus(t)
	p := startProcess(t, nc, publish.Config{WorkerID: 1, LocalIndexer: true}, 1)
	b := newBed(t, nc, events.SubscriberConfig{})
	running(t, b.sub.Run)
	b.sub.SetWorker(1, source(1))
	shape := &indexer.Shape{Block: 16, Full: 32, Sides: []indexer.SideGroup{{Group: 1, Needs: indexer.NeedsState, Block: 16}, {Group: 2, Needs: indexer.NeedsWindow, Block: 8, Tokens: 20}}}
	for _, ev := range []indexer.Event{
		{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1, Local: 1}, {External: 2, Local: 2}}},
		{Kind: indexer.SideStored, Group: 1, Externals: []uint64{2, 2}, Shape: shape},
		{Kind: indexer.SideStored, Group: 2, Externals: []uint64{11, 1, 12, 2}, Shape: shape},
	} {
		p.Publish(0, ev)
	}
	eventually(t, func() bool { return b.index.SideBlocks(1) == 6 })
	var file bytes.Buffer
	if err := b.sub.Save(t.Context(), b.holdings(2), writer(&file, b.scope)); err != nil {
		t.Fatal(err)
	}
	later := newBed(t, nc, events.SubscriberConfig{})
	if n, err := later.load(&file, 2); n != 1 || err != nil {
		t.Fatalf("%d ranks are back, %v; want 1", n, err)
	}
	for copies := 2; copies >= 0; copies-- { // of the state
		for _, x := range []*indexer.Index{b.index, later.index} {
			m := indexer.Matches{Device: make([]int32, 2), Tokens: 33}
			if x.FindMatches(&m, []uint64{1, 2}); m.Device[1] != int32(min(copies, 1)*2) {
				t.Errorf("%d blocks can be used with %d copies of the state, of the saved index: %v", m.Device[1], copies, x == later.index)
			}
			x.Apply(1, indexer.Event{Kind: indexer.SideRemoved, Group: 1, Externals: []uint64{2}})
		}
	}
}

// writer returns a function that writes a snapshot of a scope.
func writer(w io.Writer, scope wire.Scope) func(*events.Snapshot) error {
	return func(s *events.Snapshot) error {
		_, err := saved.Write(w, scope, s)
		return err
	}
}

// load reads a file into a bed with workers below n.
func (b *bed) load(r io.Reader, n int) (ranks int, err error) {
	s, whole, err := saved.Read(r, b.scope)
	if err != nil {
		return 0, err
	}
	return b.sub.Load(s, whole, b.holdings(n))
}

// holdings returns the blocks in a bed's index, of workers with numbers below n. A number in the
// index is a worker's id.
func (b *bed) holdings(n int) events.Holdings {
	dump := func(s *events.Snapshot, mine func(uint64) bool) (done func(), ok bool) {
		b.mu.Lock()
		defer b.mu.Unlock()
		s.Meta.Pools = []events.SnapshotPool{{Model: "m", BlockSize: 16}}
		waiting := b.parked.Events()
		for id := range uint64(n) {
			s.Ranks = append(s.Ranks, events.RankName{WorkerID: id})
			if !mine(id) {
				continue
			}
			s.Workers = append(s.Workers, events.SnapshotWorker{ID: id})
			for _, ev := range waiting[int(id)] {
				s.Parked = append(s.Parked, events.RouterEvent{WorkerID: id, Event: ev})
			}
		}
		runs, stop := b.index.DumpNow()
		var failed error
		s.Failed = func() error { return failed }
		s.Runs = func(yield func(int, indexer.Run) bool) {
			for r, err := range runs {
				if failed = err; err != nil || !yield(0, r) {
					return
				}
			}
		}
		return stop, true
	}
	restore := func(s *events.Snapshot, mine func(uint64) bool, whole func() error) error {
		x, _, err := indexer.Restore(indexer.Config{}, func(yield func(indexer.Run, error) bool) {
			for _, run := range s.Runs {
				for i := range run.Holders {
					run.Holders[i].Worker = int(s.Ranks[run.Holders[i].Worker].WorkerID)
				}
				if !yield(run, nil) {
					return
				}
			}
		})
		if err := errors.Join(whole(), err); err != nil {
			return err
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		b.index, b.parked = x, indexer.NewParked(x)
		for _, ev := range s.Parked {
			if mine(ev.WorkerID) {
				b.parked.Apply(time.Now(), rankNumber(ev.WorkerID, ev.DPRank), ev.Event)
			}
		}
		return nil
	}
	return events.Holdings{Dump: dump, Restore: restore}
}
