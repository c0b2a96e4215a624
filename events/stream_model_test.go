// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/engines/localindex"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// land simulates workers, a stream that loses messages, snapshots that may be damaged, and router
// replicas that die. It runs in one goroutine with a simulated clock.
type land struct {
	t       *testing.T
	rng     *rand.Rand
	now     time.Time
	faults  landFaults
	workers []*worker
	asks    []bool   // whether a worker has a local indexer, by number
	names   []bool   // whether a worker's record names its publisher
	stream  []said   // by position - 1
	first   uint64   // position of the first message that is not purged
	snaps   [2]*snap // newest first; nil if absent
	epoch   uint64
	start   uint64 // position of the first message of the epoch
	nodes   []*node
	bus     []func()
	happens map[string]int
}

// landFaults are probabilities, per mille of steps.
type landFaults struct{ lose, purge, restart, crash, damage, reset, lie, loseAnswers int }

type said struct {
	publisher uint64
	ev        events.RouterEvent
}

// snap is a snapshot.
type snap struct {
	position, epoch uint64
	snapshot        *events.Snapshot
	runs            []indexer.Run
	started         map[uint64]int64 // start times of the contained workers, as the router keeps them
}

// node is a router replica.
type node struct {
	l               *land
	tracker         events.Tracker
	index           *indexer.Index
	parked          *indexer.Parked
	position, epoch uint64
	review, lost    bool
	registered      map[uint64]int64 // start times of registered workers
	life            int
}

func newLand(t *testing.T, seed uint64, workers, nodes int, f landFaults) *land {
	l := &land{t: t, rng: rand.New(rand.NewPCG(seed, 11)), now: start, faults: f, first: 1, happens: map[string]int{}}
	for i := range workers {
		p := &worker{id: uint64(i) + 1, cache: fakeCache{rng: l.rng}}
		l.workers = append(l.workers, p)
		l.asks, l.names = append(l.asks, i%3 != 2 && i != 7), append(l.names, i%4 != 3)
		l.begin(p)
	}
	for range nodes {
		n := &node{l: l}
		l.nodes = append(l.nodes, n)
		n.open()
	}
	return l
}

func (l *land) mille(n int) bool   { return l.rng.IntN(1000) < n }
func (l *land) last() uint64       { return uint64(len(l.stream)) }
func (l *land) happen(what string) { l.happens[what]++ }
func (p *worker) number() int      { return int(p.id) - 1 }
func (l *land) source(p *worker) (src events.Source) {
	src = events.Source{Feed: events.FeedDurable, Queries: l.asks[p.number()], DPSize: 1, StartedMS: p.started}
	if l.names[p.number()] {
		src.Publisher = p.publisher
	}
	return src
}

// begin starts a worker's process with an empty cache. Its record reaches each replica some time
// later.
func (l *land) begin(p *worker) {
	p.publisher, p.last, p.cache.held = l.rng.Uint64()>>11|1, 0, nil
	p.started++
	p.local, p.truth = localindex.New(), indexer.New(indexer.Config{})
	for _, n := range l.nodes {
		l.bus = append(l.bus, func() { n.register(p) })
	}
}

// register registers a worker at a replica, with the content of its record.
func (n *node) register(p *worker) {
	if was, known := n.registered[p.id]; known && was != p.started {
		n.parked.RemoveWorker(int(p.id)) // as the router does
	}
	n.registered[p.id] = p.started
	n.tracker.SetWorker(n.l.now, p.id, n.l.source(p))
}

// open starts a replica with only the snapshots and the stream.
func (n *node) open() {
	l := n.l
	n.life++
	n.registered = map[uint64]int64{}
	n.index = indexer.New(indexer.Config{})
	n.parked = indexer.NewParked(n.index)
	n.tracker = events.NewTracker(func(id uint64, _ uint32, ev indexer.Event) {
		if _, known := n.registered[id]; !known {
			return
		}
		n.parked.Apply(l.now, int(id), ev)
	}).Knows(func(id uint64) bool { _, known := n.registered[id]; return known }).Seed(l.rng.Uint64())
	n.tracker.Count(func(what string, k int) { l.happens[what] += k })
	early := l.rng.IntN(4) > 0 // the registry usually answers first
	for _, p := range l.workers {
		if early {
			n.register(p)
		} else {
			l.bus = append(l.bus, func() { n.register(p) })
		}
	}
	n.load()
}

