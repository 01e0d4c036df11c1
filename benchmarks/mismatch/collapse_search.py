"""A search for a setting in which an FP8 rollout alone makes reinforcement learning unstable, for ``collapse.py``.

Each setting of ``SETTINGS`` trains the arms ``bf16`` and ``plain`` of ``collapse.py`` on one seed. After ``--limit`` seconds a rule that was
fixed before any run chooses one setting; the experiment then has other seeds, so that luck of the search does not affect its result.

The rule: both arms of a setting are compared over the steps that both have made, by means over tenths of these. A setting is admitted if
``bf16`` is stable (its last tenth is at least ``STABLE`` of its best tenth) and learns (its last tenth is above its first). The loss of ``plain``
is the share by which its last tenth is below the larger of its own best tenth and the last tenth of ``bf16``. The admitted setting with the
largest loss is chosen, or of all settings the one with the largest loss if none is admitted; the result says which.

Settings with the same model, task and warm start share a directory of ``--out``. ``--flags NAME`` prints a setting's flags of ``collapse.py`` and
runs nothing. ``--probe`` times both devices instead: ``--jobs`` runs at the same time, half of them on the CPU.

Run: ``python benchmarks/mismatch/collapse_search.py --out search --device cuda --jobs 32 --limit 150 --save``. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import finish, installed, options
from benchmarks.mismatch import collapse
from benchmarks.mismatch.forked_runs import ForkedRun, prepare, run_all

#: Directory of the warm starts -> flags of model, task and warm start.
MODELS = {
    "long": "--layers 4 --hidden 64 --experts 16 --length 24 --sft-steps 300 --sft-batch 64",
    "deep": "--layers 8 --hidden 64 --experts 32 --length 24 --sft-steps 400 --sft-batch 64",
}
#: Name -> (directory, prompts of a rollout, learning rate, further flags). The rates go up from one at which bf16 is stable.
LADDER = {
    "long-a": ("long", 16, 8e-4, ""),
    "long-b": ("long", 32, 1e-3, ""),
    "long-c": ("long", 32, 1.25e-3, ""),
    "long-d": ("long", 64, 1.3e-3, ""),
    "long-e": ("long", 64, 1.7e-3, ""),
    "long-once": ("long", 64, 3e-3, "--updates 1"),
    "long-exact": ("long", 64, 1.3e-3, "--updates 4 --reward exact"),
    "deep-a": ("deep", 16, 9e-4, ""),
    "deep-b": ("deep", 32, 1e-3, ""),
    "deep-c": ("deep", 32, 1.3e-3, ""),
    "deep-d": ("deep", 64, 1.3e-3, ""),
    "deep-e": ("deep", 64, 1.8e-3, ""),
    "deep-once": ("deep", 64, 2e-3, "--updates 1"),
}
#: Of every setting. AdamW's larger epsilon keeps steps small where gradients vanish, so that bf16 is stable at higher rates; like more prompts,
#: which make the gradient less noisy, it does not reduce the error that a gap causes.
ALL = "--adam-eps 1e-3"
#: Name -> (directory, flags of ``collapse.py``).
SETTINGS = {
    name: (model, f"{MODELS[model]} {ALL} --prompts {prompts} --lr {lr} {more or '--updates 4'}")
    for name, (model, prompts, lr, more) in LADDER.items()
}
#: Share of its best tenth that the last tenth of a stable arm has.
STABLE = 0.9
ARMS = ("bf16", "plain")
#: Without a number format: tiny products in BF16 take three times as long on a CPU.
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}


def setting(given: argparse.Namespace, name: str) -> argparse.Namespace:
    """The command line of ``collapse.py`` for a setting: one seed, two arms, steps without end."""
    model, words = SETTINGS[name]
    words = f"--out {given.out / model} {words} --prefix {name}- --arms {' '.join(ARMS)} --seeds {given.seed} --device {given.device}"
    dtype = given.dtype or DTYPES[given.device]
    return collapse.parse(f"{words} --dtype {dtype} --steps {given.steps} --cores {given.cores}".split())


def tenths(curve: list[float]) -> list[float]:
    """Means over tenths of a curve of at least ten values; a rest belongs to no tenth and is cut from the beginning."""
    part = len(curve) // 10
    curve = curve[len(curve) - 10 * part :]
    return [statistics.fmean(curve[i : i + part]) for i in range(0, len(curve), part)]


def judge(curves: dict[str, list[float]]) -> dict[str, Any]:
    """Return the numbers of the rule for a setting.

    Args:
        curves: arm -> reward of its steps.
    """
    steps = min(len(curve) for curve in curves.values())
    if steps < 10:
        return {"steps": steps, "admitted": False, "loss": 0.0}
    bf16, plain = (tenths(curves[arm][:steps]) for arm in ARMS)
    level = max(max(plain), bf16[-1])
    return {
        "steps": steps,
        "admitted": bf16[-1] >= STABLE * max(bf16) and bf16[-1] > bf16[0],
        "loss": round(1 - plain[-1] / level, 4) if level else 0.0,
        "bf16": [round(x, 4) for x in bf16],
        "plain": [round(x, 4) for x in plain],
    }


def choose(table: dict[str, dict[str, Any]]) -> str:
    """Return the setting with the largest loss of ``plain``, of the admitted ones if there are any."""
    names = [name for name, row in table.items() if row["admitted"]] or list(table)
    return max(names, key=lambda name: float(table[name]["loss"]))


def table_of(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Setting -> the numbers of the rule, the median KL divergence of ``plain`` and its largest mean gap of a step."""
    table = {}
    for name in given.settings:
        rows = {run_arm: run.rows() for run_arm, run in zip(ARMS, runs_of(given, name), strict=True)}
        table[name] = judge({arm: [row["reward/mean"] for row in found] for arm, found in rows.items()})
        table[name]["flags"] = SETTINGS[name][1]
        if rows["plain"]:
            table[name]["kl_median"] = float(f"{statistics.median(r['mismatch/kl_k3'] for r in rows['plain']):.3g}")
            table[name]["gap_largest"] = float(f"{max(r['mismatch/abs_log_prob'] for r in rows['plain']):.3g}")
    return table


