"""Updates of SGLang's weights that come bucket by bucket: as a stream of tensors, or from another process (transport ``buckets``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import torch

from miles_core.data import Encoded
from miles_sglang.buckets import Bucket, Flat, divide
from miles_sglang.weight_names import Seen
from miles_transport import Arrival


class Loading:
    """One update: SGLang loads a bucket while the next one is filled, and the last one waits until the update is known to be whole.

    Args:
        send: brings a bucket to SGLang, with the version that is complete with it, or None.
        device: where buckets are made of what comes from host memory.
    """

    def __init__(self, send: Callable[[Flat, int | None], Awaitable[None]], device: str = "") -> None:
        self._send, self._device = send, device
        self._ready: Flat | None = None
        self._sending: asyncio.Future[None] | None = None

    async def add(self, bucket: Bucket) -> None:
        """The next bucket, whose tensors are copied."""
        flat, ready = bucket.flatten(self._device), self._ready
        self._ready = flat
        if ready is not None:
            await self._loaded()
            self._sending = asyncio.ensure_future(self._send(ready, None))
            await asyncio.sleep(0)  # it leaves before the next one is filled

    async def finish(self, version: int) -> None:
        """All of them came: SGLang serves this version."""
        await self._loaded()
        if self._ready is not None:
            await self._send(self._ready, version)

    async def wait(self) -> None:
        """After an error: SGLang loads nothing any more."""
        if self._sending is not None:
            await asyncio.wait([self._sending])

    async def _loaded(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            await sending


class Passing(Arrival):
    """Goes into SGLang as it comes; what a bucket holds is checked before SGLang is given any of it.

    Args:
        loading: takes its buckets.
        seen: holds its tensors against the model's names.
        limit: bytes of a bucket.
        served: called when SGLang serves it.
        version: which one it is.
    """

    def __init__(self, loading: Loading, seen: Seen, limit: int, served: Callable[[int], None], version: int) -> None:
        self._loading, self._seen, self._limit = loading, seen, limit
        self._served, self._version = served, version

    async def take(self, units: Iterator[Encoded]) -> None:
        try:
            named = [(name, tensor) for unit in self._seen.passing(units) for name, tensor in unit.parts.items()]
            for bucket in divide(named, self._limit) if named else ():  # a greeting has none
                await self._loading.add(bucket)
            _wait_for_gpu()
        except BaseException:
            await self._loading.wait()
            raise

    async def finish(self) -> None:
        self._seen.finish()
        await self._loading.finish(self._version)
        self._served(self._version)


class Held(Arrival):
    """Is held here until it is whole and put in force.

    Args:
        load: gives SGLang all of it.
    """

    def __init__(self, load: Callable[[list[Encoded]], Awaitable[None]]) -> None:
        self._load, self._units = load, list[Encoded]()

    async def take(self, units: Iterator[Encoded]) -> None:
        self._units += [Encoded(u.name, {n: t.clone() for n, t in u.parts.items()}, u.format) for u in units]
        _wait_for_gpu()

    async def finish(self) -> None:
        await self._load(self._units)


def _wait_for_gpu() -> None:
    """The sender writes over a bucket as soon as its ``receive`` returns."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()  # not those on which the next bucket may be coming
