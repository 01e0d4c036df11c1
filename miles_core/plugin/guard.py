"""Validate hook implementations, and define how their results are checked.

Implementations are validated before registration, because pluggy accepts the following mistakes silently or reports them without the
plugin's name: a misspelt hook, a method without the ``hookimpl`` decorator, an argument with a default (which some pluggy versions never
pass), ``tryfirst`` and ``trylast`` (which override the plan's order), wrappers (which cannot be compiled), and ``async`` methods (hooks
are not awaited).

The ``Boundary`` of a hook checks the results that a plugin returns to core; ``miles_core.contracts.returned`` lists them. Checks compare
types and shapes, and read values only for hooks that run once per step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from miles_core.errors import PluginError
from miles_core.nearest import did_you_mean

_FORBIDDEN = ("tryfirst", "trylast", "wrapper", "hookwrapper", "optionalhook")
MARK = "miles_impl"  # the attribute that hookimpl sets on a function


@dataclass(frozen=True)
class Boundary:
    """The checks of a hook's results. Each check returns an error message, or "" for a valid result.

    Attributes:
        part: for ``make_*``, checks the part.
        call: for ``wrap_*`` and functions built by ``make_*``, checks (result, arguments) of every call.
        kind: kind of that function: ``sync``, ``async``, or ``stream`` (``call`` then checks each item).
        shapes: for ``stream``, returns name -> shape of an item. A plugin may drop, add or rename entries of the inner stream, but
            must not change the shape of a name.
        before: for ``on_*``, computes a state from the hook's arguments before each implementation is called.
        after: for ``on_*``, checks (state, arguments) after each implementation.
    """

    part: Callable[[Any], str] | None = None
    call: Callable[[Any, tuple[Any, ...]], str] | None = None
    kind: Literal["sync", "async", "stream"] = "sync"
    shapes: Callable[[Any], Mapping[str, Any]] | None = None
    before: Callable[[Mapping[str, Any]], Any] | None = None
    after: Callable[[Any, Mapping[str, Any]], str] | None = None


UNCHECKED = Boundary()


def refuse(plugin: str, hook: str, wrong: str) -> PluginError:
    """Return the error for an invalid result."""
    error = PluginError(f"plugin {plugin}, hook {hook}: {wrong}")
    error.plugin = plugin
    return error


def describe(value: Any) -> str:
    """Describe a value by its type and its shape, length or beginning."""
    if value is None:
        return "None"
    if inspect.iscoroutine(value):
        value.close()  # it is never awaited, and Python would warn
        return "a coroutine (from an async function)"
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return "a generator (from a function with yield)"
    kind = type(value).__name__
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {kind} of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (list, tuple, dict, set)):
        inside = sorted({type(item).__name__ for item in value})
        return f"a {kind} of {len(value)}" + (f" ({', '.join(inside)})" if inside else "")
    return f"a {kind}, {value!r:.60}"


def read_specs(specs: type) -> dict[str, tuple[str, ...]]:
    """Return hook -> its arguments from a class of specifications."""
    arguments = {}
    for name, function in vars(specs).items():
        if hasattr(function, "miles_spec"):
            arguments[name] = tuple(p for p in inspect.signature(function).parameters if p != "self")
    return arguments


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
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise PluginError(f"{where} is async; a hook is called and never awaited: write `def {name}`")
        if inspect.isgeneratorfunction(function):
            raise PluginError(f"{where} is a generator, so calling it runs nothing; remove `yield` from it")
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
