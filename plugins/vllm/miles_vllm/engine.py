"""The engine contract on top of vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from miles_core.data import Encoded
from miles_core.engine import EnginePart, PauseMode, Request, Response
from miles_core.plugin import MilesError, SyncError
from miles_vllm.adapters import VllmAdapter
from miles_vllm.link import Link
from miles_vllm.requests import SCORING, Translator
from miles_vllm.sending import Sender
from miles_workers import ProgramEngine, Restarts, next_number
from miles_workers.servers import ADAPTER, ServerError


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


class VllmEngine(ProgramEngine):
    """vLLM behind the engine contract.

    Args:
        link: connection to vLLM.
        settings: everything else that the engine needs.
    """

    def __init__(self, link: Link, settings: Settings) -> None:
        super().__init__("vLLM", settings.translator.max_context, settings.restarts, settings.allow_mismatch)
        self.link, self.settings, self._translator = link, settings, settings.translator
        self.capabilities = settings.capabilities
        self._sender = Sender(settings.bucket_bytes, settings.sends_in)
        self._adapter = VllmAdapter(lambda *arguments: self.link.call(*arguments))

    # -- life -----------------------------------------------------------------------------------------------------

    def model_facts(self) -> Mapping[str, object]:
        return self.settings.model_facts

    async def start(self) -> None:
        self._usable, self._paused = self._version < 0 and self.settings.has_weights, None
        context = await self.link.start()
        if context is not None:
            self._max_context = min(context, self._max_context)
            self._translator = replace(self._translator, max_context=self._max_context)
        self._calls.open()

    async def _restart_program(self) -> None:
        self._adapter.forget()
        await self.link.restart()

    async def stop(self) -> None:
        if self.link.news is not None:  # the servers outlive the run
            await self._adapter.leave()
        await self.link.stop()
        self._sender.close()

    async def _ask(self, method: str, *args: Any) -> Any:
        return await self._retry(lambda: self.link.call(method, *args))

    # -- generation -----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        parameters, number = self._translator.parameters(request), next_number()

        async def ask() -> tuple[Mapping[str, Any], int]:
            version = self._version if self._adapter.version < 0 else self._adapter.version
            return await self._generate(number, request.tokens, parameters), version

        answer = await self._answer(request.key, number, ask)
        return Response([], [], "abort") if answer is None else self._translator.response(request, *answer)

    async def _generate(self, number: int, tokens: Sequence[int], parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        ids = np.array(tokens, np.int32)  # pickle visits each element of a list
        answer: Mapping[str, Any] = await self.link.call("generate", number, ids, parameters, self._adapter.name)
        return answer

    async def _request_scores(
        self, sequence: Sequence[int], media: tuple[Any, ...], each: bool
    ) -> Mapping[str, np.ndarray | None]:
        number = next_number()
        if each:
            ids = np.array(sequence, np.int32)
            answers = await self.link.call_each("generate", number, ids, SCORING, self._adapter.name)
        else:
            answers = {"": await self._generate(number, sequence, SCORING)}
        return {name: found["prompt_log_probs"] for name, found in answers.items()}

    # -- interruptions --------------------------------------------------------------------------------------------

    async def _cancel(self, number: int) -> None:
        await self._ask("abort", number)

    async def pause(self, mode: PauseMode = "abort") -> None:
        if mode != "abort":
            raise MilesError(
                f"vLLM cannot pause with {mode}: this plugin does not record which weights sampled each token; use abort"
            )
        await super().pause(mode)

    async def _pause_program(self, mode: PauseMode) -> None:
        await self.link.call("pause")

    async def _resume_program(self) -> None:
        await self.link.call("resume")

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
                self._serve(version)
            else:
                await self._deliver(message, version, last)

    @asynccontextmanager
    async def _updating(self, call: str, version: int, staged: bool = False) -> AsyncIterator[None]:
        """Hold new requests while weights change."""
        if not staged:
            self._check_idle(call)
        await self._renewal.wait_until_renewed()
        async with self._calls.hold(), self._running(version):
            yield

    async def _deliver(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        """Send one message to vLLM's workers."""
        self._usable = self._usable and bool(message.get("staged"))
        try:
            answer = await self.link.call("receive", message, version, last)
        except ServerError:
            self._usable = False
            raise
        if "error" in answer:
            raise (SyncError if answer["corrupt"] else MilesError)(answer["error"])
        self._usable = self._usable and not answer["loading"]
        if answer["complete"]:
            missed: Sequence[str] = answer["missed"]
            self._check_coverage(f"{missed[0]}{f' and {len(missed) - 1} more' if missed[1:] else ''}" if missed else "")
            self._serve(version)
