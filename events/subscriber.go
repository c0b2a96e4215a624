// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/beat"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/wire"
)

// SubscriberConfig configures a [Subscriber]. Sink is required; the zero value of each other field means its default.
type SubscriberConfig struct {
	Scope wire.Scope
	Sink  Sink
	// Knows reports whether the sink knows a worker. Events of a worker that neither the
	// sink nor [Subscriber.SetWorker] knows wait. Default: it knows every worker.
	Knows func(workerID uint64) bool
	// Changed, if not nil, is called when the state of a rank changes, one call at a
	// time and in order. It must not call methods of the subscriber.
	Changed func(workerID uint64, dpRank uint32, s indexer.State)
	// Ask sends a query to a worker of [FeedPlane], and calls part with the parts of the answer until it returns
	// false. The error is the reason why no more parts come. Default: [ErrNobody].
	Ask func(ctx context.Context, q Query, part func(AnswerPart) (more bool)) error
	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log gets a line for each loss. Default none.
	Log *slog.Logger
	// Meter creates the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// Subscriber passes the events of a scope's workers to a sink.
type Subscriber struct {
	conf    SubscriberConfig
	nc      *nats.Conn
	metrics *metrics
	inbox   string         // subject of answers, without the query's id; set by Run
	pending int            // how many messages may wait in a subscription
	asking  sync.WaitGroup // calls of Ask

	repairing chan struct{} // holds a token if queries have a time or wait

	mu sync.Mutex
	// mu guards the fields below. Nothing that may wait happens while it is held.
	tracker *tracker
	answers map[uint64]*collected // by query

	// queue is what to do after mu is unlocked, in order: events for the sink, publishing,
	// logging and callbacks. One goroutine at a time does it; it has set delivering.
	queue      []delivery
	delivering bool
	delivered  sync.Cond // on mu: delivering is false, or the queue is empty
	blocked    int       // goroutines that wait for delivered
	// Goroutines with messages wait while the queue has more deliveries than maxQueue, or more
	// blocks than maxQueuedBlocks in its events.
	maxQueue, queuedBlocks int
}

// NewSubscriber returns a subscriber. The caller closes the connection.
func NewSubscriber(nc *nats.Conn, conf SubscriberConfig) (*Subscriber, error) {
	if conf.Now == nil {
		conf.Now = time.Now
	}
	conf.Log = meter.Quiet(meter.Log(conf.Log))
	if conf.Knows == nil {
		conf.Knows = func(uint64) bool { return true }
	}
	if conf.Ask == nil {
		conf.Ask = func(context.Context, Query, func(AnswerPart) bool) error { return ErrNobody }
	}
	s := &Subscriber{
		conf: conf, nc: nc,
		pending: 1 << 20, maxQueue: 4096,
		answers: make(map[uint64]*collected), repairing: make(chan struct{}, 1),
	}
	s.delivered.L = &s.mu
	s.tracker = newTracker(func(r RankName, ev indexer.Event) {
		s.queue = append(s.queue, delivery{RankName: r, ev: ev})
		s.queuedBlocks += len(ev.Blocks)
	})
	var err error
	if s.metrics, err = newMetrics(conf.Meter, s); err != nil {
		return nil, err
	}
	s.tracker.count = func(worker uint64, what string, n int) {
		s.metrics.Happened(s.tracker.workers[worker].Feed, what, n)
	}
	s.tracker.gaveUp = func(r RankName) {
		s.laterLocked(func() {
			s.conf.Log.Warn("the missing events of a worker could not be requested; its known blocks stay and may be wrong",
				"worker", r.WorkerID, "dp_rank", r.DPRank)
		})
	}
	if conf.Changed != nil {
		s.tracker.changed = func(r RankName, state indexer.State) {
			s.laterLocked(func() { conf.Changed(r.WorkerID, r.DPRank, state) })
		}
	}
	return s, nil
}

// Periods of [Subscriber.Run].
const (
	tickEvery   = 50 * time.Millisecond  // precision of the times of queries
	idleEvery   = 500 * time.Millisecond // between two ticks without queries
	lossesEvery = time.Second
	expireEvery = 5 * time.Second
	wantedEvery = 500 * time.Millisecond // see [Subscriber.AwaitWanted]
)

// Run receives events from NATS core until ctx ends, and sends queries. After a loss of the
// connection it queries all workers.
func (s *Subscriber) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		s.stop()
		s.asking.Wait()
	}()
	// A burst of the whole fleet must fit into the limits. If it does not, messages are dropped,
	// and the ids of later events show a gap.
	sub, err := s.Listen(ctx, s.conf.Scope.Topic(Topic), func(data []byte) { s.Take(ctx, FeedCore, data, nil) })
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }() // fails if the connection is closed
	s.inbox = s.nc.NewInbox() + "."
	replies, err := s.nc.Subscribe(s.inbox+"*", func(m *nats.Msg) { s.reply(ctx, m) })
	if err != nil {
		return fmt.Errorf("events: subscribe to answers: %w", err)
	}
	defer func() { _ = replies.Unsubscribe() }()                // as above
	if err := replies.SetPendingLimits(-1, 1<<30); err != nil { // the number of queries is bounded
		return fmt.Errorf("events: set limits of answers: %w", err)
	}
	tick := time.NewTimer(beat.Wait(idleEvery))
	defer tick.Stop()
	connection, lost := s.nc.Stats().Reconnects, 0
	expired, checked := time.Now(), time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.repairing:
			bus.Wait(ctx, tickEvery)
		case <-tick.C:
			tick.Reset(beat.Wait(idleEvery))
		}
		s.tick(ctx)
		if now := s.nc.Stats().Reconnects; now != connection && s.nc.IsConnected() {
			connection = now
			s.Audit("NATS was away")
		}
		if time.Since(expired) >= expireEvery {
			expired = time.Now()
			s.expire()
		}
		if time.Since(checked) < lossesEvery {
			continue
		}
		checked = time.Now()
		if dropped, err := sub.Dropped(); err == nil && dropped > lost {
			s.conf.Log.Warn("too slow for the events; messages were dropped", "messages", dropped-lost)
			s.metrics.Received(FeedCore, outcomeSlow, dropped-lost)
			lost = dropped
			s.Audit("too slow for the events")
		}
	}
}

