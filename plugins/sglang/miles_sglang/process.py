"""Starts, watches and stops SGLang in a separate process.

SGLang never runs in the run's own process, because a failing scheduler kills its parent. SGLang's output goes to a log file. If the
process ends unexpectedly, the error message contains the last lines of the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from miles_sglang import compiling, frames, inside, record_files
from miles_sglang.answers import Answer
from miles_sglang.images import PackedBody
from miles_sglang.link import Link, SglangError, SglangLost
from miles_sglang.record_files import RecordReader
from miles_sglang.spawn import WORKER, Spawned, spawn
from miles_sglang.standby import VARIABLE as STANDBY

log = logging.getLogger(__name__)

#: Pattern in SGLang's log during startup -> progress message.
_PROGRESS = (
    (re.compile(r"Load weight begin"), "loading weights"),
    (re.compile(r"Load weight end"), "weights loaded"),
    (re.compile(r"KV Cache is allocated"), "cache allocated"),
    (re.compile(r"Capture cuda graph begin"), "capturing CUDA graphs"),
    (re.compile(r"JIT|DeepGEMM.*(warm|compil)", re.IGNORECASE), "compiling kernels"),
)
#: A log line that names the cause of a failure. Excluded are errors that follow from the end of another process, and models that SGLang
#: skips because their import fails.
_CAUSE = re.compile(r"\w*(Error|Exception|out of memory)\b.*", re.IGNORECASE)
_NO_CAUSE = re.compile(
    r"Initialization failed|scheduler is dead|EOFError|BrokenPipe|SIGQUIT|Killing|Ignore import error"
)
#: SGLang's message about a scheduler that was killed and therefore logged nothing itself.
_ENDED = re.compile(r"Subprocess \S+ \(pid=\d+\) crashed with exit code -?\d+")
#: Seconds to wait for a clean shutdown before killing the process.
_END_S = 20.0
#: Pattern in the log -> advice, appended to the error message.
_HINTS = (
    (
        re.compile(r"(increase|raise) --mem-fraction-static", re.IGNORECASE),
        "; weights and cache do not fit into its share of the GPU: raise --sglang-mem-fraction-static",
    ),
    (
        re.compile(r"out of memory|OutOfMemory", re.IGNORECASE),
        "; it ran out of memory: lower --sglang-mem-fraction-static or --max-running-requests",
    ),
    (
        re.compile(r"address already in use|EADDRINUSE|port \d+ is (already )?(in use|not available)", re.IGNORECASE),
        "; a port is already in use: choose others with --sglang-port and --sglang-nccl-port, or end the process that uses it",
    ),
    (
        re.compile(r"Model architectures .* not supported|Cannot find model module", re.IGNORECASE),
        "; this SGLang does not support the model: use --engine embedded, or another SGLang version",
    ),
    (
        re.compile(r"No CUDA GPUs are available|Found no NVIDIA driver|no accelerator", re.IGNORECASE),
        "; it found no GPU: check CUDA_VISIBLE_DEVICES and nvidia-smi, or use --engine embedded",
    ),
)


class ProcessLink(Link):
    """Connection to an ``sglang.Engine`` in a child process, which runs the module ``worker``.

    Args:
        arguments: arguments of ``ServerArgs``.
        log_file: file to which SGLang's output is appended.
        startup_timeout: seconds to wait until SGLang is ready.
        environment: changes to this process's environment variables; None removes a variable.
        worker: the module that the child process runs.
        early: processes that were started before, by log file; one with the same worker and changes is used.
    """

    same_host = True

    def __init__(
        self,
        arguments: Mapping[str, Any],
        log_file: Path,
        startup_timeout: float = 900.0,
        environment: Mapping[str, str | None] | None = None,
        worker: str = WORKER,
        early: dict[Path, Spawned] | None = None,
    ) -> None:
        self.worker, self._early = worker, {} if early is None else early
        self.arguments, self.log_file, self.startup_timeout = dict(arguments), log_file, startup_timeout
        self.changes = dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._written: list[bytes] = []
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[tuple[Any, bytes]]] = {}
        self._asking: socket.socket | None = None
        self._records: RecordReader | None = None
        self._generating = 0
        self._sending = asyncio.Lock()
        self._up = False
        self._since = 0  # offset in the log of the current phase: startup, then serving
        self._ended: SglangError | None = SglangError("SGLang is not running: the engine was not started")

    def span(self, machines: int, index: int, address: str) -> None:
        if (spawned := self._early.pop(self.log_file, None)) is not None:  # it has another environment
            spawned.drop()
        self.arguments |= {"nnodes": machines, "node_rank": index, "dist_init_addr": address}
        if index:
            self.log_file = self.log_file.with_name(f"{self.log_file.stem}-part-{index}.log")
        self.changes["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"  # Engine() returns on all machines
        self.changes[STANDBY] = "0"  # only SGLang knows which of the schedulers run on this machine

    async def start(self) -> Mapping[str, Any]:
        return await self._start({})

    async def _start(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        self._ended, self._written = None, []
        spawned = self._take_early() or spawn(self.worker, self.changes, self.log_file)
        self._process, self._asking, self._since = await spawned.starting, spawned.probes, spawned.since
        reader, self._writer = await asyncio.open_connection(sock=spawned.calls, limit=frames.LIMIT)
        ready = self._pending[0] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))
        self._watching = asyncio.get_running_loop().create_task(compiling.watch(self._process.pid))
        self._records = self._make_reader()
        shared = {record_files.VARIABLE: str(self._records.directory)} if self._records else {}
        self._writer.write(frames.head(self.arguments | dict(changes) | shared))
        started = time.monotonic()
        log.info("SGLang is starting (process %d); its output is in %s", self._process.pid, self.log_file)
        try:
            info: Mapping[str, Any] = await self._wait_until_ready(ready, started)
        except BaseException:
            await self.stop()
            raise
        self._up, self._since = True, self.log_file.stat().st_size
        log.info("SGLang %s is up after %.0f s", info.get("version", ""), time.monotonic() - started)
        return info

    def _make_reader(self) -> RecordReader | None:
        """Return the reader of routed experts; None if schedulers may lack this plugin's code or this machine's memory, or none is available."""
        given = self.arguments
        apart = given.get("enable_dp_attention") or given.get("nnodes", 1) > 1
        if apart or not given.get("enable_return_routed_experts"):
            return None
        try:
            return RecordReader(self.changes.get(inside.VARIABLE) or inside.WIDE)
        except OSError as error:
            log.warning("%s: %s", record_files.IN_ANSWERS, error)
            return None

    def _take_early(self) -> Spawned | None:
        """Return the process that was started early for this link, if its worker and environment are those of the link."""
        spawned = self._early.pop(self.log_file, None)
        if spawned is None or (spawned.worker, spawned.changes) == (self.worker, self.changes):
            return spawned
        spawned.drop()
        return None

    async def _wait_until_ready(self, ready: asyncio.Future[Any], started: float) -> Any:
        """Wait for the worker's first frame and log SGLang's startup progress."""
        said, position = "", self._since
        while not ready.done():
            await asyncio.wait([ready], timeout=1.0)
            new = self._output(position)
            position += len(new)
            text = new.decode(errors="replace")
            for pattern, meaning in _PROGRESS:
                if meaning != said and pattern.search(text):
                    said = meaning
                    log.info("SGLang: %s (%.0f s)", meaning, time.monotonic() - started)
            if not ready.done() and time.monotonic() - started > self.startup_timeout:
                raise SglangLost(
                    f"SGLang was not ready within {self.startup_timeout:g} s (--sglang-startup-timeout); {self._describe_log()}",
                    self._last_lines(),
                )
        try:
            return ready.result()[0]
        except SglangLost:
            raise
        except SglangError as error:
            raise SglangError(f"{error}{_hint([str(error)])}") from error

    def _output(self, position: int) -> bytes:
        """Return the log from a byte offset on."""
        with self.log_file.open("rb") as file:
            file.seek(position)
            return file.read()

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._ended = self._ended or SglangError("SGLang is not running: the engine was stopped")
        if self._watching is not None:
            self._watching.cancel()
        if self._asking is not None:
            self._asking.close()
        if self._writer is not None:
            self._writer.close()  # the worker shuts SGLang down at the end of its input
        if self._up:
            try:
                await asyncio.wait_for(process.wait(), _END_S)
            except TimeoutError:
                log.warning("SGLang's process %d did not end within %g s; killing it", process.pid, _END_S)
        _kill_group(process.pid)
        await process.wait()
        if self._reading is not None:
            await self._reading
        if self._records is not None:
            self._records.close()
            self._records = None

    async def restart(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        await self.stop()
        self._up = False
        return await self._start(changes)

    def quantize(self, format: str, shape: tuple[int, int], numbers: bytes) -> bytes:
        if self._asking is None or self._ended:
            raise self._loss_error()
        self._asking.sendall(frames.head({"format": format, "shape": shape}, len(numbers)) + numbers)
        answer = frames.receive(self._asking)
        if answer is None or "error" in answer[0]:
            raise SglangError(f"SGLang's kernel did not run: {answer[0]['error'] if answer else 'its process ended'}")
        return answer[1]

    async def generate(self, body: Mapping[str, Any]) -> Answer:
        self._generating += 1
        try:
            answer = Answer.read(*await self._ask_for(body))
            if self._records is None or "routes" not in answer.columns:
                return answer
            return Answer(answer.meta, {**answer.columns, "routes": self._records.read(answer.columns["routes"])})
        finally:
            self._generating -= 1
            if self._records is not None and not self._generating:
                self._records.clear()

    async def _ask_for(self, body: Mapping[str, Any]) -> tuple[Any, bytes]:
        """Send a request. Those with images are processed and written one at a time, so that the pixels of few are in memory."""
        if "image_data" not in body:
            return await self._exchange("generate", body)
        async with self._sending:
            packed = PackedBody.of(body)
            answer = self._exchange("generate", packed.body, packed.size)
            await self._send(packed.payload)
        return await answer

    async def call(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b"") -> Any:
        answer = self._exchange(endpoint, body, len(payload))
        await self._send([payload] if payload else ())
        return (await answer)[0]

    async def _send(self, payload: Sequence[bytes | memoryview]) -> None:
        """Write the queued calls, and the bytes that belong to the last of them."""
        self._write()
        if payload and self._writer is not None:
            self._writer.writelines(payload)
            with contextlib.suppress(ConnectionError):  # the reader fails too, and reports the cause
                await self._writer.drain()

    def _exchange(self, endpoint: str, body: Mapping[str, Any], size: int = 0) -> asyncio.Future[tuple[Any, bytes]]:
        """Queue a call and return a future of its answer. Calls of one event loop iteration are written together."""
        if self._ended or self._writer is None:
            raise self._loss_error()
        number, loop = next(self._numbers), asyncio.get_running_loop()
        self._pending[number] = answer = loop.create_future()
        if not self._written:
            loop.call_soon(self._write)
        self._written.append(frames.head({"id": number, "endpoint": endpoint, "body": dict(body)}, size))
        return answer

    def _write(self) -> None:
        written, self._written = self._written, []
        if written and self._writer is not None:
            self._writer.writelines(written)

    def _loss_error(self) -> SglangError:
        """Return a new error for each caller, because an exception that is raised twice accumulates tracebacks."""
        ended = self._ended
        assert ended is not None
        return SglangLost(ended.cause, ended.lines) if isinstance(ended, SglangLost) else SglangError(str(ended))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (frame := await frames.read(reader)) is not None:
            message, payload = frame
            future = self._pending.pop(message["id"], None)
            if future is None or future.done():
                continue
            if "error" in message:
                future.set_exception(SglangError(message["error"]))
            else:
                future.set_result((message["result"], payload))
        await self._fail_pending()

    async def _fail_pending(self) -> None:
        """Fail all pending and later calls with the reason why SGLang's process ended."""
        if not self._ended:
            process = self._process
            if process is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), timeout=5)
                _kill_group(process.pid)
            code = process.returncode if process is not None else None
            how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
            self._ended = SglangLost(f"SGLang's process ended ({how}); {self._describe_log()}", self._last_lines())
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(self._loss_error())
                future.exception()  # mark as retrieved: a call without a waiter is not a second error

    def _last_lines(self, count: int = 12) -> tuple[str, ...]:
        """Return the last ``count`` non-empty log lines of the current phase."""
        try:
            lines = self._output(self._since).decode(errors="replace").splitlines()
        except OSError:
            return ()
        return tuple(line.rstrip() for line in lines if line.strip())[-count:]

    def _describe_log(self) -> str:
        """Return the path of the log, the cause found in it, and advice, for an error message."""
        lines = self._last_lines(200)
        said = [line for line in reversed(lines) if not _NO_CAUSE.search(line)]
        causes = (found.group(0) for pattern in (_CAUSE, _ENDED) for line in said if (found := pattern.search(line)))
        cause = next(causes, "")
        return f"its log {self.log_file} ends{f' ({shorten(cause, 240)})' if cause else ''}{_hint(lines)}"


def _hint(lines: Sequence[str]) -> str:
    """Return the advice for the first known pattern in the lines; empty if none matches."""
    return next((hint for pattern, hint in _HINTS if any(pattern.search(line) for line in lines)), "")


def _kill_group(pid: int) -> None:
    """Kill the remaining processes of a process group; SGLang's process is started as the leader of a new session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
