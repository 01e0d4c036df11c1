"""What the hooks cost a step: the real loop without plugins, and with plugins on every hook that do nothing, taking turns.

Both sides make the same samples and do the same arithmetic (two optimiser steps a rollout, because a plugin on
``wrap_correction`` asks for the old log-probabilities that two steps need anyway). The workload is the demo's model with
short responses, so that a step is short and the share of the hooks is not hidden. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import ROOT, Reporter, Worker, alternate, finish, installed, medians, options, spread

PROMPTS, SAMPLES = 16, 8


def work(directory: Path, steps: int, plugins: list[str], reporter: Reporter) -> None:
    """Run ``miles train``, held before each step."""
    from benchmarks.training.workload import train_in_turns

    reporter.send(ready=True)
    flags = f"""--hf-checkpoint {directory}/model --prompt-data {directory}/data/train.jsonl --input-key prompt
        --label-key label --custom-rm-path {ROOT}/benchmarks/training/workload.py:rm --device cpu --dtype float32
        --rollout-batch-size {PROMPTS} --n-samples-per-prompt {SAMPLES} --num-rollout {steps} --num-steps-per-rollout 2
        --rollout-max-response-len 4 --lr 1e-6 --use-dynamic-batch-size --max-tokens-per-gpu 65536 --seed 0
        --log-level error"""
    given = ["--plugins", ",".join(plugins)] if plugins else []
    report = lambda _, seconds, cpu: reporter.send(seconds=seconds)  # noqa: E731
    train_in_turns([*flags.split(), *given], reporter.wait, report)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=60, help="measured steps of each side")
    parser.add_argument("--warm-up", type=int, default=5, help="unmeasured steps of each side")
    parser.add_argument("--plugins", type=int, default=3, help="how many plugins, each on every hook")
    for name in ("--worker", "--directory", "--files"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.set_defaults(threads=1)
    given = parser.parse_args()
    if given.worker:
        work(Path(given.directory), given.steps, [f for f in given.files.split(",") if f], Reporter())
        return
    from miles_tools.demo.model import make_checkpoint
    from miles_tools.demo.task import write_task

    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        make_checkpoint(directory / "model")
        write_task(directory / "data")
        files = [directory / f"every_hook_{i}.py" for i in range(given.plugins)]
        for file in files:
            shutil.copy(Path(__file__).with_name("every_hook.py"), file)
        base = [sys.executable, str(Path(__file__).resolve()), "--worker", "miles", "--directory", place]
        base += ["--steps", str(given.turns + given.warm_up + 1)]
        named = {"bare": "", "hooked": ",".join(map(str, files))}
        workers = [Worker(name, [*base, "--files", value], given.threads) for name, value in named.items()]
        try:
            reports = alternate(workers, given.turns, given.warm_up)
        finally:
            for worker in workers:
                worker.close()
    sides = {name: medians(r) | {"range": spread(r)} for name, r in reports.items()}
    bare, hooked = (sides[name]["seconds"] for name in ("bare", "hooked"))
    result = {
        "workload": {
            "samples": PROMPTS * SAMPLES,
            "plugins": given.plugins,
            "threads": given.threads,
            "turns": given.turns,
        },
        "sides": sides,
        "milliseconds_per_step": round((hooked - bare) * 1e3, 3),
        "microseconds_per_sample": round((hooked - bare) * 1e6 / (PROMPTS * SAMPLES), 2),
        "percent_of_step": round((hooked / bare - 1) * 100, 2),
    }
    finish("hook_overhead", result, given.save, lambda: installed("miles-core", "torch", "transformers"))


if __name__ == "__main__":
    main()
