// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"os/exec"
	"testing"
	"time"
)

// The Python client, tested by its own tests against a router with two simulated
// workers, with whatever Python 3 there is.
func TestPythonClient(t *testing.T) {
	t.Parallel() // it waits, most of the time
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
	d := &demonstration{out: io.Discard, dir: t.TempDir(), workers: 2}
	d.load.Model = "sim"
	t.Cleanup(func() {
		d.stop()
		if t.Failed() && d.router != nil {
			t.Logf("kvroute's log:\n%s", d.router.lastLines())
		}
	})
	if err := d.start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d.router, err = startChild(t.Context(), d.dir, "kvroute", "serve", "--http-address", "127.0.0.1:0", "--extproc-address", "127.0.0.1:0", "--nats-url", d.bus.url(), "--router-predicted-ttl-secs", "0"); err != nil {
		t.Fatal(err)
	}
	if err := d.waitWorkers(t.Context()); err != nil {
		t.Fatal(err)
	}
	test("test_client.py", "http://"+d.router.at.HTTP, "sim")
}
