"""The result of a demo, read from its run directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from miles_core.errors import MilesError
from miles_core.observe.metrics import read, series


@dataclass(frozen=True)
class Outcome:
    """The last output line of ``miles demo --json``.

    Attributes:
        accuracy_before: fraction of held-out prompts answered correctly (one sample each, temperature 1) after the warm start.
        accuracy_after: the same after the last reinforcement-learning step.
        seconds_warm_start: wall time of the supervised steps.
        seconds_rl: wall time of the reinforcement-learning steps, including evaluations between them.
        run_dir: the run directory.
        report: its HTML report.
    """

    accuracy_before: float
    accuracy_after: float
    seconds_warm_start: float
    seconds_rl: float
    run_dir: str
    report: str

    def json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    def text(self) -> str:
        """For people."""
        return (
            f"held-out accuracy: {self.accuracy_before:.1%} after the warm start ({self.seconds_warm_start:.0f} s), "
            f"{self.accuracy_after:.1%} after reinforcement learning ({self.seconds_rl:.0f} s)\n"
            f"run:    {self.run_dir}\n"
            f"report: {self.report}"
        )


def outcome(directory: Path, report: Path) -> Outcome:
    """Read the metrics of a finished demo.

    Raises MilesError if the run has fewer than two evaluations.
    """
    records = read(directory / "metrics.jsonl")
    steps, accuracies = series(records, "eval/accuracy")
    if len(steps) < 2:
        raise MilesError(f"{directory / 'metrics.jsonl'} has {len(steps)} evaluations, the demo needs two or more")
    _, warm = series(records, "time/warm_start")
    taken = [value for step, value in zip(*series(records, "time/step"), strict=True) if step > 0]
    return Outcome(
        accuracy_before=accuracies[0],
        accuracy_after=accuracies[-1],
        seconds_warm_start=round(sum(warm), 2),
        seconds_rl=round(sum(taken), 2),
        run_dir=str(directory.resolve()),
        report=str(report.resolve()),
    )
