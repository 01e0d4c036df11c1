"""Detects whether Python stores the bytecode of modules, and where.

Python compiles a module when it imports it, and stores the bytecode in ``__pycache__`` next to the source, or below PYTHONPYCACHEPREFIX.
Container images often set PYTHONDONTWRITEBYTECODE, and some installers do not compile. Then every process compiles torch and Transformers
again, which takes longer than the rest of their import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from miles_core.cache_folder import cache_folder

__all__ = ["variables"]

#: Large packages whose bytecode is looked for.
PACKAGES = ("torch", "transformers")
_DISABLED, _PREFIX = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"


def find_recompiled(packages: Sequence[str] = PACKAGES) -> tuple[str, ...]:
    """Return the installed packages without stored bytecode that this interpreter can use."""
    found = []
    for package in packages:
        try:
            spec = find_spec(package)
        except ValueError:  # a module that no file was loaded for
            continue
        if spec is not None and spec.origin and not Path(cache_from_source(spec.origin)).is_file():
            found.append(package)
    return tuple(found)


def explain(packages: Sequence[str] = PACKAGES, environment: Mapping[str, str] = os.environ) -> str:
    """Return a message if imports are compiled on every start because of an environment variable; empty otherwise."""
    recompiled = find_recompiled(packages) if environment.get(_DISABLED) else ()
    if not recompiled:
        return ""
    return (
        f"imports of {' and '.join(recompiled)} are recompiled on every start because {_DISABLED} is set: unset it, or run "
        "python -m compileall on the installed packages once"
    )


def variables(packages: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Return changes of environment variables with which child processes store bytecode; None removes a variable.

    They are empty unless PYTHONDONTWRITEBYTECODE is set and a package has no bytecode. The bytecode is stored in the user's cache folder and
    not next to the sources, because the variable asks for that.
    """
    if not environment.get(_DISABLED) or not find_recompiled(packages):
        return {}
    return {_DISABLED: None, _PREFIX: environment.get(_PREFIX) or str(cache_folder(environment) / "bytecode")}
