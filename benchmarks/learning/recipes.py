"""Run recipes: how accuracy changes over steps, the time of a step, and the gap.

Run in the root of a checkout: ``python benchmarks/learning/recipes.py --save`` (some minutes per recipe and seed) runs those of the demo's model on
a CPU. Recipes of a published model need its checkpoint: ``--only sums sft --hf-checkpoint DIR``, and run on ``--device``, ``--jobs`` runs at a time.
With ``--runs DIR`` the runs stay in a directory, and runs that are there are read. The last line of the output is one JSON object.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import finish, installed, options
from miles_core.observe.metrics import read, series

RECIPES = ("fp8-r3", "ppo", "lora", "agent", "async")
#: Recipe of a published model -> the folders whose data.py it needs, and the metrics of its curve.
PUBLISHED = {
    "sums": (("sums",), ("eval/part/right",)),
    "sft": (("sums",), ("offline/held_out_nll",)),
    "dpo": (("dpo",), ("offline/accuracy", "offline/margin")),
    "reward-model": (("reward-model",), ("offline/accuracy", "offline/margin")),
    "reasoning-gym": ((), ("eval/sums/accuracy", "eval/legs/accuracy", "eval/letters/accuracy")),
    "tools": (("tools",), ("eval/part/right",)),
}
ROOT = Path(__file__).parents[2]


def miles(*words: str) -> None:
    """Run a command of ``miles``."""
    subprocess.run([sys.executable, "-m", "miles_core", *words], check=True, cwd=ROOT, stdout=sys.stderr)


def trained_base(directory: Path) -> list[str]:
    """Return the options of a run over the base that the recipe ``lora`` starts from, which is made at the first call."""
    base, model = directory / "base", directory / "base-model"
    if not model.is_dir():
        miles("demo", "--num-rollout", "4", "--dir", str(base), "--export-hf", str(model), "--device", "cpu")
    data = {"prompt-data": "train", "eval-prompt-data": "held_out"}
    files = (f"--{option}={base}/data/{name}.jsonl" for option, name in data.items())
    return [f"--hf-checkpoint={model}", *files]


def command(recipe: str, directory: Path, device: str, checkpoint: Path | None) -> list[str]:
    """Return the words of ``miles`` that run a recipe."""
    words = ["--config", str(ROOT / "recipes" / recipe / "run.yaml"), "--device", device]
    if recipe in PUBLISHED:
        if checkpoint is None:
            raise SystemExit(f"the recipe {recipe} trains a published model: give --hf-checkpoint")
        return ["train", *words, "--hf-checkpoint", str(checkpoint)]
    return ["train", *words, *trained_base(directory.parent)] if recipe == "lora" else ["demo", *words]


def run(recipe: str, seed: int, directory: Path, words: list[str]) -> dict[str, Any]:
    """Run a recipe unless its directory has a run; return its curves, those of a stopped run up to its last step."""
    if not (directory / "metrics.jsonl").is_file():
        miles(*words, "--save", str(directory), "--seed", str(seed))
    records = read(directory / "metrics.jsonl")
    _, seconds = series(records, "time/step")
    _, gaps = series(records, "mismatch/abs_log_prob")
    metrics = PUBLISHED[recipe][1] if recipe in PUBLISHED else ("eval/accuracy",)
    curves = {metric.removeprefix("eval/"): curve(records, metric) for metric in metrics}
    found = {"steps": records[-1]["step"], **curves, "seconds_a_step": round(median(seconds[1:]), 2)}
    return found | ({"largest_gap": max(gaps)} if gaps else {})


def curve(records: list[dict[str, Any]], metric: str) -> dict[int, float]:
    """Return step -> value of a metric; one that each step has is thinned to every tenth step."""
    steps, values = series(records, metric)
    chosen = [n for n, step in enumerate(steps) if len(steps) <= 20 or step % 10 == 0 or n in (0, len(steps) - 1)]
    return {steps[n]: round(values[n], 4) for n in chosen}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=[*RECIPES, *PUBLISHED], default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--runs", type=Path, help="directory for the runs")
    parser.add_argument("--hf-checkpoint", type=Path, help="the published model, SmolLM2-135M-Instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--flags", default="", help="further flags of every run")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    given = parser.parse_args()
    for folder in sorted({folder for recipe in given.only for folder in PUBLISHED.get(recipe, ((), ()))[0]}):
        subprocess.run([sys.executable, f"recipes/{folder}/data.py"], check=True, cwd=ROOT)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(given.jobs) as pool:
        directory, more = (given.runs or Path(temporary)).absolute(), given.flags.split()
        started = {
            (recipe, seed): pool.submit(
                run, recipe, seed, place, [*command(recipe, place, given.device, given.hf_checkpoint), *more]
            )
            for recipe in given.only
            for seed in given.seeds
            for place in [directory / f"{recipe}-{seed}"]
        }
        runs: dict[str, dict[int, Any]] = {recipe: {} for recipe in given.only}
        for (recipe, seed), future in started.items():
            runs[recipe][seed] = future.result()
    chosen = [] if given.only == list(RECIPES) else [*given.only, *([] if given.device == "cpu" else [given.device])]
    of = given.variant or "-".join(chosen)
    result = {"runs": runs, "runs_at_the_same_time": given.jobs}
    finish("recipes", result, given.save, lambda: installed("miles-core", "torch", "transformers"), of)


if __name__ == "__main__":
    main()
