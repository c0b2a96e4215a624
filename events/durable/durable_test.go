// SPDX-License-Identifier: Apache-2.0

package durable_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/engines/publish"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/durable"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
)

// natsd is a NATS server with JetStream that a test can stop and start again.
type natsd struct {
	t    *testing.T
	opts server.Options
	s    *server.Server
	js   jetstream.JetStream // the test's own connection
}

func startJetStream(t *testing.T, prepare ...func(*natsd)) *natsd {
	t.Helper()
	n := &natsd{t: t, opts: server.Options{Host: "127.0.0.1", Port: fixtures.HoldPort(t), JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true}}
	for _, f := range prepare {
		f(n)
	}
	n.start()
	t.Cleanup(func() { n.stop() })
	return n
}

func (n *natsd) start() {
	n.t.Helper()
	opts := n.opts
	s, err := server.NewServer(&opts)
	if err != nil {
		n.t.Fatal(err)
	}
	go s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		n.t.Fatal("NATS does not start")
	}
	n.s = s
}

func (n *natsd) stop() {
	n.s.Shutdown()
	n.s.WaitForShutdown()
}

func (n *natsd) connect() *nats.Conn {
	n.t.Helper()
	nc, err := nats.Connect(n.s.ClientURL(), nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond), nats.ReconnectJitter(0, 0), nats.Timeout(10*time.Second))
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(nc.Close)
	return nc
}

func (n *natsd) jetStream() jetstream.JetStream {
	n.t.Helper()
	if n.js == nil {
		var err error
		if n.js, err = jetstream.New(n.connect()); err != nil {
			n.t.Fatal(err)
		}
	}
	return n.js
}

// interfere returns a function for publishers that stores messages in the stream through the given
// hook.
func (n *natsd) interfere(with func(ctx context.Context, m *nats.Msg, publish func(context.Context, *nats.Msg) error) error) func(context.Context, *nats.Msg) error {
	js := n.jetStream()
	publish := func(ctx context.Context, m *nats.Msg) error {
		_, err := js.PublishMsg(ctx, m, jetstream.WithRetryAttempts(0))
		return err
	}
	return func(ctx context.Context, m *nats.Msg) error { return with(ctx, m, publish) }
}

// enginePool holds simulated workers with caches of their own. Each cache change is true and goes
// to the worker's publisher. Workers are numbered from 1.
type enginePool struct {
	t     *testing.T
	truth *indexer.Index
	nc    *nats.Conn
	pubs  []*publish.Publisher // durable ones, by worker - 1
	stops []func()
	held  [][]uint64
	rng   *rand.Rand
	next  uint64
	local bool // the workers have local indexers
	live  int  // the number of workers still running; the others have ended
}

func startEngines(t *testing.T, nc *nats.Conn, n int, prepare ...func(*publish.Config)) *enginePool {
	t.Helper()
	e := &enginePool{t: t, nc: nc, truth: indexer.New(indexer.Config{}), held: make([][]uint64, n), rng: rand.New(rand.NewPCG(7, uint64(n)))}
	e.start(n, prepare...)
	return e
}

// startAskable starts engines with local indexers.
func startAskable(t *testing.T, nc *nats.Conn, n int, prepare ...func(*publish.Config)) *enginePool {
	t.Helper()
	e := startEngines(t, nc, 0)
	e.local, e.held = true, make([][]uint64, n)
	e.start(n, prepare...)
	return e
}

func (e *enginePool) start(n int, prepare ...func(*publish.Config)) {
	e.live = n
	for i := range n {
		conf := publish.Config{WorkerID: uint64(i + 1), Durable: true, LocalIndexer: e.local}
		for _, f := range prepare {
			f(&conf)
		}
		p := publish.New(e.nc, conf)
		e.stops = append(e.stops, natstest.Run(e.t, p.Run))
		e.pubs = append(e.pubs, p)
	}
}

// source returns the content of a worker's record; w counts from 0.
func (e *enginePool) source(w int) events.Source {
	return events.Source{Feed: events.FeedDurable, Queries: e.local, DPSize: 1, Publisher: e.pubs[w].ID()}
}

// register announces the workers to replicas.
func (e *enginePool) register(replicas ...*replica) {
	for _, r := range replicas {
		for w := range e.pubs {
			r.sub.SetWorker(uint64(w+1), e.source(w))
		}
	}
}

