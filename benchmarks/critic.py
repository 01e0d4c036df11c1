"""Does a critic learn the demo's task, and how does it compare with GRPO at equal tokens?

Run: ``python benchmarks/critic.py --threads 1 --save`` (some minutes; needs ``examples/critic``). The demo's task and model; for every
seed one supervised warm start, then reinforcement learning from it with the same number of samples in each step: GRPO with 8 samples of
each prompt, the critic with the same prompts, and the critic with one sample of each of 8 times as many prompts, which GRPO cannot do. The
last line of the output is one JSON object: held-out accuracy over the steps, tokens, and seconds of a step.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from formats_in_the_loop import train, warm_start
from measure import finish, installed, options

SAMPLES, GROUP = 512, 8
PPO = "--plugins critic --advantage-estimator ppo --critic-lr 0.002 --lambd 1.0 --normalize-advantages --value-clip 1.0"
MODES = {
    "grpo": f"--rollout-batch-size {SAMPLES // GROUP} --n-samples-per-prompt {GROUP}",
    "critic": f"{PPO} --rollout-batch-size {SAMPLES // GROUP} --n-samples-per-prompt {GROUP}",
    "critic, 1 sample of a prompt": f"{PPO} --rollout-batch-size {SAMPLES} --n-samples-per-prompt 1",
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each mode")
    parser.add_argument("--steps", type=int, default=40, help="reinforcement-learning steps")
    parser.add_argument("--warm-start", type=int, default=400, help="supervised steps before them")
    chosen = parser.parse_args()
    import torch

    torch.set_num_threads(chosen.threads)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in MODES}
    for seed in range(chosen.seeds):
        with tempfile.TemporaryDirectory() as directory:
            start = warm_start(Path(directory), seed, chosen.warm_start)
            for name, flags in MODES.items():
                runs[name].append(learn(start, name, flags, seed, chosen.steps))
                print(f"seed {seed}  {name:<30}", runs[name][-1], file=sys.stderr, flush=True)
    settings = {"seeds": chosen.seeds, "steps": chosen.steps, "warm_start": chosen.warm_start}
    result = {**settings, "modes": {name: {"options": MODES[name], **summary(found)} for name, found in runs.items()}}
    versions = ("miles-core", "miles-plugin-critic-example", "torch", "transformers")
    finish(Path(__file__).stem, result, chosen.save, lambda: installed(*versions))


def learn(directory: Path, name: str, flags: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: accuracy before the first step and at four points, and the tokens that it was trained on."""
    more = ["--hf-checkpoint", str(directory / "start"), "--num-rollout", str(steps), *flags.split()]
    more += ["--eval-interval", str(max(steps // 4, 1)), "--n-samples-per-eval-prompt", "4"]
    metrics = train(directory, name.replace(",", ""), more, seed)
    trained = [m for m in metrics if "train/loss" in m]
    return {
        "accuracy": [m["eval/accuracy"] for m in metrics if "eval/accuracy" in m],
        "tokens": sum(m["rollout/tokens"] for m in trained),
        "value_loss": [
            trained[at]["critic/train/value_loss"] for at in (0, -1) if "critic/train/value_loss" in trained[at]
        ],
        "seconds": statistics.median(m["time/step"] for m in trained),
    }


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds."""
    accuracy = [round(statistics.mean(points), 4) for points in zip(*(r["accuracy"] for r in runs), strict=True)]
    found = {"accuracy": accuracy, "accuracy_of_each_seed": [round(r["accuracy"][-1], 4) for r in runs]}
    if runs[0]["value_loss"]:
        ends = zip(*(r["value_loss"] for r in runs), strict=True)
        found["value_loss"] = [round(statistics.mean(values), 4) for values in ends]
    numbers = {name: statistics.mean(r[name] for r in runs) for name in ("tokens", "seconds")}
    return found | {"tokens": round(numbers["tokens"]), "seconds": round(numbers["seconds"], 3)}


if __name__ == "__main__":
    main()
