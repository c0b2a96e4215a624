// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/engines/localindex"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/wire"
)

// outlet is what a publisher speaks through, and is asked through. It belongs to the
// goroutine of [Publisher.Run], which numbers the messages by calling send.
type outlet interface {
	// open begins to take queries for the publisher. end ends that, and is to be
	// called after an error, too.
	open(p *Publisher) (end func(), err error)
	// send gives a message, whose Sequence it fills in, to those who listen. An
	// error means that some of them may not get it.
	send(ctx context.Context, scope wire.Scope, rank uint32, e events.Envelope) error
	// takes reports whether somebody could be reached now.
	takes() bool
	// connection changes when somebody may have missed messages that were sent
	// without an error.
	connection() uint64
	// flush waits, up to a second, for the last messages to leave.
	flush() error
}

// natsOutlet is an outlet on NATS: core, or a stream.
type natsOutlet struct {
	nc       *nats.Conn
	stream   *streamSender // nil for core
	sequence uint64
}

func (o *natsOutlet) open(p *Publisher) (end func(), err error) {
	var subs []*nats.Subscription
	listen := func(subject string, take nats.MsgHandler) {
		sub, e := o.nc.Subscribe(subject, take)
		if e != nil {
			err = errors.Join(err, fmt.Errorf("events: subscribe to %s: %w", subject, e))
			return
		}
		subs = append(subs, sub)
	}
	if p.conf.LocalIndexer {
		query := func(m *nats.Msg) { o.query(p, m) }
		listen(events.QuerySubject(p.conf.Scope, p.conf.WorkerID, "*"), query)
	}
	if p.conf.Quiet {
		listen(p.conf.Scope.Own(presenceTopic), func(m *nats.Msg) { p.tell(p.conf.Now(), m.Data) })
	}
	return func() {
		for _, sub := range subs {
			_ = sub.Unsubscribe() // fails if the connection is closed, which does the same
		}
	}, err
}

// query answers a message that asks for events.
func (o *natsOutlet) query(p *Publisher, m *nats.Msg) {
	if m.Reply == "" {
		return
	}
	a := p.reply(m.Data)
	if a == nil {
		return
	}
	parts := localindex.Split(a)
	for i := range parts {
		out := nats.NewMsg(m.Reply)
		out.Data = events.AppendAnswer(nil, &parts[i])
		out.Header.Set(events.HeaderPublisher, wire.WorkerKey(p.id))
		if len(parts) > 1 {
			out.Header.Set(events.HeaderPart, strconv.Itoa(i))
			out.Header.Set(events.HeaderParts, strconv.Itoa(len(parts)))
		}
		if err := o.nc.PublishMsg(out); err != nil {
			p.conf.Log.Warn("a query about the worker's events cannot be answered", "err", err)
			return
		}
	}
}

func (o *natsOutlet) send(ctx context.Context, scope wire.Scope, _ uint32, e events.Envelope) error {
	e.Sequence = o.sequence
	o.sequence++
	subject, message := scope.Topic(events.Topic), events.AppendEnvelope(nil, e)
	if o.stream == nil {
		return o.nc.Publish(subject, message)
	}
	return o.stream.send(ctx, subject, fmt.Sprintf("%x-%d", e.PublisherID, e.Sequence), message)
}

func (o *natsOutlet) takes() bool        { return o.nc.IsConnected() }
func (o *natsOutlet) connection() uint64 { return o.nc.Stats().Reconnects }

func (o *natsOutlet) flush() error {
	if !o.nc.IsConnected() || o.stream != nil {
		return nil // who is away cannot be waited for, and a stream has acknowledged
	}
	err := o.nc.FlushTimeout(time.Second)
	if errors.Is(err, nats.ErrConnectionClosed) {
		return nil // it went away meanwhile, which is no other end than before
	}
	if err != nil {
		return fmt.Errorf("events: flush the last events: %w", err)
	}
	return nil
}
