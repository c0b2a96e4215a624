// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"syscall"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/msgpack"
)

// followPlane hands what a publisher says on its own socket to the subscriber until
// ctx ends. What is missed, and what a new process holds, the subscriber asks for:
// nothing is kept here. Each connection is told of once the subscription is on its
// way, so that what was published before is in the answers.
func (r *rankSource) followPlane(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sub := r.s.conf.Subscriber
	heard := make(chan news, 64)
	wg.Go(func() { r.connect(ctx, heard) })
	for {
		var n news
		select {
		case <-ctx.Done():
			return
		case n = <-heard:
		}
		switch n.kind {
		case newsConnected:
			r.count(sourceConnected, 1)
			r.log.Info("a publisher's events are heard", "endpoint", r.at.events.String(), "queries", r.at.replay.String())
			r.set(KnownWell)
			sub.Missed(r.worker.ID, r.at.rank)
		case newsAway:
			r.count(sourceAway, 1)
			r.log.Warn("a publisher's events are not heard any more", "endpoint", r.at.events.String(), "err", n.err)
			r.set(KnownNothing)
		case newsLive:
			if !n.frames.Plane {
				r.count(sourceBad, 1)
				continue
			}
			r.count(sourceLive, 1)
			sub.TakeFrom(ctx, events.FeedZMQ, n.frames.Body, func(worker uint64, dpRank uint32) bool {
				own := worker == r.worker.ID && dpRank == r.at.rank
				if !own {
					r.lie(worker, dpRank)
				}
				return own
			})
		case newsReplay, newsReplayEnd, newsUnanswered: // of engines: queries are asked by sub
		}
	}
}

// Ask puts a query to the local indexer of a Dynamo worker, where [Sources.SetPlane] has
// said, or to the publisher of a worker that is followed with Queries, and
// hands on the parts of the answer until part says that it was the last. It is for
// [events.SubscriberConfig].
func (s *Sources) Ask(ctx context.Context, q events.Query, part func(events.AnswerPart) (more bool)) error {
	if at, ok := s.plane.indexer(q.WorkerID, q.DPRank); ok {
		return askIndexer(ctx, at, q, part)
	}
	at, ok := s.planeOf(q.WorkerID, q.DPRank)
	if !ok {
		return events.ErrNobody
	}
	err := s.askSocket(ctx, at.replay, [][]byte{nil, events.AppendQuery(nil, q)}, func(frames [][]byte) (more bool, err error) {
		p, err := splitPart(frames)
		return err == nil && part(p), err
	})
	if errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%w: %w", events.ErrNobody, err)
	}
	return err
}

// splitPart takes a part of an answer apart: an empty frame; number and count, u32
// big-endian, before the bytes; and the publisher, which others leave out.
func splitPart(frames [][]byte) (events.AnswerPart, error) {
	n := len(frames)
	if n < 2 || n > 3 || len(frames[0]) > 0 || len(frames[1]) < 8 || n == 3 && len(frames[2]) != 8 {
		return events.AnswerPart{}, fmt.Errorf("events: read an answer: %w: %d frames", msgpack.ErrShape, n)
	}
	p := events.AnswerPart{
		Index: int(binary.BigEndian.Uint32(frames[1])), Count: int(binary.BigEndian.Uint32(frames[1][4:])), Data: frames[1][8:],
	}
	if n == 3 {
		p.Publisher = binary.BigEndian.Uint64(frames[2])
	}
	return p, nil
}

// planeOf returns where a rank's publisher is asked.
func (s *Sources) planeOf(worker uint64, dpRank uint32) (at socket, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r := range s.ranks {
		if r.at.plane && r.worker.ID == worker && r.at.rank == dpRank {
			return r.at, true
		}
	}
	return at, false
}