def runs_of(given: argparse.Namespace, name: str) -> list[ForkedRun]:
    """The runs of a setting, in the order of ``ARMS``."""
    words = setting(given, name)
    return [collapse.run_of(words, lr, arm, given.seed) for lr in words.lr for arm in ARMS]


def search(given: argparse.Namespace) -> None:
    """Make the runs until the limit."""
    until = time.monotonic() + given.limit
    prepare(*collapse.MODEL)
    starts = {}
    for name in given.settings:
        words = setting(given, name)
        if not (words.out / "task" / "exact.py").is_file():
            collapse.write_task(words.out / "task", words.length)
        starts[words.out] = words
    given.cores = max(1, given.cores // len(starts))
    if run_all([collapse.warm_start(words, given.seed) for words in starts.values()], len(starts), until):
        run_all([run for name in given.settings for run in runs_of(given, name)], given.jobs, until)


def report(given: argparse.Namespace) -> None:
    """Print and save the table and the chosen setting."""
    table = table_of(given)
    for name, row in table.items():
        print(f"{name:<18}", {k: v for k, v in row.items() if k != "flags"}, file=sys.stderr)
    chosen = choose(table)
    given.choice.write_text(f"{chosen} {SETTINGS[chosen][1]}\n")
    result = {
        "device": given.device,
        "dtype": given.dtype or DTYPES[given.device],
        "seed": given.seed,
        "settings": table,
    }
    result |= {"chosen": chosen, "admitted": table[chosen]["admitted"]}
    versions = partial(installed, "miles-core", "torch", "transformers")
    finish("collapse_search", result, given.save, versions, given.variant)


def probe(given: argparse.Namespace) -> None:
    """Print the median seconds of a step and the number of steps on each device, while all runs compute at the same time."""
    until = time.monotonic() + given.limit
    prepare(*collapse.MODEL)
    starts, runs = [], dict[str, list[ForkedRun]]()
    for device in ("cuda", "cpu"):
        place = argparse.Namespace(**{**vars(given), "device": device, "dtype": None, "out": given.out / device})
        words = setting(place, given.settings[0])
        words.sft_steps = 2
        collapse.write_task(words.out / "task", words.length)
        starts.append(collapse.warm_start(words, given.seed))
        runs[device] = []
        for number in range(given.jobs // 2):
            words.prefix = f"{number}-"
            runs[device].append(collapse.run_of(words, words.lr[0], "plain", given.seed))
    run_all(starts, 2, until)
    run_all([run for pair in zip(*runs.values(), strict=True) for run in pair], given.jobs, until)
    for device, made in runs.items():
        seconds = [row["time/step"] for run in made for row in run.rows()[1:]]
        print(device, f"{statistics.median(seconds):.3f}" if seconds else "inf", sum(len(run.rows()) for run in made))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--steps", type=int, default=100000, help="rollouts of a run at most")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--cores", type=int, default=1, help="threads of all warm starts together")
    parser.add_argument("--limit", type=float, default=150, help="seconds")
    parser.add_argument(
        "--choice", type=Path, help="file for the chosen setting's name and flags (default: choice.txt in --out)"
    )
    parser.add_argument("--variant", default="", help="part of the result file's name, such as a device")
    parser.add_argument("--flags", choices=SETTINGS, help="print a setting's name and flags and run nothing")
    parser.add_argument("--probe", action="store_true", help="time the devices")
    given = parser.parse_args()
    given.choice = given.choice or given.out / "choice.txt"
    return given


def main() -> None:
    given = parse()
    if given.flags:
        print(given.flags, SETTINGS[given.flags][1])
    elif given.probe:
        probe(given)
    else:
        try:
            search(given)
        finally:
            report(given)


if __name__ == "__main__":
    main()
