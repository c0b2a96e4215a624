// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/wire"
)

const (
	// maxPendingDurable bounds the memory while the stream takes nothing: minutes
	// of a busy worker.
	maxPendingDurable = 1 << 16
	ackTimeout        = 2 * time.Second
	leaveTimeout      = 5 * time.Second
	slowestRetry      = 500 * time.Millisecond
)

// streamSender sends messages into a stream, one after the other: each is repeated
// until the stream has acknowledged it, before the next one leaves. Were several
// under way, one that is repeated would come behind those after it, and be taken for
// an old one; and the events that gather meanwhile make the next message larger, so
// the wait costs little. The stream drops what it has already, by the message's id.
type streamSender struct {
	js       jetstream.JetStream
	err      error // why there is none
	scope    wire.Scope
	replicas int
	log      *slog.Logger
	// publish asks the stream to take a message.
	publish func(ctx context.Context, m *nats.Msg) error
	retry   time.Duration // first wait
	leave   time.Duration // for all that is left when the context has ended
	leaving sync.Once
	until   time.Time // set by leaving
}

func newStreamSender(nc *nats.Conn, conf *PublisherConfig) *streamSender {
	s := &streamSender{scope: conf.Scope, replicas: max(1, conf.Replicas), log: conf.Log, retry: 10 * time.Millisecond, leave: leaveTimeout}
	s.js, s.err = jetstream.New(nc)
	if s.publish = conf.Publish; s.publish == nil {
		s.publish = func(ctx context.Context, m *nats.Msg) error {
			if !nc.IsConnected() {
				return nats.ErrDisconnected // or it would be kept, and sent many times
			}
			_, err := s.js.PublishMsg(ctx, m, jetstream.WithRetryAttempts(0))
			return err
		}
	}
	return s
}

// send returns when the stream has the message, or some time after ctx has ended.
func (s *streamSender) send(ctx context.Context, subject, id string, data []byte) error {
	if s.err != nil {
		return s.err
	}
	// The context of the publisher ends before its last events are sent.
	life, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	defer context.AfterFunc(ctx, func() {
		s.leaving.Do(func() { s.until = time.Now().Add(s.leave) })
		time.AfterFunc(time.Until(s.until), func() { cancel(context.Cause(ctx)) })
	})()
	var last error
	for wait := s.retry; ; wait = min(2*wait, slowestRetry) {
		m := nats.NewMsg(subject)
		m.Data = data
		m.Header.Set(jetstream.MsgIDHeader, id)
		err := s.once(life, m)
		switch {
		case err == nil:
			if last != nil {
				s.log.Info("the stream takes events again")
			}
			return nil
		case errors.Is(err, nats.ErrMaxPayload):
			return err // it never will
		case errors.Is(err, jetstream.ErrNoStreamResponse):
			err = errors.Join(err, s.open(life))
		}
		if last == nil {
			s.log.Warn("the stream does not take events; they wait", "err", err)
		}
		last = err
		select {
		case <-life.Done():
			return fmt.Errorf("events: publish: %w: %w", context.Cause(life), last)
		case <-time.After(wait):
		}
	}
}

func (s *streamSender) once(ctx context.Context, m *nats.Msg) error {
	ctx, cancel := context.WithTimeout(ctx, ackTimeout)
	defer cancel()
	return s.publish(ctx, m)
}

// open makes the stream, if there is none.
func (s *streamSender) open(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, ackTimeout)
	defer cancel()
	_, err := events.OpenStream(ctx, s.js, s.scope, s.replicas)
	return err
}
