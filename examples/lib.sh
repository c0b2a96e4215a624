# SPDX-License-Identifier: Apache-2.0
# What the examples' scripts share; each sources it first. Afterwards the working folder is the project's, $folder is for logs and
# what else is made, and at the end everything that was started is stopped.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_program() { # name, place in .cache, what makes it
	command -v "$1" || { [ -x ".cache/$2" ] && echo "$PWD/.cache/$2"; } ||
		{ echo "run.sh: $1 is missing: run $3, or put it on PATH" >&2; exit 1; }
}

wait_for() { # what it says otherwise, command …; for a minute, or as many tenths of a second as tries says
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

kvroute=${KVROUTE:-$(find_program kvroute bin/kvroute "make build")}
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$folder"' EXIT
