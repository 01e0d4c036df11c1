"""The plugin ``true_on_policy``: the gap between engine and trainer by family and by number format, and its time.

Families: tiny random checkpoints. The engine samples seven requests that share prompts and end at different steps, at most five
at once; the trainer scores them in micro-batches of 1, 3 and all samples, with and without shared prompts. The table has the largest
|difference| of a token's log-probabilities over all of these, without and with the plugin. With the plugin it has to be exactly 0.

Formats: two steps of a toy run whose engine and trainer compute in the format, emulated; the larger ``mismatch/abs_log_prob``, a mean over
tokens.

Native: the same in BF16 with the GPU's FP8 products (``--device cuda``), at first with the plain choice of kernels, then with
``--fp8-fixed-order`` and the plugin.

Time: the step of ``grpo_step.py`` with and without the plugin, in two processes that take turns; with ``--device cuda`` that of its GPU
models ``--models``, and ``--only kernels`` compares the plugin's products and attention with the libraries'. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.measure import ROOT, Worker, finish, installed, median_interval, medians, options, spread
from miles_core.contracts.engine import Request, Sampling
from miles_core.contracts.trainer import Callbacks
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_core.errors import PlanError
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.load import load_model
from miles_embedded.testing.families import FAMILIES, family_checkpoint
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing import plan, toy_run
from miles_true_on_policy.hooks import make_invariant

DTYPES = ("float32", "bfloat16")
FORMATS = ("fp8", "mxfp8", "nvfp4", "int4")
#: Whole blocks of every format.
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
PROMPTS = [[3, 4, 5]] * 3 + [[6, 7, 8, 9, 10, 11, 12, 13, 14]] * 2 + [[20] * 11, [2]]
#: Micro-batches of the trainer: samples, and whether prompts are computed once.
SPLITS = ((1, True), (3, True), (100, True), (100, False))


def load(checkpoint: Path, dtype: str, exact: bool, device: str) -> nn.Module:
    """The model of one side."""
    model = load_model(checkpoint, dtype, device)
    if exact:
        make_invariant(model)
    return model


def generate(model: nn.Module) -> list[Sample]:
    """Sample the requests."""
    engine = EmbeddedEngine(model, Settings(str, eos=[], max_context=64, max_running_requests=5))
    requests = [Request(p, Sampling(7 + 2 * i, ignore_eos=True), key=i) for i, p in enumerate(PROMPTS)]

    async def main() -> list[Any]:
        return await asyncio.gather(*[engine.generate(r) for r in requests])

    samples = []
    for i, (request, response) in enumerate(zip(requests, asyncio.run(main()), strict=True)):
        tokens = [*request.tokens, *response.tokens]
        samples.append(Sample(tokens=tokens, response_length=len(response.tokens), index=i))
        samples[-1].rollout_log_probs = response.log_probs
    return samples


def gap(checkpoint: Path, dtype: str, exact: bool, device: str) -> float:
    """Largest |difference| of a log-probability, in nats, over all splits."""
    samples = generate(load(checkpoint, dtype, exact, device))
    engine = np.concatenate([np.asarray(s.rollout_log_probs, np.float32) for s in samples])
    batch, model = collate(samples), load(checkpoint, dtype, exact, device)
    largest = 0.0
    for count, share in SPLITS:
        settings = TrainerConfig(OptimizerConfig(), micro_batch_size=count, share_prompts=share)
        trainer = EmbeddedTrainer(model, settings)
        trainer.bind(Callbacks(trainer.forward, None, trainer.optimizer_step))
        found = trainer.log_probs(batch, "old")["log_probs"].cpu()[batch.mask.bool()].numpy()
        largest = max(largest, float(np.abs(found - engine).max()))
    return largest


def measure_families(families: list[str], device: str) -> dict[str, Any]:
    """Family -> dtype -> gap without and with the plugin; a string where the plan refuses the family."""
    table: dict[str, Any] = {}
    for family in families:
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = family_checkpoint(family, directory)
            try:
                plan(["true_on_policy"], hf_checkpoint=checkpoint, prompt_data="none.jsonl")
            except PlanError as error:
                table[family] = error.problems[0].headline
                continue
            table[family] = {d: [gap(checkpoint, d, exact, device) for exact in (False, True)] for d in DTYPES}
        print(family, table[family], file=sys.stderr, flush=True)
    return table


def measure_formats(device: str) -> dict[str, Any]:
    """Family -> format -> dtype -> largest ``mismatch/abs_log_prob`` of two steps without and with the plugin; a string where the plan
    refuses the format."""
    table: dict[str, Any] = {}
    for family in ("qwen3", "qwen3_moe"):
        for name in FORMATS:
            found: Any = {}
            try:
                for dtype in DTYPES:
                    found[dtype] = [
                        format_gap(family, name, dtype, device, plugins) for plugins in ([], ["true_on_policy"])
                    ]
            except PlanError as error:
                found = error.problems[0].headline
            table.setdefault(family, {})[name] = found
            print(family, name, found, file=sys.stderr, flush=True)
    return table


def format_gap(family: str, name: str, dtype: str, device: str, plugins: list[str]) -> float:
    """Of a run whose engine and trainer compute in the format."""
    more = {"int4_group_size": 32} if name == "int4" else {}
    both = {"rollout_precision": name, "train_precision": name, "emulate_precision": True}
    run = toy_run([name, *plugins], family=family, sizes=SIZES, dtype=dtype, device=device, **both, **more)
    return max(record["mismatch/abs_log_prob"] for record in run.metrics)


def measure_native() -> dict[str, Any]:
    """Family -> bfloat16 -> largest ``mismatch/abs_log_prob`` of two steps with native FP8 products, without and with the plugin."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}
    both: Any = {"rollout_precision": "fp8", "train_precision": "fp8", "quantized_product": "native"}
    table: dict[str, Any] = {}
    for family in ("qwen3", "qwen3_moe"):
        gaps = []
        for plugins, more in ((["fp8"], {}), (["fp8", "true_on_policy"], {"fp8_fixed_order": True})):
            options: Any = {
                "sizes": sizes,
                "dtype": "bfloat16",
                "device": "cuda",
                "rollout_max_response_len": 24,
                **more,
            }
            run = toy_run(plugins, family=family, **options, **both)
            gaps.append(max(record["mismatch/abs_log_prob"] for record in run.metrics))
        table[family] = {"bfloat16": gaps}
        print(family, "native fp8", gaps, file=sys.stderr, flush=True)
    return table


