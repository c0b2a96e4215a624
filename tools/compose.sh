#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the images of docker-compose.yaml from local binaries, runs the file end
# to end, checks it from outside and takes it down. Uses Docker if a daemon
# answers, else podman and podman-compose, which it installs from Debian where it
# may. .cache/bin/kvroute must be there (make build).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stage=$PWD/.cache/compose
say() { echo "compose.sh: $1" >&2; }

# --- the container engine ---
if docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; then
	engine=(docker) compose=(docker compose)
else
	if ! command -v podman >/dev/null || ! command -v podman-compose >/dev/null || ! command -v runc >/dev/null; then
		if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
			say "no Docker daemon answers: start one, or install podman, podman-compose and runc"
			exit 1
		fi
		say "installing podman, podman-compose and runc"
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq podman podman-compose runc >/dev/null
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

# --- images ---
context() { # name: a fresh folder
	rm -rf "${stage:?}/$1"
	mkdir -p "$stage/$1/tmp"
	chmod 1777 "$stage/$1/tmp"
	touch "$stage/$1/tmp/.keep"
}
build() { "${engine[@]}" build -q -t "localhost/$1:dev" -f "$stage/$1/Dockerfile" "$stage/$1" >/dev/null; }

context kvroute
cp Dockerfile .cache/bin/kvroute "$stage/kvroute/"
build kvroute

context nats-server
CGO_ENABLED=0 go build -o "$stage/nats-server/nats-server" github.com/nats-io/nats-server/v2
cat >"$stage/nats-server/Dockerfile" <<-X
	FROM scratch
	COPY nats-server /nats-server
	COPY tmp /tmp
	ENTRYPOINT ["/nats-server"]
X
build nats-server

context envoy
tools/envoy.sh
envoy=$(command -v envoy || echo .cache/envoy/bin/envoy)
bundled=$(find .cache/envoy/lib -path '*/envoy/_bin/envoy' 2>/dev/null | head -n 1)
cp "${bundled:-$envoy}" "$stage/envoy/envoy"
mkdir "$stage/envoy/root"
ldd "$stage/envoy/envoy" | grep -oE '/[^ ]+' | while read -r library; do
	mkdir -p "$stage/envoy/root$(dirname "$library")"
	cp -L "$library" "$stage/envoy/root$library"
done
pool=()
for i in 1 2 3 4; do pool+=(--pool "worker-$i:8000"); done
.cache/bin/kvroute config envoy --listen 0.0.0.0:8080 --admin 127.0.0.1:9901 \
	--extproc kvroute-1:9002 --extproc kvroute-2:9002 "${pool[@]}" >"$stage/envoy/envoy.yaml"
cat >"$stage/envoy/Dockerfile" <<-X
	FROM scratch
	COPY root /
	COPY tmp /tmp
	COPY envoy envoy.yaml /
	ENTRYPOINT ["/envoy", "-c", "/envoy.yaml", "--disable-hot-restart", "--concurrency", "1", "--log-level", "warn"]
X
build envoy

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
"${compose[@]}" -f docker-compose.yaml -p kvroute up -d >"$stage/up.log" 2>&1 || { cat "$stage/up.log"; failed "compose up"; }

container=$("${engine[@]}" ps -a --format '{{.Names}}' | grep -E '^kvroute[-_]load[-_]1$') || failed "there is no load"
echo "waiting for the load"
status=$(timeout 180 "${engine[@]}" wait "$container") || failed "the load does not end"
"${engine[@]}" logs "$container" 2>&1
[ "$status" = 0 ] || failed "the load ended with status $status"

# --- look from outside ---
[ "$("${engine[@]}" logs "$container" 2>&1 | grep -cE '^worker +worker-[1-4]:')" = 4 ] || failed "not every worker was reached"
for port in 19003 19004; do
	.cache/bin/kvroute healthcheck --url "http://127.0.0.1:$port/readyz" || failed "the replica at $port is not ready"
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
for _ in $(seq 50); do # its events travel some milliseconds
	again=$(ask)
	grep -qE '^x-dynamo-overlap-blocks: [1-9]' <<<"$again" && break
done
grep -E '^x-(sim-worker|dynamo)' <<<"$again"
grep -qE '^x-dynamo-overlap-blocks: [1-9]' <<<"$again" || failed "no overlap the second time"
echo "the stack works"
