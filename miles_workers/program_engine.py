"""The engine contract on top of a program that runs in processes of its own or on servers, such as SGLang and vLLM."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import numpy as np

from miles_core.contracts.engine import Engine, PauseMode, check_scored
from miles_core.errors import MilesError, MismatchError, SyncError
from miles_workers.inflight import Calls
from miles_workers.renewal import EngineLost, Renewal
from miles_workers.restarts import Restarts
from miles_workers.servers.errors import ServerError, ServerLeft

log = logging.getLogger(__name__)

Found = TypeVar("Found")


class ProgramEngine(Engine):
    """Requests in flight, restarts, scores and interruptions. A subclass passes them on to its program.

    Args:
        program: name of the program in errors.
        max_context: maximum tokens of prompt and response.
        restarts: counts how often the program may be restarted after it died.
        allow_mismatch: continue if an update does not reach all parameters.
    """

    def __init__(self, program: str, max_context: int, restarts: Restarts, allow_mismatch: bool) -> None:
        self._program, self._max_context, self._allow_mismatch = program, max_context, allow_mismatch
        self._calls = Calls(self._cancel)
        self._renewal = Renewal(self, program, restarts, self._renew)
        self._version, self._usable, self._lost, self._warned = -1, False, False, False
        self._paused: PauseMode | None = None

    @abstractmethod
    async def _cancel(self, number: int) -> None:
        """End the request with this number."""

    @abstractmethod
    async def _pause_program(self, mode: PauseMode) -> None:
        """Pause the program."""

    @abstractmethod
    async def _resume_program(self) -> None:
        """Continue after ``_pause_program``."""

    @abstractmethod
    async def _restart_program(self) -> None:
        """Restart the program, without weights and not paused."""

    @abstractmethod
    async def _request_scores(
        self, sequence: Sequence[int], media: tuple[Any, ...], each: bool
    ) -> Mapping[str, np.ndarray | None]:
        """Request log-probabilities of the tokens of a sequence after the first one: server -> [tokens - 1]; None for a single token.

        Args:
            sequence, media: as for ``score``.
            each: request them from every server; otherwise from one, with the name "".
        """

    # -- life -----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    async def _retry(self, ask: Callable[[], Awaitable[Found]]) -> Found:
        """Return the result of ``ask``, which is called again after a restart if the program dies during the call, and if a server leaves."""
        while True:
            with suppress(ServerLeft):
                return await self._renewal.retry(ask)

    async def _start_again(self) -> None:
        self._usable, self._paused, self._lost = False, None, False
        await self._restart_program()

    async def _renew(self) -> None:
        """Restart the program, send it the learner's weights, and restore the pause mode."""
        assert self.resend is not None  # otherwise ``Renewal.spend`` has raised
        paused = self._paused
        async with self._calls.hold():
            try:
                await self._start_again()
                await self.resend()
                if paused is not None:
                    await self._pause_program(paused)
            finally:
                self._paused = paused

    # -- requests -------------------------------------------------------------------------------------------------

    async def _answer(self, key: int, number: int, ask: Callable[[], Awaitable[Found]]) -> Found | None:
        """Return the answer to a request, which ``ask`` sends, again if it was lost with the program or its server; None if it was aborted
        before the program had it. number: of ``next_number``."""
        with self._calls.add(key, number) as call:
            while True:
                await self._calls.wait(call)
                if call.aborted:
                    return None
                self._check_usable()
                times, call.sent = self._renewal.times, True
                try:
                    return await ask()
                except EngineLost as lost:
                    call.sent = False
                    await self._renewal.renew_after(lost, times)
                except ServerError as error:
                    call.sent = call.sent and not isinstance(error, ServerLeft)
                    if call.sent and not call.aborted:
                        raise

    def _check_usable(self) -> None:
        if not self._usable:
            raise MilesError(
                f"{self._program}'s weights are incomplete (an update failed part-way, or none has arrived); it generates after a complete "
                "update"
            )

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, media: Sequence[Any] = ()
    ) -> list[np.ndarray]:
        return (await self._score(sequences, temperature, media, each=False))[""]

    async def score_each(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, media: Sequence[Any] = ()
    ) -> Mapping[str, list[np.ndarray]]:
        return await self._score(sequences, temperature, media, each=True)

    async def _score(
        self, sequences: Sequence[Sequence[int]], temperature: float, media: Sequence[Any], each: bool
    ) -> dict[str, list[np.ndarray]]:
        """Return the scores by server, without servers that left before they had scored all sequences."""
        if temperature != 1.0:
            raise MilesError(f"{self._program} can score only at temperature 1, not {temperature:g}")
        await self._renewal.wait_until_renewed()
        self._check_usable()
        check_scored(sequences, self._max_context)
        pairs = zip(sequences, media or [()] * len(sequences), strict=True)
        found = await asyncio.gather(*(self._score_one(*pair, each) for pair in pairs))
        names = [name for name in found[0] if all(name in scores for scores in found)] if found else [""]
        return {name: [scores[name] for scores in found] for name in names}

    async def _score_one(self, sequence: Sequence[int], media: tuple[Any, ...], each: bool) -> dict[str, np.ndarray]:
        found = await self._retry(lambda: self._request_scores(sequence, media, each))
        return {name: np.zeros(0, np.float32) if s is None else np.array(s) for name, s in found.items()}

    # -- interruptions --------------------------------------------------------------------------------------------

    async def abort(self, keys: Collection[int] | None = None) -> None:
        await self._calls.abort(None if keys is None else frozenset(keys))

    async def pause(self, mode: PauseMode = "abort") -> None:
        await self._renewal.wait_until_renewed()
        self._calls.close()
        if mode == "abort":
            await self._calls.abort()
        await self._retry(lambda: self._pause_program(mode))
        self._paused = mode

    async def resume(self) -> None:
        await self._retry(self._resume_program)
        self._paused = None
        self._calls.open()

    # -- weights --------------------------------------------------------------------------------------------------

    def _check_idle(self, call: str) -> None:
        if self._paused is None and self._calls.any_sent:
            raise RuntimeError(f"{call} with requests in flight: pause or abort them first")

    @asynccontextmanager
    async def _running(self, version: int) -> AsyncIterator[None]:
        """Ensure that the program runs. If it dies inside the context, the update fails with SyncError; the next update restarts it."""
        try:
            if self._lost:
                await self._start_again()
            yield
        except EngineLost as lost:
            self._lost = True
            if self._renewal.here:
                raise
            self._renewal.spend(lost)
            raise SyncError(
                f"{self._program} died while it loaded version {version} of the weights: {lost.cause}"
            ) from lost

    def _serve(self, version: int) -> None:
        """Record that the program has all weights of a version."""
        self._version, self._usable = version, True

    def _check_coverage(self, missed: str) -> None:
        """Check that the first update wrote all parameters.

        Args:
            missed: description of the parameters that the update did not write; empty if there are none.

        Raises:
            MismatchError: the program would compute with parameters that still have their random initial values.
        """
        if not missed or self._warned:
            return
        message = (
            f"the weight update did not reach {missed}, which keeps its initial values, so {self._program} computes another function than "
            f"the trainer. The checkpoint has no tensor that {self._program} loads there"
        )
        if not self._allow_mismatch:
            raise MismatchError(f"{message}; use another engine, or train anyway with --allow-mismatch")
        self._warned = True
        log.warning("%s (--allow-mismatch was given)", message)
