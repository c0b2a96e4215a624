// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"io"
	"regexp"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/process"
)

// The demo plays its load in several ways, and all requests succeed. The demo itself checks that
// replicas that exchange their requests agree at its end, that the upper tier receives the groups'
// summaries, and that prefill workers compute the prompts of a split model.
func TestDemos(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	if _, err := envoytest.Find(); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		flags, want []string
		missed      bool // the load is too small for the targets
	}{
		"hot": {
			flags: []string{"--hot", "--workers", "3", "--max-tokens", "40"},
			want: []string{
				"round-robin   kv, decode 0             kv\n  requests                           16             16             16\n  errors                              0              0              0\n",
				"TTFT p99", "between tokens mean", "E2E p99", "busiest worker's share           3", "requests of worker-3",
			},
			missed: true,
		},
		"replicas": {
			flags: []string{"--replicas", "2", "--workers", "2"},
			want: []string{
				"kvroute doctor: equal: 2 replicas, 2 workers, ", "one       2 synced     2 unsynced",
				"  errors                              0              0              0\n",
			},
		},
		"groups": {
			flags: []string{"--groups", "2", "--workers", "3"},
			want: []string{
				"flat  groups, asked   by summaries\n  requests                           16             16             16\n  errors                              0              0              0\n",
				"requests of worker-3", "again: worker-",
			},
		},
		"split": {
			flags: []string{"--split", "--workers", "3"},
			want: []string{
				"3 aggregated    1 + 2 split\n  requests                           16             16\n  errors                              0              0\n",
				"between tokens p99", "requests of worker-1",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // mostly waits
			status, out, stderr := runs(t, append([]string{"demo", "--rate", "20", "--conversations", "8", "--turns", "2", "--turn-gap", "200ms"}, c.flags...)...)
			for _, want := range c.want {
				if !strings.Contains(out, want) {
					t.Errorf("it does not say %q", want)
				}
			}
			if status != 0 && !c.missed || t.Failed() {
				t.Errorf("status %d, %s\n%s", status, stderr, out)
			}
		})
	}
	for want, flags := range map[string][]string{
		`groups is "0"`:                     {"--groups", "0"},
		`replicas is "0"`:                   {"--replicas", "0"},
		"groups is 3":                       {"--groups", "3", "--workers", "2"},
		"shown one at a time":               {"--groups", "2", "--replicas", "2"},
		"shown without groups and replicas": {"--split", "--replicas", "2"},
		"want 2 or more for a split":        {"--split", "--workers", "1"},
		"hot is shown without":              {"--hot", "--split"},
	} {
		if status, _, stderr := runs(t, append([]string{"demo"}, flags...)...); status != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%v: status %d, %s, want %q", flags, status, stderr, want)
		}
	}
}

var dashboardAt = regexp.MustCompile(`dashboard .*(http://[0-9.:]+)/`)

// With --keep the dashboard has one address before each load and afterwards, when a gentle load goes on.
func TestDemoKeepsItsDashboard(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	reader, writer := io.Pipe()
	var stderr strings.Builder
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		run(ctx, []string{"demo", "--keep", "--workers", "2", "--rate", "20", "--conversations", "8", "--turns", "2", "--turn-gap", "200ms"}, stdio{writer, &stderr})
		_ = writer.Close()
	}()
	var addresses []string
	for lines := bufio.NewScanner(reader); len(addresses) < 3 && lines.Scan(); {
		if m := dashboardAt.FindStringSubmatch(lines.Text()); m != nil {
			addresses = append(addresses, m[1])
		}
	}
	go func() { _, _ = io.Copy(io.Discard, reader) }() // ends with the demo
	if len(addresses) < 3 || addresses[0] != addresses[1] || addresses[1] != addresses[2] {
		cancel()
		<-ended
		t.Fatalf("the dashboard is at %q, want one address in three lines; %s", addresses, &stderr)
	}
	requests := func(ctx context.Context) (n int) {
		var live struct{ Totals struct{ Requests int } }
		if err := process.GetJSON(ctx, addresses[0]+"/v1/live", &live); err != nil {
			t.Error(err)
		}
		return live.Totals.Requests
	}
	before := requests(ctx)
	if err := process.Until(ctx, process.Patience, "no request comes", func(ctx context.Context) bool { return requests(ctx) > before+1 }); err != nil {
		t.Error(err)
	}
	cancel()
	<-ended
}
