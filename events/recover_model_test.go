// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/engines/localindex"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// world simulates workers, a bus that drops, repeats and delays their messages, and a router (a
// tracker and its index). It runs in one goroutine with a simulated clock.
type world struct {
	t       *testing.T
	rng     *rand.Rand
	now     time.Time
	faults  faults
	workers []*worker
	tracker events.Tracker
	index   *indexer.Index
	parked  *indexer.Parked
	bus     []func() // deliveries in transit
	happens map[string]int
}

// faults are the probabilities of faults of the bus and the workers, in percent.
type faults struct {
	lose, repeat, delay int
	loseAnswers         int
	restart             int  // per mille of steps
	lie                 int  // per mille
	deaf                bool // all queries stay unanswered for a long time
	burst               int  // per mille: more events are lost than the ring holds
}

// worker simulates a worker whose process may be replaced by another one.
type worker struct {
	id         uint64
	publisher  uint64
	started    int64
	registered int64 // start time of the process that was last registered
	last       uint64
	cache      fakeCache
	local      *localindex.Index
	truth      *indexer.Index
}

func newWorld(t *testing.T, seed uint64, workers int, f faults) *world {
	w := &world{t: t, rng: rand.New(rand.NewPCG(seed, 3)), now: start, faults: f, happens: map[string]int{}}
	w.index = indexer.New(indexer.Config{})
	w.parked = indexer.NewParked(w.index)
	w.tracker = events.NewTracker(func(id uint64, _ uint32, ev indexer.Event) {
		w.parked.Apply(w.now, int(id), ev)
	}).Seed(seed)
	w.tracker.Count(func(what string, n int) { w.happens[what] += n })
	for i := range workers {
		p := &worker{id: uint64(i) + 1, cache: fakeCache{rng: w.rng}}
		w.workers = append(w.workers, p)
		w.begin(p)
		w.register(p)
	}
	return w
}

var start = time.Unix(1755000000, 0)

// begin starts a worker's process, with an empty cache.
func (w *world) begin(p *worker) {
	p.publisher, p.last, p.cache.held = w.rng.Uint64()>>11|1, 0, nil
	p.started++
	p.local, p.truth = localindex.New(), indexer.New(indexer.Config{})
}

// register announces a worker to the router as the registry would.
func (w *world) register(p *worker) {
	src := events.Source{Feed: events.FeedCore, Queries: true, DPSize: 1, StartedMS: p.started}
	w.bus = append(w.bus, func() {
		if src.StartedMS != p.started {
			return // the registry only reports the newest process
		}
		if p.registered != p.started {
			w.parked.RemoveWorker(int(p.id)) // as the router does
		}
		p.registered = p.started
		w.tracker.SetWorker(w.now, p.id, src)
	})
}

func (w *world) chance(percent int) bool { return w.rng.IntN(100) < percent }

// publish makes a worker's cache change.
func (w *world) publish(p *worker, sure bool) {
	p.last++
	ev := events.RouterEvent{WorkerID: p.id, EventID: p.last, Event: p.cache.event()}
	p.local.Remember(w.now, ev)
	p.truth.Apply(0, ev.Event)
	publisher := p.publisher
	arrive := func() { w.tracker.Accept(w.now, publisher, ev) }
	if !sure && w.chance(w.faults.lose) {
		return
	}
	w.bus = append(w.bus, arrive)
	if !sure && w.chance(w.faults.repeat) {
		w.bus = append(w.bus, arrive)
	}
}

// deliver delivers one message of the bus, mostly the first.
func (w *world) deliver() {
	if len(w.bus) == 0 {
		return
	}
	i := 0
	if w.chance(w.faults.delay) {
		i = w.rng.IntN(min(len(w.bus), 8))
	}
	arrive := w.bus[i]
	w.bus = slices.Delete(w.bus, i, i+1)
	arrive()
}

// tick lets the router send queries. Queries and answers travel over the bus.
func (w *world) tick() {
	dumps := 0
	for _, a := range w.tracker.Tick(w.now) {
		if !a.Query.HasStart {
			dumps++
		}
		if w.faults.deaf || w.chance(w.faults.loseAnswers) {
			if w.chance(50) {
				w.bus = append(w.bus, func() { w.tracker.Failed(w.now, a.ID) })
			}
			continue // otherwise the query times out
		}
		p := w.workers[a.Query.WorkerID-1]
		w.bus = append(w.bus, func() { // the query arrives
			answer, publisher := localAnswer(p.local, a.Query), p.publisher
			if w.rng.IntN(1000) < w.faults.lie {
				answer.LastEventID = w.rng.Uint64N(20)
			}
			w.bus = append(w.bus, func() { w.tracker.Answer(w.now, a.ID, publisher, answer) })
		})
	}
	if dumps > events.MaxDumps || w.tracker.Asked() > events.MaxQueries {
		w.t.Fatalf("%d dumps, %d queries at once", dumps, w.tracker.Asked())
	}
	if _, blocks, sum := w.tracker.Repairs(); blocks != sum {
		w.t.Fatalf("%d blocks are said to wait, %d do", blocks, sum)
	}
}

