// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/zmtp"
)

const (
	// settle is how long a subscription is given to reach the engine before a
	// replay is asked for: what is published in between would be in neither.
	settle = 20 * time.Millisecond
	// replayTime bounds an answer, silence and all.
	replayTime = 30 * time.Second
	// An engine's ROUTER socket queues as many messages for an asker as ZeroMQ does unless
	// told otherwise, and drops the others, the end among them. An answer of so many may
	// lack any that follow: when it ends, or pauses for replayPause, the rest is asked for.
	replayQueue = 1000
	replayPause = 500 * time.Millisecond
	// replayTries is how often a question is put before it is given up.
	replayTries = 8
	// rebuildEvery is how often everything is asked for of a suspect rank.
	rebuildEvery = time.Minute
	pollEvery    = 100 * time.Millisecond
	// partialFor is how long a rank that was heard too late counts as partial: what it
	// held before is mostly evicted by then.
	partialFor = 10 * time.Minute
)

// rankSource follows the events of one rank.
type rankSource struct {
	s      *Sources
	worker *EngineWorker
	at     socket
	log    *slog.Logger
	engine *Engine
	stream *stream

	// mu is held while anything below, the engine or the stream changes: a state that is
	// saved is one between two batches.
	mu sync.Mutex

	ctx context.Context //nolint:containedctx // the metrics want one wherever something is counted
	// spoken are the ranks that the socket spoke for.
	spoken map[uint32]struct{}
	lied   bool // it spoke for others; said once

	state  atomic.Uint32 // a KnownState
	copies atomic.Int64
	gap    time.Time // when events of TensorRT-LLM were missing last
	misfit bool      // blocks were left out for their size
	fits   bool      // blocks were told of
}

func newRankSource(s *Sources, w *EngineWorker, at socket, log *slog.Logger) *rankSource {
	r := &rankSource{
		s: s, worker: w, at: at, log: events.QuietLog(log),
		engine: NewEngine(EngineOptions{
			BlockSize: w.BlockSize, Rank: at.rank,
			SetLike: w.SetLike || w.Engine == "sglang" || w.Engine == "trtllm",
		}),
		spoken: map[uint32]struct{}{at.rank: {}},
	}
	r.state.Store(uint32(KnownNothing))
	r.stream = newStream(at.replays, r.apply, r.clear, r.count)
	return r
}

func (r *rankSource) known() KnownState { return KnownState(r.state.Load()) }

func (r *rankSource) count(outcome string, n int) {
	r.s.metrics.count(r.ctx, outcome, n)
	switch outcome {
	case sourceLost:
		r.log.Warn("events of an engine are lost; what is known of the rank may be wrong", "batches", n)
	case sourceRestart:
		r.log.Info("an engine started anew; its blocks are forgotten")
	case sourceGap:
		r.log.Info("events of an engine are missing; it is asked for them")
	case sourceOverflow:
		r.log.Warn("too many events came while lost ones were asked for")
	}
}

// run follows the rank until ctx ends.
func (r *rankSource) run(ctx context.Context) {
	r.ctx = ctx
	if r.at.plane {
		r.followPlane(ctx)
		return
	}
	r.locked(r.clear) // whatever was known of it is another source's
	r.restore()
	if r.at.url != "" {
		r.poll(ctx)
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	news := make(chan news, 64)
	wg.Go(func() { r.connect(ctx, news) })
	q := question{r: r, news: news}
	defer q.end()
	rebuild := time.NewTicker(rebuildEvery)
	defer rebuild.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case n := <-news:
			r.locked(func() { r.take(&q, n) })
		case <-q.due():
			r.locked(func() { q.put(ctx, &wg) })
		case <-q.surely:
			r.locked(r.stream.askAgain)
		case <-rebuild.C:
			r.locked(r.stream.tryAll)
			r.copies.Store(int64(r.engine.Copies()))
		}
		q.follow()
		r.judge()
	}
}

func (r *rankSource) locked(do func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	do()
}

// news is what the goroutines of a rank's sockets tell.
type news struct {
	kind   newsKind
	closed bool // of a connection: the port was closed before it
	ask    int  // of an answer: the question
	err    error
	frames Frames
}

type newsKind uint8

const (
	newsConnected newsKind = iota
	newsAway
	newsLive
	newsReplay
	newsReplayEnd
	newsUnanswered
)

