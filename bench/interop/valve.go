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
	parts sync.WaitGroup

	mu sync.Mutex
	// mu guards the fields below.
	off   bool
	conns map[net.Conn]struct{} // both ends of each connection that passes
}

// openValve listens at an address. The socket that it leads to is in the same network.
func openValve(network, at, to string) (*valve, error) {
	l, err := net.Listen(network, at)
	if err != nil {
		return nil, err
	}
	v := &valve{l: l, conns: make(map[net.Conn]struct{})}
	v.parts.Go(func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return // it has stopped
			}
			if to, err := net.Dial(network, to); err != nil {
				_ = from.Close()
			} else {
				v.parts.Go(func() { v.pass(from, to) })
				v.parts.Go(func() { v.pass(to, from) })
			}
		}
	})
	return v, nil
}

// pass carries the bytes of one direction until one end is closed.
func (v *valve) pass(from, to net.Conn) {
	v.mu.Lock()
	off := v.off
	v.conns[from] = struct{}{}
	v.mu.Unlock()
	if !off {
		_, _ = io.Copy(to, from) // how it ends does not matter
	}
	_, _ = from.Close(), to.Close()
	v.mu.Lock()
	delete(v.conns, from)
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
