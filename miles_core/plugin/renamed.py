"""Public names that were renamed or moved, for plugins that were written for an earlier version.

A plugin that imports an old name does not start; the error names the plugin, the old name and the new one. The tables are
``miles_core/renamed.toml``, to which a rename adds a line, and the file of that name in other packages with public names. Its
section ``hooks`` has the hooks that were deleted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from miles_core.nearest import did_you_mean

#: The modules that plugins may import (docs/api.md).
PUBLIC = (
    *(
        "miles_core.plugin",
        "miles_core.data",
        "miles_core.engine",
        "miles_core.trainer",
        "miles_formats",
        "miles_core.api",
    ),
    *("miles_workers", "miles_workers.transport", "miles_core.chat", "miles_testing"),
    *("miles_formats.convert", "miles_tools.http_client", "miles_core.observe.bytecode", "miles_formats.native"),
)
_FROM = r"cannot import name '(\w+)' from '([\w.]+)'"
_KEYWORD = r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'"
_OF_MODULE = r"(?:module ')?([\w.]+)'? has no (?:attribute )?'(\w+)'"


@cache
def table(package: str = "miles_core") -> dict[str, str]:
    """Return old name -> new name, "" if nothing replaces it: the table of core and that of ``package``, without importing it."""
    return {old: new for old, new in _read(package).items() if isinstance(new, str)}


def explain_unknown_hook(hook: str, hooks: Iterable[str]) -> str:
    """Return that there is no such hook, and what to do instead if it was deleted, or else the nearest of ``hooks``."""
    hint = str(_read("miles_core")["hooks"].get(hook, "")) or did_you_mean(hook, hooks) or "docs/hooks.md lists them"
    return f"there is no hook {hook!r}; {hint}"


@cache
def _read(package: str) -> dict[str, Any]:
    import tomllib

    renamed: dict[str, Any] = {}
    for name in ("miles_core", package):
        spec = find_spec(name)
        files = [Path(folder) / "renamed.toml" for folder in (spec.submodule_search_locations or ())] if spec else []
        for file in files:
            if file.is_file():
                renamed |= tomllib.loads(file.read_text(encoding="utf-8"))
    return renamed


def explain_old_name(error: BaseException) -> str:
    """Return a predicate about the old public name that an import failed on, such as ``imports m:old, which is now m:new``.

    Empty if the error is about anything else.
    """
    old = _failed_on(error)
    if not old.startswith("miles_") or (
        find_new_name(old) is None and old.partition(":")[0].partition(".")[0] not in _packages()
    ):
        return ""
    new = find_new_name(old)
    if new:
        return f"{'passes' if '(' in old else 'imports'} {old}, which is now {new}"
    if new is not None:
        return f"imports {old}, which no longer exists and has no replacement"
    module, _, name = old.partition(":")
    if not name:
        return f"imports {module}, which does not exist in this version"
    hint = did_you_mean(name, _exports(module), "; ") or "; docs/api.md lists the public names"
    return f"imports {old}, which does not exist in this version{hint}"


def find_new_name(old: str) -> str | None:
    """Return the new name of ``module:name`` or ``module``; "" if nothing replaces it, None if the old name is not known."""
    renamed = table(old.partition(":")[0].partition(".")[0])
    if old in renamed:
        return renamed[old]
    module, _, name = old.partition(":")
    for moved in (module[: len(module) - cut] for cut in range(len(module)) if cut == 0 or module[-cut] == "."):
        if moved in renamed:  # a package that moved with its modules
            target = renamed[moved]
            return target and f"{target}{old[len(moved) :]}"
    modules = PUBLIC if name else ()
    here = [f"{m}:{name}" for m in modules if name in _exports(m)]  # it moved without a new name
    return next(iter([*here, *(renamed[f"{m}:{name}"] for m in modules if f"{m}:{name}" in renamed)]), None)


def _failed_on(error: BaseException) -> str:
    """Return the ``module:name`` or ``module`` that does not exist; "" if the error is about something else."""
    if isinstance(error, ModuleNotFoundError):
        return error.name or ""
    if isinstance(error, ImportError):
        found = re.search(_FROM, str(error))
        return f"{found[2]}:{found[1]}" if found else ""
    if isinstance(error, TypeError) and (found := re.fullmatch(_KEYWORD, str(error))):
        old = f"miles_core.plugin:{found[1]}({found[2]})"
        return old if find_new_name(old) else ""  # any other argument is the plugin's own mistake
    found = re.fullmatch(_OF_MODULE, str(error)) if isinstance(error, AttributeError) else None
    return f"{found[1]}:{found[2]}" if found else ""


def _packages() -> set[str]:
    return {name.partition(".")[0] for name in PUBLIC}


def _exports(module: str) -> list[str]:
    """Return the public names of a module, which imports none of them; empty if the module does not exist."""
    try:
        return list(getattr(import_module(module), "__all__", ()))
    except ImportError:
        return []
