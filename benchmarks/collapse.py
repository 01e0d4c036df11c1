"""Does the gap between engine and trainer matter? A mixture of experts trained until reinforcement learning is unstable with an FP8 rollout.

The task: a prompt is a row of digits, and the answer their running sums modulo 10, so a wrong digit spoils what follows. A random
mixture of experts learns it from a careless teacher (supervised, once per seed), then by GRPO, whose reward is the share of digits before the
first wrong one. There is no KL term; ``--updates`` optimizer steps per rollout and the learning rates ``--lr`` decide how stable the run is. Arms
differ in the engine's and the trainer's number format and in the correction only; the arms of a seed share the warm start, the prompts and the
seed of the samples. Arm ``bf16`` has no number format: what it loses, no correction of a rounded rollout can win back.

Every run is one ``miles train`` in ``--out/LR-ARM-SEED``. A run that is complete with the same flags is not repeated, so the command may be
stopped and given again.
For each learning rate the table has the mean reward of the last tenth of the steps, the best mean over a tenth of the steps, and how many seeds
collapsed (the last tenth below half of that seed's best tenth), with 95 % t-intervals over seeds; ``--plot`` draws reward and KL of every seed. The
last line is one JSON object with the curves.

Run on a CPU: ``python benchmarks/collapse.py --out collapse --jobs 2 --save --plot collapse.svg``; on one GPU add ``--device cuda --jobs 9``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import finish, installed, options

_FP8 = "--plugins fp8 --rollout-precision fp8 --emulate-precision"
_BOTH = f"{_FP8} --train-precision fp8"
ARMS = {
    "bf16": "",
    "plain": _FP8,
    "tis": f"{_FP8} --use-tis",
    "r3": f"{_FP8} --use-r3",
    "r3+tis": f"{_FP8} --use-r3 --use-tis",
    "unified": _BOTH,
    "true_on_policy": f"{_BOTH} --true-on-policy-mode",
}
#: Metrics whose curves the result keeps.
CURVES = {
    "reward": "reward/mean",
    "kl": "mismatch/kl_k3",
    "gap": "mismatch/abs_log_prob",
    "grad_norm": "train/grad_norm",
}
#: Two-sided 95 % quantile of Student's t, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
REWARD = '''
def reward(args, sample):
    """Share of the answer's digits before the first wrong one; an answer that goes on is wrong there."""
    text, right = sample.response.strip(), 0
    while right < len(sample.label) and text[right : right + 1] == sample.label[right]:
        right += 1
    return {"score": right / len(sample.label) if len(text) <= len(sample.label) else right / len(text)}
