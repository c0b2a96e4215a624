// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/zmtp"
)

const (
	// An engine's ROUTER socket queues 1,000 messages for a client, ZeroMQ's default, and
	// drops the others, including the end. So when an answer of that many messages ends, or
	// pauses for replayPause, the rest is requested.
	replayQueue = 1000
	replayPause = 500 * time.Millisecond
	// maxKept limits the bytes of a batch whose memory is kept for the next one.
	maxKept = 1 << 20
	// copiesEvery is how often the copies of blocks are counted.
	copiesEvery = time.Minute
)

// rankSource follows the events of one rank of a worker. For an engine's sockets, one
// goroutine receives live batches and another one requests missing batches.
type rankSource struct {
	s      *Sources
	worker *EngineWorker
	at     socket
	log    *slog.Logger

	wake chan struct{} // holds a token while the follower may have something to do

	mu sync.Mutex
	// mu guards the fields below. Between two batches the state can be saved.
	engine         *Engine
	follower       *events.Follower
	batch          EngineBatch         // the last one; its memory is reused
	translated     output              // of the batch; its memory is reused
	namedRanks     map[uint32]struct{} // ranks that the socket has named
	foreignLogged  bool                // a rank that is not the socket's was logged
	kindLogged     bool                // a group of an unknown kind was logged
	unsteadyLogged bool                // that the groups changed too often was logged
	misfit         bool                // blocks of an unfit size were ignored
	fits           bool                // blocks were indexed
	muted          bool                // another worker's events are the same and count: see same
	connected      bool                // to the socket of events
	prints         []batchPrint        // of batches that same has not seen yet
	seenRequests   int                 // the follower's requests that the other goroutine has been woken for
	unanswered     error               // why the last request failed
	counted        time.Time           // when the copies of blocks were counted

	state  atomic.Value // an indexer.State
	copies atomic.Int64
	// The sockets that are unavailable, if any.
	noEvents, noReplay atomic.Pointer[Fault]
}

func newRankSource(s *Sources, w *EngineWorker, at socket, log *slog.Logger) *rankSource {
	r := &rankSource{
		s: s, worker: w, at: at, log: meter.Quiet(log),
		wake: make(chan struct{}, 1),
		engine: NewEngine(EngineOptions{
			BlockSize: w.BlockSize, Rank: at.rank, SetLike: w.SetLike || engine.Of(w.Engine).SetLike,
		}),
		namedRanks: map[uint32]struct{}{at.rank: {}},
	}
	r.state.Store(indexer.StateNone)
	r.newFollower()
	return r
}

func (r *rankSource) current() indexer.State { return r.state.Load().(indexer.State) } //nolint:forcetypeassert // it holds nothing else

func (r *rankSource) count(outcome string, n int) {
	r.s.metrics.count(feedOf(r.worker.Transport), outcome, n)
	switch outcome {
	case sourceLost:
		r.log.Warn("events of an engine are lost; the known blocks of the rank may be wrong", "batches", n)
	case sourceRestart:
		r.log.Info("an engine restarted; its blocks are forgotten")
	case sourceGap:
		r.log.Info("events of an engine are missing; they are requested")
	case sourceOverflow:
		r.log.Warn("too many events of an engine wait for missing ones")
	}
}

// run follows the rank until ctx ends.
func (r *rankSource) run(ctx context.Context) {
	r.do(r.clear) // known blocks are of another source
	if !r.isMuted() {
		r.restore()
	}
	if r.at.url != "" {
		r.poll(ctx)
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { r.request(ctx) })
	(&zmtp.Subscription{
		At: r.at.events, Topic: r.at.topic, Dialer: r.s.conf.dialer, Log: r.log,
		Connected: func(closed bool) {
			r.count(sourceConnected, 1)
			r.unavailable(&r.noEvents, nil)
			r.do(func() {
				if r.connected = true; !r.muted {
					r.set(indexer.StateOK)
					r.follower.Connected(time.Now(), closed)
				}
			})
		},
		Settled: func() { r.do(func() { r.follower.RequestMore(time.Now()) }) },
		Disconnected: func() {
			r.count(sourceAway, 1)
			r.do(func() {
				r.connected = false
				r.set(indexer.StateNone)
			})
			r.s.conf.Ended(r.worker.ID)
		},
		Message: r.live,
		Refused: func(err error) { r.unavailable(&r.noEvents, err) },
	}).Run(ctx)
}

// live takes a message of the engine's PUB socket.
func (r *rankSource) live(frames [][]byte) {
	f, err := SplitFrames(frames)
	if err != nil || f.End {
		r.count(sourceBad, 1)
		r.log.Debug("a message is not an engine's", "frames", len(frames), "err", err)
		return
	}
	r.count(sourceLive, 1)
	r.do(func() {
		if r.muted {
			r.prints = append(r.prints, batchPrint{f.Sequence, xxh3.Hash(f.Body)})
			return
		}
		r.follower.Live(time.Now(), f.Sequence, f.Body)
	})
}

