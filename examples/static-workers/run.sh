#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
envoy=$(find_program envoy envoy/bin/envoy "make envoy")

"$kvroute" serve --config examples/static-workers/kvroute.yaml --state-dir "$folder/state" >"$folder/kvroute.log" 2>&1 &
wait_for "kvroute does not start" curl -fs http://127.0.0.1:29003/healthz
for i in 1 2; do
	"$kvroute" engine --name gpu-$i --listen 127.0.0.1:2800$i --nats-url "file:$folder/state/nats-url" >"$folder/gpu-$i.log" 2>&1 &
	wait_for "worker $i does not start" curl -fs http://127.0.0.1:2800$i/health
done
"$kvroute" config envoy --listen 127.0.0.1:28080 --admin 127.0.0.1:29901 --extproc 127.0.0.1:29002 \
	--pool 127.0.0.1:28001 --pool 127.0.0.1:28002 >"$folder/envoy.yaml"
"$envoy" -c "$folder/envoy.yaml" --disable-hot-restart --concurrency 1 --log-level error >"$folder/envoy.log" 2>&1 &
wait_for "Envoy does not start" curl -fs http://127.0.0.1:28080/v1/models

ask() {
	curl -fsS -D - -o /dev/null http://127.0.0.1:28080/v1/chat/completions -H 'content-type: application/json' -d '{
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
