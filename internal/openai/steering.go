// SPDX-License-Identifier: Apache-2.0

package openai

// Steering are the request headers that steer routers, gateways, workers and the sidecars of
// workers. Some workers connect to an address in such a header. A worker gets these headers from
// kvroute only: the Envoy configurations and kvroute remove the clients' ones.
//
//nolint:gochecknoglobals // a table
var Steering = []string{
	// kvroute's own, for Envoy.
	"x-dynamo-worker",
	"x-dynamo-worker-fallback",
	"x-dynamo-worker-list",
	"x-dynamo-worker-host",
	"x-dynamo-rank",
	"x-dynamo-rank-fallback",
	"x-dynamo-request-id",
	// From routers to workers and gateways.
	"x-dynamo-prefill-worker",
	"x-dynamo-overlap-blocks",
	"x-data-parallel-rank",
	"x-gateway-destination-endpoint",
	"x-gateway-destination-endpoint-subset",
	"x-gateway-destination-endpoint-served",
	"x-gateway-model-name-rewrite",
	"x-llm-d-model-name-rewrite",
	// From llm-d's router to the sidecars of its workers.
	"x-prefiller-host-port",
	"x-prefiller-url",
	"x-prefill-host-port",
	"x-encoder-hosts-ports",
	"x-data-parallel-host-port",
	"x-kv-cache-source-host-port",
	"x-llm-d-pin-host-port",
	"x-llm-d-reserved-host-port",
	"x-llm-d-destination-endpoint",
	"x-llm-d-destination-endpoint-subset",
	"x-llm-d-destination-endpoint-served",
	// From trusted clients and gateways to kvroute.
	"x-dynamo-worker-instance-id",
	"x-worker-instance-id",
	"x-dynamo-dp-rank",
	"x-dp-rank",
	"x-dynamo-prefill-instance-id",
	"x-prefill-instance-id",
	"x-dynamo-prefill-dp-rank",
	"x-prefill-dp-rank",
	"x-dynamo-router-group",
	"x-dynamo-routing-mode",
	"x-dynamo-request-priority",
	"x-dynamo-request-strict-priority",
	"x-dynamo-slo-ttft-ms",
	"x-dynamo-router-override",
	"x-dynamo-meta-policy-class",
	"x-gateway-inference-objective",
	"x-llm-d-inference-objective",
	"x-gateway-inference-fairness-id",
	"x-llm-d-inference-fairness-id",
}
