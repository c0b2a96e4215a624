// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
)

// Client headers that only kvroute may set never reach a worker, whether kvroute decides, passes,
// has no room, hangs or is dead.
func TestControlHeadersReachNoWorker(t *testing.T) {
	t.Parallel() // mostly waits
	const forged = "192.0.2.1:1"
	d := newStack(t, 0, nil)
	var mu sync.Mutex
	var seen []string
	asked := 0
	worker := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		if r.Header.Get("X-Of-Others") == "stays" { // other requests are not the test's
			asked++
		}
		for name, values := range r.Header {
			if strings.Contains(strings.Join(values, ","), forged) {
				seen = append(seen, strings.ToLower(name))
			}
		}
		mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"choices":[]}`)
	})
	header := http.Header{"X-Of-Others": {"stays"}}
	for _, name := range envoytest.SteeringHeaders {
		header.Add(name, forged)
	}
	d.EnvoyConfig.MessageTimeout = time.Second
	d.EnvoyConfig.Pool = []string{worker}
	flags := staticFlags(t, d, "a", worker)
	d.begin(t, flags...)
	const decides, passes, either = "decides", "passes", "either"
	check := func(when, does string) {
		t.Helper()
		for _, c := range []struct{ method, path, body string }{
			{"POST", chatPath, chatBody("hello", 2, false)}, {"OPTIONS", "/v1/models/x", "{}"}, {"HEAD", "/v1/models", ""},
		} {
			resp, body := reply(t, d, c.method, c.path, c.body, header)
			decided := resp.Header.Get("X-Dynamo-Reason") != ""
			if resp.StatusCode != 200 || does != either && decided != (does == decides && c.path == chatPath) {
				t.Errorf("%s, %s: status %d, reason %q: %.200s", when, c.path, resp.StatusCode, resp.Header.Get("X-Dynamo-Reason"), body)
			}
		}
		mu.Lock()
		defer mu.Unlock()
		if len(seen) > 0 || asked != 3 {
			t.Errorf("%s: the worker got %d requests of 3, and the client's %v", when, asked, seen)
		}
		seen, asked = nil, 0
	}
	check("kvroute decides", decides)
	hold(t, d.Router)
	check("kvroute hangs", passes)
	kill(t, d.Router)
	check("kvroute is dead", passes)
	d.Unrouted = true
	if err := d.StartRouter(t.Context(), append(flags, "--decision-timeout", "1ns")...); err != nil {
		t.Fatal(err)
	}
	check("kvroute has no time", either)

	d.EnvoyConfig.BodyMode = envoy.FullDuplex
	if err := d.Envoy.Stop(); err != nil {
		t.Fatal(err)
	}
	d.Envoy, d.Unrouted = nil, false
	if err := d.StartRouter(t.Context(), flags...); err != nil {
		t.Fatal(err)
	}
	check("kvroute decides in full duplex", decides)
}

// configurations returns each configuration of Envoy that this project writes or keeps, with kvroute
// at an address ("" means an address without a listener), and the pool at two addresses.
func configurations(t *testing.T, pool [2]string, kvroute string) map[string][]byte {
	t.Helper()
	if kvroute == "" {
		kvroute = heldAddress(t)
	}
	all := map[string][]byte{}
	add := func(name string, c envoy.Config) {
		t.Helper()
		c.ListenAddress, c.AdminAddress, c.ExtProc = "127.0.0.1:0", "127.0.0.1:0", []string{kvroute}
		if c.PoolFile == "" {
			c.Pool = pool[:]
		}
		var text bytes.Buffer
		if err := envoy.Render(&text, c); err != nil {
			t.Fatal(err)
		}
		all[name] = text.Bytes()
	}
	file := filepath.Join(t.TempDir(), "pool.json")
	if err := os.WriteFile(file, envoy.Endpoints("1", []netip.AddrPort{netip.MustParseAddrPort(pool[0]), netip.MustParseAddrPort(pool[1])}, nil), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, failover := range []envoy.Failover{envoy.Composite, envoy.List, envoy.NoFailover} {
		add(failover, envoy.Config{Failover: failover})
		add(failover+" with a file", envoy.Config{Failover: failover, PoolFile: file})
	}
	for _, mode := range []envoy.BodyMode{envoy.BufferedPartial, envoy.Streamed, envoy.StreamedAhead, envoy.FullDuplex} {
		add(mode, envoy.Config{BodyMode: mode})
	}
	add("all else", envoy.Config{NoObserver: true})

	kept, err := filepath.Glob(filepath.Join("..", "..", "envoy", "testdata", "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range kept {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for from, to := range map[string]string{
			`"127.0.0.1", port_value: 8080}`: `"127.0.0.1", port_value: 0}`, `"127.0.0.1", port_value: 9901}`: `"127.0.0.1", port_value: 0}`,
			`"127.0.0.1", port_value: 9002}`: portOf(kvroute), `"127.0.0.1", port_value: 8001}`: portOf(pool[0]), `"127.0.0.1", port_value: 8002}`: portOf(pool[1]),
		} {
			if !bytes.Contains(text, []byte(from)) {
				t.Fatalf("%s has no %s", name, from)
			}
			text = bytes.ReplaceAll(text, []byte(from), []byte(to))
		}
		all[filepath.Base(name)] = text
	}
	translated, err := filepath.Glob(filepath.Join("..", "..", "examples", "envoy-gateway", "translated", "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range translated {
		variant := strings.TrimSuffix(filepath.Base(name), ".json")
		text, err := gatewayDump(t, variant).bootstrap(map[string]string{"10.0.0.2:9002": kvroute, "10.0.1.1:8000": pool[0], "10.0.1.2:8000": pool[1]})
		if err != nil {
			t.Fatal(err)
		}
		all[variant] = text
	}
	if len(kept) == 0 || len(translated) < 2 {
		t.Fatalf("the configurations that are kept are %v and %v", kept, translated)
	}
	return all
}

func portOf(address string) string {
	return `"127.0.0.1", port_value: ` + address[strings.LastIndex(address, ":")+1:] + "}"
}

// While kvroute is dead, no client chooses its worker or sends a steering header to one, in any
// configuration that this project writes or keeps.
func TestNoConfigurationLetsClientsChoose(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	var mu sync.Mutex
	var reached []string
	var seen map[string]bool
	var from string
	startWorker := func(name string) string {
		return startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			reached = append(reached, name)
			from = r.Header.Get("X-Forwarded-For")
			for _, header := range envoytest.SteeringHeaders {
				if r.Header.Values(header) != nil {
					seen[header] = true
				}
			}
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"choices":[]}`)
		})
	}
	pool := [2]string{startWorker("pool"), startWorker("pool")}
	victim := startWorker("victim")
	header := http.Header{}
	for _, name := range envoytest.SteeringHeaders {
		header.Set(name, victim)
	}
	header.Set("X-Forwarded-For", "203.0.113.7")
	for name, config := range configurations(t, pool, "") {
		t.Run(name, func(t *testing.T) {
			proxy, err := envoytest.Start(t.Context(), envoytest.Options{Config: config})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = proxy.Stop() })
			for _, c := range []struct{ method, path, body string }{
				{"POST", chatPath, chatBody("hello", 2, false)}, {"OPTIONS", "/v1/models/x", "{}"}, {"HEAD", "/v1/models", ""},
			} {
				status := 0
				eventually(t, "the pool does not serve", func() bool {
					mu.Lock()
					reached, seen = nil, map[string]bool{}
					mu.Unlock()
					resp, body := whole(t, c.method, proxy.URL()+c.path, c.body, header)
					if status = resp.StatusCode; status != 200 {
						t.Logf("%s: status %d: %.200s", c.path, status, body)
					}
					// In full duplex Envoy must first notice that kvroute is absent.
					return status == 200 || name != envoy.FullDuplex
				})
				mu.Lock()
				if status != 200 || !slices.Equal(reached, []string{"pool"}) || len(seen) > 0 {
					t.Errorf("%s: status %d from %v, which hear of the client %v", c.path, status, reached, slices.Sorted(maps.Keys(seen)))
				}
				// For a client on loopback Envoy writes the machine's address.
				if _, own, _ := strings.Cut(from, "203.0.113.7,"); net.ParseIP(own) == nil {
					t.Errorf("%s: X-Forwarded-For is %q, want the client's own address behind what it says", c.path, from)
				}
				mu.Unlock()
			}
		})
	}
}
