// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/router"
)

// A Stack is a bus, workers, routers and an Envoy, each a process of its own but the bus.
// The first group of fields is set before it starts.
type Stack struct {
	Dir         string // logs of the children
	EnvoyPath   string
	Model       string
	Workers     int
	EngineFlags []string
	Prefill     int          // the first workers have the role prefill, the others decode; 0 = none has a role
	Core        bool         // events go over NATS core, without JetStream
	SharedBus   bool         // Bus belongs to another stack, which stops it
	EnvoyConfig envoy.Config // the addresses that are not given here are those of the children
	// Bootstrap makes Envoy's configuration; nil renders kvroute's own.
	Bootstrap func(envoy.Config) ([]byte, error)
	Unrouted  bool   // StartRouter does not wait until requests are decided
	HTTP      string // address of the API of the router that is started last; empty for a free one

	Bus     *bus.Server
	Engines []*Child
	Router  *Child   // the one that was started last
	Others  []*Child // replicas, Router among them
	Groups  []*Stack // those below the router, if it is one of groups
	Envoy   *envoytest.Proc

	ports []func() // release the ports that children listen at
}

// Start starts the bus and the workers.
func (s *Stack) Start(ctx context.Context) (err error) {
	if s.Bus, err = bus.StartServer("127.0.0.1:0", "", ""); err != nil {
		return err
	}
	return s.StartEngines(ctx, "workers", 1)
}

// StartEngines starts the workers, as those of a component, by names that count from first.
func (s *Stack) StartEngines(ctx context.Context, component string, first int) error {
	s.Engines = make([]*Child, s.Workers)
	all, ctx := errgroup.WithContext(ctx)
	for i := range s.Engines {
		at, err := s.hold()
		if err != nil {
			return err
		}
		flags := s.EngineFlags
		if s.Prefill > 0 {
			role := router.Decode
			if i < s.Prefill {
				role = router.Prefill
			}
			flags = append([]string{"--role", string(role)}, flags...)
		}
		all.Go(func() (err error) {
			name := fmt.Sprint("worker-", first+i)
			s.Engines[i], err = Start(ctx, s.Dir, name, append([]string{
				"engine", "--name", name, "--component", component,
				"--listen", at, "--nats-url", s.Bus.URL(), "--model", s.Model, s.EventsFlag(),
			}, flags...)...)
			return err
		})
	}
	return all.Wait()
}

// EventsFlag is the flag that says how events travel.
func (s *Stack) EventsFlag() string { return fmt.Sprint("--durable-kv-events=", !s.Core) }

// hold reserves an address at which a child may be started more than once.
func (s *Stack) hold() (address string, err error) {
	port, release, err := process.HoldPort()
	if err == nil {
		s.ports = append(s.ports, release)
	}
	return fmt.Sprint("127.0.0.1:", port), err
}

// Stop ends everything, the clients of others first.
func (s *Stack) Stop() {
	if s.Envoy != nil {
		_ = s.Envoy.Stop() // it ends with this process in any case
	}
	for _, c := range s.Others {
		c.Stop()
	}
	s.Router.Stop()
	for _, g := range s.Groups {
		g.Stop()
	}
	for _, e := range s.Engines {
		e.Stop()
	}
	if s.Bus != nil && !s.SharedBus {
		s.Bus.Stop()
	}
	for _, release := range s.ports {
		release()
	}
	s.ports = nil
}

// StartRouter starts kvroute in place of the one before, and waits until it decides
// requests through Envoy.
func (s *Stack) StartRouter(ctx context.Context, flags ...string) error {
	return bench.Try(func() {
		var at process.Addresses
		if s.Router != nil { // Envoy knows the address of the one before
			at = s.Router.At
			s.Router.Stop()
			s.Router = nil
		} else {
			at.Extproc, at.HTTP = bench.Must(s.hold()), s.HTTP
			if at.HTTP == "" {
				at.HTTP = bench.Must(s.hold())
			}
		}
		bench.NoError(s.serve(ctx, "kvroute", at.Extproc, at.HTTP, flags...))
		if s.Envoy == nil {
			bench.NoError(s.StartEnvoy(ctx))
		}
		if !s.Unrouted {
			bench.NoError(s.WaitRouted(ctx))
		}
	})
}

// StartReplicas starts so many routers, and waits until Envoy spreads requests over them.
func (s *Stack) StartReplicas(ctx context.Context, n int, flags ...string) error {
	return bench.Try(func() {
		for i := range n {
			name, httpAt := fmt.Sprint("kvroute-", i+1), "127.0.0.1:0"
			if i == n-1 && s.HTTP != "" {
				httpAt = s.HTTP
			}
			bench.NoError(s.serve(ctx, name, "127.0.0.1:0", httpAt, append([]string{"--replica", name}, flags...)...))
			s.Others = append(s.Others, s.Router)
			s.EnvoyConfig.ExtProc = append(s.EnvoyConfig.ExtProc, s.Router.At.Extproc)
		}
		bench.NoError(s.StartEnvoy(ctx))
		bench.NoError(process.Until(ctx, process.Patience, "Envoy does not find all replicas", func(ctx context.Context) bool {
			healthy, err := s.Envoy.Stat(ctx, "cluster.kvroute.membership_healthy")
			return err == nil && healthy == int64(n)
		}))
		bench.NoError(s.WaitRouted(ctx))
	})
}

