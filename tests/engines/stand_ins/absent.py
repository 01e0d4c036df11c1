"""Make a package importable of which this machine can have no build: any name can be imported, none can be used.

SGLang imports its compiled kernels and torchvision when its modules are loaded, although it calls neither of them while it
computes text on a CPU. A stand-in package calls ``install``; a function of it that is called anyway raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Collection, Sequence
from typing import Any


class AbsentType(type):
    """The type of classes that exist only by name: their attributes are strings that show where they came from."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__module__}.{cls.__name__}.{name}"


class AbsentModule(types.ModuleType):
    """A module with every name: classes where the name starts with a capital, otherwise functions that raise."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = absent_member(self.__name__, name)
        setattr(self, name, made)
        return made


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below the packages it was created for.

    Args:
        package: name of the package.
        missing: full names of submodules that cannot be imported either, because the importer has its own replacement.
    """

    def __init__(self, package: str, missing: Collection[str] = ()) -> None:
        self.prefix = package + "."
        self.missing = missing

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(self.prefix):
            return None
        if name in self.missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def absent_member(module: str, name: str) -> Any:
    """A class or function called ``name`` that can be imported and passed on, but not called."""
    if name[:1].isupper():
        return AbsentType(name, (), {"__module__": module})

    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{module}.{name} is a stand-in for tests on a CPU and computes nothing")

    call.__name__ = call.__qualname__ = name
    return call


def install(package: str, missing: Collection[str] = ()) -> None:
    """Turn the imported module ``package`` into one with every name and every submodule but ``missing``."""
    sys.modules[package].__class__ = AbsentModule
    sys.meta_path.append(AbsentFinder(package, missing))