// do changes the state of the rank, and wakes the goroutine of requests if the follower has another one.
func (r *rankSource) do(change func()) {
	if prints := r.change(change); len(prints) > 0 {
		r.s.mute(r.s.same.take(r, prints))
	}
}

// change is do, except that it returns the prints of batches instead of comparing them.
func (r *rankSource) change(change func()) (prints []batchPrint) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
	if n := r.follower.Requests(); r.seenRequests != n {
		r.seenRequests = n
		stir(r.wake)
	}
	r.judge()
	prints, r.prints = r.prints, nil
	return prints
}

// judge updates the state that others see.
func (r *rankSource) judge() {
	state := r.follower.State()
	switch {
	case r.current() == indexer.StateNone:
		return // until it is connected
	case r.misfit && !r.fits:
		state = indexer.StateMisfit
	}
	if r.current() != state {
		stir(r.wake) // a faulty rank is read again later
		r.log.Info("the state of a rank's known blocks has changed", "state", state)
		r.set(state)
	}
}

func (r *rankSource) set(state indexer.State) {
	r.state.Store(state)
	r.s.conf.Changed(r.worker.ID, r.s.State(r.worker.ID))
}

// clear forgets the blocks of the rank.
func (r *rankSource) clear() {
	for rank := range r.namedRanks {
		ev := r.engine.Clear(rank)
		r.deliver(&ev)
	}
}

// apply applies a batch, and reports whether the engine cleared its cache in it.
func (r *rankSource) apply(body []byte) (cleared bool) {
	if err := r.batch.decode(body); err != nil {
		r.count(sourceBad, 1)
		r.log.Debug("a batch of an engine cannot be read", "err", err)
		return false
	}
	cleared = r.applyBatch(&r.batch)
	if r.batch.isEvidence() {
		sequence, digest, _ := r.follower.Last()
		r.prints = append(r.prints, batchPrint{sequence, digest})
		r.prints = r.prints[max(0, len(r.prints)-samePrints):]
	}
	if len(body) > maxKept {
		r.batch, r.translated = EngineBatch{}, output{}
	}
	return cleared
}

func (r *rankSource) applyBatch(b *EngineBatch) (cleared bool) {
	for i := range b.Events {
		if ev := &b.Events[i]; ev.HasRank && (i == 0 || b.Events[i-1].Rank != ev.Rank || !b.Events[i-1].HasRank) {
			if ev.Rank < r.worker.DPStart || ev.Rank-r.worker.DPStart >= max(1, r.worker.DPSize) {
				r.rejectRank(ev.Rank)
				return false // the whole batch is of one rank
			}
			r.namedRanks[ev.Rank] = struct{}{}
		}
	}
	r.count(sourceAccepted, 1)
	out := &r.translated
	if tokens := r.s.conf.Tokens; tokens != nil {
		for i := range b.Events {
			if ev := &b.Events[i]; ev.Kind == EngineStored && len(ev.Objects) == 0 && len(ev.Tokens) > 0 {
				tokens(ev.Tokens)
			}
		}
	}
	r.engine.translate(b, out)
	r.s.metrics.drops(feedOf(r.worker.Transport), &out.drops)
	if out.drops[DropSize] > 0 && !r.misfit {
		r.misfit = true
		r.log.Error("an engine's block size neither divides the index's nor is a multiple of it",
			"block_size", r.worker.BlockSize)
	}
	switch {
	case out.unsteady && !r.unsteadyLogged:
		r.unsteadyLogged = true
		r.log.Warn("groups of the engine's cache change too often: no prompt counts as cached on this rank until a restart")
	case out.unknownKind != "" && !r.kindLogged:
		r.kindLogged = true
		r.log.Warn("a group of the engine's cache has a kind that kvroute does not know: no prompt counts as cached on this rank, until responses show what the engine uses",
			"kind", out.unknownKind)
	}
	for i := range out.events {
		ev := &out.events[i]
		r.fits = r.fits || ev.Event.Kind == indexer.Stored
		cleared = cleared || ev.Event.Kind == indexer.Cleared
		r.deliver(ev)
	}
	return cleared
}

// rejectRank counts events of a rank that is not the socket's.
func (r *rankSource) rejectRank(rank uint32) {
	r.count(sourceForeign, 1)
	if !r.foreignLogged {
		r.foreignLogged = true
		r.log.Warn("events of ranks that are not the socket's are ignored", "claimed_rank", rank,
			"dp_start", r.worker.DPStart, "dp_size", max(1, r.worker.DPSize))
	}
}

func (r *rankSource) deliver(ev *events.RouterEvent) {
	events.Parts(ev.Event, func(part indexer.Event) {
		r.s.conf.Sink(r.worker.ID, ev.DPRank, part)
	})
}

// request sends the follower's requests to the engine until ctx ends.
func (r *rankSource) request(ctx context.Context) {
	var replays sync.WaitGroup
	defer replays.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	end := func() {} // ends the last request
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-r.wake:
		}
		f, id, from, wait := r.tick()
		timer.Reset(wait)
		if id != 0 {
			end()
			own, cancel := context.WithCancel(ctx)
			end = cancel
			replays.Go(func() {
				defer cancel()
				r.replay(own, f, id, from)
			})
		}
	}
}

