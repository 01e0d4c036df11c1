"""The engine contract on top of vLLM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from miles_core.data import Encoded
from miles_core.engine import Engine, EnginePart, PauseMode, Request, Response, check_scored
from miles_core.plugin import MilesError, MismatchError, SyncError
from miles_vllm.adapters import VllmAdapter
from miles_vllm.calls import Call, Calls
from miles_vllm.link import Link
from miles_vllm.requests import SCORING, Translator
from miles_vllm.sending import Sender
from miles_workers import EngineLost, Renewal, Restarts
from miles_workers.servers import ADAPTER, ServerError, ServerLeft

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Everything that the engine needs in addition to the connection to vLLM.

    Attributes:
        translator: converts requests and responses.
        model_facts: facts from ``config.json`` of the served model.
        capabilities: capabilities of the manifest that these settings have.
        has_weights: vLLM starts with the checkpoint's weights.
        bucket_bytes: maximum bytes of a bucket of weights.
        sends_in: where weights travel, see ``Sender``.
        allow_mismatch: continue if an update does not reach all of vLLM's parameters.
        restarts: counts how often vLLM may be restarted after it died.
    """

    translator: Translator
    model_facts: Mapping[str, object]
    capabilities: frozenset[str]
    has_weights: bool = True
    bucket_bytes: int = 512 << 20
    sends_in: str = "cpu"
    allow_mismatch: bool = False
    restarts: Restarts = field(default_factory=lambda: Restarts(0))


class VllmEngine(Engine):
    """vLLM behind the engine contract.

    Args:
        link: connection to vLLM.
        settings: everything else that the engine needs.
    """

    def __init__(self, link: Link, settings: Settings) -> None:
        self.link, self.settings, self._translator = link, settings, settings.translator
        self.capabilities = settings.capabilities
        self._calls = Calls(lambda number: self._ask("abort", number))
        self._renewal = Renewal(self, "vLLM", settings.restarts, self._renew)
        self._sender = Sender(settings.bucket_bytes, settings.sends_in)
        self._adapter = VllmAdapter(lambda *arguments: self.link.call(*arguments))
        self._version, self._usable, self._paused, self._lost, self._checked = -1, False, False, False, False

    # -- life -----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    def model_facts(self) -> Mapping[str, object]:
        return self.settings.model_facts

    async def start(self) -> None:
        self._usable, self._paused = self._version < 0 and self.settings.has_weights, False
        context = await self.link.start()
        if context is not None:
            self._translator = replace(self._translator, max_context=min(context, self._translator.max_context))
        self._calls.open()

    async def _start_again(self) -> None:
        self._usable, self._paused = False, False
        self._adapter.forget()
        await self.link.restart()

    async def stop(self) -> None:
        if self.link.news is not None:  # the servers outlive the run
            await self._adapter.leave()
        await self.link.stop()
        self._sender.close()

    async def _ask(self, method: str, *args: Any) -> Any:
        """``Link.call``, repeated after a restart if vLLM dies during the call, and on another server if one leaves."""
        while True:
            with suppress(ServerLeft):
                return await self._renewal.retry(lambda: self.link.call(method, *args))

    async def _renew(self) -> None:
        """Restart vLLM, send it the learner's weights, and pause it again if it was paused."""
        assert self.resend is not None  # otherwise ``spend`` has raised
        paused = self._paused
        async with self._calls.hold():
            await self._start_again()
            await self.resend()
            if paused:
                await self.link.call("pause")
            self._paused = paused

    # -- generation -----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        parameters = self._translator.parameters(request)
        with self._calls.add(request.key) as call:
            while True:
                await self._calls.wait(call)
                if call.aborted:
                    return Response([], [], "abort")
                self._check_usable()
                version = self._version if self._adapter.version < 0 else self._adapter.version
                answer = await self._send_request(call, request, parameters)
                if answer is not None:
                    return self._translator.response(request, answer, version)

    async def _send_request(self, call: Call, request: Request, parameters: Mapping[str, Any]) -> Any:
        """Send a request. Returns None if it was lost with its server, or with vLLM, which has been restarted."""
        times, call.sent = self._renewal.times, True
        tokens = np.array(request.tokens, np.int32)  # pickle visits each element of a list
        try:
            return await self.link.call("generate", call.number, tokens, parameters, self._adapter.name)
        except ServerLeft:
            call.sent = False
            return None
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
        async def ask(*args: Any) -> Mapping[str, Any]:
            return {"": await self.link.call(*args)}

        return (await self._score(ask, sequences, temperature))[""]

    async def score_each(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, media: Sequence[Any] = ()
    ) -> Mapping[str, list[np.ndarray]]:
        return await self._score(self.link.call_each, sequences, temperature)

    async def _score(
        self, ask: Callable[..., Awaitable[Mapping[str, Any]]], sequences: Sequence[Sequence[int]], temperature: float
    ) -> dict[str, list[np.ndarray]]:
        """Return the scores by server, without servers that left before they had scored all sequences."""
        if temperature != 1.0:
            raise MilesError(f"vLLM can score only at temperature 1, not {temperature:g}")
        await self._renewal.wait_until_renewed()
        self._check_usable()
        check_scored(sequences, self._translator.max_context)
        each = await asyncio.gather(*(self._score_one(ask, sequence) for sequence in sequences))
        names = [name for name in each[0] if all(name in found for found in each)] if each else [""]
        return {name: [found[name] for found in each] for name in names}

    async def _score_one(
        self, ask: Callable[..., Awaitable[Mapping[str, Any]]], sequence: Sequence[int]
    ) -> dict[str, np.ndarray]:
        tokens, none = np.array(sequence, np.int32), np.zeros(0, np.float32)  # of a single token
        with self._calls.add(-1) as call:  # no request has this key
            while True:
                with suppress(ServerLeft):
                    answers = await self._renewal.retry(
                        lambda: ask("generate", call.number, tokens, SCORING, self._adapter.name)
                    )
                    scores = {name: found["prompt_log_probs"] for name, found in answers.items()}
                    return {name: none if found is None else found for name, found in scores.items()}

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
        if "sleep" in self.capabilities:
            await self._ask("wake", [*parts])

    # -- weights --------------------------------------------------------------------------------------------------

    async def update_weights(self, units: Iterable[Encoded], version: int) -> None:
        async with self._updating("update_weights", version):
            await self._sender.send(units, lambda message, last: self._deliver(message, version, last))

    async def receive(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        async with self._updating("receive", version, staged=bool(message.get("staged"))):
            if ADAPTER in message:
                await self._adapter.load(message, version)
                self._version, self._usable = version, True
            else:
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
                    await self._start_again()
                    self._lost = False
                yield
            except EngineLost as lost:
                if self._renewal.here:
                    raise
                self._usable, self._lost = False, True
                self._renewal.spend(lost)
                raise SyncError(f"vLLM died while it loaded version {version} of the weights: {lost.cause}") from lost

    async def _deliver(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        """Send one message to vLLM's workers."""
        try:
            answer = await self.link.call("receive", message, version, last)
        except ServerError:
            self._usable = False
            raise
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
