"""Measures how much longer a training step of the embedded trainer takes with r3. Two trainers of the same model take turns; one replays experts.

No engine takes part: records are random and equal for the shared prompt of a group, as an engine with a prefix cache makes them. The rows of a
micro-batch are therefore the same on both sides, and the time of a step differs by replay only. ``--profile`` prints what differs between two
profiled steps: events of the GPU and of the host by total time, with their numbers, and the host's waits.

On a GPU ``--model moe --groups 32 --max-tokens 8192`` is the training half of ``r3_overhead.py --gpu moe``; on a CPU ``--model tiny`` rehearses it.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from embedded_training import SAMPLES, make_batch
from measure import finish, installed, options
from r3_overhead import median_interval
from sglang_engine import EXPERTS, SIZES, make_model

from miles_core.trainer import Callbacks, OptimizerConfig
from miles_embedded import load_model
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_r3 import ROUTES
from miles_r3.config import R3Config
from miles_r3.hooks import R3
from miles_testing.yardstick import weighted

#: Rows of the table that ``--profile`` prints, for the GPU and for the host.
ROWS = 14


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=["tiny", "moe"], default="tiny")
    parser.add_argument(
        "--groups", type=int, default=2, help="prompts with 8 samples of 320 tokens in a step (default: 2)"
    )
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens of a micro-batch (default: 8192)")
    parser.add_argument("--turns", type=int, default=8, help="measured steps of each side (default: 8)")
    parser.add_argument("--warm-up", type=int, default=2, help="unmeasured steps of each side (default: 2)")
    parser.add_argument(
        "--profile", action="store_true", help="print the events that differ between two profiled steps"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = make_model("moe" if given.model == "moe" else "tiny", Path(directory) / "model")
        trainers = {"plain": make_trainer(given, checkpoint, False), "r3": make_trainer(given, checkpoint, True)}
    batch = make_batch(given.groups)
    batches = {"plain": batch, "r3": with_records(batch, int(SIZES[given.model]["num_hidden_layers"]))}
    seconds: dict[str, list[float]] = {"plain": [], "r3": []}
    for turn in range(given.warm_up + given.turns):
        for side in ("plain", "r3") if turn % 2 else ("r3", "plain"):
            took = timed(trainers[side], batches[side])
            if turn >= given.warm_up:
                seconds[side].append(took)
    ratios = [b / a for a, b in zip(seconds["plain"], seconds["r3"], strict=True)]
    result = {
        "model": given.model,
        "threads": given.threads,
        "samples": given.groups * SAMPLES,
        "micro_batches": len(trainers["r3"].split(batches["r3"])),
        "seconds": {side: round(statistics.median(times), 4) for side, times in seconds.items()},
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_median_interval": [round(x, 4) for x in median_interval(ratios)],
    }
    if torch.cuda.is_available():
        result["allocation_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    versions = ("miles-core", "miles-plugin-r3", "torch", "transformers")
    variant = "" if given.model == "tiny" else f"gpu-{given.model}"
    finish("r3_training", result, given.save, lambda: installed(*versions), variant, quiet=given.profile)
    if given.profile:
        compare({side: profiled(trainers[side], batches[side]) for side in ("plain", "r3")})
        finish("r3_training", result, False, lambda: installed(*versions), variant)


def make_trainer(given: argparse.Namespace, checkpoint: Path, replays: bool) -> EmbeddedTrainer:
    """A trainer with a model of its own; ``replays``: with r3."""
    model = load_model(checkpoint, "bfloat16", "cuda" if torch.cuda.is_available() else "cpu")
    plugin = R3(R3Config())
    if replays:
        plugin.on_model(model, "train")
    config = TrainerConfig(OptimizerConfig(lr=1e-6), micro_batch_size=None, max_tokens=given.max_tokens)
    trainer = EmbeddedTrainer(model, config)
    run: Any = SimpleNamespace(plan=SimpleNamespace(fact=lambda name, default=None: EXPERTS["num_experts"]))
    wrap = plugin.wrap_forward(run, SimpleNamespace(generates=True)) if replays else None
    trainer.bind(Callbacks(wrap(trainer.forward) if wrap else trainer.forward, weighted, trainer.optimizer_step))
    return trainer


def with_records(batch: Any, layers: int) -> Any:
    """The batch with random records of experts, [tokens, layers, experts per token]; equal in the prompts of a group."""
    draw = np.random.default_rng(3)
    scores = draw.random((len(batch.tokens), layers, EXPERTS["num_experts"]), np.float32)
    records = scores.argpartition(EXPERTS["num_experts_per_tok"], axis=2)[..., : EXPERTS["num_experts_per_tok"]]
    records = records.astype(ROUTES.dtype)
    starts, prompts, lengths = (x.tolist() for x in (batch.starts, batch.prompt_lengths, batch.lengths))
    for number, (start, prompt, length) in enumerate(zip(starts, prompts, lengths, strict=True)):
        first = starts[number - number % SAMPLES]
        records[start : start + prompt] = records[first : first + prompt]
        records[start + length - 1] = ROUTES.pad
    made = batch.select(range(len(batch)))
    made.columns[ROUTES.name] = torch.from_numpy(records)
    made.inputs = batch.inputs | {ROUTES.name}
    return made


def timed(trainer: EmbeddedTrainer, batch: Any) -> float:
    """Seconds of one step, with what the learner does for it: all samples of the rollout are selected."""
    synchronize()
    started = time.perf_counter()
    trainer.step(batch.select(range(len(batch))))
    synchronize()
    return time.perf_counter() - started


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def profiled(trainer: EmbeddedTrainer, batch: Any) -> dict[str, dict[str, tuple[float, int]]]:
    """Milliseconds and number of each event of one step: ``gpu`` (kernels and copies) and ``host`` (operations and calls of CUDA)."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds) as seen:
        timed(trainer, batch)
    found: dict[str, dict[str, tuple[float, int]]] = {"gpu": {}, "host": {}}
    for event in seen.key_averages():
        on_gpu = str(event.device_type).endswith("CUDA")
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        found["gpu" if on_gpu else "host"][event.key[:70]] = (spent / 1e3, event.count)
    return found


def compare(sides: dict[str, dict[str, dict[str, tuple[float, int]]]]) -> None:
    """Print the events whose time differs most between the two sides."""
    for place in ("gpu", "host"):
        plain, replayed = sides["plain"][place], sides["r3"][place]
        sums = [(sum(t for t, _ in side.values()), sum(n for _, n in side.values())) for side in (plain, replayed)]
        print(
            f"{place}: plain {sums[0][0]:.1f} ms, {sums[0][1]} events; r3 {sums[1][0]:.1f} ms, {sums[1][1]} events",
            file=sys.stderr,
        )
        nothing = (0.0, 0)
        rows = [(replayed.get(k, nothing), plain.get(k, nothing), k) for k in {*plain, *replayed}]
        for (t, n), (before, count), name in sorted(rows, key=lambda row: -abs(row[0][0] - row[1][0]))[:ROWS]:
            print(f"  {t - before:+9.2f} ms {n - count:+6d}   {before:9.2f} -> {t:9.2f}   {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