// work makes n random cache changes.
func (e *enginePool) work(n int) {
	for range n {
		w := e.rng.IntN(e.live)
		held := e.held[w]
		switch k := len(held); {
		case k > 0 && e.rng.IntN(4) == 0:
			at := e.rng.IntN(k)
			e.publish(w, indexer.Event{Kind: indexer.Removed, Externals: []uint64{held[at]}})
			e.held[w] = slices.Delete(held, at, at+1)
		case e.rng.IntN(500) == 0:
			e.publish(w, indexer.Event{Kind: indexer.Cleared})
			e.held[w] = nil
		default:
			ev := indexer.Event{Kind: indexer.Stored}
			if k > 0 && e.rng.IntN(2) == 0 {
				ev.HasParent, ev.Parent = true, held[e.rng.IntN(k)]
			}
			for range 1 + e.rng.IntN(8) {
				e.next++
				ev.Blocks = append(ev.Blocks, indexer.Block{External: e.next<<8 | uint64(w), Local: e.rng.Uint64N(6)})
				e.held[w] = append(e.held[w], e.next<<8|uint64(w))
			}
			e.publish(w, ev)
		}
	}
}

func (e *enginePool) publish(w int, ev indexer.Event) {
	e.truth.Apply(w+1, ev)
	e.pubs[w].Publish(0, ev)
}

// restart restarts a worker with an empty cache.
func (e *enginePool) restart(w int) {
	e.t.Helper()
	e.stops[w]() // sends the pending events
	p := publish.New(e.nc, publish.Config{WorkerID: uint64(w + 1), Durable: true, LocalIndexer: e.local})
	e.pubs[w], e.stops[w] = p, natstest.Run(e.t, p.Run)
	e.truth.Apply(w+1, indexer.Event{Kind: indexer.Cleared})
	e.held[w] = nil
	e.publish(w, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1<<60 | uint64(w), Local: 1}}})
}

// workFor makes cache changes for some time.
func (e *enginePool) workFor(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		e.work(20)
		<-time.After(2 * time.Millisecond)
	}
}

// workUntil makes cache changes until a condition holds.
func (e *enginePool) workUntil(so func() bool) {
	e.t.Helper()
	natstest.Eventually(e.t, func() bool {
		e.work(20)
		<-time.After(2 * time.Millisecond)
		return so()
	})
}

// replica is the part of a router replica that handles events.
type replica struct {
	*durable.Reader
	t    *testing.T
	nc   *nats.Conn
	sub  *events.Subscriber
	log  *fixtures.Log
	stop func()

	mu     sync.Mutex
	index  *indexer.Index
	parked *indexer.Parked // holds events that wait for their parent
	slow   time.Duration   // for each event
	// states holds the state of each worker's rank 0, by worker, unless it is ok.
	states map[uint64]indexer.State
	// stranger is a worker that is not registered yet.
	stranger   uint64
	runs       func(func(int, indexer.Run) bool) // replaces the index's runs if set
	gate       func()                            // if not nil, is called while a snapshot is restored
	installing func()                            // is called before a snapshot that was read takes effect
	names      map[int]uint64                    // workers with large ids, by number
}

// number returns the number of a worker in indexes.
func number(worker uint64) int {
	if worker < 20_000 {
		return int(worker)
	}
	return 10_000 + int(worker%10_007)
}

// newReplica returns a replica that is not running yet.
func newReplica(t *testing.T, nc *nats.Conn, name string, conf durable.Config, hurry ...func(*durable.Timing)) *replica {
	t.Helper()
	return newReplicaIn(t, nc, wire.Scope{}, name, conf, hurry...)
}

func newReplicaIn(t *testing.T, nc *nats.Conn, scope wire.Scope, name string, conf durable.Config, hurry ...func(*durable.Timing)) *replica {
	t.Helper()
	r := &replica{t: t, nc: nc, index: indexer.New(indexer.Config{}), log: &fixtures.Log{}, names: map[int]uint64{}, states: map[uint64]indexer.State{}}
	r.parked = indexer.NewParked(r.index)
	var err error
	log := slog.New(slog.NewTextHandler(r.log, nil)).With("replica", name)
	if r.sub, err = events.NewSubscriber(nc, events.SubscriberConfig{Scope: scope, Log: log, Sink: r.sink, Knows: r.knows, Changed: r.changed}); err != nil {
		t.Fatal(err)
	}
	conf.Replica, conf.Holdings, conf.Log = name, events.Holdings{Dump: r.dump, Restore: r.restore}, log
	if r.Reader, err = durable.New(r.sub, conf); err != nil {
		t.Fatal(err)
	}
	r.Hurry(hurry...)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of %s:\n%s", name, r.log)
		}
	})
	return r
}

