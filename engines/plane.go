// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// Channel is where a publisher of Dynamo's event plane sends the events of one rank: a
// socket, or a subject of NATS.
type Channel struct {
	Publisher uint64
	Endpoint  string // tcp://host:port of its PUB socket; empty for NATS
	Subject   string // if Endpoint is empty
	Worker    uint64
	DPRank    uint32
}

// WorkerRank names a rank of a worker.
type WorkerRank struct {
	WorkerID uint64
	DPRank   uint32
}

// Plane lists the publishers of Dynamo's workers.
type Plane struct {
	Channels []Channel
	// Indexers are the local indexers of the ranks.
	Indexers map[WorkerRank]Indexer
}

// spot is a place to receive events from. Several channels may share a subject.
type spot struct{ endpoint, subject string }

// plane receives the events of Dynamo's publishers and hands them to the Subscriber, which
// orders them and requests missing ones. Events of a rank that has no channel at their spot
// are ignored.
type plane struct {
	s    *Sources
	wake chan struct{} // holds a token while spots may have changed

	mu sync.Mutex
	// mu guards the fields below.
	ranks    map[spot][]WorkerRank // of the channels; a slice never changes
	indexers map[WorkerRank]Indexer
}

// SetPlane replaces the list of Dynamo's publishers. Connections to spots that are in both
// lists stay.
func (s *Sources) SetPlane(p Plane) {
	ranks := make(map[spot][]WorkerRank)
	for _, c := range p.Channels {
		at := spot{endpoint: c.Endpoint}
		if c.Endpoint == "" {
			at.subject = c.Subject
		}
		ranks[at] = append(ranks[at], WorkerRank{c.Worker, c.DPRank})
	}
	s.plane.mu.Lock()
	s.plane.ranks, s.plane.indexers = ranks, p.Indexers
	s.plane.mu.Unlock()
	stir(s.plane.wake)
}

func (p *plane) spots() map[spot]bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make(map[spot]bool, len(p.ranks))
	for at := range p.ranks {
		all[at] = true
	}
	return all
}

// follow receives the events of a spot until ctx ends.
func (p *plane) follow(ctx context.Context, at spot) {
	l := planeListener{s: p.s, ctx: ctx, ranks: func() []WorkerRank {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.ranks[at]
	}}
	if at.endpoint == "" {
		l.log = events.QuietLog(p.s.conf.Log).With("subject", at.subject)
		l.followSubject(at.subject)
		return
	}
	l.log = events.QuietLog(p.s.conf.Log).With("endpoint", at.endpoint)
	endpoint, err := zmtp.ParseEndpoint(at.endpoint, 0, 0)
	if err != nil {
		p.s.metrics.count(sourceUndiscovered, 1)
		l.log.Warn("a publisher's endpoint is unusable", "err", err)
		return
	}
	l.followSocket(endpoint)
}

// planeListener hands the messages of a spot to the Subscriber. After each connection the
// Subscriber queries the ranks of the spot.
type planeListener struct {
	s     *Sources
	ctx   context.Context //nolint:containedctx // of the function that follows
	log   *slog.Logger
	ranks func() []WorkerRank // may send events here
}

func (l *planeListener) followSocket(at zmtp.Endpoint) {
	again := time.AfterFunc(secondRequestAfter, l.missed)
	again.Stop() // until there is a connection
	defer again.Stop()
	(&subscription{
		s: l.s, at: at, topic: events.Topic, log: l.log, disconnected: func() {},
		connected: func(bool) {
			l.missed()
			again.Reset(secondRequestAfter)
		},
		message: func(frames [][]byte) {
			f, err := SplitFrames(frames)
			switch {
			case err != nil || !f.Plane:
				l.s.metrics.count(sourceBad, 1)
				l.log.Debug("a message is not one of the event plane", "frames", len(frames), "err", err)
			case f.Topic == events.Topic: // others begin with it
				l.take(f.Body)
			}
		},
	}).run(l.ctx)
}

// followSubject receives the events of a subject. The Subscriber itself requests events
// that were lost while NATS was unavailable.
func (l *planeListener) followSubject(subject string) {
	wait := backoff{}
	for l.ctx.Err() == nil {
		sub, err := l.s.conf.Subscriber.Listen(l.ctx, subject, l.take)
		if err != nil {
			l.log.Warn("subscribing to a subject of publishers failed", "err", err)
			wait.wait(l.ctx)
			continue
		}
		l.missed()
		<-l.ctx.Done()
		_ = sub.Unsubscribe() // fails if the connection is closed
	}
}

func (l *planeListener) missed() {
	for _, r := range l.ranks() {
		l.s.conf.Subscriber.Missed(r.WorkerID, r.DPRank)
	}
}

func (l *planeListener) take(body []byte) {
	l.s.metrics.count(sourceLive, 1)
	l.s.conf.Subscriber.Take(l.ctx, events.FeedPlane, body, func(worker uint64, dpRank uint32) bool {
		own := slices.Contains(l.ranks(), WorkerRank{worker, dpRank})
		if !own {
			l.s.metrics.count(sourceForeign, 1)
		}
		return own
	})
}

// Ask sends a query to the local indexer of a Dynamo worker's rank. It calls part with the parts
// of the answer until part returns false. It is for [events.SubscriberConfig].
func (s *Sources) Ask(ctx context.Context, q events.Query, part func(events.AnswerPart) (more bool)) error {
	s.plane.mu.Lock()
	indexer, ok := s.plane.indexers[WorkerRank{q.WorkerID, q.DPRank}]
	s.plane.mu.Unlock()
	if !ok {
		return events.ErrNobody
	}
	return askIndexer(ctx, indexer, q, part)
}
