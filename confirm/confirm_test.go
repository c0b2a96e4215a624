// SPDX-License-Identifier: Apache-2.0

package confirm_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

const blockSize = 4

// class is the class of a request in these tests; others are classes beside it.
const class, otherClass = chat.Class(32), chat.Class(33)

// fleet is a table with simulated workers on a virtual clock. A worker stores the blocks of the tokens that
// the engine makes, which may be other ones than kvroute's.
type fleet struct {
	t       *testing.T
	table   confirm.Table
	model   *confirm.Model
	index   *indexer.Index
	now     time.Time
	number  uint64
	workers []*simWorker
	changes []confirm.Change
	tokens  bool // events have token ids
	size    int  // of blocks
	// seed is that of kvroute's hashes, engineSeed that of the events.
	seed, engineSeed uint64
	onChain          func() // when the index is asked for a chain; nil for nothing
	steps            int    // of all judgements
}

type simWorker struct {
	confirm.Worker

	parents map[uint64]uint64 // of the blocks that it has, by sequence hash; 0 = none
	order   []uint64          // the blocks, the least recently stored first
	room    int               // blocks; 0 = no limit
	mute    bool              // its events are lost
	unsure  bool              // its rank is not ok
}

func newFleet(t *testing.T, workers int) *fleet {
	t.Helper()
	f := &fleet{t: t, model: confirm.NewModel("m"), index: indexer.New(indexer.Config{}), now: time.Unix(1000, 0), tokens: true, size: blockSize}
	f.seed = indexer.Seed("", "")
	f.engineSeed = f.seed
	for i := range workers {
		f.workers = append(f.workers, &simWorker{Worker: confirm.Worker{ID: uint64(i)}, parents: map[uint64]uint64{}})
	}
	return f
}

func (f *fleet) apply(w *simWorker, ev indexer.Event) {
	if w.mute {
		return
	}
	switch ev.Kind {
	case indexer.Shaped, indexer.SideStored, indexer.SideRemoved: // of hybrid models
	case indexer.Stored:
		f.table.Stored(f.now, w.Worker, &ev)
	case indexer.Cleared:
		f.table.Interrupt(w.Worker)
	case indexer.Removed:
	}
	f.index.Apply(int(w.ID), ev)
}

// compute has a worker compute a prompt: it stores the blocks that it does not have, in events of a few blocks, and
// removes old ones.
func (f *fleet) compute(w *simWorker, ids []uint32) {
	local := indexer.AppendLocalHashes(nil, ids, f.size, f.engineSeed)
	chain := indexer.AppendSequenceHashes(nil, local)
	for i := 0; i < len(chain); {
		if _, has := w.parents[chain[i]]; has {
			i++
			continue
		}
		to := min(i+min(f.size, 3), len(chain)) // an engine evicts the ends of chains first, so it has none of these
		ev := indexer.Event{Kind: indexer.Stored}
		if i > 0 {
			ev.HasParent, ev.Parent = true, chain[i-1]
		}
		for k := i; k < to; k++ {
			w.parents[chain[k]] = 0
			if k > 0 {
				w.parents[chain[k]] = chain[k-1]
			}
			w.order = append(w.order, chain[k])
			ev.Blocks = append(ev.Blocks, indexer.Block{External: chain[k], Local: local[k]})
		}
		if f.apply(w, ev); f.tokens && !w.mute {
			f.table.StoredTokens(ids[i*f.size : to*f.size])
		}
		i = to
	}
	for w.room > 0 && len(w.order) > w.room {
		f.evict(w, 0)
	}
}

// evict removes the block at a place of the order, or a block behind it that is the end of a chain.
func (f *fleet) evict(w *simWorker, at int) {
	block := w.order[at]
	for more := true; more; {
		more = false
		for child, parent := range w.parents {
			if parent == block {
				block, more = child, true
				break
			}
		}
	}
	at = slices.Index(w.order, block)
	w.order = slices.Delete(w.order, at, at+1)
	delete(w.parents, block)
	f.apply(w, indexer.Event{Kind: indexer.Removed, Externals: []uint64{block}})
}

