"""Runs users' code during a rollout: files are imported once, and calls that may block run in threads. A thread cannot be killed: if the
caller stops waiting, the thread continues and its result is dropped. The threads are daemons, so they do not delay the exit of the program.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from miles_core.errors import ConfigError, OutOfTime
from miles_core.text import describe_error

T = TypeVar("T")


def import_code(path: str, kind: str, where: str) -> ModuleType:
    """Import a file, once per path, or an installed module.

    Args:
        path: ``FILE.py`` or ``package.module``.
        kind: part of the name of a file's module, such as ``tools``.
        where: the option with the path, for messages.

    Raises:
        ConfigError: it does not exist, or importing it raised an error.
    """
    file = Path(path).expanduser()
    if path.endswith(".py") and not file.is_file():
        raise ConfigError(f"{where}: there is no file {file}")
    try:
        return _import_file(file, kind) if path.endswith(".py") else importlib.import_module(path)
    except (KeyboardInterrupt, OutOfTime):
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name == path.partition(".")[0]:
            raise ConfigError(
                f"{where}: there is no module {path!r}; give a file FILE.py, or an installed module"
            ) from None
        raise ConfigError(f"{where}: importing it raised {describe_error(error)}") from error


def _import_file(path: Path, kind: str) -> ModuleType:
    name = f"miles_{kind}_of_users_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None  # a .py file
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


async def call_in_thread(function: Callable[[], T], name: str) -> T:
    """Call a function in a new thread and wait for the result. SystemExit and the like are raised as RuntimeError; a process that the
    function forks exits when the function returns.

    Args:
        function: the function.
        name: name of the thread.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    process = os.getpid()

    def finish(result: Any, error: Exception | None) -> None:
        if future.done():
            return  # the caller has given up
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def call() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = function()
        except StopIteration as stop:  # a future cannot hold it
            error = RuntimeError(f"StopIteration: {stop}")
        except Exception as raised:
            error = raised
        except BaseException as raised:
            error = RuntimeError(describe_error(raised))
        if os.getpid() != process:
            os._exit(0)
        with suppress(RuntimeError):  # the run has ended
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return await future