func startReplica(t *testing.T, nc *nats.Conn, name string, conf durable.Config, hurry ...func(*durable.Timing)) *replica {
	t.Helper()
	r := newReplica(t, nc, name, conf, hurry...)
	r.stop = natstest.Run(t, r.Run)
	natstest.Eventually(t, r.Ready)
	return r
}

// settled starts NATS, engines with some cache changes, and a replica that has received all of
// them.
func settled(t *testing.T, workers, happened int, conf durable.Config) (*natsd, *enginePool, *replica) {
	t.Helper()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), workers)
	a := startReplica(t, n.connect(), "a", conf)
	e.work(happened)
	e.mustKnow(a)
	return n, e, a
}

// startMember starts a replica to which all engines are registered, and which queries them.
func (e *enginePool) startMember(nc *nats.Conn, name string, conf durable.Config) *replica {
	e.t.Helper()
	r := newReplica(e.t, nc, name, conf)
	e.register(r)
	asking := natstest.Run(e.t, r.sub.Run)
	reading := natstest.Run(e.t, r.Run)
	r.stop = func() { reading(); asking() }
	natstest.Eventually(e.t, r.Ready)
	return r
}

func (r *replica) changed(worker uint64, _ uint32, s indexer.State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.states[worker] = s; s == indexer.StateOK {
		delete(r.states, worker)
	}
}

// isIn waits until a number of workers are in a state.
func (r *replica) isIn(s indexer.State, workers int) {
	r.t.Helper()
	natstest.Eventually(r.t, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		for w := range workers {
			if cmp.Or(r.states[uint64(w+1)], indexer.StateOK) != s {
				return false
			}
		}
		return true
	})
}

// kill ends a replica without a last snapshot.
func (r *replica) kill() {
	r.nc.Close()
	r.stop()
}

func (r *replica) knows(worker uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return worker != r.stranger || worker == 0
}

func (r *replica) sink(worker uint64, _ uint32, ev indexer.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.slow > 0 {
		<-time.After(r.slow)
	}
	if worker == r.stranger && worker != 0 {
		return
	}
	r.names[number(worker)] = worker
	r.parked.Apply(time.Now(), number(worker), ev)
}

func (r *replica) dump(s *events.Snapshot, _ func(uint64) bool) (done func(), ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s.Meta.Pools = []events.SnapshotPool{{Model: "m", BlockSize: 16}}
	for w := range 20_000 {
		if r.index.WorkerBlocks(w) > 0 || w < 100 {
			for len(s.Ranks) <= w {
				id := uint64(len(s.Ranks))
				if name, ok := r.names[len(s.Ranks)]; ok {
					id = name
				}
				s.Ranks = append(s.Ranks, events.RankName{WorkerID: id})
			}
		}
	}
	for w, evs := range r.parked.Events() {
		id := uint64(w)
		if name, ok := r.names[w]; ok {
			id = name
		}
		for _, ev := range evs {
			s.Parked = append(s.Parked, events.RouterEvent{WorkerID: id, Event: ev})
		}
	}
	if r.runs != nil {
		s.Runs = r.runs
		return func() {}, true
	}
	runs, stop := r.index.DumpNow()
	var failed error
	s.Runs = func(yield func(int, indexer.Run) bool) {
		for run, err := range runs {
			if failed = err; err != nil || !yield(0, run) {
				return
			}
		}
	}
	s.Failed = func() error { return failed }
	return stop, true
}

