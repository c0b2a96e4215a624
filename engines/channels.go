// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// settleSurely is after how long the ranks of a new connection are asked once more. Dynamo's
// publishers, unlike ours, say nothing when somebody has subscribed: where one is slow to
// take the subscription, what it publishes between the first answer and that is lost, and
// nothing shows it before the rank's next event.
const settleSurely = 2 * time.Second

// Channel is where a publisher of Dynamo's event plane is heard: at a socket, or on
// a subject of the bus.
type Channel struct {
	Publisher uint64
	Endpoint  string // tcp://host:port of its PUB socket; empty for the bus
	Subject   string // that its messages have, if Endpoint is empty
	// Bound says that the publisher speaks for one rank, Worker's DPRank. One that is
	// not bound may speak for every worker of its Group.
	Bound  bool
	Worker uint64
	DPRank uint32
	Group  string
}

// WorkerRank names a rank of a worker.
type WorkerRank struct {
	WorkerID uint64
	DPRank   uint32
}

// Plane is all that is known of the publishers of Dynamo's workers.
type Plane struct {
	Channels []Channel
	// Indexers says where the local indexer of a rank is asked.
	Indexers map[WorkerRank]Indexer
	// Groups are the workers' groups, for channels that are not bound.
	Groups map[uint64]string
}

// spot is what makes one channel to be listened to: who may speak there can change
// meanwhile.
type spot struct{ endpoint, subject string }

// plane is the part of [Sources] that follows Dynamo's publishers.
//
// The events go to the Subscriber as those of [events.FeedPlane], which puts them in order
// and asks for what is missing: nothing is kept here. Of what comes from a place only
// that counts which is of a rank that a publisher there may speak for.
type plane struct {
	s    *Sources
	wake chan struct{} // holds one token while places are to be opened or left

	mu sync.Mutex
	// mu guards the field below.
	known Plane
}

// SetPlane replaces what is known of Dynamo's publishers. What is not in p any more
// is not listened to any more, and what is goes on.
func (s *Sources) SetPlane(p Plane) {
	s.plane.mu.Lock()
	s.plane.known = p
	s.plane.mu.Unlock()
	select {
	case s.plane.wake <- struct{}{}:
	default:
	}
}

// spots are those to be listened to.
func (p *plane) spots() map[spot]struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make(map[spot]struct{})
	for _, c := range p.known.Channels {
		at := spot{endpoint: c.Endpoint}
		if c.Endpoint == "" {
			at.subject = c.Subject
		}
		all[at] = struct{}{}
	}
	return all
}

// speaks reports whether a publisher at a place may speak for a rank.
func (p *plane) speaks(at spot, worker uint64, dpRank uint32) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.known.Channels {
		c := &p.known.Channels[i]
		if !c.at(at) {
			continue
		}
		if c.Bound && c.Worker == worker && c.DPRank == dpRank {
			return true
		}
		if group, ok := p.known.Groups[worker]; !c.Bound && ok && group == c.Group {
			return true
		}
	}
	return false
}

func (c *Channel) at(p spot) bool {
	return c.Endpoint == p.endpoint && (c.Endpoint != "" || c.Subject == p.subject)
}

// speakers are the ranks that may be spoken for at a place.
func (p *plane) speakers(at spot) (ranks []WorkerRank) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.known.Channels {
		c := &p.known.Channels[i]
		switch {
		case !c.at(at):
		case c.Bound:
			ranks = append(ranks, WorkerRank{c.Worker, c.DPRank})
		default:
			for r := range p.known.Indexers {
				if p.known.Groups[r.WorkerID] == c.Group {
					ranks = append(ranks, r)
				}
			}
		}
	}
	return ranks
}

// indexer returns where a rank's local indexer is asked.
func (p *plane) indexer(worker uint64, dpRank uint32) (at Indexer, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at, ok = p.known.Indexers[WorkerRank{worker, dpRank}]
	return at, ok
}