func (f *fleet) clear(w *simWorker) {
	w.parents, w.order, w.unsure = map[uint64]uint64{}, nil, false
	f.apply(w, indexer.Event{Kind: indexer.Cleared})
}

// heldBy returns the leading blocks of a worker.
func (f *fleet) heldBy(w confirm.Worker, local []uint64) int {
	device := make([]int32, len(f.workers))
	f.index.Match(device, local)
	return int(device[w.ID])
}

// expect books a request with kvroute's ids.
func (f *fleet) expect(w *simWorker, c chat.Class, ids []uint32) (number uint64) {
	f.number++
	local := indexer.AppendLocalHashes(nil, ids, f.size, f.seed)
	local = local[:confirm.Blocks(len(ids), f.size)]
	f.table.Expect(f.now, f.model, &confirm.Request{
		Number: f.number, Worker: w.Worker, Class: c, BlockSize: f.size, Local: local, Had: f.heldBy(w.Worker, local), IDs: ids, Seed: f.seed,
	})
	return f.number
}

// pass lets time pass, with a judgement each second.
func (f *fleet) pass(d time.Duration) {
	for end := f.now.Add(d); f.now.Before(end); {
		f.now = f.now.Add(time.Second)
		changes, steps := f.table.JudgeSteps(f.now, confirm.Cache{
			Held: func(w confirm.Worker, _ *confirm.Model, local []uint64) (int, bool) {
				return f.heldBy(w, local), !f.workers[w.ID].unsure
			},
			AppendChain: func(dst []uint64, w confirm.Worker, _ *confirm.Model, external uint64) []uint64 {
				if f.onChain != nil {
					f.onChain()
				}
				return f.index.AppendChain(dst, int(w.ID), external)
			},
		})
		f.changes, f.steps = append(f.changes, changes...), f.steps+steps
	}
}

// request serves a request: kvroute makes ours, the engine theirs.
func (f *fleet) request(w *simWorker, c chat.Class, ours, theirs []uint32) {
	n := f.expect(w, c, ours)
	f.compute(w, theirs)
	f.table.FirstToken(n, f.now)
	f.table.End(n, f.now)
}

// seen returns how many requests of a class had an outcome.
func (f *fleet) seen(c chat.Class, o confirm.Outcome) int {
	for _, s := range f.table.States(f.model) {
		if s.Class == c.String() {
			return int(s.Requests[o.String()])
		}
	}
	return 0
}

// prompt returns n tokens that begin with a common prefix of some length, and go on randomly.
func prompt(rng *rand.Rand, n, common int) (ids []uint32) {
	for i := range n {
		if i < common {
			ids = append(ids, uint32(i))
		} else {
			ids = append(ids, 1000+rng.Uint32N(1000))
		}
	}
	return ids
}

// broken is what an engine makes of kvroute's ids if one conversion differs: from a position on.
func broken(ids []uint32, at int) []uint32 {
	return slices.Insert(slices.Clone(ids), at, 7)
}

// A class whose prompts differ is found within ten requests, wherever they differ, with the token. Other classes
// keep their verdict. When the engine agrees again, so does the verdict.
func TestDifferentClassIsFound(t *testing.T) {
	for _, at := range []int{0, 1, 15, 16, 22, 41} {
		rng := rand.New(rand.NewPCG(1, uint64(at)))
		f := newFleet(t, 2)
		requests := 0
		for len(f.changes) == 0 {
			if requests++; requests > 10 {
				t.Fatalf("position %d: not found by %d requests", at, requests)
			}
			w := f.workers[requests%2]
			ids := prompt(rng, 60, 22)
			f.request(w, class, ids, broken(ids, at))
			plain := prompt(rng, 70, 22)
			f.request(w, otherClass, plain[:50], plain[:50])
			f.request(w, otherClass, plain, plain)
			f.pass(4 * time.Second)
		}
		// The ids of the requests before the first contradiction are not known.
		ids := prompt(rng, 60, 22)
		f.request(f.workers[0], class, ids, broken(ids, at))
		f.pass(4 * time.Second)
		last := f.changes[len(f.changes)-1]
		if first := f.changes[0]; first.Kind != confirm.ClassUnconfirmed || first.Class != class || first.Block != at/blockSize || last.Class != class {
			t.Fatalf("position %d: changes %+v", at, f.changes)
		}
		for _, s := range f.table.States(f.model) {
			if s.Unconfirmed != (s.Class == class.String()) || s.Unconfirmed && (s.Position != at || s.Difference.Theirs == nil) {
				t.Errorf("position %d: %+v", at, s)
			}
		}
		f.changes = nil
		for i := range 5 {
			ids := prompt(rng, 60, 22)
			f.request(f.workers[i%2], class, ids, ids)
			f.pass(4 * time.Second)
		}
		if len(f.changes) != 1 || f.changes[0].Kind != confirm.ClassConfirmed || f.changes[0].Class != class {
			t.Errorf("position %d: after five equal ones: %+v", at, f.changes)
		}
	}
}