func (r *replica) restore(s *events.Snapshot, _ func(uint64) bool, whole func() error) error {
	x := indexer.New(indexer.Config{})
	if s.Runs != nil {
		if r.gate != nil {
			r.gate()
		}
		var err error
		if x, _, err = indexer.Restore(indexer.Config{}, func(yield func(indexer.Run, error) bool) {
			for _, run := range s.Runs {
				for i := range run.Holders {
					id := s.Ranks[run.Holders[i].Worker].WorkerID
					run.Holders[i].Worker = number(id)
					r.mu.Lock()
					r.names[number(id)] = id
					r.mu.Unlock()
				}
				if !yield(run, nil) {
					return
				}
			}
		}); err != nil {
			return errors.Join(whole(), err)
		}
	}
	if whole != nil {
		if err := whole(); err != nil {
			return err
		}
	}
	if r.installing != nil && s.Runs != nil {
		r.installing()
	}
	r.mu.Lock()
	r.index, r.parked = x, indexer.NewParked(x)
	for _, ev := range s.Parked {
		r.parked.Apply(time.Now(), number(ev.WorkerID), ev.Event)
	}
	r.mu.Unlock()
	return nil
}

// content returns the blocks that the replica knows.
func (r *replica) content() []string {
	r.mu.Lock()
	x := r.index
	r.mu.Unlock()
	return natstest.Holdings(x)
}

// mustKnow waits until the replicas know exactly what the engines cache.
func (e *enginePool) mustKnow(replicas ...*replica) {
	e.t.Helper()
	e.awaitEqual(func(w int) bool { return true }, replicas...)
}

// awaitEqual waits until the replicas know exactly what the selected engines cache.
func (e *enginePool) awaitEqual(which func(worker int) bool, replicas ...*replica) {
	e.t.Helper()
	pick := func(lines []string) []string {
		return slices.DeleteFunc(lines, func(line string) bool {
			var w int
			fmt.Sscanf(line, "%d", &w)
			return !which(w)
		})
	}
	want := pick(natstest.Holdings(e.truth))
	for _, r := range replicas {
		var got []string
		for deadline := time.Now().Add(time.Minute); ; <-time.After(5 * time.Millisecond) {
			if got = pick(r.content()); slices.Equal(got, want) {
				break
			}
			if time.Now().After(deadline) {
				e.t.Fatalf("%s knows %d blocks, the engines have %d; %s", r.Consumer(), len(got), len(want), firstDifference(got, want))
			}
		}
	}
}

func firstDifference(got, want []string) string {
	for i := range max(len(got), len(want)) {
		if i >= len(got) || i >= len(want) || got[i] != want[i] {
			return fmt.Sprintf("line %d: got %v, want %v", i, got[min(i, len(got)):min(i+3, len(got))], want[min(i, len(want)):min(i+3, len(want))])
		}
	}
	return "no difference"
}

func (n *natsd) streamInfo() *jetstream.StreamInfo {
	n.t.Helper()
	s, err := n.jetStream().Stream(n.t.Context(), wire.Scope{}.Stream())
	if err != nil {
		n.t.Fatal(err)
	}
	return s.CachedInfo()
}

