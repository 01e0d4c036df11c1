"""The boundary between core and the functions of plugins: call a function, check its result, and name the plugin in its exceptions.

A composition of ``wrap_*`` functions consists of ordinary function calls: each layer adds one ``try`` and the check of its result. It can
therefore be compiled, and a profiler shows every layer under its own name. ``miles_core.contracts.boundaries`` lists the checks of all hooks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from miles_core.errors import MilesError, PluginError, describe

F = TypeVar("F", bound=Callable[..., Any])
#: Returns what is wrong with a value, given the arguments of the call that returned it; "" if nothing is.
Check = Callable[[Any, tuple[Any, ...]], str]


@dataclass(frozen=True)
class Boundary:
    """The checks of a hook's results. Each check returns an error message, or "" for a valid result.

    Attributes:
        part: for ``make_*``, checks the part; it receives no arguments.
        call: for ``wrap_*`` and functions built by ``make_*``, checks the result of every call.
        kind: kind of that function: ``sync``, ``async``, or ``stream`` (``call`` then checks each item).
        shapes: for ``stream``, returns name -> shape of an item. A plugin may drop, add or rename entries of the inner stream, but
            must not change the shape of a name.
        before: for ``on_*``, computes a state from the hook's arguments before each implementation is called.
        after: for ``on_*``, checks (state, arguments) after each implementation; it may also raise a MilesError.
    """

    part: Check | None = None
    call: Check | None = None
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


class ErrorNote(AbstractContextManager[None]):
    """Names a plugin in an exception that leaves the body, unless a body inside has named one.

    The message of a ``PluginError``, a mistake in the plugin's code, then begins with the plugin; other errors get a note. An error of core
    (empty ``plugin``) gets no note, but is marked so that no plugin around it is named.
    """

    def __init__(self, plugin: str, hook: str) -> None:
        self.plugin, self.hook = plugin, hook

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or getattr(error, "plugin", None) is not None:
            return
        error.plugin = self.plugin  # type: ignore[attr-defined]  # of any class
        if self.plugin and not isinstance(error, PluginError):
            error.add_note(f"in plugin {self.plugin}, hook {self.hook}")
        elif self.plugin and f"plugin {self.plugin}" not in str(error):
            error.args = (f"plugin {self.plugin}, hook {self.hook}: {error}",)


def names_plugin(error: BaseException) -> bool:
    """Whether ``ErrorNote`` added the name of a plugin to ``error``, or its message has one."""
    return bool(getattr(error, "plugin", "")) or isinstance(error, PluginError)


@dataclass(frozen=True)
class Wrapper:
    """The wrapping function that a ``wrap_*`` hook of one plugin returned."""

    plugin: str
    hook: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    boundary: Boundary = UNCHECKED

    def __call__(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``inner``. Exceptions raised in the wrapper carry a note that names plugin and hook."""
        seen: dict[str, Any] = {}
        if self.boundary.shapes is not None:
            inner = _record_shapes(inner, self.boundary.shapes, seen)
        with ErrorNote(self.plugin, self.hook):
            function = self.wrap(inner)
        if not callable(function):
            raise PluginError(
                f"plugin {self.plugin}: {self.hook} wrapped with something that returned {function!r}; "
                "it takes the inner function and returns a function with the same arguments"
            )
        return guard(function, self.plugin, self.hook, self.boundary, seen)


def compose(inner: F, wrappers: Sequence[Wrapper]) -> F:
    """Wrap ``inner`` with ``wrappers``; the first becomes the outermost. Without wrappers, return ``inner`` itself."""
    if not wrappers:
        return inner
    function = guard(inner, "", "")
    for wrapper in reversed(wrappers):
        function = wrapper(function)
    return cast(F, function)


