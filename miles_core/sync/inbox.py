"""Taking buckets of weights in: the receiver's side of the transport ``buckets``, whichever memory they lie in."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from miles_core.data.unit import Encoded
from miles_core.errors import SyncError
from miles_core.sync.bucket import unpacked
from miles_core.sync.device_memory import attach

#: kind of memory -> what attaches it: the message's ``memory`` -> [nbytes] uint8, valid while it is referenced.
Attach = Callable[[Mapping[str, Any]], Tensor]


class Inbox:
    """Opens the buckets of messages, and keeps their memory attached from one sync to the next.

    A message's ``memory`` is ``{"kind": ..., "key": ...}`` and what its kind needs: ``file`` is memory of this host that has a
    name in the file system (``path``), ``device`` is a GPU's (``DeviceMemory``), ``data`` comes with the message (``data``, bytes).
    """

    def __init__(self) -> None:
        self.kinds: dict[str, Attach] = {"file": _file, "device": attach, "data": _data}
        self._attached: dict[str, Tensor] = {}
        self._used: set[str] = set()

    def open(self, message: Mapping[str, Any]) -> list[Encoded]:
        """The tensors of a message, as views of memory that the sender keeps until ``receive`` returns.

        Raises:
            SyncError: the memory cannot be read from this process, or its bytes are not those that were sent.
        """
        return unpacked(message, self._memory(message["memory"]))

    def finish(self) -> None:
        """An update is complete: let memory go that it did not use."""
        self._attached = {key: memory for key, memory in self._attached.items() if key in self._used}
        self._used = set()

    def _memory(self, where: Mapping[str, Any]) -> Tensor:
        kind, key = where["kind"], where.get("key", "")
        if kind not in self.kinds:
            raise SyncError(f"weights came in memory of the kind {kind!r}, which this engine does not read")
        if not key:
            return self.kinds[kind](where)
        if key not in self._attached:
            self._attached[key] = self.kinds[kind](where)
        self._used.add(key)
        return self._attached[key]


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
