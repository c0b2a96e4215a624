#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Prints the path of axe-core, which finds mistakes of accessibility in pages. It is a file of the pinned wheel
# axe-playwright-python of PyPI, which this script installs once into .cache/axe. Nothing of it is in the binary.
set -euo pipefail

version=0.1.8
hash=sha256:fdd263c998388f1a8e67cad02677e612d946248bd44d163be5e8650ea31f95f8
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$root/.cache/axe/$version
file=$folder/axe_playwright_python/axe.min.js

if [ ! -e "$file" ]; then
	command -v python3 >/dev/null || { echo "axe.sh: there is no python3 to install axe-core with: install Python 3" >&2; exit 1; }
	python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes --target "$folder.$$" \
		-r /dev/stdin <<<"axe-playwright-python==$version --hash=$hash" >&2 ||
		{ echo "axe.sh: pip could not install axe-playwright-python==$version (is PyPI reachable?)" >&2; exit 1; }
	mv -T "$folder.$$" "$folder" 2>/dev/null || rm -rf "$folder.$$" # another run was faster
fi
echo "$file"
