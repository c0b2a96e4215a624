# SPDX-License-Identifier: Apache-2.0
"""Prints the public classes and methods of the installed package that have no docstring or no annotation."""

import inspect

import kvroute
import kvroute.client

for module in kvroute, kvroute.client:
    for name in module.__all__:
        cls = getattr(module, name)
        if not cls.__doc__:
            print(module.__name__, name, "has no docstring")
        for method, function in inspect.getmembers(cls, inspect.isfunction):
            if method.startswith("_"):
                continue
            if not function.__doc__:
                print(module.__name__, name, method, "has no docstring")
            if "return" not in function.__annotations__:
                print(module.__name__, name, method, "has no type of its result")
