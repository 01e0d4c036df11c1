"""A weight sync under Ray without a plugin: in blocks that travel while the next one is packed, compared with the way before them.

    python benchmarks/sync/ray_sync.py --layers 2 --save        # two idle cores
    python benchmarks/sync/ray_sync.py --device cuda --save     # two GPUs

A trainer in this process sends the weights of a model of ``cluster_run.py``, one expert after the other, through Ray's object store to an actor. It
loads them as SGLang's adapter does: into one array per bucket on its device, then with one batched copy into tensors of its own. With
``--device cuda`` sender and receiver have a GPU each, and Ray hides the sender's from the receiver.

Before, a rank appended one weight after the other to bytes until it had ``--sync-bucket-size`` of them, and waited until engines had loaded
these before it packed the next ones. Both ways take turns; ``ratio`` is the median over the pairs of their seconds. ``share`` has the seconds in
which the sender writes to the object store, ``load`` those in which the receiver is busy: with blocks they overlap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import finish, installed
from miles_core.config.groups import Run
from miles_core.data import Encoded
from miles_core.run.parts import freeze_gc
from miles_workers.weight_block import ENOUGH, BlockSender, Table, read_block

BUCKET = Run().sync_bucket_size
#: Sizes in bytes of a description and of the tensors that follow it.
HEAD = "<QQ"


def shapes(size: str, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each weight of a model of ``cluster_run.py``, with other ``layers`` if they are not 0."""
    from benchmarks.planning.cluster_run import make_config

    c = make_config(size, layers or None)
    wide, heads, groups = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    yield "embed_tokens.weight", (c.vocab_size, wide)
    for number in range(c.num_hidden_layers):
        layer = f"layers.{number}."
        yield from ((f"{layer}{name}", (rows, wide)) for name, rows in (("q", heads), ("k", groups), ("v", groups)))
        yield f"{layer}o", (wide, heads)
        yield from ((f"{layer}{name}_norm", (wide,)) for name in ("input", "post_attention"))
        yield f"{layer}router", (c.num_experts, wide)
        for expert in range(c.num_experts):
            yield from ((f"{layer}{expert}.{name}", (c.moe_intermediate_size, wide)) for name in ("gate", "up"))
            yield f"{layer}{expert}.down", (wide, c.moe_intermediate_size)
    yield "lm_head.weight", (c.vocab_size, wide)


def sum_up(tensors: Iterable[Tensor]) -> int:
    """Return the sum of BF16 weights as integers, to compare both sides."""
    return sum(int(tensor.view(torch.int16).sum(dtype=torch.int64)) for tensor in tensors)


class Receiver:
    """The engine's side, an actor of Ray."""

    def __init__(self, device: str) -> None:
        torch.set_num_threads(1)
        self.device, self.own, self.busy = device, dict[str, Tensor](), 0.0

    def take_bytes(self, data: np.ndarray) -> None:
        """Load a bucket of the way before."""
        self._load(lambda: read_bytes(data))

    def take_block(self, table: Table, data: np.ndarray) -> None:
        """Load a block."""
        self._load(lambda: read_block(table, data))

    def seconds(self) -> float:
        """Return the seconds of loading since the last call."""
        busy, self.busy = self.busy, 0.0
        return busy

    def sum(self) -> int:
        """Return the sum of all loaded weights, and forget them."""
        total = sum_up(self.own.values())
        for tensor in self.own.values():
            tensor.zero_()
        return total

    def _load(self, read: Callable[[], Iterator[Encoded]]) -> None:
        from miles_sglang.buckets import split_into_buckets

        start = time.perf_counter()
        named = ((name, tensor) for unit in read() for name, tensor in unit.parts.items())
        for bucket in split_into_buckets(named, BUCKET):
            flat = bucket.flatten("" if self.device == "cpu" else self.device)
            found = {
                name: flat.array[at : at + 2 * torch.Size(shape).numel()].view(torch.bfloat16).view(shape)
                for name, _, shape, at in flat.tensors
            }
            for name in found.keys() - self.own.keys():
                self.own[name] = torch.empty_like(found[name])
            torch._foreach_copy_([self.own[name] for name in found], list(found.values()))
        if self.device != "cpu":
            torch.cuda.synchronize()
        self.busy += time.perf_counter() - start


def write_bytes(unit: Encoded, data: bytearray) -> None:
    """Append a weight to the bucket of the way before."""
    parts = [[name, list(tensor.shape)] for name, tensor in unit.parts.items()]
    head = json.dumps(parts).encode()
    data += struct.pack(HEAD, len(head), unit.nbytes) + head
    for tensor in unit.parts.values():
        data += tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def read_bytes(data: np.ndarray) -> Iterator[Encoded]:
    """Yield the weights of a bucket of the way before."""
    start = 0
    while start < len(data):
        head, body = struct.unpack_from(HEAD, data, start)
        start += struct.calcsize(HEAD)
        [(name, shape)] = json.loads(bytes(data[start : start + head]))
        piece = data[start + head : start + head + body]
        if piece.ctypes.data % 16:
            piece = piece.copy()
        yield Encoded(name, {name: torch.from_numpy(piece).view(torch.bfloat16).view(shape)})
        start += head + body


