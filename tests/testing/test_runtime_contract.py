"""The runtimes that keep everything in this process, held to the contract."""

from __future__ import annotations

from typing import ClassVar

from miles_testing import RuntimeContract
from miles_testing.doubles import remote


class TestInline(RuntimeContract):
    pass


class TestApart(RuntimeContract):
    plugins = ("r3", "tis", remote.__file__)
    options: ClassVar = {"runtime": "remote", "remote_engines": 2}
    rel = 1e-4
    workers = ("trainer-0", "engine-0", "engine-1")
