"""Find the hooks that a plan's classes implement by parsing their source, without importing them.

``miles plan`` and ``miles plugins`` print these hooks. Importing a hook class would import torch and possibly packages that a
head node does not have. Only a class with a base class in another module is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from miles_core.errors import PluginError
from miles_core.plugin.load import import_target
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.marker import MARK
from miles_core.plugin.plan import HookTarget, Plan
from miles_core.plugin.renamed import explain_unknown_hook

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def scan_hooks(plan: Plan, hooks: Iterable[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return hook -> plugins that implement it, in plan order (outermost first). Hooks are in the order of ``hooks``.

    Raises:
        PluginError: a hook class cannot be found, or a name marked with ``hookimpl`` is not one of ``hooks``.
    """
    plugins_of = _group_by_hook(plan.hooks, hooks)
    if wrong := find_misspelt(plugins_of, hooks):
        raise PluginError(wrong[0])
    return plugins_of


def find_misspelt(plugins_of: Mapping[str, Sequence[str]], hooks: Iterable[str]) -> list[str]:
    """Return an error message for each name in ``plugins_of`` that is not in ``hooks``; none if ``hooks`` is empty."""
    known = tuple(hooks)
    return [
        f"plugin {', '.join(plugins)}: {explain_unknown_hook(name, known)}"
        for name, plugins in plugins_of.items()
        if known and name not in known
    ]


def hooks_of(plugin: Plugin) -> tuple[str, ...]:
    """Return all hooks that a plugin implements under any condition."""
    targets = []
    for condition, given in plugin.hooks.items():
        targets += [HookTarget(plugin.name, t, condition) for t in ((given,) if isinstance(given, str) else given)]
    return tuple(_group_by_hook(targets, ()))


def _group_by_hook(targets: Iterable[HookTarget], order: Iterable[str]) -> dict[str, tuple[str, ...]]:
    plugins_of: dict[str, list[str]] = {hook: [] for hook in order}
    for target in targets:
        for hook in find_marked(target.plugin, target.target):
            if target.plugin not in plugins_of.setdefault(hook, []):
                plugins_of[hook].append(target.plugin)
    return {hook: tuple(plugins) for hook, plugins in plugins_of.items() if plugins}


@lru_cache(maxsize=256)
def find_marked(plugin: str, target: str) -> tuple[str, ...]:
    """Return the names marked with ``hookimpl`` in ``module:Class`` (``module:`` is the module itself).

    Raises:
        PluginError: the module or class does not exist.
    """
    module, _, name = target.partition(":")
    tree = ast.parse(_source(plugin, module))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if not name:
        return tuple(_marked_functions(tree.body))
    if name not in classes:
        return _import_and_find_marked(plugin, target)
    names: list[str] = []
    waiting = [classes[name]]
    while waiting:
        node = waiting.pop()
        names += _marked_functions(node.body)
        for base in node.bases:
            if not isinstance(base, ast.Name) or base.id not in classes:
                return _import_and_find_marked(plugin, target)
            waiting.append(classes[base.id])
    return tuple(dict.fromkeys(names))


def _source(plugin: str, module: str) -> str:
    try:
        spec = sys.modules[module].__spec__ if module in sys.modules else importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        raise PluginError(f"plugin {plugin}: its hooks are in {module}, which cannot be found ({error})") from error
    if spec is None or spec.origin is None:
        raise PluginError(f"plugin {plugin}: its hooks are in {module}, which cannot be found")
    return Path(spec.origin).read_text(encoding="utf-8")


def _marked_functions(body: Iterable[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, _Function):
            for decorator in node.decorator_list:
                if getattr(decorator, "id", getattr(decorator, "attr", "")) == "hookimpl":
                    yield node.name


def _import_and_find_marked(plugin: str, target: str) -> tuple[str, ...]:
    holder = import_target(plugin, target)
    return tuple(name for name in dir(holder) if hasattr(getattr(holder, name, None), MARK))
