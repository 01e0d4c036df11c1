"""Import, register and call the hook classes of an accepted plan in one process.

Implementations are called in plan order, and their exceptions name plugin and hook. Before this step only the manifests of plugins are
imported.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_core.errors import MilesError, PluginError
from miles_core.nearest import did_you_mean
from miles_core.plugin.boundary import UNCHECKED, Boundary, ErrorNote, Guard, Wrapper, compose, names_plugin
from miles_core.plugin.core import CORE
from miles_core.plugin.discovery import discover
from miles_core.plugin.facts import Facts
from miles_core.plugin.failure import explain_import_failure
from miles_core.plugin.implementation import check_implementation, read_specs
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.plan import Plan
from miles_core.plugin.rule import Truth, evaluate

__all__ = ["Hooks", "Wrapper", "compose", "import_target", "register"]

Implementation = tuple[str, Callable[..., Any], tuple[str, ...]]  # plugin, implementation, the arguments it takes


class Hooks:
    """The hooks of one run in one process.

    Attributes:
        implemented: hook -> plugins that implement it, in plan order (outermost first).
    """

    def __init__(
        self,
        plan: Plan,
        manifests: Mapping[str, Plugin],
        specs: Mapping[str, tuple[str, ...]],
        calls: Mapping[str, list[Implementation]],
        boundaries: Mapping[str, Boundary],
    ) -> None:
        self._arguments = {name: frozenset(arguments) for name, arguments in specs.items()}
        self._calls = calls
        self._boundaries = boundaries
        standard = [plugin for plugin in manifests.values() if plugin.standard]
        self._active = [*(manifests[name] for name in plan.order), *standard, CORE]
        self.implemented = {hook: tuple(plugin for plugin, *_ in found) for hook, found in calls.items()}

    def on(self, name: str, /, **arguments: Any) -> None:
        """Call every implementation of an ``on_*`` hook in plan order, and check the arguments after each call."""
        for plugin, function, taken in self._implementations(name, arguments):
            Guard(plugin, name, self._boundaries.get(name, UNCHECKED)).call_event(function, taken, arguments)

    def name_suspects(self, error: BaseException, hooks: Sequence[str]) -> None:
        """Name plugins in an error that names none: one in its traceback, or those that implement one of ``hooks``.

        The message of a ``MilesError`` then names the implementers of ``hooks``; other errors get a note.
        """
        self._name_origin(error)
        found = [f"plugin {plugin}, hook {hook}" for hook in hooks for plugin, *_ in self._calls[hook]]
        if not found or names_plugin(error):
            return
        suspects = f"changed before by {'; '.join(found)}"
        if isinstance(error, MilesError) and error.args == (str(error),):
            error.args = (f"{error} ({suspects})",)
        else:
            error.add_note(suspects)

    def _name_origin(self, error: BaseException) -> None:
        """Add a note to an error that names no plugin: the innermost function of a plugin in its traceback."""
        active = [p for p in self._active if not p.standard and p is not CORE]
        parts = [(target, p.name) for p in active for made in p.provides.values() for target in made.values()]
        parts += [(function.__module__, plugin) for calls in self._calls.values() for plugin, function, _ in calls]
        owners = {target.partition(":")[0].partition(".")[0]: plugin for target, plugin in parts}
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            plugin = owners.get(str(frame.f_globals.get("__name__")).partition(".")[0])
            if plugin and not names_plugin(error):
                error.add_note(f"in plugin {plugin}, {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{line})")
                return

    def chain(self, name: str, /, **arguments: Any) -> list[Wrapper]:
        """Call every implementation of a ``wrap_*`` hook once and return their wrappers for ``compose``, the outermost first.

        A plugin that returns None adds no wrapper.
        """
        wrappers = []
        for plugin, function, taken in self._implementations(name, arguments):
            with ErrorNote(plugin, name):
                wrap = function(*[arguments[a] for a in taken])
            if wrap is None:
                continue
            if not callable(wrap):
                raise PluginError(f"plugin {plugin}: {name} returned {wrap!r}, not a function to wrap with (or None)")
            wrappers.append(Wrapper(plugin, name, wrap, self._boundaries.get(name, UNCHECKED)))
        return wrappers

    def make(self, kind: str, name: str, **arguments: Any) -> Any:
        """Build the part ``name`` of a kind. Its callable receives those of ``arguments`` that it accepts.

        Raises:
            PluginError: no active plugin provides the part, it cannot be imported, or its result is invalid.
        """
        plugin, build = self.builder(kind, name)
        hook, boundary = f"make_{kind} ({name})", self._boundaries.get(f"make_{kind}", UNCHECKED)
        named = "" if plugin is CORE or plugin.standard else plugin.name
        with ErrorNote(named, hook):
            made = build(**select_arguments(build, arguments))
        guard = Guard(named, hook, boundary)
        if boundary.part is not None:
            guard.accept(boundary.part(made, ()))
        # only functions are wrapped; objects have too many entry points
        wraps = made is not None and (boundary.call is not None or inspect.isfunction(made))
        return guard.wrap(made) if wraps else made

    def builder(self, kind: str, name: str) -> tuple[Plugin, Callable[..., Any]]:
        """Return the plugin that provides the part ``name`` of a kind, and the callable that builds it.

        Raises:
            PluginError: no active plugin provides the part, or it cannot be imported.
        """
        for plugin in self._active:
            if name in plugin.provides.get(kind, {}):
                return plugin, import_target(f"{plugin.name}, make_{kind} ({name})", plugin.provides[kind][name])
        raise PluginError(
            f"no active plugin provides the {kind} {name!r}; {_suggest_name(self.find_provided(kind), name)}"
        )

    def provider(self, kind: str, name: str) -> str:
        """Return the plugin from which ``make`` builds the part ``name`` of a kind; "" if there is none."""
        return next((p.name for p in self._active if name in p.provides.get(kind, {})), "")

    def describe_part(self, kind: str, name: str) -> str:
        """Return the plugin and the hook of the part ``name`` of a kind, for messages."""
        return f"plugin {self.provider(kind, name)}, hook make_{kind} ({name})"

    def takes(self, kind: str, name: str, argument: str) -> bool:
        """Whether the callable that builds the part ``name`` of a kind accepts ``argument``.

        Raises:
            PluginError: the callable cannot be imported.
        """
        for plugin in self._active:
            if target := plugin.provides.get(kind, {}).get(name):
                return bool(select_arguments(import_target(plugin.name, target), {argument: None}))
        return False

    def find_provided(self, kind: str) -> tuple[str, ...]:
        """Return the names of the parts of a kind (``format`` for number formats) that active plugins provide, core's last."""
        parts = (p.formats if kind == "format" else p.provides.get(kind, {}) for p in self._active)
        return tuple(dict.fromkeys(name for names in parts for name in names))

    def format(self, name: str) -> Any:
        """Return the class of a number format.

        Raises:
            PluginError: no active plugin provides the format, or it cannot be imported.
        """
        for plugin in self._active:
            if name in plugin.formats:
                return import_target(plugin.name, plugin.formats[name])
        hint = _suggest_name(self.find_provided("format"), name)
        raise PluginError(f"no active plugin has the number format {name!r}; {hint}")

    def _implementations(self, name: str, arguments: Mapping[str, Any]) -> list[Implementation]:
        if name not in self._calls:
            raise TypeError(f"there is no hook {name!r}; {did_you_mean(name, self._arguments)}")
        if arguments.keys() != self._arguments[name]:
            raise TypeError(f"{name} is called with {sorted(arguments)}, it takes {sorted(self._arguments[name])}")
        return self._calls[name]


