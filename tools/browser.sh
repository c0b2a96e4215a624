#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Prints the path of Chromium or Google Chrome. With CI=true, and as root on Debian, it installs Chromium first if there is
# none.
set -euo pipefail

find_browser() {
	local name
	for name in chromium chromium-browser google-chrome google-chrome-stable; do
		command -v "$name" && return
	done
	return 1
}

find_browser && exit
if [ "${CI:-}" = true ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	{ apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends chromium fonts-dejavu-core; } >&2
	find_browser && exit
fi
echo "The browser test did not run: there is no Chromium on PATH. Install it (on Debian: apt-get install chromium) and run make test-browser." >&2
exit 1
