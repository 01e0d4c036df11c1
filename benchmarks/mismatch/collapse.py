"""Does the gap between engine and trainer matter? A mixture of experts trained until reinforcement learning is unstable with an FP8 rollout.

The task: a prompt is a row of digits, and the answer their running sums modulo 10, so a wrong digit spoils what follows. A random
mixture of experts learns it from a careless teacher (supervised, once per seed), then by GRPO, whose reward is the share of digits before the
first wrong one (``--reward exact``: 1 for the whole answer, else 0). There is no KL term; ``--updates`` optimizer steps per rollout and the
learning rates ``--lr`` decide how stable the run is (``docs/decisions/0012-exact-log-probs.md`` has a setting in which FP8 alone decides). Arms
differ in the engine's and the trainer's number format and in the correction only; the arms of a seed share the warm start, the prompts and the
seed of the samples. Arm ``bf16`` has no number format: what it loses, no correction of a rounded rollout can win back.

Every run is one ``miles train`` in ``--out/LR-ARM-SEED``, in a process forked from this one (``forked_runs.py``). The command may be ended
(SIGTERM, ``--limit``) and given again: a run that is complete with the same flags is not repeated, another one goes on from its last
checkpoint, and larger ``--steps`` prolong complete runs. ``--lead`` keeps the runs in step, and ``--equal-steps`` compares them over the steps
that all of them have made. Result and plot are written every ``--every`` seconds, and at the end; until all runs
are complete they hold the steps that exist, and ``complete`` is false. ``--summarize`` starts nothing.

For each learning rate and arm the table has the mean reward of the last tenth of the steps, the best mean over a tenth of the steps, how many
seeds collapsed (the last tenth below half of that seed's best tenth), and the difference of each seed's last tenth from that of ``bf16``, with
95 % t-intervals over seeds. ``--plot`` draws reward and KL of every seed, and mean and interval of the seeds' means over a tenth of the steps.
The last line is one JSON object with the curves.

Run on a CPU: ``python benchmarks/mismatch/collapse.py --out collapse --jobs 2 --save --plot collapse.svg``; on one GPU
add ``--device cuda --jobs 9``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import finish, installed, options
from benchmarks.mismatch.forked_runs import ForkedRun, prepare, run_all

Rows = list[dict[str, Any]]
#: Imported before the first fork.
MODEL = (
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "miles_fp8.format",
    "miles_r3.hooks",
    "miles_tis.hooks",
    "miles_true_on_policy.hooks",
)

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
#: Arms that start first.
FIRST = ("true_on_policy", "bf16", "plain", "unified")
#: Metrics whose curves the result keeps.
CURVES = {
    "reward": "reward/mean",
    "kl": "mismatch/kl_k3",
    "gap": "mismatch/abs_log_prob",
    "grad_norm": "train/grad_norm",
}
#: Two-sided 95 % quantile of Student's t, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
REWARDS = {
    "share": '''
def reward(args, sample):
    """Share of the answer's digits before the first wrong one; an answer that goes on is wrong there."""
    text, right = sample.response.strip(), 0
    while right < len(sample.label) and text[right : right + 1] == sample.label[right]:
        right += 1
    return {"score": right / len(sample.label) if len(text) <= len(sample.label) else right / len(text)}
''',
    "exact": '''
def reward(args, sample):
    """1 for the whole answer, else 0."""
    return {"score": float(sample.response.strip() == sample.label)}
