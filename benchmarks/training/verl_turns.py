"""Holds verl between its steps: verl imports this module where it imports itself (``VERL_USE_EXTERNAL_MODULES``, set by ``verl_step.py``).

verl's trainer runs in an actor of Ray. It makes its file logger right before the first step and logs to it after each one, outside of
all times that it takes. So the logger here reports the step to the worker that started verl and waits there for the next turn. A step's
seconds are those between: prompts, generation, reward, log-probabilities, update, weight sync and metrics.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import verl.utils.tracking as tracking

from benchmarks.measure import Reporter, Steps, installed
from benchmarks.training.verl_step import TURNS

PHASE = "timing_s/"


class HeldLogger:
    """Takes the place of verl's file logger, which exists in the process of its training loop only."""

    def __init__(self, *_: Any) -> None:
        pipes, count, uncounted = json.loads(os.environ[TURNS])
        self.turn = Steps(Reporter(tuple(pipes)), count, uncounted)
        self.turn.reporter.send(versions=installed("verl", "sglang", "torch", "transformers", "ray"))
        self._start()

    def log(self, data: dict[str, Any], step: int) -> None:
        """Report a step, and wait for the next turn."""
        seconds = time.perf_counter() - self.started
        phases = {name.removeprefix(PHASE): float(value) for name, value in data.items() if name.startswith(PHASE)}
        without = seconds - phases.get("old_log_prob", 0.0)
        length, reward = float(data["response_length/mean"]), float(data["critic/score/mean"])
        self.turn.report(seconds=seconds, length=length, reward=reward, seconds_without_old_log_prob=without, **phases)
        self._start()

    def finish(self) -> None:
        """Nothing is open."""

    def _start(self) -> None:
        self.turn.wait()
        self.started = time.perf_counter()


tracking.FileLogger = HeldLogger