// Listen calls take with each message on a subject. The caller unsubscribes.
func (s *Subscriber) Listen(ctx context.Context, subject string, take func(data []byte)) (*nats.Subscription, error) {
	sub, err := s.nc.Subscribe(subject, func(m *nats.Msg) { take(m.Data) })
	if err != nil {
		return nil, fmt.Errorf("events: subscribe to %s: %w", subject, err)
	}
	if err := sub.SetPendingLimits(s.pending, 256<<20); err != nil {
		return nil, fmt.Errorf("events: set limits of %s: %w", subject, err)
	}
	if s.nc.IsConnected() {
		flush, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_ = s.nc.FlushWithContext(flush) // then the server has the subscription; without a connection it gets it later
	}
	return sub, nil
}

// change changes the tracker, and then makes the deliveries.
func (s *Subscriber) change(do func(t *tracker, now time.Time)) {
	s.mu.Lock()
	defer s.unlock()
	do(s.tracker, s.conf.Now())
}

// SetWorker sets the source of a worker that the sink knows. A call with the same source does nothing.
func (s *Subscriber) SetWorker(id uint64, src Source) {
	s.change(func(t *tracker, now time.Time) { t.setWorker(now, id, src) })
}

// Forget removes a worker that the sink has removed.
func (s *Subscriber) Forget(id uint64) {
	s.change(func(t *tracker, _ time.Time) { t.forget(id) })
}

// Doubt reports that the sink could not apply an event of a rank, so an earlier one is missing.
func (s *Subscriber) Doubt(workerID uint64, dpRank uint32) {
	s.change(func(t *tracker, now time.Time) { t.doubt(now, workerID, dpRank) })
}

// Reread requests all events of a rank from the worker's local indexer, if it has one. It reports whether they are
// requested now, or within about a minute as those of any suspect rank.
func (s *Subscriber) Reread(workerID uint64, dpRank uint32) (requested bool) {
	s.change(func(t *tracker, now time.Time) {
		if requested = t.workers[workerID].Queries && t.ranks[RankName{workerID, dpRank}] != nil; requested {
			t.doubt(now, workerID, dpRank)
		}
	})
	return requested
}

// Wants reports whether there are workers whose events come by a feed.
func (s *Subscriber) Wants(feed Feed) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, src := range s.tracker.workers {
		if src.Feed == feed {
			return true
		}
	}
	return false
}

