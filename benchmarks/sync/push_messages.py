"""Messages of a push of the weights by the numbers of senders and engines, directly and through the relay of the first engine.

The workers' own code (``EnginePool``, ``EngineWorker``, ``Relay``) runs in one process; only the channel between processes is a double that
counts. Every sender has one bucket, so a push has two rounds: the buckets, and the completion::

    python benchmarks/sync/push_messages.py --save
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from benchmarks.measure import finish, installed, options
from miles_core.data.weight_unit import Encoded
from miles_core.data.world import World
from miles_workers import relay
from miles_workers.engine_pool import EnginePool
from miles_workers.engine_worker import EngineWorker
from miles_workers.workers import Workers

SIZES = ((16, 4), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
#: Most pairs that are measured without the relay, each with two messages; more take minutes.
DIRECT = 1 << 14
BUILD_INFO = {"capabilities": frozenset(), "kv_cache_dtype": "", "native_products": False, "model_facts": {}}


class Engine:
    """Counts the units of an update."""

    version, received = -1, 0

    async def update_weights(self, units: Iterable[Encoded], version: int) -> None:
        self.received, self.version = sum(1 for _ in units), version


class Counted(Workers):
    """Engine workers in this process, with the number of messages to all of them."""

    def __init__(self, count: int) -> None:
        super().__init__([f"engine-{number}" for number in range(count)])
        self.workers, self.messages = [], 0
        for _ in range(count):
            worker: Any = object.__new__(EngineWorker)
            worker._begin_empty()
            worker.part = Engine()
            self.workers.append(worker)

    async def send(self, number: int, method: str, *args: Any) -> Any:
        self.messages += 1
        await asyncio.sleep(0)
        return await self.workers[number].answer(method, *args)

    async def restart(self, number: int) -> None:
        raise NotImplementedError

    async def kill(self, number: int) -> None:
        raise NotImplementedError


async def push(senders: int, count: int) -> dict[str, Any]:
    """One push; returns its messages and seconds."""
    import torch

    engines = Counted(count)
    for worker in engines.workers:
        await worker.begin_push(1, ())
    engines.workers[0].connect(engines)
    pools = [EnginePool(engines, BUILD_INFO, 1, World(rank, senders)) for rank in range(senders)]
    for pool in pools:
        pool.push = 1
    data = [[Encoded(f"w{rank}", {f"w{rank}": torch.zeros(1)})] for rank in range(senders)]
    started = time.perf_counter()
    await asyncio.gather(*(pool.update_weights(units, 0) for pool, units in zip(pools, data, strict=True)))
    seconds = time.perf_counter() - started
    assert all(w.part.received == senders and w.part.version == 0 for w in engines.workers)
    return {"messages": engines.messages, "seconds": round(seconds, 3)}


def exponent(rows: list[dict[str, Any]], name: str) -> float:
    """Slope of log(messages) over log(senders + engines), last measured row against the third last."""
    one, _, two = [row for row in rows if name in row][-3:]
    steps = math.log((two["senders"] + two["engines"]) / (one["senders"] + one["engines"]))
    return round(math.log(two[name]["messages"] / one[name]["messages"]) / steps, 3)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--largest", type=int, default=1024, help="most senders")
    given = parser.parse_args()
    rows = []
    plain, relay.WINDOW = relay.RELAYED, 1.0  # one process: all senders call within a second
    for senders, engines in (size for size in SIZES if size[0] <= given.largest):
        row: dict[str, Any] = {"senders": senders, "engines": engines}
        for name, threshold in (("direct", 1 << 60), ("relayed", plain)):
            if name == "direct" and senders * engines > DIRECT:
                continue
            relay.RELAYED = threshold
            row[name] = asyncio.run(push(senders, engines))
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    result = SimpleNamespace(direct=exponent(rows, "direct"), relayed=exponent(rows, "relayed"))
    finish("push_messages", {"rows": rows, "exponents": vars(result)}, given.save, lambda: installed("torch"))


if __name__ == "__main__":
    main()
