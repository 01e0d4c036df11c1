"""What the checks that every run makes by default cost: checksums of all weights after each sync, and the samples of the first step.

Two runs of the same model with the same seed, without and with these checks (the self-check of the model and the probe of the first sync
are left out of both), on a CPU. Times are seconds per step and the seconds that the checks themselves take. One JSON line at the end.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from measure import finish, installed, options

from miles_mismatch import first_steps, first_sync, weights_arrived
from miles_testing import toy_run
from miles_transport import sent_weights

#: name -> entries of the model's configuration
MODELS: dict[str, dict[str, int]] = {
    "toy": {},
    "100M": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12, "head_dim": 64},
}


class Stopwatch:
    """Wraps functions and adds up the seconds of their calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, since: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - since

    def watch(self, name: str, owner: Any, method: str) -> None:
        """Measure an asynchronous method."""
        inner = getattr(owner, method)

        async def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return await inner(*args)
            finally:
                self.add(name, start)

        setattr(owner, method, timed)

    def watch_plain(self, name: str, owner: Any, method: str) -> None:
        """Measure an ordinary method."""
        inner = getattr(owner, method)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args)
            finally:
                self.add(name, start)

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
    watch.watch("engine and comparison", weights_arrived.WeightsArrived, "__call__")
    watch.watch("first step", first_steps.FirstSteps, "__call__")
    watch.watch_plain("trainer", sent_weights.SentWeights, "_add")
    found = {}
    for name in given.models.split(","):
        watch.seconds = {}
        start = time.perf_counter()
        run = toy_run(
            family="qwen3",
            sizes=MODELS[name],
            steps=given.steps,
            rollout_max_response_len=given.response,
            self_check=True,
        )
        seconds = time.perf_counter() - start
        steps = [record["time/step"] for record in run.metrics]
        parameters = sum(p.numel() for p in run.trainer.model.parameters())
        per_sync = (watch.seconds["engine and comparison"] + watch.seconds["trainer"]) / (given.steps + 1)
        found[name] = {
            "parameters": parameters,
            "step_seconds": round(sorted(steps)[len(steps) // 2], 4),
            "seconds": {key: round(value, 4) for key, value in watch.seconds.items()},
            "per_sync": round(per_sync, 4),
            "share_of_step": round(per_sync / sorted(steps)[len(steps) // 2], 4),
            "run_seconds": round(seconds, 1),
        }
        print(name, found[name], file=sys.stderr, flush=True)
    finish("sync_checks", {"models": found, "steps": given.steps, "threads": given.threads}, given.save, lambda: installed("torch"))


if __name__ == "__main__":
    main()
