#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs docker-compose.yaml end to end, checks the stack from outside and stops it. Uses Docker if a daemon answers, else podman
# and podman-compose, which it installs from Debian if it has permission. With podman, an image that cannot be pulled is
# replaced by an image of the same name with this machine's programs: Go toolchain, nats-server and Envoy. The Dockerfile is
# then built with this machine's module cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stage=$PWD/.cache/compose
say() { echo "compose.sh: $1" >&2; }

# --- the container engine ---
if docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; then
	engine=(docker) compose=(docker compose)
else
	if ! command -v podman >/dev/null || ! command -v podman-compose >/dev/null || ! command -v runc >/dev/null || ! command -v busybox >/dev/null; then
		if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
			say "no Docker daemon answers: start one, or install podman, podman-compose, runc and busybox-static"
			exit 1
		fi
		say "installing podman, podman-compose, runc and busybox-static"
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq podman podman-compose runc busybox-static >/dev/null
	fi
	mkdir -p "$stage"
	cat >"$stage/containers.conf" <<-X
		[engine]
		runtime = "$(command -v runc)"
		cgroup_manager = "cgroupfs"
		[containers]
		default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
	X
	export CONTAINERS_CONF=$stage/containers.conf
	engine=(podman) compose=(podman-compose)
fi

