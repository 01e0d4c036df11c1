"""The bytes of a bucket, whichever memory they lie in: the receiver's side of the transport ``buckets``."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from miles_core.data.unit import Encoded
from miles_core.errors import SyncError
from miles_transport import delta
from miles_transport.broadcast import Broadcast
from miles_transport.bucket import unpacked
from miles_transport.device_memory import attach, borrowed


class Inbox:
    """Opens the buckets of messages, and keeps what it needs for the next ones: attached memory, groups, bytes to compare with.

    A message's ``memory`` is ``{"kind": ..., ...}`` and what its kind needs:

    - ``file``: memory of this host that has a name in the file system (``key``, ``path``), from its byte ``start`` on. With ``stays`` its
      tensors are ``lasting``: the sender leaves them alone until a later version is in force;
    - ``device``: a GPU's (``DeviceMemory``);
    - ``loan``: the sender's own tensors, on a GPU (``Loan``);
    - ``broadcast``: comes through a process group (``Broadcast``), so the message has to be ``fetched`` first;
    - ``data``: comes with the message (``data``, bytes). With ``keep``, a bucket's name, and ``version`` it is a base for what comes later;
    - ``delta``: ``data`` is the difference (``sync.delta``) to the ``base``, [version, checksum], kept under the name ``keep``.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, Callable[[Mapping[str, Any]], Tensor]] = {
            "file": lambda where: self._attached(where, _file)[where.get("start", 0) :],
            "device": lambda where: self._attached(where, attach),
            "data": _data,
            "delta": self._changed,
            "here": lambda where: where["flat"],
        }
        self._memory: dict[str, Tensor] = {}
        self._used: set[str] = set()
        self._used_before: set[str] = set()
        self._kept: dict[str, tuple[list[int], Tensor]] = {}
        self._groups: dict[str, Broadcast] = {}

    async def fetched(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message with its bytes at hand. Waits beside other calls for bytes that travel beside the message; any other message is
        as it was.

        Raises:
            SyncError: they did not come.
        """
        where = message.get("memory", {})
        if where.get("kind") != "broadcast":
            return message
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else 0
        flat = await asyncio.to_thread(self._received, where, message["nbytes"], gpu)
        return {**message, "memory": {"kind": "here", "flat": flat}}

    def open(self, message: Mapping[str, Any]) -> Iterator[Encoded]:
        """The tensors of a message, as views of memory that the sender keeps until ``receive`` returns. They are to be read to the
        end, where it is known whether they are right.

        Raises:
            SyncError: the memory cannot be read from this process, or its bytes are not those that were sent.
        """
        where = message["memory"]
        if where["kind"] == "loan":
            yield from borrowed(message, lambda key: self._attached(where["regions"][key], attach))
            return
        if where["kind"] not in self._kinds:
            raise SyncError(f"weights came in memory of the kind {where['kind']!r}, which this engine does not read")
        flat = self._kinds[where["kind"]](where)
        for unit in unpacked(message, flat):
            unit.lasting = where.get("stays", False) and not unit.format
            yield unit
        if "keep" in where:
            self._kept[where["keep"]] = [where["version"], message["checksum"]], flat

    def finish(self) -> None:
        """An update is complete: let memory go that neither it nor the one before used, as two versions may take turns."""
        used = self._used | self._used_before
        self._memory = {key: memory for key, memory in self._memory.items() if key in used}
        self._used, self._used_before = set(), self._used

    def detach(self) -> None:
        """Let all memory of the sender go."""
        self._memory, self._used = {}, set()

    def forget(self) -> None:
        """An update failed: nothing that was kept is what the sender takes it for."""
        self.detach()
        self._kept = {}
        for group in self._groups.values():
            group.close()
        self._groups = {}

    def _attached(self, where: Mapping[str, Any], attach: Callable[[Mapping[str, Any]], Tensor]) -> Tensor:
        key = where["key"]
        if key not in self._memory:
            self._memory[key] = attach(where)
        self._used.add(key)
        return self._memory[key]

    def _changed(self, where: Mapping[str, Any]) -> Tensor:
        name, flat = self._kept.pop(where["keep"], (None, torch.empty(0, dtype=torch.uint8)))
        if name != where["base"]:
            raise SyncError(
                f"the bucket of weights that starts with {where['keep']} came as a difference to version {where['base'][0]}, which "
                "this engine does not hold: it was started anew, or missed a sync"
            )
        delta.apply(flat, where["data"])
        return flat

    def _received(self, where: Mapping[str, Any], nbytes: int, gpu: int) -> Tensor:
        if where["key"] not in self._groups:
            self._groups[where["key"]] = Broadcast.join(where, gpu)
        return self._groups[where["key"]].receive(nbytes, where["turn"], where["times"])


def _file(where: Mapping[str, Any]) -> Tensor:
    try:
        descriptor = os.open(where["path"], os.O_RDWR)
    except OSError as error:
        raise SyncError(
            f"{where['path']}, where the trainer put its weights, cannot be opened by the engine's process "
            f"({error.strerror}): the two are on different hosts, or do not share /dev/shm"
        ) from error
    try:
        # Pages are mapped at once: faults one by one take longer than reading them.
        memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _data(where: Mapping[str, Any]) -> Tensor:
    data = bytearray(where["data"])  # memory that may be written to, which torch asks for
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
