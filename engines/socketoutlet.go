// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/kvroute/kvroute/engines/localindex"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// Ports of rank 0 of a publisher's own sockets, where nothing else is said.
const (
	PlanePort = 5558
	QueryPort = 5658
)

// RankSockets are the sockets of a rank of a publisher without NATS. The publisher's Run
// closes them.
type RankSockets struct {
	Events  net.Listener // a PUB socket with the event plane's frames
	Queries net.Listener // a ROUTER socket
	// Queue is how many messages may wait for one subscriber; 0 is the default of
	// [zmtp.Publisher].
	Queue int
}

// socketOutlet sends the messages of each rank over a socket of its own. Each socket
// numbers its messages.
type socketOutlet struct{ ranks map[uint32]*rankOutlet }

type rankOutlet struct {
	at       RankSockets
	pub      zmtp.Publisher
	sequence uint64
}

func newSocketOutlet(at map[uint32]RankSockets) *socketOutlet {
	o := &socketOutlet{ranks: make(map[uint32]*rankOutlet, len(at))}
	for rank, s := range at {
		o.ranks[rank] = &rankOutlet{at: s, pub: zmtp.Publisher{Queue: s.Queue}}
	}
	return o
}

func (o *socketOutlet) open(ctx context.Context, p *Publisher) (end func(), err error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // the last events are sent later
	var parts sync.WaitGroup
	serve := func(what string, do func() error) {
		parts.Go(func() {
			if err := do(); err != nil {
				p.conf.Log.Error("the publisher does not accept connections any more", "socket", what, "err", err)
			}
		})
	}
	for _, r := range o.ranks {
		serve("events", func() error { return r.pub.Serve(ctx, r.at.Events) })
		serve("queries", func() error {
			return zmtp.Serve(ctx, r.at.Queries, zmtp.Router, func(c *zmtp.Conn) { answerQueries(p, c) })
		})
	}
	return func() {
		cancel()
		parts.Wait()
	}, nil
}

// answerQueries answers a peer's queries until it leaves. A query is an empty frame and the
// query; docs/protocol.md describes the answer.
func answerQueries(p *Publisher, c *zmtp.Conn) {
	for {
		frames, err := c.Read()
		if err != nil {
			return
		}
		if len(frames) != 2 || len(frames[0]) > 0 {
			p.conf.Log.Debug("a message is not a query", "frames", len(frames))
			return
		}
		a := p.reply(frames[1])
		if a == nil {
			continue
		}
		parts := localindex.Split(a)
		for i := range parts {
			body := binary.BigEndian.AppendUint32(nil, uint32(i))
			body = binary.BigEndian.AppendUint32(body, uint32(len(parts)))
			if err := c.Write(nil, events.AppendAnswer(body, &parts[i]), binary.BigEndian.AppendUint64(nil, p.id)); err != nil {
				return
			}
		}
	}
}

// send drops the message for a subscriber that is too slow; the numbers show the gap.
func (o *socketOutlet) send(rank uint32, e events.Envelope) error {
	r := o.ranks[rank]
	if r == nil {
		return fmt.Errorf("events: publish: rank %d has no socket", rank)
	}
	e.Sequence = r.sequence
	r.sequence++
	frames := PlaneFrames(e)
	if n := r.pub.Send(frames[:]...); n > 0 {
		return fmt.Errorf("events: publish: %d subscribers are too slow", n)
	}
	return nil
}

// connection counts subscriptions: messages may have been sent before one.
func (o *socketOutlet) connection() (changes uint64, up bool) {
	for _, r := range o.ranks {
		changes += r.pub.Joined()
	}
	return changes, true
}

func (o *socketOutlet) flush() error {
	deadline := time.Now().Add(time.Second)
	for _, r := range o.ranks {
		r.pub.Drain(deadline)
	}
	return nil
}
