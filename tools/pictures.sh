#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes docs/images/dashboard.png: starts the demo, plays its load for MINUTES (5) more minutes, and takes a picture of the
# dashboard at the end of the load. BROWSER is the path of Chromium.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=$((${MINUTES:-5} * 60))
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$folder"' EXIT
address() { sed -n "s/^  $1 *\(http[^ ]*\).*/\1/p" "$folder/demo.log"; }

.cache/bin/kvroute demo --keep --conversations 20 >"$folder/demo.log" 2>&1 &
for _ in $(seq 600); do
	[ -n "$(address dashboard)" ] && break
	sleep 1
done
[ -n "$(address dashboard)" ] || { cat "$folder/demo.log" >&2; exit 1; }

rate=8
.cache/bin/kvroute load --url "$(address clients)" --rate $rate --conversations $((rate * seconds / 4 + 100)) --turn-gap 2.5s --max-tokens 40 \
	--system-prompts 12 --system-bytes 36000 --user-bytes 4200 --reply-bytes 1800 >"$folder/load.log" 2>&1 &
sleep "$seconds"
mkdir -p docs/images
go run -C bench/browser . --url "$(address dashboard)" --height "${HEIGHT:-1060}" --out "$PWD/docs/images/dashboard.png"