// AwaitWanted returns when there is a worker whose events come by a feed, or ctx ends.
func (s *Subscriber) AwaitWanted(ctx context.Context, feed Feed) {
	for !s.Wants(feed) && bus.Wait(ctx, beat.Wait(wantedEvery)) {
	}
}

func (s *Subscriber) expire() {
	var byFeed map[Feed]int
	s.change(func(t *tracker, now time.Time) { byFeed = t.expire(now) })
	dropped := 0
	for feed, n := range byFeed {
		s.metrics.Received(feed, outcomeDropped, n)
		dropped += n
	}
	if dropped > 0 {
		s.conf.Log.Warn("events of workers that never registered, or of publishers that their records do not name, were dropped", "events", dropped)
	}
}

// streamed reports whether the stream stores the events of a worker.
func (s *Subscriber) streamed(worker uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tracker.streamed(worker)
}

// Take applies one message of a feed. whose, if not nil, selects the ranks for which the sender may
// publish. Calls for one worker must not overlap.
func (s *Subscriber) Take(ctx context.Context, feed Feed, data []byte, whose func(worker uint64, dpRank uint32) bool) {
	s.applyMessage(ctx, feed, data, whose, func(bool) {})
}

// applyMessage applies one message of a feed. It calls applied with mu locked; gap reports that events
// before the message are missing and not requested.
func (s *Subscriber) applyMessage(
	ctx context.Context, feed Feed, data []byte, whose func(worker uint64, dpRank uint32) bool, applied func(gap bool),
) {
	m, err := DecodeMessage(data)
	if err != nil {
		s.metrics.Received(feed, outcomeBad, 1)
		s.conf.Log.Debug("a message has no events for us", "err", err)
		m = Message{}
	}
	if m.Bad > 0 {
		s.metrics.Received(feed, outcomeBad, m.Bad)
		s.conf.Log.Debug("events could not be read", "publisher", m.Envelope.PublisherID, "events", m.Bad)
	}
	now := s.conf.Now()
	if at := m.Envelope.PublishedAt; at > 0 {
		s.metrics.late.Record(ctx, max(0, now.Sub(time.UnixMilli(int64(at))).Seconds()))
	}
	if whose != nil {
		n := len(m.Events)
		m.Events = slices.DeleteFunc(m.Events, func(ev RouterEvent) bool { return !whose(ev.WorkerID, ev.DPRank) })
		s.metrics.Received(feed, outcomeForeign, n-len(m.Events))
	}
	known := make([]bool, len(m.Events))
	for i, ev := range m.Events {
		if known[i] = i > 0 && ev.WorkerID == m.Events[i-1].WorkerID && known[i-1]; !known[i] {
			known[i] = s.conf.Knows(ev.WorkerID)
		}
	}
	gap := false
	s.mu.Lock()
	defer s.unlockAndWait()
	for i, ev := range m.Events {
		if s.tracker.past(m.Envelope, ev.WorkerID) {
			s.metrics.Received(feed, outcomeMany, 1)
			continue
		}
		v := s.tracker.accept(now, feed, m.Envelope.PublisherID, ev, known[i])
		s.metrics.event(feed, &ev, v.outcome)
		gap = gap || v.gap && !v.held
		level, text := slog.LevelWarn, ""
		switch {
		case v.unnamed:
			text = "a publisher speaks for a worker whose record names another one; its events wait for the record to change"
		case v.gap && v.held:
			level, text = slog.LevelDebug, "events of a worker are missing; they are requested"
		case v.gap:
			text = "events of a worker are missing; what is known of it stays and may be wrong"
		case v.outcome == outcomeRestart:
			level, text = slog.LevelInfo, "a worker's publisher restarted"
		case v.second:
			text = "two publishers speak for one rank; its blocks are not cleared any more"
		}
		if text != "" {
			s.laterLocked(func() {
				s.conf.Log.Log(ctx, level, text, "worker", ev.WorkerID, "dp_rank", ev.DPRank, "event", ev.EventID, "publisher", m.Envelope.PublisherID) //nolint:sloglint // one of the texts above
			})
		}
	}
	applied(gap)
}

