// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/engine"
)

const (
	// replayTime limits the time of a complete answer.
	replayTime = 30 * time.Second
	// An engine's ROUTER socket queues 1,000 messages for a client, ZeroMQ's default, and
	// drops the others, including the end. So when an answer of that many messages ends, or
	// pauses for replayPause, the rest is requested.
	replayQueue = 1000
	replayPause = 500 * time.Millisecond
	// replayTries is how often a request is sent before it is given up.
	replayTries = 8
	// maxKept limits the bytes of a batch whose memory is kept for the next one.
	maxKept = 1 << 20
	// rebuildEvery is how often all batches of a suspect rank are requested.
	rebuildEvery = time.Minute
)

// rankSource follows the events of one rank of a worker. For an engine's sockets, one
// goroutine receives live batches and another one requests missing batches.
type rankSource struct {
	s      *Sources
	worker *EngineWorker
	at     socket
	log    *slog.Logger

	wake          chan struct{} // holds a token while the stream may have another request
	secondRequest *time.Timer   // fires when batches are to be requested once more

	mu sync.Mutex
	// mu guards the fields below. Between two batches the state can be saved.
	engine        *Engine
	stream        *stream
	batch         EngineBatch         // the last one; its memory is reused
	translated    output              // of the batch; its memory is reused
	namedRanks    map[uint32]struct{} // ranks that the socket has named
	foreignLogged bool                // a rank that is not the socket's was logged
	gap           time.Time           // when events of TensorRT-LLM were missing last
	misfit        bool                // blocks of an unfit size were ignored
	fits          bool                // blocks were indexed
	muted         bool                // another worker's events are the same and count: see same
	connected     bool                // to the socket of events
	prints        []batchPrint        // of batches that same has not seen yet
	seenRequests  int                 // the stream's requests that the other goroutine has been woken for
	cancel        context.CancelFunc  // of the request under way; nil without a request

	state  atomic.Value // an indexer.State
	copies atomic.Int64
	// The sockets that are unavailable, if any.
	noEvents, noReplay atomic.Pointer[Fault]
}

func newRankSource(s *Sources, w *EngineWorker, at socket, log *slog.Logger) *rankSource {
	r := &rankSource{
		s: s, worker: w, at: at, log: events.QuietLog(log),
		wake: make(chan struct{}, 1), secondRequest: time.NewTimer(secondRequestAfter),
		engine: NewEngine(EngineOptions{
			BlockSize: w.BlockSize, Rank: at.rank, SetLike: w.SetLike || engine.Of(w.Engine).SetLike,
		}),
		namedRanks: map[uint32]struct{}{at.rank: {}},
	}
	r.secondRequest.Stop() // until there is a connection
	r.state.Store(indexer.StateNone)
	r.newStream()
	return r
}

func (r *rankSource) current() indexer.State { return r.state.Load().(indexer.State) } //nolint:forcetypeassert // it holds nothing else

func (r *rankSource) count(outcome string, n int) {
	r.s.metrics.count(outcome, n)
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
	(&subscription{
		s: r.s, at: r.at.events, topic: r.at.topic, log: r.log,
		connected: func(closed bool) {
			r.unavailable(&r.noEvents, nil)
			r.do(func() {
				if r.connected = true; !r.muted {
					r.set(indexer.StateOK)
					r.stream.connected(closed)
				}
			})
			r.secondRequest.Reset(secondRequestAfter)
		},
		disconnected: func() {
			r.do(func() {
				r.connected = false
				r.set(indexer.StateNone)
			})
			r.s.conf.Ended(r.worker.ID)
		},
		message: r.live,
		refused: func(err error) { r.unavailable(&r.noEvents, err) },
	}).run(ctx)
}

// live takes a message of the engine's PUB socket.
func (r *rankSource) live(frames [][]byte) {
	f, err := SplitFrames(frames)
	if err != nil || f.End || f.Plane {
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
		r.stream.fromLive(batch{f.Sequence, f.Body})
	})
}

// do changes the state of the rank. If the stream then has another request, do ends the
// one that is under way.
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
	if r.seenRequests != r.stream.requests {
		r.seenRequests = r.stream.requests
		if r.cancel != nil {
			r.cancel()
		}
		stir(r.wake)
	}
	r.judge()
	prints, r.prints = r.prints, nil
	return prints
}

