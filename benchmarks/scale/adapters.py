"""Policies with adapters over one base: bytes per sync, step time and memory of 1, 4 and 16 policies.

Run: ``python benchmarks/scale/adapters.py --threads 2 --save`` (needs ``plugins/lora``). Every row trains the same number of samples per step,
divided among the policies, in a process of its own; the policies generate their own samples. With ``--engine sglang`` (needs
``plugins/sglang`` and SGLang) all policies share one server. On one GPU:

    python benchmarks/scale/adapters.py --engine sglang --device cuda --hidden 2048 --layers 12 --answer 128 --samples 256 --save --variant sglang-gpu

and the same with ``--engine embedded``. Memory is that of the process and of the processes that it starts, above that of an idle one (resident
memory in RAM, shared pages divided among processes; on a GPU the device's used memory), at the end of the last step; ``--schedule`` chooses another
schedule. A row ``1, merged`` sends all weights at each sync. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import finish, installed, options
from benchmarks.training.random_model import make_checkpoint

RANK, WARM_UP = 16, 1
TURNS = """
async def generate(args, sample, sampling_params):
    names = [name for name in {names}]
    sample.policy = names[sample.group_index % len(names)]
    turn = await args.ask(policy=sample.policy)
    sample.tokens, sample.response_length = turn.tokens, len(turn.response.tokens)
    return sample
"""
PROBE = """
from benchmarks.scale.adapters import used
from miles_core.plugin import hookimpl

@hookimpl
def on_step(run, metrics):
    metrics["adapters/memory_mb"] = used("{device}")
"""
PHASES = ("step", "rollout", "train", "sync")
#: Samples of a prompt.
GROUP = 4


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Train with ``--worker`` policies in this process (0: one policy that sends merged weights)."""
    import torch

    import miles_core.launch  # noqa: F401 - part of the idle process
    import miles_embedded.engine.engine
    import miles_embedded.trainer.trainer  # noqa: F401 - part of the idle process
    from miles_testing import toy_run

    torch.set_num_threads(given.threads)
    count = max(given.worker, 1)
    names, idle = [f"policy-{n}" for n in range(count)], used(given.device)
    with tempfile.TemporaryDirectory() as directory:
        probe = Path(directory) / "probe.py"
        probe.write_text(PROBE.format(device=given.device))
        turns = Path(directory) / "turns.py"
        turns.write_text(TURNS.format(names=names))
        flags: dict[str, Any] = {
            "hf_checkpoint": given.checkpoint,
            "engine": given.engine,
            "device": given.device,
            "dtype": "bfloat16" if given.device == "cuda" else "float32",
            "schedule": given.schedule,
            "lora_sync": "adapter" if given.worker else "merged",
            "lora_target_modules": "all-linear",
            "lora_rank": RANK,
            "policies": {name: {} for name in names},
            "custom_generate_function_path": turns,
            "rollout_batch_size": given.samples // GROUP,
            "n_samples_per_prompt": GROUP,
            "rollout_max_response_len": given.answer,
            "save_rollouts": False,
        }
        if given.engine == "sglang" and given.device == "cpu":
            flags |= {"sglang_lora_backend": "torch_native", "sglang_max_total_tokens": 16384}
        done = toy_run(["lora", str(probe)], Path(directory) / "run", steps=WARM_UP + given.turns, **flags)
    counted = done.metrics[WARM_UP:]
    prefix = f"{names[0]}/" if count > 1 else ""
    gaps = [
        m[f"{name}/mismatch/abs_log_prob" if count > 1 else "mismatch/abs_log_prob"] for m in counted for name in names
    ]
    found = {f"{phase}_seconds": statistics.median(m[f"time/{phase}"] for m in counted) for phase in PHASES}
    found |= {"abs_log_prob": statistics.mean(gaps), "memory_mb": counted[-1]["adapters/memory_mb"] - idle}
    return {"sync_bytes_per_policy": counted[-1][f"{prefix}sync/bytes"]} | {
        k: float(f"{v:.4g}") for k, v in found.items()
    }


def used(device: str) -> float:
    """Memory in MB: of the GPU, or of this process and all that it has started."""
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20
    import os

    return sum(share_of(pid) for pid in family(os.getpid())) / 1024


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            found += family(int(child))
    return found


def share_of(pid: int) -> int:
    """Resident memory of a process in KB, with its share of pages that it shares; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def run_row(given: argparse.Namespace, count: int, checkpoint: str) -> dict[str, Any]:
    """Run ``measure`` in a new interpreter."""
    words = [sys.executable, __file__, "--worker", str(count), "--checkpoint", checkpoint]
    for name in ("threads", "engine", "device", "answer", "samples", "turns", "schedule"):
        words += [f"--{name}", str(getattr(given, name))]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"failed": done.returncode}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--policies", type=int, nargs="+", default=[0, 1, 4, 16], help="0: one policy, merged weights")
    parser.add_argument("--engine", default="embedded", choices=("embedded", "sglang"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--schedule", default="sync", help="sync, ahead or async")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=4, help="its layers")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--samples", type=int, default=64, help="samples of a step, of all policies together")
    parser.add_argument("--turns", type=int, default=3, help="steps that are counted")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    parser.add_argument("--worker", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker >= 0:
        print(json.dumps(measure(given)))
        return
    heads = given.hidden // 64
    sizes = {"hidden_size": given.hidden, "intermediate_size": 3 * given.hidden, "num_hidden_layers": given.layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": max(heads // 4, 1), "head_dim": 64}
    names = ("threads", "engine", "device", "schedule", "hidden", "layers", "answer", "samples", "turns")
    result: dict[str, Any] = {name: getattr(given, name) for name in names} | {"rank": RANK, "rows": {}}
    with tempfile.TemporaryDirectory() as directory:
        result["parameters"] = make_checkpoint(
            "qwen3", Path(directory) / "model", sizes | {"vocab_size": 4096}, given.device
        )
        for count in given.policies:
            label = str(count) if count else "1, merged"
            result["rows"][label] = run_row(given, count, f"{directory}/model")
            print(f"{label:<10}", result["rows"][label], file=sys.stderr, flush=True)
    versions = (
        "miles-core",
        "miles-plugin-lora",
        "torch",
        "transformers",
        *(("sglang",) if given.engine == "sglang" else ()),
    )
    finish(Path(__file__).stem, result, given.save, lambda: installed(*versions), given.variant)


if __name__ == "__main__":
    main()
