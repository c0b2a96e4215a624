// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"errors"
	"log/slog"
	"syscall"
	"time"

	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/zmtp"
)

const (
	// subscribeTime is how long a subscription may take to reach the publisher before anything is
	// requested. Messages that are sent earlier would be neither received nor in the answer.
	subscribeTime = 20 * time.Millisecond
	// secondRequestAfter is the time until a second request after a new connection. Engines and
	// Dynamo's publishers do not tell when they have taken a subscription. Messages that a
	// slow one sends between the first answer and then are lost, and nothing shows it.
	secondRequestAfter = 2 * time.Second
)

// subscription keeps a connection to a publisher's socket.
type subscription struct {
	s     *Sources
	at    zmtp.Endpoint
	topic string // prefix of the wanted topics
	log   *slog.Logger
	// connected is called when the publisher has the subscription. closed means that the
	// port was closed since the connection before.
	connected    func(closed bool)
	disconnected func()
	message      func(frames [][]byte)
	// refused is called with the cause after some failed connections in a row. It may be nil.
	refused func(err error)
}

// refusedAfter is how many connections must fail in a row before the socket counts as refused, and
// refusedTime how long a single one may take. An engine that restarts refuses a few.
const (
	refusedAfter = 4
	refusedTime  = 3 * time.Second
)

// run connects until ctx ends. It calls the functions one at a time.
func (u *subscription) run(ctx context.Context) {
	wait := backoff{}
	failed := 0
	for closed := false; ctx.Err() == nil; wait.wait(ctx) {
		begun := time.Now()
		c, err := zmtp.Dial(ctx, u.at, zmtp.Sub, u.s.conf.dialer)
		if err != nil {
			closed = closed || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT)
			u.log.Debug("a socket of events is unavailable", "err", err)
			if failed++; u.refused != nil && ctx.Err() == nil && (failed >= refusedAfter || time.Since(begun) > refusedTime) {
				u.refused(err)
			}
			continue
		}
		wait, failed = backoff{}, 0
		u.receive(ctx, c, closed)
		closed = false
	}
}

// receive receives messages until the connection ends.
func (u *subscription) receive(ctx context.Context, c *zmtp.Conn, closed bool) {
	stop := context.AfterFunc(ctx, func() { _ = c.Close() }) // Read then ends
	defer stop()
	defer func() { _ = c.Close() }() // a second time, perhaps
	if err := c.Subscribe(u.topic); err != nil {
		return
	}
	if !bus.Wait(ctx, subscribeTime) {
		return
	}
	u.s.metrics.count(sourceConnected, 1)
	u.log.Info("the socket of events is connected", "endpoint", u.at.String())
	u.connected(closed)
	for {
		frames, err := c.Read()
		if err != nil {
			if ctx.Err() == nil {
				u.s.metrics.count(sourceAway, 1)
				u.log.Warn("the socket of events is disconnected", "endpoint", u.at.String(), "err", err)
				u.disconnected()
			}
			return
		}
		u.message(frames)
	}
}

// request sends a request to a ROUTER socket and calls part with each message of the
// answer, until part returns no more or an error.
func (s *Sources) request(
	ctx context.Context, at zmtp.Endpoint, request [][]byte, part func(frames [][]byte) (more bool, err error),
) error {
	c, err := zmtp.Dial(ctx, at, zmtp.Dealer, s.conf.dialer)
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

// backoff waits longer each time: 200 ms doubling to 5 s.
type backoff struct{ next time.Duration }

func (b *backoff) wait(ctx context.Context) {
	d := max(b.next, 200*time.Millisecond)
	b.next = min(2*d, 5*time.Second)
	bus.Wait(ctx, d)
}
