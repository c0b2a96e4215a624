// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"encoding/json"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
)

// Later versions read the records and heartbeats of workers that version 0.1.0 writes. This version ignores keys that it does not know.
func TestGoldenRecords(t *testing.T) {
	record := fleet.Record{
		V: 1, WorkerID: 1<<53 - 1, Name: "gpu-1", Address: "10.0.0.7:8000", RankAddresses: map[string]string{"2": "10.0.0.7:8002"},
		Models: []string{"llama", "llama-chat"}, LoRA: []string{"legal"}, Role: router.Prefill, Bootstrap: "10.0.0.7:8998",
		BlockSize: 16, DPStart: 2, DPSize: 2, TotalKVBlocks: 5000, MaxNumSeqs: 256, MaxBatchedTokens: 8192, Reorders: true,
		PrefillTPS: 12500.5, GPUType: "H100", Taints: []string{"batch"}, Device: "cpu", ModelCard: "llama-3",
		Events:   fleet.Events{Transport: "zmq", Endpoint: "tcp://10.0.0.7:5557", Topic: "kv", Replay: "tcp://10.0.0.7:5558", LocalIndexer: true, PublisherID: 4660},
		Health:   &fleet.Probe{Path: "/health", Interval: "2.5s"},
		Metrics:  &fleet.Probe{Path: "/metrics", Interval: "5s"},
		KVEvents: "partial", Engine: "sglang", EngineVersion: "0.5.1", Draining: true, StartedMS: 1755000000500,
	}
	data, err := json.Marshal(&record)
	if err != nil {
		t.Fatal(err)
	}
	fixtures.Golden(t, "0.1.0/record.json", data, fleet.ParseRecord, record, fixtures.Later)

	// The registry accepts the record as this worker.
	info, err := record.Registered(reach.Networks{})
	want := router.WorkerInfo{
		ID: 1<<53 - 1, Name: "gpu-1", Address: netip.MustParseAddrPort("10.0.0.7:8000"), RankAddresses: map[uint32]netip.AddrPort{2: netip.MustParseAddrPort("10.0.0.7:8002")},
		Models: []string{"llama", "llama-chat"}, LoRA: []string{"legal"}, Role: router.Prefill, Bootstrap: "10.0.0.7:8998",
		BlockSize: 16, DPStart: 2, DPSize: 2, TotalKVBlocks: 5000, MaxNumSeqs: 256, MaxBatchedTokens: 8192, Reorders: true,
		PrefillThroughput: 12500.5, GPUType: "H100", Taints: []string{"batch"}, CPU: true, ModelCard: "llama-3",
		KVEvents: "partial", Engine: "sglang", EngineVersion: "0.5.1", Draining: true, StartedMS: 1755000000500,
		Events: router.EventSource{Transport: "zmq", Endpoint: "tcp://10.0.0.7:5557", Replay: "tcp://10.0.0.7:5558", LocalIndexer: true, PublisherID: 4660},
	}
	if diff := cmp.Diff(want, info, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" || err != nil {
		t.Errorf("%v; the worker (-want +got)\n%s", err, diff)
	}

	h := fleet.Heartbeat{WorkerID: 7, TS: 1755000000500, Load: fleet.Load{Running: 3, Waiting: 2, KVUtilization: 0.25, KVUsedBlocks: 1250}}
	if data, err = json.Marshal(&h); err != nil {
		t.Fatal(err)
	}
	fixtures.Golden(t, "0.1.0/heartbeat.json", data, func(data []byte) (h fleet.Heartbeat, err error) {
		err = json.Unmarshal(data, &h)
		return h, err
	}, h, fixtures.Later)
}
