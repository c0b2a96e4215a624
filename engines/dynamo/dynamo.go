// SPDX-License-Identifier: Apache-2.0

// Package dynamo reads the cache events of NVIDIA Dynamo's workers: it receives the messages of
// their publishers, and queries their local indexers over Dynamo's request plane. A subscriber of
// package events puts the events in order.
package dynamo

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/msgpack"
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

// Plane lists the publishers of Dynamo's workers.
type Plane struct {
	Channels []Channel
	// Indexers are the local indexers of the ranks.
	Indexers map[events.RankName]Indexer
}

// Spot is a place to receive events from. Several channels may share a subject.
type Spot struct{ endpoint, subject string }

// Config configures a [Listener]. All fields are required.
type Config struct {
	// Subscriber receives the events. It must send its queries with [Listener.Ask].
	Subscriber *events.Subscriber
	// Dialer limits the addresses of sockets.
	Dialer func(*net.Dialer)
	// Count counts a happening by its name in docs/metrics.md.
	Count func(what string, n int)
	Log   *slog.Logger
}

// Listener receives the events of Dynamo's publishers and passes them to the subscriber, which
// orders them and requests missing ones. Events of a rank that has no channel at their spot
// are ignored. The methods may be called by any number of goroutines.
type Listener struct {
	conf Config
	// Changed holds a token while [Listener.Spots] may have changed.
	Changed chan struct{}

	mu sync.Mutex
	// mu guards the fields below.
	ranks    map[Spot][]events.RankName // of the channels; a slice never changes
	indexers map[events.RankName]Indexer
}

// New returns a listener without publishers.
func New(conf Config) *Listener { return &Listener{conf: conf, Changed: make(chan struct{}, 1)} }

// Set replaces the list of publishers. Connections to spots that are in both lists stay.
func (l *Listener) Set(p Plane) {
	ranks := make(map[Spot][]events.RankName)
	for _, c := range p.Channels {
		at := Spot{endpoint: c.Endpoint}
		if c.Endpoint == "" {
			at.subject = c.Subject
		}
		ranks[at] = append(ranks[at], events.RankName{WorkerID: c.Worker, DPRank: c.DPRank})
	}
	l.mu.Lock()
	l.ranks, l.indexers = ranks, p.Indexers
	l.mu.Unlock()
	select {
	case l.Changed <- struct{}{}:
	default:
	}
}

// Spots returns the places to receive events from.
func (l *Listener) Spots() map[Spot]bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := make(map[Spot]bool, len(l.ranks))
	for at := range l.ranks {
		all[at] = true
	}
	return all
}

// ranksAt returns the ranks that may send events to a spot.
func (l *Listener) ranksAt(at Spot) []events.RankName {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ranks[at]
}

// Follow receives the events of a spot until ctx ends. After each connection the subscriber
// queries the ranks of the spot.
func (l *Listener) Follow(ctx context.Context, at Spot) {
	log := meter.Quiet(l.conf.Log)
	if at.endpoint == "" {
		l.followSubject(ctx, at, log.With("subject", at.subject))
		return
	}
	log = log.With("endpoint", at.endpoint)
	endpoint, err := zmtp.ParseEndpoint(at.endpoint, 0, 0)
	if err != nil {
		l.conf.Count("discovery_failed", 1)
		log.Warn("a publisher's endpoint is unusable", "err", err)
		return
	}
	(&zmtp.Subscription{
		At: endpoint, Topic: events.Topic, Dialer: l.conf.Dialer, Log: log,
		Connected: func(bool) {
			l.conf.Count("connected", 1)
			l.missed(at)
		},
		Settled:      func() { l.missed(at) },
		Disconnected: func() { l.conf.Count("disconnected", 1) },
		Message: func(frames [][]byte) {
			topic, body, err := splitFrames(frames)
			switch {
			case err != nil:
				l.conf.Count("bad", 1)
				log.Debug("a message is not one of the event plane", "frames", len(frames), "err", err)
			case topic == events.Topic: // others begin with it
				l.take(ctx, at, body)
			}
		},
	}).Run(ctx)
}

// followSubject receives the events of a subject. The subscriber itself requests events
// that were lost while NATS was unavailable.
func (l *Listener) followSubject(ctx context.Context, at Spot, log *slog.Logger) {
	backoff := zmtp.Backoff{}
	for ctx.Err() == nil {
		sub, err := l.conf.Subscriber.Listen(ctx, at.subject, func(body []byte) { l.take(ctx, at, body) })
		if err != nil {
			log.Warn("subscribing to a subject of publishers failed", "err", err)
			backoff.Wait(ctx)
			continue
		}
		l.missed(at)
		<-ctx.Done()
		_ = sub.Unsubscribe() // fails if the connection is closed
	}
}

func (l *Listener) missed(at Spot) {
	for _, r := range l.ranksAt(at) {
		l.conf.Subscriber.Missed(r.WorkerID, r.DPRank)
	}
}

func (l *Listener) take(ctx context.Context, at Spot, body []byte) {
	l.conf.Count("live", 1)
	l.conf.Subscriber.Take(ctx, events.FeedPlane, body, func(worker uint64, dpRank uint32) bool {
		own := slices.Contains(l.ranksAt(at), events.RankName{WorkerID: worker, DPRank: dpRank})
		if !own {
			l.conf.Count("foreign", 1)
		}
		return own
	})
}

// Ask sends a query to the local indexer of a worker's rank. It calls part with the parts
// of the answer until part returns false. It is for [events.SubscriberConfig].
func (l *Listener) Ask(ctx context.Context, q events.Query, part func(events.AnswerPart) (more bool)) error {
	l.mu.Lock()
	indexer, ok := l.indexers[events.RankName{WorkerID: q.WorkerID, DPRank: q.DPRank}]
	l.mu.Unlock()
	if !ok {
		return events.ErrNobody
	}
	return askIndexer(ctx, indexer, q, part)
}

// planeVersion is the first byte of the event plane's last frame.
const planeVersion = 1

// IsPlane reports whether a ZMQ message has the form of one of the event plane.
func IsPlane(frames [][]byte) bool {
	if len(frames) != 4 || len(frames[1]) != 8 || len(frames[2]) != 8 {
		return false
	}
	last := frames[3]
	return len(last) >= 5 && last[0] == planeVersion
}

// splitFrames decodes a ZMQ message of the event plane. Its numbers must equal those of the
// envelope, which is the body: the input of [events.DecodeMessage].
func splitFrames(frames [][]byte) (topic string, body []byte, err error) {
	if !IsPlane(frames) {
		return "", nil, fmt.Errorf("dynamo: split frames: %w: %d frames", events.ErrMessage, len(frames))
	}
	topic, body = string(frames[0]), frames[3][5:]
	if size := binary.BigEndian.Uint32(frames[3][1:]); int64(size) != int64(len(body)) {
		return "", nil, fmt.Errorf("dynamo: split frames: %w: %d bytes, %d announced", msgpack.ErrShape, len(body), size)
	}
	e, err := events.DecodeEnvelope(body)
	if err != nil {
		return "", nil, err
	}
	publisher, sequence := binary.BigEndian.Uint64(frames[1]), binary.BigEndian.Uint64(frames[2])
	if e.PublisherID != publisher || e.Sequence != sequence {
		return "", nil, fmt.Errorf("dynamo: split frames: %w: publisher %d, sequence %d; the envelope says %d, %d",
			msgpack.ErrShape, publisher, sequence, e.PublisherID, e.Sequence)
	}
	return topic, body, nil
}
