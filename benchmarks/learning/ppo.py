"""Does a critic learn the demo's task, and how does PPO compare with GRPO at equal numbers of samples?

Run: ``python benchmarks/learning/ppo.py --threads 1 --jobs 3 --save`` (some minutes; needs ``plugins/ppo``). The demo's task and model; for every
seed one supervised warm start, then reinforcement learning from it with the same number of samples in each step: GRPO with 8 samples of
each prompt; PPO with one sample of each of 8 times as many prompts, which GRPO cannot do; and PPO with the same prompts as GRPO. The critic is a
model of its own, or a head on the policy's trunk. ``1 critic step`` trains it as often as the policy, which was the default until 2026-11-24.
The last line of the output is one JSON object: held-out accuracy over the steps with 95 % intervals over seeds, its difference from GRPO
paired by seed, tokens, and seconds of a step. One seed has no interval. With ``--runs DIR`` the results of finished runs stay in a directory, and
a command that was stopped goes on from them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.formats.formats_in_the_loop import interval, train, warm_start
from benchmarks.learning.seeds import made_in, mean_of, work_in_processes, workplace
from benchmarks.measure import finish, installed, options

SAMPLES, GROUP = 512, 8
GROUPS = f"--rollout-batch-size {SAMPLES // GROUP} --n-samples-per-prompt {GROUP}"
SINGLE = f"--rollout-batch-size {SAMPLES} --n-samples-per-prompt 1"
PPO = "--plugins ppo --advantage-estimator ppo --critic-lr 0.002 --critic-lr-decay-style linear --normalize-advantages"
MODES = {
    "grpo": GROUPS,
    "ppo, own critic, 1 sample per prompt": f"{PPO} {SINGLE}",
    "ppo, own critic": f"{PPO} {GROUPS}",
    "ppo, own critic, 1 critic step": f"{PPO} --critic-steps-per-rollout 1 {GROUPS}",
    "ppo, head on the trunk, 1 sample per prompt": f"{PPO} --critic-trunk policy {SINGLE}",
    "ppo, head on the trunk": f"{PPO} --critic-trunk policy {GROUPS}",
}
BASE = "grpo"
#: Metrics of critics, without the prefix of a critic that is a model of its own.
CRITIC = ("train/value_loss", "ppo/explained_variance")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each mode (1 to 10)")
    parser.add_argument("--steps", type=int, default=60, help="reinforcement-learning steps")
    parser.add_argument("--warm-start", type=int, default=500, help="supervised steps before them")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    parser.add_argument("--modes", nargs="+", default=[*MODES], choices=MODES, help="modes to run")
    parser.add_argument("--runs", default="", help="directory that keeps the results of finished runs")
    chosen = parser.parse_args()
    modes = list(dict.fromkeys([BASE, *chosen.modes]))
    seeds = range(chosen.seeds)
    versions = ("miles-core", "miles-plugin-ppo", "torch", "transformers")
    with workplace(chosen.runs, lambda: installed(*versions)) as directory:
        shared: dict[str, Any] = {"jobs": chosen.jobs, "threads": chosen.threads}
        shared |= {"kept": directory if chosen.runs else None}
        starts = [(directory / str(seed), seed) for seed in seeds]
        work_in_processes(warm_start, starts, steps=chosen.warm_start, **shared)
        keys = [(name, *start) for start in starts for name in modes]
        found = work_in_processes(learn, keys, steps=chosen.steps, **shared)
        made = made_in(directory)
    runs = {name: [found[name, *start] for start in starts] for name in modes}
    rows = {name: {"options": MODES[name], **summary(own, runs[BASE])} for name, own in runs.items()}
    for name, row in rows.items():
        print(f"{name:<38} {row}", file=sys.stderr)
    result = {"seeds": chosen.seeds, "steps": chosen.steps, "warm_start": chosen.warm_start, "modes": rows}
    finish(Path(__file__).stem, result | made, chosen.save, lambda: installed(*versions), chosen.variant)


def learn(name: str, directory: Path, seed: int, steps: int) -> dict[str, Any]:
    """One run: accuracy before the first step and at four points, and the tokens that were generated."""
    more = ["--hf-checkpoint", str(directory / "start"), "--num-rollout", str(steps), *MODES[name].split()]
    more += ["--eval-interval", str(max(steps // 4, 1)), "--n-samples-per-eval-prompt", "4"]
    metrics = train(directory, name.replace(",", ""), more, seed)
    stepped = [m for m in metrics if "rollout/tokens" in m]
    result: dict[str, Any] = {
        "accuracy": [m["eval/accuracy"] for m in metrics if "eval/accuracy" in m],
        "tokens": sum(m["rollout/tokens"] for m in stepped),
        "seconds": statistics.median(m["time/step"] for m in stepped),
    }
    for metric in CRITIC:
        if any(n.endswith(metric) for n in stepped[0]):
            result[metric] = [next(v for n, v in stepped[at].items() if n.endswith(metric)) for at in (0, -1)]
    print(f"seed {seed}  {name:<43}", result, file=sys.stderr, flush=True)
    return result


def summary(runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds; ``_interval`` entries are half-widths of 95 % intervals of the mean."""
    last = [r["accuracy"][-1] for r in runs]
    differences = [own - other["accuracy"][-1] for own, other in zip(last, base, strict=True)]
    found: dict[str, Any] = {
        "accuracy": [round(statistics.mean(points), 4) for points in zip(*(r["accuracy"] for r in runs), strict=True)],
        "accuracy_of_each_seed": [round(value, 4) for value in last],
        "minus_grpo": round(statistics.mean(differences), 4),
    }
    if len(runs) > 1:
        found["curve"] = [mean_of(points) for points in zip(*(r["accuracy"] for r in runs), strict=True)]
        found["accuracy_interval"] = round(interval(last)[1], 4)
        found["minus_grpo_interval"] = round(interval(differences)[1], 4)
    for metric in CRITIC:
        if metric in runs[0]:
            ends = zip(*(r[metric] for r in runs), strict=True)
            found[metric.split("/")[1]] = [round(statistics.mean(values), 4) for values in ends]
    numbers = {name: statistics.mean(r[name] for r in runs) for name in ("tokens", "seconds")}
    return found | {"tokens": round(numbers["tokens"]), "seconds": round(numbers["seconds"], 3)}


if __name__ == "__main__":
    main()
