// SPDX-License-Identifier: Apache-2.0

package envoytest

// SteeringHeaders are request headers that steer routers, gateways, workers and their sidecars: headers of
// kvroute, vLLM, SGLang, llm-d, Dynamo and the Gateway API Inference Extension, and names that none of them has
// yet.
//
//nolint:gochecknoglobals // a table
var SteeringHeaders = []string{
	"x-dynamo-worker", "x-dynamo-worker-fallback", "x-dynamo-worker-list", "x-dynamo-worker-host",
	"x-dynamo-rank", "x-dynamo-rank-fallback", "x-dynamo-request-id",
	"x-dynamo-prefill-worker", "x-dynamo-overlap-blocks", "x-data-parallel-rank",
	"x-gateway-destination-endpoint", "x-gateway-destination-endpoint-subset", "x-gateway-destination-endpoint-served",
	"x-gateway-model-name-rewrite", "x-llm-d-model-name-rewrite",
	"x-prefiller-host-port", "x-prefiller-url", "x-prefill-host-port", "x-encoder-hosts-ports", "x-data-parallel-host-port",
	"x-kv-cache-source-host-port", "x-llm-d-pin-host-port", "x-llm-d-reserved-host-port",
	"x-llm-d-destination-endpoint", "x-llm-d-destination-endpoint-subset", "x-llm-d-destination-endpoint-served",
	"x-dynamo-worker-instance-id", "x-worker-instance-id", "x-dynamo-dp-rank", "x-dp-rank",
	"x-dynamo-prefill-instance-id", "x-prefill-instance-id", "x-dynamo-prefill-dp-rank", "x-prefill-dp-rank",
	"x-dynamo-router-group", "x-dynamo-routing-mode", "x-dynamo-request-priority", "x-dynamo-request-strict-priority",
	"x-dynamo-slo-ttft-ms", "x-dynamo-router-override", "x-dynamo-meta-policy-class",
	"x-gateway-inference-objective", "x-llm-d-inference-objective", "x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id",
	// Not listed anywhere.
	"x-dynamo-", "x-dynamo-w", "x-dynamo-worker-instance-id2", "x-dynamo-session-id-2", "x-dynamo-session", "x-dynamo-decode-worker-id",
	"x-dp-ranks", "x-data-parallel-size", "x-gateway-inference", "x-gateway-destination", "x-llm-d-anything", "x-prefill", "x-prefiller",
	"x-prefill-addr", "x-decode-addr", "x-decoder-host-port", "x-encode-host", "x-kv-transfer-params", "x-kv-hints",
	"x-smg-target-worker", "x-smg-routing-key", "x-worker-id", "x-worker-url",
}
