"""Seconds of a whole GRPO step with SGLang as the engine, by phase: a random BF16 model on one GPU, 32 prompts of 64 tokens x 8 samples
of 256 new ones, one optimiser step on all of them.

Each set of plugins (``--plugins``) is a run of ``miles train`` of its own, in the order given, ``--turns`` times (A B, then B A); its first step,
which compiles, does not count. Words after the plugins are further flags of its run: ``--plugins tis "lora --lora-sync adapter"``.
``first_step_after`` is the time from the start of the process to the first step: on one machine the first run also compiles kernels.
``start`` are its latest phases, and ``sglang_start`` the seconds after which SGLang's log reached its marks.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoints import SIZES, VOCABULARY, make_model
from benchmarks.measure import commit, finish, installed, options

#: Marks in SGLang's log of its start.
MARKS = {
    "arguments": r"server_args=",
    "scheduler": r"Init torch distributed begin",
    "weights": r"Load weight begin",
    "weights_loaded": r"Load weight end",
    "capture": r"Capture .* begin",
    "captured": r"Capture .* end",
}
REWARD = """
async def rm(args, sample):
    tokens = sample.tokens[-64:]
    return sum(t % 2 for t in tokens) / len(tokens)
"""


def workload(directory: Path, prompts: int) -> list[str]:
    """Flags of a run's prompts and reward: random words, and the share of odd ones in the answer."""
    choose = random.Random(0)
    rows = [
        {"prompt": " ".join(f"w{choose.randrange(2, VOCABULARY)}" for _ in range(64)), "label": ""}
        for _ in range(prompts * 16)
    ]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(REWARD)
    flags = ["--prompt-data", str(directory / "prompts.jsonl"), "--input-key", "prompt", "--label-key", "label"]
    return [*flags, "--custom-rm-path", f"{directory / 'reward.py'}:rm"]


def flags_of(given: Any, plugins: str, checkpoint: Path, directory: Path) -> list[str]:
    """Of one run."""
    samples = given.prompts * 8
    flags = f"""--hf-checkpoint {checkpoint} --save {directory / "run"} --engine {given.engine} --rollout-batch-size {given.prompts}
        --n-samples-per-prompt 8 --rollout-max-response-len {given.tokens} --num-rollout {given.steps + 1} --lr {given.lr}
        --max-running-requests {samples} --use-dynamic-batch-size --max-tokens-per-gpu {given.max_tokens} --seed 0
        --rollout-max-context-len {64 + given.tokens + 8}"""
    if given.engine != "sglang":
        flags += "" if torch.cuda.is_available() else " --device cpu"
    elif torch.cuda.is_available():
        graphs = ",".join(str(n) for n in (samples // 4, samples))
        flags += f""" --sglang-attention-backend triton --sglang-sampling-backend pytorch --sglang-moe-runner-backend triton
            --sglang-cuda-graph-bs-decode {graphs} --sglang-mem-fraction-static 0.3"""
    else:
        flags += " --device cpu --sglang-max-total-tokens 8192"
    return [*flags.split(), *workload(directory, given.prompts), *(["--plugins", *plugins.split()] if plugins else [])]


def measure(given: Any, plugins: str, checkpoint: Path) -> dict[str, Any]:
    """Medians of a run's steps."""
    with tempfile.TemporaryDirectory() as directory:
        command, started = [sys.executable, "-m", "miles_core.cli.main", "train"], datetime.now()
        flags, environment = flags_of(given, plugins, checkpoint, Path(directory)), os.environ | {"SGLANG_LOG_MS": "1"}
        done = subprocess.run([*command, *flags], stdout=sys.stderr, check=False, env=environment)
        run = Path(directory) / "run"
        if given.sglang_log and (run / "sglang" / "sglang.log").exists():
            given.sglang_log.write_bytes((run / "sglang" / "sglang.log").read_bytes())
        if done.returncode:
            return {"plugins": plugins, "failed": done.returncode}
        lines = (run / "metrics.jsonl").read_text().splitlines()
        found = {"plugins": plugins} | start_of(run / "run.log", started)
        if given.engine == "sglang":
            found["sglang_start"] = marks_of(run / "sglang" / "sglang.log", started)
    steps = [step for step in map(json.loads, lines) if step["step"] > 1]
    names = [n for n in steps[0] if n.startswith(("time/", "mismatch/abs", "r3/", "sync/")) or n.endswith("per_second")]
    return found | {name: round(statistics.median(step[name] for step in steps if name in step), 4) for name in names}


def start_of(log: Path, started: datetime) -> dict[str, Any]:
    """Return the seconds from the start of the process to the first step, and those of each phase in front of it, from the run's log."""
    match = re.search(
        r"^(\S+ [\d:]+),(\d+) .*step 1 begins [\d.]+ s after the start: (.*)", log.read_text(), re.MULTILINE
    )
    if match is None:
        return {}
    seconds = (datetime.fromisoformat(f"{match[1]}.{match[2]}") - started).total_seconds()
    phases = {name: float(took) for name, took in re.findall(r"(\w+) ([\d.]+) s", match[3])}
    return {"first_step_after": round(seconds, 1), "start": phases}


def marks_of(log: Path, started: datetime) -> dict[str, float]:
    """Return the seconds from the start of the process to the first line of SGLang's log with each mark."""
    found, text = {}, log.read_text(errors="replace")
    for name, mark in MARKS.items():
        if (match := re.search(rf"^\[(\S+ [\d:]+)\.(\d+)[^\]\n]*\] .*{mark}", text, re.MULTILINE)) is not None:
            at = datetime.fromisoformat(f"{match[1]}.{match[2]}")
            found[name] = round((at - started).total_seconds(), 1)
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=sorted(SIZES), default="dense")
    parser.add_argument("--plugins", nargs="*", default=["tis"], help="sets of plugins and flags, one run each")
    parser.add_argument("--turns", type=int, default=1, help="runs of each set")
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5, help="that count")
    parser.add_argument("--max-tokens", type=int, default=32768, help="of a micro-batch")
    parser.add_argument("--sglang-log", type=Path, help="save SGLang's log of the last run here")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = make_model(given.model, Path(directory) / "model")
        found = []
        for turn in range(given.turns):
            for plugins in given.plugins[:: -1 if turn % 2 else 1]:
                found.append(measure(given, plugins, checkpoint))
                print(f"step {plugins}: {json.dumps(found[-1])}", file=sys.stderr, flush=True)
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    result = {"model": given.model, "gpu": gpu, "commit": commit(), "runs": found}
    finish(
        "sglang_step",
        result,
        given.save,
        lambda: installed("torch", "transformers", "sglang"),
        given.model + given.variant,
    )


if __name__ == "__main__":
    main()
