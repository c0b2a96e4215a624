// SPDX-License-Identifier: Apache-2.0

package wire_test

import (
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/wire"
)

func TestNames(t *testing.T) {
	var def wire.Scope
	dynamo := wire.Scope{Namespace: "dynamo", Component: "backend", Endpoint: "generate"}
	odd := wire.Scope{Namespace: "A.b", Component: "c d", Endpoint: "e/*"}
	for _, c := range []struct{ got, want string }{
		{def.Bucket("workers"), "kvr-kvroute-workers-generate-84332d3e-workers"},
		{dynamo.Bucket("snap"), "kvr-dynamo-backend-generate-38ca46ee-snap"},
		{def.Topic("kv-events"), "namespace.kvroute.component.workers.endpoint.generate.kv-events"},
		{odd.Topic("kv.events/*"), "namespace.A%2Eb.component.c%20d.endpoint.e%2F%2A.kv%2Eevents%2F%2A"},
		{def.Own("heartbeat", "*"), "kvroute.v1.kvroute.workers.generate.heartbeat.*"},
		{def.Own("heartbeat", wire.WorkerKey(255)), "kvroute.v1.kvroute.workers.generate.heartbeat.00000000000000ff"},
		{wire.Segment("é"), "%C3%A9"},
		{odd.StreamSubjects("kv-events"), "namespace.A%2Eb.component.c%20d.endpoint.*.kv-events"},
	} {
		if c.got != c.want {
			t.Errorf("got  %s\nwant %s", c.got, c.want)
		}
	}
	if a, b := dynamo.Stream(), (wire.Scope{Namespace: "dynamo", Component: "backend", Endpoint: "other"}).Stream(); a != b || !strings.HasPrefix(a, "kvr-dynamo-backend-") {
		t.Errorf("streams %s and %s of one component", a, b)
	}
	if a, b := odd.Bucket("x"), (wire.Scope{Namespace: "a-b", Component: "c-d", Endpoint: "e--"}).Bucket("x"); a == b {
		t.Errorf("two scopes share the name %s", a)
	}
}

func TestWorkerIDs(t *testing.T) {
	for name, want := range map[string]uint64{"worker-0": 3523077478650045, "worker-1": 1668131933022283} {
		if got := wire.WorkerID(name); got != want {
			t.Errorf("WorkerID(%q) = %d, want %d", name, got, want)
		}
	}
}