def guard(
    function: Callable[..., Any],
    plugin: str,
    hook: str,
    boundary: Boundary = UNCHECKED,
    seen: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Wrap ``function`` so that its exceptions name the plugin and its results are checked.

    The returned function raises PluginError if a result violates the hook's contract; the error names plugin, hook and result. If the
    boundary has no check, ``function`` may be a plain, ``async`` or generator function, or return a coroutine or generator.

    Args:
        seen: for streams, name -> shape of the inner stream's items so far.
    """
    check, kind, shapes = boundary.call, boundary.kind, boundary.shapes
    known = {} if seen is None else seen

    def guarded(*args: Any, **kwargs: Any) -> Any:
        with ErrorNote(plugin, hook):
            value = function(*args, **kwargs)
        if kind == "async" and not isinstance(value, Awaitable):
            raise refuse(plugin, hook, f"the function returned {describe(value)} at once; write `async def`")
        if kind == "stream" and not isinstance(value, Iterable):
            raise refuse(plugin, hook, f"the function returned {describe(value)}; expected an iterator")
        if kind == "async" or (check is None and isinstance(value, Coroutine)):
            return _await(value, args)
        if kind == "stream" or (check is None and isinstance(value, Generator)):
            return _iterate(value, args)
        if check is None and isinstance(value, AsyncGenerator):
            return _iterate_async(value)
        return checked(value, args)

    def checked(value: Any, args: tuple[Any, ...]) -> Any:
        if check is not None and (wrong := check(value, args)):
            raise refuse(plugin, hook, wrong)
        return value

    async def _await(value: Awaitable[Any], args: tuple[Any, ...]) -> Any:
        with ErrorNote(plugin, hook):
            value = await value
        return checked(value, args)

    def _iterate(items: Iterable[Any], args: tuple[Any, ...]) -> Iterator[Any]:
        sent = set[str]()
        with ErrorNote(plugin, hook):
            for item in items:
                checked(item, args)
                for name, shape in shapes(item).items() if shapes is not None and known else ():
                    if known.get(name, shape) != shape:
                        raise refuse(plugin, hook, f"{name} is {shape}; expected {known[name]}")
                    if name in sent:
                        raise refuse(plugin, hook, f"the stream has {name} twice; yield each tensor once")
                    sent.add(name)
                yield item

    async def _iterate_async(items: AsyncGenerator[Any, Any]) -> AsyncIterator[Any]:
        with ErrorNote(plugin, hook):
            async for item in items:
                yield item

    if kind != "async" and not (check is None and inspect.iscoroutinefunction(function)):
        return functools.update_wrapper(guarded, function)

    async def guarded_async(*args: Any, **kwargs: Any) -> Any:
        return await guarded(*args, **kwargs)

    return functools.update_wrapper(guarded_async, function)


def _record_shapes(
    inner: Callable[..., Any], shapes: Callable[[Any], Mapping[str, Any]], seen: dict[str, Any]
) -> Callable[..., Iterator[Any]]:
    """Wrap ``inner`` so that it stores the shapes of its items in ``seen``."""

    def recording(*args: Any, **kwargs: Any) -> Iterator[Any]:
        seen.clear()
        for item in inner(*args, **kwargs):
            seen.update(shapes(item))
            yield item

    return recording


def call_event(
    function: Callable[..., Any],
    taken: Sequence[str],
    arguments: Mapping[str, Any],
    plugin: str,
    hook: str,
    boundary: Boundary,
) -> None:
    """Call an implementation of an ``on_*`` hook with the arguments that it takes, and check all ``arguments`` after it.

    Raises:
        PluginError: it returned a value, or left an invalid argument.
    """
    state = boundary.before(arguments) if boundary.before is not None else None
    with ErrorNote(plugin, hook):
        value = function(*[arguments[name] for name in taken])
    if value is not None:
        wrong = f"it returned {describe(value)}; an event returns nothing: change its arguments in place"
        raise refuse(plugin, hook, wrong)
    try:
        wrong = boundary.after(state, arguments) if boundary.after is not None else ""
    except (MilesError, TypeError) as error:
        wrong = f"its changes cannot be used: {error}"
    if wrong:
        raise refuse(plugin, hook, wrong)
