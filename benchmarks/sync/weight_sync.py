"""Weights from a trainer to an engine: every path of the plugin ``zero_copy`` and core's copy, against one copy of memory.

    python benchmarks/sync/weight_sync.py --save
    python benchmarks/sync/weight_sync.py --device cuda --side 8192 --megabytes 1000,8000,30000 --precision bf16,fp8 --save
    python benchmarks/sync/weight_sync.py --device cuda --side 8192 --megabytes 1000,8000 --only NCCL --save   # two GPUs

Random matrices of [side, side] (smaller ones for few megabytes) are encoded and sent as a run sends them, checksums included. The
receiver of buckets is another process that copies each tensor into its own, codes as codes; on a second GPU where there is one and NCCL is measured.
``of_limit`` is the speed in units of one plain copy of as many bytes within one memory, measured beside it, or for NCCL of a broadcast alone;
``of_copy`` compares seconds with those of a copy of the BF16 weights. One storage is measured on a Llama of that size, Ray's object store as
the plain copy under Ray uses it. Messages carry everything; then what changed, where the lowest bits of a share of the weights did
.

A copy of memory is timed before every sync, so that the two are slowed by the same neighbours; ``of_limit`` is the lower quartile of these ratios.
Large sizes are sent fewer times.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from benchmarks.measure import finish, installed
from benchmarks.sync.weight_receiver import Elsewhere, Own
from miles_core.data import Encoded, WeightUnit
from miles_core.engine import CopyTransport
from miles_core.plugin import SyncError
from miles_core.run.parts import freeze_gc
from miles_formats import Codec, FormatCodec
from miles_formats.convert.installed import format_class
from miles_workers.weight_block import ENOUGH, BlockSender, Table
from miles_zero_copy import paths
from miles_zero_copy.limits import GPU_PROBE_BYTES, PROBE_BYTES, copy_speed
from miles_zero_copy.sender import Sender, Sent

#: Of the weights, that a step of AdamW changes at learning rates of 1e-6 and 1e-5.
SHARES = (0.004, 0.02)


def matrices(megabytes: int, device: str, side: int) -> dict[str, torch.Tensor]:
    """Named BF16 matrices of about so many megabytes."""
    side = side if megabytes >= 64 else 512 if megabytes >= 4 else 256
    count = max(megabytes * 10**6 // (2 * side * side), 1)
    one = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    return {f"model.layers.{i}.self_attn.q_proj.weight": (one * (1 + i / count)) for i in range(count)}


class Here:
    """An engine in this process that copies each tensor into its own."""

    def __init__(self, device: str) -> None:
        self.own = Own(device)

    async def update_weights(self, units: Iterator[Encoded], version: int) -> None:
        """Take them."""
        self.own.take(units)


@dataclass(frozen=True)
class Turns:
    """How often a size is sent, after the ``first`` syncs that are not counted, and to which device."""

    repeats: int
    device: str
    first: int = 1

    def of(self, send: Callable[[], None], change: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Seconds of a sync: the median, and each beside the speed of a copy then. ``change`` what is sent before each."""
        seconds, limits = [], []
        probe = PROBE_BYTES if self.device == "cpu" else GPU_PROBE_BYTES
        for _ in range(self.repeats + self.first):
            change()
            limits.append(copy_speed(probe, self.device))
            start = time.perf_counter()
            send()
            if self.device != "cpu":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        seconds, limits = seconds[self.first :], limits[self.first :]
        return {"seconds": median(seconds), "turns": seconds, "limits": limits}


