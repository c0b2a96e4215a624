# SPDX-License-Identifier: Apache-2.0
"""Builds the shared library with Go where the sources are at hand."""

import os
import shutil
import subprocess
import sys

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARY = "libkvroute_publisher" + (".dylib" if sys.platform == "darwin" else ".so")


class Build(build_py):
    """Puts the library beside the package's modules."""

    def run(self):
        super().run()
        target = os.path.join(self.build_lib, "kvroute", LIBRARY)
        ready = os.environ.get("KVROUTE_PUBLISHER_LIBRARY")
        if ready:
            shutil.copyfile(ready, target)
            return
        root = os.path.join(HERE, "..", "..")
        if not os.path.exists(os.path.join(root, "go.mod")):
            raise SystemExit(
                "kvroute: the Go sources are not at hand: install from a checkout (pip install ./bindings/python), "
                "or set KVROUTE_PUBLISHER_LIBRARY to a built " + LIBRARY
            )
        if not shutil.which("go"):
            raise SystemExit("kvroute: Go is missing: install Go 1.26 or later, or set KVROUTE_PUBLISHER_LIBRARY to a built " + LIBRARY)
        subprocess.check_call(
            ["go", "build", "-trimpath", "-buildmode=c-shared", "-o", os.path.abspath(target), "./bindings/c"],
            cwd=root, env=dict(os.environ, CGO_ENABLED="1"),
        )
        header = os.path.splitext(target)[0] + ".h"
        if os.path.exists(header):
            os.remove(header)


class Binary(Distribution):
    """A wheel with a library is for one platform."""

    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": Build}, distclass=Binary)
