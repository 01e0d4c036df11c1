"""The boundary between core and the functions of plugins: call a function, check its result, and name the plugin in its exceptions.

A composition of ``wrap_*`` functions consists of ordinary function calls: each layer adds one ``try`` and the check of its result. It can
therefore be compiled, and a profiler shows every layer under its own name. ``miles_core.contracts.boundaries`` lists the checks of all hooks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Literal, TypeVar, cast

from miles_core.errors import MilesError, PluginError, describe

F = TypeVar("F", bound=Callable[..., Any])
Function = Callable[..., Any]
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
    """Return the error for an invalid result; an empty ``plugin`` is core."""
    error = PluginError(f"{f'plugin {plugin}, ' if plugin else ''}hook {hook}: {wrong}")
    error.plugin = plugin
    return error


class ErrorNote(AbstractContextManager[None]):
    """Names a plugin in an exception that leaves the body, unless the exception already names one.

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


class Guard:
    """Calls functions of one hook of one plugin, checks their results, and names the plugin in their exceptions."""

    def __init__(self, plugin: str, hook: str, boundary: Boundary = UNCHECKED) -> None:
        self.plugin, self.hook, self.boundary = plugin, hook, boundary
        self._shapes: dict[str, Any] = {}  # of the inner stream's items so far, by name

    def accept(self, wrong: str) -> None:
        """Raise PluginError with what is ``wrong`` with a result, unless that is empty."""
        if wrong:
            raise refuse(self.plugin, self.hook, wrong)

    def wrap(self, function: Function) -> Function:
        """Wrap ``function`` so that its exceptions name the plugin and its results are checked.

        The returned function raises PluginError if a result violates the hook's contract; the error names plugin, hook and result. If
        the boundary has no check, ``function`` may be a plain, ``async`` or generator function, or return a coroutine or generator.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            with ErrorNote(self.plugin, self.hook):  # made here, or torch.compile could not trace it
                value = function(*args, **kwargs)
            return self._follow(value, args)

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            return await call(*args, **kwargs)

        waits = self.boundary.kind == "async" or (self.boundary.call is None and inspect.iscoroutinefunction(function))
        return functools.update_wrapper(call_async if waits else call, function)

    def record_shapes(self, inner: Function) -> Function:
        """Wrap the ``inner`` stream of a ``wrap_*`` hook, whose shapes the items of the wrapper must have."""
        shapes = self.boundary.shapes
        assert shapes is not None

        def recording(*args: Any, **kwargs: Any) -> Iterator[Any]:
            self._shapes.clear()
            for item in inner(*args, **kwargs):
                self._shapes.update(shapes(item))
                yield item

        return recording

    def call_event(self, function: Function, taken: Sequence[str], arguments: Mapping[str, Any]) -> None:
        """Call an implementation of an ``on_*`` hook with the arguments that it takes, and check all ``arguments`` after it.

        Raises:
            PluginError: it returned a value, or left an invalid argument.
        """
        before, after = self.boundary.before, self.boundary.after
        state = before(arguments) if before is not None else None
        with ErrorNote(self.plugin, self.hook):
            value = function(*[arguments[name] for name in taken])
        if value is not None:
            self.accept(f"it returned {describe(value)}; an event returns nothing: change its arguments in place")
        try:
            wrong = after(state, arguments) if after is not None else ""
        except (MilesError, TypeError) as error:
            wrong = f"its changes cannot be used: {error}"
        self.accept(wrong)

    def _follow(self, value: Any, args: tuple[Any, ...]) -> Any:
        """Check a returned value, or return a coroutine or iterator that checks what ``value`` yields."""
        kind, unchecked = self.boundary.kind, self.boundary.call is None
        if kind == "async" and not isinstance(value, Awaitable):
            self.accept(f"the function returned {describe(value)} at once; write `async def`")
        if kind == "stream" and not isinstance(value, Iterable):
            self.accept(f"the function returned {describe(value)}; expected an iterator")
        if kind == "async" or (unchecked and isinstance(value, CoroutineType)):
            return self._await(value, args)
        if kind == "stream" or (unchecked and isinstance(value, GeneratorType)):
            return self._iterate(value, args)
        if unchecked and isinstance(value, AsyncGeneratorType):
            return self._iterate_async(value)
        return self._check(value, args)

    def _check(self, value: Any, args: tuple[Any, ...]) -> Any:
        if self.boundary.call is not None:
            self.accept(self.boundary.call(value, args))
        return value

    async def _await(self, value: Awaitable[Any], args: tuple[Any, ...]) -> Any:
        with ErrorNote(self.plugin, self.hook):
            value = await value
        return self._check(value, args)

    def _iterate(self, items: Iterable[Any], args: tuple[Any, ...]) -> Iterator[Any]:
        sent, shapes = set[str](), self.boundary.shapes
        with ErrorNote(self.plugin, self.hook):
            for item in items:
                self._check(item, args)
                for name, shape in shapes(item).items() if shapes is not None and self._shapes else ():
                    if self._shapes.get(name, shape) != shape:
                        self.accept(f"{name} is {shape}; expected {self._shapes[name]}")
                    if name in sent:
                        self.accept(f"the stream has {name} twice; yield each tensor once")
                    sent.add(name)
                yield item

    async def _iterate_async(self, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
        with ErrorNote(self.plugin, self.hook):
            async for item in items:
                yield item


def names_plugin(error: BaseException) -> bool:
    """Whether ``ErrorNote`` added the name of a plugin to ``error``, or its message has one."""
    return bool(getattr(error, "plugin", "")) or isinstance(error, PluginError)


@dataclass(frozen=True)
class Wrapper:
    """The wrapping function that a ``wrap_*`` hook of one plugin returned."""

    plugin: str
    hook: str
    wrap: Callable[[Function], Function]
    boundary: Boundary = UNCHECKED

    def __call__(self, inner: Function) -> Function:
        """Wrap ``inner``. Exceptions raised in the wrapper carry a note that names plugin and hook."""
        guard = Guard(self.plugin, self.hook, self.boundary)
        with ErrorNote(self.plugin, self.hook):
            function = self.wrap(inner if self.boundary.shapes is None else guard.record_shapes(inner))
        if not callable(function):
            raise PluginError(
                f"plugin {self.plugin}: {self.hook} wrapped with something that returned {function!r}; "
                "it takes the inner function and returns a function with the same arguments"
            )
        return guard.wrap(function)


def compose(inner: F, wrappers: Sequence[Wrapper]) -> F:
    """Wrap ``inner`` with ``wrappers``; the first becomes the outermost. Without wrappers, return ``inner`` itself."""
    if not wrappers:
        return inner
    function = Guard("", "").wrap(inner)
    for wrapper in reversed(wrappers):
        function = wrapper(function)
    return cast(F, function)
