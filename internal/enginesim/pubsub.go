// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/kvroute/kvroute/internal/zmtp"
)

// socket is a bound ZeroMQ socket. It calls handle with each connection.
type socket struct {
	net.Listener

	at     zmtp.Endpoint // with the real port
	role   zmtp.Role
	handle func(*zmtp.Conn)

	mu sync.Mutex
	// mu guards the field below.
	conns map[net.Conn]struct{}
}

// bind binds the endpoint of a rank. A Unix socket without a listener is replaced.
func bind(endpoint string, port, rank int, role zmtp.Role, handle func(*zmtp.Conn)) (*socket, error) {
	at, err := zmtp.ParseEndpoint(endpoint, port, rank)
	if err != nil {
		return nil, err
	}
	network, address := at.Address()
	if network == "unix" && !strings.HasPrefix(address, "@") {
		if nc, err := net.Dial(network, address); err == nil {
			_ = nc.Close() // the connection only tested whether a process listens
			return nil, fmt.Errorf("enginesim: bind %s: another process listens there", at)
		}
		_ = os.Remove(address) // if that fails, net.Listen fails
	}
	l, err := net.Listen(network, address)
	if err != nil {
		return nil, fmt.Errorf("enginesim: bind %s: %w", at, err)
	}
	if a, ok := l.Addr().(*net.TCPAddr); ok {
		at.Port = a.Port
	}
	return &socket{Listener: l, at: at, role: role, handle: handle, conns: make(map[net.Conn]struct{})}, nil
}

// run accepts connections until ctx ends. Then it closes the socket and its connections.
func (s *socket) run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Add(1)
	stop := context.AfterFunc(ctx, func() { // Accept then ends; the port is free when run returns
		defer wg.Done()
		_ = s.Close()
	})
	defer func() {
		if stop() {
			wg.Done()
		}
	}()
	defer s.disconnect()
	for {
		nc, err := s.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = nc.Close() // too late
			}
			return nil
		case err != nil:
			return fmt.Errorf("enginesim: accept: %w", err)
		}
		s.mu.Lock()
		s.conns[nc] = struct{}{}
		s.mu.Unlock()
		wg.Go(func() {
			if c, err := zmtp.NewConn(nc, s.role); err == nil { // any program may connect
				s.handle(c)
			}
			_ = nc.Close() // perhaps a second time
			s.mu.Lock()
			delete(s.conns, nc)
			s.mu.Unlock()
		})
	}
}

// disconnect closes all connections.
func (s *socket) disconnect() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for nc := range s.conns {
		_ = nc.Close() // its goroutine removes it
	}
}

// publisher is the work of a PUB socket. Messages without a subscriber are dropped.
type publisher struct {
	queue int // limit of the messages that wait for one subscriber; default 10,000

	mu sync.Mutex
	// mu guards the fields below.
	subscribers []*subscriber
	joined      uint64
}

type subscriber struct {
	queue    chan [][]byte
	prefixes [][]byte // of the topics; guarded by the publisher's mu
}

// send publishes a message whose first frame is the topic, and does not wait. The frames
// are kept and must not change. It returns for how many subscribers the message is dropped.
func (p *publisher) send(frames ...[]byte) (dropped int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.subscribers {
		if slices.ContainsFunc(s.prefixes, func(prefix []byte) bool { return bytes.HasPrefix(frames[0], prefix) }) {
			select {
			case s.queue <- frames:
			default:
				dropped++
			}
		}
	}
	return dropped
}

// counts returns the number of connections with a subscription, and the number of subscriptions
// since the beginning. A counted subscriber receives the messages that are sent later.
func (p *publisher) counts() (subscribers int, joined uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.subscribers {
		if len(s.prefixes) > 0 {
			subscribers++
		}
	}
	return subscribers, p.joined
}

// follow serves one subscriber until its connection ends.
func (p *publisher) follow(c *zmtp.Conn) {
	s := &subscriber{queue: make(chan [][]byte, cmp.Or(p.queue, 10_000))}
	p.mu.Lock()
	p.subscribers = append(p.subscribers, s)
	p.mu.Unlock()

	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for frames := range s.queue {
			if err := c.Write(frames...); err != nil {
				break
			}
		}
		_ = c.Close() // Read then ends
	})
	for {
		frames, err := c.Read()
		if err != nil {
			break
		}
		if len(frames) == 1 && len(frames[0]) > 0 && frames[0][0] == 1 { // a subscription
			p.mu.Lock()
			s.prefixes = append(s.prefixes, bytes.Clone(frames[0][1:]))
			p.joined++
			p.mu.Unlock()
		}
	}
	_ = c.Close() // Write then ends
	p.mu.Lock()
	p.subscribers = slices.DeleteFunc(p.subscribers, func(o *subscriber) bool { return o == s })
	p.mu.Unlock()
	close(s.queue) // send no longer uses the queue
}
