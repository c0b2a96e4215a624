// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/envoytest"
)

// The demo of router groups plays its load through one tier and through two, with all workers in
// both, and all requests succeed. The demo itself checks that the upper tier receives the groups'
// summaries.
func TestTheDemoOfGroups(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	if _, err := envoytest.Find(); err != nil {
		t.Fatal(err)
	}
	status, out, stderr := runs(t, "demo", "--groups", "2", "--workers", "3", "--rate", "20", "--conversations", "8", "--turns", "2", "--turn-gap", "200ms")
	for _, want := range []string{
		"flat  groups, asked   by summaries\n  requests                           16             16             16\n  errors                              0              0              0\n",
		"requests of worker-3", "again: worker-",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("it does not say %q", want)
		}
	}
	if status != 0 || t.Failed() {
		t.Errorf("status %d, %s\n%s", status, stderr, out)
	}
	for want, flags := range map[string][]string{
		`groups is "0"`:       {"--groups", "0"},
		"groups is 3":         {"--groups", "3", "--workers", "2"},
		"shown one at a time": {"--groups", "2", "--replicas", "2"},
	} {
		if status, _, stderr := runs(t, append([]string{"demo"}, flags...)...); status != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%v: status %d, %s, want %q", flags, status, stderr, want)
		}
	}
}
