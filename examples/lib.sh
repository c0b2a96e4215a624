# SPDX-License-Identifier: Apache-2.0
# Common functions of the examples' scripts. Each script sources this file first. It changes to the project folder, makes
# $folder for logs and other files, and stops every started process at the end.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_program() { # name, path in .cache, command that installs it
	command -v "$1" || { [ -x ".cache/$2" ] && echo "$PWD/.cache/$2"; } ||
		{ echo "run.sh: $1 is missing: run $3, or put it on PATH" >&2; exit 1; }
}

wait_for() { # error message, command …; waits a minute, or $tries tenths of a second
	local what=$1
	shift
	for _ in $(seq "${tries:-600}"); do
		"$@" >/dev/null 2>&1 && return
		read -rt 0.1 <> <(:) || true
	done
	echo "run.sh: $what" >&2
	cat "$folder"/*.log >&2
	exit 1
}

free_ports() { # variable …; sets each variable to a free port of 127.0.0.1, so that scripts can run at the same time
	local name ports
	# Sockets that do not listen reserve the ports until the script ends.
	coproc reserve { exec python3 -c 'import socket, sys
held = [socket.socket() for _ in range(int(sys.argv[1]))]
for s in held:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in held), flush=True)
sys.stdin.read()' "$#"; }
	read -ra ports <&"${reserve[0]}"
	for name in "$@"; do
		printf -v "$name" %d "${ports[0]}"
		ports=("${ports[@]:1}")
	done
}

kvroute=${KVROUTE:-$(find_program kvroute bin/kvroute "make build")}
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$folder"' EXIT
