// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/envoytest"
)

// The demo of several replicas plays its load three ways, all requests succeed, and replicas that
// exchange their requests have the same state at its end.
func TestTheDemoOfReplicas(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	if _, err := envoytest.Find(); err != nil {
		t.Fatal(err)
	}
	status, out, stderr := runs(t, "demo", "--replicas", "2", "--workers", "2", "--rate", "20", "--conversations", "8", "--turns", "2", "--turn-gap", "200ms")
	for _, want := range []string{"kvroute doctor: equal: 2 replicas, 2 workers, ", "one       2 synced     2 unsynced", "errors                              0              0              0"} {
		if !strings.Contains(out, want) {
			t.Errorf("it does not say %q", want)
		}
	}
	if status != 0 || t.Failed() {
		t.Errorf("status %d, %s\n%s", status, stderr, out)
	}
	if status, _, stderr := runs(t, "demo", "--replicas", "0"); status != 1 || !strings.Contains(stderr, `replicas is "0"`) {
		t.Errorf("no replicas: status %d, %s", status, stderr)
	}
}
