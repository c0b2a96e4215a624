// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// maxConns bounds the connections of a bound socket: the routers of a worker.
const maxConns = 256

// Serve accepts connections until ctx ends, and gives each that has shaken hands
// to handle, in a goroutine of its own. It closes the listener and the connections
// and returns when all of them have ended. Beyond 256 connections at a time new
// ones are closed at once.
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
				_ = nc.Close() // it came too late
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("zmtp: accept: %w", err)
		case err != nil:
			// Out of files, or a peer that left meanwhile: it may pass.
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		select {
		case room <- struct{}{}:
		default:
			_ = nc.Close() // that is the answer
			continue
		}
		wg.Go(func() {
			defer func() { <-room }()
			end := context.AfterFunc(ctx, func() { _ = nc.Close() }) // what waits on it then ends
			defer end()
			c, err := NewConn(nc, own)
			if err != nil {
				return // strangers come to open ports
			}
			defer func() { _ = c.Close() }() // again, if it was closed: no matter
			handle(c)
		})
	}
}

// Publisher is a PUB socket. The zero value is ready; what nobody has subscribed
// to is dropped.
type Publisher struct {
	// Queue bounds the messages that wait for one subscriber; more are dropped
	// for it, as are those beyond its share of [MaxQueued]. Default 100,000.
	Queue int

	mu sync.Mutex
	// mu guards the field below.
	subscribers []*subscriber

	joined atomic.Uint64
}

// MaxQueued bounds the bytes of messages that wait in all of a publisher's queues. Each
// subscriber has an equal share, so one that does not read takes nothing from the others.
const MaxQueued = 256 << 20

// messageCost is what a message takes beside its frames.
const messageCost = 64

type subscriber struct {
	conn  *Conn
	wake  chan struct{} // has room for one: the queue has something in it
	sent  atomic.Uint64 // messages that have left the queue for good
	taken uint64        // messages that came into it; guarded by the publisher's mu

	mu sync.Mutex
	// mu guards the fields below.
	prefixes [][]byte
	queue    [][][]byte // grows as it is needed
	bytes    int        // of the queue
}

func cost(frames [][]byte) int {
	n := messageCost
	for _, f := range frames {
		n += len(f)
	}
	return n
}

// put lets a message wait, if there is room.
func (s *subscriber) put(frames [][]byte, messages, size int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) >= messages || s.bytes+cost(frames) > size {
		return false
	}
	s.queue, s.bytes = append(s.queue, frames), s.bytes+cost(frames)
	select {
	case s.wake <- struct{}{}:
	default:
	}
	return true
}

// next takes the first message that waits, nil if none does.
func (s *subscriber) next() (frames [][]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) == 0 {
		s.queue = nil // its memory goes
		return nil
	}
	frames, s.queue[0] = s.queue[0], nil
	s.queue, s.bytes = s.queue[1:], s.bytes-cost(frames)
	return frames
}

// Send publishes a message whose first frame is the topic. It does not wait. The
// frames are kept and must not change. It returns for how many subscribers it was
// dropped.
func (p *Publisher) Send(frames ...[]byte) (dropped int) {
	messages := p.Queue
	if messages <= 0 {
		messages = 100_000
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.subscribers {
		if !s.wants(frames[0]) {
			continue
		}
		if s.put(frames, messages, MaxQueued/len(p.subscribers)) {
			s.taken++
		} else {
			dropped++
		}
	}
	return dropped
}

// Subscribers returns how many subscribers there are.
func (p *Publisher) Subscribers() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.subscribers {
		if len(s.list()) > 0 {
			n++
		}
	}
	return n
}

// Joined counts subscriptions since the beginning. Who has subscribed gets what is
// sent after that was counted.
func (p *Publisher) Joined() uint64 { return p.joined.Load() }

// Drain waits until what was sent has left for those who listen, at most until the
// deadline.
func (p *Publisher) Drain(deadline time.Time) {
	for time.Now().Before(deadline) {
		p.mu.Lock()
		idle := !slices.ContainsFunc(p.subscribers, func(s *subscriber) bool { return s.sent.Load() < s.taken })
		p.mu.Unlock()
		if idle {
			return
		}
		<-time.After(time.Millisecond)
	}
}

func (s *subscriber) list() [][]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.prefixes
}

func (s *subscriber) wants(topic []byte) bool {
	return slices.ContainsFunc(s.list(), func(prefix []byte) bool { return bytes.HasPrefix(topic, prefix) })
}

// Bounds of the subscriptions of a connection. A longer prefix is of no topic of ours.
const (
	maxPrefixes = 1024
	maxPrefix   = 1024
)

// change takes a message from the subscriber, and reports whether it subscribes.
func (s *subscriber) change(frames [][]byte) (joins bool) {
	if len(frames) != 1 || len(frames[0]) == 0 {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	prefix := frames[0][1:]
	// The list is replaced, never changed: it is read without the lock.
	switch {
	case frames[0][0] == 1 && len(s.prefixes) < maxPrefixes && len(prefix) <= maxPrefix:
		s.prefixes = append(slices.Clone(s.prefixes), bytes.Clone(prefix)) // what was read may be longer
		return true
	case frames[0][0] == 0:
		if i := slices.IndexFunc(s.prefixes, func(p []byte) bool { return bytes.Equal(p, prefix) }); i >= 0 {
			s.prefixes = slices.Delete(slices.Clone(s.prefixes), i, i+1)
		}
	}
	return false
}

// Serve lets subscribers connect until ctx ends.
func (p *Publisher) Serve(ctx context.Context, l net.Listener) error {
	return Serve(ctx, l, Pub, p.Follow)
}

// Follow serves one subscriber until its connection ends.
func (p *Publisher) Follow(c *Conn) {
	s := &subscriber{conn: c, wake: make(chan struct{}, 1)}
	p.mu.Lock()
	p.subscribers = append(p.subscribers, s)
	p.mu.Unlock()

	var wg sync.WaitGroup
	defer wg.Wait()
	gone := make(chan struct{})
	defer close(gone)
	wg.Go(func() {
		for {
			select {
			case <-gone:
				return
			case <-s.wake:
			}
			for frames := s.next(); frames != nil; frames = s.next() {
				if err := c.Write(frames...); err != nil {
					_ = c.Close() // the reader then ends as well
					return
				}
				s.sent.Add(1)
			}
		}
	})
	for {
		frames, err := c.Read()
		if err != nil {
			break
		}
		if s.change(frames) {
			p.joined.Add(1)
		}
	}
	_ = c.Close() // the writer then ends, whatever it waits for
	p.mu.Lock()
	p.subscribers = slices.DeleteFunc(p.subscribers, func(o *subscriber) bool { return o == s })
	p.mu.Unlock()
}