// load restores the newest undamaged snapshot into a replica.
func (n *node) load() {
	l := n.l
	n.epoch, n.review = l.epoch, true
	for i, s := range l.snaps {
		if s == nil || s.epoch != l.epoch || i == 0 && l.mille(l.faults.damage) {
			continue
		}
		n.restore(s)
		if n.lost = l.first > n.position+1; n.lost {
			l.happen("hole")
		}
		return
	}
	n.index = indexer.New(indexer.Config{})
	n.parked = indexer.NewParked(n.index)
	n.position = max(l.start, 1) - 1
	n.tracker.Restored(l.now, &events.Snapshot{})
	n.lost = l.epoch > 0 || l.first > n.position+1
}

func (n *node) restore(s *snap) {
	x, _, err := indexer.Restore(indexer.Config{}, func(yield func(indexer.Run, error) bool) {
		for _, run := range s.runs {
			run.Holders = slices.DeleteFunc(slices.Clone(run.Holders), func(h indexer.Holder) bool {
				id := uint64(h.Worker)
				was, known := n.registered[id]
				return known && was != s.started[id] // as the router does
			})
			if !yield(run, nil) {
				return
			}
		}
	})
	if err != nil {
		n.l.t.Fatal(err)
	}
	n.index, n.parked, n.position = x, indexer.NewParked(x), s.position
	for id, at := range s.started {
		if _, known := n.registered[id]; !known {
			n.registered[id] = at
		}
	}
	n.tracker.Restored(n.l.now, s.snapshot)
}

// snapshot takes a snapshot of a replica and shortens the stream.
func (l *land) snapshot(n *node) {
	if n.epoch != l.epoch || l.snaps[0] != nil && l.snaps[0].epoch == l.epoch && l.snaps[0].position >= n.position {
		return
	}
	s := &snap{position: n.position, epoch: n.epoch, snapshot: n.tracker.Export(), started: map[uint64]int64{}}
	for run := range n.index.Dump() {
		run.Local, run.Holders = slices.Clone(run.Local), slices.Clone(run.Holders)
		for i := range run.Holders {
			run.Holders[i].Externals = slices.Clone(run.Holders[i].Externals)
		}
		s.runs = append(s.runs, run)
	}
	maps.Copy(s.started, n.registered)
	l.snaps = [2]*snap{s, l.snaps[0]}
	if before := l.snaps[1]; before != nil && before.epoch == l.epoch {
		upTo := before.position
		for _, n := range l.nodes {
			upTo = min(upTo, n.position)
		}
		l.first = max(l.first, upTo+1)
	}
	l.happen("snapshot")
}

// publish makes a worker's cache change.
func (l *land) publish(p *worker, sure bool) {
	p.last++
	ev := events.RouterEvent{WorkerID: p.id, EventID: p.last, Event: p.cache.event()}
	p.local.Remember(l.now, ev)
	p.truth.Apply(0, ev.Event)
	if sure || !l.mille(l.faults.lose) {
		l.stream = append(l.stream, said{p.publisher, ev})
		if !sure && l.mille(20) {
			l.stream = append(l.stream, said{p.publisher, ev}) // the acknowledgement was lost, so the message is repeated
		}
	}
}

// read lets a replica read one message.
func (n *node) read() {
	l := n.l
	if n.epoch != l.epoch {
		n.load()
	}
	n.position = max(n.position, l.first-1)
	if n.position < l.last() {
		n.position++
		m := l.stream[n.position-1]
		n.tracker.AcceptStream(l.now, m.publisher, m.ev)
	}
	if n.position >= l.last() && n.review {
		n.tracker.CaughtUp(l.now, n.lost)
		n.review, n.lost = false, false
	}
}

// tick lets a replica send queries. Queries and answers travel.
func (n *node) tick() {
	l, life := n.l, n.life
	for _, a := range n.tracker.Tick(l.now) {
		if l.mille(l.faults.loseAnswers) {
			l.bus = append(l.bus, func() {
				if n.life == life {
					n.tracker.Failed(l.now, a.ID)
				}
			})
			continue
		}
		p := l.workers[a.Query.WorkerID-1]
		if !l.asks[p.number()] {
			l.t.Fatalf("worker %d is asked, and has no local indexer", p.id)
		}
		l.bus = append(l.bus, func() {
			answer, publisher := localAnswer(p.local, a.Query), p.publisher
			l.bus = append(l.bus, func() {
				if n.life == life {
					n.tracker.Answer(l.now, a.ID, publisher, answer)
				}
			})
		})
	}
}

func (l *land) deliver() {
	if len(l.bus) > 0 {
		arrive := l.bus[0]
		l.bus = l.bus[1:]
		arrive()
	}
}

