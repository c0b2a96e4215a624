// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/engines/localindex"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/durable"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/wire"
)

const (
	// maxPendingDurable bounds the memory while the stream is unavailable: minutes of a busy
	// worker.
	maxPendingDurable = 1 << 16
	ackTimeout        = 2 * time.Second
	leaveTimeout      = 5 * time.Second // for all events that are left at the end
	firstRetry        = 10 * time.Millisecond
	slowestRetry      = 500 * time.Millisecond
)

// outlet sends the messages of a publisher over NATS core, or, if publish is set, into a
// stream. It also receives the publisher's queries. Only the goroutine of [Publisher.Run] uses it.
type outlet struct {
	nc       *nats.Conn
	conf     *Config
	sequence uint64

	publish func(ctx context.Context, m *nats.Msg) error // waits for the acknowledgement
	js      jetstream.JetStream
	life    context.Context //nolint:containedctx // ends some time after Run's
}

func newOutlet(nc *nats.Conn, conf *Config) *outlet {
	o := &outlet{nc: nc, conf: conf, life: context.Background()}
	if !conf.Durable {
		return o
	}
	var err error
	o.js, err = jetstream.New(nc)
	o.publish = conf.Publish
	if o.publish == nil {
		o.publish = func(ctx context.Context, m *nats.Msg) error {
			if err != nil {
				return err
			}
			if !nc.IsConnected() {
				return nats.ErrDisconnected // the client would keep each attempt and send all of them
			}
			_, err := o.js.PublishMsg(ctx, m, jetstream.WithRetryAttempts(0))
			return err
		}
	}
	return o
}

// open begins to receive queries. end must also be called after an error.
func (o *outlet) open(ctx context.Context, p *Publisher) (end func(), err error) {
	var cancel context.CancelFunc
	o.life, cancel = context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(leaveTimeout, cancel) })
	var sub *nats.Subscription
	if p.conf.LocalIndexer {
		subject := events.QuerySubject(p.conf.Scope, p.conf.WorkerID, "*")
		if sub, err = o.nc.Subscribe(subject, func(m *nats.Msg) { o.query(p, m) }); err != nil {
			err = fmt.Errorf("publish: subscribe to %s: %w", subject, err)
		}
	}
	return func() {
		if sub != nil {
			_ = sub.Unsubscribe() // fails if the connection is closed, which does the same
		}
		stop()
		cancel()
	}, err
}

// query answers a query.
func (o *outlet) query(p *Publisher, m *nats.Msg) {
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

// send numbers a message and sends it. After an error some reader may lack it.
func (o *outlet) send(e events.Envelope) error {
	e.Sequence = o.sequence
	o.sequence++
	subject, message := o.conf.Scope.Topic(events.Topic), events.AppendEnvelope(nil, e)
	if o.publish == nil {
		return o.nc.Publish(subject, message)
	}
	return o.store(subject, fmt.Sprintf("%x-%d", e.PublisherID, e.Sequence), message)
}

// store repeats a message until the stream has acknowledged it, or until some time after
// the end of Run. Messages are sent one after the other: a repeated one after a later one
// would count as old. Events that wait meanwhile make the next message larger, so the wait
// costs little. The stream drops duplicates by the message's id.
func (o *outlet) store(subject, id string, data []byte) error {
	var last error
	for wait := firstRetry; ; wait = min(2*wait, slowestRetry) {
		m := nats.NewMsg(subject)
		m.Data = data
		m.Header.Set(jetstream.MsgIDHeader, id)
		err := o.limited(func(ctx context.Context) error { return o.publish(ctx, m) })
		switch {
		case err == nil:
			if last != nil {
				o.conf.Log.Info("the stream takes events again")
			}
			return nil
		case errors.Is(err, nats.ErrMaxPayload):
			return err // it never will
		case errors.Is(err, jetstream.ErrNoStreamResponse):
			err = errors.Join(err, o.limited(func(ctx context.Context) error {
				_, err := durable.OpenStream(ctx, o.js, o.conf.Scope, max(1, o.conf.Replicas))
				return err
			}))
		}
		if last == nil {
			o.conf.Log.Warn("the stream does not take events; they wait", "err", err)
		}
		last = err
		if !bus.Wait(o.life, wait) {
			return fmt.Errorf("publish: %w: %w", context.Cause(o.life), last)
		}
	}
}

func (o *outlet) limited(do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(o.life, ackTimeout)
	defer cancel()
	return do(ctx)
}

// connection returns a number that changes when readers may have missed messages that were
// sent without an error, and whether messages can be sent now.
func (o *outlet) connection() (changes uint64, up bool) {
	return o.nc.Stats().Reconnects, o.nc.IsConnected()
}

// flush waits for the last messages to leave, up to a second.
func (o *outlet) flush() error {
	if !o.nc.IsConnected() || o.publish != nil {
		return nil // nothing to wait for: the stream has acknowledged its messages
	}
	if err := o.nc.FlushTimeout(time.Second); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
		return fmt.Errorf("publish: flush the last events: %w", err)
	}
	return nil
}
