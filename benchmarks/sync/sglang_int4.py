"""INT4 updates of a running SGLang: does it compute the same as an SGLang that loads the codes when it starts, and how long does a sync take?

A random dense model of .47 B parameters and a mixture of experts of .94 B, in a process each, with CUDA graphs for decoding. Two sets of
weights are sent alternately. Then SGLang is restarted twice, and loads one set from files each time. An update is ``equal`` if every
parameter of SGLang has the same bytes as after the restart with the same set. Log-probabilities of scored texts are compared, too. SGLang's
kernels do not repeat them bit for bit: ``repeated`` is their largest difference without an update in between. The kernels are compiled
first. The exit code is 1 if an update differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine import sglang_plugin
from benchmarks.engine.checkpoints import VOCABULARY, make_model
from benchmarks.engine.sglang_engine import tensors_of
from benchmarks.measure import ROOT, finish, installed, options
from benchmarks.scale import checkout

#: Module that SGLang's worker process runs.
_WORKER = "benchmarks.sync.sglang_digest"
_MODULES = ("gptq_marlin", "moe_wna16_marlin")
#: Digest of each parameter, and log-probabilities of the texts.
State = tuple[dict[str, str], np.ndarray]
_FLAGS = "--split-compile=0 -Xptxas=--split-compile=0"


def engine_for(checkpoint: Path, work: Path) -> Any:
    from miles_formats import FormatCodec
    from miles_int4.format import Int4
    from miles_sglang.build import assemble
    from miles_sglang.choices import Choices

    arguments = {
        **{"attention_backend": "triton", "sampling_backend": "pytorch", "mem_fraction_static": 0.6},
        **{"max_total_tokens": 32768, "cuda_graph_bs_decode": [1, 2, 4, 8], "disable_prefill_cuda_graph": True},
    }
    choices = Choices(arguments=arguments, dtype="bfloat16", max_context=1024, startup_timeout=500)
    engine = assemble(checkpoint, FormatCodec(Int4()), lambda tokens: "", work, choices)
    engine.link.worker = _WORKER
    return engine


async def scores(engine: Any) -> np.ndarray:
    """Log-probabilities of the tokens of 8 texts."""
    draw = torch.Generator().manual_seed(3)
    return np.concatenate(await engine.score(torch.randint(2, VOCABULARY, (8, 96), generator=draw).tolist()))


async def digests(engine: Any, work: Path) -> dict[str, str]:
    """Name -> digest of each parameter with which SGLang computes."""
    await engine.link.call("digest", {"path": str(work / "digests.json")})
    return dict(json.loads((work / "digests.json").read_text()))


async def measure(kind: str, given: argparse.Namespace) -> dict[str, Any]:
    """Everything of one model."""
    from miles_core.data import WeightUnit

    sglang_plugin.register(given.work / "plugin", _WORKER)
    checkpoint = make_model(kind, given.work / "model")
    first = tensors_of(checkpoint)
    sets = [first, {name: x.roll(1, 0) if x.ndim > 1 else x for name, x in first.items()}]
    engine = engine_for(checkpoint, given.work / "engine")

    def encoded(which: int) -> Iterator[Any]:
        yield from engine._served.codec.encode(WeightUnit({k: v}, lasting=True) for k, v in sets[which].items())

    started = time.perf_counter()
    await engine.start()
    result: dict[str, Any] = {"start": round(time.perf_counter() - started, 1), "how": engine.hot_update("int4")}
    updates, seconds, process = [], [], engine.link._process
    for version in range(given.updates):
        torch.cuda.synchronize()
        started = time.perf_counter()
        await engine.pause("abort")
        await engine.update_weights(encoded(version % 2), version)
        await engine.resume()
        seconds.append(time.perf_counter() - started)
        updates.append((await digests(engine, given.work), await scores(engine)))
        print(f"{kind}: update {version} took {seconds[-1]:.3f} s", file=sys.stderr, flush=True)
    repeated = float(np.abs(updates[-1][1] - await scores(engine)).max())
    assert engine.link._process is process, "SGLang was restarted"
    fresh, restarts = [], []
    for which in range(2):
        started = time.perf_counter()
        await engine._restart(engine._served.names.check_all(encoded(which)), given.updates + which)
        engine._serve(given.updates + which)
        restarts.append(round(time.perf_counter() - started, 1))
        fresh.append((await digests(engine, given.work), await scores(engine)))
    await engine.stop()
    return result | {
        **compare(updates, fresh),
        "repeated": repeated,
        **{"seconds": [round(s, 3) for s in seconds], "median seconds": round(statistics.median(seconds), 3)},
        **{"restart seconds": restarts, "parameters": sum(x.numel() for x in first.values())},
    }


def compare(updates: Sequence[State], fresh: Sequence[State]) -> dict[str, Any]:
    """Compare what SGLang held after each update with what it held after the restart from the same set of weights."""
    pairs = [(found, fresh[i % 2]) for i, found in enumerate(updates)]
    differing = [[name for name, digest in b[0].items() if a[0].get(name) != digest] for a, b in pairs]
    return {
        **{"updates": len(updates), "equal": differing.count([]), "parameters of SGLang": len(fresh[0][0])},
        "differing": sorted({name for names in differing for name in names})[:20],
        "largest difference": max(float(np.abs(a[1] - b[1]).max()) for a, b in pairs),
        "mean difference of the sets": float(np.abs(fresh[0][1] - fresh[1][1]).mean()),
        "changed by the sets": sum(fresh[0][0][name] != digest for name, digest in fresh[1][0].items()),
    }


def compile_kernels() -> list[float]:
    """Seconds of both kernel modules, compiled at once."""
    worker = str(ROOT / "benchmarks/formats/sglang_worker.py")
    started = [
        subprocess.Popen([sys.executable, worker, "--build", name], stdout=subprocess.PIPE, text=True)
        for name in _MODULES
    ]
    return [float((each.communicate()[0] or "nan").split()[-1]) for each in started]


def run_model(kind: str, given: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Start a process for a model; its result, or its error."""
    work = place / kind
    work.mkdir()
    command = [sys.executable, __file__, "--worker", kind, "--work", str(work), "--updates", str(given.updates)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(command, env=environment, timeout=given.limit, check=False)
    if (work / "result.json").exists():
        return dict(json.loads((work / "result.json").read_text()))
    log = work / "engine" / "sglang.log"
    return {"error": log.read_text(errors="replace")[-3000:] if log.exists() else "no result"}


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=("dense", "moe"), default=["dense", "moe"])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--limit", type=float, default=300, help="seconds of a model")
    parser.add_argument("--worker", choices=("dense", "moe"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        found = asyncio.run(measure(given.worker, given))
        (given.work / "result.json").write_text(json.dumps(found))
        return 0
    os.environ.setdefault("NVCC_APPEND_FLAGS", _FLAGS)
    compiled = compile_kernels()
    print(f"compiled {_MODULES} in {compiled} s", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(len(given.models)) as pool:
        checkout.register(Path(directory), ["sglang", "int4"], ["sglang"])
        runs = {kind: pool.submit(run_model, kind, given, Path(directory)) for kind in given.models}
        rows = {kind: run.result() for kind, run in runs.items()}
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    result = {"gpu": gpu, "compile seconds": compiled, "models": rows}
    finish("sglang_int4", result, given.save, lambda: installed("torch", "transformers", "sglang"))
    return int(any("error" in row or row["equal"] < row["updates"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