// The token of a class that was never confirmed is known with the verdict, though all requests came before the first
// judgement.
func TestTokenIsKnownAtOnce(t *testing.T) {
	f := newFleet(t, 1)
	rng := rand.New(rand.NewPCG(1, 14))
	for range 4 {
		ids := prompt(rng, 60, 22)
		f.request(f.workers[0], class, ids, broken(ids, 18))
	}
	f.pass(15 * time.Second)
	if len(f.changes) != 1 || f.changes[0].Position != 18 {
		t.Errorf("changes %+v", f.changes)
	}
}

// Events without token ids name the block and no token.
func TestHashesAlone(t *testing.T) {
	f := newFleet(t, 1)
	f.tokens = false
	rng := rand.New(rand.NewPCG(1, 2))
	for range 6 {
		ids := prompt(rng, 60, 10)
		f.request(f.workers[0], class, ids, broken(ids, 30))
		f.pass(4 * time.Second)
	}
	if len(f.changes) != 1 || f.changes[0].Kind != confirm.ClassUnconfirmed || f.changes[0].Block != 7 || f.changes[0].Position != -1 {
		t.Errorf("changes %+v", f.changes)
	}
}

// A worker that claims other tokens than it served is named, in whatever order the requests come, and the class
// is confirmed by the others.
func TestHostileWorker(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 3))
		f := newFleet(t, 4)
		for range 60 {
			w := f.workers[rng.IntN(len(f.workers))]
			ids := prompt(rng, 60, 10)
			theirs := ids
			if w.ID == 2 {
				theirs = prompt(rng, 60, 3)
			}
			f.request(w, class, ids, theirs)
			f.pass(4 * time.Second)
		}
		s := f.table.States(f.model)
		if len(s) != 1 || s[0].Unconfirmed || len(s[0].Workers) != 4 {
			t.Fatalf("seed %d: %+v", seed, s)
		}
		for _, w := range s[0].Workers {
			if w.Named != (w.ID == 2) || (w.Unconfirmed > 0) != (w.ID == 2) {
				t.Errorf("seed %d: worker %+v", seed, w)
			}
		}
		// It is no longer named when it serves what it claims.
		for range 8 {
			ids := prompt(rng, 60, 10)
			f.request(f.workers[2], class, ids, ids)
			f.pass(4 * time.Second)
		}
		if last := f.changes[len(f.changes)-1]; last.Kind != confirm.WorkerCleared || last.Worker.ID != 2 {
			t.Errorf("seed %d: last change %+v", seed, last)
		}
	}
}