'''


def running_sums(digits: str, errs: float, draw: random.Random) -> str:
    """The sums modulo 10 of a row of digits; each addition is wrong with probability ``errs``."""
    total, found = 0, ""
    for digit in digits:
        total = (total + int(digit)) % 10 if draw.random() >= errs else draw.randrange(10)
        found += str(total)
    return found


def write_task(place: Path, length: int) -> None:
    """Prompts, demonstrations of the careless teacher, and the reward."""
    draw = random.Random(0)

    def row() -> str:
        return "".join(str(draw.randrange(10)) for _ in range(length))

    place.mkdir(parents=True, exist_ok=True)
    prompts = [
        {"prompt": f"{digits}=", "label": running_sums(digits, 0, draw)} for digits in (row() for _ in range(8192))
    ]
    shown = [
        {"prompt": f"{digits}=", "response": running_sums(digits, 0.1, draw)}
        for digits in (row() for _ in range(40000))
    ]
    for name, rows in (("train", prompts), ("demonstrations", shown)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    (place / "reward.py").write_text(REWARD, encoding="utf-8")


def common(given: argparse.Namespace, seed: int, lr: float = 0.0) -> str:
    """Flags of every run."""
    place = given.out.resolve()
    return (
        f"--prompt-data {place}/task/train.jsonl --input-key prompt --label-key label --custom-rm-path {place}/task/reward.py:reward "
        f"--reward-key score --rollout-shuffle --rollout-batch-size {given.prompts} --n-samples-per-prompt 8 "
        f"--rollout-max-response-len {given.length + 1} --num-steps-per-rollout {given.updates} --lr {lr} --weight-decay 0 "
        f"--adam-beta2 0.95 --clip-grad {given.clip_grad} --eps-clip {given.eps_clip} --eps-clip-high {given.eps_clip_high} "
        f"--use-dynamic-batch-size --max-tokens-per-gpu 32768 --max-running-requests 512 --device {given.device} --dtype bfloat16 "
        f"--log-level error --no-save-rollouts --save-interval 1000000 --no-self-check --seed {seed} {given.more}"
    )


def train(words: str, run: Path) -> None:
    """One ``miles train`` in a process of its own; SystemExit with the end of its output if it fails."""
    command = [sys.executable, "-m", "miles_core", "train", *words.split(), "--save", str(run)]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{run.name} failed:\n{done.stdout[-2000:]}")


def warm_start(given: argparse.Namespace, seed: int) -> Path:
    """The supervised start of a seed, which its arms share."""
    from miles_tools.demo.model import Size, make_checkpoint

    place = given.out / f"start-{seed}"
    if not (place / "export" / "config.json").is_file():
        size = Size(
            given.hidden,
            given.layers,
            4,
            2,
            given.hidden // 4,
            given.experts,
            expert_hidden=given.hidden,
            init_std=0.05,
        )
        make_checkpoint(place / "model", seed, size)
        sft = f"--sft-data {given.out.resolve()}/task/demonstrations.jsonl --sft-steps {given.sft_steps} --sft-batch-size 256 --sft-lr 2e-3"
        words = f"--hf-checkpoint {place}/model --num-rollout 0 {sft} --export-hf {place}/export {common(given, seed)}"
        train(words, place / "run")
    return Path(place / "export")


def learn(given: argparse.Namespace, lr: float, arm: str, seed: int) -> list[dict[str, Any]]:
    """The metrics of one run, which is started unless it is complete."""
    run = given.out / f"{lr}-{arm}-{seed}"
    complete = run / "complete"
    words = f"--hf-checkpoint {given.out}/start-{seed}/export --num-rollout {given.steps} {common(given, seed, lr)} {ARMS[arm]}"
    if not complete.is_file() or complete.read_text() != words:
        started = time.monotonic()
        shutil.rmtree(run, ignore_errors=True)
        train(words, run)
        complete.write_text(words)
        print(f"{run.name} {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "reward/mean" in row]


def interval(values: list[float], digits: int = 4) -> list[float | None]:
    """[mean, half width of its 95 % t-interval]; None for one value."""
    if len(values) < 2:
        return [round(statistics.fmean(values), digits), None]
    half = STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return [round(statistics.fmean(values), digits), round(half, digits)]


def summarize(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The row of an arm: its seeds' ends, best stretches and mismatch, and the curves."""
    part = max(1, len(runs[0]) // 10)
    rewards = [[row["reward/mean"] for row in run] for run in runs]
    last = [statistics.fmean(curve[-part:]) for curve in rewards]
    best = [max(statistics.fmean(curve[i : i + part]) for i in range(0, len(curve), part)) for curve in rewards]
    curves = {
        key: [[float(f"{row.get(name, math.nan):.4g}") for row in run] for run in runs] for key, name in CURVES.items()
    }
    return {
        "reward_last": interval(last),
        "reward_best": interval(best),
        "collapsed": sum(a < b / 2 for a, b in zip(last, best, strict=True)),
        "kl_median": float(f"{statistics.median(x for c in curves['kl'] for x in c):.3g}"),
        "gap_largest": float(f"{max(x for c in curves['gap'] for x in c):.3g}"),
        "curves": curves,
    }


def draw(tables: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw reward and KL of every seed, and the mean of each arm; one column per learning rate."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(tables), figsize=(7 * len(tables), 8), sharex=True, sharey="row", squeeze=False
    )
    for column, (lr, table) in enumerate(tables.items()):
        for number, (arm, row) in enumerate(table.items()):
            for panel, key in zip(axes[:, column], ("reward", "kl"), strict=True):
                curves = row["curves"][key]
                for curve in curves:
                    panel.plot(curve, color=f"C{number}", alpha=0.25, linewidth=0.8)
                means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
                panel.plot(means, color=f"C{number}", linewidth=1.8, label=arm)
        axes[0, column].set(title=f"learning rate {lr}", ylim=(0, 1))
        axes[1, column].set(xlabel="rollout", yscale="symlog")
    axes[0, 0].set(ylabel="reward")
    axes[0, 0].legend(ncols=2)
    axes[1, 0].set(ylabel="KL of engine to trainer (k3)")
    axes[1, 0].set_yscale("symlog", linthresh=1e-5)
    figure.savefig(path)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS), help="none: only the warm starts")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=60, help="rollouts of a run")
    parser.add_argument("--updates", type=int, default=8, help="optimizer steps per rollout")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a rollout, 8 samples each")
    parser.add_argument("--length", type=int, default=16, help="digits of a prompt")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--lr", nargs="+", type=float, default=[4.5e-4, 6e-4], help="each with every arm and seed")
    parser.add_argument("--eps-clip", type=float, default=0.2)
    parser.add_argument("--eps-clip-high", type=float, default=0.28)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--more", default="", help="further flags of miles train")
    parser.add_argument("--plot", type=Path, help="SVG file for the curves")
    parser.add_argument("--variant", default="", help="part of the result file's name, such as a device")
    given = parser.parse_args()
    write_task(given.out / "task", given.length)
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(lambda seed: warm_start(given, seed), given.seeds))
        # the slow arms first, so that no core waits for the last of them
        keys = [(lr, arm, seed) for arm in given.arms[::-1] for seed in given.seeds for lr in given.lr]
        found = dict(zip(keys, pool.map(lambda key: learn(given, *key), keys), strict=True))
    tables = {
        str(lr): {arm: summarize([found[lr, arm, seed] for seed in given.seeds]) for arm in given.arms}
        for lr in given.lr
    }
    for lr, table in tables.items():
        for arm, row in table.items():
            print(f"{lr:<8} {arm:<15}", {k: v for k, v in row.items() if k != "curves"}, file=sys.stderr)
    if given.plot and given.arms:
        draw(tables, given.plot)
    hidden = ("out", "plot", "save", "variant", "arms", "threads")
    settings = {name: value for name, value in vars(given).items() if name not in hidden}
    result = {"settings": settings, "flags": {arm: ARMS[arm] for arm in given.arms}, "learning_rates": tables}
    finish("collapse", result, given.save, lambda: installed("miles-core", "torch", "transformers"), given.variant)


if __name__ == "__main__":
    main()
