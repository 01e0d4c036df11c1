"""A small vision model trained by reward, with one or several engines: gap between engine and trainer, reward, and seconds of a step.

The model and the task are those of ``examples/vision`` (count circles), without a download; it is warm-started with supervised steps first.
Every engine is one ``miles train``; an engine that the plan refuses is reported with the plan's reason. The last line is one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import ROOT, finish, options

EXAMPLE = ROOT / "examples" / "vision"


def train(engine: str, files: Path, steps: int, directory: Path) -> dict[str, Any]:
    """Train with one engine; returns what its metrics say, or the plan's refusal."""
    data = [f"--prompt-data={files / 'train.jsonl'}", f"--eval-prompt-data={files / 'held_out.jsonl'}"]
    data.append(f"--sft-data={files / 'demonstrations.jsonl'}")
    start = [
        f"--hf-checkpoint={files / 'model'}",
        f"--num-rollout={steps}",
        f"--save={directory}",
        f"--engine={engine}",
    ]
    command = [sys.executable, "-m", "miles_core", "train", "--config", str(EXAMPLE / "vision.yaml"), *data, *start]
    done = subprocess.run(command, stderr=subprocess.PIPE, stdout=sys.stderr, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        return {"refused": next((line for line in done.stderr.splitlines()[::-1] if line.strip()), "")}
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = [row for row in rows if "time/step" in row]
    return {
        "abs_log_prob_gap": [float(f"{row['mismatch/abs_log_prob']:.3g}") for row in trained],
        "abs_log_prob_gap_max": max(row["mismatch/abs_log_prob_max"] for row in trained),
        "reward": [round(row["reward/mean"], 3) for row in trained],
        "held_out": {row["step"]: round(row["eval/accuracy"], 3) for row in rows if "eval/accuracy" in row},
        "seconds": round(median(row["time/step"] for row in trained[1:] or trained), 3),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--engines", nargs="+", default=["embedded", "sglang"])
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        files = Path(name) / "files"
        subprocess.run([sys.executable, str(EXAMPLE / "make_inputs.py"), str(files)], check=True, stdout=sys.stderr)
        found = {e: train(e, files, given.steps, Path(name) / e) for e in given.engines}
    finish("vision_step", {"steps": given.steps, "engines": found}, given.save, dict, "gpu")


if __name__ == "__main__":
    main()
