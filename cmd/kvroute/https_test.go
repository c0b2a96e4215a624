// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log" //nolint:depguard // net/http takes no other logger
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	natsserver "github.com/nats-io/nats-server/v2/server"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/router"
)

// Commands reach an API that speaks HTTPS if SSL_CERT_FILE names its authority. New files replace the
// certificate without a restart, and invalid files do not.
func TestTheAPIOverHTTPS(t *testing.T) {
	t.Parallel() // mostly waits
	dir := t.TempDir()
	first := newAuthority(t)
	cert, key, trusted := first.write(dir, "localhost")
	old := filepath.Join(t.TempDir(), "old.pem")
	if err := os.WriteFile(old, first.pem(), 0o600); err != nil {
		t.Fatal(err)
	}
	_, _, unknown := newAuthority(t).write(t.TempDir(), "x")
	c := spawn(t, "kvroute", "serve", "--http-tls-cert", cert, "--http-tls-key", key, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0")
	url := "https://localhost" + c.At.HTTP[strings.LastIndexByte(c.At.HTTP, ':'):]
	command := func(authority, line string) (out string, ok bool) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), os.Args[0], strings.Fields(line)...)
		cmd.Env = append(os.Environ(), "SSL_CERT_FILE="+authority)
		text, err := cmd.CombinedOutput()
		return string(text), err == nil
	}
	eventually(t, "it is not ready", func() bool { _, ok := command(trusted, "healthcheck --url "+url+"/healthz"); return ok })
	for line, want := range map[string]string{
		"top --once --url " + url:              "",
		"doctor --url " + url:                  "",
		"dump --url " + url:                    "kvroute_end",
		"explain last --url " + url:            "nothing was decided yet",
		"healthcheck --url " + url + "/readyz": "503", // no workers, but the connection is trusted
		"dump --url http://" + c.At.HTTP:       "HTTP request to an HTTPS server",
	} {
		if out, _ := command(trusted, line); !strings.Contains(out, want) || strings.Contains(out, "x509") {
			t.Errorf("kvroute %s: want %q in\n%s", line, want, out)
		}
		if out, ok := command(unknown, line); !strings.Contains(line, "http://") && (ok || !strings.Contains(out, "x509")) {
			t.Errorf("kvroute %s accepts a certificate of an unknown authority:\n%s", line, out)
		}
	}
	newAuthority(t).write(dir, "localhost")
	eventually(t, "the new certificate is not in use", func() bool { _, ok := command(trusted, "dump --url "+url); return ok })
	if out, ok := command(old, "dump --url "+url); ok {
		t.Errorf("the old certificate is still in use:\n%s", out)
	}
	if err := os.WriteFile(key, []byte("no key"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, ok := command(trusted, "dump --url "+url); !ok {
		t.Errorf("with an invalid file the last certificate is not in use:\n%s", out)
	}
	if text, err := os.ReadFile(c.Log); err != nil || !strings.Contains(string(text), "http-tls-key") {
		t.Errorf("%v, the log does not name the setting of the invalid file", err)
	}
}

// securedWorker is a worker that speaks HTTPS.
type securedWorker struct {
	address string
	busy    atomic.Bool     // POST is answered with 503
	calls   [4]atomic.Int32 // by place in securedPaths; a request for token ids may have another path
	http2   atomic.Int32    // POSTs over HTTP/2
}

var securedPaths = [4]string{"/health", "/metrics", "/tokenize", chatPath}

func newSecuredWorker(t *testing.T, a *certAuthority, name string) *securedWorker {
	t.Helper()
	w := new(securedWorker)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		for i, path := range securedPaths {
			if r.URL.Path == path || path == "/tokenize" && r.URL.Path == chatPath+"/render" {
				w.calls[i].Add(1)
			}
		}
		if r.ProtoMajor == 2 && r.Method == http.MethodPost {
			w.http2.Add(1)
		}
		if w.busy.Load() && r.URL.Path == chatPath {
			http.Error(out, "not now", http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(out, `{"choices":[],"tokens":[1],"kv_transfer_params":{"a":1}}`)
	}))
	cert, key, _ := a.write(t.TempDir(), name)
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	s.TLS, s.EnableHTTP2 = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}, true
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	w.address = s.Listener.Addr().String()
	return w
}

