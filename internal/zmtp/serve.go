// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// maxConns limits the connections of a bound socket: the routers of a worker.
const maxConns = 256

// Serve accepts connections until ctx ends, and calls handle for each in a goroutine of its
// own after the handshake. Then it closes the listener and the connections, and returns when
// all goroutines have ended. While there are 256 connections, new ones are closed at once.
func Serve(ctx context.Context, l net.Listener, own Role, handle func(*Conn)) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() }) // Accept then ends
	defer stop()
	room := make(chan struct{}, maxConns)
	for {
		nc, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = nc.Close() // too late
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("zmtp: accept: %w", err)
		case err != nil:
			// No file descriptor, or the peer has left: the next one may succeed.
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		select {
		case room <- struct{}{}:
		default:
			_ = nc.Close()
			continue
		}
		wg.Go(func() {
			defer func() { <-room }()
			end := context.AfterFunc(ctx, func() { _ = nc.Close() }) // reads and writes then end
			defer end()
			c, err := newConn(nc, own)
			if err != nil {
				return // any program may connect
			}
			defer func() { _ = c.Close() }() // a second time, perhaps
			handle(c)
		})
	}
}

// Publisher is a PUB socket. The zero value is ready. Messages without a subscriber are
// dropped.
type Publisher struct {
	// Queue limits the messages that wait for one subscriber. Messages beyond it, or beyond the
	// subscriber's share of maxQueued, are dropped for that subscriber. Default 10,000.
	Queue int

	mu sync.Mutex
	// mu guards the fields below.
	subscribers []*subscriber
	joined      uint64
}

const (
	// maxQueued limits the bytes of the messages that wait in all of a publisher's queues. Each
	// subscriber has an equal share, so a subscriber that does not read takes nothing from the
	// others.
	maxQueued = 256 << 20
	// Limits of the subscriptions of a connection. No topic of kvroute has a longer prefix.
	maxPrefixes = 1024
	maxPrefix   = 1024
)

type subscriber struct {
	queue    chan *message
	waiting  atomic.Int64 // size of the messages that are not sent yet
	prefixes [][]byte     // guarded by the publisher's mu
}

type message struct {
	frames [][]byte
	size   int64
}

// Send publishes a message whose first frame is the topic, and does not wait. The frames
// are kept and must not change. It returns for how many subscribers the message is dropped.
func (p *Publisher) Send(frames ...[]byte) (dropped int) {
	m := &message{frames, 64}
	for _, f := range frames {
		m.size += int64(len(f))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.subscribers {
		if !slices.ContainsFunc(s.prefixes, func(prefix []byte) bool { return bytes.HasPrefix(frames[0], prefix) }) {
			continue
		}
		if s.waiting.Add(m.size) <= maxQueued/int64(len(p.subscribers)) {
			select {
			case s.queue <- m:
				continue
			default:
			}
		}
		s.waiting.Add(-m.size)
		dropped++
	}
	return dropped
}

// Subscribers returns the number of connections with a subscription.
func (p *Publisher) Subscribers() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.subscribers {
		if len(s.prefixes) > 0 {
			n++
		}
	}
	return n
}

// Joined returns the number of subscriptions since the beginning. A counted subscriber
// receives the messages that are sent later.
func (p *Publisher) Joined() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.joined
}

// subscribe takes a message of a subscriber: 1 or 0, and a prefix to add or to remove.
func (p *Publisher) subscribe(s *subscriber, frames [][]byte) {
	if len(frames) != 1 || len(frames[0]) == 0 {
		return
	}
	prefix := frames[0][1:]
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case frames[0][0] == 1 && len(s.prefixes) < maxPrefixes && len(prefix) <= maxPrefix:
		s.prefixes = append(s.prefixes, bytes.Clone(prefix)) // the frame's memory may be longer
		p.joined++
	case frames[0][0] == 0:
		if i := slices.IndexFunc(s.prefixes, func(p []byte) bool { return bytes.Equal(p, prefix) }); i >= 0 {
			s.prefixes = slices.Delete(s.prefixes, i, i+1)
		}
	}
}

// Serve accepts subscribers until ctx ends.
func (p *Publisher) Serve(ctx context.Context, l net.Listener) error {
	return Serve(ctx, l, Pub, p.Follow)
}

// Follow serves one subscriber until its connection ends.
func (p *Publisher) Follow(c *Conn) {
	s := &subscriber{queue: make(chan *message, cmp.Or(p.Queue, 10_000))}
	p.mu.Lock()
	p.subscribers = append(p.subscribers, s)
	p.mu.Unlock()

	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for m := range s.queue {
			if err := c.Write(m.frames...); err != nil {
				_ = c.Close() // Read then ends
				return
			}
			s.waiting.Add(-m.size)
		}
	})
	for {
		frames, err := c.Read()
		if err != nil {
			break
		}
		p.subscribe(s, frames)
	}
	_ = c.Close() // Write then ends
	p.mu.Lock()
	p.subscribers = slices.DeleteFunc(p.subscribers, func(o *subscriber) bool { return o == s })
	p.mu.Unlock()
	close(s.queue) // Send no longer uses the queue
}
