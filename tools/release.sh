#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds all files of a release without publishing them, and checks them: checksums, contents of the archives, the lists of
# modules, the program of this machine, the Python wheels, and that a second build makes the same binaries. Images are built if a Docker daemon
# answers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH=$PWD/.cache/bin:$PATH GOFLAGS=${GOFLAGS:-}
fail() {
	echo "release.sh: $*" >&2
	exit 1
}

go build -C tools/release -o "$PWD/.cache/bin/goreleaser" github.com/goreleaser/goreleaser/v2
go build -C tools/release -o "$PWD/.cache/bin/cyclonedx-gomod" github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod
goreleaser check
skip=publish
if ! docker info >/dev/null 2>&1; then
	skip+=,docker
	echo "no Docker daemon answers: the images are not built"
fi
binaries() { (cd .cache/dist && find . -name kvroute -type f -exec sha256sum {} + | sort -k2); }
release() { goreleaser release --snapshot --clean --skip="$skip" >.cache/release.log 2>&1 || fail "$(tail -n 20 .cache/release.log)"; }
release
first=$(binaries)
release
[ "$first" = "$(binaries)" ] || fail "two builds differ:"$'\n'"$first"$'\n'"$(binaries)"

cd .cache/dist
sha256sum --quiet -c checksums.txt
archives=(kvroute_*.tar.gz) lists=(kvroute_*.cdx.json)
[ "${#archives[@]} ${#lists[@]}" = "4 4" ] || fail "want 4 archives and 4 lists of modules, not ${archives[*]} ${lists[*]}"
for archive in "${archives[@]}"; do
	names=$(tar -tzf "$archive")
	for file in kvroute LICENSE README.md CHANGELOG.md completion/kvroute.bash completion/kvroute.zsh completion/kvroute.fish; do
		grep -qxF "$file" <<<"$names" || fail "$archive has no $file"
	done
done
for list in "${lists[@]}"; do
	grep -q '"pkg:golang/github.com/nats-io/nats.go@' "$list" || fail "$list does not name nats.go"
done
own=$(find . -path "*$(go env GOOS)_$(go env GOARCH)*" -name kvroute -type f)
"$own" version
"$own" help >/dev/null
[ "$(stat -c %s "$own")" -le 40000000 ] || fail "$own has more than 40 MB"
echo "${#archives[@]} archives and their checksums, ${#lists[@]} lists of modules; two builds are equal; $(stat -c %s "$own") bytes a binary"

# The Python wheels: the client for all platforms, and the client and the C library for this one.
cd ../..
python=$(tools/python.sh)
rm -rf .cache/wheels
for pure in 1 0; do
	KVROUTE_PURE=$pure "$python" -m pip wheel --quiet --disable-pip-version-check --no-index --find-links .cache/python/wheels --no-deps -w .cache/wheels ./bindings/python
done
cd .cache/wheels
wheels=(kvroute-*.whl)
[ "${#wheels[@]}" = 2 ] && [[ ${wheels[0]} == *-py3-none-any.whl ]] || fail "want a wheel for all platforms and one for this, not ${wheels[*]}"
[[ $("$python" -m zipfile -l "${wheels[1]}") == *libkvroute_publisher* ]] || fail "${wheels[1]} has no C library"
echo "Python wheels: ${wheels[*]}"
