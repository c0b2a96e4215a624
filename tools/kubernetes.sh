#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Tests deploy/helm with a real etcd, kube-apiserver and kube-controller-manager, Helm, Envoy Gateway and Envoy: tools/kubernetes is
# the test, tools/apiserver the programs of Kubernetes.
# The programs are built once, into .cache/kubernetes; the first build takes 15 to 40 minutes. All of it runs in a network
# namespace without a way out. usage: kubernetes.sh KVROUTE [FLAGS of the harness]
# kubernetes.sh --servers only builds etcd and kube-apiserver, for istio.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD bin=$PWD/.cache/kubernetes kvroute=$1
shift
version=$(sed -n 's/^\tk8s.io\/kubernetes v//p' tools/apiserver/go.mod)
if [ "$kvroute" != --servers ] && ! unshare -rn true 2>/dev/null; then
	echo "kubernetes.sh: no network namespace can be made: run it where 'unshare -rn true' works, as with kernel.apparmor_restrict_unprivileged_userns=0, or as root" >&2
	exit 1
fi
# build NAME KEY FOLDER PACKAGE [FLAGS]: builds a program whose sources have the key, unless it is there.
build() {
	local name=$1 key=$2 folder=$3 package=$4
	shift 4
	if [ -e "$bin/$name" ] && [ "$(cat "$bin/$name.key" 2>/dev/null)" = "$key" ]; then return; fi
	echo "building $name (once, into .cache/kubernetes)"
	go build -C "$folder" -trimpath "$@" -o "$bin/$name" "$package"
	echo "$key" >"$bin/$name.key"
}
# key FOLDER: the version of Go, and a sum over a module.
key() { echo "$(go env GOVERSION) $(cat "$1/go.mod" "$1/go.sum" | sha256sum | cut -c1-16)"; }
mkdir -p "$bin"
# Helm compares the chart's kubeVersion with the version that the linker sets.
v=k8s.io/component-base/version
build servers "$(key tools/apiserver)" tools/apiserver . \
	-ldflags "-s -w -X $v.gitVersion=v$version -X $v.gitMajor=${version%%.*} -X $v.gitMinor=$(cut -d. -f2 <<<"$version")"
[ "$kvroute" != --servers ] || exit 0
envoy=$(command -v envoy || true)
[ -n "$envoy" ] || envoy=$(ls "$root"/.cache/envoy/lib/python3*/site-packages/envoy/_bin/envoy)
build helm "$(key tools/helm)" tools/helm helm.sh/helm/v3/cmd/helm -ldflags '-s -w'
build envoy-gateway "$(key tools/egctl)" tools/egctl github.com/envoyproxy/gateway/cmd/envoy-gateway -ldflags '-s -w'
go build -C tools/kubernetes -trimpath -o "$bin/harness" .

# module NAME@VERSION: downloads a module, and prints its folder.
module() { (cd tools/apiserver && go mod download -json "$1") | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p'; }
gateway=$(cd tools/egctl && go list -m -f '{{.Dir}}' github.com/envoyproxy/gateway)
pool=$(module sigs.k8s.io/gateway-api-inference-extension@v1.6.0)
monitoring=$(module github.com/prometheus-operator/prometheus-operator@v0.93.0)
keda=$(module github.com/kedacore/keda/v2@v2.18.0)
crds=$(printf '%s,' "$gateway"/charts/gateway-helm/charts/crds/crds/gatewayapi-crds.yaml "$gateway"/charts/gateway-helm/charts/crds/crds/generated/*.yaml \
	"$pool/config/crd/bases/inference.networking.k8s.io_inferencepools.yaml" \
	"$monitoring"/example/prometheus-operator-crd/monitoring.coreos.com_{servicemonitors,prometheusrules}.yaml \
	"$keda/config/crd/bases/keda.sh_scaledobjects.yaml")
exec "$bin/harness" -bin "$bin" -kvroute "$kvroute" -envoy "$envoy" -tree "$root" -crds "${crds%,}" "$@"
