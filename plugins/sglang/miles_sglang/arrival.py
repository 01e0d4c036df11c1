"""Weight updates that arrive in buckets, either as a stream of tensors or from another process (transport ``buckets``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import torch

from miles_core.data import Encoded
from miles_sglang.buckets import Bucket, Flat, split_into_buckets
from miles_workers.transport import Arrival, NameCheck


class Loading:
    """Sends the buckets of one update. SGLang loads a bucket while the next one is filled.

    The last bucket is held back until ``finish``, that is, until the update is known to be complete.

    Args:
        send: sends a bucket to SGLang; its second argument is the version that this bucket completes, or None.
        device: device on which buckets of host tensors are assembled.
    """

    def __init__(self, send: Callable[[Flat, int | None], Awaitable[None]], device: str = "") -> None:
        self._send, self._device = send, device
        self._ready: Flat | None = None
        self._sending: asyncio.Future[None] | None = None

    async def add(self, bucket: Bucket) -> None:
        """Copy the tensors of the next bucket and start to send the previous one."""
        flat, ready = bucket.flatten(self._device), self._ready
        self._ready = flat
        if ready is not None:
            await self._wait_until_loaded()
            self._sending = asyncio.ensure_future(self._send(ready, None))
            await asyncio.sleep(0)  # start sending before the caller fills the next bucket

    async def finish(self, version: int) -> None:
        """Send the last bucket. Afterwards SGLang serves ``version``."""
        await self._wait_until_loaded()
        if self._ready is not None:
            await self._send(self._ready, version)

    async def wait(self) -> None:
        """Wait for the bucket in flight. Called after an error, so that SGLang no longer loads when the error propagates."""
        if self._sending is not None:
            await asyncio.wait([self._sending])

    async def _wait_until_loaded(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            await sending


class StreamedArrival(Arrival):
    """An update that is loaded into SGLang while it arrives. The names in a message are checked before SGLang receives its tensors.

    Args:
        loading: sends the buckets.
        seen: checks tensor names against the model.
        limit: maximum bytes of a bucket.
        served: called with ``version`` once SGLang serves it.
        version: version of the weights.
    """

    def __init__(
        self, loading: Loading, seen: NameCheck, limit: int, served: Callable[[int], None], version: int
    ) -> None:
        self._loading, self._seen, self._limit = loading, seen, limit
        self._served, self._version = served, version

    async def take(self, units: Iterator[Encoded]) -> None:
        try:
            named = [(name, tensor) for unit in self._seen.check(units) for name, tensor in unit.parts.items()]
            for bucket in (
                split_into_buckets(named, self._limit) if named else ()
            ):  # the handshake message has no tensors
                await self._loading.add(bucket)
            _wait_for_gpu()
        except BaseException:
            await self._loading.wait()
            raise

    async def finish(self) -> None:
        self._seen.finish()
        await self._loading.finish(self._version)
        self._served(self._version)


class BufferedArrival(Arrival):
    """An update that is buffered in this process until it is complete.

    Args:
        load: loads the complete update into SGLang.
    """

    def __init__(self, load: Callable[[list[Encoded]], Awaitable[None]]) -> None:
        self._load, self._units = load, list[Encoded]()

    async def take(self, units: Iterator[Encoded]) -> None:
        self._units += [Encoded(u.name, {n: t.clone() for n, t in u.parts.items()}, u.format) for u in units]
        _wait_for_gpu()

    async def finish(self) -> None:
        await self._load(self._units)


def _wait_for_gpu() -> None:
    """Wait until the copies out of a bucket are done, because the sender reuses its memory as soon as ``receive`` returns."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()  # not the other streams, on which the next bucket may be arriving
