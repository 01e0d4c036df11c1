"""What an implementation of a hook must look like, checked before it is registered.

pluggy accepts each of these silently or reports it without the plugin's name: a misspelt hook, a method whose mark was
forgotten, an argument with a default (never passed by some pluggy versions), ``tryfirst`` and ``trylast`` (they beat
the plan's order), wrappers (they cannot be compiled).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from miles_core.errors import PluginError
from miles_core.nearest import did_you_mean

_FORBIDDEN = ("tryfirst", "trylast", "wrapper", "hookwrapper", "optionalhook")
MARK = "miles_impl"  # what hookimpl leaves on a function


def specified(specs: type) -> dict[str, tuple[str, ...]]:
    """hook -> its arguments, from a class of specifications."""
    found = {}
    for name, function in vars(specs).items():
        if hasattr(function, "miles_spec"):
            found[name] = tuple(p for p in inspect.signature(function).parameters if p != "self")
    return found


def check_implementation(plugin: str, holder: Any, specs: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Refuse what would be misunderstood; return the names of the hooks ``holder`` implements.

    Args:
        plugin: for the message.
        holder: an instance of a hooks class, or the module of a single-file plugin.
        specs: hook -> arguments.

    Raises:
        PluginError: one sentence naming plugin, class and hook.
    """
    owner = getattr(holder, "__name__", None) or type(holder).__name__
    implemented = []
    for name in dir(type(holder)) if not inspect.ismodule(holder) else vars(holder):
        function = inspect.getattr_static(holder, name)
        marks = getattr(function, MARK, None)
        where = f"plugin {plugin}, {owner}.{name}"
        if marks is None:
            if name in specs and callable(function):
                raise PluginError(f"{where} is named like a hook but not marked: put @hookimpl above it, or rename it")
            continue
        hook = marks.get("specname") or name
        if hook not in specs:
            raise PluginError(
                f"{where}: there is no hook {hook!r}; {did_you_mean(hook, specs) or 'see miles_core.contracts.hooks'}"
            )
        used = [flag for flag in _FORBIDDEN if marks.get(flag)]
        if used:
            raise PluginError(
                f"{where} uses {used[0]}: order belongs in the manifest (before, after), wrapping in wrap_* hooks"
            )
        _check_arguments(where, hook, getattr(holder, name), specs[hook])
        implemented.append(hook)
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
