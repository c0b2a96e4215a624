#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs docker-compose.yaml with all profiles end to end, checks the stacks from outside and stops them. It also builds kvroute's
# image twice and compares the binaries. Uses Docker if a daemon answers, else podman, which it installs from Debian if it has
# permission, and podman-compose from PyPI: Debian's knows no profiles. With podman, an image that cannot be pulled is replaced
# by an image of the same name with this machine's programs: Go toolchain, nats-server, Envoy and Debian's Prometheus. The
# Dockerfile is then built with this machine's module cache and build cache; with KVROUTE_LONG=1 the second build has an empty one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stage=$PWD/.cache/compose
mkdir -p "$stage"
say() { echo "compose.sh: $1" >&2; }

# --- the container engine ---
if docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; then
	engine=(docker) compose=(docker compose)
else
	if ! command -v podman >/dev/null || ! command -v runc >/dev/null || ! command -v busybox >/dev/null; then
		if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
			say "no Docker daemon answers: start one, or install podman, runc and busybox-static"
			exit 1
		fi
		say "installing podman, runc and busybox-static"
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq podman runc busybox-static >/dev/null
	fi
	venv=$PWD/.cache/podman-compose
	if [ ! -x "$venv/bin/podman-compose" ]; then
		say "getting podman-compose (once, into .cache)"
		python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --disable-pip-version-check podman-compose==1.5.0
	fi
	cat >"$stage/containers.conf" <<-X
		[engine]
		runtime = "$(command -v runc)"
		cgroup_manager = "cgroupfs"
		[containers]
		default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
	X
	export CONTAINERS_CONF=$stage/containers.conf
	engine=(podman) compose=("$venv/bin/podman-compose" --parallel 1)
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
	printf 'FROM scratch\nCOPY image /\n%s\nLABEL standin=yes\nENV PATH=/usr/local/go/bin:/bin GOPROXY=off GOTOOLCHAIN=local GOMODCACHE=/root/go/pkg/mod GOCACHE=/root/.cache/go-build\n' "${entrypoint:-}" >"$stage/Dockerfile"
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
build=() again=() observed=(prometheus grafana)
if [ "${engine[0]}" = podman ]; then
	rm -rf "$stage/image"
	if missing "$(image library/golang)"; then
		standin "$(image library/golang)" sh mkdir
		mounts="-v $(go env GOROOT):/usr/local/go:ro -v $(go env GOMODCACHE):/root/go/pkg/mod:ro"
		build=("--podman-build-args=$mounts -v $(go env GOCACHE):/root/.cache/go-build")
		cache=$(go env GOCACHE)
		if [ -n "${KVROUTE_LONG:-}" ]; then rm -rf "$stage/go-build" && mkdir "$stage/go-build" && cache=$stage/go-build; fi
		read -ra again <<<"$mounts -v $cache:/root/.cache/go-build"
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
	if missing "$(image prom/prometheus)"; then
		package=$stage/prometheus
		[ -x "$package/usr/bin/prometheus" ] ||
			{ mkdir -p "$package" && (cd "$package" && apt-get download -qq prometheus && dpkg -x prometheus_*.deb .) >/dev/null 2>&1; } || true
		if [ -x "$package/usr/bin/prometheus" ]; then
			mkdir -p "$stage/image/bin"
			cp "$package/usr/bin/prometheus" "$stage/image/bin/prometheus"
			entrypoint='ENTRYPOINT ["/bin/prometheus"]' standin "$(image prom/prometheus)" wget
		else
			observed=()
			say "left out: Prometheus. Its image cannot be pulled, and Debian's package cannot be downloaded"
		fi
	fi
	if missing "$(image grafana/grafana)"; then
		observed=("${observed[@]/grafana/}")
		say "left out: Grafana. Its image cannot be pulled"
	fi
	rm -rf "$stage/image"
	# podman-compose does not report a failed build.
	podman images --format '{{.Repository}}:{{.Tag}}' | grep -E '^localhost/kvroute.*:dev$' | xargs -r podman rmi -f >/dev/null 2>&1 || true
fi

