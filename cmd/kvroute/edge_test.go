// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/openai"
)

// admin are paths of workers that only an operator may use.
var admin = strings.Fields(`/flush_cache /sleep /update_weights_from_disk /v1/load_lora_adapter /reset_prefix_cache /metrics /kv_cache_events
	//flush_cache /./flush_cache /v1/../flush_cache /%66lush_cache /v1/models/../../flush_cache /v1/models/%2e%2e/%2E%2E/flush_cache
	/v1/models/..%2f..%2Fflush_cache /v1/models/..%5c..\flush_cache /v1/chat/completions/x /v1/chat/completionsx
	/v1/responses/ /v1/responses/a/b /v1/responses/a/cancel/b /v1/responses/../../flush_cache /v1/responses/..%2f..%2fflush_cache /v1/responses/a%252f..`)

// spellings are other ways to write chatPath that workers understand.
var spellings = strings.Fields(`/v1/chat/%63ompletions /v1%2Fchat%2fcompletions /v1//chat/completions //v1/chat/completions
	/v1/./chat/completions /v1/x/../chat/completions /%2e/v1/chat/completions`)

// startWorker starts a worker that records the paths of its requests. heard returns them and clears
// the record.
func startWorker(t *testing.T) (address string, heard func() []string) {
	t.Helper()
	var mu sync.Mutex
	var paths []string
	address = startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if r.Header.Get("User-Agent") == "edge" { // other requests are not the test's
			paths = append(paths, r.RequestURI)
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"choices":[]}`)
	})
	return address, func() []string {
		mu.Lock()
		defer mu.Unlock()
		got := paths
		paths = nil
		return got
	}
}

// raw sends a request with its path unchanged by Go's client.
func raw(t *testing.T, method, url, path, body string) sight {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nhost: a\r\nuser-agent: edge\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", method, path, len(body), body)
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: method})
	return look(resp, err)
}

// In each configuration that this project writes or keeps, only the inference paths reach workers.
// This holds for each spelling of a path, and whether kvroute is dead or names a worker for every
// request.
func TestOnlyInferencePathsReachWorkers(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	worker, heard := startWorker(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	eager := grpc.NewServer()
	envoytest.Noop{Worker: worker}.Register(eager)
	go func() { _ = eager.Serve(l) }() // ends with Stop
	t.Cleanup(eager.Stop)

	for kvroute, address := range map[string]string{"dead": "", "eager": l.Addr().String()} {
		for name, config := range configurations(t, [2]string{worker, worker}, address) {
			t.Run(kvroute+", "+name, func(t *testing.T) {
				proxy, err := envoytest.Start(t.Context(), envoytest.Options{Config: config})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = proxy.Stop() })
				refused := outcomeOf(t, "the path is not an inference path")
				for _, path := range admin {
					for _, method := range []string{http.MethodGet, http.MethodPost} {
						refused.check(t, raw(t, method, proxy.URL(), path, ""))
						if got := heard(); got != nil {
							t.Errorf("%s %s reaches a worker as %v", method, path, got)
						}
					}
				}
				if kvroute == "eager" && name == envoy.FullDuplex {
					return // this kvroute does not know the path
				}
				served := func(path, want string) {
					t.Helper()
					eventually(t, path+" is not served", func() bool { // in full duplex Envoy must first notice that kvroute is absent
						got := raw(t, http.MethodPost, proxy.URL(), path, "{}")
						if paths := heard(); got.status == http.StatusOK && !slices.Equal(paths, []string{want}) {
							t.Errorf("%s reaches workers as %v, want %s", path, paths, want)
						}
						return got.status == http.StatusOK
					})
				}
				for _, path := range spellings {
					served(path, chatPath)
				}
				for _, path := range append(openai.Paths(), "/v1/models", "/v1/models/meta-llama/Llama-3-8B?a=b%2Fc", "/v1/responses/resp_1/cancel", "/v1/responses/resp_1/cancel?a=b%2Fc") {
					served(path, path)
				}
			})
		}
	}
}

// A path in another spelling is routed like any other.
func TestSpellingsOfAPathAreDecided(t *testing.T) {
	d := startStack(t, 1, []string{"--speed", "50"})
	for _, path := range spellings {
		eventually(t, path+" is not decided", func() bool {
			return raw(t, http.MethodPost, d.Envoy.URL(), path, chatBody("hello", 2, false)).header.Get("X-Dynamo-Reason") != ""
		})
	}
}

// An operator may allow more paths.
func TestAllowedPaths(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	worker, heard := startWorker(t)
	start := func(args ...string) *envoytest.Proc {
		var out, complaint bytes.Buffer
		args = append([]string{"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--extproc", "127.0.0.1:1", "--pool", worker}, args...)
		if err := printEnvoy(t.Context(), args, stdio{out: &out, err: &complaint}); err != nil {
			t.Fatal(err)
		}
		proxy, err := envoytest.Start(t.Context(), envoytest.Options{Config: out.Bytes()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = proxy.Stop() })
		return proxy
	}
	some := start("--allow-path", "/health", "--allow-path", "/v1/audio/*")
	all := start("--allow-path", "/*")
	for _, c := range []struct {
		path string
		some bool
	}{{"/health", true}, {"/v1/audio/speech", true}, {"/v1/audio/a/b.c", true}, {"/v1/audio", false}, {"/health/", false}, {"/healthy", false}} {
		if status := raw(t, http.MethodGet, some.URL(), c.path, "").status; (status == http.StatusOK) != c.some || (heard() != nil) != c.some {
			t.Errorf("%s: status %d, want it served: %v", c.path, status, c.some)
		}
		if status := raw(t, http.MethodGet, all.URL(), c.path, "").status; status != http.StatusOK || heard() == nil {
			t.Errorf("%s where all is allowed: status %d", c.path, status)
		}
	}
}

// Envoy accepts only as many connections, and uses only as much memory, as its limits allow.
func TestEnvoyHasLimits(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	worker, _ := startWorker(t)
	start := func(c envoy.Config) *envoytest.Proc {
		t.Helper()
		c.ListenAddress, c.AdminAddress, c.ExtProc, c.Pool = "127.0.0.1:0", "127.0.0.1:0", []string{"127.0.0.1:1"}, []string{worker}
		var text bytes.Buffer
		if err := envoy.Render(&text, c); err != nil {
			t.Fatal(err)
		}
		proxy, err := envoytest.Start(t.Context(), envoytest.Options{Config: text.Bytes()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = proxy.Stop() })
		return proxy
	}
	full := start(envoy.Config{MaxConnections: 2})
	for range 2 {
		conn, err := net.Dial("tcp", strings.TrimPrefix(full.URL(), "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
	}
	eventually(t, "Envoy does not count its connections", func() bool {
		n, err := full.Sum(t.Context(), `^listener\..*\.downstream_cx_active$`)
		return err == nil && n >= 2
	})
	outcomeOf(t, "there are more connections than Envoy takes").check(t, tolerant(full.URL()))

	tight := start(envoy.Config{MaxHeapBytes: 1 << 20})
	eventually(t, "Envoy goes on without memory", func() bool {
		return raw(t, http.MethodGet, tight.URL(), "/v1/models", "").status != http.StatusOK
	})
	outcomeOf(t, "Envoy has used its memory").check(t, raw(t, http.MethodGet, tight.URL(), "/v1/models", ""))
}

// tolerant sends a request on a new connection, which Envoy may close before or after the request.
func tolerant(url string) sight {
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	return look((&http.Client{Transport: transport}).Get(url + "/v1/models"))
}
