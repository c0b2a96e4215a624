// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/router"
)

// syncWorld is a set of replicas with real routers on an in-memory bus that can lose and
// repeat messages. All runs in one goroutine, on a clock moved by hand; the replicas'
// clocks differ by minutes.
type syncWorld struct {
	t        testing.TB
	rand     *rand.Rand
	now      time.Time
	replicas []*syncReplica
	workers  []uint64
	loss     float64 // share of the messages that are lost
	repeat   float64 // share of the messages that arrive twice
	calm     bool    // no message is lost; only then ids repeat, and replicas report first tokens of others

	live map[string]*liveRequest // the slow model: by replica and id
	// Requests whose first token another replica reported. The report may still be on its
	// way, and would apply to the next request with the same id.
	noticed map[string]bool
}

type syncReplica struct {
	number  int
	id      uint64
	router  *router.Router
	sync    *Sync
	out     *sender
	in      *receiver
	inbox   []*nats.Msg
	away    bool
	breaks  uint64
	ahead   time.Duration
	booked  int
	changes []router.Change // in the order of publication
}

type liveRequest struct {
	replica, worker int
	leg             int    // worker of its prefill leg, -1 without one
	id, prompt      string // a letter is a block
	started         bool
	untracked       bool // its worker does not compute the prompt
}

const (
	syncBlock   = 8
	prefillOnly = 100 // workers from this id on take prefill legs only
)

func workerIDs(set map[uint64]bool) []uint64 { return slices.Sorted(maps.Keys(set)) }

func interleave(r *rand.Rand, by map[uint64][][]byte) (all [][]byte) {
	left := maps.Clone(by)
	for len(left) > 0 {
		keys := slices.Sorted(maps.Keys(left))
		k := keys[r.IntN(len(keys))]
		all = append(all, left[k][0])
		if left[k] = left[k][1:]; len(left[k]) == 0 {
			delete(left, k)
		}
	}
	return all
}

func newSyncWorld(t testing.TB, seed uint64, n int, workers ...uint64) *syncWorld {
	w := &syncWorld{t: t, rand: rand.New(rand.NewPCG(seed, 1)), now: time.Unix(1_755_000_000, 0), workers: workers, live: map[string]*liveRequest{}, noticed: map[string]bool{}}
	for range n {
		w.join()
	}
	return w
}

func workerInfo(at int, id uint64) router.WorkerInfo {
	role := router.Decode // without a prefill worker it takes whole requests
	if id >= prefillOnly {
		role = router.Prefill
	}
	return router.WorkerInfo{ID: id, Role: role, Models: []string{"m"}, BlockSize: syncBlock, Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(at >> 8), byte(at)}), 8000)}
}

// join starts a replica that knows all workers and has no state of the others.
func (w *syncWorld) join() *syncReplica {
	r := &syncReplica{number: len(w.replicas), id: w.rand.Uint64() & (1<<53 - 1), ahead: time.Duration(w.rand.IntN(600)-300) * time.Second}
	now := func() time.Time { return w.now.Add(r.ahead) }
	var err error
	if r.router, err = router.New(router.Config{
		Now: now, PredictTTL: -1, Seed: w.rand.Uint64(),
		Hooks: router.Hooks{Tell: func(c router.Change) {
			c.Sequence = slices.Clone(c.Sequence)
			r.changes = append(r.changes, c)
			r.sync.Publish(c)
		}},
	}); err != nil {
		w.t.Fatal(err)
	}
	for i, id := range w.workers {
		if err := r.router.SetWorker(workerInfo(i, id)); err != nil {
			w.t.Fatal(err)
		}
	}
	if r.sync, err = NewSync(nil, SyncConfig{
		ID: r.id, Apply: r.router.PeerChanged, Remove: r.router.RemovePeer, FirstToken: r.router.MarkPrefillCompleted, Now: now,
	}); err != nil {
		w.t.Fatal(err)
	}
	r.sync.times.jitter = 0
	r.sync.link = link{
		publish:    func(subject, reply string, data []byte) error { w.publish(r, subject, reply, data); return nil },
		connected:  func() bool { return !r.away },
		reconnects: func() uint64 { return r.breaks },
		room:       func() int { return 6 << 10 }, // small, so that batches and lists are split
	}
	r.out, r.in = newSender(r.sync), newReceiver(r.sync)
	w.replicas = append(w.replicas, r)
	r.out.present(false)
	return r
}

