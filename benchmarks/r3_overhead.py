"""What r3 costs a step: the step of ``grpo_step.py`` with and without it, taking turns.

Two processes, held between steps, A B B A, so that neither is always the second. One optimiser step a rollout, or several
(``--mini-steps``), which adds the old-log-probability pass to both sides. The last line is one JSON object: the median of the
ratios turn by turn with its 95 % interval (order statistics; no distribution is assumed), and their quartiles.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import Worker, finish, installed, medians, options, spread


def median_interval(values: list[float]) -> list[float]:
    """The order statistics that hold the median in 95 % of samples (normal approximation of the binomial)."""
    ordered = sorted(values)
    reach = 1.96 * math.sqrt(len(ordered)) / 2
    low, high = math.floor(len(ordered) / 2 - reach), math.ceil(len(ordered) / 2 + reach)
    return [ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]]


def compare(threads: int, turns: int, warm_up: int, mini_steps: int) -> dict[str, Any]:
    """Turns of both sides."""
    from workload import make_workload

    with tempfile.TemporaryDirectory() as directory:
        work = make_workload(Path(directory))
        command = [sys.executable, str(Path(__file__).with_name("grpo_step.py")), "--worker", "miles"]
        command += ["--checkpoint", str(work.checkpoint), "--prompts", str(work.prompt_file)]
        command += ["--steps", str(turns + warm_up + 1)]
        base = f"--num-steps-per-rollout {mini_steps}"
        workers = [
            Worker(name, [*command, f"--worker-flags={base}{more}"], threads)
            for name, more in (("plain", ""), ("r3", " --plugins r3"))
        ]
        reports: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
        try:
            for turn in range(warm_up + turns):
                for worker in workers if turn % 2 else workers[::-1]:
                    report = worker.turn()
                    if turn >= warm_up:
                        reports[worker.name].append(report)
                print(f"turn {turn + 1}/{warm_up + turns}", file=sys.stderr, flush=True)
        finally:
            for worker in workers:
                worker.close()
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(reports["plain"], reports["r3"], strict=True)]
    return {
        "threads": threads,
        "turns": turns,
        "mini_steps": mini_steps,
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_median_interval": [round(x, 4) for x in median_interval(ratios)],
        "ratio_quartiles": [round(x, 4) for x in statistics.quantiles(ratios, n=4)],
        "sides": {name: medians(found) | {"range": spread(found)} for name, found in reports.items()},
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=60, help="measured steps of each side")
    parser.add_argument("--warm-up", type=int, default=3, help="unmeasured steps of each side")
    parser.add_argument("--mini-steps", type=int, default=1, help="optimiser steps a rollout")
    given = parser.parse_args()
    result = compare(given.threads, given.turns, given.warm_up, given.mini_steps)
    plugins = ("miles-core", "miles-plugin-r3", "torch", "transformers")
    variant = "" if given.mini_steps == 1 else f"{given.mini_steps}-steps"
    finish("r3_overhead", result, given.save, lambda: installed(*plugins), variant)


if __name__ == "__main__":
    main()
