#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes the pictures of the dashboard in docs/images: without requests, under the demo's load after MINUTES (5), in light and
# dark colours and on a telephone, a decision for a cached prompt, and with a worker that was killed. BROWSER is the path
# of Chromium, and KVROUTE_BINARY that of kvroute.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=$((${MINUTES:-5} * 60))
kvroute=${KVROUTE_BINARY:-.cache/bin/kvroute}
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$folder"' EXIT
address() { sed -n "s/^  $1 *\(http[^ ]*\).*/\1/p" "$folder/demo.log"; }
until_some() { # until_some command: waits until it prints something
	for _ in $(seq 600); do
		[ -n "$("$@")" ] && return
		sleep 1
	done
	cat "$folder"/*.log >&2
	exit 1
}
picture() { # picture name url [flag value]...
	go run -C bench/browser . --out "$PWD/docs/images/$1.png" --url "${@:2}"
}

mkdir -p docs/images
"$kvroute" serve --http-address 127.0.0.1:0 --extproc-address 127.0.0.1:0 --nats-listen 127.0.0.1:0 --state-dir "$folder/state" \
	--worker-networks 127.0.0.0/8 --ready-file "$folder/ready" >"$folder/serve.log" 2>&1 &
until_some cat "$folder/ready" 2>/dev/null
"$kvroute" engine --name worker-1 --listen 127.0.0.1:0 --nats-url "file:$folder/state/nats-url" >"$folder/engine.log" 2>&1 &
http=$(sed -n 's/.*"HTTP": *"\([^"]*\)".*/\1/Ip' "$folder/ready")
picture dashboard-empty "http://$http" --wait '#first-requests' --height 1000

KVROUTE_HOLDOUT_SHARE=0.1 "$kvroute" demo --keep --conversations 20 >"$folder/demo.log" 2>&1 &
demo=$!
until_some address dashboard
url=$(address dashboard)
"$kvroute" load --url "$(address clients)" --rate 8 --conversations $((8 * seconds / 4 + 200)) --turn-gap 2.5s --max-tokens 40 \
	--system-prompts 12 --system-bytes 36000 --user-bytes 4200 --reply-bytes 1800 >"$folder/load.log" 2>&1 &
sleep "$seconds"
picture dashboard "$url" --height 1060
picture dashboard-dark "$url" --height 1060 --scheme dark
picture dashboard-telephone "$url" --width 390 --height 1900
cached="#decisions tbody tr:has([data-field=reason][data-value=kv]):has([data-field=overlap_blocks][data-value]:not([data-value='0'])) button"
picture decision "$url" --width 1440 --height 900 --wait "$cached" --click "$cached"

kill -KILL "$(pgrep -P "$demo" -f 'engine .*worker-2' | head -1)"
picture dashboard-dead "$url" --height 1060 --wait '#attention li'
