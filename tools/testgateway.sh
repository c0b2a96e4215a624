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

minutes=3
source tools/stack.sh # Envoy Gateway itself has fixed ports: 8081, 18000 to 18002, 19000 and 19001

# ask TEXT STREAM: sends a chat, and prints the response with its headers.
ask() {
	curl -sS -i -m 30 "http://127.0.0.1:$listen/v1/chat/completions" -H 'content-type: application/json' \
		-H 'x-dynamo-worker: 127.0.0.1:1' -d "{\"model\":\"sim\",\"stream\":${2:-false},\"max_tokens\":6,\"messages\":[{\"role\":\"user\",\"content\":\"$1\"}]}"
}

for variant in original-destination endpoint-override; do
	rm -rf "${folder:?}"/* && mkdir -p "$folder/manifests" "$folder/data/envoy-versions/$version/bin"
	ln -s "$(command -v envoy || echo "$root/.cache/envoy/bin/envoy")" "$folder/data/envoy-versions/$version/bin/envoy"
	start_stack --mode-override --second-choice "$([ $variant = original-destination ] && echo header || echo list)"
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
	"$gateway" certgen --local --config-home "$folder/config" >"$folder/certificates.log" 2>&1
	start control "$gateway" server --config-path "$folder/gateway.yaml"
	until_true "no request is decided" decided "a first request"

	refused=$(grep -B4 'status: "False"' "$folder/control.log" | grep 'reason:' | grep -v AddressNotAssigned || true) # a host has no load balancer
	[ -z "$refused" ] || fail "a manifest is refused: $refused"
	check_hit
	response=$(ask "$prompt" true)
	grep -qi '^x-dynamo-overlap-blocks: [1-9]' <<<"$response" || fail "no overlap: $response"
	served=$(sed -n 's/^x-sim-worker: \([a-z]*\).*/\1/p' <<<"$response")
	decision() { curl -sf "http://127.0.0.1:$http/v1/decisions?limit=1" | python3 -c 'import json, sys; d = json.load(sys.stdin)["decisions"][0]; print(d["worker_name"], d.get("first_token_by"))'; }
	seen() { [ "$(decision)" = "$served observer" ]; }
	until_true "the last decision is \"$(decision)\", want \"$served observer\"" seen
	echo "$variant: a prompt goes to the worker that cached it ($served), and the observer sees its first token"

	check_deaths
	stop
done