// What is not judged, and why. Each request would be contradicted otherwise: the worker stores another block.
func TestNotJudged(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 4))
	for _, c := range []struct {
		name    string
		before  func(f *fleet, w *simWorker, ids []uint32)
		after   func(f *fleet, w *simWorker, number uint64, ids []uint32)
		outcome confirm.Outcome
	}{
		{"cancelled", nil, func(f *fleet, _ *simWorker, n uint64, _ []uint32) { f.table.Drop(n) }, confirm.Cancelled},
		{"lost events", nil, func(f *fleet, w *simWorker, _ uint64, _ []uint32) { f.table.Interrupt(w.Worker) }, confirm.Lost},
		{"a rank that is not ok", nil, func(_ *fleet, w *simWorker, _ uint64, _ []uint32) { w.unsure = true }, confirm.Lost},
		{"all interrupted", nil, func(f *fleet, _ *simWorker, _ uint64, _ []uint32) { f.table.InterruptAll() }, confirm.Lost},
		{"evicted after it was stored", nil, func(f *fleet, w *simWorker, _ uint64, ids []uint32) {
			f.compute(w, ids)
			for len(w.order) > 0 {
				f.evict(w, 0)
			}
		}, confirm.Evicted},
		{"evicted after it was found", func(f *fleet, w *simWorker, ids []uint32) { f.compute(w, ids) }, func(f *fleet, w *simWorker, _ uint64, _ []uint32) {
			for len(w.order) > 0 {
				f.evict(w, 0)
			}
		}, confirm.Evicted},
		{"a full log", nil, func(f *fleet, w *simWorker, _ uint64, _ []uint32) {
			ev := indexer.Event{Kind: indexer.Stored, Blocks: make([]indexer.Block, 1000)}
			for range 300 { // 2 MB
				f.table.Stored(f.now, w.Worker, &ev)
			}
		}, confirm.Full},
	} {
		f := newFleet(t, 1)
		w, ids := f.workers[0], prompt(rng, 40, 8)
		if c.before != nil {
			c.before(f, w, ids)
		}
		n := f.expect(w, class, ids)
		f.compute(w, broken(ids, 20))
		f.table.FirstToken(n, f.now)
		c.after(f, w, n, ids)
		f.pass(15 * time.Second)
		if got := f.seen(class, c.outcome); got != 1 || f.seen(class, confirm.Unmatched) > 0 {
			t.Errorf("%s: %+v, want 1 %s", c.name, f.table.States(f.model), c.outcome)
		}
	}
	// A worker that stores nothing, and one whose other block is that of another request, contradict nothing.
	f := newFleet(t, 1)
	w := f.workers[0]
	n := f.expect(w, class, prompt(rng, 40, 8))
	ids := prompt(rng, 40, 8)
	other := f.expect(w, otherClass, ids)
	f.compute(w, slices.Concat(ids, prompt(rng, 30, 0))) // with what it generates
	f.table.FirstToken(n, f.now)
	f.table.FirstToken(other, f.now)
	f.pass(5 * time.Second)
	if f.seen(class, confirm.Unseen) != 1 || f.seen(otherClass, confirm.Confirmed) != 1 {
		t.Errorf("%+v", f.table.States(f.model))
	}
}

// A request explains blocks behind its prompt until its end plus the delay of the worker's events, and no longer.
func TestContinuationsEnd(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 9))
	for _, c := range []struct {
		name       string
		ends       bool
		after      time.Duration // from the end to the blocks
		contradict bool
	}{
		{"it generates", false, time.Minute, false},
		{"it has just ended", true, 500 * time.Millisecond, false},
		{"it has ended", true, 3 * time.Second, true},
	} {
		f := newFleet(t, 1)
		w := f.workers[0]
		first := prompt(rng, 40, 0)
		n := f.expect(w, otherClass, first)
		f.compute(w, first)
		f.table.FirstToken(n, f.now)
		f.pass(4 * time.Second) // the worker's events are in time
		if c.ends {
			f.table.End(n, f.now)
		}
		f.now = f.now.Add(c.after)
		ids := slices.Concat(first, prompt(rng, 40, 0))
		n = f.expect(w, class, ids)
		f.compute(w, broken(ids, 41))
		f.table.FirstToken(n, f.now)
		f.pass(5 * time.Second)
		want := confirm.Unseen
		if c.contradict {
			want = confirm.Unmatched
		}
		if f.seen(class, want) != 1 {
			t.Errorf("%s: %+v", c.name, f.table.States(f.model))
		}
	}
}

