"""Step times of two checkouts in alternating pairs of runs, on the toy and on a random model with SmolLM2-135M's shape.

    python benchmarks/project/step_time.py --before CHECKOUT --pairs 5 --threads 16 --save

Each run is ``miles train`` in a process of its own; the order of the two sides changes with every pair, so a slow minute of the machine
affects both. A run's time is the median of ``time/step`` without the first steps. The last line of the output is one JSON object with
every run's time and, per model, the median ratio after / before of the pairs. As in ``same_numbers.py``, a checkout needs no
installation: its packages and the entry points of its ``pyproject.toml`` files come first on the import path.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, commit, finish, installed
from benchmarks.project.same_numbers import REWARD, Side, prepare
from miles_testing.tiny import tiny_checkpoint

#: First steps of a run, which allocate and compile.
SKIPPED = 2
#: Arguments of ``tiny_checkpoint`` for the shape of SmolLM2-135M.
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
}
#: Models by name: family, arguments of ``tiny_checkpoint``, flags of the run, steps of a run.
MODELS: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "toy": ("qwen3_moe", {}, "--rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 16", 42),
    "smollm2": ("llama", SMOLLM2, "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 64", 5),
    "small": ("llama", {}, "--rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 4", 4),
}
TRAIN = """train --hf-checkpoint {model} --prompt-data {inputs}/prompts.jsonl --custom-rm-path {inputs}/reward.py --num-rollout {steps}
    --lr 1e-5 --save run --log-level error {flags}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT", help="the code before")
    parser.add_argument(
        "--after", type=Path, default=ROOT, metavar="CHECKOUT", help="the code after (default: this checkout)"
    )
    parser.add_argument("--models", default="toy,smollm2", help=f"some of {','.join(MODELS)}")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs per model")
    parser.add_argument("--steps", type=int, help=f"steps of a run, more than {SKIPPED} (default: by model)")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of a run")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/NAME-DATE.json")
    given = parser.parse_args()
    models = given.models.split(",")
    if unknown := set(models) - set(MODELS):
        parser.error(f"there is no model {', '.join(sorted(unknown))}")
    if given.steps is not None and given.steps <= SKIPPED:
        parser.error(f"--steps {given.steps}: the first {SKIPPED} steps are not measured; give more")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary).resolve()
        sides = [prepare(n, getattr(given, n), sys.executable, None, work) for n in ("before", "after")]
        times = {model: measure(model, sides, given, work) for model in models}
    ratios = {
        m: statistics.median(a / b for b, a in zip(t["before"], t["after"], strict=True)) for m, t in times.items()
    }
    commits = {side.name: commit(side.checkout) for side in sides}
    found = {
        "threads": given.threads,
        "steps": {m: given.steps or MODELS[m][3] for m in models},
        **commits,
        "ratio": ratios,
        "seconds": times,
    }
    finish(Path(__file__).stem, found, given.save, lambda: installed("torch"))


def measure(model: str, sides: list[Side], given: argparse.Namespace, work: Path) -> dict[str, list[float]]:
    """Return side -> seconds per step of each run of one model."""
    family, shape, flags, steps = MODELS[model]
    inputs = work / f"{model}-inputs"
    checkpoint = tiny_checkpoint(family, inputs / "model", **shape)
    rows = [json.dumps({"input": f"{i}+{i}="}) + "\n" for i in range(3, 11)]
    (inputs / "prompts.jsonl").write_text("".join(rows))
    (inputs / "reward.py").write_text(REWARD)
    command = TRAIN.format(model=checkpoint, inputs=inputs, steps=given.steps or steps, flags=flags).split()
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    for pair in range(given.pairs):
        for side in sides if pair % 2 else reversed(sides):
            directory = side.work / f"{model}-{pair}"
            process = side.run(directory, [[*command, *side.flags.split()]], OMP_NUM_THREADS=str(given.threads))
            if process.wait():
                raise SystemExit(f"{side.name}, {model}: {(directory / 'errors.txt').read_text()[-2000:]}")
            (metrics,) = directory.rglob("metrics.jsonl")
            seconds = [
                row["time/step"]
                for line in metrics.read_text().splitlines()
                if "time/step" in (row := json.loads(line))
            ]
            times[side.name].append(statistics.median(seconds[SKIPPED:]))
            print(f"{model:<8} pair {pair} {side.name:<6} {times[side.name][-1]:.4f} s per step", flush=True)
    return times


if __name__ == "__main__":
    main()
