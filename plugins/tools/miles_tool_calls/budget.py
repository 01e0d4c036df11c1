"""Limits of one sample, and the resources that its calls have used."""

from __future__ import annotations

from dataclasses import dataclass, field

from miles_tool_calls.config import ToolsConfig


@dataclass
class Budget:
    """Counts the calls of a sample.

    Attributes:
        limits: the options with the limits.
        calls, errors, malformed: calls so far; those that were answered by an error; those that could not be read.
        seconds: time in which at least one call was running.
        characters: characters of results that the model received.
        reached: names of the limits that were reached.
    """

    limits: ToolsConfig
    calls: int = 0
    errors: int = 0
    malformed: int = 0
    seconds: float = 0.0
    characters: int = 0
    reached: set[str] = field(default_factory=set)

    def refuse(self, position: int) -> str:
        """Return why the call at this position of an answer is not executed; empty if it is. Counts executed calls."""
        if position >= self.limits.calls_per_turn:
            self.reached.add("calls_per_turn")
            return f"not carried out: at most {self.limits.calls_per_turn} calls are allowed in one answer"
        if self.calls >= self.limits.calls_per_sample:
            self.reached.add("calls_per_sample")
            return "not carried out: no calls are left; answer without tools"
        if self.seconds >= self.limits.seconds_per_sample:
            self.reached.add("seconds_per_sample")
            return "not carried out: no time is left for tools; answer without them"
        if self.characters >= self.limits.chars_per_sample:
            self.reached.add("chars_per_sample")
            return "not carried out: the results of this conversation are too long; answer without tools"
        self.calls += 1
        return ""

    @property
    def seconds_of_call(self) -> float:
        """Time limit of the next call."""
        return min(self.limits.seconds_per_call, max(self.limits.seconds_per_sample - self.seconds, 1e-3))

    def cut(self, text: str) -> str:
        """Count a result; cut it where the characters of the sample end."""
        left = max(self.limits.chars_per_sample - self.characters, 0)
        self.characters += len(text)
        if len(text) <= left:
            return text
        self.reached.add("chars_per_sample")
        return f"{text[:left]}\n[the rest was cut: the results of this conversation are too long]"

    def metrics(self) -> dict[str, float]:
        """Return the counts as metrics of the rollout."""
        return {
            "tools/calls": float(self.calls),
            "tools/errors": float(self.errors),
            "tools/malformed": float(self.malformed),
            "tools/seconds": self.seconds,
            "tools/limited": float(bool(self.reached)),
        }
