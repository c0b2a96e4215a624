// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
)

// An Envoy whose configuration is not from this project serves as before, and asks kvroute once it has the pieces of
// `kvroute config envoy --parts`. The doctor names what it lacks before, and nothing after.
func TestAnEnvoyOfYourOwnUsesKvroute(t *testing.T) {
	t.Parallel() // mostly waits
	d := newStack(t, 3, []string{"--speed", "20"})
	foreign, err := os.ReadFile("../../envoy/testdata/foreign/envoy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan http.Header, 1)
	shop := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		asked <- r.Header
		fmt.Fprint(w, "shop")
	})
	yours := func(c envoy.Config, parts bool) ([]byte, error) {
		text := strings.NewReplacer("port_value: 9901", "port_value: 0", "port_value: 8080", "port_value: 0",
			"port_value: 8001", "port_value: "+port(d.Engines[0].At.HTTP), "port_value: 8002", "port_value: "+port(d.Engines[1].At.HTTP),
			"port_value: 8003", "port_value: "+port(shop)).Replace(string(foreign))
		if !parts {
			return []byte(text), nil
		}
		var all, pieces map[string]any
		status, printed, stderr := runs(t, "config", "envoy", "--parts", "--pool-cluster", "vllm", "--extproc", c.ExtProc[0])
		if status != 0 || stderr != "" {
			t.Fatalf("config envoy --parts ends with %d: %s", status, stderr)
		}
		if err := yaml.Unmarshal([]byte(text), &all); err != nil {
			return nil, err
		}
		if err := yaml.Unmarshal([]byte(printed), &pieces); err != nil {
			return nil, err
		}
		envoytest.AddParts(all, pieces)
		var merged bytes.Buffer
		err := yaml.NewEncoder(&merged, yaml.JSON()).Encode(all)
		return merged.Bytes(), err
	}
	d.Bootstrap = func(c envoy.Config) ([]byte, error) { return yours(c, false) }
	d.Unrouted = true
	d.begin(t, "--decision-headers")
	doctorSays := func(want string, status int) {
		t.Helper()
		if got, out := examine(t, "--url", "http://"+d.Router.At.HTTP, "--envoy-admin", d.Envoy.AdminURL()); got != status || !strings.Contains(out, want) {
			t.Errorf("the doctor ends with %d, want %d, and %q in\n%s", got, status, want, out)
		}
	}
	resp, body := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), nil)
	if resp.StatusCode != http.StatusOK || resp.Header.Get("X-Dynamo-Reason") != "" {
		t.Fatalf("without the pieces: %s, %s", resp.Status, body)
	}
	doctorSays("no listener has kvroute's filter (ext_proc)", 1)

	d.Bootstrap = func(c envoy.Config) ([]byte, error) { return yours(c, true) }
	d.restartEnvoy(t)
	if err := d.WaitRouted(t.Context()); err != nil {
		t.Fatal(err)
	}
	doctorSays("its configuration has all that kvroute needs", 0)

	// The third worker is not in the cluster of the operator, and kvroute uses it. A prefix goes to its worker.
	served := map[string]string{}
	for i := range 48 {
		prompt := fmt.Sprintf("%02d%s", i%24, strings.Repeat(" the same long beginning", 40))
		resp, body := reply(t, d, "POST", chatPath, chatBody(prompt, 2, i%2 == 0), http.Header{"X-Dynamo-Worker": {shop}})
		worker := resp.Header.Get("X-Sim-Worker")
		if resp.StatusCode != http.StatusOK || resp.Header.Get("X-Dynamo-Reason") == "" || worker == "" {
			t.Fatalf("request %d: %s, %v: %s", i, resp.Status, resp.Header, body)
		}
		if before := served[prompt[:2]]; before != "" && before != worker {
			t.Errorf("prompt %d went to %s, and then to %s", i%24, before, worker)
		}
		served[prompt[:2]] = worker
		if i == 23 {
			settle(t, d)
		}
	}
	all := map[string]bool{}
	for _, worker := range served {
		all[worker] = true
	}
	if len(all) != 3 {
		t.Errorf("the workers %v served, want all three", all)
	}

	// Other routes do not ask kvroute.
	before, err := d.Envoy.Sum(t.Context(), `http\.edge\.ext_proc\.kvroute\.streams_started`)
	if err != nil || before == 0 {
		t.Fatalf("%d streams, %v", before, err)
	}
	if resp, body := reply(t, d, "POST", "/shop/cart", strings.Repeat("x", 3<<20), nil); resp.StatusCode != http.StatusOK || body != "shop" {
		t.Errorf("the shop: %s, %s", resp.Status, body)
	}
	for name := range <-asked {
		if strings.HasPrefix(name, "X-Dynamo-") && name != "X-Dynamo-Client-Request-Id" {
			t.Errorf("the shop got the header %s", name)
		}
	}
	if after, err := d.Envoy.Sum(t.Context(), `http\.edge\.ext_proc\.kvroute\.streams_started`); err != nil || after != before {
		t.Errorf("%d streams after a request for the shop, want %d, %v", after, before, err)
	}

	// Without kvroute, the operator's cluster serves.
	kill(t, d.Router)
	for range 10 {
		if resp, body := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), nil); resp.StatusCode != http.StatusOK || resp.Header.Get("X-Dynamo-Reason") != "" {
			t.Errorf("without kvroute: %s, %s", resp.Status, body)
		}
	}
}

func port(address string) string { return address[strings.LastIndexByte(address, ':')+1:] }