// Requests with a salt or an adapter are contradicted if the engine uses the same one, at whatever token, and never
// if it uses another one.
func TestKeyedRequests(t *testing.T) {
	for _, c := range []struct {
		name       string
		engineSeed uint64
		tokens     bool
		at         int
		found      bool
	}{
		{"the same salt", indexer.Seed("", "salt"), true, 30, true},
		{"in the first block", indexer.Seed("", "salt"), true, 2, true},
		{"in the first block, events without ids", indexer.Seed("", "salt"), false, 2, false},
		{"events without ids", indexer.Seed("", "salt"), false, 30, true},
		{"no difference", indexer.Seed("", "salt"), true, -1, false},
		{"another salt", indexer.Seed("", ""), true, -1, false},
		{"another salt and a difference", indexer.Seed("", ""), true, 2, false},
	} {
		f := newFleet(t, 2)
		f.seed, f.engineSeed, f.tokens = indexer.Seed("", "salt"), c.engineSeed, c.tokens
		rng := rand.New(rand.NewPCG(1, 10))
		for i := range 10 {
			ids := prompt(rng, 60, 10)
			theirs := ids
			if c.at >= 0 {
				theirs = broken(ids, c.at)
			}
			f.request(f.workers[i%2], class, ids, theirs)
			f.pass(4 * time.Second)
		}
		s := f.table.States(f.model)[0]
		if s.Unconfirmed != c.found || !c.found && s.Requests["unconfirmed"] > 0 || c.found && c.tokens && s.Position != c.at {
			t.Errorf("%s: %+v", c.name, s)
		}
	}
}

// Long prompts are judged, and the token is named, with blocks of one token, too, of which each is an event.
func TestLongPrompts(t *testing.T) {
	for _, c := range []struct{ size, length, at int }{{1, 32_000, 5}, {1, 32_000, 31_000}, {16, 200_000, 5}, {16, 200_000, 190_001}} {
		f := newFleet(t, 1)
		f.size = c.size
		w := f.workers[0]
		rng := rand.New(rand.NewPCG(1, uint64(c.at)))
		for i := 0; i < 10 && (len(f.changes) == 0 || f.table.States(f.model)[0].Position < 0); i++ {
			ids := prompt(rng, c.length, c.length-10)
			ids[0] = uint32(i)
			n := f.expect(w, class, ids)
			f.compute(w, broken(ids, c.at))
			f.table.FirstToken(n, f.now)
			f.table.End(n, f.now)
			f.pass(4 * time.Second)
			if err := f.table.Check(); err != nil {
				t.Fatal(err)
			}
		}
		if s := f.table.States(f.model)[0]; !s.Unconfirmed || s.Position != c.at || s.Requests["full"] > 0 {
			t.Errorf("blocks of %d tokens, prompts of %d, position %d: %+v", c.size, c.length, c.at, s)
		}
	}
}

// The work against requests grows with the requests, not with the requests times the blocks that the worker stored; the
// lock is free meanwhile, for new requests.
func TestWorkIsLinear(t *testing.T) {
	work := func(requests int) int {
		f := newFleet(t, 1)
		rng := rand.New(rand.NewPCG(1, 11))
		chains := 0
		f.onChain = func() {
			chains++
			f.table.FirstToken(1, f.now) // takes the lock
		}
		before := prompt(rng, 400, 0)
		f.compute(f.workers[0], before)
		for range requests {
			ids := slices.Concat(before, prompt(rng, 400, 0))
			f.request(f.workers[0], class, ids, broken(ids, 390))
		}
		f.pass(3 * time.Second)
		f.pass(10 * time.Second)
		if got := f.seen(class, confirm.Unmatched); got != requests {
			t.Fatalf("%d of %d requests are contradicted: %+v", got, requests, f.table.States(f.model))
		}
		if chains == 0 {
			t.Error("the index was not asked")
		}
		return f.steps
	}
	few, many := work(50), work(800)
	if many > 20*few || few > 50*1000 {
		t.Errorf("%d steps for 50 requests of 200 blocks, %d for 800", few, many)
	}
}

// Late events are waited for, and the wait grows with a worker's delay.
func TestLateEvents(t *testing.T) {
	f := newFleet(t, 1)
	rng := rand.New(rand.NewPCG(1, 5))
	w := f.workers[0]
	for i, delay := range []time.Duration{0, 500 * time.Millisecond, 1500 * time.Millisecond, 3 * time.Second, 7 * time.Second, 7 * time.Second} {
		ids, foreign := prompt(rng, 40, 8), prompt(rng, 40, 8)
		n := f.expect(w, class, ids)
		f.table.FirstToken(n, f.now)
		f.compute(w, foreign) // the events of a request that kvroute did not route are first
		f.pass(delay)
		f.compute(w, ids)
		f.pass(12 * time.Second)
		if got := f.seen(class, confirm.Confirmed); got != i+1 {
			t.Errorf("a delay of %v: %+v", delay, f.table.States(f.model))
		}
	}
}