def register(
    plan: Plan,
    manifests: Mapping[str, Plugin],
    specs: type,
    options: Callable[[Plugin], Any],
    *,
    facts: Facts | None = None,
    boundaries: Mapping[str, Boundary] | None = None,
) -> Hooks:
    """Import, instantiate and register every hook class of a plan.

    Args:
        plan: the accepted plan.
        manifests: the manifests from which the plan was resolved.
        specs: the class of specifications.
        options: returns a plugin's options, for hook classes whose constructor takes one argument.
        facts: this worker's facts, which decide hook conditions that the driver could not decide.
        boundaries: hook -> checks of its results; hooks without an entry are not checked.

    Raises:
        PluginError: a class cannot be imported or instantiated, or implements a hook incorrectly; names plugin, class and hook.
    """
    known = read_specs(specs)
    calls: dict[str, list[Implementation]] = {hook: [] for hook in known}
    for wanted in plan.hooks:
        if wanted.deferred and not _decide_condition(wanted.condition, wanted.plugin, facts):
            continue
        target = import_target(wanted.plugin, wanted.target)
        holder = _instantiate(wanted.plugin, target, options(manifests[wanted.plugin]))
        for hook in check_implementation(wanted.plugin, holder, known):
            function = getattr(holder, hook)
            calls[hook].append((wanted.plugin, function, tuple(inspect.signature(function).parameters)))
    return Hooks(plan, manifests, known, calls, boundaries or {})


