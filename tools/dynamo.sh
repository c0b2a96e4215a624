#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs Dynamo's frontend, mock workers and stand-alone indexer into the given folder, for `make bench-front`, `make
# test-interop` and examples/dynamo. None of them needs a GPU.
set -euo pipefail

home=$1
version=1.6.1
if [ -x "$home/bin/python" ] && [ -e "$home/.done-$version" ]; then
	exit 0
fi
command -v python3 >/dev/null || { echo "Python 3.10 or later is missing" >&2; exit 1; }
free=$(df -Pk "$(dirname "$home")" | awk 'NR == 2 {print int($4 / 1048576)}')
echo "Dynamo $version: downloads some 0.2 GB from PyPI and takes 0.8 GB in $home; $free GB are free there"
if [ "$free" -lt 2 ]; then
	echo "less than 2 GB are free" >&2
	exit 1
fi
rm -rf "$home"
python3 -m venv "$home"
"$home/bin/python" -m pip install --quiet --disable-pip-version-check uv==0.13.8
# The declared dependencies include packages that the mock workers do not need, and some that PyPI does not have.
UV_CACHE_DIR="$home/uv" nice "$home/bin/uv" pip install --quiet --python "$home/bin/python" --no-deps "ai-dynamo==$version" "ai-dynamo-runtime==$version"
UV_CACHE_DIR="$home/uv" nice "$home/bin/uv" pip install --quiet --python "$home/bin/python" \
	fastokens==0.3.5 aiohttp msgspec pyzmq redis tqdm transformers zstandard prometheus-client pydantic uvloop "kubernetes<33"
rm -rf "$home/uv"
nice "$home/bin/python" -m compileall -q -j 2 "$home/lib" >/dev/null 2>&1 || true
touch "$home/.done-$version"
du -sh "$home"
