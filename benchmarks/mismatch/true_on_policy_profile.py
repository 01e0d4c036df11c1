"""Where the time of ``true_on_policy`` goes on a GPU: one training step and one rollout with and without it, in one process, in turns.

Random BF16 models of ``sglang_engine.py`` and the sizes of ``grpo_step.py --gpu``: 32 prompts of 64 tokens x 8 samples of 256 tokens. For each
side: seconds, the process's CPU seconds and peak memory without a profiler (medians of the turns), the sum of the GPU's kernels under one, their
number, and the kernels that took most. A step whose kernels take much less than its seconds waits for the host.

The last line is one JSON object; ``--log FILE`` receives the host's functions (``cProfile``).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import pstats
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.sglang_engine import VOCABULARY, make_model
from benchmarks.measure import finish, installed, medians, options
from miles_core.contracts.engine import Request, Sampling
from miles_core.contracts.trainer import Callbacks, Context, Loss, Output
from miles_core.data.batch import Batch, collate
from miles_core.data.sample import Sample
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.load import load_model
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_true_on_policy.hooks import make_invariant

SIDES = ("plain", "exact")
#: Kernels whose names a result has, by time.
SHOWN = 14


def make_samples(given: argparse.Namespace) -> list[Sample]:
    """Random samples of shared prompts."""
    draw, samples = random.Random(1), []
    for group in range(given.prompts):
        prompt = [draw.randrange(2, VOCABULARY) for _ in range(given.prompt_tokens)]
        for i in range(8):
            answer = [draw.randrange(2, VOCABULARY) for _ in range(given.tokens)]
            sample = Sample(tokens=prompt + answer, response_length=len(answer), loss_mask=[1] * len(answer))
            sample.index, sample.group_index = 8 * group + i, group
            samples.append(sample)
    return samples


def loss(output: Output, micro_batch: Batch, ctx: Context) -> Loss:
    """The mean log-probability of a token, which needs what a policy gradient needs."""
    assert output.log_probs is not None
    total = (output.log_probs * micro_batch.mask).sum()
    return Loss(total / max(len(micro_batch.tokens), 1), {})


def steps_of(model: Any, given: argparse.Namespace, samples: list[Sample]) -> dict[str, Callable[[], Any]]:
    """One training step, and one rollout, of a model."""
    config = TrainerConfig(OptimizerConfig(lr=1e-6), max_tokens=given.micro_batch)
    trainer = EmbeddedTrainer(model, config)
    trainer.bind(Callbacks(trainer.forward, loss, trainer.optimizer_step))
    engine = EmbeddedEngine(model, Settings(str, eos=[], max_context=given.prompt_tokens + given.tokens))
    batch, asked = collate(samples), [sample.tokens[: given.prompt_tokens] for sample in samples]

    async def answers() -> Any:
        sampling = Sampling(given.tokens, ignore_eos=True)
        requests = [Request(list(p), sampling, key=i, group=i // 8) for i, p in enumerate(asked)]
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return {"train": lambda: trainer.step(batch), "rollout": lambda: asyncio.run(answers())}


def library_sizes(model: Any) -> dict[str, list[int]]:
    """Inner x columns of each product on a GPU -> the sizes of its pieces that the plugin's kernel computes, since the library's bits differ."""
    if not torch.cuda.is_available():
        return {}
    from miles_true_on_policy.library import compare

    shapes = {(*p.shape, p.dtype, p.device) for p in model.parameters() if p.dim() == 2}
    tried = {f"{shape[1]}x{shape[0]}": compare(*shape) for shape in sorted(shapes, key=str)}
    return {name: [size for size, equal in sizes.items() if not equal] for name, sizes in tried.items()}


def seconds_of(step: Callable[[], Any]) -> float:
    """Seconds of a step, the GPU's work included."""
    wait()
    started = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - started


def measure_turn(step: Callable[[], Any]) -> dict[str, float]:
    """Seconds of a step, of the process's threads in it, peak gigabytes, and allocations that the GPU's driver had to make."""
    before = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    if before:
        torch.cuda.reset_peak_memory_stats()
    cpu = time.process_time()
    found = {"seconds": seconds_of(step), "cpu_seconds": time.process_time() - cpu}
    if before:
        after = torch.cuda.memory_stats()
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        found["driver_allocations"] = after["num_device_alloc"] - before["num_device_alloc"]
    return found


def wait() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def kernels_of(step: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds and number of the GPU's kernels of a step, and those that take most."""
    kinds = [torch.profiler.ProfilerActivity.CUDA if torch.cuda.is_available() else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        wait()
    rows = [
        (e.self_device_time_total / 1e3, e.count, e.key) for e in profile.key_averages() if e.self_device_time_total > 0
    ]
    rows.sort(reverse=True)
    largest = [{"ms": round(ms, 2), "count": count, "kernel": name[:90]} for ms, count, name in rows[:SHOWN]]
    return {"gpu_ms": round(sum(r[0] for r in rows), 1), "launches": sum(r[1] for r in rows), "largest": largest}


def host_profile(step: Callable[[], Any]) -> str:
    """The functions of the host in which a step spends most time."""
    profile = cProfile.Profile()
    profile.enable()
    step()
    wait()
    profile.disable()
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(45)
    return out.getvalue()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=("dense", "moe", "tiny"), default="dense")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=16384)
    parser.add_argument("--parts", nargs="+", choices=("train", "rollout"), default=["train", "rollout"])
    parser.add_argument("--log", type=Path, help="file for the host's functions")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device, samples = "cuda" if torch.cuda.is_available() else "cpu", make_samples(given)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = make_model(given.model, Path(directory) / "model")
        models = {side: load_model(checkpoint, "bfloat16", device) for side in SIDES}
    make_invariant(models["exact"])
    steps = {side: steps_of(model, given, samples) for side, model in models.items()}
    result: dict[str, Any] = {"model": given.model, "micro_batch": given.micro_batch}
    result["library_sizes_that_differ"] = library_sizes(models["exact"])
    print("library sizes that differ", result["library_sizes_that_differ"], file=sys.stderr, flush=True)
    for part in given.parts:
        for side in SIDES:
            print(part, side, "first", round(seconds_of(steps[side][part]), 2), "s", file=sys.stderr, flush=True)
        taken: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(given.turns):
            for side in SIDES:
                taken[side].append(measure_turn(steps[side][part]))
        found: dict[str, Any] = {}
        for side in SIDES:
            found[side] = {**medians(taken[side]), "turns": [round(turn["seconds"], 4) for turn in taken[side]]}
            found[side] |= kernels_of(steps[side][part])
            print(part, side, {k: v for k, v in found[side].items() if k != "largest"}, file=sys.stderr)
            print(*map(str, found[side]["largest"]), sep="\n", file=sys.stderr, flush=True)
            if given.log:
                with given.log.open("a") as log:
                    log.write(f"== {given.model} {part} {side}\n{host_profile(steps[side][part])}\n")
        found["ratio"] = round(found["exact"]["seconds"] / found["plain"]["seconds"], 3)
        result[part] = found
    finish(
        "true_on_policy_profile",
        result,
        given.save,
        lambda: installed("miles-core", "torch", "transformers"),
        given.model,
    )


if __name__ == "__main__":
    main()
