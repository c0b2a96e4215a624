#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs what builds and checks the Python wheels into .cache/python, in fixed versions from PyPI: pip and mypy, and the
# wheel of setuptools in .cache/python/wheels, with which pip builds without a network. Prints the path of its python.
set -euo pipefail

pip=26.3 setuptools=84.2.1 mypy=2.4.1
home=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.cache/python
stamp=$home/.complete-$pip-$setuptools-$mypy
if [ ! -e "$stamp" ]; then
	command -v python3 >/dev/null || { echo "python.sh: python3 is missing: install Python 3.10 or later" >&2; exit 1; }
	rm -rf "$home"
	mkdir -p "$home"
	{
		python3 -m venv "$home" &&
			"$home/bin/python" -m pip install --quiet --disable-pip-version-check "pip==$pip" "mypy==$mypy" &&
			"$home/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: -d "$home/wheels" "setuptools==$setuptools"
	} >"$home/log" 2>&1 || { cat "$home/log" >&2; echo "python.sh: not installed (is PyPI reachable? on Debian: apt install python3-venv)" >&2; exit 1; }
	touch "$stamp"
fi
echo "$home/bin/python"