def through_buckets(
    way: Any, bucket: int, stream: Any, turns: Turns, gpu: int, changes: dict[str, Callable[[], None]], stay: bool
) -> Iterator[tuple[str, dict]]:
    """A path to another process, which has such a GPU: all weights, and, where what changed can travel, that after each of ``changes``.
    Where they ``stay``, the receiver copies nothing."""
    path = way()
    engine = Elsewhere(turns.device, gpu)
    with asyncio.Runner() as runner:
        sender, sent = Sender(path, bucket, (0, 1), stay), Sent()
        try:
            runner.run(sender.greet(engine.receive, 0))
            limit = {} if path.limit else {"limit": runner.run(sender.speed(engine.receive, 0))}
            kept = path.make.keywords.get("sent") if isinstance(path.make, partial) else None

            def send() -> None:
                nonlocal sent
                sent = runner.run(sender.send(stream(sender.reserve), engine.receive, 1))
                sender.in_force()

            def count() -> dict[str, Any]:
                return {"bytes": sent.travelled, "buckets": sent.buckets, **limit}

            yield "", turns.of(send, kept.clear if kept is not None else lambda: None) | count()
            for what, change in changes.items() if kept is not None else ():
                yield f", {what}", turns.of(send, change) | count()
        finally:
            sender.close()
            engine.close()


def changed(tensors: dict[str, torch.Tensor], share: float) -> Callable[[], None]:
    """Changes the lowest bit of a share of the weights."""
    some = next(iter(tensors.values()))
    mask = (torch.rand(some.shape, device=some.device) < share).to(torch.int16)

    def change() -> None:
        for tensor in tensors.values():
            tensor.view(torch.int16).bitwise_xor_(mask)

    return change


def through_ray(stream: Any, turns: Turns) -> dict:
    """The plain copy under Ray: blocks put into its object store, copied out by an actor."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    own = ray.remote(Own).options(num_cpus=0).remote("cpu")
    nbytes = sum(unit.nbytes for unit in stream(None))

    async def take(_number: int, table: Table, data: Any, _version: int) -> None:
        await own.read.remote(table, data)

    sender = BlockSender(ENOUGH, ray.put, take)

    def send() -> None:
        asyncio.run(sender.send(stream(None), 1))

    try:
        found = turns.of(send)
        return found | {"bytes": nbytes}
    finally:
        ray.shutdown()


def copied(stream: Any, turns: Turns) -> dict:
    """Core's copy, within the process."""
    transport = CopyTransport(Here(turns.device))  # type: ignore[arg-type]
    report: Any = None

    def send() -> None:
        nonlocal report
        report = asyncio.run(transport.send(stream(None), 1))

    found = turns.of(send)
    return found | {"bytes": report.nbytes}


