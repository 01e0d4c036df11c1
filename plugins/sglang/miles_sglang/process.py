"""SGLang in a process of its own, which this one starts, watches and ends.

Never in the run's own process: a scheduler of SGLang that fails ends its parent. What SGLang prints goes into a file; its
last lines are in the message when the process ends unasked.
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
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from miles_sglang import compiling, frames
from miles_sglang.answers import Answer
from miles_sglang.link import Link, SglangError, SglangLost

log = logging.getLogger(__name__)

#: What SGLang logs while it comes up -> what to tell a person.
_PROGRESS = (
    (re.compile(r"Load weight begin"), "loading weights"),
    (re.compile(r"Load weight end"), "weights loaded"),
    (re.compile(r"KV Cache is allocated"), "cache allocated"),
    (re.compile(r"Capture cuda graph begin"), "capturing CUDA graphs"),
    (re.compile(r"JIT|DeepGEMM.*(warm|compil)", re.IGNORECASE), "compiling kernels"),
)
#: A line of the log that names the cause, beside the last ones; what processes say because another one ended is none, nor is a model that
#: SGLang leaves out because this machine cannot import it.
_CAUSE = re.compile(r"\w*(Error|Exception|out of memory)\b.*", re.IGNORECASE)
_NO_CAUSE = re.compile(
    r"Initialization failed|scheduler is dead|EOFError|BrokenPipe|SIGQUIT|Killing|Ignore import error"
)
#: What SGLang says of a scheduler that was ended from outside, without a word of its own.
_ENDED = re.compile(r"Subprocess \S+ \(pid=\d+\) crashed with exit code -?\d+")
#: Seconds it may take to end when it is asked to.
_END_S = 20.0
#: What the log says -> what helps.
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
        "; a port is taken: give others with --sglang-port and --sglang-nccl-port, or end what holds it",
    ),
    (
        re.compile(r"Model architectures .* not supported|Cannot find model module", re.IGNORECASE),
        "; this SGLang does not know the model: use --engine embedded, or an SGLang that does",
    ),
    (
        re.compile(r"No CUDA GPUs are available|Found no NVIDIA driver|no accelerator", re.IGNORECASE),
        "; it found no GPU: look at CUDA_VISIBLE_DEVICES and nvidia-smi, or use --engine embedded",
    ),
)


class ProcessLink(Link):
    """An ``sglang.Engine`` in a spawned process; ``worker`` is the other side.

    Args:
        arguments: of ``ServerArgs``.
        log_file: where SGLang's output goes; it is appended to.
        startup_timeout: seconds it may take to come up.
        environment: variables of the process beside this one's; None takes a variable away.
        worker: the module that is run there.
    """

    same_host = True

    def __init__(
        self,
        arguments: Mapping[str, Any],
        log_file: Path,
        startup_timeout: float = 900.0,
        environment: Mapping[str, str | None] | None = None,
        worker: str = "miles_sglang.worker",
    ) -> None:
        self.worker = worker
        self.arguments, self.log_file, self.startup_timeout = dict(arguments), log_file, startup_timeout
        changes = environment or {}
        self._environment = {k: v for k, v in os.environ.items() if k not in changes}
        self._environment |= {k: v for k, v in changes.items() if v is not None}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._written: list[bytes] = []
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[tuple[Any, bytes]]] = {}
        self._asking: socket.socket | None = None
        self._up = False
        self._since = 0  # bytes of the log that say nothing about what is going on now
        self._ended: SglangError | None = SglangError("SGLang is not running: the engine was not started")

    async def start(self) -> Mapping[str, Any]:
        return await self._start({})

    async def _start(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        (ours, theirs), (self._asking, asked) = socket.socketpair(), socket.socketpair()
        self._ended, self._written = None, []
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with theirs, asked, self.log_file.open("ab") as output:
            self._since = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self.worker, str(theirs.fileno()), str(asked.fileno()),
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=[theirs.fileno(), asked.fileno()], start_new_session=True, env=self._environment,
            )  # fmt: skip
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=frames.LIMIT)
        ready = self._pending[0] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))
        self._watching = asyncio.get_running_loop().create_task(compiling.watch(self._process.pid))
        self._writer.write(frames.head(self.arguments | dict(changes)))
        started = time.monotonic()
        log.info("SGLang is starting (process %d); its output is in %s", self._process.pid, self.log_file)
        try:
            info: Mapping[str, Any] = await self._come_up(ready, started)
        except BaseException:
            await self.stop()
            raise
        self._up, self._since = True, self.log_file.stat().st_size
        log.info("SGLang %s is up after %.0f s", info.get("version", ""), time.monotonic() - started)
        return info

    async def _come_up(self, ready: asyncio.Future[Any], started: float) -> Any:
        """Wait for the worker's first frame, telling what its log says about where it is."""
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
                    f"SGLang did not come up within {self.startup_timeout:g} s (--sglang-startup-timeout); {self._log_says()}",
                    self._last_lines(),
                )
        try:
            return ready.result()[0]
        except SglangLost:
            raise
        except SglangError as error:
            raise SglangError(f"{error}{_hint([str(error)])}") from error

    def _output(self, position: int) -> bytes:
        """What SGLang has printed from a byte of the log on."""
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
                log.warning("SGLang's process %d did not end within %g s; it is killed", process.pid, _END_S)
        _kill_group(process.pid)
        await process.wait()
        if self._reading is not None:
            await self._reading

    async def restart(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        await self.stop()
        self._up = False
        return await self._start(changes)

    def quantize(self, shape: tuple[int, int], numbers: bytes) -> bytes:
        if self._asking is None or self._ended:
            raise self._gone()
        self._asking.sendall(frames.head({"shape": shape}, len(numbers)) + numbers)
        answer = frames.receive(self._asking)
        if answer is None or "error" in answer[0]:
            raise SglangError(f"SGLang's kernel did not run: {answer[0]['error'] if answer else 'its process ended'}")
        return answer[1]

    async def generate(self, body: Mapping[str, Any]) -> Answer:
        message, payload = await self._exchange("generate", body)
        return Answer.read(message, payload)

    async def call(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b"") -> Any:
        answer = self._exchange(endpoint, body, payload)
        self._write()
        if payload and self._writer is not None:
            self._writer.write(payload)
            with contextlib.suppress(ConnectionError):  # the reader notices as well, and says why
                await self._writer.drain()
        return (await answer)[0]

    def _exchange(
        self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b""
    ) -> asyncio.Future[tuple[Any, bytes]]:
        """The answer to come of a call that is written with others of this turn of the loop."""
        if self._ended or self._writer is None:
            raise self._gone()
        number, loop = next(self._numbers), asyncio.get_running_loop()
        self._pending[number] = answer = loop.create_future()
        if not self._written:
            loop.call_soon(self._write)
        self._written.append(frames.head({"id": number, "endpoint": endpoint, "body": dict(body)}, len(payload)))
        return answer

    def _write(self) -> None:
        written, self._written = self._written, []
        if written and self._writer is not None:
            self._writer.writelines(written)

    def _gone(self) -> SglangError:
        """A new error for each caller, because one that is raised twice holds what was there when."""
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
        """SGLang's process is gone: every call under way, and every later one, fails with the reason."""
        if not self._ended:
            process = self._process
            if process is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), timeout=5)
                _kill_group(process.pid)
            code = process.returncode if process is not None else None
            how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
            self._ended = SglangLost(f"SGLang's process ended ({how}); {self._log_says()}", self._last_lines())
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(self._gone())
                future.exception()  # a call that nobody awaits any more is no second error

    def _last_lines(self, count: int = 12) -> tuple[str, ...]:
        """The end of what SGLang has printed while it came up, or since."""
        try:
            lines = self._output(self._since).decode(errors="replace").splitlines()
        except OSError:
            return ()
        return tuple(line.rstrip() for line in lines if line.strip())[-count:]

    def _log_says(self) -> str:
        """Which log it is, the cause that is found there, and what helps against it."""
        lines = self._last_lines(200)
        said = [line for line in reversed(lines) if not _NO_CAUSE.search(line)]
        causes = (found.group(0) for pattern in (_CAUSE, _ENDED) for line in said if (found := pattern.search(line)))
        cause = next(causes, "")
        return f"its log {self.log_file} ends{f' ({shorten(cause, 240)})' if cause else ''}{_hint(lines)}"


def _hint(lines: Sequence[str]) -> str:
    """What helps against what SGLang said."""
    return next((hint for pattern, hint in _HINTS if any(pattern.search(line) for line in lines)), "")


def _kill_group(pid: int) -> None:
    """End whatever is left of a process and its children, which are in its own session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