func (r *rankSource) take(q *question, n news) {
	b := batch{publisher: n.frames.Publisher, sequence: n.frames.Sequence, body: n.frames.Body}
	switch n.kind {
	case newsConnected:
		r.count(sourceConnected, 1)
		r.log.Info("an engine's events are heard", "endpoint", r.at.events.String(), "replay", r.at.replays)
		r.set(KnownWell)
		r.stream.connected(n.closed)
		q.surely = time.After(settleSurely)
	case newsAway:
		r.count(sourceAway, 1)
		r.log.Warn("an engine's events are not heard any more", "endpoint", r.at.events.String(), "err", n.err)
		r.set(KnownNothing)
	case newsLive:
		r.count(sourceLive, 1)
		r.stream.fromLive(b)
	case newsReplay:
		if n.ask == r.stream.asks {
			r.stream.fromReplay(b)
		}
	case newsReplayEnd:
		if n.ask == r.stream.asks {
			r.stream.replayEnd()
		}
	case newsUnanswered:
		if n.ask == r.stream.asks {
			q.failed(n.err)
		}
	}
}

// judge says how well the rank is known.
func (r *rankSource) judge() {
	state := KnownWell
	switch {
	case r.known() == KnownNothing:
		return // until it is connected
	case r.misfit && !r.fits:
		state = KnownMisfit
	case r.stream.suspect:
		state = KnownSuspect
	case r.stream.partial:
		state = KnownPartly
	}
	if r.known() != state {
		r.log.Info("how well a rank's cache is known has changed", "state", state.String())
		r.set(state)
	}
}

func (r *rankSource) set(state KnownState) {
	r.state.Store(uint32(state))
	r.s.conf.Changed(r.worker.ID, r.s.State(r.worker.ID))
}

// clear tells that nothing is known of the ranks any more.
func (r *rankSource) clear() {
	for rank := range r.spoken {
		r.deliver(r.engine.Clear(rank))
	}
}

// apply tells what a batch says.
func (r *rankSource) apply(body []byte) (cleared bool) {
	if b, err := DecodeBatch(body); err == nil {
		return r.applyBatch(&b)
	}
	m, err := events.DecodeMessage(body)
	if err != nil {
		r.count(sourceBad, 1)
		r.log.Debug("a message of an engine cannot be read", "err", err)
		return false
	}
	// The event plane: a publisher beside the engine made the hashes.
	if m.Bad > 0 {
		r.count(sourceBad, m.Bad)
	}
	for _, ev := range m.Events {
		if ev.WorkerID != r.worker.ID || !r.own(ev.DPRank) {
			r.lie(ev.WorkerID, ev.DPRank)
			continue
		}
		if ev.Foreign || ev.Event.Kind == 0 {
			continue
		}
		r.fits = true
		r.spoken[ev.DPRank] = struct{}{}
		cleared = cleared || ev.Event.Kind == indexer.Cleared
		r.deliver(ev)
	}
	return cleared
}

func (r *rankSource) applyBatch(b *EngineBatch) (cleared bool) {
	for i := range b.Events {
		if ev := &b.Events[i]; ev.HasRank {
			if !r.own(ev.Rank) {
				r.lie(r.worker.ID, ev.Rank)
				return false // of one rank is the whole batch
			}
			r.spoken[ev.Rank] = struct{}{}
		}
	}
	evs, drops := r.engine.Apply(b)
	r.s.metrics.drops(r.ctx, drops)
	if drops[DropSize] > 0 && !r.misfit {
		r.misfit = true
		r.log.Error("an engine's blocks are of a size that fits no block of the index", "block_size", r.worker.BlockSize)
	}
	for _, ev := range evs {
		r.fits = r.fits || ev.Event.Kind == indexer.Stored
		cleared = cleared || ev.Event.Kind == indexer.Cleared
		r.deliver(ev)
	}
	return cleared
}

func (r *rankSource) own(rank uint32) bool {
	return rank >= r.worker.DPStart && rank-r.worker.DPStart < max(1, r.worker.DPSize)
}

func (r *rankSource) lie(worker uint64, rank uint32) {
	r.count(sourceForeign, 1)
	if !r.lied {
		r.lied = true
		r.log.Warn("a socket speaks for others than its worker's ranks; that is not believed", "claimed_worker", worker, "claimed_rank", rank,
			"dp_start", r.worker.DPStart, "dp_size", max(1, r.worker.DPSize))
	}
}

func (r *rankSource) deliver(ev events.RouterEvent) {
	events.Parts(ev.Event, func(part indexer.Event) {
		r.s.conf.Sink(r.worker.ID, ev.DPRank, part) // a rank that it does not know has no blocks
	})
}