// run plays a number of random steps.
func (w *world) run(steps int) {
	for range steps {
		step := 30 * time.Millisecond
		if w.faults.deaf {
			step = 500 * time.Millisecond
		}
		w.now = w.now.Add(time.Duration(w.rng.Int64N(int64(step))))
		p := w.workers[w.rng.IntN(len(w.workers))]
		switch n := w.rng.IntN(1000); {
		case n < w.faults.restart:
			w.begin(p)
			if w.chance(50) {
				w.register(p)
			}
		case n < w.faults.restart+w.faults.lie:
			// Another process publishes under the worker's id.
			ev := events.RouterEvent{WorkerID: p.id, EventID: w.rng.Uint64N(30), Event: (&fakeCache{rng: w.rng, next: 1 << 40}).event()}
			publisher := w.rng.Uint64N(3) + 1
			w.bus = append(w.bus, func() { w.tracker.Accept(w.now, publisher, ev) })
		case n < w.faults.restart+w.faults.lie+w.faults.burst:
			before := w.faults
			w.faults = faults{lose: 100}
			for range 1024 + 10 {
				w.publish(p, false)
			}
			w.faults = before
		case n < 500:
			w.publish(p, false)
		case n < 505:
			w.tracker.Audit(w.now)
		default:
			w.deliver()
		}
		if len(w.bus) > 40 {
			w.deliver()
		}
		w.tick()
	}
}

// settle delivers all messages, then one more event of each worker and the messages that follow
// from it.
func (w *world) settle() {
	w.faults = faults{}
	quiet := func() {
		for range 100_000 {
			w.deliver()
			w.now = w.now.Add(5 * time.Millisecond)
			w.tick()
			if ranks, _, _ := w.tracker.Repairs(); ranks == 0 && len(w.bus) == 0 {
				return
			}
		}
		w.t.Fatal("the model does not come to rest")
	}
	calm(&w.now, quiet, func() {
		for _, p := range w.workers {
			w.register(p)
			w.publish(p, true)
		}
	})
}

// calm lets a model come to rest, makes its workers publish once more, and advances the clock past
// all repairs.
func calm(now *time.Time, quiet, speak func()) {
	quiet()
	*now = now.Add(11 * time.Second) // no publisher is rejected any more
	speak()
	quiet()
	*now = now.Add(2 * time.Minute) // suspect ranks are read again
	quiet()
}

// equal compares the router's index with what the workers hold.
func (w *world) equal() error {
	for _, p := range w.workers {
		if diff := gocmp.Diff(content(p.truth, 0), content(w.index, int(p.id))); diff != "" {
			return fmt.Errorf("worker %d holds (-) and is said to hold (+):\n%s", p.id, diff)
		}
		if s := w.tracker.State(p.id, 0); s != indexer.StateOK {
			return fmt.Errorf("worker %d is %v", p.id, s)
		}
		if got := w.tracker.Cursor(p.id, 0); got != p.last {
			return fmt.Errorf("worker %d: cursor %d, last event %d", p.id, got, p.last)
		}
	}
	return nil
}

// Whatever the bus and the workers do, the index equals the workers' true caches when queries are
// answered.
func TestIndexEqualsTheWorkersCaches(t *testing.T) {
	for name, f := range map[string]faults{
		"a good bus":         {},
		"loss":               {lose: 20},
		"repetition":         {repeat: 30},
		"reordering":         {delay: 50},
		"lost answers":       {lose: 10, loseAnswers: 40},
		"restarts":           {restart: 20, delay: 20},
		"deaf workers":       {lose: 10, deaf: true, restart: 5},
		"liars":              {lose: 5, lie: 20},
		"all of it":          {lose: 10, repeat: 10, delay: 30, loseAnswers: 20, restart: 10, lie: 5},
		"5 % of each":        {lose: 5, repeat: 5, delay: 5},
		"almost all is lost": {lose: 95, loseAnswers: 50},
		"long losses":        {lose: 2, burst: 4},
	} {
		t.Run(name, func(t *testing.T) {
			total := map[string]int{}
			for seed := range seeds(24) {
				w := newWorld(t, seed, 1+int(seed%3), f)
				if w.run(600); f.deaf {
					w.run(1400)
				}
				w.settle()
				if err := w.equal(); err != nil {
					t.Fatalf("seed %d: %v\n%v", seed, err, w.happens)
				}
				for k, n := range w.happens {
					total[k] += n
				}
			}
			t.Log(total)
			if f.lose > 0 && total["ask_range"] == 0 && !f.deaf {
				t.Error("no range was asked for, though events were lost")
			}
			if f.deaf && total["given_up"] == 0 {
				t.Error("nothing was given up, though nobody answered")
			}
		})
	}
}

// localAnswer sends a query to a local indexer and returns the complete answer.
func localAnswer(x *localindex.Index, q events.Query) events.Answer {
	return x.Answer(&q)()
}
