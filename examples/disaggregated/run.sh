#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
envoy=$(find_program envoy envoy/bin/envoy "make envoy")

# Free ports replace the ports of kvroute.yaml.
free_ports extproc http nats prefill decode listen admin
sed "s/25902/$extproc/; s/25903/$http/; s/25422/$nats/; s/25001/$prefill/; s/25002/$decode/" \
	examples/disaggregated/kvroute.yaml >"$folder/kvroute.yaml"

# A prefill engine and a decode engine, which behave as vLLM's do with a KV connector. Neither has a sidecar.
"$kvroute" engine --name prefill --role prefill --listen "127.0.0.1:$prefill" --nats-url "" --kv-events zmq >"$folder/prefill.log" 2>&1 &
prefill_pid=$!
"$kvroute" engine --name decode --role decode --listen "127.0.0.1:$decode" --nats-url "" --kv-events zmq >"$folder/decode.log" 2>&1 &
wait_for "the prefill engine does not start" curl -fs "http://127.0.0.1:$prefill/health"
wait_for "the decode engine does not start" curl -fs "http://127.0.0.1:$decode/health"

# Envoy's own pool, for requests without kvroute, has no prefill engine.
"$kvroute" serve --config "$folder/kvroute.yaml" --state-dir "$folder/state" >"$folder/kvroute.log" 2>&1 &
"$kvroute" config envoy --listen "127.0.0.1:$listen" --admin "127.0.0.1:$admin" --extproc "127.0.0.1:$extproc" --pool "127.0.0.1:$decode" >"$folder/envoy.yaml"
"$envoy" -c "$folder/envoy.yaml" --disable-hot-restart --concurrency 1 --log-level error >"$folder/envoy.log" 2>&1 &

ask() { # the answer's text is meaningless
	curl -fsS -o "$folder/answer" "http://127.0.0.1:$listen/v1/chat/completions" -H 'content-type: application/json' -d '{
		"model": "sim", "max_tokens": 4,
		"messages": [{"role": "user", "content": "Where is this prompt computed, where is the response generated, and how do the blocks of the cache get there? '"$1"'"}]}'
}
decided() { # prints the workers of the newest decision
	curl -fsS "http://127.0.0.1:$http/v1/decisions" | python3 -c 'import json, sys
d = json.load(sys.stdin)["decisions"][0]
leg = "leg " + d["no_prefill"] if "no_prefill" in d else d["prefill"]["worker_name"] if "prefill" in d else "none"
print("prefill worker:", leg, "| decode worker:", d["worker_name"])'
}
split() { ask "Hello." && [ "$(decided)" = "prefill worker: prefill | decode worker: decode" ]; }
wait_for "requests are not split" split

count() { # port, metric of vLLM
	curl -fsS "http://127.0.0.1:$1/metrics" | sed -nE "s/^$2\{.*\} //p"
}
counts() { # prompt tokens that each worker looked up in its cache, found there, and received
	for worker in "$prefill:prefill" "$decode:decode"; do
		port=${worker%:*}
		echo "  ${worker#*:} worker: $(count "$port" vllm:request_success_total) requests, $(count "$port" vllm:prefix_cache_queries_total) prompt tokens," \
			"$(count "$port" vllm:prefix_cache_hits_total) of them cached, $(count "$port" vllm:prompt_tokens_by_source_total) received"
	done
}
legs=$(count "$prefill" vllm:request_success_total)
received=$(count "$decode" vllm:prompt_tokens_by_source_total)
for greeting in "Good morning." "Good evening."; do
	ask "$greeting"
	echo "$greeting $(decided)"
	counts
done
[ "$(count "$decode" vllm:prompt_tokens_by_source_total)" -gt "$received" ] # the decode worker received blocks
[ "$(count "$prefill" vllm:request_success_total)" = $((legs + 2)) ]            # and both requests had a leg

kill "$prefill_pid" # the prefill engine: the decode worker computes the prompt, and the client sees no error
wait "$prefill_pid" || true
ask "Good night."
echo "Good night. $(decided)"
decided | grep -Eq "leg (failed|no_worker)" # no_worker: kvroute knew already that the engine was gone
