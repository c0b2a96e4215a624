#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
envoy=$(find_program envoy envoy/bin/envoy "make envoy")

# Free ports replace the ports of kvroute.yaml.
free_ports extproc http nats gpu_1 gpu_2 listen admin
sed "s/29002/$extproc/; s/29003/$http/; s/24222/$nats/; s/28001/$gpu_1/; s/28002/$gpu_2/" \
	examples/static-workers/kvroute.yaml >"$folder/kvroute.yaml"

"$kvroute" serve --config "$folder/kvroute.yaml" --state-dir "$folder/state" >"$folder/kvroute.log" 2>&1 &
wait_for "kvroute does not start" curl -fs "http://127.0.0.1:$http/healthz"
for i in 1 2; do
	port=gpu_$i
	"$kvroute" engine --name gpu-$i --listen "127.0.0.1:${!port}" --nats-url "file:$folder/state/nats-url" >"$folder/gpu-$i.log" 2>&1 &
	wait_for "worker $i does not start" curl -fs "http://127.0.0.1:${!port}/health"
done
"$kvroute" config envoy --listen "127.0.0.1:$listen" --admin "127.0.0.1:$admin" --extproc "127.0.0.1:$extproc" \
	--pool "127.0.0.1:$gpu_1" --pool "127.0.0.1:$gpu_2" >"$folder/envoy.yaml"
"$envoy" -c "$folder/envoy.yaml" --disable-hot-restart --concurrency 1 --log-level error >"$folder/envoy.log" 2>&1 &
wait_for "Envoy does not start" curl -fs "http://127.0.0.1:$listen/v1/models"

ask() {
	curl -fsS -D - -o /dev/null "http://127.0.0.1:$listen/v1/chat/completions" -H 'content-type: application/json' -d '{
		"model": "sim", "max_tokens": 4,
		"messages": [{"role": "user", "content": "Which of the two workers has the blocks of this question, the second time it is asked?"}]
	}' | grep -iE '^x-(sim-worker|dynamo-(overlap-blocks|reason))' | tr -d '\r'
}
echo "first:"
first=$(ask)
echo "$first"
read -rt 0.3 <> <(:) || true # the worker's events need some milliseconds to arrive
echo "again:"
again=$(ask)
echo "$again"
grep -q 'x-dynamo-reason: kv' <<<"$again"
