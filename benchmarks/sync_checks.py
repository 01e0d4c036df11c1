"""What the checks that every run makes by default cost: checksums of all weights after each sync, and the samples of the first step.

Runs with these checks, without the self-check of the model and the probe of the first sync, on a CPU, in seconds of the processor's
time. One JSON line at the end.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import torch
from measure import finish, installed, options

from miles_core import loop
from miles_core.mismatch import first_steps, first_sync, weights_arrived
from miles_testing import toy_run
from miles_workers.transport import sent_weights

#: name -> entries of the model's configuration
MODELS: dict[str, dict[str, int]] = {
    "toy": {},
    "100M": {
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "head_dim": 64,
    },
}


class Stopwatch:
    """Wraps functions and measures the processor's time of their calls, which other processes do not change."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def watch(self, name: str, owner: Any, method: str) -> None:
        """Measure an asynchronous function."""
        inner = getattr(owner, method)

        async def timed(*args: Any) -> Any:
            start = time.process_time()
            try:
                return await inner(*args)
            finally:
                self.seconds.setdefault(name, []).append(time.process_time() - start)

        setattr(owner, method, timed)

    def watch_plain(self, name: str, owner: Any, method: str) -> None:
        """Measure an ordinary function."""
        inner = getattr(owner, method)

        def timed(*args: Any) -> Any:
            start = time.process_time()
            try:
                return inner(*args)
            finally:
                self.seconds.setdefault(name, []).append(time.process_time() - start)

        setattr(owner, method, timed)


def main() -> None:
    """Run what the arguments ask for."""
    parser = options(__doc__)
    parser.add_argument("--models", default="toy,100M")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--response", type=int, default=32)
    parser.set_defaults(checkpoint=None, dtype="float32", device="cpu", threads=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    from miles_embedded.engine import build as engine_build

    engine_build.self_check = lambda model: None
    first_sync.make_check = lambda run: None
    watch = Stopwatch()
    watch.watch("engine", weights_arrived.WeightsArrived, "__call__")
    watch.watch("first step", first_steps.FirstSteps, "__call__")
    watch.watch("step", loop, "step")
    watch.watch_plain("trainer", sent_weights.SentWeights, "_add")
    found = {}
    for name in given.models.split(","):
        watch.seconds = {}
        sizes, length = MODELS[name], given.response
        run = toy_run(family="qwen3", sizes=sizes, steps=given.steps, rollout_max_response_len=length, self_check=True)
        seconds = watch.seconds
        tensors = len(seconds["trainer"]) // (given.steps + 1)
        per_sync = median(seconds["engine"]) + sum(seconds["trainer"][-tensors:])
        step = median(seconds["step"][1:])
        found[name] = {
            "parameters": sum(p.numel() for p in run.trainer.model.parameters()),
            "tensors": tensors,
            "step_seconds": round(step, 4),
            "engine_seconds": round(median(seconds["engine"]), 4),
            "trainer_seconds": round(sum(seconds["trainer"][-tensors:]), 4),
            "share_of_step": round(per_sync / step, 4),
            "first_step_seconds": round(sum(seconds["first step"][:1]), 4),
        }
        print(name, found[name], file=sys.stderr, flush=True)
    finish(
        "sync_checks",
        {"models": found, "steps": given.steps, "threads": given.threads},
        given.save,
        lambda: installed("torch"),
    )


if __name__ == "__main__":
    main()
