// SPDX-License-Identifier: Apache-2.0

// Package natstest has helpers for tests with a NATS server and with events of caches.
package natstest

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/internal/fixtures"
)

// Start starts a NATS server with JetStream in a new folder, on a port that the test holds,
// or on another one if port is not 0. The server stops at the end of the test.
func Start(t testing.TB, port int) *server.Server {
	t.Helper()
	if port == 0 {
		port = fixtures.HoldPort(t)
	}
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: port, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("NATS does not start")
	}
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	return s
}

// Connect returns a connection that reconnects soon, until the end of the test.
func Connect(t testing.TB, s *server.Server) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(s.ClientURL(), nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond), nats.ReconnectJitter(0, 0))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// Run calls run in a goroutine, with a context that ends when stop is called or the test
// ends. An error of run fails the test.
func Run(t testing.TB, run func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// Eventually waits up to three minutes for a condition.
func Eventually(t testing.TB, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(3 * time.Minute); !ok(); {
		if time.Now().After(deadline) {
			t.Fatal("the condition did not hold in time")
		}
		<-time.After(5 * time.Millisecond)
	}
}
