"""The transport ``buckets``: shared storage within a process, else the fastest path that both sides support."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from miles_core.data import Encoded
from miles_core.engine import CopyTransport, Engine, SyncReport, Transport
from miles_core.plugin import Run, SyncError
from miles_core.trainer import ALONE, World
from miles_formats import Stored
from miles_zero_copy.config import ZeroCopyConfig
from miles_zero_copy.paths import paths
from miles_zero_copy.sender import Sender
from miles_zero_copy.slots import Receive

log = logging.getLogger(__name__)


def make_transport(run: Run, engine: Engine, world: World = ALONE) -> Transport:
    """Provider of ``--transport buckets``."""
    options: ZeroCopyConfig = run.config.plugin("zero_copy")
    here = run.config.run.runtime == "inline" and "shared_storage" in engine.capabilities
    if here and not options.async_sync:
        return SharedStorage(engine) if run.config.run.schedule == "sync" else CopyTransport(engine)
    run_options = run.config.run
    return BucketTransport(
        engine,
        world,
        world.bucket_bytes(run_options.sync_bucket_size),
        options.async_sync,
        run_options.colocate,
        "shared_storage" in engine.capabilities,
    )


class SharedStorage(Transport):
    """Engine and trainer share the storage of unquantised weights."""

    shares = True

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def send(self, units: Iterator[Encoded], version: int) -> SyncReport:
        started, tensors = time.perf_counter(), 0

        def counted() -> Iterator[Encoded]:
            nonlocal tensors
            for unit in units:
                tensors += len(unit.parts)
                yield unit

        copied = await self.engine.share_weights(counted(), version)
        return SyncReport(version, copied, tensors, time.perf_counter() - started)


class BucketTransport(Transport):
    """Sends flat buckets from this rank to engines in other processes.

    Args:
        engine: the receiver, possibly a pool of several engines that read the same buckets.
        world: this rank's position among those that send; each sends the units of its trainer, and the engine waits for all of them.
        bucket_size: maximum bytes of each of the two buckets.
        staging: send each version while the engine serves the previous one, and switch when it is pushed.
        colocated: trainer and engine take turns on a device, so neither keeps device memory for the next version.
        stay: the engine may read weights in place.
    """

    def __init__(
        self,
        engine: Engine,
        world: World,
        bucket_size: int,
        staging: bool = False,
        colocated: bool = False,
        stay: bool = False,
    ) -> None:
        self.engine, self.world, self.bucket_size = engine, world, bucket_size
        self.staging, self.colocated, self.stay = staging, colocated, stay and not colocated
        self._staged: SyncReport | None = None
        self._sender: Sender | None = None
        self._limit, self._logged, self._name = 0.0, "", ""
        self._full: dict[str, str] = {}

    def reserve(self, name: str, stored: Mapping[str, Stored]) -> dict[str, Tensor] | None:
        return None if self._sender is None else self._sender.reserve(name, stored)

    async def send(self, units: Iterator[Encoded], version: int) -> SyncReport:
        staged, self._staged = self._staged, None
        if staged is None or staged.version != version:
            report = await self._transfer(units, version)
        else:
            started = time.perf_counter()
            try:
                await self.engine.receive({"switch": True}, version, True)
            except BaseException:
                self.close()  # some engines may already read the new version
                raise
            seconds = time.perf_counter() - started
            report = replace(staged, metrics={**staged.metrics, "switch_seconds": seconds})
        if self._sender is not None:
            self._sender.in_force()
        return report

    async def stage(self, units: Iterator[Encoded], version: int) -> None:
        if self.staging:
            self._staged = await self._transfer(units, version, {"staged": True})

    def unstage(self) -> None:
        self._staged = None

    async def _transfer(
        self, units: Iterator[Encoded], version: int, how: Mapping[str, Any] | None = None
    ) -> SyncReport:
        """Send all of ``units``. how: additional fields of every message."""

        async def receive(message: Mapping[str, Any], last: bool) -> None:
            once = {"once": True} if self.colocated else {}
            await self.engine.receive({**message, **once, **(how or {})}, version, last)

        try:
            if self._sender is None:
                first = list(itertools.islice(units, 1))
                device = next(iter(first[0].parts.values())).device if first else torch.device("cpu")
                self._sender = await self._choose_sender(device, receive, version)
                units = itertools.chain(first, units)
            started = time.perf_counter()
            sent = await self._sender.send(units, receive, version)
        except BaseException as error:
            if self._sender is not None and self._sender.full:
                self._full[self._name] = str(error)
            self.close()  # the next push chooses a path again
            self._limit = 0.0
            for _ in (
                units if isinstance(error, Exception) else ()
            ):  # other ranks may wait in the iterator's collectives
                pass
            raise
        seconds = time.perf_counter() - started
        if self.colocated and self._sender.path.lends:
            self.close()
        metrics = {"travelled": sent.travelled / max(sent.nbytes, 1)}
        if self._limit:
            metrics["of_limit"] = sent.travelled / seconds / self._limit
        return SyncReport(version, sent.travelled, sent.tensors, seconds, metrics)

    def close(self) -> None:
        """Free the memory of the buckets."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    async def _choose_sender(self, device: torch.device, receive: Receive, version: int) -> Sender:
        """Return a sender on the fastest path on which ``greet`` succeeds.

        Raises:
            SyncError: no path works; the message lists the reasons."""
        reasons = []
        for name, way in paths(device, self.engine.receivers, self.colocated).items():
            sender: Sender | None = None
            if name in self._full:
                reasons.append(self._full[name])
                continue
            try:
                path = way()
                sender = Sender(path, self.bucket_size, (self.world.rank, self.world.size), self.stay)
                await sender.greet(receive, version)
                self._limit = self._limit or (path.limit() if path.limit else await sender.speed(receive, version))
            except BaseException as error:
                if sender is not None:
                    sender.close()
                if not isinstance(error, SyncError):
                    raise
                reasons.append(str(error))
                continue
            self._name = name
            why = f", because {'; '.join(reasons)}" if reasons else ""
            if name + why != self._logged:
                self._logged = name + why
                log.log(logging.WARNING if reasons else logging.INFO, "weights travel through %s%s", name, why)
            return sender
        raise SyncError(f"weights cannot be sent to the engine: {'; '.join(reasons)}")