func (l *land) run(steps int) {
	for range steps {
		l.now = l.now.Add(time.Duration(l.rng.Int64N(int64(30 * time.Millisecond))))
		p, n := l.workers[l.rng.IntN(len(l.workers))], l.nodes[l.rng.IntN(len(l.nodes))]
		f := &l.faults
		switch {
		case l.mille(f.restart):
			l.begin(p)
		case l.mille(f.crash):
			n.open()
		case l.mille(f.purge):
			l.first = l.last() + 1
			l.happen("purge")
		case l.mille(f.reset):
			l.epoch, l.start = l.epoch+1, l.last()+1
			l.first = l.start
		case l.mille(f.lie) && l.names[p.number()]:
			// Another process publishes under the worker's id.
			l.stream = append(l.stream, said{l.rng.Uint64N(3) + 1, events.RouterEvent{
				WorkerID: p.id, EventID: l.rng.Uint64N(30), Event: (&fakeCache{rng: l.rng, next: 1 << 40}).event(),
			}})
		case l.mille(30):
			l.snapshot(n)
		case l.mille(300):
			l.publish(p, false)
		case l.mille(600):
			n.read()
		default:
			l.deliver()
		}
		for _, n := range l.nodes {
			n.tick()
		}
	}
}

// settle delivers everything, with one more event of each worker.
func (l *land) settle() {
	l.faults = landFaults{}
	quiet := func() {
		for range 100_000 {
			busy := len(l.bus) > 0
			l.deliver()
			l.now = l.now.Add(5 * time.Millisecond)
			for _, n := range l.nodes {
				n.read()
				n.tick()
				ranks, _, _ := n.tracker.Repairs()
				busy = busy || ranks > 0 || n.position < l.last()
			}
			if !busy {
				return
			}
		}
		l.t.Fatal("the model does not come to rest")
	}
	calm(&l.now, quiet, func() {
		for _, p := range l.workers {
			l.publish(p, true)
		}
	})
}

// check compares the replicas' state with the workers' caches. The state of workers that can be
// queried must be equal; that of other workers must match its reported quality.
func (l *land) check() error {
	for i, n := range l.nodes {
		for _, p := range l.workers {
			state := n.tracker.State(p.id, 0)
			diff := gocmp.Diff(content(p.truth, 0), content(n.index, int(p.id)))
			switch {
			case l.asks[p.number()] && state != indexer.StateOK:
				return fmt.Errorf("replica %d: worker %d could be asked, and is %v", i, p.id, state)
			case state != indexer.StateOK:
				l.happen("said to be " + string(state))
			case diff != "":
				return fmt.Errorf("replica %d: worker %d is said to be ok; it holds (-), and is said to hold (+):\n%s", i, p.id, diff)
			case n.tracker.Cursor(p.id, 0) != p.last:
				return fmt.Errorf("replica %d: worker %d: cursor %d, last event %d", i, p.id, n.tracker.Cursor(p.id, 0), p.last)
			}
		}
	}
	return nil
}

// Whatever the stream loses and whichever replica dies, all replicas know the caches of the
// workers that can be queried, and report which other ranks are incomplete.
func TestReplicasEqualTheWorkersCaches(t *testing.T) {
	t.Parallel()
	// Seeds with which a rank was said to be ok although blocks were missing: its worker's new process was
	// registered after a replica had restored the old one from a snapshot.
	failed := map[string][]uint64{"restarts": {342}, "new epochs": {6, 23, 135, 446}}
	for name, f := range map[string]landFaults{
		"a good stream": {},
		"replicas die":  {crash: 10},
		"damage":        {crash: 20, damage: 500},
		"loss":          {lose: 100, crash: 5},
		"purges":        {purge: 5, crash: 10, damage: 300},
		"restarts":      {restart: 10, crash: 10},
		"new epochs":    {restart: 20, crash: 30, reset: 20},
		"liars":         {lie: 30, crash: 5, restart: 5},
		"resets":        {reset: 5, crash: 5},
		"answers lost":  {lose: 50, purge: 3, loseAnswers: 400, crash: 5},
		"all of it":     {lose: 30, purge: 2, restart: 5, crash: 10, damage: 200, reset: 2, lie: 10, loseAnswers: 100},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			total, tried := map[string]int{}, failed[name]
			for seed := range seeds(30) {
				tried = append(tried, seed)
			}
			for _, seed := range tried {
				l := newLand(t, seed, 1+int(seed%8), 1+int(seed%3), f)
				l.run(2000)
				l.settle()
				if err := l.check(); err != nil {
					t.Fatalf("seed %d: %v\n%v", seed, err, l.happens)
				}
				for k, n := range l.happens {
					total[k] += n
				}
			}
			t.Log(total)
			if f == (landFaults{}) || f == (landFaults{crash: 10}) {
				for what, n := range total {
					if n > 0 && (what == "hole" || what == "said to be suspect" || what == "said to be partial") {
						t.Errorf("without a loss it is %s, %d times", what, n)
					}
				}
			}
			if total["snapshot"] == 0 {
				t.Error("no snapshot was taken")
			}
		})
	}
}
