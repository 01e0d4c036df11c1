"""Interpreters that have imported SGLang's parts before SGLang starts them.

SGLang starts its scheduler and its detokenizer with ``multiprocessing``'s method ``spawn``: new interpreters, which import torch, Transformers
and SGLang again, after the arguments are known. A ``Standby`` starts such an interpreter first, and ``Process.start()`` sends it the process
object, as ``spawn`` would. A fork of an interpreter that has imported SGLang is no alternative: the import may initialise CUDA.

The interpreter has the environment at its start. Later changes of variables in ``LATE`` are passed on. If another variable
has changed since, or the interpreter has ended, ``spawn`` starts the process as usual.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import json
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import popen_fork, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnProcess, set_spawning_popen
from typing import Any

log = logging.getLogger(__name__)

#: Environment variable of SGLang's main process: the number of schedulers that it will start; "0" if none should be started early.
VARIABLE = "MILES_SGLANG_STANDBY"
#: Function that a process runs -> the module that the interpreter imports.
SCHEDULER = {"run_scheduler_process": "sglang.srt.managers.scheduler"}
DETOKENIZER = {"run_detokenizer_process": "sglang.srt.managers.detokenizer_manager"}
#: ``NAME=VALUE`` that SGLang sets between its own import and the start of its processes. No module reads these variables while it is
#: imported, or the value is the default; those of CUDA are CUDA's defaults.
LATE = re.compile(
    r"(NCCL_\w+|TRTLLM_ENABLE_PDL|CUTE_DSL_LOG_\w+|TOKENIZERS_PARALLELISM|SGLANG_RUN_ID|SGLANG_DISABLED_MODEL_ARCHS|MILES_SGLANG_RECORDS"
    r"|SGLANG_ENABLE_DETERMINISTIC_INFERENCE|SGLANG_DISABLE_OUTLINES_DISK_CACHE"
    r"|SGLANG_ENABLE_CP_V2|SGLANG_OPT_FP8_WO_A_GEMM|SGLANG_USE_CUDA_IPC_TRANSPORT)=.*"
    r"|CUDA_DEVICE_MAX_CONNECTIONS=8|CUDA_MODULE_LOADING=AUTO|SGLANG_ENABLE_TORCH_COMPILE=0",
    re.DOTALL,
)
#: Maximum number of file descriptors in a message.
_MOST = 64
#: Bytes of the length in front of the environment.
_LENGTH = 8


class Standby:
    """One interpreter that imports a module and waits for a process object.

    Args:
        target: name of the function that the process runs.
        module: what the interpreter imports.
    """

    def __init__(self, target: str, module: str) -> None:
        self.target, self.executable = target, spawn.get_executable()
        self.connection, theirs = socket.socketpair()
        with theirs:
            program = f"from miles_sglang.standby import serve; serve({theirs.fileno()}, {module!r})"
            command = [*spawn.get_command_line()[:-2], program]  # the interpreter and its flags
            self.pid = util.spawnv_passfds(os.fsencode(self.executable), command, [theirs.fileno()])

    def drop(self) -> None:
        """End the interpreter, which no process took."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class Pool:
    """The interpreters of one engine.

    Args:
        schedulers: how many schedulers the engine starts; with 0 there are no interpreters.
        kinds: function -> module, one interpreter each; default: the schedulers' and the detokenizer's.
    """

    def __init__(self, schedulers: int, kinds: Sequence[Mapping[str, str]] | None = None) -> None:
        if kinds is None:
            kinds = [SCHEDULER] * schedulers + [DETOKENIZER] * bool(schedulers)
        self.waiting = [Standby(target, module) for kind in kinds for target, module in kind.items()]
        self.environment: dict[str, str] = {}

    def install(self) -> None:
        """Let processes run in the interpreters. Call it after the import of SGLang, which changes the environment in all of them alike."""
        usual, self.environment = SpawnProcess._Popen, dict(os.environ)

        def start(process: Any) -> Any:
            standby = self.take(process)
            if standby is None:
                return usual(process)
            try:
                return _Popen(process, standby)
            except ConnectionError:
                log.warning("the interpreter that imported %s for SGLang has ended; a new one starts", standby.target)
                standby.drop()
                return usual(process)

        SpawnProcess._Popen = staticmethod(start)  # type: ignore[method-assign, assignment]

    def take(self, process: Any) -> Standby | None:
        """Return an interpreter for a process; None if there is none. Logs what has changed if it cannot be used."""
        target = getattr(getattr(process, "_target", None), "__name__", "")
        standby = next((one for one in self.waiting if one.target == target), None)
        if standby is None:
            return None
        self.waiting.remove(standby)
        changed = changes(self.environment, os.environ)
        if spawn.get_executable() != standby.executable:
            changed.append("the interpreter")
        if not changed:
            return standby
        log.warning("%s imports SGLang again, because these changed: %s", target, ", ".join(changed))
        standby.drop()
        return None

    def drop(self) -> None:
        """End the interpreters that no process took."""
        for standby in self.waiting:
            standby.drop()
        self.waiting = []


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of the environment variables that differ, sorted, without those that are read late."""
    names = (name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return sorted(name for name in names if not LATE.fullmatch(f"{name}={now.get(name, '')}"))


class _Position:
    """Pickled form of a file descriptor: its position among the descriptors that the interpreter received."""

    def __init__(self, position: int) -> None:
        self.position = position

    def detach(self) -> int:
        return _received[self.position]


#: File descriptors that this interpreter received with its process object.
_received: list[int] = []


class _Popen(popen_fork.Popen):
    """Runs a process object in a waiting interpreter, which is a child of this process: ``join`` and signals work as after ``spawn``."""

    method = "spawn"
    DupFd = _Position

    def __init__(self, process: Any, standby: Standby) -> None:
        self._standby, self._fds = standby, list[int]()
        super().__init__(process)

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process: Any) -> None:
        data = io.BytesIO()
        set_spawning_popen(self)  # type: ignore[arg-type]  # declared for the two classes of the standard library
        try:
            reduction.dump(spawn.get_preparation_data(process._name), data)
            reduction.dump(process, data)
        finally:
            set_spawning_popen(None)
        (sentinel, theirs), (reads, writes) = os.pipe(), os.pipe()
        self.finalizer = util.Finalize(self, _close, (sentinel, writes))
        try:
            # the interpreter keeps `theirs` open, so `sentinel` reports its end
            _send(self._standby.connection, [reads, theirs, _tracker(), *self._fds])
        except OSError:
            self.finalizer()
            raise
        finally:
            _close(theirs, reads)
        self.pid, self.sentinel = self._standby.pid, sentinel
        self._standby.connection.close()
        with open(writes, "wb", closefd=False) as file:
            file.write(data.getbuffer())


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _tracker() -> int:
    """Return the file descriptor of this process's resource tracker, which it starts if needed."""
    descriptor = resource_tracker.getfd()
    assert descriptor is not None
    return descriptor


def _send(connection: socket.socket, descriptors: list[int]) -> None:
    """Send file descriptors and this process's environment."""
    environment = json.dumps(dict(os.environ)).encode()
    socket.send_fds(connection, [len(environment).to_bytes(_LENGTH, "big")], descriptors)
    connection.sendall(environment)


def serve(descriptor: int, module: str) -> None:
    """Import a module, then wait for a process object and run it. Ends if the parent closes its end of the connection first."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive SGLang's main process
    importlib.import_module(module)
    with socket.socket(fileno=descriptor) as connection:
        length, found, *_ = socket.recv_fds(connection, _LENGTH, _MOST)
        if not length:
            sys.exit(0)
        with connection.makefile("rb") as file:
            environment = json.loads(file.read(int.from_bytes(length, "big")))
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    reads, _theirs, tracker, *_received[:] = found
    vars(resource_tracker._resource_tracker)["_fd"] = tracker
    sys.exit(spawn._main(reads, os.dup(reads)))