func (w *syncWorld) publish(from *syncReplica, subject, reply string, data []byte) {
	for _, to := range w.replicas {
		if to.away || to != from && w.rand.Float64() < w.loss {
			continue
		}
		for copies := 1; copies > 0; copies-- {
			if w.rand.Float64() < w.repeat {
				copies++
			}
			to.inbox = append(to.inbox, &nats.Msg{Subject: subject, Reply: reply, Data: slices.Clone(data)})
		}
	}
}

// deliver has a replica read up to n messages.
func (w *syncWorld) deliver(r *syncReplica, n int) {
	for ; n > 0 && len(r.inbox) > 0; n-- {
		m := r.inbox[0]
		r.inbox = r.inbox[1:]
		switch {
		case m.Subject == r.sync.listRequests(r.id):
			lists, ids := replySubjects(m, nil)
			r.out.sendList(lists)
			r.out.sendIDs(ids)
		case slices.Contains([]string{r.sync.topic, r.sync.presence, r.sync.lists}, m.Subject):
			r.in.message(m.Subject, m.Data)
		}
		select {
		case <-r.sync.announce:
			r.out.present(false)
		default:
		}
	}
}

// settle ends the faults: no more messages are lost, and time passes.
func (w *syncWorld) settle() {
	w.loss, w.repeat = 0, 0
	for range 20 {
		for _, r := range w.replicas {
			r.out.flush(false)
			r.out.present(false)
		}
		for range 3 {
			w.now = w.now.Add(presentEvery / 3)
			for range 4 {
				for _, r := range w.replicas {
					w.deliver(r, len(r.inbox))
				}
			}
			for _, r := range w.replicas {
				w.deliver(r, len(r.inbox))
				r.in.tick()
			}
		}
	}
}

func (w *syncWorld) prompt() string {
	letters := "ab"
	n := w.rand.IntN(12)
	b := make([]byte, n)
	for i := range b {
		b[i] = letters[w.rand.IntN(len(letters))]
	}
	return string(b)
}

func syncTokens(prompt string) (tokens []uint32) {
	for _, l := range prompt {
		for range syncBlock {
			tokens = append(tokens, uint32(l))
		}
	}
	return append(tokens, 7) // the last token fills no block
}

func (w *syncWorld) book(r *syncReplica, id string) {
	q := &liveRequest{replica: r.number, id: id, prompt: w.prompt()}
	d, err := r.router.BestWorker(w.t.Context(), router.Request{ID: id, Owned: true, Model: "m", Tokens: syncTokens(q.prompt)})
	if err != nil {
		w.t.Fatal(err)
	}
	q.worker, q.leg = slices.Index(w.workers, d.Worker.ID), -1
	if d.Prefill != nil {
		q.leg, q.untracked = slices.Index(w.workers, d.Prefill.Worker.ID), true
	}
	w.live[fmt.Sprint(r.number, "/", id)] = q
}

func (w *syncWorld) some() (string, *liveRequest) {
	keys := slices.Sorted(maps.Keys(w.live))
	if len(keys) == 0 {
		return "", nil
	}
	k := keys[w.rand.IntN(len(keys))]
	return k, w.live[k]
}

// load is the sum of a worker's requests.
type syncLoad struct{ requests, pending, blocks int }

// want recomputes every worker's load from the list of requests.
func (w *syncWorld) want() []syncLoad {
	loads, blocks := make([]syncLoad, len(w.workers)), make([]map[string]bool, len(w.workers))
	for i := range blocks {
		blocks[i] = map[string]bool{}
	}
	for _, q := range w.live {
		tokens := len(q.prompt)*syncBlock + 1
		l := &loads[q.worker]
		if l.requests++; !q.started && !q.untracked {
			l.pending += tokens
		}
		if q.leg >= 0 {
			loads[q.leg].requests++
			loads[q.leg].pending += tokens
		}
		for i := range q.prompt {
			blocks[q.worker][q.prompt[:i+1]] = true
		}
		l.blocks = len(blocks[q.worker])
	}
	return loads
}

