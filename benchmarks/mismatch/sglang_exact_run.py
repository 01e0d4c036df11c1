"""Whole runs with ``--engine sglang --true-on-policy-mode``: is the gap 0.0 at every step, and what does the mode cost?

Random BF16 models (``checkpoints.py``), a process for each run. Sides: a mixture of experts with ``r3`` in small and in large batches, a
dense model, and the mixture without the mode, with SGLang's own kernels and CUDA graphs. Reported are the largest
``mismatch/abs_log_prob_max`` of all steps, how far the policy moved, and medians of the second half of the steps. Runs that go on at the same
time share the GPU, so compare times of runs with ``--jobs 1``. The exit code is 1 when a gap is not 0.0, or a run of the mode did not end.

With ``--partial`` responses have random lengths and continue under new weights (``--partial-rollout``). The largest gap is then that of the
tokens that the trained weights generated, and the exit code is also 1 when no step has tokens of older weights, or a sample tokens of two versions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoints import VOCABULARY, make_model
from benchmarks.measure import finish, installed, options
from benchmarks.scale import checkout
from miles_core.api import samples

#: Side -> model, plugins, prompts of a step (8 samples each).
SIDES = {
    "moe, 32 rows": ("moe", "true_on_policy,r3", 4),
    "moe, 256 rows": ("moe", "true_on_policy,r3", 32),
    "dense, 64 rows": ("dense", "true_on_policy", 8),
    "moe, 32 rows, without the mode": ("moe", "r3", 4),
}
_REWARD = """
async def rm(args, sample):
    return sum(t % 2 for t in sample.tokens[-32:]) / 32
"""
_TIMES = ("time/step", "time/rollout", "time/train", "time/sync", "rollout/tokens_per_second")


def flags_of(side: str, given: argparse.Namespace, place: Path) -> list[str]:
    """The command line of a run."""
    model, plugins, prompts = SIDES[side]
    flags = f"""--hf-checkpoint {place / model} --save {place / directory_of(side)} --engine sglang --plugins {plugins} --dtype bfloat16
        --prompt-data {place / "prompts.jsonl"} --input-key prompt --label-key label --custom-rm-path {place / "reward.py"}:rm
        --rollout-batch-size {prompts} --n-samples-per-prompt 8 --rollout-max-response-len {given.tokens} --num-rollout {given.steps}
        --lr 1e-5 --max-running-requests {8 * prompts} --use-dynamic-batch-size --max-tokens-per-gpu 16384 --seed 0
        --rollout-max-context-len {given.tokens + 64} --sglang-attention-backend triton --sglang-sampling-backend pytorch
        --sglang-moe-runner-backend triton --sglang-mem-fraction-static 0.6 --sglang-max-total-tokens 65536"""
    if given.partial:
        stops = ",".join(map(str, range(2, VOCABULARY, given.tokens // 4)))  # lengths differ
        flags += f" --partial-rollout --over-sampling-batch-size {2 * prompts} --rollout-stop-token-ids {stops}"
    return flags.split()


def directory_of(side: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in side)


def measure(side: str, given: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Run a side; what its steps said."""
    command = [sys.executable, "-m", "miles_core.cli.main", "train", *flags_of(side, given, place)]
    output, directory = place / f"{directory_of(side)}.txt", place / directory_of(side)
    with output.open("w") as file:
        try:
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=given.limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    path = directory / "metrics.jsonl"
    steps = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    name = "mismatch/current_abs_log_prob" if given.partial else "mismatch/abs_log_prob"
    gaps = [s[f"{name}_max"] for s in steps if f"{name}_max" in s]
    late = steps[len(steps) // 2 :]
    found: dict[str, Any] = {
        **{
            "exit": code,
            "steps": len(steps),
            "largest gap": max(gaps, default=None),
            "steps with current tokens": len(gaps),
        },
        "mean gap": statistics.fmean(s[name] for s in steps if name in s) if gaps else None,
        **(
            {"older tokens": share_of_older(steps), "samples of two versions": count_mixed(directory)}
            if given.partial
            else {}
        ),
        **{n: round(statistics.median(s[n] for s in late if n in s), 4) for n in _TIMES if any(n in s for s in late)},
        "rewards": [round(s["reward/mean"], 4) for s in steps if "reward/mean" in s][-2:],
    }
    if code:
        log = directory / "sglang" / "sglang.log"
        found["output"] = output.read_text(errors="replace")[-3000:]
        found["log"] = log.read_text(errors="replace")[-3000:] if log.exists() else ""
    else:
        found["start"] = [line for line in output.read_text(errors="replace").splitlines() if "same bits" in line]
    print(f"{side}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return found


def share_of_older(steps: list[dict[str, Any]]) -> float:
    """Mean share of trained tokens that older weights generated."""
    return statistics.fmean(s.get("rollout/stale_tokens", 0.0) for s in steps) if steps else 0.0


def count_mixed(directory: Path) -> int:
    """Number of trained samples with tokens of several weight versions."""
    return sum(len({v for _, v in sample["weight_versions"]}) > 1 for sample in samples(directory))


def is_exact(row: dict[str, Any], given: argparse.Namespace) -> bool:
    """Whether a run of the mode completed its steps with a gap of 0.0, and with ``--partial`` had what it is about."""
    complete = row["exit"] == 0 and row["steps"] == given.steps and row["largest gap"] == 0.0
    return complete and (not given.partial or (row["older tokens"] > 0 and row["samples of two versions"] > 0))


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--partial", action="store_true", help="continue unfinished responses under new weights")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64, help="of a response")
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--limit", type=float, default=360, help="seconds of a run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(given.jobs) as pool:
        place = Path(directory)
        (place / "metadata").mkdir()
        checkout.register(place / "metadata", ["sglang", "true_on_policy", "r3"], ["sglang"])
        for model in {SIDES[side][0] for side in given.sides}:
            make_model(model, place / model)
        draw = torch.Generator().manual_seed(2)
        texts = torch.randint(2, VOCABULARY, (64, 16), generator=draw).tolist()
        rows = [json.dumps({"prompt": " ".join(f"w{t}" for t in text), "label": ""}) for text in texts]
        (place / "prompts.jsonl").write_text("\n".join(rows) + "\n")
        (place / "reward.py").write_text(_REWARD)
        runs = {side: pool.submit(measure, side, given, place) for side in given.sides}
        found = {side: run.result() for side, run in runs.items()}
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    result = {"gpu": gpu, "steps": given.steps, "jobs": given.jobs, "partial": given.partial, "sides": found}
    finish("sglang_exact_run", result, given.save, lambda: installed("torch", "transformers", "sglang"))
    return int(not all(is_exact(row, given) for side, row in found.items() if "without" not in side))


if __name__ == "__main__":
    sys.exit(main())
