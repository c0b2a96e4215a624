# SPDX-License-Identifier: Apache-2.0
"""Downloads public collections of chat templates into a folder, for `make conformance`: those of vLLM and of llama.cpp,
from source packages on PyPI in fixed versions. Each template is a file NAME/PATH.jinja.

templates.py FOLDER
"""
import hashlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.request

INDEX = "https://pypi.org/simple/"

# The project, the source package and its SHA-256 hash. SGLang's packages have no templates.
SOURCES = [
    ("vllm", "vllm-0.33.0.tar.gz", "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"),
    ("llama-cpp-python", "llama_cpp_python-0.3.36.tar.gz", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"),
]


def address(project: str, filename: str) -> str:
    """The address of a file, by the index of packages."""
    request = urllib.request.Request(f"{INDEX}{project}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        for file in json.load(answer)["files"]:
            if file["filename"] == filename:
                return file["url"]
    sys.exit(f"templates.py: {INDEX}{project}/ has no {filename}")


def fetch(project: str, filename: str, sha256: str, folder: str) -> int:
    """Writes all templates of a package into the folder, and returns their number."""
    with tempfile.TemporaryFile() as archive:
        with urllib.request.urlopen(address(project, filename), timeout=60) as answer:
            shutil.copyfileobj(answer, archive)
        archive.seek(0)
        if hashlib.sha256(archive.read()).hexdigest() != sha256:
            sys.exit(f"templates.py: {filename} has another SHA-256 hash than {sha256}")
        archive.seek(0)
        count = 0
        with tarfile.open(fileobj=archive) as members:
            for member in members:
                path = os.path.normpath(member.name).split("/")[1:]
                if not member.isfile() or not member.name.endswith(".jinja") or ".." in path:
                    continue
                name = os.path.join(folder, project, "-".join(path))
                with open(name, "wb") as out:
                    shutil.copyfileobj(members.extractfile(member), out)
                count += 1
    return count


def main() -> None:
    folder = sys.argv[1]
    stamp = os.path.join(folder, ".complete")
    wanted = json.dumps(SOURCES)
    if os.path.exists(stamp) and open(stamp).read() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    for project, filename, sha256 in SOURCES:
        os.makedirs(os.path.join(folder, project))
        print(f"{filename}: {fetch(project, filename, sha256, folder)} templates")
    with open(stamp, "w") as out:
        out.write(wanted)


if __name__ == "__main__":
    main()
