"""Loads functions from users' files: ``f.py``, ``f.py:name``, or ``package.module:name``.

A wrong path, name or signature is reported before the run starts.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from miles_core.errors import ConfigError, DataError, MilesError, OutOfTime
from miles_core.text import describe_error

log = logging.getLogger(__name__)
_warned: set[str] = set()


@dataclass(frozen=True)
class UserFunction:
    """A loaded function with its origin; calling the object calls the function.

    Attributes:
        function: the callable itself.
        name: its name in the file.
        origin: file (or module) of the function, for messages.
        is_async: whether calling it returns a coroutine.
        home: working directory of calls; it is restored after each call.
    """

    function: Callable[..., Any]
    name: str
    origin: str
    is_async: bool
    home: str = field(default_factory=os.getcwd)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_async:
            return self._await(*args, **kwargs)
        with _Contained(self):
            return self.function(*args, **kwargs)

    def locate(self, error: BaseException) -> str:
        """Return FILE:LINE of the last place in the function's own file that ``error`` passed; "" if there is none."""
        function = inspect.unwrap(self.function)
        code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
        file = getattr(code, "co_filename", "")
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        return f"{os.path.basename(file)}:{lines[-1]}" if lines else ""

    async def _await(self, *args: Any, **kwargs: Any) -> Any:
        with _Contained(self):
            return await self.function(*args, **kwargs)


class _Contained(AbstractContextManager[None]):
    """Context of a call to a user's function.

    Exceptions that would end the program, or that an event loop or thread cannot propagate, become a DataError. The working directory is
    restored, because the run's paths are relative to it."""

    def __init__(self, called: UserFunction) -> None:
        self.called = called

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None and (what := _describe_escape(error, self.called.is_async)):
                raise DataError(what) from error
            if (
                isinstance(error, Exception)
                and not isinstance(error, MilesError)
                and (place := self.called.locate(error))
            ):
                error.add_note(place)
        finally:
            _return_to(self.called.home, f"{self.called.name} ({self.called.origin})")


def _describe_escape(error: BaseException, is_async: bool) -> str:
    """Describe an exception that must not leave a call; "" for others."""
    if isinstance(error, StopIteration):
        return "it raised StopIteration: give next(...) a default, or catch it"
    if isinstance(error, Exception) or _ends_program(error, is_async):
        return ""
    what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {describe_error(error)}"
    return f"it {what}; raise an error instead, or return a result"


def _ends_program(error: BaseException, is_async: bool) -> bool:
    """Return whether ``error`` ends the program or cancels the call from outside, as opposed to an error of the function itself."""
    if isinstance(error, OutOfTime):
        return True
    if isinstance(error, KeyboardInterrupt):  # only the main thread receives signals
        return threading.current_thread() is threading.main_thread()
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task() if is_async else None
        return task is not None and task.cancelling() > 0
    return is_async and isinstance(error, GeneratorExit)


def _return_to(home: str, who: str) -> None:
    try:
        there = os.getcwd()
    except FileNotFoundError:  # the working directory was deleted
        there = "a deleted directory"
    if there != home:
        if who not in _warned:
            _warned.add(who)
            log.warning(
                "%s changes the working directory (to %s); it is put back to %s after each call", who, there, home
            )
        os.chdir(home)


def load_function(spec: str, *, flag: str, default: str, parameters: tuple[str, ...]) -> UserFunction:
    """Load the function that ``spec`` names.

    Args:
        spec: ``path/to/f.py[:name]``, ``package.module:name`` or ``package.module.name``.
        flag: the option with ``spec``, for messages (``--custom-rm-path``).
        default: name of the function if ``spec`` is a file without ``:name``.
        parameters: names of the positional arguments, to check the signature.

    Raises:
        ConfigError: the file, module or function does not exist, the import fails, the object is not callable, or its signature
            does not accept the parameters.
    """
    module, name, origin = _load_module(spec, flag, default)
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        there = f"it has {', '.join(sorted(own))}" if own else "it defines no function"
        raise ConfigError(f"{flag} {spec}: {origin} has no function {name!r} ({there}); write {origin}:NAME to choose")
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"{flag} {spec}: {name} in {origin} is a {type(function).__name__}, not a function")
    _check_signature(function, name, origin, flag, parameters)
    return UserFunction(function, name, origin, is_async(function))


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling ``function`` (a function, or an object with ``__call__``) returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _check_signature(
    function: Callable[..., Any], name: str, origin: str, flag: str, parameters: tuple[str, ...]
) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some built-in callables have no signature to check
    try:
        signature.bind(*parameters)
    except TypeError as error:
        wanted = f"{name}({', '.join(parameters)})"
        raise ConfigError(
            f"{flag}: {name}{signature} in {origin} cannot be called as {wanted} ({error}); change it to accept these"
        ) from error


def _load_module(spec: str, flag: str, default: str) -> tuple[ModuleType, str, str]:
    path, colon, name = spec.rpartition(":")
    if not colon or "/" in name or name.endswith(".py"):
        path, name = spec, ""
    if path.endswith(".py"):
        return _load_file(Path(path), spec, flag), name or default, path
    if not name:
        path, _, name = path.rpartition(".")
    if not path:
        raise ConfigError(
            f"{flag} {spec}: write a file as path/to/file.py[:function] or a function as package.module:name"
        )
    try:
        return importlib.import_module(path), name, path
    except (Exception, SystemExit) as error:
        beside = Path(*path.split(".")).with_suffix(".py")
        hint = f"; there is a file {beside}: write {beside}:{name}" if beside.is_file() else ""
        raise ConfigError(f"{flag} {spec}: importing {path} failed: {describe_error(error)}{hint}") from error


def _load_file(path: Path, spec: str, flag: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{flag} {spec}: there is no file {path} (looked in {Path.cwd()})")
    path = path.resolve()
    # Load each file once, so that a reward and a filter in the same file share its globals.
    module_name = f"miles_user_{path.stem}_{sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if str(path.parent) not in sys.path:
        sys.path.append(
            str(path.parent)
        )  # modules next to the file; appended last, so that they shadow no other module
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{flag} {spec}: {path} cannot be loaded as a Python file")
    home, module = os.getcwd(), importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"{flag} {spec}: loading {path} failed{where}: {describe_error(error)}") from error
    finally:
        _return_to(home, str(path))
    return module
