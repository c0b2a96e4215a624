#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs common clients of the OpenAI API into the given folder, for `make test-interop`: from PyPI
# and npm, in fixed versions.
set -euo pipefail

home=$1
openai=3.54.0
litellm=1.83.0
openai_js=7.57.0
stamp=$home/.done-$openai-$litellm-$openai_js
[ -e "$stamp" ] && exit 0
for program in python3 npm curl; do
	command -v "$program" >/dev/null || { echo "clients.sh: $program is missing" >&2; exit 1; }
done
echo "clients: downloads some 60 MB from PyPI and npm, and takes 350 MB in $home"
rm -rf "$home"
mkdir -p "$home/js"
python3 -m venv "$home/py"
nice "$home/py/bin/python" -m pip install --quiet --disable-pip-version-check "openai==$openai" "litellm==$litellm"
nice npm install --silent --no-audit --no-fund --prefix "$home/js" "openai@$openai_js"
touch "$stamp"
du -sh "$home"
