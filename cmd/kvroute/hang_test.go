// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/envoy"
)

// mute accepts streams and never answers on them.
type mute struct {
	extprocv3.UnimplementedExternalProcessorServer
}

func (mute) Process(s extprocv3.ExternalProcessor_ProcessServer) error {
	<-s.Context().Done()
	return nil
}

// startMute starts an external processor that reports itself as healthy.
func startMute(t *testing.T) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	extprocv3.RegisterExternalProcessorServer(s, mute{})
	healthpb.RegisterHealthServer(s, health.NewServer())
	go func() { _ = s.Serve(l) }() // ends with Stop
	t.Cleanup(s.Stop)
	return l.Addr().String()
}

// hold stops all threads of a child, and waits until they are stopped.
func hold(t *testing.T, c *demo.Child) {
	t.Helper()
	if err := c.Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	eventually(t, c.Name+" does not stand still", func() bool {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", c.Cmd.Process.Pid))
		for _, name := range threads {
			// The state follows the name, which is in brackets.
			text, err := os.ReadFile(name)
			if _, state, ok := bytes.Cut(text, []byte(") ")); err != nil || !ok || state[0] != 'T' {
				return false
			}
		}
		return err == nil && len(threads) > 0
	})
}

// kvroute hangs, as a stopped process or as one that runs and never answers. Envoy continues without
// it if Envoy holds the request itself; in full duplex, once the health check has failed.
func TestARouterThatHangs(t *testing.T) {
	for _, mode := range []envoy.BodyMode{envoy.Buffered, envoy.BufferedPartial, envoy.Streamed, envoy.StreamedAhead, envoy.FullDuplex} {
		duplex := mode == envoy.FullDuplex
		t.Run(mode+", never answers", func(t *testing.T) {
			t.Parallel() // mostly waits
			d := newStack(t, 2, []string{"--speed", "20"})
			d.EnvoyConfig.BodyMode, d.Unrouted, d.EnvoyConfig.ExtProc = mode, true, []string{startMute(t)}
			if d.EnvoyConfig.IdleTimeout = time.Minute; duplex {
				d.EnvoyConfig.IdleTimeout = 2 * time.Second
			}
			d.begin(t)
			want := outcomeOf(t, "kvroute hangs")
			if duplex {
				want = outcomeOf(t, "in full duplex kvroute lives and never answers")
			}
			for _, stream := range []bool{false, true} {
				want.check(t, d.send(t, "hello", stream))
			}
			want.check(t, look(send(t, t.Context(), http.MethodGet, d.Envoy.URL()+"/v1/models", "", nil)))
		})
		t.Run(mode+", stands still", func(t *testing.T) {
			t.Parallel()
			d := newStack(t, 2, []string{"--speed", "5"})
			d.EnvoyConfig.BodyMode = mode
			d.begin(t)
			resp, err := send(t, t.Context(), http.MethodPost, d.Envoy.URL()+chatPath, chatBody("tell me a story", 1000, true), nil)
			if err != nil {
				t.Fatal(err)
			}
			story, whole := make(chan sight, 1), make(chan sight, 1)
			go func() { story <- look(resp, nil) }()
			go func() { // has no headers yet
				whole <- look(send(t, t.Context(), http.MethodPost, d.Envoy.URL()+chatPath, chatBody("and another one", 1000, false), nil))
			}()
			eventually(t, "two slots are not taken", func() bool { n, _, _ := inFlight(t, d); return n == 2 })
			hold(t, d.Router)
			asked, decided := outcomeOf(t, "kvroute hangs"), outcomeOf(t, "kvroute hangs after the decision")
			before := decided
			if duplex {
				before = outcomeOf(t, "in full duplex kvroute hangs")
				asked, decided = outcomeOf(t, "in full duplex kvroute hangs"), outcomeOf(t, "in full duplex kvroute hangs after the decision")
			}
			asked.check(t, d.send(t, "hello", false))
			decided.check(t, <-story)
			before.check(t, <-whole)
			// Once Envoy has noticed the failure, no request waits.
			eventually(t, "Envoy does not notice that kvroute hangs", func() bool {
				n, err := d.Envoy.Stat(t.Context(), "cluster.kvroute.membership_healthy")
				return err == nil && n == 0
			})
			waited := func() int64 {
				n, err := d.Envoy.Stat(t.Context(), "http.llm.ext_proc.kvroute.message_timeouts")
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
			already := waited()
			for i := range 6 {
				outcomeOf(t, "kvroute hangs").check(t, d.send(t, "hello", i%2 == 0))
			}
			if n := waited() - already; n != 0 {
				t.Errorf("%d of 6 requests wait for a kvroute that is known to hang", n)
			}
			if err := d.Router.Cmd.Process.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			atRest(t, d)
			eventually(t, "kvroute does not decide again", func() bool { return d.send(t, "hello", false).header.Get("X-Dynamo-Reason") != "" })
		})
	}
}