''',
}


def running_sums(digits: str, errs: float, draw: random.Random) -> str:
    """The sums modulo 10 of a row of digits; each addition is wrong with probability ``errs``."""
    total, found = 0, ""
    for digit in digits:
        total = (total + int(digit)) % 10 if draw.random() >= errs else draw.randrange(10)
        found += str(total)
    return found


def write_task(place: Path, length: int) -> None:
    """Prompts, demonstrations of the careless teacher, and the rewards."""
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
    for name, source in REWARDS.items():
        (place / f"{name}.py").write_text(source, encoding="utf-8")


def common(given: argparse.Namespace, seed: int) -> str:
    """Flags of warm starts and runs: task and device."""
    task = given.out.resolve() / "task"
    return (
        f"--prompt-data {task}/train.jsonl --input-key prompt --label-key label --reward-key score --rollout-shuffle "
        f"--n-samples-per-prompt 8 --rollout-max-response-len {given.length + 1} --weight-decay 0 --adam-beta2 {given.adam_beta2} "
        f"--use-dynamic-batch-size --max-tokens-per-gpu 32768 --max-running-requests 512 --device {given.device} --dtype {given.dtype} "
        f"--log-level error --no-save-rollouts --no-self-check --seed {seed}"
    )


def algorithm(given: argparse.Namespace, lr: float) -> str:
    """Flags of the runs alone: settings that differ in nothing else share the warm starts."""
    return (
        f"--custom-rm-path {given.out.resolve()}/task/{given.reward}.py:reward --rollout-batch-size {given.prompts} "
        f"--num-steps-per-rollout {given.updates} --lr {lr} --adam-eps {given.adam_eps} --clip-grad {given.clip_grad} "
        f"--eps-clip {given.eps_clip} --eps-clip-high {given.eps_clip_high} --entropy-coef {given.entropy} "
        f"--advantage-estimator {given.estimator} {given.more}"
    )


def warm_start(given: argparse.Namespace, seed: int) -> ForkedRun:
    """The supervised start of a seed, which its arms share."""
    from miles_tools.demo.model import Size, make_checkpoint

    place = given.out / f"start-{seed}"
    if not (place / "model" / "config.json").is_file():
        head = given.hidden // 4
        shape = Size(
            given.hidden, given.layers, 4, 2, head, given.experts, given.experts_per_token, given.hidden, init_std=0.05
        )
        make_checkpoint(place / "model", seed, shape)
    task = given.out.resolve() / "task"
    sft = f"--sft-data {task}/demonstrations.jsonl --sft-steps {given.sft_steps} --sft-batch-size {given.sft_batch} --sft-lr 2e-3"
    words = f"--hf-checkpoint {place}/model {sft} --custom-rm-path {task}/share.py:reward --export-hf {place}/export {common(given, seed)}"
    threads = max(1, given.cores // len(given.seeds))
    return ForkedRun(place / "run", words, 0, threads, place / "export" / "config.json")


def run_of(given: argparse.Namespace, lr: float, arm: str, seed: int) -> ForkedRun:
    """The run of an arm and a seed."""
    words = f"--hf-checkpoint {given.out}/start-{seed}/export --save-interval 20 --keep 1 {common(given, seed)} "
    words += f"{algorithm(given, lr)} {ARMS[arm]}"
    return ForkedRun(given.out / f"{given.prefix}{lr}-{arm}-{seed}", words, given.steps, given.threads)


def interval(values: list[float], digits: int = 4) -> list[float | None]:
    """[mean, half width of its 95 % t-interval]; None for one value."""
    if len(values) < 2:
        return [round(statistics.fmean(values), digits), None]
    half = STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return [round(statistics.fmean(values), digits), round(half, digits)]


def smooth(curve: list[float], part: int) -> list[float]:
    """Means over the last ``part`` steps."""
    return [statistics.fmean(curve[max(0, i - part + 1) : i + 1]) for i in range(len(curve))]


def summarize(runs: dict[int, Rows], reference: dict[int, Rows], steps: int) -> dict[str, Any]:
    """The row of an arm: its seeds' ends, best stretches and mismatch, and the curves.

    Args:
        runs: seed -> the metrics of its steps so far, at least one.
        reference: the same of the arm ``bf16``; seeds of equally many steps are compared.
        steps: steps of a complete run.
    """
    part = max(1, steps // 10)
    rewards = {seed: [row["reward/mean"] for row in run] for seed, run in runs.items()}
    last = {seed: statistics.fmean(curve[-part:]) for seed, curve in rewards.items()}
    best = {
        seed: max(statistics.fmean(curve[i : i + part]) for i in range(0, len(curve), part))
        for seed, curve in rewards.items()
    }
    plain = {s: statistics.fmean(row["reward/mean"] for row in run[-part:]) for s, run in reference.items()}
    pairs = [last[s] - plain[s] for s, run in runs.items() if len(run) == len(reference.get(s, ()))]
    curves = {
        key: [[float(f"{row.get(name, math.nan):.4g}") for row in run] for run in runs.values()]
        for key, name in CURVES.items()
    }
    return {
        "steps": [len(run) for run in runs.values()],
        "reward_last": interval(list(last.values())),
        "reward_best": interval(list(best.values())),
        "minus_bf16": interval(pairs) if pairs else None,
        "collapsed": sum(last[seed] < best[seed] / 2 for seed in runs),
        "kl_median": float(f"{statistics.median(x for c in curves['kl'] for x in c):.3g}"),
        "gap_largest": float(f"{max(x for c in curves['gap'] for x in c):.3g}"),
        "curves": curves,
    }


def tables_of(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Learning rate -> arm -> row, of the runs that have made a step."""
    tables: dict[str, dict[str, Any]] = {}
    for lr in given.lr:
        rows = {arm: {s: run_of(given, lr, arm, s).rows() for s in given.seeds} for arm in given.arms}
        found = {arm: {s: run for s, run in runs.items() if run} for arm, runs in rows.items()}
        table = {arm: summarize(runs, found.get("bf16", {}), given.steps) for arm, runs in found.items() if runs}
        if table:
            tables[str(lr)] = table
    return tables


def draw(tables: dict[str, dict[str, Any]], path: Path, part: int) -> None:
    """Draw reward and KL, one column per arm and two rows per learning rate: every seed, mean and 95 % interval of the seeds' means over the
    last ``part`` steps, and the mean of ``bf16`` for comparison."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    arms = list(dict.fromkeys(arm for table in tables.values() for arm in table))
    figure, axes = pyplot.subplots(
        2 * len(tables), len(arms), figsize=(2.6 * len(arms), 5 * len(tables)), sharex=True, sharey="row", squeeze=False
    )
    for number, (lr, table) in enumerate(tables.items()):
        for offset, key in enumerate(("reward", "kl")):
            means = {arm: middle(row["curves"][key], part) for arm, row in table.items()}
            for panel, arm in zip(axes[2 * number + offset], arms, strict=True):
                if arm not in table:
                    continue
                for curve in table[arm]["curves"][key]:
                    panel.plot(curve, color="C0", alpha=0.3, linewidth=0.6)
                mean, low, high = means[arm]
                panel.fill_between(range(len(low)), low, high, color="C0", alpha=0.2, linewidth=0)
                if arm != "bf16" and "bf16" in means:
                    panel.plot(means["bf16"][0], color="0.4", linewidth=1, linestyle="--")
                panel.plot(mean, color="C0", linewidth=1.6)
                panel.set_title(f"{arm}, {lr}", fontsize=9)
        axes[2 * number, 0].set(ylabel="reward", ylim=(0, 1))
        axes[2 * number + 1, 0].set(ylabel="KL of engine to trainer (k3)")
        axes[2 * number + 1, 0].set_yscale("symlog", linthresh=1e-5)
    for panel in axes[-1]:
        panel.set(xlabel="rollout")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def middle(curves: list[list[float]], part: int) -> tuple[list[float], list[float], list[float]]:
    """Mean of the smoothed curves, and the ends of its 95 % t-interval (none for one curve), over the steps that all of them have."""
    columns = [list(values) for values in zip(*(smooth(curve, part) for curve in curves), strict=False)]
    found = [interval(values, 8) for values in columns]
    wide = [(mean, half) for mean, half in found if mean is not None and half is not None]
    return [statistics.fmean(c) for c in columns], [m - h for m, h in wide], [m + h for m, h in wide]


def equal_steps(made: list[int]) -> int:
    """Return the steps that all runs have made, apart from those with less than half of the most steps: they failed, or have just started."""
    return min(steps for steps in made if 2 * steps >= max(made))


def report(given: argparse.Namespace, last: bool) -> None:
    """Write the plot and the results of the runs so far. Print the table if this is the ``last`` report."""
    if given.equal_steps:
        given = argparse.Namespace(
            **{**vars(given), "steps": equal_steps([len(run.rows()) for run in arm_runs(given)])}
        )
    tables = tables_of(given)
    if not tables:
        return
    if given.plot:
        draw(tables, given.plot, max(1, given.steps // 10))
    hidden = (
        "out",
        "plot",
        "save",
        "variant",
        "arms",
        "threads",
        "cores",
        "jobs",
        "limit",
        "every",
        "summarize",
        "lead",
        "prefix",
    )
    settings = {name: value for name, value in vars(given).items() if name not in hidden}
    done = all(r.is_complete() for r in arm_runs(given))
    flags = {arm: ARMS[arm] for arm in given.arms}
    result = {"settings": settings, "complete": done, "flags": flags, "learning_rates": tables}
    for lr, table in tables.items() if last else ():
        for arm, row in table.items():
            print(f"{lr:<8} {arm:<15}", {k: v for k, v in row.items() if k != "curves"}, file=sys.stderr)
    versions = partial(installed, "miles-core", "torch", "transformers")
    finish("collapse", result, given.save, versions, given.variant, quiet=not last)


def arm_runs(given: argparse.Namespace) -> list[ForkedRun]:
    """All runs, in the order in which they start: one learning rate after the other, and first the arms without which the others say little."""
    arms = sorted(given.arms, key=lambda arm: FIRST.index(arm) if arm in FIRST else len(FIRST))
    return [run_of(given, lr, arm, seed) for lr in given.lr for arm in arms for seed in given.seeds]


def main() -> None:
    given = parse()
    until = time.monotonic() + given.limit
    try:
        if not given.summarize:
            prepare(*MODEL)
            if not (given.out / "task" / "exact.py").is_file():
                write_task(given.out / "task", given.length)
            starts = [warm_start(given, seed) for seed in given.seeds]
            if run_all(starts, len(starts), until):
                run_all(arm_runs(given), given.jobs, until, given.every, lambda: report(given, False), given.lead)
    finally:
        report(given, True)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the task, the model and its training, which all arms share."""
    parser.add_argument("--steps", type=int, default=60, help="rollouts of a run")
    parser.add_argument("--updates", type=int, default=8, help="optimizer steps per rollout")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a rollout, 8 samples each")
    parser.add_argument("--length", type=int, default=16, help="digits of a prompt")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument(
        "--reward",
        choices=REWARDS,
        default="share",
        help="share of the digits before the first wrong one, or all or nothing",
    )
    parser.add_argument("--estimator", default="grpo", help="advantage estimator")
    parser.add_argument("--lr", nargs="+", type=float, default=[4.5e-4, 6e-4], help="each with every arm and seed")
    parser.add_argument("--eps-clip", type=float, default=0.2)
    parser.add_argument("--eps-clip-high", type=float, default=0.28)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--adam-beta2", type=float, default=0.95)
    parser.add_argument("--adam-eps", type=float, default=1e-8)
    parser.add_argument("--entropy", type=float, default=0.0, help="coefficient of the entropy bonus")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--sft-batch", type=int, default=256)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line; ``words``: flags in its place."""
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS), help="none: only the warm starts")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_training_options(parser)
    parser.add_argument(
        "--prefix",
        default="",
        help="of the runs' directories; settings that differ in it may share the warm starts of --out",
    )
    parser.add_argument("--more", default="", help="further flags of miles train")
    parser.add_argument("--plot", type=Path, help="SVG file for the curves")
    parser.add_argument("--variant", default="", help="part of the result file's name, such as a device")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="threads of all warm starts together")
    parser.add_argument(
        "--limit", type=float, default=1e9, help="seconds after which running runs are ended with a checkpoint"
    )
    parser.add_argument("--every", type=float, default=60, help="seconds between results of runs that are not complete")
    parser.add_argument(
        "--lead", type=int, default=0, help="steps that a run may be ahead of the slowest running one; 0: any number"
    )
    parser.add_argument(
        "--equal-steps", action="store_true", help="compare the steps that all runs have made, instead of --steps"
    )
    parser.add_argument("--summarize", action="store_true", help="start nothing; summarize the runs that exist")
    parser.set_defaults(threads=1)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
