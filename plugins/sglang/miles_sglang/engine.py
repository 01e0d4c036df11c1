"""The engine contract on top of SGLang."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, cast

import numpy as np

from miles_core.data import Encoded
from miles_core.engine import Engine, EnginePart, PauseMode, Request, Response, check_scored
from miles_core.plugin import MilesError, SyncError
from miles_formats import Format, Quantizer
from miles_sglang import buckets, weight_files
from miles_sglang.activations import make_quantizer
from miles_sglang.adapters import SglangAdapter
from miles_sglang.answers import Answer
from miles_sglang.arrival import BufferedArrival, Loading, StreamedArrival
from miles_sglang.formats import loads_in_place
from miles_sglang.inflight import Call
from miles_sglang.link import Link
from miles_sglang.settings import Settings
from miles_sglang.tensor_messages import MESSAGE_BYTES
from miles_sglang.update_result import check_accepted, check_coverage
from miles_workers import EngineLost, Renewal
from miles_workers.servers import ADAPTER, ServerError, ServerLeft
from miles_workers.transport import Arrival, Arrivals, NameCheck

log = logging.getLogger(__name__)

#: Sends the body of ``generate``, and returns server -> answer.
_Ask = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Answer]]]
#: Parts of the engine -> SGLang's memory saver tags.
_TAGS: dict[EnginePart, str] = {"weights": "weights", "cache": "kv_cache"}


class SglangEngine(Engine):
    """SGLang behind the engine contract.

    Args:
        link: connection to SGLang.
        settings: everything else that the engine needs.
    """

    def __init__(self, link: Link, settings: Settings) -> None:
        self.link, self.settings, self._served = link, settings, settings.served
        self.capabilities = settings.capabilities
        self._info: Mapping[str, Any] = {}
        self._calls: dict[str, Call] = {}
        self._numbers = itertools.count()
        self._version, self._usable, self._dead = -1, True, False
        self._paused, self._asleep = cast("PauseMode | None", None), set[EnginePart]()
        self._spans = False  # SGLang runs on several machines, which cannot read this machine's memory
        self._open = asyncio.Event()
        self._renewal = Renewal(self, "SGLang", settings.restarts, self._renew)
        self._arrivals = Arrivals(self._begin_arrival)
        directory = None if settings.over_http else settings.weights_dir
        self._adapter = SglangAdapter(lambda *arguments: self.link.call(*arguments), directory)

    # -- life -----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    def span(self, machines: int, index: int, address: str) -> None:
        self._spans = True
        self.link.span(machines, index, address)

    async def start(self) -> None:
        self._info = await self.link.start()
        self._paused = None
        self._open.set()

    async def stop(self) -> None:
        if not self.link.same_host:
            await self._adapter.leave()
        await self.link.stop()

    def model_facts(self) -> Mapping[str, object]:
        return self.settings.model_facts

    def hot_update(self, format: str) -> Literal["in_place", "via_disk", "restart"]:
        ours = self.link.same_host
        in_place = ours or self.settings.over_http
        return "restart" if not loads_in_place(format, ours) else "in_place" if in_place else "via_disk"

    def quantizer(self, format: Format) -> Quantizer | None:
        return make_quantizer(self.link, format)

    async def rebuild(self, precision: str) -> None:
        """Restart SGLang for another precision: it creates its layers when it starts."""
        self._check_idle("rebuild")
        await self._renewal.wait_until_renewed()
        self._served = self.settings.served_in(precision)
        self._arrivals.drop()
        await self._start_again()

    # -- generation -----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        # fixed width: SGLang aborts every request whose id starts with the given one
        rid = f"{next(self._numbers):016x}"
        body = self.settings.translator.body(request, rid)
        call = self._calls[rid] = Call(request.key, rid)
        try:
            answer = None
            while answer is None:
                await self._until_open(call)
                if call.aborted:
                    return Response([], [], "abort")
                self._check_usable()
                answer = await self._send_request(call, body)
        finally:
            del self._calls[rid]
            call.done.set()
        return self.settings.translator.response(request, answer, body["sampling_params"]["max_new_tokens"])

    async def _send_request(self, call: Call, body: Mapping[str, Any]) -> Answer | None:
        """Send a request. Returns None if it was aborted before a scheduler saw it, or lost with SGLang's process or server."""
        times, call.sent = self._renewal.times, True
        try:
            return self._adapter.label(await self.link.generate(self._adapter.select(body)))
        except EngineLost as lost:
            call.sent = False
            await self._renewal.renew_after(lost, times)
            return None
        except ServerError as error:
            call.sent = call.sent and not isinstance(error, ServerLeft)
            if call.aborted or not call.sent:
                return None
            raise

    async def _until_open(self, call: Call) -> None:
        """Wait until the engine accepts requests or the call is aborted."""
        while not self._open.is_set() and not call.aborted:
            opened, stirred = (asyncio.ensure_future(e.wait()) for e in (self._open, call.stirred))
            try:
                await asyncio.wait([opened, stirred], return_when=asyncio.FIRST_COMPLETED)
            finally:
                opened.cancel()
                stirred.cancel()

    def _check_usable(self) -> None:
        if not self._usable:
            raise MilesError(
                "SGLang's weights are incomplete (an update failed part-way); it generates again after a complete update"
            )

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, media: Sequence[Any] = ()
    ) -> list[np.ndarray]:
        async def ask(body: Mapping[str, Any]) -> Mapping[str, Answer]:
            return {"": await self.link.generate(body)}

        return (await self._score(ask, sequences, temperature, media))[""]

    async def score_each(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, media: Sequence[Any] = ()
    ) -> Mapping[str, list[np.ndarray]]:
        return await self._score(self.link.generate_each, sequences, temperature, media)

    async def _score(
        self, ask: _Ask, sequences: Sequence[Sequence[int]], temperature: float, media: Sequence[Any]
    ) -> dict[str, list[np.ndarray]]:
        """Return the scores by server, without servers that left before they had scored all sequences."""
        if temperature != 1.0:
            raise MilesError(f"SGLang can score only at temperature 1, not {temperature:g}")
        await self._renewal.wait_until_renewed()
        self._check_usable()
        check_scored(sequences, self.settings.translator.max_context)
        pairs = zip(sequences, media or [()] * len(sequences), strict=True)
        each = await asyncio.gather(*(self._score_one(ask, *pair) for pair in pairs))
        names = [name for name in each[0] if all(name in found for found in each)] if each else [""]
        return {name: [found[name] for found in each] for name in names}

    async def _score_one(self, ask: _Ask, sequence: Sequence[int], media: tuple[Any, ...]) -> dict[str, np.ndarray]:
        body = self.settings.translator.score_body(sequence, media, f"{next(self._numbers):016x}")
        none = np.zeros(0, np.float32)  # of a single token
        while True:
            with suppress(ServerLeft):
                answers = await self._renewal.retry(lambda: ask(self._adapter.select(body)))
                return {name: np.array(found.columns.get("prompt_log_probs", none)) for name, found in answers.items()}

    # -- interruptions --------------------------------------------------------------------------------------------

    async def abort(self, keys: Collection[int] | None = None) -> None:
        wanted = None if keys is None else frozenset(keys)
        await self._abort_calls([c for c in self._calls.values() if wanted is None or c.key in wanted])

    async def _abort_calls(self, calls: Iterable[Call]) -> None:
        for call in calls:
            call.aborted = True
            call.stirred.set()
            if call.sent:
                await self._ask("abort_request", {"rid": call.rid})

    async def pause(self, mode: PauseMode = "abort") -> None:
        if mode not in ("abort", "retract"):
            raise MilesError(
                f"SGLang cannot pause with {mode}: tokens that it computes during the pause would be recorded with the version of the new "
                "weights; use abort or retract"
            )
        await self._renewal.wait_until_renewed()
        self._open.clear()
        if mode == "abort":
            await self._abort_all()
        await self._ask("pause_generation", {"mode": mode})
        self._paused = mode

    async def _abort_all(self) -> None:
        """Abort until no request of this moment is in flight; later ones wait for ``resume``. Repeats because a request may reach the
        scheduler after the abort."""
        calls = list(self._calls.values())
        while calls := [call for call in calls if not call.done.is_set()]:
            await self._abort_calls(calls)
            waiting = [asyncio.ensure_future(c.done.wait()) for c in calls]
            for task in (await asyncio.wait(waiting, timeout=0.5))[1]:
                task.cancel()

    async def resume(self) -> None:
        await self._ask("continue_generation", {})
        self._paused = None
        self._open.set()

    async def sleep(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        """Flush the cache and, if SGLang was started with its memory saver, release the memory of ``parts``."""
        if any(call.sent for call in self._calls.values()):
            raise RuntimeError("sleep with requests in flight: abort them first")
        if "cache" not in self._asleep:
            await self._ask("flush_cache", {})
        if "sleep" in self.capabilities:
            await self._renewal.retry(lambda: self._move_memory("release_memory_occupation", set(parts) - self._asleep))
            self._asleep |= set(parts)
            if "weights" in parts:
                self._usable = False
                self._arrivals.drop()

    async def wake(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        await self._renewal.retry(lambda: self._move_memory("resume_memory_occupation", set(parts) & self._asleep))
        self._asleep -= set(parts)

    async def _move_memory(self, endpoint: str, parts: Collection[EnginePart]) -> None:
        """Release or reallocate the memory of ``parts``. After a restart of SGLang all parts are awake."""
        if parts:
            await self.link.call(endpoint, {"tags": sorted(_TAGS[part] for part in parts)})

    async def _ask(self, endpoint: str, body: Mapping[str, Any]) -> Any:
        """``Link.call``, repeated after a restart if SGLang dies during the call."""
        return await self._renewal.retry(lambda: self.link.call(endpoint, body))

    async def _renew(self) -> None:
        """Restart SGLang, send it the learner's weights, and restore the pause mode."""
        assert self.resend is not None  # if the run itself restarts SGLang, the learner is in this process
        was_open, paused = self._open.is_set(), self._paused
        self._open.clear()
        try:
            await self._start_again()
            await self.resend()
            if paused is not None:
                await self.link.call("pause_generation", {"mode": paused})
        finally:
            self._paused = paused
            if was_open:
                self._open.set()

    async def _start_again(self) -> None:
        """Restart SGLang without weights and not paused. If SGLang loads weights at start, the next update starts it instead."""
        self._usable, self._paused, self._dead, self._asleep = False, None, False, set()
        self._adapter.forget()
        if self._update_method() != "restart":
            self._info = await self.link.restart(self._served.arguments)

    # -- weights --------------------------------------------------------------------------------------------------

    async def update_weights(self, units: Iterable[Encoded], version: int) -> None:
        self._check_idle("update_weights")
        await self._renewal.wait_until_renewed()
        self._arrivals.forget()
        async with self._hold_requests(), self._process_running(version):
            await self._load(units, version)

    async def receive(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        if not message.get("staged"):
            self._check_idle("receive")
        await self._renewal.wait_until_renewed()
        async with self._process_running(version):
            if ADAPTER in message:
                await self._adapter.load(message, version)
                self._serve(version)
            else:
                await self._arrivals.receive(message, version, last)

    def _check_idle(self, call: str) -> None:
        if self._paused is None and any(call.sent for call in self._calls.values()):
            raise RuntimeError(f"{call} with requests in flight: pause or abort them first")

    def _begin_arrival(self, version: int, staged: bool) -> Arrival:
        """Return the receiver of a version that arrives in buckets."""
        self._usable = self._usable and staged
        if staged or self._update_method() != "in_place":
            return BufferedArrival(lambda units: self._load(units, version))
        self.link.begin_update()
        return StreamedArrival(
            self._loading(), NameCheck(self._served.names), self._bucket_bytes(), self._serve, version
        )

    def _bucket_bytes(self) -> int:
        most = self.settings.bucket_bytes
        return most if self.link.same_host else min(most, MESSAGE_BYTES // int(self._info.get("tp_size") or 1))

    async def _load(self, units: Iterable[Encoded], version: int) -> None:
        """Load a complete update into SGLang."""
        self._usable = False
        self.link.begin_update()
        update = {"in_place": self._update_in_place, "via_disk": self._update_from_files, "restart": self._restart}
        await update[self._update_method()](self._served.names.check_all(units), version)
        self._serve(version)

    def _loading(self) -> Loading:
        return Loading(self._send, "" if self._spans else self.settings.device)

    def _serve(self, version: int) -> None:
        self._version, self._usable = version, True

    @asynccontextmanager
    async def _process_running(self, version: int) -> AsyncIterator[None]:
        """Ensure that SGLang runs. If it dies inside the context, the update fails with SyncError; the next update restarts it."""
        try:
            if self._dead:
                await self._start_again()
            yield
        except EngineLost as lost:
            self._dead = True
            if self._renewal.here:
                raise
            self._renewal.spend(lost)
            raise SyncError(f"SGLang died while it loaded version {version} of the weights: {lost.cause}") from lost

    def _update_method(self) -> Literal["in_place", "via_disk", "restart"]:
        format = self._served.codec.format
        return self.hot_update(format.name if format else "")

    @asynccontextmanager
    async def _hold_requests(self) -> AsyncIterator[None]:
        """Hold new requests while weights change, also if the engine is not paused."""
        was_open = self._open.is_set()
        self._open.clear()
        try:
            yield
        finally:
            if was_open:
                self._open.set()

    async def _update_in_place(self, units: Iterator[Encoded], version: int) -> None:
        named = ((name, tensor) for unit in units for name, tensor in unit.parts.items())
        loading = self._loading()
        try:
            for bucket in buckets.split_into_buckets(named, self._bucket_bytes()):
                await loading.add(bucket)
            await loading.finish(version)  # all names of the stream have been checked
        finally:
            await loading.wait()

    async def _send(self, flat: buckets.Flat, version: int | None = None) -> None:
        """Send one bucket. version: the version that this bucket completes; None for all buckets but the last."""
        if self._spans or not self.link.same_host:
            flat = flat.to_host()
        body, payload = flat.message(int(self._info.get("tp_size") or 1))
        body["copies"] = self._spans
        body["disable_draft_model"] = self.settings.separate_draft
        body["flush_cache"] = version is not None
        body["weight_version"] = None if version is None else str(version)
        answer = await self.link.call("update_weights_from_tensor", body, payload)
        check_accepted(answer)
        check_coverage(answer.get("missed", ""), self.settings.allow_mismatch)

    async def _update_from_files(self, units: Iterator[Encoded], version: int) -> None:
        with weight_files.write_update(units, self.settings.weights_dir, version) as directory:
            body = {"model_path": str(directory), "weight_version": str(version), "flush_cache": True}
            check_accepted(await self.link.call("update_weights_from_disk", body))

    async def _restart(self, units: Iterator[Encoded], version: int) -> None:
        """Restart SGLang from a checkpoint of this version."""
        with weight_files.write_update(units, self.settings.weights_dir, version, self._served.described) as directory:
            log.info("restarting SGLang with version %d of the weights: it repacks this format during loading", version)
            changes = {"model_path": str(directory), "load_format": "auto", "weight_version": str(version)}
            self._info = await self.link.restart({**self._served.arguments, **changes})
