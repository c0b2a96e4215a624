// SPDX-License-Identifier: Apache-2.0

package envoy_test

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
)

// listener is an external processor that records which headers Envoy sends to it.
type listener struct {
	envoytest.Noop

	mu sync.Mutex
	// mu guards the field below.
	heard map[string]bool
}

type heardStream struct {
	extprocv3.ExternalProcessor_ProcessServer
	l *listener
}

func (s heardStream) Recv() (*extprocv3.ProcessingRequest, error) {
	m, err := s.ExternalProcessor_ProcessServer.Recv()
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	for _, h := range append(m.GetRequestHeaders().GetHeaders().GetHeaders(), m.GetResponseHeaders().GetHeaders().GetHeaders()...) {
		s.l.heard[h.GetKey()] = true
	}
	return m, err
}

func (l *listener) Process(g extprocv3.ExternalProcessor_ProcessServer) error {
	return l.Noop.Process(heardStream{g, l})
}

// Credentials reach the worker and the client, and not kvroute.
func TestCredentialsStayWithEnvoy(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	secrets := []string{"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"}
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, name := range secrets {
			if r.Header.Get(name) != "secret" {
				t.Errorf("the worker does not get %s", name)
			}
		}
		w.Header().Set("Set-Cookie", "secret")
		w.Header().Set("X-Answer", "yes")
	}))
	defer worker.Close()
	l := &listener{Noop: envoytest.Noop{Worker: strings.TrimPrefix(worker.URL, "http://")}, heard: map[string]bool{}}
	server := grpc.NewServer()
	extprocv3.RegisterExternalProcessorServer(server, l)
	healthpb.RegisterHealthServer(server, health.NewServer())
	at, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(at) }()
	defer func() {
		server.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	p, err := envoytest.Start(t.Context(), envoytest.Options{Config: render(t, envoy.Config{
		ListenAddress: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", ExtProc: []string{at.Addr().String()},
	})})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Stop() }() // cleanup stops it in any case
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.URL()+"/v1/chat/completions", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range secrets {
		req.Header.Set(name, "secret")
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != 200 || resp.Header.Get("Set-Cookie") != "secret" {
		t.Fatalf("status %d, headers %v, %v", resp.StatusCode, resp.Header, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.heard[":path"] || !l.heard["x-answer"] {
		t.Errorf("shown are only %v", l.heard)
	}
	for _, name := range append(secrets, "set-cookie") {
		if l.heard[name] {
			t.Errorf("kvroute is shown %s", name)
		}
	}
}