// run listens until ctx ends.
func (p *plane) run(ctx context.Context) {
	type listening struct {
		cancel context.CancelFunc
		done   chan struct{}
	}
	running := make(map[spot]listening)
	leave := func(at spot) {
		running[at].cancel()
		<-running[at].done
		delete(running, at)
	}
	for {
		wanted := p.spots()
		for at := range running {
			if _, ok := wanted[at]; !ok {
				leave(at)
			}
		}
		for at := range wanted {
			if _, ok := running[at]; ok {
				continue
			}
			own, cancel := context.WithCancel(ctx)
			l := listening{cancel, make(chan struct{})}
			running[at] = l
			go func() {
				defer close(l.done)
				if at.endpoint != "" {
					p.followSocket(own, at)
				} else {
					p.followSubject(own, at)
				}
			}()
		}
		select {
		case <-ctx.Done():
			for at := range running {
				leave(at)
			}
			return
		case <-p.wake:
		}
	}
}

// followSocket keeps a connection to a publisher's socket until ctx ends.
func (p *plane) followSocket(ctx context.Context, at spot) {
	log := events.QuietLog(p.s.conf.Log).With("endpoint", at.endpoint)
	endpoint, err := zmtp.ParseEndpoint(at.endpoint, 0, 0)
	if err != nil {
		p.s.metrics.count(ctx, sourceUndiscovered, 1)
		log.Warn("a publisher's socket cannot be reached", "err", err)
		return
	}
	wait := backoff{}
	for ctx.Err() == nil {
		c, err := zmtp.Dial(ctx, endpoint, zmtp.Sub)
		if err != nil {
			log.Debug("a publisher's socket is not there", "err", err)
			wait.wait(ctx)
			continue
		}
		if err := p.hear(ctx, at, c, log); ctx.Err() == nil {
			p.s.metrics.count(ctx, sourceAway, 1)
			log.Warn("a publisher's events are not heard any more", "err", err)
		}
		wait = backoff{}
		wait.wait(ctx)
	}
}

// hear takes what comes over a connection until it ends.
func (p *plane) hear(ctx context.Context, at spot, c *zmtp.Conn, log *slog.Logger) error {
	stop := context.AfterFunc(ctx, func() { _ = c.Close() }) // Read then ends
	defer stop()
	defer func() { _ = c.Close() }() // again, perhaps
	if err := c.Subscribe(events.Topic); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(settle):
	}
	p.s.metrics.count(ctx, sourceConnected, 1)
	log.Info("a publisher's events are heard")
	p.missed(at)
	again := time.AfterFunc(settleSurely, func() { p.missed(at) })
	defer again.Stop()
	for {
		frames, err := c.Read()
		if err != nil {
			return err
		}
		f, err := SplitFrames(frames)
		switch {
		case err != nil || !f.Plane:
			p.s.metrics.count(ctx, sourceBad, 1)
			log.Debug("a message is not one of the event plane", "frames", len(frames), "err", err)
		case f.Topic != events.Topic: // which it begins with
		default:
			p.take(ctx, at, f.Body)
		}
	}
}

// missed has all be asked who may speak at a place.
func (p *plane) missed(at spot) {
	for _, r := range p.speakers(at) {
		p.s.conf.Subscriber.Missed(r.WorkerID, r.DPRank)
	}
}

// take hands a message on.
func (p *plane) take(ctx context.Context, at spot, body []byte) {
	p.s.metrics.count(ctx, sourceLive, 1)
	p.s.conf.Subscriber.TakeFrom(ctx, events.FeedPlane, body, func(worker uint64, dpRank uint32) bool {
		own := p.speaks(at, worker, dpRank)
		if !own {
			p.s.metrics.count(ctx, sourceForeign, 1)
		}
		return own
	})
}

// followSubject listens to a subject of the bus until ctx ends. What is lost while the
// bus is away the Subscriber asks for once it is back.
func (p *plane) followSubject(ctx context.Context, at spot) {
	log := events.QuietLog(p.s.conf.Log).With("subject", at.subject)
	wait := backoff{}
	for ctx.Err() == nil {
		sub, err := p.s.conf.Subscriber.Listen(ctx, at.subject, func(data []byte) { p.take(ctx, at, data) })
		if err != nil {
			log.Warn("a subject of publishers cannot be listened to", "err", err)
			wait.wait(ctx)
			continue
		}
		p.missed(at)
		<-ctx.Done()
		if err := sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
			log.Warn("a subject of publishers cannot be left", "err", err)
		}
	}
}