// judge updates the state that others see.
func (r *rankSource) judge() {
	state := indexer.StateOK
	switch {
	case r.current() == indexer.StateNone:
		return // until it is connected
	case r.misfit && !r.fits:
		state = indexer.StateMisfit
	case r.stream.suspect:
		state = indexer.StateSuspect
	case r.stream.partial:
		state = indexer.StatePartial
	}
	if r.current() != state {
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
		r.prints = append(r.prints, batchPrint{r.stream.last, r.stream.digest})
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
	out := &r.translated
	if tokens := r.s.conf.Tokens; tokens != nil {
		for i := range b.Events {
			if ev := &b.Events[i]; ev.Kind == EngineStored && len(ev.Objects) == 0 && len(ev.Tokens) > 0 {
				tokens(ev.Tokens)
			}
		}
	}
	r.engine.translate(b, out)
	r.s.metrics.drops(&out.drops)
	if out.drops[DropSize] > 0 && !r.misfit {
		r.misfit = true
		r.log.Error("an engine's block size neither divides the index's nor is a multiple of it",
			"block_size", r.worker.BlockSize)
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

// request sends the stream's requests to the engine until ctx ends.
func (r *rankSource) request(ctx context.Context) {
	rebuild := time.NewTicker(rebuildEvery)
	defer rebuild.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.secondRequest.C:
			r.do(func() { r.stream.requestMore() })
		case <-rebuild.C:
			r.do(func() {
				r.stream.requestAll()
				r.copies.Store(int64(r.engine.Copies()))
			})
		case <-r.wake:
			own, cancel := context.WithCancel(ctx)
			r.do(func() { r.cancel = cancel })
			r.requestUntilAnswered(own)
			cancel()
		}
	}
}

// requestUntilAnswered sends the stream's request until it is answered or given up. ctx ends when
// the stream has another request.
func (r *rankSource) requestUntilAnswered(ctx context.Context) {
	var wait backoff
	for tries := 0; ; {
		if tries > 0 {
			wait.wait(ctx)
		}
		r.mu.Lock()
		due, from := r.stream.requesting && ctx.Err() == nil, r.stream.begin()
		r.mu.Unlock()
		if !due {
			return
		}
		r.count(sourceAsked, 1)
		err := r.replay(ctx, from)
		r.do(func() {
			switch {
			case ctx.Err() != nil: // the answer is not needed any more
				return
			case err == nil:
				r.unavailable(&r.noReplay, nil)
				r.stream.replayEnd()
				return
			case errors.Is(err, errCut) && r.stream.from() > from:
				r.count(sourceCut, 1)
				tries, wait = 0, backoff{}
				return
			}
			r.count(sourceUnanswered, 1)
			r.log.Debug("an engine does not answer", "err", err)
			if tries++; tries >= replayTries {
				r.log.Warn("an engine does not send missing events: later ones are applied without them, and all are requested every minute",
					"tries", replayTries, "every", rebuildEvery.String(), "err", err)
				r.unavailable(&r.noReplay, err)
				r.stream.giveUp()
			}
		})
	}
}

// errCut means that an answer is so long that its rest may have been dropped.
var errCut = errors.New("an answer longer than the engine's queue")

// replay requests the batches from a sequence on, and hands them to the stream until ctx ends.
func (r *rankSource) replay(ctx context.Context, from uint64) error {
	request := ReplayFrames(from)
	limited, end := context.WithTimeout(ctx, replayTime)
	defer end()
	limited, cancel := context.WithCancelCause(limited)
	defer cancel(nil)
	pause := time.AfterFunc(replayTime, func() { cancel(errCut) })
	pause.Stop() // until the answer is long
	defer pause.Stop()
	n := 0
	err := r.s.request(limited, r.at.replay, request[:], func(frames [][]byte) (more bool, err error) {
		pause.Stop() // the time to apply a batch does not count
		f, err := SplitFrames(frames)
		switch {
		case err != nil:
			return false, err
		case f.End && n >= replayQueue:
			return false, errCut
		case f.End:
			return false, nil
		}
		r.do(func() {
			if ctx.Err() == nil {
				r.stream.fromReplay(batch{f.Sequence, f.Body})
			}
		})
		if n++; n >= replayQueue {
			pause.Reset(replayPause)
		}
		return true, limited.Err()
	})
	if errors.Is(context.Cause(limited), errCut) {
		return errCut
	}
	return err
}

// unavailable notes why a socket of the rank is unavailable, or that it is available.
func (r *rankSource) unavailable(to *atomic.Pointer[Fault], err error) {
	var f *Fault
	if err != nil {
		kind, where, setting := "event", r.at.where(), "events.endpoint"
		if to == &r.noReplay {
			kind, where, setting = "replay", r.at.replay.String(), "events.replay"
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
			r.newStream()
			switch {
			case muted:
				r.clear()
				r.set(indexer.StateNone)
			case r.connected:
				r.set(indexer.StateOK)
				r.stream.connected(false)
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

// newStream begins a stream. That of a muted source requests nothing.
func (r *rankSource) newStream() {
	r.stream, r.seenRequests = newStream(r.at.replays && !r.muted, r.apply, r.clear, r.count), 0
	if r.cancel != nil {
		r.cancel() // the request of the stream before
	}
}
