#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Prints what docs/comparison.md does not have, and fails if there is something: the flags of Dynamo's frontend, and the
# variables DYN_… that the frontend, the router, the planner and the runtime read. The argument is the folder that
# tools/dynamo.sh made.
set -euo pipefail

"$1/bin/python" -m dynamo.frontend --help | "$1/bin/python" <(cat <<'END'
import pathlib, re, sys, sysconfig

page = re.sub(r"(?s)```.*?```", "", pathlib.Path(sys.argv[1]).read_text())
texts = {t.split("=")[0].split(" ")[0] for t in re.findall(r"`([^`\n]+)`", page)}
missing = set()

# A negative flag, and the former name --aic-… of a flag --ais-…, has the row of the flag.
for flag in re.findall(r"(?:\[|\| )(--[a-z][a-z0-9-]+)", sys.stdin.read()):
    if not re.match(r"--(no-|aic-|help$|version$)", flag) and not texts & {flag, "--no-" + flag[2:]} \
            and not (flag.startswith("--ais-") and "--ais-*" in texts):
        missing.add(flag)

# `DYN_A_*` in the page stands for DYN_A and all names that begin with DYN_A_. DYN_FOO and DYN_ENABLE_FEATURE are examples
# in comments of Dynamo.
names = sorted({"DYN_FOO", "DYN_ENABLE_FEATURE"} | {t for t in texts if re.fullmatch(r"DYN_[A-Z0-9_]+", t)}, key=len, reverse=True)
kinds = tuple(t[:-1] for t in texts if re.fullmatch(r"DYN_[A-Z0-9]+_[A-Z0-9_]*\*", t))

root = pathlib.Path(sysconfig.get_path("purelib"), "dynamo")
for part in "frontend router planner common/configuration runtime".split():
    for file in (root / part).rglob("*.py"):
        if "tests" not in file.parts:
            missing |= {n for n in re.findall(r"\bDYN_[A-Z0-9_]+", file.read_text()) if n not in names and not (n + "_").startswith(kinds)}

# The compiled library has names one behind the other, without a separator, and with letters of other texts at their ends.
# Some are cut after a multiple of 16 bytes.
for text in re.findall(rb"DYN_[A-Z0-9_]+", next(root.glob("_core*.so")).read_bytes()):
    for name in re.split(r"(?=DYN_)", text.decode()):
        known = next((n for n in names if name.startswith(n) and not name[len(n):].startswith("_")), None)
        if name and not known and not (name + "_").startswith(kinds) and not (len(name) % 16 == 0 and any(n.startswith(name) for n in names)):
            missing.add(name)
print("\n".join(sorted(missing)), end="\n" if missing else "")
sys.exit(bool(missing))
END
) "$(dirname "$0")/../docs/comparison.md"
