// SPDX-License-Identifier: Apache-2.0

package natstest

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
)

// Way is a proxy to a server whose connections a test can cut.
type Way struct {
	At string // host:port of the proxy

	// Deaf makes the proxy discard the data sent to the server.
	Deaf atomic.Bool

	mu    sync.Mutex
	gone  bool
	conns []net.Conn
}

// mute is a connection's other end. It discards data while deaf is set.
type mute struct {
	net.Conn

	deaf *atomic.Bool
}

func (m mute) Write(p []byte) (int, error) {
	if m.deaf.Load() {
		return len(p), nil
	}
	return m.Conn.Write(p)
}

// NewWay starts a proxy to the address that to returns. It ends with the test.
func NewWay(t testing.TB, to func() string) *Way {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &Way{At: l.Addr().String()}
	var both sync.WaitGroup
	both.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to())
			w.mu.Lock()
			if err != nil || w.gone {
				in.Close()
				if err == nil {
					out.Close()
				}
				w.mu.Unlock()
				continue
			}
			w.conns = append(w.conns, in, out)
			w.mu.Unlock()
			for _, pair := range [][2]net.Conn{{in, out}, {out, in}} {
				both.Go(func() {
					if pair[0] == out {
						_, _ = io.Copy(mute{out, &w.Deaf}, pair[1])
					} else {
						_, _ = io.Copy(pair[0], pair[1])
					}
					pair[0].Close()
				})
			}
		}
	})
	t.Cleanup(func() {
		l.Close()
		w.Cut(true)
		both.Wait()
	})
	return w
}

// Cut ends all connections. While gone is set, new ones end at once.
func (w *Way) Cut(gone bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gone = gone
	for _, c := range w.conns {
		c.Close()
	}
	w.conns = nil
}
