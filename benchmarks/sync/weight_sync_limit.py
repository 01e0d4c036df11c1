"""What a weight sync through shared memory can make of one plain copy on this machine, if messages and tensors cost nothing.

    python benchmarks/sync/weight_sync_limit.py --save        # two idle cores

Weights that are read where they arrive are moved once: the trainer copies them into shared memory. For the checksum they are read twice
more, by the trainer what it has just copied and by the engine what came. Each is timed, in turns with the plain copy that ``sync/of_limit``
is measured in, so that the same neighbours slow all of them:

- ``copy in pieces``: the copy alone, in pieces that stay in a cache;
- ``copy, adding up``: the trainer's part, with the sum, while the other process is idle;
- ``add up``: the engine's part, of memory that no cache holds;
- ``both sides``: the two in two processes, one after the other: one tensor and one message.

One JSON line at the end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.measure import finish, installed
from miles_core.data import Encoded
from miles_workers.transport import Bucket, Inbox
from miles_workers.transport.checksum import PIECE, checksum
from miles_zero_copy.limits import copy_speed
from miles_zero_copy.segment import Segment
from miles_zero_copy.slots import StandingSlot


def engine(connection: Any) -> None:
    """The other process: reads what messages are about, to the end."""
    torch.set_num_threads(1)
    inbox = Inbox()
    while (message := connection.recv()) is not None:
        for _ in inbox.open(message):
            pass
        if message["units"]:
            inbox.finish()
        connection.send(None)


class BothSides:
    """A trainer, and an engine in another process, which share memory for ``weights`` [n] uint8."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.unit = Encoded("weights", {"weights": weights}, lasting=True)
        self.segment = Segment(len(weights) + (1 << 20))
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=engine, args=(there,), daemon=True)
        self.process.start()

    def begin(self) -> None:
        """A new version."""
        self.slot = StandingSlot(self.segment)

    def send(self) -> None:
        """Tell the engine what is in the bucket, and wait until it has read it."""
        header = self.slot.bucket.header()
        self.connection.send({**header, "memory": self.slot.memory(header, 1)})
        self.connection.recv()

    def sync(self) -> None:
        """All of it."""
        self.slot.bucket.add(self.unit)
        self.send()

    def close(self) -> None:
        """End the engine and free the memory."""
        self.connection.send(None)
        self.process.join()
        self.segment.close()


def measure(megabytes: int, seconds: float) -> dict[str, Any]:
    """The shares of a plain copy's speed that each way makes."""
    weights = torch.randint(0, 256, (megabytes * 10**6 // PIECE * PIECE,), dtype=torch.uint8)
    both = BothSides(weights)
    there = both.segment.buffer[: len(weights)]

    def in_pieces() -> None:
        for to, piece in zip(there.split(PIECE), weights.split(PIECE), strict=True):
            to.copy_(piece)

    def adding_up() -> None:
        bucket = Bucket(both.segment.buffer)
        bucket.add(both.unit)
        bucket.header()

    ways: dict[str, Callable[[], object]] = {
        "copy in pieces": in_pieces,
        "copy, adding up": adding_up,
        "add up": lambda: checksum(there),
        "both sides": both.sync,
    }
    shares: dict[str, list[float]] = {name: [] for name in ways}
    limits, end = [], time.monotonic() + seconds
    while time.monotonic() < end or len(limits) < len(ways):
        for name, way in ways.items():
            both.begin()
            limits.append(copy_speed())
            start = time.perf_counter()
            way()
            shares[name].append(len(weights) / (time.perf_counter() - start) / limits[-1])
    both.close()
    found = {
        name: {"lower_quartile": quantiles(s, n=4)[0], "median": median(s), "turns": len(s)}
        for name, s in shares.items()
    }
    for name, row in found.items():
        print(
            f"{megabytes:>6} MB  {name:16} {row['lower_quartile']:5.2f} to {row['median']:5.2f} of a plain copy",
            flush=True,
        )
    return {"megabytes": megabytes, "copy_gb_per_second": median(limits) / 1e9, "of_copy": found}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", default="128,1000")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each size")
    parser.add_argument("--save", nargs="?", const="", metavar="VARIANT", help="a word for the file's name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {"sizes": [measure(size, options.seconds) for size in map(int, options.megabytes.split(","))]}
    finish("weight_sync_limit", result, options.save is not None, lambda: installed("torch"), options.save or "")


if __name__ == "__main__":
    main()