def shared(megabytes: int, turns: Turns) -> dict:
    """One storage, of two Llamas."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from miles_embedded.model.load import prepare
    from miles_embedded.model.load_units import Update
    from miles_embedded.model.views import export

    wide = 1024 if megabytes >= 64 else 256
    layer = 2 * (4 * wide * wide + 3 * wide * 4 * wide)
    sizes = {"hidden_size": wide, "intermediate_size": 4 * wide, "vocab_size": 512}
    config = LlamaConfig(num_hidden_layers=max(megabytes * 10**6 // layer, 1), num_attention_heads=8, **sizes)

    def model() -> nn.Module:
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return prepare(made.to_empty(device=turns.device))

    trainer, engine, held, nbytes = model(), model(), set[str](), 0

    def send() -> None:
        nonlocal nbytes
        update = Update(engine, None, held, share=True)
        update.take(Codec().encode(export(trainer)))
        nbytes = update.finish()

    found = turns.of(send)
    return found | {"bytes": nbytes}


def measure(megabytes: int, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """All paths for one size and number format."""
    device = options.device
    turns = Turns(max(1, min(options.repeats, options.repeats * 128 // megabytes)), device)
    codec = Codec() if precision == "bf16" else FormatCodec(format_class(precision)())
    tensors = matrices(megabytes, device, options.side)
    whole = sum(t.numel() * 2 for t in tensors.values())
    changes = {f"{share:.1%} changed": changed(tensors, share) for share in SHARES} if precision == "bf16" else {}
    rows: dict[str, dict] = {}

    def stream(room: Any) -> Iterator[Encoded]:
        return codec.encode((WeightUnit({name: t}, lasting=True) for name, t in tensors.items()), room)

    def wanted(name: str) -> bool:
        return options.only in name

    ways = [(name, way, turns, False) for name, way in paths.paths(torch.device(device)).items()]
    if (
        device == "cpu" and precision == "bf16"
    ):  # the two pieces of memory are made for the second sync, and read after the third
        ways.insert(1, (f"{ways[0][0]}, read where it is", ways[0][1], replace(turns, first=3), True))
    for name, way, counted, stay in ways:
        if not wanted(name) or ("messages" in name and megabytes > options.messages):
            continue
        try:
            gpu = 1 if "NCCL" in name and torch.cuda.device_count() > 1 else 0
            for what, row in through_buckets(way, options.bucket, stream, counted, gpu, changes, stay):
                rows[name + what] = print_row(megabytes, precision, name + what, row, whole)
        except SyncError as error:
            print(f"{name} is not measured: {error}", flush=True)
    if wanted("copy within the process"):
        rows["copy within the process"] = print_row(
            megabytes, precision, "copy within the process", copied(stream, turns), whole
        )
    if wanted("Ray") and device == "cpu" and find_spec("ray"):
        rows["Ray's object store"] = print_row(
            megabytes, precision, "Ray's object store", through_ray(stream, turns), whole
        )
    tensors.clear()
    if precision == "bf16" and wanted("one storage"):
        rows["one storage"] = print_row(megabytes, precision, "one storage", shared(megabytes, turns), whole)
    return {"megabytes": megabytes, "precision": precision, "repeats": turns.repeats, "paths": rows}


def print_row(megabytes: int, precision: str, name: str, row: dict[str, Any], whole: int) -> dict[str, Any]:
    """What is saved of a path's turns, printed too; ``whole`` bytes are the BF16 weights."""
    seconds, limits, own = row.pop("turns"), row.pop("limits"), row.pop("limit", None)
    ratios = sorted(row["bytes"] / s / (own or limit) for s, limit in zip(seconds, limits, strict=True))
    row["gb_per_second"] = row["bytes"] / row["seconds"] / 1e9
    row["limit_gb_per_second"] = (own or median(limits)) / 1e9
    row["of_limit"] = quantiles(ratios, n=4, method="inclusive")[0] if len(ratios) > 1 else ratios[0]
    row["of_copy"] = median(s / (whole / limit) for s, limit in zip(seconds, limits, strict=True))
    print(
        f"{megabytes:>6} MB {precision:>5}  {name:56} {row['seconds']:9.4f} s {row['bytes'] / 1e6:9.2f} MB {row['gb_per_second']:9.2f} GB/s "
        f"{row['of_limit']:6.2f} of its limit, {row['of_copy']:6.2f} x a copy of BF16",
        flush=True,
    )
    return row


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--megabytes", default="1,16,128,1000,4000", help="sizes of the BF16 weights")
    parser.add_argument("--precision", default="bf16,fp8")
    parser.add_argument("--bucket", type=int, default=512 << 20, help="bytes of a bucket, at most")
    parser.add_argument("--repeats", type=int, default=8, help="of sizes up to 128 MB; fewer of larger ones")
    parser.add_argument("--only", default="", help="paths whose name has this in it")
    parser.add_argument("--side", type=int, default=2048, help="rows and columns of a matrix")
    parser.add_argument(
        "--messages", type=int, default=1000, help="megabytes up to which messages are measured: all is held twice"
    )
    parser.add_argument("--save", nargs="?", const="", metavar="VARIANT", help="a word for the file's name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    freeze_gc()  # as a run does
    results = [
        measure(size, precision, options)
        for size in map(int, options.megabytes.split(","))
        for precision in options.precision.split(",")
    ]
    gpu = torch.cuda.get_device_name() if options.device != "cpu" else ""
    result = {"device": options.device, "gpu": gpu, "bucket": options.bucket, "results": results}
    variant = "-".join(filter(None, ["" if options.device == "cpu" else "gpu", options.save]))
    finish("weight_sync", result, options.save is not None, lambda: installed("torch"), variant)


if __name__ == "__main__":
    main()