// serve starts a kvroute, and waits until it knows the workers.
func (s *Stack) serve(ctx context.Context, name, extprocAt, httpAt string, flags ...string) (err error) {
	if s.Router, err = Start(ctx, s.Dir, name, append([]string{
		"serve", "--decision-headers", "--extproc-address", extprocAt, "--http-address", httpAt,
		"--nats-url", s.Bus.URL(), "--drain-timeout", "1s", "--drain-delay", "0", s.EventsFlag(),
	}, flags...)...); err != nil {
		return err
	}
	return s.WaitWorkers(ctx)
}

// StartEnvoy starts Envoy before the router, or before the replicas that its
// configuration names.
func (s *Stack) StartEnvoy(ctx context.Context) (err error) {
	c := s.EnvoyConfig
	c.ListenAddress, c.AdminAddress, c.Pool = "127.0.0.1:0", "127.0.0.1:0", slices.Clone(c.Pool)
	if len(c.ExtProc) == 0 {
		c.ExtProc = []string{s.Router.At.Extproc}
	}
	for _, e := range s.Engines[s.Prefill:] {
		if c.PoolFile == "" {
			c.Pool = append(c.Pool, e.At.HTTP)
		}
	}
	if s.Bootstrap == nil {
		s.Bootstrap = Render
	}
	config, err := s.Bootstrap(c)
	if err != nil {
		return err
	}
	s.Envoy, err = envoytest.Start(ctx, envoytest.Options{Path: s.EnvoyPath, Config: config})
	return err
}

// Render makes the bootstrap that `kvroute config envoy` prints.
func Render(c envoy.Config) ([]byte, error) {
	c.NoSilenceTimeout = c.NoSilenceTimeout || runtime.GOOS != "linux"
	var text bytes.Buffer
	err := envoy.Render(&text, c)
	return text.Bytes(), err
}

// WaitWorkers waits until the router knows all workers, or groups.
func (s *Stack) WaitWorkers(ctx context.Context) error {
	want := s.Workers
	if len(s.Groups) > 0 {
		want = len(s.Groups)
	}
	return process.Until(ctx, process.Patience, "the workers do not register", func(ctx context.Context) bool {
		known, err := s.workers(ctx)
		return err == nil && len(known) >= want // there may be others than ours
	})
}

// workers returns the workers that the router knows.
func (s *Stack) workers(ctx context.Context) ([]router.WorkerState, error) {
	var answer struct{ Workers []router.WorkerState }
	err := process.GetJSON(ctx, "http://"+s.Router.At.HTTP+"/v1/workers", &answer)
	return answer.Workers, err
}

// WaitRouted waits until Envoy has found the router: its requests are decided.
func (s *Stack) WaitRouted(ctx context.Context) error {
	return process.Until(ctx, process.Patience, "Envoy does not find kvroute", func(ctx context.Context) bool {
		hosts, err := process.Get(ctx, s.Envoy.AdminURL()+"/clusters")
		if err != nil || bytes.Contains(hosts, []byte(s.Router.At.Extproc+"::health_flags::/failed_active_hc")) {
			return false
		}
		if _, err := s.Ask(ctx, "Are you there?"); err != nil {
			return false
		}
		var kept struct{ Decisions []router.Decision }
		err = process.GetJSON(ctx, "http://"+s.Router.At.HTTP+"/v1/decisions", &kept)
		return err == nil && len(kept.Decisions) > 0
	})
}

// Ask sends one request through Envoy, and returns the headers of its response.
func (s *Stack) Ask(ctx context.Context, content string) (headers http.Header, err error) {
	err = bench.Try(func() {
		body := bench.Must(json.Marshal(map[string]any{
			"model": s.Model, "max_tokens": 4,
			"messages": []map[string]string{{"role": "user", "content": content}},
		}))
		resp := bench.Must(http.DefaultClient.Do(bench.Must(http.NewRequestWithContext(ctx, http.MethodPost, s.Envoy.URL()+"/v1/chat/completions", bytes.NewReader(body)))))
		defer resp.Body.Close()
		bench.Must(io.Copy(io.Discard, resp.Body))
		if resp.StatusCode != http.StatusOK {
			bench.NoError(fmt.Errorf("status %d", resp.StatusCode))
		}
		headers = resp.Header
	})
	return headers, err
}
