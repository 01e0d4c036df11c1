"""The engine contract on top of SGLang."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from miles_core.data import Encoded
from miles_core.engine import Engine, EnginePart, PauseMode, Request, Response
from miles_core.format import Format, FormatItself, Quantizer
from miles_core.plugin import MilesError, MismatchError, SyncError, WorkerLost
from miles_sglang import buckets, weight_files
from miles_sglang.activations import OwnActivations
from miles_sglang.answers import Answer
from miles_sglang.arrival import Held, Loading, Passing
from miles_sglang.link import Link, SglangError, SglangLost
from miles_sglang.renewal import Renewal
from miles_sglang.settings import Settings
from miles_sglang.weight_names import Seen
from miles_transport import Arrival, Arrivals

log = logging.getLogger(__name__)

#: Formats that a running SGLang takes tensor by tensor, because it keeps them as they are sent. Others it packs into a layout
#: of its own after loading, and 0.5.17 cannot load into that again.
IN_PLACE = frozenset({"", "fp8"})
#: SGLang's names of what gives its memory back.
_TAGS: dict[EnginePart, str] = {"weights": "weights", "cache": "kv_cache"}


@dataclass(eq=False)
class _Call:
    """One request on its way: ``sent`` to SGLang or waiting for ``resume``; ``aborted`` when somebody asked for that."""

    key: int
    rid: str
    done: asyncio.Event = field(default_factory=asyncio.Event)
    stirred: asyncio.Event = field(default_factory=asyncio.Event)
    sent: bool = False
    aborted: bool = False


class SglangEngine(Engine):
    """SGLang behind the engine contract.

    Args:
        link: to SGLang.
        settings: see there.
    """

    def __init__(self, link: Link, settings: Settings) -> None:
        self.link, self.settings = link, settings
        self.capabilities = settings.capabilities
        self._info: Mapping[str, Any] = {}
        self._calls: dict[str, _Call] = {}
        self._numbers = itertools.count()
        self._version, self._usable, self._dead = -1, True, False
        self._paused: PauseMode | None = None
        self._asleep: set[EnginePart] = set()
        self._open = asyncio.Event()
        self._renewal = Renewal(self._spend, self._renew)
        self._arrivals = Arrivals(self._begun)

    # -- life -----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        self._info = await self.link.start()
        draft = self._info.get("speculative_draft_model_path")
        if not self.link.same_host and draft not in (None, self._info.get("model_path")):
            await self.link.stop()
            raise SglangError(
                f"the server drafts with {draft}, and would load every update of the policy's weights into that too, because both "
                "come from one directory; start it without the draft"
            )
        self._paused = None
        self._open.set()

    async def stop(self) -> None:
        await self.link.stop()

    def model_facts(self) -> Mapping[str, object]:
        return self.settings.model_facts

    def hot_update(self, format: str) -> Literal["in_place", "via_disk", "restart"]:
        if format not in IN_PLACE:
            return "restart"
        return "in_place" if self.link.same_host else "via_disk"

    def quantizer(self, format: Format) -> Quantizer | None:
        """The weights that SGLang computes with are the codes it is sent. Activations it rounds with kernels of its own."""
        if not format.quantizes_activations:
            return FormatItself(format)
        return OwnActivations(self.link, format) if format.name == "fp8" else None

    # -- generation -----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        rid = f"{next(self._numbers):016x}"  # of one width: SGLang aborts whatever begins with a rid
        body = self.settings.translator.body(request, rid)
        call = self._calls[rid] = _Call(request.key, rid)
        try:
            answer = None
            while answer is None:
                await self._until_open(call)
                if call.aborted:
                    return Response([], [], "abort")
                self._check_usable()
                answer = await self._asked(call, body)
        finally:
            del self._calls[rid]
            call.done.set()
        return self.settings.translator.response(request, answer, body["sampling_params"]["max_new_tokens"])

    async def _asked(self, call: _Call, body: Mapping[str, Any]) -> Answer | None:
        """SGLang's answer; None where the request was aborted before a scheduler saw it, or lost with SGLang's process."""
        times, call.sent = self._renewal.times, True
        try:
            return await self.link.generate(body)
        except SglangLost as lost:
            call.sent = False
            await self._renewal.after(lost, times)
            return None
        except SglangError:
            if call.aborted:
                return None
            raise

    async def _until_open(self, call: _Call) -> None:
        """Wait while the engine is paused, or until the call is aborted."""
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
                "SGLang has no complete weights, because an update failed part-way; it cannot generate until a complete "
                "update succeeds"
            )

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[np.ndarray]:
        if temperature != 1.0:
            raise MilesError(f"SGLang scores at temperature 1 only, not {temperature:g}")
        await self._renewal.whole()
        self._check_usable()
        limit = self.settings.translator.max_context
        for i, sequence in enumerate(sequences):
            if not 0 < len(sequence) <= limit:
                raise MilesError(f"sequence {i} to score has {len(sequence)} tokens; 1 to {limit} are possible")
        return list(await asyncio.gather(*(self._score(sequence) for sequence in sequences)))

    async def _score(self, sequence: Sequence[int]) -> np.ndarray:
        if len(sequence) == 1:
            return np.zeros(0, np.float32)
        body = {
            "rid": f"{next(self._numbers):016x}",
            "input_ids": [int(t) for t in sequence],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._renewal.asked(lambda: self.link.generate(body))
        return np.array(answer.columns["prompt_log_probs"])

    # -- interruptions --------------------------------------------------------------------------------------------

    async def abort(self, keys: Collection[int] | None = None) -> None:
        wanted = None if keys is None else frozenset(keys)
        for call in [c for c in self._calls.values() if wanted is None or c.key in wanted]:
            call.aborted = True
            call.stirred.set()
            if call.sent:
                await self._ask("abort_request", {"rid": call.rid})

    async def pause(self, mode: PauseMode = "abort") -> None:
        if mode not in ("abort", "retract", "in_place"):
            raise ValueError(f"pause mode {mode!r} is none of abort, retract, in_place")
        await self._renewal.whole()
        self._open.clear()
        if mode == "abort":
            await self._abort_all()
        await self._ask("pause_generation", {"mode": mode})
        self._paused = mode

    async def _abort_all(self) -> None:
        """Until nothing is in flight; asked again because a request may reach the scheduler after the abort did."""
        while calls := list(self._calls.values()):
            await self.abort()
            waiting = [asyncio.ensure_future(c.done.wait()) for c in calls]
            _, late = await asyncio.wait(waiting, timeout=0.5)
            for task in late:
                task.cancel()

    async def resume(self) -> None:
        await self._ask("continue_generation", {})
        self._paused = None
        self._open.set()

    async def sleep(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        """Free the cache; and, where SGLang was started with its memory saver, give the parts' memory back."""
        if any(call.sent for call in self._calls.values()):
            raise RuntimeError("sleep with requests in flight: abort them first")
        if "cache" not in self._asleep:
            await self._ask("flush_cache", {})
        if "sleep" in self.capabilities:
            await self._renewal.asked(lambda: self._move("release_memory_occupation", set(parts) - self._asleep))
            self._asleep |= set(parts)
            if "weights" in parts:
                self._usable = False
                self._arrivals.drop()

    async def wake(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        await self._renewal.asked(lambda: self._move("resume_memory_occupation", set(parts) & self._asleep))
        self._asleep -= set(parts)

    async def _move(self, endpoint: str, parts: Collection[EnginePart]) -> None:
        """Give back, or take again, the memory of these; of a new SGLang all parts are awake."""
        if parts:
            await self.link.call(endpoint, {"tags": sorted(_TAGS[part] for part in parts)})

    async def _ask(self, endpoint: str, body: Mapping[str, Any]) -> Any:
        """``Link.call`` of this SGLang, or of the one that replaces it."""
        return await self._renewal.asked(lambda: self.link.call(endpoint, body))

    def _spend(self, lost: SglangLost) -> None:
        """Count one more start of SGLang; WorkerLost where there may be none, or where the whole engine is made anew."""
        if self.resend is None:
            raise WorkerLost("", lost.cause, lost.lines) from lost
        self.settings.restarts.spend(WorkerLost("sglang", lost.cause, lost.lines))

    async def _renew(self) -> None:
        """SGLang anew with the learner's weights, paused where it was."""
        assert self.resend is not None  # a run that restarts SGLang itself has its learner here
        was_open, paused = self._open.is_set(), self._paused
        self._open.clear()
        try:
            await self._start_anew()
            await self.resend()
            if paused is not None:
                await self.link.call("pause_generation", {"mode": paused})
        finally:
            self._paused = paused
            if was_open:
                self._open.set()

    async def _start_anew(self) -> None:
        """SGLang without weights, and not paused; where it is started with the weights, ``update_weights`` starts it."""
        self._usable, self._paused, self._dead, self._asleep = False, None, False, set()
        if self._how() != "restart":
            self._info = await self.link.restart({})

    # -- weights --------------------------------------------------------------------------------------------------

    async def update_weights(self, units: Iterable[Encoded], version: int) -> None:
        self._quiet("update_weights")
        await self._renewal.whole()
        self._arrivals.forget()
        async with self._closed(), self._alive(version):
            await self._load(units, version)

    async def receive(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        if not message.get("staged"):
            self._quiet("receive")
        await self._renewal.whole()
        async with self._alive(version):
            await self._arrivals.receive(message, version, last)

    def _quiet(self, call: str) -> None:
        if self._paused is None and any(call.sent for call in self._calls.values()):
            raise RuntimeError(f"{call} with requests in flight: pause or abort them first")

    def _begun(self, version: int, staged: bool) -> Arrival:
        """A version that comes in buckets."""
        self._usable = self._usable and staged
        if staged or self._how() != "in_place":
            return Held(lambda units: self._load(units, version))
        return Passing(self._loading(), Seen(self.settings.names), self.settings.bucket_bytes, self._serve, version)

    async def _load(self, units: Iterable[Encoded], version: int) -> None:
        """Give SGLang a whole update."""
        self._usable = False
        update = {"in_place": self._update_in_place, "via_disk": self._update_from_files, "restart": self._restart}
        await update[self._how()](self.settings.names.complete(units), version)
        self._serve(version)

    def _loading(self) -> Loading:
        return Loading(self._send, self.settings.device)

    def _serve(self, version: int) -> None:
        self._version, self._usable = version, True

    @asynccontextmanager
    async def _alive(self, version: int) -> AsyncIterator[None]:
        """SGLang is there. Where it dies meanwhile, the update has failed, and the next one finds it started anew."""
        try:
            if self._dead:
                await self._start_anew()
            yield
        except SglangLost as lost:
            self._dead = True
            if self._renewal.here:
                raise
            self._spend(lost)
            raise SyncError(f"SGLang died over version {version} of the weights: {lost.cause}") from lost

    def _how(self) -> Literal["in_place", "via_disk", "restart"]:
        format = self.settings.codec.format
        return self.hot_update(format.name if format else "")

    @asynccontextmanager
    async def _closed(self) -> AsyncIterator[None]:
        """New requests wait while weights change, also where nobody paused."""
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
            for bucket in buckets.divide(named, self.settings.bucket_bytes):
                await loading.add(bucket)
            await loading.finish(version)  # the whole stream has passed the check of its names
        finally:
            await loading.wait()

    async def _send(self, flat: buckets.Flat, version: int | None = None) -> None:
        """One bucket; the last one of an update says which ``version`` is complete."""
        body, payload = flat.message(int(self._info.get("tp_size") or 1))
        body["disable_draft_model"] = self.settings.separate_draft
        body["flush_cache"] = version is not None and self._paused != "in_place"
        body["weight_version"] = None if version is None else str(version)
        answer = await self.link.call("update_weights_from_tensor", body, payload)
        self._check(answer)
        self._check_coverage(answer.get("missed", ""))

    async def _update_from_files(self, units: Iterator[Encoded], version: int) -> None:
        with weight_files.written(units, self.settings.weights_dir, version) as directory:
            body = {
                "model_path": str(directory),
                "weight_version": str(version),
                "flush_cache": self._paused != "in_place",
            }
            self._check(await self.link.call("update_weights_from_disk", body))

    async def _restart(self, units: Iterator[Encoded], version: int) -> None:
        """SGLang anew, from a checkpoint of this version."""
        with weight_files.written(units, self.settings.weights_dir, version, self.settings.described) as directory:
            log.info(
                "SGLang is started anew with version %d of the weights: it packs this format when it loads", version
            )
            changes = {"model_path": str(directory), "load_format": "auto", "weight_version": str(version)}
            self._info = await self.link.restart(changes)

    def _check_coverage(self, missed: str) -> None:
        """Stop, or warn, where the first update did not reach all parameters. missed: which, in SGLang's words; empty for none.

        Raises:
            MismatchError: SGLang would compute with numbers that are nobody's weights.
        """
        if not missed:
            return
        message = (
            f"the weight update did not reach {missed}: it keeps the numbers that SGLang started with, so SGLang computes "
            "another function than the trainer. The checkpoint has no tensor that SGLang loads there"
        )
        if not self.settings.allow_mismatch:
            raise MismatchError(f"{message}; use another engine, or train all the same with --allow-mismatch")
        log.warning("%s (--allow-mismatch was given)", message)

    @staticmethod
    def _check(answer: Mapping[str, Any]) -> None:
        if not answer["success"]:
            raise MilesError(
                f"SGLang did not take the weights: {answer['message']}. They may be half written; only a complete update makes "
                "the engine usable again"
            )
