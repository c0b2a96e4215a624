# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# For scripts that run kvroute and two simulated workers behind the Envoy of a gateway: istio.sh and testgateway.sh. The
# script sets kvroute (the program) and minutes (how long it waits at most), and has ask TEXT, which sends a chat and
# prints the response with its headers. variant, if it is set, stands before messages.

folder=$(mktemp -d) processes=() variant=
# stop ends all processes.
stop() {
	for p in "${processes[@]}"; do kill -INT "$p" 2>/dev/null || true; done
	for p in "${processes[@]}"; do wait "$p" 2>/dev/null || true; done
	processes=()
}
trap 'stop; rm -rf "$folder"' EXIT

# fail MESSAGE: prints it with the last lines of each log, and ends the script.
fail() {
	echo "${0##*/}: ${variant:+$variant: }$*" >&2
	for log in "$folder"/*.log; do
		echo "--- ${log##*/}" >&2
		grep -v '	info	' "$log" | tail -n 25 >&2
	done
	exit 1
}

# port prints a free port.
port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# start NAME COMMAND...: runs a command in the background. The variable NAME is its process.
start() {
	local name=$1
	shift
	"$@" >>"$folder/$name.log" 2>&1 &
	processes+=($!)
	printf -v "$name" %s $!
}

# until_true WHAT COMMAND...: repeats a command until it succeeds.
until_true() {
	local what=$1 tries=0
	shift
	until "$@"; do
		((++tries < 120 * minutes)) || fail "$what: not in $minutes minutes"
		sleep 0.5
	done
}

answers() { ask "$@" 2>/dev/null | grep -q '^HTTP/1.1 200'; }
decided() { ask "$@" 2>/dev/null | grep -qi '^x-dynamo-reason:'; }
hit() { ask "$@" 2>/dev/null | grep -qi '^x-dynamo-reason: kv'; }
ready() { curl -sf -o /dev/null "http://127.0.0.1:$http/readyz"; }

# all_answered WHAT: sends 20 requests, and fails if one of them is not answered with 200.
all_answered() {
	for i in $(seq 20); do answers "$1 $i" || fail "$1: request $i is not answered with 200"; done
	echo "${variant:+$variant: }$1: 20 of 20 requests answered with 200"
}

# start_stack FLAGS of kvroute serve...: starts the workers one and two (processes worker1 and worker2) and kvroute
# (process router), and waits until it is ready. The array serve is kvroute's command. The gateway's port is listen.
start_stack() {
	listen=$(port) extproc=$(port) http=$(port) one=$(port) two=$(port) events1=$(port) events2=$(port)
	cat >"$folder/kvroute.yaml" <<-X
		version: 1
		workers:
		- {name: one, address: "127.0.0.1:$one", models: [sim], model_card: kvroute-sim, block_size: 16, events: {transport: zmq, endpoint: "tcp://127.0.0.1:$events1"}}
		- {name: two, address: "127.0.0.1:$two", models: [sim], model_card: kvroute-sim, block_size: 16, events: {transport: zmq, endpoint: "tcp://127.0.0.1:$events2"}}
	X
	serve=("$kvroute" serve --config "$folder/kvroute.yaml" --extproc-address "127.0.0.1:$extproc" --http-address "127.0.0.1:$http" --decision-headers "$@")
	start worker1 "$kvroute" engine --name one --listen "127.0.0.1:$one" --kv-events zmq --kv-events-endpoint "tcp://127.0.0.1:$events1" --nats-url ""
	start worker2 "$kvroute" engine --name two --listen "127.0.0.1:$two" --kv-events zmq --kv-events-endpoint "tcp://127.0.0.1:$events2" --nats-url ""
	start router "${serve[@]}"
	until_true "kvroute is not ready" ready
}

# check_hit: a prompt goes to the worker that cached it. Sets prompt.
check_hit() {
	prompt=$(printf 'the same long beginning of a conversation %.0s' $(seq 30))
	answers "$prompt" || fail "the first request of a conversation is not answered"
	until_true "no request goes to the worker that cached its prompt" hit "$prompt"
}

# check_deaths: requests are answered while kvroute is dead, a new kvroute decides them, and a dead worker harms none.
check_deaths() {
	kill -9 "$router" && wait "$router" 2>/dev/null || true
	all_answered "kvroute is dead"
	start router "${serve[@]}"
	until_true "a new kvroute is not used" decided "a request after the restart"
	echo "${variant:+$variant: }a restarted kvroute decides again"
	kill -9 "$worker1" && wait "$worker1" 2>/dev/null || true
	all_answered "a worker is dead"
}