# --- run ---
export WORKERS="engine-1:8000 engine-2:8000" MODEL=sim TOKENIZER=./internal/enginesim/model ENGINE=vllm EVENTS=zmq
[ "${engine[0]}" = docker ] || export HOST_ADDRESS=192.0.2.1 # podman 4.3 does not know host-gateway; no engine is there
profiles=()
for profile in observability hierarchy split real; do profiles+=(--profile "$profile"); done
default=("${compose[@]}" "${build[@]}" -f docker-compose.yaml -p kvroute)
stack() { # arguments of compose …; with all profiles
	"${default[@]}" "${profiles[@]}" "$@"
}
down() {
	"${engine[@]}" rm -f kvroute-engine-1 kvroute-engine-2 >/dev/null 2>&1 || true
	stack down >/dev/null 2>&1 || true
}
failed() {
	say "failed: $1"
	tail -n 30 "$stage/up.log"
	for c in $("${engine[@]}" ps -a --format '{{.Names}}' | grep '^kvroute'); do
		echo "--- $c"
		"${engine[@]}" logs "$c" 2>&1 | tail -n 15
	done
	exit 1
}
up() { # services …; starts them and those that they wait for
	echo "starting $*"
	stack up -d "$@" >>"$stage/up.log" 2>&1 || failed "compose up"
	[ "${engine[0]}" = docker ] || healthy "$@"
}
healthy() { # services …; runs the health checks of all that run, which podman does not do without systemd
	"$venv/bin/python" - "$@" <<-'X' || failed "a health check"
		import subprocess, sys, time, yaml
		services, todo, seen = yaml.safe_load(open("docker-compose.yaml"))["services"], sys.argv[1:], set()
		while todo:
		    if (name := todo.pop()) in seen:
		        continue
		    seen.add(name)
		    todo += services[name].get("depends_on", {})
		    if "healthcheck" not in services[name]:
		        continue
		    command = [word.replace("$$", "$") for word in services[name]["healthcheck"]["test"][1:]]
		    for _ in range(60):
		        if subprocess.run(["podman", "exec", f"kvroute_{name}_1", *command], capture_output=True).returncode == 0:
		            break
		        time.sleep(1)
		    else:
		        sys.exit(f"compose.sh: {name} is not healthy: {command}")
	X
	echo "healthy: $*"
}
down
trap down EXIT
echo "building the images"
stack build >"$stage/up.log" 2>&1 || failed "compose build"
"${engine[@]}" image inspect kvroute:dev kvroute-real:dev kvroute-envoy{,-hierarchy,-east,-west,-split,-real}:dev >/dev/null 2>&1 || failed "compose build"

# --- the image: small, unprivileged, and the same binary from a clean copy of the sources ---
binary() { # image; copies its binary to $stage/kvroute and prints the hash
	local c
	rm -f "$stage/kvroute"
	c=$("${engine[@]}" create "$1") || return
	"${engine[@]}" cp "$c:/kvroute" "$stage/kvroute" >/dev/null && "${engine[@]}" rm "$c" >/dev/null || return
	sha256sum "$stage/kvroute" | cut -d' ' -f1
}
size=$("${engine[@]}" image inspect -f '{{.Size}}' kvroute:dev)
user=$("${engine[@]}" image inspect -f '{{.Config.User}}' kvroute:dev)
first=$(binary kvroute:dev) || failed "the image has no binary"
echo "image: $((size / 1000000)) MB, user $user, binary $first"
[ "$size" -le $((40 << 20)) ] || failed "the image has $size bytes, at most 40 MiB are allowed"
[ "$user" = 65532:65532 ] || failed "the image runs as \"$user\""
! ldd "$stage/kvroute" >/dev/null 2>&1 || failed "the binary is linked dynamically"
rm -rf "$stage/clean" && mkdir "$stage/clean"
git ls-files -z -co --exclude-standard | tar --null -T - -c | tar -x -C "$stage/clean"
"${engine[@]}" rmi -f kvroute:again >/dev/null 2>&1 || true
"${engine[@]}" build -q --no-cache -t kvroute:again "${again[@]}" "$stage/clean" >>"$stage/up.log" 2>&1 || failed "the second build"
second=$(binary kvroute:again) || failed "the second image has no binary"
[ "$first" = "$second" ] || failed "two builds differ: $first and $second"
echo "a second build from a clean copy of the sources has the same binary"