// purge empties the stream, as another program might.
func (n *natsd) purge() {
	n.t.Helper()
	s, err := n.jetStream().Stream(n.t.Context(), wire.Scope{}.Stream())
	if err == nil {
		err = s.Purge(n.t.Context())
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

// state returns the bucket of states.
func (n *natsd) state() jetstream.KeyValue {
	n.t.Helper()
	kv, err := n.jetStream().KeyValue(n.t.Context(), wire.Scope{}.Bucket("state"))
	if err != nil {
		n.t.Fatal(err)
	}
	return kv
}

// unlocked reports whether no replica writes a snapshot.
func (n *natsd) unlocked() bool {
	n.t.Helper()
	kv, err := n.jetStream().KeyValue(n.t.Context(), wire.Scope{}.Bucket("lock"))
	if err != nil {
		n.t.Fatal(err)
	}
	_, err = kv.Get(n.t.Context(), "snapshot")
	return errors.Is(err, jetstream.ErrKeyNotFound)
}

func (n *natsd) objects() jetstream.ObjectStore {
	n.t.Helper()
	obs, err := n.jetStream().ObjectStore(n.t.Context(), wire.Scope{}.Bucket("snap"))
	if err != nil {
		n.t.Fatal(err)
	}
	return obs
}

func (n *natsd) consumers() (names []string) {
	n.t.Helper()
	s, err := n.jetStream().Stream(n.t.Context(), wire.Scope{}.Stream())
	if err != nil {
		n.t.Fatal(err)
	}
	for name := range s.ConsumerNames(n.t.Context()).Name() {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// hasSnapshot reports whether there is a snapshot at or after a position.
func (n *natsd) hasSnapshot(from uint64) bool {
	e, err := n.state().Get(context.Background(), "head")
	if err != nil {
		return false
	}
	var seq uint64
	if i := strings.Index(string(e.Value()), `"last_seq":`); i >= 0 {
		fmt.Sscanf(string(e.Value())[i:], `"last_seq":%d`, &seq)
	}
	return seq >= from && seq > 0
}

func TestReplicasKnowWhatTheEnginesCache(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 5)
	a := startReplica(t, n.connect(), "a", durable.Config{})
	e.work(500)
	b := startReplica(t, n.connect(), "b", durable.Config{}) // starts late
	e.work(500)
	e.mustKnow(a, b)
	if got, want := n.consumers(), []string{"kvroute-a", "kvroute-b"}; !slices.Equal(got, want) {
		t.Errorf("consumers %v, want %v", got, want)
	}
	info := n.streamInfo()
	if c := info.Config; c.MaxAge != time.Hour || c.Retention != jetstream.LimitsPolicy || c.Duplicates != 2*time.Minute || c.Discard != jetstream.DiscardOld {
		t.Errorf("the stream is %+v", c)
	}
	if a.Position() != info.State.LastSeq {
		t.Errorf("position %d, want %d", a.Position(), info.State.LastSeq)
	}
}

// A router with a retention sets it on the stream, whichever program created the stream. Without a
// retention the stream's setting stays, or messages are kept for an hour.
func TestRetention(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	for i, c := range []struct{ set, want time.Duration }{{0, time.Hour}, {3 * time.Hour, 3 * time.Hour}, {0, 3 * time.Hour}, {30 * time.Minute, 30 * time.Minute}} {
		r := startReplica(t, n.connect(), fmt.Sprint("r", i), durable.Config{Retention: c.set})
		natstest.Eventually(t, r.Ready)
		if got := n.streamInfo().Config; got.MaxAge != c.want || got.Duplicates != 2*time.Minute {
			t.Errorf("with a retention of %v the stream keeps messages for %v, repeated ids for %v, want %v and 2m", c.set, got.MaxAge, got.Duplicates, c.want)
		}
		r.kill()
	}
	if _, err := durable.New(nil, durable.Config{Retention: time.Minute}); err == nil {
		t.Error("a retention below that of snapshots is taken")
	}
}

// Above the threshold a snapshot is taken and the stream is shortened. A third replica that starts
// after the first two have died has the complete state.
func TestAThirdReplicaHasTheFullState(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 5)
	conf := durable.Config{SnapshotThreshold: 50}
	a, b := startReplica(t, n.connect(), "a", conf), startReplica(t, n.connect(), "b", conf)
	e.workUntil(func() bool { return n.streamInfo().State.FirstSeq > 50 })
	e.mustKnow(a, b)
	a.kill()
	b.kill()
	e.work(300) // no replica runs
	c := startReplica(t, n.connect(), "c", conf)
	e.mustKnow(c)
	if !c.log.Has("a snapshot is restored") {
		t.Error("the replica did not start from a snapshot")
	}
}

// A replica that restarts under the same name continues from its snapshot.
func TestARestartUnderTheSameName(t *testing.T) {
	t.Parallel()
	n, e, a := settled(t, 3, 300, durable.Config{})
	a.stop() // stop writes a snapshot
	at := a.Position()
	if !n.hasSnapshot(at) {
		t.Error("the last snapshot is missing")
	}
	e.restart(1) // only the snapshot has the events of its previous process
	e.work(200)
	b := startReplica(t, n.connect(), "a", durable.Config{})
	e.mustKnow(b)
	if got := n.consumers(); len(got) != 1 {
		t.Errorf("consumers %v, want one", got)
	}
}

func TestSnapshotsAreTakenAfterSomeTime(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 3)
	a := startReplica(t, n.connect(), "a", durable.Config{}, func(t *durable.Timing) { t.SnapshotAge = 100 * time.Millisecond })
	e.work(100)
	e.mustKnow(a)
	natstest.Eventually(t, func() bool { return n.hasSnapshot(a.Position()) })
	at := a.Position()
	e.work(100)
	natstest.Eventually(t, func() bool { return n.hasSnapshot(at + 1) })
}

// When one replica resets, all replicas drop their state and read it again.
func TestResettingStatesReachesAllReplicas(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 4)
	conf := durable.Config{SnapshotThreshold: 30}
	a, b := startReplica(t, n.connect(), "a", conf), startReplica(t, n.connect(), "b", conf)
	e.workUntil(func() bool { return n.hasSnapshot(1) })
	e.mustKnow(a, b)

	// No replica knows the blocks from before the reset; every replica knows the blocks stored
	// after it.
	reset := conf
	reset.ResetStates = true
	c := startReplica(t, n.connect(), "c", reset)
	for _, r := range []*replica{a, b, c} {
		natstest.Eventually(t, func() bool { return len(r.content()) == 0 })
	}
	e.truth = indexer.New(indexer.Config{})
	for w := range e.held {
		e.held[w] = nil
	}
	e.workUntil(func() bool { return n.hasSnapshot(1) })
	e.mustKnow(a, b, c)
	d := startReplica(t, n.connect(), "d", conf)
	e.mustKnow(d)
}

