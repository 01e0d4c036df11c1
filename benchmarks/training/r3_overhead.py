"""What r3 costs a step: the step of ``grpo_step.py`` with and without it, taking turns.

Two processes, held between steps, A B B A, so that neither is always the second. One optimiser step a rollout, or several
(``--mini-steps``), which adds the old-log-probability pass to both sides. The last line is one JSON object: the median of the
ratios turn by turn with its 95 % interval (order statistics; no distribution is assumed), and their quartiles.

``--gpu moe`` takes the step of ``grpo_step.py --gpu`` on a GPU, and ``--engine sglang`` SGLang beside the embedded trainer. Both sides correct by
importance sampling and stay on the GPU, so micro-batches and caches are small. With ``--save`` the result is written after each turn, so a run
that is cut keeps the turns it had: ``turns`` counts them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import Worker, finish, installed, medians, options, spread
from benchmarks.training.grpo_step import GPU_PROMPTS, PROMPTS, device_of


def median_interval(values: list[float]) -> list[float]:
    """The order statistics that hold the median in 95 % of samples (normal approximation of the binomial)."""
    ordered = sorted(values)
    reach = 1.96 * math.sqrt(len(ordered)) / 2
    low, high = math.floor(len(ordered) / 2 - reach), math.ceil(len(ordered) / 2 + reach)
    return [ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]]


#: Flags of a run that shares a GPU with another one, and SGLang's options on it. Two trainers and two SGLangs fit into 80 GB. With smaller
#: micro-batches the host decides how long a training step takes, and its noise is larger than r3's cost.
ON_GPU = "--max-tokens-per-gpu 16384"
SGLANG = """--engine sglang --rollout-max-context-len 328 --sglang-attention-backend triton --sglang-sampling-backend pytorch
    --sglang-moe-runner-backend triton --sglang-cuda-graph-bs-decode 64,256 --sglang-mem-fraction-static 0.2 --sglang-max-total-tokens 100000
    --sglang-sleep-on-idle"""
SGLANG_ON_CPU = "--engine sglang --rollout-max-context-len 328 --sglang-max-total-tokens 8192"


def start(given: argparse.Namespace, directory: Path) -> list[Worker]:
    """The two sides, each a process that makes its model and engine."""
    from benchmarks.training.workload import make_workload, random_words

    work = random_words(directory, given.gpu) if given.gpu else make_workload(directory)
    count = given.prompts_a_step or (GPU_PROMPTS if given.gpu else PROMPTS)
    command = [sys.executable, str(Path(__file__).with_name("grpo_step.py")), "--worker", "miles"]
    command += ["--checkpoint", str(work.checkpoint), "--prompts", str(work.prompt_file)]
    command += ["--steps", str((given.steps_a_turn + 1) * (given.turns + given.warm_up) + 1)]
    command += ["--steps-a-turn", str(given.steps_a_turn), "--prompts-a-step", str(count)]
    command += ["--gpu", given.gpu] if given.gpu else []
    base = f"--num-steps-per-rollout {given.mini_steps} --log-level info"
    base += f" {ON_GPU}" if given.gpu else ""
    if given.engine == "sglang":
        base += f" {SGLANG if device_of(given) == 'cuda' else SGLANG_ON_CPU}"
    plugins = ["tis"] if given.gpu else []
    workers = []
    for name, more in (("plain", plugins), ("r3", ["r3", *plugins])):
        flags = " ".join([base, *(["--plugins", ",".join(more)] if more else [])])
        workers.append(Worker(name, [*command, f"--worker-flags={flags}"], given.threads))
    return workers


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Turns of both sides."""
    reports: dict[str, list[dict[str, Any]]] = {"plain": [], "r3": []}
    with tempfile.TemporaryDirectory() as directory:
        workers = start(given, Path(directory))
        try:
            for turn in range(given.warm_up + given.turns):
                for worker in workers if turn % 2 else workers[::-1]:
                    report = worker.turn()
                    if turn >= given.warm_up:
                        reports[worker.name].append(report)
                print(f"turn {turn + 1}/{given.warm_up + given.turns}", file=sys.stderr, flush=True)
                if len(reports["r3"]) > 1:
                    write(given, summarize(given, reports), quiet=True)
        finally:
            for worker in workers:
                worker.close()
    return summarize(given, reports)


def summarize(given: argparse.Namespace, reports: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The result of the turns so far; two at least."""
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(reports["plain"], reports["r3"], strict=True)]
    return {
        "threads": given.threads,
        "turns": len(ratios),
        "steps_a_turn": given.steps_a_turn,
        "mini_steps": given.mini_steps,
        "engine": given.engine,
        "model": given.gpu or "random Qwen3-MoE",
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_median_interval": [round(x, 4) for x in median_interval(ratios)],
        "ratio_quartiles": [round(x, 4) for x in statistics.quantiles(ratios, n=4)],
        "sides": {name: medians(found) | {"range": spread(found)} for name, found in reports.items()},
    }


def write(given: argparse.Namespace, result: dict[str, Any], quiet: bool = False) -> None:
    """Write the result file; ``quiet`` while turns are missing."""
    plugins = ("miles-core", "miles-plugin-r3", "torch", "transformers")
    parts = [*(["sglang"] if given.engine == "sglang" else []), *([given.gpu] if given.gpu else [])]
    variant = "-".join([*parts, *([] if given.mini_steps == 1 else [f"{given.mini_steps}-steps"])])
    finish("r3_overhead", result, given.save, lambda: installed(*plugins), variant, quiet)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=60, help="measured turns of each side")
    parser.add_argument("--warm-up", type=int, default=3, help="unmeasured turns of each side")
    parser.add_argument("--steps-a-turn", type=int, default=1, help="counted steps of a turn, after one that is not")
    parser.add_argument("--mini-steps", type=int, default=1, help="optimiser steps a rollout")
    parser.add_argument("--gpu", choices=("moe", "tiny"), default="", help="a random BF16 model on a GPU")
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--prompts-a-step", type=int, default=0, help="prompts of a step, as in grpo_step.py")
    given = parser.parse_args()
    write(given, compare(given))


if __name__ == "__main__":
    main()