// Missed reports that a rank of a worker of [FeedPlane] is reachable from now on,
// and that events may have been lost before.
func (s *Subscriber) Missed(workerID uint64, dpRank uint32) {
	s.change(func(t *tracker, now time.Time) { t.missed(now, workerID, dpRank) })
}

// tick sends the queries that are due.
func (s *Subscriber) tick(ctx context.Context) {
	connected := s.nc.IsConnected()
	s.mu.Lock()
	defer s.unlock()
	now := s.conf.Now()
	s.tracker.tick(now)
	s.sendLocked(ctx, now, connected)
	for id := range s.answers {
		if s.tracker.repairs.asked[id] == nil {
			delete(s.answers, id) // the rest of the answer is not needed
		}
	}
}

// sendLocked sends queries after mu is unlocked. Without a connection it sends only those to
// workers with sockets of their own.
func (s *Subscriber) sendLocked(ctx context.Context, now time.Time, connected bool) {
	for _, a := range s.tracker.queries(now, func(worker uint64) bool { return connected || s.tracker.workers[worker].Feed == FeedPlane }) {
		q := &a.query
		s.answers[a.id] = &collected{query: *q}
		if s.tracker.workers[q.WorkerID].Feed == FeedPlane {
			s.asking.Go(func() { s.ask(ctx, a.id, a.query) })
			continue
		}
		s.laterLocked(func() {
			err := s.nc.PublishRequest(QuerySubject(s.conf.Scope, q.WorkerID, strconv.FormatUint(uint64(q.DPRank), 10)),
				s.inbox+strconv.FormatUint(a.id, 10), AppendQuery(nil, *q))
			if err != nil {
				s.change(func(t *tracker, now time.Time) {
					delete(s.answers, a.id)
					t.queryFailed(now, a.id, "refused")
				})
			}
		})
	}
}

// ask sends a query to a worker's socket and waits for the answer.
func (s *Subscriber) ask(ctx context.Context, id uint64, q Query) {
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	if err := s.conf.Ask(ctx, q, func(p AnswerPart) (more bool) { return s.part(ctx, id, p, nil) }); err != nil {
		s.part(ctx, id, AnswerPart{}, err)
	}
}

// reply handles a NATS message with an answer or a part of one.
func (s *Subscriber) reply(ctx context.Context, m *nats.Msg) {
	id, err := strconv.ParseUint(strings.TrimPrefix(m.Subject, s.inbox), 10, 64)
	if err != nil {
		return
	}
	if len(m.Data) > 0 || m.Header.Get("Status") != "503" {
		p, err := partOf(m)
		s.part(ctx, id, p, err)
		return
	}
	s.part(ctx, id, AnswerPart{}, ErrNobody)
}

// part handles a part of the answer to a query, or the reason why no answer comes. It reports
// whether more parts are needed. Calls for one query must not overlap.
func (s *Subscriber) part(ctx context.Context, id uint64, p AnswerPart, err error) (more bool) {
	s.mu.Lock()
	c := s.answers[id]
	s.mu.Unlock()
	if c == nil {
		s.metrics.Happened(FeedAny, "stale", 1)
		return false
	}
	var done bool
	if err == nil {
		done, err = c.add(p)
	}
	if err == nil && !done {
		return true
	}
	connected := s.nc.IsConnected()
	s.mu.Lock()
	defer s.unlock()
	now := s.conf.Now()
	delete(s.answers, id)
	if err == nil {
		s.metrics.Received(s.tracker.workers[c.query.WorkerID].Feed, outcomeBad, c.answer.Bad)
		s.tracker.answer(now, id, c.publisher, &c.answer)
	} else {
		why := "bad_answer"
		if errors.Is(err, ErrNobody) {
			why = "nobody"
		}
		s.laterLocked(func() {
			s.conf.Log.Debug("a query about a worker's events has failed", "worker", c.query.WorkerID,
				"dp_rank", c.query.DPRank, "err", err)
		})
		s.tracker.queryFailed(now, id, why)
	}
	s.sendLocked(ctx, now, connected)
	return false
}

// stop fails all queries: the subscription of the answers is gone.
func (s *Subscriber) stop() {
	s.change(func(t *tracker, now time.Time) {
		for id := range s.answers {
			t.queryFailed(now, id, "stopped")
		}
		clear(s.answers)
	})
}

// ErrNobody means that a query has no receiver.
var ErrNobody = errors.New("nobody answers")
