"""What a number format costs a step: training and rollout in each mode against BF16, emulated on a CPU, taking turns.

The model, prompts and settings of ``grpo_step.py``; every mode is an ordinary ``miles train`` in a process of its own, held
between steps. The last line is one JSON object: seconds by phase and their ratios to the run without a format.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, Worker, alternate, finish, installed, medians, options, spread

PLAIN = "bf16"
MODES = {
    PLAIN: "",
    "fp8 rollout": "--rollout-fp8",
    "fp8 unified": "--rollout-fp8 --train-fp8",
    "mxfp8 unified": "--rollout-mxfp8 --train-mxfp8",
    "nvfp4 unified": "--rollout-nvfp4 --train-nvfp4",
    "int4 rollout": "--rollout-int4",
    "int4 QAT": "--rollout-int4 --train-int4",
}


def compare(threads: int, turns: int, warm_up: int) -> dict[str, Any]:
    """Turns of every mode; no format means the model copy as it is (float32 here), as with ``bf16`` elsewhere."""
    from benchmarks.training.workload import make_workload

    with tempfile.TemporaryDirectory() as directory:
        work = make_workload(Path(directory))
        command = [sys.executable, str(ROOT / "benchmarks/training/grpo_step.py"), "--worker", "miles"]
        command += ["--checkpoint", str(work.checkpoint), "--prompts", str(work.prompt_file)]
        command += ["--steps", str(turns + warm_up + 1)]
        flags = {name: f"{more} --emulate-precision" if more else "" for name, more in MODES.items()}
        workers = [Worker(name, [*command, f"--worker-flags={more}"], threads) for name, more in flags.items()]
        try:
            reports = alternate(workers, turns, warm_up)
        finally:
            for worker in workers:
                worker.close()
    sides = {name: medians(r) | {"range": spread(r)} for name, r in reports.items()}
    plain = sides[PLAIN]
    ratios = {n: {p: round(s[p] / plain[p], 2) for p in ("train", "rollout", "seconds")} for n, s in sides.items()}
    return {"threads": threads, "turns": turns, "modes": sides, "times_bf16": ratios}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=9, help="measured steps of each mode")
    parser.add_argument("--warm-up", type=int, default=2, help="unmeasured steps of each mode")
    given = parser.parse_args()
    result = compare(given.threads, given.turns, given.warm_up)
    finish("format_training", result, given.save, lambda: installed("miles-core", "torch", "transformers"))


if __name__ == "__main__":
    main()
