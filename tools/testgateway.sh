#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs Envoy Gateway's own binary with the manifests of examples/envoy-gateway: it reads them from files, starts a real
# Envoy, and configures it over xDS. Requests go through that Envoy to kvroute and two simulated workers. Then kvroute and
# a worker are killed. What differs from the committed manifests: the addresses, and an EnvoyProxy that names the version of
# Envoy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD version=1.40.0 gateway=$PWD/.cache/bin/envoy-gateway kvroute=$PWD/.cache/bin/kvroute
examples=$root/examples/envoy-gateway
go build -C tools/egctl -o "$gateway" github.com/envoyproxy/gateway/cmd/envoy-gateway

folder=$(mktemp -d) processes=()
stop() {
	for p in "${processes[@]}"; do kill -INT "$p" 2>/dev/null || true; done
	for p in "${processes[@]}"; do wait "$p" 2>/dev/null || true; done
	processes=()
}
trap 'stop; rm -rf "$folder"' EXIT

fail() {
	echo "testgateway.sh: $variant: $*" >&2
	for log in "$folder"/*.log; do
		echo "--- ${log##*/}" >&2
		grep -v '	info	' "$log" | tail -n 25 >&2
	done
	exit 1
}

# port prints a free port. Envoy Gateway itself has fixed ones: 8081, 18000 to 18002, 19000 and 19001.
port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# start NAME COMMAND...: runs a command in the background. The variable NAME is its process.
start() {
	local name=$1
	shift
	"$@" >>"$folder/$name.log" 2>&1 &
	processes+=($!)
	printf -v "$name" %s $!
}

# until_true WHAT COMMAND...: repeats a command until it succeeds, for at most three minutes.
until_true() {
	local what=$1 tries=0
	shift
	until "$@"; do
		((++tries < 360)) || fail "$what: not in 3 minutes"
		sleep 0.5
	done
}

# ask TEXT STREAM: sends a chat, and prints the response with its headers.
ask() {
	curl -sS -i -m 30 "http://127.0.0.1:$listen/v1/chat/completions" -H 'content-type: application/json' \
		-H 'x-dynamo-worker: 127.0.0.1:1' -d "{\"model\":\"sim\",\"stream\":${2:-false},\"max_tokens\":6,\"messages\":[{\"role\":\"user\",\"content\":\"$1\"}]}"
}
answers() { ask "$@" 2>/dev/null | grep -q '^HTTP/1.1 200'; }
decided() { ask "$@" 2>/dev/null | grep -qi '^x-dynamo-reason:'; }
hit() { ask "$@" 2>/dev/null | grep -qi '^x-dynamo-reason: kv'; }
ready() { curl -sf -o /dev/null "http://127.0.0.1:$http/readyz"; }

# all_answered WHAT: sends 20 requests, and fails if one of them is not answered with 200.
all_answered() {
	for i in $(seq 20); do answers "$1 $i" || fail "$1: request $i is not answered with 200"; done
	echo "$variant: $1: 20 of 20 requests answered with 200"
}

