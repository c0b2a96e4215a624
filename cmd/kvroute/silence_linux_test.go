// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/silence"
)

// machine is a worker whose machine can be lost: then its sockets acknowledge nothing any more.
type machine struct {
	address string
	mu      sync.Mutex
	conns   []*net.TCPConn
}

func startMachine(t *testing.T, at string, h http.Handler) *machine {
	t.Helper()
	l, err := (&net.ListenConfig{KeepAlive: -1}).Listen(t.Context(), "tcp", at) // probes of its own would be signs of life
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{address: l.Addr().String()}
	s := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute, ConnState: func(c net.Conn, state http.ConnState) {
		if state == http.StateNew {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.conns = append(m.conns, c.(*net.TCPConn))
		}
	}}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }() // ends with Close
	t.Cleanup(func() { _ = s.Close(); <-done })
	return m
}

// lose makes all connections of the machine silent.
func (m *machine) lose(t *testing.T) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.conns {
		_ = process.FallSilent(c) // an error: it is closed
	}
}

// beginWithMachine starts a stack with a worker on a machine of its own.
func beginWithMachine(t *testing.T, at string) (*demonstration, *machine) {
	t.Helper()
	d := newStack(t, 0, nil)
	d.EnvoyConfig.SilenceTimeout = 2 * time.Second
	hang := make(chan struct{})
	m := startMachine(t, at, faulty(hang, make(chan struct{})))
	t.Cleanup(func() { close(hang) }) // before the machine waits for its handlers
	d.begin(t, append(staticFlags(t, d, "lost", m.address), "--avoid-failing", "0")...)
	return d, m
}

// Requests that wait for a worker end when its machine is lost, whether they were sent before or after the loss.
func TestALostMachineEndsItsRequests(t *testing.T) {
	for name, c := range map[string]struct {
		at, does, row string
		stream        bool
	}{
		"sent before":       {at: "127.0.0.1:0", does: "hang before headers", row: "the worker's machine is lost before the response"},
		"sent before, IPv6": {at: "[::1]:0", does: "hang before headers", row: "the worker's machine is lost before the response"},
		"in the response":   {at: "127.0.0.1:0", does: "hang in the stream", row: "the worker's machine is lost in the response", stream: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // mostly waits
			d, m := beginWithMachine(t, c.at)
			got := make(chan sight, 1)
			go func() { got <- d.send(t, c.does, c.stream) }()
			eventually(t, "the request does not reach the worker", func() bool {
				n, err := d.Envoy.Stat(t.Context(), "cluster.worker-first.upstream_rq_active")
				return err == nil && n == 1
			})
			m.lose(t)
			outcomeOf(t, c.row).check(t, <-got)
			atRest(t, d)
		})
	}
	t.Run("sent after", func(t *testing.T) {
		t.Parallel() // mostly waits
		d, m := beginWithMachine(t, "127.0.0.1:0")
		eventually(t, "no request is sent on a connection that was open before", func() bool {
			outcomeOf(t, "kvroute decides").check(t, d.send(t, "answer", false))
			m.lose(t)
			got := d.send(t, "answer", false)
			if got.status == 200 { // Envoy had closed the idle connection, and opened another one
				return false
			}
			outcomeOf(t, "the worker's machine is lost before the response").check(t, got)
			return true
		})
		atRest(t, d)
	})
}

// A client whose machine is lost before the first token ends like any other client that leaves. Its load stays
// on the worker until the worker answers another request. The worker's health does not change.
func TestALostClientLeavesItsLoad(t *testing.T) {
	t.Parallel() // mostly waits
	d, _ := beginWithMachine(t, "127.0.0.1:0")
	conn := dial(t, d)
	defer conn.Close()
	tcp := conn.(*net.TCPConn)
	if err := tcp.SetKeepAlive(false); err != nil {
		t.Fatal(err)
	}
	body := chatBody("hang before headers", 4, false)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, d.Envoy.URL()+chatPath, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if err := req.Write(conn); err != nil {
		t.Fatal(err)
	}
	eventually(t, "no slot is taken", func() bool { n, _, _ := inFlight(t, d); return n == 1 })
	if err := process.FallSilent(tcp); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the request does not end", func() bool { n, _, _ := inFlight(t, d); return n == 0 })
	if w := workers(t, d)[0]; w.LeftRequests != 1 || w.PendTokens == 0 || w.Health != "healthy" || w.Failing || w.Failures > 0 {
		t.Errorf("%d requests left their load, of %d tokens; the worker is %s, failing: %v", w.LeftRequests, w.PendTokens, w.Health, w.Failing)
	}
	atRestAfterAnAnswer(t, d)
}

// The connections of Envoy and of the API's clients end when the other end is silent.
func TestListenersHaveTheLimit(t *testing.T) {
	l, err := listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ours, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	theirs, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	if o, err := process.SocketOptions(theirs.(*net.TCPConn)); err != nil || o.UserTimeout != silence.Timeout || !o.KeepAlive {
		t.Errorf("%+v, %v", o, err)
	}
}
