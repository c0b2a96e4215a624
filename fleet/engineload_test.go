// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"errors"
	"reflect"
	"testing"

	"github.com/kvroute/kvroute/fleet"
)

func TestEngineLoad(t *testing.T) {
	for name, c := range map[string]struct {
		body     string
		capacity fleet.Capacity
		want     map[uint32]fleet.Load
		total    fleet.Load
	}{
		"vLLM": {
			`# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
`,
			fleet.Capacity{Blocks: 1000, BlockSize: 16},
			map[uint32]fleet.Load{0: {Running: 3, Waiting: 2, KVUtilization: 0.25, KVUsedBlocks: 250}},
			fleet.Load{Running: 3, Waiting: 2, KVUtilization: 0.25, KVUsedBlocks: 250},
		},
		"vLLM with two ranks, of which one says less": {
			"vllm:num_requests_running{engine=\"0\"} 3\nvllm:num_requests_running{engine=\"1\"} 5\nvllm:gpu_cache_usage_perc{engine=\"1\"} 1e0 1755000000\n",
			fleet.Capacity{Blocks: 10},
			map[uint32]fleet.Load{0: {Running: 3}, 1: {Running: 5, KVUtilization: 1, KVUsedBlocks: 10}},
			fleet.Load{Running: 8, KVUtilization: 0.5, KVUsedBlocks: 10},
		},
		"SGLang, whose tensor-parallel ranks say the same": {
			`sglang:num_running_reqs{engine_type="unified",model_name="a,dp_rank=\"7\"",tp_rank="0",dp_rank="1"} 4
sglang:num_running_reqs{engine_type="unified",model_name="a",tp_rank="1",dp_rank="1"} 4
sglang:num_queue_reqs{model_name="a",tp_rank="0",dp_rank="1"} 6.0
sglang:token_usage{model_name="a",tp_rank="0",dp_rank="1"} 0.5
sglang:num_used_tokens{model_name="a",tp_rank="0",dp_rank="1"} 161
`,
			fleet.Capacity{BlockSize: 16},
			map[uint32]fleet.Load{1: {Running: 4, Waiting: 6, KVUtilization: 0.5, KVUsedBlocks: 11}},
			fleet.Load{Running: 4, Waiting: 6, KVUtilization: 0.5, KVUsedBlocks: 11},
		},
		"TensorRT-LLM's text": {
			"trtllm_num_requests_running{model_name=\"m\"} 2\ntrtllm_num_requests_waiting{model_name=\"m\"} 1\ntrtllm_kv_cache_utilization{model_name=\"m\"} 0.125\ntrtllm_kv_cache_used_blocks{model_name=\"m\"} 64\ntrtllm_kv_cache_max_blocks{model_name=\"m\"} 512\n",
			fleet.Capacity{},
			map[uint32]fleet.Load{0: {Running: 2, Waiting: 1, KVUtilization: 0.125, KVUsedBlocks: 64}},
			fleet.Load{Running: 2, Waiting: 1, KVUtilization: 0.125, KVUsedBlocks: 64},
		},
		"TensorRT-LLM's statistics": {
			`[{"iter":1,"numActiveRequests":9,"kvCacheStats":{"usedNumBlocks":400,"maxNumBlocks":500}},
			  {"iter":2,"numActiveRequests":1,"numQueuedRequests":3,"kvCacheStats":{"usedNumBlocks":100,"maxNumBlocks":500}}]`,
			fleet.Capacity{},
			map[uint32]fleet.Load{0: {Running: 1, Waiting: 3, KVUtilization: 0.2, KVUsedBlocks: 100}},
			fleet.Load{Running: 1, Waiting: 3, KVUtilization: 0.2, KVUsedBlocks: 100},
		},
		"senseless numbers": {
			"vllm:num_requests_running NaN\nvllm:num_requests_running -1\nvllm:num_requests_running 1e300\nvllm:num_requests_running{ 5\nvllm:num_requests_running{}\nvllm:num_requests_running many\nvllm:num_requests_running 2\n",
			fleet.Capacity{},
			map[uint32]fleet.Load{0: {Running: 2}},
			fleet.Load{Running: 2},
		},
	} {
		got, err := fleet.EngineLoad([]byte(c.body), c.capacity)
		if err != nil || !reflect.DeepEqual(got, c.want) || fleet.Total(got) != c.total {
			t.Errorf("%s: %+v, together %+v, %v", name, got, fleet.Total(got), err)
		}
	}
	for _, body := range []string{"", "[]", "[1]", "{}", "process_cpu_seconds_total 3\n", "<html>", "vllm:num_requests_running"} {
		if got, err := fleet.EngineLoad([]byte(body), fleet.Capacity{}); !errors.Is(err, fleet.ErrNoLoad) {
			t.Errorf("%q: %+v, %v", body, got, err)
		}
	}
	if got := fleet.Total(nil); got != (fleet.Load{}) {
		t.Errorf("the load of no ranks is %+v", got)
	}
}

func FuzzEngineLoad(f *testing.F) {
	f.Add([]byte("vllm:num_requests_running{engine=\"0\"} 3\n"))
	f.Add([]byte(`[{"numActiveRequests":1}]`))
	f.Fuzz(func(t *testing.T, body []byte) {
		loads, err := fleet.EngineLoad(body, fleet.Capacity{Blocks: 100, BlockSize: 16})
		if (err == nil) != (len(loads) > 0) {
			t.Errorf("%d ranks, %v", len(loads), err)
		}
		for _, l := range loads {
			if l.KVUtilization < 0 || l.KVUtilization > 1 || l.Running < 0 || l.Waiting < 0 || l.KVUsedBlocks < 0 {
				t.Errorf("%+v", l)
			}
		}
	})
}
