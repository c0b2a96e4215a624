// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
)

// link is the connection to the bus. Tests have one that loses messages.
type link struct {
	publish    func(subject, reply string, data []byte) error
	connected  func() bool
	reconnects func() uint64 // since the start
	room       func() int    // the largest message, in bytes
}

func linkOf(nc *nats.Conn) link {
	return link{
		publish: func(subject, reply string, data []byte) error {
			return nc.PublishMsg(&nats.Msg{Subject: subject, Reply: reply, Data: data})
		},
		connected:  nc.IsConnected,
		reconnects: func() uint64 { return nc.Stats().Reconnects },
		room:       func() int { return int(nc.MaxPayload()) },
	}
}

// send publishes a message. Without a connection it returns an error, since nats.go would
// send the message late.
func (l *link) send(subject, reply string, data []byte) error {
	if !l.connected() {
		return nats.ErrConnectionReconnecting
	}
	return l.publish(subject, reply, data)
}

// subscriptions are the subscriptions of one run.
type subscriptions struct {
	nc  *nats.Conn
	all []*nats.Subscription
}

// add subscribes a channel to a subject. If the queue is not empty, one of its members
// receives each message.
func (s *subscriptions) add(subject, queue string, in chan *nats.Msg) error {
	sub, err := s.nc.ChanQueueSubscribe(subject, queue, in)
	if err != nil {
		return fmt.Errorf("subscribe to %s: %w", subject, err)
	}
	s.all = append(s.all, sub)
	return nil
}

func (s *subscriptions) end() {
	for _, sub := range s.all {
		_ = sub.Unsubscribe() // fails if the connection is closed, when there is nothing to end
	}
}

// latency measures the delay of one sender's messages, by clocks that may differ: the
// quickest message of this window and the one before has no delay. The zero value is ready.
type latency struct {
	now, before int64 // the least difference of the clocks in ms, in this window and the one before
	since       time.Time
}

// of returns the delay of a message.
func (l *latency) of(now time.Time, publishedMS uint64, window time.Duration) time.Duration {
	diff := now.UnixMilli() - int64(publishedMS)
	switch {
	case l.since.IsZero():
		l.now, l.before, l.since = diff, diff, now
	case now.Sub(l.since) >= window:
		l.before, l.now, l.since = l.now, diff, now
	}
	l.now = min(l.now, diff)
	return time.Duration(diff-min(l.now, l.before)) * time.Millisecond
}

// clip shortens a text for a log line or an error.
func clip(s string) string { return s[:min(len(s), 128)] }
