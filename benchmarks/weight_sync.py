"""Weights from a trainer to an engine: every path of the plugin ``zero_copy`` and core's copy, against one copy of memory.

    python benchmarks/weight_sync.py --save
    python benchmarks/weight_sync.py --device cuda --megabytes 1000,8000,30000 --precision bf16,fp8 --save

Random matrices of [4096, 4096] (smaller ones for few megabytes) are encoded and sent as a run sends them, checksums included. The
receiver of buckets is another process that copies each tensor into its own, codes as codes. ``of_limit`` is the speed in
units of one plain copy of as many bytes within one memory, measured beside it. One storage is measured on a Llama of that size.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from measure import finish, installed
from torch import nn

from miles_core.backend import Codec, CopyTransport, Encoded, Inbox, Unit
from miles_core.precision.installed import format_class
from miles_zero_copy import paths
from miles_zero_copy.sender import Sender


def matrices(megabytes: int, device: str) -> dict[str, torch.Tensor]:
    """Named BF16 matrices of about so many megabytes."""
    side = 4096 if megabytes >= 64 else 512 if megabytes >= 4 else 256
    count = max(megabytes * 10**6 // (2 * side * side), 1)
    one = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    return {f"model.layers.{i}.self_attn.q_proj.weight": (one * (1 + i / count)) for i in range(count)}


def receiver(connection: Connection, device: str) -> None:
    """Another process: takes messages and copies what is in them into tensors of its own."""
    torch.set_num_threads(1)
    inbox, own = Inbox(), dict[str, torch.Tensor]()
    while (message := connection.recv()) is not None:
        try:
            for unit in inbox.open(message):
                for name, tensor in unit.parts.items():
                    if name not in own:
                        own[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    own[name].copy_(tensor)
            if device != "cpu":
                torch.cuda.synchronize()
            connection.send("")
        except Exception as error:  # is told to the sender
            connection.send(f"{type(error).__name__}: {error}")


class Elsewhere:
    """The receiver as an engine: ``receive`` returns when it has acknowledged."""

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=receiver, args=(there, device), daemon=True)
        self.process.start()

    async def receive(self, message: Any, last: bool) -> None:
        """One message."""
        self.connection.send(message)
        said = await asyncio.get_running_loop().run_in_executor(None, self.connection.recv)
        if said:
            raise SystemExit(f"the receiver: {said}")

    def close(self) -> None:
        """End it."""
        self.connection.send(None)
        self.process.join()


class Here:
    """An engine in this process that copies each tensor into its own."""

    def __init__(self) -> None:
        self.own: dict[str, torch.Tensor] = {}

    async def update_weights(self, units: Iterator[Encoded], version: int) -> None:
        """Take them."""
        for unit in units:
            for name, tensor in unit.parts.items():
                self.own.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def timed(send: Any, repeats: int, device: str) -> float:
    """Median seconds of a sync, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        send()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def through_buckets(path: paths.Path, bucket: int, tensors: Any, codec: Codec, repeats: int, device: str) -> dict:
    """A path to another process."""
    engine = Elsewhere(device)
    with asyncio.Runner() as runner:
        sender = Sender(path.make, bucket, (0, 1))
        encoded = 0

        def send() -> None:
            nonlocal encoded
            stream = codec.encode((Unit({name: t}, lasting=True) for name, t in tensors.items()), sender.room)
            encoded = runner.run(sender.send(stream, engine.receive)).nbytes

        seconds = timed(send, repeats, device)
        sender.close()
        engine.close()
    return {"seconds": seconds, "bytes": encoded}


def copied(tensors: Any, codec: Codec, repeats: int, device: str) -> dict:
    """Core's copy, within the process."""
    transport = CopyTransport(Here())  # type: ignore[arg-type]
    report: Any = None

    def send() -> None:
        nonlocal report
        report = asyncio.run(
            transport.send(codec.encode(Unit({name: t}, lasting=True) for name, t in tensors.items()), 1)
        )

    seconds = timed(send, repeats, device)
    return {"seconds": seconds, "bytes": report.nbytes}


def shared(megabytes: int, repeats: int, device: str) -> dict:
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
        return prepare(made.to_empty(device=device))

    trainer, engine, held, nbytes = model(), model(), set[str](), 0

    def send() -> None:
        nonlocal nbytes
        update = Update(engine, None, held, share=True)
        update.take(Codec().encode(export(trainer)))
        nbytes = update.finish()

    seconds = timed(send, repeats, device)
    return {"seconds": seconds, "bytes": nbytes}


def measured(megabytes: int, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """All paths for one size and number format."""
    device, repeats = options.device, options.repeats
    codec = Codec() if precision == "bf16" else Codec(format_class(precision)())
    tensors = matrices(megabytes, device)
    limit = paths.copy_speed(min(megabytes * 10**6, 2 * 10**9), device)
    rows: dict[str, dict] = {}
    for path in paths.paths(torch.device(device)):
        if path.name in options.skip.split(","):
            continue
        rows[path.name] = through_buckets(path, options.bucket, tensors, codec, repeats, device)
    rows["copy within the process"] = copied(tensors, codec, repeats, device)
    del tensors
    if precision == "bf16":
        rows["one storage"] = shared(megabytes, repeats, device)
    for row in rows.values():
        row["gb_per_second"] = row["bytes"] / row["seconds"] / 1e9
        row["of_limit"] = row["bytes"] / row["seconds"] / limit
    for name, row in rows.items():
        print(
            f"{megabytes:>6} MB {precision:>5}  {name:36} {row['seconds']:9.4f} s {row['gb_per_second']:9.2f} GB/s "
            f"{row['of_limit']:6.2f} of a copy",
            flush=True,
        )
    return {"megabytes": megabytes, "precision": precision, "limit_gb_per_second": limit / 1e9, "paths": rows}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--megabytes", default="1,16,128,1000", help="sizes of the BF16 weights")
    parser.add_argument("--precision", default="bf16,fp8")
    parser.add_argument("--bucket", type=int, default=64 << 20, help="bytes of a bucket")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip", default="", help="paths to leave out, by name")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [
        measured(size, precision, options)
        for size in map(int, options.megabytes.split(","))
        for precision in options.precision.split(",")
    ]
    gpu = torch.cuda.get_device_name() if options.device != "cpu" else ""
    result = {"device": options.device, "gpu": gpu, "bucket": options.bucket, "results": results}
    finish("weight_sync", result, options.save, lambda: installed("torch"), "" if options.device == "cpu" else "gpu")


if __name__ == "__main__":
    main()
