"""Validate hook implementations before they are registered.

Finds mistakes that would otherwise have no visible effect, or an error in the middle of a run: a misspelt hook, a method without the
``hookimpl`` decorator, arguments that the hook does not have, and ``async`` methods and generators (hooks are neither awaited nor iterated).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from miles_core.errors import PluginError
from miles_core.nearest import did_you_mean
from miles_core.plugin.marker import MARK
from miles_core.plugin.renamed import explain_unknown_hook


def read_specs(specs: type) -> dict[str, tuple[str, ...]]:
    """Return hook -> its arguments from a class of specifications."""
    hooks = {name: function for name, function in vars(specs).items() if not name.startswith("_")}
    return {
        name: tuple(p for p in inspect.signature(function).parameters if p != "self")
        for name, function in hooks.items()
    }


def check_implementation(plugin: str, holder: Any, specs: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Validate the hook implementations of ``holder`` and return the names of its hooks.

    Args:
        plugin: the plugin's name, for messages.
        holder: an instance of a hooks class, or the module of a single-file plugin.
        specs: hook -> arguments.

    Raises:
        PluginError: an implementation is invalid; names plugin, class and hook.
    """
    owner = getattr(holder, "__name__", None) or type(holder).__name__
    implemented = []
    for name in dir(type(holder)) if not inspect.ismodule(holder) else vars(holder):
        function = inspect.getattr_static(holder, name)
        where = f"plugin {plugin}, {owner}.{name}"
        if not hasattr(function, MARK):
            if name in specs and callable(function):
                raise PluginError(f"{where} is named like a hook but not marked: put @hookimpl above it, or rename it")
            continue
        if name not in specs:
            raise PluginError(f"{where}: {explain_unknown_hook(name, specs)}")
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise PluginError(f"{where} is async; a hook is called and never awaited: write `def {name}`")
        if inspect.isgeneratorfunction(function):
            raise PluginError(f"{where} is a generator, so calling it runs nothing; remove `yield` from it")
        _check_arguments(where, name, getattr(holder, name), specs[name])
        implemented.append(name)
    if not implemented:
        raise PluginError(f"plugin {plugin}, {owner}: implements no hook; mark its methods with @hookimpl")
    return implemented


def _check_arguments(where: str, hook: str, function: Callable[..., Any], allowed: tuple[str, ...]) -> None:
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise PluginError(f"{where} takes *{name}: name the arguments you use, out of {', '.join(allowed)}")
        if name not in allowed:
            hint = did_you_mean(name, allowed) or f"it has {', '.join(allowed)}"
            raise PluginError(f"{where}: hook {hook} has no argument {name!r}; {hint}")
        if parameter.default is not parameter.empty:
            raise PluginError(f"{where}: argument {name!r} has a default; a hook always gets a value, remove it")