// Clients, Envoy, kvroute and workers use TLS for all connections. kvroute's probes and calls, and
// Envoy's requests to all its clusters, reach workers whose certificate is right, and only them.
func TestTLSFromClientsToWorkers(t *testing.T) {
	t.Parallel() // mostly waits
	d := newStack(t, 0, nil)
	d.Unrouted = true
	authority, other := newAuthority(t), newAuthority(t)
	cert, key, ca := authority.write(d.Dir, "localhost")
	names := []string{"prefill", "first", "second", "stranger", "misnamed"}
	byName := map[string]*securedWorker{}
	var text strings.Builder
	text.WriteString("version: 1\nworkers:\n")
	for _, name := range names {
		signed, subject, role := authority, "worker.internal", "decode"
		switch name {
		case "prefill":
			role = name
		case "stranger":
			signed = other
		case "misnamed":
			subject = "envoy.internal"
		}
		byName[name] = newSecuredWorker(t, signed, subject)
		fmt.Fprintf(&text, "- {name: %s, address: %q, models: [sim], role: %s, engine: vllm, model_card: kvroute-sim, block_size: 16, health: {interval: 100ms}, metrics: {interval: 100ms}, events: {transport: none}}\n",
			name, byName[name].address, role)
	}
	d.EnvoyConfig.ListenCert, d.EnvoyConfig.ListenKey = cert, key
	d.EnvoyConfig.WorkerCA, d.EnvoyConfig.WorkerName = ca, "worker.internal"
	d.EnvoyConfig.Pool = []string{byName["first"].address, byName["second"].address}
	flags := []string{"--config", writeFile(t, text.String()), "--worker-tls-ca", ca, "--worker-tls-name", "worker.internal", "--degraded-after", "3s", "--unhealthy-after", "3s", "--avoid-failing", "0", "--verify-tokenizer"}
	d.begin(t, flags...)

	healthy := func() (list []string) {
		for _, w := range workers(t, d) {
			if w.Health == "healthy" {
				list = append(list, w.Name)
			}
		}
		return list
	}
	eventually(t, "the probes find no healthy workers", func() bool { return len(healthy()) == 3 })
	for _, name := range []string{"stranger", "misnamed"} {
		eventually(t, name+" is not probed", func() bool {
			text, err := os.ReadFile(d.Router.Log)
			return err == nil && strings.Contains(string(text), "a probe of a worker fails\" worker="+name) && strings.Contains(string(text), "worker-tls-ca is "+ca+", worker-tls-name is")
		})
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority.pem())
	request := func(http2 bool) (status, version int, decided bool) {
		t.Helper()
		client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, ServerName: "localhost"}, ForceAttemptHTTP2: http2, DisableKeepAlives: true}}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, strings.Replace(d.Envoy.URL(), "http://", "https://", 1)+chatPath, strings.NewReader(chatBody("a prompt of more than one block of tokens", 2, false)))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		return resp.StatusCode, resp.ProtoMajor, resp.Header.Get("X-Dynamo-Reason") != ""
	}
	for _, c := range []struct {
		failover envoy.Failover
		choice   string
		http2    bool
	}{{envoy.Composite, "header", false}, {envoy.List, "list", false}, {envoy.NoFailover, "none", true}} {
		d.EnvoyConfig.Failover, d.EnvoyConfig.WorkerHTTP2 = c.failover, c.http2
		d.restartEnvoy(t, append(flags, "--second-choice", c.choice)...)
		eventually(t, "the workers are not healthy", func() bool { return len(healthy()) == 3 })
		eventually(t, "requests are not decided", func() bool { _, _, decided := request(false); return decided })
		byName["first"].busy.Store(c.failover != envoy.NoFailover)
		for i := range 6 {
			status, version, decided := request(i%2 == 1)
			if status != http.StatusOK || version != 1+i%2 || !decided {
				t.Errorf("%s: status %d over HTTP/%d, decided: %v", c.failover, status, version, decided)
			}
		}
		byName["first"].busy.Store(false)
	}
	for name, w := range byName {
		for i, path := range securedPaths {
			right := name != "stranger" && name != "misnamed"
			if n := w.calls[i].Load(); (n > 0) != right && path != "/tokenize" || n > 0 && !right {
				t.Errorf("%s got %d calls of %s", name, n, path)
			}
		}
	}
	if byName["first"].calls[2].Load()+byName["second"].calls[2].Load() == 0 {
		t.Error("no worker was asked for token ids")
	}
	if byName["first"].http2.Load()+byName["second"].http2.Load() == 0 {
		t.Error("Envoy uses no HTTP/2 over TLS to workers")
	}
	if got := healthy(); len(got) != 3 {
		t.Errorf("healthy workers: %v", got)
	}
	d.Router.Stop()
	eventually(t, "the pool does not serve", func() bool { status, _, decided := request(false); return status == http.StatusOK && !decided })
	_, _, d.EnvoyConfig.WorkerCA = other.write(t.TempDir(), "x")
	d.restartEnvoy(t)
	if status, _, _ := request(false); status != http.StatusServiceUnavailable {
		t.Errorf("Envoy sends a request to a worker with a certificate of an unknown authority: status %d", status)
	}
}

