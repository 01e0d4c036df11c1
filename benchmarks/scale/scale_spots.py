"""Exponents of the driver's work: seconds of the processor at growing sizes, whole steps and spots that used to be quadratic or to block.

An exponent near 1 means that the work grows in proportion to the size. Whole steps run the real loop with an engine and a trainer that
cost nothing (``driver_double.py``); their work includes what other threads of the driver do, and not that of other processes. Run:
``python benchmarks/scale/scale_spots.py --save`` (ten minutes), or ``--only WORD`` for the measurements whose names contain a word.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import finish, installed, options
from miles_core import loop
from miles_core.cli.main import main as run_command
from miles_core.data.prompts import Prompts
from miles_core.engine import Response
from miles_core.rollout.continuation import cut_at_stop, join_parts
from miles_planner.simulation.simulation import simulate
from miles_testing.toy import toy_arguments
from miles_workers.least_loaded import LeastLoaded
from miles_workers.output import Output

SPOTS: dict[str, tuple[str, tuple[int, ...], Callable[[int, Path], None]]] = {}
Measure = Callable[[int, Path], None]


def spot(name: str, unit: str, *sizes: int) -> Callable[[Measure], Measure]:
    """Register a measurement: what grows, and the sizes."""

    def register(function: Measure) -> Measure:
        SPOTS[name] = unit, sizes, function
        return function

    return register


def _decode(tokens: list[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


@spot("stop strings after one abort", "tokens before the abort, as many after it", 4096, 16384, 65536)
def look_for_stop(size: int, directory: Path) -> None:
    parts = [Response([1] * size, [-1.0] * size, finish) for finish in ("abort", "stop")]
    cut_at_stop(parts, ("bcd",), (), _decode)
    join_parts(parts, ("bcd",), (), _decode)


@spot("choice of an engine, 64 requests each", "engines", 256, 1024, 4096)
def choose_engines(size: int, directory: Path) -> None:
    load, engines = LeastLoaded(), set(range(size))
    for _ in range(64 * size):
        load.add(load.choose(engines), 1)


@spot("reading the output of workers, one of them writes", "workers", 256, 1024, 4096)
def read_output(size: int, directory: Path) -> None:
    folder = directory / "workers"
    folder.mkdir(parents=True)
    for number in range(size):
        (folder / f"worker-{number}.log").write_text("a line\n")
    output = Output(directory)
    with (folder / "worker-0.log").open("a") as file:
        file.write("another line\n")
    start = time.process_time()
    assert len(output._read_new()) == 1
    _EXACT[size] = time.process_time() - start


#: Seconds without the preparation, where a measurement knows them.
_EXACT: dict[int, float] = {}


@spot("opening a prompt file", "rows", 10_000, 40_000, 160_000)
def open_file(size: int, directory: Path) -> None:
    file = directory / "prompts.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    with file.open("w") as out:
        out.writelines(json.dumps({"input": f"question {n} " + "x" * 100}) + "\n" for n in range(size))
    start = time.process_time()
    assert len(Prompts(str(file))) == size
    _EXACT[size] = time.process_time() - start


def _simulate(size: int, schedule: str, directory: Path) -> None:
    directory.mkdir(parents=True)
    curve = directory / "curve.json"
    curve.write_text(json.dumps({"batches": [1, 512], "seconds": [0.01, 0.02]}))
    flags: dict[str, Any] = {
        "--schedule": schedule,
        "--rollout-batch-size": size // 8,
        "--n-samples-per-prompt": 8,
        "--num-rollout": 3,
        "--lengths": "lognormal:1000,1.0",
        "--rollout-max-response-len": 8192,
        "--decode-curve": curve,
        "--engine-gpus": 16,
        "--trainer-gpus": 16,
        "--prefill-seconds-per-token": 0,
        "--train-seconds-per-token": 1e-6,
        "--sync-seconds": 1,
    }
    simulate([str(word) for pair in flags.items() for word in pair])


@spot("loop, sync, samples that end one after the other", "samples per step", 1024, 4096, 16384)
def run_sync(size: int, directory: Path) -> None:
    _simulate(size, "sync", directory)


@spot("loop, async", "samples per step", 1024, 4096)
def run_async(size: int, directory: Path) -> None:
    _simulate(size, "async", directory)


def run_steps(samples: int, length: int, directory: Path, saves: bool, layers: int, workers: int | None = None) -> None:
    """Measure the third of three steps with ``samples`` responses of ``length`` tokens, without the steps that fill caches."""
    directory.mkdir(parents=True)
    (directory / "reward.py").write_text("async def reward(args, sample):\n    return float(sample.index % 2)\n")
    os.environ |= {"DRIVER_TOKENS": str(length), "DRIVER_ROUTES": str(layers)}
    words = toy_arguments(
        [str(Path(__file__).with_name("driver_double.py"))],
        directory=directory / "run",
        steps=3,
        runtime="driver_double",
        rollout_workers=workers,
        rollout_batch_size=samples // 8,
        n_samples_per_prompt=8,
        rollout_max_response_len=length,
        custom_rm_path=directory / "reward.py",
        save_rollouts=saves,
        save_rollouts_size=1 << 40,
    )
    plain = loop.step

    async def step(run: Any, *rest: Any) -> None:
        start = time.process_time()
        await plain(run, *rest)
        _EXACT[max(samples, length)] = time.process_time() - start

    loop.step = step
    try:
        run_command(["train", *words])
    finally:
        loop.step = plain


def measure_steps(name: str, saves: bool, layers: int, workers: int | None = None) -> None:
    """Register the curves of whole steps: more samples, and longer ones."""
    sizes = (4096, 16384) if layers else (4096, 16384, 65536)  # all routes are in memory at once

    @spot(f"step, {name}, responses of 256 tokens", "samples", *sizes)
    def grow_samples(size: int, directory: Path) -> None:
        run_steps(size, 256, directory, saves, layers, workers)

    @spot(f"step, {name}, 64 responses", "tokens of a response", 2048, 8192, 32768)
    def grow_lengths(size: int, directory: Path) -> None:
        run_steps(64, size, directory, saves, layers, workers)


#: Tokens of a step per unit of its size.
_TOKENS = {"samples": 256, "tokens of a response": 64}

measure_steps("plain", saves=False, layers=0)
measure_steps("saved", saves=True, layers=0)
measure_steps("saved with routes of 48 layers", saves=True, layers=48)
measure_steps("saved with routes of 48 layers, a rollout worker", saves=True, layers=48, workers=1)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--largest", type=int, default=1 << 40, metavar="SIZE", help="leave out larger sizes")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    found: dict[str, dict[str, Any]] = {}
    for name, (unit, all_sizes, function) in SPOTS.items():
        sizes = [size for size in all_sizes if size <= chosen.largest]
        if chosen.only not in name or len(sizes) < 2:
            continue
        seconds = []
        for size in sizes:
            _EXACT.clear()
            with tempfile.TemporaryDirectory() as temporary:
                start = time.process_time()
                function(size, Path(temporary) / "run")
                seconds.append(_EXACT.get(size, time.process_time() - start))
        exponent = math.log(seconds[-1] / seconds[0]) / math.log(sizes[-1] / sizes[0])
        found[name] = {
            "unit": unit,
            "sizes": sizes,
            "seconds": [round(s, 4) for s in seconds],
            "exponent": round(exponent, 2),
        }
        if unit in _TOKENS:
            rates = [size * _TOKENS[unit] / taken for size, taken in zip(sizes, seconds, strict=True)]
            found[name]["tokens_per_second"] = [round(rate) for rate in rates]
        print(name, found[name], file=sys.stderr, flush=True)
    finish(Path(__file__).stem, {"spots": found}, chosen.save, lambda: installed("torch"))


if __name__ == "__main__":
    main()
