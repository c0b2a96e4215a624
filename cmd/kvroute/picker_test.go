// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvroute/kvroute/bench/demo"
)

// The suite for endpoint pickers runs against a kvroute process, as it would against any other
// picker. A kvroute that drains reports this over the protocol's services.
func TestThePickerSuiteAgainstAProcess(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	const endpoints = "10.0.0.1:8000,10.0.0.2:8000,10.0.0.3:8000"
	text := "version: 1\nworkers:\n"
	for i, e := range strings.Split(endpoints, ",") {
		text = fmt.Sprintf("%s- {name: w%d, address: %q, models: [m], block_size: 16}\n", text, i, e)
	}
	c, err := demo.Start(t.Context(), t.TempDir(), "kvroute", "serve", "--config", writeFile(t, text), "--endpoint-picker", "--allow-direct",
		"--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0", "--drain-delay", "20s", "--drain-timeout", "20s",
		"--decision-timeout", "50s") // so that a busy machine causes no request to fail open
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Stop)
	out, err := exec.CommandContext(t.Context(), "go", "test", "-count=1", "-v", "../../internal/epptest", "-addr", c.At.Extproc, "-model", "m", "-endpoints", endpoints).CombinedOutput()
	if passed := strings.Count(string(out), "--- PASS: "); err != nil || passed < 14 || strings.Contains(string(out), "--- SKIP") {
		t.Fatalf("%d tests pass, %v:\n%s", passed, err, out)
	}

	conn, err := grpc.NewClient(c.At.Extproc, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := c.Cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for service, want := range map[string]healthpb.HealthCheckResponse_ServingStatus{
		"": healthpb.HealthCheckResponse_NOT_SERVING, "readiness": healthpb.HealthCheckResponse_NOT_SERVING,
		"envoy.service.ext_proc.v3.ExternalProcessor": healthpb.HealthCheckResponse_NOT_SERVING,
		// The process is alive: draining must not cause a restart.
		"liveness": healthpb.HealthCheckResponse_SERVING,
	} {
		var got healthpb.HealthCheckResponse_ServingStatus
		eventually(t, "the service "+service+" does not become "+want.String(), func() bool {
			resp, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: service})
			got = resp.GetStatus()
			return err == nil && got == want
		})
	}
	kill(t, c)
}
