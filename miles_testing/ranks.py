"""Several ranks in a test: processes with a real torch.distributed group, started once and reused.

    def loss_of(share):  # at the top level of a test module
        return float(train(share))

    def test_two_ranks(ranks):
        assert sum(ranks.run(loss_of, size=2, each=[(first,), (second,)])) == pytest.approx(whole)

``ranks`` is a fixture once miles-core is installed. Starting a process takes the seconds of importing torch, so all tests of a session
share the processes. Each call has its own default group (gloo, with a file store). The processes end with the tests.
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

#: Seconds to wait for the errors of other ranks after one failed, and for the stacks of ranks that timed out.
_GRACE = 1.0
#: Threads of a process above which the next call gets a new one. Groups of Megatron-Core's trainers are never released, and each has threads
#: that poll: with 560 of them an idle process takes a third of a core.
_THREADS = 300


class RankError(AssertionError):
    """A rank failed, died or timed out; the message contains its traceback or stack."""


class Ranks:
    """Processes that run functions together, each as a rank of torch.distributed's default group.

    Args:
        timeout: seconds that a call may take, and timeout of its collectives.
        start_timeout: seconds that a process may take to start.
    """

    def __init__(self, timeout: float = 180.0, start_timeout: float = 120.0) -> None:
        self.timeout, self.start_timeout = timeout, start_timeout
        self._directory = Path(tempfile.mkdtemp(prefix="miles-ranks-"))
        self._workers: list[_Worker] = []
        self._calls = 0

    def run(
        self, function: Callable[..., Any], *args: Any, size: int = 2, each: Sequence[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """Call ``function`` on every rank; returns the results in rank order.

        Args:
            function: a function at the top level of a module, or a method of a class there; the test's own module is allowed.
            args: arguments for every rank.
            size: number of ranks.
            each: further arguments, a tuple per rank.

        Raises:
            RankError: a rank raised (with its traceback), died or timed out (with its stack). All processes are ended, and the next
                call starts new ones.
        """
        if any(worker.count_threads() > _THREADS for worker in self._workers):
            self.close(keep=True)
        while len(self._workers) < size:
            self._workers.append(_Worker(self._directory / f"stack-{len(self._workers)}"))
        workers = self._workers[:size]
        self._calls += 1
        meeting = str(self._directory / f"group-{self._calls}")
        started = [worker for worker in workers if not worker.ready]
        try:
            self._collect(started, self.start_timeout)
            for worker in started:
                worker.ready = True
            for rank, worker in enumerate(workers):
                own = (*args, *(each[rank] if each else ()))
                worker.connection.send_bytes(_dumps((meeting, rank, size, self.timeout, function, own)))
            return self._collect(workers, self.timeout + _GRACE)
        except BaseException:
            self.close(keep=True)
            raise

    def close(self, keep: bool = False) -> None:
        """End all processes; with ``keep`` others can be started afterwards."""
        for worker in self._workers:
            worker.end()
        self._workers = []
        if not keep:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _collect(self, workers: list[_Worker], seconds: float) -> list[Any]:
        """Return the answers of all workers in order; RankError if one failed."""
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
    """A process, and the pipe to it."""

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

    def count_threads(self) -> int:
        tasks = Path(f"/proc/{self._process.pid}/task")
        return len(os.listdir(tasks)) if tasks.is_dir() else 0

    def stack(self) -> str:
        return self._stack.read_text() if self._stack.exists() else "(still starting)"

    def end(self) -> None:
        pid = self._process.pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):  # the process is still starting, or has ended
            _kill_group(pid)
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection, stack: str) -> None:
    """Main function of a process: run calls until the pipe closes."""
    if hasattr(os, "setsid"):
        os.setsid()  # so that processes started by a function end with this process
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
    """Run one call in a new group; returns the pickled answer."""
    import torch.distributed as dist

    try:
        meeting, rank, size, timeout, function, args = pickle.loads(message)
        faulthandler.dump_traceback_later(timeout, file=stack)
        patience = timedelta(seconds=timeout)
        dist.init_process_group("gloo", f"file://{meeting}", timeout=patience, rank=rank, world_size=size)
        try:
            # A rank that finishes early would exit while another is still connecting to it.
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
    """End a process group by the id of its leader."""
    if hasattr(os, "killpg"):
        os.killpg(pid, signal.SIGKILL)


class _Pickler(pickle.Pickler):
    """Stores functions and classes with their file, since other processes cannot import test modules by pytest's names."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (FunctionType, type)) or "<" in obj.__qualname__:
            return NotImplemented
        module = sys.modules.get(obj.__module__)
        file = getattr(module, "__file__", None)
        if file is None or file == __file__ or "site-packages" in file:
            return NotImplemented
        return _find_object, (obj.__module__, file, obj.__qualname__)


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _find_object(module: str, file: str, qualname: str) -> Any:
    """Return the object ``qualname`` of the module in ``file``."""
    found: Any = sys.modules.get(module) or _import_file(module, file)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _import_file(module: str, file: str) -> Any:
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
