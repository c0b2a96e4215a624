#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Prints the flags of Dynamo's frontend, and the variables that its help names, which docs/comparison.md does not have, and fails
# if there is one. The argument is the folder that tools/dynamo.sh made.
set -euo pipefail

help=$("$1/bin/python" -m dynamo.frontend --help)
page=$(dirname "$0")/../docs/comparison.md
missing=0
# A negative flag, and the former name --aic-… of a flag --ais-…, has the row of the flag.
names=$(grep -oE -- '(\[|\| )--[a-z][a-z0-9-]+' <<<"$help" | grep -oE -- '--[a-z0-9-]+' | grep -vE -- '^--(no-|aic-|help$|version$)' | sort -u
	grep -oE 'env var: DYN_[A-Z0-9_]+' <<<"$help" | sed 's/env var: //' | sort -u)
for name in $names; do
	pattern=$name
	if [[ $name == --ais-* ]]; then pattern='--ais-\*'; fi
	if [[ $name == DYN_AIS_* ]]; then pattern='DYN_AIS_\*'; fi
	if ! grep -qE -- "\`(--no-${name#--}|$pattern)(\`|=)" "$page"; then
		echo "$name"
		missing=1
	fi
done
exit $missing
