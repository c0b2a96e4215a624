#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Translates the manifests of examples/envoy-gateway with Envoy Gateway's own offline
# translator, which takes minutes to build, into examples/envoy-gateway/translated. It
# fails if a resource is not accepted, or if the output differs from the committed files
# (--write replaces them). `make test` runs an Envoy on the committed files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=examples/envoy-gateway
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

for variant in endpoint-override original-destination; do
	{ cat $folder/base.yaml; echo "---"; cat $folder/$variant.yaml; } >"$out/$variant.yaml"
	go tool -modfile=tools/egctl/go.mod egctl x translate --from gateway-api --to gateway-api,xds -t all -o json -f "$out/$variant.yaml" >"$out/all.json"
	python3 - "$out/all.json" "$out/$variant.json" <<-'X'
		import json, sys
		everything = json.load(open(sys.argv[1]))

		def refused(node, path):
		    """Yields what says that it is not as it should be."""
		    if isinstance(node, dict):
		        if node.get("status") == "False":
		            yield f"{path}: {node.get('type')}: {node.get('message')}"
		        for key, value in node.items():
		            yield from refused(value, f"{path}/{key}")
		    elif isinstance(node, list):
		        for number, value in enumerate(node):
		            yield from refused(value, f"{path}/{number}")

		bad = list(refused(everything, ""))
		if bad:
		    sys.exit("gateway.sh: " + "\n".join(bad))
		(dump,) = everything["xds"].values()
		# The bootstrap only has data of Envoy Gateway itself: certificates, its control plane.
		dump["configs"] = [c for c in dump["configs"] if not c["@type"].endswith("BootstrapConfigDump")]
		with open(sys.argv[2], "w") as f:
		    json.dump(dump, f, indent=1, sort_keys=True)
		    f.write("\n")
	X
	if [ "${1:-}" = --write ]; then
		cp "$out/$variant.json" $folder/translated/$variant.json
	else
		diff -u $folder/translated/$variant.json "$out/$variant.json"
	fi
	echo "$variant: accepted, as committed"
done
