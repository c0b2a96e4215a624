# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel with the C library, or without it.

With Go, a C compiler and the Go sources, or with KVROUTE_PUBLISHER_LIBRARY, the wheel has the library and is for one
platform. Otherwise, or with KVROUTE_PURE=1, it has Python only and is for all platforms: kvroute.client works, and
KvEventPublisher needs KVROUTE_PUBLISHER_LIBRARY at run time. KVROUTE_PURE=0 makes a missing library an error.
"""

import os
import shutil
import subprocess
import sys

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
LIBRARY = "libkvroute_publisher" + (".dylib" if sys.platform == "darwin" else ".so")
READY = os.environ.get("KVROUTE_PUBLISHER_LIBRARY")


def missing():
    """Returns what the library cannot be built without, or None."""
    if READY:
        return None
    if not os.path.exists(os.path.join(ROOT, "go.mod")):
        return "the Go sources are not here: install from a checkout (pip install ./bindings/python)"
    if not shutil.which("go"):
        return "Go is missing: install Go 1.26 or later"
    if not shutil.which(os.environ.get("CC", "cc").split()[0]):
        return "a C compiler is missing: install gcc or clang"
    return None


def pure():
    """Reports whether the wheel has no library."""
    wish, why = os.environ.get("KVROUTE_PURE", ""), missing()
    if wish == "0" and why:
        raise SystemExit("kvroute: %s, or set KVROUTE_PUBLISHER_LIBRARY to a built %s" % (why, LIBRARY))
    if wish != "1" and why:
        print("kvroute: only the client is installed, without KvEventPublisher: %s" % why, file=sys.stderr)
    return wish == "1" or bool(why)


PURE = pure()


class Build(build_py):
    """Puts the library beside the package's modules."""

    def run(self):
        super().run()
        if PURE:
            return
        target = os.path.join(self.build_lib, "kvroute", LIBRARY)
        if READY:
            shutil.copyfile(READY, target)
            return
        subprocess.check_call(
            ["go", "build", "-trimpath", "-buildmode=c-shared", "-o", os.path.abspath(target), "./bindings/c"],
            cwd=ROOT, env=dict(os.environ, CGO_ENABLED="1"),
        )
        header = os.path.splitext(target)[0] + ".h"
        if os.path.exists(header):
            os.remove(header)


class Wheel(bdist_wheel):
    """Names the wheel by its platform: the library does not depend on the version of Python."""

    def get_tag(self):
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class Package(Distribution):
    """A wheel with a library is for one platform."""

    def has_ext_modules(self):
        return not PURE


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Package)