// connect keeps a connection to the engine's socket.
func (r *rankSource) connect(ctx context.Context, out chan<- news) {
	wait := backoff{}
	for closed := false; ctx.Err() == nil; {
		c, err := zmtp.Dial(ctx, r.at.events, zmtp.Sub, r.s.conf.dialer)
		if err != nil {
			closed = closed || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT)
			r.log.Debug("an engine's socket is not there", "err", err)
			wait.wait(ctx)
			continue
		}
		wait = backoff{}
		r.hear(ctx, c, closed, out)
		closed = false
		wait.wait(ctx)
	}
}

// hear tells what comes over a connection until it ends.
func (r *rankSource) hear(ctx context.Context, c *zmtp.Conn, closed bool, out chan<- news) {
	stop := context.AfterFunc(ctx, func() { _ = c.Close() }) // Read then ends
	defer stop()
	defer func() { _ = c.Close() }() // again, perhaps
	err := c.Subscribe(r.at.topic)
	if err != nil {
		return
	}
	if r.at.replays {
		select {
		case <-ctx.Done():
			return
		case <-time.After(settle):
		}
	}
	if !tell(ctx, out, news{kind: newsConnected, closed: closed}) {
		return
	}
	record := r.s.conf.Recorder
	record.news(r.at.rank, "connected", r.at.events.String())
	for {
		var frames [][]byte
		if frames, err = c.Read(); err != nil {
			break
		}
		record.live(r.at.rank, frames)
		f, err := SplitFrames(frames)
		if err != nil || f.End {
			r.s.metrics.count(ctx, sourceBad, 1)
			r.log.Debug("a message is not an engine's", "frames", len(frames), "err", err)
			continue
		}
		if f.Plane && f.Topic != events.Topic {
			continue // the prefix of ours, and another one
		}
		if !tell(ctx, out, news{kind: newsLive, frames: f}) {
			return
		}
	}
	record.news(r.at.rank, "disconnected", err.Error())
	tell(ctx, out, news{kind: newsAway, err: err})
}

func tell(ctx context.Context, out chan<- news, n news) bool {
	select {
	case <-ctx.Done():
		return false
	case out <- n:
		return true
	}
}

// question is what the engine is asked: the stream's question as it goes out, is
// tried again, or is given up.
type question struct {
	r      *rankSource
	news   chan<- news
	ask    int // the stream's number of the question that is out or due
	from   uint64
	tries  int
	cancel context.CancelFunc // of the one that is out
	timer  <-chan time.Time   // nil unless one is due
	surely <-chan time.Time   // when what follows is asked for once more
	wait   backoff
}

func (q *question) due() <-chan time.Time { return q.timer }

// follow sees whether the stream has a question other than the one that is out.
func (q *question) follow() {
	s := q.r.stream
	if s.asks == q.ask {
		return
	}
	q.end()
	q.ask, q.tries, q.wait, q.timer = s.asks, 0, backoff{}, nil
	if s.asking != askNothing {
		q.timer = now()
	}
}

// now is a timer that has fired.
func now() <-chan time.Time {
	c := make(chan time.Time, 1)
	c <- time.Time{}
	return c
}

func (q *question) end() {
	if q.cancel != nil {
		q.cancel()
		q.cancel = nil
	}
}

// put puts the question.
func (q *question) put(ctx context.Context, wg *sync.WaitGroup) {
	q.timer = nil
	q.end()
	limited, cancel := context.WithTimeout(ctx, replayTime)
	q.cancel = cancel
	from, ask := q.r.stream.begin(), q.ask
	q.from = from
	q.r.count(sourceAsked, 1)
	wg.Go(func() {
		err := q.r.replay(limited, from, ask, q.news)
		n := news{kind: newsReplayEnd, ask: ask}
		if err != nil {
			n = news{kind: newsUnanswered, ask: ask, err: err}
		}
		tell(ctx, q.news, n) // also when the question's own time is over
	})
}

// failed puts the question again, later, or gives it up. Of a cut answer the rest is asked
// for at once, as long as each brings something.
func (q *question) failed(err error) {
	if errors.Is(err, errCut) && q.r.stream.from() > q.from {
		q.r.count(sourceCut, 1)
		q.tries, q.timer = 0, now()
		return
	}
	q.r.count(sourceUnanswered, 1)
	if q.tries++; q.tries >= replayTries {
		q.r.log.Warn("an engine does not send lost events again: what came since is applied without them, the rank is suspect, and everything is asked for every minute",
			"tries", q.tries, "every", rebuildEvery.String(), "err", err)
		q.r.stream.giveUp()
		return
	}
	q.r.log.Debug("an engine does not answer", "err", err)
	q.timer = time.After(q.wait.step())
}