def measure_time(given: argparse.Namespace, gpu: str = "") -> dict[str, Any]:
    """Seconds of a step of both sides, turn by turn after the warm-up; ``gpu``: a model of ``grpo_step.py --gpu``. After ``given.limit``
    seconds no further turn begins, if at least three were measured."""
    from benchmarks.training.workload import make_workload, random_words

    with tempfile.TemporaryDirectory() as directory:
        work = random_words(Path(directory), gpu) if gpu else make_workload(Path(directory))
        command = [sys.executable, str(ROOT / "benchmarks/training/grpo_step.py"), "--worker", "miles"]
        command += ["--checkpoint", str(work.checkpoint), "--prompts", str(work.prompt_file)]
        turns = given.turns + given.warm_up
        command += ["--steps-a-turn", str(given.steps_a_turn)]
        command += ["--steps", str((given.steps_a_turn + 1) * turns + 1)]  # the first step of a turn is not counted
        command += ["--gpu", gpu] if gpu else []
        command += ["--micro-batch", str(given.micro_batch)]
        flags = {"plain": "--num-steps-per-rollout 1", "exact": "--num-steps-per-rollout 1 --plugins true_on_policy"}
        workers = [Worker(name, [*command, f"--worker-flags={more}"], given.threads) for name, more in flags.items()]
        reports: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
        started = time.monotonic()
        try:
            for turn in range(turns):
                if len(reports["plain"]) >= 3 and time.monotonic() - started > given.limit:
                    break
                for worker in workers if turn % 2 else workers[::-1]:
                    report = worker.turn()
                    print(gpu, "turn", turn, worker.name, json.dumps(report), file=sys.stderr, flush=True)
                    if turn >= given.warm_up:
                        reports[worker.name].append(report)
        finally:
            for worker in workers:
                worker.close()
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(reports["plain"], reports["exact"], strict=True)]
    return {
        "threads": given.threads,
        "turns": len(ratios),
        "steps_a_turn": given.steps_a_turn,
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_median_interval": [round(x, 3) for x in median_interval(ratios)],
        "largest_gap": {name: max(report["gap"] for report in found) for name, found in reports.items()},
        "sides": {name: medians(found) | {"range": spread(found)} for name, found in reports.items()},
    }


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=20, help="measured steps of each side")
    parser.add_argument("--steps-a-turn", type=int, default=1, help="counted steps of a turn")
    parser.add_argument("--warm-up", type=int, default=2, help="unmeasured turns of each side")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no turn of a model begins")
    parser.add_argument(
        "--only", nargs="+", choices=("families", "formats", "native", "time", "kernels"), help="measure only these"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=("dense", "moe", "tiny"),
        default=["dense", "moe"],
        help="whose steps are timed on a GPU",
    )
    parser.add_argument(
        "--micro-batch", type=int, default=0, help="tokens in a micro-batch of a timed step (default: of grpo_step.py)"
    )
    parser.add_argument("--variant", default="", help="end of the result file's name")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    parts: dict[str, Callable[[], Any]] = {
        "families": lambda: measure_families(given.families, given.device),
        "formats": lambda: measure_formats(given.device),
        "time": lambda: measure_time(given),
    }
    if given.device == "cuda":
        from benchmarks.mismatch.true_on_policy_kernels import measure_kernels

        parts["time"] = lambda: {model: measure_time(given, model) for model in given.models}
        parts["kernels"] = measure_kernels
        parts["native"] = measure_native
    result = {name: measure() for name, measure in parts.items() if given.only is None or name in given.only}
    tables = [
        *result.get("families", {}).values(),
        *result.get("native", {}).values(),
        *(f for t in result.get("formats", {}).values() for f in t.values()),
    ]
    inexact = [row for row in tables if isinstance(row, dict) and any(exact for _, exact in row.values())]
    plugins = ("miles-core", "miles-plugin-true-on-policy", "torch", "transformers")
    variant = "-".join(
        [*(given.only or []), *(["gpu"] if given.device == "cuda" else []), *([given.variant] if given.variant else [])]
    )
    finish("true_on_policy", result, given.save, lambda: installed(*plugins), variant)
    if inexact:
        print(json.dumps(inexact), file=sys.stderr)
    return bool(inexact)


if __name__ == "__main__":
    sys.exit(main())
