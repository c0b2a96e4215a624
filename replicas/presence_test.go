// SPDX-License-Identifier: Apache-2.0

package replicas_test

import (
	"context"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/replicas"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A router publishes its presence at once and every two seconds, with whether it needs
// events.
func TestPresence(t *testing.T) {
	s := natstest.Start(t, 0)
	nc := natstest.Connect(t, s)
	sub, err := nc.SubscribeSync(wire.Scope{Endpoint: "e"}.Own("presence"))
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	stop := natstest.Run(t, func(ctx context.Context) error {
		return replicas.AnnouncePresence(ctx, nc, wire.Scope{Endpoint: "e"}, replicas.Presence{RouterID: 1<<53 - 1, StartedMS: 5, Version: "v"})
	})
	begin := time.Now()
	for range 2 {
		m, err := sub.NextMsg(5 * time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := string(m.Data), `{"router_id":9007199254740991,"started_ms":5,"version":"v"}`; got != want {
			t.Errorf("said %s, want %s", got, want)
		}
	}
	if passed := time.Since(begin); passed < 1500*time.Millisecond {
		t.Errorf("said again after %v, want 2 s", passed)
	}
	stop()
}