class Ways:
    """The sender's side. Each way sends ``units()`` and returns when the receiver has loaded all of them.

    Attributes:
        sharing: seconds of writing to the object store since it was set to 0.
    """

    def __init__(self, units: Callable[[], Iterator[Encoded]], actor: Any) -> None:
        self.units, self.actor, self.sharing = units, actor, 0.0
        self.all: dict[str, Callable[[], Awaitable[object]]] = {"bytes": self.send_bytes, "blocks": self.send_blocks}
        self._sender = BlockSender(min(BUCKET, ENOUGH), self._share, self._take)

    async def send_bytes(self) -> None:
        """Send as before there were blocks."""
        bucket = bytearray()
        for unit in self.units():
            write_bytes(unit, bucket)
            if len(bucket) >= BUCKET:
                await self.actor.take_bytes.remote(self._share(np.frombuffer(bucket, np.uint8)))
                bucket = bytearray()
        if bucket:
            await self.actor.take_bytes.remote(self._share(np.frombuffer(bucket, np.uint8)))

    async def send_blocks(self) -> None:
        """Send as a rank does."""
        await self._sender.send(self.units(), 0)

    async def _take(self, _number: int, table: Table, shared: Any, _version: int) -> None:
        await self.actor.take_block.remote(table, shared)

    def _share(self, data: np.ndarray) -> Any:
        import ray

        start = time.perf_counter()
        shared = ray.put(data)
        self.sharing += time.perf_counter() - start
        return shared


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Send in both ways in turns; return the seconds and their ratio."""
    import ray

    gpus = torch.cuda.device_count() if given.device == "cuda" else 0
    device = f"cuda:{gpus - 1}" if gpus else "cpu"  # Ray gives the first one to the actor
    torch.manual_seed(0)
    weights = {
        name: torch.randn(shape, device=device).to(torch.bfloat16) for name, shape in shapes(given.size, given.layers)
    }
    nbytes, total = sum(tensor.nbytes for tensor in weights.values()), sum_up(weights.values())
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    seconds: dict[str, list[float]] = {"bytes": [], "blocks": []}
    parts: dict[str, dict[str, list[float]]] = {name: {"share": [], "load": []} for name in seconds}
    try:
        receiver: Any = ray.remote(Receiver)
        actor = receiver.options(num_gpus=1 if gpus else 0, num_cpus=0).remote(given.device)
        ways = Ways(lambda: (Encoded(name, {name: tensor}) for name, tensor in weights.items()), actor)
        for turn in range(given.warm_up + given.pairs):
            for name in sorted(seconds, reverse=bool(turn % 2)):
                ways.sharing, start = 0.0, time.perf_counter()
                asyncio.run(wait(ways.all[name]))
                took = time.perf_counter() - start
                busy = ray.get(actor.seconds.remote())
                if turn < given.warm_up:
                    assert ray.get(actor.sum.remote()) == total, f"{name}: other weights arrived than were sent"
                    continue
                seconds[name].append(took)
                parts[name]["share"].append(ways.sharing)
                parts[name]["load"].append(busy)
                print(
                    f"{name:6} {took:.3f} s, share {ways.sharing:.3f} s, load {busy:.3f} s", file=sys.stderr, flush=True
                )
    finally:
        ray.shutdown()
    return {"bytes": nbytes, "tensors": len(weights), **summarize(nbytes, seconds, parts)}


async def wait(way: Callable[[], Awaitable[object]]) -> None:
    """Run one way."""
    await way()


def summarize(nbytes: int, seconds: dict[str, list[float]], parts: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Return medians by way, and the ratio of both ways in pairs."""
    ratios = [old / new for old, new in zip(seconds["bytes"], seconds["blocks"], strict=True)]
    rows = {
        name: {
            "seconds": round(statistics.median(all_of), 4),
            "range": [round(min(all_of), 4), round(max(all_of), 4)],
            "gb_per_second": round(nbytes / statistics.median(all_of) / 1e9, 3),
            **{part: round(statistics.median(values), 4) for part, values in parts[name].items()},
        }
        for name, all_of in seconds.items()
    }
    return {"ways": rows, "ratio": round(statistics.median(ratios), 3), "ratios": [round(x, 3) for x in ratios]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", default="1b", help="model of cluster_run.py")
    parser.add_argument("--layers", type=int, default=0, help="other number of its layers")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/ray_sync-DATE.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    freeze_gc()  # as a run does
    result = {"device": given.device, "size": given.size, "layers": given.layers, **measure(given)}
    if given.device == "cuda":
        result["gpus"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    variant = "" if given.device == "cpu" else "gpu"
    finish("ray_sync", result, given.save, lambda: installed("torch", "ray"), variant)


if __name__ == "__main__":
    main()