// `kvroute publish` registers an engine that speaks HTTPS.
func TestPublishForAnEngineOverHTTPS(t *testing.T) {
	t.Parallel() // mostly waits
	bus, _ := emptyBus(t)
	a := newAuthority(t)
	w := newSecuredWorker(t, a, "worker.internal")
	_, _, ca := a.write(t.TempDir(), "x")
	// It is ready once the worker is registered.
	spawn(t, "publish", "publish", "--engine-address", w.address, "--worker-tls-ca", ca, "--worker-tls-name", "worker.internal",
		"--nats-url", bus.URL(), "--model", "m", "--block-size", "16", "--zmq-endpoint", "tcp://127.0.0.1:1")
	if w.calls[0].Load() == 0 {
		t.Error("it registered an engine whose health it did not check")
	}
}

// No event of an engine crosses a network unencrypted if its sockets are files and `kvroute publish`
// beside it uses NATS with TLS, as docs/operations.md says.
func TestEventsOverTLS(t *testing.T) {
	t.Parallel() // mostly waits
	dir := t.TempDir()
	cert, key, ca := newAuthority(t).write(dir, "localhost")
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	s, err := natsserver.NewServer(&natsserver.Options{
		Host: "127.0.0.1", Port: natsserver.RANDOM_PORT, NoSigs: true, NoLog: true, JetStream: true, StoreDir: dir,
		TLS: true, TLSTimeout: 5, TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}},
	})
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	if !s.ReadyForConnections(process.Patience) {
		t.Fatal("NATS does not start")
	}
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	url := fmt.Sprintf("tls://localhost:%d", s.Addr().(*net.TCPAddr).Port)
	events, replay := "ipc://"+dir+"/kv", "ipc://"+dir+"/kv-replay"
	e := bareEngine(t, "a", "--kv-events-endpoint", events, "--kv-events-replay-endpoint", replay)
	c := spawn(t, "kvroute", "serve", "--nats-url", url, "--nats-ca", ca, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0")
	spawn(t, "publish", "publish", "--engine-address", e.At.HTTP, "--zmq-endpoint", events, "--zmq-replay-endpoint", replay, "--nats-url", url, "--nats-ca", ca)
	if resp, body := whole(t, http.MethodPost, "http://"+e.At.HTTP+chatPath, chatBody(strings.Repeat("a long prompt ", 40), 2, false), nil); resp.StatusCode != http.StatusOK {
		t.Fatal(body)
	}
	eventually(t, "no cached block is known", func() bool {
		var response struct{ Workers []router.WorkerState }
		err := process.GetJSON(t.Context(), "http://"+c.At.HTTP+"/v1/workers", &response)
		return err == nil && len(response.Workers) == 1 && response.Workers[0].CachedBlocks > 0
	})
}