// tick does what is due, and returns the request to send, as [events.Follower.Tick].
func (r *rankSource) tick() (f *events.Follower, id, from uint64, wait time.Duration) {
	r.do(func() {
		now := time.Now()
		if now.Sub(r.counted) >= copiesEvery {
			r.counted = now
			r.copies.Store(int64(r.engine.Copies()))
		}
		f = r.follower
		id, from, wait = f.Tick(now)
	})
	return f, id, from, min(wait, copiesEvery)
}

var (
	// errCut means that an answer is so long that its rest may have been dropped.
	errCut    = errors.New("an answer longer than the engine's queue")
	errSilent = errors.New("it does not answer in time")
)

// replay sends a request for the batches from a sequence on, and hands the answer to the follower, until ctx ends.
func (r *rankSource) replay(ctx context.Context, f *events.Follower, id, from uint64) {
	request := ReplayFrames(from)
	limited, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	pause := time.AfterFunc(time.Hour, func() { cancel(errCut) })
	pause.Stop() // until the answer is long
	defer pause.Stop()
	n := 0
	err := zmtp.Request(limited, r.at.replay, r.s.conf.dialer, request[:], func(frames [][]byte) (more bool, err error) {
		pause.Stop() // the time to apply a batch does not count
		b, err := SplitFrames(frames)
		switch {
		case err != nil:
			return false, err
		case b.End && n >= replayQueue:
			return false, errCut
		case b.End:
			return false, nil
		}
		r.do(func() { more = f == r.follower && f.Part(time.Now(), id, b.Sequence, b.Body) })
		if n++; n >= replayQueue {
			pause.Reset(replayPause)
		}
		return more, limited.Err()
	})
	if ctx.Err() != nil {
		return // the answer is not needed any more
	}
	if errors.Is(context.Cause(limited), errCut) {
		err = errCut
	}
	r.do(func() {
		if f != r.follower {
			return
		}
		if r.unanswered = err; err == nil {
			r.unavailable(&r.noReplay, nil)
			f.End(time.Now(), id)
			return
		}
		cut := errors.Is(err, errCut)
		if f.Fail(time.Now(), id, cut); !cut {
			r.log.Debug("an engine does not answer", "err", err)
		}
		stir(r.wake)
	})
}

// unavailable notes why a socket of the rank is unavailable, or that it is available.
func (r *rankSource) unavailable(to *atomic.Pointer[Fault], err error) {
	var f *Fault
	if err != nil {
		kind, where, setting := "event", r.at.where(), "events.endpoint"
		if to == &r.noReplay {
			kind, where, setting = "replay", r.at.replay.String(), "events.replay"
		}
		if errors.Is(err, syscall.ECONNREFUSED) { // the text has the address already
			err = syscall.ECONNREFUSED
		}
		f = &Fault{faultRefused, fmt.Sprintf("its %s socket %s (rank %d) is unavailable: %v; is the engine running, and is %s right?",
			kind, where, r.at.rank, err, setting)}
	}
	if old := to.Swap(f); old != f && (old == nil || f == nil || *old != *f) {
		r.s.conf.Faulty(r.worker.ID)
	}
}

// mute mutes the sources whose events another worker's source delivers, too, and those no more muted
// count again. The blocks of a muted source are forgotten, and its state is [indexer.StateNone].
func (s *Sources) mute(changed []*rankSource) {
	for _, r := range changed {
		r.do(func() {
			muted := s.same.by(r) != nil
			if muted == r.muted {
				return
			}
			r.muted = muted
			r.newFollower()
			switch {
			case muted:
				r.clear()
				r.set(indexer.StateNone)
			case r.connected:
				r.set(indexer.StateOK)
				r.follower.Connected(time.Now(), false)
			}
		})
	}
	if len(changed) == 0 {
		return
	}
	s.mu.Lock()
	ids := make([]uint64, 0, len(s.wanted))
	for id := range s.wanted {
		ids = append(ids, id)
	}
	s.mu.Unlock()
	for _, id := range ids { // seldom: any of them may have been the other worker
		s.conf.Faulty(id)
	}
}

// newFollower begins a follower. That of a muted source requests nothing.
func (r *rankSource) newFollower() {
	r.follower, r.seenRequests = events.NewFollower(events.FollowerConfig{
		Replays: r.at.replays && !r.muted, Apply: r.apply, Clear: r.clear, Count: r.count, GaveUp: r.gaveUp,
	}), 0
}

func (r *rankSource) gaveUp() {
	err := cmp.Or(r.unanswered, errSilent)
	if r.noReplay.Load() == nil { // otherwise it was logged at an earlier try
		r.log.Warn("an engine does not send missing events: later ones are applied without them, and all are requested every minute", "err", err)
	}
	r.unavailable(&r.noReplay, err)
}