// Events that are late from the first request on, among those of requests that kvroute did not route, are no
// contradiction.
func TestEventsThatAreAlwaysLate(t *testing.T) {
	for _, lag := range []int{1, 3, 6, 9} { // seconds
		f := newFleet(t, 1)
		rng := rand.New(rand.NewPCG(uint64(lag), 7))
		w := f.workers[0]
		var late [][][]uint32 // prompts whose events have not come, by the second in which they were computed
		for range 60 {
			ids, foreign := prompt(rng, 40, 8), prompt(rng, 40, 8)
			f.table.FirstToken(f.expect(w, class, ids), f.now)
			if late = append(late, [][]uint32{foreign, ids}); len(late) > lag {
				for _, computed := range late[0] {
					f.compute(w, computed)
				}
				late = late[1:]
			}
			f.pass(time.Second)
		}
		if got := f.seen(class, confirm.Confirmed); got < 40 || f.seen(class, confirm.Unmatched) > 0 {
			t.Errorf("events are %d s late: %+v", lag, f.table.States(f.model))
		}
	}
}

// No request of an engine that makes kvroute's ids is contradicted, whatever happens to workers and events; and of
// those that the engine makes otherwise some are, and no others.
func TestNoFalseAlarm(t *testing.T) {
	found := 0
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 6))
		f := newFleet(t, 1+rng.IntN(3))
		differ := seed%2 == 1
		open := map[uint64]bool{}
		type running struct {
			w      *simWorker
			number uint64
			ids    []uint32
		}
		var generating []running
		var turns [][]uint32
		for _, w := range f.workers {
			w.room = []int{0, 40, 300}[rng.IntN(3)]
		}
		for step := range 600 {
			w := f.workers[rng.IntN(len(f.workers))]
			switch n := rng.IntN(100); {
			case n < 60:
				ids := prompt(rng, 5+rng.IntN(60), rng.IntN(30))
				if len(turns) > 0 && rng.IntN(2) == 0 { // the next turn of a chat, or the same prompt again
					ids = slices.Concat(turns[rng.IntN(len(turns))], prompt(rng, rng.IntN(20), 0))
				}
				c, theirs := class, slices.Concat(ids, prompt(rng, rng.IntN(10), 0))
				if differ && rng.IntN(3) == 0 {
					c, theirs = otherClass, broken(theirs, rng.IntN(len(ids)))
				} else if turns = append(turns, ids); len(turns) > 20 {
					turns = turns[1:]
				}
				number := f.expect(w, c, ids)
				switch rng.IntN(10) {
				case 0: // cancelled before it is computed
					f.table.Drop(number)
				case 1: // lost
					w.mute = true
					f.compute(w, theirs)
					w.mute = false
					w.unsure = true
					f.table.Interrupt(w.Worker)
					f.table.FirstToken(number, f.now)
				case 2: // computed later
					open[number] = true
					f.compute(w, theirs)
				default:
					f.compute(w, theirs)
					f.table.FirstToken(number, f.now)
					generating = append(generating, running{w, number, theirs})
				}
			case n < 70: // a request that kvroute did not route
				f.compute(w, prompt(rng, 5+rng.IntN(60), rng.IntN(30)))
			case n < 75:
				for number := range open {
					f.table.FirstToken(number, f.now)
					delete(open, number)
				}
			case n < 78 && len(generating) > 0:
				g := &generating[rng.IntN(len(generating))]
				g.ids = slices.Concat(g.ids, prompt(rng, rng.IntN(20), 0))
				if f.compute(g.w, g.ids); rng.IntN(3) == 0 {
					f.table.End(g.number, f.now)
					*g = generating[len(generating)-1]
					generating = generating[:len(generating)-1]
				}
			case n < 80 && len(w.order) > 0:
				f.evict(w, rng.IntN(len(w.order)))
			case n == 81 || n == 83 && w.unsure:
				f.clear(w)
			case n == 82:
				f.table.Forget(w.ID, f.model)
				f.clear(w)
				generating = slices.DeleteFunc(generating, func(g running) bool { return g.w == w })
			default:
				f.pass(time.Second)
			}
			if got := f.seen(class, confirm.Unmatched); got > 0 {
				t.Fatalf("seed %d: step %d: a false alarm: %+v", seed, step, f.table.States(f.model))
			}
		}
		for _, c := range f.changes {
			if c.Class != otherClass || !differ {
				t.Errorf("seed %d: %+v", seed, c)
			}
		}
		found += f.seen(otherClass, confirm.Unmatched)
		if f.seen(class, confirm.Confirmed) < 50 {
			t.Errorf("seed %d: %+v", seed, f.table.States(f.model))
		}
		if err := f.table.Check(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	if found < 50 {
		t.Errorf("%d requests were contradicted, want at least 50", found)
	}
}

