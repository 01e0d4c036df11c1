"""The engine contract on top of vLLM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.data import Encoded
from miles_core.engine import Engine, EnginePart, PauseMode, Request, Response, check_scored
from miles_core.plugin import MilesError, MismatchError, SyncError
from miles_vllm import host
from miles_vllm.calls import Call, Calls
from miles_vllm.requests import SCORING, Translator
from miles_vllm.sending import Sender
from miles_workers import EngineLost, LocalProcess, ProcessEnded, Renewal, Restarts, last_lines

log = logging.getLogger(__name__)

#: Seconds in which vLLM may stop by itself.
_END_S = 20.0


@dataclass(frozen=True)
class Settings:
    """Everything that the engine needs.

    Attributes:
        translator: converts requests and responses.
        arguments: arguments of vLLM's ``AsyncEngineArgs``.
        environment: environment variables of vLLM's processes.
        names, tied, layers: tensors of an update, see ``WeightNames``.
        model_facts: facts from ``config.json`` of the served model.
        capabilities: capabilities of the manifest that these settings have.
        directory, name: run directory and name of vLLM's process, which name the file of its output.
        startup_timeout: seconds to wait until vLLM is ready.
        bucket_bytes: maximum bytes of a bucket of weights.
        device: device in whose memory weights travel, ``cuda`` or ``cpu``.
        allow_mismatch: continue if an update does not reach all of vLLM's parameters.
        restarts: counts how often vLLM may be restarted after it died.
    """

    translator: Translator
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    names: Collection[str]
    tied: bool
    layers: int | None
    model_facts: Mapping[str, object]
    capabilities: frozenset[str]
    directory: Path
    name: str = "vllm"
    startup_timeout: float = 900.0
    bucket_bytes: int = 512 << 20
    device: str = "cpu"
    allow_mismatch: bool = False
    restarts: Restarts = field(default_factory=lambda: Restarts(0))


class VllmEngine(Engine):
    """vLLM behind the engine contract.

    Args:
        settings: everything that the engine needs.
        start: starts the process; a test passes one without vLLM.
    """

    def __init__(self, settings: Settings, start: Callable[[str, str, str], LocalProcess] = LocalProcess) -> None:
        self.settings, self._start_process = settings, start
        self.capabilities = settings.capabilities
        self._process: LocalProcess | None = None
        self._calls = Calls(lambda number: self._ask("abort", number))
        self._renewal = Renewal(self, "vLLM", settings.restarts, self._renew)
        self._sender = Sender(settings.bucket_bytes, settings.device)
        self._version, self._usable, self._paused, self._lost, self._checked = -1, False, False, False, False

    # -- life -----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    def model_facts(self) -> Mapping[str, object]:
        return self.settings.model_facts

    async def start(self) -> None:
        await self._launch()
        self._calls.open()

    async def _launch(self) -> None:
        """Start a process with vLLM. Its weights are usable if they are those of the start, and the checkpoint stores them in BF16."""
        given = self.settings
        self._usable, self._paused = self._version < 0 and given.arguments.get("load_format") != "dummy", False
        self._process = self._start_process(str(given.directory), given.name, "info")
        try:
            made = self.call("make", host.NAME, dict(given.arguments), dict(given.environment))
            await asyncio.wait_for(made, given.startup_timeout)
            await self.call("expect", [*given.names], given.tied, given.layers)
        except TimeoutError:
            await self.stop()
            late = f"vLLM was not ready within {given.startup_timeout:g} s (--vllm-startup-timeout)"
            raise EngineLost(late, self._last_lines()) from None
        except host.StartError as error:
            await self.stop()
            raise EngineLost(str(error), self._last_lines()) from error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            try:
                await asyncio.wait_for(process.call("close"), _END_S)
            except Exception as error:  # it is stuck, has died, or did not start
                log.debug("vLLM's process %d did not stop by itself: %s", process.pid, error)
            await process.kill()
        self._sender.close()

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of ``Host``. Raises EngineLost if the process has ended."""
        if self._process is None:
            raise MilesError("vLLM is not running: the engine was not started, or was stopped")
        try:
            return await self._process.call(method, *args)
        except ProcessEnded as ended:
            raise EngineLost(f"vLLM died: {ended}", self._last_lines()) from ended

    def _last_lines(self) -> tuple[str, ...]:
        return last_lines(self.settings.directory, self.settings.name)

    async def _ask(self, method: str, *args: Any) -> Any:
        """``call``, repeated after a restart if vLLM dies during the call."""
        return await self._renewal.retry(lambda: self.call(method, *args))

    async def _renew(self) -> None:
        """Restart vLLM, send it the learner's weights, and pause it again if it was paused."""
        assert self.resend is not None  # otherwise ``spend`` has raised
        paused = self._paused
        async with self._calls.hold():
            await self.stop()
            await self._launch()
            await self.resend()
            if paused:
                await self.call("pause")
            self._paused = paused

    # -- generation -----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        parameters = self.settings.translator.parameters(request)
        with self._calls.add(request.key) as call:
            while True:
                await self._calls.wait(call)
                if call.aborted:
                    return Response([], [], "abort")
                self._check_usable()
                version = self._version
                answer = await self._send_request(call, request, parameters)
                if answer is not None:
                    return self.settings.translator.response(request, answer, version)

    async def _send_request(self, call: Call, request: Request, parameters: Mapping[str, Any]) -> Any:
        """Send a request. Returns None if it was lost because vLLM died, and vLLM has been restarted."""
        times, call.sent = self._renewal.times, True
        try:
            return await self.call("generate", call.number, [*request.tokens], parameters)
        except EngineLost as lost:
            call.sent = False
            await self._renewal.renew_after(lost, times)
            return None

    def _check_usable(self) -> None:
        if not self._usable:
            raise MilesError(
                "vLLM's weights are incomplete (an update failed part-way, or none has arrived); it generates after a complete update"
            )

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, media: Sequence[Any] = ()
    ) -> list[np.ndarray]:
        if temperature != 1.0:
            raise MilesError(f"vLLM can score only at temperature 1, not {temperature:g}")
        await self._renewal.wait_until_renewed()
        self._check_usable()
        check_scored(sequences, self.settings.translator.max_context)
        return list(await asyncio.gather(*map(self._score, sequences)))

    async def _score(self, sequence: Sequence[int]) -> np.ndarray:
        if len(sequence) == 1:
            return np.zeros(0, np.float32)
        with self._calls.add(-1) as call:  # no request has this key
            tokens = [int(token) for token in sequence]
            found: np.ndarray = (await self._ask("generate", call.number, tokens, SCORING))["prompt_log_probs"]
            return found

    # -- interruptions --------------------------------------------------------------------------------------------

    async def abort(self, keys: Collection[int] | None = None) -> None:
        await self._calls.abort(keys)

    async def pause(self, mode: PauseMode = "abort") -> None:
        if mode != "abort":
            raise MilesError(
                f"vLLM cannot pause with {mode}: this plugin does not record which weights sampled each token; use abort"
            )
        await self._renewal.wait_until_renewed()
        self._calls.close()
        await self._calls.abort()
        await self._ask("pause")
        self._paused = True

    async def resume(self) -> None:
        await self._ask("resume")
        self._paused = False
        self._calls.open()

    async def sleep(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        if self._calls.any_sent:
            raise RuntimeError("sleep with requests in flight: abort them first")
        if "sleep" in self.capabilities:
            await self._ask("sleep", [*parts])
            self._usable = self._usable and "weights" not in parts

    async def wake(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        await self._ask("wake", [*parts])

    # -- weights --------------------------------------------------------------------------------------------------

    async def update_weights(self, units: Iterable[Encoded], version: int) -> None:
        async with self._updating("update_weights", version):
            await self._sender.send(units, lambda message, last: self._deliver(message, version, last))

    async def receive(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        async with self._updating("receive", version, staged=bool(message.get("staged"))):
            await self._deliver(message, version, last)

    @asynccontextmanager
    async def _updating(self, call: str, version: int, staged: bool = False) -> AsyncIterator[None]:
        """Hold new requests while weights change. If vLLM dies inside the context, the update fails with SyncError, and the next one
        begins with a restart."""
        if self._calls.any_sent and not self._paused and not staged:
            raise RuntimeError(f"{call} with requests in flight: pause or abort them first")
        await self._renewal.wait_until_renewed()
        async with self._calls.hold():
            try:
                if self._lost:
                    await self._launch()
                    self._lost = False
                yield
            except EngineLost as lost:
                if self._renewal.here:
                    raise
                await self.stop()
                self._usable, self._lost = False, True
                self._renewal.spend(lost)
                raise SyncError(f"vLLM died while it loaded version {version} of the weights: {lost.cause}") from lost

    async def _deliver(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        """Send one message to vLLM's workers."""
        answer = await self.call("receive", message, version, last)
        if "error" in answer:
            self._usable = self._usable and bool(message.get("staged"))
            raise (SyncError if answer["corrupt"] else MilesError)(answer["error"])
        self._usable = self._usable and not answer["loading"]
        if answer["complete"]:
            self._check_coverage(answer["missed"])
            self._version, self._usable = version, True

    def _check_coverage(self, missed: Sequence[str]) -> None:
        """Check that the first update wrote all parameters.

        Raises:
            MismatchError: vLLM would compute with parameters that have random values.
        """
        if not missed or self._checked:
            return
        more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
        message = (
            f"the weight update did not reach {missed[0]}{more}, which keeps its initial values, so vLLM computes another function than the "
            "trainer"
        )
        if not self.settings.allow_mismatch:
            raise MismatchError(f"{message}; use another engine, or train anyway with --allow-mismatch")
        self._checked = True
        log.warning("%s (--allow-mismatch was given)", message)
