"""Adapters here and in TRL with peft on one task, side by side: learning curves, trained parameters, memory, and seconds of a step.

Run: ``python benchmarks/training/lora_trl.py --trl-python PYTHON --threads 1 --save`` (about 10 minutes; needs ``plugins/lora``, and an interpreter
with trl, peft and datasets). The demo's task (sums of two numbers) and model. For every seed one supervised warm start, then GRPO from it on
both sides with adapters of rank 16 on the four matrices of each attention: 64 prompts x 8 samples per step, one optimizer step on all samples,
the same learning rate, schedule and loss, FP32. Initial adapters, order of the prompts and sampled answers differ between the sides. No prompt occurs
twice in 80 steps, so the mean reward of a step is the accuracy on prompts that were not trained on. The seconds of a step mean something only
with ``--jobs 1``, where both sides take turns, and on a quiet machine.

The targets are named because ``all-linear`` has another meaning in peft, which adapts routers and joined experts, too.

The last line of the output is one JSON object. ``first`` and ``last`` are mean rewards of the first and of the last five steps, with 95 % intervals
of Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.formats.formats_in_the_loop import train, warm_start
from benchmarks.learning.seeds import change_of, mean_of, work_in_processes
from benchmarks.measure import ROOT, finish, installed, options
from benchmarks.training.grpo_step import PROMPTS, SAMPLES, trl_config

RANK, ALPHA, ANSWER = 16, 32, 4
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
WARM_UP, BETA2, CLIP_HIGH = 10, 0.99, 0.28
ENDS = 5  # steps whose mean is the beginning or the end of a curve
SIDES = ("miles", "trl")


def work_with_miles(given: argparse.Namespace) -> dict[str, Any]:
    """``miles train`` with adapters."""
    directory = Path(given.directory)
    flags = f"""--plugins lora --lora-rank {RANK} --lora-alpha {ALPHA} --lora-target-modules {",".join(TARGETS)} --lora-export adapter
        --hf-checkpoint {directory}/start --export-hf {directory}/adapter --num-rollout {given.steps} --rollout-batch-size {PROMPTS}
        --n-samples-per-prompt {SAMPLES} --rollout-max-response-len {ANSWER} --lr {given.lr} --lr-decay-style linear
        --lr-warmup-iters {WARM_UP} --adam-beta2 {BETA2} --weight-decay 0 --clip-grad 1.0 --eps-clip 0.2 --eps-clip-high {CLIP_HIGH}
        --loss-aggregation token_mean --eval-interval {given.steps + 1} --no-save-rollouts --dtype float32"""
    metrics = [m for m in train(directory, "miles", flags.split(), given.seed) if "train/loss" in m]
    from safetensors.torch import load_file

    trained = sum(tensor.numel() for tensor in load_file(directory / "adapter/adapter_model.safetensors").values())
    versions = installed("miles-core", "miles-plugin-lora", "torch", "transformers", "peft")
    return outcome([m["reward/mean"] for m in metrics], [m["time/step"] for m in metrics], trained, versions)


def work_with_trl(given: argparse.Namespace) -> dict[str, Any]:
    """``GRPOTrainer`` with a ``LoraConfig`` and its fastest settings (``grpo_step.py``)."""
    import time

    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    rewards, times = list[float](), list[float]()

    def reward(completions: list[str], label: list[str], **_: Any) -> list[float]:
        found = [float(text.strip() == gold) for text, gold in zip(completions, label, strict=True)]
        rewards.append(statistics.fmean(found))
        return found

    class Timed(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(-time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times[-1] += time.perf_counter()

    directory = Path(given.directory)
    rows = [json.loads(line) for line in (directory / "data/train.jsonl").read_text().splitlines()]
    settings = argparse.Namespace(
        trl_batch=PROMPTS * SAMPLES,
        prompts_a_step=PROMPTS,
        steps=given.steps,
        model="",
        gpu="",
        trl_experts="grouped_mm",
    )
    config = trl_config(
        str(directory / "trl"),
        settings,
        learning_rate=given.lr,
        lr_scheduler_type="linear",
        warmup_steps=WARM_UP,
        adam_beta2=BETA2,
        epsilon_high=CLIP_HIGH,
        max_completion_length=ANSWER,
        loss_type="dapo",  # the mean over all tokens
        seed=given.seed,
    )
    start = str(directory / "start")
    trainer = GRPOTrainer(
        start,
        reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [r["prompt"] for r in rows], "label": [r["label"] for r in rows]}),
        processing_class=AutoTokenizer.from_pretrained(start, padding_side="left"),
        callbacks=[Timed()],
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[*TARGETS], task_type="CAUSAL_LM"),
    )
    trainer.train()
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    return outcome(rewards, times, trained, installed("trl", "peft", "torch", "transformers"))


def outcome(rewards: Sequence[float], times: Sequence[float], trained: int, versions: dict[str, str]) -> dict[str, Any]:
    """Return the report of a worker; the first step, which warms up, does not count in the seconds."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "rewards": [round(r, 5) for r in rewards],
        "seconds": statistics.median(times[1:] or times),
        "trained_parameters": trained,
        "peak_mb": peak,
        "versions": versions,
    }


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Run both sides with every seed."""
    with tempfile.TemporaryDirectory() as directory:
        starts = [(Path(directory) / str(seed), seed) for seed in range(given.seeds)]
        work_in_processes(warm_start, starts, given.jobs, given.threads, steps=given.warm_start)
        keys = [(side, *start) for start in starts for side in SIDES]  # in turns: a slow minute slows both
        with ThreadPoolExecutor(given.jobs) as pool:  # every run has a process of its own
            runs = list(pool.map(lambda key: run_side(given, *key), keys))
    found = {side: runs[at :: len(SIDES)] for at, side in enumerate(SIDES)}
    last = {side: [end_of(run) for run in runs] for side, runs in found.items()}
    differences = [own - other for own, other in zip(last["miles"], last["trl"], strict=True)]
    return {
        "sides": {side: summary(runs) for side, runs in found.items()},
        "miles_minus_trl": {"last": mean_of(differences), "last_of_each_seed": [round(d, 4) for d in differences]},
    }


def run_side(given: argparse.Namespace, side: str, directory: Path, seed: int) -> dict[str, Any]:
    """Run one side in a process of its interpreter."""
    python = given.trl_python if side == "trl" else sys.executable
    words = [python, str(Path(__file__).resolve()), "--worker", side, "--directory", str(directory)]
    for name, value in (("seed", seed), ("steps", given.steps), ("threads", given.threads), ("lr", given.lr)):
        words += [f"--{name}", str(value)]
    # the other interpreter needs the modules of this checkout
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"seed {seed}  {side:<6}", {n: v for n, v in found.items() if n != "versions"}, file=sys.stderr, flush=True)
    return found


def end_of(run: dict[str, Any]) -> float:
    """Mean reward of the last steps."""
    return statistics.fmean(run["rewards"][-ENDS:])


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, with half-widths of 95 % intervals."""
    change = change_of([(statistics.fmean(r["rewards"][:ENDS]), end_of(r)) for r in runs])
    points = zip(*(r["rewards"] for r in runs), strict=True)
    return {
        "first": change["before"],
        "last": change["after"],
        "gain": change["gain"],
        "gain_of_each_seed": change["gain_of_each_seed"],
        "curve": [mean_of(values) for values in points],
        "trained_parameters": runs[0]["trained_parameters"],
        "seconds": float(f"{statistics.median(r['seconds'] for r in runs):.4g}"),
        "peak_mb": round(statistics.mean(r["peak_mb"] for r in runs)),
        "versions": runs[0]["versions"],
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has trl installed")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=40, help="reinforcement-learning steps")
    parser.add_argument("--warm-start", type=int, default=400, help="supervised steps before them")
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate of the adapters")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    parser.add_argument("--worker", default="", choices=("", *SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--directory", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        import torch

        torch.set_num_threads(given.threads)
        print(json.dumps({"miles": work_with_miles, "trl": work_with_trl}[given.worker](given)))
        return
    result: dict[str, Any] = {n: getattr(given, n) for n in ("seeds", "steps", "warm_start", "lr", "threads", "jobs")}
    result |= {
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "rank": RANK,
        "alpha": ALPHA,
        "targets": TARGETS,
        **compare(given),
    }
    finish(Path(__file__).stem, result, given.save, lambda: installed("miles-core", "torch"), given.variant)


if __name__ == "__main__":
    main()
