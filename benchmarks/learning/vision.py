"""The example with images with several seeds: accuracy on held-out pictures, gap between engine and trainer, and seconds.

Every seed draws the pictures and makes the model of ``examples/vision`` again, and is one ``miles train`` with its options. The last line is one
JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, finish, options

EXAMPLE = ROOT / "examples" / "vision"
#: The largest difference between the log-probs of engine and trainer in a step.
GAP = "mismatch/abs_log_prob_max"


def learn(seed: int, directory: Path) -> dict[str, Any]:
    """Train with one seed; returns its curve."""
    files, run = directory / "files", directory / "run"
    make = [sys.executable, str(EXAMPLE / "make_inputs.py"), str(files), "--seed", str(seed)]
    subprocess.run(make, check=True, stdout=sys.stderr)
    flags = {
        "--config": EXAMPLE / "vision.yaml",
        "--hf-checkpoint": files / "model",
        "--sft-data": files / "demonstrations.jsonl",
        "--prompt-data": files / "train.jsonl",
        "--eval-prompt-data": files / "held_out.jsonl",
        "--save": run,
        "--seed": seed,
    }
    given = [str(word) for pair in flags.items() for word in pair]
    subprocess.run([sys.executable, "-m", "miles_core", "train", *given], check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "held_out": {row["step"]: round(row["eval/accuracy"], 3) for row in rows if "eval/accuracy" in row},
        "abs_log_prob_gap_max": max(row[GAP] for row in rows if GAP in row),
        "seconds": round(sum(row.get("time/step", 0.0) for row in rows), 1),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    found = {}
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as name:
            found[seed] = learn(seed, Path(name))
    finish("vision", {"seeds": found}, given.save, dict)


if __name__ == "__main__":
    main()
