// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/doctor"
	"github.com/kvroute/kvroute/replicas"
)

// examine runs the command against running replicas.
func examine(t *testing.T, flags ...string) (status int, out string) {
	t.Helper()
	status, out, stderr := runs(t, append([]string{"doctor"}, flags...)...)
	return status, out + stderr
}

// apis are the --url flags of some replicas.
func apis(replicas ...*demo.Child) (flags []string) {
	for _, c := range replicas {
		flags = append(flags, "--url", "http://"+c.At.HTTP)
	}
	return flags
}

// Running replicas with the same knowledge are reported as equal, while requests begin and end. A
// replica with other settings, without a listener or out of reach is named.
func TestTheDoctorComparesReplicas(t *testing.T) {
	t.Parallel() // mostly waits
	bus, engines := streamFleet(t)
	a, b := startReplicaProcess(t, bus, "a"), startReplicaProcess(t, bus, "b")
	talk(t, engines, 0, 12)
	booked := func(c *demo.Child, id string) {
		t.Helper()
		resp, text := whole(t, http.MethodPost, "http://"+c.At.HTTP+"/v1/best_worker", fmt.Sprintf(`{"model":"sim","request_id":%q,"token_ids":[1,2,3]}`, id), nil)
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s", resp.Status, text)
		}
	}
	booked(a, "one")
	booked(b, "two")
	stop := make(chan struct{})
	busy := make(chan struct{})
	go func() {
		defer close(busy)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
			id := fmt.Sprint("busy", i)
			booked([]*demo.Child{a, b}[i%2], id)
			whole(t, http.MethodPost, "http://"+[]*demo.Child{a, b}[i%2].At.HTTP+"/v1/free", fmt.Sprintf(`{"request_id":%q}`, id), nil)
		}
	}()
	eventually(t, "equal replicas are not called so", func() bool {
		status, out := examine(t, apis(a, b)...)
		return status == 0 && strings.Contains(out, "equal: 2 replicas, 3 workers, ") && !strings.Contains(out, " 0 cached blocks")
	})
	close(stop)
	<-busy

	_, out := examine(t, append(apis(a), "--json")...)
	var report struct {
		Healthy  bool
		Equal    *bool
		Replicas []struct {
			Name     string
			Workers  int
			RouterID uint64         `json:"router_id"`
			Settings map[string]any `json:"settings"`
			Peers    []replicas.PeerView
		}
		Findings []doctor.Finding
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatal(err)
	}
	if r := report.Replicas[0]; !report.Healthy || report.Equal != nil || r.Name != "a" || r.Workers != 3 || r.RouterID == 0 || r.Settings["block-size"] == nil || r.Settings["nats-url"] != nil || len(r.Peers) != 1 {
		t.Errorf("report %+v", report)
	}
	if len(report.Findings) != 1 || report.Findings[0].What != "replica" || !strings.Contains(report.Findings[0].Text, "replica b ") {
		t.Errorf("the replica that was not asked is not named: %+v", report.Findings)
	}

	alone := startReplicaProcess(t, bus, "alone", "--router-replica-sync=false", "--block-size", "32", "--active-prefill-tokens-threshold", "1000000")
	status, out := examine(t, append(append(apis(a, b, alone), apis(a)...), "--url", "http://127.0.0.1:1")...)
	for _, want := range []string{
		"setting block-size: 0 at a#1, a#4, b; 32 at alone",
		"setting router-replica-sync: false at alone; true at a#1, a#4, b",
		"busy thresholds of sim: active_prefill_tokens_threshold 1000000 at alone; none at a#1, a#4, b",
		"active requests", "pending tokens",
		"a#4: it is the same process as a#1",
		"127.0.0.1:1: it cannot be asked",
		"differences, 2 faults, among 4 replicas",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("it does not say %q", want)
		}
	}
	if status != 1 || t.Failed() {
		t.Errorf("status %d\n%s", status, out)
	}

	bus.Server.Shutdown()
	eventually(t, "that NATS is away is not said", func() bool {
		status, out := examine(t, apis(a, b)...)
		return status == 1 && strings.Contains(out, "a: NATS is away") && strings.Contains(out, `b: kvroute is degraded: the check "registry" fails`)
	})
}

// The doctor refuses contradictory flags.
func TestTheDoctorRefuses(t *testing.T) {
	for args, want := range map[string]string{
		"--url nowhere": "want http://host:port", "--envoy-admin http://127.0.0.1:1": "its configuration cannot be read", "--api-token-file /nowhere/at": "nowhere",
	} {
		if status, out, stderr := runs(t, append([]string{"doctor"}, strings.Fields(args)...)...); status == 0 || !strings.Contains(out+stderr, want) {
			t.Errorf("%s: status %d, %s", args, status, out+stderr)
		}
	}
}

// Each setting belongs either to one replica or to all, and each name in these lists is a setting.
func TestWhatReplicasShare(t *testing.T) {
	c := defaults()
	all := c.shared()
	for _, name := range []string{"block-size", "router-mode", "cost", "namespace", "router-replica-sync", "drain-timeout"} {
		if _, ok := all[name]; !ok {
			t.Errorf("%s is not compared", name)
		}
	}
	for _, name := range []string{"version", "http-address", "nats-url", "nats-creds", "nats-key", "replica", "state-dir", "extproc-tls-key", "log-level", "models", "workers", "dynamo"} {
		if _, ok := all[name]; ok {
			t.Errorf("%s is compared", name)
		}
	}
}
