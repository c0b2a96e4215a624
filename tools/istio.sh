#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs Istio's own control plane with the EnvoyFilter that tools/istio makes, and a real Envoy that it configures over xDS as a
# gateway. Requests go through that Envoy to kvroute and two simulated workers. Then kvroute and a worker are killed.
# What differs from Istio: its proxy has filters of its own, which are left out here, and the part "bootstrap" stands in
# the file with which Envoy starts. The configuration comes from files, so Kubernetes has no objects.
# usage: istio.sh KVROUTE
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD bin=$PWD/.cache/istio kvroute=$1
envoy=$(command -v envoy || ls "$root"/.cache/envoy/lib/python3*/site-packages/envoy/_bin/envoy)
key="$(go env GOVERSION) $(cat tools/istio/go.mod tools/istio/go.sum | sha256sum | cut -c1-16)"
tools/kubernetes.sh --servers
mkdir -p "$bin"
for program in istioctl/cmd/istioctl pilot/cmd/pilot-discovery; do
	name=${program##*/}
	if [ ! -e "$bin/$name" ] || [ "$(cat "$bin/$name.key" 2>/dev/null)" != "$key" ]; then
		echo "building $name (once, into .cache/istio)"
		go build -C tools/istio -trimpath -ldflags '-s -w' -o "$bin/$name" "istio.io/istio/$program"
		echo "$key" >"$bin/$name.key"
	fi
done

minutes=2
source tools/stack.sh
admin=$(port) xds=$(port) pilot_http=$(port) https=$(port) secure=$(port) monitoring=$(port) ctrlz=$(port)

# ask TEXT: sends a chat, and prints the response with its headers.
ask() {
	curl -sS -i -m 30 "http://127.0.0.1:$listen/v1/chat/completions" -H 'host: llm.example.com' -H 'content-type: application/json' \
		-H 'x-dynamo-worker: 127.0.0.1:1' -d "{\"model\":\"sim\",\"max_tokens\":6,\"messages\":[{\"role\":\"user\",\"content\":\"$1\"}]}"
}
start_stack

# The workers' own cluster, as Istio names it, is the pool.
mkdir "$folder/istio"
"$kvroute" config envoy --parts --pool-cluster 'outbound|8000||vllm.example.com' --extproc "127.0.0.1:$extproc" >"$folder/parts.yaml"
go run -C tools/istio . "llm.example.com:$listen" <"$folder/parts.yaml" >"$folder/istio/filter.yaml"
cat >"$folder/istio/gateway.yaml" <<-X
	apiVersion: networking.istio.io/v1
	kind: Gateway
	metadata: {name: llm, namespace: istio-system}
	spec:
	  selector: {istio: ingressgateway}
	  servers: [{bind: 127.0.0.1, port: {number: $listen, name: http, protocol: HTTP}, hosts: [llm.example.com]}]
	---
	apiVersion: networking.istio.io/v1
	kind: VirtualService
	metadata: {name: llm, namespace: istio-system}
	spec:
	  hosts: [llm.example.com]
	  gateways: [llm]
	  http:
	  - match: [{uri: {prefix: /v1/}}, {uri: {exact: /health}}]
	    route: [{destination: {host: vllm.example.com, port: {number: 8000}}}]
	---
	apiVersion: networking.istio.io/v1
	kind: ServiceEntry
	metadata: {name: vllm, namespace: istio-system}
	spec:
	  hosts: [vllm.example.com]
	  location: MESH_EXTERNAL
	  resolution: STATIC
	  ports: [{number: 8000, name: http, protocol: HTTP}]
	  endpoints: [{address: 127.0.0.1, ports: {http: $one}}, {address: 127.0.0.1, ports: {http: $two}}]
	---
	# A filter that only Istio's own proxy has.
	apiVersion: networking.istio.io/v1alpha3
	kind: EnvoyFilter
	metadata: {name: plain-envoy, namespace: istio-system}
	spec:
	  configPatches:
	  - applyTo: HTTP_FILTER
	    match: {context: GATEWAY, listener: {filterChain: {filter: {name: envoy.filters.network.http_connection_manager, subFilter: {name: istio.alpn}}}}}
	    patch: {operation: REMOVE}
X
"$bin/istioctl" validate -f "$folder/istio/filter.yaml"
"$bin/istioctl" analyze --use-kube=false --all-namespaces "$folder"/istio/*.yaml

# Istio's control plane does not start without an API of Kubernetes: this one has no objects.
servers=$root/.cache/kubernetes/servers etcd_port=$(port) peer=$(port) api=$(port) token=the-token-of-this-test
start etcd "$servers" etcd --data-dir "$folder/etcd" --listen-client-urls "http://127.0.0.1:$etcd_port" --advertise-client-urls "http://127.0.0.1:$etcd_port" \
	--listen-peer-urls "http://127.0.0.1:$peer" --initial-advertise-peer-urls "http://127.0.0.1:$peer" --initial-cluster "default=http://127.0.0.1:$peer" \
	--unsafe-no-fsync --log-level warn
openssl genrsa -out "$folder/sa.key" 2048 2>/dev/null
echo "$token,admin,admin,system:masters" >"$folder/tokens.csv"
start apiserver "$servers" kube-apiserver --etcd-servers "http://127.0.0.1:$etcd_port" --bind-address 127.0.0.1 --secure-port "$api" --cert-dir "$folder/certs" \
	--service-cluster-ip-range 10.96.0.0/16 --service-account-issuer https://kubernetes.default.svc --service-account-key-file "$folder/sa.key" \
	--service-account-signing-key-file "$folder/sa.key" --token-auth-file "$folder/tokens.csv" --authorization-mode RBAC --endpoint-reconciler-type none
api_ready() { curl -skf -o /dev/null -H "Authorization: Bearer $token" "https://127.0.0.1:$api/readyz"; }
until_true "kube-apiserver is not ready" api_ready
curl -skf -o /dev/null -H "Authorization: Bearer $token" -H 'content-type: application/json' "https://127.0.0.1:$api/api/v1/namespaces" -d '{"metadata":{"name":"istio-system"}}'
cat >"$folder/kubeconfig" <<-X
	apiVersion: v1
	kind: Config
	clusters: [{name: c, cluster: {server: "https://127.0.0.1:$api", certificate-authority: $folder/certs/apiserver.crt}}]
	users: [{name: u, user: {token: $token}}]
	contexts: [{name: x, context: {cluster: c, user: u}}]
	current-context: x
X
echo 'enableAutoMtls: false' >"$folder/mesh.yaml" # no program makes certificates here
PILOT_ENABLE_METADATA_EXCHANGE=false POD_NAMESPACE=istio-system start control "$bin/pilot-discovery" discovery --kubeconfig "$folder/kubeconfig" --configDir "$folder/istio" --meshConfig "$folder/mesh.yaml" \
	--grpcAddr "127.0.0.1:$xds" --httpAddr "127.0.0.1:$pilot_http" --httpsAddr "127.0.0.1:$https" --secureGRPCAddr "127.0.0.1:$secure" \
	--monitoringAddr "127.0.0.1:$monitoring" --ctrlz_port "$ctrlz"
{
	cat <<-X
		node:
		  id: router~10.1.1.1~gateway.istio-system~istio-system.svc.cluster.local
		  cluster: istio-ingressgateway
		  metadata: {NAMESPACE: istio-system, CLUSTER_ID: Kubernetes, ISTIO_VERSION: 1.31.0, LABELS: {istio: ingressgateway}}
		admin: {address: {socket_address: {address: 127.0.0.1, port_value: $admin}}}
		dynamic_resources:
		  lds_config: {ads: {}, resource_api_version: V3, initial_fetch_timeout: 0s}
		  cds_config: {ads: {}, resource_api_version: V3, initial_fetch_timeout: 0s}
		  ads_config: {api_type: GRPC, transport_api_version: V3, set_node_on_first_message_only: true, grpc_services: [{envoy_grpc: {cluster_name: xds-grpc}}]}
		static_resources:
		  clusters:
		  - name: xds-grpc
		    connect_timeout: 1s
		    typed_extension_protocol_options:
		      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
		        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
		        explicit_http_config: {http2_protocol_options: {}}
		    load_assignment: {cluster_name: xds-grpc, endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: $xds}}}}]}]}
	X
	sed -n '/^bootstrap:/,/^# 2/{/^bootstrap:/d; /^# 2/d; s/^  //; p}' "$folder/parts.yaml"
} >"$folder/envoy.yaml"
start gateway "$envoy" -c "$folder/envoy.yaml" --use-dynamic-base-id --log-level warn
until_true "no request is decided" decided "a first request"
grep -i "rejected" "$folder/gateway.log" && fail "Envoy rejects what Istio sends"

check_hit
echo "a prompt goes to the worker that cached it"
"$kvroute" doctor --url "http://127.0.0.1:$http" --envoy-admin "http://127.0.0.1:$admin" || fail "the doctor has findings"
curl -sf -o /dev/null -m 10 -H 'host: llm.example.com' "http://127.0.0.1:$listen/health" || fail "a route of the gateway's own is not answered"
check_deaths
