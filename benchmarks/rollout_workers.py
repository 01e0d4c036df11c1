"""What ``--rollout-workers`` takes off the driver, and what it adds.

The real loop with an engine and a trainer that cost nothing (``driver_double.py``), in the driver alone and with one and two workers: the
processor time of the driver per token, and the time of a step. ``reward`` is the processor time of scoring one sample in Python, which
workers do in parallel. Samples are saved; ``routes`` is the number of layers with a routing record. Run:
``python benchmarks/rollout_workers.py --save`` (three minutes).
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import finish, installed, options

from miles_core import loop
from miles_core.cli.main import main as run_command
from miles_testing.toy import toy_arguments

#: Uses the processor for some milliseconds, as a verifier does, and cannot run in parallel with other Python code of its process.
REWARD = """
import time

async def reward(args, sample):
    end = time.thread_time() + {milliseconds} / 1000
    while time.thread_time() < end:
        pass
    return float(sample.index % 2)
"""


def measure(workers: int | None, groups: int, length: int, routes: int, milliseconds: float) -> dict[str, float]:
    """Run three steps; return the time of the last one, and the driver's processor time in it."""
    found: dict[str, float] = {}
    plain = loop.step

    async def step(run: Any, *rest: Any) -> None:
        processor, wall = time.process_time(), time.perf_counter()
        await plain(run, *rest)
        found["step_seconds"] = round(time.perf_counter() - wall, 3)
        found["driver_microseconds_per_token"] = round(
            (time.process_time() - processor) / (groups * 8 * length) * 1e6, 3
        )

    os.environ |= {"DRIVER_TOKENS": str(length), "DRIVER_ROUTES": str(routes)}
    with tempfile.TemporaryDirectory() as temporary:
        reward = Path(temporary) / "reward.py"
        reward.write_text(REWARD.format(milliseconds=milliseconds))
        words = toy_arguments(
            [str(Path(__file__).with_name("driver_double.py"))],
            directory=Path(temporary) / "run",
            steps=3,
            runtime="driver_double",
            rollout_workers=workers,
            rollout_batch_size=groups,
            n_samples_per_prompt=8,
            rollout_max_response_len=length,
            custom_rm_path=reward,
            save_rollouts_size=1 << 40,
        )
        loop.step = step
        try:
            if status := run_command(["train", *words]):
                raise SystemExit(status)
        finally:
            loop.step = plain
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--groups", type=int, default=32, help="groups of a step, of eight samples")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a response")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    rows: list[dict[str, Any]] = []
    for routes, milliseconds in ((0, 0.0), (0, 10.0), (48, 0.0), (48, 10.0)):
        for workers in (None, 1, 2):
            found = measure(workers, chosen.groups, chosen.length, routes, milliseconds)
            rows.append({"routes": routes, "reward_milliseconds": milliseconds, "workers": workers or 0, **found})
            print(rows[-1], file=sys.stderr, flush=True)
    result = {"groups": chosen.groups, "length": chosen.length, "rows": rows}
    finish(Path(__file__).stem, result, chosen.save, lambda: installed("torch"))


if __name__ == "__main__":
    main()