// Memory stays bounded for requests that are never served, all classes and many workers, and later requests are
// judged nevertheless.
func TestBounds(t *testing.T) {
	f := newFleet(t, 1)
	long := make([]uint64, 3000)
	for n := range uint64(20_000) {
		f.number++
		f.table.Expect(f.now, f.model, &confirm.Request{
			Number: f.number, Worker: confirm.Worker{ID: n % 5000}, Class: chat.Class(n), BlockSize: blockSize, Local: long, IDs: make([]uint32, 10),
		})
		if n%1000 == 0 {
			if err := f.table.Check(); err != nil {
				t.Fatal(err)
			}
		}
	}
	ev := indexer.Event{Kind: indexer.Stored, Blocks: make([]indexer.Block, 100)}
	for n := range 200_000 {
		f.table.Stored(f.now, confirm.Worker{ID: uint64(n % 5000)}, &ev)
	}
	for range 1000 {
		f.table.StoredTokens(make([]uint32, 3001))
	}
	if err := f.table.Check(); err != nil {
		t.Fatal(err)
	}
	f.now = f.now.Add(time.Hour) // none of them had a first token
	f.pass(time.Second)
	ids := prompt(rand.New(rand.NewPCG(1, 7)), 40, 0)
	f.request(f.workers[0], class, ids, ids)
	f.pass(4 * time.Second)
	if f.seen(class, confirm.Confirmed) != 1 {
		t.Errorf("%+v", f.table.States(f.model))
	}
	if err := f.table.Check(); err != nil {
		t.Fatal(err)
	}
}

// In a fleet with more pairs of worker and class than are kept, a class that comes late is judged, too. One wrong
// worker is named, and does not change the verdict on the class.
func TestMoreWorkersThanAreKept(t *testing.T) {
	for _, wrong := range []uint64{1, 1024} {
		table, model := new(confirm.Table), confirm.NewModel("m")
		ids, others := make([]uint32, 5*blockSize), make([]uint32, 5*blockSize)
		others[0] = 7
		answer := func(c chat.Class, worker uint64, ours []uint32, at int) []confirm.Change {
			return table.Answered(model, c, confirm.Worker{ID: worker}, blockSize, at, ours, ids)
		}
		for worker := range uint64(1024) {
			for c := range chat.Class(4) {
				answer(class+c, worker, ids, -1)
			}
		}
		const late = class + 4
		var changes []confirm.Change
		for range 4 {
			for worker := range uint64(8) {
				if worker < wrong {
					changes = append(changes, answer(late, worker, others, 0)...)
				} else {
					changes = append(changes, answer(late, worker, ids, -1)...)
				}
			}
		}
		want := confirm.ClassUnconfirmed
		if wrong == 1 {
			want = confirm.WorkerNamed
		}
		if len(changes) == 0 || changes[0].Kind != want || changes[0].Class != late {
			t.Errorf("%d wrong workers: %+v, want %d", wrong, changes, want)
		}
		rows := 0
		for _, s := range table.States(model) {
			rows += len(s.Workers)
		}
		if rows != 4096 {
			t.Errorf("%d rows", rows)
		}
	}
}

