// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench/demo"
)

// The Python client's own tests, against a router with two simulated workers, with the installed
// Python 3.
func TestPythonClient(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Fatal("python3 is missing")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	test := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(ctx, python, append([]string{"-B"}, args...)...)
		cmd.Dir = "../../bindings/python"
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	}
	test("test_transport.py")
	d := &demonstration{demo.Stack{Dir: t.TempDir(), Workers: 2}}
	d.Model = "sim"
	t.Cleanup(func() {
		d.Stop()
		if t.Failed() && d.Router != nil {
			t.Logf("kvroute's log:\n%s", d.Router.LastLines())
		}
	})
	if err := d.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d.Router, err = demo.Start(t.Context(), d.Dir, "kvroute", "serve", "--http-address", "127.0.0.1:0", "--extproc-address", "127.0.0.1:0", "--nats-url", d.Bus.URL(), "--router-predicted-ttl-secs", "0"); err != nil {
		t.Fatal(err)
	}
	if err := d.WaitWorkers(t.Context()); err != nil {
		t.Fatal(err)
	}
	test("test_client.py", "http://"+d.Router.At.HTTP, "sim")
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, block, _ := strings.Cut(string(readme), "```python\n")
	block, _, _ = strings.Cut(block, "```")
	block = strings.Replace(block, "127.0.0.1:9003", d.Router.At.HTTP, 1)
	test("-c", block+"\nassert event['choices'][0]['finish_reason'] == 'length', event\n")

	block = strings.Replace(codeBlock(t, "library", "python"), "127.0.0.1:9003", d.Router.At.HTTP, 1)
	test("-c", block+"\nassert overlap_blocks == 0 and router.get_potential_loads_sync([1])[0]['active_requests'] == 0\n")

	file := filepath.Join(t.TempDir(), "kvroute.yaml")
	var config strings.Builder
	config.WriteString("version: 1\nworkers:\n")
	for i, role := range []string{"prefill", "decode"} {
		at := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			if role == "prefill" {
				fmt.Fprint(w, `{"kv_transfer_params":{"remote_host":"h"}}`)
				return
			}
			text := "of the decode worker"
			if strings.Contains(string(body), `"remote_host":"h"`) {
				text += " after a leg"
			}
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprintf(w, "data: {\"choices\":[{\"text\":%q}]}\n\ndata: [DONE]\n\n", text)
		})
		fmt.Fprintf(&config, "- {worker_id: %d, role: %s, engine: vllm, address: %q, models: [m], block_size: 16}\n", i+1, role, at)
	}
	if err := os.WriteFile(file, []byte(config.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	split := spawn(t, "kvroute", "serve", "--config", file, "--http-address", "127.0.0.1:0", "--extproc-address", "127.0.0.1:0", "--no-kv-events")
	test("test_split.py", "http://"+split.At.HTTP, "m")
}
