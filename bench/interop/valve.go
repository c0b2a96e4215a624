// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"net"
	"sync"
)

// valve forwards connections to a socket. While it is cut it has no connections and closes
// new ones.
type valve struct {
	l     net.Listener
	to    string // in the listener's network
	parts sync.WaitGroup

	mu sync.Mutex
	// mu guards the fields below.
	off   bool
	conns map[net.Conn]struct{} // two for each connection that passes
}

// openValve listens at an address. The socket that it leads to is in the same network.
func openValve(network, at, to string) (*valve, error) {
	l, err := net.Listen(network, at)
	if err != nil {
		return nil, err
	}
	v := &valve{l: l, to: to, conns: make(map[net.Conn]struct{})}
	v.parts.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return // it has stopped
			}
			v.parts.Go(func() { v.pass(conn) })
		}
	})
	return v, nil
}

// pass carries a connection's bytes until one side ends, or it is cut.
func (v *valve) pass(from net.Conn) {
	defer from.Close()
	to, err := net.Dial(v.l.Addr().Network(), v.to)
	if err != nil {
		return // the client sees a closed connection
	}
	defer to.Close()
	v.mu.Lock()
	off := v.off
	if !off {
		v.conns[from], v.conns[to] = struct{}{}, struct{}{}
	}
	v.mu.Unlock()
	if off {
		return
	}
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{from, to}, {to, from}} {
		both.Go(func() {
			_, _ = io.Copy(way[0], way[1]) // until one of them is closed
			_ = way[0].Close()
			_ = way[1].Close()
		})
	}
	both.Wait()
	v.mu.Lock()
	delete(v.conns, from)
	delete(v.conns, to)
	v.mu.Unlock()
}

// cut ends all connections, and closes new ones until join.
func (v *valve) cut() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.off = true
	for conn := range v.conns {
		_ = conn.Close() // pass then ends
	}
}

// join accepts connections again.
func (v *valve) join() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.off = false
}

// passing reports whether a connection passes.
func (v *valve) passing() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.conns) > 0
}

// stop ends the valve and waits for its goroutines.
func (v *valve) stop() {
	_ = v.l.Close() // Accept then ends
	v.cut()
	v.parts.Wait()
}