for variant in original-destination endpoint-override; do
	rm -rf "${folder:?}"/* && mkdir -p "$folder/manifests" "$folder/data/envoy-versions/$version/bin"
	ln -s "$(command -v envoy || echo "$root/.cache/envoy/bin/envoy")" "$folder/data/envoy-versions/$version/bin/envoy"
	listen=$(port) extproc=$(port) http=$(port) one=$(port) two=$(port) events1=$(port) events2=$(port)
	{
		sed "s/address: 10.0.0.2, port: 9002/address: 127.0.0.1, port: $extproc/
			s/address: 10.0.1.1, port: 8000/address: 127.0.0.1, port: $one/
			s/address: 10.0.1.2, port: 8000/address: 127.0.0.1, port: $two/
			s/protocol: HTTP, port: 8080/protocol: HTTP, port: $listen/
			s|^spec: {controllerName: \(.*\)}|spec: {controllerName: \1, parametersRef: {group: gateway.envoyproxy.io, kind: EnvoyProxy, name: host, namespace: default}}|" "$examples/base.yaml"
		echo "---"
		cat "$examples/$variant.yaml"
		printf '%s\n' "---" "apiVersion: gateway.envoyproxy.io/v1alpha1" "kind: EnvoyProxy" "metadata: {name: host, namespace: default}" \
			"spec: {provider: {type: Host, host: {envoyVersion: $version}}}"
	} >"$folder/manifests/all.yaml"
	cat >"$folder/gateway.yaml" <<-X
		apiVersion: gateway.envoyproxy.io/v1alpha1
		kind: EnvoyGateway
		gateway: {controllerName: gateway.envoyproxy.io/gatewayclass-controller}
		provider:
		  type: Custom
		  custom:
		    resource: {type: File, file: {paths: [$folder/manifests]}}
		    infrastructure:
		      type: Host
		      host: {configHome: $folder/config, dataHome: $folder/data, stateHome: $folder/state, runtimeDir: $folder/runtime}
		extensionApis: {enableBackend: true, enableEnvoyPatchPolicy: true}
	X
	cat >"$folder/kvroute.yaml" <<-X
		version: 1
		workers:
		- {name: one, address: "127.0.0.1:$one", models: [sim], model_card: kvroute-sim, block_size: 16, events: {transport: zmq, endpoint: "tcp://127.0.0.1:$events1"}}
		- {name: two, address: "127.0.0.1:$two", models: [sim], model_card: kvroute-sim, block_size: 16, events: {transport: zmq, endpoint: "tcp://127.0.0.1:$events2"}}
	X
	serve=("$kvroute" serve --config "$folder/kvroute.yaml" --extproc-address "127.0.0.1:$extproc" --http-address "127.0.0.1:$http" --mode-override --decision-headers
		--second-choice "$([ $variant = original-destination ] && echo header || echo list)")

	start worker1 "$kvroute" engine --name one --listen "127.0.0.1:$one" --kv-events zmq --kv-events-endpoint "tcp://127.0.0.1:$events1" --nats-url ""
	start worker2 "$kvroute" engine --name two --listen "127.0.0.1:$two" --kv-events zmq --kv-events-endpoint "tcp://127.0.0.1:$events2" --nats-url ""
	start router "${serve[@]}"
	until_true "kvroute is not ready" ready
	"$gateway" certgen --local --config-home "$folder/config" >"$folder/certificates.log" 2>&1
	start control "$gateway" server --config-path "$folder/gateway.yaml"
	until_true "no request is decided" decided "a first request"

	refused=$(grep -B4 'status: "False"' "$folder/control.log" | grep 'reason:' | grep -v AddressNotAssigned || true) # a host has no load balancer
	[ -z "$refused" ] || fail "a manifest is refused: $refused"
	prompt=$(printf 'the same long beginning of a conversation %.0s' $(seq 30))
	answers "$prompt" || fail "the first request of a conversation is not answered"
	until_true "no request goes to the worker that cached its prompt" hit "$prompt"
	response=$(ask "$prompt" true)
	grep -qi '^x-dynamo-overlap-blocks: [1-9]' <<<"$response" || fail "no overlap: $response"
	served=$(sed -n 's/^x-sim-worker: \([a-z]*\).*/\1/p' <<<"$response")
	decision() { curl -sf "http://127.0.0.1:$http/v1/decisions?limit=1" | python3 -c 'import json, sys; d = json.load(sys.stdin)["decisions"][0]; print(d["worker_name"], d.get("first_token_by"))'; }
	seen() { [ "$(decision)" = "$served observer" ]; }
	until_true "the last decision is \"$(decision)\", want \"$served observer\"" seen
	echo "$variant: a prompt goes to the worker that cached it ($served), and the observer sees its first token"

	kill -9 "$router" && wait "$router" 2>/dev/null || true
	all_answered "kvroute is dead"
	start router "${serve[@]}"
	until_true "a new kvroute is not used" decided "a request after the restart"
	echo "$variant: a restarted kvroute decides again"
	kill -9 "$worker1" && wait "$worker1" 2>/dev/null || true
	all_answered "a worker is dead"
	stop
done
