#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# Free ports replace the ports of kvroute.yaml.
free_ports extproc http nats vllm sglang
sed "s/27902/$extproc/; s/27903/$http/; s/27422/$nats/; s/27001/$vllm/" examples/publish/kvroute.yaml >"$folder/kvroute.yaml"

# Two engines without knowledge of kvroute: an OpenAI server with cache events on a ZeroMQ socket.
"$kvroute" engine --name vllm --listen "127.0.0.1:$vllm" --nats-url "" --kv-events zmq --block-hash vllm >"$folder/vllm.log" 2>&1 &
"$kvroute" engine --name sglang --listen "127.0.0.1:$sglang" --nats-url "" --kv-events zmq --kv-events-format sglang --block-hash sglang >"$folder/sglang.log" 2>&1 &
wait_for "the first engine does not start" curl -fs "http://127.0.0.1:$vllm/health"
wait_for "the second engine does not start" curl -fs "http://127.0.0.1:$sglang/health"

# kvroute reads the first engine's events directly: the file contains only the engine's address.
"$kvroute" serve --config "$folder/kvroute.yaml" --state-dir "$folder/state" >"$folder/kvroute.log" 2>&1 &
wait_for "kvroute does not start" curl -fs "http://127.0.0.1:$http/healthz"

# A sidecar registers the second engine and publishes its events on NATS.
"$kvroute" publish --name sglang --engine-address "127.0.0.1:$sglang" --nats-url "file:$folder/state/nats-url" >"$folder/publish.log" 2>&1 &

known() { # name; prints the number of known blocks and the state of the events
	curl -fs "http://127.0.0.1:$http/v1/workers" |
		python3 -c 'import json, sys
for w in json.load(sys.stdin)["workers"]:
    if w["name"] == sys.argv[1]: print(w["cached_blocks"], w["kv_events"])' "$1"
}
heard() { known "$1" | grep -q ' ok$'; }
wait_for "the first engine is not heard" heard vllm
wait_for "the second engine is not heard" heard sglang

prompt='Which blocks does a prompt of some forty words take in the cache of an engine, who tells the router of them, and how long does that take, if the engine knows nothing of routers and speaks to whoever listens?'
for port in "$vllm" "$sglang"; do
	curl -fsS -o /dev/null "http://127.0.0.1:$port/v1/completions" -H 'content-type: application/json' \
		-d "{\"model\": \"sim\", \"max_tokens\": 4, \"prompt\": \"$prompt\"}"
done
cached() { known "$1" | grep -qv '^0 '; }
wait_for "the first engine's blocks are not known" cached vllm
wait_for "the second engine's blocks are not known" cached sglang
echo "blocks known of vllm:   $(known vllm)"
echo "blocks known of sglang: $(known sglang)"