// errCut says that an answer is so long that some of it may have been dropped.
var errCut = errors.New("an answer longer than the engine's queue")

// replay asks the engine for the batches from a sequence on.
func (r *rankSource) replay(ctx context.Context, from uint64, ask int, out chan<- news) error {
	request := ReplayFrames(from)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	pause := time.AfterFunc(replayTime, func() { cancel(errCut) })
	pause.Stop() // until the answer is long
	defer pause.Stop()
	n := 0
	err := r.s.askSocket(ctx, r.at.replay, request[:], func(frames [][]byte) (more bool, err error) {
		pause.Stop() // it is the engine's that counts
		r.s.conf.Recorder.reply(r.at.rank, request[:], frames)
		f, err := SplitFrames(frames)
		switch {
		case err != nil:
			return false, err
		case f.End && n >= replayQueue:
			return false, errCut
		case f.End:
			return false, nil
		case !tell(ctx, out, news{kind: newsReplay, ask: ask, frames: f}):
			return false, ctx.Err()
		}
		if n++; n >= replayQueue {
			pause.Reset(replayPause)
		}
		return true, nil
	})
	if errors.Is(context.Cause(ctx), errCut) {
		return errCut
	}
	return err
}

// askSocket sends a request to a ROUTER socket and takes what comes back, until take
// wants no more.
func (s *Sources) askSocket(ctx context.Context, at zmtp.Endpoint, request [][]byte, take func(frames [][]byte) (more bool, err error)) error {
	c, err := zmtp.Dial(ctx, at, zmtp.Dealer, s.conf.dialer)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() }) // Read then ends
	defer stop()
	defer func() { _ = c.Close() }() // again, perhaps
	if err := c.Write(request...); err != nil {
		return err
	}
	for {
		frames, err := c.Read()
		if err != nil {
			return err
		}
		if more, err := take(frames); !more || err != nil {
			return err
		}
	}
}

// poll asks TensorRT-LLM's server for what happened. It has no other client: what
// it answers it forgets.
func (r *rankSource) poll(ctx context.Context) {
	wait := backoff{}
	away := true
	copies := time.Now()
	for ctx.Err() == nil {
		b, err := r.pollOnce(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			if !away {
				away = true
				r.count(sourceAway, 1)
				r.set(KnownNothing)
				r.log.Warn("an engine's events are not heard any more", "endpoint", r.at.url, "err", err)
			}
			if errors.Is(err, syscall.ECONNREFUSED) && r.stream.heard {
				r.locked(r.stream.restart) // its process has ended
			}
			wait.wait(ctx)
			continue
		}
		if away {
			away, wait = false, backoff{}
			r.count(sourceConnected, 1)
			r.set(KnownWell)
			r.log.Info("an engine's events are heard", "endpoint", r.at.url)
		}
		if len(b.Events) > 0 || b.Drops != (Drops{}) {
			r.count(sourceLive, 1)
			r.locked(func() {
				if !r.stream.heard && len(b.Events) > 0 && b.Events[0].ID > 0 {
					r.stream.partial, r.gap = true, time.Now() // another client received the first events
				}
				r.stream.heard = true
				gaps := r.engine.gaps
				switch cleared := r.applyBatch(&b); {
				case r.engine.gaps > gaps:
					// What was known is forgotten; what the engine still holds is not known.
					r.stream.partial, r.gap = true, time.Now()
				case cleared:
					r.stream.whole()
				}
			})
			r.judge()
			continue
		}
		if r.stream.partial && !r.gap.IsZero() && time.Since(r.gap) >= partialFor {
			r.locked(r.stream.whole) // the blocks of before are mostly evicted
		}
		r.judge()
		if time.Since(copies) > rebuildEvery {
			copies = time.Now()
			r.copies.Store(int64(r.engine.Copies()))
		}
		select {
		case <-ctx.Done():
		case <-time.After(pollEvery):
		}
	}
}

func (r *rankSource) pollOnce(ctx context.Context) (EngineBatch, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.at.url, bytes.NewReader(nil))
	if err != nil {
		return EngineBatch{}, err
	}
	body, err := r.s.do(req)
	if err != nil {
		return EngineBatch{}, err
	}
	if string(bytes.TrimSpace(body)) != "[]" {
		r.s.conf.Recorder.polled(r.at.rank, body)
	}
	return DecodeTRTLLM(body)
}
