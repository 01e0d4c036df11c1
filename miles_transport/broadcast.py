"""Bytes from one process to several through a process group of their own: NCCL for a GPU, gloo for a CPU.

The group stands beside torch.distributed's default one and knows nothing of it. Its members meet in a store that the sender opens
on a free port, and whose address travels in messages; a receiver's number is the order in which it came.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from miles_core.errors import SyncError

#: Seconds in which the members must meet, and a broadcast end.
PATIENCE = 120.0
#: Seconds in which one address of the sender must answer.
_ANSWER = 5.0


class Broadcast:
    """One end of such a group; its methods wait, so they are called beside the event loop.

    Attributes:
        memory: how messages name it (``Inbox``), at the sender's end.
    """

    def __init__(self, store: TCPStore, device: torch.device, rank: int, size: int, patience: float) -> None:
        self._store, self._device, self._rank, self._size = store, device, rank, size
        self._patience = timedelta(seconds=patience)
        self._group: Any = None
        self._closed = False
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._turns = 0
        self._turn, self._next = 0, threading.Condition()
        self._stream: torch.cuda.Stream | None = None
        self.memory: dict[str, Any] = {}

    @classmethod
    def open(cls, receivers: int, device: torch.device, patience: float = PATIENCE) -> Broadcast:
        """The sender's end, for so many receivers, with tensors on ``device``. SyncError where nobody may listen on a port."""
        try:
            store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=patience), wait_for_workers=False)
        except RuntimeError as error:
            raise SyncError(f"no port can be opened to broadcast weights: {str(error).splitlines()[0]}") from error
        key = secrets.token_hex(8)
        store.set("key", key)
        made = cls(store, device, 0, receivers + 1, patience)
        where = {"hosts": _addresses(), "port": int(store.port), "receivers": receivers, "device": device.type}
        made.memory = {"kind": "broadcast", "key": key, "patience": patience, **where}
        return made

    @classmethod
    def join(cls, where: Mapping[str, Any], gpu: int = 0) -> Broadcast:
        """A receiver's end; on a GPU on that of this number, since a thread of its own begins at the first one.

        Raises:
            SyncError: the sender cannot be reached from here, all receivers are there, or this process has no such device.
        """
        if where["device"] == "cuda" and not torch.cuda.is_available():
            raise SyncError("weights are broadcast from GPU to GPU, and the engine's process has no GPU")
        store = _met(where)
        rank = int(store.add("receivers", 1))
        if rank > where["receivers"]:
            raise SyncError(
                f"a broadcast has its {where['receivers']} receivers already: this engine left it after an error, or was started anew"
            )
        device = torch.device("cuda", gpu) if where["device"] == "cuda" else torch.device("cpu")
        return cls(store, device, rank, where["receivers"] + 1, where["patience"])

    def send(self, flat: Tensor, turn: int, times: int = 1) -> float:
        """Give ``flat`` [n] uint8, which has to be there, not only under way, to every receiver, ``times`` times; returns when it may be
        written over, with the seconds of the last time.

        Args:
            turn: the number of this broadcast, from 0 on: whoever comes early waits for the ones before.

        Raises:
            SyncError: not all of them came, or took it, in time.
        """
        with self._in(turn), self._beside(flat.device):
            return self._all(flat, times)

    def receive(self, nbytes: int, turn: int, times: int = 1) -> Tensor:
        """What is sent in this turn: [nbytes] uint8, valid until the turn after the next. SyncError when it does not come, or there is
        no memory for it."""
        with self._in(turn), self._beside(self._device):
            if len(self._buffers[0]) < nbytes:
                try:
                    self._buffers[0] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                except torch.OutOfMemoryError as error:
                    raise SyncError(
                        f"{nbytes:,} bytes of the engine's GPU memory for a broadcast are not to be had"
                    ) from error
            flat = self._buffers[0][:nbytes]
            self._buffers.reverse()
            self._all(flat, times)
            return flat

    def turn(self) -> int:
        """The number of the next broadcast, at the sender's end."""
        self._turns += 1
        return self._turns - 1

    def close(self) -> None:
        """Leave the group; who waits for the others waits no longer."""
        with self._next:
            self._closed = True
            self._next.notify_all()
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):
                group.abort()

    @contextmanager
    def _in(self, turn: int) -> Iterator[None]:
        """While this turn is on."""
        with self._next:
            if not self._next.wait_for(lambda: self._turn >= turn or self._closed, self._patience.total_seconds()):
                raise SyncError(f"broadcast {turn} among {self._size} processes waited for number {self._turn} in vain")
            if self._closed:
                raise SyncError(f"broadcast {turn} among {self._size} processes was given up: one before it failed")
        try:
            yield
        finally:
            with self._next:
                self._turn = turn + 1
                self._next.notify_all()

    def _beside(self, device: torch.device) -> AbstractContextManager[Any]:
        """On a GPU a stream of this group's own: what is added up and copied meanwhile neither waits for the link nor the link for it."""
        if device.type == "cpu":
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(device)
        return torch.cuda.stream(self._stream)  # and its GPU, which a thread has to be told

    def _all(self, flat: Tensor, times: int) -> float:
        start = time.perf_counter()
        try:
            if self._group is None:
                self._group = self._meet()
            for _ in range(times):
                start = time.perf_counter()
                self._group.broadcast(flat, 0).wait()
                if self._stream is not None:
                    self._stream.synchronize()
        except RuntimeError as error:
            self.close()
            raise SyncError(
                f"a broadcast among {self._size} processes failed at number {self._rank}: {str(error).splitlines()[0]}"
            ) from error
        return time.perf_counter() - start

    def _meet(self) -> Any:
        """Everybody is there; then the group."""
        self._store.set(f"here/{self._rank}", "")
        others = [f"here/{rank}" for rank in range(self._size)]
        end = time.monotonic() + self._patience.total_seconds()
        while not self._store.check(others):
            if self._closed or time.monotonic() > end:
                raise RuntimeError("the others did not come")
            time.sleep(0.01)
        if self._device.type == "cpu":
            return ProcessGroupGloo(self._store, self._rank, self._size, self._patience)
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = self._patience
        return ProcessGroupNCCL(self._store, self._rank, self._size, options)


def _addresses() -> list[str]:
    """Under which others may reach this host, the likeliest first."""
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent; says which of its addresses this host would use
        found.append(probe.getsockname()[0])
    with suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _met(where: Mapping[str, Any]) -> TCPStore:
    """The sender's store, at the first of its addresses that answers as it should."""
    for host in where["hosts"]:
        try:
            socket.create_connection((host, where["port"]), timeout=_ANSWER).close()
            store = TCPStore(host, where["port"], None, False, timedelta(seconds=_ANSWER))
            if store.get("key").decode() == where["key"]:
                store.set_timeout(timedelta(seconds=where["patience"]))
                return store
        except (OSError, RuntimeError):
            continue
    raise SyncError(
        f"the trainer cannot be reached from the engine's process at {', '.join(where['hosts'])}, port {where['port']}, where it "
        "wants to broadcast weights"
    )