func (w *syncWorld) check(when string) {
	w.t.Helper()
	want := w.want()
	for _, r := range w.replicas {
		for _, s := range r.router.Workers() {
			at := slices.Index(w.workers, s.Worker.ID)
			if got := (syncLoad{s.ActiveRequests, s.PendTokens, s.ActiveBlocks}); got != want[at] {
				w.t.Fatalf("%s: replica %d of %d holds %+v on worker %d, want %+v", when, r.number, len(w.replicas), got, s.Worker.ID, want[at])
			}
		}
		for _, from := range r.in.peers {
			if !from.ask.IsZero() {
				w.t.Fatalf("%s: replica %d is not sure of %d", when, r.number, from.id)
			}
		}
	}
}

// kill ends a replica with all its requests in flight.
func (w *syncWorld) kill(r *syncReplica) {
	maps.DeleteFunc(w.live, func(_ string, q *liveRequest) bool { return q.replica == r.number })
	w.replicas = slices.DeleteFunc(w.replicas, func(o *syncReplica) bool { return o == r })
}

// After any faults of the bus, every replica's load equals that of all replicas'
// requests, recomputed from their list.
func TestSyncWorld(t *testing.T) {
	seeds := uint64(120)
	if testing.Short() {
		seeds = 30
	}
	for seed := range seeds {
		workers := []uint64{11, 12, 13}
		if seed%7 < 3 {
			workers[2] = prefillOnly // each request has a prefill leg
		}
		w := newSyncWorld(t, seed, 2+int(seed%3), workers...)
		all := slices.Clone(w.replicas)
		w.calm = seed%12 == 0 && seed%5 != 0
		for round := range 3 {
			w.loss, w.repeat = float64(seed%4)/10, float64(seed%3)/10
			for range 150 {
				w.step()
			}
			for _, r := range w.replicas {
				if r.away {
					r.away = false
					r.breaks++
				}
			}
			if seed%5 == 0 && round == 1 {
				if seed%2 == 0 { // a goodbye message, which may be lost
					w.replicas[0].out.present(true)
				}
				w.kill(w.replicas[0])
				all = append(all, w.join())
				all[len(all)-1].number = len(all) - 1
			}
			w.settle()
			w.check(fmt.Sprintf("seed %d, round %d", seed, round))
		}
		for _, q := range w.live {
			all[q.replica].router.Free(q.id)
		}
		clear(w.live)
		w.settle()
		w.check(fmt.Sprintf("seed %d, at the end", seed))
		for _, r := range all {
			checkChanges(t, r.changes)
		}
	}
}

