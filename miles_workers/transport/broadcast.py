"""Broadcast bytes from one process to several through a dedicated process group: NCCL for GPUs, gloo for CPUs.

The group is independent of torch.distributed's default group. Its members connect to a store that the sender opens on a free port;
messages contain its address. A receiver's rank is the order in which it joined.
"""

from __future__ import annotations

import os
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

#: Timeout in seconds for the members to connect, and for each broadcast.
PATIENCE = 120.0
#: Timeout in seconds to connect to one address of the sender.
_ANSWER = 5.0


class Broadcast:
    """One member of the group. All methods block, so call them outside the event loop's thread.

    Attributes:
        memory: description of the group for messages (``Inbox``), on the sender.
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
        """Make the sender for this number of receivers, with tensors on ``device``. SyncError if no port can be opened.

        The store listens on the loopback interface only if the environment restricts the group to it (``GLOO_SOCKET_IFNAME``,
        ``NCCL_SOCKET_IFNAME``), else on every interface, because receivers may be on other hosts."""
        hosts = ["127.0.0.1"] if _is_local(device) else _addresses()
        try:
            store = _open_store("127.0.0.1" if _is_local(device) else "", patience)
        except (OSError, RuntimeError) as error:
            raise SyncError(f"no port can be opened to broadcast weights: {str(error).splitlines()[0]}") from error
        key = secrets.token_hex(8)
        store.set("key", key)
        made = cls(store, device, 0, receivers + 1, patience)
        where = {"hosts": hosts, "port": int(store.port), "receivers": receivers, "device": device.type}
        made.memory = {"kind": "broadcast", "key": key, "patience": patience, **where}
        return made

    @classmethod
    def join(cls, where: Mapping[str, Any], gpu: int = 0) -> Broadcast:
        """Make a receiver; for a GPU transport on GPU ``gpu``, because a new thread's current device is GPU 0.

        Raises:
            SyncError: the sender cannot be reached, all receivers have joined already, or this process has no such device.
        """
        if where["device"] == "cuda" and not torch.cuda.is_available():
            raise SyncError("weights are broadcast between GPUs, but the engine's process has no GPU")
        store = _connect(where)
        rank = int(store.add("receivers", 1))
        if rank > where["receivers"]:
            raise SyncError(
                f"all {where['receivers']} receivers of a broadcast have joined already: this engine left it after an error, or was restarted"
            )
        device = torch.device("cuda", gpu) if where["device"] == "cuda" else torch.device("cpu")
        return cls(store, device, rank, where["receivers"] + 1, where["patience"])

    def send(self, flat: Tensor, turn: int, times: int = 1) -> float:
        """Send ``flat`` [n] uint8, whose content must be complete on the current stream, to every receiver, ``times`` times.

        Returns after the memory may be overwritten.

        Args:
            flat: the bytes.
            turn: index of this broadcast, starting at 0; waits for the broadcasts before it.
            times: number of repetitions.

        Returns:
            duration of the last repetition in seconds.

        Raises:
            SyncError: not all receivers joined or received in time.
        """
        with self._wait_for(turn), self._use_stream(flat.device):
            return self._broadcast(flat, times)

    def receive(self, nbytes: int, turn: int, times: int = 1) -> Tensor:
        """Receive broadcast ``turn``: [nbytes] uint8, valid until broadcast ``turn + 2``.

        Raises:
            SyncError: the broadcast did not arrive, or there is not enough memory.
        """
        with self._wait_for(turn), self._use_stream(self._device):
            if len(self._buffers[0]) < nbytes:
                try:
                    self._buffers[0] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                except torch.OutOfMemoryError as error:
                    raise SyncError(
                        f"the engine's GPU has no {nbytes:,} bytes of free memory to receive a broadcast"
                    ) from error
            flat = self._buffers[0][:nbytes]
            self._buffers.reverse()
            self._broadcast(flat, times)
            return flat

    def turn(self) -> int:
        """Return the index of the next broadcast, on the sender."""
        self._turns += 1
        return self._turns - 1

    def close(self) -> None:
        """Leave the group, and wake threads that wait for a turn."""
        with self._next:
            self._closed = True
            self._next.notify_all()
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):
                group.abort()

    @contextmanager
    def _wait_for(self, turn: int) -> Iterator[None]:
        """Wait for broadcast ``turn``, and start the next one on exit."""
        with self._next:
            if not self._next.wait_for(lambda: self._turn >= turn or self._closed, self._patience.total_seconds()):
                raise SyncError(
                    f"broadcast {turn} among {self._size} processes timed out while waiting for broadcast {self._turn}"
                )
            if self._closed:
                raise SyncError(
                    f"broadcast {turn} among {self._size} processes was cancelled: an earlier broadcast failed"
                )
        try:
            yield
        finally:
            with self._next:
                self._turn = turn + 1
                self._next.notify_all()

    def _use_stream(self, device: torch.device) -> AbstractContextManager[Any]:
        """Use the group's own stream on a GPU, so that computation and transfer do not wait for each other."""
        if device.type == "cpu":
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(device)
        return torch.cuda.stream(self._stream)  # also selects the GPU, which is a property of the thread

    def _broadcast(self, flat: Tensor, times: int) -> float:
        start = time.perf_counter()
        try:
            if self._group is None:
                self._group = self._form_group()
            for _ in range(times):
                start = time.perf_counter()
                self._group.broadcast(flat, 0).wait()
                if self._stream is not None:
                    self._stream.synchronize()
        except RuntimeError as error:
            self.close()
            raise SyncError(
                f"a broadcast among {self._size} processes failed on rank {self._rank}: {str(error).splitlines()[0]}"
            ) from error
        return time.perf_counter() - start

    def _form_group(self) -> Any:
        """Wait for all members, then create the process group."""
        self._store.set(f"here/{self._rank}", "")
        others = [f"here/{rank}" for rank in range(self._size)]
        end = time.monotonic() + self._patience.total_seconds()
        while not self._store.check(others):
            if self._closed or time.monotonic() > end:
                raise RuntimeError("the other members did not join in time")
            time.sleep(0.01)
        if self._device.type == "cpu":
            return ProcessGroupGloo(self._store, self._rank, self._size, self._patience)
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = self._patience
        return ProcessGroupNCCL(self._store, self._rank, self._size, options)


def _addresses() -> list[str]:
    """Return the addresses under which other hosts may reach this one, the most likely first."""
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; selects the address that this host would use
        found.append(probe.getsockname()[0])
    with suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _is_local(device: torch.device) -> bool:
    """Whether the environment restricts process groups for ``device`` to the loopback interface."""
    library = "NCCL" if device.type == "cuda" else "GLOO"
    return os.environ.get(f"{library}_SOCKET_IFNAME") in ("lo", "lo0")


def _open_store(host: str, patience: float) -> TCPStore:
    """Open a store on a free port of one address, or of all interfaces if ``host`` is empty."""
    place = socket.create_server((host, 0))
    port, timeout = int(place.getsockname()[1]), timedelta(seconds=patience)
    return TCPStore(
        "127.0.0.1", port, None, True, timeout, wait_for_workers=False, master_listen_fd=place.detach()
    )  # by default the store listens on every interface


def _connect(where: Mapping[str, Any]) -> TCPStore:
    """Connect to the sender's store at the first address that answers with the right key."""
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
        f"the engine's process cannot reach the trainer at {', '.join(where['hosts'])}, port {where['port']}, to receive broadcast "
        "weights"
    )