def find_part(kind: str, name: str, package: str = "") -> Any:
    """Import a part that works without a run (``contracts.hooks.WITHOUT_A_RUN``), from any installed plugin.

    Args:
        package: what to install if there is none. Without it, a missing part is None.

    Raises:
        PluginError: no installed plugin provides it.
    """
    for plugin in discover().values():
        if target := plugin.provides.get(kind, {}).get(name):
            return import_target(plugin.name, target)
    if package:
        raise PluginError(f"no installed plugin provides the part {kind}: {name}; pip install {package}")
    return None


def announce_import(package: str, why: str) -> None:
    """Print one line to standard error before a plan imports a large package, which takes seconds; nothing if it is imported already."""
    if package not in sys.modules:
        print(f"importing {package} {why}; this takes a few seconds", file=sys.stderr, flush=True)


def import_target(plugin: str, target: str) -> Any:
    """Import the object ``module:name`` (``module:`` is the module itself).

    Raises:
        PluginError: the module cannot be imported, or has no such name (suggests similar names).
    """
    module_name, _, name = target.partition(":")
    if not module_name or ":" not in target:
        raise PluginError(f"plugin {plugin}: {target!r} names no module; write 'module:name'")
    with explain_import_failure(f"plugin {plugin}", module_name):
        module = importlib.import_module(module_name)
    if not name:
        return module
    if not hasattr(module, name):
        raise PluginError(
            f"plugin {plugin}: {getattr(module, '__file__', None) or module_name} has no {name!r}; "
            f"{did_you_mean(name, vars(module))}".rstrip("; ")
        )
    return getattr(module, name)


def _instantiate(plugin: str, target: Any, options: Any) -> Any:
    """Return the object to register: a module itself, or an instance of a class.

    A class whose constructor takes an argument receives its plugin's options.
    """
    if inspect.ismodule(target):
        return target
    if not inspect.isclass(target):
        raise PluginError(f"plugin {plugin}: hooks must name a class, {target!r} is {type(target).__name__}")
    parameters = [p for p in inspect.signature(target).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [p.name for p in parameters if p.default is p.empty]
    if len(required) > 1:
        raise PluginError(
            f"plugin {plugin}: {target.__name__} takes {', '.join(required)}; it may take its options, no more"
        )
    with ErrorNote(plugin, f"{target.__name__}()"):
        build: Callable[..., Any] = target
        return build(options) if parameters else build()


def _decide_condition(condition: str, plugin: str, facts: Facts | None) -> bool:
    truth = evaluate(condition, facts.lookup) if facts is not None else Truth.UNKNOWN
    if truth is Truth.UNKNOWN:
        raise PluginError(f"plugin {plugin}: its hooks depend on {condition!r}, which is not known on this worker")
    return truth is Truth.TRUE


def select_arguments(build: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``arguments`` that the function ``build`` accepts."""
    parameters = inspect.signature(build).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def _suggest_name(names: Sequence[str], wanted: str) -> str:
    return did_you_mean(wanted, names) or f"there are: {', '.join(names) or 'none'}"
