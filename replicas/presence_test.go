// SPDX-License-Identifier: Apache-2.0

package replicas_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/replicas"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// startNATS starts a server with JetStream in a new folder, on a port or, with -1, on one that
// the test holds.
func startNATS(t *testing.T, port int) *server.Server {
	t.Helper()
	if port == server.RANDOM_PORT {
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

func connect(t *testing.T, s *server.Server) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(s.ClientURL(), nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond), nats.ReconnectJitter(0, 0))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// running runs something until the test's end, or until stop is called.
func running(t *testing.T, run func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(stop)
	return stop
}

func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(15 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatal("it does not happen")
		}
		<-time.After(5 * time.Millisecond)
	}
}

// A router says at once and every two seconds that it is there, and whether it wants
// events.
func TestPresence(t *testing.T) {
	s := startNATS(t, -1)
	nc := connect(t, s)
	sub, err := nc.SubscribeSync(wire.Scope{Endpoint: "e"}.Own("presence"))
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	stop := running(t, func(ctx context.Context) error {
		return replicas.AnnouncePresence(ctx, nc, wire.Scope{Endpoint: "e"}, replicas.Presence{RouterID: 1<<53 - 1, StartedMS: 5, Version: "v", WantsEvents: true})
	})
	begin := time.Now()
	for range 2 {
		m, err := sub.NextMsg(5 * time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := string(m.Data), `{"router_id":9007199254740991,"started_ms":5,"version":"v","wants_events":true}`; got != want {
			t.Errorf("said %s, want %s", got, want)
		}
	}
	if passed := time.Since(begin); passed < 1500*time.Millisecond {
		t.Errorf("said again after %v, want 2 s", passed)
	}
	stop()
}
