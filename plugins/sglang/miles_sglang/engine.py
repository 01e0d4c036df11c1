"""The engine contract on top of SGLang."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from miles_core.data import Encoded
from miles_core.engine import EnginePart, PauseMode, Request, Response
from miles_core.plugin import MilesError
from miles_formats import Format, Quantizer
from miles_sglang import buckets, weight_files
from miles_sglang.activations import make_quantizer
from miles_sglang.adapters import SglangAdapter
from miles_sglang.answers import Answer
from miles_sglang.arrival import BufferedArrival, Loading, StreamedArrival
from miles_sglang.formats import loads_in_place
from miles_sglang.link import Link
from miles_sglang.settings import Settings
from miles_sglang.tensor_messages import MESSAGE_BYTES
from miles_workers import ProgramEngine, next_number
from miles_workers.servers import ADAPTER
from miles_workers.transport import Arrival, Arrivals, NameCheck

log = logging.getLogger(__name__)

#: Parts of the engine -> SGLang's memory saver tags.
_TAGS: dict[EnginePart, str] = {"weights": "weights", "cache": "kv_cache"}


class SglangEngine(ProgramEngine):
    """SGLang behind the engine contract.

    Args:
        link: connection to SGLang.
        settings: everything else that the engine needs.
    """

    def __init__(self, link: Link, settings: Settings) -> None:
        super().__init__("SGLang", settings.translator.max_context, settings.restarts, settings.allow_mismatch)
        self.link, self.settings, self._served = link, settings, settings.served
        self.capabilities = settings.capabilities
        self._info: Mapping[str, Any] = {}
        self._usable = True
        self._asleep = set[EnginePart]()
        self._spans = False  # SGLang runs on several machines, which cannot read this machine's memory
        self._arrivals = Arrivals(self._begin_arrival)
        directory = None if settings.over_http else settings.weights_dir
        self._adapter = SglangAdapter(lambda *arguments: self.link.call(*arguments), directory)

    # -- life -----------------------------------------------------------------------------------------------------

    def span(self, machines: int, index: int, address: str) -> None:
        self._spans = True
        self.link.span(machines, index, address)

    async def start(self) -> None:
        self._info = await self.link.start()
        self._paused = None
        self._calls.open()

    async def _restart_program(self) -> None:
        """See ``ProgramEngine``. If SGLang loads weights at start, the next update starts it instead."""
        self._asleep = set()
        self._adapter.forget()
        if self._update_method() != "restart":
            self._info = await self.link.restart(self._served.arguments)

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
        translator, number = self.settings.translator, next_number()
        body = translator.body(request, _rid(number))

        async def ask() -> Answer:
            return self._adapter.label(await self.link.generate(self._adapter.select(body)))

        if (answer := await self._answer(request.key, number, ask)) is None:
            return Response([], [], "abort")
        return translator.response(request, answer, body["sampling_params"]["max_new_tokens"])

    async def _request_scores(
        self, sequence: Sequence[int], media: tuple[Any, ...], each: bool
    ) -> Mapping[str, np.ndarray | None]:
        body = self._adapter.select(self.settings.translator.score_body(sequence, media, _rid(next_number())))
        answers = await self.link.generate_each(body) if each else {"": await self.link.generate(body)}
        return {name: found.columns.get("prompt_log_probs") for name, found in answers.items()}

    # -- interruptions --------------------------------------------------------------------------------------------

    async def _cancel(self, number: int) -> None:
        await self._ask("abort_request", {"rid": _rid(number)})

    async def pause(self, mode: PauseMode = "abort") -> None:
        if mode not in ("abort", "retract"):
            raise MilesError(
                f"SGLang cannot pause with {mode}: tokens that it computes during the pause would be recorded with the version of the new "
                "weights; use abort or retract"
            )
        await super().pause(mode)

    async def _pause_program(self, mode: PauseMode) -> None:
        await self.link.call("pause_generation", {"mode": mode})

    async def _resume_program(self) -> None:
        await self.link.call("continue_generation", {})

    async def sleep(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        """Flush the cache and, if SGLang was started with its memory saver, release the memory of ``parts``."""
        if self._calls.any_sent:
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
        return await self._retry(lambda: self.link.call(endpoint, body))

    # -- weights --------------------------------------------------------------------------------------------------

    async def update_weights(self, units: Iterable[Encoded], version: int) -> None:
        self._check_idle("update_weights")
        await self._renewal.wait_until_renewed()
        self._arrivals.forget()
        async with self._calls.hold(), self._running(version):
            await self._load(units, version)

    async def receive(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        if not message.get("staged"):
            self._check_idle("receive")
        await self._renewal.wait_until_renewed()
        async with self._running(version):
            if ADAPTER in message:
                await self._adapter.load(message, version)
                self._serve(version)
            else:
                await self._arrivals.receive(message, version, last)

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

    def _update_method(self) -> Literal["in_place", "via_disk", "restart"]:
        format = self._served.codec.format
        return self.hot_update(format.name if format else "")

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
        self._check_coverage(answer.get("missed", ""))

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


def _rid(number: int) -> str:
    """Return the id of a request; of fixed width, because SGLang aborts every request whose id starts with the given one."""
    return f"{number:016x}"


def check_accepted(answer: Mapping[str, Any]) -> None:
    """Check that SGLang accepted an update or one of its buckets.

    Args:
        answer: SGLang's answer with ``success`` and ``message``.

    Raises:
        MilesError: SGLang rejected it; its weights may be partly overwritten.
    """
    if not answer["success"]:
        raise MilesError(
            f"SGLang rejected the weights: {answer['message']}. They may be partly overwritten; only a complete update makes the "
            "engine usable again"
        )
