#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
envoy=$(find_program envoy envoy/bin/envoy "make envoy")

# Free ports replace the ports of the files.
free_ports nats tier tier_admin tier_extproc tier_http \
	east east_admin east_extproc east_http east_1 east_2 east_3 east_4 \
	west west_admin west_extproc west_http west_1 west_2 west_3 west_4
for file in upper lower; do
	sed -e "s/26422/$nats/; s/26002/$tier_extproc/; s/26003/$tier_http/; s/26081/$east/; s/26082/$west/; s|STATE|$folder/state|" \
		"examples/hierarchy/$file.yaml" >"$folder/$file.yaml"
done
start_envoy() { # name, port, admin port, kvroute's ext_proc port, ports of the pool …
	local name=$1 listen=$2 admin=$3 extproc=$4
	shift 4
	"$kvroute" config envoy --listen "127.0.0.1:$listen" --admin "127.0.0.1:$admin" --extproc "127.0.0.1:$extproc" \
		"${@/#/--pool=127.0.0.1:}" >"$folder/$name-envoy.yaml"
	"$envoy" -c "$folder/$name-envoy.yaml" --disable-hot-restart --concurrency 1 --log-level error >"$folder/$name-envoy.log" 2>&1 &
	pids+=($!)
}

# The upper tier's kvroute also runs the NATS server.
pids=()
"$kvroute" serve --config "$folder/upper.yaml" >"$folder/upper.log" 2>&1 &
wait_for "the upper kvroute does not start" curl -fs "http://127.0.0.1:$tier_http/healthz"
start_envoy upper "$tier" "$tier_admin" "$tier_extproc" "$east" "$west"

# Two groups, each with a gateway, a router and four workers.
start_group() { # name, gateway port, admin port, kvroute's ext_proc and HTTP ports, four worker ports
	local name=$1 gateway=$2 admin=$3 extproc=$4 http=$5
	shift 5
	"$kvroute" serve --config "$folder/lower.yaml" --group "$name" --component "$name" \
		--extproc-address "127.0.0.1:$extproc" --http-address "127.0.0.1:$http" >"$folder/$name.log" 2>&1 &
	pids+=($!)
	for port in "$@"; do
		"$kvroute" engine --name "$name-$port" --component "$name" --listen "127.0.0.1:$port" \
			--nats-url "file:$folder/state/nats-url" >"$folder/$name-$port.log" 2>&1 &
		pids+=($!)
	done
	start_envoy "$name" "$gateway" "$admin" "$extproc" "$@"
}
start_group east "$east" "$east_admin" "$east_extproc" "$east_http" "$east_1" "$east_2" "$east_3" "$east_4"
pids=()
start_group west "$west" "$west_admin" "$west_extproc" "$west_http" "$west_1" "$west_2" "$west_3" "$west_4"
west_pids=("${pids[@]}")

groups() { # prints the state of the groups in the upper tier
	curl -fs "http://127.0.0.1:$tier_http/v1/workers" | python3 -c 'import json, sys
for w in json.load(sys.stdin)["workers"]:
    s = w["summary"]
    print(w["group"], "stale" if s["stale"] else "fresh", "with", s["members"], "members")'
}
heard() { [ "$(groups | grep -c "fresh with 4 members")" = "$1" ]; }
wait_for "the groups are not heard" heard 2
wait_for "Envoy does not start" curl -fs "http://127.0.0.1:$tier/v1/models"
echo "groups:"
groups

# The upper tier sends each conversation to the group that has its beginning cached.
"$kvroute" load --url "http://127.0.0.1:$tier" --model sim --conversations 24 --turns 3 --rate 40 --max-tokens 8 --user-bytes 400
echo
echo "a decision of the upper tier:"
"$kvroute" explain --url "http://127.0.0.1:$tier_http" last
at=$("$kvroute" explain --url "http://127.0.0.1:$tier_http" --json last | python3 -c 'import json, sys
print(json.load(sys.stdin)["group"])')
echo
echo "and the one of the group $at below it:"
http=$east_http
[ "$at" = east ] || http=$west_http
"$kvroute" explain --url "http://127.0.0.1:$http" last

# A whole group dies. The other group gets its requests.
{ kill -KILL "${west_pids[@]}" && wait "${west_pids[@]}"; } 2>/dev/null || true
"$kvroute" load --url "http://127.0.0.1:$tier" --model sim --conversations 12 --turns 3 --rate 40 --max-tokens 8 >"$folder/after.txt" ||
	{ cat "$folder/after.txt"; exit 1; }
gone() { groups | grep -q "^west stale"; }
wait_for "the dead group is not noticed" gone
echo
echo "without west:"
groups
cat "$folder/after.txt"
