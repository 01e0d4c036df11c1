"""Whole GRPO steps at the sizes of Qwen3-4B and Qwen3-8B on one or two GPUs: seconds, tokens per second, share of the peak, memory next to the plan.

The models have random BF16 weights in all of their layers; 32 prompts of 64 tokens x 8 samples of up to 256 tokens, one optimiser step. Each
setting is a run of ``miles train`` of its own (two processes or more with two GPUs); its first step, which compiles, does not count.
``share_of_peak`` is 6 operations per parameter and token of the training phase (4 with a frozen base, whose weights need no gradient) over
989 TFLOP/s per GPU, attention not counted.
``peak_gb`` is the device memory in use as the driver reports it, per GPU, so it counts what PyTorch reserves without using it.

    python benchmarks/training/sizes.py --settings 4b-embedded 8b-lora --save
    python benchmarks/training/sizes.py --tiny             # a rehearsal on a CPU

Results are written after every setting with ``--out``. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoints import make_model
from benchmarks.measure import commit, finish, installed, options
from benchmarks.scale import checkout
from benchmarks.training.sglang_step import workload

PEAK = 989e12
SGLANG = """--engine sglang --sglang-attention-backend triton --sglang-sampling-backend pytorch --sglang-cuda-graph-bs-decode 64,256
    --sglang-mem-fraction-static 0.2"""
#: Word in a setting's flags -> library that was copied without its metadata.
LIBRARIES = {"sglang": "sglang", "megatron": "megatron.core"}
APART = "--max-tokens-per-gpu 32768 --actor-num-gpus-per-node 1 --rollout-num-gpus 1"
TWO = "--actor-num-gpus-per-node 2 --colocate"


@dataclass(frozen=True)
class Setting:
    """One run: its model, GPUs, plugins and flags."""

    model: str
    gpus: int
    plugins: str
    flags: str


SETTINGS = {
    "4b-embedded": Setting("qwen3-4b", 1, "tis", "--max-tokens-per-gpu 8192"),
    "4b-embedded-4k": Setting("qwen3-4b", 1, "tis", "--max-tokens-per-gpu 4096"),
    "4b-sglang": Setting("qwen3-4b", 1, "tis", f"--max-tokens-per-gpu 4096 {SGLANG}"),
    "4b-sglang-megatron": Setting("qwen3-4b", 1, "tis", f"--max-tokens-per-gpu 4096 {SGLANG} --trainer megatron"),
    "8b-lora": Setting("qwen3-8b", 1, "tis,lora", "--max-tokens-per-gpu 8192"),
    "8b-lora-adapter": Setting("qwen3-8b", 1, "tis,lora", "--max-tokens-per-gpu 8192 --lora-sync adapter"),
    "4b-two": Setting("qwen3-4b", 2, "tis", f"--max-tokens-per-gpu 8192 {TWO}"),
    "8b-two": Setting("qwen3-8b", 2, "tis", f"--max-tokens-per-gpu 4096 {TWO}"),
    "8b-sglang-two": Setting("qwen3-8b", 2, "tis", f"--max-tokens-per-gpu 4096 {TWO} {SGLANG}"),
    "8b-sglang-megatron-two": Setting(
        "qwen3-8b", 2, "tis", f"--max-tokens-per-gpu 4096 {TWO} {SGLANG} --trainer megatron"
    ),
    # trainer and engine on a GPU each: alternating, one step ahead, and asynchronous
    "dense-two-sync": Setting("dense", 2, "tis", APART),
    "dense-two-ahead": Setting("dense", 2, "tis", f"{APART} --schedule ahead"),
    "dense-two-async": Setting("dense", 2, "tis", f"{APART} --schedule async --max-weight-staleness 2"),
    "tiny": Setting("tiny_dense", 0, "tis", "--device cpu"),
    "tiny-lora": Setting("tiny_dense", 0, "tis,lora", "--device cpu"),
}


def main() -> None:
    parser = options(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--settings", nargs="+", choices=sorted(SETTINGS), default=["4b-embedded"])
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of a response")
    parser.add_argument("--steps", type=int, default=4, help="that count")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--directory", type=Path, help="for models and runs (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="write results here after every setting")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    given = parser.parse_args()
    if given.tiny:
        given.settings, given.prompts, given.tokens, given.steps = ["tiny", "tiny-lora"], 2, 16, 1
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    result: dict[str, Any] = {"gpu": gpu, "commit": commit(), "settings": {}}
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        (Path(directory) / "metadata").mkdir()
        words = " ".join(SETTINGS[name].flags for name in given.settings)
        libraries = [name for word, name in LIBRARIES.items() if word in words]
        checkout.register(Path(directory) / "metadata", ["sglang", "tis", "lora", "megatron", "ray"], libraries)
        for name in given.settings:
            result["settings"][name] = found = measure(given, name, Path(directory))
            print(f"{name}: {json.dumps(found)}", file=sys.stderr, flush=True)
            if given.out is not None:
                given.out.write_text(json.dumps(result, indent=1))
    finish("sizes", result, given.save, lambda: installed("torch", "transformers"), given.variant)


def measure(given: argparse.Namespace, name: str, scratch: Path) -> dict[str, Any]:
    """Run one setting; return the medians of its steps, its memory and the plan's."""
    setting = SETTINGS[name]
    checkpoint = scratch / setting.model
    if not checkpoint.exists():
        make_model(setting.model, checkpoint)
        torch.cuda.empty_cache()
    run = scratch / name
    run.mkdir()
    flags = f"""--hf-checkpoint {checkpoint} --save {run / "run"} --rollout-batch-size {given.prompts} --n-samples-per-prompt 8
        --rollout-max-response-len {given.tokens} --num-rollout 1000 --lr {given.lr} --seed 0
        --max-running-requests {8 * given.prompts} --use-dynamic-batch-size --rollout-max-context-len {64 + given.tokens + 8}
        --plugins {setting.plugins} {setting.flags}"""
    words = [*flags.split(), *workload(run, given.prompts)]
    miles = [sys.executable, "-m", "miles_core.cli.main"]
    planned = subprocess.run([*miles, "plan", *words], capture_output=True, text=True, check=False)
    metrics = run / "run" / "metrics.jsonl"
    with DeviceMemory(setting.gpus) as memory:
        code = run_until([*miles, "train", *words], metrics, given.steps + 1)
    found: dict[str, Any] = {"plugins": setting.plugins, "flags": setting.flags}
    if code is not None:
        return found | {"failed": code, "plan": (planned.stdout + planned.stderr)[-2000:]}
    steps = [step for step in map(json.loads, metrics.read_text().splitlines()[: given.steps + 1]) if step["step"] > 1]
    names = [
        n for n in steps[0] if n.startswith("time/") or n in ("rollout/tokens_per_second", "mismatch/abs_log_prob")
    ]
    medians = {n: round(statistics.median(step[n] for step in steps if n in step), 4) for n in names}
    tokens = 8 * given.prompts * given.tokens
    gpus = max(setting.gpus, 1)
    parameters = count_parameters(checkpoint)
    return found | {
        "parameters": parameters,
        "medians": medians,
        "tokens_per_second_and_gpu": round(tokens / medians["time/step"] / gpus, 1),
        "share_of_peak": round(
            (4 if "lora" in setting.plugins else 6) * parameters * tokens / medians["time/train"] / gpus / PEAK, 3
        ),
        "peak_gb": memory.peak_gb,
        "planned_gb": [
            float(n) for n in re.findall(r"^  (?:trainer|engine).* ([\d.]+) +[\d.]+$", planned.stdout, re.MULTILINE)
        ],
    }


def run_until(command: list[str], metrics: Path, steps: int) -> int | None:
    """Run a command until it has written the metrics of some steps, then end it; return its exit status if it ended before.

    A run always writes a checkpoint at its end. That of an 8B model with its optimizer is larger than the disk of many machines.
    """
    process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        if process.poll() is not None:
            return process.returncode
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if "--actor-num-gpus-per-node" in command:
        subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "stop", "--force"], stdout=sys.stderr, check=False)
    return None


def count_parameters(checkpoint: Path) -> int:
    """Count the parameters of a checkpoint."""
    from safetensors import safe_open

    count = 0
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            count += sum(torch.Size(tensors.get_slice(name).get_shape()).numel() for name in tensors.keys())  # noqa: SIM118
    return count


class DeviceMemory:
    """Samples the used memory of the first GPUs while a run works."""

    def __init__(self, gpus: int) -> None:
        self.peak_gb = [0.0] * gpus
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> DeviceMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while self.peak_gb and not self._stop.wait(0.1):
            for gpu in range(len(self.peak_gb)):
                free, total = torch.cuda.mem_get_info(gpu)
                self.peak_gb[gpu] = max(self.peak_gb[gpu], round((total - free) / 1e9, 2))


if __name__ == "__main__":
    main()
