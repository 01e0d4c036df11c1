"""Shared state of the virtual engines: lengths, progress of aborted responses, and counts over time."""

from __future__ import annotations

from dataclasses import dataclass, field

from miles_core.rollout.requests import MAX_SAMPLES
from miles_planner.simulation.lengths import Lengths

#: Number of points that a timeline keeps at most.
POINTS = 1000


@dataclass
class Timeline:
    """A value over time, thinned to at most ``POINTS`` points at about equal distances."""

    points: list[tuple[float, int]] = field(default_factory=list)
    distance: float = 0.0

    def add(self, now: float, value: int) -> None:
        """Record the value from ``now`` on."""
        if self.points and now - self.points[-1][0] < self.distance:
            self.points[-1] = self.points[-1][0], value
            return
        self.points.append((now, value))
        if len(self.points) > POINTS:
            self.points = self.points[::2]
            self.distance = 2 * (self.points[-1][0] - self.points[0][0]) / POINTS


class Ledger:
    """Progress of all responses of a run.

    A token of the driver stands for ``unit`` tokens of an engine, so that the driver's lists stay short at any length; the engines
    count exactly. ``progress`` keeps what an aborted response has beyond whole units.

    Attributes:
        generated: tokens that the engines generated, including those that no step used.
        running: requests that are decoded now, all engines.
        over_time: ``running`` over time.
    """

    def __init__(self, lengths: Lengths, unit: int) -> None:
        self.lengths, self.unit = lengths, unit
        self.progress: dict[int, float] = {}
        self.generated = 0.0
        self.running = 0
        self.over_time = Timeline()
        self._responses: dict[int, int] = {}

    def response(self, key: int) -> int:
        """Return the tokens of the response with this request key."""
        sample = key % MAX_SAMPLES
        if sample not in self._responses:
            self._responses[sample] = self.lengths.response(sample)
        return self._responses[sample]

    def units(self, tokens: float) -> int:
        """Return the tokens of the driver for a complete response."""
        return -(-int(tokens) // self.unit)

    def start(self, key: int, units: int) -> float:
        """Return the exact progress of a response of which the driver has ``units`` tokens; 0 for a new or restarted one."""
        done = self.progress.pop(key, 0.0)
        return done if int(done) // self.unit == units else float(units * self.unit)

    def forget(self, sample: int) -> None:
        """Drop what is stored of a sample that was trained on."""
        self._responses.pop(sample, None)
        self.progress.pop(sample, None)

    def count(self, now: float, change: int) -> None:
        """Change the number of running requests."""
        self.running += change
        self.over_time.add(now, self.running)
