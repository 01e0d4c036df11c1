"""Which hooks a plan's classes implement, read from their source without importing them.

``miles plan`` and ``miles plugins`` print this; importing a hooks class would import torch, and on a head node perhaps
software that is not there. A class that inherits from another module is imported after all.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from miles_core.errors import PluginError
from miles_core.nearest import did_you_mean
from miles_core.plugin.guard import MARK
from miles_core.plugin.load import import_target
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.plan import HookTarget, Plan

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def implemented(plan: Plan, hooks: Iterable[str] = ()) -> dict[str, tuple[str, ...]]:
    """hook -> plugins that implement it, in plan order (outermost first); in the order of ``hooks``, others after them.

    Raises:
        PluginError: a hooks class cannot be found, or marks what is no hook (of ``hooks``).
    """
    found = _by_hook(plan.hooks, hooks)
    if wrong := misspelt(found, hooks):
        raise PluginError(wrong[0])
    return found


def misspelt(found: Mapping[str, Sequence[str]], hooks: Iterable[str]) -> list[str]:
    """A sentence for each marked name that is no hook; none where ``hooks`` names none."""
    known = tuple(hooks)
    return [
        f"plugin {', '.join(plugins)}: there is no hook {name!r}; {did_you_mean(name, known)}".rstrip("; ")
        for name, plugins in found.items()
        if known and name not in known
    ]


def hooks_of(plugin: Plugin) -> tuple[str, ...]:
    """Every hook a plugin implements under some condition."""
    targets = []
    for condition, given in plugin.hooks.items():
        targets += [HookTarget(plugin.name, t, condition) for t in ((given,) if isinstance(given, str) else given)]
    return tuple(_by_hook(targets, ()))


def _by_hook(targets: Iterable[HookTarget], order: Iterable[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {hook: [] for hook in order}
    for target in targets:
        for hook in marked(target.plugin, target.target):
            if target.plugin not in found.setdefault(hook, []):
                found[hook].append(target.plugin)
    return {hook: tuple(plugins) for hook, plugins in found.items() if plugins}


@lru_cache(maxsize=256)
def marked(plugin: str, target: str) -> tuple[str, ...]:
    """Names marked with ``hookimpl`` in ``module:Class`` (``module:`` is the module itself).

    Raises:
        PluginError: no such module or class.
    """
    module, _, name = target.partition(":")
    tree = ast.parse(_source(plugin, module))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if not name:
        return tuple(_marked(tree.body))
    if name not in classes:
        return _imported(plugin, target)
    found: list[str] = []
    waiting = [classes[name]]
    while waiting:
        node = waiting.pop()
        found += _marked(node.body)
        for base in node.bases:
            if not isinstance(base, ast.Name) or base.id not in classes:
                return _imported(plugin, target)
            waiting.append(classes[base.id])
    return tuple(dict.fromkeys(found))


def _source(plugin: str, module: str) -> str:
    try:
        spec = sys.modules[module].__spec__ if module in sys.modules else importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        raise PluginError(f"plugin {plugin}: its hooks are in {module}, which cannot be found ({error})") from error
    if spec is None or spec.origin is None:
        raise PluginError(f"plugin {plugin}: its hooks are in {module}, which cannot be found")
    return Path(spec.origin).read_text(encoding="utf-8")


def _marked(body: Iterable[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, _Function):
            for decorator in node.decorator_list:
                call = decorator.func if isinstance(decorator, ast.Call) else decorator
                if getattr(call, "id", getattr(call, "attr", "")) == "hookimpl":
                    yield _specname(decorator) or node.name


def _specname(decorator: ast.expr) -> str:
    for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
        if keyword.arg == "specname" and isinstance(keyword.value, ast.Constant):
            return str(keyword.value.value)
    return ""


def _imported(plugin: str, target: str) -> tuple[str, ...]:
    holder = import_target(plugin, target)
    marks: Mapping[str, object] = {n: getattr(getattr(holder, n, None), MARK, None) for n in dir(holder)}
    return tuple(name for name, mark in marks.items() if mark is not None)
