"""Compose the functions of ``wrap_*`` hooks, so that an exception names the plugin that caused it.

The composition consists of ordinary function calls: each layer adds one ``try`` and the check of its result. It can therefore be
compiled, and a profiler shows every layer under its own name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import (
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
from typing import Any, TypeVar, cast

from miles_core.errors import PluginError
from miles_core.plugin.guard import UNCHECKED, Boundary, describe, refuse

F = TypeVar("F", bound=Callable[..., Any])


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
        if self.boundary.call is not None:
            return add_checks(function, self.plugin, self.hook, self.boundary, seen)
        return add_error_notes(function, self.plugin, self.hook)


def compose(inner: F, wrappers: Sequence[Wrapper]) -> F:
    """Wrap ``inner`` with ``wrappers``; the first becomes the outermost. Without wrappers, return ``inner`` itself."""
    if not wrappers:
        return inner
    function = add_error_notes(inner, "", "")
    for wrapper in reversed(wrappers):
        function = wrapper(function)
    return cast(F, function)


def note(error: BaseException, plugin: str, hook: str) -> None:
    """Name the plugin of the innermost function that raised ``error``; later calls have no effect.

    The message of a ``PluginError``, a mistake in the plugin's code, then begins with the plugin; other errors get a note. An error of core
    (empty ``plugin``) gets no note, but is marked so that no plugin around it is named.
    """
    if getattr(error, "plugin", None) is not None:
        return
    error.plugin = plugin  # type: ignore[attr-defined]  # of any class
    if isinstance(error, PluginError):
        if plugin and f"plugin {plugin}" not in str(error):
            error.args = (f"plugin {plugin}, hook {hook}: {error}",)
    elif plugin:
        error.add_note(f"in plugin {plugin}, hook {hook}")


class ErrorNote(AbstractContextManager[None]):
    """Adds the note of ``note`` to an exception that leaves the body."""

    def __init__(self, plugin: str, hook: str) -> None:
        self.plugin, self.hook = plugin, hook

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            note(error, self.plugin, self.hook)


def names_plugin(error: BaseException) -> bool:
    """Whether ``note`` added the name of a plugin to ``error``, or its message has one."""
    return bool(getattr(error, "plugin", "")) or isinstance(error, PluginError)


def add_error_notes(function: Callable[..., Any], plugin: str, hook: str) -> Callable[..., Any]:
    """Wrap ``function`` so that its exceptions get a note (``note``).

    ``function`` may be a plain, ``async`` or generator function, or return a coroutine or generator.
    """
    result: Callable[..., Any]
    if inspect.iscoroutinefunction(function):

        async def result(*args: Any, **kwargs: Any) -> Any:
            return await _await(function(*args, **kwargs), plugin, hook)

    elif inspect.isasyncgenfunction(function):

        async def result(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            with ErrorNote(plugin, hook):
                async for item in function(*args, **kwargs):
                    yield item

    elif inspect.isgeneratorfunction(function):

        def result(*args: Any, **kwargs: Any) -> Any:
            return _iterate(function(*args, **kwargs), plugin, hook)

    else:

        def result(*args: Any, **kwargs: Any) -> Any:
            with ErrorNote(plugin, hook):
                value = function(*args, **kwargs)
            if isinstance(value, Generator):
                return _iterate(value, plugin, hook)
            return _await(value, plugin, hook) if isinstance(value, Coroutine) else value

    return functools.wraps(function)(result) if hasattr(function, "__name__") else result


def add_checks(
    function: Callable[..., Any], plugin: str, hook: str, boundary: Boundary, seen: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Wrap ``function`` so that its exceptions get a note and every result is checked.

    The returned function raises PluginError if a result violates the hook's contract; the error names plugin, hook and result.

    Args:
        seen: for streams, name -> shape of the inner stream's items so far, filled by ``_record_shapes``.
    """
    make = {"async": _check_async, "stream": _check_stream}.get(boundary.kind, _check_call)
    return functools.update_wrapper(make(function, plugin, hook, boundary, {} if seen is None else seen), function)


def _check_async(
    function: Callable[..., Any], plugin: str, hook: str, boundary: Boundary, seen: Mapping[str, Any]
) -> Callable[..., Any]:
    check = boundary.call
    assert check is not None

    async def result(*args: Any, **kwargs: Any) -> Any:
        with ErrorNote(plugin, hook):
            awaitable = function(*args, **kwargs)
            if not inspect.isawaitable(awaitable):
                raise refuse(plugin, hook, f"the function returned {describe(awaitable)} at once; write `async def`")
            value = await awaitable
        if wrong := check(value, args):
            raise refuse(plugin, hook, wrong)
        return value

    return result


def _check_stream(
    function: Callable[..., Any], plugin: str, hook: str, boundary: Boundary, seen: Mapping[str, Any]
) -> Callable[..., Any]:
    check = boundary.call
    assert check is not None

    def result(*args: Any, **kwargs: Any) -> Any:
        with ErrorNote(plugin, hook):
            items = function(*args, **kwargs)
            if not isinstance(items, Iterable):
                raise refuse(plugin, hook, f"the function returned {describe(items)}; expected an iterator")
            sent = set[str]()
            for item in items:
                if wrong := check(item, args):
                    raise refuse(plugin, hook, wrong)
                if seen and boundary.shapes is not None:
                    for name, shape in boundary.shapes(item).items():
                        if seen.get(name, shape) != shape:
                            raise refuse(plugin, hook, f"{name} is {shape}; expected {seen[name]}")
                        if name in sent:
                            raise refuse(plugin, hook, f"the stream has {name} twice; yield each tensor once")
                        sent.add(name)
                yield item

    return result


def _check_call(
    function: Callable[..., Any], plugin: str, hook: str, boundary: Boundary, seen: Mapping[str, Any]
) -> Callable[..., Any]:
    check = boundary.call
    assert check is not None

    def result(*args: Any, **kwargs: Any) -> Any:
        with ErrorNote(plugin, hook):
            value = function(*args, **kwargs)
        if wrong := check(value, args):
            raise refuse(plugin, hook, wrong)
        return value

    return result


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


def _iterate(items: Generator[Any, Any, Any], plugin: str, hook: str) -> Generator[Any, Any, Any]:
    with ErrorNote(plugin, hook):
        return (yield from items)


async def _await(value: Awaitable[Any], plugin: str, hook: str) -> Any:
    with ErrorNote(plugin, hook):
        return await value
