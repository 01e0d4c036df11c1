"""Several ranks in a test: processes with a real torch.distributed group, started once and given work again and again.

    def loss_of(share):  # at the top of a test module
        return float(train(share))

    def test_two_ranks(ranks):
        assert sum(ranks.run(loss_of, size=2, each=[(first,), (second,)])) == pytest.approx(whole)

``ranks`` is a fixture once miles-core is installed. Starting a process costs the seconds that importing torch takes, so all
tests of a session share them; each call gets a default group of its own (gloo, through a file), and whatever processes are left
when the tests end are gone with them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FunctionType
from typing import Any

#: Seconds to wait for what is about to come: the others' words when one rank has failed, the stacks of those that are late.
_GRACE = 1.0


class RankError(AssertionError):
    """A rank failed, was lost or did not come to an end; with what it did then."""


class Ranks:
    """Processes that run functions together, each with torch.distributed's default group.

    Args:
        timeout: seconds a call may take, and a collective within it.
        start_timeout: seconds a process has to start.
    """

    def __init__(self, timeout: float = 60.0, start_timeout: float = 120.0) -> None:
        self.timeout, self.start_timeout = timeout, start_timeout
        self._directory = Path(tempfile.mkdtemp(prefix="miles-ranks-"))
        self._workers: list[_Worker] = []
        self._calls = 0

    def run(
        self, function: Callable[..., Any], *args: Any, size: int = 2, each: Sequence[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """Call ``function`` on every rank and return what came back, in the order of ranks.

        Args:
            function: of a module's top level, or a method of a class there; a test's own module will do.
            args: for every rank.
            size: how many ranks there are.
            each: further arguments, one tuple a rank.

        Raises:
            RankError: a rank raised (with its traceback), died or took too long (with where it was). All processes are then
                ended, and the next call starts new ones.
        """
        while len(self._workers) < size:
            self._workers.append(_Worker(self._directory / f"stack-{len(self._workers)}"))
        workers = self._workers[:size]
        self._calls += 1
        meeting = str(self._directory / f"group-{self._calls}")
        started = [worker for worker in workers if not worker.ready]
        try:
            self._answers(started, self.start_timeout)
            for worker in started:
                worker.ready = True
            for rank, worker in enumerate(workers):
                own = (*args, *(each[rank] if each else ()))
                worker.connection.send_bytes(_dumps((meeting, rank, size, self.timeout, function, own)))
            return self._answers(workers, self.timeout + _GRACE)
        except BaseException:
            self.close(keep=True)
            raise

    def close(self, keep: bool = False) -> None:
        """End all processes; ``keep`` what is needed to start others."""
        for worker in self._workers:
            worker.end()
        self._workers = []
        if not keep:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _answers(self, workers: list[_Worker], seconds: float) -> list[Any]:
        """One answer of each, in order; RankError when one is not good."""
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        end = time.monotonic() + seconds
        while len(answers) + len(failures) < len(workers) and time.monotonic() < end:
            open_ = {w.connection: i for i, w in enumerate(workers) if i not in answers and i not in failures}
            for connection in wait(list(open_), max(end - time.monotonic(), 0)):
                rank = open_[connection]  # type: ignore[index]
                try:
                    good, value = pickle.loads(workers[rank].connection.recv_bytes())
                except (EOFError, OSError):
                    good, value = False, f"the process ended with status {workers[rank].status()}"
                (answers if good else failures)[rank] = value
                if not good:
                    end = min(end, time.monotonic() + _GRACE)
        if failures:
            raise RankError("\n".join(f"rank {r} of {len(workers)}: {text}" for r, text in sorted(failures.items())))
        late = [i for i in range(len(workers)) if i not in answers]
        if late:
            where = "\n".join(f"rank {i} was here:\n{workers[i].stack()}" for i in late)
            raise RankError(
                f"rank {', '.join(map(str, late))} of {len(workers)} did not answer in {seconds:g} s\n{where}"
            )
        return [answers[rank] for rank in range(len(workers))]


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, stack: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.ready = False
        self._stack = stack
        self._process = context.Process(target=_serve, args=(theirs, str(stack)), daemon=True)
        self._process.start()
        theirs.close()

    def status(self) -> int | None:
        self._process.join(_GRACE)
        return self._process.exitcode

    def stack(self) -> str:
        return self._stack.read_text() if self._stack.exists() else "(still starting)"

    def end(self) -> None:
        pid = self._process.pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):  # it is still starting, or has ended
            _kill_group(pid)
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection, stack: str) -> None:
    """The life of a process: one call after the other until the pipe closes."""
    if hasattr(os, "setsid"):
        os.setsid()  # so that what a function started ends with this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    torch.set_num_threads(1)
    connection.send_bytes(pickle.dumps((True, None)))
    with open(stack, "w") as file:
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:
                return
            file.seek(0)
            file.truncate()
            connection.send_bytes(_call(message, file))


def _call(message: bytes, stack: io.TextIOWrapper) -> bytes:
    """Do one call within a group of its own; the pickled answer."""
    import torch.distributed as dist

    try:
        meeting, rank, size, timeout, function, args = pickle.loads(message)
        faulthandler.dump_traceback_later(timeout, file=stack)
        patience = timedelta(seconds=timeout)
        dist.init_process_group("gloo", f"file://{meeting}", timeout=patience, rank=rank, world_size=size)
        try:
            # A rank that needs nobody would leave while another is still connecting to it.
            dist.barrier()
            return _dumps((True, function(*args)))
        finally:
            dist.destroy_process_group()
    except Exception:
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _kill_group(os.getpid())
    os._exit(1)


def _kill_group(pid: int) -> None:
    """End a process that leads a group, and all in it."""
    if hasattr(os, "killpg"):
        os.killpg(pid, signal.SIGKILL)


class _Pickler(pickle.Pickler):
    """Names functions and classes by their file too, since pytest imports test modules under names nobody else can import."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (FunctionType, type)) or "<" in obj.__qualname__:
            return NotImplemented
        module = sys.modules.get(obj.__module__)
        file = getattr(module, "__file__", None)
        if file is None or file == __file__ or "site-packages" in file:
            return NotImplemented
        return _found, (obj.__module__, file, obj.__qualname__)


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _found(module: str, file: str, qualname: str) -> Any:
    """The object of that name in the module of that file."""
    found: Any = sys.modules.get(module) or _imported(module, file)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _imported(module: str, file: str) -> Any:
    try:
        found = importlib.import_module(module)
        if getattr(found, "__file__", None) == file:
            return found
    except ImportError:
        pass
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[module] = found
    spec.loader.exec_module(found)
    return found
