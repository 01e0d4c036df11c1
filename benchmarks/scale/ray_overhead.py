"""What a runtime of many processes costs a step: the same run with everything in one process and with trainer and engine under Ray.

One trainer rank and one engine, which take turns (``--schedule sync``), so that two cores are enough: what differs is what the driver,
the calls between processes and the weights in the object store take. The number of prompts is chosen so that a step takes about a
second in one process. Every process computes with one thread. The two take turns, and a phase's seconds are the lower quartile over all
steps, because on a shared machine a step takes up to half as long again as the one before it. ``ray_itself`` is what Ray takes without
us on the machine: a call of an actor that does nothing, and how much longer the same products take in an actor than in this process. Run:
``python benchmarks/scale/ray_overhead.py --save`` (five minutes).
"""

from __future__ import annotations

import io
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.measure import ROOT, finish, installed, options
from benchmarks.training.workload import make_workload
from miles_core.config.load import load
from miles_core.launch import launch
from miles_core.observe.metrics import read
from miles_core.run.prepare import apply_plan, prepare

WARM_UP = 3


def measure(directory: Path, words: list[str], steps: int) -> list[dict[str, Any]]:
    """The metrics of one run's steps, warm-up left out."""
    config = load([*words, "--num-rollout", str(WARM_UP + steps), "--save", str(directory)])
    plan, catalogue = prepare(config)
    launch(apply_plan(config, plan), plan, catalogue, Console(file=io.StringIO()))
    return read(directory / "metrics.jsonl")[WARM_UP:]


class Idle:
    """An actor with nothing of ours: its calls, and products in it."""

    async def nothing(self) -> None:
        """A call."""

    async def products(self) -> float:
        """Seconds of products that take about as long as a decoding step, one after another."""
        return products()


def products() -> float:
    """See ``Idle.products``."""
    import torch

    torch.set_num_threads(1)
    a = torch.rand(300, 300)
    started = time.perf_counter()
    for _ in range(400):
        a @ a
    return time.perf_counter() - started


def ray_itself() -> dict[str, float]:
    """What Ray takes on this machine, whoever uses it."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    actor = ray.remote(Idle).remote()

    def typical(what: Callable[[], float], count: int) -> float:
        what()
        return statistics.quantiles(what() for _ in range(count))[0]

    def call() -> float:
        started = time.perf_counter()
        ray.get(actor.nothing.remote())
        return time.perf_counter() - started

    try:
        there, here = typical(lambda: ray.get(actor.products.remote()), 12), typical(products, 12)
        return {"seconds_a_call": round(typical(call, 50), 5), "products_in_an_actor_to_here": round(there / here, 3)}
    finally:
        ray.shutdown()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step")
    parser.add_argument("--samples", type=int, default=8, help="samples a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens a response")
    parser.add_argument("--steps", type=int, default=10, help="steps measured a run")
    parser.add_argument("--runs", type=int, default=6, help="runs of each, in turns")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(1)
    found: dict[str, list[dict[str, Any]]] = {"inline": [], "ray": []}
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        work = make_workload(place)
        words = ["--hf-checkpoint", str(work.checkpoint), "--prompt-data", str(work.prompt_file), "--device", "cpu"]
        words += ["--custom-rm-path", f"{ROOT}/benchmarks/training/workload.py:rm", "--log-level", "error"]
        words += ["--rollout-batch-size", str(chosen.prompts), "--n-samples-per-prompt", str(chosen.samples)]
        words += ["--rollout-max-response-len", str(chosen.tokens), "--lr", "1e-6", "--input-key", "prompt"]
        for turn in range(chosen.runs):
            for runtime, records in found.items():
                records += measure(place / f"{runtime}{turn}", [*words, "--runtime", runtime], chosen.steps)
                print(runtime, turn, file=sys.stderr, flush=True)
    phases = ("step", "rollout", "prepare", "train", "sync", "other")
    seconds = {
        name: {phase: round(statistics.quantiles(r[f"time/{phase}"] for r in records)[0], 4) for phase in phases}
        for name, records in found.items()
    }
    overhead = seconds["ray"]["step"] - seconds["inline"]["step"]
    result = {
        "prompts": chosen.prompts,
        "samples": chosen.samples,
        "tokens": chosen.tokens,
        "steps": chosen.steps * chosen.runs,
        "bytes_a_sync": found["ray"][-1]["sync/bytes"],
        "requests_a_step": chosen.prompts * chosen.samples,
        "seconds": seconds,
        "overhead_seconds": round(overhead, 4),
        "overhead_of_step": round(overhead / seconds["inline"]["step"], 4),
        "ray_itself": ray_itself(),
    }
    finish(Path(__file__).stem, result, chosen.save, lambda: installed("torch", "ray"))


if __name__ == "__main__":
    main()
