// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/internal/fixtures"
)

// startReplicas starts a second replica beside the router, and an Envoy that uses both.
func (d *demonstration) startReplicas(t *testing.T) (replicas [2]*demo.Child) {
	t.Helper()
	second, err := demo.Start(t.Context(), d.Dir, "kvroute-2", "serve", "--decision-headers", "--extproc-address", heldAddress(t), "--http-address", heldAddress(t),
		"--nats-url", d.Bus.URL(), "--replica", "kvroute-2")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(second.Stop)
	d.EnvoyConfig.ExtProc = []string{d.Router.At.Extproc, second.At.Extproc}
	d.restartEnvoy(t)
	return [2]*demo.Child{d.Router, second}
}

// restart starts an ended child again with the same flags. The addresses in these flags are reserved
// for the child.
func restart(t *testing.T, c *demo.Child, dir string) *demo.Child {
	t.Helper()
	next, err := demo.Start(t.Context(), dir, c.Name, c.Cmd.Args[1:len(c.Cmd.Args)-2]...)
	if err != nil {
		t.Fatal(err)
	}
	return next
}

// Two replicas are restarted in turn, eight or sixty times, while clients send requests
// continuously. No request fails, and nearly all are decided.
func TestRollingRestartsHarmNobody(t *testing.T) {
	t.Parallel() // mostly waits
	d := newStack(t, 2, []string{"--speed", "50"})
	d.begin(t, "--replica", "kvroute-1", "--drain-delay", "2s", "--drain-timeout", "10s")
	replicas := d.startReplicas(t)

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var clients sync.WaitGroup
	var asked, decided, failed atomic.Int64
	for c := range 4 {
		clients.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				<-time.After(10 * time.Millisecond) // leaves time for the machine's other work
				body := chatBody(fmt.Sprintf("%d %d %s", c, i%7, strings.Repeat("a prefix ", 30)), 60, i%2 == 0)
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, d.Envoy.URL()+chatPath, strings.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					failed.Add(1)
					t.Errorf("request %d of client %d: %v", i, c, err)
					continue
				}
				text, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close() // all was read
				whole := strings.Contains(string(text), `"finish_reason":"length"`)
				if asked.Add(1); err != nil || resp.StatusCode != 200 || !whole {
					failed.Add(1)
					t.Errorf("request %d of client %d: status %d, whole: %v, error %v: %.200s", i, c, resp.StatusCode, whole, err, text)
				}
				if resp.Header.Get("X-Dynamo-Reason") != "" {
					decided.Add(1)
				}
			}
		})
	}
	restarts := 8
	if fixtures.Long() {
		restarts = 60
	}
	for i := range restarts {
		r := i % 2
		before := asked.Load()
		replicas[r].Stop()
		replicas[r] = restart(t, replicas[r], d.Dir)
		// Envoy notices within a second that the replica is back.
		eventually(t, "the other replica is not found healthy", func() bool {
			n, err := d.Envoy.Stat(t.Context(), "cluster.kvroute.membership_healthy")
			return err == nil && n == 2 && asked.Load() >= before+4
		})
	}
	stop()
	clients.Wait()
	if d.Router = replicas[0]; failed.Load() > 0 {
		t.Errorf("%d of %d requests failed", failed.Load(), asked.Load())
	}
	t.Cleanup(replicas[1].Stop)
	if asked.Load() < int64(4*restarts) || decided.Load() < asked.Load()*9/10 {
		t.Errorf("%d of %d requests were decided, want nine in ten of %d or more", decided.Load(), asked.Load(), 4*restarts)
	}
	t.Logf("%d requests, %d decided", asked.Load(), decided.Load())
}