# --- images in place of those that cannot be pulled ---
standin() { # image, programs of busybox …; builds the image from $stage/image, and adds the shared libraries of its programs
	local image=$1 root=$stage/image program
	shift
	mkdir -p "$root/bin" "$root/tmp" "$root/etc/ssl/certs"
	cp "$(command -v busybox)" "$root/bin/busybox"
	for program; do ln -sf busybox "$root/bin/$program"; done
	cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
	for library in $(ldd "$root"/bin/* 2>/dev/null | grep -oE '[[:space:]]/[^ :]+' | sort -u); do
		mkdir -p "$root$(dirname "$library")"
		cp -L "$library" "$root$library"
	done
	printf 'FROM scratch\nCOPY image /\nLABEL standin=yes\nENV PATH=/usr/local/go/bin:/bin GOPROXY=off GOTOOLCHAIN=local GOMODCACHE=/root/go/pkg/mod GOCACHE=/root/.cache/go-build\n' >"$stage/Dockerfile"
	"${engine[@]}" build -q -t "$image" -f "$stage/Dockerfile" "$stage" >/dev/null
	say "$image cannot be pulled: one made of this machine's programs stands in for it"
}
missing() { # image; succeeds if the image is absent and cannot be pulled, or is a stand-in
	case $("${engine[@]}" image inspect -f '{{index .Labels "standin"}}' "$1" 2>/dev/null || echo none) in
	yes) ;;
	none) ! timeout 60 "${engine[@]}" pull -q "$1" >/dev/null 2>&1 ;;
	*) false ;;
	esac
}
image() { grep -ohE "docker\.io/$1:[^ ]+" Dockerfile docker-compose.yaml; }
build=()
if [ "${engine[0]}" = podman ]; then
	rm -rf "$stage/image"
	if missing "$(image library/golang)"; then
		standin "$(image library/golang)" sh mkdir
		build=("--podman-build-args=-v $(go env GOROOT):/usr/local/go:ro -v $(go env GOMODCACHE):/root/go/pkg/mod:ro -v $(go env GOCACHE):/root/.cache/go-build")
	fi
	rm -rf "$stage/image"
	if missing "$(image library/nats)"; then
		mkdir -p "$stage/image/bin"
		CGO_ENABLED=0 go build -o "$stage/image/bin/nats-server" github.com/nats-io/nats-server/v2
		standin "$(image library/nats)" wget
	fi
	rm -rf "$stage/image"
	if missing "$(image envoyproxy/envoy)"; then
		mkdir -p "$stage/image/bin"
		tools/envoy.sh
		envoy=$(command -v envoy || echo .cache/envoy/bin/envoy)
		bundled=$(find .cache/envoy/lib -path '*/envoy/_bin/envoy' 2>/dev/null | head -n 1)
		cp "${bundled:-$envoy}" "$stage/image/bin/envoy"
		cp "$(command -v bash)" "$stage/image/bin/bash"
		standin "$(image envoyproxy/envoy)" sh
	fi
	rm -rf "$stage/image"
	"${engine[@]}" rmi -f kvroute:dev kvroute-envoy:dev >/dev/null 2>&1 || true # podman-compose does not report a failed build
fi

# --- run ---
down() {
	"${compose[@]}" -f docker-compose.yaml -p kvroute down >/dev/null 2>&1 || true
}
failed() {
	say "failed: $1"
	for c in nats kvroute-1 kvroute-2 envoy worker-1 load; do
		echo "--- $c"
		"${compose[@]}" -f docker-compose.yaml -p kvroute logs "$c" 2>&1 | tail -n 15
	done
	exit 1
}
down
trap down EXIT
echo "building and starting the stack"
"${compose[@]}" "${build[@]}" -f docker-compose.yaml -p kvroute build >"$stage/up.log" 2>&1 || { tail -n 30 "$stage/up.log"; failed "compose build"; }
"${engine[@]}" image inspect kvroute:dev kvroute-envoy:dev >/dev/null 2>&1 || { tail -n 30 "$stage/up.log"; failed "compose build"; }
"${compose[@]}" -f docker-compose.yaml -p kvroute up -d >>"$stage/up.log" 2>&1 || { tail -n 30 "$stage/up.log"; failed "compose up"; }

container=$("${engine[@]}" ps -a --format '{{.Names}}' | grep -E '^kvroute[-_]load[-_]1$') || failed "there is no load"
echo "waiting for the load"
status=$(timeout 180 "${engine[@]}" wait "$container") || failed "the load does not end"
"${engine[@]}" logs "$container" 2>&1
[ "$status" = 0 ] || failed "the load ended with status $status"

# --- health checks, which podman does not run without systemd ---
if [ "${engine[0]}" = podman ]; then
	/usr/bin/python3 - <<-'X' || failed "a health check"
		import subprocess, sys, time, yaml
		for name, service in yaml.safe_load(open("docker-compose.yaml"))["services"].items():
		    if "healthcheck" not in service:
		        continue
		    command = [word.replace("$$", "$") for word in service["healthcheck"]["test"][1:]]
		    for _ in range(30):
		        if subprocess.run(["podman", "exec", f"kvroute_{name}_1", *command], capture_output=True).returncode == 0:
		            break
		        time.sleep(1)
		    else:
		        sys.exit(f"compose.sh: {name} is not healthy: {command}")
	X
	echo "all services are healthy"
fi

# --- checks from outside ---
[ "$("${engine[@]}" logs "$container" 2>&1 | grep -cE '^worker +worker-[1-4]:')" = 4 ] || failed "not every worker was reached"
for port in 19003 19004; do
	curl -fsS -o /dev/null "http://127.0.0.1:$port/readyz" || failed "the replica at $port is not ready"
	n=$(curl -fsS "http://127.0.0.1:$port/v1/decisions?limit=1000" | grep -o '"mode":"kv"' | wc -l)
	echo "replica at $port: $n kv decisions"
	[ "$n" -gt 0 ] || failed "the replica at $port decided nothing"
done
ask() {
	curl -fsS -D - -o /dev/null http://127.0.0.1:18080/v1/chat/completions -H 'content-type: application/json' \
		-d '{"model":"sim","max_tokens":4,"messages":[{"role":"user","content":"A question that is long enough for several blocks, asked twice over."}]}' | tr -d '\r'
}
ask >/dev/null
again=""
for _ in $(seq 50); do # the events need some milliseconds to arrive
	again=$(ask)
	grep -qE '^x-dynamo-overlap-blocks: [1-9]' <<<"$again" && break
done
grep -E '^x-(sim-worker|dynamo)' <<<"$again"
grep -qE '^x-dynamo-overlap-blocks: [1-9]' <<<"$again" || failed "no overlap the second time"
echo "the stack works"
