// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"syscall"
	"time"
)

const (
	// subscribeTime is how long a subscription may take to reach the publisher before anything is
	// requested. Messages that are sent earlier would be neither received nor in the answer.
	subscribeTime = 20 * time.Millisecond
	// settledAfter is the time until [Subscription.Settled]. Publishers do not tell when they have
	// taken a subscription. Messages that a slow one sends between the answer to a first request and
	// then are lost, and nothing shows it.
	settledAfter = 2 * time.Second
	// refusedAfter is how many connections must fail in a row before the socket counts as refused, and
	// refusedTime how long a single one may take. An engine that restarts refuses a few.
	refusedAfter = 4
	refusedTime  = 3 * time.Second
)

// Subscription keeps a connection to a publisher's socket. All fields are required, except Refused.
type Subscription struct {
	At     Endpoint
	Topic  string // prefix of the wanted topics
	Dialer func(*net.Dialer)
	Log    *slog.Logger

	// Connected is called when the publisher has the subscription. closed means that the
	// port was closed since the connection before.
	Connected func(closed bool)
	// Settled is called 2 s after each connection, also beside the other functions: what was published
	// before the connection should be requested once more.
	Settled      func()
	Disconnected func()
	// Message must not keep the frames.
	Message func(frames [][]byte)
	// Refused is called with the cause after some failed connections in a row.
	Refused func(err error)
}

// Run connects until ctx ends. It calls the functions one at a time, except Settled.
func (s *Subscription) Run(ctx context.Context) {
	settled := time.AfterFunc(settledAfter, s.Settled)
	settled.Stop() // until there is a connection
	defer settled.Stop()
	backoff := Backoff{}
	failed := 0
	for closed := false; ctx.Err() == nil; backoff.Wait(ctx) {
		begun := time.Now()
		c, err := Dial(ctx, s.At, Sub, s.Dialer)
		if err != nil {
			closed = closed || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT)
			s.Log.Debug("a socket of events is unavailable", "err", err)
			if failed++; s.Refused != nil && ctx.Err() == nil && (failed >= refusedAfter || time.Since(begun) > refusedTime) {
				s.Refused(err)
			}
			continue
		}
		backoff, failed = Backoff{}, 0
		s.receive(ctx, c, closed, settled)
		closed = false
	}
}

// receive receives messages until the connection ends.
func (s *Subscription) receive(ctx context.Context, c *Conn, closed bool, settled *time.Timer) {
	stop := context.AfterFunc(ctx, func() { _ = c.Close() }) // Read then ends
	defer stop()
	defer func() { _ = c.Close() }() // a second time, perhaps
	if err := c.Subscribe(s.Topic); err != nil || !wait(ctx, subscribeTime) {
		return
	}
	s.Log.Info("the socket of events is connected", "endpoint", s.At.String())
	s.Connected(closed)
	settled.Reset(settledAfter)
	for {
		frames, err := c.Read()
		if err != nil {
			if ctx.Err() == nil {
				s.Log.Warn("the socket of events is disconnected", "endpoint", s.At.String(), "err", err)
				s.Disconnected()
			}
			return
		}
		s.Message(frames)
	}
}

// Request sends a request to a ROUTER socket and calls part with each message of the
// answer, until part returns no more or an error.
func Request(
	ctx context.Context, at Endpoint, dialer func(*net.Dialer), request [][]byte,
	part func(frames [][]byte) (more bool, err error),
) error {
	c, err := Dial(ctx, at, Dealer, dialer)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() }) // Read then ends
	defer stop()
	defer func() { _ = c.Close() }() // a second time, perhaps
	if err := c.Write(request...); err != nil {
		return err
	}
	for {
		frames, err := c.Read()
		if err != nil {
			return err
		}
		if more, err := part(frames); !more || err != nil {
			return err
		}
	}
}

// Backoff waits longer after each failure: 200 ms, doubled up to 5 s. The zero value is for the first failure.
type Backoff struct{ next time.Duration }

// Wait waits, or until ctx ends.
func (b *Backoff) Wait(ctx context.Context) {
	d := max(b.next, 200*time.Millisecond)
	b.next = min(2*d, 5*time.Second)
	wait(ctx, d)
}

// wait reports whether ctx goes on after a time.
func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
	return ctx.Err() == nil
}