# --- the default stack ---
"${default[@]}" up -d >>"$stage/up.log" 2>&1 || failed "compose up"
container=$("${engine[@]}" ps -a --format '{{.Names}}' | grep -E '^kvroute[-_]load[-_]1$') || failed "there is no load"
echo "waiting for the load"
status=$(timeout 180 "${engine[@]}" wait "$container") || failed "the load does not end"
"${engine[@]}" logs "$container" 2>&1
[ "$status" = 0 ] || failed "the load ended with status $status"
[ "${engine[0]}" = docker ] || healthy load
[ "$("${engine[@]}" logs "$container" 2>&1 | grep -cE '^worker +worker-[1-4]:')" = 4 ] || failed "not every worker was reached"
for port in 19003 19004; do
	curl -fsS -o /dev/null "http://127.0.0.1:$port/readyz" || failed "the replica at $port is not ready"
	n=$(curl -fsS "http://127.0.0.1:$port/v1/decisions?limit=1000" | grep -o '"mode":"kv"' | wc -l)
	echo "replica at $port: $n kv decisions"
	[ "$n" -gt 0 ] || failed "the replica at $port decided nothing"
done

until_true() { # what is wrong otherwise, command …; tries for a minute
	local what=$1
	shift
	for _ in $(seq 120); do
		"$@" && return
		sleep 0.5
	done
	failed "$what"
}
overlap() { # port of Envoy; succeeds if kvroute sends the request to a worker that has the prompt cached
	curl -fsS -D "$stage/headers" -o /dev/null "http://127.0.0.1:$1/v1/chat/completions" -H 'content-type: application/json' \
		-d '{"model":"sim","max_tokens":4,"messages":[{"role":"user","content":"A question that is long enough for several blocks, asked twice over."}]}' 2>/dev/null &&
		grep -qiE '^x-dynamo-overlap-blocks: [1-9]' "$stage/headers"
}
through() { # port of Envoy, port of kvroute, text in the newest decision
	until_true "no overlap at Envoy's port $1" overlap "$1"
	grep -iE '^x-(sim-worker|dynamo)' "$stage/headers" | tr -d '\r'
	curl -fsS "http://127.0.0.1:$2/v1/decisions?limit=1" | grep -qE "$3" || failed "the newest decision has no $3"
}
through 18080 19003 '"mode"'

# --- the profiles ---
if [ -n "${observed[*]}" ]; then
	# shellcheck disable=SC2068 # an empty element is no service
	up ${observed[@]}
	query() { curl -fsS "http://127.0.0.1:19090/api/v1/$1" 2>/dev/null; }
	scraped() { [ "$(query 'query?query=up' | grep -o '"[01]"\]' | sort | uniq -c | tr -d ' ')" = '3"1"]' ]; }
	until_true "Prometheus does not scrape two replicas and Envoy" scraped
	rules=$(query rules | grep -o '"type":"alerting"' | wc -l)
	[ "$rules" = "$(grep -c -- '- alert:' examples/observability/alerts.yaml)" ] || failed "Prometheus has $rules alert rules"
	echo "Prometheus scrapes 3 targets and has $rules alert rules"
	case "${observed[*]}" in *grafana*)
		until_true "Grafana does not have the dashboard" curl -fs -o /dev/null http://127.0.0.1:13000/api/dashboards/uid/kvroute
		echo "Grafana has the dashboard"
	esac
fi
up hierarchy-envoy
through 18081 19005 '"group":"(east|west)"'
up split-envoy
through 18082 19006 '"prefill":\{'
up real-envoy
network=$("${engine[@]}" network ls --format '{{.Name}}' | grep -E '^kvroute_default$')
for i in 1 2; do
	"${engine[@]}" run -d --name "kvroute-engine-$i" --network "$network" --network-alias "engine-$i" kvroute:dev engine --name "engine-$i" \
		--engine vllm --listen 0.0.0.0:8000 --nats-url "" --kv-events zmq --kv-events-endpoint "tcp://*:5557" --kv-events-replay-endpoint "tcp://*:5657" >/dev/null
done
through 18083 19007 '"worker_name":"engine-[12]'
echo "all stacks work"