// step executes one random operation.
func (w *syncWorld) step() {
	r := w.replicas[w.rand.IntN(len(w.replicas))]
	key, q := w.some()
	var owner *syncReplica
	for _, o := range w.replicas {
		if q != nil && o.number == q.replica {
			owner = o
		}
	}
	switch n := w.rand.IntN(22); {
	case n < 6:
		// Two replicas may get the same id, and one of them again later. This does not
		// happen while messages are lost: a replica that missed the end of the first
		// request would confuse the two. Some ids contain their owner.
		id := fmt.Sprint("r", w.rand.IntN(40))
		if !w.calm {
			r.booked++
			id = fmt.Sprint("r", r.booked)
		}
		if w.rand.IntN(2) == 0 {
			id = fmt.Sprintf("%016x-%s", r.id, id)
		}
		if key := fmt.Sprint(r.number, "/", id); w.live[key] == nil && !w.noticed[key] {
			w.book(r, id)
		}
	case n < 8 && owner != nil:
		if owner.router.MarkPrefillCompleted(q.id) == q.started && !w.noticed[key] {
			w.t.Fatalf("the first token of %s had an effect: %v", key, q.started)
		}
		q.started, q.leg = true, -1
	case n < 9 && owner != nil && len(q.id) > 17 && w.calm:
		// Another replica reports the first token, if it has the request.
		if r != owner && r.router.MarkPrefillCompleted(q.id) {
			q.started, q.leg, w.noticed[key] = true, -1, true
		}
	case n < 10 && owner != nil:
		to := w.rand.IntN(len(w.workers))
		owner.router.Served(q.id, router.Response{Address: workerInfo(to, 0).Address, Status: 200})
		if first := firstWorker(owner.changes, q.id); q.worker == slices.Index(w.workers, first.ID) {
			q.worker = to // a request moves once, from where it was booked
		}
	case n < 14 && owner != nil:
		if w.rand.IntN(2) == 0 {
			owner.router.Free(q.id)
		} else {
			owner.router.Abandon(q.id)
		}
		delete(w.live, key)
	case n < 15:
		w.now = w.now.Add(time.Duration(w.rand.IntN(1000)) * time.Millisecond)
	case n < 16:
		for _, r := range w.replicas {
			w.deliver(r, len(r.inbox))
			r.in.tick()
		}
	case n < 17:
		r.out.present(false)
	case n < 18 && !w.calm && w.rand.IntN(8) == 0:
		if r.away = !r.away; !r.away {
			r.breaks++
		}
	case n < 19 && owner != nil && q.untracked:
		owner.router.PrefillFailed(q.id)
		q.leg, q.untracked = -1, false
	case n < 20 && owner != nil && q.leg >= 0:
		owner.router.Free(q.id + "/prefill")
		q.leg = -1
	default:
		r.out.flush(false)
		w.deliver(r, 1+w.rand.IntN(20))
	}
}

// firstWorker returns the worker of the latest booking with an id.
func firstWorker(changes []router.Change, id string) router.Worker {
	for _, c := range slices.Backward(changes) {
		if c.ID == id && c.Kind == router.SlotTaken {
			return c.Worker
		}
	}
	return router.Worker{}
}

// checkChanges returns an error if a router published the changes of its slots in a wrong
// order.
func checkChanges(t *testing.T, changes []router.Change) {
	t.Helper()
	started := map[string]bool{}
	for i, c := range changes {
		was, taken := started[c.ID]
		switch {
		case c.Owner != 0:
		case (c.Kind == router.SlotTaken) == taken, c.Kind == router.FirstToken && was:
			t.Fatalf("change %d, %v of %s, does not follow", i, c.Kind, c.ID)
		case c.Kind == router.SlotFreed:
			delete(started, c.ID)
		default:
			started[c.ID] = was || c.Kind == router.FirstToken
		}
	}
}

// A replica without peers sends nothing. A new replica learns all requests of the first
// one, including changes during its query. A replica whose peers left stops sending after
// a while.
func TestSyncAlone(t *testing.T) {
	w := newSyncWorld(t, 1, 1, 11, 12)
	first := w.replicas[0]
	published := func() (n int) {
		for _, m := range first.inbox {
			if m.Subject == first.sync.topic {
				n++
			}
		}
		return n
	}
	w.settle()
	for i := range 3 * syncBatch {
		w.book(first, fmt.Sprint("before", i))
	}
	first.out.flush(false)
	first.out.present(false)
	if published() > 0 || first.out.next == 0 {
		t.Fatalf("%d messages without a receiver, next is number %d", published(), first.out.next)
	}

	second := w.join()
	second.number = 1
	w.deliver(second, len(second.inbox)) // second receives first's presence; first has not received second's
	w.book(first, "between")
	w.deliver(first, len(first.inbox)) // first receives second's presence and publishes its position again
	w.book(first, "behind")
	w.settle()
	w.check("together")
	w.book(first, "later")
	first.out.flush(false)
	if published() == 0 {
		t.Fatal("with another replica present no change is sent")
	}

	w.kill(second)
	w.settle()
	w.now = w.now.Add(syncQuietAfter)
	w.settle()
	w.book(first, "alone again")
	first.out.flush(false)
	if published() > 0 {
		t.Fatal("a change is sent without another replica")
	}
}
