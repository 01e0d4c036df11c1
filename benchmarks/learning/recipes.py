"""Run the recipes of the demo's model: held-out accuracy over steps, the time of a step, and the gap.

Run in the root of a checkout: ``python benchmarks/learning/recipes.py --save`` (some minutes per recipe and seed). With ``--runs DIR`` the runs
stay in a directory, and runs that are there are read. The last line of the output is one JSON object.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import finish, installed, options
from miles_core.observe.metrics import read, series

RECIPES = ("fp8-r3", "ppo", "lora", "agent", "async")
ROOT = Path(__file__).parents[2]


def miles(*words: str) -> None:
    """Run a command of ``miles`` on the CPU."""
    subprocess.run(
        [sys.executable, "-m", "miles_core", *words, "--device", "cpu"], check=True, cwd=ROOT, stdout=sys.stderr
    )


def trained_base(directory: Path) -> list[str]:
    """Return the options of a run over the base that the recipe ``lora`` starts from, which is made at the first call."""
    base, model = directory / "base", directory / "base-model"
    if not model.is_dir():
        miles("demo", "--num-rollout", "4", "--dir", str(base), "--export-hf", str(model))
    data = {"prompt-data": "train", "eval-prompt-data": "held_out"}
    files = (f"--{option}={base}/data/{name}.jsonl" for option, name in data.items())
    return [f"--hf-checkpoint={model}", *files]


def run(recipe: str, seed: int, directory: Path) -> dict[str, Any]:
    """Run a recipe unless its directory has a run; return its curve, that of a stopped run up to its last step."""
    if not (directory / "metrics.jsonl").is_file():
        words = ["--save", str(directory), "--seed", str(seed), "--config", str(ROOT / "recipes" / recipe / "run.yaml")]
        miles(*(["train", *words, *trained_base(directory.parent)] if recipe == "lora" else ["demo", *words]))
    records = read(directory / "metrics.jsonl")
    steps, accuracy = series(records, "eval/accuracy")
    _, seconds = series(records, "time/step")
    _, gaps = series(records, "mismatch/abs_log_prob")
    return {
        "steps": records[-1]["step"],
        "accuracy": dict(zip(steps, (round(value, 4) for value in accuracy), strict=True)),
        "seconds_a_step": round(median(seconds[1:]), 2),
        "largest_gap": max(gaps),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--runs", type=Path, help="directory for the runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = given.runs or Path(temporary)
        runs = {
            recipe: {seed: run(recipe, seed, directory / f"{recipe}-{seed}") for seed in given.seeds}
            for recipe in given.only
        }
    of = "" if given.only == list(RECIPES) else "-".join(given.only)
    finish("recipes", {"runs": runs}, given.save, lambda: installed("miles-core", "torch", "transformers"), of)


if __name__ == "__main__":
    main()