// The methods may be called at the same time; run with the race detector.
func TestConcurrentUse(t *testing.T) {
	f := newFleet(t, 2)
	index := func(of confirm.Worker, _ *confirm.Model, local []uint64) (int, bool) {
		return min(3, len(local)), of.Rank == 0
	}
	var all sync.WaitGroup
	for g := range uint64(4) {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(g, 13))
			for i := range uint64(300) {
				w, number, now := f.workers[i%2].Worker, 1+i*4+g, f.now.Add(time.Duration(i)*time.Second)
				ids := prompt(rng, 40, 8)
				local := indexer.AppendLocalHashes(nil, ids, blockSize, f.seed)
				f.table.Expect(now, f.model, &confirm.Request{Number: number, Worker: w, Class: class, BlockSize: blockSize, Local: local, IDs: ids, Seed: f.seed})
				ev := indexer.Event{Kind: indexer.Stored, HasParent: i%3 == 0, Parent: i / 2}
				for k, hash := range local {
					ev.Blocks = append(ev.Blocks, indexer.Block{External: i + uint64(k), Local: hash + i%2})
				}
				f.table.StoredTokens(ids)
				f.table.Stored(now, w, &ev)
				f.table.FirstToken(number, now)
				f.table.Judge(now, confirm.Cache{Held: index, AppendChain: func(dst []uint64, _ confirm.Worker, _ *confirm.Model, _ uint64) []uint64 {
					return append(dst, local[0])
				}})
				f.table.End(number, now)
			}
		})
	}
	all.Wait()
	if err := f.table.Check(); err != nil {
		t.Fatal(err)
	}
	if f.seen(class, confirm.Unmatched) == 0 {
		t.Errorf("%+v", f.table.States(f.model))
	}
}

// All of the work for a confirmed request of 10 KB: 2,500 tokens, in 156 blocks of which the worker stores half.
func BenchmarkConfirmed(b *testing.B) {
	const blocks, size = 156, 16
	f := newFleet(&testing.T{}, 1)
	rng, w := rand.New(rand.NewPCG(1, 8)), f.workers[0].Worker
	ids := prompt(rng, blocks*size, blocks*size/2)
	ev := indexer.Event{Kind: indexer.Stored, Blocks: make([]indexer.Block, blocks/2)}
	var local, chain []uint64
	held := confirm.Cache{Held: func(confirm.Worker, *confirm.Model, []uint64) (int, bool) { return blocks, true }}
	for b.Loop() {
		f.number++
		ids[blocks*size/2] = uint32(f.number)
		local = indexer.AppendLocalHashes(local[:0], ids, size, f.seed)
		chain = indexer.AppendSequenceHashes(chain[:0], local)
		ev.HasParent, ev.Parent = true, chain[blocks/2-1]
		for i := range ev.Blocks {
			ev.Blocks[i] = indexer.Block{External: chain[blocks/2+i], Local: local[blocks/2+i]}
		}
		f.table.Expect(f.now, f.model, &confirm.Request{Number: f.number, Worker: w, Class: class, BlockSize: size, Local: local, Had: blocks / 2, IDs: ids, Seed: f.seed})
		f.table.StoredTokens(ids[blocks*size/2:])
		f.table.Stored(f.now, w, &ev)
		f.table.FirstToken(f.number, f.now)
		f.table.FirstToken(f.number, f.now)
		f.table.End(f.number, f.now)
		if f.number%64 == 0 {
			f.table.Judge(f.now.Add(3*time.Second), held)
		}
	}
}

// Judgements against requests, with the number of requests of one worker that are judged at once.
func BenchmarkContradicted(b *testing.B) {
	for _, requests := range []int{250, 500, 1000, 2000} {
		b.Run(fmt.Sprint(requests), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				f := newFleet(&testing.T{}, 1)
				rng := rand.New(rand.NewPCG(1, 12))
				for range requests {
					ids := prompt(rng, 1000, 500)
					f.request(f.workers[0], class, ids, broken(ids, 600))
				}
				f.pass(2 * time.Second)
				f.now = f.now.Add(10 * time.Second)
				b.StartTimer()
				f.pass(time.Second)
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*requests), "µs/request")
		})
	}
}