// An epoch that begins above the stream's last message is refused, by running replicas and by new ones: all messages
// would be dropped. A reset replaces it.
func TestAForgedEpochIsRefused(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 4)
	conf := durable.Config{SnapshotThreshold: 30}
	a := startReplica(t, n.connect(), "a", conf)
	e.workUntil(func() bool { return n.hasSnapshot(1) })
	stream, err := n.jetStream().Stream(t.Context(), wire.Scope{}.Stream())
	if err != nil {
		t.Fatal(err)
	}
	kv, err := n.jetStream().KeyValue(t.Context(), wire.Scope{}.Bucket("state"))
	if err != nil {
		t.Fatal(err)
	}
	for i, forged := range []string{
		fmt.Sprintf(`{"epoch": 7, "start": 1000000000, "stream": %d}`, stream.CachedInfo().Created.UnixNano()),
		`{"epoch": 18446744073709551615}`,
	} {
		if _, err := kv.Put(t.Context(), "epoch", []byte(forged)); err != nil {
			t.Fatal(err)
		}
		natstest.Eventually(t, func() bool { return strings.Count(a.log.String(), "is refused") == i+1 })
		e.work(100)
		b := startReplica(t, n.connect(), fmt.Sprint("b", i), conf)
		e.mustKnow(a, b)
		if n := strings.Count(b.log.String(), "is refused"); n != 1 {
			t.Errorf("a new replica logs %d refusals", n)
		}
	}
	reset := conf
	reset.ResetStates = true
	c := startReplica(t, n.connect(), "c", reset)
	for _, r := range []*replica{a, c} {
		natstest.Eventually(t, func() bool { return len(r.content()) == 0 })
	}
}

// The consumer of a replica that is gone for long is removed, because it would block the purge for
// ever.
func TestOrphanConsumersAreRemoved(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	e := startEngines(t, n.connect(), 3)
	quick := func(t *durable.Timing) { t.Inactive = 500 * time.Millisecond }
	conf := durable.Config{SnapshotThreshold: 20}
	a, b := startReplica(t, n.connect(), "a", conf, quick), startReplica(t, n.connect(), "b", conf, quick)
	e.workFor(100 * time.Millisecond)
	e.mustKnow(a, b)
	b.kill()
	at := b.Position()
	e.workFor(200 * time.Millisecond)
	e.mustKnow(a)
	natstest.Eventually(t, func() bool { return slices.Equal(n.consumers(), []string{"kvroute-a"}) })
	e.workUntil(func() bool { return n.streamInfo().State.FirstSeq > at+1 })
	again := startReplica(t, n.connect(), "b", conf, quick)
	e.mustKnow(a, again)
}

// Two processes with the same name do not share deliveries: the first one continues under another
// name.
func TestTwoProcessesWithOneName(t *testing.T) {
	t.Parallel()
	n, e, a := settled(t, 3, 100, durable.Config{})
	b := startReplica(t, n.connect(), "a", durable.Config{})
	e.workFor(300 * time.Millisecond)
	e.mustKnow(a, b)
	if !a.log.Has("another process has this replica's name") {
		t.Error("nobody says that two processes have one name")
	}
	if got := n.consumers(); len(got) != 2 {
		t.Errorf("consumers %v, want two", got)
	}
}
